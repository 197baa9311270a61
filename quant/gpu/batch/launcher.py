"""Launches of lookups on one device, with their stream and lock."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from tableside.quant.cache.cache import Cache
from tableside.quant.cache.tickets import Ticket
from tableside.quant.device.device import Device
from tableside.quant.device.launch import Jobs, Kernel
from tableside.quant.errors import QuantError
from tableside.quant.gpu.batch.buffers import Buffers
from tableside.quant.gpu.batch.follower import FILL_BLOCK
from tableside.quant.gpu.batch.placed import Launch, Launches
from tableside.quant.gpu.batch.resolve import RESOLVE_BLOCK
from tableside.quant.gpu.batch.ring import CopyRing
from tableside.quant.gpu.kernels import compiled as kernels
from tableside.quant.gpu.kernels.job import FillField, ResolveField
from tableside.quant.gpu.residence.stashable import StashableTables


class Launcher:
    """Launches kernels on one device.
    lock: held during launches. stream: of batches, which goes first. copies: a stream beside lookups. cache:
    the device's, once open. stashable: tables that a lookup may have to restore. ring: for who has
    the lock."""

    def __init__(self, device: Device) -> None:
        self.device, self.lock = device, threading.RLock()
        self.stream, self.copies = device.stream(-1), device.stream()
        self.cache: Cache | None = None
        self.stashable = StashableTables(device)
        self.ring = CopyRing(device)
        self._is_on_stream = False  # the thread that holds the lock is on the stream
        self.resolvers = {
            overlaid: kernels.resolver(device.block(RESOLVE_BLOCK), overlaid) for overlaid in (False, True)
        }
        self._bag_starts, self.fill = kernels.bag_starts(), kernels.filler(device.block(FILL_BLOCK))
        self._lookups: dict[Any, Kernel] = {}

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Nobody else looks up on the device meanwhile; what is launched goes to `stream`."""
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

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Nobody else looks up on the device, stashes its tables, or changes its cache meanwhile."""
        with self.lock, nullcontext() if self.cache is None else self.cache.exclusive():
            yield

    def settle(self) -> None:
        """Waits for what is under way on the stream and in the cache."""
        if self.cache is not None:
            self.cache.join_all()
        self.stream.synchronize()

    # ---- tables that are away ----

    def stash(self) -> int:
        """Frees the memory of all stashable tables after running lookups; returns the bytes."""
        with self.lock:
            self.device.synchronize()
            return self.stashable.stash()

    def restore(self) -> None:
        """Begins to bring stashed tables back, on a stream of its own."""
        with self.lock:
            if self.stashable.away:
                with self.device.on(self.copies):
                    self.stashable.restore()

    def await_tables(self) -> None:
        """Later work on the current stream finds stashed tables in their place."""
        if self.stashable.all:
            self.restore()
            self.stashable.wait()

    # ---- launches ----

    def resolve(
        self, jobs: Jobs, is_overlaid: bool, source: int, inputs: int, outputs: int, counts: int
    ) -> None:
        """Turns ids into row numbers on the current stream. jobs: addresses. is_overlaid: a table has an
        overlay. source, inputs, outputs: base addresses of ids, row numbers and found masks. counts: device
        address of int64 [jobs * 2], incremented by `Unfound`."""
        self.await_tables()  # ids may lie in their rows
        self.resolvers[is_overlaid](
            jobs.programs,
            self.device.current_handle(),
            jobs.jobs_at,
            jobs.programs_at,
            source,
            inputs,
            outputs,
            counts,
        )

    def prefetch(self, launches: Launches, inputs: torch.Tensor) -> Ticket | None:
        """Makes the cache fetch the batch's rows; None: no table is cached. inputs: row numbers for ids."""
        if launches.probe is None:
            return None
        if self.cache is None:
            raise QuantError(
                "the plan reads through another device's cache; make it with this backend's tables"
            )
        return self.cache.prefetch(launches.probe, inputs)

    def look_up(self, launches: Launches, buffers: Buffers, ticket: Ticket | None) -> None:
        """Launches the lookups on the current stream behind the ticket's rows, without waiting.
        buffers.flags: int32 [jobs], zeros; 1 is written for a job with a wrong id or length. ticket: released
        behind the lookups."""
        self.await_tables()
        locations, staging = (0, 0) if ticket is None else (ticket.locations.data_ptr(), ticket.staging)
        if ticket is not None:
            ticket.wait()
        stream = self.device.current_handle()
        inputs, outputs = buffers.device_in.data_ptr(), buffers.device_out.data_ptr()
        scratch, flags = buffers.scratch.data_ptr(), buffers.flags.data_ptr()
        for one in launches.lookups:
            jobs, programs = launches.address + one.jobs_at, launches.address + one.programs_at
            flags_at = flags + 4 * one.first_flag
            if one.has_lengths:
                self._bag_starts(one.jobs, stream, jobs, inputs, scratch, flags_at)
            kernel = self._kernel_of(one)
            kernel(
                one.programs, stream, jobs, programs, inputs, scratch, outputs, flags_at, locations, staging
            )
        if ticket is not None:
            ticket.release()

    def _kernel_of(self, launch: Launch) -> Kernel:
        """The kernel for a launch, compiled when it is first launched."""
        key = (launch.key, launch.pooled, launch.is_weighted, launch.is_indirect, launch.config)
        if key not in self._lookups:
            self._lookups[key] = kernels.lookup(
                launch.key,
                launch.config,
                pooled=launch.pooled,
                is_weighted=launch.is_weighted,
                is_indirect=launch.is_indirect,
            )
        return self._lookups[key]

    # ---- warming up ----

    def warm_up_overlays(self) -> None:
        """Compiles what lookups in tables with overlays take beside what others do, before there is one."""
        with self.on_stream():
            nothing = torch.zeros(64, dtype=torch.int64, device=self.device.torch_device)  # a job of no ids
            at = nothing.data_ptr()
            nothing[ResolveField.ROW_MAP] = at + 256  # zeros as well
            self.resolvers[True](1, self.device.current_handle(), at, at + 256, at, at, at, at)

    def warm_up_follower(self, warm_up: Callable[[], None]) -> None:
        """Compiles a follower's kernels before it exists. warm_up: its own part, called like `run`."""
        with self.on_stream():
            nothing = torch.zeros(
                64, dtype=torch.int64, device=self.device.torch_device
            )  # a job of no values
            nothing[FillField.WIDTH] = 1
            self.fill(1, self.device.current_handle(), nothing.data_ptr(), nothing.data_ptr())
            warm_up()


class OnDevice:
    """A context in which launches go to a device, and nobody else launches there."""

    def __init__(self, launcher: Launcher) -> None:
        self._lock, self._device = launcher.lock, launcher.device
        self._others: list[Any] = []  # contexts to leave, one for each time that this was entered

    def __enter__(self) -> None:
        self._lock.acquire()
        if (other := self._device.switch()) is not None:
            other.__enter__()
        self._others.append(other)

    def __exit__(self, *error: object) -> None:
        if (other := self._others.pop()) is not None:
            other.__exit__(*error)
        self._lock.release()
