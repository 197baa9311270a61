"""Batches of an evaluation on a GPU: looked up and scored there, several together, by what a server's batches
run by.

Where tables are stashed, vectors of several batches are computed first, as many as a quarter of the tables'
memory holds. Then the tables leave, the dense part scores these batches, and the tables begin to come back
while later batches are read and laid out: the next lookup waits for them on the device, and nobody on the
host.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tableside.quant import BadIds
from tableside.quant.gpu.batch.follower import Follower, FollowerInputs
from tableside.serving.errors import ApiError
from tableside.serving.evaluation.batches import Batch, BatchScores
from tableside.serving.evaluation.spent import SCORING, STAGING, Spent
from tableside.serving.executors.device_scores import DeviceScores, is_scored_on_device
from tableside.serving.executors.scoring import ScoreStage
from tableside.serving.model.hbm_plan import Placement
from tableside.serving.model.request import Answer, Request
from tableside.serving.model.version import ServedVersion

if TYPE_CHECKING:
    from tableside.quant.gpu.backend import GpuBackend  # both import torch
    from tableside.quant.gpu.batch.batch import DeviceBatch

GROUP_ROWS, GROUP_BYTES = (
    32_768,
    256 << 20,
)  # of batches that go to the device together: rows, and their vectors
_SHARE = 4  # a quarter of the tables' memory is for vectors, while the tables are away,
_LEAST_BYTES = 64 << 20  # and so much at least: what smaller tables give back is no gain to wait for so often


class BegunGroup(NamedTuple):
    """Batches that began together. requests: of all of them; on_device: those that are scored there, by
    number."""

    batches: Sequence[Batch]
    requests: Sequence[tuple[Request, Any]]
    on_device: frozenset[int]
    scores: DeviceScores
    begun: "DeviceBatch"


class DeviceScoring:
    """Looks up and scores batches of candidates that are served on one GPU.

    stashes: their tables leave while they are scored. ahead: groups of batches that begin before the one that
    is looked up. spent: of the thread that calls.
    """

    def __init__(
        self, gpu: "GpuBackend", served: Sequence[ServedVersion], stashes: bool, ahead: int = 0
    ) -> None:
        self._gpu, self._served, self._stashes, self.ahead = gpu, served, stashes, ahead
        self._stage, self.spent = ScoreStage(gpu.is_lost), Spent()
        self._bytes = (
            max(_LEAST_BYTES, sum(s.placed.hbm_bytes for s in served) // _SHARE) if stashes else GROUP_BYTES
        )

    def batch_rows(self, asked: int) -> int:
        """Rows of a batch where `asked` were asked for.

        Where each row's score is its own, a batch has as many rows as go to the device together: the host
        lays out and stages one request in the time of many. No batch is larger than a response may be, or
        than a scorer takes. With rows in `zero_copy` it is as it was asked for, since what the CPU gathers is
        bounded for each request.
        """
        most = GROUP_ROWS
        for served in self._served:
            scorer = served.scorer
            assert scorer is not None
            if (
                scorer.calls is None
                or not scorer.is_row_wise
                or Placement.ZERO_COPY in served.placed.placements.values()
            ):
                return asked
            # A score, and as much for what parts of a response are aligned to.
            row_bytes = 4 * (2 + sum(i.width for i in scorer.inputs if i.feature is not None))
            response = served.max_response_bytes or self._bytes
            most = min(
                most,
                scorer.calls.rows[1],
                response // row_bytes,
                self._bytes // (len(self._served) * row_bytes),
            )
        return max(asked, most)

    def groups(self, batches: Iterable[Batch]) -> Iterator[list[Batch]]:
        """Batches that go to the device together."""
        group: list[Batch] = []
        rows = size = 0
        for batch in batches:
            rows += batch.size
            size += sum(request.out_bytes for request, _ in batch.requests)
            if group and (size > self._bytes or (rows > GROUP_ROWS and not self._stashes)):
                yield group
                group, rows = [], batch.size
                size = sum(request.out_bytes for request, _ in batch.requests)
            group.append(batch)
        if group:
            yield group

    def begin(self, group: Sequence[Batch]) -> BegunGroup:
        """Sends a group to the device, and has the cache bring its rows. Waits for nothing."""
        with self.spent.on(STAGING):
            return self._begun(group)

    def _begun(self, group: Sequence[Batch]) -> BegunGroup:
        requests = [request for batch in group for request in batch.requests]
        scored = {n: one for n, one in enumerate(requests) if is_scored_on_device(one[0])}
        scores = DeviceScores(scored, self._stage, None)
        follower: Follower = _WhileAway(self._gpu, scores) if self._stashes else scores
        begun = self._gpu.batches.begin(
            [(request.plan, inputs) for request, inputs in requests], follower=follower
        )
        return BegunGroup(group, requests, frozenset(scored), scores, begun)

    def finish(self, group: BegunGroup) -> list[BatchScores]:
        """Looks a group up and scores it. Groups are finished in the order in which they began.

        DataError: a request of a batch is refused, or its scores are no probabilities.
        """
        with self.spent.on(SCORING):
            answers = iter(self._answers(group))
        found = []
        for batch in group.batches:
            scores, unfound = [], []
            for n, (served, (request, _)) in enumerate(zip(self._served, batch.requests, strict=True)):
                answer = next(answers)
                if isinstance(answer, ApiError):
                    raise batch.error(n, answer)
                if isinstance(answer, Exception):
                    raise answer
                assert request.scoring is not None
                scores.append(np.array(request.scoring.output.view(answer.buffer)))
                unfound.append(answer.unfound)
                batch.check(scores[-1], served.header.model)
            found.append(BatchScores(batch, scores, unfound))
        return found

    def _answers(self, group: BegunGroup) -> list[Answer | Exception]:
        """What each request gets."""
        found, _ = self._gpu.batches.finish(group.begun)
        answers: list[Answer | Exception] = []
        for n, ((request, inputs), result) in enumerate(zip(group.requests, found, strict=True)):
            if isinstance(result, BadIds):
                answers.append(request.refusal(result))
                continue
            answer = Answer(*result)
            is_scored = n in group.on_device
            refused = group.scores.write(n, answer.buffer) if is_scored else _on_host(request, inputs, answer)
            answers.append(refused or answer)
        return answers


def _on_host(request: Request, inputs: Any, answer: Answer) -> ApiError | None:
    """Scores a request whose vectors are on the host; returns why it is refused, or None."""
    assert request.scoring is not None
    try:
        request.scoring.run(inputs, answer.buffer)
    except ApiError as error:
        return error
    return None


class _WhileAway:
    """A follower that runs while the tables' memory is given back."""

    def __init__(self, gpu: "GpuBackend", follower: Follower) -> None:
        self._gpu, self._follower = gpu, follower

    def takes(self, number: int) -> FollowerInputs | None:
        return self._follower.takes(number)

    def run(self) -> None:
        self._gpu.stash()
        try:
            self._follower.run()
        finally:
            self._gpu.restore()
