"""Where a segment keeps rows and how their ids are found: the parts of a header that say so, and the
arrays of these."""

from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tableside.loader.errors import SegmentError
from tableside.quant.row_format import RowFormat
from tableside.quant.rows.ids import ID_BYTES, DirectoryField, IdIndex, RowMap, id_at, pilots_for
from tableside.quant.rows.overlay import Marks, mark_words

INDEX_UNIT_BYTES = 64  # parts of an index begin at multiples of this
LARGEST_BUCKETS, LARGEST_SLOTS = 1 << 20, 1 << 32  # of a table, and of one bucket
LARGEST_SEED = 1 << 32
_ENTRY_BYTES = 8 * len(DirectoryField._fields)
_POLICIES = ("error", "zero", "mean", "constant")


@dataclass(frozen=True)
class StoredRows:
    """Rows of bytes in the segment. offset: bytes from the start of the file; first_chunk: index of its
    first checksum."""

    rows: int
    row_bytes: int
    offset: int
    chunk_rows: int
    first_chunk: int

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk_rows)

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """Rows [start, stop) of the chunk number `chunk`."""
        return chunk * self.chunk_rows, min((chunk + 1) * self.chunk_rows, self.rows)


@dataclass(frozen=True)
class StoredIndex(StoredRows):
    """The id index of a table of raw ids (`quant.rows.ids`), at a multiple of 4096, in units of 64 bytes,
    checksummed like rows.

    Its parts, each at a multiple of 64: directory, pilots, the ids of the rows unless these lie in the rows'
    padding, a bit for each row if any was backfilled, and of a delta its filter and marks
    (`quant.rows.overlay`).

    buckets: of the whole table; this segment has `owned` from `first_bucket` on. bucket_ids: ids of a bucket,
    or 0: by hash. slots: rows without the default row. id_at: where an id lies in its row, or -1, as in a
    delta. filter_words: uint64 of the filter. marked: row numbers that marks tell of; 0: no marks.
    """

    buckets: int
    bucket_ids: int
    first_bucket: int
    owned: int
    slots: int
    id_at: int
    filter_words: int = 0
    marked: int = 0


@dataclass(frozen=True)
class StoredIds:
    """How ids become rows of a table (`quant.rows.ids.RowMap`).

    count: ids with a row of their own; backfilled: how many of these rows came from an older version.
    missing: the policy; default_row: the row of missing ids, the last one; None: they are refused. first: the
    id of row 0, where there is no index; index: of raw ids. deleted: ids of a delta that have no row any
    more; then the bits mark these, not the backfilled ones.
    """

    count: int
    missing: str = "error"
    default_row: int | None = None
    first: int = 0
    backfilled: int = 0
    index: StoredIndex | None = None
    deleted: int = 0

    @property
    def has_bits(self) -> bool:
        """Whether its index has a bit for each row."""
        return self.backfilled > 0 or self.deleted > 0


@dataclass(frozen=True)
class StoredTable(StoredRows):
    """A table in the segment. rows: all stored ones, with empty slots and the default row. ids: None: ids are
    row numbers, and others are refused."""

    name: str
    key: str
    row_format: str
    dim: int
    ids: StoredIds | None = None

    @property
    def id_count(self) -> int:
        """Ids that have a row of their own."""
        return self.rows if self.ids is None else self.ids.count


