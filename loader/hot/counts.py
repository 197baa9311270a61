"""How often rows on a disk or in Redis are asked for: a byte a row, in memory that the processes of a host
share.

    FOLDER/3.counts     of version 3, little-endian:
        offset    bytes
        0         8       the content of the version
        8         8       ids that were counted since all counts were halved last, int64
        16        8       the number of the last hot segment that was made, int64: none is given again
        24        8       1: counts of the version before it were taken over, int64
        4096      R       a byte for each row of its tables on the disk and in Redis, in their order

Bit 7 says that the hot segment has the row (`loader.hot.hot`). The others count uses among a sample of the
ids, STEP for each, so that halving does not forget a single one at once. Processes add without a lock, so
that a few uses are lost.
"""

import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredTable
from tableside.loader.versions.folder import Folder
from tableside.quant.contract import Ids
from tableside.quant.cpu.index_builder import count_rows, place_rows
from tableside.quant.rows.fetched import Note
from tableside.quant.rows.ids import RowMap

HOT, MOST, STEP = 0x80, 0x7F, 8  # the bit of a row in the hot segment; the largest count; what one use adds
_HEAD_BYTES = mmap.PAGESIZE
_SAMPLED_S, _BURST = 210_000, 42_000  # ids that a process counts in a second, and at once after a pause
_AT_ONCE = 1 << 24  # counts that are looked at together

Counts = NDArray[np.uint8]


def counted_tables(version: Segment) -> list[StoredTable]:
    """Returns the tables whose rows are counted: those on a disk, and in Redis, without a place in a file."""
    return [*disk_tables(version), *(t.without_rows() for t in version.header.remote if t.redis is not None)]


def disk_tables(version: Segment) -> list[StoredTable]:
    """Returns the tables whose rows are read from a disk by their numbers. Not those of raw ids that lie
    beside the rows: they would be read there as well."""
    return [
        t
        for t in version.header.tables
        if t.name in version.readers and (t.index is None or t.index.id_at >= 0)
    ]


def counts_name(version: int) -> str:
    return f"{version}.counts"


