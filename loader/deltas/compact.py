"""Compaction: a version and its delta become the next version, while changes go on.

1. Two live deltas are merged into one, as a state of its own.
2. A new segment is written: files of unchanged large tables are linked, other unchanged rows copied packed,
   changed ones come from the delta, and tables of raw ids get a new index. Meanwhile applies leave this
   delta in place and write newer ones over it.
3. The newer delta is written again over the new version, and the record flips to both. Ids deleted from a
   table of row numbers stay deleted by this delta.

After an error or kill before the flip the live state is unchanged.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

import numpy as np

from tableside.loader.deltas.apply import COMPACT_LOCK, DEFAULTS, ApplySettings, merge_live
from tableside.loader.errors import VersionError
from tableside.loader.load.raw_ids import IndexedRows, reserve_records
from tableside.loader.load.settings import Progress, thread_count
from tableside.loader.segment.delta import Delta, delta_name
from tableside.loader.segment.delta_writer import DeltaEntries, entries_of, merge, own_entries, write_delta
from tableside.loader.segment.header import Change
from tableside.loader.segment.layout import plan_tables
from tableside.loader.segment.numa import chosen_nodes
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredTable, plan_index
from tableside.loader.segment.writer import SegmentWriter
from tableside.loader.versions.folder import Folder
from tableside.loader.versions.states import State, attach_state, state_of, writing
from tableside.loader.versions.versions import Model
from tableside.quant import Table
from tableside.quant.contract import Bytes, Ids
from tableside.quant.cpu.index_builder import RECORD_BYTES, IndexBuilder, find_rows
from tableside.quant.rows.ids import IdIndex, set_bits

_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class CompactionResult:
    """state: the live one. rows, segment_bytes: of the new version; merged: entries of the delta; seconds:
    until it was live."""

    model: str
    state: State
    rows: int
    merged: int
    segment_bytes: int
    seconds: float


def delta_share(segment: Segment) -> float:
    """Returns the bytes of a state's deltas per byte of its version."""
    return float(sum(d.segment.size for d in segment.deltas) / segment.base.size)


def compact(
    model: Model, settings: ApplySettings = DEFAULTS, progress: Progress | None = None
) -> CompactionResult | None:
    """Compacts the live version and its deltas; None: no delta is live. VersionError: a load or compaction
    runs, or another version became live. SegmentError: the live state is damaged. NoSpace."""
    started, model = time.monotonic(), model.on(None)
    # The load lock keeps compactions apart; an apply takes the other one for a moment, to see whether one is
    # under way.
    with model.loading() as version, model.opened() as folder, folder.lock(COMPACT_LOCK):
        if not attach_state(model, None, "header").deltas:
            return None
        merge_live(model, settings)
        segment = attach_state(model, None, "full")
        progress = progress or (lambda done, total: None)
        return _Compaction(model, folder, version, segment, settings, progress).run(started)


class _Compaction:
    """One compaction. The caller holds the load and compaction locks."""

    def __init__(
        self,
        model: Model,
        folder: Folder,
        version: int,
        segment: Segment,
        settings: ApplySettings,
        progress: Progress,
    ) -> None:
        self.model, self.folder, self.version, self.settings = model, folder, version, settings
        self.base = segment.base
        self.delta: Delta = segment.deltas[-1]  # a newer one may have come, which stays
        self.entries = {name: entries_of(self.delta.own_layer(name)) for name in self.delta.tables}
        self._progress, self._done, self._total = progress, 0, 0

    def run(self, started: float) -> CompactionResult:
        tables = {t.name: _CompactTable(self, t) for t in self.base.header.tables}
        header = self.base.header
        stored = [t.stored for t in tables.values()]
        planned = replace(
            header,
            version=self.version,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tables=plan_tables(stored),
            merged=replace(
                self.delta.change, below=0, mark=0 if self._hides_rows() else self.delta.change.mark
            ),
            origin=(header.origin or self.base.content()) if header.is_over_hosts else 0,
        )
        self._total = sum(t.rows for t in planned.tables)
        program = self.base.program() if header.scorer is not None else b""
        kept = {name: self.base for name, t in tables.items() if not t.is_changed}
        nodes = chosen_nodes(self.model.nodes(header.version) or None)
        with self.model.writer(self.version, planned, program, kept, nodes) as writer:
            for table in writer.header.tables:
                if table.name in writer.linked:
                    self.done(table.rows)
                else:
                    tables[table.name].write(writer, table)
            writer.finish_rest(thread_count(self.settings.threads))
            writer.seal({"seconds": time.monotonic() - started, "source_bytes": float(self.base.size)})
        state = self._publish()
        rows = sum(t.id_count for t in planned.tables)
        seconds = time.monotonic() - started
        return CompactionResult(self.model.name, state, rows, self.delta.entries, writer.size, seconds)

    def _hides_rows(self) -> bool:
        """Whether the new version alone has rows that were deleted."""
        return any(self._deleted_numbers(name) for name in self.entries)

    def _deleted_numbers(self, name: str) -> bool:
        """Whether row numbers of a table were deleted, which a delta over the new version says."""
        row_map = self.base.tables[name].row_map
        return (row_map is None or row_map.index is None) and bool(self.entries[name].deleted.any())

    def done(self, rows: int) -> None:
        """Counts written rows."""
        self._done += rows
        self._progress(self._done, self._total)

    def _publish(self) -> State:
        """Carries over newer changes and flips."""
        with writing(self.model, self.folder):
            live = attach_state(self.model, None, "header")
            below = live.deltas[-1].sequence if live.deltas else 0
            if (live.header.version, below) != (self.base.header.version, self.delta.sequence):
                raise VersionError(
                    f"state {state_of(self.model.record())} of model {self.model.name!r} is live, which does "
                    f"not follow from {self.base.header.version}+{self.delta.sequence}, which was compacted; "
                    "nothing was published: compact again"
                )
            sequence = self._carry_over(live)
            try:
                self.model.publish(self.version, sequence=sequence)
            except BaseException:
                self.folder.unlink(delta_name(self.version, sequence))
                raise
        return State(self.version, sequence)

    def _carry_over(self, live: Segment) -> int:
        """Writes newer changes as a delta over the new version; returns its sequence, 0: none."""
        parts: list[tuple[str, list[DeltaEntries]]] = []
        for name, entries in self.entries.items():
            if self._deleted_numbers(name):
                parts.append((name, [entries.only(entries.deleted)]))
        newer = live.deltas[:-1]
        if not parts and not newer:
            return 0
        change: Change = live.deltas[0].change
        tables = merge(self.base, [*parts, *own_entries(newer)], self.settings.threads)
        header = replace(self.base.header, version=self.version)
        name = delta_name(self.version, change.sequence)
        with self.folder.replacing(name) as partial:
            path, fd = self.folder.path / partial, self.folder.create(partial)
            write_delta(path, fd, header, replace(change, below=0), tables)
        return change.sequence


