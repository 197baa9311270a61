"""A table as a device reads it."""

from dataclasses import dataclass

from tableside.quant.contract import RowSource, Table
from tableside.quant.cpu.backend import host_table
from tableside.quant.gpu.kernels.wanted import KernelKey
from tableside.quant.gpu.residence.layers import DeviceLayer
from tableside.quant.gpu.residence.registry import UNPLACED, residence
from tableside.quant.gpu.residence.residence import Residence
from tableside.quant.gpu.residence.row_map import DeviceRowMap
from tableside.quant.row_format import RowFormat, device_row_bytes
from tableside.quant.rows.fetched import AskedTable, FetchedTable
from tableside.quant.rows.ids import RowMap


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """A host table with its residence on a device; a `RowSource`. device_map: its row map on the device;
    None: ids are row numbers, or the CPU looks it up."""

    host: Table | FetchedTable | AskedTable
    residence: Residence
    key: KernelKey
    device_map: DeviceRowMap | None = None

    @property
    def is_overlaid(self) -> bool:
        """True if the device reads overlay rows."""
        return bool(self.layers)

    @property
    def layers(self) -> tuple[DeviceLayer, ...]:
        """The overlay's layers on the device, newest first."""
        return () if self.device_map is None else self.device_map.layers

    @property
    def job_rows(self) -> int:
        """Value of `JobField.ROWS`."""
        return -1 if self.is_overlaid else self.rows

    @property
    def is_gathered(self) -> bool:
        """True if the CPU gathers rows for many ids: not if the device resolves the ids."""
        return self.residence.is_gathered and self.row_map is None

    @property
    def rows(self) -> int:
        return self.host.rows

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next where the device reads them."""
        size, where = self.host.row_bytes, self.residence
        return device_row_bytes(size) if where.is_on_device and not where.reads_host else size

    @property
    def row_format(self) -> RowFormat:
        return self.host.row_format

    @property
    def dim(self) -> int:
        return self.host.dim

    @property
    def row_map(self) -> RowMap | None:
        return self.host.row_map


def on_device(table: RowSource) -> DeviceTable:
    """The table as a device reads it. A table of the host that was not placed is looked up by the CPU."""
    if isinstance(table, DeviceTable):
        return table
    return looked_up_by_cpu(table if isinstance(table, FetchedTable | AskedTable) else host_table(table))


def looked_up_by_cpu(host: Table | FetchedTable | AskedTable) -> DeviceTable:
    """The table, which no device reads."""
    return DeviceTable(host, residence(UNPLACED)(), KernelKey())
