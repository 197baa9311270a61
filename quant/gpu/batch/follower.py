"""A follower: work on the device behind a batch's lookups that reads their vectors there.
It names the vectors and input tensors that it takes of each request, the target matrices and their precision.
Tensors are staged and sent with the ids; one launch fills the matrices (`quant.gpu.kernels.fill`). Outputs
that only the follower reads stay on the device. Imports neither torch nor Triton."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import MatrixPlace, Precision
from tableside.quant.gpu.batch.moves import Move
from tableside.quant.gpu.kernels.job import FillField

if TYPE_CHECKING:
    from tableside.quant.gpu.batch.layout import Layout  # imports Triton

_ALIGNMENT = 16  # of what is staged
FILL_BLOCK = 1024  # values that a program copies
_IS_OUTPUT, _AT, _ROW_BYTES, _IS_HALF, _WIDTH = range(len(MatrixPlace._fields))


class Matrices:
    """Matrices of a request that a follower reads, in whichever batch it is. sources: int64 [matrices, fields
    of MatrixPlace]. rows: of each. precision: what they become."""

    def __init__(self, sources: NDArray[np.int64], rows: int, precision: Precision = Precision.FP32) -> None:
        self.sources, self.rows, self.precision = sources, rows, precision
        self._kept: tuple[Layout | None, NDArray[np.int64]] = None, sources

    def staged_at(self, layout: "Layout") -> NDArray[np.int64]:
        """Returns the byte offsets of the vectors among the staged outputs of `layout`. The last one's are
        kept: to search them takes as long as all else that a follower takes of a request."""
        of, found = self._kept
        if of is not layout:
            found = _staged_at(layout, self.sources[:, _AT])
            self._kept = layout, found
        return found


class FollowerInputs(NamedTuple):
    """A follower's inputs from one request. targets: int64 [matrices], device addresses of [rows, width].
    stays: the outputs are not copied to the host."""

    matrices: Matrices
    targets: NDArray[np.int64]
    stays: bool


class StagedTensor(NamedTuple):
    """A matrix among the inputs of request `number`: its byte there, its byte among what is staged, its
    bytes."""

    number: int
    at: int
    staged_at: int
    bytes: int


class Follower(Protocol):
    """Work behind the lookups of a batch."""

    def takes(self, number: int) -> FollowerInputs | None:
        """Returns the inputs from request `number` of the batch, or None. Called before staging."""
        ...

    def run(self) -> None:
        """Begins the work on the backend's current stream, behind lookups that filled its matrices. Who waits
        for the batch waits for it."""
        ...


class Fills:
    """Jobs that fill a batch's matrices. taken: of each request. block: values a program. Sources are known
    once all is staged (`written`).
    input_bytes: staged bytes of each request's tensors among its inputs. tensors: these."""

    programs = programs_at = size = 0
    tensors: tuple[StagedTensor, ...] = ()

    def __init__(
        self, layouts: Sequence["Layout"], taken: Sequence[FollowerInputs | None], block: int
    ) -> None:
        self.input_bytes = [0] * len(taken)
        held = [(n, t, t.matrices) for n, t in enumerate(taken) if t is not None]
        if not held:
            return
        sources = np.concatenate([m.sources for _, _, m in held])
        of_request = [(n, m.rows, m.precision, layouts[n].is_direct) for n, _, m in held]
        counts = [len(m.sources) for _, _, m in held]
        self._requests, rows, precision, is_direct = np.repeat(np.array(of_request), counts, 0).T
        self._is_output, is_half = sources[:, _IS_OUTPUT] != 0, sources[:, _IS_HALF]
        width, row_bytes = sources[:, _WIDTH], sources[:, _ROW_BYTES]
        values = rows * width
        programs = -(-values // block)
        self._of_program = np.repeat(np.arange(len(programs), dtype=np.int32), programs)
        self._jobs = jobs = np.zeros((len(programs), len(FillField)), np.int64)
        jobs[:, FillField.SOURCE] = np.concatenate([m.staged_at(layouts[n]) for n, _, m in held])
        jobs[:, FillField.TARGET] = np.concatenate([t.targets for _, t, _ in held])
        jobs[:, FillField.VALUES], jobs[:, FillField.WIDTH] = values, width
        # vectors that the host brings together lie one after another here
        jobs[:, FillField.STEP] = np.where(is_direct, row_bytes // np.where(is_half, 2, 4), width)
        jobs[:, FillField.IS_HALF], jobs[:, FillField.PRECISION] = is_half, precision
        jobs[:, FillField.FIRST_PROGRAM] = np.cumsum(programs) - programs
        if not self._is_output.all():
            self._stage(sources[:, _AT])
        self.programs = self._of_program.size
        self.programs_at = jobs.nbytes
        self.size = _aligned(self.programs_at + self._of_program.nbytes)

    def _stage(self, at: NDArray[np.int64]) -> None:
        """Lays a request's tensors out one after another. at: where its inputs have them."""
        found = []
        which = np.flatnonzero(~self._is_output)
        sizes = 4 * self._jobs[which, FillField.VALUES]
        for number, source, size in zip(
            *(a.tolist() for a in (self._requests[which], at[which], sizes)), strict=True
        ):
            found.append(StagedTensor(number, source, self.input_bytes[number], size))
            self.input_bytes[number] += _aligned(size)
        self.tensors = tuple(found)

    def written(self, inputs: Sequence[int], outputs: Sequence[int], failed: Sequence[bool]) -> bytes:
        """Returns the jobs, and from `programs_at` on the job of each program.
        inputs, outputs: device addresses of each request's tensors, if there are any, and staged outputs.
        failed: requests without rows; their vectors become zeros."""
        sources = self._jobs[:, FillField.SOURCE] + np.array(outputs)[self._requests]
        if any(failed):
            sources[np.array(failed)[self._requests]] = 0
        if self.tensors:
            sources[~self._is_output] = [inputs[t.number] + t.staged_at for t in self.tensors]
        self._jobs[:, FillField.SOURCE] = sources
        return self._jobs.tobytes() + self._of_program.tobytes()


def _aligned(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT


def _staged_at(layout: "Layout", at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Maps byte offsets of vectors in the caller's outputs to offsets in the staged outputs."""
    if layout.is_direct:
        return at
    moves = np.frombuffer(layout.moves_out, np.int64).reshape(-1, len(Move._fields))
    if not len(moves):
        return np.zeros_like(at)  # none of them has a value
    moves = moves[np.argsort(moves[:, 1], kind="stable")]
    own = moves[np.maximum(0, np.searchsorted(moves[:, 1], at, "right") - 1)]
    return at - own[:, 1] + own[:, 0]
