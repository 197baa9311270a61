"""Segments of raw ids without a load: an id index is built slowly, in plain numpy, from its specification
(`quant.rows.ids`)."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from planned_tables import planned_tables

from tableside.loader.model.specs import FeatureSpec
from tableside.loader.segment.header import Header, StoredScorer
from tableside.loader.segment.stored import StoredIds, StoredTable, index_parts, plan_index
from tableside.loader.segment.writer import SegmentWriter
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat, Source, choose
from tableside.quant.rows.ids import MIX, PILOT, SEED, SLOT, SPREAD, mix, pilots_for, slots_for

WIDE = np.uint64(32)


@dataclass(frozen=True)
class RawTable:
    """A table to be written. ids: int64 [n], all different; values: fp32 [n, dim]. default: the vector of
    a missing id; None: such an id is refused. backfilled: which ids came from an older version, bool [n];
    None: none."""

    ids: np.ndarray
    values: np.ndarray
    row_format: RowFormat = RowFormat.INT8
    buckets: int = 8
    bucket_ids: int = 0
    default: np.ndarray | None = None
    backfilled: np.ndarray | None = None


@dataclass(frozen=True)
class DenseTable:
    """A table whose ids are [first, first + n), with a policy; the `backfilled` last ones came from an
    older version."""

    values: np.ndarray
    row_format: RowFormat = RowFormat.INT8
    default: np.ndarray | None = None
    first: int = 0
    backfilled: int = 0
    is_plain: bool = False  # ids are row numbers, as in a segment of format version 1


@dataclass(frozen=True)
class BuiltIndex:
    """directory int64 [buckets + 1, 2], pilots uint8, rows: the row of each id."""

    directory: np.ndarray
    pilots: np.ndarray
    rows: np.ndarray


def build_index(ids: np.ndarray, buckets: int, bucket_ids: int = 0) -> BuiltIndex:
    """A perfect hash of ids [n], all different: each bucket takes the first seed with which every group
    finds a pilot."""
    bucket = ids // bucket_ids if bucket_ids else (mix(ids) & np.uint64(buckets - 1)).astype(np.int64)
    members = [np.flatnonzero(bucket == b) for b in range(buckets)]
    slots = [slots_for(m.size) for m in members]
    directory = np.zeros((buckets + 1, 2), np.int64)
    directory[1:, 0] = np.cumsum(slots)
    pilots, rows = np.zeros(pilots_for(sum(slots), buckets), np.uint8), np.zeros(ids.size, np.int64)
    for b, at in enumerate(members):
        if at.size:
            first = int(directory[b, 0])
            directory[b, 1], chosen, rows[at] = _place(mix(ids[at]), slots[b])
            pilots[first * 5 // 16 + b :][: chosen.size] = chosen
            rows[at] += first
    return BuiltIndex(directory, pilots, rows)


def _place(hashes: np.ndarray, slots: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Seed, pilots and slot of each hash of one bucket."""
    for seed in range(1000):
        g = (hashes ^ np.uint64(seed * SEED % 2**64)) * np.uint64(SPREAD)
        g = (g ^ (g >> np.uint64(32))) * np.uint64(MIX)
        pilots = slots * 5 // 16 + 1
        group = ((g >> WIDE) * np.uint64(pilots) >> WIDE).astype(np.int64)
        members = np.split(
            np.argsort(group, kind="stable"), np.cumsum(np.bincount(group, minlength=pilots))[:-1]
        )
        by_pilot = _slots(g, slots)
        if (chosen := _choose(members, by_pilot, slots, np.random.default_rng(seed))) is not None:
            return seed, chosen, by_pilot[chosen[group], np.arange(g.size)]
    raise AssertionError(f"no seed places {hashes.size} ids in {slots} slots")


def _choose(
    members: list[np.ndarray], by_pilot: np.ndarray, slots: int, rng: np.random.Generator
) -> np.ndarray | None:
    """A pilot for each group, uint8, or None. A group that fits nowhere drives out those that it costs
    least to place again."""
    pilots, taken_by, cost = np.zeros(len(members), np.uint8), np.full(slots, -1), np.zeros(slots)
    waiting = [(-m.size, n) for n, m in enumerate(members) if m.size]
    heapq.heapify(waiting)
    for _ in range(40 * len(waiting) + 200):
        if not waiting:
            return pilots
        size, n = heapq.heappop(waiting)
        where = by_pilot[:, members[n]]
        ordered = np.sort(where, axis=1)
        meets = (ordered[:, 1:] == ordered[:, :-1]).any(1)
        total = np.where(meets, np.inf, cost[where].sum(1))
        if np.isinf(total.min()):
            return None
        best = rng.choice(np.flatnonzero(total == total.min()))
        for other in {int(x) for x in taken_by[where[best]]} - {-1}:
            freed = by_pilot[pilots[other], members[other]]
            taken_by[freed], cost[freed] = -1, 0
            heapq.heappush(waiting, (-members[other].size, other))
        pilots[n] = best
        taken_by[where[best]], cost[where[best]] = n, size * size
    return None


