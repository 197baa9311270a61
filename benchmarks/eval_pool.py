"""The evaluation pool against a plain PyTorch loop: rows a second with one and two workers, host memory, the same scores.

A model of the DLRM kind over a Parquet file: 8 features of a table of 1,000,000 rows x D 32 in int8, a dense part of 270,000
weights. The plain loop is what one would write: fp32 nn.EmbeddingBag, batches of the same file, one process and one thread.
"""

import argparse
import os
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from common import console, report, shared_folder

from tableside.loader.load import load
from tableside.loader.memory import processes_below, pss_bytes
from tableside.loader.model import parse_model
from tableside.loader.versions import Model
from tableside.serving.evaluation.run import EvalSettings, evaluate
from tableside.serving.evaluation.work import Candidate
from tableside.serving.settings import ServerSettings

FEATURES, TABLE_ROWS, DIM, IDS, DENSE, BATCH = 8, 1_000_000, 32, 10, 13, 4096
NAMES = [f"f{n}" for n in range(FEATURES)]


class Dense(torch.nn.Module):
    """The dense part, of the features' vectors and 13 numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [FEATURES * DIM + DENSE, 512, 256, 1]
        layers: list[torch.nn.Module] = []
        for before, after in pairwise(widths):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*layers[:-1], torch.nn.Sigmoid())

    def forward(
        self,
        f0: torch.Tensor,
        f1: torch.Tensor,
        f2: torch.Tensor,
        f3: torch.Tensor,
        f4: torch.Tensor,
        f5: torch.Tensor,
        f6: torch.Tensor,
        f7: torch.Tensor,
        dense: torch.Tensor,
    ) -> torch.Tensor:
        scores: torch.Tensor = self.layers(torch.cat([f0, f1, f2, f3, f4, f5, f6, f7, dense], 1)).squeeze(1)
        return scores


def make(folder: Path, root: Path, rows: int) -> torch.Tensor:
    """Publishes the model and writes the data; returns the table."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((TABLE_ROWS, DIM), dtype=np.float32) * np.float32(0.3)
    np.savez(folder / "c.npz", t=table)
    batch = torch.export.Dim("batch")
    inputs = (*(torch.zeros(2, DIM) for _ in NAMES), torch.zeros(2, DENSE))
    program = torch.export.export(Dense().eval(), inputs, dynamic_shapes={n: {0: batch} for n in [*NAMES, "dense"]})
    torch.export.save(program, folder / "scorer.pt2")
    raw = {
        "name": "eval",
        "checkpoint": "c.npz",
        "tables": {"t": {"key": "t", "row_format": "int8"}},
        "features": {n: {"table": "t", "pooling": "sum"} for n in NAMES},
        "scorer": {"program": "scorer.pt2"},
        "eval": {"label": "label"},
    }
    load(parse_model(raw, folder), root)
    columns: dict[str, Any] = {}
    offsets = pa.array(np.arange(0, rows * IDS + 1, IDS, dtype=np.int32))
    for name in NAMES:
        columns[name] = pa.ListArray.from_arrays(offsets, pa.array(rng.integers(0, TABLE_ROWS, rows * IDS)))
    numbers = pa.array(rng.standard_normal(rows * DENSE).astype(np.float32))
    columns["dense"] = pa.FixedSizeListArray.from_arrays(numbers, DENSE)
    columns["label"] = pa.array(rng.integers(0, 2, rows))
    pq.write_table(pa.table(columns), folder / "data.parquet", row_group_size=16_384)
    return torch.from_numpy(table)


def plain(table: torch.Tensor, data: Path, device: str = "cpu") -> tuple[np.ndarray, float]:
    """Scores and rows a second of the loop, one thread of the CPU, its tensors on `device`."""
    torch.set_num_threads(1)
    bag, dense = torch.nn.EmbeddingBag.from_pretrained(table.to(device), mode="sum"), Dense().eval().to(device)
    scores, started = [], time.perf_counter()
    with torch.inference_mode():
        for batch in pq.ParquetFile(data).iter_batches(BATCH):
            vectors = []
            for name in NAMES:
                ids, offsets = batch.column(name).flatten().to_numpy(), batch.column(name).offsets.to_numpy()
                start = torch.from_numpy((offsets[:-1] - offsets[0]).astype(np.int64))
                vectors.append(bag(torch.from_numpy(ids.copy()).to(device), start.to(device)))
            numbers = torch.from_numpy(batch.column("dense").flatten().to_numpy().copy()).view(-1, DENSE).to(device)
            scores.append(dense(*vectors, numbers).cpu().numpy())
    found = np.concatenate(scores)
    return found, len(found) / (time.perf_counter() - started)


def pool(root: Path, folder: Path, workers: int, name: str) -> tuple[np.ndarray, float, float]:
    """Scores, rows a second, and the most private memory of a worker in MB."""
    out, most = folder / name, 0.0

    def look(done: int, total: int) -> None:
        nonlocal most
        if not total * 0.5 <= done < total * 0.5 + 16_384:  # once: looking takes time of the pool's own process
            return
        for pid in processes_below(os.getpid()):
            try:
                most = max(most, pss_bytes(pid)["private"] / 1e6)
            except (OSError, KeyError):
                continue

    settings = EvalSettings(folder / "data.parquet", out, workers, shard_rows=16_384, batch_rows=BATCH)
    found = evaluate([Candidate("eval", 1)], settings, ServerSettings(root=root), look)
    scores = [pq.read_table(p).column("score_0").to_numpy() for p in sorted((out / "parts").glob("*.parquet"))]
    return np.concatenate(scores), found.rows_per_s, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_500_000, help="rows of the data (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds, the median counts (default: %(default)s)")
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {"plain loop, fp32": [], "pool, 1 worker": [], "pool, 2 workers": []}
    memory: dict[str, float] = {}
    with shared_folder() as root, TemporaryDirectory() as name:
        folder = Path(name)
        table = make(folder, root, arguments.rows)
        segment = Model(root, "eval").attach().size
        expected, _ = plain(table, folder / "data.parquet")
        for turn in range(arguments.rounds):
            console.print(f"round {turn + 1} of {arguments.rounds}")
            rates["plain loop, fp32"].append(plain(table, folder / "data.parquet")[1])
            for workers in (1, 2):
                key = f"pool, {workers} worker{'s' if workers > 1 else ''}"
                scores, rate, private = pool(root, folder, workers, f"out-{turn}-{workers}")
                assert np.abs(scores - expected).max() < 0.02, "int8 scores are not near those of fp32"
                rates[key].append(rate)
                memory[key] = max(memory.get(key, 0.0), private)
    base = float(np.median(rates["plain loop, fp32"]))
    rows = [
        {"what": k, "rows_per_s": float(np.median(v)), "of_plain": float(np.median(v)) / base, "private_mb": memory.get(k, 0.0)}
        for k, v in rates.items()
    ]
    scaling = rows[2]["rows_per_s"] / rows[1]["rows_per_s"]  # type: ignore[operator]
    missed = [] if scaling >= 1.8 else [f"two workers {scaling:.2f} x one < 1.8"]
    report("eval_pool", "Evaluation pool", rows, two_over_one=scaling, segment_mb=segment / 1e6, rounds=rates, missed=missed)


if __name__ == "__main__":
    main()
