"""Lookups of fetched rows of which some, or all, lie in memory."""

import random

import numpy as np
import overlays
import pytest
from drawn_lookups import Drawn
from fetched_tables import BACKENDS, FromArray, outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from indexed_tables import raw_table
from overlays import KINDS
from reference import backend_of
from tables import table_of

from tableside.quant import BadIds, LookupKind, Place, Pooling, RowFormat, choose
from tableside.quant.contract import Waiting
from tableside.quant.errors import Problem
from tableside.quant.rows.fetched import RowReader


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_rows_that_are_here_are_read_where_they_lie(seed: int) -> None:
    """Nothing is fetched. Where some rows are away, these are fetched alone, each once a lookup, if no id is
    missing or wrong; else all are. Raw ids, deltas, what is missing and what is wrong are as in memory."""
    drawn, rng = Drawn(seed), random.Random(seed)
    for wrong in (False, True):
        places, inputs, out_bytes = drawn.request(wrong)
        sources = [FromArray(table) for table in drawn.tables]
        tables = [
            table.fetched_by(
                RowReader(source, source.ready, away=source.away, in_place=source.counted.append)
            )
            for table, source in zip(drawn.tables, sources, strict=True)
        ]
        for name in BACKENDS:
            backend = backend_of(name)
            plain = outcome(backend.planner(drawn.kinds).plan(places.tobytes()), inputs, out_bytes)
            planner = backend.planner(drawn.over(tables))
            assert outcome(planner.plan(places.tobytes()), inputs, out_bytes) == plain
            assert not any(source.asked for source in sources)
            for share, slow in ((1.0, 0.0), (0.3, 0.0), (0.3, 0.5)):
                for source in sources:
                    source.absent = {row for row in range(source.table.rows) if rng.random() < share}
                    source.slow = {row for row in source.absent if rng.random() < slow}
                    source.asked.clear(), source.copied.clear(), source.counted.clear()
                assert outcome(planner.plan(places.tobytes()), inputs, out_bytes) == plain
                for source in sources:
                    fetched = [row for rows in source.asked for row in rows]
                    assert not source.counted or {*fetched} <= source.absent
                    assert len(source.asked) > 1 or len({*fetched}) == len(fetched)
            for source in sources:
                source.absent, source.slow = set(), set()
                source.asked.clear()


def test_a_row_that_is_away_is_fetched() -> None:
    """Also the row of a missing id, and the one that a raw id has if it is there."""
    made = raw_table(KINDS["random"])
    index = made.table.row_map.index  # type: ignore[union-attr]
    assert index is not None
    missing = next(i for i in range(2**20, 2**21) if i not in KINDS["random"])
    known, one_missing = KINDS["random"][:3], np.array([*KINDS["random"][:2], missing])
    for here, away in ((known, int(index.find(known[2:])[0])), (one_missing, made.table.rows - 1)):
        source = FromArray(made.table)
        table = made.table.fetched_by(RowReader(source, away=source.away))
        source.absent = {away}
        place = np.array([Place(0, 0, 3, -1, 3, 1, -1, 0)], np.int64).tobytes()
        begun = choose().planner([LookupKind(table, Pooling.SUM)]).plan(place).begin(here.tobytes())
        assert isinstance(begun, Waiting)
        source.absent = set()
        begun = choose().planner([LookupKind(table, Pooling.SUM)]).plan(place).begin(here.tobytes())
        assert not isinstance(begun, Waiting) and not source.asked


@pytest.mark.parametrize("count", [10, 3000])
@pytest.mark.parametrize("made", [overlays.raw(), overlays.dense(first=100)], ids=["raw", "dense"])
def test_rows_of_overlays_are_asked_about_nowhere(made: overlays.Overlaid, count: int) -> None:
    """They are never away: a request that asks for no other ones runs at once. Where one row is the table's
    own, it is asked about; lookups of other tables go on beside."""
    row_map = made.table.row_map
    assert row_map is not None and row_map.overlay is not None
    rows = row_map.find(np.array([*made.numbers]))
    over = np.array([*made.numbers])[(rows < -1) | (rows >= made.table.rows)]
    own = np.array([*made.numbers])[(rows >= 0) & (rows < made.table.rows)]
    source, looked = FromArray(made.table), list[int]()

    def away(rows: np.ndarray) -> np.ndarray:
        looked.append(rows.size)
        return source.away(rows)

    reader = RowReader(source, source.ready, away=away, in_place=source.counted.append)
    other, kinds = table_of(RowFormat.INT8, 8, 100), []
    for table in (made.table.fetched_by(reader), made.table):
        kinds.append([LookupKind(other, Pooling.SUM), LookupKind(table, Pooling.NONE)])
    dim, ids = made.table.dim, np.random.default_rng(1).choice(over, count)
    for asked, is_over in ((ids, True), (np.append(ids[1:], own[:1]), False)):
        inputs = np.append([7], asked).tobytes()
        places = np.array(
            [Place(0, 0, 1, -1, 1, 1, -1, 0), Place(1, 8, count, -1, 1, 0, -1, 32)], np.int64
        ).tobytes()
        fetched, plain = (choose().planner(each).plan(places) for each in kinds)
        out_bytes = 32 + count * dim * 4
        expected, out = outcome(plain, inputs, out_bytes), np.zeros(out_bytes, np.uint8)
        assert fetched.run_at_once(inputs, out) == (() if is_over else None)
        if is_over:
            assert (out.tobytes(), None) == expected
        else:
            assert outcome(fetched.begin(inputs), inputs, out_bytes) == expected
        assert (looked[:1], source.counted) == ([] if is_over else [count], [count])
        source.counted.clear()


