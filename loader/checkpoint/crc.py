"""Checks CRC-32 of archive records while any threads read their rows, in any order.

A piece P adds shift(crc(P), bytes after P) to the record's CRC; the terms are joined by exclusive or:

    crc(P1 P2 ... Pn) = shift(crc(P1), |P2 ... Pn|) ^ ... ^ shift(crc(Pn), 0)
    shift(c, n) = crc32_combine(c, 0, n)

So each record needs 4 bytes of state. Bytes that no table reads (a .npy header, other views of a storage)
are read at the end if they are few; else the record is not verified.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock

from isal import isal_zlib

from tableside.loader.checkpoint.archive import ArchiveRecord
from tableside.loader.checkpoint.rows import RowShard, ShardedRows
from tableside.loader.errors import CheckpointError

_REST_BYTES, _REST_FRACTION = 8 << 20, 1 / 32
_PIECE_BYTES = 1 << 20
Fill = Callable[[Path, memoryview, int], None]


class _Sum:
    """One record's CRC so far. readers: (table, shard) that count, each byte once; gaps: the bytes between
    them."""

    def __init__(self, path: Path, record: ArchiveRecord) -> None:
        self.path, self.record = path, record
        self.shards: list[tuple[int, int, str, str, RowShard]] = []  # (begin, end, table, key, shard)
        self.crc = 0

    def plan(self) -> tuple[set[tuple[str, RowShard]], list[tuple[int, int]]]:
        """Returns the readers that count and the gaps between them, some empty; skips shards that overlap
        earlier ones."""
        at, readers, gaps = self.record.offset, set(), []
        for begin, end, table, _, shard in sorted(self.shards, key=lambda s: s[:3]):
            if begin >= at:
                readers.add((table, shard))
                gaps.append((at, begin))
                at = end
        return readers, [*gaps, (at, self.record.offset + self.record.bytes)]

    def add(self, offset: int, data: memoryview) -> int:
        """Adds a piece to the record's CRC."""
        after = self.record.offset + self.record.bytes - offset - len(data)
        return int(isal_zlib.crc32_combine(isal_zlib.crc32(data), 0, after))


class Crc32Check:
    """The CRC-32 of the records that a load's tables lie in. `take` while rows are read, then `finish`."""

    def __init__(self, matrices: Mapping[str, ShardedRows]) -> None:
        """matrices: table -> its matrix or ids, every row of which will be read once."""
        self._lock = Lock()
        self._sums = self._sums_of(matrices)
        self._readers: dict[tuple[str, RowShard], _Sum] = {}
        self._gaps: list[tuple[_Sum, int, int]] = []
        self.unverified: dict[str, str] = {}  # table -> why
        for table, matrix in matrices.items():
            if any(s.record is None for s in matrix.shards if s.constant is None):
                self.unverified[table] = "its file carries no checksums"
            elif any(s.record.crc is None for s in matrix.shards if s.record):
                self.unverified[table] = "its archive was saved without CRC-32"
        for found in self._sums:
            self._plan(found)

    @staticmethod
    def _sums_of(matrices: Mapping[str, ShardedRows]) -> "list[_Sum]":
        sums: dict[tuple[Path, int], _Sum] = {}
        for table, matrix in matrices.items():
            for shard in matrix.shards:
                if (record := shard.record) is not None and record.crc is not None:
                    found = sums.setdefault((shard.path, record.offset), _Sum(shard.path, record))
                    found.shards.append((*matrix.span(shard), table, matrix.key, shard))
        return list(sums.values())

    def _plan(self, found: _Sum) -> None:
        readers, gaps = found.plan()
        rest = sum(end - begin for begin, end in gaps)
        if rest > max(_REST_BYTES, _REST_FRACTION * (found.record.bytes - rest)):
            for _, _, table, _, _ in found.shards:
                self.unverified[table] = "it is a part of a larger storage"
            return
        self._readers |= dict.fromkeys(readers, found)
        self._gaps += [(found, begin, end) for begin, end in gaps]

    def take(self, table: str, shard: RowShard, offset: int, data: memoryview) -> None:
        """Counts a piece of a shard that was read; any thread."""
        if (found := self._readers.get((table, shard))) is not None:
            part = found.add(offset, data)
            with self._lock:
                found.crc ^= part

    def finish(self, fill: Fill) -> None:
        """Reads the gaps and compares; CheckpointError names file, tensors, rows. fill: reads a piece of a
        file."""
        for found, begin, end in self._gaps:
            for offset in range(begin, end, _PIECE_BYTES):
                piece = memoryview(bytearray(min(_PIECE_BYTES, end - offset)))
                fill(found.path, piece, offset)
                found.crc ^= found.add(offset, piece)
        for found in set(self._readers.values()):
            if found.crc != found.record.crc:
                raise CheckpointError(
                    f"{found.path}: {_rows(s[3:] for s in found.shards)}: the CRC-32 is wrong, so bytes "
                    "changed after they were written; take another copy of the checkpoint"
                )


def _rows(shards: Iterable[tuple[str, RowShard]]) -> str:
    named = [f"{key!r} rows [{s.row}, {s.row + s.rows})" for key, s in shards]
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
