"""The launches of a batch over three streams; the host waits for none, but where it fetches rows.
    main                    side                           copies
    begin
    probe
    enumerate_misses ─────► list_rows
    choose_threshold        ‹the CPU gathers chunk 1› ───► copy chunk 1
    rank_admitted           ‹the CPU gathers chunk 2› ───► copy chunk 2
    evict                    …                              …
    evict (ANY)             copy_gathered ◄──────────────── all copied
    unlink                  fetch_misses
    insert                   │
    fetch_misses (REST)      │
    resolve                  │
    (all fetched) ◄──────────┘
             └────────────► ready ───────────────────────► (the lookup's stream) lookup · release · released
                            fill_slots
                            end
    next batch's begin ◄─── filled
Time goes down; an arrow makes another stream wait for all above its start.
The side stream fetches misses to the staging buffer while the main stream chooses admitted rows and victims;
only probing and fetching delay the batch. REST fetches admitted rows without room there straight into their
slots. The launches from `probe` to there are the same for batches of a size, so from the third on a CUDA
graph replays them (`replays`), if the settings allow it. At `ready` the lookup finds each row at its
location; beside it admitted rows are copied to slots. The next `begin` waits for `filled`, a later batch with
the same staging buffer for `released`. `list_rows`, the CPU's part, the copies and `copy_gathered` need
`gather_threads`. The host does not know how many bytes the CPU gathers, so it copies as many as in a recent
batch and some more; `copy_gathered` copies the rest. Where tables have rows that the host fetches
(`quant.cache.fetched`), it waits for the list of all misses behind `enumerate_misses`, and fetches those
rows. They and their locations are copied on the side stream, behind `fetch_misses`; the main stream waits for
that, and two graphs are replayed, one before and one behind it."""

from dataclasses import dataclass
from typing import Any

import torch

from tableside.quant.cache.fetched import FetchedRows
from tableside.quant.cache.jobs import PROBE_BLOCK
from tableside.quant.cache.kernels import admit, batch, evict, fetch, find
from tableside.quant.cache.kernels.state import CLASSES, UNIT_BYTES, Root
from tableside.quant.cache.memory import CacheMemory
from tableside.quant.cache.pages import Pages
from tableside.quant.cache.replays import Replays
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.cache.streams import Streams
from tableside.quant.cache.tables import FLAGS
from tableside.quant.cache.tickets import InFlightBatch
from tableside.quant.device.gather import HostGather
from tableside.quant.device.launch import Jobs, Kernel

_FEW = 528  # programs of kernels that have little to do where few rows are missing; starting many takes long
_MOST_GATHERED = 1 << 19  # rows of a batch that the CPU gathers
_MOST_GATHERED_BYTES = 64 << 20
_COPY_UNIT = (
    1 << 16
)  # copies are multiples of it, and of 1/16 of a power of 2, so that there are few different ones
_EVICTING, _EVICTING_ANY = (
    2112,
    528,
)  # programs of the two `evict`s; more take long to start, and the second seldom has work
_MISSES = 256  # that a program takes at once: `list_rows`, `rank_admitted`, `end`
_INSERTED = 512  # `insert`
_UNLINKED = 1024  # `unlink`
_SLOTS = 512  # `evict`
_SAMPLE = 1024  # slots and misses that `choose_threshold` looks at
_CHUNKS = 2048  # of 16 bytes, `copy_gathered`
_TILE_WORDS, _MOST_WORDS = (
    8192,
    64,
)  # words of 4 bytes that a program copies at once, of all its rows and of one
_ROW_WARPS = 8


