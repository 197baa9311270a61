"""Lookups of rows that are fetched give, bit for bit, what the same rows in memory give."""

import random
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from drawn_lookups import Drawn
from fetched_tables import BACKENDS, FromArray, fetched_table, outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from indexed_tables import raw_table
from overlays import KINDS, Overlaid, dense, raw
from reference import backend_of
from tables import table_of

from tableside.quant import (
    BadIds,
    LookupKind,
    Place,
    Pooling,
    Precision,
    QuantError,
    RowFormat,
    Table,
    choose,
)
from tableside.quant.contract import MASK_LATE, Unfound, Waiting
from tableside.quant.errors import RowsNotRead
from tableside.quant.rows.fetched import FetchedTable, RowReader, RowState
from tableside.quant.rows.ids import RowMap


def source_of(table: FetchedTable) -> FromArray:
    assert isinstance(table.reader.fetch, FromArray)
    return table.reader.fetch


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
@pytest.mark.drawn(0.5)
def test_fetched_rows_give_what_rows_in_memory_give(seed: int) -> None:
    """By every backend, beside tables in memory, also what is wrong, and where."""
    drawn, rng = Drawn(seed), random.Random(seed)
    tables = [fetched_table(t) if rng.random() < 0.7 else t for t in drawn.tables]
    for wrong in (False, False, True):
        places, inputs, out_bytes = drawn.request(wrong)
        for name in BACKENDS:
            kinds = drawn.over(tables)
            staged = backend_of(name).planner(kinds, rng.randint(1, 2)).plan(places.tobytes(), out_bytes)
            plain = backend_of(name).planner(drawn.kinds).plan(places.tobytes(), out_bytes)
            assert outcome(staged, inputs, out_bytes) == outcome(plain, inputs, out_bytes), name


@pytest.mark.parametrize("made", [dense(), raw()], ids=["dense", "raw"])
@pytest.mark.parametrize("kind", KINDS)
def test_deltas_and_missing_ids_lie_above_fetched_rows(made: Overlaid, kind: str) -> None:
    ids = np.concatenate([np.array(KINDS[kind], np.int64), np.array([7, -5, 2**40])])
    masks = ids.size * 8 * made.table.dim
    place = np.array([Place(0, 0, ids.size, -1, 0, 0, -1, 0, 0, masks)], np.int64)
    for name in BACKENDS:
        table = fetched_table(made.table)
        plan = backend_of(name).planner([LookupKind(table, Pooling.NONE)]).plan(place.tobytes())
        plain = backend_of(name).planner([LookupKind(made.table, Pooling.NONE)]).plan(place.tobytes())
        found = outcome(plan, ids.tobytes(), masks + ids.size)
        assert found == outcome(plain, ids.tobytes(), masks + ids.size)
        if made.default is not None:
            assert found[0][masks:] == made.expected_found(ids).tobytes()  # type: ignore[index]
        assert all(0 <= row < table.rows for asked in source_of(table).asked for row in asked)


def without_kept_ids(table: Table) -> FetchedTable:
    """Rows that are fetched, of which nothing in memory has the ids."""
    made = fetched_table(table)
    assert made.id_at >= 0 and made.row_map is not None and made.row_map.index is not None
    index = replace(made.row_map.index, ids=np.zeros_like(made.row_map.index.ids))
    return replace(made, row_map=replace(made.row_map, index=index))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
