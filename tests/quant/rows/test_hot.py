"""Rows that lie at a second place, too (`quant.rows.hot`): which ones are found, and that every backend of
the CPU reads them there."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from cpu_backends import BACKENDS, cpu_backend
from hot_tables import with_hot
from indexed_tables import raw_table
from overlays import KINDS, changed, overlaid
from overlays import dense as overlaid_rows
from tables import check_vectors, table_of

from tableside.quant import CpuBackend, LookupKind, Pooling, RowFormat, Table, choose
from tableside.quant.contract import Place
from tableside.quant.cpu import _native
from tableside.quant.cpu.index_builder import place_rows
from tableside.quant.rows.hot import HotRows, fill_hot, hot_words
from tableside.quant.rows.ids import RowMap

COUNTS = (0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 80, 2047, 2049, 6000)  # around blocks, stretches and pieces
SHARES = (0.0, 0.03, 0.5, 1.0)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    yield from cpu_backend(request.param)


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    _native.use(request.param)
    yield request.param
    _native.use(_native.isas()[0])


def some(rows: int, share: float) -> np.ndarray:
    return np.flatnonzero(np.random.default_rng(rows).random(rows) < share)


def read_by(table: Table, hot: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The rows of a table with the same values as `with_hot` gives those that are looked up."""
    return np.where(np.isin(rows, hot), 1, rows)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 1000, 1 << 24])
def test_marks_lead_to_rows_in_their_order(rows: int) -> None:
    for share in (*SHARES, 1 / rows) if rows < 2000 else (0.001,):
        hot = some(rows, share)
        marks = np.zeros((hot_words(rows), 2), np.uint64)
        fill_hot(hot, marks)
        made = HotRows(marks, np.zeros((hot.size, 4), np.uint8), -5000)
        np.testing.assert_array_equal(made.numbers(), hot)
        asked = np.concatenate(
            [np.arange(-3, 70), some(rows, 0.5)[:999], hot[-999:], [rows - 1, rows, -5000, 1 << 40]]
        )
        slot = {row: slot for slot, row in enumerate(hot.tolist())}
        expected = [slot[n] - 5000 if n in slot else n for n in asked.tolist()]
        assert made.place(asked).tolist() == expected


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("first", [0, -70, 1 << 40])
def test_the_kernel_finds_them_as_specified(isa: str, first: int, share: float) -> None:
    rng, hot = np.random.default_rng(1), some(3000, share)
    plain = table_of(RowFormat.INT8, 16, 3001)
    table = with_hot(replace(plain, row_map=RowMap(3000, 3000, first=first)), hot)
    assert table.row_map is not None
    for count in COUNTS:
        ids = rng.integers(-5, 3005, count) + first
        found = table.row_map.find(ids)
        placed, doubtful = place_rows(table.row_map, ids, table.rows)
        np.testing.assert_array_equal(placed, np.where(found == -1, 3000, found))
        assert doubtful == np.count_nonzero(found == -1)


@pytest.mark.parametrize("share", SHARES)
def test_the_kernel_takes_only_rows_that_keep_the_id(isa: str, share: float) -> None:
    made = raw_table(KINDS["random"], RowFormat.INT8, 64)
    hot = np.sort(made.index.find(KINDS["random"])[some(KINDS["random"].size, share)])
    table = with_hot(made.table, hot)
    assert table.row_map is not None
    for count in COUNTS:
        there = np.random.default_rng(2).choice(KINDS["random"], count)
        np.testing.assert_array_equal(place_rows(table.row_map, there)[0], table.row_map.find(there))
        gone = there ^ 1
        gone = gone[~np.isin(gone, KINDS["random"])]
        np.testing.assert_array_equal(place_rows(table.row_map, gone)[0], made.index.places(gone))


@pytest.mark.drawn(12)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("is_above", [True, False], ids=["above", "below"])
@pytest.mark.parametrize("kind", ["rows", "refused", "from a first one on"])
def test_lookups_by_row_numbers(backend: CpuBackend, kind: str, is_above: bool, share: float) -> None:
    """At addresses above and below the table's."""
    hot, first = some(300, share), 1000 if kind == "from a first one on" else 0
    plain = table_of(RowFormat.INT8, 24, 300)
    whole = np.zeros((300 + hot.size + 1) * plain.row_bytes, np.uint8)
    at = 0 if is_above else (hot.size + 1) * plain.row_bytes
    packed = whole[at : at + plain.packed.size].reshape(plain.packed.shape)
    packed[:] = plain.packed
    memory = whole[packed.size :] if is_above else whole[:at]
    row_map = None if kind == "rows" else RowMap(300, None, first=first)
    table = with_hot(replace(plain, packed=packed, row_map=row_map), hot, memory)
    for count in COUNTS:
        rows = np.random.default_rng(count).integers(0, 300, count)
        check_vectors(backend, table, rows + first, plain, read_by(plain, hot, rows))


@pytest.mark.drawn(6)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("has_changes", [False, True])
def test_lookups_by_raw_ids(backend: CpuBackend, has_changes: bool, share: float) -> None:
    """With ids that are missing, and changes above the hot rows."""
    base = raw_table(KINDS["random"], RowFormat.INT8, 64)
    hot = np.sort(base.index.find(KINDS["random"])[some(KINDS["random"].size, share)])
    made = overlaid(
        base.table,
        base.plain,
        base.numbers,
        [changed(KINDS["random"], 1)] if has_changes else [(np.array([2**61]), np.zeros(1, np.bool_))],
    )
    table = with_hot(made.table, hot)
    plain_rows = {i for i in made.numbers if made.numbers[i] < base.plain.rows}
    ids_hot = set(base.index.ids[hot].tolist()) & plain_rows
    values = replace(made.plain, packed=np.concatenate([made.plain.packed, table.packed[1:2]]))
    for count in COUNTS:
        asked = np.random.default_rng(count).choice(
            np.concatenate([KINDS["random"], KINDS["random"] ^ 1]), count
        )
        rows = made.expected_rows(asked)
        rows[np.isin(asked, list(ids_hot))] = values.rows - 1
        check_vectors(backend, table, asked, values, rows)


