"""Files of changes: what was written is read, in its order, and no file is held whole."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from change_rows import DIMS, ROWS, WRITERS, Row, read, write_lines, write_parquet
from support import rows_of

from tableside.loader.deltas import change_arrays, change_lines, change_parquet
from tableside.loader.deltas.change_files import read_changes, rows_in
from tableside.loader.deltas.changes import TableChanges
from tableside.loader.errors import ChangeError


def expected(rows: list[Row]) -> dict[str, list[tuple[int, list[float] | None]]]:
    return {table: [(i, v) for t, i, v in rows if t == table] for table in DIMS}


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_changes_are_what_was_written(
    name: str, small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a table in their order, deletions among them, in one block or in many."""
    if small:
        for module in (change_parquet, change_arrays):
            monkeypatch.setattr(module, "BLOCK_BYTES", 300)
        monkeypatch.setattr(change_lines, "_BLOCK_VALUES", 60)
    path = WRITERS[name](tmp_path / name, ROWS)
    assert read(path) == expected(ROWS)
    assert len(list(read_changes(path))) > (20 if small else 0)
    assert rows_in(path) == (None if name.endswith("jsonl") else len(ROWS))


@pytest.mark.parametrize("value", ["float", "halffloat", "double"])
@pytest.mark.parametrize("fixed", [False, True])
def test_lists_of_parquet(fixed: bool, value: str, tmp_path: Path) -> None:
    """Of one length or of any, of every width, with and without deletions, of one table that the file
    names or not."""
    pa = pytest.importorskip("pyarrow", reason="the eval extra brings pyarrow")
    kind = pa.list_(pa.type_for_alias(value), 6) if fixed else pa.large_list(pa.type_for_alias(value))
    rows: list[Row] = [("user", i, [float(x) for x in range(i, i + 6)]) for i in range(200)]
    path = write_parquet(tmp_path / "a.parquet", rows, kind)
    assert read(path) == read(path, "user") == {"user": [(i, v) for _, i, v in rows]}
    with_gaps: list[Row] = [(t, i, None if i % 7 == 3 else v) for t, i, v in rows]
    assert read(write_parquet(path, with_gaps, kind)) == {"user": [(i, v) for _, i, v in with_gaps]}


def test_vectors_of_parquet_are_not_copied(tmp_path: Path) -> None:
    """They lie in Arrow's memory, where none is deleted."""
    rows: list[Row] = [("user", i, [1.0] * 6) for i in range(100)]
    for c in read_changes(write_parquet(tmp_path / "a.parquet", rows)):
        assert not c.vectors.flags.owndata and not c.vectors.flags.writeable


@pytest.mark.parametrize("name", ["a.npz", "a.jsonl", "a.parquet"])
def test_a_file_need_not_name_the_one_table(name: str, tmp_path: Path) -> None:
    path, vectors = tmp_path / name, rows_of(3, 4)
    if name == "a.npz":
        np.savez(path, ids=[5, 6, 7], vectors=vectors)
    elif name == "a.jsonl":
        path.write_text(
            "\n".join(json.dumps({"id": i, "vector": v.tolist()}) for i, v in enumerate(vectors, 5))
        )
    else:
        pa = pytest.importorskip("pyarrow", reason="the eval extra brings pyarrow")
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"id": [5, 6, 7], "vector": list(vectors)}), path)
    assert read(path, "user") == {"user": [(i, v.tolist()) for i, v in enumerate(vectors, 5)]}
    with pytest.raises(ChangeError, match="--table"):
        read(path)


def test_a_file_of_deletions_alone(tmp_path: Path) -> None:
    """It need not say how many values a vector has."""
    rows: list[Row] = [("user", 1, None), ("user", 2, None)]
    np.savez(tmp_path / "a.npz", **{"user.ids": [1, 2], "user.deleted": [True, True]})  # type: ignore[arg-type]
    for path in (
        tmp_path / "a.npz",
        write_lines(tmp_path / "a.jsonl", rows),
        write_parquet(tmp_path / "a.parquet", rows),
    ):
        assert read(path) == {"user": [(1, None), (2, None)]}


def test_a_file_is_not_held_whole(tmp_path: Path) -> None:
    """Blocks come one after another: the first one before the file's later rows are looked at."""
    path = tmp_path / "a.jsonl"
    vector = [0.5] * (1 << 16)
    path.write_text(
        "".join(json.dumps({"table": "user", "id": i, "vector": vector}) + "\n" for i in range(20)) + "{"
    )
    blocks: Iterator[TableChanges] = read_changes(path)
    first = list(itertools.islice(blocks, 1))
    assert [c.rows for c in first] == [16]
    with pytest.raises(ChangeError, match="line 21: not JSON"):
        list(blocks)
