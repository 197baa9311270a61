"""Dynamic batching: requests that arrive while the GPU works, or within a set delay, go to it together.

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

from quant import BadIds
from serving import metrics
from serving.engine import Batch

if TYPE_CHECKING:
    from quant.fused import Fused

logger = logging.getLogger("tableside")

_TIMED_EVERY = 16  # batches; the events that time one cost some 10 µs
_BATCH_BYTES = 64 << 20  # of vectors that requests share a batch up to; one that asks for more runs alone

Result = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Waiting:
    batch: Batch
    inputs: Any
    future: "asyncio.Future[Result]"
    since: float


class Batcher:
    """Runs requests on `fused`, at most `max_batch` together, each waiting at most `delay_s` for others."""

    def __init__(self, fused: "Fused", max_batch: int, delay_s: float) -> None:
        self._fused, self._max_batch, self._delay_s = fused, max_batch, delay_s
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tableside-gpu")
        self._timer: asyncio.TimerHandle | None = None
        self._is_running = False
        self._batches = 0
        self._metrics = metrics.GpuMetrics(str(fused.device))

    async def run(self, batch: Batch, inputs: Any) -> Result:
        """A request's vectors, uint8 [out_bytes]. ApiError: its ids or lengths are wrong."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(batch, inputs, future, time.perf_counter()))
        self._start_if_due()
        result: Result = await future
        return result

    def close(self) -> None:
        """Waits for the batch that runs."""
        self._thread.shutdown()

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
        taken, size = [self._waiting.popleft()], 0
        while self._waiting and len(taken) < self._max_batch:
            size += taken[-1].batch.out_bytes
            if size + self._waiting[0].batch.out_bytes > _BATCH_BYTES:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _start(self) -> None:
        taken = self._take()
        self._is_running = True
        self._batches += 1
        timed = self._batches % _TIMED_EVERY == 1
        requests = [(w.batch.plan, w.inputs) for w in taken]
        started = time.perf_counter()
        for w in taken:
            self._metrics.waited(started - w.since)
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._fused.run_timed, requests, timed)
        running.add_done_callback(functools.partial(self._done, taken))

    def _done(self, taken: list[_Waiting], running: "asyncio.Future[Any]") -> None:
        self._is_running = False
        if (error := running.exception()) is not None:
            logger.error("a batch of %d requests failed on %s", len(taken), self._fused.description, exc_info=error)
            for w in taken:
                if not w.future.done():
                    w.future.set_exception(error)
            if self._fused.is_lost(error):
                logger.critical("the device is lost to this worker, which ends; the supervisor replaces it")
                os.kill(os.getpid(), signal.SIGTERM)
                return
            self._start_if_due()
            return
        results, times = running.result()
        self._metrics.answered(len(taken), times)
        for w, result in zip(taken, results, strict=True):
            if w.future.done():  # its client left
                continue
            if isinstance(result, BadIds):
                w.future.set_exception(w.batch.refusal(result))
            else:
                w.future.set_result(result)
        self._start_if_due()
