"""The evaluation pool against a plain PyTorch loop: rows a second, start-up, host memory, the same scores.

    python benchmarks/eval_pool.py                     # shape `bags`, on all cores
    python benchmarks/eval_pool.py --shape criteo      # one worker and the loop, both on one core

Two models of the DLRM kind, each over a Parquet file. `bags`: 8 features of 10 ids, from one table of
1,000,000 rows x D 32, and 13 numbers, MLP 269-512-256-1. `criteo`: 26 columns of one id, each from a table of
100,000 rows x D 16, 13 columns of numbers, MLP 429-256-64-1. Tables are int8 in the pool. The plain loop is
what one would write: fp32 tables, batches of the same file, one process and one thread, its imports and its
tables' making not counted. The pool is the command `tableside eval`: its rate is that between its first shard
and its last, its start-up what comes before the first shard, from the start of the command.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from common import console, report, shared_folder

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.segment.memory import processes_below, pss_bytes
from tableside.loader.versions.versions import Model

NUMBERS, BATCH, SHARD_ROWS = 13, 4096, 16_384


@dataclass(frozen=True)
class Shape:
    """A model and its data. ids: of a bag; 0: columns of one id each, and each number in a column of its
    own."""

    features: int
    tables: int
    table_rows: int
    dim: int
    ids: int
    hidden: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """The features, which are columns of the data."""
        return [f"f{n}" for n in range(self.features)]

    @property
    def numbers(self) -> list[str]:
        """The columns of the dense tensor."""
        return ["dense"] if self.ids else [f"n{n}" for n in range(NUMBERS)]

    def table_of(self, feature: int) -> int:
        return feature % self.tables


SHAPES = {
    "bags": Shape(8, 1, 1_000_000, 32, 10, (512, 256)),
    "criteo": Shape(26, 26, 100_000, 16, 0, (256, 64)),
}


class Dense(torch.nn.Module):
    """The dense part, of the features' vectors and 13 numbers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [shape.features * shape.dim + NUMBERS, *shape.hidden, 1]
        layers: list[torch.nn.Module] = []
        for before, after in pairwise(widths):
            layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
        self.layers = torch.nn.Sequential(*layers[:-1], torch.nn.Sigmoid())

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(torch.cat(parts, 1)).squeeze(1)
        return scores


def make(folder: Path, root: Path, rows: int, shape: Shape = SHAPES["bags"]) -> list[torch.Tensor]:
    """Publishes the model and writes the data; returns the tables."""
    rng = np.random.default_rng(0)
    tables = [
        rng.standard_normal((shape.table_rows, shape.dim), dtype=np.float32) * np.float32(0.3)
        for _ in range(shape.tables)
    ]
    named: dict[str, Any] = {f"t{n}": t for n, t in enumerate(tables)}
    np.savez(folder / "c.npz", **named)
    batch = torch.export.Dim("batch")
    inputs = (*(torch.zeros(2, shape.dim) for _ in shape.names), torch.zeros(2, NUMBERS))
    program = torch.export.export(
        Dense(shape).eval(), inputs, dynamic_shapes={"parts": tuple({0: batch} for _ in inputs)}
    )
    torch.export.save(program, folder / "scorer.pt2")
    raw = {
        "name": "eval",
        "checkpoint": "c.npz",
        "tables": {f"t{n}": {"key": f"t{n}", "row_format": "int8"} for n in range(shape.tables)},
        "features": {
            name: {"table": f"t{shape.table_of(n)}", "pooling": "sum"} for n, name in enumerate(shape.names)
        },
        "scorer": {
            "program": "scorer.pt2",
            "inputs": {f"parts_{n}": name for n, name in enumerate(shape.names)},
        },
        "eval": {"label": "label", "columns": {f"parts_{shape.features}": shape.numbers}},
    }
    load(parse_model(raw, folder), root)
    pq.write_table(data(shape, rows, rng), folder / "data.parquet", row_group_size=SHARD_ROWS)
    return [torch.from_numpy(t) for t in tables]


def data(shape: Shape, rows: int, rng: np.random.Generator) -> pa.Table:
    """Random rows: ids, numbers and labels."""
    columns: dict[str, Any] = {}
    offsets = pa.array(np.arange(0, rows * shape.ids + 1, shape.ids, dtype=np.int32)) if shape.ids else None
    for name in shape.names:
        ids = pa.array(rng.integers(0, shape.table_rows, rows * max(1, shape.ids)))
        columns[name] = ids if offsets is None else pa.ListArray.from_arrays(offsets, ids)
    numbers = rng.standard_normal((rows, NUMBERS)).astype(np.float32)
    if shape.ids:
        columns["dense"] = pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), NUMBERS)
    else:
        columns |= {name: pa.array(numbers[:, n].copy()) for n, name in enumerate(shape.numbers)}
    columns["label"] = pa.array(rng.integers(0, 2, rows))
    return pa.table(columns)


def plain(
    tables: list[torch.Tensor], path: Path, device: str = "cpu", shape: Shape = SHAPES["bags"]
) -> tuple[np.ndarray, float]:
    """Scores and rows a second of the loop, one thread of the CPU, its tensors on `device`."""
    torch.set_num_threads(1)
    if shape.ids:
        held = [torch.nn.EmbeddingBag.from_pretrained(t.to(device), mode="sum") for t in tables]
    else:
        held = [torch.nn.Embedding.from_pretrained(t.to(device)) for t in tables]  # type: ignore[no-untyped-call]
    dense = Dense(shape).eval().to(device)
    scores, started = [], time.perf_counter()
    with torch.inference_mode():
        for batch in pq.ParquetFile(path).iter_batches(BATCH):
            parts = []
            for n, name in enumerate(shape.names):
                column, module = batch.column(name), held[shape.table_of(n)]
                if not shape.ids:
                    parts.append(module(torch.from_numpy(column.to_numpy().copy()).to(device)))
                    continue
                ids, offsets = column.flatten().to_numpy(), column.offsets.to_numpy()
                start = torch.from_numpy((offsets[:-1] - offsets[0]).astype(np.int64))
                parts.append(module(torch.from_numpy(ids.copy()).to(device), start.to(device)))
            numbers = [batch.column(n).flatten() if shape.ids else batch.column(n) for n in shape.numbers]
            stacked = np.stack([n.to_numpy() for n in numbers], 1)
            parts.append(torch.from_numpy(stacked).reshape(-1, NUMBERS).to(device))
            scores.append(dense(*parts).cpu().numpy())
    found = np.concatenate(scores)
    return found, len(found) / (time.perf_counter() - started)


