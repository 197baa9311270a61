"""Id indexes in a GPU's memory: what the budget counts, where ids lie that it does not hold, and caches
over a swap."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tables
from planned_tables import planned_tables
from raw_tables import Known, random_ids, raw_table
from reference import REFERENCE
from tables import expected_of, values_of

from tableside.loader.model.specs import FeatureSpec
from tableside.loader.segment.header import Header
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredIds, StoredTable, index_parts, plan_index
from tableside.loader.segment.writer import SegmentWriter
from tableside.quant import Pooling, QuantError, RowFormat, Table
from tableside.quant.gpu.residence import plan
from tableside.serving.errors import ServingError
from tableside.serving.model.placement import Placer
from tableside.serving.model.placements import size_of
from tableside.serving.settings import ServerSettings

HOME: Any = SimpleNamespace(cache=None)  # a device without a cache
COUNT = 300
IDS = random_ids(COUNT)
DEFAULT = np.full(64, 4.0, np.float32)
PADDED, ARRAY = (
    raw_table(IDS, values_of(COUNT, 64), RowFormat.INT8, missing=DEFAULT),
    raw_table(IDS, values_of(COUNT, 32), RowFormat.FP16, missing=DEFAULT[:32]),
)

needs_interpreter = pytest.mark.skipif(
    "__import__('tables').DEVICE != 'interpreter'", reason="places tables on the CPU's memory"
)


def stored_of(held: dict[str, Table]) -> tuple[StoredTable, ...]:
    """The tables as a header has them."""
    planned, ids = [], {}
    for name, table in held.items():
        planned.append((name, name, table.row_format, table.rows, table.dim))
        if (row_map := table.row_map) is not None:
            index = row_map.index
            stored = (
                None if index is None else plan_index(table.row_format, table.dim, index.slots, index.buckets)
            )
            ids[name] = StoredIds(row_map.count, "zero", row_map.default_row, row_map.first, 0, stored)
    return planned_tables(planned, ids)


@pytest.fixture
def attach(root: Path) -> Callable[[dict[str, Table]], Segment]:
    """attach({"name": table}) -> a segment that holds these tables."""

    def run(held: dict[str, Table]) -> Segment:
        root.mkdir(exist_ok=True)
        path = root / f"segment-{len(list(root.iterdir()))}"
        writer = SegmentWriter(
            path,
            Header("demo", 1, "now", stored_of(held), (FeatureSpec("f", next(iter(held)), "none", "fp32"),)),
        )
        for stored in writer.header.tables:
            table = held[stored.name]
            writer.rows(stored, 0, stored.rows)[:] = table.packed
            if stored.ids is not None and (index := stored.ids.index) is not None:
                assert table.row_map is not None
                assert table.row_map.index is not None
                given = table.row_map.index
                arrays = (given.directory, given.pilots, given.ids, np.zeros(0))
                parts = index_parts(index, writer.rows(index, 0, index.rows).reshape(-1), False)
                for part, array in zip(parts, arrays, strict=True):
                    if part.size:
                        part[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        writer.seal({})
        return Segment(path)

    return run


def placer(budget: int, placement: str) -> Placer:
    made = Placer(
        ServerSettings(
            devices=(tables.serve_device(),), hbm_budget=budget, placement=placement, gather_threads=0
        ),
        REFERENCE,
    )
    made.open()
    return made


@needs_interpreter
@pytest.mark.parametrize("table", [PADDED, ARRAY], ids=["in padding", "in an array"])
@pytest.mark.parametrize(
    ("placement", "copies_ids"), [("hbm", True), ("zero_copy", True), ("zero_copy", False)]
)
@pytest.mark.drawn(3)
def test_the_budget_counts_what_an_index_takes(
    table: Table, placement: str, copies_ids: bool, attach: Callable[[dict[str, Table]], Segment]
) -> None:
    """But for the zeros between its parts in the segment. A budget that does not hold the ids leaves them
    in host memory."""
    stored = size_of(stored_of({"t": table})[0])
    beside = stored.index_bytes + (stored.id_bytes if copies_ids else 0)
    counted = stored.whole_index_bytes if placement == "hbm" else beside
    held = placer(counted + (stored.bytes if placement == "hbm" else 0), placement)
    placed = held.place(attach({"t": table}))
    assert placed.hbm_bytes == counted + (stored.bytes if placement == "hbm" else 0)
    on_gpu = placed.on_gpu["t"]
    assert on_gpu.device_map is not None
    assert 0 <= counted - on_gpu.device_map.bytes < 4 * 64
    known = Known.of(IDS.tolist(), values_of(COUNT, table.dim), table.row_format, DEFAULT[: table.dim])
    ids = np.concatenate([IDS[:30], [5, 6]])
    assert held.gpu is not None
    found = held.gpu.lookup(on_gpu, ids, pooling=Pooling.NONE)
    np.testing.assert_array_equal(found, expected_of(known.twin, known.twins(ids)))


@pytest.mark.parametrize("table", [PADDED, ARRAY], ids=["in padding", "in an array"])
def test_times_of_rows_are_no_part_of_what_a_gpu_gets(table: Table) -> None:
    """They lie behind the index, and compactions alone read them."""
    (plain,) = stored_of({"t": table})
    index = plain.index
    assert plain.ids is not None and index is not None
    shape = (table.row_format, table.dim, index.slots, index.buckets)
    timed = replace(plain, ids=replace(plain.ids, index=plan_index(*shape, has_times=True)))
    assert timed.has_times and size_of(timed) == size_of(plain)


def test_placements_count_indexes() -> None:
    """All in hbm to the byte; one byte less, and auto leaves a table where it is, while hbm is refused
    with what is needed."""
    sizes = list(map(size_of, stored_of({"padded": PADDED, "array": ARRAY})))
    total = sum(t.whole_bytes for t in sizes)
    assert total > sum(t.bytes for t in sizes)
    assert plan.choose(sizes, "auto", total, HOME) == {"padded": "hbm", "array": "hbm"}
    assert plan.choose(sizes, "hbm", total, HOME) == {"padded": "hbm", "array": "hbm"}
    assert "zero_copy" in plan.choose(sizes, "auto", total - 1, HOME).values()
    with pytest.raises(
        QuantError, match=f"placement hbm needs {total:,} bytes, the budget of this worker is {total - 1:,}"
    ):
        plan.choose(sizes, "hbm", total - 1, HOME)


def test_ids_are_copied_as_far_as_the_budget_goes() -> None:
    """The smallest tables first."""
    few = raw_table(IDS[:20], values_of(20, 64), RowFormat.INT8)
    sizes = list(map(size_of, stored_of({"many": PADDED, "few": few})))
    assert {t.name: t.id_bytes for t in sizes} == {"many": 8 * (PADDED.rows - 1), "few": 8 * (few.rows - 1)}
    total = sum(t.id_bytes for t in sizes)
    assert plan.with_copied_ids(sizes, total) == {"many", "few"}
    assert plan.with_copied_ids(sizes, total - 1) == {"few"}
    assert plan.with_copied_ids(sizes, 0) == set()


def test_a_budget_that_holds_no_index_is_refused(attach: Callable[[dict[str, Table]], Segment]) -> None:
    """With what it needs, what there is, and what to do."""
    least = size_of(stored_of({"t": PADDED})[0]).index_bytes
    with pytest.raises(
        ServingError,
        match=rf"take {least:,} bytes of HBM at least; .* leaves {least - 1:,}; .* \(--hbm-budget",
    ):
        placer(least - 1, "zero_copy").place(attach({"t": PADDED}))


@needs_interpreter
@pytest.mark.drawn(0.5)
def test_a_swap_brings_the_hot_ids_to_their_new_rows(attach: Callable[[dict[str, Table]], Segment]) -> None:
    """A next version has some of the ids, at other rows: of those that were hot, half are in the cache
    before a lookup."""
    kept = IDS[: COUNT // 2][::-1].copy()
    values = values_of(COUNT, 64, seed=1)
    held = placer(200_000, "cached")
    first: Any = held.place(attach({"t": PADDED}))
    hot = kept[:20]
    assert held.gpu is not None
    for _ in range(2):
        held.gpu.lookup(first.on_gpu["t"], hot, pooling=Pooling.NONE)
    newer = raw_table(kept, values[: kept.size], RowFormat.INT8, missing=DEFAULT)
    second: Any = held.place(attach({"t": newer}), first)
    assert newer.row_map is not None
    cached = second.on_gpu["t"].residence.hot()
    assert cached.size == hot.size // 2
    assert np.isin(cached, newer.row_map.find(hot)).all()
    known = Known.of(kept.tolist(), values[: kept.size], RowFormat.INT8, DEFAULT)
    np.testing.assert_array_equal(
        held.gpu.lookup(second.on_gpu["t"], IDS[:200], pooling=Pooling.NONE),
        expected_of(known.twin, known.twins(IDS[:200])),
    )
