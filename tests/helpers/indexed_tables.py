"""Tables of raw ids in memory, with what a dictionary says of them, and ids whose hashes are chosen."""

from dataclasses import dataclass, replace

import numpy as np
import tables

from tableside.quant import RowFormat, Table
from tableside.quant.cpu.index_builder import IndexBuilder, find_rows
from tableside.quant.rows.ids import (
    ID_BYTES,
    MIX,
    SEED,
    SPREAD,
    IdIndex,
    RowMap,
    id_at,
    pilots_for,
    slots_for,
)

_WORD = 1 << 64


def unmix(hashes: np.ndarray) -> np.ndarray:
    """The ids int64 [n] that have these hashes uint64 [n]: `mix` is undone step by step, from the last one
    on."""
    x = hashes.astype(np.uint64)
    for _ in range(2):
        x = x ^ (x >> np.uint64(32))
        x = x * np.uint64(pow(MIX, -1, _WORD))
    return (x ^ (x >> np.uint64(32))).view(np.int64)


def unspread(spreads: np.ndarray, seed: int = 0) -> np.ndarray:
    """The ids whose hashes, spread with a seed, are these uint64 [n]. The high half of such a number
    chooses the pilot."""
    x = spreads.astype(np.uint64) * np.uint64(pow(MIX, -1, _WORD))
    x = (x ^ (x >> np.uint64(32))) * np.uint64(pow(SPREAD, -1, _WORD))
    return unmix(x ^ np.uint64(seed * SEED % _WORD))


def built(
    ids: np.ndarray, buckets: int = 1, bucket_ids: int = 0, threads: int = 1, blocks: int = 3
) -> IdIndex:
    """The index of different ids int64 [n], given to the builder in blocks; its `ids` are empty."""
    builder = IndexBuilder(buckets, bucket_ids, threads)
    parts = np.array_split(np.arange(len(ids)), blocks)
    for part in parts:
        builder.count(ids[part])
    records = np.zeros((builder.begin(), 2), np.int64)
    for part in parts:
        builder.put(ids[part], part, records)
    assert not builder.distinct(records, "error").size
    return builder.build(records)


def rows_in(index: IdIndex, ids: np.ndarray) -> np.ndarray:
    """Where the native kernel finds ids, int64 [n]."""
    return find_rows(index, ids)


def check_index(index: IdIndex, ids: np.ndarray) -> np.ndarray:
    """Fails unless each id has a row of its own among the slots that its bucket should have. Returns the
    rows."""
    rows = rows_in(index, ids)
    assert index.slots == sum(
        map(slots_for, np.bincount(index.bucket_of(ids), minlength=index.buckets).tolist())
    )
    assert index.pilots.size == pilots_for(index.slots, index.buckets)
    assert not len(ids) or (rows.min() >= 0 and rows.max() < index.slots)
    assert np.bincount(rows, minlength=1).max() <= 1, "two ids have one row"
    return rows


@dataclass(frozen=True, eq=False)
class RawTable:
    """A table of raw ids, and its rows in the order in which they were given, the default row behind them.

    numbers: id -> its row of `plain`; it is the oracle, and knows nothing of an index.
    """

    table: Table
    plain: Table
    numbers: dict[int, int]

    def expected_rows(self, ids: np.ndarray) -> np.ndarray:
        """Rows of `plain` that these ids have; those that are missing have the default row."""
        return np.array([self.numbers.get(i, len(self.numbers)) for i in ids.tolist()], np.int64)

    def expected_found(self, ids: np.ndarray) -> np.ndarray:
        return np.array([i in self.numbers for i in ids.tolist()], np.bool_)

    @property
    def index(self) -> IdIndex:
        assert self.table.row_map is not None and self.table.row_map.index is not None
        return self.table.row_map.index

    def refusing(self) -> Table:
        """The table, where a missing id is an error."""
        assert self.table.row_map is not None
        return replace(self.table, row_map=replace(self.table.row_map, default_row=None))


