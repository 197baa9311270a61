"""The parts of a header that place rows and id indexes in a segment, and arrays over them."""

from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tableside.loader.errors import SegmentError
from tableside.quant.contract import Bytes, Ids
from tableside.quant.row_format import RowFormat
from tableside.quant.rows.hot import WORD_BYTES, hot_words
from tableside.quant.rows.ids import ID_BYTES, U64, DirectoryField, IdIndex, RowMap, id_at, pilots_for
from tableside.quant.rows.overlay import Marks, mark_words

INDEX_UNIT_BYTES = 64  # parts of an index begin at multiples of this
LARGEST_BUCKETS, LARGEST_SLOTS = 1 << 20, 1 << 32  # of a table, and of one bucket
LARGEST_SEED = 1 << 32
_ENTRY_BYTES = 8 * len(DirectoryField._fields)
TIME_BYTES = 4  # of a row's time
LONGEST_S = 2**32 - 1  # the last time that a row can have, in 2106
Times = NDArray[np.uint32]
_POLICIES = ("error", "zero", "mean", "constant")


@dataclass(frozen=True)
class StoredRows:
    """Rows of bytes. offset: from the start of the file; first_chunk: index of the first checksum."""

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
        """Returns rows [start, stop) of a chunk."""
        return chunk * self.chunk_rows, min((chunk + 1) * self.chunk_rows, self.rows)


@dataclass(frozen=True)
class StoredIndex(StoredRows):
    """The id index of a table of raw ids (`quant.rows.ids`), in 64-byte units, checksummed like rows. Its
    parts, 64-byte aligned: directory, pilots, ids (unless in the rows' padding), a bit per row for backfilled
    ones, in a delta filter and marks (`quant.rows.overlay`), and times. buckets: of the whole table; `owned`
    of them, from `first_bucket`, are here. bucket_ids: ids per bucket; 0: by hash. slots: rows without the
    default row. id_at: place of the id in its row; -1: in the index. filter_words: uint64 of the filter.
    marked: row numbers with marks; 0: none. has_times: whether each slot has a time, seconds since 1970 as
    uint32 (`times_of`); not in a repr, which `Segment.content` is made of. numbered: how many rows of the
    version have marks (`quant.rows.hot`), which are all that there is of hot rows; 0: these are none."""

    buckets: int
    bucket_ids: int
    first_bucket: int
    owned: int
    slots: int
    id_at: int
    filter_words: int = 0
    marked: int = 0
    has_times: bool = field(default=False, repr=False)
    numbered: int = field(default=0, repr=False)


@dataclass(frozen=True)
class StoredIds:
    """How ids become rows (`quant.rows.ids.RowMap`). count: ids with rows; backfilled: rows copied from an
    older version. missing: the policy; default_row: the last row, read for missing ids; None: they are
    refused. first: the id of row 0, without an index. deleted: ids a delta deletes; the bits mark these.
    strings: they are those of strings (loader.string_ids); a delta does not say it. ttl_s, max_rows: what
    compaction keeps of them (loader.deltas.expiry), 0: all; expired, evicted: ids that compactions dropped
    since the load, for their age, and beyond max_rows."""

    count: int
    missing: str = "error"
    default_row: int | None = None
    first: int = 0
    backfilled: int = 0
    index: StoredIndex | None = None
    deleted: int = 0
    strings: bool = False
    ttl_s: int = field(default=0, repr=False)
    max_rows: int = field(default=0, repr=False)
    expired: int = field(default=0, repr=False)
    evicted: int = field(default=0, repr=False)

    @property
    def has_bits(self) -> bool:
        """Returns whether the index has a bit for each row."""
        return self.backfilled > 0 or self.deleted > 0


@dataclass(frozen=True)
class StoredTable(StoredRows):
    """A table. rows: including empty slots and the default row. ids: None: ids are row numbers, others are
    refused."""

    name: str
    key: str
    row_format: str
    dim: int
    ids: StoredIds | None = None

    @property
    def index(self) -> StoredIndex | None:
        """Returns the id index; None: ids are row numbers, or follow each other."""
        return None if self.ids is None else self.ids.index

    @property
    def has_times(self) -> bool:
        """Returns whether each row has the time of its last change."""
        return self.index is not None and self.index.has_times

    @property
    def id_kind(self) -> str:
        """Returns what its ids are, as model.toml says it."""
        return "row" if self.index is None or self.ids is None else "string" if self.ids.strings else "raw"

    @property
    def id_count(self) -> int:
        """Returns the number of ids with a row of their own."""
        return self.rows if self.ids is None else self.ids.count


