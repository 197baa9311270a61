"""Compaction gives the rows that were live, as a version; changes that come meanwhile stay, whatever ends
it."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from changing import DIM, IDS, MISSING, Oracle, found_by
from raw_segments import DenseTable, RawTable, publish_tables
from support import rows_of

from tableside.loader.deltas import compact as compaction
from tableside.loader.deltas.apply import ApplySettings, apply, position_of
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact, delta_share
from tableside.loader.errors import NoSpace, VersionError
from tableside.loader.shards.reshard import reshard
from tableside.loader.versions.states import State, attach_state, state_of
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, RowFormat, choose


@pytest.fixture
def oracle(root: Path) -> Oracle:
    return Oracle(root)


@pytest.mark.parametrize(
    "row_format", [RowFormat.FP32, RowFormat.FP16, RowFormat.INT8], ids=lambda f: f.label
)
@pytest.mark.drawn(1)
def test_a_version_has_the_rows_that_were_live(root: Path, row_format: RowFormat) -> None:
    """Overwritten, inserted and deleted ones, the ids and default rows of every table, and what checksums
    say of them."""
    oracle = Oracle(root, row_format)
    for n in range(3):
        apply(oracle.model, ChangeBatch(oracle.change(200), "stream", str(n + 1), str(n) if n else None))
    before = attach_state(oracle.model)
    done = compact(oracle.model)
    assert done is not None and done.state.version == 2
    after = attach_state(oracle.model, None, "full")
    asked = {
        name: np.arange(1000) if name != "raw" else np.concatenate([IDS, np.arange(1000) * 7919 + 1])
        for name in after.tables
    }
    for name, table in after.tables.items():
        for weights in (None, np.full(asked[name].size, 0.5, np.float32)):
            lengths = np.ones(asked[name].size, np.int32)
            now, was = (
                choose().lookup(s.tables[name], asked[name], lengths, weights=weights)
                for s in (after, before)
            )
            np.testing.assert_array_equal(now, was, name)
        there = np.array([(name, int(i)) in oracle.rows for i in asked[name]])
        np.testing.assert_array_equal(found_by(table, asked[name]), there, name)
    assert after.sequence == 4, "two deltas were merged first, which is a state as well"
    assert position_of(oracle.model, "stream") == "3"


def test_what_no_version_needs_is_gone(root: Path) -> None:
    """Where nothing was deleted from a table of row numbers, the new version has no delta."""
    publish_tables(
        root,
        {"raw": RawTable(IDS, rows_of(IDS.size, DIM), default=MISSING), "dense": DenseTable(rows_of(9, DIM))},
    )
    model = Model(root, "demo")
    change = TableChanges("raw", IDS[:700], rows_of(700, DIM, 3), np.arange(700) < 300)
    apply(model, ChangeBatch([change, TableChanges("dense", np.arange(5), rows_of(5, DIM, 4))]))
    assert 0 < delta_share(attach_state(model)) < 2
    done = compact(model)
    assert done is not None and done.state == State(2)
    segment = attach_state(model)
    assert not segment.deltas and segment.sequence == 1 and delta_share(segment) == 0
    table = segment.header.tables[0]
    assert table.ids is not None and table.ids.count == IDS.size - 300
    assert compact(model) is None
    assert apply(model, ChangeBatch([change])).state == State(2, 2)


def test_one_byte_for_each_that_a_rebuilt_table_has(root: Path) -> None:
    """Rows of a dense table are those of a table that was written with these vectors."""
    values, changed = rows_of(500, DIM), rows_of(40, DIM, 1)
    publish_tables(root, {"t": DenseTable(values, is_plain=True)})
    ids = np.random.default_rng(0).permutation(500)[:40]
    apply(Model(root, "demo"), ChangeBatch([TableChanges("t", ids, changed)]))
    compact(Model(root, "demo"))
    values[ids] = changed
    publish_tables(root, {"t": DenseTable(values, is_plain=True)}, "rebuilt")
    compacted, rebuilt = (attach_state(Model(root, name)).tables["t"] for name in ("demo", "rebuilt"))
    np.testing.assert_array_equal(compacted.packed, rebuilt.packed)


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.drawn(1)
def test_changes_that_come_meanwhile(oracle: Oracle, monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    """They are applied, seen at once, and still there when the new version is live."""
    apply(oracle.model, ChangeBatch(oracle.change(100)))
    apply(oracle.model, ChangeBatch(oracle.change(2)))
    write = compaction.CompactTable.write

    def slow(self: compaction.CompactTable, *of: object) -> None:
        if self.before.name == "raw":
            for _ in range(batches):
                changes = oracle.change(400)
                thread = threading.Thread(
                    target=apply, args=(oracle.model, ChangeBatch(changes), ApplySettings(merge_share=0.0))
                )
                thread.start()
                thread.join()
                oracle.check(attach_state(oracle.model))
        write(self, *of)  # type: ignore[arg-type]

    monkeypatch.setattr(compaction.CompactTable, "write", slow)
    done = compact(oracle.model)
    assert done is not None and done.state == State(2, 3 + batches), (
        "a merge of two deltas is a state as well"
    )
    segment = attach_state(oracle.model)
    assert len(segment.deltas) == 1 and segment.header.version == 2
    oracle.check(segment)
    apply(oracle.model, ChangeBatch(oracle.change(50)))
    oracle.check(attach_state(oracle.model))


def test_going_back_meanwhile_ends_it(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(oracle.model, ChangeBatch(oracle.change(100)))
    old = dict(oracle.rows)
    apply(oracle.model, ChangeBatch(oracle.change(100)), ApplySettings(merge_share=0.0))
    write = compaction.CompactTable.write

    def back(self: compaction.CompactTable, *of: object) -> None:
        oracle.model.activate(1, 1)
        write(self, *of)  # type: ignore[arg-type]

    monkeypatch.setattr(compaction.CompactTable, "write", back)
    with pytest.raises(
        VersionError, match=r"state 1\+1 of model 'demo' is live, which does not follow from 1\+"
    ):
        compact(oracle.model)
    assert state_of(oracle.model.record()) == State(1, 1) and oracle.model.versions() == [1]
    oracle.rows = old
    oracle.check(attach_state(oracle.model))


STEPS = ("CompactTable.write", "Compaction._carry_over", "Compaction._publish")


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.drawn(1)
def test_a_compaction_that_fails_leaves_what_was(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    apply(oracle.model, ChangeBatch(oracle.change(100)))
    names = step.split(".")

    def fail(*of: object) -> None:
        raise NoSpace("full")

    with monkeypatch.context() as patched:
        patched.setattr(getattr(compaction, names[0]), names[1], fail)
        with pytest.raises(NoSpace):
            compact(oracle.model)
    assert state_of(oracle.model.record()) == State(1, 1) and oracle.model.versions() == [1]
    assert not [n for n in os.listdir(oracle.model.folder) if n.startswith("2") or n.endswith(".partial")]
    oracle.check(attach_state(oracle.model))
    assert compact(oracle.model) is not None


def test_a_compacted_version_is_gone_back_from(oracle: Oracle) -> None:
    apply(oracle.model, ChangeBatch(oracle.change(100)))
    compact(oracle.model)
    oracle.model.activate(1)
    oracle.check(attach_state(oracle.model))
    assert state_of(oracle.model.record()) == State(1, 1)


def test_an_owner_whose_ids_do_not_begin_at_zero(root: Path) -> None:
    """A changed id is told from its row number."""
    values = rows_of(4000, 8)
    publish_tables(root, {"t": DenseTable(values, RowFormat.FP32)})
    reshard(root, "demo", 2)
    model = Model(root, "demo-owner-1-of-2")
    first, count = attach_state(model).tables["t"].row_numbers
    assert first > 0
    changed = np.array([first, first + 7, first + count - 1])
    elsewhere = np.array([0, first - 1])
    ids = np.concatenate([elsewhere, changed])
    changes = TableChanges("t", ids, np.full((ids.size, 8), 2.0, np.float32))
    assert apply(model, ChangeBatch([changes], "apply", "1")).rows == changed.size
    assert compact(model) is not None
    ids = np.arange(first, first + count)
    expected = values[ids]
    expected[changed - first] = 2.0
    table = attach_state(model).tables["t"]
    np.testing.assert_array_equal(choose().lookup(table, ids, pooling=Pooling.NONE), expected)
