"""A table's row map on a device: a NativeRowMap in its memory, and what that points to.
Directory entries, pilots and backfilled bits, a third of a byte an id, are copied to HBM. Kept ids, 8 bytes a
row, are read
    in the table's rows   if all are in HBM and ids lie in their padding
    in a copy in HBM      otherwise
    in host memory        if a budget does not hold the copy: one host read an id
If a budget does not hold the former either, they lie in page-locked host memory. `quant.gpu.residence.layers`
has the overlay's layers. A table's states share its own parts."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.contract import Table
from tableside.quant.device.device import Device
from tableside.quant.errors import QuantError
from tableside.quant.gpu.residence.layers import DeviceLayer, native_layers
from tableside.quant.gpu.residence.memory import InHost, allocate_for, fill
from tableside.quant.gpu.residence.residence import Residence
from tableside.quant.rows.ids import ID_BYTES, IdIndex, native_row_map


class DeviceRowMap:
    """A table's RowMap on a device. address: of its NativeRowMap; bytes: of HBM, without layers. layers:
    newest first; none at first. in_host: where kept ids that are an array are read in host memory, it is
    registered with the rows, as all of a segment is. QuantError: it does not fit, or the residence reads no
    host memory."""

    def __init__(
        self, table: Table, residence: Residence, device: Device, in_host: InHost = InHost.NOTHING
    ) -> None:
        assert table.row_map is not None
        self._device, self._in_host = device, in_host
        self._held: list[torch.Tensor] = []
        self.layers: tuple[DeviceLayer, ...] = ()
        self._layer_table: torch.Tensor | None = None
        record = native_row_map(table.row_map)._replace(layers=0, layer_count=0, hot=0)
        if (index := table.row_map.index) is not None:
            ids, step = self._ids(table, index, residence)
            bits = 0 if index.backfilled is None else self._copied(index.backfilled)
            entries, pilots = self._copied(index.entries), self._copied(index.pilots)
            record = record._replace(
                directory=0, entries=entries, pilots=pilots, ids=ids, id_step=step, backfilled=bits
            )
            record = record._replace(own=index.slots)  # the bits say which rows are not
        self.bytes = 0 if in_host is InHost.ALL else sum(part.numel() for part in self._held)
        self._native = record
        self._record = torch.tensor(record, dtype=torch.int64, device=device.torch_device)
        self.address = self._record.data_ptr()

    def with_layers(self, layers: Sequence[DeviceLayer]) -> "DeviceRowMap":
        """The same map with the layers of an overlay, the newest first, at least one. All else is shared."""
        made, table = copy(self), native_layers(layers, self._device)
        made.layers, made._layer_table = tuple(layers), table
        record = self._native._replace(layers=table.data_ptr(), layer_count=len(layers))
        made._record = torch.tensor(record, dtype=torch.int64, device=self._device.torch_device)
        made.address = made._record.data_ptr()
        return made

    def _ids(self, table: Table, index: IdIndex, residence: Residence) -> tuple[int, int]:
        """Returns the address of row 0's kept id, and the stride in bytes."""
        place = index.ids.ctypes.data - table.address
        is_in_rows = 0 <= place < table.row_bytes == index.ids.strides[0]
        if not index.slots:
            return 0, ID_BYTES
        if is_in_rows and residence.hbm_address:
            return residence.hbm_address + place, table.row_bytes
        rows = residence.host_rows
        if self._in_host:
            if rows is None:
                raise QuantError(
                    "ids cannot be read in host memory beside rows that are all in HBM; copy them too"
                )
            return rows.data_ptr() + place, index.ids.strides[0]
        if not is_in_rows or rows is None:
            return self._copied(np.ascontiguousarray(index.ids)), ID_BYTES
        copied = self._allocated(index.slots * ID_BYTES)
        kept = rows.view(torch.int64).as_strided(
            (index.slots,), (table.row_bytes // ID_BYTES,), place // ID_BYTES
        )
        copied.view(torch.int64).copy_(kept)
        self._device.current_stream().synchronize()
        return copied.data_ptr(), ID_BYTES

    def _copied(self, array: NDArray[Any]) -> int:
        """The address of a copy that the device reads; it is there when this returns."""
        memory = self._allocated(array.nbytes)
        fill(memory, array, self._in_host is InHost.ALL)
        return memory.data_ptr()

    def _allocated(self, size: int) -> torch.Tensor:
        self._held.append(
            allocate_for(size, self._device, "the id index of a table", self._in_host is InHost.ALL)
        )
        return self._held[-1]
