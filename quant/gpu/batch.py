"""A batch for the fused kernel: the buffers it goes through, where each request lies in them, and what is launched.

Buffers belong to one device and one batch at a time. Everything is copied on the stream that is current, and nothing is waited
for here.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.jobs import ProbeJobs, write_jobs
from tableside.quant.contract import Variant
from tableside.quant.errors import BadIds
from tableside.quant.gpu.layout import Bases, Layout, Shape, aligned
from tableside.quant.gpu.lookup_kernel import FIELDS

SMALLEST = 4096  # bytes of a buffer

Buffer = NDArray[np.uint8]


@dataclass(frozen=True)
class Times:
    """Where the time of a batch went, in seconds: staging on the host, the copy in, kernels, the copy out."""

    staging: float
    copy_in: float
    kernels: float
    copy_out: float


class Buffers:
    """Memory that the batches of one device share, one at a time; it grows, and stays. The host's side is page-locked.

    in: staged inputs and jobs; rows: gathered rows; out: vectors; scratch: starts of bags; flags: of jobs, on the host.
    In the interpreter the host's side is the device's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.host_in, self.device_in = self._pair(SMALLEST)
        self.host_rows, self.device_rows = self._pair(SMALLEST)
        self.device_out, self.scratch = self.on_device(SMALLEST), self.on_device(SMALLEST)
        self.flags = self.host(SMALLEST)

    def host(self, size: int) -> torch.Tensor:
        """Memory of the host, page-locked; torch's allocator hands it out again once it is let go."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda)

    def on_device(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

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
    """Jobs of a batch that are one launch, on the device at addresses `at` and (the job of each program) `programs_at`.

    members: (request, its first flag, the flag after its last).
    """

    pooled: bool
    variant: Variant
    shape: Shape
    jobs: int
    programs: int
    first_flag: int
    has_lengths: bool
    is_weighted: bool
    is_cached: bool
    at: int
    programs_at: int
    members: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Launches:
    """What a batch launches: first what finds its cached rows, if there are any, then its groups."""

    groups: tuple[Group, ...]
    cached: ProbeJobs | None


def _header(layouts: Sequence[Layout], bases: Sequence[Bases], address: int, is_interpreted: bool) -> tuple[bytes, Launches]:
    """The jobs of a batch as bytes that will lie at `address` on the device, and what is to be launched."""
    parts: list[bytes] = []
    groups: list[Group] = []
    at = flag = 0
    kinds = dict.fromkeys((kind, layout.variant, layout.groups[kind].shape) for kind in range(2) for layout in layouts)
    for kind, variant, shape in kinds:
        numbers = [
            n
            for n, layout in enumerate(layouts)
            if (layout.variant, layout.groups[kind].shape) == (variant, shape) and len(layout.groups[kind].rows)
        ]
        members = [layouts[n].groups[kind] for n in numbers]
        rows, of_program, places, jobs, programs = [], [], [], 0, 0
        for n, member in zip(numbers, members, strict=True):
            rows.append(member.shifted(bases[n], programs).tobytes())
            of_program.append((member.job_of_program + np.int32(jobs)).tobytes())
            programs += member.job_of_program.size
            places.append((n, flag + jobs, flag + jobs + len(member.rows)))
            jobs += len(member.rows)
        if jobs:
            programs_at = at + 8 * FIELDS * jobs
            padding = bytes(-4 * programs % 8)
            parts += [*rows, *of_program, padding]
            groups.append(
                Group(
                    pooled=members[0].pooled,
                    variant=variant,
                    shape=shape,
                    jobs=jobs,
                    programs=programs,
                    first_flag=flag,
                    has_lengths=any(m.has_lengths for m in members),
                    is_weighted=any(m.is_weighted for m in members),
                    is_cached=any(m.is_cached for m in members),
                    at=address + at,
                    programs_at=address + programs_at,
                    members=tuple(places),
                )
            )
            at = programs_at + 4 * programs + len(padding)
            flag += jobs
    cached = None
    if jobs_of_cache := [job.shifted(base.inputs, base.locations) for layout, base in zip(layouts, bases, strict=True) for job in layout.cached]:
        written, jobs_in_it = write_jobs(jobs_of_cache, is_interpreted)
        cached = jobs_in_it.placed(address + at)
        parts.append(written)
    return b"".join(parts), Launches(tuple(groups), cached)


def _cached_bytes(layout: Layout, is_interpreted: bool) -> int:
    """What a request's cached lookups take of the jobs."""
    return len(write_jobs(layout.cached, is_interpreted)[0])


def jobs_on_device(layout: Layout, device: torch.device, is_interpreted: bool) -> tuple[torch.Tensor, Launches]:
    """The jobs of one request on the device, and what is to be launched."""
    memory = torch.empty(layout.header_bytes + _cached_bytes(layout, is_interpreted), dtype=torch.uint8, device=device)
    header, launches = _header([layout], [Bases()], memory.data_ptr(), is_interpreted)
    memory[: len(header)].copy_(torch.frombuffer(bytearray(header or b"0"), dtype=torch.uint8)[: len(header)])
    return memory, launches


class Batch:
    """Requests that run together: where each one's bytes lie in the shared buffers."""

    def __init__(self, buffers: Buffers, layouts: list[Layout], is_interpreted: bool) -> None:
        self._buffers, self._layouts, self._is_interpreted = buffers, layouts, is_interpreted
        inputs = outputs = scratch = rows = header = jobs = located = 0
        places = []
        for layout in layouts:
            places.append((inputs, outputs, scratch, rows, 4 * located))
            inputs += aligned(layout.in_bytes)
            outputs += layout.out_bytes
            scratch += layout.scratch
            rows += layout.rows_bytes
            jobs += layout.jobs
            located += layout.cached_ids
            header += layout.header_bytes
        header += sum(_cached_bytes(layout, is_interpreted) for layout in layouts)
        buffers.fit(inputs + header, rows, outputs, 4 * scratch, 4 * jobs)
        self.out_bytes = outputs
        self._header_at = inputs
        self._rows_at = [p[3] for p in places]
        address = buffers.device_rows.data_ptr()
        self._bases = [Bases(i, o, s, address + r, at) for i, o, s, r, at in places]
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
                self._failed[n] = True  # what lies there is looked up all the same, and thrown away
                return
            if device is not host:
                device[start : start + gather.bytes].copy_(piece, non_blocking=True)

    def send(self, launches: Launches | None) -> Launches:
        """Sends inputs to the device, and jobs where no `launches` say that they are there; returns what is to be launched."""
        host, device = self._buffers.host_in, self._buffers.device_in
        end = self._header_at
        if launches is None:
            address = device.data_ptr() + self._header_at
            header, launches = _header(self._layouts, self._bases, address, self._is_interpreted)
            end += len(header)
            self._host[self._header_at : end] = np.frombuffer(header, np.uint8)
        self._groups = launches.groups
        if device is not host:
            device[:end].copy_(host[:end], non_blocking=True)
        return launches

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
        """Whether the device refused an id or a length of each request."""
        found = [False] * len(self._layouts)
        for n, first, end in (member for group in self._groups for member in group.members):
            found[n] |= bool(self._flags[first:end].any())
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


class Clock:
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