def test_marks_that_are_damaged_lead_to_some_hot_row(isa: str) -> None:
    """Whatever a file holds, no other memory is read."""
    table = with_hot(table_of(RowFormat.INT8, 16, 200), np.arange(0, 200, 3))
    assert table.row_map is not None and table.row_map.hot is not None
    hot = table.row_map.hot
    for bits, before in (
        (2**64 - 1, 0),
        (2**64 - 1, 60),
        (1, 2**63),
        (2**63, 2**64 - 1),
        (2**64 - 1, 2**64 - 70),
    ):
        hot.marks[:] = bits, before
        numbers, _ = place_rows(table.row_map, np.arange(200))
        is_own = numbers == np.arange(200)
        slots = numbers[~is_own] - hot.first_row
        assert slots.size and (slots >= 0).all() and (slots < len(hot.packed)).all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["rows", "from a first one on", "raw ids"])
def test_lookups_run_where_all_their_rows_are_hot(isa: str, kind: str, threads: int) -> None:
    """Else they say no, wherever the id is that is not hot, and another way says why."""
    count, first = 40_000, 1000 if kind == "from a first one on" else 0
    if kind == "raw ids":
        known = np.arange(1, 101) * 7
        made = raw_table(known, RowFormat.INT8, 16)
        plain, rows = made.table, np.sort(made.index.find(known[10:90]))
    else:
        plain, known, rows = table_of(RowFormat.INT8, 16, 100), np.arange(100) + first, np.arange(10, 90)
        plain = replace(plain, row_map=RowMap(100, first=first) if first else None)
    table = with_hot(plain, rows)
    assert table.row_map is not None and table.row_map.hot is not None
    run = choose("native").layers_run([LookupKind(table, Pooling.NONE)] * 2, [True] * 2, threads)
    assert run is not None
    vectors = 4 * 16 * count
    place = Place(1, 0, count, -1, 0, count, -1, 0, found_at=vectors)
    places = np.array([place, place._replace(kind=0, ids=0, bags=0)], np.int64)
    ids, out = np.random.default_rng(0).choice(known[10:90], count), np.zeros(vectors + count, np.uint8)
    assert run(places, ids, out) == () and out[vectors:].all()
    expected = choose("native").lookup(table, ids, pooling=Pooling.NONE)
    np.testing.assert_array_equal(out[:vectors].view(np.float32), expected.ravel())
    others = (*known[[0, 9, 90, 99]].tolist(), int(known[-1]) + 1, first - 1, -5, 2**62, -(2**63))
    for at in (0, 2047, 2048, count - 1):
        for other in others:
            changed_ids = ids.copy()
            changed_ids[at] = other
            assert run(places, changed_ids, out) is None
    assert run(places, ids, out) == ()


def test_no_lookup_runs_of_a_table_without_hot_rows() -> None:
    table = table_of(RowFormat.INT8, 16, 100)
    hot = with_hot(table, np.arange(100))
    place, ids, out = Place(0, 0, 5, -1, 0, 5, -1, 0), np.arange(5), np.zeros(5 * 64, np.uint8)
    for tables, expected in (([hot, hot], ()), ([hot, table], None), ([table, hot], None)):
        kinds = [LookupKind(one, Pooling.NONE) for one in tables]
        run = choose("native").layers_run(kinds, [True, True], 1)
        assert run is not None
        assert run(np.array([place, place._replace(kind=1)], np.int64), ids, out) == expected
    in_memory = choose("native").layers_run([LookupKind(table, Pooling.NONE)], [False], 1)
    assert in_memory is not None and in_memory(np.array([place], np.int64), ids, out) == ()


def test_ids_beside_hot_rows_may_be_missing() -> None:
    """They are counted, as those of hot rows that an older version had."""
    plain = table_of(RowFormat.INT8, 16, 100)
    tables = [
        with_hot(replace(plain, row_map=RowMap(100, own=50)), np.arange(100)),
        replace(plain, row_map=RowMap(99, 99)),
    ]
    run = choose("native").layers_run([LookupKind(t, Pooling.NONE) for t in tables], [True, False], 1)
    places = np.array([Place(0, 0, 3, -1, 0, 3, -1, 0), Place(1, 24, 3, -1, 0, 3, -1, 192)], np.int64)
    assert run is not None
    assert run(places, np.array([1, 60, 70, 5, 200, 6]), np.zeros(384, np.uint8)) == [(0, 2, 0), (1, 0, 0)]


def test_no_other_ids_than_those_of_its_rows_are_a_tables() -> None:
    """Also where nobody checked them before."""
    hot = with_hot(table_of(RowFormat.INT8, 16, 100), np.arange(10, 90))
    over = overlaid_rows(first=0).table
    for table in (hot, over):
        assert table.row_map is not None
        row_map = replace(table.row_map, default_row=None)
        ids = np.array([5, 50, 99, 100, 5000, -1, -5, 2**40, row_map.elsewhere[-1][0] + 3, -(2**63)])
        rows = row_map.find(ids)
        np.testing.assert_array_equal(place_rows(row_map, ids)[0][3 if table is hot else 4 :], -1)
        np.testing.assert_array_equal(place_rows(row_map, ids)[0], rows)
