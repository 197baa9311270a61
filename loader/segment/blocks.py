"""Rows of a table's file on a disk, read by their numbers.

The rows begin at a page of the file, and each of their pages is a block with a CRC-32C (`_sums.c`) that
begins with the file's seed. The checksums, a thousandth of the rows, lie behind rows and id index in the same
file, and the version names their own checksum. So most rows cost one read of a page, and a block that
changed, or is another one, is never taken for its rows. A row of a block that this process has checked is
read where the file is mapped, while looks at the page cache, some two a second, find its page there.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.segment import _blocks
from tableside.loader.segment.memory import without_readahead
from tableside.loader.segment.stored import StoredRows
from tableside.quant.contract import Bytes
from tableside.quant.rows.fetched import RowState
from tableside.quant.rows.turns import waiting

logger = logging.getLogger("tableside")

BLOCK_BYTES = 4096
_READERS = 32  # parts of one call that are read at once
_LEAST_ROWS = 8  # that are worth a thread
_DEPTH, _PATIENCE_MS = 32, 50  # blocks that one thread has the disk read; how long it waits for one
_PART_ROWS = 2048  # that another thread asks for and takes, of many
_LONG_S = 1e6  # instead of no deadline
OPENS_S, _HUNG_S = 1.0, 0.9  # see `Breaker`, which opens within a second where requests wait for a tenth
_GRACE_MS = 5  # that a thread gets to end at a deadline, by a coarse clock, with the rows that came
_TOLD_S = 1.0  # between two lines of the log about rows that cannot be read
_BELIEVED_MS = 500  # for which a look at the page cache is believed
_TRUSTED_MS = 1000  # after a look, for which checked blocks of pages that stayed need no check
_LEFT, _BROKEN = 3, 128  # for `_blocks`: a row that was not read yet; and the number of an error

Sums = NDArray[np.uint32]


def block_count(stored: StoredRows) -> int:
    """The blocks of a table."""
    return -(-stored.bytes // BLOCK_BYTES)


def sum_bytes(stored: StoredRows) -> int:
    """Bytes of a table's checksums."""
    return 4 * block_count(stored)


