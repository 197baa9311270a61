"""Requests whose rows are in memory, alone and beside others that read a disk as fast as it gives rows.

    python benchmarks/disk_beside.py                    # 8 GB of int8 rows below build/; some two minutes
    python benchmarks/disk_beside.py --folder /mnt/ssd  # another disk
    python benchmarks/disk_beside.py --gb 1             # smaller; printed and not written

One worker serves a table with 64 values a row; some of its rows are in a hot segment. One process asks for
these, at even times and less often than the worker can answer, and counts from when each request was due. In
every second round another process asks for rows of the whole table without a pause, by as many
connections as a worker has threads for the disk, and a third one has the page cache forget the file. Every
vector of the hot rows is compared.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import report
from disk_rows import DIM, TABLE, drop
from make_model import publish_random

from tableside.loader.hot.counts import STEP, RowCounts
from tableside.loader.hot.hot import clear_hot, hot_folder
from tableside.loader.hot.warm import warm
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.cli.local import local_server
from tableside.serving.client import Client

MODEL, HOT_ROWS, BAGS, IDS, COLD_IDS = "m", 20_000, 8, 10, 64
RATE, ROUND_S, ROUNDS, CONNECTIONS = 300, 5.0, 5, 32


def hot_rows(root: Path) -> tuple[Segment, np.ndarray]:
    """Makes a hot segment of some rows; returns the version and their numbers."""
    model = Model(root, MODEL)
    version = model.attach(verify="header")
    hot = np.random.default_rng(2).choice(version.tables[TABLE].rows, HOT_ROWS, replace=False)
    with hot_folder(root, MODEL) as folder:
        RowCounts.shared(folder, version).tables[TABLE][hot] = STEP
    assert warm(model, 1, 1 << 30).rows == HOT_ROWS
    return version, hot


def ask_cold(url: str, rows: int, go: Any, done: Any, count: Any) -> None:
    """A process: connections that ask for any rows while `go` is set, until `done` is."""

    def ask(number: int) -> None:
        rng = np.random.default_rng([number, os.getpid()])
        with Client(url, retries=0, timeout_s=60) as client:
            while not done.is_set():
                if not go.wait(0.1):
                    continue
                client.lookup(MODEL, {TABLE: rng.integers(0, rows, (1, COLD_IDS))})
                assert not client.late_rows()
                with count.get_lock():
                    count.value += COLD_IDS

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(CONNECTIONS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def forget(path: Path, done: Any) -> None:
    """A process: has the page cache forget the file, again and again."""
    while not done.wait(0.5):
        drop(path)


def hits(client: Client, hot: np.ndarray, expected: np.ndarray, rng: np.random.Generator) -> list[float]:
    """Asks for hot rows at even times; returns each answer's seconds from when the request was due."""
    found, began = list[float](), time.perf_counter()
    for number in range(int(RATE * ROUND_S)):
        due = began + number / RATE
        time.sleep(max(0.0, due - time.perf_counter()))
        at = rng.integers(0, HOT_ROWS, (BAGS, IDS))
        vectors = client.lookup(MODEL, {TABLE: hot[at]})[TABLE]
        found.append(time.perf_counter() - due)
        np.testing.assert_allclose(vectors, expected[at].sum(1), rtol=1e-5, atol=1e-5)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent.parent / "build")
    options = parser.parse_args()
    root, rng, spawn = (
        options.folder / "disk-beside",
        np.random.default_rng(1),
        multiprocessing.get_context("spawn"),
    )
    go, done, count = spawn.Event(), spawn.Event(), spawn.Value("q", 0)
    processes: list[Any] = []
    try:
        publish_random(root, MODEL, {TABLE: (int(options.gb * 1e9) // 80, DIM, "int8")})
        version, hot = hot_rows(root)
        table = version.tables[TABLE]
        expected = choose().lookup(table, hot, pooling=Pooling.NONE)
        given = "--host-cache", "1GiB", "--host-cache-s", "3600", "--disk-timeout-s", "60"
        with local_server([MODEL], *given, root=root) as server, Client(server.url, retries=0) as client:
            asking = ask_cold, (server.url, table.rows, go, done, count)
            forgetting = forget, (version.files[1].path, done)
            processes = [spawn.Process(target=f, args=a, daemon=True) for f, a in (asking, forgetting)]
            for process in processes:
                process.start()
            hits(client, hot, expected, rng)
            rows: list[dict[str, Any]] = []
            for _ in range(ROUNDS):
                for is_beside in (False, True):
                    if is_beside:
                        go.set()
                        time.sleep(1.0)
                    before, began = count.value, time.perf_counter()
                    seconds = hits(client, hot, expected, rng)
                    rate = (count.value - before) / (time.perf_counter() - began)
                    go.clear()
                    time.sleep(1.0)
                    of = {f"p{p}_ms": 1e3 * float(np.percentile(seconds, p)) for p in (50, 99)}
                    rows.append({"beside": is_beside, **of, "cold_krows_s": rate / 1e3})
            done.set()
            for process in processes:
                process.join(60)
                assert process.exitcode == 0
        middle = [
            {"requests": name}
            | {
                key: statistics.median(r[key] for r in rows if r["beside"] is is_beside)
                for key in list(rows[0])[1:]
            }
            for name, is_beside in (("alone", False), ("beside others that read the disk", True))
        ]
        if options.gb < 8:
            os.environ["TRIAL"] = "1"
        title = f"requests for hot rows, {RATE} a second, beside reads of {options.gb:g} GB on a disk"
        ratios = [b["p99_ms"] / a["p99_ms"] for a, b in zip(rows[::2], rows[1::2], strict=True)]
        report("disk_beside", title, middle, rounds=rows, p99_ratio=statistics.median(ratios))
    finally:
        done.set()
        for process in processes:
            process.join(10)
            process.kill()
        clear_hot(root, MODEL, tuple)
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
