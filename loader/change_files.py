"""Files of changes: rows to insert, overwrite or delete, in the order in which they count.

    .parquet   columns `id` (integers), `vector` (lists of float32, float16 or float64; null: the id is deleted), and `table`
    .npz       arrays TABLE.ids (integers [n]), TABLE.vectors (floats [n, dim]) and, where ids are deleted, TABLE.deleted
               (bool [n]); the vectors of deleted ids are not read, and TABLE.vectors may be absent where all are deleted
    .jsonl     a line a row: {"table": "user", "id": 7, "vector": [0.5, 1]}; null as the vector: the id is deleted

The table may be left out where it is known: the column, the key, or in an .npz the prefix "TABLE.". float64 is rounded to
float32. A file is read block by block, so memory does not grow with it. Values that a row format cannot represent, ids outside a
table and vectors of another length than the table's are not looked for here: `loader.apply` refuses them.
"""

from collections.abc import Iterator
from pathlib import Path

from tableside.loader import change_arrays, change_lines
from tableside.loader.change_rows import ahead
from tableside.loader.changes import TableChanges
from tableside.loader.errors import ChangeError

SUFFIXES = (".parquet", ".npz", ".jsonl")


def read_changes(path: Path, table: str | None = None) -> Iterator[TableChanges]:
    """The changes of a file, in blocks of some MiB. table: all rows are of it, and the file need not name it.

    ChangeError, while it is read: the file is damaged, or a row is not what it must be.
    """
    _check_suffix(path)
    if path.suffix == ".npz":
        return change_arrays.blocks(path, table)
    if path.suffix == ".jsonl":
        return change_lines.blocks(path, table)
    check_parquet(path)
    from tableside.loader import change_parquet

    return ahead(change_parquet.blocks(path, table))


def rows_in(path: Path) -> int | None:
    """How many rows a file says that it has; None: it must be read to know. ChangeError: it is damaged."""
    _check_suffix(path)
    if path.suffix == ".npz":
        return change_arrays.rows_in(path)
    if path.suffix == ".jsonl":
        return None
    check_parquet(path)
    from tableside.loader import change_parquet

    return change_parquet.rows_in(path)


def check_parquet(path: Path) -> None:
    """ChangeError: what reads Parquet is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ChangeError(
            f"{path}: Parquet is read by pyarrow, which does not import ({error}); install tableside[eval]"
        ) from None


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ChangeError(f"{path}: a file of changes ends with {', '.join(SUFFIXES)}; found {path.suffix or 'no suffix'!r}")