class Kernels:
    """The kernels of a cache, with their constants. rows: a program copies at once (fewer if wide).
    widest_row_bytes: of slots; is_tight: rows of a table are not padded in host memory; probe_block: ids a
    program of `find` takes at once."""

    def __init__(
        self, is_lfu: bool, gathers: bool, widest_row_bytes: int, is_tight: bool, probe_block: int
    ) -> None:
        words = max(4, min(_MOST_WORDS, 1 << (widest_row_bytes // 4 - 1).bit_length()))
        self.rows = _TILE_WORDS // words
        ids, lfu, lanes = {"BLOCK": probe_block}, {"LFU": is_lfu}, {"CLASS_LANES": CLASSES}
        tile = {"ROWS": self.rows, "WORDS": words}
        fetch_tile = {**tile, "TIGHT": is_tight}
        self.begin = Kernel(batch.begin, 1, **lanes)
        self.probe = Kernel(find.probe, 1, **lfu, **ids)
        self.enumerate_misses = Kernel(find.enumerate_misses, 4, **lfu, FLAGS=FLAGS)
        self.list_rows = Kernel(fetch.list_rows, 4, BLOCK=_MISSES)
        self.copy_gathered = Kernel(fetch.copy_gathered, _ROW_WARPS, CHUNKS=_CHUNKS)
        self.fetch_misses = Kernel(fetch.fetch_misses, _ROW_WARPS, GATHERS=gathers, REST=False, **fetch_tile)
        self.choose_threshold = Kernel(admit.choose_threshold, 8, **lfu, SAMPLE=_SAMPLE, **lanes)
        self.rank_admitted = Kernel(admit.rank_admitted, 4, **lfu, BLOCK=_MISSES)
        self.evict = Kernel(evict.evict, 1, ANY=False, **lfu, BLOCK=_SLOTS, **lanes)
        self.evict_any = Kernel(evict.evict, 1, ANY=True, **lfu, BLOCK=_SLOTS, **lanes)
        self.unlink = Kernel(evict.unlink, 4, BLOCK=_UNLINKED)
        self.insert = Kernel(admit.insert, 4, **lfu, BLOCK=_INSERTED)
        self.fetch_rest = Kernel(fetch.fetch_misses, _ROW_WARPS, GATHERS=False, REST=True, **fetch_tile)
        self.resolve = Kernel(find.resolve, 1, **ids)
        self.fill_slots = Kernel(fetch.fill_slots, _ROW_WARPS, **tile)
        self.end = Kernel(batch.end, 4, BLOCK=_MISSES)
        self.release = Kernel(batch.release, 1)

    def by_name(self) -> dict[str, Kernel]:
        """All of them."""
        return {name: kernel for name, kernel in vars(self).items() if isinstance(kernel, Kernel)}


@dataclass(frozen=True)
class LaunchShape:
    """What a batch's launches depend on while tables and pages stay. place: of the batch's record; blocks:
    that have programs; copied: gathered bytes that the host copies."""

    place: int
    blocks: int
    admit_all: bool
    copied: int


class Pipeline:
    """Launches batches, for rows of `smallest_row_bytes` until `fit_rows` changes that. The caller holds the
    cache's lock. staging_bytes: of a staging buffer. kernels: those in use."""

    def __init__(
        self,
        memory: CacheMemory,
        pages: Pages,
        fetched: FetchedRows,
        streams: Streams,
        settings: CacheSettings,
        staging_bytes: int,
        smallest_row_bytes: int,
    ) -> None:
        self._memory, self._pages, self._streams, self._settings = memory, pages, streams, settings
        self._fetched = fetched
        self._most = streams.device.programs(settings.programs)
        self._few = min(self._most, _FEW)
        self._block = streams.device.block(PROBE_BLOCK)
        self._replays = Replays(streams, settings.replays)
        self._gather: HostGather | None = None
        if settings.gather_threads:
            size = min(staging_bytes, _MOST_GATHERED_BYTES)
            self._gather = HostGather(_MOST_GATHERED, size, settings.gather_threads, streams.device)
        self._fitted: tuple[int, bool] | None = None
        self.fit_rows(smallest_row_bytes, False)

    def fit_rows(self, widest_row_bytes: int, is_tight: bool) -> None:
        """Takes kernels for slots up to this size, and for rows as they are in host memory; those in use stay
        where they fit, with what they know of their launches."""
        if self._fitted == (widest_row_bytes, is_tight):
            return
        self._fitted = widest_row_bytes, is_tight
        is_lfu, gathers = self._settings.policy.is_lfu, self._gather is not None
        self.kernels = Kernels(is_lfu, gathers, widest_row_bytes, is_tight, self._block)

    def root_fields(self) -> dict[Root, int]:
        """The record's fields for the CPU's gathering."""
        if self._gather is None:
            return {}
        return {
            Root.GATHER_LIST: self._gather.list.data_ptr(),
            Root.GATHER_FROM: self._settings.gather_from,
            Root.GATHER_MOST: self._gather.rows,
            Root.GATHERED: self._gather.staging.data_ptr(),
            Root.GATHERED_UNITS: self._gather.staging.numel() // UNIT_BYTES,
        }

    def forget_graphs(self) -> None:
        """Nothing is replayed that was captured before tables, pages or a staging buffer changed."""
        self._replays.forget()

    def launch(self, jobs: Jobs, inputs_at: int, batch: InFlightBatch, admit_all: bool) -> None:
        """Launches a batch's kernels on the main and the side stream, as the module draws."""
        root, ticket, streams, run = self._memory.root, batch.record.data_ptr(), self._streams, self.kernels
        self._begin(jobs, inputs_at, batch)
        if jobs.programs:
            # A power of 2 of blocks, so that batches share graphs.
            shape = LaunchShape(
                batch.place, 1 << (jobs.programs - 1).bit_length(), admit_all, self._copied(batch)
            )
            if self._fetched.are_there:
                self._replays((shape, 1), streams, lambda on: self._find(on, batch, shape))
                staging = batch.staging
                self._fetched.bring(batch, streams)
                streams.join()
                if batch.staging is not staging:
                    self.forget_graphs()  # which copy gathered rows there
                self._replays((shape, 2), streams, lambda on: self._place(on, batch, shape))
            else:
                self._replays(shape, streams, lambda on: self._find(on, batch, shape, places=True))
        streams.side.wait_stream(streams.main)
        batch.ready.record(streams.side)
        if jobs.programs:
            side = streams.side.cuda_stream
            run.fill_slots(self._programs(jobs.ids, run.rows), side, root, ticket)
            run.end(self._programs(jobs.ids, _MISSES), side, root)
            streams.filled.record(streams.side)

    def _begin(self, jobs: Jobs, inputs_at: int, batch: InFlightBatch) -> None:
        batch_record, locations = batch.record.data_ptr(), batch.locations.data_ptr()
        self.kernels.begin(
            1,
            self._streams.main.cuda_stream,
            self._memory.root,
            batch_record,
            jobs.jobs_at,
            jobs.programs_at,
            jobs.programs,
            inputs_at,
            locations,
        )

    def _copied(self, batch: InFlightBatch) -> int:
        """Gathered bytes that the host copies for a batch: as many as in a recent batch and some more."""
        if self._gather is None:
            return 0
        likely = self._gather.last_bytes * 17 // 16
        unit = max(_COPY_UNIT, 1 << max(0, likely.bit_length() - 5))
        return min(-(-likely // unit) * unit, self._gather.staging.numel(), batch.device_bytes)

    def _programs(self, ids: int, at_once: int) -> int:
        """Programs of a kernel that takes so many of a batch's misses at once, of which there may be few."""
        return min(self._few, -(-ids // at_once))

    def _find(self, streams: Streams, batch: InFlightBatch, shape: LaunchShape, places: bool = False) -> None:
        """Finds the rows of a batch and fetches misses; the main stream is behind all of it. places: also
        gives slots, meanwhile."""
        root, ticket, run = self._memory.root, batch.record.data_ptr(), self.kernels
        main, rows = streams.main.cuda_stream, self._programs(shape.blocks * self._block, run.rows)
        run.probe(min(self._most, shape.blocks), main, root, ticket)
        run.enumerate_misses(self._memory.groups, main, root, ticket)
        streams.side.wait_stream(streams.main)
        if not self._fetched.are_all:
            self._fetch(streams, batch, shape.copied, min(self._settings.row_programs, rows))
        if places:
            self._place(streams, batch, shape)
        streams.join()

    def _place(self, streams: Streams, batch: InFlightBatch, shape: LaunchShape) -> None:
        """Gives slots, and says where each row is, on the main stream."""
        root, ticket, run = self._memory.root, batch.record.data_ptr(), self.kernels
        main, ids = streams.main.cuda_stream, shape.blocks * self._block
        self._admit(main, ids, shape.admit_all)
        run.fetch_rest(self._programs(ids, run.rows), main, root, ticket)
        run.resolve(min(self._most, shape.blocks), main, root, ticket)

    def _admit(self, main: int | None, ids: int, admit_all: bool) -> None:
        """Decides on the main stream which misses are admitted, and gives them slots."""
        root, run = self._memory.root, self.kernels
        run.choose_threshold(len(self._pages.classes), main, root, int(admit_all))
        run.rank_admitted(self._programs(ids, _MISSES), main, root)
        parts = self._pages.count * -(-self._pages.most_slots // _SLOTS)
        run.evict(min(self._most, _EVICTING, parts), main, root)
        run.evict_any(min(self._most, _EVICTING_ANY, parts), main, root)
        run.unlink(self._programs(ids, _UNLINKED), main, root)
        run.insert(self._programs(ids, _MISSES), main, root)

    def _fetch(self, streams: Streams, batch: InFlightBatch, copied: int, programs: int) -> None:
        """Fetches the misses into the batch's staging buffer, on the side stream."""
        root, ticket, run = self._memory.root, batch.record.data_ptr(), self.kernels
        side = streams.side.cuda_stream
        if self._gather is not None:
            run.list_rows(programs, side, root, ticket)
            for first, end, request in self._gather.requests(copied):
                self._gather(side, request)
                self._copy(streams, self._gather.staging, batch, first, min(end, copied))
            streams.side.wait_stream(streams.copies)
            run.copy_gathered(programs, side, root, ticket, copied)
        run.fetch_misses(programs, side, root, ticket)

    def _copy(
        self, streams: Streams, gathered: torch.Tensor, batch: InFlightBatch, first: int, end: int
    ) -> None:
        """Copies a chunk of what the CPU gathered to the staging buffer, while the next one is gathered."""
        streams.copies.wait_stream(streams.side)
        with streams.device.on(streams.copies):
            batch.staging[first:end].copy_(gathered[first:end], non_blocking=True)

    def release(self, batch: InFlightBatch, stream: Any) -> None:
        """Lets the batch's slots be evicted after the work so far on `stream`, the current one."""
        self._streams.device.wait(batch.ready, stream)  # which wrote what is undone here
        self.kernels.release(1, stream.cuda_stream, self._memory.root, batch.record.data_ptr())
