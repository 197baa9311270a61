"""Missing rows of tables that the device does not read (`quant.rows.fetched`). The host waits until the
misses of a batch are known, and then for their rows. In the staging buffer they lie behind the rows that the
device reads itself, table after table."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.kernels.state import ID_BITS, UNIT_BYTES, BatchArray, BatchState
from tableside.quant.cache.memory import CacheMemory
from tableside.quant.cache.streams import Streams
from tableside.quant.cache.tables import Tables
from tableside.quant.cache.tickets import InFlightBatch, Unread, rounded_up
from tableside.quant.cpu.index_builder import place_rows
from tableside.quant.device.device import Device
from tableside.quant.row_format import device_row_bytes
from tableside.quant.rows.fetched import FetchedTable, RowState
from tableside.quant.rows.ids import RowMap

_COUNT_BITS = 32  # of `BatchState.MISSES`
_PART_ROWS = 1024  # that are worth a thread


class _Missing:
    """Missing rows [n] of one table. keys: of them, ascending, at `places` of the batch's. out: uint8 [n,
    slot_bytes], where `fetch` copies them."""

    out: NDArray[np.uint8]

    def __init__(self, table: int, source: FetchedTable, keys: NDArray[np.int64], places: slice) -> None:
        self.table, self.source, self.places = table, source, places
        self.rows = keys[places] & ((1 << ID_BITS) - 1)
        self.slot_bytes = device_row_bytes(source.row_bytes)
        self.bytes = self.rows.size * self.slot_bytes

    @cached_property
    def _ids(self) -> NDArray[np.int64]:
        return self.rows if self.source.row_map is None else self.rows + np.int64(self.source.row_map.first)

    @cached_property
    def _hot(self) -> tuple[RowMap, NDArray[np.int64]] | None:
        """The map to the hot segment, and the number that each row has with it."""
        row_map = self.source.row_map
        if row_map is None or row_map.hot is None:
            return None
        return row_map, place_rows(row_map, self._ids)[0]

    @cached_property
    def _own(self) -> NDArray[np.int64] | slice:
        """Where those are that lie in no hot segment."""
        return slice(None) if self._hot is None else np.flatnonzero(self._hot[1] == self.rows)

    def ask(self) -> None:
        """Has the rows brought, without a wait."""
        if (ask := self.source.reader.ask) is not None:
            ask(self.rows[self._own])

    def fetch(self, deadline: float | None) -> NDArray[np.uint8]:
        """Copies the rows; returns what came of each, `RowState` [n]."""
        reader, row_bytes, own, out = self.source.reader, self.source.row_bytes, self._own, self.out
        if reader.note is not None:
            reader.note(self._ids)
        rows, state = self.rows[own], np.zeros(self.rows.size, np.uint8)
        came = np.zeros(rows.size, np.uint8)
        is_direct = self._hot is None and row_bytes == self.slot_bytes
        packed = out if is_direct else np.empty((rows.size, row_bytes), np.uint8)
        if rows.size:
            reader.fetch(rows, packed, came, deadline)
            state[own] = came
        if not is_direct:
            out[own, :row_bytes] = packed
            out[:, row_bytes:] = 0
        if self._hot is not None:
            self._hot[0].copy_elsewhere(self._hot[1], out[:, :row_bytes])
        return state


class FetchedRows:
    """Fetches missing rows for the batches of a cache. threads: that fetch parts of a batch. The caller holds
    the cache's lock on the main stream."""

    def __init__(self, device: Device, memory: CacheMemory, tables: Tables, threads: int) -> None:
        self._device, self._memory, self._tables = device, memory, tables
        self._most, self._host = max(1, threads), device.pinned(0)
        self._threads = ThreadPoolExecutor(self._most, "tableside-fetch")

    @property
    def are_there(self) -> bool:
        """Whether rows of a table are fetched."""
        return bool(self._tables.fetched)

    @property
    def are_all(self) -> bool:
        """Whether rows of all tables are fetched."""
        return len(self._tables.fetched) == len(self._tables)

    def bring(self, batch: InFlightBatch, streams: Streams) -> None:
        """Fetches what the batch misses, and writes rows and locations on the side stream, where the buffer
        becomes larger if it must. Waits for the device, and for the rows until the earliest deadline of their
        tables."""
        misses = int(self._memory.state[BatchState.MISSES])
        count, units = misses & ((1 << _COUNT_BITS) - 1), misses >> _COUNT_BITS
        keys, ranks = self._memory.array(BatchArray.MISSES)[:count].sort()
        missing = list(self._missing(keys.cpu().numpy()))
        if not missing:
            return
        ends = list(accumulate(one.bytes for one in missing))
        size = ends[-1] + max(one.slot_bytes for one in missing)  # the last are zeros, for what does not come
        listed = torch.cat([ranks[one.places] for one in missing])
        host = self._room(size + 4 * listed.numel())
        rows, locations = host[:size], host[size:].view(torch.int32)
        rows.numpy()[ends[-1] :] = 0
        for one, end in zip(missing, ends, strict=True):
            one.out = rows.numpy()[end - one.bytes : end].reshape(-1, one.slot_bytes)
        state = self._fetch(missing)
        is_here = state == RowState.HERE
        first = min(units, batch.device_bytes // UNIT_BYTES)
        steps = [np.full(one.rows.size, one.slot_bytes // UNIT_BYTES) for one in missing]
        at = -2 - first - np.append(0, np.concatenate(steps).cumsum())
        locations.numpy()[:] = np.where(is_here, at[:-1], at[-1])
        streams.side.wait_stream(streams.main)  # which makes `listed`
        with self._device.on(streams.side):
            batch.fit_staging(first * UNIT_BYTES + size)
            batch.staging[first * UNIT_BYTES :][:size].copy_(rows, non_blocking=True)
            sent = locations.to(listed.device, non_blocking=True)
            self._memory.array(BatchArray.LOCATIONS).index_copy_(0, listed, sent)
            if not is_here.all():
                self._memory.state[BatchState.UNREAD] = int(at[-1])
                batch.unread = _unread(missing, state)

    def _missing(self, keys: NDArray[np.int64]) -> Iterator[_Missing]:
        """Yields the rows of each table, in parts for all threads. keys: of the batch's misses, ascending."""
        for table in sorted(self._tables.fetched):
            first, end = keys.searchsorted((table << ID_BITS, (table + 1) << ID_BITS)).tolist()
            parts = min(self._most, -(-(end - first) // _PART_ROWS))
            cuts = [first + (end - first) * n // parts for n in range(parts)]
            for start, stop in pairwise([*cuts, end]):
                yield _Missing(table, self._tables.sources[table], keys, slice(start, stop))

    def _fetch(self, missing: list[_Missing]) -> NDArray[np.uint8]:
        """Returns what came of all rows."""
        limits = [s for one in missing if (s := one.source.reader.wait_s) is not None]
        deadline = time.monotonic() + min(limits) if limits else None
        if self._most > 1 and len(missing) > 1:
            parts = [self._threads.submit(one.fetch, deadline) for one in missing]
            wait(parts)  # those behind one that fails write to the memory of the next batch
            return np.concatenate([part.result() for part in parts])
        for one in missing if len(missing) > 1 else ():  # so that no table waits for those before it
            one.ask()
        return np.concatenate([one.fetch(deadline) for one in missing])

    def _room(self, size: int) -> torch.Tensor:
        if self._host.numel() < size:
            self._host = self._device.pinned(rounded_up(size))
        return self._host[:size]


def _unread(missing: list[_Missing], state: NDArray[np.uint8]) -> Unread:
    """state: of all rows."""
    tables = np.repeat([one.table for one in missing], [one.rows.size for one in missing])
    rows, lacks = np.concatenate([one.rows for one in missing]), state != RowState.HERE
    found = {table: lacks & (tables == table) for table in np.unique(tables[lacks]).tolist()}
    return {table: (rows[its], state[its]) for table, its in found.items()}
