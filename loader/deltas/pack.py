"""Checks and quantizes changes to rows of a version's tables."""

from collections.abc import Iterable

import numpy as np

from tableside.loader.deltas.changes import TableChanges
from tableside.loader.deltas.checks import check_ids, check_kind, check_shapes
from tableside.loader.deltas.hosts import changes_here
from tableside.loader.errors import ChangeError
from tableside.loader.segment.delta_writer import DeltaEntries
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import seconds
from tableside.quant import CpuBackend, Source, Table, choose
from tableside.quant.errors import NotRepresentable

_SOURCES = {np.dtype(np.float32): Source.FP32, np.dtype(np.float16): Source.FP16}


class PackedChanges:
    """Packed changes of a batch, of rows that this host has. version: that they fit. rows: changes. tables:
    name -> entries, in order."""

    def __init__(self, segment: Segment) -> None:
        self.version, self.rows = segment.base.header.version, 0
        self.tables: dict[str, list[DeltaEntries]] = {}
        self._segment, self._backend = segment, choose()

    def add(self, blocks: Iterable[TableChanges]) -> None:
        """Packs all blocks, or none after an error. ChangeError: a change does not fit the model."""
        here = (changes_here(self._segment, block) for block in blocks if block.rows)
        added = [(b.table, pack_changes(self._segment, b, self._backend)) for b in here if b is not None]
        for table, entries in added:
            self.tables.setdefault(table, []).append(entries)
            self.rows += entries.ids.size

    def set_times(self, now: float) -> None:
        """Says when the changes were made, of tables whose rows have times. now: seconds since 1970."""
        timed = {t.name for t in self._segment.base.header.tables if t.has_times}
        for name in self.tables.keys() & timed:
            self.tables[name] = [
                part._replace(times=np.full(part.ids.size, seconds(now))) for part in self.tables[name]
            ]


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
    if (table := segment.base.tables.get(block.table)) is None:
        where = f"{block.where}: " if block.where else ""
        raise ChangeError(
            f"{where}model {segment.header.model!r} has no table {block.table!r}; it has: "
            f"{', '.join((*segment.base.tables, *(t.name for t in segment.header.remote)))}"
        )
    check_shapes(block, table.dim)
    check_kind(block, block.table in segment.base.header.string_tables)
    return table
