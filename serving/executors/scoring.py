"""Scoring after lookups. A GPU scores a batch together; on the CPU a batch is one request.

torch cannot be interrupted, so a scorer's late call is logged, waiters are told, and the worker gets SIGTERM,
answers other requests for `ending_s` seconds and ends. If the call blocks the event loop it ends at once.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from tableside.serving.errors import ApiError, ErrorKind
from tableside.serving.metrics.metrics import ERRORS, SCORE_SECONDS
from tableside.serving.model.scorer import Scorer, Scoring, score_together

logger = logging.getLogger("tableside")

Tell = Callable[[Scorer], object]
_EXIT_STATUS = 70  # EX_SOFTWARE


def timed_out(scorer: Scorer) -> ApiError:
    """Returns the 503 for requests that wait for a hanging scorer."""
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
    """Watches one call at a time, within a second; each thread that calls scorers has its own."""

    def __init__(self) -> None:
        self._call: _Call | None = None  # replaced whole, so no lock
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, scorer: Scorer, tell: Tell | None) -> Iterator[None]:
        """Surrounds a scorer's call. tell: called once with the scorer, from another thread, if the call is
        late; None: the call blocks the event loop."""
        timeout_s = scorer.limits.timeout_s
        if timeout_s is None:
            yield
            return
        if self._thread is None:
            thread = threading.Thread(
                target=self._run, args=(min(1.0, timeout_s / 8),), name="deadline", daemon=True
            )
            thread.start()
            self._thread = thread
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
    what = "the scorer of %s runs for more than %g s (scorer_timeout_s): this worker ends and is replaced"
    logger.critical(what, scorer.name, scorer.limits.timeout_s)
    if call.tell is None:
        ERRORS.labels(scorer.model, ErrorKind.SCORER_TIMEOUT.value).inc()
        os._exit(_EXIT_STATUS)
    with suppress(RuntimeError):  # the event loop is closed: this worker ends already
        call.tell(scorer)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(scorer.limits.ending_s)
    logger.critical("the scorer of %s still runs: this worker ends without it", scorer.name)
    os._exit(_EXIT_STATUS)


class ScoredRequest(Protocol):
    @property
    def scoring(self) -> Scoring: ...


Score = Callable[[Sequence[Any]], None]  # one call of a scorer, for requests of it; on a device its beginning


class ScoreStage:
    """Scores batches, each scorer call within its time limit. One thread calls. is_device_lost: whether the
    device of the batches is unusable; None: there is none."""

    def __init__(self, is_device_lost: Callable[[], bool] | None = None) -> None:
        self._deadline = Deadline()
        self._is_device_lost = is_device_lost

    def run(
        self,
        batch: Sequence[ScoredRequest],
        tell: Tell | None,
        since: float | None = None,
        score: Score = score_together,
    ) -> list[Exception | None]:
        """Scores a batch; returns each request's error or None. A row-wise scorer takes its requests in one
        call; if that fails, one by one, so that only requests at fault are refused. tell: as of
        `Deadline.watch`. since: the first call's start (time.perf_counter); None: now. score: one call.
        RuntimeError: the device was lost to a scorer."""
        refused: list[Exception | None] = [None] * len(batch)
        for members in _calls(batch):
            self._call(batch, members, tell, time.perf_counter() if since is None else since, refused, score)
        return refused

    def _call(
        self,
        batch: Sequence[ScoredRequest],
        members: list[int],
        tell: Tell | None,
        began: float,
        refused: list[Exception | None],
        score: Score,
    ) -> None:
        scorer = batch[members[0]].scoring.scorer
        try:
            with self._deadline.watch(scorer, tell):
                score([batch[n] for n in members])
        # whatever a scorer raises is about these requests alone, unless the device is lost
        except Exception as error:
            if self._is_device_lost is not None and self._is_device_lost():
                raise RuntimeError(f"the device was lost to the scorer of {scorer.name}") from error
            if len(members) == 1:
                refused[members[0]] = error
                return
            for n in members:
                self._call(batch, [n], tell, time.perf_counter(), refused, score)
            return
        if score is score_together:  # others have only begun
            SCORE_SECONDS.labels(scorer.model).observe(time.perf_counter() - began)

    @contextmanager
    def waits(self, scorers: Sequence[Scorer], tell: Tell | None, since: float) -> Iterator[None]:
        """Surrounds the wait for what scorers compute on a device since `since`. If they are late the first
        one is named. tell: as of `Deadline.watch`. RuntimeError: the device was lost meanwhile."""
        with ExitStack() as watch:
            try:
                watch.enter_context(self._deadline.watch(scorers[0], tell))
            except (
                RuntimeError
            ):  # there is no room for a thread; what is under way is waited for all the same
                logger.exception("the scorer of %s is not watched", scorers[0].name)
            try:
                yield
            except Exception as error:
                if self._is_device_lost is not None and self._is_device_lost():
                    names = " or ".join(scorer.name for scorer in scorers)
                    raise RuntimeError(f"the device was lost, perhaps to the scorer of {names}") from error
                raise
        for scorer in scorers:
            SCORE_SECONDS.labels(scorer.model).observe(time.perf_counter() - since)


def _calls(batch: Sequence[ScoredRequest]) -> list[list[int]]:
    """Groups a batch's requests, by place, into one call each."""
    if len(batch) == 1:
        return [[0]]
    calls: dict[int, list[int]] = {}
    for n, one in enumerate(batch):
        scorer = one.scoring.scorer
        calls.setdefault(id(scorer) if scorer.is_row_wise else -n, []).append(n)
    return list(calls.values())
