"""A batch for the lookup kernel: the requests' places in its buffers, and their results.
Buffers (`quant.gpu.batch.buffers`) serve one device and one batch at a time. The buffer sent to the device
holds
    inputs of request 0 · inputs of request 1 · … · header (`quant.gpu.batch.placed`) · a follower's fill jobs
A follower's tensors come last in a request's inputs. Outputs that stay on the device come first. Copies go on
the current stream; nothing waits for them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.tickets import Ticket
from tableside.quant.contract import Unfound
from tableside.quant.cpu import _native
from tableside.quant.device.device import Device
from tableside.quant.device.locked_memory import LockedMemory
from tableside.quant.errors import BadIds, Problem, Refused, RowsNotRead
from tableside.quant.gpu.batch.buffers import Buffer, Buffers
from tableside.quant.gpu.batch.clock import Clock
from tableside.quant.gpu.batch.elsewhere import (
    Elsewhere,
    check_elsewhere,
    gaps,
    masks_of,
    reads_of,
    run_copies,
    whole_inputs,
    writes_of,
)
from tableside.quant.gpu.batch.follower import FILL_BLOCK, Fills, Follower
from tableside.quant.gpu.batch.layout import Layout, aligned
from tableside.quant.gpu.batch.placed import BatchLayout, Copy, Launches
from tableside.quant.gpu.batch.resolve import COUNT_BYTES, COUNTS

SHARED_BYTES = 4 << 20  # of answers in one block, which is there until the last of them is read


class LookupResult(NamedTuple):
    """A request's result. outputs: uint8; unfound: as `Plan.run` returns it."""

    outputs: Buffer
    unfound: list[Unfound] | None


