"""The cache: rows of host tables in the GPU's memory, any row in any slot, keyed by (table, id).

`prefetch` brings the rows of a batch to the device and says where each lies; the lookup of the batch then reads those places,
and the ticket is released. Several tickets may be out at once: what they use is not evicted. No call waits for the device,
whether ids hit or miss: the kernels (`quant.cache.kernels`) count and choose on the device, and read missing rows from the host.

A row that is missing goes to the ticket's *pad*, where the lookup finds it, while it is decided which of them are taken in: those
are copied to slots, in place of the coldest rows that no ticket uses, beside the lookup. Where the pad is full they go to their
slots at once, and what gets none is read in place by the lookup. Each way yields the same bytes.

Policies: LRU evicts what was not used for longest. LFU what was used least, where a use counts half as much after `half_life`
tickets: a row's score is log2 of the sum of 2 ** (t / half_life) over the tickets t that used it, so that rows which are not used
need no upkeep (LRFU, Lee et al. 2001). LFU also admits: misses have scores too, as far as *ghosts*, one for each slot, remember
them, and a row is taken in only where a colder one goes (as TinyLFU, Einziger et al. 2017). So a scan passes through the pad.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache import kernels as k
from tableside.quant.cache.check import check
from tableside.quant.cache.jobs import MARKS, TURN, UNLINK, CacheJobs, Kernels, cache_jobs, cached_bytes
from tableside.quant.cache.kernels import ClassField, ClassState, Counter, Root, State, TableField, TicketField, occupied_at
from tableside.quant.cache.pages import Pages, page_bytes, slots_of_page
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.cache.statistics import Statistics, statistics_of
from tableside.quant.device.gather import HostGather
from tableside.quant.errors import QuantError
from tableside.quant.gpu.layout import CacheJob

_PARTS = 7  # of 4 bytes an id
_FEW = 528  # programs of kernels that have little to do where little is missing; starting many takes long
_MOST_GATHERED = 1 << 19  # rows of a batch that the CPU gathers, and their bytes
_MOST_STAGED = 64 << 20
_COPY_UNIT = 1 << 16
_MOST_LACKED = (2**31 - 1) * k.PAD_UNIT  # bytes of rows that a batch may lack
_WARM_IDS = 1 << 16
_SNAPSHOT_EVERY = 16  # tickets
_REBALANCE_EVERY = 256
_REBALANCE_FROM = 1.25  # coldness of victims, one class's to another's


@dataclass
class _Cached:
    """A table: its size, its class, and maps of what a batch lacks."""

    name: str
    address: int
    rows: int
    row_class: int
    bits: torch.Tensor
    first_ranks: torch.Tensor
    marks: torch.Tensor


def map_bytes(rows: int) -> int:
    """What a table of so many rows takes of the device beside a cache's budget: a quarter of a byte a row."""
    return -(-rows // k.ROWS_PER_MARK) * 4 * (2 * k.WORDS + 1)


class Ticket:
    """A batch whose rows are on their way to the device.

    locations int32 [ids]: >= 0: a slot, at this multiple of its row's bytes from `slots`; -1: the table itself; else 16 * (-2 -
    location) bytes from `pad`.
    """

    def __init__(self, cache: "Cache", berth: "_Berth") -> None:
        self._cache, self._berth = cache, berth
        self.captured: _Berth | None = berth if _is_capturing() else None
        self.locations = berth.locations
        self.pad = berth.pad

    def wait(self) -> None:
        """What comes next on the current stream finds the rows there."""
        _wait(self._berth.ready)

    def release(self) -> None:
        """Lets its rows be evicted once what is on the current stream so far is done. Again: nothing."""
        berth, self._berth = self._berth, None  # type: ignore[assignment]
        if berth is not None:
            self._cache._release(berth, self.captured is None)

    def __del__(self) -> None:
        if getattr(self, "_berth", None) is not None and self.captured is None:
            self._cache._abandoned.append(self._berth)


class Registered:
    """A table's place in a cache, given up with the last reference."""

    def __init__(self, cache: "Cache", number: int) -> None:
        self.number = number
        weakref.finalize(self, cache._forgotten.append, number)  # whoever drops it may hold any lock


class _Berth:
    """What a ticket takes of the device, used by one after another."""

    def __init__(self, device: torch.device, number: int, pad: int, pad_units: int) -> None:
        self.record = torch.tensor([0, pad, pad_units, number], dtype=torch.int64, device=device)
        self.pad, self.pad_bytes = pad, pad_units * k.PAD_UNIT
        self.locations = torch.empty(0, dtype=torch.int32, device=device)
        is_cuda = device.type == "cuda"
        self.ready = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self.released = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        assert len(TicketField) == 4


class Cache:
    """A cache of `budget_bytes` on a device; what runs on it runs on one stream at a time, `stream`.

    smallest_row_bytes: of the rows to come; the index is laid out for it. QuantError: the budget holds no page.
    """

    def __init__(
        self,
        device: torch.device,
        budget_bytes: int,
        settings: CacheSettings | None = None,
        *,
        smallest_row_bytes: int = 32,
        stream: Any = None,
        is_interpreted: bool = False,
    ) -> None:
        self.settings = settings or CacheSettings()
        self.device, self._stream, self._is_interpreted = device, stream, is_interpreted
        self._aside, self._copies = (
            None if stream is None else torch.cuda.Stream(device, stream.priority)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        self._placed: Any = None if stream is None else torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()
        self._abandoned: deque[_Berth] = deque()
        self._forgotten: deque[int] = deque()
        self._tables: dict[int, _Cached] = {}
        self._out = 0
        self._ids = 0
        self.generation = 0
        self.tickets = 0
        page = self.settings.page_bytes or page_bytes(budget_bytes)
        pad_bytes = min(self.settings.pad_bytes, int(budget_bytes * self.settings.pad_fraction / self.settings.pads)) // 16 * 16
        slots = slots_of_page(page, smallest_row_bytes)
        # Buckets are 4 bytes, ghosts 8, each at most twice as many as slots.
        index_bytes = slots * (24 if self.settings.policy.is_lfu else 8)
        pages = (budget_bytes - pad_bytes * self.settings.pads) // (page + index_bytes)
        if pages < 1 or slots < 1:
            raise QuantError(
                f"a cache of {budget_bytes:,} bytes holds no page of {page:,} bytes beside {self.settings.pads} pads of "
                f"{pad_bytes:,}; raise the budget (--hbm-budget)"
            )
        with self._on_stream():
            size = pages * page + pad_bytes * self.settings.pads
            self._arena = torch.empty(size + 16, dtype=torch.uint8, device=device)
            skipped = -self._arena.data_ptr() % 16
            self._arena = self._arena[skipped : skipped + size]
            self._pages = Pages(self._arena[: pages * page].view(pages, page), smallest_row_bytes, self._note_dropped)
            self._page_table = self._filled(-1, 2 * pages)
            self._state = self._zeros(len(State) + k.CLASSES * len(ClassState))
            self._berths_out = self._zeros(k.BERTHS)
            self._root = self._zeros(len(Root))
        first_pad = self._arena.data_ptr() + pages * page
        pad_units = pad_bytes // k.PAD_UNIT
        self._gather: HostGather | None = None
        self._pad_bytes = pad_bytes
        with self._on_stream():
            self._berths = [_Berth(device, n, first_pad + n * pad_bytes, pad_units) for n in range(self.settings.pads)]
            self._kernels = self._kernels_for(smallest_row_bytes)
        self._free_berths = deque(self._berths)
        self._heads = self._ghosts = self._scratch = self._page_table[:0]
        self._tables_on_device = self._classes_on_device = self._counters = self._state[:0]
        self._marks = self._page_table[:0]
        self._page_lists: list[torch.Tensor] = []
        self._snapshot_event: Any = None
        self._snapshot: tuple[torch.Tensor, torch.Tensor, dict[int, tuple[str, int]]] | None = None
        self._last_state: torch.Tensor | None = None
        self._statistics: Statistics | None = None

    # ---- tables ----

    @property
    def slots(self) -> int:
        """Rows that the cache can hold, with the pages as they are divided now."""
        return self._pages.slots

    @property
    def _host_bytes(self) -> int:
        """Of the rows of all tables."""
        return sum(t.rows * self._pages.classes[t.row_class].row_bytes for t in self._tables.values())

    @property
    def slots_at(self) -> int:
        """The address that locations of slots count from."""
        return self._arena.data_ptr()

    @property
    def bytes(self) -> int:
        """Of the device's memory, with index and maps."""
        parts = [self._arena, self._heads, self._ghosts, self._scratch, self._state, self._page_table, self._counters]
        for t in self._tables.values():
            parts += [t.bits, t.first_ranks, t.marks]
        return sum(p.numel() * p.element_size() for p in parts)

    def registered(self, address: int, rows: int, row_bytes: int, name: str = "") -> Registered:
        """As `register`; the table is forgotten when the result is let go."""
        return Registered(self, self.register(address, rows, row_bytes, name))

    def register(self, address: int, rows: int, row_bytes: int, name: str = "") -> int:
        """Takes a table whose rows the device reads at `address`; returns its number. It takes a quarter of a byte a row.

        QuantError: a row does not fit into a page, or there are too many sizes of rows.
        """
        if not 0 < rows <= 1 << k.ID_BITS or row_bytes % 16 or row_bytes <= 0:
            raise QuantError(
                f"a table of {rows:,} rows of {row_bytes} bytes cannot be cached; expected 1 to {1 << k.ID_BITS:,} rows of a "
                "multiple of 16 bytes"
            )
        with self._lock, self._on_stream():
            self._clear_up()
            row_class = self._class_of(row_bytes)
            number = next(n for n in range(len(self._tables) + 1) if n not in self._tables)
            marks = -(-rows // k.ROWS_PER_MARK)
            words = marks * k.WORDS
            self._tables[number] = _Cached(
                name, address, rows, row_class, self._filled(0, words), self._filled(0, words), self._filled(0, marks)
            )
            if (row := number + 1) * len(Counter) > self._counters.numel():
                grown = self._zeros(max(64, 2 * row) * len(Counter))
                grown[: self._counters.numel()] = self._counters
                self._counters = grown
            self._counters[number * len(Counter) : row * len(Counter)] = 0
            try:
                self._assign()
            except BaseException:
                del self._tables[number]
                self._relink()
                raise
            self._describe()
            return number

    def forget(self, number: int) -> None:
        """Lets go of a table; no lookup of it may be planned or under way but those whose tickets are out."""
        with self._lock, self._on_stream():
            k.forget[(self._pages.count,)](self._root.data_ptr(), number, BLOCK=TURN * 4)
            self._relink()
            del self._tables[number]
            self._describe()

    def _class_of(self, row_bytes: int) -> int:
        known = len(self._pages.classes)
        number = self._pages.class_of(row_bytes)
        if number == known:
            self._kernels = self._kernels_for(self._pages.widest)
        return number

    def _note_dropped(self, number: int, rows: torch.Tensor) -> None:
        self._state[occupied_at(number)] -= rows
        self._state[State.FREED] += rows

    def _kernels_for(self, widest_row_bytes: int) -> Kernels:
        """Kernels for rows up to this size."""
        threads = self.settings.gather_threads
        if threads and self._gather is None:
            self._gather = HostGather(_MOST_GATHERED, min(self._pad_bytes, _MOST_STAGED), threads, self.device.type == "cuda")
        return Kernels(self.settings.policy.is_lfu, threads > 0, widest_row_bytes, self._is_interpreted)

    def _assign(self) -> None:
        """Gives every class its pages."""
        rows = [0] * len(self._pages.classes)
        for t in self._tables.values():
            rows[t.row_class] += t.rows
        if self._pages.assign(rows):
            self._relink()
            self._settle()

    def _settle(self) -> None:
        """Gives pages that were taken to their new class, where no ticket is out that may read them."""
        if self._pages.moving and self._out == 0:
            for berth in self._berths:
                _wait(berth.released)
            self._pages.settle()
            self._describe()

    def _relink(self) -> None:
        """Builds all chains anew, for as many buckets as there are slots."""
        self._describe()
        buckets = 1 << max(1, (self.slots - 1).bit_length())
        if self._heads.numel() < buckets:
            self._heads = self._filled(-1, buckets)
            self._ghosts = self._filled(-(2**30), 2 * buckets if self.settings.policy.is_lfu else 2)
            self._describe()
        self._heads.fill_(-1)
        k.link_all[(self._pages.count,)](self._root.data_ptr(), BLOCK=TURN * 4)

    def _describe(self) -> None:
        """Writes what the kernels read of tables and classes. Launches that were captured before no longer fit."""
        self.generation += 1
        count = max(self._tables, default=-1) + 1
        tables = np.zeros((max(1, count), len(TableField)), np.int64)
        marks = []
        for number, t in self._tables.items():
            row = tables[number]
            row[TableField.ADDRESS], row[TableField.ROWS] = t.address, t.rows
            row[TableField.ROW_BYTES], row[TableField.CLASS] = self._pages.classes[t.row_class].row_bytes, t.row_class
            row[TableField.BITS], row[TableField.FIRST_RANKS] = t.bits.data_ptr(), t.first_ranks.data_ptr()
            row[TableField.MARK_AT] = t.marks.data_ptr()
            firsts = np.arange(0, t.marks.numel(), MARKS, dtype=np.int32)
            marks.append(np.stack([np.full_like(firsts, number), firsts], 1))
        classes = np.zeros((k.CLASSES, len(ClassField)), np.int64)
        of_page, lists = self._pages.device_arrays()
        self._page_lists = [self._sent(pages) for pages in lists]
        for n, (c, pages) in enumerate(zip(self._pages.classes, self._page_lists, strict=True)):
            classes[n] = (c.row_bytes, c.slots, pages.data_ptr(), len(c.pages))
        self._tables_on_device, self._classes_on_device = self._sent(tables.reshape(-1)), self._sent(classes.reshape(-1))
        self._marks = self._sent(np.concatenate(marks).reshape(-1) if marks else np.zeros(0, np.int32))
        self._page_table.copy_(torch.from_numpy(of_page))
        self._write_root()

    def _write_root(self) -> None:
        ids = self._scratch.numel() // _PARTS
        part = [self._scratch.data_ptr() + 4 * ids * n for n in range(_PARTS)]
        root = dict.fromkeys(Root, 0)
        root |= {
            Root.ARENA: self._arena.data_ptr(),
            Root.PAGE_BYTES: self._pages.page_bytes,
            Root.PAGES: self._page_table.data_ptr(),
            Root.PAGE_COUNT: self._pages.count,
            Root.NODE_BITS: self._pages.node_bits,
            Root.HEADS: self._heads.data_ptr(),
            Root.BUCKET_MASK: self._heads.numel() - 1,
            Root.TABLES: self._tables_on_device.data_ptr(),
            Root.CLASSES_AT: self._classes_on_device.data_ptr(),
            Root.STATE: self._state.data_ptr(),
            Root.COUNTERS: self._counters.data_ptr(),
            Root.OUT: self._berths_out.data_ptr(),
            Root.GHOSTS: self._ghosts.data_ptr(),
            Root.GHOST_MASK: self._ghosts.numel() // 2 - 1,
            Root.RATE: max(1, k.SCORE_UNIT // self.settings.half_life),
            Root.MARKS: self._marks.data_ptr(),
            Root.MISSING: part[0],  # int64: two parts
            Root.SCORES: part[2],
            Root.RANKS: part[3],
            Root.PLACES: part[4],
            Root.VICTIMS: part[5],
            Root.VICTIM_BUCKETS: part[6],
            Root.MOST_SLOTS: self._pages.most_slots,
            Root.WIDEST_UNITS: self._pages.widest // k.PAD_UNIT,
        }
        if self._gather is not None:
            root |= {
                Root.LIST: self._gather.list.data_ptr(),
                Root.LEAST_GATHERED: self.settings.gather_from,
                Root.MOST_GATHERED: self._gather.rows,
                Root.STAGING: self._gather.staging.data_ptr(),
                Root.STAGING_UNITS: self._gather.staging.numel() // k.PAD_UNIT,
            }
        self._root.copy_(torch.tensor([root[f] for f in Root], dtype=torch.int64))

    # ---- batches ----

    def reserve(self, ids: int) -> None:
        """Makes room for batches of so many ids, so that none has to."""
        with self._lock, self._on_stream():
            if ids > self._ids:
                self._ids = 1 << max(6, (ids - 1).bit_length())
                self._scratch = self._filled(-1, _PARTS * self._ids)
                self._write_root()
            for berth in self._free_berths:  # what others use they keep
                _wait(berth.released)
                self._fit(berth, ids)

    def _fit(self, berth: _Berth, ids: int) -> None:
        if berth.locations.numel() < ids:
            berth.locations = torch.empty(1 << max(6, (ids - 1).bit_length()), dtype=torch.int32, device=self.device)

    def prefetch(self, jobs: CacheJobs, inputs: torch.Tensor, takes_all: bool = False) -> Ticket:
        """Brings the rows of a batch to the device; nothing is waited for. takes_all: admits every row (LRU always does).

        inputs: uint8, on the device, 8-aligned; like the jobs written on the cache's stream, or before. QuantError: too many
        tickets are out.
        """
        with self._lock, self._on_stream():
            if _is_capturing():
                return self._capture(jobs, inputs, takes_all)
            if min(jobs.ids * self._pages.widest, self._host_bytes) > _MOST_LACKED:
                raise QuantError(
                    f"a batch of {jobs.ids:,} ids of rows of up to {self._pages.widest} bytes may lack more than "
                    f"{_MOST_LACKED:,} bytes at once; split it"
                )
            self._clear_up()
            self._settle()
            if (self.tickets + 1) % _REBALANCE_EVERY == 0 and len(self._pages.classes) > 1:
                self._rebalance()
            if jobs.ids > self._ids:
                self.reserve(jobs.ids)
            berth = self._berth(jobs.ids)
            self.tickets += 1
            self._out += 1
            try:
                self._launch(jobs, inputs.data_ptr(), berth, takes_all)
            except BaseException:
                self._empty()
                self._release(berth)
                raise
            ticket = Ticket(self, berth)
            if self.tickets % _SNAPSHOT_EVERY == 0:
                self._begin_snapshot()
            return ticket

    def _empty(self) -> None:
        """Drops every row, and what a batch left behind that was launched in part."""
        self.join_all()
        for table in self._tables.values():
            table.bits.zero_()
            table.marks.zero_()
        self._scratch.fill_(-1)
        self._pages.empty()
        for n in range(len(self._pages.classes)):  # what was counted, and broken off before it had its key
            self._note_dropped(n, self._state[occupied_at(n)].clone())
        self._relink()

    def follow_itself(self) -> None:
        """What comes next on the current stream comes after the last ticket's work, what runs aside included."""
        _wait(self._placed)

    def follow_current_stream(self) -> None:
        """What the cache does next comes after what is on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _clear_up(self) -> None:
        """Does what was left to do by whoever let go of a ticket or a table."""
        while self._abandoned:
            self._release(self._abandoned.popleft())
        while self._forgotten:
            self.forget(self._forgotten.popleft())

    def _capture(self, jobs: CacheJobs, inputs: torch.Tensor, takes_all: bool) -> Ticket:
        """A prefetch that a graph will replay, with a berth of its own. Room for its ids must have been reserved."""
        assert jobs.ids <= self._ids and self._free_berths, "reserve, and leave a berth, before a graph is captured"
        berth = self._take_berth()
        assert berth.locations.numel() >= jobs.ids
        self._launch(jobs, inputs.data_ptr(), berth, takes_all)
        return Ticket(self, berth)

    def give_back(self, ticket: Ticket) -> None:
        """Gives the berth of a captured ticket to others, once its graph is gone and no replay is under way."""
        with self._lock:
            if ticket.captured is not None:
                self._free_berths.append(ticket.captured)
                ticket.captured = None

    def probe(self, jobs: CacheJobs, inputs: torch.Tensor) -> None:
        """What `prefetch` begins with, alone, for measurements: finds the ids that are there. All must be."""
        with self._lock, self._on_stream():
            locations = self._berths[0].locations.data_ptr()
            arguments = (self._root.data_ptr(), jobs.at, jobs.blocks_at, jobs.blocks, inputs.data_ptr(), locations)
            self._kernels.probe(min(jobs.blocks, self.settings.programs), self._stream_handle(), *arguments)

    def _berth(self, ids: int) -> _Berth:
        if not self._free_berths:
            if len(self._berths) >= k.BERTHS:
                raise QuantError(f"{len(self._berths)} tickets are out; release them, in any order, after their lookups")
            berth = _Berth(self.device, len(self._berths), self.slots_at, 0)
            self._berths.append(berth)
            self._free_berths.append(berth)
        berth = self._take_berth()
        _wait(berth.released)  # the lookup that read its locations and its pad
        self._fit(berth, ids)
        return berth

    def _take_berth(self) -> _Berth:
        """The one with a pad that is free for longest; where there is none, one without."""
        berth = next((b for b in self._free_berths if b.pad_bytes), self._free_berths[0])
        self._free_berths.remove(berth)
        return berth

    def _launch(self, jobs: CacheJobs, inputs_at: int, berth: _Berth, takes_all: bool) -> None:
        """A batch's kernels: rows are fetched aside while it is decided which are taken in."""
        root, ticket = self._root.data_ptr(), berth.record.data_ptr()
        stream, run, most = self._stream_handle(), self._kernels, 1 if self._is_interpreted else self.settings.programs
        few = min(most, _FEW)
        rows = min(few, -(-jobs.ids // run.rows))
        probe = (root, jobs.at, jobs.blocks_at, jobs.blocks, inputs_at, berth.locations.data_ptr())
        run.begin(1, stream, root, ticket)
        if jobs.blocks:
            run.probe(min(most, jobs.blocks), stream, *probe)
            run.enumerate(self._marks.numel() // 2, stream, root, ticket)
        self._order(self._aside, self._stream)
        if not jobs.blocks:
            self._after(self._aside, berth.ready)
            return
        self._fetch(berth, min(self.settings.row_programs, rows))
        run.choose(len(self._pages.classes), stream, root, int(takes_all))
        run.admit(min(few, -(-jobs.ids // TURN)), stream, root)
        parts = self._pages.count * -(-self._pages.most_slots // run.part)
        for evict in run.evict:
            evict(min(most, parts), stream, root)
        run.unlink(min(few, -(-jobs.ids // UNLINK)), stream, root)
        run.take_in(min(few, -(-jobs.ids // TURN)), stream, root)
        run.fetch_rest(rows, stream, root, ticket)
        run.resolve(min(most, jobs.blocks), stream, *probe)
        self._order(self._aside, self._stream)
        self._after(self._aside, berth.ready)
        aside = self._aside_handle()
        run.place(rows, aside, root, ticket)
        run.end(min(few, -(-jobs.ids // TURN)), aside, root)
        self._after(self._aside, self._placed)

    def _fetch(self, berth: _Berth, programs: int) -> None:
        """Brings the missing rows to a pad."""
        root, ticket, aside, run = self._root.data_ptr(), berth.record.data_ptr(), self._aside_handle(), self._kernels
        if self._gather is not None:
            run.list_rows(programs, aside, root, ticket)
            # How much there is only the device knows: as much as lately by copies, and a little more; the rest by `bring`.
            likely = -(-self._gather.last_bytes * 9 // 8 // _COPY_UNIT) * _COPY_UNIT
            likely = min(likely, self._gather.staging.numel(), berth.pad_bytes)
            for first, end, request in self._gather.requests(likely):
                self._gather(aside, request)
                self._copy_staged(berth, first, min(end, likely))
            self._order(self._aside, self._copies)
            run.bring(programs, aside, root, ticket, likely)
        run.fetch(programs, aside, root, ticket)

    def _copy_staged(self, berth: _Berth, first: int, end: int) -> None:
        """Copies a part of what the CPU gathered to a pad, while the next one is gathered."""
        assert self._gather is not None
        self._order(self._copies, self._aside)
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            target = berth.pad - self.slots_at
            self._arena[target + first : target + end].copy_(self._gather.staging[first:end], non_blocking=True)

    def _stream_handle(self) -> int | None:
        return None if self._stream is None else int(self._stream.cuda_stream)

    def _aside_handle(self) -> int | None:
        return None if self._aside is None else int(self._aside.cuda_stream)

    def _order(self, later: Any, earlier: Any) -> None:
        """What comes next on one stream comes after what is on the other so far."""
        if later is not None:
            later.wait_stream(earlier)

    def _after(self, stream: Any, event: Any) -> None:
        """Notes in an event what is on a stream so far. While a graph is captured, what comes next in it waits instead."""
        if event is None:
            return
        if not _is_capturing():
            event.record(stream)
        elif event is not self._placed:
            self._order(self._stream, stream)

    def join(self) -> None:
        """What comes next on the cache's stream comes after what runs aside: a graph that is captured ends so."""
        self._order(self._stream, self._aside)

    def join_all(self) -> None:
        """As `join`, where a launch broke off: after copies too that nothing came after."""
        self._order(self._stream, self._copies)
        self.join()

    def _release(self, berth: _Berth, is_over: bool = True) -> None:
        """is_over: others may use the berth; not so where a graph will release it each time."""
        stream = None if self._is_interpreted else torch.cuda.current_stream(self.device).cuda_stream
        _wait(berth.ready)  # which wrote what is undone here
        self._kernels.release(1, stream, self._root.data_ptr(), berth.record.data_ptr())
        if not is_over:
            return
        if berth.released is not None:
            berth.released.record()
        with self._lock:
            self._out -= 1
            self._free_berths.append(berth)

    def _rebalance(self) -> None:
        """Moves a hundredth of the pages to the class whose victims are warmest, from the one whose are coldest.

        Where all are alike, every class evicts what one cache of all rows would. Judged by a snapshot some tickets old.
        """
        self._keep_snapshot()
        if self._last_state is None:
            return
        of_class = self._last_state[len(State) :].view(-1, len(ClassState)).tolist()
        busy = [n for n, c in enumerate(self._pages.classes) if of_class[n][ClassState.ADMITTED] and len(c.pages) > 1]
        if len(busy) < 2:
            return
        by_coldness = sorted(busy, key=lambda n: of_class[n][ClassState.COLDEST])
        warm, cold = by_coldness[0], by_coldness[-1]
        if of_class[cold][ClassState.COLDEST] > _REBALANCE_FROM * max(1, of_class[warm][ClassState.COLDEST]):
            most = len(self._pages.classes[cold].pages) - 1
            self._pages.take(cold, min(most, max(1, self._pages.count // 100)), warm)
            self._relink()

    # ---- what it holds ----

    def _begin_snapshot(self) -> None:
        if self._snapshot_event is not None and not self._snapshot_event.query():
            return
        self._keep_snapshot()
        is_cuda = self.device.type == "cuda"
        parts = []
        for source in (self._state, self._counters):
            target = torch.empty(source.shape, dtype=source.dtype, pin_memory=is_cuda)
            target.copy_(source, non_blocking=True)
            parts.append(target)
        self._snapshot = (parts[0], parts[1], self._names())
        if is_cuda:
            self._snapshot_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._snapshot_event.record()

    def _keep_snapshot(self) -> None:
        if self._snapshot is not None and (self._snapshot_event is None or self._snapshot_event.query()):
            self._last_state = self._snapshot[0]
            self._statistics = self._statistics_of(*self._snapshot)

    def _names(self) -> dict[int, tuple[str, int]]:
        """Number of each table -> its name, and bytes of its rows."""
        return {number: (t.name, self._pages.classes[t.row_class].row_bytes) for number, t in self._tables.items()}

    def _statistics_of(self, state: torch.Tensor, counters: torch.Tensor, names: dict[int, tuple[str, int]]) -> Statistics:
        return statistics_of(state, counters, names, len(self._pages.classes), self.slots)

    def statistics(self, wait: bool = False) -> Statistics:
        """Counts as of some tickets ago, without waiting; `wait`: as of now."""
        if not self._lock.acquire(blocking=wait):
            return self._statistics or Statistics(0, self.slots, 0, 0, 0, 0, 0, {})
        try:
            return self._counted(wait)
        finally:
            self._lock.release()

    def _counted(self, wait: bool) -> Statistics:
        with self._on_stream():
            if wait:
                return self._statistics_of(self._state.cpu(), self._counters.cpu(), self._names())
            self._keep_snapshot()
            return self._statistics or self._statistics_of(torch.zeros(self._state.shape, dtype=torch.int64), torch.zeros(0), {})

    def hot(self, number: int, count: int | None = None) -> NDArray[np.int64]:
        """Ids of a table that the cache holds, the hottest first, `count` at most. Waits for the device; batches come between."""
        keys, ranks = [], []
        with self._lock:
            row_class = self._tables[number].row_class
            parts = self._pages.parts(row_class)
        for part in parts:
            with self._lock, self._on_stream():
                nodes = self._pages.nodes(row_class, [p for p in part if self._pages.of_page[p, 0] == row_class])
                mine = (nodes.keys >> k.ID_BITS) == number
                keys.append(nodes.keys[mine].cpu())
                ranks.append((nodes.scores if self.settings.policy.is_lfu else nodes.uses)[mine].cpu())
        if not keys:
            return np.zeros(0, np.int64)
        order = torch.cat(ranks).argsort(descending=True, stable=True)[:count]
        ids: NDArray[np.int64] = (torch.cat(keys)[order] & ((1 << k.ID_BITS) - 1)).numpy()
        return ids

    def warm(self, number: int, ids: NDArray[np.int64]) -> None:
        """Takes rows of a table in, whatever their scores, for lookups to come; nothing is waited for."""
        for first in range(0, ids.size, _WARM_IDS):
            part = ids[first : first + _WARM_IDS]
            jobs = [CacheJob(number, 0, part.size, 0)]
            with self._lock, self._on_stream():
                memory = torch.empty(8 * part.size + cached_bytes(jobs), dtype=torch.uint8, device=self.device)
                written, launched = cache_jobs(jobs, memory.data_ptr() + 8 * part.size, self._is_interpreted)
                memory[: 8 * part.size + len(written)].copy_(
                    torch.frombuffer(bytearray(part.tobytes() + written), dtype=torch.uint8)
                )
                self.prefetch(launched, memory, takes_all=True).release()

    def mean_chain(self) -> float:
        """Mean length of the index's chains that are not empty. Waits for the device."""
        with self._lock, self._on_stream():
            heads = int((self._heads != -1).sum())
            return self._statistics_of(self._state.cpu(), self._counters.cpu(), {}).occupied / max(1, heads)

    def check_integrity(self, row_of: Any = None) -> None:
        """Raises AssertionError, with numbers, where the cache is not what it should be. Waits for the device.

        row_of: (table's number, id) -> its bytes, to compare with what its slot holds.
        """
        check(self, row_of)

    # ---- memory ----

    def _filled(self, value: int, count: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=self.device)

    def _zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self.device)

    def _sent(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            with np.errstate(all="ignore"):  # a GPU does not warn either
                yield
        else:
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                _wait(self._placed)
                yield


def _wait(event: Any) -> None:
    """What comes next on the current stream comes after `event`.

    Not where a graph is captured: it may not wait for what came before it, and whoever replays it orders it.
    """
    if event is not None and not _is_capturing():
        event.wait()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
