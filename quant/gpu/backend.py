"""Lookups on a GPU: every table of every request in hand, in one launch of `quant.gpu.lookup_kernel`.

One copy takes jobs and ids to the device, one launch looks up (one more where bags have lengths of their own, one more where
some features are not pooled), one copy brings the vectors back.

Rows that stay in host memory are read by the GPU itself where a lookup has few ids, and always where a table is split. Random
reads over a large span are slow that way (translation, not bytes: docs/log.md), so from `gather_from` ids on, the CPU gathers the
rows into page-locked memory, and each piece is copied over while the next one is gathered. Or they are read through a cache
(`open_cache`).
"""

import ctypes
import dataclasses
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant import contract
from tableside.quant.contract import (
    INTERPRETER,
    SPLIT_BLOCK,
    Backend,
    CpuBackend,
    DeviceTable,
    Floats,
    Ids,
    InCache,
    Lengths,
    Lookup,
    Plan,
    Pooling,
    Precision,
    Split,
    Table,
    Variant,
    split_rows,
)
from tableside.quant.device.memory import DeviceMemory
from tableside.quant.errors import BadIds, MissingBackend, QuantError

try:
    from tableside.quant.gpu import lookup_kernel as fused_kernel
except ImportError as error:
    raise MissingBackend(f"triton does not import ({error}); install tableside[cuda], or serve without --devices") from error
from tableside.quant.cache.cache import Cache
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.cache.tickets import Ticket
from tableside.quant.device.launch import Kernel
from tableside.quant.gpu.batch import Batch, Buffer, Buffers, Clock, Group, Launches, Times, jobs_on_device
from tableside.quant.gpu.layout import Layout, Shape, Shapes
from tableside.quant.gpu.prepared import PreparedLookup

GATHER_FROM = 4096  # ids of host rows in a request from which the CPU gathers them
# A program costs milliseconds there, whatever its width.
_INTERPRETED = Shapes(Shape(4, 1024, 4), Shape(2, 1024, 4), Shape(1, 1024, 4), Shape(2, 256, 4, 4))
_STARTS_BLOCK = 1024
_COPY_PIECE = 64 << 20


class FusedPlan(Plan):
    """Lookups of one request, laid out for `Fused.run`."""

    def __init__(self, fused: "Fused", layout: Layout) -> None:
        self._fused, self.layout = fused, layout
        self._runs = 0
        self._alone: tuple[torch.Tensor, Launches] | None = None

    @property
    def staged_bytes(self) -> int:
        """Bytes that a run takes of the buffers that the requests of a batch share."""
        return self.layout.staged_bytes

    def alone(self) -> "Launches | None":
        """What is to be launched where this plan is a whole batch: from its second run on its jobs are on the device.

        Not so where rows are gathered: they lie wherever the buffer for them does.
        """
        self._runs += 1
        if self.layout.gathers or self._runs < 2:
            return None
        if self._alone is None:
            self._alone = jobs_on_device(self.layout, self._fused.device, self._fused.is_interpreted)
        return self._alone[1]

    def run(self, inputs: Any, outputs: Any) -> None:
        (result,) = self._fused.run([(self, inputs)])
        if isinstance(result, BadIds):
            raise result
        target = np.frombuffer(outputs, np.uint8)
        for lk in self.layout.lookups:
            target[lk.out_at : lk.out_at + lk.out_bytes] = result[lk.out_at : lk.out_at + lk.out_bytes]


def _fused(plan: Plan) -> FusedPlan:
    assert isinstance(plan, FusedPlan), "a plan of another backend"
    return plan