def write_sums(rows: Bytes, start: int, stop: int, seed: int, sums: Sums) -> None:
    """Writes the checksums of the blocks that lie whole in bytes [start, stop) of a table. rows: the table's
    bytes, uint8; sums: of the table."""
    first = -(-start // BLOCK_BYTES)
    end = sums.size if stop == rows.size else stop // BLOCK_BYTES
    if first < end:
        _blocks.sums(rows[first * BLOCK_BYTES : end * BLOCK_BYTES], seed, first, sums[first:end])


def write_sums_between(rows: Bytes, stored: StoredRows, seed: int, sums: Sums) -> None:
    """Writes the checksums of the blocks that have bytes of several chunks, once all are written."""
    ends = np.arange(1, stored.chunks) * (stored.chunk_rows * stored.row_bytes)
    for block in np.unique(ends[ends % BLOCK_BYTES > 0] // BLOCK_BYTES).tolist():
        first = block * BLOCK_BYTES
        write_sums(rows, first, min(first + BLOCK_BYTES, rows.size), seed, sums)


# Where rows came from, for counts: the mapping, copied from the page cache, the disk
IN_PLACE, PAGE_CACHE, DISK = "in_place", "page_cache", "disk"
# Or did not: in time, as the disk refused to read, as they are not what was written
LATE, FAILED, CORRUPT = "late", "failed", "corrupt"


class BlockFile(NamedTuple):
    """A table's file. fd: an open one; at, sums_at: bytes of row 0 and of the first checksum in it; seed: of
    the checksums."""

    fd: int
    at: int
    sums_at: int
    seed: int


class BlockReader:
    """Reads rows of a table: a `quant.rows.fetched.Fetch`. file: closed with this object. mapped: its rows;
    None: they are not mapped. believed_ms, trusted_ms: see `_blocks.c`. name: for the log. `damage`: says
    which rows were found damaged first; "": none. Set later: `timeout_s`, that callers wait who say nothing
    else; `count`, `count_in_place` and `count_wait`, which are told how many rows came from where, how many
    were read in the mapping, and how many seconds a call waited for the disk; `count_sample`, of how many ids
    how many were hot (loader.hot)."""

    def __init__(
        self,
        file: BlockFile,
        stored: StoredRows,
        mapped: Bytes | None = None,
        believed_ms: int = _BELIEVED_MS,
        trusted_ms: int = _TRUSTED_MS,
        name: str = "",
    ) -> None:
        self._file, self._stored = file, stored
        fd = file.fd
        self._mapped, self._name = mapped, name
        checked = np.zeros(block_count(stored) // 8 + 1, np.uint8)
        # To who could not write to a file, the kernel says that all of it is in the page cache
        is_told = mapped is not None and os.geteuid() in (0, os.fstat(fd).st_uid)
        address = mapped.ctypes.data if mapped is not None and is_told else 0
        regions = np.zeros((stored.bytes // _blocks.REGION_BYTES + 2) * _blocks.REGION_SIZE, np.uint8)
        fields = (*file, stored.row_bytes, stored.rows, address, believed_ms, trusted_ms)
        self._where = np.array(fields, np.int64).tobytes(), checked, regions
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # a row's block alone is read
        self._kept: dict[int, Bytes] = {}
        self.damage, self._told_at = "", -_TOLD_S
        self._device = os.fstat(fd).st_dev
        self._breaker, self.timeout_s = _breaker(self._device), OPENS_S
        self.count: Callable[[str, int], object] = lambda where, rows: None
        self.count_in_place: Callable[[int], object] = lambda rows: None
        self.count_wait: Callable[[float], object] = lambda seconds: None
        self.count_sample: Callable[[int, int], object] = lambda ids, hot: None

    def __call__(
        self, rows: NDArray[np.int64], out: Bytes, state: NDArray[np.uint8], deadline: float | None
    ) -> None:
        """What is in the page cache is read at once; the disk is asked for the rest, some blocks at a time.
        Where a block takes long, threads read it and those behind it. Who has a deadline waits for threads
        alone: a disk that hangs holds up whoever asks it for more than its queue has room for."""
        if not (left := self._fetch(rows, out, state)):
            return
        began = time.monotonic()
        # Who waits for less neither says that the disk hangs, nor is the one that looks whether it does
        is_patient = deadline is None or deadline - began >= min(self.timeout_s, OPENS_S) / 2
        if self._breaker.is_open() if is_patient else self._breaker.hangs:
            state[state == _LEFT] = RowState.LATE
            self.count(LATE, left)
            return
        if self._breaker.hangs:  # a disk that reads again answers soon, and others may wait for this call
            soon = began + OPENS_S / 2
            deadline = soon if deadline is None else min(soon, deadline)
        bring = _DEPTH, _PATIENCE_MS, _left_ms(deadline)
        if deadline is None and left < 2 * _PART_ROWS:
            _blocks.bring(*self._where, rows, out, state, *bring)
        else:
            self._in_threads(left // _PART_ROWS, rows, out, state, deadline, *bring)
        if deadline is not None and time.monotonic() >= deadline:
            state[state == _LEFT] = RowState.LATE
        elif (state == _LEFT).any():
            self._in_threads(left // _LEAST_ROWS, rows, out, state, deadline, 0, 0, 0)
        late, corrupt = (int(np.count_nonzero(state == s)) for s in (RowState.LATE, RowState.CORRUPT))
        failed = int(np.count_nonzero(state >= _BROKEN))
        self.count_wait(time.monotonic() - began)
        counts = {DISK: left - late - corrupt - failed, LATE: late, FAILED: failed, CORRUPT: corrupt}
        for source, number in counts.items():
            self.count(source, number)
        if failed or corrupt:
            self._tell(rows, state)
            state[state >= _BROKEN] = RowState.LATE
        # A disk that refuses answers, too
        if change := self._breaker.told(began, left - late, late if is_patient else 0):
            logger.warning("%s: %s", self._name, change)

    def _tell(self, rows: NDArray[np.int64], state: NDArray[np.uint8]) -> None:
        """Says that rows are damaged, or cannot be read."""
        corrupt = state == RowState.CORRUPT
        at = int((corrupt if corrupt.any() else state >= _BROKEN).argmax())
        start, size = int(rows[at]) * self._stored.row_bytes, self._stored.row_bytes
        first, last = start // BLOCK_BYTES, (start + size - 1) // BLOCK_BYTES
        said = f"{self._name}: row {rows[at]} in blocks {first} to {last} "
        if corrupt[at]:
            said += "is not what was written, or the file was cut; it was read twice"
            said = self.damage = self.damage or said
        else:
            said += f"cannot be read: {os.strerror(int(state[at]) - _BROKEN)}"
        if time.monotonic() - self._told_at >= _TOLD_S:
            self._told_at = time.monotonic()
            logger.error("%s", said)

    def sums(self) -> Bytes:
        """Reads the checksums. Bytes behind the file's end are any."""
        out, at = np.empty(sum_bytes(self._stored), np.uint8), 0
        while at < out.size and (got := os.preadv(self._file.fd, [out[at:].data], self._file.sums_at + at)):
            at += got
        return out

    def without_readahead(self) -> None:
        """Has rows that are read where they are mapped bring their pages alone. Readahead would make who
        reads a page that is there wait for a disk that hangs."""
        if self._mapped is not None:
            without_readahead(self._mapped)

    def _fetch(self, rows: NDArray[np.int64], out: Bytes, state: NDArray[np.uint8]) -> int:
        """Reads what is in the page cache; returns how many rows are left."""
        state[:] = _LEFT
        left = _blocks.fetch(*self._where, rows, out, state, True)
        self.count(PAGE_CACHE, rows.size - left)
        return left

    def ready(
        self, rows: NDArray[np.int64], out: Bytes, state: NDArray[np.uint8], deadline: float | None
    ) -> None:
        """Reads what is in the page cache; the other rows are LATE."""
        if self._fetch(rows, out, state):
            state[state == _LEFT] = RowState.LATE

    def away(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the places in `rows` of those that may not be read in the mapping now. Rows that the table
        has not do not count."""
        out = np.empty(rows.size, np.int64)
        return out[: _blocks.away(*self._where, rows, out)]

    def ask(self, rows: NDArray[np.int64]) -> None:
        """Has the disk bring the first blocks of some rows, ascending, without a wait."""
        if not self._breaker.hangs:
            _blocks.ask(self, self._device, self._where[0], rows, _DEPTH)

    def kept(self, row: int, wait_s: float = 0.0) -> Bytes | None:
        """Returns a packed row, which stays in memory once it came, uint8 [row_bytes]; None: it did not come
        within wait_s, or is damaged."""
        if row not in self._kept:
            out, state = np.empty((1, self._stored.row_bytes), np.uint8), np.zeros(1, np.uint8)
            self(np.array([row]), out, state, time.monotonic() + wait_s)
            if state[0]:
                return None
            self._kept[row] = out[0]
        return self._kept[row]

    def _in_threads(
        self,
        parts: int,
        rows: NDArray[np.int64],
        out: Bytes,
        state: NDArray[np.uint8],
        deadline: float | None,
        *limits: int,
    ) -> None:
        """Reads the rows that are left, some parts at once. Rows of a part that does not end in time are
        LATE: a thread goes on with it when the disk lets it."""
        wait_ms = -1 if deadline is None else _left_ms(deadline) + _GRACE_MS
        where = *self._where, rows, out, state
        with waiting():
            _blocks.in_threads(self, self._device, max(1, min(_READERS, parts)), wait_ms, *where, *limits)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):  # of a file system that is gone
            os.close(self._file.fd)


class Breaker:
    """Says that what gives rows hangs: requests waited for them for _HUNG_S, and none came. Then nobody
    waits, but for one request in OPENS_S, until a row comes. source: who gives them, for people. Any thread
    may call."""

    def __init__(self, now: Callable[[], float] = time.monotonic, source: str = "the disk") -> None:
        self._source, self._now, self._lock = source, now, threading.Lock()
        self._since = 0.0  # when the wait began in which no row came yet
        self._late_at = 0.0  # when a request last waited too long
        self._asks_at = 0.0  # when the next one waits; 0: all do

    @property
    def hangs(self) -> bool:
        """Whether it is open, for who does not look whether the disk reads again."""
        return self._asks_at > 0

    def is_open(self) -> bool:
        """Whether a request shall not wait for the disk. False while it hangs: this one is to look."""
        if not self._asks_at:
            return False
        with self._lock:
            if not self._asks_at:
                return False
            if self._now() < self._asks_at:
                return True
            self._asks_at = self._now() + OPENS_S
            return False

    def told(self, began: float, came: int, late: int) -> str:
        """Takes note of the rows that a request waited for, since `began`; returns what it means, if that
        changed."""
        now = self._now()
        with self._lock:
            if came:
                was_open, self._since, self._asks_at = self._asks_at, 0.0, 0.0
                return f"rows come from {self._source} again" if was_open else ""
            if not late:
                return ""
            if not self._since or now - self._late_at > OPENS_S:
                self._since = began
            self._late_at = now
            if self._asks_at or now - self._since < _HUNG_S:
                self._asks_at = self._asks_at and now + OPENS_S  # after a look, not after it began
                return ""
            self._asks_at = now + OPENS_S
            return (
                f"no row came from {self._source} for {now - self._since:.1f} s; requests do not wait for it"
            )


def _left_ms(deadline: float | None) -> int:
    return int(1000 * (_LONG_S if deadline is None else max(0.0, deadline - time.monotonic())))


@cache
def _breaker(device: int) -> Breaker:
    """That of a disk, which all of its files share."""
    return Breaker()
