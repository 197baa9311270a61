"""What each row format costs a small DLRM in AUC and normalized entropy.

Clicks have a planted structure: users and items have hidden tastes, and a click is likelier where they agree.
dlrm.py trains on them, publishes, serves and scores. Exit code 0 only if fp32 scores equal the trained
model's, and no format of 4 bits or more loses more than 0.01 of normalized entropy.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[2]))
from examples.dlrm.dlrm import DensePart, Dlrm, Rows, measured, show

USERS, ITEMS, CATEGORIES, NUMBERS, HISTORY = 4_000, 2_000, 50, 4, 5
TABLES = {"user": USERS, "item": ITEMS, "category": CATEGORIES}
FEATURES = {"user": "user", "item": "item", "category": "category", "history": "item"}


def clicks(rows: int, seed: int) -> Rows:
    """A user, an item and its category, five items that the user clicked before, four numbers."""
    hidden, rng = np.random.default_rng(0), np.random.default_rng(seed)
    tastes, kinds = hidden.standard_normal((USERS, 6)), hidden.standard_normal((ITEMS, 6))
    category, weight = hidden.integers(0, CATEGORIES, ITEMS), hidden.standard_normal(NUMBERS)
    popular = hidden.permutation(ITEMS)
    user = (USERS * rng.random(rows) ** 2).astype(np.int64)
    item = popular[(ITEMS * rng.random(rows) ** 2).astype(np.int64)]
    # Items that a user clicked are near the user's taste: of three at random the nearest, five times.
    offers = rng.integers(0, ITEMS, (rows, HISTORY, 3))
    near = np.einsum("rhod,rd->rho", kinds[offers], tastes[user]).argmax(2)
    history = np.take_along_axis(offers, near[:, :, None], 2)[:, :, 0]
    numbers = rng.standard_normal((rows, NUMBERS)).astype(np.float32)
    logit = 1.2 * (tastes[user] * kinds[item]).sum(1) + 0.7 * numbers @ weight - 1.5
    label = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    ids = {"user": user, "item": item, "category": category[item], "history": history}
    each = {f: (i.reshape(-1), np.arange(rows + 1) * (i.size // rows)) for f, i in ids.items()}
    return Rows(each, numbers, label)


class Dense(DensePart):
    def forward(
        self,
        user: torch.Tensor,
        item: torch.Tensor,
        category: torch.Tensor,
        history: torch.Tensor,
        context: torch.Tensor,
    ) -> torch.Tensor:
        return self.scores(context, user, item, category, history)


def run(rows: int = 600_000) -> tuple[list[dict[str, Any]], float]:
    """`measured`, of clicks."""
    torch.manual_seed(0)
    model = Dlrm(TABLES, FEATURES, Dense(len(FEATURES), NUMBERS))
    return measured(model, clicks(rows, 1), clicks(40_000, 2), passes=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=600_000, help="rows to train on (default: %(default)s)")
    show(*run(parser.parse_args().rows))


if __name__ == "__main__":
    main()
