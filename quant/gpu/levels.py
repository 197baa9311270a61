"""Levels of overlays where a device reads them: rows, index, filter and deleted bits of each, copied to HBM once. Where a budget
does not hold the rows, these lie in page-locked memory of the host.

A level lies over one table and is part of one state of it after another, as long as no newer changes are merged into it. So
states share what was copied of it, and it goes with the last of them. Where the table's own rows live makes no difference:
nothing of them is copied, moved or looked at.

The lookup kernel finds a row at `table + number * row_bytes`, in arithmetic of 64 bits that wraps. A level's memory begins whole
rows away from the table's first one, and row_bytes is a multiple of 16; so 2 ** 60 may be added to a number without changing
where it leads. `first_row` is taken between -2 ** 63 and -2 ** 63 + 2 ** 60. That makes the numbers of all overlays' rows
negative, and never -1: the cache and tables in two places tell them from their own by the sign, and the lookup kernel, for which
ids are numbers without a sign, refuses -1 alone.
"""

import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.contract import Table
from tableside.quant.errors import QuantError
from tableside.quant.gpu.residence import Residence, allocate, array_bytes, copy_from_host
from tableside.quant.ids import ID_BYTES
from tableside.quant.overlay import MOST_LEVELS, Level, NativeLevel

_ALIGNMENT = 16  # bytes, of each part
_NUMBERS_STEP = 1 << 60  # numbers this far apart lead to one address, for rows of multiples of 16 bytes


class DeviceLevel:
    """A level of the overlay of one table, for a device. native: as kernels read it; bytes: of HBM.

    table_at: the address of the table's row 0 as kernels have it. rows_in_host: rows are copied to page-locked memory of the
    host, which the device reads, and take no HBM. QuantError: it does not fit.
    """

    def __init__(self, level: Level, table_at: int, device: torch.device, rows_in_host: bool = False) -> None:
        self._index = level.index  # by which `DeviceLevels` knows the level
        self.bytes, self.rows_in_host = level_bytes(level, rows_in_host), rows_in_host
        row_bytes, slots = level.packed.shape[1], level.index.slots
        assert row_bytes % _ALIGNMENT == 0, "rows are padded to 16 bytes (row_format)"
        rows = level.packed[:slots]
        self._rows = _rows_memory(rows.nbytes + row_bytes, device, rows_in_host)
        first = (table_at - self._rows.data_ptr()) % row_bytes  # whole rows away from the table
        _copy(self._rows[first : first + rows.nbytes], rows, rows_in_host)
        rows_at = self._rows.data_ptr() + first
        parts, starts = _parts(level)
        self._memory = allocate(starts[-1], device, "the index of a delta")
        together = np.zeros(starts[-1], np.uint8)  # one copy takes as long as each of five
        at = {}
        for (name, part), start in zip(parts.items(), starts, strict=False):
            at[name] = self._memory.data_ptr() + start
            together[start : start + part.nbytes] = part.reshape(-1).view(np.uint8)
        _copy(self._memory, together, False)
        self.native = NativeLevel(
            filter=at["filter"],
            filter_words=level.filter.size,
            first_row=(rows_at - table_at) // row_bytes % _NUMBERS_STEP - 2**63,
            deleted=at.get("deleted", 0),
            entries=at["entries"],
            pilots=at["pilots"],
            ids=at["ids"],
            id_step=ID_BYTES,
            buckets=level.index.buckets,
            slots=slots,
            marks=0,  # which are the CPU's
            marks_before=0,
            marked_slots=0,
            first_marked=0,
            marked=0,
        )


def level_bytes(level: Level, rows_in_host: bool = False) -> int:
    """HBM that a level takes."""
    _, starts = _parts(level)
    return starts[-1] + (0 if rows_in_host else (level.index.slots + 1) * level.packed.shape[1])


def _parts(level: Level) -> tuple[dict[str, NDArray[Any]], list[int]]:
    """What is copied to HBM beside the rows, and where each part begins, and the last one ends."""
    index = level.index
    parts: dict[str, NDArray[Any]] = {"filter": level.filter, "entries": level.entries, "pilots": index.pilots}
    parts["ids"] = np.ascontiguousarray(index.ids)
    if level.deleted is not None:
        parts["deleted"] = level.deleted
    sizes = (-(-part.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts.values())
    return parts, [0, *accumulate(sizes)]


def _rows_memory(size: int, device: torch.device, in_host: bool) -> torch.Tensor:
    if not in_host or device.type != "cuda":
        return allocate(size, device, "a delta of a table")
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise QuantError(
            f"{size:,} bytes of a delta cannot be page-locked; the machine has too little memory ({error})"
        ) from error


def _copy(target: torch.Tensor, part: NDArray[Any], in_host: bool) -> None:
    if not part.nbytes:
        return
    if in_host:
        target.copy_(array_bytes(part))
    else:
        copy_from_host(target, array_bytes(part), is_pinned=False)


class DeviceLevels:
    """The levels that a device has. Any thread may call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: WeakValueDictionary[tuple[int, int], DeviceLevel] = WeakValueDictionary()
        self._lock = threading.Lock()  # held while levels are copied, so that each is once

    def of(self, table: Table, residence: Residence, rows_in_host: bool = False) -> tuple[DeviceLevel, ...]:
        """Those of a table's overlay, the newest first; none where it has none. What is not there is copied, on the current
        stream, and is there when this returns. rows_in_host: of levels that are not there. QuantError: there is no room."""
        if table.row_map is None or table.row_map.overlay is None:
            return ()
        with self._lock:
            return tuple(self._level(level, residence.address, rows_in_host) for level in table.row_map.overlay.levels)

    def new_bytes(self, table: Table, residence: Residence, rows_in_host: bool = False) -> int:
        """HBM that `of` would take."""
        if table.row_map is None or table.row_map.overlay is None:
            return 0
        new = [v for v in table.row_map.overlay.levels if (id(v.index), residence.address) not in self._known]
        return sum(level_bytes(level, rows_in_host) for level in new)

    def _level(self, level: Level, table_at: int, rows_in_host: bool) -> DeviceLevel:
        key = id(level.index), table_at
        if (found := self._known.get(key)) is None:
            found = self._known[key] = DeviceLevel(level, table_at, self._device, rows_in_host)
        return found


def native_levels(levels: Sequence[DeviceLevel], device: torch.device) -> torch.Tensor:
    """int64 [MOST_LEVELS, fields of NativeLevel] on the device."""
    rows = np.zeros((MOST_LEVELS, len(NativeLevel._fields)), np.int64)
    rows[: len(levels)] = [level.native for level in levels]
    return torch.from_numpy(rows).to(device)
