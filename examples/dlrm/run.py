"""A small model of the DLRM kind, from training to scores: what each row format costs in AUC and normalized
entropy.

Generates clicks with a planted structure (users and items have hidden tastes; a click is likelier where they
agree), trains embeddings and a dense part on the CPU in under a minute, exports the dense part, publishes the
model in every row format, serves all of them, and scores held-out rows over HTTP. Exit code 0 only if fp32
scores equal the trained model's, and no format of 4 bits or more loses more than 0.01 of normalized entropy.
"""

import argparse
import shutil
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import save_file

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.quant import RowFormat
from tableside.serving.cli.local import local_server
from tableside.serving.client import Client
from tableside.serving.evaluation.quality import quality

console = Console(highlight=False, soft_wrap=True, width=120)
USERS, ITEMS, CATEGORIES, DIM, DENSE, HISTORY = 4_000, 2_000, 50, 32, 4, 5
BATCH, PASSES, LEARNING_RATE = 1024, 4, 0.003


class Clicks:
    """Rows: a user, what the user clicked before, an item, its category, four numbers; and whether it was
    clicked."""

    def __init__(self, rows: int, seed: int) -> None:
        hidden, rng = np.random.default_rng(0), np.random.default_rng(seed)
        tastes, kinds = hidden.standard_normal((USERS, 6)), hidden.standard_normal((ITEMS, 6))
        category, weight = hidden.integers(0, CATEGORIES, ITEMS), hidden.standard_normal(DENSE)
        popular = hidden.permutation(ITEMS)
        self.user = (USERS * rng.random(rows) ** 2).astype(np.int64)
        self.item = popular[(ITEMS * rng.random(rows) ** 2).astype(np.int64)]
        # Items that a user clicked are near the user's taste: of three at random the nearest, five times.
        offers = rng.integers(0, ITEMS, (rows, HISTORY, 3))
        near = np.einsum("rhod,rd->rho", kinds[offers], tastes[self.user]).argmax(2)
        self.history = np.take_along_axis(offers, near[:, :, None], 2)[:, :, 0]
        self.category = category[self.item]
        self.context = rng.standard_normal((rows, DENSE)).astype(np.float32)
        logit = 1.2 * (tastes[self.user] * kinds[self.item]).sum(1) + 0.7 * self.context @ weight - 1.5
        self.label = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.float32)

    def features(self, rows: slice) -> dict[str, np.ndarray]:
        """Feature -> ids [rows, ids a bag]."""
        one = {f: getattr(self, f)[rows, None] for f in ("user", "item", "category")}
        return {**one, "history": self.history[rows]}


class DensePart(torch.nn.Module):
    """Four vectors and the context -> the probability of a click: a bottom MLP, pairwise products, a top
    MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = torch.nn.Sequential(torch.nn.Linear(DENSE, DIM), torch.nn.ReLU())
        self.top = torch.nn.Sequential(
            torch.nn.Linear(10 + 5 * DIM, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )

    def forward(
        self,
        user: torch.Tensor,
        item: torch.Tensor,
        category: torch.Tensor,
        history: torch.Tensor,
        context: torch.Tensor,
    ) -> torch.Tensor:
        vectors = torch.stack([self.bottom(context), user, item, category, history], 1)
        products = vectors @ vectors.transpose(1, 2)
        pairs = torch.cat([products[:, i, i + 1 :] for i in range(4)], 1)
        return torch.sigmoid(self.top(torch.cat([pairs, vectors.flatten(1)], 1))).squeeze(1)


TABLES = {"user": USERS, "item": ITEMS, "category": CATEGORIES}
FEATURES = {"user": "user", "item": "item", "category": "category", "history": "item"}


class Dlrm(torch.nn.Module):
    """Tables and the dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleDict(
            {t: torch.nn.EmbeddingBag(n, DIM, mode="mean") for t, n in TABLES.items()}
        )
        self.dense = DensePart()
        for table in self.tables.values():
            assert isinstance(table, torch.nn.EmbeddingBag)
            torch.nn.init.normal_(table.weight, std=0.1)

    def forward(self, features: dict[str, torch.Tensor], context: torch.Tensor) -> torch.Tensor:
        pooled = {f: self.tables[t](features[f]) for f, t in FEATURES.items()}
        scores: torch.Tensor = self.dense(**pooled, context=context)
        return scores