def raw_table(
    ids: np.ndarray,
    row_format: RowFormat = RowFormat.INT8,
    dim: int = 64,
    buckets: int = 4,
    bucket_ids: int = 0,
    backfilled: np.ndarray | None = None,
) -> RawTable:
    """A table of different ids int64 [n]. backfilled: which of them came from an older version, bool [n]."""
    plain = tables.table_of(row_format, dim, max(2, len(ids) + 1), seed=len(ids))
    plain = replace(plain, packed=plain.packed[: len(ids) + 1])
    index = built(ids, buckets, bucket_ids)
    rows = check_index(index, ids)
    packed = np.zeros((index.slots + 1, plain.row_bytes), np.uint8)
    packed[rows], packed[index.slots] = plain.packed[:-1], plain.packed[-1]
    at = id_at(row_format, dim)
    kept = (
        np.ndarray((index.slots,), np.int64, packed.reshape(-1), at, (packed.shape[1],)) if at >= 0 else None
    )
    kept = np.zeros(index.slots, np.int64) if kept is None else kept
    kept[:] = ids[0] if len(ids) else 0
    kept[rows] = ids
    assert kept.itemsize == ID_BYTES
    bits = None
    if backfilled is not None:
        bits = np.packbits(
            np.bincount(rows[backfilled], minlength=index.slots).astype(np.bool_), bitorder="little"
        )
    index = replace(index, ids=kept, backfilled=bits)
    row_map = RowMap(len(ids), index.slots, index)
    return RawTable(
        Table(packed, row_format, dim, row_map), plain, {i: n for n, i in enumerate(ids.tolist())}
    )


def part_of(whole: RawTable, first: int, owned: int) -> RawTable:
    """Buckets [first, first + owned) of a table, as an owner of them holds it."""
    index, table = whole.index, whole.table
    begin, end = int(index.directory[first, 0]), int(index.directory[first + owned, 0])
    directory = index.directory[first : first + owned + 1] - np.array([begin, 0])
    pilots = np.zeros(pilots_for(end - begin, owned), np.uint8)
    for bucket in range(
        owned
    ):  # the roundings of two sums of slots differ, so each bucket's pilots move by themselves
        old, new = (int(d) * 5 // 16 + at for d, at in ((index.directory[first + bucket, 0], first + bucket),
                                                      (directory[bucket, 0], bucket)))  # fmt: skip
        count = int(directory[bucket + 1, 0] - directory[bucket, 0]) * 5 // 16 + 1
        pilots[new : new + count] = index.pilots[old : old + count]
    packed = np.concatenate([table.packed[begin:end], table.packed[-1:]])
    at = id_at(table.row_format, table.dim)
    kept = index.ids[begin:end].copy()
    if at >= 0:
        kept = np.ndarray((end - begin,), np.int64, packed.reshape(-1), at, (packed.shape[1],))
    here = IdIndex(directory, pilots, kept, index.buckets, index.bucket_ids, first)
    ids = np.array(list(whole.numbers), np.int64)
    mine = ids[here.bucket_of(ids) >= 0]
    row_map = RowMap(len(mine), end - begin, here)
    numbers = {i: n for n, i in enumerate(mine.tolist())}
    rows = [whole.numbers[i] for i in mine.tolist()] + [len(whole.numbers)]
    plain = replace(whole.plain, packed=whole.plain.packed[rows])
    return RawTable(Table(packed, table.row_format, table.dim, row_map), plain, numbers)


def kinds_of_ids(count: int = 700) -> dict[str, np.ndarray]:
    """Ids of the sorts that break hash tables, int64 [n] each, all different."""
    rng = np.random.default_rng(5)
    spread = rng.integers(0, 1 << 32, count, np.uint64)
    extremes = np.array([-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 2, 2**63 - 1])
    return {
        "random": np.unique(rng.integers(-(2**63), 2**63, count)),
        "a dense run": np.arange(count) - 50,
        "equal low bits": np.arange(count) << 40 | 77,
        "equal high bits": np.arange(count) + (1 << 62),
        "extremes": extremes,
        "one": np.array([-7]),
        "zero alone": np.array([0]),
        "none": np.zeros(0, np.int64),
        "one bucket": unmix(np.arange(count, dtype=np.uint64) << np.uint64(20) | np.uint64(2)),
        "one pilot": unspread(np.arange(count, dtype=np.uint64) | np.uint64(0xABCDEF << 40)),
        "two hashes by a high bit": unmix(
            np.concatenate([spread[: count // 2], spread[: count // 2] | np.uint64(1 << 63)])
        ),
    }