class RowCounts:
    """The counts of a version's tables, uint8 [rows] each."""

    def __init__(self, version: Segment, mapped: mmap.mmap, inode: int) -> None:
        self._sampled, self._number, self._has_begun = (
            np.frombuffer(mapped, np.int64, 1, at) for at in (8, 16, 24)
        )
        self._inode = inode
        self.tables: dict[str, Counts] = {}
        at = _HEAD_BYTES
        for table in counted_tables(version):
            self.tables[table.name] = np.frombuffer(mapped, np.uint8, table.rows, at)
            at += table.rows
        self._left, self._looked_at = float(_BURST), time.monotonic()

    @classmethod
    def opened(cls, folder: Folder, version: Segment) -> Self | None:
        """Opens the counts of a version; None: there are none, or another version's."""
        try:
            fd = folder.open(counts_name(version.header.version), os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            found = os.fstat(fd)
            is_ours = found.st_size == _size(version) and os.pread(fd, 8, 0) == _identity(version)
            return cls(version, mmap.mmap(fd, _size(version)), found.st_ino) if is_ours else None
        finally:
            os.close(fd)

    @classmethod
    def shared(cls, folder: Folder, version: Segment) -> Self:
        """Opens the counts of a version, new ones if there are none. OSError: memory does not hold them."""
        if (found := cls.opened(folder, version)) is not None:
            return found
        name = counts_name(version.header.version)
        with folder.lock("counts.lock"):
            if (found := cls.opened(folder, version)) is not None:
                return found
            with folder.replacing(name) as partial_name:
                folder.unlink(partial_name)  # of a killed process
                fd = folder.create(partial_name)
                try:
                    os.posix_fallocate(fd, 0, _size(version))  # else writing to them could end a process
                    os.pwrite(fd, _identity(version), 0)
                finally:
                    os.close(fd)
        opened = cls.opened(folder, version)
        assert opened is not None
        return opened

    def counter(
        self, table: str, row_map: RowMap | None, told: Callable[[int, int], object] = lambda ids, hot: None
    ) -> Note:
        """Returns what counts ids of a table, as many as a process counts. told: of ids that were counted,
        and how many of them the hot segment has."""
        return partial(self._count, self.tables[table], row_map, told)

    def _count(
        self,
        counts: Counts,
        row_map: RowMap | None,
        told: Callable[[int, int], object],
        ids: Ids,
        is_due: bool | None = None,
    ) -> bool:
        if is_due is None:
            now = time.monotonic()
            self._left = min(float(_BURST), self._left + _SAMPLED_S * (now - self._looked_at))
            self._looked_at = now
            is_due = self._left >= 0
        if is_due:
            self._left -= ids.size
            known, hot = count_rows(counts, own_rows(row_map, ids), MOST, STEP)
            self._sampled += known
            if known:
                told(known, hot)
        return is_due

    def add(self, table: str, rows: Ids, uses: Counts) -> None:
        """Adds uses [n] of rows [n], each named once."""
        counts = self.tables[table]
        more = np.minimum(counts[rows] & MOST, MOST - (uses & MOST)) + (uses & MOST)
        counts[rows] = counts[rows] & HOT | more

    def mark(self, hot: Mapping[str, Ids]) -> None:
        """Notes which rows the hot segment has, by table."""
        for name, counts in self.tables.items():
            for _, part in _pieces(counts):
                part &= MOST
            counts[hot.get(name, np.empty(0, np.int64))] |= HOT

    @property
    def sampled(self) -> int:
        """Returns how many ids were counted since `age`."""
        return int(self._sampled[0])

    def begin(self) -> bool:
        """Returns whether they are new: nobody called this before."""
        self._has_begun[0], had = 1, int(self._has_begun[0])
        return not had

    def are_at(self, path: Path) -> bool:
        """Returns whether these are the counts that other processes find in a folder."""
        try:
            return os.stat(path).st_ino == self._inode
        except FileNotFoundError:
            return False

    def new_number(self, after: int) -> int:
        """Returns a number for the next hot segment, above `after`. Needs the lock of those that make one."""
        self._number[0] = max(after, int(self._number[0])) + 1
        return int(self._number[0])

    def age(self) -> None:
        """Halves all counts."""
        self._sampled[:] = 0
        for counts in self.tables.values():
            for _, part in _pieces(counts):
                part[:] = part & HOT | (part & MOST) >> 1

    def rows_with(self, table: str, byte: int, most: int) -> Ids:
        """Returns the first rows with this byte, up to `most`, ascending."""
        found = [np.empty(0, np.int64)]
        for start, part in _pieces(self.tables[table]):
            if most <= 0:
                break
            found.append(start + np.flatnonzero(part == byte)[:most])
            most -= found[-1].size
        return np.concatenate(found)

    def uses(self, table: str, start: int, stop: int) -> int:
        """Returns how often rows [start, stop) were asked for, of what is counted."""
        counts = self.tables[table][start:stop]
        return sum(int((part & MOST).sum()) for _, part in _pieces(counts))

    def histogram(self, table: str) -> NDArray[np.int64]:
        """Returns how many rows have each byte, int64 [256]."""
        parts = _pieces(self.tables[table])
        return sum((np.bincount(part, minlength=256) for _, part in parts), np.zeros(256, np.int64))


def own_rows(row_map: RowMap | None, ids: Ids) -> Ids:
    """Returns the row that each id has if it is there, or a number that is no row's. row_map: of a version
    without deltas."""
    if row_map is None:
        return ids
    if row_map.index is None:
        return ids - np.int64(row_map.first)
    return place_rows(row_map, ids)[0]


def _pieces(counts: Counts) -> Iterator[tuple[int, Counts]]:
    """Yields parts of counts that are looked at together, each with its first row."""
    for start in range(0, counts.size, _AT_ONCE):
        yield start, counts[start : start + _AT_ONCE]


def _size(version: Segment) -> int:
    return _HEAD_BYTES + sum(table.rows for table in counted_tables(version))


def _identity(version: Segment) -> bytes:
    return version.content().to_bytes(8, "little")
