"""Scorers: from the pooled vectors of a request's features, and dense tensors beside them, to one score a row.

`open_scorer` gives what a version was published with: `dot` or `cosine` of two features, or an exported program (serving.program,
which alone imports torch).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.loader.header import ScorerInput, StoredScorer
from tableside.loader.segment import Segment

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ScorerLimits:
    """What one call of a scorer may take; None: as much as it wants. ending_s: how long a worker whose scorer took longer than
    timeout_s goes on answering other requests before it ends."""

    bytes: int | None = None
    timeout_s: float | None = None
    ending_s: float = 0.0


NO_LIMITS = ScorerLimits()


class Scorer(ABC):
    """inputs: what `run` takes, in order. width: None for one score a row, else scores of a row. is_row_wise: a row's score does
    not depend on the rows beside it. model, version: whose scorer it is. Any thread may call."""

    kind: str
    model: str = ""
    version: int = 0
    limits: ScorerLimits = NO_LIMITS
    inputs: tuple[ScorerInput, ...]
    width: int | None = None
    is_row_wise: bool = True

    @abstractmethod
    def run(self, arrays: list[Floats]) -> Floats:
        """fp32 [batch, width] of each input -> fp32 [batch], or [batch, `width`]."""

    def admit(self, rows: int) -> int:
        """The work of a call with `rows` rows, in multiplications. ApiError: it would take more memory than it may."""
        return 4 * rows * sum(i.width for i in self.inputs)

    @property
    def name(self) -> str:
        """Whose scorer it is, for people."""
        return f"{self.model} version {self.version}"

    @property
    def dense(self) -> dict[str, int]:
        """Name -> width of the inputs that a request brings as they are."""
        return {i.name: i.width for i in self.inputs if i.feature is None}

    @property
    def features(self) -> tuple[str, ...]:
        """The features whose vectors it takes."""
        return tuple(i.feature for i in self.inputs if i.feature is not None)

    def describe(self) -> dict[str, Any]:
        """For metadata."""
        inputs = [{"name": i.name, "feature": i.feature, "shape": [-1, i.width]} for i in self.inputs]
        return {"kind": self.kind, "inputs": inputs, "shape": [-1] if self.width is None else [-1, self.width]}


class Similarity(Scorer):
    """How alike two vectors are: their dot product, or its cosine (0 where one of them is all zeros)."""

    def __init__(self, stored: StoredScorer) -> None:
        self.kind, self.inputs = stored.kind, stored.inputs

    def run(self, arrays: list[Floats]) -> Floats:
        a, b = arrays
        scores: Floats = np.einsum("bd,bd->b", a, b, dtype=np.float32)
        if self.kind == "cosine":
            lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
            np.divide(scores, lengths, out=scores, where=lengths > 0)
        return scores


def open_scorer(segment: Segment, device: str = "cpu", threads: int = 1, limits: ScorerLimits = NO_LIMITS) -> Scorer | None:
    """A version's scorer, tried once on zeros; None where it has none. device, threads: what a program runs on.

    LoaderError: its bytes changed. ServingError: it does not run, or gives something else than scores.
    """
    stored = segment.header.scorer
    if stored is None:
        return None
    if stored.kind == "program":
        from tableside.serving.program import ProgramScorer

        scorer: Scorer = ProgramScorer(stored, segment.program(), device, threads, limits)
    else:
        scorer = Similarity(stored)
    scorer.model, scorer.version = segment.header.model, segment.header.version
    return scorer
