"""What workers cost: memory of the host with 1, 2 and 4 of them over one segment, and lookups of two
processes against one.

Memory is PSS (shared pages divided by their users) summed over all processes of the server, after requests
that touched every table, so that a page of the segment counts once however many workers map it. `beside the
segment` is the rest, their own memory. Lookups are measured over a segment whose 2 MiB pages fit the
processor's TLB, and over one that is four times as large. A process that had less than its whole core was
disturbed, and so was its round; rates by CPU time say what it does with a core of its own.
"""

import argparse
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common import console, report, shared_folder
from make_model import publish_random

from tableside.loader.segment.memory import processes_below, pss_bytes
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.quant.gpu.residence.registry import UNPLACED
from tableside.serving.client import Client
from tableside.serving.model.placements import Placements
from tableside.serving.model.request import FeatureInput
from tableside.serving.model.version import ServedVersion

DIM, TABLES, IDS, BATCH = 64, 8, 20, 256
MEMORY_TARGET, SCALING_TARGET = 0.02, 1.8
ROUNDS, ROUND_S = 7, 1.5


def memory(root: Path, workers: int, rows: int) -> dict[str, Any]:
    """PSS of a whole server, each worker having read every table."""
    command = [
        sys.executable,
        "-m",
        "tableside",
        "serve",
        "ads",
        "--root",
        root,
        "--port",
        "0",
        "--workers",
        workers,
        "--drain-s",
        "0",
    ]
    process = subprocess.Popen(
        [str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]  # type: ignore[index]
        rng = np.random.default_rng(workers)
        for _ in range(20 * workers):
            with Client(url) as client:  # a connection each, so that every worker gets some
                client.lookup("ads", {f"t{i}": rng.integers(0, rows, (BATCH, IDS)) for i in range(TABLES)})
        found = [pss_bytes(p) for p in (process.pid, *processes_below(process.pid))]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    return {
        "workers": workers,
        "processes": len(found),
        "pss MB": sum(f["pss"] for f in found) / 1e6,
        "segment pages MB": sum(f["pss_shmem"] for f in found) / 1e6,
        "beside the segment MB": sum(f["pss"] - f["pss_shmem"] for f in found) / 1e6,
    }


def look_up(root: str, model: str, seconds: float, ready: Any, go: Any, found: Any) -> None:
    """One process: plans a batch of all features and runs it again and again, one thread. Puts ids/s, and
    its share of a core."""
    segment = Model(Path(root), model).attach(verify="header")
    placements = Placements(dict.fromkeys(segment.tables, UNPLACED), on_host=segment.tables)
    served = ServedVersion(segment, choose(), placements)
    rng = np.random.default_rng(os.getpid())
    inputs, at = [], 0
    for name in served.features:
        inputs.append(FeatureInput(name, at, BATCH * IDS, BATCH, IDS))
        at += BATCH * IDS * 8
    request = served.lay_out(inputs)
    rows = served.header.tables[0].rows
    buffers = [rng.integers(0, rows, at // 8).tobytes() for _ in range(20)]
    for buffer in buffers:
        request.run(buffer)
    int(served.segment.mapping.bytes[:: 1 << 16].sum())  # every page mapped before the clock starts
    ready.release()
    go.wait()
    done, started, cpu = 0, time.perf_counter(), time.process_time()
    while (elapsed := time.perf_counter() - started) < seconds:
        request.run(buffers[done % len(buffers)])
        done += 1
    found.put((done * request.ids / elapsed, (time.process_time() - cpu) / elapsed))


@dataclass(frozen=True)
class Lookups:
    """Processes that looked up at once. ids_per_s: of all together; ids_per_cpu_s: of each, by its own CPU
    time, the median."""

    ids_per_s: float
    ids_per_cpu_s: float
    least_share: float


def lookups(root: Path, model: str, processes: int, seconds: float) -> Lookups:
    """So many processes at once, attached to the one segment."""
    context = multiprocessing.get_context("spawn")
    ready, go, queue = context.Semaphore(0), context.Event(), context.Queue()
    running = [
        context.Process(target=look_up, args=(str(root), model, seconds, ready, go, queue))
        for _ in range(processes)
    ]
    for p in running:
        p.start()
    try:
        for _ in running:
            while not ready.acquire(timeout=0.5):
                if ended := [p.exitcode for p in running if p.exitcode is not None]:
                    raise SystemExit(
                        f"a process that looks up ended with {ended[0]} before it began; its error stands "
                        "above"
                    )
        go.set()
        found = [queue.get(timeout=60) for _ in running]
    finally:
        for p in running:
            if not go.is_set():
                p.kill()
            p.join()
    by_cpu = float(np.median([rate / share for rate, share in found]))
    return Lookups(sum(rate for rate, _ in found), by_cpu, min(share for _, share in found))


def scaling(root: Path, model: str) -> dict[str, Any]:
    """Two processes against one over a segment, in turns: medians over the rounds, and the ratios' spread."""
    lookups(root, model, 2, 0.5)
    rounds = [(lookups(root, model, 1, ROUND_S), lookups(root, model, 2, ROUND_S)) for _ in range(ROUNDS)]
    ones, twos = zip(*rounds, strict=True)
    ratios = [two.ids_per_s / one.ids_per_s for one, two in rounds]
    ratio = float(np.median(ratios))
    return {
        "segment GB": Model(root, model).path(1).stat().st_size / 1e9,
        "one process M ids/s": median_m([one.ids_per_s for one in ones]),
        "two processes M ids/s": median_m([two.ids_per_s for two in twos]),
        "ratio": ratio,
        "least ratio": min(ratios),
        "greatest ratio": max(ratios),
        "alone M ids/CPU s": median_m([one.ids_per_cpu_s for one in ones]),
        "each of two M ids/CPU s": median_m([two.ids_per_cpu_s for two in twos]),
        "least share of a core": min(each.least_share for each in (*ones, *twos)),
        "target": SCALING_TARGET,
        "met": bool(ratio >= SCALING_TARGET),
    }


def median_m(values: list[float]) -> float:
    """The median, in millions."""
    return float(np.median(values)) / 1e6


def publish(root: Path, name: str, gib: float) -> int:
    """Publishes a model of so many GiB; returns the rows of each of its tables."""
    rows = int(gib * 2**30 / TABLES / 80)
    publish_random(root, name, {f"t{i}": (rows, DIM, "int8") for i in range(TABLES)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gib", type=float, default=4.0, help="size of the large segment (default: %(default)s)"
    )
    options = parser.parse_args()
    with shared_folder() as root:
        rows = publish(root, "ads", options.gib)
        segment = Model(root, "ads").path(1).stat().st_size
        console.print(f"segment {segment / 1e9:.2f} GB")
        found = [memory(root, workers, rows) for workers in (1, 2, 4)]
        for before, after in pairwise(found):
            added = (after["pss MB"] - before["pss MB"]) / (after["workers"] - before["workers"])
            after["MB a worker adds"] = added
            after["share of the segment"] = added * 1e6 / segment
            after["target"] = MEMORY_TARGET
            after["met"] = bool(added * 1e6 / segment < MEMORY_TARGET)
        found[0].update(dict.fromkeys(list(found[1])[len(found[0]) :]))
        publish(root, "small", options.gib / 4)
        scaled = [scaling(root, model) for model in ("small", "ads")]
        report("workers_memory", f"memory of a server over one segment of {segment / 1e9:.2f} GB", found)
        title = (
            f"in-process lookups, {TABLES} features x {IDS} ids x batch {BATCH}, int8 D {DIM}, one "
            f"thread a process"
        )
        report("workers_scaling", title, scaled)


if __name__ == "__main__":
    main()
