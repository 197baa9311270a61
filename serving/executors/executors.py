"""Runs laid-out requests on the CPU: looks up, then scores (`serving.executors.scoring.ScoreStage`). With a
GPU `serving.engine_process.link.EngineLink` stands in this place."""

import asyncio
import functools
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tableside.quant import Plan
from tableside.quant.contract import Waiting
from tableside.serving.executors.pending import Found, Pending, Readers, kept
from tableside.serving.executors.scoring import ScoreStage, timed_out
from tableside.serving.model.request import Answer, Request
from tableside.serving.model.scorer import Scorer, Scoring, ToScore

INLINE_FETCHED = 4096  # ids of a request up to which rows that need no wait are fetched on the event loop
INLINE_WORK = 1 << 28  # multiplications up to which scores are computed on the event loop: some 10 ms
INLINE_IDS = 200_000  # of a request up to which they are looked up on the event loop
# of vectors up to which they are looked up on the event loop: some 5 ms, even where bags are empty
INLINE_OUT_BYTES = 8 << 20

_Refusals = list[Exception | None]


class CpuExecutor:
    """Runs requests one by one. Large lookups use the thread `beside`, large scorer calls another one, and
    those that wait for rows threads of their own. Belongs to one event loop."""

    def __init__(self, beside: ThreadPoolExecutor, readers: Readers) -> None:
        """beside: one thread; both are shut down by their owner."""
        self._beside, self._readers = beside, readers
        self._scores_on_loop, self._scores_on_thread = ScoreStage(), ScoreStage()
        self._score_thread = ThreadPoolExecutor(1, thread_name_prefix="tableside-scorer")
        self._waiting: set[asyncio.Future[_Refusals]] = set()  # for scores from that thread
        self._tasks: set[asyncio.Task[None]] = set()
        self._late: Scorer | None = None

    def begin(self, request: Request, inputs: Any) -> Answer | Pending:
        """Answers a small request at once, and a larger one, or one that waits for rows, later. The answer is
        its output buffer: vectors, scores, found masks. `inputs` may be reused on return. ApiError: an id or
        length is wrong, rows did not come, the scorer refuses or is late, or the worker is being replaced."""
        plan, scoring = request.plan, request.scoring
        blocks, answer = self._blocks(request), None
        if plan.waits and not blocks:
            answer = request.look_up_at_once(inputs)
        if plan.waits and answer is None:
            inputs = kept(inputs)  # which `begun` may point into
            if request.ids > INLINE_FETCHED and not plan.begins_at_once:
                return self._later(self._run_fetched(request, inputs), waits_for_rows=True)
            begun = request.begin(inputs)
            if isinstance(begun, Waiting):
                if scoring is None and not begun.may_be_here:
                    return self._readers.begin(functools.partial(_wait, request, begun, inputs))
                return self._later(self._run_begun(request, begun, inputs), waits_for_rows=True)
            plan = begun
        if answer is None:
            if blocks or (scoring is not None and self._goes_beside(scoring)):
                return self._later(self._run(request, plan, kept(inputs)))
            answer = request.look_up(inputs, plan)
        elif scoring is not None and self._goes_beside(scoring):
            return self._later(self._scored(request, kept(inputs), answer))
        if scoring is not None:
            self._score_now(ToScore(scoring, inputs, answer.buffer), time.perf_counter())
        return answer

    def _later(self, coming: Coroutine[Any, Any, Answer], waits_for_rows: bool = False) -> Pending:
        pending = Pending(waits_for_rows)
        task = asyncio.get_running_loop().create_task(_tell(pending, coming))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return pending

    async def _run_fetched(self, request: Request, inputs: Any) -> Answer:
        begun = await asyncio.get_running_loop().run_in_executor(self._beside, request.begin, inputs)
        return await self._run_begun(request, begun, inputs)

    async def _run_begun(self, request: Request, begun: Plan | Waiting, inputs: Any) -> Answer:
        if isinstance(begun, Waiting) and begun.may_be_here:
            begun = await asyncio.get_running_loop().run_in_executor(self._beside, request.look, begun)
        if isinstance(begun, Waiting):
            return await self._run_waiting(request, begun, inputs)
        return await self._run(request, begun, inputs)

    async def _run_waiting(self, request: Request, begun: Waiting, inputs: Any) -> Answer:
        answer = await self._readers.run(functools.partial(_wait, request, begun, inputs))
        return await self._scored(request, inputs, answer)

    async def _run(self, request: Request, plan: Plan, inputs: Any) -> Answer:
        if self._blocks(request):
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._beside, request.look_up, inputs, plan)
        else:
            answer = request.look_up(inputs, plan)
        return await self._scored(request, inputs, answer)

    async def _scored(self, request: Request, inputs: Any, answer: Answer) -> Answer:
        if request.scoring is not None:
            await self._score(ToScore(request.scoring, inputs, answer.buffer))
        return answer

    def _blocks(self, request: Request) -> bool:
        """Returns whether it takes too long for the event loop."""
        return request.ids > INLINE_IDS or request.out_bytes > INLINE_OUT_BYTES

    def close(self) -> None:
        # a call that hangs is not waited for: the deadline ends the process
        self._score_thread.shutdown(wait=False)

    async def _score(self, one: ToScore) -> None:
        since = time.perf_counter()  # a wait for the scores' thread counts as well
        if not self._goes_beside(one.scoring):
            self._score_now(one, since)
            return
        (refused,) = await self._score_beside(one, since)
        if refused is not None:
            raise refused

    def _goes_beside(self, scoring: Scoring) -> bool:
        """Returns whether scores are computed on their thread. ApiError: not at all."""
        if self._late is not None:
            raise timed_out(self._late)
        return scoring.scorer.admit(scoring.output.shape[0]) > INLINE_WORK

    def _score_now(self, one: ToScore, since: float) -> None:
        (refused,) = self._scores_on_loop.run([one], None, since)
        if refused is not None:
            raise refused

    async def _score_beside(self, one: ToScore, since: float) -> _Refusals:
        """Scores on the thread. A late scorer's request is refused while the thread runs on."""
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
        """Refuses all requests that wait for scores, and later ones."""
        self._late = scorer
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(timed_out(scorer))


def _wait(request: Request, begun: Waiting, inputs: Any) -> Answer:
    """Looks up where it waited, so that the event loop has time for requests that need no wait."""
    return request.look_up(inputs, request.wait(begun, request.deadline))


async def _tell(pending: Pending, coming: Coroutine[Any, Any, Answer]) -> None:
    try:
        found: Found = await coming
    except Exception as error:  # noqa: BLE001  # whoever asked gets it
        found = error
    pending.tell(found)


def _pass_on(answer: "asyncio.Future[_Refusals]", running: "asyncio.Future[_Refusals]") -> None:
    """Passes a thread's result to its request unless it was answered."""
    if answer.done() or running.cancelled():
        return
    if (error := running.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(running.result())
