"""Files of changes: rows to insert, overwrite or delete, in order.

    .parquet   columns `id` (integers or strings), `vector` (lists of float32, float16 or float64; null
               deletes the id), and `table`
    .npz       arrays TABLE.ids (integers [n]), TABLE.vectors (floats [n, dim]) and optionally TABLE.deleted
               (bool [n]); vectors of deleted ids are ignored, and absent if all are deleted
    .jsonl     one row per line: {"table": "user", "id": 7, "vector": [0.5, 1]}; null as vector deletes the
               id, which may be a string

The table may be left out if the caller gives it. float64 is rounded to float32. Files are read block by
block. `loader.deltas.apply` refuses values that do not fit the model.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tableside.loader.deltas import change_arrays, change_lines
from tableside.loader.deltas.changes import TableChanges, ahead
from tableside.loader.errors import ChangeError

SUFFIXES = (".parquet", ".npz", ".jsonl")


def read_changes(path: Path, table: str | None = None) -> Iterator[TableChanges]:
    """Yields a file's changes in blocks of some MiB. table: for rows without one. ChangeError: the file is
    damaged or a row is wrong."""
    blocks: Iterator[TableChanges] = _reader(path).blocks(path, table)
    return ahead(blocks) if path.suffix == ".parquet" else blocks


def rows_in(path: Path) -> int | None:
    """Returns the number of rows that a file declares; None: not declared. ChangeError: it is damaged."""
    rows: int | None = _reader(path).rows_in(path)
    return rows


def _reader(path: Path) -> ModuleType:
    """Returns the module for a kind of file. ChangeError: no such kind, or pyarrow is not installed."""
    if path.suffix not in SUFFIXES:
        raise ChangeError(
            f"{path}: a file of changes ends with {', '.join(SUFFIXES)}; found {path.suffix or 'no suffix'!r}"
        )
    if path.suffix != ".parquet":
        return change_arrays if path.suffix == ".npz" else change_lines
    try:
        import pyarrow  # noqa: F401

        from tableside.loader.deltas import change_parquet
    except ImportError as error:
        what = f"{path}: Parquet is read by pyarrow, which does not import ({error})"
        raise ChangeError(f"{what}; install tableside[eval]") from None
    return change_parquet
