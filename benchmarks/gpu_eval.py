"""The evaluation pool on GPUs: rows a second of 1, 2, 4 and 8 of them, a process each, against a plain PyTorch loop on one.

    python benchmarks/gpu_eval.py [--rows 2000000]     # as many GPUs as there are

The model and the data of benchmarks/eval_pool.py. Start-up (imports, a CUDA context, kernels that are compiled) is a matter of
seconds and does not depend on the data, so the rate is that between the first shard and the last; the whole run is given, too.
"""

import argparse
import os
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from common import console, report, shared_folder
from eval_pool import BATCH, make, plain

from tableside.loader.memory import processes_below, pss_bytes
from tableside.loader.versions import Model
from tableside.serving.evaluation.run import EvalSettings, evaluate
from tableside.serving.evaluation.work import Candidate
from tableside.serving.settings import ServerSettings

SHARD = 32_768


class Memory:
    """The most that the processes below this one held together: private, and their shares of what is shared, in MB."""

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


def pool(root: Path, folder: Path, gpus: int, stash: bool, expected: np.ndarray) -> dict[str, Any]:
    out = folder / f"out-{gpus}-{stash}"
    settings = EvalSettings(folder / "data.parquet", out, gpus, shard_rows=SHARD, batch_rows=BATCH, stash=stash)
    server = ServerSettings(root=root, devices=tuple(str(n) for n in range(gpus)), placement="hbm")
    memory, started = Memory(), time.perf_counter()
    try:
        evaluate([Candidate("eval", 1)], settings, server)
    finally:
        memory.end()
    seconds = time.perf_counter() - started
    parts = sorted((out / "parts").glob("*.parquet"))
    scores = np.concatenate([pq.read_table(p).column("score_0").to_numpy() for p in parts])
    assert np.abs(scores - expected).max() < 0.02, "int8 scores are not near those of fp32"
    ends = sorted((p.stat().st_mtime, pq.read_metadata(p).num_rows) for p in parts)
    rate = sum(rows for _, rows in ends[gpus:]) / (ends[-1][0] - ends[gpus - 1][0])
    row = {"what": f"{gpus} GPU" + ("s" if gpus > 1 else "") + (", --stash" if stash else ""), "rows_per_s": rate}
    return row | {"whole_run_s": seconds, "private_mb": memory.private, "shared_mb": memory.shared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the data (default: %(default)s)")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with shared_folder() as root, TemporaryDirectory() as name:
        folder = Path(name)
        table = make(folder, root, arguments.rows)
        segment = Model(root, "eval").attach().size
        plain(table, folder / "data.parquet", "cuda")
        expected, rate = plain(table, folder / "data.parquet", "cuda")
        rows.append({"what": "plain loop on a GPU, fp32", "rows_per_s": rate, "whole_run_s": None})
        for gpus in (n for n in (1, 2, 4, 8) if n <= torch.cuda.device_count()):
            for stash in (False, True) if gpus == 1 else (False,):
                rows.append(pool(root, folder, gpus, stash, expected))
                console.print(rows[-1])
    for row in rows:
        row["of_plain"] = row["rows_per_s"] / rate
    rows[0] |= {"private_mb": None, "shared_mb": None}
    keys = ("what", "rows_per_s", "of_plain", "whole_run_s", "private_mb", "shared_mb")
    ordered = [{k: row[k] for k in keys} for row in rows]
    report("gpu_eval", "Evaluation pool on GPUs", ordered, segment_mb=segment / 1e6, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
