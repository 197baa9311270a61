"""A follower: work on the device behind a batch's lookups that reads their vectors there.
It names the vectors and input tensors that it takes of each request, the target matrices and their precision.
Tensors are staged and sent with the ids; one launch fills the matrices (`quant.gpu.kernels.fill`). Outputs
that only the follower reads stay on the device. Imports neither torch nor Triton."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import Precision
from tableside.quant.gpu.batch.moves import Move
from tableside.quant.gpu.kernels.job import FillField

if TYPE_CHECKING:
    from tableside.quant.gpu.batch.layout import Layout  # imports Triton

_ALIGNMENT = 16  # of what is staged
FILL_BLOCK = 1024  # values that a program copies


class VectorField(IntEnum):
    """The fields of vectors that are taken of a request, as they lie in the caller's output buffer."""

    AT = 0  # bytes, where they begin
    IS_HALF = 1  # 1: they are fp16, else fp32
    WIDTH = 2  # values of a vector
    STEP = 3  # values from one vector to the next
    VALUES = 4  # of all of them


class FollowerTensor(NamedTuple):
    """A tensor of a request: fp32 [values] at byte `at` of its inputs. target: a device address."""

    at: int
    values: int
    target: int


class FollowerInputs(NamedTuple):
    """A follower's inputs from one request.
    vectors: int64 [parts, fields of VectorField]. targets: int64 [parts], device addresses of [VALUES] of
    `precision`, as for tensors. stays: the outputs are not copied to the host."""

    vectors: NDArray[np.int64]
    targets: NDArray[np.int64]
    tensors: Sequence[FollowerTensor]
    stays: bool
    precision: Precision = Precision.FP32

    @property
    def input_bytes(self) -> int:
        """Bytes that its tensors take of the staged inputs."""
        return sum(_aligned(4 * tensor.values) for tensor in self.tensors)

    def staged(self) -> Iterable[tuple[FollowerTensor, int]]:
        """Its tensors, and where each begins among them where they are staged."""
        at = 0
        for tensor in self.tensors:
            yield tensor, at
            at += _aligned(4 * tensor.values)


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
    once all is staged (`written`)."""

    def __init__(self, taken: Sequence[FollowerInputs | None], block: int) -> None:
        self._held = [(n, t) for n, t in enumerate(taken) if t is not None]
        self.programs = self.programs_at = self.bytes = 0
        if self._held:
            self._lay_out(block)

    def _lay_out(self, block: int) -> None:
        self._vectors = _joined([t.vectors for _, t in self._held], (0, len(VectorField)))
        tensors = [tensor for _, t in self._held for tensor in t.tensors]
        values = [*self._vectors[:, VectorField.VALUES].tolist(), *(tensor.values for tensor in tensors)]
        counts = -(-np.array(values, np.int64) // block)
        self._of_program = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        self._jobs = np.zeros((len(counts), len(FillField)), np.int64)
        self._jobs[:, FillField.VALUES] = values
        self._jobs[:, FillField.FIRST_PROGRAM] = np.cumsum(counts) - counts
        self._jobs[:, FillField.WIDTH] = self._jobs[:, FillField.STEP] = 1 << 30  # a tensor is one row
        of_vectors = [FillField.IS_HALF, FillField.WIDTH, FillField.STEP]
        fields = [VectorField.IS_HALF, VectorField.WIDTH, VectorField.STEP]
        self._jobs[: len(self._vectors), of_vectors] = self._vectors[:, fields]
        self._jobs[: len(self._vectors), FillField.TARGET] = _joined([t.targets for _, t in self._held], (0,))
        self._jobs[len(self._vectors) :, FillField.TARGET] = [tensor.target for tensor in tensors]
        precisions = [t.precision for _, t in self._held]
        if any(precisions):  # else they are zeros, which is fp32
            parts = [*(len(t.vectors) for _, t in self._held), *(len(t.tensors) for _, t in self._held)]
            self._jobs[:, FillField.PRECISION] = np.repeat(precisions * 2, parts)
        self.programs = self._of_program.size
        self.programs_at = self._jobs.nbytes
        self.bytes = _aligned(self.programs_at + self._of_program.nbytes)

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
        counts = [len(t.vectors) for _, t in self._held]
        at = self._vectors[:, VectorField.AT]
        if not all(layouts[n].is_direct for n, _ in self._held):
            at = _joined([_staged_at(layouts[n], t.vectors[:, VectorField.AT]) for n, t in self._held], (0,))
            apart = np.repeat(
                [not layouts[n].is_direct for n, _ in self._held], counts
            )  # such lie one after another
            steps = self._jobs[: len(self._vectors), FillField.STEP]
            steps[apart] = self._vectors[apart, VectorField.WIDTH]
        sources = at + np.repeat([outputs[n] for n, _ in self._held], counts)
        if any(failed):
            sources[np.repeat([failed[n] for n, _ in self._held], counts)] = 0
        self._jobs[: len(sources), FillField.SOURCE] = sources
        self._jobs[len(sources) :, FillField.SOURCE] = [
            inputs[n] + at for n, t in self._held for _, at in t.staged()
        ]
        return self._jobs.tobytes() + self._of_program.tobytes()


def _joined(arrays: Sequence[NDArray[np.int64]], empty: tuple[int, ...]) -> NDArray[np.int64]:
    """empty: the shape where there are none."""
    return np.concatenate(arrays) if arrays else np.empty(empty, np.int64)


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
