"""Writes a delta's file: entries of several sources, of which the last one of each id counts, become one table each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.delta import Delta
from tableside.loader.header import Change, Header, plan_tables
from tableside.loader.segment import SegmentWriter
from tableside.loader.stored import StoredIds, filter_part, index_parts, keep_zero_apart, marks_part, plan_index
from tableside.quant import Table
from tableside.quant.cpu.index_builder import IndexBuilder, fill_filter, fill_marks, find_rows
from tableside.quant.ids import IdIndex, bits_at, set_bits
from tableside.quant.overlay import Level, are_marks_worth_it, filter_words

_IDS_A_BUCKET = 2048  # few enough for a bucket to be built in a core's cache
_BLOCK_ROWS = 1 << 14  # that are copied at once, into memory that is used again


class Entries(NamedTuple):
    """Changes of one table, in order. ids: int64 [n]; packed: uint8 [rows, row_bytes], where row `rows[n]` is that of each;
    deleted: bool [n]."""

    ids: NDArray[np.int64]
    packed: NDArray[np.uint8]
    rows: NDArray[np.int64]
    deleted: NDArray[np.bool_]


def entries_of(level: Level) -> Entries:
    """What a delta has of a table."""
    kept, slots = np.ascontiguousarray(level.index.ids), np.arange(level.index.slots)
    found = np.empty(kept.size, np.int64)
    find_rows(level.index, kept, found)
    slots = slots[found == slots]
    deleted = np.zeros(slots.size, np.bool_) if level.deleted is None else bits_at(level.deleted, slots)
    return Entries(kept[slots], level.packed, slots, deleted)


def own_entries(deltas: Sequence[Delta]) -> Iterator[tuple[str, list[Entries]]]:
    """What deltas, the newest first, have of each of their tables; the oldest first."""
    for delta in reversed(deltas):
        for name in delta.tables:
            yield name, [entries_of(delta.own_level(name))]


@dataclass(frozen=True, eq=False)
class MergedTable:
    """A table of a delta that is planned. kept: which of the entries of all parts, one part after another, count; rows: the row
    of each of these."""

    base: Table
    parts: tuple[Entries, ...]
    index: IdIndex
    ids: StoredIds
    kept: NDArray[np.bool_]
    rows: NDArray[np.int64]


def merge(base: Table, parts: Sequence[Entries], threads: int) -> MergedTable:
    """Plans the table of a delta from its parts, the newest last: of an id that comes twice the last entry counts."""
    ids = np.concatenate([part.ids for part in parts])
    buckets = 1 << max(0, (ids.size // _IDS_A_BUCKET).bit_length())
    builder = IndexBuilder(buckets, 0, threads)
    builder.count(ids)
    records = np.zeros((builder.begin(), 2), np.int64)
    builder.put(ids, np.arange(ids.size), records)
    kept = np.ones(ids.size, np.bool_)
    kept[builder.distinct(records, "last")] = False
    index = builder.build(records)
    rows = np.empty(int(kept.sum()), np.int64)
    find_rows(index, ids[kept], rows)
    deleted = int(np.concatenate([part.deleted for part in parts])[kept].sum())
    _, numbers = base.row_numbers
    stored = plan_index(
        base.row_format,
        base.dim,
        index.slots,
        buckets,
        has_backfilled=deleted > 0,
        filter_words=filter_words(rows.size),
        marked=numbers if are_marks_worth_it(numbers, rows.size, base.row_bytes) else 0,
    )
    return MergedTable(base, tuple(parts), index, StoredIds(rows.size, index=stored, deleted=deleted), kept, rows)


def write_delta(
    path: Path, fd: int, model: str, version: int, change: Change, tables: Mapping[str, MergedTable], keys: Mapping[str, str]
) -> int:
    """Writes and seals a delta; returns its bytes. Arguments and errors as those of `write_unsealed`."""
    writer = write_unsealed(path, fd, model, version, change, tables, keys)
    try:
        writer.seal({})
    finally:
        writer.close()
    return writer.size


def write_unsealed(
    path: Path, fd: int, model: str, version: int, change: Change, tables: Mapping[str, MergedTable], keys: Mapping[str, str]
) -> SegmentWriter:
    """Writes all of a delta but its header, which the caller seals. fd: an open, empty file at `path`, which the writer closes.

    keys: of the tables, as the version has them. NoSpace: nothing stays at `path` but an empty file.
    """
    shapes = [(name, keys[name], t.base.row_format, t.index.slots + 1, t.base.dim) for name, t in tables.items()]
    planned = plan_tables(shapes, ids={name: t.ids for name, t in tables.items()})
    created = datetime.now(UTC).isoformat(timespec="seconds")
    writer = SegmentWriter(path, Header(model, version, created, planned, (), delta=change), b"", fd)
    try:
        for stored in writer.header.tables:
            _write(writer, stored.name, tables[stored.name])
        for rows in writer.header.stored:
            for chunk in range(rows.chunks):
                writer.finish_chunk(rows, chunk)
    except BaseException:
        writer.close()
        raise
    return writer


def _write(writer: SegmentWriter, name: str, table: MergedTable) -> None:
    stored = next(t for t in writer.header.tables if t.name == name)
    assert stored.ids is not None and stored.ids.index is not None
    at = stored.ids.index
    data = writer.rows(at, 0, at.rows).reshape(-1)
    directory, pilots, kept, bits = index_parts(at, data, stored.ids.has_bits)
    directory[:] = table.index.directory.reshape(-1).view(np.uint8)
    pilots[:] = table.index.pilots
    ids = np.concatenate([part.ids for part in table.parts])[table.kept]
    slots = kept.view(np.int64)
    slots[table.rows] = ids
    keep_zero_apart(table.index, slots, not ids.all())
    fill_filter(ids, filter_part(at, data, stored.ids.has_bits))
    if (marks := marks_part(at, data, stored.ids.has_bits, table.base.row_numbers[0])) is not None:
        fill_marks(ids, table.rows, marks)
    if stored.ids.has_bits:
        deleted = np.concatenate([part.deleted for part in table.parts])[table.kept]
        set_bits(bits, table.rows[deleted])
    items = writer.rows(stored, 0, stored.rows).view(f"V{stored.row_bytes}")[:, 0]
    first = done = 0
    for part in table.parts:
        counts = table.kept[first : first + part.ids.size]
        rows = table.rows[done : done + int(counts.sum())]
        packed, sources = part.packed.view(f"V{stored.row_bytes}")[:, 0], part.rows[counts]
        for start in range(0, rows.size, _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            items[rows[block]] = packed.take(sources[block])
        first, done = first + part.ids.size, done + rows.size