def _slots(g: np.ndarray, slots: int) -> np.ndarray:
    """The slot of each hash with each pilot: int64 [256, hashes]."""
    pilot = (np.arange(256, dtype=np.uint64)[:, None] + np.uint64(1)) * np.uint64(PILOT)
    return (((g ^ pilot) * np.uint64(SLOT) >> WIDE) * np.uint64(slots) >> WIDE).astype(np.int64)


def publish_tables(
    root: Path,
    tables: Mapping[str, RawTable | DenseTable],
    name: str = "demo",
    features: tuple[FeatureSpec, ...] = (),
    scorer: StoredScorer | None = None,
    program: bytes = b"",
) -> int:
    """Publishes tables as the next version of a model; returns its number. program: the archive of the
    scorer."""
    built = {
        n: build_index(t.ids, t.buckets, t.bucket_ids) for n, t in tables.items() if isinstance(t, RawTable)
    }
    shapes, ids = [], {}
    for n, t in tables.items():
        stored = _stored_ids(t, built.get(n))
        is_one_more = isinstance(t, RawTable) or t.default is not None
        rows = len(t.values) if stored is None or stored.index is None else stored.index.slots
        shapes.append((n, f"{n}.weight", t.row_format, rows + is_one_more, t.values.shape[1]))
        if stored is not None:
            ids[n] = stored
    features = features or tuple(FeatureSpec(n, n) for n in tables)
    model = Model(root, name)
    with model.loading() as version:
        header = Header(
            name, version, "2026-11-20T00:00:00+00:00", planned_tables(shapes, ids), features, scorer=scorer
        )
        writer = model.writer(version, header, program)
        for stored_table in writer.header.tables:
            _write(writer, stored_table, tables[stored_table.name], built.get(stored_table.name))
        writer.seal({"seconds": 1.0})
        model.publish(version)
    return version


def _stored_ids(t: RawTable | DenseTable, built: BuiltIndex | None) -> StoredIds | None:
    policy = "error" if t.default is None else "constant"
    if isinstance(t, DenseTable):
        default_row = None if t.default is None else len(t.values)
        return None if t.is_plain else StoredIds(len(t.values), policy, default_row, t.first, t.backfilled)
    assert built is not None
    slots = int(built.directory[-1, 0])
    backfilled = 0 if t.backfilled is None else int(t.backfilled.sum())
    index = plan_index(
        t.row_format, t.values.shape[1], slots, t.buckets, t.bucket_ids, has_backfilled=backfilled > 0
    )
    return StoredIds(t.ids.size, policy, None if t.default is None else slots, 0, backfilled, index)


def _write(
    writer: SegmentWriter, stored: StoredTable, t: RawTable | DenseTable, built: BuiltIndex | None
) -> None:
    packed = writer.rows(stored, 0, stored.rows)
    rows = np.zeros((stored.rows, stored.dim), np.float32)
    rows[built.rows if built is not None else slice(len(t.values))] = t.values
    if t.default is not None:
        rows[-1] = t.default
    choose().quantize(rows, Source.FP32, t.row_format, packed)
    if not isinstance(t, RawTable):
        return
    assert built is not None and stored.ids is not None and stored.ids.index is not None
    index = stored.ids.index
    kept = np.full(index.slots, t.ids[0] if t.ids.size else 0, np.int64)
    kept[built.rows] = t.ids
    directory, pilots, ids, bits = index_parts(
        index, writer.rows(index, 0, index.rows).reshape(-1), stored.ids.backfilled > 0
    )
    directory[:] = built.directory.reshape(-1).view(np.uint8)
    pilots[:] = built.pilots
    if index.id_at >= 0:
        packed[:-1, index.id_at : index.id_at + 8] = kept.view(np.uint8).reshape(-1, 8)
    else:
        ids[:] = kept.view(np.uint8)
    if stored.ids.backfilled:
        marks = np.zeros(index.slots, np.uint8)
        marks[built.rows] = t.backfilled
        bits[:] = np.packbits(marks, bitorder="little")
