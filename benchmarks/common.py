"""What every benchmark does: name the machine, print a table, write the result beside its hardware,
versions and commit."""

import json
import math
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
TOP = HERE.resolve().parent
RESULTS = HERE / "results"
WRITTEN = ("benchmarks/results", "docs", "*.md")  # results and texts: they may change while benchmarks run
console = Console(highlight=False, soft_wrap=True, width=150)


def commit() -> str:
    """The commit that is measured; with `-dirty` where a file that git knows differs from it, other than
    results and texts.

    Where there is no git, the environment's COMMIT names it.
    """
    if given := os.environ.get("COMMIT"):
        return given
    found = _git("rev-parse", "--short", "HEAD")
    changed = _git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{path}" for path in WRITTEN)
    )
    return found + ("-dirty" if changed else "")


def _git(*arguments: str) -> str:
    """What git prints, run in the tree; nothing where it fails or is absent."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=TOP, capture_output=True, text=True, check=False
        ).stdout.strip()
    except FileNotFoundError:
        return ""


STARTED_FROM = commit()  # what is measured, though the tree may change while it is


class ResultError(Exception):
    """A result that is not kept; the message says why, and what to do about it."""


@cache
def machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel, versions, and the commit that the process started from."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    packages = ("tableside", "torch", "triton", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "uvicorn", "fastapi")
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{p: version for p in packages if (version := version_of(p))},
        "commit": STARTED_FROM,
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def report(name: str, title: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Prints the rows as a table and writes them to results/NAME.json: the whole file or nothing.

    A number that is not finite is refused with ResultError, and so is a tree that is no commit. With TRIAL=1
    in the environment nothing is written, and any tree will do.
    """
    table = Table(*rows[0], title=title, box=None)
    for row in rows:
        table.add_row(*(_cell(v) for v in row.values()))
    console.print(table)
    for key, value in more.items():
        console.print(f"{key}: {_cell(value)}")
    keep(RESULTS / f"{name}.json", {"title": title, "machine": machine(), "rows": rows, **more})


def keep(path: Path, found: dict[str, Any]) -> None:
    """Writes a result file, or refuses to, as `report` says. found: strict JSON, with `machine()` as its
    machine."""
    refuse_not_finite(path.name, found)
    if os.environ.get("TRIAL"):
        console.print(f"a trial: {path.name} is not written\n")
        return
    refuse_no_commit(path.name, found["machine"]["commit"])
    write_whole(path, json.dumps(found, indent=1, allow_nan=False) + "\n")
    console.print(f"written to {path}\n")


def refuse_not_finite(where: str, value: Any) -> None:
    """Raises ResultError for a NaN or an infinity; `where` is its place in the file."""
    if isinstance(value, dict):
        for key, item in value.items():
            refuse_not_finite(f"{where}: {key}", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            refuse_not_finite(f"{where}[{i}]", item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ResultError(
            f"{where} is {value}; expected a finite number; where nothing was measured, give None"
        )


def refuse_no_commit(name: str, found: str) -> None:
    """Raises ResultError where what was measured is no commit."""
    if not found:
        raise ResultError(
            f"{name}: what was measured is unknown, as there is no git here; set COMMIT to the commit"
        )
    if found.endswith("-dirty"):
        raise ResultError(
            f"{name}: the tree differs from {found}; expected a commit; commit first, or try with TRIAL=1"
        )


def write_whole(path: Path, text: str) -> None:
    """Writes a file under another name and renames it, so that a reader finds the old file or the new one."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)


def _cell(value: Any) -> str:
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 100
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str(value)
    )


def alternate(
    variants: dict[str, Callable[[], object]], seconds: float = 0.25, rounds: int = 7
) -> dict[str, float]:
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
