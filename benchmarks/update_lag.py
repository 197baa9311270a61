"""How late changes are seen, and what they do to lookups, while a server answers at half its load on the same cores.

A table of 4 M rows, int8 D 64; one worker; requests of 32 bags of 20 ids. A batch of changes is applied each second, of rows that
were made in the second before it: half of the rate that `updates.py` has as its goal. A reader asks for one row over and over,
and notes when each sequence is seen first. Lag is from when the oldest change of a batch was made until then.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import numpy as np
from common import console, report
from http_cases import serving
from update_reads import DIM, published

from tableside.loader.apply import ApplySettings, apply
from tableside.loader.changes import Batch, TableChanges
from tableside.loader.versions import Model

ROWS, EVERY_S = 4_000_000, 1.0
GOALS = {"lag p99 s": 1.5, "lookups p99": 1.3}


def bench(url: str, seconds: float, rate: float | None = None) -> dict[str, Any]:
    """What `tableside bench` says of a server. rate: requests a second; None: as many as it answers."""
    command = [sys.executable, "-m", "tableside", "bench", "ads", "--url", url, "--seconds", str(seconds), "--json"]
    command += ["--concurrency", "8", *(["--rate", str(rate)] if rate else [])]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode:
        raise SystemExit(f"{told.stdout}{told.stderr}")
    found: dict[str, Any] = json.loads(told.stdout)["forms"][0]
    assert not found["failed"], found["failure"]
    return found


class Changes(threading.Thread):
    """Applies a batch of so many rows each second. made: sequence -> when its oldest change was made."""

    def __init__(self, model: Model, rows: int) -> None:
        super().__init__(daemon=True)
        self.model, self.rows, self.stop, self.made = model, rows, threading.Event(), dict[int, float]()
        rng = np.random.default_rng(0)
        self.vectors = rng.standard_normal((rows, DIM), dtype=np.float32)
        self.rng = rng

    def run(self) -> None:
        due = time.time() + EVERY_S
        while not self.stop.wait(max(0.0, due - time.time())):
            oldest, due = due - EVERY_S, max(due + EVERY_S, time.time())
            changes = TableChanges("t", self.rng.integers(0, ROWS, self.rows), self.vectors)
            state = apply(self.model, Batch([changes], made_at=oldest), ApplySettings(keep=0)).state
            self.made[state.sequence] = oldest


def seen(url: str, stop: threading.Event, at: dict[int, float]) -> None:
    """Notes when each sequence answers first."""
    body = {"model": "ads", "features": {"t": [[1]]}}
    with httpx.Client(timeout=10) as client:
        while not stop.is_set():
            sequence = client.post(f"{url}/v1/lookup", json=body).json()["sequence"]
            at.setdefault(sequence, time.time())
            time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--rows", type=int, default=500_000, help="changes a second (default: %(default)s)")
    asked = parser.parse_args()
    with published(ROWS) as model:
        options = ("--root", model.root, "--port", 0, "--workers", 1, "--drain-s", 0)
        with serving("-m", "tableside", "serve", "ads", *options) as server:
            most = bench(server.url, 5)["requests_per_s"]
            plain = bench(server.url, asked.seconds / 2, most / 2)
            console.print(f"{most:,.0f} requests/s, at half of it p99 {plain['p99_ms']:.2f} ms")
            changes, stop, at = Changes(model, asked.rows), threading.Event(), dict[int, float]()
            reader = threading.Thread(target=seen, args=(server.url, stop, at), daemon=True)
            changes.start()
            reader.start()
            changed = bench(server.url, asked.seconds, most / 2)
            changes.stop.set()
            changes.join()
            time.sleep(1.0)  # so that the last state is seen
            stop.set()
            reader.join()
    lags = [at[n] - made for n, made in changes.made.items() if n in at]
    assert len(lags) >= 0.9 * len(changes.made), "a reader that looks every 5 ms sees nearly every state"
    rows = [
        {
            "changes a second": asked.rows,
            "batches": len(changes.made),
            "requests/s": plain["requests_per_s"],
            "lag p50 s": float(np.quantile(lags, 0.5)),
            "lag p99 s": float(np.quantile(lags, 0.99)),
            "lookups p99 ms": changed["p99_ms"],
            "without changes p99 ms": plain["p99_ms"],
            "times": changed["p99_ms"] / plain["p99_ms"],
        }
    ]
    report("update_lag", f"changes every {EVERY_S:.0f} s beside lookups, int8 D {DIM}", rows, goals=GOALS)


if __name__ == "__main__":
    main()
