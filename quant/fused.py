"""Lookups on a GPU: every table of every request in hand, in one launch of `quant.fused_kernel`.

One copy takes jobs and ids to the device, one launch looks up (one more where bags have lengths of their own, one more where
some features are not pooled), one copy brings the vectors back.

Rows that stay in host memory are read by the GPU itself where a lookup has few ids. Random reads over a large span are slow
that way (translation, not bytes: docs/log.md), so from `gather_from` ids on, the CPU gathers the rows into page-locked
memory, and each piece is copied over while the next one is gathered.
"""

import ctypes
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quant import contract
from quant.contract import Backend, CpuBackend, DeviceTable, Floats, Ids, Lengths, Lookup, Plan, Pooling, Precision, Table
from quant.errors import BadIds, MissingBackend, QuantError

try:
    from quant import fused_kernel
except ImportError as error:
    raise MissingBackend(f"triton does not import ({error}); install tableside[cuda], or serve without --devices") from error
from quant.fused_kernel import FIELDS, Field
from quant.fused_plan import Bases, Layout, Shape, Shapes, aligned

INTERPRETER = "interpreter"
GATHER_FROM = 256  # ids of a lookup of host rows from which the CPU gathers them
_INTERPRETED = Shapes(Shape(2, 1024, 4), Shape(1, 1024, 4))  # a program costs milliseconds there, whatever its width
_STARTS_BLOCK = 1024
_SMALLEST = 4096  # bytes of a buffer
_COPY_PIECE = 64 << 20

Buffer = NDArray[np.uint8]


@dataclass(frozen=True)
class Times:
    """Where the time of a batch went, in seconds: staging on the host, the copy in, kernels, the copy out."""

    staging: float
    copy_in: float
    kernels: float
    copy_out: float


