"""Checks and quantizes changes to rows of a version's tables."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tableside.loader.deltas.changes import TableChanges
from tableside.loader.errors import ChangeError
from tableside.loader.segment.delta_writer import DeltaEntries
from tableside.loader.segment.segment import Segment
from tableside.quant import CpuBackend, Source, Table, choose
from tableside.quant.contract import Ids
from tableside.quant.errors import NotRepresentable

_SOURCES = {np.dtype(np.float32): Source.FP32, np.dtype(np.float16): Source.FP16}


class PackedChanges:
    """Packed changes of a batch. version: that they fit. rows: changes. tables: name -> entries, in order."""

    def __init__(self, segment: Segment, backend: str = "native") -> None:
        self.version, self.rows = segment.base.header.version, 0
        self.tables: dict[str, list[DeltaEntries]] = {}
        self._segment, self._backend = segment, choose(backend)

    def add(self, blocks: Iterable[TableChanges]) -> None:
        """Packs all blocks, or none after an error. ChangeError: a change does not fit the model."""
        added = [(b.table, pack_changes(self._segment, b, self._backend)) for b in blocks if b.rows]
        for table, entries in added:
            self.tables.setdefault(table, []).append(entries)
            self.rows += entries.ids.size


def pack_changes(segment: Segment, block: TableChanges, backend: CpuBackend) -> DeltaEntries:
    """Returns a block as rows of its table. ChangeError: it does not fit the model."""
    table = _table(segment, block)
    deleted = np.zeros(block.rows, np.bool_) if block.deleted is None else block.deleted
    check_ids(table, block.table, block.ids, deleted)
    packed = np.zeros((block.rows, table.row_bytes), np.uint8)
    given = ~deleted
    values = block.vectors if given.all() else block.vectors[given]
    rows = packed if given.all() else np.zeros((len(values), table.row_bytes), np.uint8)
    if len(values):
        try:
            backend.quantize(np.ascontiguousarray(values), _SOURCES[values.dtype], table.row_format, rows)
        except NotRepresentable as error:
            at = int(np.flatnonzero(given)[error.row])
            raise ChangeError(
                f"table {block.table!r}, id {block.ids[at]}, change {at}: a value that "
                f"{table.row_format.label} cannot represent "
                "(not finite, or too large); nothing of the batch was applied"
            ) from error
    if rows is not packed:
        packed[given] = rows
    return DeltaEntries(np.ascontiguousarray(block.ids), packed, np.arange(block.rows), deleted)


def _table(segment: Segment, block: TableChanges) -> Table:
    """Returns the table that a block changes, after checking shapes."""
    where = f"{block.where}: " if block.where else ""
    if (table := segment.base.tables.get(block.table)) is None:
        raise ChangeError(
            f"{where}model {segment.header.model!r} has no table {block.table!r}; it has: "
            f"{', '.join(segment.base.tables)}"
        )
    ids, vectors, deleted = block.ids, block.vectors, block.deleted
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ChangeError(f"table {block.table!r}: ids are {ids.dtype} {list(ids.shape)}; expected int64 [n]")
    has_vectors = deleted is None or not deleted.all()
    if has_vectors and (vectors.dtype not in _SOURCES or vectors.shape != (block.rows, table.dim)):
        raise ChangeError(
            f"{where}table {block.table!r}: vectors are {vectors.dtype} {list(vectors.shape)}; expected "
            f"float32 or float16 [{block.rows}, {table.dim}]"
        )
    if deleted is not None and (deleted.dtype != np.bool_ or deleted.shape != ids.shape):
        raise ChangeError(
            f"table {block.table!r}: deleted is {deleted.dtype} {list(deleted.shape)}; expected bool "
            f"[{block.rows}]"
        )
    return table


def check_ids(table: Table, name: str, ids: Ids, deleted: NDArray[np.bool_]) -> None:
    """Raises ChangeError if a change of an id, or its deletion, does not fit a table. name: the table's."""
    row_map = table.row_map
    if row_map is not None and row_map.index is not None:
        index = row_map.index
        outside = np.zeros(0, np.int64)
        if index.bucket_ids or len(index.directory) - 1 < index.buckets:
            outside = np.flatnonzero(index.bucket_of(ids) < 0)
        if outside.size:
            at = int(outside[0])
            raise ChangeError(f"table {name!r}, change {at}: id {ids[at]} is in no bucket of this version")
        return
    first, count = (0, table.rows) if row_map is None else (row_map.first, row_map.count)
    if (outside := np.flatnonzero((ids < first) | (ids >= first + count))).size:
        at = int(outside[0])
        raise ChangeError(
            f"table {name!r}, change {at}: id {ids[at]} is outside the table's ids [{first}, "
            f"{first + count}); "
            'rows can be added to tables of raw ids (ids = "raw" in model.toml)'
        )
    if (row_map is None or row_map.default_row is None) and deleted.any():
        at = int(np.flatnonzero(deleted)[0])
        raise ChangeError(
            f"table {name!r}, change {at}: id {ids[at]} cannot be deleted, since the table "
            "refuses ids that it lacks; load it with a policy for missing ids"
        )
