"""The share of each owner in a table, and its copy from the segments that hold parts of it.

Owner k of n has buckets [B k // n, B (k + 1) // n) of B, or rows [R k // n, R (k + 1) // n) of R dense ids,
and the default row. Rows, pilots, ids and backfilled bits are copied as bytes. Only the directory's first
rows change with the start of the share, and with them the places of pilots and bits. Gaps between pilots stay
zero.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tableside.loader.errors import ModelError, SegmentError
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredIds, StoredTable, index_parts, plan_index
from tableside.loader.segment.writer import SegmentWriter
from tableside.loader.versions.partial import ids_in
from tableside.quant import RowFormat
from tableside.quant.contract import Bytes, Ids
from tableside.quant.rows.ids import IdIndex, bits_at, set_bits

_PIECE_BITS = 1 << 20  # looked at at once


@dataclass(frozen=True, eq=False)
class TablePart:
    """A table as one segment has it, whole or a share. packed: its rows; index: of raw ids."""

    segment: Segment
    stored: StoredTable
    packed: Bytes
    index: IdIndex | None

    @property
    def first(self) -> int:
        """Returns its first bucket, or first dense id."""
        return self.index.first_bucket if self.index else self.stored.ids.first if self.stored.ids else 0

    @property
    def end(self) -> int:
        """Returns the bucket or dense id after its last."""
        return self.first + (len(self.index.directory) - 1 if self.index else self.stored.id_count)

    @property
    def has_default(self) -> bool:
        """Returns whether the last row is a default row, as always for raw ids."""
        return self.stored.ids is not None and (
            self.index is not None or self.stored.ids.default_row is not None
        )


@dataclass(frozen=True, eq=False)
class RowRun:
    """Rows [start, stop) of a part, and for raw ids buckets [first_bucket, end_bucket), counted in the
    part."""

    part: TablePart
    start: int
    stop: int
    first_bucket: int = 0
    end_bucket: int = 0


@dataclass(frozen=True, eq=False)
class Share:
    """An owner's part of a table: runs of rows, then the default row, if any (counted in rows). ids: None:
    row numbers."""

    rows: int
    ids: StoredIds | None
    runs: tuple[RowRun, ...]
    default: Bytes | None

    @property
    def id_count(self) -> int:
        """Ids that have a row of their own in it."""
        return self.rows if self.ids is None else self.ids.count


def parts_of(segments: Sequence[Segment], name: str) -> list[TablePart]:
    """Returns a table's parts in order. SegmentError: they do not form one table."""
    parts = []
    for segment in segments:
        stored = next((t for t in segment.header.tables if t.name == name), None)
        if stored is None:
            raise SegmentError(
                f"{segment.path} has no table {name!r}; expected every owner to have each; reshard the model "
                "again"
            )
        row_map = segment.tables[name].row_map
        index = row_map.index if row_map else None
        parts.append(TablePart(segment, stored, segment.tables[name].packed, index))
    kinds = {_kind(part) for part in parts}
    is_cut = any(before.end != after.first for before, after in pairwise(parts))
    index = parts[0].index
    is_cut = is_cut or (index is not None and (parts[0].first, parts[-1].end) != (0, index.buckets))
    if len(kinds) > 1 or is_cut:
        raise SegmentError(
            f"table {name!r} is not of one piece in {len(parts)} segments; reshard the model again"
        )
    return parts


def _kind(part: TablePart) -> tuple[object, ...]:
    """Returns what all parts of a table have in common."""
    stored, index = part.stored, part.index
    default = part.packed[-1].tobytes() if part.has_default else None
    policy = None if stored.ids is None else (stored.ids.missing, stored.ids.default_row is None)
    buckets = None if index is None else (index.buckets, index.bucket_ids)
    return stored.key, stored.row_format, stored.dim, stored.row_bytes, policy, default, buckets


def shares_of(parts: Sequence[TablePart], owners: int) -> list[Share]:
    """Returns each owner's share. ModelError: an owner would have no row. SegmentError: ids would be lost."""
    shares = [share_of(parts, number, owners) for number in range(owners)]
    name = parts[0].stored.name
    before = sum(p.stored.id_count for p in parts)
    after = sum(s.id_count for s in shares)
    if before != after:
        raise SegmentError(
            f"table {name!r} has {before} ids by its header, {after} by its directory; publish the version "
            "again"
        )
    return shares


def share_of(parts: Sequence[TablePart], number: int, owners: int) -> Share:
    """Returns one owner's share. ModelError: it would have no row."""
    index, first, size = parts[0].index, parts[0].first, parts[-1].end - parts[0].first
    stored = parts[0].stored
    if index is not None and owners > size:
        raise ModelError(
            f"table {stored.name!r} has {size} buckets; expected at most as many owners, or more buckets in "
            "model.toml"
        )
    if not parts[0].has_default and owners > size:
        raise ModelError(
            f"table {stored.name!r} has {size} rows, and some of {owners} owners would have none; expected "
            f"at most {size} owners, or a policy for missing ids in model.toml"
        )
    start, stop = first + size * number // owners, first + size * (number + 1) // owners
    runs = [_run(p, max(start, p.first), min(stop, p.end)) for p in parts if p.first < stop and start < p.end]
    make = _dense_share if index is None else _raw_share
    return make(parts, tuple(runs), start, stop)


