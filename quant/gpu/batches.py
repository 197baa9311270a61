"""Batches of requests on their way through a GPU: begun, launched, waited for. What one launches is the backend's to do."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tableside.quant.cache.tickets import Ticket
from tableside.quant.contract import Plan
from tableside.quant.device.addresses import address_of
from tableside.quant.device.locked_memory import LockedMemory
from tableside.quant.errors import BadIds, QuantError
from tableside.quant.gpu.batch import Batch, LookedUp
from tableside.quant.gpu.buffers import Buffer, Buffers
from tableside.quant.gpu.clock import Clock, Times
from tableside.quant.gpu.elsewhere import Elsewhere, check_elsewhere
from tableside.quant.gpu.follower import Follower
from tableside.quant.gpu.merge import Launches
from tableside.quant.gpu.plan import GpuPlan

if TYPE_CHECKING:
    from tableside.quant.gpu.backend import GpuBackend


class Begun(NamedTuple):
    """A batch whose inputs are on their way to the device. ticket: of the rows that its cache brings."""

    inputs: list[Any]
    buffers: Buffers
    batch: Batch
    launches: Launches
    ticket: Ticket | None
    follower: Follower | None
    clock: Clock | None


class Started(NamedTuple):
    """A batch that was sent whole. outputs: where its outputs go on the host. done: an event behind them."""

    begun: Begun
    outputs: Buffer
    done: Any


class Batches:
    """The batches of one backend: its buffers, one for each batch that is under way. Any thread may call."""

    def __init__(self, backend: "GpuBackend") -> None:
        self._backend = backend
        self._take_answers: Callable[[int], Buffer] | None = None  # as `Buffers` takes it
        self.locked = LockedMemory(backend.device)  # that inputs are copied from where they lie
        self._free = [Buffers(backend.device)]  # more are made where several batches have begun

    def write_answers_by(self, take: Callable[[int], Buffer]) -> None:
        """Has what callers get lie where `take` says, as `GpuBackend.write_answers_to` does."""
        self._take_answers = take
        self._free.clear()

    def start(self, requests: Sequence[tuple[Plan, Any]], timed: bool = False, follower: Follower | None = None) -> Started:
        """Sends a batch with all that follows, for `wait`. Waits for nothing but what the CPU does of it, and the follower.

        One may be started while another thread waits for those before it.
        """
        with self._backend.on_stream():
            return self._sent(self._begun(requests, timed, follower))

    def wait(self, started: Started) -> tuple[list[LookedUp | BadIds], Times | None]:
        """What a batch gives that was started, once it is there. Once, on any thread; others may look up meanwhile."""
        begun, outputs, done = started
        try:
            done.synchronize()
            return begun.batch.results(begun.inputs, outputs), begun.clock.times() if begun.clock else None
        except BaseException:
            with self._backend.on_stream():
                self._settle()
            raise
        finally:
            self._free.append(begun.buffers)

    def begin(self, requests: Sequence[tuple[Plan, Any]], timed: bool = False, follower: Follower | None = None) -> Begun:
        """The first part of `run_timed`, for `finish`: inputs are sent, and the cache begins to bring rows. Waits for nothing.

        Several batches may have begun; each has buffers of its own.
        """
        with self._backend.on_stream():
            return self._begun(requests, timed, follower)

    def finish(self, begun: Begun) -> tuple[list[LookedUp | BadIds], Times | None]:
        """The rest of `run_timed`: lookups, what follows them, and the results. Once, in the order in which batches began."""
        with self._backend.on_stream():
            started = self._sent(begun)
        return self.wait(started)

    def _begun(self, requests: Sequence[tuple[Plan, Any]], timed: bool, follower: Follower | None) -> Begun:
        buffers = self._free.pop() if self._free else Buffers(self._backend.device, self._take_answers)
        try:
            return self._begin(buffers, requests, timed, follower)
        except BaseException:
            self._settle()
            self._free.append(buffers)
            raise

    def _sent(self, begun: Begun) -> Started:
        try:
            return self._launch_all(begun)
        except BaseException:
            self._settle()
            self._free.append(begun.buffers)
            raise

    def _settle(self) -> None:
        """Waits for what is under way, which reads and writes the buffers of the next batch."""
        if self._backend.cache is not None:
            self._backend.cache.join_all()
        self._backend.stream.synchronize()

    def _begin(self, buffers: Buffers, requests: Sequence[tuple[Plan, Any]], timed: bool, follower: Follower | None) -> Begun:
        clock = Clock(self._backend.device, self._backend.stream) if timed else None
        plans = [self._own(plan) for plan, _ in requests]
        taken = [] if follower is None else [follower.takes(n) for n in range(len(plans))]
        elsewhere = {n: inputs for n, (_, inputs) in enumerate(requests) if isinstance(inputs, Elsewhere)}
        for n in elsewhere:
            check_elsewhere(plans[n].layout)
        given = [inputs.inputs if isinstance(inputs, Elsewhere) else inputs for _, inputs in requests]
        batch = Batch(buffers, [plan.layout for plan in plans], self._backend.device, taken, elsewhere, self.locked)
        launches = batch.prepare(plans[0].launches_alone() if len(plans) == 1 else None)
        batch.stage(given)
        if clock:
            clock.mark()
        batch.send(self._backend.device.current_handle())
        if clock:
            clock.mark()
        if batch.fills.programs and any(one.has_lengths for one in launches.lookups):
            buffers.device_out[: batch.out_bytes].zero_()  # where lengths are wrong no vector is written
        if launches.resolve is not None:
            self._backend.resolve(launches, buffers.device_in, buffers.device_in, buffers.device_out, batch.counts.zero_())
        ticket = self._backend.prefetch(launches, buffers.device_in)
        return Begun(given, buffers, batch, launches, ticket, follower, clock)

    def _launch_all(self, begun: Begun) -> Started:
        inputs, buffers, batch, launches, ticket, follower, clock = begun
        self._backend.launch(launches, buffers.flags, buffers.device_in, buffers.device_out, buffers.scratch, ticket)
        fills = batch.fills_address
        self._backend.fill(batch.fills.programs, self._backend.device.current_handle(), fills, fills + batch.fills.programs_at)
        batch.write_elsewhere(self._backend.device.current_handle())
        if clock:
            clock.mark()
        outputs = buffers.answer(batch.out_bytes - batch.stay_bytes)
        if outputs.size:
            self._backend.device.copy(
                self._backend.device.current_handle(),
                address_of(outputs.data),
                buffers.device_out.data_ptr() + batch.stay_bytes,
                outputs.size,
            )
        if clock:
            clock.mark()
        done = self._backend.stream.record_event(buffers.done)
        batch.run_on_host(inputs)
        if follower is not None:
            follower.run()
        return Started(begun, outputs, done)

    def _own(self, plan: Plan) -> GpuPlan:
        if not isinstance(plan, GpuPlan) or plan.backend is not self._backend:
            raise QuantError("the plan was made by another backend; make it with this one")
        return plan
