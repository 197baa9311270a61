"""Ids that no change wrote for longer than their table's ttl, or that are too many, are dropped by
compaction; ages survive whatever else happens to a table."""

import itertools
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from aging import BEGAN, DIM, IDS, MISSING, VALUES, at, change, check, clock, compact_on, days_of, on, publish
from killing import run_until
from raw_loads import publish_raw, vectors_of
from support import LONGEST_S, flip_bit, rows_of, until

from tableside.loader.deltas import apply as applying
from tableside.loader.deltas.changes import TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.deltas.merging import Merges
from tableside.loader.errors import ModelError, NoSpace, SegmentError, VersionError
from tableside.loader.load.as_delta import load_as_delta
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.segment.stored import StoredIds
from tableside.loader.shards.reshard import reshard
from tableside.loader.versions.retention import Retention, collect_states
from tableside.loader.versions.states import State, attach_state, state_of
from tableside.loader.versions.versions import Model

# ---- ttl ----


def test_ids_without_a_change_go(root: Path, tmp_path: Path) -> None:
    """They are unknown ids then, until a change brings one back as a new one."""
    model = publish(tmp_path, root, ttl="30d")
    check(model, on(0, IDS))
    change(model, 20, IDS[:50])
    change(model, 25, [1, 2, int(IDS[60])], deleted=[1])
    expected = on(0, IDS) | on(20, IDS[:50]) | on(25, [2, int(IDS[60])])
    check(model, expected)
    done = compact_on(model, 40)
    assert (done.expired, done.evicted, done.rows) == (IDS.size - 51, 0, 52)
    expected = on(20, IDS[:50]) | on(25, [2, int(IDS[60])])
    check(model, expected)
    table = attach_state(model).tables["t"]
    np.testing.assert_array_equal(vectors_of(table, [*IDS[50:52], 2])[:, 0], [0.5, 0.5, 1])
    change(model, 41, IDS[70:72])
    check(model, expected | on(41, IDS[70:72]))
    compact_on(model, 52)
    check(model, on(25, [2, int(IDS[60])]) | on(41, IDS[70:72]))


def test_a_version_without_changes_is_compacted_for_what_goes(root: Path, tmp_path: Path) -> None:
    """Where nothing goes, nothing is done; positions, scorer and other tables stay as they were."""
    model = publish(tmp_path, root, ttl="30d", more={"other": (None, rows_of(50, 4))})
    assert compact(model, at(30)) is None, "a row lives for the whole of its ttl"
    done = compact_on(model, 30.1)
    assert (done.state, done.expired, done.merged, done.rows) == (State(2), IDS.size, 0, 50)
    check(model, {})
    assert compact(model, at(100)) is None
    change(model, 31, IDS[:3])
    check(model, on(31, IDS[:3]))
    compact_on(model, 32)
    check(model, on(31, IDS[:3]))


def test_a_table_without_a_ttl_has_no_times(root: Path, tmp_path: Path) -> None:
    """Its files have the format that they always had."""
    model = publish(tmp_path, root)
    change(model, 1, IDS[:5])
    segment = attach_state(model)
    assert (segment.header.format_version, segment.deltas[0].segment.header.format_version) == (2, 3)
    said = json.loads(segment.header.to_json())["tables"][0]["ids"]
    assert not {"ttl_s", "max_rows", "expired", "evicted"} & set(said) and "has_times" not in said["index"]
    compact_on(model, 10_000)
    assert attach_state(model).header.tables[0].id_count == IDS.size
    timed = publish(tmp_path, root, ttl="30d")
    change(timed, 1, IDS[:5])
    segment = attach_state(timed)
    assert {segment.header.format_version, segment.deltas[0].segment.header.format_version} == {12}


def test_what_names_a_version_by_its_rows_does_not_see_new_keys() -> None:
    """`Segment.content` is made of this text, and other hosts and pickles keep it."""
    text = (
        "StoredIds(count=3, missing='error', default_row=None, first=0, backfilled=0, index=None, deleted=0, "
    )
    assert repr(StoredIds(3, ttl_s=5, max_rows=6, expired=7, evicted=8)) == f"{text}strings=False)"


