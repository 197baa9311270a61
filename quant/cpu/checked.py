"""The check of a lookup's ids and lengths, and the rows that they lead to."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import (
    Floats,
    Ids,
    Lengths,
    Lookup,
    LookupKind,
    Place,
    Pooling,
    RowSource,
    Table,
    Unfound,
)
from tableside.quant.errors import BadIds, Problem, QuantError


def check_arguments(
    table: RowSource,
    ids: Ids,
    lengths: Lengths | None,
    pooling: Pooling,
    weights: NDArray[np.float32] | None,
    half: bool,
    out: Floats | None,
) -> Floats:
    """Checks dtypes and shapes of a lookup (not the ids' values); returns `out`, made where it was None."""
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise QuantError(f"ids are {ids.dtype} {list(ids.shape)}; expected int64 [n]")
    if pooling is Pooling.NONE:
        if lengths is not None or weights is not None:
            raise QuantError(
                "an unpooled lookup takes neither lengths nor weights; pool by sum or mean, or leave them out"
            )
    elif lengths is None or lengths.dtype != np.int32 or lengths.ndim != 1:
        found = "None" if lengths is None else f"{lengths.dtype} {list(lengths.shape)}"
        raise QuantError(f"lengths are {found}; expected int32 [bags] for pooling {pooling.label}")
    if weights is not None and (weights.dtype != np.float32 or weights.shape != ids.shape):
        raise QuantError(
            f"weights are {weights.dtype} {list(weights.shape)}; expected float32 {list(ids.shape)}, one an "
            "id"
        )
    dtype = np.float16 if half else np.float32
    shape = (ids.size if lengths is None else lengths.size, table.dim)
    for name, array in (("ids", ids), ("lengths", lengths), ("weights", weights)):
        if array is not None and not array.flags.c_contiguous:
            raise QuantError(
                f"{name} are a strided view; expected a contiguous array (numpy.ascontiguousarray)"
            )
    if out is None:
        return np.empty(shape, dtype)
    if out.dtype != dtype or out.shape != shape or not out.flags.c_contiguous:
        raise QuantError(
            f"out is {out.dtype} {list(out.shape)}; expected contiguous {np.dtype(dtype)} {list(shape)}"
        )
    return out


def inputs_of(kind: Lookup | LookupKind, place: Place, inputs: Any) -> tuple[Ids, Lengths | None]:
    """Returns the ids of a lookup, and the lengths of its bags; None: it is not pooled."""
    ids = np.frombuffer(inputs, np.int64, place.ids, place.ids_at)
    if kind.pooling is Pooling.NONE:
        return ids, None
    if place.lengths_at < 0:
        return ids, np.full(place.bags, place.bag_length, np.int32)
    return ids, np.frombuffer(inputs, np.int32, place.bags, place.lengths_at)


def check_ids(ids: Ids, lengths: Lengths | None, rows: int, job: int = 0) -> None:
    """Raises BadIds for the first negative length, wrong sum of lengths, or id outside [0, rows). rows -1:
    any id."""
    if lengths is not None:
        if (negative := np.flatnonzero(lengths < 0)).size:
            at = int(negative[0])
            raise BadIds(Problem.LENGTH, job, at, int(lengths[at]), 0)
        if (total := int(lengths.sum(dtype=np.int64))) != ids.size:
            raise BadIds(Problem.SUM, job, lengths.size, total, ids.size)
    if rows >= 0 and (outside := np.flatnonzero((ids < 0) | (ids >= rows))).size:
        at = int(outside[0])
        raise BadIds(Problem.ID, job, at, int(ids[at]), rows)


def rows_of(
    table: RowSource, ids: Ids, lengths: Lengths | None, job: int = 0
) -> tuple[Ids, NDArray[np.bool_] | None, Unfound]:
    """Returns the row of each id, the found mask (None: all found) and the counts. BadIds: as `check_ids`."""
    row_map = table.row_map
    if row_map is None:
        check_ids(ids, lengths, table.rows, job)
        return ids, None, Unfound(0, 0)
    check_ids(ids, lengths, -1, job)
    rows = row_map.find(ids)
    found = rows != -1
    backfilled = int(np.count_nonzero(row_map.is_backfilled(rows[found])))
    if (lacks := np.flatnonzero(~found)).size:
        if row_map.default_row is None:
            at = int(lacks[0])
            raise BadIds(
                Problem.ID if row_map.is_plain else Problem.MISSING, job, at, int(ids[at]), row_map.count
            )
        rows[lacks] = row_map.default_row
    return rows, found, Unfound(int(lacks.size), backfilled)


def plain_rows(table: Table, rows: NDArray[np.int64]) -> tuple[Table, NDArray[np.int64]]:
    """Returns a table without a map and the numbers in it of rows [n] of `table`. `rows` must not contain -1.
    The table is `table` itself, or a copy of the rows if some may lie elsewhere."""
    if table.row_map is None:
        return table, rows
    if not table.row_map.elsewhere:
        return replace(table, row_map=None), rows
    own = (rows >= 0) & (rows < table.rows)
    packed = np.empty((max(1, rows.size), table.row_bytes), np.uint8)
    packed[: rows.size][own] = table.packed[rows[own]]
    table.row_map.copy_elsewhere(rows, packed[: rows.size])
    return Table(packed, table.row_format, table.dim), np.arange(rows.size, dtype=np.int64)
