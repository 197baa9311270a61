"""A batch for the lookup kernel: the buffers that it goes through, where each request lies in them, and what is launched.

The buffers belong to one device and to one batch at a time. The one that is sent to the device holds

    inputs of request 0 · inputs of request 1 · … · header

    header   for each launch: jobs int64 [jobs, FIELDS] · the job of each program int32 [programs] · zeros to a multiple of 8
             then, if ids are to become row numbers, what the kernel that does it reads (`quant.gpu.resolve`)
             then, if rows are read through the cache, what its kernels read (`quant.cache.jobs`)
             then, if something follows on the device, what fills its matrices (`quant.gpu.follower`)

A follower's tensors come last of a request's inputs. Outputs that stay on the device are the first ones.

`merge` writes the header and says where in it each launch finds its jobs; its size is the number of bytes that it wrote.
Copies go on the stream that is current, and nothing here waits for them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.jobs import ProbeJobs, shifted, write_jobs
from tableside.quant.contract import Unfound
from tableside.quant.errors import BadIds, Problem
from tableside.quant.gpu.elsewhere import Copy, Elsewhere, gaps, reads_of, run_copies, whole_inputs, writes_of
from tableside.quant.gpu.follower import Fills, Taken
from tableside.quant.gpu.job import FIELDS
from tableside.quant.gpu.layout import Bases, LaunchConfig, Layout, aligned, joined
from tableside.quant.gpu.moves import move, move_all
from tableside.quant.gpu.resolve import COUNT_BYTES, COUNTS, ResolveJobs, copies_of_the_rest
from tableside.quant.gpu.resolve import write_jobs as write_resolve_jobs
from tableside.quant.gpu.wanted import KernelKey

SMALLEST = 4096  # bytes of a buffer

Buffer = NDArray[np.uint8]


class LookedUp(NamedTuple):
    """What a request gets. outputs: its output buffer, uint8; unfound: as `Plan.run` returns it."""

    outputs: Buffer
    unfound: list[Unfound] | None


class Buffers:
    """Memory that the batches of one device share, one at a time. It grows and is kept. The host's side is page-locked.

    Sizes are bytes. in: inputs and header; rows: gathered rows; out: vectors, found masks and counts; scratch: starts of bags,
    int32; flags: int32 a job, on the host. All but the flags lie on the device. done: an event behind a batch's work; None in the
    interpreter.
    In the interpreter the host's side is the device's.
    """

    def __init__(self, device: torch.device, answers: Callable[[int], Buffer] | None = None) -> None:
        """answers: gives page-locked room for what callers get; None: torch does."""
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.host_in, self.device_in = self._pair(SMALLEST)
        self.host_rows, self.device_rows = self._pair(SMALLEST)
        self.device_out, self.scratch = self.on_device(SMALLEST), self.on_device(SMALLEST)
        self.flags = self.host(SMALLEST)
        self._answers = answers
        # Whoever waits sleeps: a thread that spins takes the time of those that parse and send.
        self.done: Any = torch.cuda.Event(blocking=True) if self._is_cuda else None  # type: ignore[no-untyped-call]

    def host(self, size: int) -> torch.Tensor:
        """Memory of the host, page-locked; torch's allocator hands it out again once it is let go."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda)

    def answer(self, size: int, is_copied: bool = True) -> Buffer:
        """Room for what a caller gets. is_copied: the device copies to it."""
        if self._answers is not None:
            return self._answers(size)
        return self.host(size).numpy() if is_copied else np.empty(size, np.uint8)

    def on_device(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def fit(self, *, inputs: int = 0, rows: int = 0, outputs: int = 0, scratch: int = 0, flags: int = 0) -> None:
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
class Launch:
    """Jobs of a batch that one launch works on.

    jobs_at, programs_at: offsets in the header, of the jobs and of the job of each program. members: (request, its first
    flag, the flag after its last).
    """

    pooled: bool
    key: KernelKey
    config: LaunchConfig
    jobs: int
    programs: int
    first_flag: int
    has_lengths: bool
    is_weighted: bool
    is_indirect: bool
    jobs_at: int
    programs_at: int
    members: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Launches:
    """What a batch launches: first what makes row numbers of ids (`resolve`) and what finds its cached rows (`probe`), if there
    are any, then the lookups.

    address: of the header on the device.
    """

    lookups: tuple[Launch, ...]
    resolve: ResolveJobs | None
    probe: ProbeJobs | None
    address: int = 0

    def placed(self, address: int) -> "Launches":
        """The same, with the header at this address of the device, a multiple of 8."""
        resolve = None if self.resolve is None else self.resolve.placed(address)
        return Launches(self.lookups, resolve, None if self.probe is None else self.probe.placed(address), address)


def merge(
    layouts: Sequence[Layout], bases: Sequence[Bases], is_interpreted: bool, keeps_inputs: bool = False
) -> tuple[bytes, Launches]:
    """The header of a batch, and what is to be launched once it lies on the device. bases: where each request's parts begin.

    Jobs of several requests share a launch where they were compiled alike and are cut up alike. keeps_inputs: row numbers are not
    written over the ids but to another buffer, to which everything else that was staged is copied.
    """
    written: list[bytes] = []
    launches: list[Launch] = []
    at = flag = 0
    for (kind, key, config), numbers in _alike(layouts):
        of_kind = [layouts[n].jobs[kind] for n in numbers]
        rows, of_program = joined(of_kind, [bases[n] for n in numbers])
        programs, jobs, members = len(of_program) // 4, 0, []
        for n, own in zip(numbers, of_kind, strict=True):
            members.append((n, flag + jobs, flag + jobs + len(own.rows)))
            jobs += len(own.rows)
        launches.append(
            Launch(
                pooled=of_kind[0].pooled,
                key=key,
                config=config,
                jobs=jobs,
                programs=programs,
                first_flag=flag,
                has_lengths=any(own.has_lengths for own in of_kind),
                is_weighted=any(own.is_weighted for own in of_kind),
                is_indirect=any(own.is_indirect for own in of_kind),
                jobs_at=at,
                programs_at=at + 8 * FIELDS * jobs,
                members=tuple(members),
            )
        )
        part = b"".join([rows, of_program, bytes(-4 * programs % 8)])
        written.append(part)
        at += len(part)
        flag += jobs
    resolve = probe = None
    if resolved := [r.shifted(b.inputs, b.outputs) for layout, b in zip(layouts, bases, strict=True) for r in layout.resolved]:
        if keeps_inputs:
            resolved += copies_of_the_rest(resolved, sum(layout.in_bytes for layout in layouts))
        part, resolve = write_resolve_jobs(resolved, is_interpreted)
        written.append(part)
        resolve = resolve.placed(at)
        at += len(part)
    if counts := [len(layout.cached) for layout in layouts if len(layout.cached)]:
        bases_of = [(b.inputs, b.locations) for la, b in zip(layouts, bases, strict=True) if len(la.cached)]
        of_lookup = np.repeat(bases_of, counts, axis=0)
        cached = shifted(np.concatenate([la.cached for la in layouts]), of_lookup[:, 0], of_lookup[:, 1])
        part, probe = write_jobs(cached, is_interpreted)
        written.append(part)
        probe = probe.placed(at)
    return b"".join(written), Launches(tuple(launches), resolve, probe)


def _alike(layouts: Sequence[Layout]) -> list[tuple[tuple[int, KernelKey, LaunchConfig], list[int]]]:
    """The layouts by number that share a launch: those with jobs of a kind that were compiled alike and are cut up alike."""
    found: list[tuple[tuple[int, KernelKey, LaunchConfig], list[int]]] = []
    known: dict[tuple[int, int, int], list[int]] = {}  # by identity, as hashing takes longer than the rest
    for kind in range(2):
        for n, layout in enumerate(layouts):
            own = layout.jobs[kind]
            if not own.rows.size:
                continue
            identity = (kind, id(layout.key), id(own.config))
            if (numbers := known.get(identity)) is None:
                alike = (kind, layout.key, own.config)
                numbers = next((of for other, of in found if other == alike), None)
                if numbers is None:
                    found.append((alike, numbers := []))
                known[identity] = numbers
            numbers.append(n)
    return found


def jobs_on_device(
    layout: Layout, device: torch.device, is_interpreted: bool, keeps_inputs: bool = False
) -> tuple[torch.Tensor, Launches]:
    """The header of one request on the device, and what is to be launched. keeps_inputs: as for `merge`."""
    header, launches = merge([layout], [Bases()], is_interpreted, keeps_inputs)
    memory = torch.empty(max(1, len(header)), dtype=torch.uint8, device=device)
    memory[: len(header)].copy_(torch.frombuffer(bytearray(header or b"0"), dtype=torch.uint8)[: len(header)])
    return memory, launches.placed(memory.data_ptr())


class Batch:
    """Requests that run together: where each one's parts lie in the shared buffers.

    counts: int64 [lookups * 2] behind the outputs, on the device: what was not found of lookups whose ids become row numbers.
    taken: what follows takes of each request. elsewhere: requests by number, of which parts lie elsewhere on the device. The
    host gets outputs and counts [stay_bytes, out_bytes).
    """

    def __init__(
        self,
        buffers: Buffers,
        layouts: list[Layout],
        is_interpreted: bool,
        taken: Sequence[Taken | None] = (),
        elsewhere: Mapping[int, Elsewhere] = MappingProxyType({}),
    ) -> None:
        self._buffers, self._layouts, self._is_interpreted = buffers, layouts, is_interpreted
        self._taken = list(taken) or [None] * len(layouts)
        self.fills = Fills(self._taken, is_interpreted)
        self._stays = [t is not None and t.stays for t in self._taken]
        self._elsewhere = elsewhere
        for n, given in elsewhere.items():
            self._stays[n] |= sum(part.size for part in given.writes) == layouts[n].asked_bytes
        self._reads: list[Copy] = []  # from other memory to this batch's inputs
        self.stay_bytes, outputs_at = _outputs_at(layouts, self._stays)
        inputs = scratch = rows = jobs = located = resolved = 0
        places = []
        for layout, one, outputs in zip(layouts, self._taken, outputs_at, strict=True):
            places.append((inputs, outputs, scratch, rows, 4 * located))
            inputs += aligned(layout.in_bytes) + (0 if one is None else one.input_bytes)
            scratch += layout.scratch
            rows += layout.rows_bytes
            jobs += layout.job_count
            located += layout.cached_ids
            resolved += len(layout.resolved)
        self._counts_at = aligned(sum(layout.out_bytes for layout in layouts))
        self.out_bytes = self._counts_at + COUNT_BYTES * resolved
        buffers.fit(inputs=inputs, rows=rows, outputs=self.out_bytes, scratch=4 * scratch, flags=4 * jobs)
        self.counts = buffers.device_out[self._counts_at : self.out_bytes].view(torch.int64)
        self._header_at = inputs
        self._rows_at = [p[3] for p in places]
        address = buffers.device_rows.data_ptr()
        self._bases = [Bases(i, o, s, address + r, at) for i, o, s, r, at in places]
        self.flags = buffers.flags[: 4 * jobs].view(torch.int32)
        self._flags = self.flags.numpy()
        self._flags[:] = 0
        self._on_host: list[Sequence[Unfound] | None] = [None] * len(layouts)
        self._answers: list[Buffer | None] = [None] * len(layouts)
        self._failed = [False] * len(layouts)
        self._lookups: tuple[Launch, ...] = ()

    def prepare(self, launches: Launches | None) -> Launches:
        """What is to be launched. launches: their header is on the device already; None: one is written behind the inputs."""
        header = b""
        if launches is None:
            header, launches = merge(self._layouts, self._bases, self._is_interpreted)
        self._fills_at = aligned(self._header_at + len(header))
        self._end = self._fills_at + self.fills.bytes
        self._buffers.fit(inputs=self._end)
        if header:
            launches = launches.placed(self._buffers.device_in.data_ptr() + self._header_at)
        self._host = self._buffers.host_in.numpy()
        self._host[self._header_at : self._header_at + len(header)] = np.frombuffer(header, np.uint8)
        self._lookups = launches.lookups
        return launches

    def stage_inputs(self, inputs: Sequence[Any]) -> None:
        """Copies the requests' inputs to where they are sent from."""
        moves = [la.moves_in for la in self._layouts]
        for n, one in self._elsewhere.items():
            copies, moves[n] = reads_of(self._layouts[n], one.reads)
            self._reads += [copy._replace(staged=copy.staged + self._bases[n].inputs) for copy in copies]
        parts = [(m, one, b.inputs) for m, one, b in zip(moves, inputs, self._bases, strict=True)]
        move_all(parts, self._host)

    def stage(self, n: int, inputs: Any) -> None:
        """Has what follows, and rows that are gathered, brought to where they are sent from; the rows are sent."""
        layout, base = self._layouts[n], self._bases[n]
        if (taken := self._taken[n]) is not None:
            first = base.inputs + aligned(layout.in_bytes)
            for tensor, at in taken.staged():
                size = 4 * tensor.values
                self._host[first + at : first + at + size] = np.frombuffer(inputs, np.uint8, size, tensor.at)
        host, device = self._buffers.host_rows, self._buffers.device_rows
        for gather in layout.gathers:
            start = self._rows_at[n] + gather.target
            chunk = host[start : start + gather.bytes]
            try:
                gather.plan.run(inputs, chunk.numpy())
            except BadIds:
                self._failed[n] = True  # what lies there is looked up all the same, and thrown away
                return
            if device is not host:
                device[start : start + gather.bytes].copy_(chunk, non_blocking=True)

    def send(self, stream: int | None) -> None:
        """Sends inputs and header to the device, and copies what lies elsewhere on it. stream: where that is enqueued."""
        host, device = self._buffers.host_in, self._buffers.device_in
        if self.fills.programs:
            inputs, outputs = device.data_ptr(), self._buffers.device_out.data_ptr()
            tensors = [inputs + b.inputs + aligned(la.in_bytes) for b, la in zip(self._bases, self._layouts, strict=True)]
            written = self.fills.written(self._layouts, tensors, [outputs + b.outputs for b in self._bases], self._failed)
            self._host[self._fills_at : self._fills_at + len(written)] = np.frombuffer(written, np.uint8)
        if device is not host:
            for first, end in gaps(self._reads, self._end):
                device[first:end].copy_(host[first:end], non_blocking=True)
        run_copies(stream, device.data_ptr(), self._reads, to_staged=True)

    def write_elsewhere(self, stream: int | None) -> None:
        """Copies vectors to where they belong elsewhere on the device, behind the lookups."""
        for n, one in self._elsewhere.items():
            outputs = self._buffers.device_out.data_ptr() + self._bases[n].outputs
            run_copies(stream, outputs, writes_of(self._layouts[n], one.writes), to_staged=False)

    @property
    def fills_address(self) -> int:
        """Of the jobs that fill matrices, on the device."""
        return self._buffers.device_in.data_ptr() + self._fills_at

    def run_on_host(self, n: int, inputs: Any) -> None:
        """Looks up what the CPU does of a request, while the device works."""
        layout = self._layouts[n]
        if self._stays[n] or not layout.is_direct:
            self._answers[n] = self._buffers.answer(layout.asked_bytes, is_copied=False)
        if layout.host is not None:
            try:
                self._on_host[n] = layout.host.run(inputs, self._answers[n])
            except BadIds:
                self._failed[n] = True

    def results(self, inputs: Sequence[Any], outputs: Buffer) -> list[LookedUp | BadIds]:
        """What each request gets, once the device is done. outputs: those of the batch that do not stay there, and the counts.

        The buffer of a request whose outputs stay has room for them; nobody wrote to it.
        """
        flagged = self._flagged() if self._flags.any() else self._failed
        unfound = self._unfound(outputs[self._counts_at - self.stay_bytes :].view(np.int64).reshape(-1, COUNTS))
        return [
            self._problem(n, inputs[n]) if failed or is_flagged else LookedUp(self._answer(n, outputs), unfound[n])
            for n, (failed, is_flagged) in enumerate(zip(self._failed, flagged, strict=True))
        ]

    def _flagged(self) -> list[bool]:
        """Whether the device refused an id or a length of each request."""
        found = [False] * len(self._layouts)
        for n, first, end in (member for launch in self._lookups for member in launch.members):
            found[n] |= bool(self._flags[first:end].any())
        return found

    def _problem(self, n: int, inputs: Any) -> BadIds:
        if (one := self._elsewhere.get(n)) is not None:
            inputs = whole_inputs(None if self._is_interpreted else 0, one)
        problem = self._layouts[n].problem(inputs)
        if problem is None and one is not None:
            return BadIds(Problem.CHANGED, 0, 0, 0, 0)
        if problem is None:
            raise RuntimeError("the device refused ids that are right; the driver, the device or the kernel is at fault")
        return problem

    def _answer(self, n: int, outputs: Buffer) -> Buffer:
        layout, base, answer = self._layouts[n], self._bases[n], self._answers[n]
        if self._stays[n]:
            assert answer is not None, "run_on_host made it"
            return answer
        start = base.outputs - self.stay_bytes
        if answer is None:
            return outputs[start : start + layout.asked_bytes]
        move(layout.moves_out, outputs, answer, start, 0)
        for at, size in layout.all_found:
            answer[at : at + size] = 1
        return answer

    def _unfound(self, counts: NDArray[np.int64]) -> list[list[Unfound] | None]:
        """What was not found of each request, by the device's counts, int64 [lookups, 2], and the CPU's."""
        found: list[list[Unfound] | None] = [None] * len(self._layouts)
        if not (counts.any() or any(self._on_host)):
            return found
        rows = iter(counts.tolist())
        for n, layout in enumerate(self._layouts):
            of_lookup = dict(zip(layout.host_lookups, self._on_host[n] or (), strict=False))
            of_lookup |= {resolved.lookup: Unfound(*next(rows)) for resolved in layout.resolved}
            if any(any(unfound) for unfound in of_lookup.values()):
                found[n] = [of_lookup.get(number, Unfound(0, 0)) for number in range(len(layout.lookups()))]
        return found


def _outputs_at(layouts: Sequence[Layout], stays: Sequence[bool]) -> tuple[int, list[int]]:
    """How many bytes of outputs stay on the device, and where each request's outputs begin."""
    at, found = 0, [0] * len(layouts)
    for wanted in (True, False):
        for n, layout in enumerate(layouts):
            if stays[n] is wanted:
                found[n] = at
                at += layout.out_bytes
    return sum(layout.out_bytes for layout, one in zip(layouts, stays, strict=True) if one), found
