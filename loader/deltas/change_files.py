"""Files of changes: rows to insert, overwrite or delete, in the order in which they count.

    .parquet   columns `id` (integers), `vector` (lists of float32, float16 or float64; null: the id is deleted), and `table`
    .npz       arrays TABLE.ids (integers [n]), TABLE.vectors (floats [n, dim]) and, where ids are deleted, TABLE.deleted
               (bool [n]); the vectors of deleted ids are not read, and TABLE.vectors may be absent where all
               are deleted
    .jsonl     a line a row: {"table": "user", "id": 7, "vector": [0.5, 1]}; null as the vector: the id is deleted

The table may be left out where it is known: the column, the key, or in an .npz the prefix "TABLE.". float64
is rounded to float32. A file is read block by block, so memory does not grow with it. Values that a row
format cannot represent, ids outside a table and vectors of another length than the table's are not looked for
here: `loader.deltas.apply` refuses them.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tableside.loader.deltas import change_arrays, change_lines
from tableside.loader.deltas.changes import TableChanges, ahead
from tableside.loader.errors import ChangeError

SUFFIXES = (".parquet", ".npz", ".jsonl")


def read_changes(path: Path, table: str | None = None) -> Iterator[TableChanges]:
    """Yields the changes of a file in blocks of some MiB. table: the table of all rows, which the file need
    not name. ChangeError, while it is read: the file is damaged, or a row is wrong."""
    blocks: Iterator[TableChanges] = _reader(path).blocks(path, table)
    return ahead(blocks) if path.suffix == ".parquet" else blocks


def rows_in(path: Path) -> int | None:
    """How many rows a file says that it has; None: it must be read to know. ChangeError: it is damaged."""
    rows: int | None = _reader(path).rows_in(path)
    return rows


def _reader(path: Path) -> ModuleType:
    """The module that reads a kind of file. ChangeError: no such kind, or pyarrow is not installed."""
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
