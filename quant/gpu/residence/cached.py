"""Tables that the device reads through its cache."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.tables import map_bytes
from tableside.quant.contract import Table
from tableside.quant.errors import QuantError
from tableside.quant.gpu.residence.in_host_memory import InHostMemory
from tableside.quant.gpu.residence.residence import Home, Planned, Residence, Room, TableSize
from tableside.quant.row_format import ALIGNMENTS, device_row_bytes
from tableside.quant.rows.fetched import FetchedTable, RowReader

_SMALLEST_CACHE = 1 << 20  # bytes


class Cached(InHostMemory):
    """Rows read through the device's cache until this object goes; misses come from host memory, or are
    fetched by the host, and are padded on their way."""

    host_alignment = min(ALIGNMENTS)

    def __init__(
        self,
        home: Home,
        table: Table,
        rows: torch.Tensor | None,
        label: str = "",
        reader: RowReader | None = None,
    ) -> None:
        """label: for statistics. reader: of rows on a disk, which the device does not read. QuantError: there
        is no cache, or it cannot hold rows of this size."""
        if home.cache is None:
            raise QuantError("this device has no cache; open_cache makes one")
        self._cache, self._reader = home.cache, reader
        if reader is None:
            super().__init__(home, table, rows)
        else:
            self._table, self.address = table, table.address
        read_at = self.address if reader is None else 0
        self._registered = self._cache.registered(read_at, table.rows, table.row_bytes, label)
        self.hbm_rows, self.cache_table = self._cache.slots_address, self._registered.number
        self.read_from(self.source(table))

    @classmethod
    def fits(cls, tables: Sequence[TableSize], budget: int, home: Home) -> bool:
        return home.cache is not None or budget - 2 * _maps(tables) >= _SMALLEST_CACHE

    @classmethod
    def takes_rest(cls, home: Home) -> bool:
        return home.cache is None

    @classmethod
    def plan(cls, tables: Sequence[TableSize], room: Room) -> Planned:
        """Opens the device's cache in the rest of the budget for the first tables of all, with room for the
        maps of a version and its successor."""

        def make(name: str, table: Table, rows: torch.Tensor | None) -> Residence:
            return cls(room.home, table, rows, f"{room.label}{name}", room.readers.get(name))

        if room.home.cache is not None:
            return Planned(_maps(tables), make)
        budget = room.budget - room.growth
        if (maps := 2 * _maps(tables)) >= budget:
            raise QuantError(
                f"the cache's maps of {sum(t.rows for t in tables):,} rows, of two versions, take {maps:,} "
                f"bytes; the budget leaves {max(0, budget):,}; give it more, or choose zero_copy"
            )
        smallest = min(device_row_bytes(t.row_bytes) for t in tables)
        room.open_cache(budget - maps, smallest, room.cache_settings(sum(t.bytes for t in tables)))
        return Planned(0, make, kept_bytes=budget)

    def source(self, table: Table) -> Table | FetchedTable:
        return table if self._reader is None else table.fetched_by(self._reader)

    def read_from(self, source: Table | FetchedTable) -> None:
        if isinstance(source, FetchedTable):
            self._cache.read_from(self.cache_table, source)
            self._source = source  # the one before it is in use until then

    def hot(self) -> NDArray[np.int64]:
        """None of those that lie on a disk, where a new version's would be read one by one."""
        return super().hot() if self._reader is not None else self._cache.hot(self.cache_table)

    def warm(self, ids: NDArray[np.int64]) -> None:
        self._cache.warm(self.cache_table, ids)

    def take_over(self, before: Residence, rows: NDArray[np.int64], successors: NDArray[np.int64]) -> None:
        if isinstance(before, Cached) and before._cache is self._cache:
            self._cache.hand_over(before.cache_table, self.cache_table, rows, successors)


def _maps(tables: Sequence[TableSize]) -> int:
    return sum(map_bytes(t.rows) for t in tables)