def plan_index(
    row_format: RowFormat, dim: int, slots: int, buckets: int, bucket_ids: int = 0, first_bucket: int = 0,
    owned: int | None = None, has_backfilled: bool = False, filter_words: int = 0, marked: int = 0,
    has_times: bool = False, numbered: int = 0,
) -> StoredIndex:  # fmt: skip
    """Plans an index; offset and first checksum are set later. owned: None for all buckets."""
    owned = buckets if owned is None else owned
    at = -1 if filter_words or numbered else id_at(row_format, dim)
    rows = (0, INDEX_UNIT_BYTES, 0, (1 << 20) // INDEX_UNIT_BYTES, 0)
    where = (buckets, bucket_ids, first_bucket, owned)
    index = StoredIndex(*rows, *where, slots, at, filter_words, marked, has_times, numbered)
    end = sum(-(-size // INDEX_UNIT_BYTES) for size in _part_bytes(index, has_backfilled))
    return replace(index, rows=end)


def index_parts(index: StoredIndex, data: Bytes, has_backfilled: bool) -> list[Bytes]:
    """Returns directory, pilots, ids and bits over an index's bytes; absent parts are empty."""
    return _parts(index, data, has_backfilled)[:4]


def filter_part(index: StoredIndex, data: Bytes, has_deleted: bool) -> NDArray[np.uint64]:
    """Returns the filter of a delta's index over its bytes: uint64 [filter_words]."""
    return _parts(index, data, has_deleted)[4].view("<u8")


def marks_part(index: StoredIndex, data: Bytes, has_deleted: bool, first: int) -> Marks | None:
    """Returns the marks of a delta's index over its bytes. first: the id of row 0."""
    if not index.marked:
        return None
    bits, before, slots = _parts(index, data, has_deleted)[5:8]
    return Marks(first, index.marked, bits.view("<u8"), before.view("<u4"), slots.view("<u4"))


def hot_part(index: StoredIndex, data: Bytes) -> U64:
    """Returns the marks of hot rows over an index's bytes, uint64 [words, 2]."""
    return _parts(index, data, False)[0].view("<u8").reshape(-1, 2)


def times_part(index: StoredIndex, data: Bytes, has_bits: bool) -> Times:
    """Returns when each slot was written last, uint32 [slots], over an index's bytes; empty: it has no
    times."""
    return _parts(index, data, has_bits)[8].view("<u4")


def seconds(now: float) -> np.uint32:
    """Returns a time of `time.time` as a row keeps it."""
    return np.uint32(min(max(now, 0), LONGEST_S))


def times_of(table: StoredTable, segment: Bytes) -> Times | None:
    """Returns when each slot of a table was written last, in seconds since 1970; None: it has no times."""
    if table.ids is None or (index := table.ids.index) is None or not table.has_times:
        return None
    return times_part(index, segment[index.offset : index.offset + index.bytes], table.ids.has_bits)


def _parts(index: StoredIndex, data: Bytes, has_backfilled: bool) -> list[Bytes]:
    parts, at = [], 0
    for size in _part_bytes(index, has_backfilled):
        parts.append(data[at : at + size])
        at += -(-size // INDEX_UNIT_BYTES) * INDEX_UNIT_BYTES
    return parts


def _part_bytes(index: StoredIndex, has_backfilled: bool) -> tuple[int, ...]:
    if index.numbered:
        return (WORD_BYTES * hot_words(index.numbered),)
    return (
        (index.owned + 1) * _ENTRY_BYTES,
        pilots_for(index.slots, index.owned),
        0 if index.id_at >= 0 else index.slots * ID_BYTES,
        -(-index.slots // 8) if has_backfilled else 0,
        8 * index.filter_words,
        8 * mark_words(index.marked),
        4 * mark_words(index.marked),
        4 * index.slots if index.marked else 0,
        TIME_BYTES * index.slots if index.has_times else 0,
    )


def write_index(stored: StoredIds, index: IdIndex, data: Bytes, packed: Bytes) -> tuple[Ids, Bytes]:
    """Writes directory and pilots to the index's bytes; returns the arrays of slot ids and bits, to be
    filled."""
    assert stored.index is not None
    directory, pilots, ids, bits = index_parts(stored.index, data, stored.has_bits)
    directory[:] = index.directory.reshape(-1).view(np.uint8)
    pilots[:] = index.pilots
    return _kept_ids(stored.index, ids, packed), bits


def _kept_ids(index: StoredIndex, ids: Bytes, packed: Bytes) -> Ids:
    """Returns the ids of an index's slots, from the rows or from the index."""
    if index.id_at < 0:
        return ids.view("<i8")
    return np.ndarray((index.slots,), "<i8", packed.reshape(-1), index.id_at, (packed.shape[1],))


def id_index(index: StoredIndex, data: Bytes, packed: Bytes, has_backfilled: bool) -> IdIndex:
    """Returns the index over its bytes and the table's rows, uint8 [rows, row_bytes]; does not check it."""
    directory, pilots, ids, bits = index_parts(index, data, has_backfilled)
    entries, kept = (
        directory.view("<i8").reshape(-1, len(DirectoryField._fields)),
        _kept_ids(index, ids, packed),
    )
    backfilled = bits if has_backfilled else None
    return IdIndex(entries, pilots, kept, index.buckets, index.bucket_ids, index.first_bucket, backfilled)


def keep_zero_apart(index: IdIndex, kept: Ids, has_zero: bool) -> None:
    """Fills the empty slot that id 0 leads to with another id, unless the table has id 0. kept: int64
    [slots]."""
    slot = int(index.places(np.zeros(1, np.int64))[0])
    if slot >= 0 and not has_zero and not kept[slot]:
        kept[slot] = next(i for i in count(1) if int(index.places(np.array([i]))[0]) != slot)


def row_map(table: StoredTable, segment: Bytes, packed: Bytes) -> RowMap | None:
    """Returns the map of a table's ids to rows of `packed`. SegmentError: the index points outside the
    table."""
    if (ids := table.ids) is None:
        return None
    if (stored := ids.index) is not None and stored.numbered:
        return None
    if stored is None:
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
    """Raises SegmentError for impossible values in a table's ids; does not check the index's offset."""
    ids, what = t.ids, f"table {t.name!r}"
    if ids is None:
        return
    lives = (ids.ttl_s, ids.max_rows, ids.expired, ids.evicted)
    if not all(type(n) is int and 0 <= n < 2**63 for n in lives) or (
        (ids.ttl_s or ids.max_rows) and not (ids.index and ids.index.has_times)
    ):
        raise SegmentError(f"{what} has ttl or max_rows without times of its rows, or a wrong number of them")
    numbers = (ids.count, ids.first, ids.backfilled, ids.deleted)
    most = max(ids.backfilled, ids.deleted) if all(type(n) is int for n in numbers) else -1
    if (
        not 0 <= most <= ids.count
        or min(ids.backfilled, ids.deleted) != 0
        or not isinstance(ids.missing, str)
        or type(ids.strings) is not bool
    ):
        raise SegmentError(
            f"{what} has ids with a number of the wrong type, or more of them backfilled than there are"
        )
    if ids.default_row is not None and (type(ids.default_row) is not int or ids.default_row != t.rows - 1):
        raise SegmentError(
            f"{what} has default row {str(ids.default_row)[:30]}; expected the last one, {t.rows - 1}"
        )
    if ids.index is None:
        rows = t.rows - (ids.default_row is not None)
        if not -(2**63) <= ids.first <= 2**63 - ids.count or ids.count != rows:
            raise SegmentError(f"{what} has {ids.count} ids from {ids.first} on in {t.rows} rows")
        return
    index = ids.index
    others = [number for name, number in vars(index).items() if name not in ("id_at", "has_times")]
    kinds = (type(index.id_at), type(index.has_times))
    if not all(type(n) is int and n >= 0 for n in others) or kinds != (int, bool):
        raise SegmentError(f"the id index of {what} has a number of the wrong type")
    is_power = 1 <= index.buckets <= LARGEST_BUCKETS and not index.buckets & (index.buckets - 1)
    if not is_power or index.bucket_ids >= 2**63:
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
    if index.numbered and (not index.slots or index.filter_words or index.marked or index.has_times):
        raise SegmentError(f"the id index of {what} has marks of hot rows, and none of these or other parts")
    buckets = (index.buckets, index.bucket_ids, index.first_bucket, index.owned)
    shape = (RowFormat.parse(t.row_format), t.dim, index.slots)
    layers = (index.filter_words, index.marked)
    expected = plan_index(*shape, *buckets, ids.has_bits, *layers, index.has_times, index.numbered)
    is_planned = replace(index, offset=0, first_chunk=0) == expected
    is_planned &= index.id_at < 0 or index.id_at + ID_BYTES <= t.row_bytes
    if index.slots != t.rows - 1 or ids.count > index.slots or not is_planned:
        raise SegmentError(
            f"the id index of {what} does not fit {ids.count} ids in {index.slots} slots of {t.rows} rows"
        )
