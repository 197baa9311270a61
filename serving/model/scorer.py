"""What a scorer is: it turns the pooled vectors of a request's features, and dense tensors beside them, into
one score a row.

The scorers that there are lie in `serving.model.scorers`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tableside.loader.program.layers import LayerSource
from tableside.loader.segment.header import ScorerInput
from tableside.quant.contract import Precision

if TYPE_CHECKING:
    from tableside.serving.model.device_calls import DeviceCalls  # imports torch

Floats = NDArray[np.float32]
REFUSED = (
    RuntimeError,
    ValueError,
    IndexError,
    AssertionError,
    ArithmeticError,
)  # by which a scorer says that it does not take rows
InPlace = Callable[
    [Any, Any], int
]  # (inputs, outputs) -> the first row with a score that is not finite, or -1


@dataclass(frozen=True)
class ScorerLimits:
    """What one call of a scorer may take; None: as much as it wants.

    ending_s: how long a worker goes on answering its other requests after a call took longer than timeout_s,
    before it ends.
    """

    bytes: int | None = None
    timeout_s: float | None = None
    ending_s: float = 0.0


NO_LIMITS = ScorerLimits()


class Scorer(ABC):
    """Any thread may call.

    inputs: what `run` takes, in order. width: scores of a row where there are several, else None.
    is_row_wise: a row's score does not depend on the rows beside it. model, version: whose scorer it is.
    runs_on: what computes the scores, for a person. calls: how it is called with rows that are on a device
    already; None: it is not. precision: of its weights, its inputs and what it computes; scores are fp32 in
    any.
    """

    kind: str
    runs_on: str = "numpy"
    precision: Precision = Precision.FP32
    model: str = ""
    version: int = 0
    limits: ScorerLimits = NO_LIMITS
    inputs: tuple[ScorerInput, ...]
    width: int | None = None
    is_row_wise: bool = True
    calls: "DeviceCalls | None" = None

    @abstractmethod
    def run(self, arrays: list[Floats]) -> Floats:
        """Takes fp32 [rows, width] for each input; returns fp32 [rows], or [rows, self.width]."""

    def in_place(self, sources: Sequence[LayerSource], rows: int, scores_at: int) -> InPlace | None:
        """What reads a request's buffers where its inputs lie, and writes fp32 scores at byte `scores_at` of
        the second.

        None: this scorer takes arrays, by `run`. sources: of each of `inputs`, with `rows` rows each.
        """
        return None

    def admit(self, rows: int) -> int:
        """The work of a call with `rows` rows, in multiplications. ApiError: the call would take more
        memory than it may."""
        return 4 * rows * sum(i.width for i in self.inputs)

    @property
    def name(self) -> str:
        """Whose scorer it is, for logs and errors."""
        return f"{self.model} version {self.version}"

    @property
    def dtype(self) -> str:
        """Its precision, as settings and metadata name it."""
        return self.precision.name.lower()

    @cached_property
    def widths(self) -> list[int]:
        """Of the inputs, in order."""
        return [i.width for i in self.inputs]

    @property
    def dense(self) -> dict[str, int]:
        """Name -> width of the dense tensors, which a request brings as they are."""
        return {i.name: i.width for i in self.inputs if i.feature is None}

    @property
    def features(self) -> tuple[str, ...]:
        """The features whose vectors the scorer takes."""
        return tuple(i.feature for i in self.inputs if i.feature is not None)

    def describe(self) -> dict[str, Any]:
        """Kind, what it runs on, its precision, inputs and shape of the scores, for metadata."""
        inputs = [{"name": i.name, "feature": i.feature, "shape": [-1, i.width]} for i in self.inputs]
        shape = [-1] if self.width is None else [-1, self.width]
        return {
            "kind": self.kind,
            "runs_on": self.runs_on,
            "dtype": self.dtype,
            "inputs": inputs,
            "shape": shape,
        }
