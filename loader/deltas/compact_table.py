"""A table of a compaction: the rows that it has after the changes, and how they are written."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, starmap
from typing import TYPE_CHECKING

import numpy as np

from tableside.loader.deltas.expiry import Expiry, LivingRows, expiry_of
from tableside.loader.hot.counts import MOST, Counts
from tableside.loader.load.raw_ids import IndexedRows, reserve_records
from tableside.loader.segment.delta_writer import DeltaEntries
from tableside.loader.segment.stored import StoredTable, plan_index, times_of
from tableside.loader.segment.writer import SegmentWriter
from tableside.quant import Table
from tableside.quant.contract import Bytes, Ids
from tableside.quant.cpu.index_builder import RECORD_BYTES, IndexBuilder, find_rows
from tableside.quant.rows.ids import IdIndex, set_bits

if TYPE_CHECKING:
    from tableside.loader.deltas.compact import Compaction

_BLOCK_ROWS = 1 << 16


class CompactTable:
    """One table: what it has after the changes, and how it is written. rows, ids: as the header has them."""

    def __init__(self, work: "Compaction", stored: StoredTable) -> None:
        self.work, self.before = work, stored
        self.table: Table = work.base.tables[stored.name]
        self.entries = work.entries.get(stored.name)
        self.rows, self.ids = stored.rows, stored.ids
        self.index: IdIndex | None = None
        self.expiry = Expiry()
        self._uses: Counts | None = None
        row_map = self.table.row_map
        if row_map is not None and row_map.index is not None:
            self._old = row_map.index
            self._times = times_of(stored, work.base.mapping.bytes)
            entries = _no_entries(self.table) if self.entries is None else self.entries
            self._gone = np.sort(entries.ids)  # from the rows of before
            self._given = entries.only(~entries.deleted)
            self._drop()
            if self.entries is not None or self.expiry.dropped:
                self._plan(row_map.index)

    @property
    def is_changed(self) -> bool:
        """Returns whether rows change. Deleted row numbers keep theirs; a delta over the version hides it."""
        is_written = self.entries is not None and not self.entries.deleted.all()
        return self.index is not None or is_written

    @property
    def stored(self) -> StoredTable:
        """Returns the table for the header; an unchanged one keeps its chunks, so that its file can be
        linked."""
        chunk_rows = 1 if self.is_changed else self.before.chunk_rows
        return replace(self.before, rows=self.rows, ids=self.ids, chunk_rows=chunk_rows)

    def _drop(self) -> None:
        """Decides which ids are dropped, and drops changed ones."""
        if self._times is None:
            return
        assert self.ids is not None and self._given.times is not None
        counts = self.work.counts
        if counts is not None and self.before.name in counts.tables:
            self._uses = counts.tables[self.before.name] & np.uint8(MOST)  # a copy: servers go on to count
        # Changed rows have no counts yet: they go last
        given = LivingRows(self._given.ids, self._given.times, 0 if self._uses is None else MOST + 1)
        self.expiry = expiry_of(
            self.ids,
            self.work.now,
            lambda: chain(starmap(self._living, self._kept()), (given,)),
            self._scratch,
        )
        self._given = self._given.only(self.expiry.keeps(given))

    def _living(self, ids: Ids, rows: Ids) -> LivingRows:
        assert self._times is not None
        return LivingRows(ids, self._times[rows], 0 if self._uses is None else self._uses[rows])

    def _scratch(self, count: int) -> Ids:
        """Returns int64 [count] in shared memory."""
        scratch = partial(self.work.model.create_scratch, self.work.version)
        records = reserve_records(-(-count // 2) * RECORD_BYTES, scratch, self.work.folder.path)
        return records.reshape(-1)[:count]

    def _plan(self, old: IdIndex) -> None:
        """Builds the index of the table's present ids."""
        assert self.ids is not None and self.ids.index is not None
        builder = IndexBuilder(old.buckets, old.bucket_ids, self.work.settings.threads)
        inserted = self._given.ids
        backfilled = 0
        for ids, rows in self._kept():
            builder.count(ids)
            if self.ids.backfilled:
                assert self.table.row_map is not None
                backfilled += int(self.table.row_map.is_backfilled(rows).sum())
        builder.count(inserted)
        records = self._scratch(2 * builder.begin()).reshape(-1, 2)
        for ids, rows in self._kept():
            builder.put(ids, rows, records)
        builder.put(inserted, np.arange(inserted.size) + old.slots, records)
        builder.distinct(records, "error")
        first, owned = old.first_bucket, len(old.directory) - 1
        self.index = builder.build(records).part(first, first + owned)
        shape = (self.table.row_format, self.table.dim, self.index.slots)
        buckets = old.buckets, old.bucket_ids, first, owned
        has_times = self._times is not None
        stored = plan_index(*shape, *buckets, has_backfilled=backfilled > 0, has_times=has_times)
        self.rows = self.index.slots + 1
        default = None if self.ids.default_row is None else self.index.slots
        self.ids = replace(
            self.ids, count=builder.ids, default_row=default, backfilled=backfilled, index=stored,
            expired=self.ids.expired + self.expiry.expired, evicted=self.ids.evicted + self.expiry.evicted,
        )  # fmt: skip

    def _kept(self) -> Iterator[tuple[Ids, Ids]]:
        """Yields (ids, rows) of unchanged rows that stay, block by block."""
        for start in range(0, self._old.slots, _BLOCK_ROWS):
            rows = np.arange(start, min(start + _BLOCK_ROWS, self._old.slots), dtype=np.int64)
            ids = np.ascontiguousarray(self._old.ids[rows[0] : rows[-1] + 1])
            own = find_rows(self._old, ids) == rows
            if self._gone.size:
                at = np.searchsorted(self._gone, ids)
                own &= self._gone[np.minimum(at, self._gone.size - 1)] != ids
            ids, rows = ids[own], rows[own]
            if self.expiry.dropped:
                stays = self.expiry.keeps(self._living(ids, rows))
                ids, rows = ids[stays], rows[stays]
            yield ids, rows

    def write(self, writer: SegmentWriter, stored: StoredTable) -> None:
        """Writes the rows, and the index where there is one."""
        target = writer.rows(stored, 0, stored.rows)
        if self.index is None:
            for start in range(0, stored.rows, _BLOCK_ROWS):
                end = min(start + _BLOCK_ROWS, stored.rows)
                target[start:end] = self.table.packed[start:end]
                self.work.done(end - start)
            self._copy_index(writer, stored)
            if self.entries is not None:
                self._overwrite(target)
            return
        self._write_indexed(writer, stored, target)

    def _overwrite(self, target: Bytes) -> None:
        assert self.entries is not None
        given = self.entries.only(~self.entries.deleted)
        first = 0 if self.table.row_map is None else self.table.row_map.first
        target[given.ids - first] = given.packed[given.rows]

    def _copy_index(self, writer: SegmentWriter, stored: StoredTable) -> None:
        old, new = self.before.index, stored.index
        if old is None:
            return
        assert new is not None
        data = self.work.base.mapping.bytes[old.offset : old.offset + old.bytes]
        writer.rows(new, 0, new.rows).reshape(-1)[:] = data

    def _write_indexed(self, writer: SegmentWriter, stored: StoredTable, target: Bytes) -> None:
        assert self.index is not None and self.table.row_map is not None
        assert stored.ids is not None and stored.index is not None
        data = writer.rows(stored.index, 0, stored.index.rows).reshape(-1)
        written = IndexedRows(stored.ids, self.index, data, target)
        given = self._given
        for ids, rows in self._kept():
            to = written.put(ids, self.table.packed.take(rows, 0))
            if stored.ids.backfilled:
                set_bits(written.bits, to[self.table.row_map.is_backfilled(rows)])
            if self._times is not None:
                written.times[to] = self._times[rows]
            self.work.done(ids.size)
        to = written.put(given.ids, given.packed.take(given.rows, 0))
        if given.times is not None:
            written.times[to] = given.times
        written.finish()
        target[-1] = self.table.packed[-1]
        self.work.done(given.ids.size)


def _no_entries(table: Table) -> DeltaEntries:
    """Returns no changes of a table."""
    none = np.empty(0, np.int64)
    packed = np.empty((0, table.row_bytes), np.uint8)
    return DeltaEntries(none, packed, none, np.empty(0, np.bool_), times=np.empty(0, np.uint32))
