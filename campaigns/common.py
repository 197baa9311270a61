"""What every campaign shares: results beside their goals, a folder of its own, a model whose rows say what
they are, a deadline.

A campaign is a module with

    def run(seconds: float, seed: int) -> dict[str, float]

which torments real processes for about `seconds`, in an order that `seed` decides, and returns what it
counted and measured by name. It raises only where the campaign itself cannot run: a wrong answer is a count.
What the figures should be stands in campaigns/goals.py. `standalone(run)` is a module's own command line.
"""

import argparse
import contextlib
import json
import os
import random
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any, Literal
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from tableside.loader.load.load import load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.segment import layout
from tableside.loader.segment.huge_pages import is_on_disk
from tableside.loader.segment.memory import processes_below
from tableside.serving.cli.local import LocalServer
from tableside.serving.client import Client

console = Console(highlight=False, soft_wrap=True, width=150)
Run = Callable[[float, int], Mapping[str, float]]
Verdict = Literal["ok", "MISSED", "short run", ""]


# ---- results ----


@dataclass(frozen=True)
class Goal:
    """What a figure should be. kind: `must` holds however short the run; `count` needs a full one;
    `figure` is a machine's."""

    text: str
    is_met: Callable[[float], bool]
    kind: Literal["must", "count", "figure"]

    def verdict(self, value: float) -> Verdict:
        if self.is_met(value):
            return "ok"
        return "short run" if self.kind == "count" else "MISSED"


def none() -> Goal:
    """Nothing of the kind may happen, ever."""
    return Goal("0", lambda value: value == 0, "must")


def at_least(least: float, kind: Literal["must", "count", "figure"] = "count") -> Goal:
    return Goal(f">= {least:,g}", lambda value: value >= least, kind)


def at_most(most: float, kind: Literal["must", "count", "figure"] = "figure") -> Goal:
    return Goal(f"<= {most:,g}", lambda value: value <= most, kind)


@dataclass(frozen=True)
class Result:
    """What one campaign found. measured: figure -> value; goals: figure -> goal, for those that have one."""

    name: str
    seconds: float
    seed: int
    measured: Mapping[str, float]
    goals: Mapping[str, Goal]

    def rows(self) -> list[tuple[str, float | None, str, Verdict]]:
        """(figure, measured, goal, verdict); a goal whose figure was not measured is missed."""
        found: list[tuple[str, float | None, str, Verdict]] = []
        for figure, value in self.measured.items():
            goal = self.goals.get(figure)
            found.append((figure, value, goal.text if goal else "", goal.verdict(value) if goal else ""))
        return found + [(f, None, g.text, "MISSED") for f, g in self.goals.items() if f not in self.measured]

    def is_broken(self) -> bool:
        """Whether a promise that holds in a run of any length was not kept, or its figure is missing."""
        return any(
            g.kind == "must" and not g.is_met(self.measured.get(f, float("nan")))
            for f, g in self.goals.items()
        )

    def to_json(self) -> dict[str, Any]:
        rows = [
            {"figure": f, "measured": v, "goal": g, "verdict": verdict} for f, v, g, verdict in self.rows()
        ]
        return {"name": self.name, "seconds": round(self.seconds, 1), "seed": self.seed, "rows": rows}


def show(results: list[Result]) -> None:
    """The table: each figure beside its goal."""
    table = Table("campaign", "figure", "measured", "goal", "", box=None)
    for result in results:
        for i, (figure, value, goal, verdict) in enumerate(result.rows()):
            cell = "not measured" if value is None else f"{value:,.3f}".rstrip("0").rstrip(".")
            style = {"MISSED": "red", "short run": "yellow", "ok": "green", "": ""}[verdict]
            name = f"{result.name} ({result.seconds:.0f} s)" if i == 0 else ""
            table.add_row(name, figure, cell, goal, f"[{style}]{verdict}[/]" if style else "")
    console.print(table)


def standalone(run: Run) -> None:
    """A campaign's own command line: its figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(json.dumps({**run(given.seconds, given.seed), "seed": given.seed}, indent=1))


# ---- what campaigns work with ----


def random_of(seed: int, *what: object) -> random.Random:
    """A generator for one part of a campaign, the same for the same seed and names."""
    return random.Random(f"{seed}:" + ":".join(map(str, what)))


_base = Path("/dev/shm")


def publish_on(disk: Path) -> None:
    """Has models published below a folder on a disk from now on. Every table has a file there, as large ones
    have."""
    global _base
    assert is_on_disk(disk), f"{disk} lies in memory"
    _base, layout.LARGE_PAGES = disk, 1


@contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """(a folder of published models, in shared memory or on a disk, a folder for checkpoints), both gone at
    the end."""
    root = _base / f"tableside-campaign-{uuid4().hex[:8]}"
    root.mkdir()
    try:
        with TemporaryDirectory(prefix="tableside-campaign-") as files:
            yield root, Path(files)
    finally:
        rmtree(root, ignore_errors=True)


def until(
    condition: Callable[[], object],
    deadline_s: float = 300.0,
    what: str = "the condition",
    pause_s: float = 0.005,
) -> float:
    """Waits for a condition; seconds that it took. TimeoutError: it is not met at the deadline."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > deadline_s:
            raise TimeoutError(f"{what} was not met within {deadline_s} s")
        time.sleep(pause_s)
    return time.monotonic() - started


