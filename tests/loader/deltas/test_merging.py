"""Deltas that are merged beside a follower: each state is what a dictionary of rows says, and nothing is
left of a void merge."""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from changing import Oracle

from campaigns.common import until
from tableside.loader.deltas import apply as applying
from tableside.loader.deltas import merging
from tableside.loader.deltas.apply import ApplyResult, apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.deltas.merging import Merges
from tableside.loader.errors import NoSpace
from tableside.loader.load.load import Loaded
from tableside.loader.versions.states import State, attach_state, kept_states
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose


@pytest.fixture
def oracle(root: Path) -> Oracle:
    return Oracle(root)


@pytest.fixture
def merges(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> Iterator[Merges]:
    """Of a model whose deltas are merged as if a few hundred rows were many."""
    monkeypatch.setattr(applying, "SMALL_BYTES", 1 << 15)
    with Merges(oracle.model) as made:
        yield made


def files(oracle: Oracle) -> list[str]:
    return sorted(n for n in os.listdir(oracle.model.folder) if "+" in n)


def begun(oracle: Oracle, merges: Merges) -> str:
    """Applies batches until a merge has begun, and has ended unpublished; the name of its file."""
    for _ in range(100):
        apply(oracle.model, ChangeBatch(oracle.change(300)), merges=merges)
        if merges.is_running():
            until(merges._running.done, what="the merge to end")
            return next((n for n in files(oracle) if n.endswith(".merged")), "")
    raise AssertionError("no merge began")


@pytest.mark.drawn(0.5)
def test_states_while_deltas_are_merged(oracle: Oracle, merges: Merges) -> None:
    """Overwrites of overwrites, deletions and insertions, before, while and after both deltas become one."""
    applied: list[ApplyResult] = []
    segment = None
    for n in range(40):
        tables = ("raw", "dense", "policy") if n % 3 else ("raw",)
        applied.append(
            apply(
                oracle.model, ChangeBatch(oracle.change(300 if n % 7 == 0 else 5 + n, tables)), merges=merges
            )
        )
        segment = attach_state(oracle.model, None, "full", segment)
        assert len(segment.deltas) <= 2 and segment.sequence == applied[-1].state.sequence
        assert applied[-1].entries == sum(d.entries for d in segment.deltas)
        assert applied[-1].delta_bytes == sum(d.segment.size for d in segment.deltas)
        oracle.check(segment)
    merged = sum(a.is_merged for a in applied)
    assert merged >= 3 and applied[-1].state.sequence == 40 + merged, "a merge has a sequence of its own"


def test_the_merged_delta_is_the_state_that_was_merged(oracle: Oracle, merges: Merges) -> None:
    """It keeps that state's rows and positions, under a new sequence, and holds nothing that came after
    it."""
    begun(oracle, merges)
    rows, positions = dict(oracle.rows), attach_state(oracle.model).change
    last = apply(oracle.model, ChangeBatch(oracle.change(3), "stream", "1"), merges=merges)
    assert last.is_merged
    oracle.check(attach_state(oracle.model))
    below = attach_state(oracle.model, State(1, last.state.sequence - 1))
    assert len(below.deltas) == 1 and below.change is not None and positions is not None
    assert below.change.positions == positions.positions
    oracle.rows = rows
    oracle.check(below)
    assert State(1, last.state.sequence - 1) in kept_states(oracle.model, 1)


def test_changes_of_others_meanwhile_are_carried_over(oracle: Oracle, merges: Merges) -> None:
    """They lie over both deltas while these are merged, however many they are, and over the merged one
    then."""
    file = begun(oracle, merges)
    for rows in (20, 500, 1):
        assert not apply(oracle.model, ChangeBatch(oracle.change(rows))).is_merged
    assert file in files(oracle)
    assert apply(oracle.model, ChangeBatch(oracle.change(20)), merges=merges).is_merged and file not in files(
        oracle
    )
    oracle.check(attach_state(oracle.model))


def test_another_process_does_not_merge_what_is_merged_already(oracle: Oracle, merges: Merges) -> None:
    begun(oracle, merges)
    with Merges(oracle.model) as others:
        apply(oracle.model, ChangeBatch(oracle.change(500)), merges=others)
        assert not others.is_running()
    oracle.check(attach_state(oracle.model))


@pytest.mark.parametrize("what", ["compacted", "went back", "went back and on"])
@pytest.mark.drawn(1)
def test_a_state_that_does_not_follow_makes_a_merge_void(oracle: Oracle, merges: Merges, what: str) -> None:
    """Its file goes, and a later merge is published."""
    apply(oracle.model, ChangeBatch(oracle.change(600)), merges=merges)
    apply(
        oracle.model, ChangeBatch(oracle.change(5)), merges=merges
    )  # which lies over the first one, as the merged state does
    rows = dict(oracle.rows)
    file = begun(oracle, merges)
    if what == "compacted":
        compact(oracle.model)
    else:
        oracle.model.activate(1, 2)
        oracle.rows = rows
    if what == "went back and on":
        apply(oracle.model, ChangeBatch(oracle.change(30)))
    applied = apply(oracle.model, ChangeBatch(oracle.change(20)), merges=merges)
    assert not applied.is_merged and file not in files(oracle)
    oracle.check(attach_state(oracle.model))
    begun(oracle, merges)
    assert apply(oracle.model, ChangeBatch(oracle.change(20)), merges=merges).is_merged
    oracle.check(attach_state(oracle.model))


def test_a_merge_that_ends_with_its_process_leaves_nothing(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applying, "SMALL_BYTES", 1 << 15)
    with Merges(oracle.model) as merges:
        assert begun(oracle, merges) in files(oracle)
    assert not [n for n in files(oracle) if n.endswith(".merged")]
    oracle.check(attach_state(oracle.model))


def test_files_of_merges_go_when_nobody_holds_them(oracle: Oracle) -> None:
    """Applies of others and `gc` leave the file of a merge that is under way."""
    apply(oracle.model, ChangeBatch(oracle.change(3)))
    path = oracle.model.folder / "1+1.merged"
    with open(path, "wb") as held:
        os.chmod(path, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
        apply(oracle.model, ChangeBatch(oracle.change(3)))
        oracle.model.collect(0)
        assert path.exists()
    apply(oracle.model, ChangeBatch(oracle.change(3)))
    assert not path.exists()


def test_a_full_file_system_ends_a_merge(
    oracle: Oracle, merges: Merges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next batch says so; the live state, its rows and its files stay."""
    from tableside.loader.segment import memory

    sizes = memory.available_bytes
    is_merge = lambda: threading.current_thread().name.startswith("tableside-merge")  # noqa: E731
    monkeypatch.setattr(memory, "available_bytes", lambda where: 1000 if is_merge() else sizes(where))
    assert not begun(oracle, merges), "its file has gone"
    rows, there = dict(oracle.rows), files(oracle)
    with pytest.raises(NoSpace, match="has 1,000 bytes free"):
        apply(oracle.model, ChangeBatch(oracle.change(5)), merges=merges)
    oracle.rows = rows
    assert files(oracle) == there
    oracle.check(attach_state(oracle.model))


@pytest.mark.drawn(0.5)
def test_a_merge_that_is_slow_is_waited_for(
    oracle: Oracle, merges: Merges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest delta outgrows the one below it by a batch at most, however long the merge takes."""
    is_released, write = threading.Event(), merging.write_unsealed
    monkeypatch.setattr(merging, "write_unsealed", lambda *given: is_released.wait(300) and write(*given))
    apply(oracle.model, ChangeBatch(oracle.change(200)), merges=merges)
    while not merges.is_running():
        apply(oracle.model, ChangeBatch(oracle.change(30)), merges=merges)
    threading.Timer(1.0, is_released.set).start()
    is_merged = False
    while not is_merged:
        sizes = [d.segment.size for d in attach_state(oracle.model).deltas]
        assert sizes[0] < sizes[1] + (1 << 15), sizes
        is_merged = apply(oracle.model, ChangeBatch(oracle.change(30)), merges=merges).is_merged
    oracle.check(attach_state(oracle.model))


@pytest.mark.parametrize(("row_format", "dim"), [("int8", 64), ("int4", 64), ("fp32", 3)])
@pytest.mark.drawn(1)
def test_rows_of_any_size_are_merged(
    publish: Callable[..., Loaded], root: Path, monkeypatch: pytest.MonkeyPatch, row_format: str, dim: int
) -> None:
    """Of 68, 36 and 12 bytes: multiples of 4, and not of 8."""
    monkeypatch.setattr(applying, "SMALL_BYTES", 1)
    publish({"t": np.zeros((2000, dim), np.float32)}, formats={"t": row_format})
    model, merged = Model(root, "demo"), 0
    with Merges(model) as merges:
        for n in range(6):
            ids = np.arange(50 * n, 50 * n + 300)
            change = TableChanges("t", ids, np.full((ids.size, dim), n, np.float32))
            apply(model, ChangeBatch([change]), merges=merges)
            if merges.is_running():
                merged += 1
                until(merges._running.done, what="the merge to end")
    assert merged
    found = choose().lookup(attach_state(model).tables["t"], np.arange(600), pooling=Pooling.NONE)
    expected = np.minimum(np.arange(600) // 50, 5) * (np.arange(600) < 550)
    np.testing.assert_array_equal(found, np.repeat(expected[:, None], dim, 1))
