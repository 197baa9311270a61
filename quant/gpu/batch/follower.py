"""A follower: work on the device behind a batch's lookups that reads their vectors there.
It names the vectors and input tensors that it takes of each request, the target matrices and their precision.
Tensors are staged and sent with the ids; one launch fills the matrices (`quant.gpu.kernels.fill`). Outputs
that only the follower reads stay on the device. Imports neither torch nor Triton."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
    """Matrices of a request that a follower reads, in whichever batch it is.
    sources: int64 [matrices, fields of MatrixPlace]. rows: of each. precision: what they become. is_output:
    bool [matrices]. tensors: those among the inputs: (byte, byte among what is staged, bytes). staged_bytes:
    of all tensors."""

    def __init__(self, sources: NDArray[np.int64], rows: int, precision: Precision = Precision.FP32) -> None:
        self._sources, self.is_output = sources, sources[:, _IS_OUTPUT] != 0
        self._jobs = jobs = np.zeros((len(sources), len(FillField)), np.int64)
        is_half = sources[:, _IS_HALF]
        jobs[:, FillField.VALUES] = rows * sources[:, _WIDTH]
        jobs[:, FillField.IS_HALF], jobs[:, FillField.WIDTH] = is_half, sources[:, _WIDTH]
        jobs[:, FillField.STEP] = sources[:, _ROW_BYTES] // np.where(is_half, 2, 4)
        jobs[:, FillField.PRECISION] = precision
        which = ~self.is_output
        sizes = 4 * jobs[which, FillField.VALUES]
        ends = np.cumsum(_aligned(sizes))
        self._staged_at = ends - _aligned(sizes)
        rows_of = zip(*(a.tolist() for a in (sources[which, _AT], self._staged_at, sizes)), strict=True)
        self.tensors, self.staged_bytes = tuple(rows_of), int(ends[-1]) if ends.size else 0
        self._placed: tuple[Layout | None, NDArray[np.int64]] = None, jobs

    def jobs(self, layout: "Layout") -> NDArray[np.int64]:
        """Returns the jobs that fill them, int64 [matrices, fields of FillField], not to be changed. A source
        counts from the staged outputs of the request, or from its staged tensors; targets are left out."""
        of, jobs = self._placed
        if of is not layout:
            jobs = self._jobs.copy()
            jobs[:, FillField.SOURCE] = _staged_at(layout, self._sources[:, _AT])
            jobs[~self.is_output, FillField.SOURCE] = self._staged_at
            if not layout.is_direct:  # such vectors lie one after another
                jobs[:, FillField.STEP] = jobs[:, FillField.WIDTH]
            self._placed = layout, jobs
        return jobs


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
        """On the backend's current stream, behind lookups that filled its matrices."""
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
        self.input_bytes = [0 if t is None else t.matrices.staged_bytes for t in taken]
        held = [(n, t) for n, t in enumerate(taken) if t is not None]
        if not held:
            return
        self._jobs = jobs = np.concatenate([t.matrices.jobs(layouts[n]) for n, t in held])
        jobs[:, FillField.TARGET] = np.concatenate([t.targets for _, t in held])
        programs = -(-jobs[:, FillField.VALUES] // block)
        jobs[:, FillField.FIRST_PROGRAM] = np.cumsum(programs) - programs
        self._of_program = np.repeat(np.arange(len(programs), dtype=np.int32), programs)
        self._requests = np.repeat([n for n, _ in held], [len(t.targets) for _, t in held])
        self.tensors = tuple(StagedTensor(n, *one) for n, t in held for one in t.matrices.tensors)
        if self.tensors:
            self._is_output = np.concatenate([t.matrices.is_output for _, t in held])
        self.programs = self._of_program.size
        self.programs_at = jobs.nbytes
        self.size = _aligned(self.programs_at + self._of_program.nbytes)

    def written(self, inputs: Sequence[int], outputs: Sequence[int], failed: Sequence[bool]) -> bytes:
        """Returns the jobs, and from `programs_at` on the job of each program.
        inputs, outputs: device addresses of each request's tensors, if there are any, and staged outputs.
        failed: requests without rows; their vectors become zeros."""
        sources = self._jobs[:, FillField.SOURCE]
        found = sources + np.array(outputs)[self._requests]
        if any(failed):
            found[np.array(failed)[self._requests]] = 0
        if self.tensors:
            found = np.where(self._is_output, found, sources + np.array(inputs)[self._requests])
        self._jobs[:, FillField.SOURCE] = found
        return self._jobs.tobytes() + self._of_program.tobytes()


def _aligned(n: Any) -> Any:
    """A number, or numbers, rounded up."""
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
