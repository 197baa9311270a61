"""Dynamic batching: requests that arrive while the GPU works, or within a set delay, go to it together, lookups and scores.

Two batches are under way at most: one is staged and sent while the GPU works on the other, by threads of their own
(`serving.batch_threads`); the event loop reads and writes requests meanwhile. Without a delay no request ever waits for others: a
batch is what came while the two before it were under way.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tableside.quant import BadIds, Plan
from tableside.quant.contract import Unfound
from tableside.serving import metrics
from tableside.serving.admission import NEWEST_FIRST_AFTER_S, overloaded
from tableside.serving.batch_threads import BatchThreads
from tableside.serving.deadline import Tell, timed_out
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

_UNDER_WAY = 2  # batches at most
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

    def start(self, requests: Sequence[tuple[Plan, Any]], timed: bool, follower: "Follower | None" = None) -> Any: ...

    def wait(self, started: Any) -> "tuple[Sequence[_LookedUp | BadIds], Times | None]": ...


class Future(Protocol):
    """What the batcher asks of an asyncio.Future, and gives its answers to."""

    def done(self) -> bool: ...

    def set_result(self, result: Answer, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: Request
    inputs: Any
    future: Future
    since: float  # of time.perf_counter


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Requests that run together. scores: those that are computed on the device, of the requests `scored` by number."""

    taken: list[_Waiting]
    timed: bool
    loop: asyncio.AbstractEventLoop
    scored: dict[int, tuple[Request, Any]]
    scores: DeviceScores | None


class Batcher(Executor):
    """Runs requests on a GPU, at most `max_batch` together; each waits at most `delay_s` for others."""

    def __init__(
        self, backend: BatchBackend, max_batch: int, delay_s: float, max_waiting: int = 1024, max_wait_s: float = 1.0
    ) -> None:
        """max_waiting, max_wait_s: as for `serving.admission.Slots`, whose rules are followed here."""
        self._backend, self._max_batch, self._delay_s = backend, max_batch, delay_s
        self._max_waiting, self._max_wait_s = max_waiting, max_wait_s
        self._waiting: deque[_Waiting] = deque()
        self._threads = BatchThreads(self._begin, self._finish, self._tell_done, "tableside-gpu")
        self._timer: asyncio.TimerHandle | None = None
        self._under_way: list[_Batch] = []  # in order
        self._is_ending = self._is_looking = False
        self._lost: ApiError | None = None
        self._scores, self._device_scores = ScoreStage(backend.is_lost), ScoreStage(backend.is_lost)  # of a thread each
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
        self._look_soon()  # those that came in the same round go together

    def close(self) -> None:
        self._threads.close()

    async def finish(self) -> None:
        """Begins no other batch, and waits for those under way."""
        self._is_ending = True
        while self._under_way:
            await asyncio.sleep(_FINISH_S)

    def count_cache(self, wait: bool = False) -> None:
        """Brings the counters of the device's cache up to date, as of some batches ago. wait: as of now, where no batch runs."""
        if self._backend.cache is not None:
            self._cache_metrics.update(self._backend.cache.statistics(wait=wait and not self._under_way))

    def end_if_lost(self) -> bool:
        if self._lost is None and self._backend.is_lost():
            logger.critical("%s is lost to this process, which ends; the supervisor replaces it", self._backend.description)
            self._lost = DeviceLost()
            while self._waiting:
                _fail(self._waiting.popleft(), self._lost)
            os.kill(os.getpid(), signal.SIGTERM)
        return self._lost is not None

    def _look_soon(self) -> None:
        if not self._is_looking and self._waiting and len(self._under_way) < _UNDER_WAY:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._is_looking = False
        self._start_if_due()

    def _start_if_due(self) -> None:
        while len(self._under_way) < _UNDER_WAY and self._waiting and not self._is_ending:
            left = self._waiting[0].since + self._delay_s - time.perf_counter()
            if left <= 0 or len(self._waiting) >= self._max_batch:
                self._start()
                continue
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(left, self._timer_ended)
            return

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
        scored = {n: (w.request, w.inputs) for n, w in enumerate(taken) if is_scored_on_device(w.request)}
        loop = asyncio.get_running_loop()
        scores = DeviceScores(scored, self._device_scores, self._teller(loop)) if scored else None
        batch = _Batch(taken, self._batches % _TIMED_EVERY == 0, loop, scored, scores)
        try:
            self._threads.put(batch)
        except RuntimeError as error:  # no thread, or this worker is closing
            for w in taken:
                _fail(w, error)
            return
        self._under_way.append(batch)
        self._batches += 1
        now = time.perf_counter()
        for w in taken:
            self._metrics.waited(now - w.since)

    def _teller(self, loop: asyncio.AbstractEventLoop) -> Tell:
        """What a thread calls where a scorer takes too long."""

        def tell(scorer: Scorer) -> None:
            loop.call_soon_threadsafe(self._give_up, scorer)

        return tell

    def _begin(self, batch: _Batch) -> Any:
        """On the first thread: sends all requests of a batch to the device, and has it score those that it can."""
        return self._backend.start([(w.request.plan, w.inputs) for w in batch.taken], batch.timed, batch.scores)

    def _finish(self, batch: _Batch, started: Any) -> "tuple[list[Answer | Exception], Times | None]":
        """On the second thread: waits for a batch, and scores on the CPU what is scored there."""
        found, times = self._backend.wait(started)
        answers: list[Answer | Exception] = []
        places: list[int] = []
        to_score: list[ToScore] = []
        for n, (w, result) in enumerate(zip(batch.taken, found, strict=True)):
            if isinstance(result, BadIds):
                answers.append(w.request.refusal(result))
                continue
            answer = Answer(*result)
            if batch.scores is not None and n in batch.scored:
                answers.append(batch.scores.write(n, answer.buffer) or answer)
                continue
            if w.request.scoring is not None:
                places.append(len(answers))
                to_score.append(ToScore(w.request.scoring, w.inputs, answer.buffer))
            answers.append(answer)
        if to_score:
            tell = self._teller(batch.loop)
            for place, refused in zip(places, self._scores.run(to_score, tell), strict=True):
                if refused is not None:
                    answers[place] = refused
        return answers, times

    def _tell_done(self, batch: _Batch, found: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            batch.loop.call_soon_threadsafe(self._done, batch, found)

    def _give_up(self, scorer: Scorer) -> None:
        """On the event loop, where a scorer takes too long: this worker answers no request any more, and ends."""
        self._lost = timed_out(scorer)
        for w in (*(w for batch in self._under_way for w in batch.taken), *self._waiting):
            _fail(w, self._lost)

    def _done(self, batch: _Batch, found: "tuple[list[Answer | Exception], Times | None] | Exception") -> None:
        self._under_way.remove(batch)
        taken = batch.taken
        if isinstance(found, Exception):
            if not isinstance(found, ApiError):
                logger.error("a batch of %d requests failed on %s", len(taken), self._backend.description, exc_info=found)
            for w in taken:
                _fail(w, found)
            if isinstance(found, RuntimeError):
                self.end_if_lost()
            self._start_if_due()
            return
        if not self._under_way:
            self._start_if_due()  # the device has nothing to do; else answers go out first
        results, times = found
        for w, result in zip(taken, results, strict=True):
            if isinstance(result, Exception):
                _fail(w, result)
            elif not w.future.done():
                w.future.set_result(result)
        self._look_soon()
        self._metrics.answered(len(taken), times)
        if self._batches % _TIMED_EVERY == 0:
            self.count_cache()


def _fail(w: _Waiting, error: BaseException) -> None:
    if not w.future.done():
        w.future.set_exception(error)
