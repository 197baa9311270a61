"""What more doors cost on one GPU: memory of the host and of the GPU, and how many contexts there are, with
one door and four.

    python benchmarks/gpu_memory.py   # 26 tables x 500,000 rows x D 128 int8, in HBM and behind a cache of a
                                      # tenth of their bytes

Doors share one engine process, so four of them should have one context and one cache, as one has. Each server
is measured after requests of ids of every table over many connections, and one answer was compared with the
CPU's before. Memory of the host is PSS (shared pages divided by their users) summed over all processes of the
server. HBM is what the device's used memory grew by. A process counts as one with a context where it has a
GPU's device file open; the benchmark fails where that is not one.
"""

import argparse
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import console, report, shared_folder
from gpu_server import BATCH, DIM, FEATURES, IDS, ROWS, check_placed, gpus, hbm_used, serve
from make_model import publish_random

from tableside.loader.segment.memory import processes_below, pss_bytes
from tableside.serving.client import Client

DOORS = (1, 4)
REQUESTS = 40  # for each door, over a connection each
BUDGET = f"{FEATURES * ROWS * 144 // 10 >> 20}MiB"
WAYS: dict[str, tuple[object, ...]] = {
    "hbm": ("--placement", "hbm"),
    "cached 10 %": ("--placement", "cached", "--hbm-budget", BUDGET),
}
_DEVICE_FILE = re.compile(r"/dev/nvidia\d+")


def has_context(pid: int) -> bool:
    """Whether a process has a GPU's device file open."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            if _DEVICE_FILE.fullmatch(str(link.readlink())):
                return True
    return False


def ask(url: str, doors: int) -> None:
    """Requests that reach every door and read rows of every table."""
    rng = np.random.default_rng(doors)
    for _ in range(REQUESTS * doors):
        with Client(url) as client:
            client.lookup("ads", {f"t{i}": rng.integers(0, ROWS, (BATCH, IDS)) for i in range(FEATURES)})


def gauge(url: str, name: str) -> float:
    """The sum of a gauge on /metrics; 0 where there is none."""
    return sum(
        map(
            float,
            re.findall(
                rf"^{name}{{[^}}]*}} (\S+)$", httpx.get(f"{url}/metrics", timeout=10).text, re.MULTILINE
            ),
        )
    )


def measure(root: Path, name: str, doors: int) -> dict[str, Any]:
    (before, *_) = hbm_used()
    options = ("--workers", doors, "--devices", 0, *WAYS[name])
    with serve(root, ["ads"], *options) as server:
        check_placed(root, server.url, FEATURES)
        ask(server.url, doors)
        (used, *_) = hbm_used()
        processes = [server.process.pid, *processes_below(server.process.pid)]
        memories = [pss_bytes(pid) for pid in processes]
        contexts = sum(map(has_context, processes))
        cache_bytes = gauge(server.url, "tableside_cache_bytes")
    if contexts != 1:
        raise SystemExit(
            f"{name}, {doors} doors: {contexts} processes have a context; expected one, of the engine process"
        )
    return {
        "placement": name,
        "doors": doors,
        "processes": len(processes),
        "contexts": contexts,
        "cache MB": cache_bytes / 1e6,
        "HBM MB": (used - before) / 1e6,
        "PSS MB": sum(m["pss"] for m in memories) / 1e6,
        "of it segment and shared memory MB": sum(m["pss_shmem"] for m in memories) / 1e6,
        "ready s": server.ready_s,
    }


def beside_one(rows: Sequence[dict[str, Any]]) -> None:
    """Adds what each row has in times of the same placement's with one door."""
    for row in rows:
        (one,) = [r for r in rows if r["placement"] == row["placement"] and r["doors"] == 1]
        for key in ("HBM", "PSS"):
            row[f"{key}, times one door's"] = row[f"{key} MB"] / one[f"{key} MB"]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    gpu = gpus()
    if not gpu:
        raise SystemExit("nvidia-smi is not here; expected a host with a GPU")
    rows = []
    with shared_folder() as root:
        publish_random(root, "ads", {f"t{i}": (ROWS, DIM, "int8") for i in range(FEATURES)})
        for name in WAYS:
            for doors in DOORS:
                rows.append(measure(root, name, doors))
                console.print(rows[-1])
    beside_one(rows)
    title = (
        f"memory of one GPU's engine process and its doors: {FEATURES} tables of {ROWS:,} rows, int8 D {DIM}"
    )
    report("gpu_memory", title, rows, gpu=gpu[0])


if __name__ == "__main__":
    main()
