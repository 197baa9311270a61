"""A batch's scores on a GPU, computed where its lookups wrote vectors: a `quant.gpu.batch.follower.Follower`.
The rows of a scorer's requests go to its room (`serving.model.device_calls`) one after another, then a
`ScoreStage` calls the scorers as on the CPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tableside.quant.contract import matrices_in
from tableside.quant.gpu.batch.follower import FollowerInputs
from tableside.serving.errors import ApiError, ErrorKind
from tableside.serving.executors.scoring import ScoreStage, Tell
from tableside.serving.model.places import Buffer
from tableside.serving.model.request import Request
from tableside.serving.model.scorer import REFUSED, Floats, Scoring, does_not_take

if TYPE_CHECKING:
    from tableside.serving.model.device_calls import DeviceCalls, Room  # imports torch


def is_scored_on_device(request: Request) -> bool:
    """Returns whether a request's scores can be computed on its vectors' device."""
    scoring = request.scoring
    return scoring is not None and scoring.scorer.calls is not None and request.plan.is_on_device


@dataclass(frozen=True)
class _Member:
    """A request of a batch. room: its scorer's; start: its first row there; of: rows of all its requests."""

    number: int
    scoring: Scoring
    inputs: Any
    room: "Room"
    start: int
    of: int


class DeviceScores:
    """One batch's scores; one thread makes, runs and reads them. requests: by number in the batch."""

    def __init__(
        self, requests: Mapping[int, tuple[Request, Any]], stage: ScoreStage, tell: Tell | None
    ) -> None:
        self._requests, self._stage, self._tell = requests, stage, tell
        self._members: dict[int, _Member] | None = None
        self._refused: dict[int, Exception | None] = {}
        self._scores: dict[int, Floats] = {}

    def has(self, number: int) -> bool:
        return number in self._requests

    def takes(self, number: int) -> FollowerInputs | None:
        """As `Follower.takes`."""
        if self._members is None:
            self._members = self._placed()
        if (member := self._members.get(number)) is None:
            return None
        scoring = member.scoring
        calls = _calls(scoring)
        targets = member.room.addresses + member.start * calls.row_bytes
        sources = matrices_in(scoring.sources)
        return FollowerInputs(sources, scoring.rows, targets, scoring.is_alone, calls.precision)

    def _placed(self) -> dict[int, _Member]:
        of_scorer: dict[int, list[int]] = {}
        for n, (request, _) in self._requests.items():
            of_scorer.setdefault(id(_scoring(request).scorer), []).append(n)
        placed = {}
        for numbers in of_scorer.values():
            scorings = [_scoring(self._requests[n][0]) for n in numbers]
            rows = sum(s.rows for s in scorings)
            room, start = _calls(scorings[0]).room(rows), 0
            for n, scoring in zip(numbers, scorings, strict=True):
                placed[n] = _Member(n, scoring, self._requests[n][1], room, start, rows)
                start += scoring.rows
        return placed

    def run(self) -> None:
        """As `Follower.run`. RuntimeError: the device was lost to a scorer."""
        members = list((self._members or {}).values())
        refused = self._stage.run(members, self._tell, score=self._score)
        self._refused = {m.number: error for m, error in zip(members, refused, strict=True)}

    def _score(self, members: Sequence[_Member]) -> None:
        """Scores requests with adjacent rows by one call. As `score_together`."""
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
        start = 0
        for m in members:
            part = scores[start : start + m.scoring.rows]
            m.scoring.check(m.inputs, part)
            self._scores[m.number] = part
            start += m.scoring.rows

    def write(self, number: int, buffer: Buffer) -> Exception | None:
        """Writes a request's scores to its output buffer after `run`, or returns its error."""
        if (refused := self._refused.get(number)) is None:
            _scoring(self._requests[number][0]).output.view(buffer)[:] = self._scores[number]
        return refused


def _scoring(request: Request) -> Scoring:
    assert request.scoring is not None, "it is scored"
    return request.scoring


def _calls(scoring: Scoring) -> "DeviceCalls":
    assert scoring.scorer.calls is not None, "it is scored on a device"
    return scoring.scorer.calls
