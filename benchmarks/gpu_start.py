"""Seconds until a server on GPUs is ready: on a machine that never compiled its kernels, and when it did.

    python benchmarks/gpu_start.py                      # 26 tables x 500,000 rows x D 128 int8
    python benchmarks/gpu_start.py --placements cached  # one of them

For each placement the cache of Triton is an empty folder first, and then what that start left; the later
start is the median of `AGAIN`. There are as many GPUs as the host has, two at most, and four doors for each.
One answer of each server is compared with the CPU's. `steps` is what the engine processes' log says of the
last start: where each one's time went.
"""

import argparse
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from common import console, report, shared_folder
from gpu_server import DIM, FEATURES, ROWS, check_placed, gpus, serve
from make_model import publish_random

PLACEMENTS = ("hbm", "cached", "hybrid", "zero_copy", "auto")
DOORS, MOST_GPUS, AGAIN = 4, 2, 3
GOALS = {"cold": 20.0, "compiled": 8.0}  # seconds
BUDGET = f"{FEATURES * ROWS * 144 // 10 >> 20}MiB"
_STEPS = re.compile(r"was attached in ([^\n]*)")


def start(root: Path, placement: str, devices: Sequence[int]) -> tuple[float, list[str], int]:
    """Seconds until it is ready; what each engine process says of them; and how many kernels were compiled
    meanwhile."""
    options = [
        "--workers",
        DOORS * len(devices),
        "--devices",
        ",".join(map(str, devices)),
        "--placement",
        placement,
    ]
    if placement != "hbm" and placement != "zero_copy":
        options += ["--hbm-budget", BUDGET]
    with serve(root, ["ads"], *options) as server:
        check_placed(root, server.url, FEATURES)
        server.log.seek(0)
        log = server.log.read()
    compiled = sum(map(int, re.findall(r"kernels for sm_\d+: (\d+) in ", log)))
    return server.ready_s, _STEPS.findall(log), compiled


def measure(root: Path, placement: str, devices: Sequence[int]) -> dict[str, Any]:
    with TemporaryDirectory(prefix="tableside-triton-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        cold_s, _, compiled = start(root, placement, devices)
        again = [start(root, placement, devices) for _ in range(AGAIN)]
    if not compiled or any(count for _, _, count in again):
        raise SystemExit(
            f"{placement}: {compiled} kernels were compiled first, then {[c for _, _, c in again]}; expected "
            "none then"
        )
    return {
        "placement": placement,
        "GPUs": len(devices),
        "doors": DOORS * len(devices),
        "kernels": compiled,
        "cold s": cold_s,
        "compiled s": statistics.median(seconds for seconds, _, _ in again),
        "cold goal s": GOALS["cold"],
        "compiled goal s": GOALS["compiled"],
        "steps": "; ".join(again[-1][1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=PLACEMENTS)
    options = parser.parse_args()
    gpu = gpus()
    if not gpu:
        raise SystemExit("nvidia-smi is not here; expected a host with a GPU")
    rows = []
    with shared_folder() as root:
        publish_random(root, "ads", {f"t{i}": (ROWS, DIM, "int8") for i in range(FEATURES)})
        for placement in options.placements:
            rows.append(measure(root, placement, range(min(MOST_GPUS, len(gpu)))))
            console.print(rows[-1])
    title = (
        f"seconds until a server is ready: {FEATURES} tables of {ROWS:,} rows, int8 D {DIM}, "
        f"{len(os.sched_getaffinity(0))} cores"
    )
    report("gpu_start", title, rows, gpu=gpu[0])


if __name__ == "__main__":
    main()
