"""A small model of the DLRM kind, from training to scores, in every row format.

Trains embeddings and a dense part on the CPU in under a minute, exports the dense part, publishes the model
in every row format, serves all of them, and scores held-out rows over HTTP.
"""

import shutil
import tempfile
import time
import uuid
from dataclasses import dataclass
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
from tableside.serving.client import Client, Jagged
from tableside.serving.evaluation.quality import quality

console = Console(highlight=False, soft_wrap=True, width=120)
DIM, BATCH, LEARNING_RATE = 32, 1024, 0.003


@dataclass(frozen=True)
class Rows:
    """Rows to train on or to score. ids: feature -> values [ids] and where each row's begin, [rows + 1].
    numbers: fp32 [rows, n]. label: fp32 [rows], 0 or 1."""

    ids: dict[str, tuple[np.ndarray, np.ndarray]]
    numbers: np.ndarray
    label: np.ndarray

    def batch(self, first: int, last: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Returns `ids` of some rows in turn."""
        starts = {f: s[first : last + 1] for f, (_, s) in self.ids.items()}
        return {f: (self.ids[f][0][s[0] : s[-1]], s - s[0]) for f, s in starts.items()}


class DensePart(torch.nn.Module):
    """A vector of each feature [rows, DIM] and numbers [rows, n] -> probabilities [rows]: a bottom MLP,
    pairwise products, a top MLP. A class of each model names its inputs in `forward`."""

    def __init__(self, features: int, numbers: int) -> None:
        super().__init__()
        vectors = features + 1
        width = vectors * (vectors - 1) // 2 + vectors * DIM
        self.bottom = torch.nn.Sequential(torch.nn.Linear(numbers, DIM), torch.nn.ReLU())
        self.top = torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def scores(self, numbers: torch.Tensor, *pooled: torch.Tensor) -> torch.Tensor:
        vectors = torch.stack([self.bottom(numbers), *pooled], 1)
        products = vectors @ vectors.transpose(1, 2)
        pairs = torch.cat([products[:, i, i + 1 :] for i in range(len(pooled))], 1)
        return torch.sigmoid(self.top(torch.cat([pairs, vectors.flatten(1)], 1))).squeeze(1)


class Dlrm(torch.nn.Module):
    """Tables, name -> rows, and the dense part over features, name -> table. Each feature is the mean of its
    rows."""

    def __init__(self, tables: dict[str, int], features: dict[str, str], dense: DensePart) -> None:
        super().__init__()
        self.features, self.dense = features, dense
        self.tables = torch.nn.ModuleDict(
            {
                t: torch.nn.EmbeddingBag(n, DIM, mode="mean", include_last_offset=True)
                for t, n in tables.items()
            }
        )
        for table in self.tables.values():
            assert isinstance(table, torch.nn.EmbeddingBag)
            torch.nn.init.normal_(table.weight, std=0.1)

    def forward(self, rows: Rows, first: int, last: int) -> torch.Tensor:
        ids = {f: map(torch.from_numpy, pair) for f, pair in rows.batch(first, last).items()}
        pooled = {f: self.tables[table](*ids[f]) for f, table in self.features.items()}
        scores: torch.Tensor = self.dense(**pooled, context=torch.from_numpy(rows.numbers[first:last]))
        return scores


def train(model: Dlrm, rows: Rows, passes: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    steps = len(rows.label) // BATCH
    for step in track(range(passes * steps), "training", console=console, transient=True):
        first, last = step % steps * BATCH, (step % steps + 1) * BATCH
        label = torch.from_numpy(rows.label[first:last])
        loss = torch.nn.functional.binary_cross_entropy(model(rows, first, last), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def export(model: Dlrm, numbers: int, folder: Path) -> None:
    """The tables as a checkpoint, the dense part as a program."""
    save_file(model.tables.state_dict(), folder / "tables.safetensors")
    batch = torch.export.Dim("batch")
    inputs = (*(torch.zeros(2, DIM) for _ in model.features), torch.zeros(2, numbers))
    names = [*model.features, "context"]
    program = torch.export.export(model.dense, inputs, dynamic_shapes={name: {0: batch} for name in names})
    torch.export.save(program, folder / "scorer.pt2")


def description(model: Dlrm, name: str, row_format: str) -> dict[str, object]:
    return {
        "name": name,
        "checkpoint": "tables.safetensors",
        "tables": {t: {"key": f"{t}.weight", "row_format": row_format} for t in model.tables},
        "features": {f: {"table": t, "pooling": "mean"} for f, t in model.features.items()},
        "scorer": {"program": "scorer.pt2"},
    }


def score(client: Client, name: str, rows: Rows) -> np.ndarray:
    parts = []
    for first in range(0, len(rows.label), 1000):
        ids = rows.batch(first, first + 1000)
        features = {
            f: Jagged(values, np.diff(starts).astype(np.int32)) for f, (values, starts) in ids.items()
        }
        parts.append(client.score(name, features, {"context": rows.numbers[first : first + 1000]}))
    return np.concatenate(parts)


def measured(model: Dlrm, rows: Rows, held_out: Rows, passes: int) -> tuple[list[dict[str, Any]], float]:
    """Trains, publishes in every row format and scores held-out rows over HTTP. Returns a row for each
    format, fp32 first, and the largest difference of fp32 scores from the trained model's."""
    started, count = time.monotonic(), len(held_out.label)
    train(model, rows, passes)
    seconds = time.monotonic() - started
    console.print(f"trained on {len(rows.label):,} rows, {passes} passes, in {seconds:.0f} s")
    console.print(f"{count:,} held-out rows, {held_out.label.mean():.1%} of them positive, scored over HTTP")
    with torch.inference_mode():
        trained = model(held_out, 0, count).numpy()

    root = Path("/dev/shm") / f"tableside-dlrm-{uuid.uuid4().hex[:8]}"
    formats = ["fp32", *(f.label for f in reversed(RowFormat) if f is not RowFormat.FP32)]
    found: list[dict[str, Any]] = []
    worst = 0.0
    try:
        with tempfile.TemporaryDirectory() as folder:
            export(model, rows.numbers.shape[1], Path(folder))
            sizes = {
                f: load(parse_model(description(model, f, f), Path(folder)), root).header.table_bytes
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


def show(found: list[dict[str, Any]], worst: float) -> None:
    """Prints `measured`. SystemExit: fp32 scores are not the trained model's, or a format of 4 bits or more
    loses more than 0.01 of normalized entropy."""
    table = Table(*found[0], box=None)
    for row in found:
        name, size, auc, ne, against, calibration = row.values()
        table.add_row(name, f"{size:,}", f"{auc:.5f}", f"{ne:.5f}", f"{against:+.5f}", f"{calibration:.4f}")
    console.print(table)
    console.print(f"fp32 scores differ from the trained model's by at most {worst:.1e}")
    lost = [row["format"] for row in found if row["format"] != "int2" and row["NE against fp32"] > 0.01]
    if worst > 1e-5 or lost:
        raise SystemExit(f"FAILED: {worst=}, {lost=}")