def test_an_id_that_went_is_refused_where_missing_ids_are(root: Path, tmp_path: Path) -> None:
    model = publish(tmp_path, root, ttl="1h", missing="error")
    change(model, 1, IDS[:3])
    compact_on(model, 1.01)
    row_map = attach_state(model).tables["t"].row_map
    assert row_map is not None and row_map.default_row is None
    assert (row_map.find(IDS) >= 0).sum() == 3


def test_a_load_begins_anew(root: Path, tmp_path: Path) -> None:
    """Also of a checkpoint whose rows are those that are live, and as changes it is a load."""
    model = publish(tmp_path, root, ttl="30d")
    compact_on(model, 31)
    publish(tmp_path, root, day=32, ttl="30d")
    check(model, on(32, IDS))
    raw = {"t": {"key": "t.weight", "ids": "raw", "id_key": "t.ids", "row_format": "fp32", "ttl": "30d"}}
    raw["t"]["missing"] = MISSING.tolist()  # type: ignore[assignment]
    spec = parse_model({"name": "demo", "checkpoint": "c.npz", "tables": raw}, tmp_path)
    why_not = load_as_delta(spec, root).why_not
    assert why_not == "table 't' has ttl or max_rows, and a load gives all of its rows new ages"


@pytest.mark.usefixtures("every_table_is_large")
def test_a_load_does_not_take_a_file_with_old_ages(root: Path, tmp_path: Path) -> None:
    """Though the rows are the same. What `--only` leaves alone keeps its ages, and its file."""
    more = {"other": (None, rows_of(50, 4))}
    model = publish(tmp_path, root, ttl="30d", more=more)
    publish(tmp_path, root, day=5, ttl="30d", more=more)
    check(model, on(5, IDS))
    assert attach_state(model).header.source.get("same", {}).get("tables") == ["other"]
    of = {"t": {"missing": MISSING.tolist(), "ttl": "30d"}}
    tables = {"t": (IDS, VALUES), "other": (None, rows_of(50, 4, 9))}
    only = LoadSettings(only=("other",), clock=lambda: clock(9))
    publish_raw(tmp_path, root, tables, of, settings=only, row_format="fp32")
    check(model, on(5, IDS))
    for more, said in (
        ({"ttl": "31d"}, r"ttl in seconds is 2678400; version 3 .* has 2592000; load this"),
        ({"max_rows": 5}, "max_rows is 5; version 3 .* has None; load this"),
    ):
        with pytest.raises(ModelError, match=said):
            publish_raw(tmp_path, root, tables, {"t": of["t"] | more}, settings=only, row_format="fp32")


# ---- ages ----


def test_ages_survive_merges(root: Path, tmp_path: Path) -> None:
    """Each apply merges deltas into one; the last change of an id counts."""
    model = publish(tmp_path, root, ttl="30d")
    expected = on(0, IDS)
    for day in range(1, 7):
        ids = IDS[day * 10 : day * 10 + 20]
        change(model, day, ids, merge_share=0.0)
        expected |= on(day, ids)
        check(model, expected)
    done = compact_on(model, 33)
    assert done.expired == IDS.size - 50, "day 3 is as old as the ttl, and no older"
    check(model, {id_: day for id_, day in expected.items() if day >= 3})


