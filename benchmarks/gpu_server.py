"""Servers on GPUs: what registration and workers cost, and lookups over HTTP against the same server on the CPU.

    python benchmarks/gpu_server.py --memory 32    # GiB of a segment: registration, first answer, PSS and HBM of 1, 2, 4 workers
    python benchmarks/gpu_server.py --http         # 26 features over HTTP, on the CPU and on the GPU in turns

Memory of the host is PSS (shared pages divided by their users) summed over all processes of the server, after requests to every
table. HBM is what the device's free memory fell by, contexts included. Answers are compared with the CPU's first.
"""

import argparse
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx
import numpy as np
from common import console, report, shared_folder
from make_model import publish_random

from tableside.loader.memory import processes_below, pss_bytes
from tableside.loader.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.cli import bench
from tableside.serving.client import Client

FEATURES, IDS, BATCH, DIM, ROWS = 26, 20, 32, 128, 500_000
SECONDS, ROUNDS = 2.0, 3
STAGES = ("queue", "staging", "copy_in", "kernels", "copy_out")


@contextmanager
def serving(root: Path, *options: object) -> Iterator[tuple[str, "subprocess.Popen[str]", Any, float]]:
    """A server in processes of its own: its url, process, log, and the seconds until it was ready."""
    with TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "tableside", "serve", "ads", "--root", root, "--port", 0, "--drain-s", 0, *options]
        started = time.perf_counter()
        process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not (found := re.search(r"http://\S+", line)):
                log.seek(0)
                raise SystemExit(f"the server did not start: {line}{log.read()}")
            yield found[0], process, log, time.perf_counter() - started
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def hbm_used() -> list[int]:
    """Bytes in use of each GPU, by nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) << 20 for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def check(root: Path, url: str, tables: int) -> None:
    """Every vector of one request is the CPU's, within the rounding of a sum in another order."""
    segment = Model(root, "ads").attach(verify="header")
    rng = np.random.default_rng(5)
    ids = {t.name: rng.integers(0, t.rows, (BATCH, IDS)) for t in segment.header.tables[:tables]}
    with Client(url) as client:
        found = client.lookup("ads", ids)
    for name, wanted in ids.items():
        lengths = np.full(BATCH, IDS, np.int32)
        expected = choose().lookup(segment.tables[name], wanted.reshape(-1), lengths, pooling=Pooling.SUM)
        np.testing.assert_allclose(found[name], expected, rtol=1e-3, atol=1e-3)


def memory(root: Path, gib: int, devices: Sequence[int]) -> list[dict[str, Any]]:
    rows = gib * 2**30 // 8 // 144
    console.print(f"making {gib} GiB")
    publish_random(root, "ads", {f"t{i}": (rows, DIM, "int8") for i in range(8)})
    segment_bytes = Model(root, "ads").path(1).stat().st_size
    found = []
    for gpus in [n for n in (1, 2, 4) if n <= len(devices)]:
        for workers in [w for w in (1, 2, 4) if w >= gpus]:
            before = hbm_used()
            options = ("--devices", ",".join(map(str, devices[:gpus])), "--placement", "zero_copy", "--workers", workers)
            with serving(root, *options) as (url, process, log, ready_s):
                check(root, url, 8)
                first_s = ready_s
                rng = np.random.default_rng(workers)
                for _ in range(10 * workers):
                    with Client(url) as client:
                        client.lookup("ads", {f"t{i}": rng.integers(0, rows, (BATCH, IDS)) for i in range(8)})
                used = [now - b for now, b in zip(hbm_used(), before, strict=True)]
                memories = [pss_bytes(p) for p in (process.pid, *processes_below(process.pid))]
                log.seek(0)
                seconds = [float(s) for s in re.findall(r"registered with CUDA in ([\d.]+) s", log.read())]
            found.append(
                {
                    "GPUs": gpus,
                    "workers": workers,
                    "registered GB/s": segment_bytes / 1e9 / (sum(seconds) / len(seconds)),
                    "registration s": sum(seconds) / len(seconds),
                    "all workers ready s": first_s,
                    "PSS GB": sum(m["pss"] for m in memories) / 1e9,
                    "segment pages GB": sum(m["pss_shmem"] for m in memories) / 1e9,
                    "private MB a worker": sum(m["private"] for m in memories) / 1e6 / workers,
                    "HBM MB a worker": sum(used) / 1e6 / workers,
                }
            )
            console.print(found[-1])
    return found


