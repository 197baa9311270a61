"""A bound on the time of a scorer's call. What runs in torch cannot be interrupted, so the worker that it
runs in is replaced.

`Deadline` watches a call from a thread beside it. Where a call takes longer than its scorer's `timeout_s`,
that is logged and whoever waits for the call is told. The worker gets SIGTERM, answers its other requests for
`ending_s` seconds and ends, even where the call never does. Where the call blocks the event loop nobody can
be told or answered: the worker ends at once.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tableside.serving.errors import ApiError, ErrorKind
from tableside.serving.metrics.metrics import ERRORS
from tableside.serving.model.scorer import Scorer

logger = logging.getLogger("tableside")

Tell = Callable[[Scorer], object]
_EXIT_STATUS = 70  # EX_SOFTWARE


def timed_out(scorer: Scorer) -> ApiError:
    """503 for requests that wait for scores of a worker whose scorer hangs."""
    return ApiError(
        503,
        ErrorKind.SCORER_TIMEOUT,
        f"the scorer of {scorer.name} took longer than {scorer.limits.timeout_s:g} s (scorer_timeout_s); "
        "this worker is being replaced: try again, with fewer rows if it was this request",
    )


@dataclass(frozen=True)
class _Call:
    scorer: Scorer
    late_at: float  # of time.monotonic
    tell: Tell | None


class Deadline:
    """Watches one call at a time, so each thread that calls scorers has its own. A late call is seen
    within a second."""

    def __init__(self) -> None:
        self._call: _Call | None = None  # replaced whole, so no lock
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, scorer: Scorer, tell: Tell | None) -> Iterator[None]:
        """Goes around a call of `scorer`.

        tell: called once with the scorer, from another thread, where the call is late. None: nobody could be
        told, as the call blocks the event loop.
        """
        timeout_s = scorer.limits.timeout_s
        if timeout_s is None:
            yield
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(min(1.0, timeout_s / 8),), name="deadline", daemon=True
            )
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
        ERRORS.labels(scorer.model, ErrorKind.SCORER_TIMEOUT.value).inc()
        os._exit(_EXIT_STATUS)
    with suppress(RuntimeError):  # the event loop is closed: this worker ends already
        call.tell(scorer)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(scorer.limits.ending_s)
    logger.critical("the scorer of %s still runs: this worker ends without it", scorer.name)
    os._exit(_EXIT_STATUS)