def test_rows_that_are_away_are_copied_alone() -> None:
    """Also where one of them needs a wait. An id outside the table is refused, and reads nothing."""
    made = table_of(RowFormat.INT8, 8, 100)
    source = FromArray(made)
    reader = RowReader(source, source.ready, away=source.away, in_place=source.counted.append)
    planner = choose().planner([LookupKind(made.fetched_by(reader), Pooling.SUM)])
    place = np.array([Place(0, 0, 5, -1, 5, 1, -1, 0)], np.int64).tobytes()
    ids = np.array([7, 40, 41, 40, 9]).tobytes()
    expected = outcome(choose().planner([LookupKind(made, Pooling.SUM)]).plan(place), ids, 32)
    source.absent = {40, 41}
    begun = planner.plan(place).begin(ids)
    assert not isinstance(begun, Waiting) and outcome(begun, ids, 32) == expected
    assert source.copied == [[40, 41]] and source.counted == [2] and not source.asked
    source.slow = {41}
    begun = planner.plan(place).begin(ids)
    assert isinstance(begun, Waiting) and outcome(begun.wait(), ids, 32) == expected
    assert source.asked == [[40, 41]] and source.counted == [2, 2]
    for wrong in (-1, 100, 2**62):
        source.copied, source.asked = [], []
        with pytest.raises(BadIds):
            planner.plan(place).begin(np.array([7, 40, wrong, 40, 9]).tobytes())
        assert not source.copied and not source.asked


def test_raw_ids_that_rows_keep_are_compared_where_some_are_away() -> None:
    """Of an id that is there its row alone is fetched. Of one that is not the default row stands, with all
    rows of the lookup fetched: the same id may have to be told as missing."""
    made = raw_table(KINDS["random"]).table
    assert made.row_map is not None and made.row_map.index is not None
    source = FromArray(made)
    reader = RowReader(source, source.ready, away=source.away, in_place=source.counted.append)
    planner = choose().planner([LookupKind(made.fetched_by(reader), Pooling.SUM)])
    place = np.array([Place(0, 0, 4, -1, 4, 1, -1, 0)], np.int64).tobytes()
    ids = KINDS["random"][:4]
    rows = made.row_map.index.find(ids).tolist()
    other = next(i for i in range(2**20, 2**21) if i not in KINDS["random"])
    for asked, away in ((ids, rows[2]), (np.array([*ids[:3], other]), rows[2]), (ids, made.rows - 1)):
        expected = outcome(
            choose().planner([LookupKind(made, Pooling.SUM)]).plan(place), asked.tobytes(), 256
        )
        source.absent, is_known = {away}, other not in asked
        source.asked.clear(), source.counted.clear()
        assert outcome(planner.plan(place), asked.tobytes(), 256) == expected
        is_alone = source.counted == [3] and source.asked == [[away]]
        assert is_alone == (is_known and away == rows[2])
        assert source.counted == [4] or away == rows[2]


def test_a_lookup_that_is_wrong_is_named_after_rows_were_copied() -> None:
    """Of two of a table the second one's ids have a row that keeps another id, and its lengths are wrong."""
    made = raw_table(KINDS["random"]).table
    assert made.row_map is not None and made.row_map.index is not None
    source = FromArray(made)
    kind = LookupKind(made.fetched_by(RowReader(source, source.ready, away=source.away)), Pooling.SUM)
    other = next(i for i in range(2**20, 2**21) if i not in KINDS["random"])
    ids = np.array([*KINDS["random"][:9], other])
    source.absent = set(made.row_map.index.places(ids).tolist())
    each = [Place(0, 0, 2, -1, 2, 1, -1, 0), Place(0, 16, 8, -1, 7, 1, -1, 256)]
    plan = choose().planner([kind]).plan(np.array(each, np.int64).tobytes())
    begun = plan.begin(ids.tobytes())
    with pytest.raises(BadIds) as caught:
        (begun.wait() if isinstance(begun, Waiting) else begun).run(ids.tobytes(), np.empty(512, np.uint8))
    assert (caught.value.problem, caught.value.job) == (Problem.SUM, 1)


def test_many_rows_are_copied_by_who_has_time() -> None:
    """Where a request begins, a few show whether they come. Those that lie in memory are still read there."""
    made = table_of(RowFormat.INT8, 8, 100)
    source = FromArray(made)
    reader = RowReader(source, source.ready, away=source.away, in_place=source.counted.append)
    planner = choose().planner([LookupKind(made.fetched_by(reader), Pooling.SUM)])
    place = np.array([Place(0, 0, 100, -1, 100, 1, -1, 0)], np.int64).tobytes()
    ids = np.arange(100).tobytes()
    expected = outcome(choose().planner([LookupKind(made, Pooling.SUM)]).plan(place), ids, 32)
    source.absent = {*range(0, 100, 2)}
    begun = planner.plan(place).begin(ids)
    assert isinstance(begun, Waiting) and begun.may_be_here and source.copied == [[*range(0, 32, 2)]]
    here = begun.look()
    assert not isinstance(here, Waiting) and outcome(here, ids, 32) == expected
    assert source.copied[1:] == [sorted(source.absent)] and source.counted == [50] and not source.asked
    source.slow = {64}  # which is not among the first
    begun = planner.plan(place).begin(ids)
    assert isinstance(begun, Waiting) and begun.may_be_here
    there = begun.look()
    assert isinstance(there, Waiting) and not there.may_be_here
    assert outcome(there.wait(), ids, 32) == expected
    assert source.asked == [sorted(source.absent)] and source.counted == [50, 50]
    source.slow = {4}
    begun = planner.plan(place).begin(ids)
    assert isinstance(begun, Waiting) and not begun.may_be_here
    assert outcome(begun.wait(), ids, 32) == expected
