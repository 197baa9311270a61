"""Checks changes against the table that they are of. ChangeError says which change does not fit, and why."""

import numpy as np
from numpy.typing import NDArray

from tableside.loader.deltas.changes import TableChanges
from tableside.loader.errors import ChangeError
from tableside.quant.contract import Ids, Table


def check_shapes(block: TableChanges, dim: int) -> None:
    """Raises ChangeError if the arrays of changes are not those of a table of this dim."""
    where, name = f"{block.where}: " if block.where else "", block.table
    ids, vectors, deleted = block.ids, block.vectors, block.deleted
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ChangeError(f"table {name!r}: ids are {ids.dtype} {list(ids.shape)}; expected int64 [n]")
    has_vectors = deleted is None or not deleted.all()
    are_floats = vectors.dtype in (np.float32, np.float16)
    if has_vectors and not (are_floats and vectors.shape == (block.rows, dim)):
        raise ChangeError(
            f"{where}table {name!r}: vectors are {vectors.dtype} {list(vectors.shape)}; expected "
            f"float32 or float16 [{block.rows}, {dim}]"
        )
    if deleted is not None and (deleted.dtype != np.bool_ or deleted.shape != ids.shape):
        raise ChangeError(
            f"table {name!r}: deleted is {deleted.dtype} {list(deleted.shape)}; expected bool [{block.rows}]"
        )


def check_kind(block: TableChanges, strings: bool) -> None:
    """Raises ChangeError unless the ids of changes are strings, as those of the table, or neither are."""
    if block.strings is not strings:
        found, expected = ("strings", "integers") if block.strings else ("integers", "strings")
        where = f"{block.where}: " if block.where else ""
        raise ChangeError(f"{where}table {block.table!r}: the ids are {found}; expected {expected}")


def check_ids(table: Table, name: str, ids: Ids, deleted: NDArray[np.bool_]) -> None:
    """Raises ChangeError if a change of an id, or its deletion, does not fit a table. name: the table's."""
    row_map = table.row_map
    if row_map is not None and row_map.index is not None:
        index = row_map.index
        if index.bucket_ids or len(index.directory) - 1 < index.buckets:
            check_buckets(name, ids, index.bucket_of(ids))
        return
    first, count = table.row_numbers
    has_default = row_map is not None and row_map.default_row is not None
    check_numbers(name, ids, deleted, first, count, has_default)


def check_buckets(name: str, ids: Ids, buckets: NDArray[np.int64]) -> None:
    """Raises ChangeError if an id has no bucket. buckets: of each id [n]; below 0: it has none."""
    if (outside := np.flatnonzero(buckets < 0)).size:
        at = int(outside[0])
        raise ChangeError(f"table {name!r}, change {at}: id {ids[at]} is in no bucket of this version")


def check_numbers(
    name: str, ids: Ids, deleted: NDArray[np.bool_], first: int, count: int, has_default: bool
) -> None:
    """Raises ChangeError if an id [n] is none of a table's row numbers, or is deleted where `has_default`
    says that the table refuses missing ids."""
    if (outside := np.flatnonzero((ids < first) | (ids >= first + count))).size:
        at = int(outside[0])
        raise ChangeError(
            f"table {name!r}, change {at}: id {ids[at]} is outside the table's ids [{first}, "
            f"{first + count}); "
            'rows can be added to tables of raw ids (ids = "raw" in model.toml)'
        )
    if not has_default and deleted.any():
        at = int(np.flatnonzero(deleted)[0])
        raise ChangeError(
            f"table {name!r}, change {at}: id {ids[at]} cannot be deleted, since the table "
            "refuses ids that it lacks; load it with a policy for missing ids"
        )
