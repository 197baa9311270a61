"""Missing rows of tables that the device does not read (`quant.rows.fetched`). The host waits until the
misses of a batch are known, and then for their rows. In the staging buffer they lie behind the rows that the
device reads itself, table after table."""

import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.kernels.state import ID_BITS, UNIT_BYTES, BatchArray, BatchState
from tableside.quant.cache.memory import CacheMemory
from tableside.quant.cache.tables import Tables
from tableside.quant.cache.tickets import InFlightBatch, rounded_up
from tableside.quant.cpu.index_builder import place_rows
from tableside.quant.device.device import Device
from tableside.quant.row_format import device_row_bytes
from tableside.quant.rows.fetched import FetchedTable, RowState
from tableside.quant.rows.overlay import Overlay

_COUNT_BITS = 32  # of `BatchState.MISSES`


class _Missing:
    """Missing rows [n] of one table. keys: of them, ascending, at `places` of the batch's. own: where those
    are that lie in no hot segment."""

    def __init__(self, table: int, source: FetchedTable, keys: NDArray[np.int64], places: slice) -> None:
        self.table, self.source, self.places = table, source, places
        self.rows = self._ids = keys[places] & ((1 << ID_BITS) - 1)
        self.slot_bytes = device_row_bytes(source.row_bytes)
        self.bytes = self.rows.size * self.slot_bytes
        self._own: slice | NDArray[np.int64] = slice(None)
        self._hot: Overlay | None = None
        if (row_map := source.row_map) is not None:
            self._ids = self.rows + np.int64(row_map.first)
            if (hot := row_map.overlay) is not None:
                self._hot, self._numbers = hot, place_rows(row_map, self._ids)[0]
                self._own = np.flatnonzero(self._numbers == self.rows)

    def ask(self) -> None:
        """Has the rows brought, without a wait."""
        if (ask := self.source.reader.ask) is not None:
            ask(self.rows[self._own])

    def fetch(self, out: NDArray[np.uint8], deadline: float | None) -> NDArray[np.uint8]:
        """Copies the rows to out [n, slot_bytes]; returns what came of each, `RowState` [n]."""
        reader, row_bytes = self.source.reader, self.source.row_bytes
        if reader.note is not None:
            reader.note(self._ids)
        rows, state = self.rows[self._own], np.zeros(self.rows.size, np.uint8)
        came = np.zeros(rows.size, np.uint8)
        is_direct = self._hot is None and row_bytes == self.slot_bytes
        packed = out if is_direct else np.empty((rows.size, row_bytes), np.uint8)
        if rows.size:
            reader.fetch(rows, packed, came, deadline)
            state[self._own] = came
        if not is_direct:
            out[self._own, :row_bytes] = packed
            out[:, row_bytes:] = 0
        if self._hot is not None:
            self._hot.rows(self._numbers, out[:, :row_bytes])
        return state


class FetchedRows:
    """Fetches missing rows for the batches of a cache. The caller holds the cache's lock on the main
    stream."""

    def __init__(self, device: Device, memory: CacheMemory, tables: Tables) -> None:
        self._device, self._memory, self._tables = device, memory, tables
        self._host = device.pinned(0)

    @property
    def are_there(self) -> bool:
        """Whether rows of a table are fetched."""
        return bool(self._tables.sources)

    def bring(self, batch: InFlightBatch, side: Any) -> int:
        """Fetches what the batch misses, and writes rows and locations on the side stream, where the buffer
        becomes larger if it must. Returns the location of the rows that did not come; 0: all came. Waits for
        the device, and for the rows until the earliest deadline of their tables."""
        misses = int(self._memory.state[BatchState.MISSES])
        count, units = misses & ((1 << _COUNT_BITS) - 1), misses >> _COUNT_BITS
        keys, ranks = self._memory.array(BatchArray.MISSES)[:count].sort()
        missing = list(self._missing(keys.cpu().numpy()))
        if not missing:
            return 0
        ends = list(accumulate(one.bytes for one in missing))
        size = ends[-1] + max(one.slot_bytes for one in missing)  # the last are zeros, for what does not come
        listed = torch.cat([ranks[one.places] for one in missing])
        host = self._room(size + 4 * listed.numel())
        rows, locations = host[:size], host[size:].view(torch.int32)
        is_here = self._fetch(batch, missing, ends, rows.numpy()) == RowState.HERE
        first = min(units, batch.staging.numel() // UNIT_BYTES)
        steps = [np.full(one.rows.size, one.slot_bytes // UNIT_BYTES) for one in missing]
        at = -2 - first - np.append(0, np.concatenate(steps).cumsum())
        locations.numpy()[:] = np.where(is_here, at[:-1], at[-1])
        with self._device.on(side):
            batch.fit_staging(first * UNIT_BYTES + size)
            batch.staging[first * UNIT_BYTES :][:size].copy_(rows, non_blocking=True)
            sent = locations.to(listed.device, non_blocking=True)
            self._memory.array(BatchArray.LOCATIONS).index_copy_(0, listed, sent)
        return 0 if is_here.all() else int(at[-1])

    def _missing(self, keys: NDArray[np.int64]) -> Iterator[_Missing]:
        """keys: of the batch's misses, ascending."""
        for table, source in sorted(self._tables.sources.items()):
            first, end = keys.searchsorted((table << ID_BITS, (table + 1) << ID_BITS)).tolist()
            if first < end:
                yield _Missing(table, source, keys, slice(first, end))

    def _fetch(
        self, batch: InFlightBatch, missing: list[_Missing], ends: list[int], out: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Returns what came of all rows, and tells the batch of those that did not come."""
        limits = [s for one in missing if (s := one.source.reader.wait_s) is not None]
        deadline = time.monotonic() + min(limits) if limits else None
        for one in missing if len(missing) > 1 else ():  # so that no table waits for those before it
            one.ask()
        out[ends[-1] :] = 0
        states = []
        for one, end in zip(missing, ends, strict=True):
            states.append(one.fetch(out[end - one.bytes : end].reshape(-1, one.slot_bytes), deadline))
            if states[-1].any():
                lacks = states[-1] != RowState.HERE
                batch.unread[one.table] = one.rows[lacks], states[-1][lacks]
        return np.concatenate(states)

    def _room(self, size: int) -> torch.Tensor:
        if self._host.numel() < size:
            self._host = self._device.pinned(rounded_up(size))
        return self._host[:size]
