"""The files in which a server's processes count: one folder a server, one file a process, an array of
doubles.

    byte 0            the worker's gauges, in 8 doubles (`serving.metrics.counters`)
    byte 64           counts: one or several doubles a name, in the names' order
    byte NAMES_AT     a line a name, as JSON: [name, how many doubles, label, ...]

The empty file `started` is as old as the server. A process maps its file and adds in place. Writing to full
shared memory kills (SIGBUS), so `posix_fallocate` reserves doubles before their name is written; counts
without room stay in the process and are missing from /metrics. A process locks its file while it lives, and
takes over an unlocked one before it makes another: so counts of ended processes stay, and the sum over all
files is exact. A name cut short by a kill has no end of line and no counts.
"""

import contextlib
import errno
import fcntl
import functools
import itertools
import json
import logging
import mmap
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from tableside.loader.files import take_lock
from tableside.loader.segment.huge_pages import huge_page_bytes

logger = logging.getLogger("tableside")

VARIABLE = "TABLESIDE_METRICS"  # of the environment: the folder of this server
NAMES_AT = 1 << 24
_HEAD = struct.Struct("8d")
_STEP_BYTES = 1 << 16  # that are reserved at once
_PREFIX = "counts_"
_STARTED = "started"
_REMEDY = "free shared memory (tableside gc), then have the workers replaced (SIGHUP to the server)"
_lock = threading.Lock()


# ---- the folder ----


@contextlib.contextmanager
def metrics_folder(root: Path) -> Iterator[None]:
    """Makes the folder for the workers' counts in `root`; beside it if it is another user's; in /dev/shm if
    it is on a hugetlbfs, whose smallest file is a huge page. Removes unlocked folders of killed servers.
    Without a folder the server runs without counts."""
    if not os.access(root, os.W_OK):
        root = root.parent
    if root.is_dir() and huge_page_bytes(root):
        root = Path("/dev/shm")
    for stale in root.glob(".metrics-*"):
        _remove_if_free(stale)
    lock = -1
    folder = root / ".metrics-none"  # is not there: no file can be made in it
    try:
        folder, lock = _new_folder(root)
    except OSError as error:
        logger.error(
            "no folder for metrics in %s (%s): served without counters and histograms; free shared memory "
            "(tableside gc), then start the server again",
            root,
            error.strerror,
        )
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if lock >= 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _new_folder(root: Path) -> tuple[Path, int]:
    """A new folder, and the lock on it: on the folder itself, so that it takes no file."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=".metrics-", dir=root))
        with contextlib.suppress(FileNotFoundError):  # another server that starts may hold it for a stale one
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                (folder / _STARTED).touch()
                return folder, lock
            os.close(lock)


def _remove_if_free(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    if take_lock(lock):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        logger.debug("%s belongs to a server that runs", folder)
    os.close(lock)


# ---- writing: each process in its file ----


def doubles(name: str, labels: Sequence[str], count: int) -> "memoryview[float]":
    """The `count` doubles of a name with these labels, to be added to in place. Any thread may call."""
    with _lock:
        file = _own_file(os.environ.get(VARIABLE))
        line = json.dumps([name, count, *labels]).encode() + b"\n"
        found = None if file is None else file.place(line, count)
    return found if found is not None else memoryview(bytearray(8 * count)).cast("d")


def set_head(values: Sequence[float]) -> None:
    """Replaces the 8 doubles at the beginning of this process's file."""
    with _lock:
        file = _own_file(os.environ.get(VARIABLE))
    if file is not None:
        file.set_head(values)


@functools.cache
def _own_file(folder: str | None) -> "CountsFile | None":
    """None: no server started this process, or there is no room."""
    try:
        return None if folder is None else CountsFile(Path(folder))
    except OSError as error:
        message = "no room for metrics in %s (%s): this process's are left out; %s"
        logger.error(message, folder, error.strerror, _REMEDY)
        return None


