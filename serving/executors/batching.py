"""Dynamic batching on the GPU, lookups and scores: a batch is what came while the two before it ran; no
request waits for others. Two batches are under way at most: one is staged while the GPU works on the other.
One thread starts batches, the other waits for results and passes them on."""

import asyncio
import logging
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tableside.quant import Plan
from tableside.quant.contract import Waiting
from tableside.quant.errors import Refused
from tableside.serving.errors import ApiError, DeviceLost
from tableside.serving.executors.admission import NEWEST_FIRST_AFTER_S, overloaded
from tableside.serving.executors.batch_threads import BatchThreads
from tableside.serving.executors.device_scores import DeviceScores, is_scored_on_device
from tableside.serving.executors.executors import INLINE_FETCHED
from tableside.serving.executors.pending import Readers
from tableside.serving.executors.scoring import ScoreStage, timed_out
from tableside.serving.metrics import metrics
from tableside.serving.model.request import Answer, Request
from tableside.serving.model.scorer import Scorer, ToScore

if TYPE_CHECKING:  # both import torch
    from tableside.quant.gpu.backend import GpuBackend
    from tableside.quant.gpu.batch.clock import Times

logger = logging.getLogger("tableside")

_UNDER_WAY = 2  # batches at most
_FINISH_S = 0.005  # between two looks whether a batch is done, at the end
_TIMED_EVERY = 16  # batches; the events that time one cost some 10 µs
# of ids, gathered rows and vectors that requests share a batch up to; a larger one runs alone
_BATCH_BYTES = 64 << 20


