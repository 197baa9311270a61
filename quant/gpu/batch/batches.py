"""Batches of requests on their way through a GPU: begun, launched, waited for."""

from collections.abc import Callable, Sequence
from typing import Any

from tableside.quant.contract import Plan
from tableside.quant.device.addresses import address_of
from tableside.quant.device.locked_memory import LockedMemory
from tableside.quant.errors import QuantError, Refused
from tableside.quant.gpu.batch.batch import DeviceBatch, LookupResult
from tableside.quant.gpu.batch.buffers import Buffer, Buffers
from tableside.quant.gpu.batch.clock import Clock, Times
from tableside.quant.gpu.batch.follower import Follower
from tableside.quant.gpu.batch.launcher import Launcher
from tableside.quant.gpu.batch.plan import GpuPlan

Requests = Sequence[tuple[Plan, Any]]  # a plan and its inputs each
Results = tuple[list[LookupResult | Refused], Times | None]  # of each request; where the time went


class Batches:
    """The batches of one device: its buffers, one for each batch that is under way. Any thread may call."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._take_answers: Callable[[int], Buffer] | None = None  # as `Buffers` takes it
        self.locked = LockedMemory(launcher.device)  # that inputs are copied from where they lie
        self._free = [Buffers(launcher.device)]  # more are made where several batches have begun

    def write_answers_to(self, memory: Buffer, take: Callable[[int], Buffer]) -> None:
        """Makes batches write results to parts of `memory`, uint8, page-locked now and mapped until exit.
        take: returns a part of so many bytes, in use while an array over it lives. QuantError: CUDA cannot
        lock it."""
        self.launcher.device.page_lock(memory.ctypes.data, memory.size)
        with self.launcher.lock:
            self._take_answers = take
            self._free.clear()

    def read_inputs_in(self, memory: Buffer) -> None:
        """Page-locks `memory` until its last view goes; the device copies large inputs from it, which must
        not change until their batch is done. QuantError: CUDA cannot lock it."""
        self.locked.add(memory)

    # ---- one batch ----

    def run(self, requests: Requests, timed: bool = False, follower: Follower | None = None) -> Results:
        """Runs requests as one batch; returns outputs and `Unfound`, or the error, of each.
        Outputs keep the batch's page-locked memory alive. follower: runs on the device behind the lookups,
        in the requests' order. Rows of a refused request are arbitrary finite numbers and do not affect
        others."""
        return self.wait(self.begin(requests, timed, follower))

    def begin(
        self,
        requests: Requests,
        timed: bool = False,
        follower: Follower | None = None,
        *,
        launches: bool = True,
    ) -> DeviceBatch:
        """Sends a batch with all that follows, for `wait`. Waits only for the CPU's part and missing
        rows that the host fetches for the cache. Several batches may have begun; each has its own
        buffers. launches: False: inputs are sent and the cache's fetches begin; the lookups and the follower
        wait for `wait`."""
        with self.launcher.on_stream():
            batch = self._begun(requests, timed, follower)
            return self._launched(batch) if launches else batch

    def wait(self, batch: DeviceBatch) -> Results:
        """Returns the results of a batch that has begun, when done. Call once, on any thread; others may look
        up meanwhile. Call it for batches that were not launched in the order in which they began."""
        if not batch.is_launched:
            with self.launcher.on_stream():
                self._launched(batch)
        try:
            batch.done.synchronize()
            return batch.results(), batch.clock.times() if batch.clock else None
        except BaseException:
            with self.launcher.on_stream():
                self.launcher.settle()
            raise
        finally:
            self._free.append(batch.buffers)

    def _begun(self, requests: Requests, timed: bool, follower: Follower | None) -> DeviceBatch:
        buffers = self._free.pop() if self._free else Buffers(self.launcher.device, self._take_answers)
        try:
            return self._begin(buffers, requests, timed, follower)
        except BaseException:
            self._give_back(buffers)
            raise

    def _launched(self, batch: DeviceBatch) -> DeviceBatch:
        batch.is_launched = True
        try:
            self._launch(batch)
        except BaseException:
            self._give_back(batch.buffers)
            raise
        return batch

    def _give_back(self, buffers: Buffers) -> None:
        """Has the next batch take the buffers, once nothing under way reads or writes them."""
        self.launcher.settle()
        self._free.append(buffers)

    def _begin(
        self, buffers: Buffers, requests: Requests, timed: bool, follower: Follower | None
    ) -> DeviceBatch:
        launcher = self.launcher
        clock = Clock(launcher.device, launcher.stream) if timed else None
        plans = [self._own(plan) for plan, _ in requests]
        laid_out = [(plan.layout, inputs) for plan, (_, inputs) in zip(plans, requests, strict=True)]
        batch = DeviceBatch(buffers, laid_out, launcher.device, follower, self.locked, clock)
        batch.prepare(plans[0].launches_alone() if len(plans) == 1 else None)
        batch.stage()
        if clock:
            clock.mark()
        batch.send(launcher.device.current_handle())
        if clock:
            clock.mark()
        launches = batch.launches
        if batch.fills.programs and any(one.has_lengths for one in launches.lookups):
            buffers.device_out[: batch.out_bytes].zero_()  # where lengths are wrong no vector is written
        if launches.resolve is not None:
            inputs = buffers.device_in.data_ptr()
            launcher.resolve(
                launches.resolve,
                launches.is_overlaid,
                inputs,
                inputs,
                buffers.device_out.data_ptr(),
                batch.counts.zero_().data_ptr(),
            )
        batch.ticket = launcher.prefetch(launches, buffers.device_in)
        return batch

    def _launch(self, batch: DeviceBatch) -> None:
        launcher, buffers, clock = self.launcher, batch.buffers, batch.clock
        launcher.look_up(batch.launches, buffers, batch.ticket)
        fills, stream = batch.fills_address, launcher.device.current_handle()
        launcher.fill(batch.fills.programs, stream, fills, fills + batch.fills.programs_at)
        batch.write_elsewhere(stream)
        if clock:
            clock.mark()
        batch.outputs = outputs = buffers.answer(batch.out_bytes - batch.stay_bytes)
        if outputs.size:
            source = buffers.device_out.data_ptr() + batch.stay_bytes
            launcher.device.copy(stream, address_of(outputs.data), source, outputs.size)
        if clock:
            clock.mark()
        if batch.follower is not None:
            batch.follower.run()
        batch.done = launcher.stream.record_event(buffers.done)
        batch.run_on_host()

    def _own(self, plan: Plan) -> GpuPlan:
        if not isinstance(plan, GpuPlan) or plan.batches is not self:
            raise QuantError("the plan was made by another backend; make it with this one")
        return plan
