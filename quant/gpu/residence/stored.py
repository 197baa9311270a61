"""Tables on a disk. Imports no torch: a worker without a GPU has them, too."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tableside.quant.contract import Table
from tableside.quant.gpu.residence.residence import Home, Planned, Residence, Room, TableSize
from tableside.quant.rows.fetched import FetchedTable, RowReader

if TYPE_CHECKING:
    import torch


class Stored(Residence):
    """The CPU looks rows up that are read from a disk as requests ask for them. reader: of them; None: they
    are read where they are mapped."""

    is_on_device = False

    def __init__(self, reader: RowReader | None = None) -> None:
        self._reader = reader

    @classmethod
    def of(cls, home: Home, table: Table, rows: "torch.Tensor | None", **how: Any) -> "Stored":
        """reader: of the rows."""
        return cls(**how)

    @classmethod
    def plan(cls, tables: Sequence[TableSize], room: Room) -> Planned:
        return Planned(0, lambda name, table, rows: cls(room.readers.get(name)))

    @classmethod
    def without_device(cls, reader: RowReader | None) -> "Stored":
        return cls(reader)

    def source(self, table: Table) -> Table | FetchedTable:
        return table if self._reader is None else table.fetched_by(self._reader)