class Future(Protocol):
    """The part of asyncio.Future that the batcher needs."""

    def done(self) -> bool: ...

    def set_result(self, result: Answer, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...


Told = Sequence[tuple[Future, Answer | BaseException]]  # of each request: who waits for it, and what it gets


@dataclass(slots=True, eq=False)  # not frozen: those take four times as long to make
class Asked:
    """A request, and who waits for its answer. deadline: as of `Request`, which others may share. Set once
    it is submitted: since, of time.perf_counter; plan."""

    request: Request
    inputs: Any
    future: Future
    deadline: float | None = None
    since: float = 0.0
    plan: Plan = field(init=False)


@dataclass(slots=True, eq=False)
class _Batch:
    """Requests that run together. scores: those computed on the device."""

    taken: list[Asked]
    timed: bool
    scores: DeviceScores | None = None


class Batcher:
    """Runs up to `max_batch` requests together on a GPU. Belongs to one event loop."""

    def __init__(
        self,
        backend: "GpuBackend",
        max_batch: int,
        max_waiting: int = 1024,
        max_wait_s: float = 1.0,
        *,
        tell: Callable[[Told], None],
    ) -> None:
        """max_waiting, max_wait_s: as of `serving.executors.admission.Slots`. tell: gets a batch's results,
        on a thread."""
        self._backend, self._max_batch = backend, max_batch
        self._max_waiting, self._max_wait_s = max_waiting, max_wait_s
        self._tell = tell
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()  # for what is below, up to the empty line
        self._waiting: deque[Asked] = deque()
        self._under_way: list[_Batch] = []  # in order
        self._is_ending = self._is_closed = False
        # the first thread; before all else it waits, as those that come in the same round go together
        self._is_idle = True
        self._lost: ApiError | None = None

        # what the first thread waits for where it is idle
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads = BatchThreads(self._next, self._begin, self._finish, self._end, "tableside-gpu")
        self._readers = Readers()
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="tableside-beside")  # begins large requests
        self._is_looking, self._reading = False, 0  # of the event loop
        # of a thread each
        self._scores, self._device_scores = (ScoreStage(backend.is_lost), ScoreStage(backend.is_lost))
        self._batches = 0  # of the first thread
        self._metrics = metrics.GpuMetrics(str(backend.device))
        self._cache_metrics = metrics.CacheMetrics(str(backend.device))

    def submit_all(self, asked: Sequence[Asked]) -> None:
        """Runs requests that came together in some batch; their futures get answers or ApiErrors."""
        now = time.perf_counter()
        for w in asked:
            w.since, w.plan = now, w.request.plan
        self._submit([w for w in asked if not w.plan.waits or self._is_ready(w)])

    def _is_ready(self, w: Asked) -> bool:
        """Begins a request that may wait for rows; where it does, a thread waits, so that no batch does."""
        try:
            if self._reading >= self._max_waiting:
                raise overloaded(f"{self._max_waiting} requests wait for rows, the limit (max_waiting)")
            if w.request.ids > INLINE_FETCHED and not w.plan.begins_at_once:
                self._later(w, self._run_beside(partial(w.request.begin, w.inputs)))
                return False
            return self._takes(w, w.request.begin(w.inputs))
        except (ApiError, RuntimeError) as error:  # refused, or this worker is closing
            _fail(w, error)
        return False

    def _takes(self, w: Asked, begun: Plan | Waiting) -> bool:
        """Returns whether a request that began can run now."""
        if isinstance(begun, Waiting) and begun.may_be_here:
            self._later(w, self._run_beside(partial(w.request.look, begun)))
            return False
        if isinstance(begun, Waiting):
            self._later(w, self._readers.submit(partial(w.request.wait, begun, w.deadline)))
            return False
        w.plan, w.since = begun, time.perf_counter()
        return True

    def _run_beside(self, work: Callable[[], Plan | Waiting]) -> "asyncio.Future[Plan | Waiting]":
        return asyncio.get_running_loop().run_in_executor(self._beside, work)

    def _later(self, w: Asked, reading: "asyncio.Future[Plan | Waiting]") -> None:
        self._reading += 1
        reading.add_done_callback(partial(self._came, w))

    def _came(self, w: Asked, reading: "asyncio.Future[Plan | Waiting]") -> None:
        self._reading -= 1
        if reading.cancelled():
            _fail(w, _closing())
        elif (error := reading.exception()) is not None:
            if not isinstance(error, ApiError):
                logger.error("rows for model %s were not read", w.request.model, exc_info=error)
            _fail(w, error)
        else:
            try:
                if self._takes(w, reading.result()):
                    self._submit([w])
            except RuntimeError:
                _fail(w, _closing())

    def _submit(self, came: list[Asked]) -> None:
        try:
            self._threads.begin()
            self._loop = asyncio.get_running_loop()
            refused = self._add(came)
        except RuntimeError as error:  # there is no room for threads, or this worker is closing
            for w in came:
                _fail(w, error)
            return
        for w in refused:
            _fail(w, self._lost or self._too_many())
        if not self._is_looking:  # those that came in the same round go together
            self._is_looking = True
            self._loop.call_soon(self._look)

    def _add(self, came: list[Asked]) -> list[Asked]:
        """Queues requests; returns those to refuse. RuntimeError: the batcher was closed."""
        with self._lock:
            if self._is_closed:
                raise _closing()
            if self._lost is not None:
                return came
            self._waiting.extend(came)
            return [self._waiting.popleft() for _ in range(len(self._waiting) - self._max_waiting)]

    def _too_many(self) -> ApiError:
        return overloaded(f"{self._max_waiting} requests wait for the GPU, the limit (max_waiting)")

    def close(self) -> None:
        """Takes no more requests and waits for running lookups."""
        with self._lock:
            self._is_closed = True
        self._readers.close()
        self._beside.shutdown(wait=False, cancel_futures=True)
        self._wake()
        self._threads.join()
        for w in self._waiting:
            _fail(w, _closing())

    async def finish(self) -> None:
        """Starts no more batches and waits for those under way."""
        self._is_ending = True
        while self._under_way:
            await asyncio.sleep(_FINISH_S)

    def count_cache(self, wait: bool = False) -> None:
        """Updates the cache's counters, some batches late; with `wait`, now, if no batch runs."""
        if self._backend.cache is not None:
            self._cache_metrics.update(self._backend.cache.statistics(wait=wait and not self._under_way))

    def end_if_lost(self) -> bool:
        """Ends the process if its device is lost; returns whether it is ending."""
        if self._lost is None and self._backend.is_lost():
            logger.critical(
                "%s is lost to this process, which ends; the supervisor replaces it",
                self._backend.description,
            )
            with self._lock:
                self._lost = DeviceLost()
                waiting = list(self._waiting)
                self._waiting.clear()
            for w in waiting:
                _fail(w, self._lost)
            os.kill(os.getpid(), signal.SIGTERM)
        return self._lost is not None

    def _look(self) -> None:
        self._is_looking = False
        self._wake()

    def _wake(self) -> None:
        """Wakes the first thread if it waits; on any thread."""
        with self._lock:
            was_idle, self._is_idle = self._is_idle, False
        if was_idle:
            self._woken.put(None)

    # ---- on the first thread ----

    def _next(self) -> _Batch | None:
        """Returns the next batch once fewer than _UNDER_WAY run; None: closed."""
        while True:
            with self._lock:
                if self._is_closed:
                    return None
                if not self._is_idle and self._may_begin() and (taken := self._take()):
                    self._under_way.append(batch := _Batch(taken, self._batches % _TIMED_EVERY == 0))
                    break
                self._is_idle = True
            self._woken.get()
            with self._lock:
                self._is_idle = False
        self._batches += 1
        return batch

    def _may_begin(self) -> bool:
        return not self._is_ending and self._lost is None and len(self._under_way) < _UNDER_WAY

    def _take(self) -> list[Asked]:
        self._refuse_late()
        taken: list[Asked] = []
        size, late_since = 0, time.perf_counter() - NEWEST_FIRST_AFTER_S
        while self._waiting and len(taken) < self._max_batch:
            end = -1 if self._waiting[0].since < late_since else 0
            w = self._waiting[end]
            if w.future.done():  # its client left
                del self._waiting[end]
                continue
            size += w.request.staged_bytes
            if taken and size > _BATCH_BYTES:
                break
            del self._waiting[end]
            taken.append(w)
        return taken

    def _refuse_late(self) -> None:
        while self._waiting and time.perf_counter() - self._waiting[0].since > self._max_wait_s:
            error = overloaded(f"the request waited {self._max_wait_s:g} s for the GPU (max_wait_s)")
            self._on_loop(_fail, self._waiting.popleft(), error)

    def _tell_late(self, scorer: Scorer) -> None:
        """Called by a thread when a scorer takes too long."""
        self._on_loop(self._give_up, scorer)

    def _on_loop(self, call: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None, "a request came"
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(call, *arguments)

    def _begin(self, batch: _Batch) -> Any:
        if scored := {
            n: (w.request, w.inputs) for n, w in enumerate(batch.taken) if is_scored_on_device(w.request)
        }:
            batch.scores = DeviceScores(scored, self._device_scores, self._tell_late)
        began = time.perf_counter()
        started = self._backend.batches.begin(
            [(w.plan, w.inputs) for w in batch.taken], batch.timed, batch.scores
        )
        self._metrics.waited([began - w.since for w in batch.taken])
        return started

    # ---- on the second thread ----

    def _finish(self, batch: _Batch, started: Any) -> "tuple[list[Answer | Exception], Times | None]":
        """Waits for a batch, and computes the CPU's scores."""
        scores = batch.scores
        with nullcontext() if scores is None else scores.waited_for(self._scores):
            found, times = self._backend.batches.wait(started)
        answers: list[Answer | Exception] = []
        to_score: dict[int, ToScore] = {}
        for n, (w, result) in enumerate(zip(batch.taken, found, strict=True)):
            if isinstance(result, Refused):
                answers.append(w.request.refusal(result))
                continue
            answer = Answer(*result)
            if scores is not None and scores.has(n):
                answers.append(scores.write(n, answer.buffer) or answer)
                continue
            if w.request.scoring is not None:
                to_score[n] = ToScore(w.request.scoring, w.inputs, answer.buffer)
            answers.append(answer)
        if to_score:
            refused = self._scores.run([*to_score.values()], self._tell_late)
            for n, why in zip(to_score, refused, strict=True):
                answers[n] = why or answers[n]
        return answers, times

    def _end(self, batch: _Batch, found: "tuple[list[Answer | Exception], Times | None] | Exception") -> None:
        """Passes a batch's results on; first starts the next one if the device is idle."""
        if isinstance(found, Exception):
            self._on_loop(self._failed, batch, found)
            return
        results, times = found
        is_idle = len(self._under_way) == 1
        if is_idle:
            self._leave(batch)
        try:
            self._tell([(w.future, result) for w, result in zip(batch.taken, results, strict=True)])
        except Exception:  # whatever it is, later batches need this thread
            logger.exception("answers of a batch of %d requests could not be passed on", len(results))
        if not is_idle:
            self._leave(batch)
        self._metrics.answered(len(results), times)
        if batch.timed:
            self._on_loop(self.count_cache)

    def _leave(self, batch: _Batch) -> None:
        with self._lock:
            self._under_way.remove(batch)
        self._wake()

    # ---- on the event loop ----

    def _failed(self, batch: _Batch, error: Exception) -> None:
        """Fails a batch's requests. If the device is lost, no other batch begins."""
        taken = batch.taken
        if not isinstance(error, ApiError):
            logger.error(
                "a batch of %d requests failed on %s", len(taken), self._backend.description, exc_info=error
            )
        for w in taken:
            _fail(w, error)
        if isinstance(error, RuntimeError):
            self.end_if_lost()
        self._leave(batch)

    def _give_up(self, scorer: Scorer) -> None:
        """Fails all requests after a scorer's timeout; the worker ends."""
        with self._lock:
            self._lost = timed_out(scorer)
            left = (*(w for batch in self._under_way for w in batch.taken), *self._waiting)
            self._waiting.clear()
        for w in left:
            _fail(w, self._lost)


def _closing() -> RuntimeError:
    return RuntimeError("no batch runs any more: this worker is closing")


def _fail(w: Asked, error: BaseException) -> None:
    if not w.future.done():
        w.future.set_exception(error)
