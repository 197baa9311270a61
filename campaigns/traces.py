"""Modules drawn at random, under everything that looks at torch's operators (`campaigns.tracers`), on the
CPU.

Each draw has features, forms of input, weights and padding of its own. It is traced with some inputs and
answered for others. The oracle of every answer is the eager call, bit for bit; that of the eager call is
torch.nn.functional.embedding_bag over the rows that were published, whose sums of small whole numbers are
exact. Weights are halves. `python -m campaigns.traces --seconds 60`
"""

import random
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import embedding, embedding_bag

from campaigns.common import (
    ROWS,
    TABLES,
    Goal,
    at_least,
    console,
    folders,
    none,
    publish,
    random_of,
    standalone,
    told,
)
from campaigns.tracers import TRACERS, Inputs
from tableside.torch import Bags, EmbeddingBags, Embeddings

FORMS = ("offsets", "lengths", "fixed", "weighted", "packed", "ids")
GOALS: Mapping[str, Goal] = {
    "traced answers": at_least(10_000),
    **dict.fromkeys(("wrong answers", "wrong eager answers", "errors"), none()),
}
_POOLED = {"bought": ("item", "sum"), "liked": ("item", "mean")}
_MEANS_WITHIN = 2**-10  # of a mean's value: fp16 has 11 bits, and so have sums before they are rounded


class Draw(NamedTuple):
    """What a module of this campaign is. bags: of `per_bag` ids on average."""

    feature: str
    form: str
    output: torch.dtype
    padding: int | None
    bags: int
    per_bag: int


class Drawn(torch.nn.Module):
    """The module of a draw. Its inputs: ids, offsets, lengths, weights."""

    def __init__(self, draw: Draw, root: str) -> None:
        super().__init__()
        self.draw = draw
        if draw.form == "ids":
            self.module: Embeddings | EmbeddingBags = Embeddings(
                "demo", ["user"], root=root, output=draw.output
            )
        else:
            padding = None if draw.padding is None else {draw.feature: draw.padding}
            self.module = EmbeddingBags(
                "demo", [draw.feature], root=root, output=draw.output, padding_idx=padding
            )

    def forward(
        self, ids: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        draw, module = self.draw, self.module
        if draw.form == "packed":
            assert isinstance(module, EmbeddingBags)
            return module.packed(
                ids, torch.cat([offsets, torch.full_like(offsets[:1], draw.bags * draw.per_bag)])
            )
        given = {
            "offsets": (ids, offsets),
            "lengths": Bags(ids, lengths=lengths),
            "fixed": ids.view(draw.bags, draw.per_bag),
            "weighted": (ids, offsets, weights),
            "ids": ids.view(draw.per_bag, draw.bags),
        }[draw.form]
        found: torch.Tensor = module({draw.feature: given})[draw.feature]
        return found

    def expected(
        self, ids: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """What torch makes of the published rows."""
        draw = self.draw
        if draw.form == "ids":
            return embedding(ids.view(draw.per_bag, draw.bags), _rows("user")).to(draw.output)
        table, mode = _POOLED[draw.feature]
        starts = torch.arange(0, ids.numel(), draw.per_bag) if draw.form == "fixed" else offsets
        by = weights if draw.form == "weighted" else None
        found = embedding_bag(
            ids, _rows(table), starts, mode=mode, per_sample_weights=by, padding_idx=draw.padding
        )
        return found.to(draw.output)


def run(seconds: float, seed: int) -> dict[str, float]:
    """Draws modules for `seconds`, at least one; counts by name."""
    found: Counter[str] = Counter(dict.fromkeys((*GOALS, "modules"), 0))
    chance, end = random_of(seed, "traces"), time.monotonic() + seconds
    with folders() as (root, files), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of what is deprecated or slow
        publish(root, files, 1)
        while not found["modules"] or time.monotonic() < end:
            _judge(Drawn(_draw(chance), str(root)).eval(), chance, found)
            found["modules"] += 1
    return {name: float(count) for name, count in found.items()}


def _draw(chance: random.Random) -> Draw:
    form = chance.choice(FORMS)
    feature = {"ids": "user", "weighted": "bought"}.get(form) or chance.choice(list(_POOLED))
    padding = chance.choice([None, 0, chance.randrange(ROWS)]) if form != "ids" else None
    output = chance.choice([torch.float32, torch.float16, torch.bfloat16])
    return Draw(feature, form, output, padding, chance.randrange(2, 20), chance.randrange(2, 9))


def _inputs(draw: Draw, chance: random.Random) -> Inputs:
    """Inputs of the draw's sizes; a quarter of the ids is padding, where there is some."""
    values = np.random.default_rng(chance.randrange(2**32))
    count = draw.bags * draw.per_bag
    ids = values.integers(0, ROWS, count)
    if draw.padding is not None:
        ids[values.random(count) < 0.25] = draw.padding
    offsets = np.sort(values.integers(0, count + 1, draw.bags))
    offsets[0] = 0
    lengths = np.diff(offsets, append=count)
    weights = values.integers(-4, 5, count).astype(np.float32) / 2
    return (
        torch.from_numpy(ids),
        torch.from_numpy(offsets),
        torch.from_numpy(lengths),
        torch.from_numpy(weights),
    )


def _rows(table: str) -> torch.Tensor:
    return torch.from_numpy(told(TABLES[table], 1, np.arange(ROWS)))


def _judge(drawn: Drawn, chance: random.Random, found: Counter[str]) -> None:
    traced, given = _inputs(drawn.draw, chance), _inputs(drawn.draw, chance)
    eager, expected = drawn(*given), drawn.expected(*given)
    within = _MEANS_WITHIN * 8 if drawn.draw.feature == "liked" else 0
    found["wrong eager answers"] += not torch.allclose(eager, expected, rtol=within, atol=0)
    for name, tracer in TRACERS.items():
        try:
            answer = tracer(drawn, traced, given)
        except Exception as error:  # noqa: BLE001  (counted, and told)
            found["errors"] += 1
            console.print(
                f"traces: {name} of {drawn.draw}: {type(error).__name__}: {error!s:.300}", markup=False
            )
            continue
        found["traced answers"] += 1
        if not torch.equal(answer, eager):
            found["wrong answers"] += 1
            console.print(f"traces: {name} of {drawn.draw}: another answer than the eager one", markup=False)


if __name__ == "__main__":
    standalone(run)