class FusedPlan(Plan):
    """Lookups of one request, laid out for `Fused.run`."""

    def __init__(self, fused: "Fused", layout: Layout) -> None:
        self._fused, self.layout = fused, layout
        self._alone: tuple[torch.Tensor, list[Group]] | None = None

    def alone(self) -> "list[Group]":
        """What is to be launched where this plan is a whole batch; its jobs are on the device from the first call on."""
        if self._alone is None:
            self._alone = _on_device(self.layout, self._fused.device)
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

    cpu: looks up the tables that are not on the device, and gathers, with `threads`. One batch runs at a time.
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
        self._formats, self._whole_words = 0, True  # of all tables that were ever placed: what the kernel is compiled for
        self._lock = threading.Lock()
        self._stream = None if self.is_interpreted else torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._buffers = _Buffers(self.device)

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

    def is_lost(self, error: BaseException) -> bool:
        """Whether an error of `run` leaves the device unusable for this process, as most errors of CUDA do."""
        return isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)

    # ---- tables ----

    def hold(self, table: Table, source: torch.Tensor | None = None) -> DeviceTable:
        """Copies a table to the device's memory. source: its rows, uint8 [bytes], where they copy faster (registered memory).

        QuantError: it does not fit.
        """
        try:
            memory = torch.empty(table.packed.size, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise QuantError(
                f"a table of {table.packed.size:,} bytes does not fit on {self.device}; lower --hbm-budget, or choose "
                f"--placement uvm ({error})"
            ) from error
        with self._lock:
            _copy(memory, _bytes_of(table) if source is None else source, is_pinned=source is not None)
        return self._placed(table, memory, in_hbm=True)

    def view(self, table: Table, rows: torch.Tensor | None) -> DeviceTable:
        """A table that the device reads where the host holds it. rows: uint8 [bytes] on the device, over registered memory.

        None: the table's own memory, which the interpreter reads.
        """
        if rows is None and not self.is_interpreted:
            raise QuantError("a GPU reads registered memory alone; pass the view that loader.registration gives")
        return self._placed(table, _bytes_of(table) if rows is None else rows, in_hbm=False)

    def _placed(self, table: Table, memory: torch.Tensor, in_hbm: bool) -> DeviceTable:
        self._formats |= 1 << table.row_format
        self._whole_words &= table.dim * table.row_format.bits % 32 == 0
        return DeviceTable(table, memory.data_ptr(), in_hbm, memory)

    # ---- lookups ----

    def plan(self, lookups: Sequence[Lookup], threads: int = 1) -> FusedPlan:
        return FusedPlan(self, Layout(lookups, self.cpu, max(threads, self.threads), self.shapes, self.gather_from))

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
                return self._run(requests, timed)
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                return self._run(requests, timed)

    def _run(self, requests: Sequence[tuple[Plan, Any]], timed: bool) -> tuple[list[Buffer | BadIds], Times | None]:
        clock = _Clock(self._stream) if timed else None
        plans = [_fused(plan) for plan, _ in requests]
        batch = _Batch(self._buffers, [plan.layout for plan in plans])
        for n, (_, inputs) in enumerate(requests):
            batch.stage(n, inputs)
        if clock:
            clock.mark()
        # Gathered rows lie wherever the buffer for them does, so their jobs are not the same each time.
        is_alone = len(plans) == 1 and not plans[0].layout.gathers
        groups = batch.send(plans[0].alone() if is_alone else None)
        if clock:
            clock.mark()
        buffers = self._buffers
        self.launch(groups, batch.flags, buffers.device_in, buffers.device_out, buffers.scratch)
        if clock:
            clock.mark()
        outputs = buffers.result(batch.out_bytes)
        outputs.copy_(buffers.device_out[: batch.out_bytes], non_blocking=True)
        if clock:
            clock.mark()
        for n, (_, inputs) in enumerate(requests):
            batch.run_on_host(n, inputs)
        if self._stream is not None:
            self._stream.synchronize()
        return batch.results([inputs for _, inputs in requests], outputs.numpy()), clock.times() if clock else None

    def launch(
        self,
        groups: "Sequence[Group]",
        flags: torch.Tensor,
        inputs: torch.Tensor,
        outputs: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """Launches what the groups need, on the current stream; nothing is waited for.

        flags int32 [jobs], zeros, on the device or page-locked: 1 where an id or a length of the job is wrong.
        """
        for g in groups:
            flags_at = flags.data_ptr() + 4 * g.first_flag
            if g.has_lengths:
                fused_kernel.bag_starts[(g.jobs,)](g.at, inputs.data_ptr(), scratch.data_ptr(), flags_at, BLOCK=_STARTS_BLOCK)
            if g.programs:
                fused_kernel.lookup[(g.programs,)](
                    g.at,
                    g.programs_at,
                    inputs.data_ptr(),
                    scratch.data_ptr(),
                    outputs.data_ptr(),
                    flags_at,
                    FORMATS=self._formats,
                    POOLED=g.pooled,
                    WEIGHTED=g.is_weighted,
                    CACHED=g.is_cached,
                    WHOLE_WORDS=self._whole_words,
                    ROWS=g.shape.rows,
                    COLUMNS=g.shape.columns,
                    num_warps=g.shape.warps,
                )

    def prepare(self, plan: FusedPlan, caches: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None) -> "PreparedLookup":
        """A plan for inputs and outputs that are on the device already; its jobs are copied there once.

        caches: number of a lookup -> (slots uint8 [slots, row_bytes], locations int32 [ids]): a row whose location is not -1 is
        read from its slot. QuantError: not all of the plan runs on the device.
        """
        if plan.layout.host is not None or plan.layout.gathers:
            raise QuantError("a plan with lookups that begin on the CPU cannot be prepared; hold its tables on the device")
        return PreparedLookup(self, plan.layout, caches or {})


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
    """Fills a tensor on a device from the host. Memory that is not page-locked goes through two pieces that are, in turn."""
    if is_pinned or target.device.type != "cuda":
        target.copy_(source)
        return
    pieces = [torch.empty(_COPY_PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
    with torch.cuda.device(target.device):
        for n, start in enumerate(range(0, source.numel(), _COPY_PIECE)):
            size = min(_COPY_PIECE, source.numel() - start)
            copied[n % 2].synchronize()
            pieces[n % 2][:size].copy_(source[start : start + size])
            target[start : start + size].copy_(pieces[n % 2][:size], non_blocking=True)
            copied[n % 2].record()
        torch.cuda.synchronize()


class _Buffers:
    """Memory that the batches of one device share, one at a time; it grows, and stays. The host's side is page-locked.

    in: staged inputs and jobs; rows: gathered rows; out: vectors; scratch: starts of bags; flags: of jobs, on the host.
    In the interpreter the host's side is the device's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.host_in, self.device_in = self._pair(_SMALLEST)
        self.host_rows, self.device_rows = self._pair(_SMALLEST)
        self.device_out, self.scratch = self.on_device(_SMALLEST), self.on_device(_SMALLEST)
        self.flags = self.host(_SMALLEST)

    def host(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda)

    def on_device(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def result(self, size: int) -> torch.Tensor:
        """Host memory that a caller keeps; torch's allocator of page-locked memory hands it out again afterwards."""
        return self.host(size)

    def fit(self, inputs: int, rows: int, outputs: int, scratch: int, flags: int) -> None:
        """Makes room for so many bytes of each."""
        if inputs > self.host_in.numel():
            self.host_in, self.device_in = self._pair(_grown(inputs))
        if rows > self.host_rows.numel():
            self.host_rows, self.device_rows = self._pair(_grown(rows))
        if outputs > self.device_out.numel():
            self.device_out = self.on_device(_grown(outputs))
        if scratch > self.scratch.numel():
            self.scratch = self.on_device(_grown(scratch))
        if flags > self.flags.numel():
            self.flags = self.host(_grown(flags))

    def _pair(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        host = self.host(size)
        return host, self.on_device(size) if self._is_cuda else host


def _grown(n: int) -> int:
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Group:
    """The pooled or the unpooled jobs of a batch, on the device at addresses `at` and (the job of each program) `programs_at`."""

    pooled: bool
    shape: Shape
    jobs: int
    programs: int
    first_flag: int
    has_lengths: bool
    is_weighted: bool
    is_cached: bool
    at: int
    programs_at: int


def _header(layouts: Sequence[Layout], bases: Sequence[Bases], address: int) -> tuple[bytes, list[Group]]:
    """The jobs of a batch as bytes that will lie at `address` on the device, and what is to be launched."""
    parts: list[bytes] = []
    groups: list[Group] = []
    at = flag = 0
    for kind in range(2):
        members = [layout.groups[kind] for layout in layouts]
        rows, of_program, jobs, programs = [], [], 0, 0
        for member, base in zip(members, bases, strict=True):
            if len(member.rows):
                rows.append(member.shifted(base, programs).tobytes())
                of_program.append((member.job_of_program + np.int32(jobs)).tobytes())
                programs += member.job_of_program.size
                jobs += len(member.rows)
        if jobs:
            programs_at = at + 8 * FIELDS * jobs
            padding = bytes(-4 * programs % 8)
            parts += [*rows, *of_program, padding]
            groups.append(
                Group(
                    pooled=members[0].pooled,
                    shape=members[0].shape,
                    jobs=jobs,
                    programs=programs,
                    first_flag=flag,
                    has_lengths=any(m.has_lengths for m in members),
                    is_weighted=any(m.is_weighted for m in members),
                    is_cached=False,
                    at=address + at,
                    programs_at=address + programs_at,
                )
            )
            at = programs_at + 4 * programs + len(padding)
            flag += jobs
    return b"".join(parts), groups


def _on_device(layout: Layout, device: torch.device) -> tuple[torch.Tensor, list[Group]]:
    """The jobs of one request on the device, and what is to be launched."""
    memory = torch.empty(layout.header_bytes, dtype=torch.uint8, device=device)
    header, groups = _header([layout], [Bases()], memory.data_ptr())
    memory[: len(header)].copy_(torch.frombuffer(bytearray(header or b"0"), dtype=torch.uint8)[: len(header)])
    return memory, groups


class _Batch:
    """Requests that run together: where each one's bytes lie in the shared buffers."""

    def __init__(self, buffers: _Buffers, layouts: list[Layout]) -> None:
        self._buffers, self._layouts = buffers, layouts
        inputs = outputs = scratch = rows = header = jobs = 0
        places = []
        for layout in layouts:
            places.append((inputs, outputs, scratch, rows))
            inputs += aligned(layout.in_bytes)
            outputs += layout.out_bytes
            scratch += layout.scratch
            rows += layout.rows_bytes
            jobs += layout.jobs
            header += layout.header_bytes
        buffers.fit(inputs + header, rows, outputs, 4 * scratch, 4 * jobs)
        self.out_bytes = outputs
        self._header_at = inputs
        self._rows_at = [p[3] for p in places]
        address = buffers.device_rows.data_ptr()
        self._bases = [Bases(i, o, s, address + r) for i, o, s, r in places]
        self.flags = buffers.flags[: 4 * jobs].view(torch.int32)
        self._flags = self.flags.numpy()
        self._flags[:] = 0
        self._host = buffers.host_in.numpy()
        self._answers: list[Buffer | None] = [None] * len(layouts)
        self._failed = [False] * len(layouts)

    def stage(self, n: int, inputs: Any) -> None:
        """Copies a request's inputs to where they are sent from; has its rows gathered, and sends them."""
        layout, base = self._layouts[n], self._bases[n]
        source = np.frombuffer(inputs, np.uint8)
        for m in layout.moves_in:
            at = base.inputs + m.target
            self._host[at : at + m.bytes] = source[m.source : m.source + m.bytes]
        host, device = self._buffers.host_rows, self._buffers.device_rows
        for gather in layout.gathers:
            start = self._rows_at[n] + gather.target
            piece = host[start : start + gather.bytes]
            try:
                gather.plan.run(inputs, piece.numpy())
            except BadIds:
                self._failed[n] = True
                host[start : self._rows_at[n] + layout.rows_bytes] = 0  # looked up all the same, and thrown away
                return
            if device is not host:
                device[start : start + gather.bytes].copy_(piece, non_blocking=True)

    def send(self, groups: list[Group] | None) -> list[Group]:
        """Sends inputs to the device, and jobs where no `groups` say that they are there; returns what is to be launched."""
        host, device = self._buffers.host_in, self._buffers.device_in
        end = self._header_at
        if groups is None:
            header, groups = _header(self._layouts, self._bases, device.data_ptr() + self._header_at)
            end += len(header)
            self._host[self._header_at : end] = np.frombuffer(header, np.uint8)
        if device is not host:
            device[:end].copy_(host[:end], non_blocking=True)
        return groups

    def run_on_host(self, n: int, inputs: Any) -> None:
        """Looks up what is not on the device, while the device works."""
        layout = self._layouts[n]
        if not layout.is_direct:
            self._answers[n] = np.empty(layout.asked_bytes, np.uint8)
        if layout.host is not None:
            try:
                layout.host.run(inputs, self._answers[n])
            except BadIds:
                self._failed[n] = True

    def results(self, inputs: Sequence[Any], outputs: Buffer) -> list[Buffer | BadIds]:
        """What each request gets, once the device is done. outputs: those of the whole batch."""
        flagged = self._flagged() if self._flags.any() else self._failed
        return [
            self._problem(n, inputs[n]) if failed or is_flagged else self._answer(n, outputs)
            for n, (failed, is_flagged) in enumerate(zip(self._failed, flagged, strict=True))
        ]

    def _flagged(self) -> list[bool]:
        """Whether the device refused an id or a length of each request. Flags lie as jobs do: by kind, then by request."""
        found, at = [False] * len(self._layouts), 0
        for kind in range(2):
            for n, layout in enumerate(self._layouts):
                jobs = len(layout.groups[kind].numbers)
                found[n] |= bool(self._flags[at : at + jobs].any())
                at += jobs
        return found

    def _problem(self, n: int, inputs: Any) -> BadIds:
        problem = self._layouts[n].problem(inputs)
        if problem is None:
            raise RuntimeError("the device refused ids that are right; the driver, the device or the kernel is at fault")
        return problem

    def _answer(self, n: int, outputs: Buffer) -> Buffer:
        layout, base, answer = self._layouts[n], self._bases[n], self._answers[n]
        if answer is None:
            return outputs[base.outputs : base.outputs + layout.asked_bytes]
        for m in layout.moves_out:
            at = base.outputs + m.source
            answer[m.target : m.target + m.bytes] = outputs[at : at + m.bytes]
        return answer


class PreparedLookup:
    """A plan's jobs on the device, to be launched on many pairs of buffers there.

    in_bytes, out_bytes: what the buffers hold, as `layout.moves_in` and `layout.moves_out` place it.
    """

    def __init__(self, fused: Fused, layout: Layout, caches: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._fused, self.layout = fused, layout
        self.in_bytes, self.out_bytes = layout.in_bytes, layout.out_bytes
        self._kept = (layout.lookups, caches)
        for group in layout.groups:
            for row, number in zip(group.rows, group.numbers, strict=True):
                if number in caches:
                    slots, locations = caches[number]
                    row[Field.SLOTS], row[Field.LOCATIONS] = slots.data_ptr(), locations.data_ptr()
        self._jobs, groups = _on_device(layout, fused.device)
        self._groups = [replace(g, is_cached=bool(caches)) for g in groups]
        self._scratch = torch.empty(max(1, layout.scratch), dtype=torch.int32, device=fused.device)
        self.flags = torch.zeros(sum(g.jobs for g in groups), dtype=torch.int32, device=fused.device)

    def __call__(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        """Launches on the current stream. inputs uint8 [in_bytes], outputs uint8 [out_bytes], both on the device, 16-aligned.

        `flags` int32 [jobs] on the device turn 1 where an id or a length is wrong; that row was not read.
        """
        self._fused.launch(self._groups, self.flags, inputs, outputs, self._scratch)


class _Clock:
    """Marks between the parts of a batch: events on a stream, or the host's clock."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._began = time.perf_counter()
        self._staged = 0.0
        self._marks: list[Any] = []

    def mark(self) -> None:
        if not self._marks:
            self._staged = time.perf_counter() - self._began
        if self._stream is None:
            self._marks.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._marks.append(event)

    def times(self) -> Times:
        """After the stream was waited for, and four marks were made."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        parts = [b - a if self._stream is None else a.elapsed_time(b) / 1e3 for a, b in pairs]
        return Times(self._staged, *parts)