def plan_index(
    row_format: RowFormat, dim: int, slots: int, buckets: int, bucket_ids: int = 0, first_bucket: int = 0, owned: int | None =
    None, has_backfilled: bool = False, filter_words: int = 0,
    marked: int = 0,
) -> StoredIndex:  # fmt: skip
    """An index of so many slots; offset and first checksum are not known yet. owned None: all buckets."""
    owned = buckets if owned is None else owned
    index = StoredIndex(0, INDEX_UNIT_BYTES, 0, (1 << 20) // INDEX_UNIT_BYTES, 0, buckets, bucket_ids, first_bucket, owned, slots,
                        -1 if filter_words else id_at(row_format, dim), filter_words, marked)  # fmt: skip
    end = sum(-(-size // INDEX_UNIT_BYTES) for size in _part_bytes(index, has_backfilled))
    return replace(index, rows=end)


def index_parts(index: StoredIndex, data: NDArray[np.uint8], has_backfilled: bool) -> list[NDArray[np.uint8]]:
    """The parts of an index over its bytes: directory, pilots, ids, bits; those that it has not are empty."""
    return _parts(index, data, has_backfilled)[:4]


def filter_part(index: StoredIndex, data: NDArray[np.uint8], has_deleted: bool) -> NDArray[np.uint64]:
    """The filter of a delta's index over its bytes: uint64 [filter_words]."""
    return _parts(index, data, has_deleted)[4].view("<u8")


def marks_part(index: StoredIndex, data: NDArray[np.uint8], has_deleted: bool, first: int) -> Marks | None:
    """The marks of a delta's index over its bytes. first: the id whose row number is 0."""
    if not index.marked:
        return None
    bits, before, slots = _parts(index, data, has_deleted)[5:]
    return Marks(first, index.marked, bits.view("<u8"), before.view("<u4"), slots.view("<u4"))


def _parts(index: StoredIndex, data: NDArray[np.uint8], has_backfilled: bool) -> list[NDArray[np.uint8]]:
    parts, at = [], 0
    for size in _part_bytes(index, has_backfilled):
        parts.append(data[at : at + size])
        at += -(-size // INDEX_UNIT_BYTES) * INDEX_UNIT_BYTES
    return parts


def _part_bytes(index: StoredIndex, has_backfilled: bool) -> tuple[int, ...]:
    return (
        (index.owned + 1) * _ENTRY_BYTES,
        pilots_for(index.slots, index.owned),
        0 if index.id_at >= 0 else index.slots * ID_BYTES,
        -(-index.slots // 8) if has_backfilled else 0,
        8 * index.filter_words,
        8 * mark_words(index.marked),
        4 * mark_words(index.marked),
        4 * index.slots if index.marked else 0,
    )


def write_index(
    stored: StoredIds, index: IdIndex, data: NDArray[np.uint8], packed: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Writes directory and pilots of a new index to its bytes; returns the slots' ids and the bits, to be
    written."""
    assert stored.index is not None
    directory, pilots, ids, bits = index_parts(stored.index, data, stored.has_bits)
    directory[:] = index.directory.reshape(-1).view(np.uint8)
    pilots[:] = index.pilots
    return _kept_ids(stored.index, ids, packed), bits


def _kept_ids(index: StoredIndex, ids: NDArray[np.uint8], packed: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The ids of an index's slots, which lie in the rows or in a part of their own."""
    if index.id_at < 0:
        return ids.view("<i8")
    return np.ndarray((index.slots,), "<i8", packed.reshape(-1), index.id_at, (packed.shape[1],))


def id_index(
    index: StoredIndex, data: NDArray[np.uint8], packed: NDArray[np.uint8], has_backfilled: bool
) -> IdIndex:
    """An index over its bytes and the table's rows, uint8 [rows, row_bytes]. Its directory is taken as it
    is."""
    directory, pilots, ids, bits = index_parts(index, data, has_backfilled)
    return IdIndex(
        directory.view("<i8").reshape(-1, len(DirectoryField._fields)),
        pilots,
        _kept_ids(index, ids, packed),
        index.buckets,
        index.bucket_ids,
        index.first_bucket,
        bits if has_backfilled else None,
    )


def keep_zero_apart(index: IdIndex, kept: NDArray[np.int64], has_zero: bool) -> None:
    """Slots without an id keep 0: makes sure that id 0, unless the table has it, leads to none of them. kept:
    int64 [slots]."""
    slot = int(index.places(np.zeros(1, np.int64))[0])
    if slot >= 0 and not has_zero and not kept[slot]:
        kept[slot] = next(i for i in count(1) if int(index.places(np.array([i]))[0]) != slot)


def row_map(table: StoredTable, segment: NDArray[np.uint8], packed: NDArray[np.uint8]) -> RowMap | None:
    """How a table's ids become rows of `packed`, over the bytes of its segment. SegmentError: the index
    points outside the table."""
    if (ids := table.ids) is None:
        return None
    if (stored := ids.index) is None:
        return RowMap(ids.count, ids.default_row, None, ids.first, ids.count - ids.backfilled)
    index = id_index(stored, segment[stored.offset : stored.offset + stored.bytes], packed, ids.has_bits)
    first = index.directory[:, 0]
    steps = np.diff(first)
    seeds = index.directory[:, 1]
    is_outside = (
        first[0] != 0 or first[-1] != stored.slots or (steps < 0).any() or (steps >= LARGEST_SLOTS).any()
    )
    if is_outside or (seeds < 0).any() or (seeds >= LARGEST_SEED).any():
        raise SegmentError(
            f"the id index of table {table.name!r} points outside the table, or has a seed of more than 32 "
            "bits"
        )
    return RowMap(ids.count, ids.default_row, index)


def check_ids(t: StoredTable) -> None:
    """SegmentError: what a header says of a table's ids cannot be. The place of the index in the file is
    not looked at."""
    ids, what = t.ids, f"table {t.name!r}"
    if ids is None:
        return
    numbers = (ids.count, ids.first, ids.backfilled, ids.deleted)
    is_outside = (
        not all(type(n) is int for n in numbers) or not 0 <= max(ids.backfilled, ids.deleted) <= ids.count
    )
    if is_outside or min(ids.backfilled, ids.deleted) != 0 or not isinstance(ids.missing, str):
        raise SegmentError(
            f"{what} has ids with a number of the wrong type, or more of them backfilled than there are"
        )
    if ids.default_row is not None and (type(ids.default_row) is not int or ids.default_row != t.rows - 1):
        raise SegmentError(
            f"{what} has default row {str(ids.default_row)[:30]}; expected the last one, {t.rows - 1}"
        )
    if ids.index is None:
        if not -(2**63) <= ids.first <= 2**63 - ids.count or ids.count != t.rows - (
            ids.default_row is not None
        ):
            raise SegmentError(f"{what} has {ids.count} ids from {ids.first} on in {t.rows} rows")
        return
    index = ids.index
    named = (
        index.rows,
        index.row_bytes,
        index.offset,
        index.chunk_rows,
        index.first_chunk,
        index.buckets,
        index.bucket_ids,
    )
    more = (index.first_bucket, index.owned, index.slots, index.filter_words, index.marked)
    if not all(type(n) is int and n >= 0 for n in (*named, *more)) or type(index.id_at) is not int:
        raise SegmentError(f"the id index of {what} has a number of the wrong type")
    if (
        not 1 <= index.buckets <= LARGEST_BUCKETS
        or index.buckets & (index.buckets - 1)
        or index.bucket_ids >= 2**63
    ):
        raise SegmentError(f"the id index of {what} has {index.buckets} buckets; expected a power of two")
    if index.first_bucket + index.owned > index.buckets or index.owned < 1:
        raise SegmentError(
            f"the id index of {what} holds buckets [{index.first_bucket}, +{index.owned}) of {index.buckets}"
        )
    if index.marked and not index.slots:
        raise SegmentError(
            f"the id index of {what} has marks of {index.marked} row numbers, and no slot that they could "
            "lead to"
        )
    expected = plan_index(RowFormat.parse(t.row_format), t.dim, index.slots, index.buckets, index.bucket_ids, index.first_bucket,
                          index.owned, ids.has_bits, index.filter_words, index.marked)  # fmt: skip
    if (
        index.slots != t.rows - 1
        or ids.count > index.slots
        or replace(index, offset=0, first_chunk=0) != expected
    ):
        raise SegmentError(
            f"the id index of {what} does not fit {ids.count} ids in {index.slots} slots of {t.rows} rows"
        )
