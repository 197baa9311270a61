"""The launches of a batch, over three streams. The host waits for none of them.

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
    resolve ──────────────► ready ───────────────────────► (the lookup's stream) lookup · release · released
                            fill_slots
                            end
    next batch's begin ◄─── filled

Time goes down. Work on one stream runs in order; an arrow makes another stream wait for all that is above its begin.

Misses are fetched into the batch's staging buffer on the side stream, while the main stream decides which of
them are admitted and which rows they replace. Only probing and fetching delay the batch. An admitted
row that has no room in the staging buffer is fetched straight into its slot (REST).
At `ready` the lookup finds each row at its location; admitted rows are then copied from the staging buffer to
their slots beside it. The next batch's `begin` waits for `filled`. A later batch with the same staging
buffer waits for `released`.

`list_rows`, the CPU's part, the copies and `copy_gathered` exist only with `gather_threads`. Only the device
knows how many bytes the CPU will gather. So the host copies as many as in a recent batch and an eighth more,
and `copy_gathered` copies the rest.
"""

import torch

from tableside.quant.cache.jobs import ProbeJobs, probe_block
from tableside.quant.cache.kernels import admit, batch, evict, fetch, find
from tableside.quant.cache.kernels.state import CLASSES, UNIT_BYTES, Root
from tableside.quant.cache.memory import CacheMemory
from tableside.quant.cache.pages import Pages
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.cache.streams import Streams, handle, order, wait
from tableside.quant.cache.tables import FLAGS
from tableside.quant.cache.tickets import InFlightBatch
from tableside.quant.device.gather import HostGather
from tableside.quant.device.launch import Kernel

_FEW = 528  # programs of kernels that have little to do where few rows are missing; starting many takes long
_MOST_GATHERED = 1 << 19  # rows of a batch that the CPU gathers
_MOST_GATHERED_BYTES = 64 << 20
_COPY_UNIT = 1 << 16  # copies are multiples of it, so that there are few different ones
_MISSES = 256  # that a program takes at once: `list_rows`, `rank_admitted`, `end`
_INSERTED = 512  # `insert`
_UNLINKED = 1024  # `unlink`
_SLOTS = 512  # `evict`
_SLOTS_INTERPRETED = 1024
_SAMPLE = 1024  # slots and misses that `choose_threshold` looks at
_CHUNKS = 2048  # of 16 bytes, `copy_gathered`
_TILE_WORDS, _MOST_WORDS = 8192, 64  # words of 4 bytes that a program copies at once, of all its rows and of one
_ROWS_INTERPRETED = 256
_ROW_WARPS = 8