def test_a_row_that_is_written_again_as_it_was_is_young(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a merge is under way of its older change, which has the very same row."""
    model, may_end, write = publish(tmp_path, root, ttl="30d"), threading.Event(), Merges._write
    monkeypatch.setattr(applying, "SMALL_BYTES", 0)
    monkeypatch.setattr(Merges, "_write", lambda *of: may_end.wait(LONGEST_S) and write(*of))
    with Merges(model, 1) as merges:

        def rows_on(day: float, ids: np.ndarray) -> None:
            block = TableChanges("t", ids, np.ones((ids.size, DIM), np.float32))
            applying.apply(model, applying.ChangeBatch([block]), at(day), merges=merges)

        rows_on(1, IDS[:50])
        rows_on(2, IDS[50:90])
        rows_on(3, IDS[60:70])
        assert merges.is_running(), "two deltas are merged"
        may_end.set()
        until(merges._running.done, what="the merge to end")  # type: ignore[union-attr]
        before = state_of(model.record()).sequence
        rows_on(4, IDS[80:85])
        assert state_of(model.record()).sequence == before + 2, "the merged delta was published"
    days = on(0, IDS) | on(1, IDS[:50]) | on(2, IDS[50:90]) | on(3, IDS[60:70]) | on(4, IDS[80:85])
    check(model, days)


@pytest.mark.usefixtures("every_table_is_large")
def test_ages_survive_compactions_that_drop_nothing(root: Path, tmp_path: Path) -> None:
    """Files of a table without changes are linked to, with its times."""
    model = publish(tmp_path, root, ttl="30d", more={"other": (None, rows_of(50, 4))})
    change(model, 3, IDS[:9])
    compact_on(model, 4)
    change_other(model, 5)
    compact_on(model, 6)
    first, second = (model.attach(version, "header").files for version in (2, 3))
    shared = {f.table for f in first} & {f.table for f in second if f.status.st_nlink > 1}
    assert shared == {"t"}
    check(model, on(0, IDS) | on(3, IDS[:9]))


def change_other(model: Model, day: float) -> None:
    block = TableChanges("other", np.arange(3), rows_of(3, 4, 5))
    applying.apply(model, applying.ChangeBatch([block]), at(day))


def test_a_version_that_is_gone_back_to_has_its_ages(root: Path, tmp_path: Path) -> None:
    model = publish(tmp_path, root, ttl="30d")
    change(model, 10, IDS[:9])
    compact_on(model, 31)
    check(model, on(10, IDS[:9]))
    model.activate(1)
    check(model, on(0, IDS) | on(10, IDS[:9]))
    model.activate(1, 0)
    compact_on(model, 29 + 2)
    check(model, {})


def test_a_change_that_comes_meanwhile_keeps_its_row(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id that is dropped, and written before the new version is live, is there."""
    model, came = publish(tmp_path, root, ttl="30d"), list[int]()

    def come(done: int, total: int) -> None:
        if not came:
            came.append(done)
            change(model, 31, IDS[:9])
            change(model, 32, IDS[9:12])

    done = compact(model, at(31), come)
    assert done is not None and came and done.expired == IDS.size
    check(model, on(31, IDS[:9]) | on(32, IDS[9:12]))
    assert done.state == State(2, 2)


def test_times_are_those_of_the_apply_and_positions_stay(root: Path, tmp_path: Path) -> None:
    """Whatever a stream says of when its changes were made; and where nothing is merged."""
    model = publish(tmp_path, root, ttl="30d")
    block = TableChanges("t", IDS[:4], np.ones((4, DIM), np.float32))
    batch = applying.ChangeBatch([block], "stream", "1", made_at=5.0)
    applying.apply(model, batch, at(20))
    check(model, on(0, IDS) | on(20, IDS[:4]))
    for day in (31, 60):
        compact_on(model, day)
        assert applying.position_of(model, "stream") == "1"


@pytest.mark.drawn(1)
@pytest.mark.parametrize("seed", range(6))
def test_days_of_anything(root: Path, tmp_path: Path, seed: int) -> None:
    """Changes, deletions, merges, compactions and ways back, at random: a dictionary says what must be
    there."""
    rng = np.random.default_rng(seed)
    model, pool = publish(tmp_path, root, ttl="20d", max_rows=420), np.concatenate([IDS, np.arange(100) - 5])
    expected, uses = on(0, IDS), 0
    for day in range(1, 60):
        ids = rng.choice(pool, rng.integers(1, 30), replace=False)
        deleted = ids[rng.random(ids.size) < 0.2]
        change(model, day, ids, deleted, merge_share=float(rng.choice([0.0, 0.25])))
        expected |= on(day, ids)
        for id_ in deleted.tolist():
            del expected[id_]
        if rng.random() < 0.3:
            done = compact(model, at(day))
            assert done is not None
            young = {id_: time for id_, time in expected.items() if time >= day - 20}
            assert done.expired == len(expected) - len(young)
            left = sorted(young, key=lambda id_: (young[id_], id_))[max(0, len(young) - 420) :]
            assert done.evicted == len(young) - len(left)
            expected, uses = {id_: young[id_] for id_ in left}, uses + done.expired + done.evicted
        check(model, expected)
    stored = attach_state(model).header.tables[0].ids
    assert stored is not None and stored.expired + stored.evicted == uses > 0


# ---- kills ----


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["kill", "full"])
def test_every_step_of_a_compaction(root: Path, tmp_path: Path, what: str) -> None:
    """Before its flip all ids are there, behind it those that are left; no file of a dead one stays."""
    story = root / "story"
    model = publish(tmp_path, story, ttl="30d", max_rows=90)
    change(model, 20, IDS[:50])
    change(model, 25, IDS[40:100])
    before = on(0, IDS) | on(20, IDS[:50]) | on(25, IDS[40:100])
    after = on(20, np.sort(IDS[:40])[-30:]) | on(25, IDS[40:100])
    for step in itertools.count(1):
        shutil.rmtree(root / "now", ignore_errors=True)
        shutil.copytree(story, root / "now")
        model = Model(root / "now", "demo")
        was_ended = run_until(step, what, lambda m=model: compact(m, at(40)), (NoSpace, OSError))  # type: ignore[arg-type, misc]
        check(model, before if model.record().current == 1 else after)
        model.collect(0)
        collect_states(model, Retention(0))
        left = [n for n in os.listdir(model.folder) if n.endswith((".partial", ".merged", ".scratch"))]
        assert not left, left
        if model.record().current == 1:
            compact_on(model, 40)
        check(model, after)
        if not was_ended:
            break
    assert step > 8, f"it has {step - 1} steps"