class Fused(Backend):
    """The fused kernel on one device: "cuda:0", or "interpreter" for Triton's interpreter on the CPU (slow, for tests).

    cpu: looks up the tables that are not on the device, and gathers, with `threads`. priority: of its stream; lower numbers go
    first, 0 is the last. One batch runs at a time.
    MissingBackend: there is no such device.
    """

    name = "fused"

    def __init__(
        self,
        device: str,
        cpu: CpuBackend,
        *,
        threads: int = 1,
        gather_from: int = GATHER_FROM,
        shapes: Shapes | None = None,
        priority: int = -1,
    ) -> None:
        self.cpu, self.threads, self.gather_from = cpu, threads, gather_from
        self.is_interpreted = device == INTERPRETER
        if self.is_interpreted != fused_kernel.interpreted():
            raise MissingBackend(
                f"device {device!r} was asked for, and TRITON_INTERPRET was {'not ' if self.is_interpreted else ''}set when "
                f"the kernels were imported; {'set it to 1' if self.is_interpreted else 'unset it'}"
            )
        self.shapes = shapes or (_INTERPRETED if self.is_interpreted else Shapes())
        self.device = torch.device("cpu") if self.is_interpreted else _cuda(device)
        self._lock = threading.RLock()
        self._stream = None if self.is_interpreted else torch.cuda.Stream(self.device, priority)  # type: ignore[no-untyped-call]
        self._buffers = Buffers(self.device)
        self._bag_starts = Kernel(fused_kernel.bag_starts, 4, BLOCK=_STARTS_BLOCK)
        self._lookups: dict[Any, Kernel] = {}
        self._stashable: weakref.WeakSet[DeviceTable] = weakref.WeakSet()
        self._copies = None if self.is_interpreted else torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._restored: Any = None
        self.cache: Cache | None = None

    @property
    def description(self) -> str:
        on = "Triton's interpreter" if self.is_interpreted else f"{torch.cuda.get_device_name(self.device)}, {self.device}"
        return f"fused ({on})"

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device's memory."""
        if self.is_interpreted:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def is_lost(self) -> bool:
        """Whether the device is of no more use to this process, as after most errors of a kernel. Waits for what runs."""
        if self.is_interpreted:
            return False
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False

    def trim(self) -> None:
        """Gives the device's memory that nothing uses back to it, for other processes."""
        if not self.is_interpreted:
            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()

    # ---- tables ----

    def hold(
        self, table: Table, source: torch.Tensor | None = None, variant: Variant | None = None, *, stashable: bool = False
    ) -> DeviceTable:
        """Copies a table to the device's memory, and waits for it.

        source: its rows, uint8 [bytes], where they copy faster (registered memory). variant: of all tables that are used
        together with this one. stashable: `stash` gives its memory back. QuantError: it does not fit.
        """
        if stashable:
            pages = DeviceMemory(table.packed.size, self.device)
            _copy(pages.tensor, _bytes_of(table) if source is None else source, is_pinned=source is not None)
            held = DeviceTable(table, pages.tensor.data_ptr(), True, (pages, source), variant or Variant.of(table))
            self._stashable.add(held)
            return held
        try:
            memory = torch.empty(table.packed.size, dtype=torch.uint8, device=self.device)
            _copy(memory, _bytes_of(table) if source is None else source, is_pinned=source is not None)
        except torch.OutOfMemoryError as error:
            raise QuantError(
                f"a table of {table.packed.size:,} bytes does not fit on {self.device}; lower --hbm-budget, or choose "
                f"--placement uvm ({error})"
            ) from error
        return DeviceTable(table, memory.data_ptr(), True, memory, variant or Variant.of(table))

    def stash(self) -> int:
        """Gives back the memory of all tables that were held for it, after lookups that are under way; returns how many bytes.

        Nothing is copied: the rows lie with the host. The next lookup brings them back, or `restore` before it.
        """
        with self._lock:
            if self._stream is not None:
                torch.cuda.synchronize(self.device)
            given = [held.memory[0] for held in list(self._stashable) if held.memory[0].is_taken]
            for pages in given:
                pages.give_back()
            self._restored = None
            return sum(pages.size for pages in given)

    def restore(self) -> None:
        """Begins to bring stashed tables back, on a stream of its own, which the next lookup waits for; nobody else does.

        QuantError: there is no room for all; make some, and call again, or look up.
        """
        with self._lock:
            away = [held for held in list(self._stashable) if not held.memory[0].is_taken]
            if not away:
                return
            with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
                for held in away:
                    pages, source = held.memory
                    pages.take()
                    try:
                        pages.tensor.copy_(_bytes_of(held.host) if source is None else source, non_blocking=True)
                    except BaseException:
                        pages.give_back()
                        raise
                    if self._copies is not None:
                        self._restored = torch.cuda.Event()  # type: ignore[no-untyped-call]
                        self._restored.record()

    def _await_tables(self) -> None:
        """What comes next on the current stream finds stashed tables in their place."""
        self.restore()
        if self._restored is not None and not torch.cuda.is_current_stream_capturing():
            self._restored.wait()

    def view(self, table: Table, rows: torch.Tensor | None, variant: Variant | None = None) -> DeviceTable:
        """A table that the device reads where the host holds it. rows: uint8 [bytes] on the device, over registered memory.

        None: the table's own memory, which the interpreter reads.
        """
        if rows is None and not self.is_interpreted:
            raise QuantError("a GPU reads registered memory alone; pass the view that tableside.loader.registration gives")
        memory = _bytes_of(table) if rows is None else rows
        return DeviceTable(table, memory.data_ptr(), False, memory, variant or Variant.of(table))

    def open_cache(self, budget_bytes: int, smallest_row_bytes: int = 32, settings: CacheSettings | None = None) -> Cache:
        """Makes the device's cache, for the tables given to `cached`. QuantError: there is one, or too few bytes."""
        if self.cache is not None:
            raise QuantError("this device has a cache already; its tables share one")
        try:
            self.cache = Cache(
                self.device,
                budget_bytes,
                settings,
                smallest_row_bytes=smallest_row_bytes,
                stream=self._stream,
                is_interpreted=self.is_interpreted,
            )
        except torch.OutOfMemoryError as error:
            message = f"a cache of {budget_bytes:,} bytes does not fit on {self.device}; lower --hbm-budget ({error})"
            raise QuantError(message) from error
        return self.cache

    def cached(self, table: Table, rows: torch.Tensor | None, variant: Variant | None = None, name: str = "") -> DeviceTable:
        """A table that the device reads through its cache; rows: as for `view`, name: for statistics.

        It leaves the cache with the last reference.
        """
        if self.cache is None:
            raise QuantError("this device has no cache; open_cache makes one")
        seen = self.view(table, rows, variant)
        registered = self.cache.registered(seen.address, table.rows, table.row_bytes, name)
        place = InCache(registered.number, self.cache.slots_address)
        return dataclasses.replace(seen, memory=(seen.memory, registered), in_cache=place)

    def split(self, table: Table, rows: torch.Tensor | None, share: int, variant: Variant | None = None) -> DeviceTable:
        """A table of which the first `share` of every SPLIT_BLOCK rows are copied to the device, the others read as by `view`.

        QuantError: share is not from 1 to SPLIT_BLOCK - 1, or there is no room.
        """
        if not 0 < share < SPLIT_BLOCK:
            raise QuantError(
                f"a share of {share} of {SPLIT_BLOCK} rows; expected 1 to {SPLIT_BLOCK - 1}, or hold or view the table"
            )
        seen = self.view(table, rows, variant)
        size = table.row_bytes
        blocks = table.rows // SPLIT_BLOCK
        on_device = split_rows(table.rows, share)
        try:
            memory = torch.empty(on_device * size, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise QuantError(
                f"{share} of {SPLIT_BLOCK} rows do not fit on {self.device}; lower --hbm-budget ({error})"
            ) from error
        whole = blocks * SPLIT_BLOCK * size
        copied, rest = memory[: blocks * share * size], memory[blocks * share * size :]
        copied.view(blocks, share * size).copy_(seen.memory[:whole].view(blocks, SPLIT_BLOCK * size)[:, : share * size])
        rest.copy_(seen.memory[whole : whole + rest.numel()])
        if not self.is_interpreted:
            torch.cuda.current_stream(self.device).synchronize()
        return dataclasses.replace(seen, memory=(seen.memory, memory), split=Split(share, memory.data_ptr()))

    # ---- lookups ----

    def plan(self, lookups: Sequence[Lookup], threads: int = 1, out_bytes: int = 0) -> FusedPlan:
        return FusedPlan(self, Layout(lookups, self.cpu, max(threads, self.threads), self.shapes, self.gather_from, out_bytes))

    def lookup(
        self,
        table: Table | DeviceTable,
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
        held = self.hold(table) if isinstance(table, Table) else table
        out = contract.check_arguments(held.host, ids, lengths, pooling, weights, half, out)
        bags = 0 if lengths is None else lengths.size
        lengths_at = None if lengths is None else ids.nbytes
        weights_at = None if weights is None else ids.nbytes + 4 * bags
        precision = Precision.FP16 if half else Precision.FP32
        lk = Lookup(held, pooling, 0, ids.size, 0, precision, bags, lengths_at, weights_at=weights_at)
        inputs = b"".join(array.tobytes() for array in (ids, lengths, weights) if array is not None)
        self.plan([lk], threads).run(inputs, out.reshape(-1).view(np.uint8))
        return out

    def run(self, requests: Sequence[tuple[Plan, Any]]) -> list[Buffer | BadIds]:
        """Runs several requests, (plan, inputs) each, as one batch; each gets its outputs, uint8, or what is wrong with it.

        The outputs are the caller's; they keep the batch's page-locked memory until the last of them is let go.
        """
        return self.run_timed(requests, timed=False)[0]

    def run_timed(self, requests: Sequence[tuple[Plan, Any]], timed: bool = True) -> tuple[list[Buffer | BadIds], Times | None]:
        """As `run`, and where the time went."""
        with self._lock:
            if self._stream is None:
                with np.errstate(all="ignore"):  # a GPU does not warn either
                    return self._run(requests, timed)
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                try:
                    return self._run(requests, timed)
                except BaseException:
                    if self.cache is not None:
                        self.cache.join_all()
                    self._stream.synchronize()  # what is under way reads and writes the buffers of the next batch
                    raise

    def _run(self, requests: Sequence[tuple[Plan, Any]], timed: bool) -> tuple[list[Buffer | BadIds], Times | None]:
        clock = Clock(self._stream) if timed else None
        plans = [_fused(plan) for plan, _ in requests]
        batch = Batch(self._buffers, [plan.layout for plan in plans], self.is_interpreted)
        for n, (_, inputs) in enumerate(requests):
            batch.stage(n, inputs)
        if clock:
            clock.mark()
        launches = batch.send(plans[0].alone() if len(plans) == 1 else None)
        if clock:
            clock.mark()
        buffers = self._buffers
        ticket = self.prefetch(launches, buffers.device_in)
        self.launch(launches.groups, batch.flags, buffers.device_in, buffers.device_out, buffers.scratch, ticket)
        if clock:
            clock.mark()
        outputs = buffers.host(batch.out_bytes)
        outputs.copy_(buffers.device_out[: batch.out_bytes], non_blocking=True)
        if clock:
            clock.mark()
        for n, (_, inputs) in enumerate(requests):
            batch.run_on_host(n, inputs)
        if self._stream is not None:
            self._stream.synchronize()
        return batch.results([inputs for _, inputs in requests], outputs.numpy()), clock.times() if clock else None

    def prefetch(self, launches: "Launches", inputs: torch.Tensor) -> "Ticket | None":
        """Has the cache bring what it is to; None: nothing is read through it."""
        if launches.cached is None:
            return None
        assert self.cache is not None, "tables of another device's cache"
        return self.cache.prefetch(launches.cached, inputs)

    def launch(
        self,
        groups: "Sequence[Group]",
        flags: torch.Tensor,
        inputs: torch.Tensor,
        outputs: torch.Tensor,
        scratch: torch.Tensor,
        ticket: "Ticket | None" = None,
    ) -> None:
        """Launches what the groups need, on the current stream, once the ticket's rows are there; the host waits for nothing.
        `ticket` is released behind them.

        flags int32 [jobs], zeros, on the device or page-locked: 1 where an id or a length of the job is wrong.
        """
        if self._stashable:
            self._await_tables()
        locations, pad = (0, 0) if ticket is None else (ticket.locations.data_ptr(), ticket.staging)
        if ticket is not None:
            ticket.wait()
        stream = None if self._stream is None else torch.cuda.current_stream(self.device).cuda_stream
        inputs_at, outputs_at, scratch_at = inputs.data_ptr(), outputs.data_ptr(), scratch.data_ptr()
        for g in groups:
            flags_at = flags.data_ptr() + 4 * g.first_flag
            if g.has_lengths:
                self._bag_starts(g.jobs, stream, g.at, inputs_at, scratch_at, flags_at)
            self._lookup_of(g)(
                g.programs, stream, g.at, g.programs_at, inputs_at, scratch_at, outputs_at, flags_at, locations, pad
            )
        if ticket is not None:
            ticket.release()

    def _lookup_of(self, g: "Group") -> Kernel:
        """The kernel for a group, compiled when it is first launched."""
        key = (g.variant, g.pooled, g.is_weighted, g.is_cached, g.shape)
        if key not in self._lookups:
            self._lookups[key] = Kernel(
                fused_kernel.lookup,
                g.shape.warps,
                FORMATS=g.variant.formats,
                POOLED=g.pooled,
                WEIGHTED=g.is_weighted,
                CACHED=g.is_cached,
                WHOLE_WORDS=g.variant.whole_words,
                ROWS=g.shape.rows,
                COLUMNS=g.shape.columns,
                WALKERS=g.shape.walkers,
            )
        return self._lookups[key]

    def prepare(self, plan: FusedPlan) -> "PreparedLookup":
        """A plan for inputs and outputs that are on the device already; its jobs are copied there once.

        QuantError: not all of the plan runs on the device.
        """
        if plan.layout.host is not None or plan.layout.gathers:
            raise QuantError("a plan with lookups that begin on the CPU cannot be prepared; hold its tables on the device")
        return PreparedLookup(self, plan.layout)


def _cuda(device: str) -> torch.device:
    """The device; MissingBackend where it is not one that CUDA has here."""
    if not torch.cuda.is_available():
        raise MissingBackend(
            f"device {device!r} was asked for, and torch {torch.__version__} finds no CUDA device here; "
            "serve without --devices, or check the driver (nvidia-smi) and that torch was built for CUDA"
        )
    if device not in (known := [f"cuda:{n}" for n in range(torch.cuda.device_count())]):
        raise MissingBackend(f"device {device!r} is unknown; this machine has: {', '.join(known)}")
    return torch.device(device)


def _bytes_of(table: Table) -> torch.Tensor:
    """A table's memory as a tensor, uint8 [bytes]. It is not kept alive by it, and must not be written to."""
    # torch warns of arrays that say they are read-only, as a segment's do.
    memory = (ctypes.c_uint8 * table.packed.size).from_address(table.address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _copy(target: torch.Tensor, source: torch.Tensor, is_pinned: bool) -> None:
    """Fills a tensor on a device from the host, and waits until it is.

    Memory that is not page-locked goes through two pieces that are, in turn.
    """
    if target.device.type != "cuda":
        target.copy_(source)
        return
    with torch.cuda.device(target.device):
        if is_pinned:
            target.copy_(source)
            torch.cuda.current_stream().synchronize()
            return
        piece = min(_COPY_PIECE, source.numel())
        pieces = [torch.empty(piece, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        for n, start in enumerate(range(0, source.numel(), piece)):
            size = min(piece, source.numel() - start)
            copied[n % 2].synchronize()
            pieces[n % 2][:size].copy_(source[start : start + size])
            target[start : start + size].copy_(pieces[n % 2][:size], non_blocking=True)
            copied[n % 2].record()
        torch.cuda.current_stream().synchronize()
