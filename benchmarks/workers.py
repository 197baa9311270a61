"""What workers cost: memory of the host with 1, 2 and 4 of them over one segment, and lookups of two processes against one.

Memory is PSS (shared pages divided by their users) summed over all processes of the server, after requests that touched every
table, so that a page of the segment counts once however many workers map it.
"""

import argparse
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common import console, report, shared_folder
from make_model import publish_random

from tableside.loader.memory import processes_below, pss_bytes
from tableside.loader.versions import Model
from tableside.quant import choose
from tableside.serving.client import Client
from tableside.serving.placement import Placement, Placements
from tableside.serving.request import FeatureInput
from tableside.serving.version import ServedVersion

DIM, TABLES, IDS, BATCH = 64, 8, 20, 256
MEMORY_TARGET, SCALING_TARGET = 0.02, 1.8


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
    process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
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
        "private MB": sum(f["private"] for f in found) / 1e6,
    }


def look_up(root: str, seconds: float, ready: Any, go: Any, counts: Any) -> None:
    """One process: plans a batch of all features and runs it again and again, one thread."""
    segment = Model(Path(root), "ads").attach(verify="header")
    placements = Placements(dict.fromkeys(segment.tables, Placement.HOST), on_host=segment.tables)
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
    done, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        request.run(buffers[done % len(buffers)])
        done += 1
    counts.put(done * request.ids / seconds)


def lookups_per_s(root: Path, processes: int, seconds: float) -> float:
    """ids/s of so many processes at once, attached to the one segment."""
    context = multiprocessing.get_context("spawn")
    ready, go, counts = context.Semaphore(0), context.Event(), context.Queue()
    running = [context.Process(target=look_up, args=(str(root), seconds, ready, go, counts)) for _ in range(processes)]
    for p in running:
        p.start()
    for _ in running:
        ready.acquire()
    go.set()
    total = sum(counts.get(timeout=60) for _ in running)
    for p in running:
        p.join()
    return float(total)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the segment (default: %(default)s)")
    options = parser.parse_args()
    with shared_folder() as root:
        rows = int(options.gib * 2**30 / TABLES / 80)
        publish_random(root, "ads", {f"t{i}": (rows, DIM, "int8") for i in range(TABLES)})
        segment = Model(root, "ads").path(1).stat().st_size
        console.print(f"segment {segment / 1e9:.2f} GB")
        found = [memory(root, workers, rows) for workers in (1, 2, 4)]
        for before, after in pairwise(found):
            added = (after["pss MB"] - before["pss MB"]) / (after["workers"] - before["workers"])
            after["MB a worker adds"] = added
            after["share of the segment"] = added * 1e6 / segment
            after["target"] = MEMORY_TARGET
            after["met"] = bool(added * 1e6 / segment < MEMORY_TARGET)
        found[0].update(dict.fromkeys(list(found[1])[len(found[0]) :], ""))
        report("workers_memory", f"memory of a server over one segment of {segment / 1e9:.2f} GB", found)
        lookups_per_s(root, 2, 0.5)
        rounds = [(lookups_per_s(root, 1, 2), lookups_per_s(root, 2, 2)) for _ in range(5)]
        one, two = (float(np.median(column)) for column in zip(*rounds, strict=True))
        ratio = float(np.median([b / a for a, b in rounds]))
        row = {"one process M ids/s": one / 1e6, "two processes M ids/s": two / 1e6, "ratio": ratio, "target": SCALING_TARGET}
        title = f"in-process lookups, {TABLES} features x {IDS} ids x batch {BATCH}, int8 D {DIM}, one thread a process"
        report("workers_scaling", title, [{**row, "met": bool(ratio >= SCALING_TARGET)}])


if __name__ == "__main__":
    main()
