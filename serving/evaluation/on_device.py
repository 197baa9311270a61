"""Batches of an evaluation on a GPU: looked up and scored there, several together, as in a server.

With stashed tables, the vectors of several batches are computed first, within a quarter of the tables'
memory. Then the tables leave, the dense part scores these batches, and the tables return while later batches
are laid out. The next lookup waits on the device; the host does not wait.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from tableside.quant import Plan
from tableside.quant.contract import Waiting
from tableside.quant.errors import BadIds, Refused, RowsNotRead
from tableside.quant.gpu.batch.follower import Follower, FollowerInputs
from tableside.serving.evaluation.batches import (
    SCORING,
    STAGING,
    Batch,
    BatchReader,
    BatchScores,
    ShardTable,
    Spent,
    on_host,
    scored,
)
from tableside.serving.evaluation.data import DataError, Shard
from tableside.serving.executors.device_scores import DeviceScores, is_scored_on_device
from tableside.serving.executors.scoring import ScoreStage
from tableside.serving.model.request import Answer, Request
from tableside.serving.model.version import ServedVersion

if TYPE_CHECKING:
    from tableside.quant.gpu.backend import GpuBackend  # both import torch
    from tableside.quant.gpu.batch.batch import DeviceBatch


# of batches that go to the device together: rows, and their vectors
GROUP_ROWS, GROUP_BYTES = (32_768, 256 << 20)
_SHARE = 4  # a quarter of the tables' memory is for vectors, while the tables are away,
_LEAST_BYTES = 64 << 20  # and so much at least: what smaller tables give back is no gain to wait for so often


class BegunGroup(NamedTuple):
    """Batches that began together. requests: of all. on_device: indices of those scored there."""

    batches: Sequence[Batch]
    requests: Sequence[tuple[Request, Any]]
    on_device: frozenset[int]
    scores: DeviceScores
    begun: "DeviceBatch"


class DeviceScoring:
    """Looks up and scores batches of candidates on one GPU. stashes: tables that leave during scoring. ahead:
    number of groups begun early. spent: of the calling thread."""

    def __init__(
        self, gpu: "GpuBackend", served: Sequence[ServedVersion], stashes: bool, ahead: int = 0
    ) -> None:
        self._gpu, self._served, self._stashes, self.ahead = gpu, served, stashes, ahead
        self._stage, self.spent = ScoreStage(gpu.is_lost), Spent()
        self._bytes = (
            max(_LEAST_BYTES, sum(s.placed.hbm_bytes for s in served) // _SHARE) if stashes else GROUP_BYTES
        )

    def batch_rows(self, asked: int) -> int:
        """Returns the rows of a batch if `asked` were asked for: larger if each score depends on its row
        alone, within the limits of responses and scorers; unchanged with rows that the CPU gathers, which
        its buffers bound."""
        most = GROUP_ROWS
        for served in self._served:
            scorer = served.scorer
            assert scorer is not None
            if (
                scorer.calls is None
                or not scorer.is_row_wise
                or any(table.residence.is_gathered for table in served.placed.on_gpu.values())
            ):
                return asked
            # A score, and as much for what parts of a response are aligned to.
            row_bytes = 4 * (2 + sum(i.width for i in scorer.inputs if i.feature is not None))
            response = served.max_response_bytes or self._bytes
            in_stash = self._bytes // (len(self._served) * row_bytes)
            most = min(most, scorer.calls.rows[1], response // row_bytes, in_stash)
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
        """Sends a group to the device, and has the cache bring its rows. Waits for rows of a disk alone."""
        with self.spent.on(STAGING):
            return self._begun(group)

    def _begun(self, group: Sequence[Batch]) -> BegunGroup:
        requests = [request for batch in group for request in batch.requests]
        here = {n: one for n, one in enumerate(requests) if is_scored_on_device(one[0])}
        scores = DeviceScores(here, self._stage, None)
        follower: Follower = _WhileAway(self._gpu, scores) if self._stashes else scores
        begun = self._gpu.batches.begin(
            [(_ready_plan(*one), one[1]) for one in requests], follower=follower, launches=False
        )
        return BegunGroup(group, requests, frozenset(here), scores, begun)

    def finish(self, group: BegunGroup) -> list[BatchScores]:
        """Looks a group up and scores it, in the order of begin. DataError: a request is refused, or scores
        are no probabilities."""
        with self.spent.on(SCORING):
            answers = iter(self._answers(group))
        return [scored(batch, self._served, answers) for batch in group.batches]

    def _answers(self, group: BegunGroup) -> list[Answer | Exception]:
        found, _ = self._gpu.batches.wait(group.begun)
        answers: list[Answer | Exception] = []
        for n, ((request, inputs), result) in enumerate(zip(group.requests, found, strict=True)):
            if isinstance(result, Refused):
                answers.append(request.refusal(result))
                continue
            answer = Answer(*result)
            if n in group.on_device:
                answers.append(group.scores.write(n, answer.buffer) or answer)
            else:
                answers.append(on_host(request, inputs, answer))
        return answers


def _ready_plan(request: Request, inputs: Any) -> Plan:
    """Returns the request's plan with the rows that it waits for, before it has the device. One that is
    refused is so again, and told, where it runs."""
    try:
        begun = request.plan.begin(inputs)
        return begun.wait() if isinstance(begun, Waiting) else begun
    except (BadIds, RowsNotRead):
        return request.plan


class _WhileAway:
    """A follower that is waited for while the tables' memory is given back."""

    def __init__(self, gpu: "GpuBackend", follower: Follower) -> None:
        self._gpu, self._follower = gpu, follower

    def takes(self, number: int) -> FollowerInputs | None:
        return self._follower.takes(number)

    def run(self) -> None:
        self._gpu.stash()
        try:
            self._follower.run()
            self._gpu.batches.launcher.stream.synchronize()
        finally:
            self._gpu.restore()


