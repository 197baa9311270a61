"""Servers on GPUs: what registration and workers cost, and lookups over HTTP against the same server on the
CPU.

    python benchmarks/gpu_server.py --memory 32    # GiB of a segment: registration, first answer, PSS and HBM
                                                   # of 1, 2, 4 workers
    python benchmarks/gpu_server.py --http         # the cases of http_lookup.py, a CPU worker and an hbm
                                                   # worker in turns
    python benchmarks/gpu_server.py --placements   # 26 features, every placement, 1 and 4 workers

Lengths differ in every request, but for the way `same` of --http. Without a GPU, --http measures its CPU
worker and writes no file. Memory of the host is PSS (shared pages divided by their users) summed over all
processes of the server, after requests to every table. HBM is what the device's free memory fell by, contexts
included. Answers are compared with the CPU's first.
"""

import argparse
import os
import re
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import console, report, shared_folder
from http_cases import CASES, WAYS, Case, InProcess, Server, check, line, prepare, publish, serving, warm_up
from make_model import publish_random

from tableside.loader.segment.memory import processes_below, pss_bytes
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.cli.commands import bench
from tableside.serving.cli.commands.generator import Load, merged, run
from tableside.serving.client import Client

FEATURES, IDS, BATCH, DIM, ROWS = 26, 20, 32, 128, 500_000
DESCRIBED = {
    "name": "ads",
    "tables": [{"name": f"t{i}", "rows": ROWS} for i in range(FEATURES)],
    "features": [{"name": f"t{i}", "table": f"t{i}"} for i in range(FEATURES)],
}
SECONDS, ROUNDS = 2.0, 3
HTTP_S, CONNECTIONS = 1.5, 16  # of each way and server of --http
STAGES = ("queue", "staging", "copy_in", "kernels", "copy_out")


def serve(root: Path, models: Sequence[str], *options: object) -> AbstractContextManager[Server]:
    """`tableside serve` in processes of its own."""
    return serving("-m", "tableside", "serve", *models, "--root", root, "--port", 0, "--drain-s", 0, *options)


def hbm_used() -> list[int]:
    """Bytes in use of each GPU, by nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [
        int(line) << 20
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    ]


def check_placed(root: Path, url: str, tables: int) -> None:
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
            options = (
                "--devices",
                ",".join(map(str, devices[:gpus])),
                "--placement",
                "zero_copy",
                "--workers",
                workers,
            )
            with serve(root, ["ads"], *options) as server:
                url, process = server.url, server.process
                check_placed(root, url, 8)
                rng = np.random.default_rng(workers)
                for _ in range(10 * workers):
                    with Client(url) as client:
                        client.lookup("ads", {f"t{i}": rng.integers(0, rows, (BATCH, IDS)) for i in range(8)})
                used = [now - b for now, b in zip(hbm_used(), before, strict=True)]
                memories = [pss_bytes(p) for p in (process.pid, *processes_below(process.pid))]
                server.log.seek(0)
                seconds = [
                    float(s) for s in re.findall(r"registered with CUDA in ([\d.]+) s", server.log.read())
                ]
            found.append(
                {
                    "GPUs": gpus,
                    "workers": workers,
                    "place": f"{gpus}/{workers}",
                    "registered GB/s": segment_bytes / 1e9 / (sum(seconds) / len(seconds)),
                    "registration s": sum(seconds) / len(seconds),
                    "all workers ready s": server.ready_s,
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


def mean_stages(
    before: dict[str, tuple[float, float]], after: dict[str, tuple[float, float]]
) -> dict[str, float]:
    """Microseconds of each stage of a batch, on average, between two `stage_sums`."""
    return {
        f"{s} us": 1e6 * (after[s][0] - before[s][0]) / max(1.0, after[s][1] - before[s][1]) for s in STAGES
    }


def http(root: Path, has_gpu: bool) -> list[dict[str, Any]]:
    """The cases of http_lookup.py, a CPU worker and an hbm worker in turns. The load generator has a core
    to itself."""
    publish(root)
    cores = sorted(os.sched_getaffinity(0))
    models = [case.model for case in CASES]
    options: dict[str, tuple[object, ...]] = {"cpu": ()}
    if has_gpu:
        options["hbm"] = ("--devices", 0, "--placement", "hbm")
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        os.sched_setaffinity(0, cores[:-1])  # of the servers, which inherit it
        servers = {}
        for name, more in options.items():
            servers[name] = stack.enter_context(serve(root, models, "--verify", "header", *more))
            console.print(f"{name}: ready in {servers[name].ready_s:.0f} s")
        os.sched_setaffinity(0, cores[-1:])
        for case in CASES:
            inside = InProcess(root, case)
            for name, server in servers.items():
                for way in WAYS:
                    check(case, inside, server.url, way, exact=name == "cpu")
            rows += http_rows(case, {name: server.url for name, server in servers.items()})
            console.print(*map(line, rows[-len(WAYS) :]), sep="\n")
    return rows


def http_rows(case: Case, urls: dict[str, str]) -> list[dict[str, Any]]:
    """A row for each of WAYS, with every server's figures side by side."""
    prepared = prepare(case, next(iter(urls.values())))
    loads: dict[tuple[str, str], list[Load]] = {(way, name): [] for way in WAYS for name in urls}
    sent = {(way, name): warm_up(urls[name], prepared[way], CONNECTIONS) for way, name in loads}
    for _ in range(ROUNDS):
        for (way, name), found in loads.items():
            load = run(
                urls[name],
                prepared[way],
                concurrency=CONNECTIONS,
                seconds=HTTP_S / ROUNDS,
                first=sent[way, name],
            )
            if load.failed:
                raise SystemExit(f"{name}, {case}, {way}: {load.failed} requests failed: {load.failure}")
            sent[way, name] += load.latencies_s.size
            found.append(load)
    rates = {key: statistics.median(load.requests_per_s for load in found) for key, found in loads.items()}
    rows = []
    for way in WAYS:
        row: dict[str, Any] = {"features x batch x ids": str(case), "way": way}
        for name in urls:
            load = merged(loads[way, name])
            row[f"{name} req/s"] = rates[way, name]
            row[f"{name} of same"] = rates[way, name] / rates["same", name]
            row[f"{name} p50 ms"], row[f"{name} p99 ms"] = load.percentile_ms(50), load.percentile_ms(99)
        if "hbm" in urls:
            row["hbm of cpu"] = rates[way, "hbm"] / rates[way, "cpu"]
        rows.append(row)
    return rows


