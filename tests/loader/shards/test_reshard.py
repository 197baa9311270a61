"""Resharding: owners together are the whole, each id with one of them, and nothing but bytes is moved."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from raw_segments import DenseTable, RawTable, publish_tables
from reference import backend_of
from resharded import RANDOM, TABLES, again, attached, bytes_of, raw
from support import rows_of

from tableside.loader.load.load import load
from tableside.loader.load.manifest import write_manifest
from tableside.loader.model.model import parse_model
from tableside.loader.model.specs import FeatureSpec
from tableside.loader.segment.header import Owner, ScorerInput, StoredScorer
from tableside.loader.segment.layout import CHUNK_BYTES
from tableside.loader.segment.segment import Segment
from tableside.loader.shards import shares
from tableside.loader.shards.reshard import owner_names
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling

STRANGERS = np.array([7, 123_456_789, -(2**62), 2**40 + 1, 10**6], np.int64)  # ids that no table has


def ids_of(table: RawTable | DenseTable) -> np.ndarray:
    return table.ids if isinstance(table, RawTable) else table.first + np.arange(len(table.values))


def answers(segment: Segment, ids: np.ndarray) -> dict[int, tuple[bytes, bool]]:
    """The packed row of each id that the segment finds in its table, and whether it was backfilled."""
    table = segment.tables["t"]
    if table.row_map is None:
        return {int(i): (table.packed[i].tobytes(), False) for i in ids if 0 <= i < table.rows}
    rows = table.row_map.find(ids)
    marks = table.row_map.is_backfilled(np.maximum(rows, 0))
    return {
        int(i): (table.packed[r].tobytes(), bool(m))
        for i, r, m in zip(ids, rows, marks, strict=True)
        if r >= 0
    }


@pytest.mark.parametrize("owners", [2, 3])
@pytest.mark.parametrize("case", TABLES)
@pytest.mark.drawn(14)
def test_each_id_is_with_one_owner(case: str, owners: int, root: Path) -> None:
    """With the bytes that its row had, by a dictionary of the whole; every other id is missing for all."""
    table = TABLES[case]
    publish_tables(root, {"t": table})
    whole = Model(root, "demo").attach()
    asked = np.concatenate([ids_of(table), np.setdiff1d(STRANGERS, ids_of(table))])
    expected = answers(whole, asked)
    assert sorted(expected) == sorted(ids_of(table).tolist())
    done = again(root, owners)
    together: dict[int, tuple[bytes, bool]] = {}
    for number, segment in enumerate(attached(root, owners)):
        found = answers(segment, asked)
        assert not found.keys() & together.keys(), "an id is with two owners"
        together |= found
        assert segment.header.owner == Owner("demo", 1, number, owners) and segment.header.format_version == 2
        assert segment.header.tables[0].id_count == len(found) == done.after[number].ids
    assert together == expected
    assert sum(h.ids for h in done.before) == sum(h.ids for h in done.after) == len(expected)


@pytest.mark.parametrize("case", TABLES)
@pytest.mark.drawn(7)
def test_policies_and_default_rows_go_with_each_owner(case: str, root: Path) -> None:
    """Byte for byte, whether its buckets are empty or not."""
    publish_tables(root, {"t": TABLES[case]})
    whole = Model(root, "demo").attach()
    again(root, 2)
    stored, (of_whole,) = [s.header.tables[0] for s in attached(root, 2)], whole.header.tables
    for segment, t in zip(attached(root, 2), stored, strict=True):
        row_map, before = segment.tables["t"].row_map, whole.tables["t"].row_map
        assert row_map is not None and t.ids is not None
        assert t.ids.missing == (of_whole.ids.missing if of_whole.ids else "error")
        assert (row_map.default_row is None) == (before is None or before.default_row is None)
        if row_map.default_row is not None:
            assert (
                segment.tables["t"].packed[row_map.default_row].tobytes()
                == whole.tables["t"].packed[-1].tobytes()
            )
    assert sum(t.ids.backfilled for t in stored if t.ids) == (of_whole.ids.backfilled if of_whole.ids else 0)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("case", ["a default row", "dense, a default row"])
def test_backends_look_an_owners_ids_up(case: str, backend: str, root: Path) -> None:
    """One owner gives an id's vector, and all others the default row, as for an id that nobody has."""
    publish_tables(root, {"t": TABLES[case]})
    tensor = Model(root, "demo").tensor("t")
    vectors = {int(i): v for ids, values in tensor.chunks() for i, v in zip(ids, values, strict=True)}
    again(root, 3)
    asked = np.concatenate([[*vectors], STRANGERS])
    given = [
        backend_of(backend).lookup(s.tables["t"], asked, pooling=Pooling.NONE) for s in attached(root, 3)
    ]
    for n, i in enumerate(asked.tolist()):
        of_own = [v[n] for v in given if not (v[n] == 1).all()]
        assert len(of_own) == (i in vectors)
        if of_own:
            np.testing.assert_array_equal(of_own[0], vectors[i])


@pytest.mark.parametrize("case", TABLES)
@pytest.mark.drawn(7)
def test_there_and_back_are_the_first_bytes(case: str, root: Path) -> None:
    """1 -> 5 -> 2 -> 1: rows and index of the last version are those of the first, and 5 -> 2 is what 1 ->
    2 would have been."""
    publish_tables(root, {"t": TABLES[case]})
    again(root, 2)
    directly = [bytes_of(s) for s in attached(root, 2)]
    again(root, 5)
    again(root, 2, 5)
    assert [bytes_of(s) for s in attached(root, 2)] == directly
    again(root, 1, 2)
    model = Model(root, "demo")
    first, last = model.attach(1), model.attach()
    assert last.header.version == 2 and last.header.owner is None
    assert bytes_of(last) == bytes_of(first)
    assert last.header.tables == first.header.tables or case.startswith("plain")