@pytest.mark.drawn(0.5)
def test_ids_are_compared_with_those_of_fetched_rows(seed: int) -> None:
    """Whether they are there, missing, changed, deleted or backfilled; and the first that is wrong is named,
    beside lookups that are wrong without any row."""
    rng = np.random.default_rng(seed)
    ids, old = KINDS["random"], rng.random(KINDS["random"].size) < 0.3
    made = [raw().table, raw_table(ids, backfilled=old).table, raw_table(ids[:5], dim=32).table]
    made += [replace(t, row_map=replace(t.row_map, default_row=None)) for t in made if t.row_map is not None]
    plain = [*made, table_of(RowFormat.INT8, 8, 100)]
    kept = [*map(without_kept_ids, made), plain[-1]]
    places, inputs, out_at = [], b"", 0
    for kind in rng.integers(0, 2 * len(plain), rng.integers(1, 6)).tolist():
        table, is_dense, bags = plain[kind // 2], kind // 2 == len(made), int(rng.integers(0, 4))
        lengths = rng.integers(0, 5, bags).astype(np.int32)
        count = int(lengths.sum())
        asked = rng.integers(0, 100, count) if is_dense else rng.choice(ids, count)
        if count and rng.random() < 0.3:
            asked[rng.integers(count)] = rng.integers(2**62)
        at, masks = len(inputs), out_at + 4 * bags * table.dim
        places.append(Place(kind, at, count, at + 8 * count, bags, 0, -1, out_at, 0, masks))
        inputs, out_at = inputs + asked.tobytes() + lengths.tobytes() + bytes(-4 * bags % 8), masks + count
    written = np.array(places, np.int64).tobytes()
    found = [
        outcome(choose().planner(kinds_over(tables)).plan(written, out_at), inputs, out_at)
        for tables in (kept, plain)
    ]
    assert found[0] == found[1]


def kinds_over(tables: list[Any]) -> list[LookupKind]:
    return [LookupKind(t, pooling) for t in tables for pooling in (Pooling.SUM, Pooling.MEAN)]


def test_a_lookup_without_a_plan_fetches() -> None:
    table = table_of(RowFormat.INT8, 24)
    ids, lengths = np.array([5, 3, 5, 0]), np.array([3, 1], np.int32)
    for name in BACKENDS:
        found = backend_of(name).lookup(fetched_table(table), ids, lengths, pooling=Pooling.MEAN)
        np.testing.assert_array_equal(
            found, backend_of(name).lookup(table, ids, lengths, pooling=Pooling.MEAN)
        )
        with pytest.raises(BadIds):
            backend_of(name).lookup(fetched_table(table), np.array([table.rows]), pooling=Pooling.NONE)


def test_each_row_is_asked_for_once_in_order_and_begin_does_not_block() -> None:
    """Over all lookups of a table in a request."""
    table = fetched_table(table_of(RowFormat.INT8, 8, 100))
    kinds = [LookupKind(table, Pooling.SUM), LookupKind(table, Pooling.NONE, Precision.FP16)]
    planner = choose().planner(kinds)
    assert (
        planner.waits and not choose().planner([LookupKind(table_of(RowFormat.INT8, 8), Pooling.SUM)]).waits
    )
    ids = np.array([90, 3, 3, 41, 3, 90, 7])
    places = np.array([Place(0, 0, 4, -1, 2, 2, -1, 0), Place(1, 32, 3, -1, 0, 0, -1, 64)], np.int64)
    source = source_of(table)
    source.is_open.clear()
    begun = planner.plan(places.tobytes()).begin(ids.tobytes())
    assert isinstance(begun, Waiting) and source.asked == []
    source.is_open.set()
    plan = begun.wait()
    assert source.asked == [[3, 7, 41, 90]]
    out = np.zeros(64 + 48, np.uint8)
    assert plan.run(ids.tobytes(), out) is None and source.asked == [[3, 7, 41, 90]]
    expected = choose().lookup(source.table, ids[:4], np.array([2, 2], np.int32))
    np.testing.assert_array_equal(out[:64].view(np.float32).reshape(2, 8), expected)


def test_a_request_without_ids_asks_for_nothing() -> None:
    table = fetched_table(table_of(RowFormat.INT8, 8))
    plan = (
        choose()
        .planner([LookupKind(table, Pooling.SUM)])
        .plan(np.array([Place(0, 0, 0, -1, 0, 2, -1, 0)], np.int64).tobytes())
    )
    out = np.full(64, 0xEE, np.uint8)
    assert plan.run(b"", out) is None and not out.any() and source_of(table).asked == []


def test_rows_that_do_not_come_are_told() -> None:
    states = {3: RowState.LATE, 4: RowState.LATE, 9: RowState.CORRUPT}
    table = fetched_table(table_of(RowFormat.INT8, 8), states)
    for ids, rows, late, corrupt in (([3, 5], 2, 1, 0), ([9, 4, 3], 3, 2, 1)):
        with pytest.raises(
            RowsNotRead, match=f"of {rows} rows to fetch {late} came too late and {corrupt}"
        ) as e:
            choose().lookup(table, np.array(ids), pooling=Pooling.NONE)
        assert (e.value.rows, e.value.late, e.value.corrupt) == (rows, late, corrupt)
    assert choose().lookup(table, np.array([5]), pooling=Pooling.NONE).shape == (1, 8)


@pytest.mark.parametrize("made", [dense(), raw()], ids=["dense", "raw"])
def test_the_default_row_stands_for_rows_that_are_late(made: Overlaid) -> None:
    """They are counted apart from missing ids; rows of deltas are never late, nor are ids that have no row.
    A plan that needs no wait does not take them."""
    table, ids = made.table, np.append(KINDS["random"][:8], [2**41, 2**42])
    row_map = table.row_map
    assert row_map is not None and row_map.default_row is not None
    if row_map.index is None:
        ids = np.array([0, 1, 2, 3, 100, 150, 222, 299, 2**41, 2**42])
    numbers = row_map.find(ids)
    own = [int(row) for row in numbers if 0 <= row < row_map.rows]
    late = set(own[::2])
    source = FromArray(table, dict.fromkeys(late, RowState.LATE))
    default = table.packed[row_map.default_row]
    fetched = table.fetched_by(RowReader(source, ready=source, default=lambda: default))
    masks = ids.size * 4 * table.dim
    place = np.array([Place(0, 0, ids.size, -1, 0, 0, -1, 0, 0, masks)], np.int64).tobytes()
    begun = choose().planner([LookupKind(fetched, Pooling.NONE)]).plan(place).begin(ids.tobytes())
    assert isinstance(begun, Waiting)
    out = np.zeros(masks + ids.size, np.uint8)
    unfound = begun.wait().run(ids.tobytes(), out)
    is_late = np.isin(numbers, list(late))
    asked = np.where(is_late, 2**43, ids)  # which has no row
    np.testing.assert_array_equal(
        out[:masks].view(np.float32).reshape(ids.size, table.dim),
        choose().lookup(table, asked, pooling=Pooling.NONE),
    )
    np.testing.assert_array_equal(out[masks:], np.where(is_late, MASK_LATE, numbers != -1))
    missing = int((numbers == -1).sum())
    assert late and missing and unfound == [Unfound(missing, 0, int(is_late.sum()))]
    assert row_map.default_row not in {row for asked in source.asked for row in asked}  # it is in memory
    source.states[own[-1]] = RowState.CORRUPT  # type: ignore[index]
    with pytest.raises(RowsNotRead, match="1 were damaged"):
        choose().planner([LookupKind(fetched, Pooling.NONE)]).plan(place).run(ids.tobytes(), out)


def test_unfound_ids_are_counted_beside_those_of_memory() -> None:
    made = raw()
    ids = np.array([5, 2**41, 2**42])
    kinds = [LookupKind(fetched_table(made.table), Pooling.SUM), LookupKind(made.table, Pooling.SUM)]
    places = np.array([Place(n, 0, 3, -1, 3, 1, -1, n * 4 * made.table.dim) for n in (0, 1)], np.int64)
    out = np.zeros(8 * made.table.dim, np.uint8)
    unfound = choose().planner(kinds).plan(places.tobytes()).run(ids.tobytes(), out)
    assert unfound is not None and unfound[0] == unfound[1] and isinstance(unfound[0], Unfound)
    assert unfound[0].missing >= 2


def test_a_row_of_another_size_is_refused() -> None:
    with pytest.raises(QuantError, match="fetched rows have 9 bytes; expected"):
        FetchedTable(3, 9, RowFormat.INT8, 8, RowReader(FromArray(table_of(RowFormat.INT8, 8))))


def test_rows_that_need_no_wait_are_there_when_a_plan_begins() -> None:
    """Of all tables of a request; one row that does is waited for, within the least time that a table gives.
    Those that came are not asked for again."""
    table = table_of(RowFormat.INT8, 8, 100)
    asked: list[tuple[list[int], float | None]] = []

    def ready(rows: np.ndarray, out: np.ndarray, state: np.ndarray, deadline: float | None) -> None:
        out[:] = table.packed[rows]
        state[rows >= 50] = RowState.LATE

    def fetch(rows: np.ndarray, out: np.ndarray, state: np.ndarray, deadline: float | None) -> None:
        out[:] = table.packed[rows]
        asked.append((rows.tolist(), deadline))

    readers = [RowReader(fetch, ready, wait_s) for wait_s in (300.0, 900.0)]
    kinds = [LookupKind(table.fetched_by(reader), Pooling.NONE) for reader in readers]
    places = np.array([Place(n, 8 * n, 1, -1, 0, 0, -1, 32 * n) for n in (0, 1)], np.int64)
    plan, out = choose().planner(kinds).plan(places.tobytes()), np.zeros(64, np.uint8)
    for ids, waits in (([3, 4], False), ([3, 60], True)):
        begun = plan.begin(np.array(ids).tobytes())
        assert isinstance(begun, Waiting) is waits
        after = time.monotonic() + 300
        (begun.wait() if isinstance(begun, Waiting) else begun).run(np.array(ids).tobytes(), out)
        expected = choose().lookup(table, np.array(ids), pooling=Pooling.NONE)
        np.testing.assert_array_equal(out.view(np.float32).reshape(2, 8), expected)
    ((rows, deadline),) = asked
    assert rows == [60] and deadline is not None and deadline <= after


def test_rows_of_one_table_come_in_two_turns() -> None:
    """Those that needed no wait, and then the others; missing ids get the default row."""
    table = replace(table_of(RowFormat.INT8, 8, 100), row_map=RowMap(99, default_row=99))
    asked: list[list[int]] = []

    def ready(rows: np.ndarray, out: np.ndarray, state: np.ndarray, deadline: float | None) -> None:
        state[rows % 2 == 1] = RowState.LATE
        out[state == 0] = table.packed[rows[state == 0]]

    def fetch(rows: np.ndarray, out: np.ndarray, state: np.ndarray, deadline: float | None) -> None:
        out[:] = table.packed[rows]
        asked.append(rows.tolist())

    ids = np.array([7, 4, 500, 4, 9, 98, 7, -1])
    place = Place(0, 0, ids.size, -1, 0, 0, -1, 0)
    kinds = [LookupKind(table.fetched_by(RowReader(fetch, ready)), Pooling.NONE)]
    plan = choose().planner(kinds).plan(np.array([place], np.int64).tobytes())
    out = np.zeros((8, 8), np.float32)
    begun = plan.begin(ids.tobytes())
    assert isinstance(begun, Waiting)
    begun.wait().run(ids.tobytes(), out)
    np.testing.assert_array_equal(out, choose().lookup(table, ids, pooling=Pooling.NONE))
    assert asked == [[7, 9], [99]]


def test_a_default_row_that_came_is_not_fetched_again() -> None:
    """Where another table's row must be waited for."""
    packed = table_of(RowFormat.INT8, 8, 100)
    asked: list[list[int]] = []

    def ready(rows: np.ndarray, out: np.ndarray, state: np.ndarray, deadline: float | None) -> None:
        out[:] = packed.packed[rows]
        state[rows == 50] = RowState.LATE

    def fetch(rows: np.ndarray, out: np.ndarray, state: np.ndarray, deadline: float | None) -> None:
        out[:] = packed.packed[rows]
        asked.append(rows.tolist())

    tables = [replace(packed, row_map=RowMap(99, default_row=99)), packed]
    kinds = [LookupKind(t.fetched_by(RowReader(fetch, ready)), Pooling.NONE) for t in tables]
    places = np.array([Place(n, 16 * n, 2, -1, 0, 0, -1, 64 * n) for n in (0, 1)], np.int64)
    plan, out = choose().planner(kinds).plan(places.tobytes()), np.zeros((4, 8), np.float32)
    ids = np.array([3, 400, 50, 7])
    begun = plan.begin(ids.tobytes())
    assert isinstance(begun, Waiting)
    begun.wait().run(ids.tobytes(), out)
    np.testing.assert_array_equal(
        out, choose().lookup(packed, np.array([3, 99, 50, 7]), pooling=Pooling.NONE)
    )
    assert asked == [[50]]
