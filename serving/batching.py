"""Dynamic batching: requests that arrive while the GPU works, or within a set delay, go to it together, lookups and scores.

One batch is on the GPU at a time, driven by a thread of its own; the event loop reads and writes requests meanwhile. Without
a delay nothing ever waits for company: a batch is what came while the one before it ran.
"""

import asyncio
import functools
import logging
import os
import signal
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tableside.quant import BadIds
from tableside.serving import metrics
from tableside.serving.admission import NEWEST_FIRST_AFTER_S, overloaded
from tableside.serving.deadline import Deadline, timed_out
from tableside.serving.engine import Batch, score_together
from tableside.serving.errors import ApiError, Kind
from tableside.serving.scorer import Scorer

if TYPE_CHECKING:
    from tableside.quant.gpu.backend import GpuBackend
    from tableside.quant.gpu.clock import Times

logger = logging.getLogger("tableside")

_TIMED_EVERY = 16  # batches; the events that time one cost some 10 µs
_BATCH_BYTES = 64 << 20  # of ids, gathered rows and vectors that requests share a batch up to; a larger one runs alone

Result = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Waiting:
    batch: Batch
    inputs: Any
    future: "asyncio.Future[Result]"
    since: float


class Batcher:
    """Runs requests on `fused`, at most `max_batch` together, each waiting at most `delay_s` for others."""

    def __init__(
        self, fused: "GpuBackend", max_batch: int, delay_s: float, max_waiting: int = 1024, max_wait_s: float = 1.0
    ) -> None:
        """max_waiting, max_wait_s: as for `serving.admission.Slots`, whose rules are followed here."""
        self._fused, self._max_batch, self._delay_s = fused, max_batch, delay_s
        self._max_waiting, self._max_wait_s = max_waiting, max_wait_s
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tableside-gpu")
        self._timer: asyncio.TimerHandle | None = None
        self._is_running = False
        self._lost: ApiError | None = None
        self._deadline = Deadline()
        self._batches = 0
        self._metrics = metrics.GpuMetrics(str(fused.device))
        self._cache_metrics = metrics.CacheMetrics(str(fused.device))

    async def run(self, batch: Batch, inputs: Any) -> Result:
        """A request's vectors and scores, uint8 [out_bytes]. ApiError: it is wrong, its scorer refuses, or the device is lost."""
        if self._lost is not None:
            raise self._lost
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(batch, inputs, future, time.perf_counter()))
        if len(self._waiting) > self._max_waiting:
            _fail(self._waiting.popleft(), overloaded(f"{self._max_waiting} requests wait for the GPU, the limit (max_waiting)"))
        self._start_if_due()
        result: Result = await future
        return result

    def close(self) -> None:
        """Waits for the batch that runs."""
        self._thread.shutdown()

    def end_if_lost(self) -> bool:
        """Where the device is of no more use to this process: refuses what waits, and ends the process, to be replaced."""
        if self._lost is None and self._fused.is_lost():
            logger.critical("%s is lost to this worker, which ends; the supervisor replaces it", self._fused.description)
            self._lost = ApiError(503, Kind.INTERNAL, "this worker lost its GPU and is being replaced; try again")
            while self._waiting:
                _fail(self._waiting.popleft(), self._lost)
            os.kill(os.getpid(), signal.SIGTERM)
        return self._lost is not None

    def _start_if_due(self) -> None:
        if self._is_running or not self._waiting:
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
            size += 0 if w.future.done() else w.batch.staged_bytes
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

    def _work(self, taken: list[_Waiting], timed: bool) -> "tuple[list[Result | Exception], Times | None]":
        """On the thread: looks everything up at once, then scores the requests of each scorer at once."""
        found, times = self._fused.run_timed([(w.batch.plan, w.inputs) for w in taken], timed)
        answers: list[Result | Exception] = []
        to_score: dict[int, list[int]] = {}
        for n, (w, result) in enumerate(zip(taken, found, strict=True)):
            if isinstance(result, BadIds):
                answers.append(w.batch.refusal(result))
                continue
            answers.append(w.batch.with_scores(result))
            if w.batch.scoring is not None:
                scorer = w.batch.scoring.scorer
                to_score.setdefault(id(scorer) if scorer.is_row_wise else -n, []).append(n)
        for members in to_score.values():
            self._score(taken, answers, members)
        return answers, times

    def _score(self, taken: list[_Waiting], answers: list[Result | Exception], members: list[int]) -> None:
        """Scores requests in one call; where that is refused, each on its own, so that only those at fault are."""
        started = time.perf_counter()
        requests = [(taken[n].batch.scoring, taken[n].inputs, answers[n]) for n in members]
        scorer = taken[members[0]].batch.scoring.scorer  # type: ignore[union-attr]
        loop = taken[0].future.get_loop()
        try:
            with self._deadline.watch(scorer, functools.partial(loop.call_soon_threadsafe, self._give_up, scorer, taken)):
                score_together(requests)  # type: ignore[arg-type]
        except Exception as error:  # whatever a scorer raises is of these requests alone, unless the device is lost
            if self._fused.is_lost():
                raise RuntimeError(f"{self._fused.description} was lost to a scorer") from error
            if len(members) > 1:
                for n in members:
                    self._score(taken, answers, [n])
                return
            answers[members[0]] = error
        metrics.SCORE_SECONDS.labels(taken[members[0]].batch.model).observe(time.perf_counter() - started)

    def _give_up(self, scorer: Scorer, taken: list[_Waiting]) -> None:
        """On the event loop, where a scorer takes too long: nothing is answered any more by this worker, which ends."""
        self._lost = timed_out(scorer)
        for w in (*taken, *self._waiting):
            _fail(w, self._lost)

    def _done(self, taken: list[_Waiting], running: "asyncio.Future[Any]") -> None:
        self._is_running = False
        try:
            if (error := running.exception()) is not None:
                logger.error("a batch of %d requests failed on %s", len(taken), self._fused.description, exc_info=error)
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
            if self._fused.cache is not None and self._batches % _TIMED_EVERY == 0:
                self._cache_metrics.update(self._fused.cache.statistics())
        finally:
            self._start_if_due()


def _fail(w: _Waiting, error: BaseException) -> None:
    if not w.future.done():
        w.future.set_exception(error)
