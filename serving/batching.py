"""Dynamic batching: requests that arrive while the GPU works, or within a set delay, go to it together, lookups and scores.

One batch is on the GPU at a time, driven by a thread of its own; the event loop reads and writes requests meanwhile. Without
a delay no request ever waits for others: a batch is what came while the batch before it ran.
"""

import asyncio
import functools
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tableside.quant import BadIds, Plan
from tableside.quant.contract import Unfound
from tableside.serving import metrics
from tableside.serving.admission import NEWEST_FIRST_AFTER_S, overloaded
from tableside.serving.deadline import timed_out
from tableside.serving.device_scores import DeviceScores, is_scored_on_device
from tableside.serving.errors import ApiError, DeviceLost
from tableside.serving.executors import Executor
from tableside.serving.places import Buffer
from tableside.serving.request import Answer, Request
from tableside.serving.scorer import Scorer
from tableside.serving.scores import ToScore
from tableside.serving.scoring import ScoreStage

if TYPE_CHECKING:  # both import torch
    from tableside.quant.cache.cache import Cache
    from tableside.quant.gpu.clock import Times
    from tableside.quant.gpu.follower import Follower

logger = logging.getLogger("tableside")

_FINISH_S = 0.005  # between two looks whether a batch is done, at the end
_TIMED_EVERY = 16  # batches; the events that time one cost some 10 µs
_BATCH_BYTES = 64 << 20  # of ids, gathered rows and vectors that requests share a batch up to; a larger one runs alone


_LookedUp = tuple[Buffer, Sequence[Unfound] | None]  # a request's output buffer, and what was not found


class BatchBackend(Protocol):
    """What the batcher needs of the GPU's backend (`quant.gpu.backend`)."""

    @property
    def device(self) -> Any: ...

    @property
    def description(self) -> str: ...

    @property
    def cache(self) -> "Cache | None": ...

    def is_lost(self) -> bool: ...

    def run_timed(
        self, requests: Sequence[tuple[Plan, Any]], timed: bool, follower: "Follower | None" = None
    ) -> "tuple[Sequence[_LookedUp | BadIds], Times | None]": ...


