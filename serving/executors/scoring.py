"""Scoring: what follows a request's lookup, on the CPU and on a GPU alike.

A GPU looks a batch of requests up together, and so they are scored together; on the CPU a batch is one
request.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tableside.serving.executors.deadline import Deadline, Tell
from tableside.serving.metrics.metrics import SCORE_SECONDS
from tableside.serving.model.scores import Scoring, score_together


class ScoredRequest(Protocol):
    """A request that is scored."""

    @property
    def scoring(self) -> Scoring: ...


Score = Callable[[Sequence[Any]], None]  # one call of a scorer, for requests of it


class ScoreStage:
    """Scores batches of requests that were looked up, each call of a scorer within that scorer's time limit.

    One thread calls: whoever scores on several threads has a stage for each. is_device_lost: whether the
    device that scorers run on is of no more use to this process; None: they run on the CPU.
    """

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
        """Scores a batch; returns, for each request, why it is refused, or None.

        The requests of a scorer that sees each row alone are scored by one call. Where that call fails, each
        of them is scored by a call of its own, so that only the requests at fault are refused.

        tell: as for `Deadline.watch`. since: when the first call is said to have begun, of time.perf_counter;
        None: when it does. score: one call for requests of one scorer. RuntimeError: the device was lost to a
        scorer.
        """
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
        except (
            Exception
        ) as error:  # whatever a scorer raises is about these requests alone, unless the device is lost
            if self._is_device_lost is not None and self._is_device_lost():
                raise RuntimeError(f"the device was lost to the scorer of {scorer.name}") from error
            if len(members) == 1:
                refused[members[0]] = error
                return
            for n in members:
                self._call(batch, [n], tell, time.perf_counter(), refused, score)
            return
        SCORE_SECONDS.labels(scorer.model).observe(time.perf_counter() - began)


def _calls(batch: Sequence[ScoredRequest]) -> list[list[int]]:
    """The requests of a batch, by their places in it, that are scored by one call each."""
    if len(batch) == 1:
        return [[0]]
    calls: dict[int, list[int]] = {}
    for n, one in enumerate(batch):
        scorer = one.scoring.scorer
        calls.setdefault(id(scorer) if scorer.is_row_wise else -n, []).append(n)
    return list(calls.values())
