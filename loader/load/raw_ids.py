"""Tables of raw ids: builds the index from the ids, then writes the vectors to their rows.

1. Ids are read twice: counted by bucket, then put into their buckets' records (id, source row). The records
   are an unnamed file in shared memory, freed before the segment is made.
2. Per bucket duplicates are found and pilots built (`quant.cpu.index_builder`), which gives the table's rows.
3. Ids and vectors are read together and quantized by blocks (`loader.load.load`), which `IndexedRows` writes
   to their rows.

Private memory holds the index alone, a third of a byte per id.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from tableside.loader.checkpoint.keyed.keyed import KeyedRows
from tableside.loader.errors import CheckpointError, ModelError
from tableside.loader.load.backfill import Backfill
from tableside.loader.load.settings import Progress
from tableside.loader.model.specs import RawIds, TableSpec
from tableside.loader.segment.memory import FileToMap, reserve
from tableside.loader.segment.stored import StoredIds, keep_zero_apart, plan_index, times_part, write_index
from tableside.quant import QuantError
from tableside.quant.contract import Bytes, Ids
from tableside.quant.cpu.index_builder import RECORD_BYTES, DuplicateId, IndexBuilder, find_rows
from tableside.quant.rows.ids import ID_BYTES, IdIndex, bits_at, bucket_of, set_bits, slots_for

PASSES = 3  # of a table's ids while its index is built: they are counted, put into buckets, and placed


class Indexing:
    """Shared by the indexes of a load. scratch: creates an unnamed file in `folder`, returns its descriptor.
    total: ids over all passes; progress: takes (ids done, total)."""

    def __init__(
        self, folder: Path, scratch: Callable[[], int], threads: int, total: int, progress: Progress
    ) -> None:
        self.folder, self.scratch, self.threads = folder, scratch, threads
        self._done, self._total, self._progress, self._lock = 0, total, progress, Lock()

    def done(self, ids: int) -> None:
        """So many ids more were passed once. Any thread may call."""
        with self._lock:
            self._done += ids
            self._progress(self._done, self._total)


@dataclass(frozen=True, eq=False)
class RawTable:
    """A table of raw ids with its index, whole or a share. dropped: a bit per source row replaced by a
    duplicate; None: none."""

    source: KeyedRows
    ids: StoredIds
    index: IdIndex
    dropped: Bytes | None

    @property
    def rows(self) -> int:
        """Returns the table's rows in a segment: slots and the default row, always present."""
        return self.index.slots + 1

    def kept(self, ids: Ids, sources: Ids) -> NDArray[np.bool_] | None:
        """Returns which of the ids, of these rows of the source, are written; None: all are."""
        kept = None if self.dropped is None else ~bits_at(self.dropped, sources)
        if len(self.index.directory) - 1 < self.index.buckets:  # others have other owners
            here = self.index.bucket_of(ids) >= 0
            kept = here if kept is None else kept & here
        return None if kept is None or kept.all() else kept


