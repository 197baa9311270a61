"""Loads of tables of string ids: a string has the row that the int64 has which it hashes to."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from keyed_tables import small_pieces
from raw_loads import attached, quantized, vectors_of
from string_tables import hashes, make_weak, publish_strings, texts
from support import rows_of, run_tableside

from tableside.loader import string_ids
from tableside.loader.errors import CheckpointError, ModelError
from tableside.loader.load.as_delta import load_as_delta
from tableside.loader.load.load import load
from tableside.loader.load.origin import spec_digest
from tableside.loader.model.model import parse_model, read_model
from tableside.loader.segment.header import Header
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model

TEXTS, VALUES = texts(1000), rows_of(1000, 12)
KINDS = {
    "string": pa.array(TEXTS),
    "large_string": pa.array(TEXTS, pa.large_string()),
    "binary": pa.array([t.encode() for t in TEXTS], pa.binary()),
    "categories": pa.array(TEXTS).dictionary_encode(),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", KINDS)
def test_every_string_has_its_row(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In blocks smaller than a row group; as the model of the hashed ids answers, bit for bit."""
    small_pieces(monkeypatch)
    publish_strings(tmp_path, root, {"t": (KINDS[kind], VALUES)})
    publish_strings(tmp_path, root, {"t": (hashes(TEXTS), VALUES)}, name="hashed")
    of_strings, of_numbers = attached(root), attached(root, name="hashed")
    found = vectors_of(of_strings, hashes(TEXTS))
    np.testing.assert_array_equal(found, vectors_of(of_numbers, hashes(TEXTS)))
    np.testing.assert_allclose(found, quantized(VALUES, of_strings), atol=1e-5)