def stage_sums(url: str) -> dict[str, tuple[float, float]]:
    """Seconds and batches of each stage so far, from /metrics."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    found = {}
    for stage in STAGES:
        values = []
        for kind in ("sum", "count"):
            pattern = rf'tableside_gpu_seconds_{kind}{{[^}}]*stage="{stage}"[^}}]*}} (\S+)'
            values.append(sum(float(v) for v in re.findall(pattern, text)))
        found[stage] = (values[0], values[1])
    return found


def http(root: Path) -> list[dict[str, Any]]:
    publish_random(root, "ads", {f"t{i}": (ROWS, DIM, "int8") for i in range(FEATURES)})
    described = {
        "name": "ads",
        "tables": [{"name": f"t{i}", "rows": ROWS} for i in range(FEATURES)],
        "features": [{"name": f"t{i}", "table": f"t{i}"} for i in range(FEATURES)],
    }
    ways = {
        "cpu": (),
        "hbm": ("--devices", 0, "--placement", "hbm"),
        "zero_copy": ("--devices", 0, "--placement", "zero_copy", "--threads", 4),
        "cached 10 %": ("--devices", 0, "--placement", "cached", "--hbm-budget", f"{FEATURES * ROWS * 144 // 10 >> 20}MiB"),
    }
    rows = []
    for workers in (1, 4):
        loads: dict[tuple[str, int], list[bench.Load]] = {}
        stages: dict[tuple[str, int], dict[str, float]] = {}
        for way, options in ways.items():
            with serving(root, "--workers", workers, *options) as (url, _, _, _):
                check(root, url, FEATURES)
                requests = bench.make_requests(described, url, BATCH, IDS, 1.05)
                bench.run(url, requests, concurrency=16, seconds=2.0)
                for concurrency in (1, 16, 64):
                    before = stage_sums(url)
                    for _ in range(ROUNDS):
                        load = bench.run(url, requests, concurrency=concurrency, seconds=SECONDS / ROUNDS)
                        assert load.failed == 0
                        loads.setdefault((way, concurrency), []).append(load)
                    after = stage_sums(url)
                    stages[way, concurrency] = {
                        s: 1e6 * (after[s][0] - before[s][0]) / max(1.0, after[s][1] - before[s][1]) for s in STAGES
                    }
        for (way, concurrency), measured in loads.items():
            latencies = np.concatenate([load.latencies_s for load in measured])
            rate = float(np.median([load.requests_per_s for load in measured]))
            base = float(np.median([load.requests_per_s for load in loads["cpu", concurrency]]))
            rows.append(
                {
                    "workers": workers,
                    "placement": way,
                    "connections": concurrency,
                    "req/s": rate,
                    "times cpu": rate / base,
                    "p50 ms": float(np.percentile(latencies, 50) * 1e3),
                    "p99 ms": float(np.percentile(latencies, 99) * 1e3),
                    **{f"{s} us": value for s, value in stages[way, concurrency].items()},
                }
            )
            console.print(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=int, metavar="GIB", help="measure memory over a segment of so many GiB")
    parser.add_argument("--http", action="store_true", help="measure lookups over HTTP")
    options = parser.parse_args()
    gpu = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.strip().splitlines()
    if options.memory:
        with shared_folder() as root:
            rows = memory(root, options.memory, range(len(gpu)))
        report(
            "gpu_workers",
            f"workers over one segment of {options.memory} GiB, placement zero_copy",
            rows,
            gpu=gpu[0].partition(" (")[0],
        )
    if options.http:
        with shared_folder() as root:
            rows = http(root)
        title = (
            f"binary lookup of {FEATURES} features x {IDS} ids x batch {BATCH}, int8 D {DIM}, Zipf 1.05; load generator beside it"
        )
        report("gpu_http", title, rows, gpu=gpu[0].partition(" (")[0])


if __name__ == "__main__":
    main()
