"""Backfill: rows of an older version, copied packed at load for ids that the checkpoint lacks.

`missing = "backfill:MODEL@VERSION"` names it. Rows that it copied itself are included. The new version does
not need it after publication.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tableside.loader.errors import ModelError, VersionError
from tableside.loader.model.specs import TableSpec
from tableside.loader.versions.versions import Model
from tableside.quant.contract import Bytes, Ids
from tableside.quant.rows.ids import RowMap

_BLOCK_BYTES = 2 << 20


class Backfill:
    """The table of an older version. rows: ids; rows_there: rows that hold them, numbered from 0. used_bytes:
    of a row before its padding, which may differ there."""

    def __init__(self, root: Path, spec: TableSpec, dim: int) -> None:
        """Attaches the version. ModelError: no such table, or other rows. SegmentError: it is damaged."""
        what = f"[tables.{spec.name}]: missing = {str(spec.missing)!r}"
        try:
            self.segment = Model(root, spec.missing.model).attach(spec.missing.version)
        except VersionError as error:
            versions = ", ".join(map(str, Model(root, spec.missing.model).versions())) or "none"
            raise ModelError(
                f"{what}: that version is not published (versions there: {versions}); name one that is, and "
                "load with a --keep that leaves it there"
            ) from error
        if spec.name not in self.segment.tables:
            raise ModelError(
                f"{what}: that version has no table {spec.name!r}; it has: {', '.join(self.segment.tables)}"
            )
        self.table = self.segment.tables[spec.name]
        found = (self.table.row_format, self.table.dim)
        if found != (spec.row_format, dim):
            raise ModelError(
                f"{what}: its rows are {found[0].label} of dim {found[1]}, these are {spec.row_format.label} "
                f"of dim {dim}; rows are taken over as they are, so load both in one row format"
            )
        row_map = self.table.row_map
        if spec.raw is None and row_map is not None and row_map.index is not None:
            raise ModelError(
                f'{what}: its ids are raw, and those of this table are row numbers; set ids = "raw"'
            )
        (stored,) = (t for t in self.segment.header.tables if t.name == spec.name)
        if "string" in (kinds := {stored.id_kind, spec.id_kind}) and len(kinds) > 1:
            raise ModelError(
                f"{what}: its ids are {stored.id_kind!r}, and those of this table {spec.id_kind!r}; "
                "name a version whose ids are the same"
            )
        if spec.raw is None and row_map is not None and row_map.first:
            raise ModelError(
                f"{what}: it is a part of a table, whose first id is {row_map.first}; name a version that is "
                "whole"
            )
        self._map = RowMap(self.table.rows) if row_map is None else row_map
        self.rows = self._map.count
        self.rows_there = self.rows if self._map.index is None else self._map.index.slots
        self._step = max(1, _BLOCK_BYTES // self.table.row_bytes)
        self.used_bytes, self._row_bytes = spec.row_format.used_bytes(dim), spec.row_bytes(dim)

    def ids(self) -> Iterator[tuple[Ids, Ids]]:
        """Yields (ids, their rows), block by block."""
        for start in range(0, self.rows_there, self._step):
            rows, ids = self._map.rows_with_ids(start, min(start + self._step, self.rows_there))
            yield ids, rows

    def blocks(self) -> Iterator[tuple[Ids, Ids, Bytes]]:
        """Yields (ids, their rows, a copy of them, packed as this load packs rows)."""
        for ids, rows in self.ids():
            packed = np.zeros((rows.size, self._row_bytes), np.uint8)
            packed[:, : self.used_bytes] = self.table.packed[rows, : self.used_bytes]
            yield ids, rows, packed

    @property
    def default_row(self) -> Bytes | None:
        """Returns the older version's row for ids that it lacks, uint8 [used_bytes]; None: none, they are
        refused."""
        if self._map.default_row is None:
            return None
        return np.asarray(self.table.packed[self._map.default_row][: self.used_bytes])