class DeviceBatch:
    """Requests that run together, and the places of their parts in the shared buffers.
    requests: (layout, inputs) each. locked: memory whose large inputs the device copies itself; they must not
    change until the batch is done. counts: int64 [lookups * 2] behind the outputs on the device: `Unfound` of
    lookups with mapped ids. The host gets outputs and counts [stay_bytes, out_bytes). ticket: of cached rows.
    is_launched: False: its lookups are still to be. outputs: the batch's outputs on the host; done: an event
    behind them and the follower."""

    is_launched = False
    ticket: Ticket | None = None
    done: Any = None
    outputs: Buffer
    launches: Launches

    def __init__(
        self,
        buffers: Buffers,
        requests: Sequence[tuple[Layout, Any]],
        device: Device,
        follower: Follower | None,
        locked: LockedMemory,
        clock: Clock | None,
    ) -> None:
        self.buffers, self._device, self.follower, self.clock = buffers, device, follower, clock
        self._layouts = layouts = [layout for layout, _ in requests]
        taken = [None if follower is None else follower.takes(n) for n in range(len(layouts))]
        self.fills = Fills(layouts, taken, device.block(FILL_BLOCK))
        self._stays = [t is not None and t.stays for t in taken]
        self._elsewhere = {
            n: inputs for n, (_, inputs) in enumerate(requests) if isinstance(inputs, Elsewhere)
        }
        self._inputs = [inputs.inputs if isinstance(inputs, Elsewhere) else inputs for _, inputs in requests]
        for n, given in self._elsewhere.items():
            check_elsewhere(layouts[n])
            self._stays[n] |= sum(part.size for part in given.writes) == layouts[n].asked_bytes
        self._reads: list[Copy] = []  # from other memory of the device to this batch's inputs
        self._locked = locked
        self._locked_reads: list[Copy] = []  # from the host's memory, as far as it is locked
        self._merged = BatchLayout(layouts, self.fills.input_bytes, self._stays)
        sizes = self._merged.sizes
        self.stay_bytes = sizes.stay
        self._counts_at = aligned(sizes.outputs)
        self.out_bytes = self._counts_at + COUNT_BYTES * sizes.resolved
        buffers.fit(
            inputs=sizes.inputs,
            rows=sizes.rows,
            outputs=self.out_bytes,
            scratch=4 * sizes.scratch,
            flags=4 * sizes.jobs,
        )
        self._header_at = sizes.inputs
        self._flags = buffers.flags_array[: sizes.jobs]
        self._flags[:] = 0
        self._on_host: list[Sequence[Unfound] | None] = [None] * len(layouts)
        self._answers: list[Buffer | None] = [None] * len(layouts)
        self._failed = [False] * len(layouts)
        self._refused: dict[int, BadIds | RowsNotRead] = {}  # requests, by the CPU's lookups

    @property
    def counts(self) -> torch.Tensor:
        """As the class says."""
        return self.buffers.device_out[self._counts_at : self.out_bytes].view(torch.int64)

    def prepare(self, launches: Launches | None) -> None:
        """Makes room for the batch. launches: its header is on the device; None: write one behind the
        inputs."""
        header_bytes = 0
        if launches is None:
            header_bytes, launches = self._merged.sizes.header, self._merged.launches()
        self._fills_at = aligned(self._header_at + header_bytes)
        self._end = self._fills_at + self.fills.size
        self.buffers.fit(inputs=self._end)
        if header_bytes:
            launches = launches.placed(self.buffers.device_in.data_ptr() + self._header_at)
        self._host = self.buffers.host_in_array
        self.launches = launches

    def stage(self) -> None:
        """Writes the inputs and header to the staging memory; sends gathered rows."""
        for n, one in self._elsewhere.items():
            copies, self._merged.moves[n] = reads_of(self._layouts[n], one.reads)
            first = self._merged.bases[n].inputs
            self._reads += [copy._replace(staged=copy.staged + first) for copy in copies]
        rows_at = self.buffers.device_rows.data_ptr()
        self._locked_reads = self._merged.write(
            [*self._inputs], self._host, self._header_at, self._locked.ranges, rows_at
        )
        for tensor in self.fills.tensors:
            n = tensor.number
            first = self._merged.bases[n].inputs + aligned(self._layouts[n].in_bytes) + tensor.staged_at
            given = np.frombuffer(self._inputs[n], np.uint8, tensor.bytes, tensor.at)
            self._host[first : first + tensor.bytes] = given
        if self._merged.sizes.rows:
            for n, one in enumerate(self._inputs):
                self._gather(n, one)

    def _gather(self, n: int, inputs: Any) -> None:
        """Gathers and sends the rows of request `n`."""
        layout, base = self._layouts[n], self._merged.bases[n]
        host, device = self.buffers.host_rows, self.buffers.device_rows
        for gather in layout.gathers:
            start = base.rows + gather.target
            chunk = host[start : start + gather.bytes]
            try:
                gather.plan.run(inputs, chunk.numpy())
            except BadIds:
                self._failed[n] = True  # what lies there is looked up all the same, and thrown away
                return
            device[start : start + gather.bytes].copy_(chunk, non_blocking=True)

    def send(self, stream: int | None) -> None:
        """Sends inputs and header on `stream`, and copies inputs that lie elsewhere on the device."""
        host, device = self.buffers.host_in, self.buffers.device_in
        if self.fills.programs:
            inputs, outputs = device.data_ptr(), self.buffers.device_out.data_ptr()
            of_tensors = [0] * len(self._layouts)
            if self.fills.tensors:
                of_tensors = [
                    inputs + b.inputs + aligned(la.in_bytes)
                    for b, la in zip(self._merged.bases, self._layouts, strict=True)
                ]
            of_outputs = [outputs + at for at in self._merged.outputs_at]
            self.fills.write(self._host[self._fills_at : self._end], of_tensors, of_outputs, self._failed)
        sent, staged = device.data_ptr(), host.data_ptr()
        holes = [Copy(at, 0, aligned(size)) for at, _, size in self._locked_reads]
        for first, end in gaps([*self._reads, *holes], self._end):
            self._device.copy(stream, sent + first, staged + first, end - first)
        for at, address, size in self._locked_reads:
            self._device.copy(stream, sent + at, address, size)
        run_copies(self._device, stream, sent, self._reads, to_staged=True)

    def write_elsewhere(self, stream: int | None) -> None:
        """Copies vectors and masks to where they belong elsewhere on the device, behind the lookups."""
        for n, one in self._elsewhere.items():
            outputs = self.buffers.device_out.data_ptr() + self._merged.outputs_at[n]
            run_copies(
                self._device, stream, outputs, writes_of(self._layouts[n], one.writes), to_staged=False
            )
            if masks := masks_of(self._layouts[n], one.writes):
                size = max(copy.size for copy in masks)
                self._ones = torch.ones(size, dtype=torch.uint8, device=self._device.torch_device)
                run_copies(self._device, stream, self._ones.data_ptr(), masks, to_staged=False)

    @property
    def fills_address(self) -> int:
        """Device address of the fill jobs."""
        return self.buffers.device_in.data_ptr() + self._fills_at

    def run_on_host(self) -> None:
        """Runs the CPU's lookups while the device works, and makes room for outputs that it assembles."""
        apart = [
            n
            for n, (layout, stays) in enumerate(zip(self._layouts, self._stays, strict=True))
            if stays or not layout.is_direct
        ]
        ends = [*accumulate((aligned(self._layouts[n].asked_bytes) for n in apart), initial=0)]
        shares = 0 < ends[-1] <= SHARED_BYTES
        room = self.buffers.answer(ends[-1], is_copied=False) if shares else None
        for n, at in zip(apart, ends, strict=False):
            layout, size = self._layouts[n], self._layouts[n].asked_bytes
            answer = self.buffers.answer(size, is_copied=False) if room is None else room[at : at + size]
            self._answers[n] = answer
            if layout.host is not None:
                try:
                    self._on_host[n] = layout.host.run(self._inputs[n], answer)
                except (BadIds, RowsNotRead) as error:
                    self._failed[n] = isinstance(error, BadIds)
                    self._refused[n] = error.with_traceback(None)

    def results(self) -> list[LookupResult | Refused]:
        """Returns each request's result once the device is done. Outputs that stay on the device have an
        unwritten buffer."""
        flagged = self._flagged() if self._flags.any() else self._failed
        unfound = self._unfound(
            self.outputs[self._counts_at - self.stay_bytes :].view(np.int64).reshape(-1, COUNTS)
        )
        return [
            self._problem(n)
            if failed or is_flagged
            else self._refused.get(n) or self._unread(n) or LookupResult(self._answer(n), unfound[n])
            for n, (failed, is_flagged) in enumerate(zip(self._failed, flagged, strict=True))
        ]

    def _flagged(self) -> list[bool]:
        """True for each request with an id or length that the device refused."""
        found = [False] * len(self._layouts)
        for n, first, end in (member for launch in self.launches.lookups for member in launch.members):
            found[n] |= bool(self._flags[first:end].any())
        return found

    def _whole_inputs(self, n: int) -> Any:
        one = self._elsewhere.get(n)
        return self._inputs[n] if one is None else whole_inputs(self._device, one)

    def _unread(self, n: int) -> Refused | None:
        """The error of a request that asked for rows which did not come."""
        if self.ticket is None or not self.ticket.unread:
            return None
        try:
            return self._layouts[n].unread(self._whole_inputs(n), self.ticket.unread)
        except BadIds:  # its client wrote others meanwhile
            return BadIds(Problem.CHANGED, 0, 0, 0, 0)

    def _problem(self, n: int) -> BadIds:
        refused = self._refused.get(n)
        of_host = refused if isinstance(refused, BadIds) else None
        problem = self._layouts[n].problem(self._whole_inputs(n), of_host)
        if problem is None and n in self._elsewhere:
            return BadIds(Problem.CHANGED, 0, 0, 0, 0)
        if problem is None:
            raise RuntimeError(
                "the device refused ids that are right; the driver, the device or the kernel is at fault"
            )
        return problem

    def _answer(self, n: int) -> Buffer:
        layout, answer, outputs = self._layouts[n], self._answers[n], self.outputs
        if self._stays[n]:
            assert answer is not None, "run_on_host made it"
            return answer
        start = self._merged.outputs_at[n] - self.stay_bytes
        if answer is None:
            return outputs[start : start + layout.asked_bytes]
        _native.move_all(layout.moves_out, outputs[start:], answer)
        for at, size in layout.all_found:
            answer[at : at + size] = 1
        return answer

    def _unfound(self, counts: NDArray[np.int64]) -> list[list[Unfound] | None]:
        """`Unfound` of each request, from the device's counts, int64 [lookups, 2], and the CPU's."""
        found: list[list[Unfound] | None] = [None] * len(self._layouts)
        if not (counts.any() or any(self._on_host)):
            return found
        rows = iter(counts.tolist())
        for n, layout in enumerate(self._layouts):
            of_lookup = dict(zip(layout.host_lookups, self._on_host[n] or (), strict=False))
            of_lookup |= {lookup: Unfound(*next(rows)) for lookup in layout.resolved}
            if any(any(unfound) for unfound in of_lookup.values()):
                found[n] = [of_lookup.get(number, Unfound(0, 0)) for number in range(len(layout.lookups()))]
        return found