def placements(root: Path) -> list[dict[str, Any]]:
    publish_random(root, "ads", {f"t{i}": (ROWS, DIM, "int8") for i in range(FEATURES)})
    ways = {
        "cpu": (),
        "hbm": ("--devices", 0, "--placement", "hbm"),
        "zero_copy": ("--devices", 0, "--placement", "zero_copy", "--threads", 4),
        "cached 10 %": (
            "--devices",
            0,
            "--placement",
            "cached",
            "--hbm-budget",
            f"{FEATURES * ROWS * 144 // 10 >> 20}MiB",
        ),
    }
    rows = []
    for workers in (1, 4):
        loads: dict[tuple[str, int], list[Load]] = {}
        stages: dict[tuple[str, int], dict[str, float]] = {}
        for way, options in ways.items():
            with serve(root, ["ads"], "--workers", workers, *options) as server:
                url, sent = server.url, 0
                check_placed(root, url, FEATURES)
                requests = bench.make_requests(DESCRIBED, url, bench.Shape(BATCH, IDS, zipf=1.05))
                run(url, requests, concurrency=16, seconds=2.0)
                for concurrency in (1, 16, 64):
                    before = stage_sums(url)
                    for _ in range(ROUNDS):
                        load = run(
                            url, requests, concurrency=concurrency, seconds=SECONDS / ROUNDS, first=sent
                        )
                        assert load.failed == 0
                        sent += load.latencies_s.size
                        loads.setdefault((way, concurrency), []).append(load)
                    stages[way, concurrency] = mean_stages(before, stage_sums(url))
        for (way, concurrency), measured in loads.items():
            load = merged(measured)
            rate = statistics.median(load.requests_per_s for load in measured)
            base = statistics.median(load.requests_per_s for load in loads["cpu", concurrency])
            rows.append(
                {
                    "workers": workers,
                    "placement": way,
                    "connections": concurrency,
                    "req/s": rate,
                    "times cpu": rate / base,
                    "p50 ms": load.percentile_ms(50),
                    "p99 ms": load.percentile_ms(99),
                    **stages[way, concurrency],
                }
            )
            console.print(rows[-1])
    return rows


def gpus() -> list[str]:
    """The GPUs' names, by nvidia-smi; none where there is no nvidia-smi."""
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        return []
    return [line.partition(" (")[0] for line in found.strip().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--memory", type=int, metavar="GIB", help="measure memory over a segment of so many GiB"
    )
    parser.add_argument("--http", action="store_true", help="measure the cases of http_lookup.py")
    parser.add_argument(
        "--placements", action="store_true", help="measure lookups over HTTP in every placement"
    )
    options = parser.parse_args()
    gpu = gpus()
    if not gpu and (options.memory or options.placements):
        raise SystemExit("nvidia-smi is not here; expected a host with a GPU")
    if options.memory:
        with shared_folder() as root:
            rows = memory(root, options.memory, range(len(gpu)))
        report(
            "gpu_workers",
            f"workers over one segment of {options.memory} GiB, placement zero_copy",
            rows,
            gpu=gpu[0],
        )
    if options.http:
        with shared_folder() as root:
            rows = http(root, bool(gpu))
        if gpu:
            title = (
                f"lookups over HTTP, int8 D 64, one worker, {CONNECTIONS} connections; load generator "
                f"on a core of its own"
            )
            report("gpu_http", title, rows, gpu=gpu[0])
    if options.placements:
        with shared_folder() as root:
            rows = placements(root)
        title = (
            f"lookup of {FEATURES} features x batch {BATCH} x {IDS} ids on average, lengths that differ in "
            "every request, "
            f"int8 D {DIM}, Zipf 1.05; load generator beside it"
        )
        report("gpu_http_placements", title, rows, gpu=gpu[0])


if __name__ == "__main__":
    main()
