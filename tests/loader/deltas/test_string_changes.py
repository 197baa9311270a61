"""Changes of tables of string ids, from files: a string is found again by its hash, in deltas and below."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw_loads import vectors_of
from string_tables import hashes, publish_strings, texts
from support import rows_of

from tableside.loader.deltas.apply import ApplySettings, apply
from tableside.loader.deltas.change_files import read_changes
from tableside.loader.deltas.changes import ChangeBatch
from tableside.loader.deltas.compact import compact
from tableside.loader.errors import ChangeError
from tableside.loader.shards.reshard import reshard
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model

TEXTS, VALUES = texts(40), rows_of(40, 4)
NEW = ["new", "", TEXTS[5], "neu\0"]


def write_lines(path: Path, ids: list[Any], vectors: list[Any]) -> Path:
    rows = ({"table": "t", "id": i, "vector": v} for i, v in zip(ids, vectors, strict=True))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, ids: list[Any], vectors: list[Any], kind: Any = None) -> Path:
    columns = {"table": ["t"] * len(ids), "id": pa.array(ids, kind), "vector": pa.array(vectors)}
    pq.write_table(pa.table(columns), path)
    return path


WRITERS = {"a.jsonl": write_lines, "a.parquet": write_parquet}


def change(root: Path, path: Path, name: str = "demo") -> None:
    apply(Model(root, name), ChangeBatch(read_changes(path)))


def rows_now(root: Path, ids: np.ndarray, name: str = "demo") -> np.ndarray:
    table = attach_state(Model(root, name), None, "full").tables["t"]
    return vectors_of(table, ids)


@pytest.mark.parametrize("name", WRITERS)
def test_changes_are_those_of_the_hashed_ids(root: Path, tmp_path: Path, name: str) -> None:
    """New rows, other ones and deleted ones, in the delta, when it is compacted, and cut to two owners and
    joined; what the table is stays."""
    vectors = [[1.5] * 4, [2.5] * 4, None, [3.5] * 4]
    write = WRITERS[name]
    of = {"t": {"missing": "zero", "row_format": "fp32"}}
    publish_strings(tmp_path, root, {"t": (TEXTS, VALUES)}, of=of)
    publish_strings(tmp_path, root, {"t": (hashes(TEXTS), VALUES)}, of=of, name="hashed")
    change(root, write(tmp_path / name, NEW, vectors))
    change(root, write(tmp_path / name, hashes(NEW).tolist(), vectors), "hashed")
    asked = hashes([*TEXTS, *NEW, "nobody"])
    expected = rows_now(root, asked, "hashed")
    assert expected[-5].tolist() == [1.5] * 4 and not expected[5].any() and expected[0].tolist() == [2.5] * 4
    np.testing.assert_array_equal(rows_now(root, asked), expected)
    compact(Model(root, "demo"))
    np.testing.assert_array_equal(rows_now(root, asked), expected)
    reshard(root, "demo", 2)
    shares = [attach_state(Model(root, f"demo-owner-{n}-of-2"), None, "full") for n in range(2)]
    assert all(s.header.string_tables == {"t"} for s in shares)
    found = sum(vectors_of(s.tables["t"], asked) for s in shares)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", WRITERS)
def test_ids_of_the_other_kind_are_refused(root: Path, tmp_path: Path, name: str) -> None:
    """Integers for a table of strings and strings for one of integers, with the row; nothing is applied."""
    publish_strings(tmp_path, root, {"t": (TEXTS, VALUES)})
    publish_strings(tmp_path, root, {"t": (np.arange(40), VALUES)}, name="numbers")
    write, vectors = WRITERS[name], [[0.5] * 4] * 2
    with pytest.raises(ChangeError, match=r"(row 0|line 1): table 't': the ids are integers; expected str"):
        change(root, write(tmp_path / name, [1, 2], vectors))
    with pytest.raises(ChangeError, match=r"(row 0|line 1): table 't': the ids are strings; expected int"):
        change(root, write(tmp_path / name, ["1", "2"], vectors), "numbers")
    with pytest.raises(ChangeError, match=r"its id is (null|None); expected an integer"):
        change(root, write(tmp_path / name, [None, None] if name == "a.jsonl" else ["1", None], vectors))
    assert not attach_state(Model(root, "demo"), None, "header").deltas


def test_lines_do_not_mix_strings_and_integers(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["7", 7], [[1.0], [2.0]])
    with pytest.raises(ChangeError, match=r"line 2: its id is 7; expected one like '7' before it"):
        list(read_changes(path))


@pytest.mark.parametrize("kind", [pa.large_string(), pa.binary(), pa.dictionary(pa.int8(), pa.string())])
def test_columns_as_people_have_them(tmp_path: Path, kind: Any) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["b", "a", "b"], [[1.0], [2.0], [3.0]], kind)
    (found,) = read_changes(path)
    assert found.strings and found.ids.tolist() == hashes(["b", "a", "b"]).tolist()


def test_strings_go_by_age(root: Path, tmp_path: Path) -> None:
    """Those that no change named for longer than the ttl."""
    of = {"t": {"missing": "zero", "row_format": "fp32", "ttl": "30d"}}
    publish_strings(tmp_path, root, {"t": (TEXTS, VALUES)}, of=of)
    model, later = Model(root, "demo"), ApplySettings(clock=lambda: time.time() + 31 * 86400)
    changes = read_changes(write_lines(tmp_path / "a.jsonl", TEXTS[:2], [[1.5] * 4] * 2))
    apply(model, ChangeBatch(changes), later)
    done = compact(model, later)
    assert done is not None and (done.expired, done.rows) == (38, 2)
    np.testing.assert_array_equal(rows_now(root, hashes(TEXTS[:4]))[:, 0], [1.5, 1.5, 0, 0])
