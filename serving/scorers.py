"""The scorers that there are: `dot` or `cosine` of two features, here, and exported programs, in `serving.program`.

`open_scorer` opens what a version was published with. Only a program makes it import torch.
"""

import numpy as np

from tableside.loader.header import StoredScorer
from tableside.loader.segment import Segment
from tableside.serving.scorer import NO_LIMITS, Floats, Scorer, ScorerLimits


class Similarity(Scorer):
    """How alike two vectors are: their dot product, or their cosine. The cosine is 0 where one of the vectors is all zeros."""

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

    LoaderError: the scorer's bytes are not those that were published. ServingError: it does not run, or gives no scores.
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
