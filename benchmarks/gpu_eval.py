"""The evaluation pool on GPUs: rows a second of 1, 2, 4 and 8 of them, a process each, against a plain
PyTorch loop on one.

    python benchmarks/gpu_eval.py [--rows 4000000]     # as many GPUs as there are; on one also --stash, bf16

The model and the data of benchmarks/eval_pool.py, all ways in turns with the loop, whose scores theirs are
held to. Start-up (imports, a CUDA context, kernels that are compiled) is a matter of seconds and does not
depend on the data. The pool reads the data several times over: it is through with them once before its second
process has begun. Each process has several shards decoded before the first one is done. So the rate is that
of the shards behind as many as the processes have at once; the whole run is given, too, and where the time of
the threads that score went in it.
"""

import argparse
import os
import shutil
import statistics
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import torch
from common import console, report, shared_folder
from eval_pool import BATCH, make, plain

from tableside.loader.segment.memory import processes_below, pss_bytes
from tableside.loader.versions.versions import Model
from tableside.serving.evaluation.batches import Spent
from tableside.serving.evaluation.run import EvalSettings, evaluate
from tableside.serving.evaluation.work import Candidate, shards_at_once
from tableside.serving.settings import ServerSettings

SHARD = 32_768
NEAR = {
    "fp32": 0.02,
    "bf16": 0.035,
}  # int8 rows; bf16: and 8 standard deviations of its roundings, as in gpu_scores.py


class Memory:
    """The most that the processes below this one held together: private, and their shares of what is
    shared, in MB."""

    def __init__(self) -> None:
        self.private = self.shared = 0.0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ends.wait(2.0):
            private = shared = 0.0
            for pid in processes_below(os.getpid()):
                try:
                    found = pss_bytes(pid)
                except (OSError, KeyError):
                    continue
                private += found["private"] / 1e6
                shared += (found["pss"] - found["private"]) / 1e6
            self.private, self.shared = max(self.private, private), max(self.shared, shared)

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


class Way(NamedTuple):
    """How the data is evaluated."""

    gpus: int = 1
    stash: bool = False
    dtype: Literal["fp32", "bf16"] = "fp32"


def pool(root: Path, folder: Path, way: Way, expected: np.ndarray) -> dict[str, float]:
    """One evaluation: rows a second, seconds of all of it, and memory."""
    out, gpus = folder / f"out-{way.gpus}-{way.stash}-{way.dtype}", way.gpus
    shutil.rmtree(out, ignore_errors=True)
    settings = EvalSettings(folder / "data", out, gpus, shard_rows=SHARD, batch_rows=BATCH, stash=way.stash)
    devices = tuple(str(n) for n in range(gpus))
    server = ServerSettings(root=root, devices=devices, placement="hbm", workers=gpus, scorer_dtype=way.dtype)
    memory, started = Memory(), time.perf_counter()
    try:
        told = evaluate([Candidate("eval", 1, Model(root, "eval").attach(1).content())], settings, server)
    finally:
        memory.end()
    seconds = time.perf_counter() - started
    parts = sorted((out / "parts").glob("*.parquet"))
    scores = np.concatenate([pq.read_table(p).column("score_0").to_numpy() for p in parts])
    assert np.abs(scores - expected).max() < NEAR[way.dtype], (
        f"{way.dtype} scores of int8 rows are not near those of fp32"
    )
    ends = sorted((p.stat().st_mtime, pq.read_metadata(p).num_rows) for p in parts)
    first = min(gpus * shards_at_once(server), len(ends) // 2)
    rate = sum(rows for _, rows in ends[first:]) / (ends[-1][0] - ends[first - 1][0])
    found = {
        "rows_per_s": rate,
        "whole_run_s": seconds,
        "private_mb": memory.private,
        "shared_mb": memory.shared,
    }
    return found | {f"{stage}_s": spent for stage, spent in told.stage_seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4_000_000, help="rows of the data (default: %(default)s)")
    parser.add_argument(
        "--times", type=int, default=4, help="the pool reads them so many times (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="alternating rounds, the median counts (default: %(default)s)"
    )
    arguments = parser.parse_args()
    base = "plain loop on a GPU, fp32"
    ways = {"1 GPU": Way(), "1 GPU, --stash": Way(stash=True), "1 GPU, bf16": Way(dtype="bf16")}
    ways |= {f"{n} GPUs": Way(n) for n in (2, 4, 8) if n <= torch.cuda.device_count()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    plain_rates = []
    with shared_folder() as root, TemporaryDirectory() as name:
        folder = Path(name)
        table = make(folder, root, arguments.rows)
        segment = Model(root, "eval").attach().size
        expected, _ = plain(table, folder / "data.parquet", "cuda")
        expected = np.tile(expected, arguments.times)
        (folder / "data").mkdir()
        for n in range(arguments.times):
            (folder / "data" / f"{n}.parquet").hardlink_to(folder / "data.parquet")
        for turn in range(arguments.rounds):
            plain_rates.append(plain(table, folder / "data.parquet", "cuda")[1])
            for key, way in ways.items():
                found[key].append(pool(root, folder, way, expected))
                console.print(f"round {turn + 1}, {key}: {found[key][-1]['rows_per_s']:,.0f} rows/s")
    rate = statistics.median(plain_rates)
    rows: list[dict[str, Any]] = [{"what": base, "rows_per_s": rate, "of_plain": 1.0, "whole_run_s": None}]
    rows[0] |= dict.fromkeys(("private_mb", "shared_mb", *(f"{stage}_s" for stage in Spent().seconds)))
    for what, runs in found.items():
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rows.append(
            {"what": what, "rows_per_s": medians["rows_per_s"], "of_plain": medians["rows_per_s"] / rate}
            | medians
        )
    rates = {row["what"]: row["rows_per_s"] for row in rows}
    stash_times = rates["1 GPU"] / rates["1 GPU, --stash"]
    two = rates["2 GPUs"] / rates["1 GPU"] if "2 GPUs" in rates else None
    missed = (
        []
        if rows[1]["of_plain"] >= 2.5
        else [f"one GPU does {rows[1]['of_plain']:.2f} x the plain loop < 2.5"]
    )
    missed += [] if stash_times <= 1.1 else [f"--stash takes {stash_times:.2f} x the time without > 1.1"]
    missed += [] if two is None or two >= 1.9 else [f"two GPUs do {two:.2f} x one < 1.9"]
    more: dict[str, Any] = {
        "data_rows": arguments.rows,
        "times": arguments.times,
        "stash_times": stash_times,
        "two_over_one": two,
        "missed": missed,
    }
    report(
        "gpu_eval",
        "Evaluation pool on GPUs",
        rows,
        segment_mb=segment / 1e6,
        gpu=torch.cuda.get_device_name(),
        **more,
    )


if __name__ == "__main__":
    main()