class CountsFile:
    """A file of counts that this process holds until it ends. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """OSError: there is no room."""
        self._folder, self._fd = folder, _taken(folder)
        self._places = _places(self._fd)
        self._used = 8 * max((p.stop for p in self._places.values()), default=_HEAD.size // 8)
        self._names_end = NAMES_AT + sum(map(len, self._places))
        self._reserved = 0
        try:
            os.ftruncate(self._fd, self._names_end)
            self._reserve(self._used)
            self._map = mmap.mmap(self._fd, NAMES_AT)
        except OSError:
            os.close(self._fd)
            raise
        self._doubles = memoryview(self._map).cast("d")
        self.set_head([0] * 8)

    def set_head(self, values: Sequence[float]) -> None:
        _HEAD.pack_into(self._map, 0, *values)

    def place(self, line: bytes, count: int) -> "memoryview[float] | None":
        """The `count` doubles of a name. None: there is no room."""
        if line not in self._places and not self._add(line, count):
            return None
        return self._doubles[self._places[line]]

    def _add(self, line: bytes, count: int) -> bool:
        end = self._used + 8 * count
        try:
            self._reserve(end)
            if os.pwrite(self._fd, line, self._names_end) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._fd, self._names_end)
            message = "no room for more metrics in %s (%s): new ones are left out; %s"
            _say_once(message, self._folder, error.strerror, _REMEDY)
            return False
        self._places[line] = slice(self._used // 8, end // 8)
        self._used, self._names_end = end, self._names_end + len(line)
        return True

    def _reserve(self, end: int) -> None:
        """Has all bytes up to `end` in memory. OSError: there is no room."""
        if end > NAMES_AT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if end > self._reserved:
            wanted = -(-end // _STEP_BYTES) * _STEP_BYTES
            os.posix_fallocate(self._fd, 0, wanted)
            self._reserved = wanted


def _taken(folder: Path) -> int:
    """A descriptor of the first file that no process holds, locked."""
    for number in itertools.count():
        fd = os.open(folder / f"{_PREFIX}{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if take_lock(fd):
            break
        os.close(fd)
    return fd


# ---- reading: in whichever worker is asked ----

Sums = dict[str, dict[tuple[str, ...], list[float]]]


def sums(folder: Path) -> Sums:
    """Returns name -> labels -> sums over all processes, ended ones too. Skips damaged files."""
    found: Sums = {}
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            counts = list(_counts(path))
        except (ValueError, TypeError) as error:
            _say_once("metrics file %s is damaged and left out: %s", path, repr(error))
            continue
        for name, labels, values in counts:
            of_name = found.setdefault(name, {})
            before = of_name.get(labels)
            of_name[labels] = (
                values if before is None else [a + b for a, b in zip(before, values, strict=True)]
            )
    return found


def started_at(folder: Path) -> float | None:
    """Returns when the server was started, in seconds since 1970; None: it has no room for metrics."""
    try:
        return (folder / _STARTED).stat().st_mtime
    except FileNotFoundError:
        return None


def heads(folder: Path) -> Iterator[tuple[float, ...]]:
    """Yields the first 8 doubles of each file of a living process."""
    for path in folder.glob(f"{_PREFIX}*"):
        with path.open("rb") as file:
            head = os.pread(file.fileno(), _HEAD.size, 0)
            if len(head) == _HEAD.size and not take_lock(file.fileno(), is_shared=True):
                yield _HEAD.unpack(head)


def _counts(path: Path) -> Iterator[tuple[str, tuple[str, ...], list[float]]]:
    with path.open("rb") as file:
        places = _places(file.fileno())  # before the doubles, which were there before their names
        data = os.pread(file.fileno(), 8 * max((p.stop for p in places.values()), default=0), 0)
    values: memoryview[float] = memoryview(data).cast("d")
    for line, place in places.items():
        name, _, labels = _parsed(line)
        yield name, labels, list(values[place])


def _places(fd: int) -> dict[bytes, slice]:
    """A file's names, each as its line, and which of the doubles are theirs."""
    found, at = {}, _HEAD.size // 8
    for line in os.pread(fd, max(0, os.fstat(fd).st_size - NAMES_AT), NAMES_AT).splitlines(keepends=True):
        if line.endswith(b"\n"):
            count = _parsed(line)[1]
            found[line] = slice(at, at + count)
            at += count
    return found


@functools.cache
def _parsed(line: bytes) -> tuple[str, int, tuple[str, ...]]:
    """Name, doubles and labels. ValueError, TypeError: it is no line of ours."""
    name, count, *labels = json.loads(line)
    return name, int(count), tuple(labels)


@functools.cache
def _say_once(message: str, *arguments: object) -> None:
    logger.error(message, *arguments)