@pytest.mark.parametrize("length", [*range(20), 32, 33, 128, 129, 240, 241, 1024, 1025])
def test_an_id_is_the_xxh3_of_a_string(length: int) -> None:
    """In its own array, as BYTES, and in a column; an invalid UTF-8 sequence is hashed as it is."""
    given = [bytes(range(256))[: length % 256] * (length // 256 + 1), b"\xff" * length]
    given = [g[:length] for g in given]
    expected = hashes(given).tolist()
    assert string_ids.string_ids(given).tolist() == expected
    packed = string_ids.as_bytes(given)
    found = string_ids.ids_of_bytes(packed)
    assert found is not None and found.tolist() == expected
    assert string_ids.ids_of_column(pa.array(given, pa.large_binary())).tolist() == expected
    assert string_ids.ids_of_bytes(packed[:-1]) is None and string_ids.ids_of_bytes(packed + b"\0") is None


def test_the_header_says_it(root: Path, tmp_path: Path) -> None:
    """In a format version of its own, and only of such tables; so does `inspect`."""
    tables = {"s": (TEXTS, VALUES), "n": (np.arange(1000), VALUES)}
    header = publish_strings(tmp_path, root, tables).header
    assert [t.id_kind for t in header.tables] == ["string", "raw"] and header.format_version == 11
    assert Header.from_json(header.to_json()) == header and header.to_json().count(b'"strings":true') == 1
    assert b"strings" not in publish_strings(tmp_path, root, {"n": tables["n"]}).header.to_json()
    told = run_tableside("inspect", "demo", "1", "--root", str(root)).stdout
    assert "1,000 strings" in told


@pytest.mark.parametrize("duplicates", ["error", "first", "last"])
def test_two_strings_of_one_hash_are_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, duplicates: str
) -> None:
    """Whatever is done with a string that comes twice. Both are named, with their places."""
    small_pieces(monkeypatch)
    make_weak(monkeypatch)
    ids = [chr(ord("a") + i) for i in range(20)]
    ids[3], ids[17] = "B:first", "B:second"
    if duplicates != "error":
        ids[5], ids[8] = "B:first", ids[9]
    of = {"t": {"duplicates": duplicates}}
    told = r"'B:first' and 'B:second' have one hash, -?\d+, .*row 3 .* and .*row 17"
    with pytest.raises(CheckpointError, match=told):
        publish_strings(tmp_path, root, {"t": (ids, VALUES[:20])}, of=of)
    assert not Model(root, "demo").versions()


def test_a_string_that_comes_twice(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is an error that names it, or the first or the last row counts; that is no collision."""
    small_pieces(monkeypatch)
    ids = [*TEXTS[:50], TEXTS[7]]
    with pytest.raises(CheckpointError, match=r"id '日本語|id 'x+' comes twice: .*row 7 .* and .*row 50"):
        publish_strings(tmp_path, root, {"t": (ids, VALUES[:51])})
    for duplicates, row in (("first", 7), ("last", 50)):
        publish_strings(tmp_path, root, {"t": (ids, VALUES[:51])}, of={"t": {"duplicates": duplicates}})
        table = attached(root)
        found = vectors_of(table, hashes(TEXTS[7:8]))
        np.testing.assert_allclose(found, quantized(VALUES[row : row + 1], table), atol=1e-5)


def write(path: Path, ids: Any, values: np.ndarray = VALUES) -> None:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    pq.write_table(pa.table({"id": ids, "vector": vectors}), path)


def spec(folder: Path, checkpoint: str, **keys: Any) -> Any:
    table = {"key": "vector", "row_format": "fp32", **keys}
    return parse_model({"name": "demo", "checkpoint": checkpoint, "tables": {"t": table}}, folder)


def test_what_does_not_fit_is_refused(root: Path, tmp_path: Path) -> None:
    """Integers as strings, strings as integers, parts of both, null, and ranges of strings."""
    write(tmp_path / "numbers.parquet", np.arange(1000))
    write(tmp_path / "texts.parquet", TEXTS)
    with pytest.raises(
        ModelError, match=r"ids is 'string', and the .* ids of 'vector' are integers; .*\"raw\""
    ):
        load(spec(tmp_path, "numbers.parquet", ids="string"), root)
    with pytest.raises(
        ModelError, match=r"ids is 'raw', and the .* ids of 'vector' are strings; .*\"string\""
    ):
        load(spec(tmp_path, "texts.parquet", ids="raw"), root)
    with pytest.raises(CheckpointError, match=r"texts.parquet: the ids 'id' are strings, in .*integers"):
        load(spec(tmp_path, ".", ids="string"), root)
    write(tmp_path / "null.parquet", pa.array([*TEXTS[:7], None]), VALUES[:8])
    with pytest.raises(CheckpointError, match=r"row 7 .*'id' is null; expected an id in every row"):
        load(spec(tmp_path, "null.parquet", ids="string"), root)
    with pytest.raises(ModelError, match=r"bucket_ids cuts by ranges of ids, which strings lack"):
        spec(tmp_path, "texts.parquet", ids="string", bucket_ids=10)


def test_another_kind_of_ids_is_not_taken_over(root: Path, tmp_path: Path) -> None:
    """By --only, or as an older version's rows; of the same kind they are."""
    publish_strings(tmp_path, root, {"t": (TEXTS[:9], VALUES[:9])}, name="older")
    write(tmp_path / "numbers.parquet", np.arange(1000))
    write(tmp_path / "texts.parquet", TEXTS[5:], VALUES[5:])
    backfill = {"missing": "backfill:older@1", "row_format": "int8"}
    with pytest.raises(ModelError, match=r"its ids are 'string', and those of this table 'raw'"):
        load(spec(tmp_path, "numbers.parquet", ids="raw", **backfill), root)
    load(spec(tmp_path, "texts.parquet", ids="string", **backfill), root)
    assert attached(root).row_map.count == 1000  # type: ignore[union-attr]


def test_init_finds_string_ids(root: Path, tmp_path: Path) -> None:
    """In a column of strings where there is none of integers, or where it is called id; its model.toml is
    loaded as it is."""
    write(tmp_path / "texts.parquet", TEXTS)
    toml = tmp_path / "model.toml"
    run_tableside("init", str(tmp_path / "texts.parquet"), "--out", str(toml))
    (table,) = read_model(toml).tables
    assert table.raw is not None and (table.raw.strings, table.raw.key) == (True, "id")
    load(read_model(toml), root)
    assert attached(root, table.name, "texts").row_map.count == 1000  # type: ignore[union-attr]


def test_a_new_checkpoint_as_changes(root: Path, tmp_path: Path) -> None:
    """Strings that came, that are gone, and whose rows are others."""
    write(tmp_path / "texts.parquet", TEXTS)
    specified = spec(tmp_path, "texts.parquet", ids="string", missing="zero")
    load(specified, root)
    values = VALUES[:-1].copy()
    values[5] = 7
    write(tmp_path / "texts.parquet", [*TEXTS[:-2], "new"], values)
    assert (result := load_as_delta(specified, root).result) is not None
    assert result.rows == 4, "two that are gone, one that came, and one that is another"
    found = attach_state(Model(root, "demo"), None, "full").tables["t"]
    asked = hashes([TEXTS[5], "new", TEXTS[-1], TEXTS[0]])
    expected = [values[5], values[-1], np.zeros(12), values[0]]
    np.testing.assert_array_equal(vectors_of(found, asked), expected)


def test_a_model_without_later_keys_is_told_as_before() -> None:
    """So that what an earlier build published is the model that is there."""
    tables = {"t": {"key": "t", "ids": "raw", "missing": "zero"}, "u": {"key": "u"}}
    raw = {"name": "ads", "checkpoint": "c", "tables": tables}
    before = spec_digest(parse_model(raw, Path()))
    assert before == "cea60e56f2821a3c6ea8a0a2a6dc6705"
    for more in ({"ids": "string"}, {"ttl": "1d"}, {"max_rows": 5}):
        changed = raw | {"tables": tables | {"t": tables["t"] | more}}
        assert spec_digest(parse_model(changed, Path())) != before
