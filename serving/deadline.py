"""A bound on the time of a scorer's call. What runs in torch cannot be interrupted, so the worker that it runs in is replaced.

`Scorers` computes scores: on the event loop where a call's work is small, else on a thread of its own, so that lookups go on.
`Deadline` watches a call from a thread beside it. A call that takes longer than its scorer's `timeout_s` is logged; requests
that wait for scores are answered 503, and so are all later ones; the worker gets SIGTERM, answers its other requests for
`ending_s` and ends, also where the call never does. Where the call blocks the event loop nothing can be answered: the worker
ends at once.
"""

import asyncio
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from tableside.serving.engine import Scoring
from tableside.serving.errors import ApiError, Kind
from tableside.serving.metrics import ERRORS
from tableside.serving.scorer import Scorer

logger = logging.getLogger("tableside")

Tell = Callable[[], object]
INLINE_WORK = 1 << 28  # multiplications up to which scores are computed on the event loop: some 10 ms
_EXIT_STATUS = 70  # EX_SOFTWARE


def timed_out(scorer: Scorer) -> ApiError:
    """503, for who waits for scores of a worker whose scorer hangs."""
    return ApiError(
        503,
        Kind.SCORER_TIMEOUT,
        f"the scorer of {scorer.name} took longer than {scorer.limits.timeout_s:g} s (scorer_timeout_s); "
        "this worker is being replaced: try again, with fewer rows if it was this request",
    )


@dataclass(frozen=True)
class _Call:
    scorer: Scorer
    late_at: float  # of time.monotonic
    tell: Tell | None


class Deadline:
    """Watches one call at a time: each thread that calls scorers has one. A late call is seen within a second."""

    def __init__(self) -> None:
        self._call: _Call | None = None  # replaced whole, so no lock
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, scorer: Scorer, tell: Tell | None) -> Iterator[None]:
        """Around a call. tell: called, once, from another thread, where the call is late; None: nobody could be told."""
        timeout_s = scorer.limits.timeout_s
        if timeout_s is None:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(min(1.0, timeout_s / 8),), name="deadline", daemon=True)
            self._thread.start()
        self._call = _Call(scorer, time.monotonic() + timeout_s, tell)
        try:
            yield
        finally:
            self._call = None

    def _run(self, period_s: float) -> None:
        while True:
            time.sleep(period_s)
            if (call := self._call) is not None and time.monotonic() > call.late_at:
                _end(call)


def _end(call: _Call) -> None:
    scorer = call.scorer
    logger.critical(
        "the scorer of %s runs for more than %g s (scorer_timeout_s): this worker ends and is replaced",
        scorer.name,
        scorer.limits.timeout_s,
    )
    if call.tell is None:
        ERRORS.labels(scorer.model, Kind.SCORER_TIMEOUT.value).inc()
        os._exit(_EXIT_STATUS)
    with suppress(RuntimeError):  # the event loop is closed: this worker ends already
        call.tell()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(scorer.limits.ending_s)
    logger.critical("the scorer of %s still runs: this worker ends without it", scorer.name)
    os._exit(_EXIT_STATUS)


class Scorers:
    """Computes the scores of a worker's requests on the CPU. Belongs to one event loop."""

    def __init__(self) -> None:
        self._inline, self._beside = Deadline(), Deadline()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tableside-scorer")
        self._waiting: set[asyncio.Future[None]] = set()
        self._late: Scorer | None = None

    async def run(self, scoring: Scoring, inputs: Any, buffer: np.ndarray[Any, Any]) -> None:
        """As `Scoring.run`. ApiError: the scorer refuses, a score is not finite, or a call takes too long."""
        if self._late is not None:
            raise timed_out(self._late)
        if scoring.scorer.admit(scoring.output.shape[0]) <= INLINE_WORK:
            with self._inline.watch(scoring.scorer, None):
                scoring.run(inputs, buffer)
            return
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[None] = loop.create_future()
        tell = functools.partial(loop.call_soon_threadsafe, self._give_up, scoring.scorer)
        running = loop.run_in_executor(self._thread, self._work, scoring, inputs, buffer, tell)
        running.add_done_callback(functools.partial(_pass_on, answer))
        self._waiting.add(answer)
        try:
            await answer
        finally:
            self._waiting.discard(answer)

    def _work(self, scoring: Scoring, inputs: Any, buffer: np.ndarray[Any, Any], tell: Tell) -> None:
        with self._beside.watch(scoring.scorer, tell):
            scoring.run(inputs, buffer)

    def _give_up(self, scorer: Scorer) -> None:
        self._late = scorer
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(timed_out(scorer))


def _pass_on(answer: "asyncio.Future[None]", running: "asyncio.Future[None]") -> None:
    if answer.done() or running.cancelled():
        return
    if (error := running.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(None)
