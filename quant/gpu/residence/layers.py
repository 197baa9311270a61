"""Overlay layers on a device: rows, index, filter and deleted bits, copied to HBM once, or to page-locked
host memory beyond a budget. A layer belongs to one table and to its successive states until newer changes are
merged into it. States share its copy, which goes with the last of them. The table's own residence does not
matter. The lookup kernel finds a row at `table + number * row_bytes` in wrapping 64-bit arithmetic. A layer
begins whole rows away from the table, and row_bytes is a multiple of 16, so adding 2 ** 60 to a number does
not change the address. `first_row` lies in [-2 ** 63, -2 ** 63 + 2 ** 60). So overlay rows are negative and
never -1: the cache and split tables tell them by the sign, and the lookup kernel, with unsigned ids, refuses
only -1."""

import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.contract import Table
from tableside.quant.device.device import Device
from tableside.quant.gpu.residence.memory import InHost, allocate_for, fill
from tableside.quant.gpu.residence.residence import Residence
from tableside.quant.row_format import device_row_bytes
from tableside.quant.rows.ids import ID_BYTES
from tableside.quant.rows.overlay import MOST_LAYERS, NativeLayer, OverlayLayer

_ALIGNMENT = 16  # bytes, of each part
_NUMBERS_STEP = 1 << 60  # numbers this far apart lead to one address, for rows of multiples of 16 bytes


class DeviceLayer:
    """A layer of one table's overlay on a device. native: for kernels; bytes: of HBM. table_at: address of
    row 0 for kernels. QuantError: it does not fit."""

    def __init__(
        self, layer: OverlayLayer, table_at: int, device: Device, in_host: InHost = InHost.NOTHING
    ) -> None:
        self.index = layer.index  # by which `DeviceLayers` knows the layer
        self.bytes, self.in_host = layer_bytes(layer, in_host), in_host
        slots, size = layer.index.slots, layer.packed.shape[1]
        row_bytes = device_row_bytes(size)
        rows = layer.packed[:slots]
        if row_bytes != size:
            rows = np.pad(rows, ((0, 0), (0, row_bytes - size)))
        self._rows = allocate_for(
            rows.nbytes + row_bytes, device, "a delta of a table", in_host >= InHost.SOME
        )
        first = (table_at - self._rows.data_ptr()) % row_bytes  # whole rows away from the table
        fill(self._rows[first : first + rows.nbytes], rows, in_host >= InHost.SOME)
        rows_at = self._rows.data_ptr() + first
        parts, starts = _parts(layer)
        self._memory = allocate_for(starts[-1], device, "the index of a delta", in_host is InHost.ALL)
        together = np.zeros(starts[-1], np.uint8)  # one copy takes as long as each of five
        at = {}
        for (name, part), start in zip(parts.items(), starts, strict=False):
            at[name] = self._memory.data_ptr() + start
            together[start : start + part.nbytes] = part.reshape(-1).view(np.uint8)
        fill(self._memory, together, in_host is InHost.ALL)
        self.native = layer.native._replace(
            first_row=(rows_at - table_at) // row_bytes % _NUMBERS_STEP - 2**63,
            id_step=ID_BYTES,
            marks=0,  # which are the CPU's
            **at,
        )


def layer_bytes(layer: OverlayLayer, in_host: InHost = InHost.NOTHING) -> int:
    """HBM that a layer takes."""
    _, starts = _parts(layer)
    index_bytes = 0 if in_host is InHost.ALL else starts[-1]
    return index_bytes + (0 if in_host else (layer.index.slots + 1) * device_row_bytes(layer.packed.shape[1]))


def _parts(layer: OverlayLayer) -> tuple[dict[str, NDArray[Any]], list[int]]:
    """Returns the parts to copy beside the rows, their starts, and the end."""
    index = layer.index
    parts: dict[str, NDArray[Any]] = {
        "filter": layer.filter,
        "entries": index.entries,
        "pilots": index.pilots,
    }
    parts["ids"] = np.ascontiguousarray(index.ids)
    if layer.deleted is not None:
        parts["deleted"] = layer.deleted
    sizes = (-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts.values())
    return parts, [0, *accumulate(sizes)]


class DeviceLayers:
    """The layers that a device has. Any thread may call."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: WeakValueDictionary[tuple[int, int], DeviceLayer] = WeakValueDictionary()
        self._lock = threading.Lock()  # held while layers are copied, so that each is once

    def of(
        self, table: Table, residence: Residence, in_host: InHost = InHost.NOTHING
    ) -> tuple[DeviceLayer, ...]:
        """Returns the layers of a table's overlay, newest first. Copies missing ones on the current stream
        and waits. in_host: of missing ones. QuantError: no room."""
        if table.row_map is None or table.row_map.overlay is None:
            return ()
        with self._lock:
            return tuple(
                self._layer(layer, residence.address, in_host) for layer in table.row_map.overlay.layers
            )

    def new_bytes(self, table: Table, residence: Residence, in_host: InHost = InHost.NOTHING) -> int:
        """HBM that `of` would take."""
        if table.row_map is None or table.row_map.overlay is None:
            return 0
        new = [v for v in table.row_map.overlay.layers if (id(v.index), residence.address) not in self._known]
        return sum(layer_bytes(layer, in_host) for layer in new)

    def _layer(self, layer: OverlayLayer, table_at: int, in_host: InHost) -> DeviceLayer:
        key = id(layer.index), table_at
        if (found := self._known.get(key)) is None:
            found = self._known[key] = DeviceLayer(layer, table_at, self._device, in_host)
        return found


def native_layers(layers: Sequence[DeviceLayer], device: Device) -> torch.Tensor:
    """int64 [MOST_LAYERS, fields of NativeLayer] on the device."""
    rows = np.zeros((MOST_LAYERS, len(NativeLayer._fields)), np.int64)
    rows[: len(layers)] = [layer.native for layer in layers]
    return torch.from_numpy(rows).to(device.torch_device)
