"""A follower: work on the device behind a batch's lookups that reads their vectors there.
It names the vectors and input tensors that it takes of each request, the target matrices and their precision.
Tensors are staged and sent with the ids; one launch fills the matrices (`quant.gpu.kernels.fill`). Outputs
that only the follower reads stay on the device. Imports neither torch nor Triton."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import Precision
from tableside.quant.cpu import _native
from tableside.quant.gpu.kernels.job import FillField

if TYPE_CHECKING:
    from tableside.quant.gpu.batch.layout import Layout  # imports Triton

_ALIGNMENT = 16
FILL_BLOCK = 1024  # values that a program copies


class Matrices(NamedTuple):
    """Matrices of a request that a follower reads. sources: int64 [matrices, fields of MatrixPlace], in any
    buffer. rows: of each. precision: what they become."""

    sources: Any
    rows: int
    precision: Precision = Precision.FP32


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
    """Jobs that fill a batch's matrices. taken: of each request. block: values a program. They are written
    once all is staged. jobs, programs: how many; size: their bytes, programs from `programs_at` on.
    input_bytes: staged bytes of each request's tensors among its inputs. tensors: these."""

    jobs = programs = programs_at = size = 0
    tensors: Sequence[StagedTensor] = ()

    def __init__(
        self, layouts: Sequence["Layout"], taken: Sequence[FollowerInputs | None], block: int
    ) -> None:
        self._layouts, self._taken, self._block = layouts, taken, block
        if not any(taken):
            self.input_bytes = [0] * len(taken)
            return
        sized = [None if t is None else t.matrices[:2] for t in taken]
        self.jobs, self.programs, self.input_bytes, tensors = _native.size_fills(sized, block)
        self.tensors = [*map(StagedTensor._make, tensors)]
        self.programs_at = 8 * len(FillField) * self.jobs
        self.size = _aligned(self.programs_at + 4 * self.programs)

    def write(
        self, target: NDArray[np.uint8], inputs: Sequence[int], outputs: Sequence[int], failed: Sequence[bool]
    ) -> None:
        """Writes the jobs, and the job of each program. inputs, outputs: device addresses of each request's
        tensors and staged outputs. failed: requests without rows; their vectors become zeros."""
        taken = [
            (
                t.matrices.sources,
                None if layout.is_direct else layout.moves_out,
                t.targets,
                t.matrices.rows,
                t.matrices.precision,
                tensors_at,
                0 if is_failed else outputs_at,
            )
            for layout, t, tensors_at, outputs_at, is_failed in zip(
                self._layouts, self._taken, inputs, outputs, failed, strict=True
            )
            if t is not None
        ]
        _native.write_fills(taken, self._block, self.jobs, self.programs, target)


def _aligned(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT
