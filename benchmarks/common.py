"""What every benchmark does: name the machine, print a table, write the result beside its hardware, versions and commit."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from shutil import rmtree
from typing import Any
from uuid import uuid4

from rich.console import Console
from rich.table import Table

from tableside.quant.installed import version_of

HERE = Path(__file__).parent
console = Console(highlight=False, soft_wrap=True, width=150)


@cache
def machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel, versions, commit. Found once, as the first result changes the tree."""
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")  # noqa: SIM115
    packages = ("tableside", "torch", "triton", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "uvicorn", "fastapi")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True, check=False)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{p: version for p in packages if (version := version_of(p))},
        "commit": os.environ.get("COMMIT") or commit.stdout.strip(),
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def report(name: str, title: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Prints the rows as a table and writes them to results/NAME.json."""
    table = Table(*rows[0], title=title, box=None)
    for row in rows:
        table.add_row(*(_cell(v) for v in row.values()))
    console.print(table)
    for key, value in more.items():
        console.print(f"{key}: {_cell(value)}")
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"title": title, "machine": machine(), "rows": rows, **more}, indent=1) + "\n")
    console.print(f"written to {path.relative_to(HERE.parent)}\n")


def _cell(value: Any) -> str:
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 100
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def alternate(variants: dict[str, Callable[[], object]], seconds: float = 0.25, rounds: int = 7) -> dict[str, float]:
    """Seconds a call of each variant: median over rounds that take turns, after one untimed pass."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        call()
    for _ in range(rounds):
        for name, call in variants.items():
            calls, started = 0, time.perf_counter()
            while (elapsed := time.perf_counter() - started) < seconds / rounds or not calls:
                call()
                calls += 1
            found[name].append(elapsed / calls)
    return {name: statistics.median(times) for name, times in found.items()}


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder of published models that goes when the benchmark ends."""
    root = Path("/dev/shm") / f"tableside-bench-{uuid4().hex[:8]}"
    try:
        yield root
    finally:
        rmtree(root, ignore_errors=True)