@dataclass(frozen=True)
class Run:
    """One evaluation. rows_per_s: between the first shard and the last; private_mb: the most of a worker."""

    scores: np.ndarray
    rows_per_s: float
    startup_s: float
    private_mb: float


def pool(root: Path, folder: Path, workers: int, name: str) -> Run:
    """Evaluates the data with so many workers."""
    out, most = folder / name, 0.0
    shards = pq.ParquetFile(folder / "data.parquet").num_row_groups
    options = [
        "--out",
        out,
        "--root",
        root,
        "--workers",
        workers,
        "--shard-rows",
        SHARD_ROWS,
        "--batch",
        BATCH,
    ]
    command = [sys.executable, "-m", "tableside", "eval", "eval@1", folder / "data.parquet", *options]
    environment = {
        k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"
    }  # as it is installed
    started = time.time()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, env=environment)
    while process.poll() is None:
        time.sleep(0.05)
        if not most and len(list(out.glob("parts/*.parquet"))) > shards / 2:  # once: looking takes time
            most = max(map(private_mb, processes_below(process.pid)), default=0.0)
    assert process.returncode == 0, "the evaluation failed"
    parts = sorted(out.glob("parts/*.parquet"))
    done = sorted((p.stat().st_mtime, pq.read_metadata(p).num_rows) for p in parts)
    rate = sum(rows for _, rows in done[workers:]) / (done[-1][0] - done[workers - 1][0])
    scores = [pq.read_table(p).column("score_0").to_numpy() for p in parts]
    return Run(np.concatenate(scores), rate, done[0][0] - started - workers * done[0][1] / rate, most)


def private_mb(pid: int) -> float:
    """A process's own memory; 0 where it has ended."""
    try:
        return pss_bytes(pid)["private"] / 1e6
    except (OSError, KeyError):
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="bags", help="of the model and the data (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, default=1_500_000, help="rows of the data (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="alternating rounds, the median counts (default: %(default)s)"
    )
    arguments = parser.parse_args()
    shape, workers = SHAPES[arguments.shape], (1,) if arguments.shape == "criteo" else (1, 2)
    if arguments.shape == "criteo":
        os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    base = "plain loop, fp32"
    rates: dict[str, list[float]] = {base: []}
    runs: dict[str, list[Run]] = {f"pool, {n} worker{'s' if n > 1 else ''}": [] for n in workers}
    with shared_folder() as root, TemporaryDirectory() as name:
        folder = Path(name)
        tables = make(folder, root, arguments.rows, shape)
        segment = Model(root, "eval").attach().size
        expected, _ = plain(tables, folder / "data.parquet", shape=shape)
        for turn in range(arguments.rounds):
            console.print(f"round {turn + 1} of {arguments.rounds}")
            rates[base].append(plain(tables, folder / "data.parquet", shape=shape)[1])
            for count, (key, found) in zip(workers, runs.items(), strict=True):
                found.append(pool(root, folder, count, f"out-{turn}-{count}"))
                assert np.abs(found[-1].scores - expected).max() < 0.02, (
                    "int8 scores are not near those of fp32"
                )
                rates.setdefault(key, []).append(found[-1].rows_per_s)
    write(arguments.shape, rates, runs, segment)


def write(shape: str, rates: dict[str, list[float]], runs: dict[str, list[Run]], segment: int) -> None:
    """Prints and keeps the medians, and says which goals were missed."""

    def median(of: Callable[[Run], float], key: str) -> float:
        return float(np.median([of(run) for run in runs[key]])) if key in runs else 0.0

    base = float(np.median(next(iter(rates.values()))))
    rows = [
        {
            "what": key,
            "rows_per_s": float(np.median(found)),
            "of_plain": float(np.median(found)) / base,
            "startup_s": median(lambda run: run.startup_s, key),
            "private_mb": max((run.private_mb for run in runs.get(key, [])), default=0.0),
        }
        for key, found in rates.items()
    ]
    one = rows[1]
    if shape == "criteo":
        missed = (
            [] if one["of_plain"] >= 1.5 else [f"the pool's rate is {one['of_plain']:.2f} x the loop's < 1.5"]  # type: ignore[operator]
        )
        missed += [] if one["startup_s"] <= 1.0 else [f"start-up takes {one['startup_s']:.2f} s > 1"]  # type: ignore[operator]
        title = "Evaluation of Criteo's shape, one worker on one core"
        report("eval_criteo", title, rows, segment_mb=segment / 1e6, rounds=rates, missed=missed)
        return
    scaling = rows[2]["rows_per_s"] / one["rows_per_s"]  # type: ignore[operator]
    missed = [] if scaling >= 1.8 else [f"two workers {scaling:.2f} x one < 1.8"]
    report(
        "eval_pool",
        "Evaluation pool",
        rows,
        two_over_one=scaling,
        segment_mb=segment / 1e6,
        rounds=rates,
        missed=missed,
    )


if __name__ == "__main__":
    main()
