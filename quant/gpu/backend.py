"""Lookups on a GPU: one launch of `quant.gpu.lookup_kernel` serves all tables of all waiting requests.

One copy takes inputs and jobs to the device. One launch looks up; bags with lengths of their own take one more, unpooled
features one more. One copy brings the vectors back. What reads them on the device (`quant.gpu.follower`) takes one launch more.

Rows that stay in host memory are read by the GPU itself where a request has few ids, and always where a table is split.
Random reads over a large span are slow that way, because of address translation and not of bytes (docs/log.md). From
`gather_from` ids on, the CPU therefore gathers the rows into page-locked memory, and each chunk is copied over while the next
one is gathered. A third way is to read rows through a cache (`open_cache`).
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant import contract
from tableside.quant.contract import (
    Backend,
    Floats,
    Ids,
    Lengths,
    Lookup,
    LookupKind,
    Plan,
    Planner,
    Pooling,
    Precision,
    RowSource,
    Table,
)
from tableside.quant.cpu.backend import CpuBackend
from tableside.quant.errors import BadIds, MissingBackend, QuantError

try:
    import triton

    from tableside.quant.gpu import kernels, lookup_kernel
except ImportError as error:
    raise MissingBackend(f"triton does not import ({error}); install tableside[gpu]") from error
from tableside.quant.cache.cache import Cache
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.cache.tickets import Ticket
from tableside.quant.device.devices import open_device
from tableside.quant.device.launch import Kernel
from tableside.quant.gpu.batch import LookedUp
from tableside.quant.gpu.batches import Batches, Begun, Started
from tableside.quant.gpu.buffers import Buffer
from tableside.quant.gpu.clock import Times
from tableside.quant.gpu.follower import FILL_BLOCK, Follower
from tableside.quant.gpu.job import FillField, ResolveField
from tableside.quant.gpu.launch_config import LaunchConfig, LaunchConfigs
from tableside.quant.gpu.layout import lay_out
from tableside.quant.gpu.levels import DeviceLevels
from tableside.quant.gpu.merge import Launch, Launches
from tableside.quant.gpu.plan import GpuPlan, SteadyPlanner
from tableside.quant.gpu.residence import Cached, InHbm, InHost, Mapped, Residence, Split, Stashable
from tableside.quant.gpu.resolve import RESOLVE_BLOCK, ResolveJobs
from tableside.quant.gpu.row_map import DeviceRowMap
from tableside.quant.gpu.steady import are_steady
from tableside.quant.gpu.tables import DeviceTable, by_row_number, on_device
from tableside.quant.gpu.wanted import KernelKey

GATHER_FROM = 4096  # ids of host rows in a request from which the CPU gathers them
# For devices on which a program takes milliseconds, whatever its width.
_WIDE = LaunchConfigs(LaunchConfig(4, 1024, 4), LaunchConfig(2, 1024, 4), LaunchConfig(1, 1024, 4), LaunchConfig(2, 256, 4, 4))


class GpuBackend(Backend):
    """The lookup kernel on one device: "cuda:0", or "interpreter" for Triton's interpreter on the CPU (slow, for tests).

    cpu: looks up tables that are not on the device, and gathers, with `threads` threads. priority: of its stream; lower
    numbers go first, 0 is the last. One batch is looked up at a time. MissingBackend: there is no such device.
    """

    name = "fused"
    warm_up_bags: tuple[int, ...] = (2, 32, 64)  # one for each of `LaunchConfigs.of_pooled`

    def __init__(
        self,
        device: str,
        cpu: CpuBackend,
        *,
        threads: int = 1,
        gather_from: int = GATHER_FROM,
        configs: LaunchConfigs | None = None,
        priority: int = -1,
    ) -> None:
        self.cpu, self.threads, self.gather_from = cpu, threads, gather_from
        self.device = open_device(device, is_compiled=isinstance(lookup_kernel.lookup, triton.runtime.JITFunction))
        self.is_lost = self.device.is_lost
        if not self.device.compiles:
            self.warm_up_bags = self.warm_up_bags[:1]
        self.configs = configs or (LaunchConfigs() if self.device.compiles else _WIDE)
        self.lock = threading.RLock()
        self._is_on_stream = False  # the thread that holds the lock is on the stream
        self.stream = self.device.stream(priority)
        self._batches = Batches(self)
        self._resolvers = {overlaid: kernels.resolver(self.device.block(RESOLVE_BLOCK), overlaid) for overlaid in (False, True)}
        self._bag_starts = kernels.bag_starts()
        self.fill = kernels.filler(self.device.block(FILL_BLOCK))
        self._kernels: dict[Any, Kernel] = {}
        self._stashable: weakref.WeakSet[Stashable] = weakref.WeakSet()
        self._copies = self.device.stream()
        self._restored: Any = None
        self._levels = DeviceLevels(self.device)
        self.cache: Cache | None = None

    @property
    def description(self) -> str:
        return f"fused ({self.device.description})"

    # ---- tables ----

    # A table's row map is copied to HBM with it (`quant.gpu.row_map`), but for what of its index is `in_host`: the ids that are
    # kept for rows are then read in the memory that `rows` is a view of.

    def to_hbm(
        self, table: Table, registered: torch.Tensor | None = None, key: KernelKey | None = None, *, stashable: bool = False
    ) -> DeviceTable:
        """Copies a table to HBM, and waits for it.

        registered: its rows, uint8 [bytes], in registered memory, from which they copy faster. key: of all tables that are used
        together with this one. stashable: `stash` gives its memory back. QuantError: it does not fit.
        """
        if not stashable:
            return self._placed(table, InHbm.copy_of(table, self.device, registered), key)
        residence = Stashable(table, self.device, registered)
        self._stashable.add(residence)
        return self._placed(table, residence, key)

    def map_host(
        self, table: Table, rows: torch.Tensor | None, key: KernelKey | None = None, *, in_host: InHost = InHost.NOTHING
    ) -> DeviceTable:
        """A table that the device reads in host memory. rows: uint8 [bytes] on the device, over registered memory.

        None: the table's own memory, which the interpreter reads.
        """
        return self._placed(table, Mapped(table, self._readable(rows)), key, in_host)

    def to_cache(
        self,
        table: Table,
        rows: torch.Tensor | None,
        key: KernelKey | None = None,
        name: str = "",
        *,
        in_host: InHost = InHost.NOTHING,
    ) -> DeviceTable:
        """A table that the device reads through its cache. rows: as for `map_host`; name: for statistics.

        It leaves the cache with the last reference. QuantError: there is no cache, or it cannot hold rows of this size.
        """
        if self.cache is None:
            raise QuantError("this device has no cache; open_cache makes one")
        return self._placed(table, Cached(table, self._readable(rows), self.cache, name), key, in_host)

    def split(
        self,
        table: Table,
        rows: torch.Tensor | None,
        share: int,
        key: KernelKey | None = None,
        *,
        in_host: InHost = InHost.NOTHING,
    ) -> DeviceTable:
        """A table with the first `share` rows of each SPLIT_BLOCK in HBM; the others are read as by `map_host`.

        QuantError: share is not from 1 to SPLIT_BLOCK - 1, or there is no room.
        """
        return self._placed(table, Split(table, self._readable(rows), share, self.device), key, in_host)

    def on_host(self, table: Table) -> DeviceTable:
        """A table that the CPU looks up, beside the device."""
        return on_device(table)

    def _placed(self, table: Table, residence: Residence, key: KernelKey | None, in_host: InHost = InHost.NOTHING) -> DeviceTable:
        device_map = None if table.row_map is None else DeviceRowMap(table, residence, self.device, in_host)
        return self.overlay(DeviceTable(table, residence, key or KernelKey.of(table), device_map), table)

    def overlay(self, placed: DeviceTable, table: Table, *, in_host: InHost = InHost.NOTHING) -> DeviceTable:
        """A table that was placed without an overlay in another state: `table` has the same rows, and an overlay or none.

        The rows stay where they are. Levels of the overlay that the device lacks are copied to HBM, on a stream that holds no
        lookup up; this waits for them. in_host: of new levels. QuantError: there is no room.
        """
        assert not placed.is_overlaid, "states are made of the table without one"
        if not placed.residence.is_on_device:
            return self.on_host(table)
        with self.device.on(self._copies):
            levels = self._levels.of(table, placed.residence, in_host)
            device_map = placed.device_map
            if levels:
                if device_map is None:
                    device_map = DeviceRowMap(table, placed.residence, self.device)
                device_map = device_map.with_levels(levels)
        return replace(placed, host=table, device_map=device_map)

    def overlay_bytes(self, placed: DeviceTable, table: Table, *, in_host: InHost = InHost.NOTHING) -> int:
        """HBM that `overlay` would take."""
        return self._levels.new_bytes(table, placed.residence, in_host) if placed.residence.is_on_device else 0

    def _readable(self, rows: torch.Tensor | None) -> torch.Tensor | None:
        if rows is None and not self.device.reads_all_memory:
            raise QuantError("a GPU reads registered memory alone; pass the view that a registration of the memory gives")
        return rows

    def open_cache(self, budget_bytes: int, smallest_row_bytes: int = 32, settings: CacheSettings | None = None) -> Cache:
        """Makes the device's cache, for the tables given to `to_cache`. QuantError: there is one, or too few bytes."""
        if self.cache is not None:
            raise QuantError("this device has a cache already; its tables share one")
        try:
            self.cache = Cache(self.device, budget_bytes, settings, smallest_row_bytes=smallest_row_bytes, stream=self.stream)
        except torch.OutOfMemoryError as error:
            raise QuantError(
                f"a cache of {budget_bytes:,} bytes does not fit on {self.device}; take a smaller budget ({error})"
            ) from error
        return self.cache

    # ---- stashing ----

    def stash(self) -> int:
        """Gives back the memory of all stashable tables, after lookups that are under way; returns how many bytes.

        Nothing is copied: the host keeps the rows. The next lookup brings them back, or `restore` before it.
        """
        with self.lock:
            self.device.synchronize()
            given = [table for table in self._stashable if not table.is_away]
            for table in given:
                table.give_back()
            self._restored = None
            return sum(table.bytes for table in given)

    def restore(self) -> None:
        """Begins to bring stashed tables back, on a stream of its own. The next lookup waits for it, the caller does not.

        QuantError: there is no room for all; make some, and call again, or look up.
        """
        with self.lock:
            away = [table for table in self._stashable if table.is_away]
            if not away:
                return
            with self.device.on(self._copies):
                for table in away:
                    table.bring_back()
                    self._restored = self.device.event()
                    self._restored.record()

    def await_tables(self) -> None:
        """Later work on the current stream finds stashed tables in their place."""
        if not self._stashable:
            return
        self.restore()
        if self._restored is not None:
            self.device.wait(self._restored)

    # ---- lookups ----

    def plan(self, lookups: Sequence[Lookup], threads: int = 1, out_bytes: int = 0) -> GpuPlan:
        """As the contract says. threads: of the CPU, at least the backend's own. QuantError: as for `lay_out`."""
        threads = max(threads, self.threads)
        layout = lay_out(lookups, self.cpu, threads, configs=self.configs, gather_from=self.gather_from, out_bytes=out_bytes)
        return GpuPlan(self, layout)

    def planner(self, kinds: Sequence[LookupKind], threads: int = 1) -> Planner:
        return SteadyPlanner(self, kinds, threads) if are_steady(kinds) else super().planner(kinds, threads)

    def lookup(
        self,
        table: RowSource,
        ids: Ids,
        lengths: Lengths | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        weights: NDArray[np.float32] | None = None,
        half: bool = False,
        out: Floats | None = None,
        threads: int = 1,
    ) -> Floats:
        """As the contract says; a table of the host is copied to the device for this one call."""
        held = self.to_hbm(table) if isinstance(table, Table) else table
        out = contract.check_arguments(held, ids, lengths, pooling, weights, half, out)
        bags = 0 if lengths is None else lengths.size
        lengths_at = None if lengths is None else ids.nbytes
        weights_at = None if weights is None else ids.nbytes + 4 * bags
        precision = Precision.FP16 if half else Precision.FP32
        lk = Lookup(held, pooling, 0, ids.size, 0, precision, bags, lengths_at, weights_at=weights_at)
        inputs = b"".join(array.tobytes() for array in (ids, lengths, weights) if array is not None)
        self.plan([lk], threads).run(inputs, out.reshape(-1).view(np.uint8))
        return out

    def dequantize(self, table: RowSource, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        return super().dequantize(by_row_number(table), start, stop)

    def run(self, requests: Sequence[tuple[Plan, Any]]) -> list[Buffer | BadIds]:
        """Runs several requests, (plan, inputs) each, as one batch; each gets its outputs, uint8, or what is wrong with it.

        The outputs are the caller's; they keep the batch's page-locked memory until the last of them is let go.
        """
        results, _ = self.run_timed(requests, timed=False)
        return [result if isinstance(result, BadIds) else result.outputs for result in results]

    def run_timed(
        self, requests: Sequence[tuple[Plan, Any]], timed: bool = True, follower: Follower | None = None
    ) -> tuple[list[LookedUp | BadIds], Times | None]:
        """As `run`, with what was not found of each request, and where the time went.

        follower: runs on the device before this waits for it, in the requests' order. Where a request is refused its rows are
        whatever numbers, all finite; those of others do not depend on it.
        """
        return self.finish(self.begin(requests, timed, follower))

    def start(self, requests: Sequence[tuple[Plan, Any]], timed: bool = False, follower: Follower | None = None) -> Started:
        """As of `Batches`."""
        return self._batches.start(requests, timed, follower)

    def wait(self, started: Started) -> tuple[list[LookedUp | BadIds], Times | None]:
        """As of `Batches`."""
        return self._batches.wait(started)

    def begin(self, requests: Sequence[tuple[Plan, Any]], timed: bool = False, follower: Follower | None = None) -> Begun:
        """As of `Batches`."""
        return self._batches.begin(requests, timed, follower)

    def finish(self, begun: Begun) -> tuple[list[LookedUp | BadIds], Times | None]:
        """As of `Batches`."""
        return self._batches.finish(begun)

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Nobody else looks up with this backend meanwhile; what is launched goes where it launches."""
        with self.lock:
            if self._is_on_stream:  # this thread is: entering it takes as long as a launch
                yield
                return
            self._is_on_stream = True
            try:
                with self.device.on(self.stream):
                    yield
            finally:
                self._is_on_stream = False

    def warm_up_overlays(self) -> None:
        """Compiles what lookups in tables with overlays take beside what others do, before there is one."""
        with self.on_stream():
            nothing = torch.zeros(64, dtype=torch.int64, device=self.device.torch_device)  # a job of no ids
            at = nothing.data_ptr()
            nothing[ResolveField.ROW_MAP] = at + 256  # zeros as well
            self._resolvers[True](1, self.device.current_handle(), at, at + 256, at, at, at, at)

    def warm_up_follower(self, warm_up: Callable[[], None]) -> None:
        """Compiles what a follower takes, before there is one. warm_up: what is its own part of that, called as `run` will be."""
        with self.on_stream():
            nothing = torch.zeros(64, dtype=torch.int64, device=self.device.torch_device)  # a job of no values
            nothing[FillField.WIDTH] = 1
            self.fill(1, self.device.current_handle(), nothing.data_ptr(), nothing.data_ptr())
            warm_up()

    def write_answers_to(self, memory: Buffer, take: Callable[[int], Buffer]) -> None:
        """Has `run` write what callers get to parts of `memory`, uint8, which is page-locked now and stays mapped.

        take: gives a part of so many bytes, which is the caller's as long as an array over it lives. QuantError: CUDA cannot
        lock the memory.
        """
        self.device.page_lock(memory.ctypes.data, memory.size)
        with self.lock:
            self._batches.write_answers_by(take)

    def read_inputs_in(self, memory: Buffer) -> None:
        """Has the device copy large inputs that lie in this memory from there. It is page-locked until its last view goes.

        Inputs stay as they are until their batch is done. QuantError: CUDA cannot lock the memory.
        """
        self._batches.locked.add(memory)

    def resolve(
        self, launches: Launches, source: torch.Tensor, inputs: torch.Tensor, outputs: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Makes row numbers of ids, on the current stream: of those in `source`, written to `inputs`, which may be the same.

        outputs: where found masks go. counts: int64 [jobs * 2], on the device, to which it adds what was not found.
        """
        if launches.resolve is not None:
            self.resolve_at(launches.resolve, source.data_ptr(), inputs.data_ptr(), outputs.data_ptr(), counts.data_ptr())

    def resolve_at(self, jobs: ResolveJobs, source: int, inputs: int, outputs: int, counts: int) -> None:
        """As `resolve`, of jobs that are placed, with the addresses that their offsets count from."""
        self.await_tables()  # ids may lie in their rows
        resolve = self._resolvers[jobs.is_overlaid]
        resolve(jobs.programs, self.device.current_handle(), jobs.jobs_at, jobs.programs_at, source, inputs, outputs, counts)

    def prefetch(self, launches: Launches, inputs: torch.Tensor) -> Ticket | None:
        """Has the cache bring the rows that it must; None: nothing is read through it. inputs: with row numbers for ids."""
        if launches.probe is None:
            return None
        if self.cache is None:
            raise QuantError("the plan reads through another device's cache; make it with this backend's tables")
        return self.cache.prefetch(launches.probe, inputs)

    def launch(
        self,
        launches: Launches,
        flags: torch.Tensor,
        inputs: torch.Tensor,
        outputs: torch.Tensor,
        scratch: torch.Tensor,
        ticket: Ticket | None = None,
    ) -> None:
        """Launches the lookups on the current stream, once the ticket's rows are there; the host waits for nothing.

        flags: int32 [jobs], zeros, on the device or page-locked; 1 is written where an id or a length of the job is wrong.
        ticket: is released behind the lookups.
        """
        self.await_tables()
        locations, staging = (0, 0) if ticket is None else (ticket.locations.data_ptr(), ticket.staging)
        if ticket is not None:
            ticket.wait()
        stream = self.device.current_handle()
        inputs_at, outputs_at, scratch_at = inputs.data_ptr(), outputs.data_ptr(), scratch.data_ptr()
        for one in launches.lookups:
            jobs, programs = launches.address + one.jobs_at, launches.address + one.programs_at
            flags_at = flags.data_ptr() + 4 * one.first_flag
            if one.has_lengths:
                self._bag_starts(one.jobs, stream, jobs, inputs_at, scratch_at, flags_at)
            self._kernel_of(one)(
                one.programs, stream, jobs, programs, inputs_at, scratch_at, outputs_at, flags_at, locations, staging
            )
        if ticket is not None:
            ticket.release()

    def _kernel_of(self, launch: Launch) -> Kernel:
        """The kernel for a launch, compiled when it is first launched."""
        key = (launch.key, launch.pooled, launch.is_weighted, launch.is_indirect, launch.config)
        if key not in self._kernels:
            self._kernels[key] = kernels.lookup(
                launch.key,
                launch.config,
                pooled=launch.pooled,
                is_weighted=launch.is_weighted,
                is_indirect=launch.is_indirect,
            )
        return self._kernels[key]

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Nobody else looks up with this backend, stashes its tables, or changes its cache meanwhile."""
        with self.lock, nullcontext() if self.cache is None else self.cache.exclusive():
            yield
