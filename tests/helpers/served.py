"""Versions that are attached in the test's own process, and a scorer for them."""

from pathlib import Path

import numpy as np

from tableside.loader.segment.header import ScorerInput
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.scorer import Floats, Scorer
from tableside.serving.settings import ServerSettings


class Sum(Scorer):
    """user and item, and a dense tensor, summed: a scorer with inputs of each kind."""

    kind = "sum"
    inputs = (ScorerInput("user", "user", 8), ScorerInput("context", None, 3), ScorerInput("item", "item", 6))

    def run(self, arrays: list[Floats]) -> Floats:
        # Drawn values may add up to more than float32 holds, or to no number; the score is refused then.
        with np.errstate(over="ignore", invalid="ignore"):
            found: Floats = sum(a.sum(1, dtype=np.float32) for a in arrays).astype(np.float32)  # type: ignore[union-attr]
        return found


def engine_of(root: Path, max_response_bytes: int) -> Engine:
    """The engine of the model `demo`, on the CPU."""
    settings = ServerSettings().model_copy(update={"max_response_bytes": max_response_bytes})
    return Engine(Model(root, "demo"), settings, Placer(settings, choose()))
