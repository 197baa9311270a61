"""Tables on a disk. Imports no torch: a worker without a GPU has them, too."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tableside.quant.contract import Table
from tableside.quant.gpu.residence.residence import Home, Planned, Residence, Room, TableSize
from tableside.quant.rows.fetched import Fetch, FetchedTable

if TYPE_CHECKING:
    import torch


class Stored(Residence):
    """The CPU looks rows up that are read from a disk as requests ask for them. fetch: reads them; None: they
    are read where they are mapped."""

    is_on_device = False

    def __init__(self, fetch: Fetch | None = None) -> None:
        self._fetch = fetch

    @classmethod
    def of(cls, home: Home, table: Table, rows: "torch.Tensor | None", **how: Any) -> "Stored":
        """fetch: reads the rows."""
        return cls(**how)

    @classmethod
    def plan(cls, tables: Sequence[TableSize], room: Room) -> Planned:
        return Planned(0, lambda name, table, rows: cls(room.fetches.get(name)))

    @classmethod
    def without_device(cls, fetch: Fetch | None) -> "Stored":
        return cls(fetch)

    def source(self, table: Table) -> Table | FetchedTable:
        if self._fetch is None:
            return table
        shape = (table.rows, table.row_bytes, table.row_format, table.dim)
        return FetchedTable(*shape, self._fetch, table.row_map)