def test_owners_of_buckets_without_ids(root: Path) -> None:
    """Owners that got only empty buckets, or no row of a small table, serve nothing but the default row."""
    publish_tables(
        root,
        {
            "t": TABLES["chunked, most buckets empty"],
            "small": TABLES["dense, a default row"],
            "n": TABLES["no id"],
        },
    )
    again(root, 16)
    segments = attached(root, 16)
    assert [s.header.tables[0].id_count for s in segments] == [0, 0, 2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0]
    assert [s.header.tables[1].id_count for s in segments] == [
        3 * (k + 1) // 16 - 3 * k // 16 for k in range(16)
    ]
    first = Model(root, "demo").attach()
    again(root, 1, 16)
    assert bytes_of(Model(root, "demo").attach()) == bytes_of(first)


def test_the_tensors_of_owners_are_parts_of_the_whole(root: Path) -> None:
    """In the owners' order, one after another."""
    publish_tables(root, {"t": TABLES["backfilled"]})
    whole = Model(root, "demo").tensor("t")
    again(root, 3)
    parts = [Model(root, name).tensor("t") for name in owner_names("demo", 3)]
    np.testing.assert_array_equal(np.concatenate([p.numpy() for p in parts]), whole.numpy())
    ids = np.concatenate([chunk for p in parts for chunk in p.id_chunks()])
    np.testing.assert_array_equal(ids, np.concatenate(list(whole.id_chunks())))


def test_pieces_of_a_copy_are_the_whole(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are the same in however many pieces they are copied."""
    publish_tables(root, {"t": TABLES["backfilled"]})
    again(root, 3)
    expected = [bytes_of(s) for s in attached(root, 3)]
    monkeypatch.setattr(shares, "_PIECE_BITS", 5)
    again(root, 3)
    assert [bytes_of(s) for s in attached(root, 3)] == expected


def test_features_and_scorer_go_with_each_owner(root: Path) -> None:
    """The scorer's archive too, and what the checkpoint was."""
    inputs = (ScorerInput("f", "f", 64), ScorerInput("dense", None, 3))
    features = (FeatureSpec("f", "t", "mean", "fp16"), FeatureSpec("g", "t", "none"))
    program = bytes(range(256)) * 40
    publish_tables(
        root, {"t": raw()}, features=features, scorer=StoredScorer("program", inputs), program=program
    )
    again(root, 2)
    again(root, 1, 2)
    for segment in [*attached(root, 2), Model(root, "demo").attach()]:
        h = segment.header
        assert (
            h.features == features
            and h.scorer is not None
            and h.scorer.inputs == inputs
            and segment.program() == program
        )


# ---- through a real load ----


def test_a_loaded_model(root: Path, tmp_path: Path) -> None:
    """Through a real load: tables of row numbers, in chunks as a manifest wants them, and back to the same
    checksums."""
    np.savez(tmp_path / "m.npz", t=rows_of(20_000, 64), u=rows_of(33, 8))
    write_manifest(tmp_path / "m.npz")
    tables = {"t": {"key": "t"}, "u": {"key": "u", "row_format": "fp16"}}
    loaded = load(parse_model({"name": "demo", "checkpoint": "m.npz", "tables": tables}, tmp_path), root)
    assert loaded.header.tables[0].chunk_rows != CHUNK_BYTES // loaded.header.tables[0].row_bytes
    again(root, 4)
    again(root, 1, 4)
    model = Model(root, "demo")
    assert model.attach(1).content() == model.attach(2).content()


@pytest.mark.parametrize(("row_format", "dim"), [("int8", 64), ("fp16", 32)])
def test_a_loaded_model_of_raw_ids(row_format: str, dim: int, root: Path, tmp_path: Path) -> None:
    """Through a real load, with the mean for missing ids: 1 -> 5 -> 2 -> 1 are the first bytes, and each
    id is with one owner."""
    np.savez(tmp_path / "m.npz", ids=RANDOM, weights=rows_of(RANDOM.size, dim))
    table = {"key": "weights", "id_key": "ids", "ids": "raw", "missing": "mean", "row_format": row_format}
    load(parse_model({"name": "demo", "checkpoint": "m.npz", "tables": {"t": table}}, tmp_path), root)
    whole = Model(root, "demo").attach()
    again(root, 5)
    found = [answers(s, RANDOM) for s in attached(root, 5)]
    assert sum(map(len, found)) == RANDOM.size and {i: v for f in found for i, v in f.items()} == answers(
        whole, RANDOM
    )
    again(root, 2, 5)
    again(root, 1, 2)
    last = Model(root, "demo").attach()
    assert last.header.version == 2 and bytes_of(last) == bytes_of(whole)
    assert last.header.tables == whole.header.tables


def test_memory_is_that_of_directories(root: Path, tmp_path: Path) -> None:
    """Rows, pilots and kept ids go from segment to segment without a copy of their own: a sixth of the
    rows would show."""
    ids = np.arange(-50_000, 50_000) * 7
    np.savez(tmp_path / "m.npz", ids=ids, weights=rows_of(ids.size, 32))
    table = {"key": "weights", "id_key": "ids", "ids": "raw", "row_format": "fp16"}
    loaded = load(
        parse_model({"name": "demo", "checkpoint": "m.npz", "tables": {"t": table}}, tmp_path), root
    )
    tracemalloc.start()
    try:
        again(root, 3)
        again(root, 1, 3)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20 < loaded.header.table_bytes // 6
    finally:
        tracemalloc.stop()
