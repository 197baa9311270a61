"""What each worker of a server does now: numbers that it writes to a small file, and that any worker sums up when it is asked.

A gauge in the files of counts would stay when its worker is killed. So each worker has a file `now_PID` beside them (`Now`, as
doubles), written twice a second and when this worker is asked itself. Only files of processes that run count, and what a process
has of the machine is read from /proc. The supervisor removes the file of a worker that ended.
"""

import logging
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from tableside.serving.shared_counts import REMEDY, reserve

logger = logging.getLogger("tableside")

PREFIX = "now_"
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


_LAYOUT = struct.Struct(f"{len(fields(Now))}d")


@dataclass(frozen=True)
class Seen:
    """A worker that runs. memory_bytes: by kind: private, file (its code), shared (the tables that it has touched)."""

    pid: int
    now: Now
    memory_bytes: dict[str, int]
    open_files: int


class WorkerGauges:
    """The file of this worker in a folder of metrics. Where there is no room for it, the worker is missing from the sums."""

    def __init__(self, folder: Path) -> None:
        self._fd = -1
        path = folder / f"{PREFIX}{os.getpid()}"
        try:
            reserve(path, _LAYOUT.size)
            self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            logger.warning("no room for %s (%s): this worker is missing from the gauges; %s", path, error.strerror, REMEDY)

    def write(self, now: Now) -> None:
        """Replaces what the file says."""
        if self._fd >= 0:
            os.pwrite(self._fd, _LAYOUT.pack(*astuple(now)), 0)

    def close(self) -> None:
        """Lets the file go. It stays until the supervisor removes it, and counts no more once this process has ended."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def forget(folder: Path, pid: int) -> None:
    """Removes the file of a worker that ended. OSError: it cannot be removed."""
    (folder / f"{PREFIX}{pid}").unlink(missing_ok=True)


def workers(folder: Path) -> Sequence[Seen]:
    """The workers that run, by their files."""
    return sorted(_workers(folder), key=lambda seen: seen.pid)


def _workers(folder: Path) -> Iterator[Seen]:
    for file in folder.glob(f"{PREFIX}*"):
        pid = int(file.name.removeprefix(PREFIX))
        try:
            data = file.read_bytes()
            memory = dict(_memory(Path(f"/proc/{pid}/status").read_text()))
            open_files = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue  # it ended
        if len(data) == _LAYOUT.size and memory:  # a process that ended and was not waited for yet has no memory
            yield Seen(pid, Now(*_LAYOUT.unpack(data)), memory, open_files)


def _memory(status: str) -> Iterator[tuple[str, int]]:
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in _MEMORY:
            yield _MEMORY[name], int(value.split()[0]) << 10
