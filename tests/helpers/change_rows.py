"""Rows of changes, written to files of every kind and read from them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tableside.loader.deltas.change_files import read_changes
from tableside.loader.deltas.changes import TableChanges

DIMS = {"user": 6, "item": 4}
Row = tuple[str, int, list[float] | None]  # table, id, vector; None: deleted


def some_rows(count: int = 400) -> list[Row]:
    """Rows of two tables, mixed, with ids that come again, and some deletions."""
    rng, found = np.random.default_rng(3), list[Row]()
    for _ in range(count):
        table = str(rng.choice(["user", "item"]))
        vector = None if rng.random() < 0.2 else rng.standard_normal(DIMS[table], dtype=np.float32).tolist()
        found.append((table, int(rng.integers(0, 50)), vector))
    return found


ROWS = [("user", -(2**63), None), ("item", 2**63 - 1, None), *some_rows()]


def write_lines(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps({"table": t, "id": i, "vector": v}) + "\n" for t, i, v in rows))
    return path


def write_arrays(path: Path, rows: list[Row], save: Any = np.savez, dtype: Any = np.float32) -> Path:
    arrays = {}
    for table, dim in DIMS.items():
        of_table = [(i, v) for t, i, v in rows if t == table]
        arrays[f"{table}.ids"] = np.array([i for i, _ in of_table], np.int64)
        arrays[f"{table}.vectors"] = np.array([v or [np.nan] * dim for _, v in of_table], dtype).reshape(
            -1, dim
        )
        arrays[f"{table}.deleted"] = np.array([v is None for _, v in of_table], bool)
    save(path, **arrays)
    return path


def write_parquet(path: Path, rows: list[Row], kind: Any = None, **options: Any) -> Path:
    pa = pytest.importorskip("pyarrow", reason="the eval extra brings pyarrow")
    import pyarrow.parquet as pq

    columns = {
        "vector": pa.array([v for *_, v in rows], kind or pa.list_(pa.float32())),
        "id": pa.array([i for _, i, _ in rows], pa.int64()),
        "table": pa.array([t for t, *_ in rows]).dictionary_encode(),
        "note": pa.array(["x"] * len(rows)),
    }
    pq.write_table(pa.table(columns), path, row_group_size=150, **options)
    return path


WRITERS = {
    "lines.jsonl": write_lines,
    "stored.npz": write_arrays,
    "packed.npz": lambda path, rows: write_arrays(path, rows, np.savez_compressed, np.float64),
    "lists.parquet": write_parquet,
}


def read(path: Path, table: str | None = None) -> dict[str, list[tuple[int, list[float] | None]]]:
    """Table -> its changes, one by one."""
    found: dict[str, list[tuple[int, list[float] | None]]] = {}
    for c in read_changes(path, table):
        assert (
            isinstance(c, TableChanges)
            and c.ids.dtype == np.int64
            and c.vectors.dtype in (np.float32, np.float16)
        )
        gone = np.zeros(c.rows, bool) if c.deleted is None else c.deleted
        assert len(c.vectors) == len(gone) == c.rows
        vectors = [None if g else v.tolist() for g, v in zip(gone, c.vectors, strict=True)]
        found.setdefault(c.table, []).extend(zip(c.ids.tolist(), vectors, strict=True))
    return found