class ShardsAhead:
    """Reads shards ahead, in order, by `threads`, which the caller shuts down. One thread calls."""

    def __init__(self, shards: Iterable[Shard], threads: ThreadPoolExecutor, reader: BatchReader) -> None:
        self._taken: queue.SimpleQueue[tuple[Shard, Future[list[Batch]]] | Exception | None] = (
            queue.SimpleQueue()
        )
        self._next: tuple[Shard, Future[list[Batch]]] | None = None
        self._is_over = False
        threading.Thread(
            target=self._take, args=(shards, threads, reader), name="tableside-shards", daemon=True
        ).start()

    def _take(self, shards: Iterable[Shard], threads: ThreadPoolExecutor, reader: BatchReader) -> None:
        try:
            for shard in shards:
                self._taken.put((shard, threads.submit(lambda s=shard: list(reader.batches(s)))))  # type: ignore[misc]
            self._taken.put(None)
        except (EOFError, OSError, RuntimeError) as error:  # the pool is gone, or this process ends
            self._taken.put(error)

    def get(self, wait: bool) -> tuple[Shard, list[Batch]] | None:
        """Returns the next shard and its batches; None: the end, or, without `wait`, none is decoded yet.
        DataError: its data is unreadable or does not fit the models. EOFError, OSError: the giver of shards
        is gone."""
        if self._next is None and not self._is_over:
            try:
                taken = self._taken.get(block=wait)
            except queue.Empty:
                return None
            if isinstance(taken, Exception):
                raise taken
            self._next, self._is_over = taken, taken is None
        if self._next is None or not (wait or self._next[1].done()):
            return None
        (shard, batches), self._next = self._next, None
        return shard, batches.result()


class BatchesUnderWay:
    """Groups of batches begun on a device, at most `DeviceScoring.ahead`, and their tables. name_fault:
    raises a more precise error for a faulty shard."""

    def __init__(self, device: "DeviceScoring", name_fault: Callable[[Shard], object]) -> None:
        self._device, self._name_fault = device, name_fault
        self._begun: deque[tuple[Shard, ShardTable, BegunGroup, bool]] = deque()

    def __len__(self) -> int:
        return len(self._begun)

    def begin(
        self, shard: Shard, batches: Iterable[Batch], table: ShardTable
    ) -> Iterator[tuple[Shard, pa.Table]]:
        """Begins a shard's batches; gives the tables that were finished meanwhile."""
        groups = list(self._device.groups(batches))
        for n, group in enumerate(groups):
            self._begun.append((shard, table, self._device.begin(group), n == len(groups) - 1))
            while len(self._begun) > self._device.ahead:
                yield from self.finish_one()

    def finish_one(self) -> Iterator[tuple[Shard, pa.Table]]:
        """Finishes the oldest group; returns its shard's table if it is the last one."""
        shard, table, begun, is_last = self._begun.popleft()
        try:
            for scored in self._device.finish(begun):
                table.add(scored)
        except DataError:
            self._name_fault(shard)
            raise
        if is_last:
            yield shard, table.finished()

    def finish(self) -> Iterator[tuple[Shard, pa.Table]]:
        while self._begun:
            yield from self.finish_one()
