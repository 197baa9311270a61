"""A table as a device reads it."""

from dataclasses import dataclass, replace

from tableside.quant import contract
from tableside.quant.contract import RowSource, Table
from tableside.quant.cpu.backend import host_table
from tableside.quant.gpu.kernels.wanted import KernelKey
from tableside.quant.gpu.residence.layers import DeviceLayer
from tableside.quant.gpu.residence.residence import OnHost, Residence
from tableside.quant.gpu.residence.row_map import DeviceRowMap
from tableside.quant.row_format import RowFormat
from tableside.quant.rows.ids import RowMap


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """A table of the host, and where its rows live for a device. It is a `RowSource`.

    device_map: how its ids become row numbers on the device; None: they are row numbers, or the CPU looks the
    table up.
    """

    host: Table
    residence: Residence
    key: KernelKey
    device_map: DeviceRowMap | None = None

    @property
    def is_overlaid(self) -> bool:
        """Whether the device reads rows of an overlay beside the table's own."""
        return bool(self.layers)

    @property
    def layers(self) -> tuple[DeviceLayer, ...]:
        """Those of its overlay that the device reads, the newest first."""
        return () if self.device_map is None else self.device_map.layers

    @property
    def job_rows(self) -> int:
        """What jobs have as `JobField.ROWS`."""
        return -1 if self.is_overlaid else self.rows

    @property
    def is_gathered(self) -> bool:
        """Whether the CPU gathers rows of requests with many ids: the device makes the row numbers of ids
        that are none."""
        return self.residence.is_gathered and self.row_map is None

    @property
    def rows(self) -> int:
        return self.host.rows

    @property
    def row_bytes(self) -> int:
        return self.host.row_bytes

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
    host = host_table(table)
    return DeviceTable(host, OnHost(), KernelKey())


def by_row_number(table: RowSource) -> RowSource:
    """The same rows, where an id is a row number."""
    if isinstance(table, DeviceTable) and table.row_map is not None and table.residence.is_on_device:
        return replace(table, host=replace(table.host, row_map=None), device_map=None)
    return contract.by_row_number(table)