def train(clicks: Clicks) -> Dlrm:
    torch.manual_seed(0)
    model = Dlrm()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    steps = len(clicks.label) // BATCH
    for step in track(range(PASSES * steps), "training", console=console, transient=True):
        rows = slice(step % steps * BATCH, (step % steps + 1) * BATCH)
        features = {f: torch.from_numpy(ids) for f, ids in clicks.features(rows).items()}
        scores = model(features, torch.from_numpy(clicks.context[rows]))
        loss = torch.nn.functional.binary_cross_entropy(scores, torch.from_numpy(clicks.label[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def export(model: Dlrm, folder: Path) -> None:
    """The tables as a checkpoint, the dense part as a program."""
    save_file(model.tables.state_dict(), folder / "tables.safetensors")
    batch = torch.export.Dim("batch")
    inputs = (*(torch.zeros(2, DIM) for _ in FEATURES), torch.zeros(2, DENSE))
    names = [*FEATURES, "context"]
    program = torch.export.export(model.dense, inputs, dynamic_shapes={name: {0: batch} for name in names})
    torch.export.save(program, folder / "scorer.pt2")


def description(name: str, row_format: str) -> dict[str, object]:
    return {
        "name": name,
        "checkpoint": "tables.safetensors",
        "tables": {t: {"key": f"{t}.weight", "row_format": row_format} for t in TABLES},
        "features": {f: {"table": t, "pooling": "mean"} for f, t in FEATURES.items()},
        "scorer": {"program": "scorer.pt2"},
    }


def score(client: Client, name: str, clicks: Clicks) -> np.ndarray:
    parts = [slice(at, at + 1000) for at in range(0, len(clicks.label), 1000)]
    return np.concatenate(
        [client.score(name, clicks.features(r), {"context": clicks.context[r]}) for r in parts]
    )


def measured(trained_rows: int = 600_000) -> tuple[list[dict[str, Any]], float]:
    """Trains, publishes in every row format and scores held-out rows over HTTP. Returns a row for each
    format, fp32 first, and the largest difference of fp32 scores from the trained model's."""
    started = time.monotonic()
    clicks, held_out = Clicks(trained_rows, 1), Clicks(40_000, 2)
    model = train(clicks)
    console.print(f"trained on {trained_rows:,} rows, {PASSES} passes, in {time.monotonic() - started:.0f} s")
    console.print(
        f"{len(held_out.label):,} held-out rows, {held_out.label.mean():.1%} clicked, scored over HTTP"
    )
    with torch.inference_mode():
        features = {f: torch.from_numpy(ids) for f, ids in held_out.features(slice(None)).items()}
        trained = model(features, torch.from_numpy(held_out.context)).numpy()

    root = Path("/dev/shm") / f"tableside-dlrm-{uuid.uuid4().hex[:8]}"
    formats = ["fp32", *(f.label for f in reversed(RowFormat) if f is not RowFormat.FP32)]
    found: list[dict[str, Any]] = []
    worst = 0.0
    try:
        with tempfile.TemporaryDirectory() as folder:
            export(model, Path(folder))
            sizes = {
                f: load(parse_model(description(f, f), Path(folder)), root).header.table_bytes
                for f in formats
            }
        with local_server(formats, root=root) as server, Client(server.url) as client:
            for name in formats:
                scores = score(client, name, held_out)
                q = quality(held_out.label, scores)
                if name == "fp32":
                    worst = float(np.abs(scores - trained).max())
                assert q.ne is not None and q.auc is not None
                row = {"format": name, "table bytes": sizes[name], "AUC": q.auc, "NE": q.ne}
                against = q.ne - (found[0]["NE"] if found else q.ne)
                found.append({**row, "NE against fp32": against, "calibration": q.calibration})
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return found, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=600_000, help="rows to train on (default: %(default)s)")
    found, worst = measured(parser.parse_args().rows)
    table = Table(*found[0], box=None)
    for row in found:
        name, size, auc, ne, against, calibration = row.values()
        table.add_row(name, f"{size:,}", f"{auc:.5f}", f"{ne:.5f}", f"{against:+.5f}", f"{calibration:.4f}")
    console.print(table)
    console.print(f"fp32 scores differ from the trained model's by at most {worst:.1e}")
    lost = [row["format"] for row in found if row["format"] != "int2" and row["NE against fp32"] > 0.01]
    if worst > 1e-5 or lost:
        raise SystemExit(f"FAILED: {worst=}, {lost=}")


if __name__ == "__main__":
    main()
