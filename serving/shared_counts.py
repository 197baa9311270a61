"""How a worker counts: prometheus_client's memory-mapped files, with every byte reserved before it is written.

Shared memory that is full kills who writes to it (SIGBUS), so a file grows by `posix_fallocate`, which fails instead. A value
that finds no room is missing from /metrics, and requests are answered. `count_in_reserved_files` puts these files in the place
of prometheus_client's own: it assigns two of that library's module globals, and nothing else of ours does.
"""

import logging
import os
from pathlib import Path
from typing import Any

from prometheus_client import values
from prometheus_client.mmap_dict import MmapedDict

logger = logging.getLogger("tableside")

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
NOWHERE = "nowhere"  # the entry that all values without room are written to
REMEDY = "free shared memory (tableside gc), then have the workers replaced (SIGHUP to the server)"
_FIRST_BYTES = 1 << 16


class SharedCounts(MmapedDict):
    """prometheus_client's file of counts, with reserved bytes. Not thread-safe: callers hold that library's lock."""

    def __init__(self, filename: str) -> None:
        self._has_refused = False
        try:
            reserve(filename, _FIRST_BYTES)
            super().__init__(filename)  # type: ignore[no-untyped-call]
        except OSError as error:
            logger.error("no room for metrics in %s (%s): what it would hold is left out; %s", filename, error.strerror, REMEDY)
            own = os.memfd_create("tableside-metrics", os.MFD_CLOEXEC)
            super().__init__(f"/proc/self/fd/{own}")  # type: ignore[no-untyped-call]
            os.close(own)
        if NOWHERE not in self._positions:
            super()._init_value(NOWHERE)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Lets the file go. Its mapping goes with the last tally that writes to it."""
        if self._f:
            self._f.close()
            self._f, self._m = None, None  # type: ignore[assignment]

    def read_value(self, key: str) -> tuple[float, float]:
        found: tuple[float, float] = super().read_value(key)  # type: ignore[no-untyped-call]
        return (0.0, 0.0) if self._positions[key] == self._positions[NOWHERE] else found

    def _init_value(self, key: str) -> None:
        """Adds a value. One that finds no room is written to an entry that nobody reads."""
        if self._used + entry_bytes(key) > self._capacity:
            try:
                os.posix_fallocate(self._f.fileno(), 0, 2 * self._capacity)
            except OSError as error:
                if not self._has_refused:
                    logger.error(
                        "no room for more metrics in %s (%s): new ones are left out; %s", self._fname, error.strerror, REMEDY
                    )
                self._has_refused = True
                self._positions[key] = self._positions[NOWHERE]
                return
        super()._init_value(key)  # type: ignore[no-untyped-call]


class Tally:
    """One count or sum in `SharedCounts`, added to in place. Belongs to one thread.

    prometheus_client takes a lock, looks for a fork and packs two doubles for each count; a lookup makes twelve. A value that has
    a tally is added to by tallies alone: that library remembers what it wrote last.
    """

    __slots__ = ("_at", "_value", "_values")

    def __init__(self, value: Any) -> None:
        """value: of prometheus_client, a counter's or a histogram's."""
        file = getattr(value, "_file", None)
        self._value = value
        self._values: memoryview[float] | None = None
        self._at = 0
        if isinstance(file, SharedCounts):
            # The view keeps its mapping of the file, also where the file grows and is mapped again.
            self._values = memoryview(file._m).cast("d")
            self._at = file._positions[value._key] // 8

    def add(self, amount: float) -> None:
        """Adds to the value."""
        if self._values is None:
            self._value.inc(amount)  # no files: a process of its own, as in tests
        else:
            self._values[self._at] += amount


def count_in_reserved_files() -> None:
    """Has prometheus_client count in `SharedCounts`. To be called before the first metric gets labels.

    That library asks for the process's number at every count, by a system call, to see whether the process was forked. Here a
    fork says so itself.
    """
    values.MmapedDict = SharedCounts  # type: ignore[attr-defined, assignment]
    if VARIABLE not in os.environ:
        return
    process = {"id": os.getpid()}
    os.register_at_fork(after_in_child=lambda: process.update(id=os.getpid()))
    values.ValueClass = values.MultiProcessValue(lambda: process["id"])  # type: ignore[no-untyped-call]


def reserve(filename: str | Path, size: int) -> None:
    """Makes a file of at least `size` bytes, all reserved, or enlarges it. OSError: there is no room, and no file is made."""
    with open(filename, "ab") as file:
        existing = os.fstat(file.fileno()).st_size
        try:
            os.posix_fallocate(file.fileno(), 0, max(size, existing))
        except OSError:
            if not existing:
                os.unlink(filename)
            raise


def entry_bytes(key: str) -> int:
    """An upper bound of what an entry takes: length, key, padding, two doubles."""
    return 4 + len(key.encode()) + 8 + 16