class Kernels:
    """The kernels of one cache, with their constants. Of wide rows a program copies fewer at a time.

    rows: that a program copies at once; slots: that a program of `evict` takes at once.
    """

    def __init__(self, is_lfu: bool, gathers: bool, widest_row_bytes: int, is_interpreted: bool) -> None:
        words = max(4, min(_MOST_WORDS, 1 << (widest_row_bytes // 4 - 1).bit_length()))
        self.rows = _ROWS_INTERPRETED if is_interpreted else _TILE_WORDS // words
        self.slots = _SLOTS_INTERPRETED if is_interpreted else _SLOTS
        ids, lfu, lanes = {"BLOCK": probe_block(is_interpreted)}, {"LFU": is_lfu}, {"CLASS_LANES": CLASSES}
        tile = {"ROWS": self.rows, "WORDS": words}
        self.begin = Kernel(batch.begin, 1, **lanes)
        self.probe = Kernel(find.probe, 1, **lfu, **ids)
        self.enumerate_misses = Kernel(find.enumerate_misses, 4, **lfu, FLAGS=FLAGS)
        self.list_rows = Kernel(fetch.list_rows, 4, BLOCK=_MISSES)
        self.copy_gathered = Kernel(fetch.copy_gathered, _ROW_WARPS, CHUNKS=_CHUNKS)
        self.fetch_misses = Kernel(fetch.fetch_misses, _ROW_WARPS, GATHERS=gathers, REST=False, **tile)
        self.choose_threshold = Kernel(admit.choose_threshold, 8, **lfu, SAMPLE=_SAMPLE, **lanes)
        self.rank_admitted = Kernel(admit.rank_admitted, 4, **lfu, BLOCK=_MISSES)
        self.evict = Kernel(evict.evict, 1, ANY=False, **lfu, BLOCK=self.slots, **lanes)
        self.evict_any = Kernel(evict.evict, 1, ANY=True, **lfu, BLOCK=self.slots, **lanes)
        self.unlink = Kernel(evict.unlink, 4, BLOCK=_UNLINKED)
        self.insert = Kernel(admit.insert, 4, **lfu, BLOCK=_INSERTED)
        self.fetch_rest = Kernel(fetch.fetch_misses, _ROW_WARPS, GATHERS=False, REST=True, **tile)
        self.resolve = Kernel(find.resolve, 1, **ids)
        self.fill_slots = Kernel(fetch.fill_slots, _ROW_WARPS, **tile)
        self.end = Kernel(batch.end, 4, BLOCK=_MISSES)
        self.release = Kernel(batch.release, 1)


class Pipeline:
    """Launches what a batch needs, for rows of `smallest_row_bytes` until `fit_rows` says more. The caller
    holds the cache's lock.

    staging_bytes: of a staging buffer. kernels: those in use.
    """

    def __init__(
        self,
        memory: CacheMemory,
        pages: Pages,
        streams: Streams,
        settings: CacheSettings,
        staging_bytes: int,
        smallest_row_bytes: int,
        is_interpreted: bool,
    ) -> None:
        self._memory, self._pages, self._streams, self._settings = memory, pages, streams, settings
        self._is_interpreted = is_interpreted
        self._most = 1 if is_interpreted else settings.programs
        self._few = min(self._most, _FEW)
        self._gather: HostGather | None = None
        if settings.gather_threads:
            size, is_cuda = min(staging_bytes, _MOST_GATHERED_BYTES), streams.device.type == "cuda"
            self._gather = HostGather(_MOST_GATHERED, size, settings.gather_threads, is_cuda)
        self.fit_rows(smallest_row_bytes)

    def fit_rows(self, widest_row_bytes: int) -> None:
        """Takes kernels for rows up to this size."""
        is_lfu, gathers = self._settings.policy.is_lfu, self._gather is not None
        self.kernels = Kernels(is_lfu, gathers, widest_row_bytes, self._is_interpreted)

    def root_fields(self) -> dict[Root, int]:
        """What the kernels' record says of the CPU's gathering."""
        if self._gather is None:
            return {}
        return {
            Root.GATHER_LIST: self._gather.list.data_ptr(),
            Root.GATHER_FROM: self._settings.gather_from,
            Root.GATHER_MOST: self._gather.rows,
            Root.GATHERED: self._gather.staging.data_ptr(),
            Root.GATHERED_UNITS: self._gather.staging.numel() // UNIT_BYTES,
        }

    def launch(self, jobs: ProbeJobs, inputs_at: int, batch: InFlightBatch, admit_all: bool) -> None:
        """Launches a batch's kernels, on the main stream and the side stream, as the module's diagram says."""
        root, ticket, streams, run = self._memory.root, batch.record.data_ptr(), self._streams, self.kernels
        main = handle(streams.main)
        run.begin(1, main, root, ticket)
        if not jobs.blocks:
            order(streams.side, streams.main)
            streams.note(batch.ready, streams.side)
            return
        probe = (root, jobs.jobs_at, jobs.blocks_at, jobs.blocks, inputs_at, batch.locations.data_ptr())
        run.probe(min(self._most, jobs.blocks), main, *probe)
        run.enumerate_misses(self._memory.groups, main, root, ticket)
        order(streams.side, streams.main)
        self._fetch(batch, min(self._settings.row_programs, self._programs(jobs, run.rows)))
        self._admit(jobs, admit_all)
        run.fetch_rest(self._programs(jobs, run.rows), main, root, ticket)
        run.resolve(min(self._most, jobs.blocks), main, *probe)
        order(streams.side, streams.main)
        streams.note(batch.ready, streams.side)
        side = handle(streams.side)
        run.fill_slots(self._programs(jobs, run.rows), side, root, ticket)
        run.end(self._programs(jobs, _MISSES), side, root)
        streams.note(streams.filled, streams.side)

    def _programs(self, jobs: ProbeJobs, at_once: int) -> int:
        """Programs of a kernel that takes so many of the batch's misses at once, of which there may be few."""
        return min(self._few, -(-jobs.ids // at_once))

    def _admit(self, jobs: ProbeJobs, admit_all: bool) -> None:
        """Decides on the main stream which misses are admitted, and gives them slots."""
        root, main, run = self._memory.root, handle(self._streams.main), self.kernels
        run.choose_threshold(len(self._pages.classes), main, root, int(admit_all))
        run.rank_admitted(self._programs(jobs, _MISSES), main, root)
        parts = self._pages.count * -(-self._pages.most_slots // run.slots)
        run.evict(min(self._most, parts), main, root)
        run.evict_any(min(self._most, parts), main, root)
        run.unlink(self._programs(jobs, _UNLINKED), main, root)
        run.insert(self._programs(jobs, _MISSES), main, root)

    def _fetch(self, batch: InFlightBatch, programs: int) -> None:
        """Fetches the misses into the batch's staging buffer, on the side stream."""
        root, ticket, run = self._memory.root, batch.record.data_ptr(), self.kernels
        side = handle(self._streams.side)
        if self._gather is not None:
            run.list_rows(programs, side, root, ticket)
            likely = -(-self._gather.last_bytes * 9 // 8 // _COPY_UNIT) * _COPY_UNIT
            likely = min(likely, self._gather.staging.numel(), batch.staging_bytes)
            for first, end, request in self._gather.requests(likely):
                self._gather(side, request)
                self._copy(self._gather.staging, batch, first, min(end, likely))
            order(self._streams.side, self._streams.copies)
            run.copy_gathered(programs, side, root, ticket, likely)
        run.fetch_misses(programs, side, root, ticket)

    def _copy(self, gathered: torch.Tensor, batch: InFlightBatch, first: int, end: int) -> None:
        """Copies a chunk of what the CPU gathered to the staging buffer, while the next one is gathered."""
        order(self._streams.copies, self._streams.side)
        arena = self._memory.arena
        with self._streams.on_copies():
            target = batch.staging - arena.data_ptr()
            arena[target + first : target + end].copy_(gathered[first:end], non_blocking=True)

    def probe(self, jobs: ProbeJobs, inputs_at: int, locations_at: int) -> None:
        """What `launch` begins with, alone, for measurements."""
        root, main = self._memory.root, handle(self._streams.main)
        arguments = (root, jobs.jobs_at, jobs.blocks_at, jobs.blocks, inputs_at, locations_at)
        self.kernels.probe(min(jobs.blocks, self._settings.programs), main, *arguments)

    def release(self, batch: InFlightBatch) -> None:
        """Lets the batch's slots be evicted once what is on the current stream so far is done."""
        wait(batch.ready)  # which wrote what is undone here
        stream = None if self._is_interpreted else torch.cuda.current_stream(self._streams.device).cuda_stream
        self.kernels.release(1, stream, self._memory.root, batch.record.data_ptr())
