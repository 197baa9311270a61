"""The cache of host-table rows in GPU memory: any row in any slot, keyed by (table, id).
`prefetch` brings a batch's rows to the device; the lookup reads their locations and releases the ticket. Rows
of batches in flight are never evicted. No call waits for the device: kernels count and choose there and read
missing rows from the host. Only for rows that the host fetches, from a disk, `prefetch` waits. Misses go to
the batch's staging buffer, which the lookup reads. Beside the lookup, admitted rows are copied to slots of
rows that no batch in flight uses. If the staging buffer is full, an admitted row goes straight to its slot,
and the lookup reads any other from host memory. All ways yield the same bytes. LRU evicts the rows unused for
longest. LFU evicts the rows used least, with uses halved every `half_life` tickets: a row's score is log2 of
the sum of 2 ** (t / half_life) over the tickets t that used it, so unused rows need no upkeep (LRFU, Lee et
al. 2001). LFU also admits: *ghosts*, at least one a slot, keep scores of misses, and a row is admitted only
in place of a lower score (TinyLFU, Einziger et al. 2017). So a scan passes through the staging buffer."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.fetched import FetchedRows
from tableside.quant.cache.index import Index, hottest
from tableside.quant.cache.jobs import PROBE_BLOCK, one_lookup
from tableside.quant.cache.kernels.state import UNIT_BYTES
from tableside.quant.cache.memory import CacheMemory, divide
from tableside.quant.cache.pages import Pages
from tableside.quant.cache.pipeline import Pipeline
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.cache.statistics import Snapshots, Statistics, statistics_of
from tableside.quant.cache.streams import Streams
from tableside.quant.cache.tables import TableHandle, Tables, check_table
from tableside.quant.cache.tickets import BatchesInFlight, InFlightBatch, Ticket, rounded_up
from tableside.quant.device.device import Device
from tableside.quant.device.launch import Jobs
from tableside.quant.errors import QuantError
from tableside.quant.row_format import device_row_bytes
from tableside.quant.rows.fetched import FetchedTable

_MOST_MISSED = (2**31 - 1) * UNIT_BYTES  # bytes of rows that a batch may miss
_WARM_IDS = 1 << 16  # of one batch
_SNAPSHOT_EVERY = 16  # tickets
_REBALANCE_EVERY = 256


class Cache:
    """A cache of `budget_bytes` on a device; works on `stream` and two streams of its own. Thread-safe.
    smallest_row_bytes: smallest row to come; sizes the index. QuantError: the budget holds no page."""

    def __init__(
        self,
        device: Device,
        budget_bytes: int,
        settings: CacheSettings | None = None,
        *,
        smallest_row_bytes: int = 32,
        stream: Any,
    ) -> None:
        self.device, self.settings = device, settings or CacheSettings()
        self._lock = threading.RLock()
        self._abandoned: deque[InFlightBatch] = deque()
        self._forgotten: deque[int] = deque()
        self._tickets = 0
        division = divide(budget_bytes, self.settings, smallest_row_bytes)
        self._streams = Streams(device, stream)
        with self._streams.on_main():
            self._memory = CacheMemory(device, division, self.settings)
            self._pages = Pages(self._memory.pages, smallest_row_bytes, self._memory.count_dropped)
            self._batches = BatchesInFlight(device, list(self._memory.staging))
            self._tables = Tables(device)
            self._pipeline = Pipeline(
                self._memory,
                self._pages,
                FetchedRows(device, self._memory, self._tables, self.settings.gather_threads),
                self._streams,
                self.settings,
                division.staging_bytes,
                smallest_row_bytes,
            )
        self._index = Index(self._memory, self._pages, self._tables, self._batches, self._pipeline)
        self._snapshots = Snapshots(device, self._pages)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Nobody else calls the cache meanwhile."""
        with self._lock:
            yield

    @contextmanager
    def _working(self) -> Iterator[None]:
        """As `exclusive`, and what is launched comes after the last batch, on the cache's stream."""
        with self._lock, self._streams.on_main():
            yield

    @property
    def slots(self) -> int:
        """Rows that the cache can hold, with the pages as they are divided now."""
        return self._pages.slots

    @property
    def slots_address(self) -> int:
        """The address that locations of slots count from."""
        return self._memory.arena.data_ptr()

    @property
    def bytes(self) -> int:
        """Device memory, with index, maps and counters."""
        counters = self._tables.counters
        counted = self._memory.bytes + self._tables.map_bytes + self._batches.grown_bytes
        return counted + counters.numel() * counters.element_size()

    # ---- tables ----

    def registered(self, address: int, rows: int, row_bytes: int, name: str = "") -> TableHandle:
        """As `register`; the table is forgotten when the result is let go."""
        return TableHandle(self.register(address, rows, row_bytes, name), self._forgotten.append)

    def register(self, address: int, rows: int, row_bytes: int, name: str = "") -> int:
        """Registers a table that the device reads at `address`; 0: `read_from` says who fetches its rows.
        Returns its number. Costs a quarter of a byte a row. QuantError: a row does not fit into a page, or
        there are too many row sizes."""
        check_table(rows, row_bytes)
        with self._working():
            self._clear_up()
            return self._index.register(address, rows, row_bytes, name)

    def read_from(self, number: int, source: FetchedTable) -> None:
        """Has rows that are missing fetched by the host from now on, which waits for them: in `prefetch`.
        source: the same rows, by their numbers; the caller keeps it."""
        with self._working():
            self._tables.sources[number] = source

    def forget(self, number: int) -> None:
        """Forgets a table. No planned or running lookup may use it, except batches in flight."""
        with self._working():
            self._index.forget(number)

    # ---- batches ----

    def reserve(self, ids: int) -> None:
        """Makes room for batches of so many ids, so that none has to."""
        with self._working():
            if ids > self._memory.ids:
                self._memory.fit_arrays(rounded_up(ids))
                self._index.write_root()
            self._batches.reserve(ids)

    def prefetch(self, jobs: Jobs, inputs: torch.Tensor | int, admit_all: bool = False) -> Ticket:
        """Brings the rows of a batch to the device without waiting, but for rows that the host fetches
        (`read_from`); those that do not come are zeros, and in the ticket's `unread`. admit_all: admit every
        row (LRU always does). jobs: `placed` on the device. inputs: uint8 on the device, 8-aligned, or the
        base address of the jobs' offsets; all written on the cache's stream, or before. QuantError: too many
        tickets are out."""
        inputs_at = inputs if isinstance(inputs, int) else inputs.data_ptr()
        with self._working():
            self._check_size(jobs.ids)
            self._clear_up()
            self._index.settle()
            if (self._tickets + 1) % _REBALANCE_EVERY == 0 and len(self._pages.classes) > 1:
                self._snapshots.keep()
                self._index.rebalance(self._snapshots.class_states())
            if jobs.ids > self._memory.ids:
                self.reserve(jobs.ids)
            batch = self._batches.taken(jobs.ids, self._memory.arena, self._streams.main)
            self._tickets += 1
            self._batches.count += 1
            try:
                self._pipeline.launch(jobs, inputs_at, batch, admit_all)
            except BaseException:
                self._streams.join_all()
                self._index.empty()
                self._release(batch)
                raise
            ticket = Ticket(batch, self._release, self._abandoned.append)
            if self._tickets % _SNAPSHOT_EVERY == 0:
                self._snapshots.begin(self._memory.state, self._tables.counters, self._tables.names())
            return ticket

    def _check_size(self, ids: int) -> None:
        """QuantError: a batch of so many ids may miss more bytes than are counted."""
        if min(ids * self._pages.widest, self._tables.host_bytes) > _MOST_MISSED:
            raise QuantError(
                f"a batch of {ids:,} ids of rows of up to {self._pages.widest} bytes may miss more than "
                f"{_MOST_MISSED:,} bytes "
                "at once; split it"
            )

    def _release(self, batch: InFlightBatch, stream: Any = None) -> None:
        """Lets others use the batch's memory. stream: the current one."""
        if stream is None:
            stream = self.device.current_stream()
        self._pipeline.release(batch, stream)
        batch.released.record(stream)
        with self._lock:
            self._batches.count -= 1
            self._batches.free.append(batch)

    def _clear_up(self) -> None:
        """Does what was left to do by whoever let go of a ticket or a table."""
        while self._abandoned:
            self._release(self._abandoned.popleft())
        while self._forgotten:
            self.forget(self._forgotten.popleft())

    # ---- order between streams ----

    def follow_current_stream(self, current: Any = None) -> None:
        """Makes the cache's next work wait for the current stream, which may be given."""
        self._streams.main.wait_stream(self.device.current_stream() if current is None else current)

    def join_all(self) -> None:
        """Has the cache's stream wait for its other two, where a launch broke off."""
        self._streams.join_all()

    # ---- what it holds ----

    def statistics(self, wait: bool = False) -> Statistics:
        """Counts as of some tickets ago, without waiting. wait: as of now; waits for the device."""
        if not self._lock.acquire(blocking=wait):
            return self._snapshots.last or Statistics.empty(self.slots)
        try:
            with self._streams.on_main():
                if wait:
                    return self._counted()
                self._snapshots.keep()
                return self._snapshots.last or Statistics.empty(self.slots)
        finally:
            self._lock.release()

    def _counted(self) -> Statistics:
        state, counters = self._memory.state.cpu(), self._tables.counters.cpu()
        return statistics_of(state, counters, self._tables.names(), self._pages)

    def hot(self, number: int) -> NDArray[np.int64]:
        """Returns the cached ids of a table, the hottest first. Waits for the device."""
        with self._working():
            parts, latest = self._index.parts(number), self._index.latest_use(self.settings.use_rate)
        found = []
        for part in parts:
            with self._working():
                found.append(self._index.hot_part(number, part, latest))
        return hottest(found)

    def warm(self, number: int, ids: NDArray[np.int64]) -> None:
        """Admits rows of a table, whatever their scores, for lookups to come. Waits as `prefetch`."""
        for first in range(0, ids.size, _WARM_IDS):
            part = ids[first : first + _WARM_IDS]
            written, jobs = one_lookup(number, part.size, self.device.block(PROBE_BLOCK))
            sent = bytearray(part.tobytes() + written)
            with self._working():
                memory = torch.empty(len(sent), dtype=torch.uint8, device=self.device.torch_device)
                memory.copy_(torch.frombuffer(sent, dtype=torch.uint8))
                self.prefetch(jobs.placed(memory.data_ptr() + part.nbytes), memory, admit_all=True).release()

    def hand_over(
        self, number: int, successor: int, rows: NDArray[np.int64], successors: NDArray[np.int64]
    ) -> None:
        """Moves cached rows of a table to its successor, which has the same bytes; nothing is fetched, use
        counts stay. Ignores rows that are not cached. Waits for the device. rows, successors: int64 [n], row
        numbers of each table, distinct. QuantError: the row sizes differ."""
        with self._working():
            sizes = [device_row_bytes(self._tables[n].row_bytes) for n in (number, successor)]
            if sizes[0] != sizes[1]:
                raise QuantError(
                    f"rows of {sizes[0]} bytes cannot become rows of {sizes[1]} bytes; fetch them with `warm`"
                )
            if rows.size:
                self._index.hand_over(number, successor, np.stack([rows, successors], 1)[rows.argsort()])
