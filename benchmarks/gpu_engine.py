"""Lookups over HTTP through the engine process of one GPU, beside the CPU's server on the same cores.

    python benchmarks/gpu_engine.py            # 26 features x 32 bags x 20 ids, int8 D 128, 4 workers

Half of the cores are the server's, the other half the load generators', which are processes of their own.
The CPU's server runs with as many workers as the others, and with one a core.
First every server is asked as much as it answers (closed loop). Then each gets half of what the CPU's server
answered, at random times, and latencies count from when a request was due. One request's vectors are held
against the CPU's kernel before. `loop us` is the CPU time of the engine's event loop for a request, `engine
us` that of all its threads; the others, of a batch, come from /metrics.
"""

import argparse
import multiprocessing
import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import console, report, shared_folder
from gpu_server import (
    BATCH,
    DESCRIBED,
    DIM,
    FEATURES,
    IDS,
    ROWS,
    check_placed,
    gpus,
    mean_stages,
    serve,
    stage_sums,
)
from make_model import publish_random

from tableside.loader.segment.memory import processes_below
from tableside.serving.cli.commands import bench
from tableside.serving.cli.commands.generator import Load, merged, run, run_at_rate
from tableside.serving.engine_process.main import NAME

WORKERS, CONNECTIONS, GENERATORS = 4, 64, 4
SECONDS, ROUNDS, REQUESTS = 2.0, 3, 64
TARGETS = {"hbm": 1.5, "cached 10 %": 1.2}


def generate(url: str, cores: list[int], rate: float, seed: int, begin: Any, answers: Any) -> None:
    """One load generator: a process, with its share of connections. begin: a barrier that all generators
    pass together."""
    os.sched_setaffinity(0, cores)
    requests = bench.make_requests(DESCRIBED, url, bench.Shape(BATCH, IDS, zipf=1.05), count=REQUESTS)
    each = CONNECTIONS // GENERATORS
    begin.wait(120)
    if rate:
        load = run_at_rate(
            url,
            requests,
            rate=rate / GENERATORS,
            concurrency=each,
            seconds=SECONDS,
            seed=seed,
            first=17 * seed,
        )
    else:
        load = run(url, requests, concurrency=each, seconds=SECONDS, first=17 * seed)
    answers.put(load)


def loaded(url: str, cores: list[int], rate: float = 0.0) -> Load:
    """What all generators together measured in the same seconds. rate: requests a second of all; 0: as
    many as are answered."""
    context = multiprocessing.get_context("spawn")
    answers, begin = context.Queue(), context.Barrier(GENERATORS)
    made = [
        context.Process(target=generate, args=(url, cores[n::GENERATORS], rate, n, begin, answers))
        for n in range(GENERATORS)
    ]
    for process in made:
        process.start()
    found = [answers.get(timeout=120) for _ in made]
    for process in made:
        process.join()
    if failed := sum(load.failed for load in found):
        raise SystemExit(f"{url}: {failed} requests failed: {[load.failure for load in found]}")
    together = merged(found)
    return Load(SECONDS, together.requests, 0, together.latencies_s)


def engine_seconds(server: Any) -> tuple[float, float]:
    """CPU seconds of the event loop of the engine process, its first thread, and of all its threads; 0
    where there is none."""
    for pid in processes_below(server.process.pid):
        if Path(f"/proc/{pid}/comm").read_text().startswith(NAME):
            return cpu_seconds(f"/proc/{pid}/task/{pid}/stat"), cpu_seconds(f"/proc/{pid}/stat")
    return 0.0, 0.0


def cpu_seconds(stat: str) -> float:
    fields = Path(stat).read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rows_of(servers: dict[str, Any], cores: list[int]) -> list[dict[str, Any]]:
    for server in servers.values():  # templates, and what is hot in a cache
        loaded(server.url, cores)
    loads: dict[str, list[Load]] = {name: [] for name in servers}
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    for _ in range(ROUNDS):
        for name, server in servers.items():
            before, (loop, threads) = stage_sums(server.url), engine_seconds(server)
            load = loaded(server.url, cores)
            loads[name].append(load)
            spent = zip(("loop us", "engine us"), engine_seconds(server), (loop, threads), strict=True)
            own = {key: 1e6 * (after - then) / max(1, load.requests) for key, after, then in spent}
            costs[name].append({**own, **mean_stages(before, stage_sums(server.url))})
    rates = {name: statistics.median(load.requests_per_s for load in found) for name, found in loads.items()}
    half = {
        name: [loaded(s.url, cores, rates["cpu"] / 2) for _ in range(ROUNDS)] for name, s in servers.items()
    }
    rows = []
    for name, found in loads.items():
        most, at_half = merged(found), merged(half[name])
        rows.append(
            {
                "placement": name,
                "req/s": rates[name],
                "of cpu": rates[name] / rates["cpu"],
                "target": TARGETS.get(name, 1.0),
                "p50 ms": most.percentile_ms(50),
                "p99 ms": most.percentile_ms(99),
                "half load req/s": rates["cpu"] / 2,
                "half load p50 ms": at_half.percentile_ms(50),
                "half load p99 ms": at_half.percentile_ms(99),
                **{key: statistics.median(cost[key] for cost in costs[name]) for key in costs[name][0]},
            }
        )
        console.print(rows[-1])
    return rows


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    gpu = gpus()
    if not gpu:
        raise SystemExit("nvidia-smi is not here; expected a host with a GPU")
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = cores[: len(cores) // 2], cores[len(cores) // 2 :]
    budget = f"{FEATURES * ROWS * 144 // 10 >> 20}MiB"
    ways = {
        "cpu": ("--workers", WORKERS),
        "cpu, a worker a core": ("--workers", len(ours)),
        "hbm": ("--workers", WORKERS, "--devices", 0, "--placement", "hbm"),
        "cached 10 %": (
            *("--workers", WORKERS, "--devices", 0, "--placement", "cached"),
            *("--hbm-budget", budget),
        ),
    }
    with shared_folder() as root, ExitStack() as stack:
        publish_random(root, "ads", {f"t{i}": (ROWS, DIM, "int8") for i in range(FEATURES)})
        os.sched_setaffinity(0, ours)  # of the servers, which inherit it
        servers = {}
        for name, options in ways.items():
            servers[name] = stack.enter_context(serve(root, ["ads"], "--verify", "header", *options))
            console.print(f"{name}: ready in {servers[name].ready_s:.1f} s")
            check_placed(root, servers[name].url, FEATURES)
        os.sched_setaffinity(0, theirs)
        rows = rows_of(servers, theirs)
    title = (
        f"lookups of {FEATURES} features x {BATCH} x {IDS} ids, int8 D {DIM}, Zipf 1.05, over HTTP: "
        f"{WORKERS} workers on "
        f"{len(ours)} cores, {CONNECTIONS} connections from {GENERATORS} processes on {len(theirs)} others"
    )
    report("gpu_engine", title, rows, gpu=gpu[0])


if __name__ == "__main__":
    main()
