"""Hot segments over versions on a disk: which rows they hold, and that lookups give the same with them."""

import contextlib
import gc
import os
import signal
import time
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hot_reading import DIM, IDS, ROWS, TABLES, VALUES, Reading, ask, ids_of_rows, publish
from support import flip_bit

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.errors import SegmentError, VersionError
from tableside.loader.hot import counts as counts_module
from tableside.loader.hot.counts import STEP
from tableside.loader.hot.hot import clear_hot, hot_folder, hot_path, newest_hot, open_hot
from tableside.loader.hot.warm import Warmed, warm
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.segment.delta_writer import DeltaEntries, merge, write_delta
from tableside.loader.segment.header import Change
from tableside.loader.segment.header_checks import check_header
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.quant import LookupKind, Place, Plan, Pooling, choose
from tableside.quant.errors import BadIds, RowsNotRead
from tableside.serving.service.warm import main


def expected(model: Model, name: str, ids: np.ndarray) -> np.ndarray:
    """From the live state as it is mapped, without a hot segment."""
    return choose().lookup(attach_state(model).tables[name], ids, pooling=Pooling.NONE)


@pytest.mark.parametrize("name", TABLES)
def test_rows_that_are_asked_for_most_are_hot(model: Model, reading: Reading, name: str) -> None:
    often, seldom = np.arange(100, 400), np.arange(5_000, 6_000)
    ask(reading, name, often, 5)
    ask(reading, name, seldom)
    budget = 350 * 70  # rows of 48 bytes or less, and their places in the index
    found = warm(model, 1, budget)
    assert found.rows >= 300 and found.before == 0 and 0.5 < found.share < 1
    assert reading.follow() and not reading.follow()
    hot = reading.hot_rows(name)
    assert set(often.tolist()) <= hot < set(often.tolist()) | set(seldom.tolist())
    every = ids_of_rows(name, np.arange(ROWS))
    np.testing.assert_array_equal(reading.lookup(name, every), expected(model, name, every))


