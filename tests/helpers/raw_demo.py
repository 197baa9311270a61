"""Published models whose tables have raw ids or default rows, and what their lookups must give, by a
dictionary.

Every stored value is a whole number and every row holds 0 and 255, so that int8 rows are what was given, bit
for bit, and so are sums of them in any order. What the segment holds is written here, by its format, and not
by a load.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from planned_tables import planned_tables

from tableside.loader.model.specs import EvalSpec, FeatureSpec
from tableside.loader.segment.header import Header, StoredScorer
from tableside.loader.segment.stored import StoredIds, index_parts, plan_index
from tableside.loader.segment.writer import SegmentWriter
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat, Source, choose
from tableside.quant.cpu.index_builder import IndexBuilder, find_rows

EXTREMES = (-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 1)
CREATED = "2026-01-01T00:00:00+00:00"


@dataclass(frozen=True, eq=False)
class DemoTable:
    """ids int64 [n] and their rows fp32 [n, dim]. default: the row of an id that is missing; None: it is
    refused.

    is_raw False: the ids are consecutive; and without a default row, from 0 on, nothing but row numbers.
    backfilled: how many of the last rows came from an older version. buckets, bucket_ids: of the index.
    """

    ids: np.ndarray
    rows: np.ndarray
    default: np.ndarray | None = None
    row_format: str = "int8"
    is_raw: bool = True
    backfilled: int = 0
    missing: str = "error"
    buckets: int = 4
    bucket_ids: int = 0

    @property
    def dim(self) -> int:
        return int(self.rows.shape[1])

    @property
    def has_map(self) -> bool:
        return self.is_raw or self.default is not None


@dataclass
class Oracle:
    """What lookups of a table give. rows: id -> its row."""

    table: DemoTable
    rows: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = dict(zip(self.table.ids.tolist(), self.table.rows, strict=True))

    def has(self, ids: Sequence[int]) -> list[bool]:
        """A found mask."""
        return [i in self.rows for i in ids]

    def vectors(self, bags: Sequence[Sequence[int]], pooling: str) -> np.ndarray:
        """[bags, dim], or [ids, dim] where it is "none"."""
        default = self.table.default
        found = [[self.rows.get(i, default) for i in bag] for bag in bags]
        if pooling == "none":
            return np.array([row for bag in found for row in bag], np.float32).reshape(-1, self.table.dim)
        sums = [
            np.sum(bag, axis=0) / (len(bag) if pooling == "mean" else 1) if bag else np.zeros(self.table.dim)
            for bag in found
        ]
        return np.array(sums, np.float32).reshape(-1, self.table.dim)

    def unfound(self, ids: Sequence[int]) -> tuple[int, int]:
        """Ids that are missing, and ids whose row came from an older version."""
        old = set(self.table.ids[len(self.table.ids) - self.table.backfilled :].tolist())
        return sum(i not in self.rows for i in ids), sum(i in old for i in ids)


def whole_rows(rows: int, dim: int, seed: int) -> np.ndarray:
    """fp32 [rows, dim] of whole numbers that every row format but int2 and int4 holds as they are."""
    values = np.random.default_rng(seed).integers(0, 256, (rows, dim)).astype(np.float32)
    values[:, 0], values[:, 1] = 0, 255
    return values


def random_ids(count: int, seed: int) -> np.ndarray:
    """Different int64 ids [count], the extremes among them."""
    drawn = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count, np.int64, endpoint=True)
    found: np.ndarray = np.unique(np.concatenate([np.array(EXTREMES, np.int64), drawn]))
    return np.random.default_rng(seed).permutation(found)[:count] if count else found[:0]


@dataclass(frozen=True, eq=False)
class _Placed:
    """An index before it is stored. source: the row of the table that each slot has, or 0; has_row:
    whether it has one."""

    directory: np.ndarray
    pilots: np.ndarray
    source: np.ndarray
    has_row: np.ndarray


def _index(table: DemoTable) -> _Placed:
    ids = np.ascontiguousarray(table.ids, np.int64)
    builder = IndexBuilder(table.buckets, table.bucket_ids)
    builder.count(ids)
    records = np.zeros((builder.begin(), 2), np.int64)
    builder.put(ids, np.arange(len(ids)), records)
    builder.distinct(records, "error")
    index = builder.build(records)
    rows = find_rows(index, ids)
    source, has_row = np.zeros(index.slots, np.int64), np.zeros(index.slots, bool)
    source[rows], has_row[rows] = np.arange(len(ids)), True
    return _Placed(index.directory, index.pilots, source, has_row)


def publish_raw(
    root: Path,
    name: str,
    tables: Mapping[str, DemoTable],
    features: Sequence[FeatureSpec],
    scored: tuple[StoredScorer | None, bytes] = (None, b""),
    evaluation: EvalSpec | None = None,
) -> int:
    """Publishes a version of these tables; returns its number. scored: its scorer, and the scorer's
    program."""
    placed = {t: _index(table) for t, table in tables.items() if table.is_raw}
    shapes, ids = [], {}
    for t, table in tables.items():
        count = len(table.ids)
        slots = len(placed[t].source) if table.is_raw else count
        rows = slots + 1 if table.has_map else slots
        default_row = None if table.default is None else rows - 1
        row_format = RowFormat.parse(table.row_format)
        shapes.append((t, t, row_format, rows, table.dim))
        if not table.has_map:
            continue
        index = None
        if table.is_raw:
            index = plan_index(
                row_format,
                table.dim,
                slots,
                table.buckets,
                table.bucket_ids,
                has_backfilled=table.backfilled > 0,
            )
        first = 0 if table.is_raw or not count else int(table.ids[0])
        ids[t] = StoredIds(count, table.missing, default_row, first, table.backfilled, index)
    model = Model(root, name)
    with model.loading() as version:
        planned = planned_tables(shapes, ids)
        header = Header(
            name, version, CREATED, planned, tuple(features), scorer=scored[0], evaluation=evaluation
        )
        writer = model.writer(version, header, scored[1])
        _write(writer, tables, placed)
        writer.seal({"seconds": 1.0, "source_bytes": 1.0})
        model.publish(version)
    return version


def _write(writer: SegmentWriter, tables: Mapping[str, DemoTable], placed: Mapping[str, _Placed]) -> None:
    for stored in writer.header.tables:
        table, index = tables[stored.name], placed.get(stored.name)
        values = (
            table.rows if index is None else np.where(index.has_row[:, None], table.rows[index.source], 0)
        )
        if table.has_map:
            default = np.zeros(table.dim) if table.default is None else table.default
            values = np.concatenate([values, default[None]])
        packed = writer.rows(stored, 0, stored.rows)
        choose().quantize(
            np.ascontiguousarray(values, np.float32), Source.FP32, RowFormat.parse(table.row_format), packed
        )
        if index is not None:
            assert stored.ids is not None and stored.ids.index is not None
            _write_index(writer, stored.ids.index, table, index, packed)


def _write_index(
    writer: SegmentWriter, stored: Any, table: DemoTable, index: _Placed, packed: np.ndarray
) -> None:
    data = writer.rows(stored, 0, stored.rows).reshape(-1)
    directory, pilots, ids, bits = index_parts(stored, data, table.backfilled > 0)
    directory[:] = index.directory.astype("<i8").view(np.uint8).reshape(-1)
    pilots[:] = index.pilots
    kept = table.ids[index.source].astype("<i8") if len(index.source) else np.zeros(0, "<i8")
    if stored.id_at >= 0:
        packed[: len(kept), stored.id_at : stored.id_at + 8] = kept.view(np.uint8).reshape(-1, 8)
    else:
        ids[:] = kept.view(np.uint8)
    if table.backfilled:
        is_old = index.has_row & (index.source >= len(table.ids) - table.backfilled)
        bits[:] = np.packbits(is_old, bitorder="little")


# ---- a model with tables of every kind ----


def flat_row(dim: int, value: float) -> np.ndarray:
    """A default row: whole numbers as of `whole_rows`."""
    row = np.full(dim, value, np.float32)
    row[:2] = 0, 255
    return row


TABLES = {
    "user": DemoTable(random_ids(300, 1), whole_rows(300, 64, 1), flat_row(64, 7), missing="constant"),
    "item": DemoTable(
        random_ids(200, 2),
        whole_rows(200, 32, 2),
        np.zeros(32, np.float32),
        "fp16",
        missing="zero",
        buckets=1,
    ),
    "strict": DemoTable(random_ids(100, 3), whole_rows(100, 16, 3)),
    "old": DemoTable(
        random_ids(100, 4), whole_rows(100, 16, 4), flat_row(16, 9), backfilled=30, missing="backfill:raw@1"
    ),
    "chunked": DemoTable(
        np.arange(0, 400, 3), whole_rows(134, 16, 5), np.zeros(16, np.float32), missing="zero", bucket_ids=100
    ),
    "empty": DemoTable(random_ids(0, 6), whole_rows(0, 16, 6), flat_row(16, 3), missing="constant"),
    "word": DemoTable(
        np.arange(40), whole_rows(40, 8, 7), np.zeros(8, np.float32), "fp32", is_raw=False, missing="zero"
    ),
    "plain": DemoTable(np.arange(20), whole_rows(20, 8, 8), None, "fp32", is_raw=False),
}
FEATURES = (
    FeatureSpec("user", "user", "sum", "fp32"),
    FeatureSpec("clicked", "user", "mean", "fp32"),
    FeatureSpec("item", "item", "sum", "fp32"),
    FeatureSpec("seen", "item", "none", "fp32"),
    FeatureSpec("strict", "strict", "sum", "fp32"),
    FeatureSpec("old", "old", "sum", "fp32"),
    FeatureSpec("chunked", "chunked", "sum", "fp32"),
    FeatureSpec("empty", "empty", "sum", "fp32"),
    FeatureSpec("word", "word", "none", "fp32"),
    FeatureSpec("plain", "plain", "sum", "fp32"),
)
Request = dict[str, list[list[int]]]


def draw(seed: int, features: Sequence[FeatureSpec] = FEATURES, bags: int = 4) -> Request:
    """A request: bags of 0, 1, 2 or 4 ids a feature (so that means are exact), half of them missing where
    a table allows it."""
    rng = np.random.default_rng(seed)
    found: Request = {}
    for f in features:
        table = TABLES[f.table]
        there = table.ids.tolist()
        pool = there[:6] + rng.choice(there, 10).tolist() if there else []
        if table.default is not None:
            pool += [*EXTREMES, *rng.integers(-(2**63), 2**63 - 1, 10).tolist()]
        found[f.name] = [
            [pool[n] for n in rng.integers(0, len(pool), size)] for size in rng.choice([0, 1, 2, 4], bags)
        ]
    return found


def expected(
    request: Request, features: Sequence[FeatureSpec] = FEATURES
) -> tuple[dict[str, np.ndarray], dict[str, list[bool]]]:
    """Vectors and found masks [ids] by feature."""
    of = {f.name: f for f in features}
    oracles = {name: Oracle(TABLES[of[name].table]) for name in request}
    vectors = {name: oracles[name].vectors(bags, of[name].pooling) for name, bags in request.items()}
    return vectors, {
        name: oracles[name].has([i for bag in bags for i in bag]) for name, bags in request.items()
    }


def unfound(
    requests: Sequence[Request], features: Sequence[FeatureSpec] = FEATURES
) -> dict[tuple[str, str], int]:
    """(table, reason) -> how many ids of these requests it is counted for, where there are any."""
    counts: dict[tuple[str, str], int] = {}
    for request in requests:
        for f in features:
            found = Oracle(TABLES[f.table]).unfound([i for bag in request.get(f.name, []) for i in bag])
            for reason, count in zip(("missing", "backfilled"), found, strict=True):
                if count:
                    counts[f.table, reason] = counts.get((f.table, reason), 0) + count
    return counts
