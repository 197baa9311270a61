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


class FollowerInputs(NamedTuple):
    """A follower's inputs from one request: matrices of `rows` rows.
    sources: int64 [matrices, fields of MatrixPlace]. targets: int64 [matrices], device addresses of
    [rows, width] of `precision`. stays: the outputs are not copied to the host."""

    sources: NDArray[np.int64]
    rows: int
    targets: NDArray[np.int64]
    stays: bool
    precision: Precision = Precision.FP32


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
        """On the backend's current stream, behind lookups that filled its matrices."""
        ...


class Fills:
    """Jobs that fill a batch's matrices. taken: of each request. block: values a program. Sources are known
    once all is staged (`written`).
    input_bytes: staged bytes of each request's matrices among its inputs. tensors: these matrices."""

    programs = programs_at = size = 0
    tensors: tuple[StagedTensor, ...] = ()

    def __init__(self, taken: Sequence[FollowerInputs | None], block: int) -> None:
        self.input_bytes = [0] * len(taken)
        self._held = [(n, t) for n, t in enumerate(taken) if t is not None]
        if self._held:
            self._lay_out(block)
            if not self._is_output.all():
                self._stage()

    def _lay_out(self, block: int) -> None:
        self._counts = [len(t.sources) for _, t in self._held]
        self._sources = sources = np.concatenate([t.sources for _, t in self._held])
        self._is_output = sources[:, _IS_OUTPUT] != 0
        self._values = values = np.repeat([t.rows for _, t in self._held], self._counts) * sources[:, _WIDTH]
        programs = -(-values // block)
        self._of_program = np.repeat(np.arange(len(programs), dtype=np.int32), programs)
        self._jobs = np.zeros((len(programs), len(FillField)), np.int64)
        self._jobs[:, FillField.VALUES] = values
        self._jobs[:, FillField.FIRST_PROGRAM] = np.cumsum(programs) - programs
        self._jobs[:, FillField.IS_HALF] = is_half = sources[:, _IS_HALF]
        self._jobs[:, FillField.WIDTH] = sources[:, _WIDTH]
        self._jobs[:, FillField.STEP] = sources[:, _ROW_BYTES] // np.where(is_half, 2, 4)
        self._jobs[:, FillField.TARGET] = np.concatenate([t.targets for _, t in self._held])
        self._jobs[:, FillField.PRECISION] = np.repeat([t.precision for _, t in self._held], self._counts)
        self.programs = self._of_program.size
        self.programs_at = self._jobs.nbytes
        self.size = _aligned(self.programs_at + self._of_program.nbytes)

    def _stage(self) -> None:
        """Lays a request's tensors out one after another."""
        found = []
        at = [0] * len(self.input_bytes)
        owners = np.repeat([n for n, _ in self._held], self._counts)
        which = np.flatnonzero(~self._is_output)
        rows = zip(
            owners[which].tolist(),
            self._sources[which, _AT].tolist(),
            (4 * self._values[which]).tolist(),
            strict=True,
        )
        for number, source_at, size in rows:
            found.append(StagedTensor(number, source_at, at[number], size))
            at[number] += _aligned(size)
        self.input_bytes, self.tensors = at, tuple(found)

    def written(
        self,
        layouts: Sequence["Layout"],
        inputs: Sequence[int],
        outputs: Sequence[int],
        failed: Sequence[bool],
    ) -> bytes:
        """Returns the jobs, and from `programs_at` on the job of each program.
        inputs, outputs: device addresses of each request's tensors and staged outputs. failed: requests
        without rows; their vectors become zeros."""
        at = self._sources[:, _AT]
        if not all(layouts[n].is_direct for n, _ in self._held):
            at = np.concatenate([_staged_at(layouts[n], t.sources[:, _AT]) for n, t in self._held])
            apart = np.repeat([not layouts[n].is_direct for n, _ in self._held], self._counts)
            steps = self._jobs[:, FillField.STEP]  # such vectors lie one after another
            steps[apart] = self._jobs[apart, FillField.WIDTH]
        sources = at + np.repeat([outputs[n] for n, _ in self._held], self._counts)
        if any(failed):
            sources[np.repeat([failed[n] for n, _ in self._held], self._counts)] = 0
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
