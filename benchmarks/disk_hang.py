"""A disk that hangs: when the first request says so, when no request waits for it any more, and what those
get whose rows are in memory.

    python benchmarks/disk_hang.py              # 4 GB of int8 rows below build/; some two minutes
    python benchmarks/disk_hang.py --gb 0.5     # smaller; printed and not written

One worker serves a table of which some rows are in a hot segment. Its file is one of a file system in user
space (tests/helpers/fuse_disk.py), whose process is stopped. One client asks for hot rows at even times and
counts from when each request was due; every vector is compared. Other connections ask for any rows without a
pause: the table has no default row, so that a 503 says that some came too late. Needs root, to mount the file
system.
"""

import argparse
import os
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import report
from disk_beside import MODEL, RATE, hits, hot_rows
from disk_rows import DIM, TABLE, drop
from make_model import publish_random

from tableside.loader.hot.hot import clear_hot
from tableside.quant import Pooling, choose
from tableside.serving.cli.local import local_server
from tableside.serving.client import Client, ClientError

sys.path.append(str(Path(__file__).parent.parent / "tests" / "helpers"))
from fuse_disk import disk_of

CONNECTIONS, COLD_IDS, DEADLINE_S, ROUNDS = 8, 64, 0.1, 5
IN_TIME_S = 0.05  # in which an answer of rows in memory is good


class ColdRequests:
    """Connections that ask for any rows. late, at_once: of `hang`, when the first answer said that rows were
    late, and when the first one said so without a wait, by time.monotonic."""

    def __init__(self, url: str, rows: int) -> None:
        self._url, self._rows, self._done = url, rows, threading.Event()
        self.late = self.at_once = float("inf")
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CONNECTIONS)]
        for one in self._threads:
            one.start()

    def _ask(self, number: int) -> None:
        rng = np.random.default_rng(number)
        with Client(self._url, retries=0, timeout_s=60) as client:
            while not self._done.is_set():
                began = time.monotonic()
                try:
                    client.lookup(MODEL, {TABLE: rng.integers(0, self._rows, (1, COLD_IDS))})
                except ClientError as error:
                    if " came too late" not in str(error):
                        raise
                    now = time.monotonic()
                    self.late = min(self.late, now)
                    if now - began < DEADLINE_S / 2:
                        self.at_once = min(self.at_once, now)

    def forget(self) -> None:
        self.late = self.at_once = float("inf")

    def close(self) -> None:
        self._done.set()
        for one in self._threads:
            one.join()


def summary(seconds: list[float]) -> dict[str, float]:
    good = sum(one <= IN_TIME_S for one in seconds) / len(seconds)
    return {f"p{p}_ms": 1e3 * float(np.percentile(seconds, p)) for p in (50, 99)} | {"in_time": good}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent.parent / "build")
    options = parser.parse_args()
    if os.geteuid():
        raise SystemExit("only root mounts a file system here")
    root, mounted, rng = (
        options.folder / "disk-hang",
        options.folder / "disk-hang-fuse",
        np.random.default_rng(1),
    )
    try:
        publish_random(root, MODEL, {TABLE: (int(options.gb * 1e9) // 80, DIM, "int8")})
        version, hot = hot_rows(root)
        table = version.tables[TABLE]
        expected = choose().lookup(table, hot, pooling=Pooling.NONE)
        file = version.files[1].path
        copy = file.rename(options.folder / "disk-hang.rows")
        file.touch(0o400)
        given = "--host-cache", "1GiB", "--host-cache-s", "3600", "--disk-timeout-s", DEADLINE_S
        found: list[dict[str, Any]] = []
        with disk_of(copy, mounted) as disk:
            disk.stand_for(file)
            with (
                local_server([MODEL], *map(str, given), root=root) as server,
                Client(server.url, retries=0) as client,
            ):
                hits(client, hot, expected, rng)
                cold = ColdRequests(server.url, table.rows)
                try:
                    for _ in range(ROUNDS):
                        drop(disk.path)
                        time.sleep(1.0)
                        beside = summary(hits(client, hot, expected, rng))
                        cold.forget()
                        stopped = time.monotonic()
                        disk.hang()
                        hanging = summary(hits(client, hot, expected, rng))
                        of = {
                            "first_late_ms": 1e3 * (cold.late - stopped),
                            "at_once_ms": 1e3 * (cold.at_once - stopped),
                        }
                        disk.go_on()
                        time.sleep(3.0)
                        found.append(of | {"beside": beside, "hanging": hanging})
                        print(found[-1], flush=True)
                finally:
                    disk.go_on()
                    cold.close()
        rows = [
            {"disk": name}
            | {key: statistics.median(r[way][key] for r in found) for key in ("p50_ms", "p99_ms", "in_time")}
            for name, way in (("reads", "beside"), ("hangs", "hanging"))
        ]
        if options.gb < 4:
            os.environ["TRIAL"] = "1"
        times = {key: statistics.median(r[key] for r in found) for key in ("first_late_ms", "at_once_ms")}
        title = f"{RATE} requests a second for hot rows beside a disk that hangs"
        report(
            "disk_hang",
            title,
            rows,
            rounds=found,
            deadline_ms=1e3 * DEADLINE_S,
            in_time_ms=1e3 * IN_TIME_S,
            **times,
        )
    finally:
        clear_hot(root, MODEL, tuple)
        for left in (root, mounted):
            shutil.rmtree(left, ignore_errors=True)
        (options.folder / "disk-hang.rows").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
