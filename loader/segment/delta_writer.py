"""Writes delta files. Entries of several sources become one table; the last entry of an id counts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.segment.delta import Delta
from tableside.loader.segment.header import Change, Header
from tableside.loader.segment.layout import plan_tables
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import (
    StoredIds,
    StoredTable,
    Times,
    filter_part,
    keep_zero_apart,
    marks_part,
    plan_index,
    times_of,
    times_part,
    write_index,
)
from tableside.loader.segment.writer import SegmentWriter
from tableside.quant import Table
from tableside.quant.contract import Bytes, Ids
from tableside.quant.cpu.index_builder import IndexBuilder, fill_filter, fill_marks, find_rows
from tableside.quant.rows.ids import IdIndex, bits_at, set_bits
from tableside.quant.rows.overlay import OverlayLayer, are_marks_worth_it, filter_words

_IDS_A_BUCKET = 2048  # few enough for a bucket to be built in a core's cache
_BLOCK_ROWS = 1 << 14  # that are copied at once, into memory that is used again


class DeltaEntries(NamedTuple):
    """Changes of one table, in order. ids, rows: int64 [n]; packed: uint8 [rows, row_bytes], read at `rows`;
    deleted: bool [n]. fetch: gives packed rows by their numbers, instead of `packed`. times: when each was
    changed, seconds since 1970; None: the table keeps no times."""

    ids: Ids
    packed: Bytes
    rows: Ids
    deleted: NDArray[np.bool_]
    fetch: Callable[[Ids], Bytes] | None = None
    times: Times | None = None

    def only(self, which: NDArray[Any]) -> "DeltaEntries":
        """Returns some of them, by a mask or their numbers."""
        times = None if self.times is None else self.times[which]
        return self._replace(
            ids=self.ids[which], rows=self.rows[which], deleted=self.deleted[which], times=times
        )


def delta_entries(delta: Delta, name: str) -> DeltaEntries:
    """Returns a delta's entries of a table, with their times."""
    return entries_of(delta.own_layer(name), times_of(delta.tables[name], delta.segment.mapping.bytes))


def entries_of(layer: OverlayLayer, times: Times | None = None) -> DeltaEntries:
    """Returns a layer's entries. times: of its slots."""
    kept, slots = np.ascontiguousarray(layer.index.ids), np.arange(layer.index.slots)
    slots = slots[find_rows(layer.index, kept) == slots]
    deleted = np.zeros(slots.size, np.bool_) if layer.deleted is None else bits_at(layer.deleted, slots)
    times = None if times is None else times[slots]
    return DeltaEntries(kept[slots], layer.packed, slots, deleted, times=times)


def own_entries(deltas: Sequence[Delta]) -> Iterator[tuple[str, list[DeltaEntries]]]:
    """Yields the entries of deltas by table, oldest delta first. deltas: newest first."""
    for delta in reversed(deltas):
        for name in delta.tables:
            yield name, [delta_entries(delta, name)]


@dataclass(frozen=True, eq=False)
class MergedTable:
    """A planned table of a delta. kept: mask over the entries of all parts; rows: int64, a row per kept
    entry."""

    base: Table
    parts: tuple[DeltaEntries, ...]
    index: IdIndex
    ids: StoredIds
    kept: NDArray[np.bool_]
    rows: Ids


def merge(
    base: Segment, parts: Iterable[tuple[str, list[DeltaEntries]]], threads: int
) -> dict[str, MergedTable]:
    """Plans the tables of a delta over `base` from entries by table, newest last."""
    joined: dict[str, list[DeltaEntries]] = {}
    for name, entries in parts:
        joined.setdefault(name, []).extend(entries)
    return {name: _merge_table(base.tables[name], entries, threads) for name, entries in joined.items()}


