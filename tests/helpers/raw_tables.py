"""Tables of raw ids, made slowly in plain Python as `quant.rows.ids` specifies them, and a dictionary that
says what they must answer."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from reference import REFERENCE
from tables import values_of

from tableside.quant import RowFormat, Source, Table
from tableside.quant.rows.ids import (
    MIX,
    PILOT,
    SEED,
    SLOT,
    SPREAD,
    IdIndex,
    RowMap,
    id_at,
    mix,
    pilots_for,
    slots_for,
)

_WIDE = np.uint64(32)
_PILOTS = np.arange(1, 257, dtype=np.uint64) * np.uint64(PILOT)
EXTREMES = (-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 1, 2**32, -(2**32))


def _placed(ids: np.ndarray, seed: int, slots: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Pilots [slots * 5 // 16 + 1] and the slot of each id of one bucket; None: this seed does not place
    all of them."""
    g = (mix(ids) ^ np.uint64(seed * SEED % 2**64)) * np.uint64(SPREAD)
    g = (g ^ (g >> _WIDE)) * np.uint64(MIX)
    pilots = np.zeros(slots * 5 // 16 + 1, np.uint8)
    group_of = (g >> _WIDE) * np.uint64(len(pilots)) >> _WIDE
    taken, slot_of = np.zeros(slots, bool), np.zeros(len(ids), np.int64)
    groups, counts = np.unique(group_of, return_counts=True)
    for group in groups[np.argsort(-counts, kind="stable")]:
        members = np.flatnonzero(group_of == group)
        tried = ((g[members] ^ _PILOTS[:, None]) * np.uint64(SLOT) >> _WIDE) * np.uint64(slots) >> _WIDE
        for pilot, wanted in enumerate(tried.astype(np.int64)):
            if len(set(wanted.tolist())) == len(members) and not taken[wanted].any():
                pilots[group], slot_of[members] = pilot, wanted
                taken[wanted] = True
                break
        else:
            return None
    return pilots, slot_of


@dataclass(frozen=True)
class Built:
    """An index without kept ids: the directory, the pilots, and the row of each id, -1 where its bucket is
    not here."""

    directory: np.ndarray
    pilots: np.ndarray
    rows: np.ndarray


def build(ids: np.ndarray, bucket_of: np.ndarray, buckets: int) -> Built:
    """bucket_of: of each id, counted from the first one that is here."""
    directory = np.zeros((buckets + 1, 2), np.int64)
    rows, parts, first = np.full(len(ids), -1, np.int64), [], 0
    for bucket in range(buckets):
        mine = np.flatnonzero(bucket_of == bucket)
        slots = slots_for(len(mine))
        seed, found = 0, None
        while found is None:
            found, seed = _placed(ids[mine], seed, slots), seed + 1
        directory[bucket] = first, seed - 1
        parts.append((first * 5 // 16 + bucket, found[0]))
        rows[mine] = first + found[1]
        first += slots
    directory[buckets, 0] = first
    pilots = np.zeros(pilots_for(first, buckets), np.uint8)
    for at, part in parts:
        pilots[at : at + len(part)] = part[: len(pilots) - at]
    return Built(directory, pilots, rows)


def packed_of(values: np.ndarray, row_format: RowFormat) -> np.ndarray:
    """fp32 [rows, dim] -> uint8 [rows, row_bytes]."""
    packed = np.zeros((len(values), row_format.row_bytes(values.shape[1])), np.uint8)
    if len(values):
        REFERENCE.quantize(np.ascontiguousarray(values), Source.FP32, row_format, packed)
    return packed


def raw_table(
    ids: Sequence[int] | np.ndarray,
    values: np.ndarray,
    row_format: RowFormat,
    *,
    missing: np.ndarray | None = None,
    buckets: int = 4,
    bucket_ids: int = 0,
    owned: tuple[int, int] | None = None,
    backfilled: Collection[int] = (),
) -> Table:
    """A table of raw ids, fp32 values [ids, dim]; its last row is the default row.

    missing: what ids without a row yield, fp32 [dim]; None: they are refused. buckets, bucket_ids: as
    `IdIndex` has them. owned: the buckets [first, end) that are here; None: all. backfilled: ids whose rows
    came from an older version. Ids are kept in the rows' padding where that has room, else in an array.
    """
    given = np.array(ids, np.int64).reshape(-1)
    first_bucket, end = owned or (0, buckets)
    bucket_of = given // bucket_ids if bucket_ids else (mix(given) & np.uint64(buckets - 1)).astype(np.int64)
    is_here = (bucket_of >= first_bucket) & (bucket_of < end)
    given, values = given[is_here], values[is_here]
    built = build(given, bucket_of[is_here] - first_bucket, end - first_bucket)
    slots, dim = int(built.directory[-1, 0]), values.shape[1]
    packed = np.zeros((slots + 1, row_format.row_bytes(dim)), np.uint8)
    packed[built.rows] = packed_of(values, row_format)
    packed[slots] = packed_of(
        np.zeros((1, dim), np.float32) if missing is None else missing[None], row_format
    )
    kept, at = np.zeros(slots, np.int64), id_at(row_format, dim)
    if at >= 0:
        kept = np.ndarray((slots,), "<i8", packed, at, (packed.shape[1],))
    kept[:] = given[0] if len(given) else 0  # a slot without an id keeps that of another slot
    kept[built.rows] = given
    bits = np.packbits(
        np.isin(np.arange(slots), built.rows[np.isin(given, list(backfilled))]), bitorder="little"
    )
    index = IdIndex(
        built.directory,
        built.pilots,
        kept,
        buckets,
        bucket_ids,
        first_bucket,
        bits if len(backfilled) else None,
    )
    return Table(packed, row_format, dim, RowMap(len(given), None if missing is None else slots, index))


def dense_table(
    count: int,
    row_format: RowFormat,
    dim: int,
    *,
    missing: np.ndarray | None = None,
    first: int = 0,
    own: int | None = None,
) -> Table:
    """A table of the ids [first, first + count), with a default row where `missing` says what ids without
    a row yield."""
    rows = (
        values_of(count, dim) if missing is None else np.concatenate([values_of(count, dim), missing[None]])
    )
    return Table(
        packed_of(rows, row_format),
        row_format,
        dim,
        RowMap(count, None if missing is None else count, None, first, own),
    )


@dataclass(frozen=True)
class Known:
    """What a table must answer, by a dictionary. twin: the same rows where an id is a row number, the default
    row last.

    rows: id -> row of the twin; backfilled: ids whose rows came from an older version.
    """

    twin: Table
    rows: dict[int, int]
    backfilled: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        ids: Sequence[int],
        values: np.ndarray,
        row_format: RowFormat,
        missing: np.ndarray | None,
        backfilled: Collection[int] = (),
    ) -> "Known":
        """The arguments are those of `raw_table`."""
        last = np.zeros(values.shape[1], np.float32) if missing is None else missing
        packed = packed_of(np.concatenate([values, last[None]]), row_format)
        rows = {int(id): n for n, id in enumerate(ids)}
        return cls(Table(packed, row_format, values.shape[1]), rows, frozenset(backfilled) & rows.keys())

    def twins(self, ids: np.ndarray) -> np.ndarray:
        """The twin's row of each id, int64."""
        return np.array([self.rows.get(id, self.twin.rows - 1) for id in ids.tolist()], np.int64)

    def found(self, ids: np.ndarray) -> np.ndarray:
        return np.array([id in self.rows for id in ids.tolist()], np.bool_)

    def unfound(self, ids: np.ndarray) -> tuple[int, int]:
        """Ids without a row, and those whose rows came from an older version."""
        return int((~self.found(ids)).sum()), sum(id in self.backfilled for id in ids.tolist())


def random_ids(count: int, seed: int = 0) -> np.ndarray:
    """Different ids in any order, the extremes first."""
    drawn = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count)
    return np.array(list(dict.fromkeys([*EXTREMES, *drawn.tolist()]))[:count], np.int64)