def plan_raw_table(
    spec: TableSpec,
    raw: RawIds,
    source: KeyedRows,
    backfill: Backfill | None,
    work: Indexing,
    share: tuple[int, int] | None = None,
) -> RawTable:
    """Builds a table's index. share: number of the owner whose buckets are taken, and of all owners.
    CheckpointError: duplicate or unreadable ids. ModelError: ids do not fit the buckets. NoSpace: no room for
    records."""
    try:
        builder = IndexBuilder(raw.buckets, raw.bucket_ids or 0, work.threads)
        first, end = _buckets_of(raw, share)
        taken = partial(_taken, raw, None if share is None else (first, end))
        for ids, rows in _all_ids(source, backfill):
            builder.count(taken(ids, rows)[0])
            work.done(len(ids))
        records = reserve_records(builder.begin() * RECORD_BYTES, work.scratch, work.folder)
        for ids, rows in _all_ids(source, backfill):
            builder.put(*taken(ids, rows), records)
            work.done(len(ids))
        twice, dropped = builder.distinct(records, raw.duplicates, source.rows).T
        work.done(dropped.size)
        if source.strings:
            _check_collisions(source, twice[dropped < source.rows])
        index = builder.build(records, work.done).part(first, end)
    except DuplicateId as error:
        raise _comes_twice(source, error.id, error.first, error.second) from error
    except QuantError as error:
        raise ModelError(f"[tables.{spec.name}]: {error}") from error
    kept = int(builder.kept.sum())
    backfilled = 0 if backfill is None else backfill.rows - int((dropped >= source.rows).sum())
    ids_of = _stored_ids(spec, raw, source.dim, index.slots, kept, (first, end), backfilled)
    bits = None
    if dropped.size:
        bits = np.zeros((source.rows + (backfill.rows_there if backfill else 0) + 7) // 8, np.uint8)
        set_bits(bits, dropped)
    return RawTable(source, ids_of, index, bits)


def _buckets_of(raw: RawIds, share: tuple[int, int] | None) -> tuple[int, int]:
    """Returns the buckets [first, end) of a share. QuantError: there are none."""
    number, owners = share or (0, 1)
    first, end = (raw.buckets * n // owners for n in (number, number + 1))
    if first == end:
        raise QuantError(f"{raw.buckets} buckets for {owners} owners; expected one or more for each")
    return first, end


def _stored_ids(
    spec: TableSpec, raw: RawIds, dim: int, slots: int, kept: int, buckets: tuple[int, int], backfilled: int
) -> StoredIds:
    """Plans the index of a table with so many slots, in buckets [first, end)."""
    first, end = buckets
    shape = spec.row_format, dim, slots, raw.buckets, raw.bucket_ids or 0, first, end - first
    index = plan_index(*shape, has_backfilled=backfilled > 0, has_times=raw.has_times)
    return StoredIds(
        kept, str(spec.missing), backfilled=backfilled, index=index, strings=raw.strings,
        ttl_s=raw.ttl_s or 0, max_rows=raw.max_rows or 0,
    )  # fmt: skip


class CountedIds:
    """The ids of a table, counted by bucket in one pass: what `plan_raw_table` will plan of any share, or a
    little more where ids come twice."""

    def __init__(
        self, spec: TableSpec, raw: RawIds, source: KeyedRows, backfill: Backfill | None, work: Indexing
    ) -> None:
        """CheckpointError: unreadable ids. ModelError: ids do not fit the buckets."""
        self._spec, self._raw, self._dim = spec, raw, source.dim
        self._backfilled = 0 if backfill is None else backfill.rows
        builder = IndexBuilder(raw.buckets, raw.bucket_ids or 0)
        try:
            for ids, _ in _all_ids(source, backfill):
                builder.count(ids)
                work.done(len(ids))
        except QuantError as error:
            raise ModelError(f"[tables.{spec.name}]: {error}") from error
        self._counts = builder.counts

    def stored(self, share: tuple[int, int] | None) -> tuple[int, StoredIds]:
        """Returns the rows of a share, and its ids. QuantError: it has no bucket."""
        buckets = _buckets_of(self._raw, share)
        counts = self._counts[slice(*buckets)].tolist()
        slots = sum(map(slots_for, counts))
        ids = _stored_ids(self._spec, self._raw, self._dim, slots, sum(counts), buckets, self._backfilled)
        return slots + 1, ids


def _check_collisions(source: KeyedRows, twice: Ids) -> None:
    """Reads the strings again that have one of these ids. CheckpointError: two of one id are not the same."""
    twice = np.unique(twice)
    others, firsts = np.zeros(twice.size, np.int64), np.full(twice.size, -1)  # another hash, a row
    for piece in range(source.pieces if twice.size else 0):
        for block, again in zip(source.ids(piece), source.rehashed().ids(piece), strict=True):
            at = np.minimum(np.searchsorted(twice, block.ids), twice.size - 1)
            here = twice[at] == block.ids
            at, hashes, rows = at[here], again.ids[here], block.rows[here]
            new = np.flatnonzero(firsts[at] < 0)
            others[at[new]], firsts[at[new]] = hashes[new], rows[new]
            if (differs := np.flatnonzero(others[at] != hashes)).size:
                one = at[differs[0]]
                raise _comes_twice(source, int(twice[one]), int(firsts[one]), int(rows[differs[0]]))


def _comes_twice(source: KeyedRows, id_: int, first: int, second: int) -> CheckpointError:
    """first, second: the source's rows with the id."""
    places = f"{source.where(first)} and {source.where(second)}"
    remedy = 'remove one, or set duplicates = "first" or "last"'
    if not source.strings:
        return CheckpointError(f"{source.key!r}: id {id_} comes twice: {places}; {remedy}")
    one, other = source.text(first), source.text(second)
    if one == other:
        return CheckpointError(f"{source.key!r}: id {one!r} comes twice: {places}; {remedy}")
    return CheckpointError(
        f"{source.key!r}: the strings {one!r} and {other!r} have one hash, {id_}, so they cannot both "
        f"be ids of a table: {places}; rename one, there and in requests"
    )


def _taken(raw: RawIds, buckets: tuple[int, int] | None, ids: Ids, rows: Ids) -> tuple[Ids, Ids]:
    """Returns the ids of these buckets, [first, end), and those without one, which are refused; None: all."""
    if buckets is None:
        return ids, rows
    of = bucket_of(ids, raw.buckets, raw.bucket_ids or 0)
    here = ((of >= buckets[0]) & (of < buckets[1])) | (of < 0)
    return ids[here], rows[here]


def _all_ids(source: KeyedRows, backfill: Backfill | None) -> Iterator[tuple[Ids, Ids]]:
    """(ids, rows of the source): those of an older version come last, numbered from `source.rows` on."""
    for piece in range(source.pieces):
        for block in source.ids(piece):
            yield block.ids, block.rows
    if backfill is not None:
        for ids, rows in backfill.ids():
            yield ids, rows + source.rows


def reserve_records(size: int, scratch: Callable[[], int], folder: Path) -> Ids:
    """Returns zeros int64 [records, 2] in shared memory, freed with the array. scratch, folder: see
    `Indexing`."""
    if not size:
        return np.zeros((0, 2), np.int64)
    fd = scratch()
    try:
        return (
            reserve([FileToMap(fd, -(-size // 4096) * 4096, True)], folder)
            .bytes[:size]
            .view(np.int64)
            .reshape(-1, 2)
        )
    finally:
        os.close(fd)


class IndexedRows:
    """Writes rows to where an index leads: any thread calls `put`, then one `finish`. data: the bytes of the
    index; packed: uint8 [rows, row_bytes], the rows in the segment; both zeros. bits: one for each row.
    times: uint32 of each row, or empty; the caller fills them."""

    def __init__(self, stored: StoredIds, index: IdIndex, data: Bytes, packed: Bytes) -> None:
        assert stored.index is not None
        self._index, self._id_at = index, stored.index.id_at
        self._kept, self.bits = write_index(stored, index, data, packed)
        self.times = times_part(stored.index, data, stored.has_bits)
        self._items = packed.view(f"V{packed.shape[1]}")[:, 0]
        self._has_zero = False

    def put(self, ids: Ids, packed: Bytes) -> Ids:
        """Writes packed rows [n, row_bytes] of ids [n]; returns where they lie. Puts the ids into `packed`
        first where rows hold them: one random write for both."""
        rows = find_rows(self._index, ids)
        if self._id_at >= 0:
            packed[:, self._id_at : self._id_at + ID_BYTES] = (
                np.ascontiguousarray(ids).view(np.uint8).reshape(-1, ID_BYTES)
            )
        else:
            self._kept[rows] = ids
        self._items[rows] = packed.view(self._items.dtype)[:, 0]
        if not ids.all():
            self._has_zero = True  # and never false again: threads write at the same time
        return rows

    def finish(self) -> None:
        """Makes the empty slot of id 0, which keeps 0, not match id 0."""
        keep_zero_apart(self._index, self._kept, self._has_zero)
