"""Residences: where a table's rows live for one device. A residence plans what its tables take of a budget,
owns their device memory, fills in the jobs of lookups, and says what must run first: a gather by the CPU, or
a cache probe. No other code asks for its kind (`quant.gpu.residence.registry` has the list); the kernel's
`_row_address` (`quant.gpu.kernels.lookup`) turns job and id into an address. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tableside.quant.contract import Table
from tableside.quant.row_format import device_row_bytes
from tableside.quant.rows.fetched import FetchedTable, RowReader

if TYPE_CHECKING:
    import torch

    from tableside.quant.cache.cache import Cache
    from tableside.quant.cache.settings import CacheSettings
    from tableside.quant.device.device import Device


class TableSize(NamedTuple):
    """What a plan knows of a table. index_bytes: of its id index without the kept ids; id_bytes: of those;
    ids_in_rows: they lie in the rows' padding. is_stored: its rows may be read from a disk one by one."""

    name: str
    rows: int
    row_bytes: int
    index_bytes: int = 0
    id_bytes: int = 0
    ids_in_rows: bool = False
    is_stored: bool = False

    @property
    def has_row_numbers(self) -> bool:
        """Whether its ids are row numbers, so that a device needs no row to know which one an id has."""
        return not self.index_bytes and not self.id_bytes

    @property
    def bytes(self) -> int:
        """Of the rows in host memory."""
        return self.rows * self.row_bytes

    @property
    def hbm_bytes(self) -> int:
        """Of the rows in HBM."""
        return self.rows * device_row_bytes(self.row_bytes)

    @property
    def whole_bytes(self) -> int:
        """HBM of all rows and their index."""
        return self.hbm_bytes + self.whole_index_bytes

    @property
    def whole_index_bytes(self) -> int:
        """HBM of the index beside rows that are all in HBM: ids in the rows are read there."""
        return self.index_bytes + (0 if self.ids_in_rows else self.id_bytes)


class Home(Protocol):
    """What residences of a device share (`quant.gpu.batch.launcher`). cache: None: it is not open."""

    @property
    def device(self) -> "Device": ...

    @property
    def cache(self) -> "Cache | None": ...

    @property
    def stashable(self) -> Any: ...


class Room(NamedTuple):
    """What a version's tables of one kind may take. budget: bytes of HBM. growth: of it, for id indexes of a
    next version. same: residences of the replaced version, of tables in the very files. open_cache: as
    `GpuBackend.open_cache`; cache_settings: from the bytes of its tables. label: goes before tables' names in
    statistics. readers: of tables on a disk, by name."""

    home: Home
    budget: int
    growth: int
    is_stashable: bool
    same: "Mapping[str, Residence]"
    open_cache: "Callable[[int, int, CacheSettings], Cache]"
    cache_settings: "Callable[[int], CacheSettings]"
    label: str
    readers: "Mapping[str, RowReader]"


Maker = Callable[[str, Table, "torch.Tensor | None"], "Residence"]
"""From a table's name, the table and its rows in registered memory; as `Residence.of`."""


class Planned(NamedTuple):
    """What tables of one kind take. bytes: of HBM, while the version is held; kept_bytes: for good."""

    bytes: int
    make: Maker
    kept_bytes: int = 0


class Residence:
    """One table's rows for one device, as its jobs need them."""

    is_on_device = True
    """False: the CPU looks the rows up."""
    is_whole = False
    """Whether all rows lie in HBM."""
    reads_host = False
    """Whether the device reads rows in host memory."""
    host_alignment = 1
    """Of the rows' bytes there."""
    is_gathered = False
    """Whether the CPU gathers the rows of requests with many ids."""
    address = 0
    """Of row 0 as jobs have it, whether or not row 0 is read there."""
    hbm_address = 0
    """Of row 0, where all rows lie in HBM as they do on the host; 0: they do not."""
    host_rows: "torch.Tensor | None" = None
    """The rows in host memory as the device reads them, uint8 [bytes]; None: it does not."""
    hbm_rows = 0
    """Address of slot 0 of the cache, or of the first HBM row of a split table."""
    hbm_share = 0
    """Rows of each SPLIT_BLOCK that are in HBM; 0: the table is not split."""
    cache_table = -1
    """The table's number in the cache; -1: it is not read through one."""

    # ---- plans ----

    @classmethod
    def needs(cls, tables: Sequence[TableSize]) -> int:
        """HBM without which it cannot hold the tables."""
        return 0

    @classmethod
    def fits(cls, tables: Sequence[TableSize], budget: int, home: Home) -> bool:
        """Whether the tables can live here within a budget, in bytes of HBM."""
        return cls.needs(tables) <= budget

    @classmethod
    def takes_rest(cls, home: Home) -> bool:
        """Whether it takes all that a budget leaves."""
        return False

    @classmethod
    def registers(cls, is_stashable: bool) -> bool:
        """Whether the rows' memory must be registered with the device."""
        return cls.reads_host

    @classmethod
    def plan(cls, tables: Sequence[TableSize], room: Room) -> Planned:
        """Plans tables that were chosen to live here. QuantError: there is no room."""
        return Planned(0, lambda name, table, rows: cls.of(room.home, table, rows))

    @classmethod
    def of(cls, home: Home, table: Table, rows: "torch.Tensor | None", **how: Any) -> "Residence":
        """Makes the residence of a table. rows: uint8 [bytes] on the device over registered memory; None: the
        table's memory. how: what the kind needs besides. QuantError: it cannot hold the table."""
        raise NotImplementedError

    @classmethod
    def without_device(cls, reader: RowReader | None) -> "Residence":
        """Makes the residence of a table in a worker without a device. reader: of its rows on a disk; None:
        they lie in memory."""
        return cls()

    # ---- rows ----

    def source(self, table: Table) -> Table | FetchedTable:
        """Returns what the CPU reads, of a table that it looks up or whose rows it fetches for the device."""
        return table

    def read_from(self, source: Table | FetchedTable) -> None:
        """Has the CPU fetch rows for the device there from now on: the same rows, under other hot ones."""

    def hot(self) -> NDArray[np.int64]:
        """Returns ids with rows in HBM because of use, int64 [n], hottest first. Waits for the device."""
        return np.zeros(0, np.int64)

    def warm(self, ids: NDArray[np.int64]) -> None:
        """Brings rows [n], int64, to HBM for later lookups, if the residence can. Waits for rows of a
        disk alone."""

    def take_over(self, before: "Residence", rows: NDArray[np.int64], successors: NDArray[np.int64]) -> None:
        """Keeps cached rows of another table that equal rows of this one. rows, successors: int64 [n] numbers
        in the other table and in this. The other table has to fetch them again. Waits for the device."""