class Future(Protocol):
    """What the batcher asks of an asyncio.Future, and gives its answers to."""

    def done(self) -> bool: ...

    def set_result(self, result: Answer, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...

    def get_loop(self) -> asyncio.AbstractEventLoop: ...


@dataclass(frozen=True)
class _Waiting:
    request: Request
    inputs: Any
    future: Future
    since: float  # of time.perf_counter


class Batcher(Executor):
    """Runs requests on a GPU, at most `max_batch` together; each waits at most `delay_s` for others."""

    def __init__(
        self, backend: BatchBackend, max_batch: int, delay_s: float, max_waiting: int = 1024, max_wait_s: float = 1.0
    ) -> None:
        """max_waiting, max_wait_s: as for `serving.admission.Slots`, whose rules are followed here."""
        self._backend, self._max_batch, self._delay_s = backend, max_batch, delay_s
        self._max_waiting, self._max_wait_s = max_waiting, max_wait_s
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tableside-gpu")
        self._timer: asyncio.TimerHandle | None = None
        self._is_running = self._is_ending = False
        self._lost: ApiError | None = None
        self._scores = ScoreStage(backend.is_lost)
        self._batches = 0
        self._metrics = metrics.GpuMetrics(str(backend.device))
        self._cache_metrics = metrics.CacheMetrics(str(backend.device))

    async def _run(self, request: Request, inputs: Any) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.submit(request, inputs, future)
        return await future

    def submit(self, request: Request, inputs: Any, future: Future) -> None:
        """Runs a request whose inputs were checked, in some batch; `future` gets its answer, or an ApiError."""
        if self._lost is not None:
            future.set_exception(self._lost)
            return
        self._waiting.append(_Waiting(request, inputs, future, time.perf_counter()))
        if len(self._waiting) > self._max_waiting:
            _fail(self._waiting.popleft(), overloaded(f"{self._max_waiting} requests wait for the GPU, the limit (max_waiting)"))
        self._start_if_due()

    def close(self) -> None:
        self._thread.shutdown()

    async def finish(self) -> None:
        """Begins no other batch, and waits for the one that runs."""
        self._is_ending = True
        while self._is_running:
            await asyncio.sleep(_FINISH_S)

    def count_cache(self, wait: bool = False) -> None:
        """Brings the counters of the device's cache up to date, as of some batches ago. wait: as of now, where no batch runs."""
        if self._backend.cache is not None:
            self._cache_metrics.update(self._backend.cache.statistics(wait=wait and not self._is_running))

    def end_if_lost(self) -> bool:
        if self._lost is None and self._backend.is_lost():
            logger.critical("%s is lost to this process, which ends; the supervisor replaces it", self._backend.description)
            self._lost = DeviceLost()
            while self._waiting:
                _fail(self._waiting.popleft(), self._lost)
            os.kill(os.getpid(), signal.SIGTERM)
        return self._lost is not None

    def _start_if_due(self) -> None:
        if self._is_running or self._is_ending or not self._waiting:
            return
        left = self._waiting[0].since + self._delay_s - time.perf_counter()
        if left <= 0 or len(self._waiting) >= self._max_batch:
            self._start()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(left, self._timer_ended)

    def _timer_ended(self) -> None:
        self._timer = None
        self._start_if_due()

    def _take(self) -> list[_Waiting]:
        self._refuse_late()
        taken: list[_Waiting] = []
        size = 0
        while self._waiting and len(taken) < self._max_batch:
            is_late = time.perf_counter() - self._waiting[0].since > self._delay_s + NEWEST_FIRST_AFTER_S
            end = -1 if is_late else 0
            w = self._waiting[end]
            size += 0 if w.future.done() else w.request.staged_bytes
            if taken and size > _BATCH_BYTES:
                break
            del self._waiting[end]
            if not w.future.done():  # else its client left
                taken.append(w)
        return taken

    def _refuse_late(self) -> None:
        while self._waiting and time.perf_counter() - self._waiting[0].since > self._delay_s + self._max_wait_s:
            _fail(self._waiting.popleft(), overloaded(f"the request waited {self._max_wait_s:g} s for the GPU (max_wait_s)"))

    def _start(self) -> None:
        taken = self._take()
        if not taken:
            return
        timed = self._batches % _TIMED_EVERY == 0
        started = time.perf_counter()
        try:
            running = asyncio.get_running_loop().run_in_executor(self._thread, self._work, taken, timed)
        except RuntimeError as error:  # no thread, or this worker is closing
            for w in taken:
                _fail(w, error)
            return
        self._is_running = True
        self._batches += 1
        running.add_done_callback(functools.partial(self._done, taken))
        for w in taken:
            self._metrics.waited(started - w.since)

    def _work(self, taken: list[_Waiting], timed: bool) -> "tuple[list[Answer | Exception], Times | None]":
        """On the thread: looks all requests up together, and scores those that ask for it, on the device where that can be."""

        def tell(scorer: Scorer) -> None:
            taken[0].future.get_loop().call_soon_threadsafe(self._give_up, taken, scorer)

        scored = {n: (w.request, w.inputs) for n, w in enumerate(taken) if is_scored_on_device(w.request)}
        on_device = DeviceScores(scored, self._scores, tell) if scored else None
        found, times = self._backend.run_timed([(w.request.plan, w.inputs) for w in taken], timed, on_device)
        answers: list[Answer | Exception] = []
        places: list[int] = []
        batch: list[ToScore] = []
        for n, (w, result) in enumerate(zip(taken, found, strict=True)):
            if isinstance(result, BadIds):
                answers.append(w.request.refusal(result))
                continue
            answer = Answer(*result)
            if on_device is not None and n in scored:
                answers.append(on_device.write(n, answer.buffer) or answer)
                continue
            if w.request.scoring is not None:
                places.append(len(answers))
                batch.append(ToScore(w.request.scoring, w.inputs, answer.buffer))
            answers.append(answer)
        for place, refused in zip(places, self._scores.run(batch, tell), strict=True):
            if refused is not None:
                answers[place] = refused
        return answers, times

    def _give_up(self, taken: list[_Waiting], scorer: Scorer) -> None:
        """On the event loop, where a scorer takes too long: this worker answers no request any more, and ends."""
        self._lost = timed_out(scorer)
        for w in (*taken, *self._waiting):
            _fail(w, self._lost)

    def _done(self, taken: list[_Waiting], running: "asyncio.Future[Any]") -> None:
        self._is_running = False
        try:
            if (error := running.exception()) is not None:
                if not isinstance(error, ApiError):
                    logger.error("a batch of %d requests failed on %s", len(taken), self._backend.description, exc_info=error)
                for w in taken:
                    _fail(w, error)
                if isinstance(error, RuntimeError):
                    self.end_if_lost()
                return
            results, times = running.result()
            for w, result in zip(taken, results, strict=True):
                if isinstance(result, Exception):
                    _fail(w, result)
                elif not w.future.done():
                    w.future.set_result(result)
            self._metrics.answered(len(taken), times)
            if self._batches % _TIMED_EVERY == 0:
                self.count_cache()
        finally:
            self._start_if_due()


def _fail(w: _Waiting, error: BaseException) -> None:
    if not w.future.done():
        w.future.set_exception(error)