def _merge_table(base: Table, parts: Sequence[DeltaEntries], threads: int) -> MergedTable:
    ids = np.concatenate([part.ids for part in parts])
    buckets = 1 << max(0, (ids.size // _IDS_A_BUCKET).bit_length())
    builder = IndexBuilder(buckets, 0, threads)
    builder.count(ids)
    records = np.zeros((builder.begin(), 2), np.int64)
    builder.put(ids, np.arange(ids.size), records)
    kept = np.ones(ids.size, np.bool_)
    kept[builder.distinct(records, "last")[:, 1]] = False
    index = builder.build(records)
    rows = find_rows(index, ids[kept])
    deleted = int(np.concatenate([part.deleted for part in parts])[kept].sum())
    _, numbers = base.row_numbers
    marked = numbers if are_marks_worth_it(numbers, rows.size, base.row_bytes) else 0
    shape = (base.row_format, base.dim, index.slots, buckets)
    words = filter_words(rows.size)
    has_times = all(part.times is not None for part in parts)
    stored = plan_index(
        *shape, has_backfilled=deleted > 0, filter_words=words, marked=marked, has_times=has_times
    )
    stored_ids = StoredIds(rows.size, index=stored, deleted=deleted)
    return MergedTable(base, tuple(parts), index, stored_ids, kept, rows)


def write_delta(path: Path, fd: int, base: Header, change: Change, tables: Mapping[str, MergedTable]) -> int:
    """Writes and seals a delta; returns its bytes. Arguments and errors: see `write_unsealed`."""
    with write_unsealed(path, fd, base, change, tables) as writer:
        writer.seal({})
    return writer.size


def write_unsealed(
    path: Path, fd: int, base: Header, change: Change, tables: Mapping[str, MergedTable]
) -> SegmentWriter:
    """Writes a delta over version `base` without its header; the caller seals it. fd: an empty file at
    `path`, closed by the writer. NoSpace: the file stays empty."""
    ids = {name: table.ids for name, table in tables.items()}
    return write_tables(
        path, fd, base, change, ids, lambda writer, one: _write(writer, one, tables[one.name])
    )


def write_tables(
    path: Path, fd: int, base: Header, change: Change, ids: Mapping[str, StoredIds],
    write: Callable[[SegmentWriter, StoredTable], None],
) -> SegmentWriter:  # fmt: skip
    """As `write_unsealed`. ids: of each table, with an index. write: writes one of the planned tables."""
    of = {t.name: t for t in base.tables}
    planned = plan_tables(
        replace(of[name], rows=one.index.slots + 1, ids=one, chunk_rows=1)
        for name, one in ids.items()
        if one.index is not None
    )
    created = datetime.now(UTC).isoformat(timespec="seconds")
    header = Header(base.model, base.version, created, planned, (), delta=change)
    writer = SegmentWriter(path, header, b"", fd)
    try:
        for stored in writer.header.tables:
            write(writer, stored)
        writer.finish_rest()
    except BaseException:
        writer.close()
        raise
    return writer


def _write(writer: SegmentWriter, stored: StoredTable, table: MergedTable) -> None:
    assert stored.ids is not None and stored.ids.index is not None
    at, packed = stored.ids.index, writer.rows(stored, 0, stored.rows)
    data = writer.rows(at, 0, at.rows).reshape(-1)
    slots, bits = write_index(stored.ids, table.index, data, packed)
    ids = np.concatenate([part.ids for part in table.parts])[table.kept]
    slots[table.rows] = ids
    keep_zero_apart(table.index, slots, not ids.all())
    fill_filter(ids, filter_part(at, data, stored.ids.has_bits))
    if (marks := marks_part(at, data, stored.ids.has_bits, table.base.row_numbers[0])) is not None:
        fill_marks(ids, table.rows, marks)
    if stored.ids.has_bits:
        deleted = np.concatenate([part.deleted for part in table.parts])[table.kept]
        set_bits(bits, table.rows[deleted])
    if at.has_times:
        times = np.concatenate([part.times for part in table.parts if part.times is not None])
        times_part(at, data, stored.ids.has_bits)[table.rows] = times[table.kept]
    items = packed.view(f"V{stored.row_bytes}")[:, 0]
    first = done = 0
    for part in table.parts:
        counts = table.kept[first : first + part.ids.size]
        rows = table.rows[done : done + int(counts.sum())]
        sources = part.rows[counts]
        for start in range(0, rows.size, _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            if part.fetch is None:
                items[rows[block]] = part.packed.view(items.dtype)[:, 0].take(sources[block])
            else:
                items[rows[block]] = part.fetch(sources[block]).view(items.dtype)[:, 0]
        first, done = first + part.ids.size, done + rows.size
