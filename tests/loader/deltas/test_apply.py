"""Changes that are applied are what a dictionary of rows says, whatever was merged; a batch is applied
whole or not at all."""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from changing import DIM, IDS, Oracle
from raw_segments import RawTable, publish_tables
from support import files_of, rows_of

from tableside.loader.deltas import apply as applying
from tableside.loader.deltas.apply import ApplySettings, apply, position_of
from tableside.loader.deltas.change_files import read_changes
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.errors import ChangeError, NoSpace, SegmentError, VersionError
from tableside.loader.load.load import Loaded, load
from tableside.loader.model.model import parse_model
from tableside.loader.segment.delta import Delta
from tableside.loader.segment.stored import StoredIndex
from tableside.loader.versions.retention import Retention
from tableside.loader.versions.states import State, attach_state, kept_states, parse_state, state_of
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, RowFormat, Source, choose


@pytest.fixture
def oracle(root: Path) -> Oracle:
    return Oracle(root)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deltas are merged as if a few hundred rows were many."""
    monkeypatch.setattr(applying, "SMALL_BYTES", 1 << 15)


@pytest.mark.parametrize("backend", ["native", "reference", "fbgemm"])
def test_changes_are_seen(oracle: Oracle, backend: str) -> None:
    apply(oracle.model, ChangeBatch(oracle.change(100)))
    oracle.check(attach_state(oracle.model), backend)


@pytest.mark.usefixtures("small")
@pytest.mark.drawn(0.5)
def test_many_batches_are_merged_into_two_deltas(oracle: Oracle) -> None:
    """Small and large ones in turn: overwrites of overwrites, deletions of insertions, insertions of what
    was deleted."""
    merged, segment = 0, None
    for n in range(30):
        tables = ("raw", "dense", "policy") if n % 3 else ("raw",)
        applied = apply(oracle.model, ChangeBatch(oracle.change(300 if n % 7 == 0 else 5 + n, tables)))
        merged += applied.is_merged
        assert applied.state == State(1, n + 1)
        segment = attach_state(oracle.model, None, "full", segment)
        assert len(segment.deltas) <= 2 and segment.sequence == n + 1
        assert applied.entries == sum(d.entries for d in segment.deltas)
        oracle.check(segment)
    assert 3 <= merged <= 25


def test_a_reader_keeps_the_state_that_it_took(oracle: Oracle) -> None:
    before = attach_state(oracle.model)
    old = dict(oracle.rows)
    apply(oracle.model, ChangeBatch(oracle.change(50)))
    first = attach_state(oracle.model, None, "full", before)  # over the same mapping
    middle = dict(oracle.rows)
    apply(oracle.model, ChangeBatch(oracle.change(50)))
    oracle.check(attach_state(oracle.model))
    for segment, rows in ((before, old), (first, middle)):
        oracle.rows = rows
        oracle.check(segment)


def test_quantized_rows_are_those_of_a_load(root: Path) -> None:
    """A row that was changed is, byte for byte, what a load of its vector writes, but for the id in its
    padding."""
    oracle = Oracle(root, RowFormat.INT8)
    changes = oracle.change(200, ("dense",))
    apply(oracle.model, ChangeBatch(changes))
    table = attach_state(oracle.model).tables["dense"]
    expected = np.zeros((200, table.row_bytes), np.uint8)
    choose().quantize(changes[0].vectors, Source.FP32, RowFormat.INT8, expected)
    last = {int(i): n for n, i in enumerate(changes[0].ids)}
    asked = np.array(list(last))
    assert table.row_map is not None and table.row_map.overlay is not None
    found = np.zeros((asked.size, table.row_bytes), np.uint8)
    table.row_map.copy_elsewhere(table.row_map.find(asked), found)
    np.testing.assert_array_equal(found, expected[list(last.values())])


def test_half_precision(oracle: Oracle) -> None:
    vectors = rows_of(3, DIM).astype(np.float16)
    apply(oracle.model, ChangeBatch([TableChanges("dense", np.array([1, 2, 3]), vectors)]))
    found = choose().lookup(
        attach_state(oracle.model).tables["dense"], np.array([1, 2, 3]), pooling=Pooling.NONE
    )
    np.testing.assert_array_equal(found, vectors.astype(np.float32))


REFUSED = {
    "an unknown table": (
        TableChanges("other", np.array([1]), rows_of(1, DIM)),
        "has no table 'other'; it has: raw",
    ),
    "another dim": (
        TableChanges("raw", np.array([1]), rows_of(1, 8)),
        r"vectors are float32 \[1, 8\]; expected",
    ),
    "another type": (
        TableChanges("raw", np.array([1]), rows_of(1, DIM).astype(np.float64)),
        "vectors are float64",
    ),
    "ids of 32 bits": (TableChanges("raw", np.array([1], np.int32), rows_of(1, DIM)), "ids are int32"),
    "too many deleted": (
        TableChanges("raw", np.array([1]), rows_of(1, DIM), np.zeros(2, np.bool_)),
        "deleted is bool",
    ),
    "an id outside": (
        TableChanges("dense", np.array([1, 1000]), rows_of(2, DIM)),
        r"change 1: id 1000 is outside .*\[0, 1000\)",
    ),
    "a deletion of a table that refuses": (
        TableChanges("dense", np.array([1]), rows_of(1, DIM), np.ones(1, np.bool_)),
        "id 1 cannot be deleted",
    ),
    "a value that is not finite": (
        TableChanges("raw", np.array([4, 5]), np.array([[1.0] * DIM, [np.nan] * DIM], np.float32)),
        "id 5, change 1: a value that fp32 cannot represent",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_change_that_does_not_fit_refuses_the_batch(oracle: Oracle, what: str) -> None:
    """What came before it in the batch is not applied either, and nothing stays behind."""
    change, message = REFUSED[what]
    before = dict(oracle.rows)
    good = oracle.change(10)
    with pytest.raises(ChangeError, match=message):
        apply(oracle.model, ChangeBatch([*good, change]))
    oracle.rows = before
    oracle.check(attach_state(oracle.model))
    assert state_of(oracle.model.record()) == State(1)
    assert [n for n in os.listdir(oracle.model.folder) if "delta" in n] == []


@pytest.mark.parametrize("name", ["c.jsonl", "c.parquet", "c.npz"])
def test_an_unknown_table_of_a_file_is_named_with_its_place(
    name: str, oracle: Oracle, tmp_path: Path
) -> None:
    path = tmp_path / name
    if name == "c.jsonl":
        rows = [{"table": t, "id": 1, "vector": [0.0] * DIM} for t in ("raw", "raw", "other", "raw")]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name == "c.parquet":
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows_of(4, DIM).ravel()), DIM)
        pq.write_table(
            pa.table({"table": ["raw", "raw", "other", "raw"], "id": range(4), "vector": vectors}), path
        )
    else:
        np.savez(path, **{"other.ids": np.arange(4), "other.vectors": rows_of(4, DIM)})
    place = {"c.jsonl": "line 3", "c.parquet": "row 2", "c.npz": "other.ids: row 0"}[name]
    with pytest.raises(
        ChangeError, match=rf"{name}: {place}: model 'demo' has no table 'other'; it has: raw"
    ):
        apply(oracle.model, ChangeBatch(read_changes(path, None)))


def test_positions_are_kept_with_the_changes(oracle: Oracle) -> None:
    """A batch that does not follow what was applied of its source is refused, and names both places."""
    apply(oracle.model, ChangeBatch(oracle.change(5), "stream", "7"))
    apply(oracle.model, ChangeBatch(oracle.change(5), "other", "a"))
    apply(oracle.model, ChangeBatch(oracle.change(5), "stream", "9", after="7"))
    assert (position_of(oracle.model, "stream"), position_of(oracle.model, "other")) == ("9", "a")
    assert position_of(oracle.model, "none") is None
    for after in (None, "7", "10"):
        with pytest.raises(ChangeError, match=f"follow {after or 'none'}; model 'demo' has them up to 9"):
            apply(oracle.model, ChangeBatch([], "stream", "12", after))
    oracle.model.activate(1, 1)
    assert position_of(oracle.model, "stream") == "7"


def test_going_back_to_a_state_and_on_from_it(oracle: Oracle) -> None:
    """Sequences are never given twice; what followed the state that was gone back to is kept until it is
    old."""
    kept = {}
    for n in range(1, 5):
        apply(oracle.model, ChangeBatch(oracle.change(20)))
        kept[n] = dict(oracle.rows)
    for back in (2, 4, 1):
        oracle.model.activate(1, back)
        oracle.rows = dict(kept[back])
        oracle.check(attach_state(oracle.model))
    assert apply(oracle.model, ChangeBatch(oracle.change(20))).state == State(1, 5)
    oracle.check(attach_state(oracle.model))
    oracle.rows = kept[3]
    oracle.check(attach_state(oracle.model, State(1, 3)))
    assert kept_states(oracle.model, 1) == [State(1), *(State(1, n) for n in range(1, 6))]
    oracle.model.activate(1, 0)
    assert not attach_state(oracle.model).deltas
    with pytest.raises(VersionError, match=r"keeps no delta 1\+77; it has: 1\+1, 1\+2"):
        oracle.model.activate(1, 77)


@pytest.mark.usefixtures("small")
def test_old_states_go(oracle: Oracle) -> None:
    """As many as asked stay beside the live one, with the deltas that they lie over; who has one mapped
    keeps it."""
    segments, rows = [], []
    for _ in range(12):
        apply(oracle.model, ChangeBatch(oracle.change(40)), ApplySettings(keep=Retention(3)))
        segments.append(attach_state(oracle.model))
        rows.append(dict(oracle.rows))
    for state, was in zip(range(9, 13), rows[8:], strict=True):
        oracle.rows = was
        oracle.check(attach_state(oracle.model, State(1, state)))
    files = [n for n in os.listdir(oracle.model.folder) if n.endswith(".delta")]
    assert len(files) <= 4 + 2
    for segment, was in zip(segments, rows, strict=True):
        oracle.rows = was
        oracle.check(segment)
    with pytest.raises(VersionError, match=r"keeps no state 1\+1; of version 1 it has: 1, "):
        attach_state(oracle.model, State(1, 1))


def test_a_new_version_begins_without_deltas(oracle: Oracle, root: Path) -> None:
    apply(oracle.model, ChangeBatch(oracle.change(20)))
    publish_tables(root, {"raw": RawTable(IDS[:5], rows_of(5, DIM))})
    assert state_of(oracle.model.record()) == State(2)
    assert apply(oracle.model, ChangeBatch([TableChanges("raw", IDS[:2], rows_of(2, DIM))])).state == State(
        2, 2
    )
    oracle.model.activate(1)
    assert state_of(oracle.model.record()) == State(1, 1), "a version comes back as it was"
    oracle.check(attach_state(oracle.model))
    oracle.model.remove(2)
    assert not [n for n in os.listdir(oracle.model.folder) if n.startswith("2")]


def test_a_version_that_becomes_live_meanwhile(oracle: Oracle, root: Path) -> None:
    """The batch is refused, since its changes were checked against another version."""

    def blocks() -> Iterator[TableChanges]:
        yield from oracle.change(5)
        publish_tables(root, {"raw": RawTable(IDS[:5], rows_of(5, DIM))})

    with pytest.raises(
        VersionError, match="state 2 of model 'demo' became live while changes were applied over 1"
    ):
        apply(oracle.model, ChangeBatch(blocks()))
    assert state_of(oracle.model.record()) == State(2)
    assert not [n for n in os.listdir(oracle.model.folder) if "delta" in n]


@pytest.mark.parametrize("at", [100, 5000, -1], ids=["header", "rows", "end"])
def test_a_damaged_delta_is_refused_whole(oracle: Oracle, at: int) -> None:
    apply(oracle.model, ChangeBatch(oracle.change(300)))
    path = oracle.model.folder / "1+1.delta"
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    if at < 0:
        del data[len(data) // 2 :]
    else:
        data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(SegmentError, match=r"1\+1\.delta"):
        attach_state(oracle.model)
    assert not attach_state(oracle.model, State(1)).deltas


def test_deltas_of_many_rows_have_marks(oracle: Oracle) -> None:
    """Of tables of row numbers alone; a delta whose marks are of another number of rows is refused."""
    apply(oracle.model, ChangeBatch(oracle.change(100)))
    apply(oracle.model, ChangeBatch(oracle.change(2)))
    segment = attach_state(oracle.model)
    marked = [
        {t.name: index.marked for t, index in zip(d.tables.values(), indexes_of(d), strict=True)}
        for d in segment.deltas
    ]
    assert marked == [{"raw": 0, "dense": 0, "policy": 0}, {"raw": 0, "dense": 1000, "policy": 1000}]
    shorter = replace(segment.tables["dense"], packed=segment.tables["dense"].packed[:900], row_map=None)
    with pytest.raises(
        SegmentError, match=r"1\+1\.delta: table 'dense' has marks of 1000 rows; those of the version are 900"
    ):
        segment.deltas[1].layer("dense", shorter)


def indexes_of(delta: Delta) -> list[StoredIndex]:
    return [t.index for t in delta.tables.values() if t.index is not None]


def test_a_delta_under_another_name(oracle: Oracle) -> None:
    apply(oracle.model, ChangeBatch(oracle.change(3)))
    (oracle.model.folder / "1+1.delta").rename(oracle.model.folder / "1+3.delta")
    with pytest.raises(SegmentError, match=r"holds delta 1 over version 1; its name says \(1, 3\)"):
        attach_state(oracle.model, State(1, 3))


def test_what_a_killed_apply_left_goes(oracle: Oracle) -> None:
    """Unfinished files, and a delta that was renamed and never live. Its number is given again, since
    nobody saw it."""
    apply(oracle.model, ChangeBatch(oracle.change(3)))
    (oracle.model.folder / "1+2.delta").write_bytes(b"x")
    (oracle.model.folder / "1+2.delta.partial").write_bytes(b"x")
    assert apply(oracle.model, ChangeBatch(oracle.change(3))).state == State(1, 2)
    oracle.check(attach_state(oracle.model))
    assert files_of(oracle.model.folder) == {"1.segment", "1+1.delta", "1+2.delta"}


def test_a_full_file_system_keeps_the_state(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    from tableside.loader.segment import memory

    monkeypatch.setattr(memory, "available_bytes", lambda where: 1000)
    before = dict(oracle.rows)
    with pytest.raises(NoSpace, match="has 1,000 bytes free"):
        apply(oracle.model, ChangeBatch(oracle.change(50)))
    monkeypatch.undo()
    oracle.rows = before
    oracle.check(attach_state(oracle.model))
    assert not [n for n in os.listdir(oracle.model.folder) if "delta" in n]


def test_an_overlaid_segment_is_pickled(oracle: Oracle) -> None:
    apply(oracle.model, ChangeBatch(oracle.change(30)))
    oracle.check(pickle.loads(pickle.dumps(attach_state(oracle.model))))


def test_names_of_states() -> None:
    assert parse_state("3") == (3, None) and parse_state("3+17") == (3, 17) and parse_state("3+0") == (3, 0)
    assert (str(State(3)), str(State(3, 17))) == ("3", "3+17")
    for wrong in ("", "0", "+1", "3+", "3+x", "-1", "3 + 1"):
        with pytest.raises(VersionError, match="expected VERSION or VERSION"):
            parse_state(wrong)


@pytest.mark.parametrize(("row_format", "dim"), [("fp32", 1), ("fp16", 2), ("fp8", 3)])
def test_rows_of_four_bytes_change(
    publish: Callable[..., Loaded], root: Path, row_format: str, dim: int
) -> None:
    """A row that is smaller than an id."""
    publish({"t": np.zeros((50, dim), np.float32)}, formats={"t": row_format})
    model = Model(root, "demo")
    apply(model, ChangeBatch([TableChanges("t", np.array([7, 9]), np.ones((2, dim), np.float32))]))
    table = attach_state(model, None, "full").tables["t"]
    assert table.row_bytes == 4
    found = choose().lookup(table, np.arange(50), pooling=Pooling.NONE)
    np.testing.assert_array_equal(found[:, 0], np.isin(np.arange(50), [7, 9]))


@pytest.mark.parametrize("alignments", [(16, 4), (4, 16)])
def test_a_delta_of_rows_of_another_size_is_refused(
    root: Path, tmp_path: Path, alignments: tuple[int, int]
) -> None:
    """As when the files of a host with a GPU are put beside those of one without."""
    np.save(tmp_path / "t.npy", rows_of(100, 64))
    changed = ChangeBatch([TableChanges("t", np.arange(10), rows_of(10, 64))])
    for alignment in alignments:
        raw = {
            "name": "demo",
            "checkpoint": "t.npy",
            "tables": {"t": {"key": "t", "row_alignment": alignment}},
        }
        load(parse_model(raw, tmp_path), root)
    model = Model(root, "demo")
    apply(model, changed)
    (delta,) = attach_state(model).deltas
    with pytest.raises(SegmentError, match=r"int8 of dim 64 in \d+ bytes; those of the version are int8"):
        delta.layer("t", model.attach(1).tables["t"])
