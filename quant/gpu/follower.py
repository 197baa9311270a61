"""What follows a batch's lookups on the device and reads their vectors there: where it finds what it takes of each request.

A follower says of each request which of its vectors and input tensors it takes, and to which fp32 matrices they go. The tensors
are staged with the ids and sent by the same copy; one launch then fills the matrices (`quant.gpu.fill_kernel`). Outputs that
nobody but the follower reads stay on the device. Nothing here knows what the matrices are for. Imports neither torch nor Triton.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tableside.quant.gpu.job import FillField
from tableside.quant.gpu.moves import Move

if TYPE_CHECKING:
    from tableside.quant.gpu.layout import Layout  # imports Triton

_ALIGNMENT = 16  # of what is staged
_BLOCK = 1024
_BLOCK_INTERPRETED = 16_384  # fewer programs, which are what takes the interpreter long


class PartField(IntEnum):
    """The fields of a part of a request. Its values lie one after another on the device, VALUES of them."""

    IS_INPUT = 0  # 1: fp32 in the request's input buffer; 0: a lookup's vectors
    AT = 1  # bytes, where it begins in the caller's input or output buffer
    IS_HALF = 2  # 1: the vectors are fp16
    VALUES = 3  # that it has


class Taken(NamedTuple):
    """What a follower takes of one request.

    parts: int64 [parts, fields of PartField]. targets: int64 [parts], addresses on the device of fp32 [VALUES]. stays: the
    request's outputs are not copied to the host.
    """

    parts: NDArray[np.int64]
    targets: NDArray[np.int64]
    stays: bool

    @property
    def input_bytes(self) -> int:
        """Bytes that its tensors take of the staged inputs."""
        return int(sum(_aligned(4 * values) for values in self._inputs[:, PartField.VALUES].tolist()))

    @property
    def _inputs(self) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.parts[self.parts[:, PartField.IS_INPUT] == 1]
        return found

    def staged(self) -> Iterable[tuple[int, int, int]]:
        """(source, target, bytes) of its tensors, from the caller's inputs to the staged ones, of which they are the last."""
        at = 0
        for source, values in self._inputs[:, [PartField.AT, PartField.VALUES]].tolist():
            yield source, at, 4 * values
            at += _aligned(4 * values)


class Follower(Protocol):
    """What follows the lookups of a batch."""

    def takes(self, number: int) -> Taken | None:
        """What it takes of a request of the batch, by number; None: nothing. Asked before anything is staged."""
        ...

    def run(self) -> None:
        """On the backend's current stream, behind lookups that filled its matrices."""
        ...


class Fills:
    """Jobs that fill matrices, for a batch. taken: of each request. Where values lie is known once all is staged (`written`)."""

    def __init__(self, taken: Sequence[Taken | None], is_interpreted: bool) -> None:
        held = [(n, t) for n, t in enumerate(taken) if t is not None and len(t.parts)]
        self._parts = np.concatenate([t.parts for _, t in held]) if held else np.empty((0, len(PartField)), np.int64)
        self._targets = np.concatenate([t.targets for _, t in held]) if held else np.empty(0, np.int64)
        self._request = np.repeat([n for n, _ in held], [len(t.parts) for _, t in held])
        counts = -(-self._parts[:, PartField.VALUES] // fill_block(is_interpreted))
        self._of_program = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._firsts = np.cumsum(counts) - counts
        self.programs = self._of_program.size
        self.programs_at = 8 * len(FillField) * len(counts)
        self.bytes = _aligned(self.programs_at + self._of_program.nbytes)

    def written(self, sources: Sequence[NDArray[np.int64] | None], failed: Sequence[bool]) -> bytes:
        """Jobs, and from `programs_at` on the job of each program.

        sources: of each request, the addresses of its parts. failed: requests whose rows are not there: zeros take their place.
        """
        jobs = np.zeros((len(self._parts), len(FillField)), np.int64)
        if len(jobs):
            jobs[:, FillField.SOURCE] = np.concatenate([s for s in sources if s is not None and len(s)])
            jobs[np.array(failed)[self._request], FillField.SOURCE] = 0
        jobs[:, FillField.IS_HALF] = self._parts[:, PartField.IS_HALF]
        jobs[:, FillField.VALUES] = self._parts[:, PartField.VALUES]
        jobs[:, FillField.TARGET] = self._targets
        jobs[:, FillField.FIRST_PROGRAM] = self._firsts
        return jobs.tobytes() + self._of_program.tobytes()


def _aligned(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT


def fill_block(is_interpreted: bool) -> int:
    """Values that a program copies."""
    return _BLOCK_INTERPRETED if is_interpreted else _BLOCK


def part_sources(layout: "Layout", taken: Taken, inputs: int, outputs: int) -> NDArray[np.int64]:
    """Addresses of a request's parts on the device. inputs: of its tensors; outputs: of its vectors."""
    is_input = taken.parts[:, PartField.IS_INPUT] == 1
    found = outputs + _staged_at(layout, taken.parts[:, PartField.AT])
    found[is_input] = [inputs + at for _, at, _ in taken.staged()]
    return found


def _staged_at(layout: "Layout", at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where vectors that begin at these bytes of the caller's outputs lie in the staged ones, one after another."""
    if layout.is_direct:
        return at.copy()
    moves = np.frombuffer(layout.moves_out, np.int64).reshape(-1, len(Move._fields))
    if not len(moves):
        return np.zeros_like(at)  # none of them has a value
    moves = moves[np.argsort(moves[:, 1], kind="stable")]
    own = moves[np.maximum(0, np.searchsorted(moves[:, 1], at, "right") - 1)]
    return at - own[:, 1] + own[:, 0]