def test_a_hot_segment_keeps_to_its_budget(
    model: Model, reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where counts are looked at in pieces that hold some rows each."""
    monkeypatch.setattr(counts_module, "_AT_ONCE", 7_001)
    for budget in (200_000, 600_000):
        for name in TABLES:
            ask(reading, name, np.arange(ROWS))
        assert warm(model, 1, budget).bytes < budget + 64 * 1024  # whole pages, and marks of all rows
    assert newest_hot(model.root, reading.version) == 2
    assert [n for n in os.listdir(hot_path(model.root, "m")) if n.endswith(".delta")] == ["1+2.delta"]


def test_nothing_is_made_that_gains_little(model: Model, reading: Reading) -> None:
    rows = np.arange(1000)
    assert warm(model, 1, 1 << 20) == Warmed(0, 0)
    ask(reading, "dense", rows, 3)
    assert warm(model, 1, 1 << 20).rows == 1000
    ask(reading, "dense", rows, 3)
    ask(reading, "dense", np.array([5000]))
    found = warm(model, 1, 1 << 20)
    assert found.rows == 0 and found.share == 1 and found.before > 0.99
    ask(reading, "dense", np.arange(8000, 8500))
    assert warm(model, 1, 1 << 20).rows == 1501


def test_changed_rows_lie_above_hot_ones(model: Model, reading: Reading) -> None:
    rows = np.arange(200)
    for name in TABLES:
        ask(reading, name, rows, 3)
    warm(model, 1, 1 << 20)
    assert reading.follow()
    for value, batch in ((2.0, rows[:50]), (3.0, rows[25:100])):
        changes = [
            TableChanges(n, ids_of_rows(n, batch), np.full((batch.size, DIM), value, np.float32))
            for n in TABLES
        ]
        changes.append(
            TableChanges("raw", IDS[[7, 300]], np.zeros((2, DIM), np.float32), np.ones(2, np.bool_))
        )
        apply(model, ChangeBatch(changes))
        assert reading.follow()
        for name in TABLES:
            every = ids_of_rows(name, np.arange(ROWS))
            np.testing.assert_array_equal(reading.lookup(name, every), expected(model, name, every))
            assert set(rows[100:].tolist()) <= reading.hot_rows(name)
    ask(reading, "dense", np.arange(9000, 9100), 9)
    warm(model, 1, 1 << 20)
    assert reading.follow()
    every = np.arange(ROWS)
    np.testing.assert_array_equal(reading.lookup("dense", every), expected(model, "dense", every))


def test_the_next_version_takes_over_what_was_counted(model: Model, reading: Reading, tmp_path: Path) -> None:
    rows = np.arange(300, 500)
    for name in TABLES:
        ask(reading, name, rows, 4)
    warm(model, 1, 1 << 20)
    order = np.random.default_rng(1).permutation(ROWS)
    publish(model.root, tmp_path, VALUES[order], IDS[order])
    assert reading.follow() and reading.placed.hot == 0
    found = warm(model, 2, 1 << 20)
    assert found.rows == 400
    assert reading.follow()
    assert reading.hot_rows("dense") == set(rows.tolist())
    hot = np.array(sorted(reading.hot_rows("raw")))
    np.testing.assert_array_equal(hot, rows)  # the same ids
    every = IDS
    np.testing.assert_array_equal(reading.lookup("raw", every), expected(model, "raw", every))
    model.remove(1)
    warm(model, 2, 1 << 20)
    left = {name for name in os.listdir(hot_path(model.root, "m")) if name.startswith("1")}
    assert not left


def test_what_lies_over_another_version_of_that_number_is_not_read(
    model: Model, reading: Reading, tmp_path: Path
) -> None:
    """As where a root is made anew: the numbers begin again."""
    ask(reading, "dense", np.arange(100), 3)
    warm(model, 1, 1 << 20)
    model.remove_all()
    for one in model.folder.iterdir():
        one.unlink()
    again = publish(model.root, tmp_path, -VALUES)
    assert again.current() == 1
    other = Reading(again)
    assert other.hot_rows("dense") == set()
    every = np.arange(ROWS)
    np.testing.assert_array_equal(other.lookup("dense", every), expected(again, "dense", every))
    assert other.counts.tables["dense"].max() == STEP  # of this reading alone


def test_a_damaged_hot_segment_is_not_read(model: Model, reading: Reading) -> None:
    ask(reading, "dense", np.arange(100), 3)
    warm(model, 1, 1 << 20)
    flip_bit(hot_path(model.root, "m") / "1+1.delta", 4096 * 2)
    assert reading.follow()
    assert reading.hot_rows("dense") == set() and not reading.follow()
    np.testing.assert_array_equal(
        reading.lookup("dense", np.arange(ROWS)), expected(model, "dense", np.arange(ROWS))
    )


@pytest.mark.parametrize("what", ["rows", "index", "a mark"])
def test_a_damaged_hot_segment_gives_the_next_one_no_rows(model: Model, reading: Reading, what: str) -> None:
    ask(reading, "dense", np.arange(100), 3)
    warm(model, 1, 1 << 20)
    assert reading.follow()
    with hot_folder(model.root, "m") as folder:
        hot = open_hot(folder, reading.version, 1, "always")
    assert hot is not None
    (table,) = hot.segment.header.tables
    assert table.ids is not None and table.ids.index is not None
    at = {
        "rows": table.offset + 64,
        "index": table.ids.index.offset + 64 + 8,
        "a mark": table.ids.index.offset + 64,
    }
    flip_bit(hot.path, at[what])
    ask(reading, "dense", np.arange(1000, 2000), 3)
    with pytest.raises(SegmentError, match=r"1\+1.delta"):
        warm(model, 1, 1 << 20)
    assert not hot.path.exists() and newest_hot(model.root, reading.version) == 0
    assert warm(model, 1, 1 << 20).rows == 1100
    assert reading.follow()
    every = np.arange(ROWS)
    np.testing.assert_array_equal(reading.lookup("dense", every), expected(model, "dense", every))


def test_a_hot_segment_of_an_earlier_release_is_made_anew(model: Model, reading: Reading) -> None:
    """That was a delta of the version's own rows."""
    rows, base = np.arange(100), reading.version
    ask(reading, "dense", rows, 3)
    packed = base.tables["dense"].packed[rows]
    assert reading.counts.new_number(0) == 1
    entries = DeltaEntries(rows, packed, rows, np.zeros(rows.size, np.bool_))
    with hot_folder(model.root, "m") as folder:
        change = Change(1, positions={"over": f"{base.content():016x}"})
        tables = merge(base, [("dense", [entries])], 1)
        write_delta(folder.path / "1+1.delta", folder.create("1+1.delta"), base.header, change, tables)
    assert reading.follow() and reading.hot_rows("dense") == set() and not reading.follow()
    assert warm(model, 1, 1 << 20).rows == 100
    assert reading.follow() and reading.hot_rows("dense") == set(rows.tolist())


def test_hot_rows_are_taken_for_nothing_else(model: Model, reading: Reading) -> None:
    """Neither for a delta, nor for those of a table of another size. A version has none."""
    ask(reading, "dense", np.arange(100), 3)
    warm(model, 1, 1 << 20)
    with hot_folder(model.root, "m") as folder:
        hot = open_hot(folder, reading.version, 1, "always")
    assert hot is not None
    table = reading.version.tables["dense"]
    with pytest.raises(SegmentError, match=r"1\+1.delta holds hot rows, and is no delta"):
        hot.layer("dense", table)
    with pytest.raises(SegmentError, match="has no marks of hot rows, or not of 19999 rows"):
        hot.own_hot_rows("dense", ROWS - 1)
    apply(model, ChangeBatch([TableChanges("dense", np.arange(3), np.ones((3, DIM), np.float32))]))
    (delta,) = attach_state(model).deltas
    with pytest.raises(SegmentError, match="has no marks of hot rows"):
        delta.hot_rows("dense", table)
    header = replace(hot.segment.header, delta=None, features=reading.version.header.features[:1])
    with pytest.raises(SegmentError, match="a version has the marks of hot rows"):
        check_header(header, 4096, hot.segment.size)


@pytest.mark.parametrize("has_hot", [False, True])
def test_an_id_that_no_row_has_is_refused(model: Model, reading: Reading, has_hot: bool) -> None:
    """Under changes, and above hot rows, where all ids of a request lie elsewhere than the table."""
    if has_hot:
        ask(reading, "dense", np.arange(100), 3)
        warm(model, 1, 1 << 20)
    changed = np.arange(50, 60)
    apply(model, ChangeBatch([TableChanges("dense", changed, np.ones((10, DIM), np.float32))]))
    assert reading.follow()
    row_map = reading.placed.tables["dense"].row_map
    assert row_map is not None
    first, packed = row_map.elsewhere[0]
    for wrong in (ROWS, ROWS + 5000, -1, -5, first - 100, first, first + len(packed), 2**62, -(2**63)):
        for count in (1, 5, 5000):
            ids = np.resize(changed, count)
            ids[-1] = wrong
            with pytest.raises(BadIds) as caught:
                reading.lookup("dense", ids)
            found = caught.value
            assert (found.position, found.value, found.bound) == (count - 1, wrong, ROWS)


def test_a_row_that_is_damaged_on_the_disk_does_not_become_hot(model: Model, reading: Reading) -> None:
    ask(reading, "dense", np.arange(100), 3)
    file, table = reading.version.files[1], reading.version.header.tables[0]
    flip_bit(file.path, table.offset - file.offset + 5 * table.row_bytes)
    with pytest.raises(RowsNotRead):
        warm(model, 1, 1 << 20)
    assert newest_hot(model.root, reading.version) == 0
    assert not [n for n in os.listdir(hot_path(model.root, "m")) if "delta" in n]


def test_one_process_at_a_time_makes_one(model: Model, reading: Reading) -> None:
    ask(reading, "dense", np.arange(10))
    with hot_folder(model.root, "m") as folder, folder.lock("warm.lock"), pytest.raises(VersionError):
        warm(model, 1, 1 << 20)


def test_a_backfilled_row_stays_where_it_is_counted(disk: Path, model: Model, tmp_path: Path) -> None:
    """A lookup says how many ids got a row of an older version; a hot row would not say so."""
    raw = {**TABLES["raw"], "missing": "backfill:m@1"}
    np.savez(tmp_path / "c.npz", v=VALUES[: ROWS // 2], i=IDS[: ROWS // 2])
    features = {"raw": {"table": "raw", "pooling": "none"}}
    load(
        parse_model(
            {"name": "m", "checkpoint": "c.npz", "tables": {"raw": raw}, "features": features}, tmp_path
        ),
        disk,
    )
    reading = Reading(model)
    ask(reading, "raw", np.arange(ROWS // 2, ROWS // 2 + 50), 3)
    assert warm(model, 2, 1 << 20).rows == 0 and not newest_hot(disk, reading.version)
    ask(reading, "raw", np.arange(ROWS // 2 - 50, ROWS // 2 + 50), 3)
    assert warm(model, 2, 1 << 20).rows == 50
    assert reading.follow()
    assert reading.hot_rows("raw") == set(range(ROWS // 2 - 50, ROWS // 2))


def test_a_smaller_budget_is_kept_to(model: Model, reading: Reading) -> None:
    for name in TABLES:
        ask(reading, name, np.arange(ROWS))
    assert warm(model, 1, 3 << 20).bytes > 3 << 19
    assert 0 < warm(model, 1, 300_000).bytes < 300_000 + 64 * 1024
    assert reading.follow()
    every = np.arange(ROWS)
    np.testing.assert_array_equal(reading.lookup("dense", every), expected(model, "dense", every))


def test_what_is_made_for_a_version_that_comes_meanwhile_stays(model: Model, reading: Reading) -> None:
    clear_hot(model.root, "m", lambda: (hot_path(model.root, "m") / "2.counts").touch() or [1])
    assert {"1.counts", "2.counts"} <= set(os.listdir(hot_path(model.root, "m")))


@pytest.mark.drawn(0.5)
def test_a_plan_keeps_the_rows_that_it_reads(model: Model, reading: Reading) -> None:
    """Those of the hot segment, too, of which a lookup of many ids knows the numbers alone."""
    rows = np.arange(5000)
    ask(reading, "dense", rows, 3)
    warm(model, 1, 1 << 20)
    assert reading.follow()
    ids, out = rows.tobytes(), np.empty((rows.size, DIM), np.float32)
    places = np.array([Place(0, 0, rows.size, -1, 0, 0, -1, 0)]).tobytes()
    begun = (
        choose().planner([LookupKind(reading.placed.tables["dense"], Pooling.NONE)]).plan(places).begin(ids)
    )
    assert isinstance(begun, Plan)
    gone = weakref.ref(reading.engine.served())
    del reading.engine, reading.placer
    gc.collect()
    assert gone() is None
    begun.run(ids, out.view(np.uint8).reshape(-1))
    np.testing.assert_array_equal(out, expected(model, "dense", rows))


@pytest.mark.thorough
def test_a_hot_segment_that_is_killed_while_it_is_made_is_whole_or_not_there(
    model: Model, reading: Reading
) -> None:
    """A hundred times, once it has begun to write: rows are right with what is there, and the next one
    removes what was left over."""
    rng, path, every, begun = np.random.default_rng(7), hot_path(model.root, "m"), np.arange(ROWS), 0
    arguments = [str(model.root), "m", "1", "", str(1 << 20)]

    def inodes() -> set[int]:
        found = set[int]()
        for name in os.listdir(path):
            with contextlib.suppress(FileNotFoundError):
                found.add(os.stat(path / name).st_ino)
        return found

    while begun < 100:
        for name in TABLES:
            ask(reading, name, rng.choice(ROWS, 2000, replace=False), 9)
        before = inodes()
        if (pid := os.fork()) == 0:
            try:
                main(arguments)
            finally:
                os._exit(0)
        while not (ended := os.waitpid(pid, os.WNOHANG)[0]) and inodes() <= before:
            pass
        if not ended:
            begun += 1
            time.sleep(rng.exponential(0.002))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        reading.follow()
        for name in TABLES:
            ids = ids_of_rows(name, every)
            np.testing.assert_array_equal(reading.lookup(name, ids), expected(model, name, ids))
        assert len([n for n in os.listdir(path) if n.endswith(".partial")]) <= 1
    gained = 0
    while not gained:  # what is there may be within a point of the best until counts are halved
        for name in TABLES:
            ask(reading, name, np.arange(2000), 99)
        gained = warm(model, 1, 1 << 20).rows
    assert not [n for n in os.listdir(path) if n.endswith(".partial")]
    assert len([n for n in os.listdir(path) if n.endswith(".delta")]) == 1
