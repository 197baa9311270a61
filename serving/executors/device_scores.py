"""A batch's scores on a GPU, computed where its lookups wrote vectors: a `quant.gpu.batch.follower.Follower`.
The rows of a scorer's requests go to its room (`serving.model.device_calls`) one after another, then a
`ScoreStage` calls the scorers as on the CPU."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tableside.quant.gpu.batch.follower import FollowerInputs
from tableside.serving.errors import ApiError, ErrorKind
from tableside.serving.executors.scoring import ScoreStage, Tell
from tableside.serving.model.places import Buffer
from tableside.serving.model.request import Request
from tableside.serving.model.scorer import REFUSED, Floats, Scoring, does_not_take

if TYPE_CHECKING:
    from tableside.serving.model.device_calls import DeviceCalls, ScorerRoom  # imports torch


def is_scored_on_device(request: Request) -> bool:
    """Returns whether a request's scores can be computed on its vectors' device."""
    scoring = request.scoring
    return scoring is not None and scoring.scorer.calls is not None and request.plan.is_on_device


class _Member(NamedTuple):
    """A request of a batch. room: its scorer's; start: its first row there; of: rows of all its requests."""

    number: int
    scoring: Scoring
    room: "ScorerRoom"
    start: int
    of: int


class DeviceScores:
    """One batch's scores; one thread at a time. requests: by number in the batch."""

    def __init__(
        self, requests: Mapping[int, tuple[Request, Any]], stage: ScoreStage, tell: Tell | None
    ) -> None:
        self._requests, self._stage, self._tell = requests, stage, tell
        self._members: list[_Member] = []
        self._taken: dict[int, FollowerInputs] | None = None
        self._refused: dict[int, Exception | None] = {}
        self._calls: list[Floats] = []  # the scores of each call
        self._scores: dict[int, Floats] = {}  # of each request, parts of those
        self._are_finite = False

    def has(self, number: int) -> bool:
        return number in self._requests

    def takes(self, number: int) -> FollowerInputs | None:
        """As `Follower.takes`."""
        if self._taken is None:
            self._taken = self._place()
        return self._taken.get(number)

    def _place(self) -> dict[int, FollowerInputs]:
        of_scorer: dict[int, list[tuple[int, Scoring]]] = {}
        for n, (request, _) in self._requests.items():
            scoring = _scoring(request)
            of_scorer.setdefault(id(scoring.scorer), []).append((n, scoring))
        taken = {}
        for scored in of_scorer.values():
            *starts, rows = accumulate((scoring.rows for _, scoring in scored), initial=0)
            calls = _calls(scored[0][1])
            room = calls.room(rows)
            targets = room.addresses + np.array(starts)[:, None] * calls.row_bytes
            for (n, scoring), start, own in zip(scored, starts, targets, strict=True):
                self._members.append(_Member(n, scoring, room, start, rows))
                taken[n] = FollowerInputs(scoring.matrices, own, scoring.is_alone)
        return taken

    def run(self) -> None:
        """As `Follower.run`. RuntimeError: the device was lost to a scorer."""
        self._began = time.perf_counter()
        refused = self._stage.run(self._members, self._tell, score=self._score)
        self._refused = {m.number: error for m, error in zip(self._members, refused, strict=True)}

    def _score(self, members: Sequence[_Member]) -> None:
        """Begins to score requests with adjacent rows by one call. As `score_together`."""
        first, scorer = members[0], members[0].scoring.scorer
        rows = sum(m.scoring.rows for m in members)
        scorer.admit(rows)
        try:
            scores = _calls(first.scoring).score(first.room, first.start, rows, rows == first.of)
        except REFUSED as error:
            raise does_not_take(rows, error) from error
        if scores.shape != (expected := (rows, *first.scoring.output.shape[1:])):
            what = f"the scorer of {scorer.name} gave scores {scores.shape}; expected {expected}"
            raise ApiError(500, ErrorKind.SCORER, what)
        self._calls.append(scores)
        for m in members:
            at = m.start - first.start
            self._scores[m.number] = scores[at : at + m.scoring.rows]

    @contextmanager
    def waited_for(self, stage: ScoreStage) -> Iterator[None]:
        """Surrounds the wait for the scores, each scorer within its time. stage: of the thread that waits."""
        scorers = {id(s): s for s in (_scoring(request).scorer for request, _ in self._requests.values())}
        with stage.waits([*scorers.values()], self._tell, self._began):
            yield
        self._are_finite = all(np.isfinite(scores).all() for scores in self._calls)

    def write(self, number: int, buffer: Buffer) -> Exception | None:
        """Writes a request's scores to its output buffer once the batch is done, or returns its error."""
        if (refused := self._refused.get(number)) is not None:
            return refused
        request, inputs = self._requests[number]
        scoring, scores = _scoring(request), self._scores[number]
        if not self._are_finite:
            try:
                scoring.check(inputs, scores)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is about this request alone
                return error
        at = scoring.output.at
        buffer[at : at + scores.nbytes] = scores.reshape(-1).view(np.uint8)
        return None


def _scoring(request: Request) -> Scoring:
    assert request.scoring is not None, "it is scored"
    return request.scoring


def _calls(scoring: Scoring) -> "DeviceCalls":
    assert scoring.scorer.calls is not None, "it is scored on a device"
    return scoring.scorer.calls
