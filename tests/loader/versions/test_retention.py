"""Which states can be gone back to: the newest by number or by age, over versions, and the newest of each
version."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from changing import Oracle

from tableside.loader.deltas.apply import ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch
from tableside.loader.deltas.compact import compact
from tableside.loader.load.load import Loaded
from tableside.loader.segment.delta import delta_name
from tableside.loader.versions.retention import DEFAULT, Retention, collect_states
from tableside.loader.versions.states import (
    APPLY_LOCK,
    State,
    attach_state,
    kept_states,
    resolve,
    state_of,
)
from tableside.loader.versions.versions import Model

Rows = dict[tuple[str, int], np.ndarray]


@pytest.fixture
def oracle(root: Path) -> Oracle:
    return Oracle(root)


def applied(oracle: Oracle, batches: int, keep: Retention = DEFAULT) -> dict[int, Rows]:
    """Applies batches; sequence -> what rows are in that state."""
    rows = {}
    for _ in range(batches):
        sequence = apply(oracle.model, ChangeBatch(oracle.change(5)), ApplySettings(keep=keep)).state.sequence
        rows[sequence] = dict(oracle.rows)
    return rows


def check_back(oracle: Oracle, version: int, rows: dict[int, Rows]) -> None:
    """Each of these states can be made live, and has its rows."""
    for sequence, was in rows.items():
        oracle.model.activate(version, sequence)
        oracle.rows = was
        oracle.check(attach_state(oracle.model))


def sequences(oracle: Oracle, version: int) -> set[int]:
    return {state.sequence for state in kept_states(oracle.model, version)} - {0}


@pytest.mark.parametrize("batches", [1, 4, 8, 9, 12, 30])
@pytest.mark.drawn(3)
def test_as_many_states_stay_as_promised(oracle: Oracle, batches: int) -> None:
    """Eight beside the live one, or all where there are fewer."""
    rows = applied(oracle, batches)
    check_back(oracle, 1, {s: rows[s] for s in sorted(rows)[-9:]})


@pytest.mark.parametrize("keep", [0, 1, 3, 4, 5, 100])
@pytest.mark.drawn(3)
def test_gc_leaves_what_it_says(oracle: Oracle, keep: int) -> None:
    """Of four states beside the live one, none goes where five are to stay."""
    applied(oracle, 5)
    collect_states(oracle.model, Retention(keep))
    expected = set(range(5 - min(keep, 4), 6))
    below = {attach_state(oracle.model, State(1, s)).deltas[-1].sequence for s in expected}
    assert sequences(oracle, 1) == expected | below


def test_states_stay_for_a_time(oracle: Oracle) -> None:
    """All that were live in that time: the one that was replaced within it as well."""
    keep = Retention(0, 3600)
    rows = applied(oracle, 20, keep)
    assert sequences(oracle, 1) == set(range(1, 21))
    for sequence in range(1, 15):
        os.utime(oracle.model.folder / delta_name(1, sequence), (time.time() - 7200 + sequence,) * 2)
    rows |= applied(oracle, 1, keep)
    assert set(range(14, 22)) <= sequences(oracle, 1) <= set(range(14, 22)) | {1}
    check_back(oracle, 1, {s: rows[s] for s in range(14, 22)})


def test_states_stay_over_a_compaction(oracle: Oracle) -> None:
    """Those of the version before it go as newer ones come, but for its newest, with which it can be live
    again."""
    rows = applied(oracle, 6)
    compact(oracle.model)
    rows |= applied(oracle, 3)
    assert state_of(oracle.model.record()).version == 2
    check_back(oracle, 1, {s: rows[s] for s in (3, 6)})
    oracle.model.activate(2)
    oracle.rows = rows[max(rows)]
    applied(oracle, 9)
    assert 3 not in sequences(oracle, 1)
    oracle.model.activate(1)
    oracle.rows = rows[6]
    oracle.check(attach_state(oracle.model))


def test_gc_leaves_a_model_to_which_changes_are_applied(oracle: Oracle, root: Path) -> None:
    """As well as one that is not there."""
    applied(oracle, 5)
    with oracle.model.alone(APPLY_LOCK):
        assert collect_states(oracle.model, Retention(0)) == []
    assert collect_states(Model(root, "ghost"), Retention(0)) == []
    assert collect_states(oracle.model, Retention(0))


def test_a_compaction_takes_no_state(oracle: Oracle) -> None:
    """However many are kept, and whoever asked for it."""
    keep = Retention(30)
    rows = applied(oracle, 20, keep)
    compact(oracle.model)
    assert set(rows) <= sequences(oracle, 1)


def test_the_live_state_stays_where_it_is_not_the_newest(oracle: Oracle) -> None:
    rows = applied(oracle, 6)
    oracle.model.activate(1, 2)
    collect_states(oracle.model, Retention(0))
    assert state_of(oracle.model.record()) == State(1, 2)
    oracle.rows = rows[2]
    oracle.check(attach_state(oracle.model))
    assert {2, 6} <= sequences(oracle, 1)


def test_a_state_is_named_by_its_delta_or_is_the_newest(root: Path, oracle: Oracle) -> None:
    applied(oracle, 2)
    model, version = oracle.model, oracle.model.current()
    assert version is not None
    assert [resolve(model, version, n) for n in (0, 1, None)] == [State(version, n) for n in (0, 1, 2)]


def test_versions_live_not_long_ago_stay_beside_the_newest(
    publish: Callable[..., Loaded], root: Path
) -> None:
    """By when the next one came in their place, also where an older one is live again."""
    for _ in range(4):
        publish({"a": np.zeros((4, 4), np.float32)})
    model = Model(root, "demo")
    for version, hours in ((1, 5), (2, 4), (3, 2)):
        made = time.time() - 3600 * hours
        os.utime(model.path(version), (made, made))
    model.activate(1)
    model.collect(1, 3 * 3600)
    assert model.versions() == [1, 2, 3, 4]  # 2 was live until 3 came
    model.collect(1, 3600)
    assert model.versions() == [1, 3, 4]
    model.collect(1)
    assert model.versions() == [1, 4]