def test_an_error_leaves_what_was(root: Path, tmp_path: Path) -> None:
    """Where somebody goes back meanwhile, and no change was there to be compacted."""
    model = publish(tmp_path, root, ttl="30d")
    publish(tmp_path, root, day=1, ttl="30d")
    with pytest.raises(VersionError, match=r"state 1 of model 'demo' is live, which does not follow from 2,"):
        compact(model, at(40), lambda done, total: model.activate(1))
    check(model, on(0, IDS))


# ---- what is refused ----


def test_a_delta_with_other_times_than_its_version_is_refused(root: Path, tmp_path: Path) -> None:
    """Rows without a time would be older than all others, and go."""
    plain, timed = publish(tmp_path, root / "plain"), publish(tmp_path, root / "timed", ttl="30d")
    for model in (plain, timed):
        change(model, 1, IDS[:5])
    for one, other in ((plain, timed), (timed, plain)):
        at_ = one.folder / "1+1.delta"
        data = at_.read_bytes()
        at_.unlink()
        at_.write_bytes((other.folder / "1+1.delta").read_bytes())
        with pytest.raises(
            SegmentError, match=r"1\+1\.delta: table 't' has times of its rows, or lacks them"
        ):
            attach_state(one)
        at_.write_bytes(data)


def test_owners_would_drop_rows_at_different_times(root: Path, tmp_path: Path) -> None:
    """Which is said before all rows are read."""
    model = publish(tmp_path, root, ttl="30d")
    flip_bit(model.path(1), model.attach().header.tables[0].offset)
    with pytest.raises(SegmentError, match="checksum"):
        model.attach()
    with pytest.raises(ModelError, match=r"\[tables.t\]: ttl and max_rows are for models on one host"):
        reshard(root, "demo", 2)
    assert sorted(os.listdir(root)) == ["demo"]


def test_a_clock_beyond_what_rows_hold(root: Path, tmp_path: Path) -> None:
    """Times before 1970 and behind 2106 are the first and the last one."""
    spec = publish(tmp_path, root, day=1e6, ttl="30d")
    assert set(days_of(attach_state(spec)).values()) == {(2**32 - 1 - BEGAN) / 86400}
    change(spec, -1e6, IDS[:3])
    assert sorted(days_of(attach_state(spec)).values())[:4] == [-BEGAN / 86400] * 3 + [
        (2**32 - 1 - BEGAN) / 86400
    ]