class _CompactTable:
    """One table: what it has after the changes, and how it is written. rows, ids: as the header has them."""

    def __init__(self, work: _Compaction, stored: StoredTable) -> None:
        self.work, self.before = work, stored
        self.table: Table = work.base.tables[stored.name]
        self.entries = work.entries.get(stored.name)
        self.rows, self.ids = stored.rows, stored.ids
        self.index: IdIndex | None = None
        row_map = self.table.row_map
        if row_map is not None and row_map.index is not None:
            self._old = row_map.index
            if self.entries is not None:
                self._plan(row_map.index)

    @property
    def is_changed(self) -> bool:
        """Returns whether rows change. Deleted row numbers keep theirs; a delta over the version hides it."""
        return self.entries is not None and (self.index is not None or not self.entries.deleted.all())

    @property
    def stored(self) -> StoredTable:
        """Returns the table for the header; an unchanged one keeps its chunks, so that its file can be
        linked."""
        chunk_rows = 1 if self.is_changed else self.before.chunk_rows
        return replace(self.before, rows=self.rows, ids=self.ids, chunk_rows=chunk_rows)

    def _plan(self, old: IdIndex) -> None:
        """Builds the index of the table's present ids."""
        assert self.entries is not None and self.ids is not None and self.ids.index is not None
        builder = IndexBuilder(old.buckets, old.bucket_ids, self.work.settings.threads)
        gone = np.sort(self.entries.ids)  # from the rows of before
        inserted = self.entries.ids[~self.entries.deleted]
        backfilled = 0
        for ids, rows in self._kept(gone):
            builder.count(ids)
            if self.ids.backfilled:
                assert self.table.row_map is not None
                backfilled += int(self.table.row_map.is_backfilled(rows).sum())
        builder.count(inserted)
        scratch = partial(self.work.model.create_scratch, self.work.version)
        records = reserve_records(builder.begin() * RECORD_BYTES, scratch, self.work.folder.path)
        for ids, rows in self._kept(gone):
            builder.put(ids, rows, records)
        builder.put(inserted, np.arange(inserted.size) + old.slots, records)
        builder.distinct(records, "error")
        first, owned = old.first_bucket, len(old.directory) - 1
        self.index = builder.build(records).part(first, first + owned)
        shape = (self.table.row_format, self.table.dim, self.index.slots)
        buckets = old.buckets, old.bucket_ids, first, owned
        stored = plan_index(*shape, *buckets, has_backfilled=backfilled > 0)
        self.rows = self.index.slots + 1
        default = None if self.ids.default_row is None else self.index.slots
        self.ids = replace(
            self.ids, count=builder.ids, default_row=default, backfilled=backfilled, index=stored
        )
        self._gone = gone

    def _kept(self, gone: Ids) -> Iterator[tuple[Ids, Ids]]:
        """Yields (ids, rows) of unchanged rows, block by block."""
        for start in range(0, self._old.slots, _BLOCK_ROWS):
            rows = np.arange(start, min(start + _BLOCK_ROWS, self._old.slots), dtype=np.int64)
            ids = np.ascontiguousarray(self._old.ids[rows[0] : rows[-1] + 1])
            found = np.empty(ids.size, np.int64)
            find_rows(self._old, ids, found)
            own = found == rows
            at = np.searchsorted(gone, ids)
            own &= gone[np.minimum(at, gone.size - 1)] != ids
            yield ids[own], rows[own]

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
        assert self.index is not None and self.entries is not None and self.table.row_map is not None
        assert stored.ids is not None and stored.index is not None
        data = writer.rows(stored.index, 0, stored.index.rows).reshape(-1)
        written = IndexedRows(stored.ids, self.index, data, target)
        given = self.entries.only(~self.entries.deleted)
        for ids, rows in self._kept(self._gone):
            to = written.put(ids, self.table.packed.take(rows, 0))
            if stored.ids.backfilled:
                set_bits(written.bits, to[self.table.row_map.is_backfilled(rows)])
            self.work.done(ids.size)
        written.put(given.ids, given.packed.take(given.rows, 0))
        written.finish()
        target[-1] = self.table.packed[-1]
        self.work.done(given.ids.size)
