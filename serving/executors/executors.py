"""How a worker runs requests that were laid out: look up, then score. Each worker has one executor.

`CpuExecutor` runs each request alone: on the event loop where the work is small, else on a thread beside it.
A worker on a GPU has a `serving.executors.batching.Batcher`, which runs requests together. Both score by a
`serving.executors.scoring.ScoreStage`.
"""

import asyncio
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tableside.serving.executors.deadline import timed_out
from tableside.serving.executors.scoring import ScoreStage
from tableside.serving.model.request import Answer, Request
from tableside.serving.model.scorer import Scorer
from tableside.serving.model.scores import Scoring, ToScore

INLINE_WORK = 1 << 28  # multiplications up to which scores are computed on the event loop: some 10 ms
INLINE_IDS = 200_000  # of a request up to which they are looked up on the event loop
INLINE_OUT_BYTES = (
    8 << 20
)  # of vectors up to which they are looked up on the event loop: some 5 ms, even where bags are empty

_Refusals = list[Exception | None]


class Executor(ABC):
    """Runs a worker's requests. Belongs to one event loop."""

    def run(self, request: Request, inputs: Any) -> Coroutine[Any, Any, Answer]:
        """Checks a request's inputs; the coroutine gives its output buffer: vectors, then any scores and
        found masks.

        ApiError: an id or a length is wrong, the scorer refuses the request or takes too long, or the worker
        is being replaced.
        """
        request.check(inputs)
        return self._run(request, inputs)

    def run_now(self, request: Request, inputs: Any) -> Answer | None:
        """As `run`, where the request is so small that nothing else needs to wait for it; None: it is not,
        call `run`."""
        return None

    def run_soon(self, request: Request, inputs: Any, done: Callable[[Answer | Exception], None]) -> bool:
        """As `run`, without a coroutine: `done` is called later with the answer, or with why there is none.
        False: call `run`.

        inputs: are the caller's again when this returns. ApiError: as of `run`, where it is known at once.
        """
        return False

    @abstractmethod
    async def _run(self, request: Request, inputs: Any) -> Answer:
        """Runs a request whose inputs were checked."""

    @abstractmethod
    def end_if_lost(self) -> bool:
        """Ends the process, to be replaced, where its device is of no more use to it; returns whether it
        is ending."""

    @abstractmethod
    def close(self) -> None:
        """Takes no more requests, and waits for lookups that run."""


class CpuExecutor(Executor):
    """Runs each request alone. Large lookups run on the thread `beside`, large calls of scorers on a
    thread of their own."""

    def __init__(self, beside: ThreadPoolExecutor) -> None:
        """beside: one thread, which its owner shuts down."""
        self._beside = beside
        self._scores_on_loop, self._scores_on_thread = ScoreStage(), ScoreStage()
        self._score_thread = ThreadPoolExecutor(1, thread_name_prefix="tableside-scorer")
        self._waiting: set[asyncio.Future[_Refusals]] = set()  # for scores from that thread
        self._late: Scorer | None = None

    def run_now(self, request: Request, inputs: Any) -> Answer | None:
        if self._is_large(request) or (request.scoring is not None and self._goes_beside(request.scoring)):
            return None
        request.check(inputs)
        answer = request.look_up(inputs)
        if request.scoring is not None:
            self._score_now(ToScore(request.scoring, inputs, answer.buffer), time.perf_counter())
        return answer

    async def _run(self, request: Request, inputs: Any) -> Answer:
        if self._is_large(request):
            answer = await asyncio.get_running_loop().run_in_executor(self._beside, request.look_up, inputs)
        else:
            answer = request.look_up(inputs)
        if request.scoring is not None:
            await self._score(ToScore(request.scoring, inputs, answer.buffer))
        return answer

    def _is_large(self, request: Request) -> bool:
        return request.ids > INLINE_IDS or request.out_bytes > INLINE_OUT_BYTES

    def end_if_lost(self) -> bool:
        return False

    def close(self) -> None:
        self._score_thread.shutdown(
            wait=False
        )  # a call that hangs is not waited for: the deadline ends the process

    async def _score(self, one: ToScore) -> None:
        since = time.perf_counter()  # a wait for the scores' thread counts as well
        if not self._goes_beside(one.scoring):
            self._score_now(one, since)
            return
        (refused,) = await self._score_beside(one, since)
        if refused is not None:
            raise refused

    def _goes_beside(self, scoring: Scoring) -> bool:
        """Whether the scores are computed on the thread for that. ApiError: they are not computed at all."""
        if self._late is not None:
            raise timed_out(self._late)
        return scoring.scorer.admit(scoring.output.shape[0]) > INLINE_WORK

    def _score_now(self, one: ToScore, since: float) -> None:
        (refused,) = self._scores_on_loop.run([one], None, since)
        if refused is not None:
            raise refused

    async def _score_beside(self, one: ToScore, since: float) -> _Refusals:
        """Scores on the thread for that. Where the scorer takes too long the request is refused while the
        thread still runs."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Refusals] = loop.create_future()

        def tell(scorer: Scorer) -> None:
            loop.call_soon_threadsafe(self._give_up, scorer)

        running = loop.run_in_executor(self._score_thread, self._scores_on_thread.run, [one], tell, since)
        running.add_done_callback(functools.partial(_pass_on, answer))
        self._waiting.add(answer)
        try:
            return await answer
        finally:
            self._waiting.discard(answer)

    def _give_up(self, scorer: Scorer) -> None:
        """Refuses all that wait for scores, and from now on every request that asks for some."""
        self._late = scorer
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(timed_out(scorer))


def _pass_on(answer: "asyncio.Future[_Refusals]", running: "asyncio.Future[_Refusals]") -> None:
    """Passes a thread's result to the request that waits for it, unless that was answered before."""
    if answer.done() or running.cancelled():
        return
    if (error := running.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(running.result())