def _run(part: TablePart, start: int, stop: int) -> RowRun:
    """Ids or buckets [start, stop) of a part that has them."""
    start, stop = start - part.first, stop - part.first
    if part.index is None:
        return RowRun(part, start, stop)
    rows = part.index.directory[:, 0]
    return RowRun(part, int(rows[start]), int(rows[stop]), start, stop)


def _dense_share(parts: Sequence[TablePart], runs: tuple[RowRun, ...], start: int, stop: int) -> Share:
    ids, size = parts[0].stored.ids, sum(p.stored.id_count for p in parts)
    default = parts[0].packed[-1:] if parts[0].has_default else None
    count, rows = stop - start, stop - start + (default is not None)
    is_plain = ids is None or (ids.missing == "error" and default is None and ids.first == 0)
    backfilled = sum(p.stored.ids.backfilled for p in parts if p.stored.ids is not None)
    own_end = parts[0].first + size - backfilled
    here = max(0, stop - max(start, own_end))
    if is_plain and count == size and not backfilled:
        return Share(rows, None, runs, None)
    missing = "error" if ids is None else ids.missing
    return Share(
        rows, StoredIds(count, missing, None if default is None else count, start, here), runs, default
    )


def _raw_share(parts: Sequence[TablePart], runs: tuple[RowRun, ...], start: int, stop: int) -> Share:
    stored, index = parts[0].stored, parts[0].index
    assert index is not None and stored.ids is not None
    slots = sum(run.stop - run.start for run in runs)
    count = sum(int(ids_in(np.diff(_entries(run)[:, 0])).sum()) for run in runs)
    backfilled = sum(rows.size for run in runs for rows in _backfilled(run))
    row_format = RowFormat.parse(stored.row_format)
    planned = plan_index(
        row_format, stored.dim, slots, index.buckets, index.bucket_ids, start, stop - start, backfilled > 0
    )
    default_row = None if stored.ids.default_row is None else slots
    ids = replace(stored.ids, count=count, default_row=default_row, backfilled=backfilled, index=planned)
    return Share(slots + 1, ids, runs, parts[0].packed[-1:])


# ---- copies ----


def copy_share(
    writer: SegmentWriter,
    stored: StoredTable,
    share: Share,
    done: Callable[[int], object] = lambda rows: None,
) -> None:
    """Writes a share's rows and index to where they are planned. done: is told how many rows were written."""
    at = 0
    for run in share.runs:
        for row, rows in run.part.segment.rows(run.part.stored, run.start, run.stop):
            first = at + row - run.start
            writer.rows(stored, first, first + len(rows))[:] = rows
            done(len(rows))
        at += run.stop - run.start
    if share.default is not None:
        writer.rows(stored, at, at + 1)[:] = share.default
    if stored.ids is not None and (index := stored.ids.index) is not None:
        parts = index_parts(index, writer.rows(index, 0, index.rows).reshape(-1), stored.ids.backfilled > 0)
        _copy_index(parts, index.id_at < 0, share)


def _copy_index(parts: list[Bytes], has_kept_ids: bool, share: Share) -> None:
    directory, pilots, ids, bits = parts
    entries = directory.view("<i8").reshape(-1, 2)
    row = bucket = 0
    for run in share.runs:
        index, buckets, rows = run.part.index, run.end_bucket - run.first_bucket, run.stop - run.start
        assert index is not None
        entries[bucket : bucket + buckets] = _entries(run)[:-1]
        entries[bucket : bucket + buckets, 0] += row - run.start
        _copy_pilots(run, pilots, row, bucket)
        if has_kept_ids:
            run.part.segment.need(index.ids[run.start : run.stop])
            ids.view("<i8")[row : row + rows] = index.ids[run.start : run.stop]
        if bits.size:
            for marked in _backfilled(run):
                set_bits(bits, marked + row - run.start)
        row, bucket = row + rows, bucket + buckets
    entries[bucket] = row, 0


def _copy_pilots(run: RowRun, out: Bytes, row: int, bucket: int) -> None:
    """Copies a run's pilots to a share where its rows begin at `row` and its buckets at `bucket`."""
    assert run.part.index is not None
    pilots, firsts = run.part.index.pilots, _entries(run)[:, 0].tolist()
    run.part.segment.need(
        pilots[_pilots_at(firsts[0], run.first_bucket) : _pilots_at(firsts[-1], run.end_bucket)]
    )
    for n, (first, end) in enumerate(pairwise(firsts)):
        count = (end - first) * 5 // 16 + 1
        source = _pilots_at(first, run.first_bucket + n)
        target = _pilots_at(first - run.start + row, bucket + n)
        out[target : target + count] = pilots[source : source + count]


def _pilots_at(first: int, bucket: int) -> int:
    """Returns where the pilots of a bucket begin whose first row this is."""
    return first * 5 // 16 + bucket


def _entries(run: RowRun) -> Ids:
    """Returns the directory's entries of a run's buckets, and the next one."""
    assert run.part.index is not None
    return run.part.index.directory[run.first_bucket : run.end_bucket + 1]


def _backfilled(run: RowRun) -> Iterator[Ids]:
    """Yields the backfilled rows of a run, some at a time, counted in its part."""
    if run.part.index is not None and (bits := run.part.index.backfilled) is not None:
        for start in range(run.start, run.stop, _PIECE_BITS):
            rows = np.arange(start, min(start + _PIECE_BITS, run.stop))
            yield rows[bits_at(bits, rows)]
