"""What each worker of a server does now: numbers at the beginning of its metrics file.

They are written twice a second, and when this worker is asked itself. Any worker sums them up when it is
asked, over the workers that run. What a process has of the machine is read from /proc.
"""

import os
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from tableside.serving.metrics import files as metrics_files

_MEMORY = {"RssAnon": "private", "RssFile": "file", "RssShmem": "shared"}


@dataclass(frozen=True)
class Now:
    """What a worker does at one moment. is_ready: 1 or 0. held_bytes: of bodies and responses."""

    is_ready: float
    in_flight_requests: float
    waiting_requests: float
    open_connections: float
    held_bytes: float
    max_connections: float


@dataclass(frozen=True)
class WorkerNow:
    """A worker that runs. memory_bytes: by kind: private, file (its code), shared (the tables that it has
    touched)."""

    now: Now
    memory_bytes: dict[str, int]
    open_files: int


def tell(now: Now) -> None:
    """Replaces what this worker is said to do."""
    metrics_files.set_head((1, os.getpid(), *astuple(now)))


def workers(folder: Path) -> Iterator[WorkerNow]:
    """The workers that run."""
    for is_worker, pid, *now in metrics_files.heads(folder):
        if is_worker:
            process = Path(f"/proc/{pid:.0f}")
            try:
                memory = dict(_memory((process / "status").read_text()))
                yield WorkerNow(Now(*now), memory, len(os.listdir(process / "fd")))
            except OSError:
                continue  # it ended


def _memory(status: str) -> Iterator[tuple[str, int]]:
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in _MEMORY:
            yield _MEMORY[name], int(value.split()[0]) << 10