def workers_of(supervisor: int, root: Path) -> list[int]:
    """Process ids of a server's workers: those below its supervisor that map something of `root`."""
    return [pid for pid in processes_below(supervisor) if maps(pid, str(root))]


def maps(pid: int, text: str) -> bool:
    """Whether a process maps a file whose path holds `text`; False where it is gone."""
    try:
        return text in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def answered_by(port: int, processes: Collection[int]) -> int | None:
    """Asks the server once, over a new connection; which of `processes` answered. None: another one did,
    or it died meanwhile."""
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(("127.0.0.1", port), timeout=30) as connection,
    ):
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if connection.recv(4096).startswith(b"HTTP/1.1 200"):
            inode = _inode_of(port, connection.getsockname()[1])
            return next((pid for pid in processes if f"socket:[{inode}]" in descriptors(pid)), None)
    return None


def _inode_of(port: int, peer: int) -> str:
    """The inode of the server's end of a loopback connection; "" where that is closed."""
    ends = [f"0100007F:{port:04X}", f"0100007F:{peer:04X}"]
    with open("/proc/net/tcp") as connections:
        return next((fields[9] for fields in map(str.split, connections) if fields[1:3] == ends), "")


def descriptors(pid: int) -> list[str]:
    """What a process has open, as /proc names it; nothing where it is gone."""
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


class SameWorkers:
    """A server's workers, which shall be the same in the end, with no more descriptors. Made once a first
    request has opened what stays open."""

    def __init__(self, server: LocalServer, root: Path) -> None:
        self._server, self._root = server, root
        self._before = workers_of(server.pid, root)
        self._open = len(descriptors(self._before[0]))

    def figures(self) -> dict[str, float]:
        """Internal errors, crashed workers, and descriptors that the first worker has more once connections
        are gone."""
        with Client(self._server.url) as client:
            pattern = r'tableside_errors_total\{[^}]*kind="internal"[^}]*\} ([\d.e+]+)'
            internal = re.findall(pattern, client.metrics())
        after = workers_of(self._server.pid, self._root)
        if after == self._before:
            until(lambda: len(descriptors(after[0])) <= self._open, what="the connections to be gone")
        return {
            "internal errors in the metrics": sum(map(float, internal)),
            "crashed workers": sum(pid not in after for pid in self._before),
            "descriptors leaked": max(0, len(descriptors(after[0])) - self._open) if after else 0,
        }


# ---- a model whose rows say what they are ----

ROWS, DIM = 2000, 8
TABLES = {"user": 1, "item": 2}  # name -> its number, which stands in its rows
FEATURES = {
    "user": {"table": "user", "pooling": "none"},
    "bought": {"table": "item", "pooling": "sum"},
    "liked": {"table": "item", "pooling": "mean", "output": "fp16"},
}


def told(table: int, value: int, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Rows of a table in the version of that value: fp32 [ids, 8], small whole numbers, so that fp32 sums of
    them are exact.

    Columns: the version's value, the id, the table's number, a mix of the three, and these negated.
    """
    mixed = (ids * 7919 + value * 104729 + table * 31) % 1009
    left = np.stack([np.full_like(ids, value), ids, np.full_like(ids, table), mixed], 1).astype(np.float32)
    return np.concatenate([left, -left], 1)


def publish(
    root: Path,
    files: Path,
    value: int,
    name: str = "demo",
    rows: int = ROWS,
    settings: LoadSettings = LoadSettings(),  # noqa: B008
) -> int:
    """Loads a version of that value through a real checkpoint; its number."""
    spec = parse_model(write_checkpoint(files, value, name, rows), files)
    return load(spec, root, settings).version


def write_checkpoint(files: Path, value: int, name: str = "demo", rows: int = ROWS) -> dict[str, Any]:
    """A checkpoint of that value, NAME-VALUE.npz; what model.toml says of it."""
    ids = np.arange(rows)
    np.savez(
        files / f"{name}-{value}.npz",
        user=told(TABLES["user"], value, ids),
        item=told(TABLES["item"], value, ids),
    )
    return {
        "name": name,
        "checkpoint": f"{name}-{value}.npz",
        "tables": {t: {"key": t, "row_format": "fp32"} for t in TABLES},
        "features": FEATURES,
    }


def version_told(user: NDArray[np.float32], ids: NDArray[np.int64]) -> int | None:
    """Which version's rows these are, of the feature `user`; None where they are no version's."""
    if user.shape != (len(ids), DIM):
        return None
    value = int(user[0, 0]) if len(ids) else 0
    return value if np.array_equal(user, told(TABLES["user"], value, ids)) else None
