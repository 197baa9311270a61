"""Executors: scores are written in place, on the CPU and on a GPU alike."""

import asyncio
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tables
from batched import batcher_of, run_in
from dot_model import VALUES, attach, scored

from tableside.quant.contract import MatrixPlace
from tableside.serving.errors import ApiError
from tableside.serving.executors import executors
from tableside.serving.executors.executors import INLINE_IDS, CpuExecutor
from tableside.serving.executors.pending import Pending, Readers, answer_of
from tableside.serving.model.places import Output
from tableside.serving.model.request import Answer, Request
from tableside.serving.model.scorer import Floats, Scorer, ScorerLimits, Scoring


@pytest.fixture(autouse=True)
def metrics_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TABLESIDE_METRICS", raising=False)


def test_scores_of_a_gpu_are_written_where_its_vectors_lie(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of a batch are parts of one host buffer that have room for scores: no request's vectors
    are copied for them."""
    version, placer = attach(root, tmp_path, tables.serve_device())
    assert placer.gpu is not None
    given: list[list[np.ndarray]] = []
    wait = placer.gpu.batches.wait

    def watched(started: Any) -> Any:
        found, times = wait(started)
        given.append([answer.outputs for answer in found])  # type: ignore[union-attr]
        return found, times

    monkeypatch.setattr(placer.gpu.batches, "wait", watched)
    requests = [scored(version, bags) for bags in (3, 5, 4)]

    async def run() -> list[Answer]:
        batcher = batcher_of(placer.gpu, 3)
        found = await asyncio.gather(*(run_in(batcher, request, inputs) for request, inputs, _ in requests))
        batcher.close()
        return found

    answers = asyncio.run(run())
    (buffers,) = given
    start = min(b.ctypes.data for b in buffers)
    whole = max(b.ctypes.data + b.size for b in buffers) - start
    assert whole <= sum(b.size + 64 for b in buffers), "the buffers are not parts of one"
    for answer, buffer, (request, _, expected) in zip(answers, buffers, requests, strict=True):
        assert answer.buffer is buffer
        assert buffer.size == request.out_bytes
        np.testing.assert_allclose(request.outputs[-1].view(buffer), expected, rtol=1e-4)
        np.testing.assert_allclose(
            request.outputs[0].view(buffer), VALUES["user"][: len(expected)], rtol=1e-6
        )


def test_both_executors_give_the_same(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's buffer is the same from a GPU and from the CPU, inline and beside the event loop."""
    on_gpu, placer = attach(root, tmp_path, tables.serve_device())
    on_cpu, _ = attach(root, tmp_path, None)

    request, inputs, _ = scored(on_cpu, 6)

    async def by_gpu() -> np.ndarray:
        batcher = batcher_of(placer.gpu, 1)
        try:
            return (await run_in(batcher, *scored(on_gpu, 6)[:2])).buffer
        finally:
            batcher.close()

    async def by_cpu() -> np.ndarray:
        executor = CpuExecutor(beside, Readers())
        try:
            return (await answer_of(executor.begin(request, inputs))).buffer
        finally:
            executor.close()

    found = [asyncio.run(by_gpu())]
    with ThreadPoolExecutor(1) as beside:
        found.append(asyncio.run(by_cpu()))
        monkeypatch.setattr("tableside.serving.executors.executors.INLINE_IDS", 0)
        found.append(asyncio.run(by_cpu()))
    for other in found[1:]:
        np.testing.assert_allclose(found[0].view(np.float32), other.view(np.float32), rtol=1e-5)


@pytest.mark.parametrize(
    ("ids", "out_bytes", "is_beside"), [(1, 8, True), (0, 8, False), (0, 17 << 20, True)]
)
def test_large_lookups_run_beside_the_event_loop(ids: int, out_bytes: int, is_beside: bool) -> None:
    """A request with more than INLINE_IDS ids, or with large vectors of empty bags, is looked up on the
    other thread."""
    seen: list[str] = []

    def look_up(inputs: bytes, begun: object) -> Answer:
        seen.append(threading.current_thread().name)
        return Answer(np.zeros(8, np.uint8))

    plan = SimpleNamespace(waits=False)
    request: Any = SimpleNamespace(
        ids=INLINE_IDS + ids, out_bytes=out_bytes, scoring=None, look_up=look_up, plan=plan
    )
    with ThreadPoolExecutor(1, thread_name_prefix="beside") as beside:
        executor = CpuExecutor(beside, Readers())

        async def run() -> None:
            begun = executor.begin(request, b"")
            assert isinstance(begun, Pending) == is_beside
            await answer_of(begun)

        asyncio.run(run())
        executor.close()
    assert seen == ["beside_0" if is_beside else threading.current_thread().name]


class PlayedDevice:
    """Stands for a GPU's backend: gives each request eight bytes, and says of itself what it is told."""

    device, description, cache = "cuda:9", "fused (nothing)", None

    def __init__(self, lost: bool = False) -> None:
        self.sizes, self.lost = 0, lost

    @property
    def batches(self) -> Any:
        return self

    def begin(self, requests: Any, timed: bool, follower: Any = None) -> Any:
        self.sizes += 1
        return requests

    def wait(self, started: Any) -> Any:
        return [(np.zeros(8, np.uint8), None) for _ in started], None

    def is_lost(self) -> bool:
        return self.lost


class Stuck(Scorer):
    """A scorer whose calls last until they are let go."""

    kind = "program"
    model, version = "played", 3
    limits = ScorerLimits(timeout_s=60.0)

    def __init__(self) -> None:
        self.inputs = ()
        self.began, self.let_go = threading.Event(), threading.Event()

    def admit(self, rows: int) -> int:
        return executors.INLINE_WORK + 1

    def run(self, arrays: list[Floats]) -> Floats:
        self.began.set()
        self.let_go.wait(300)
        return arrays[0][:, 0]


def played(scoring: Scoring | None) -> Request:
    """A request of no lookups: its output is its scores, if it asks for some."""
    plan = SimpleNamespace(staged_bytes=0, waits=False, run=lambda inputs, outputs: None)
    outputs = () if scoring is None else (scoring.output,)
    out_bytes = sum(o.bytes for o in outputs)
    features: Any = SimpleNamespace(model="played", version=3)
    return Request(features, b"", plan, (0, 0, 0, out_bytes), outputs=outputs, scoring=scoring)


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Scorer], object]]:
    """What watched calls of scorers are given to say that they are late; no call is watched in truth."""
    found: list[Callable[[Scorer], object]] = []

    def watch(self: Any, scorer: Scorer, tell: Any) -> Any:
        found.append(tell)
        return nullcontext()

    monkeypatch.setattr("tableside.serving.executors.scoring.Deadline.watch", watch)
    return found


def scoring_of(scorer: Scorer) -> Scoring:
    sources = np.array(MatrixPlace(0, 0, 4, 0, 1), np.int64).tobytes()
    return Scoring(scorer, sources, Output("score", 0, 8, (2,), False))


async def until_began(scorer: Stuck) -> None:
    while not scorer.began.is_set():
        await asyncio.sleep(0.001)


def test_after_a_late_scorer_lookups_go_on_and_scores_are_refused(
    tells: list[Callable[[Scorer], object]],
) -> None:
    """On the CPU: who waits for scores is told while the scorer still runs, and so is who asks later;
    lookups are answered."""
    scorer = Stuck()

    async def run() -> None:
        with ThreadPoolExecutor(1) as beside:
            executor = CpuExecutor(beside, Readers())
            waiting = asyncio.ensure_future(answer_of(executor.begin(played(scoring_of(scorer)), bytes(8))))
            await until_began(scorer)
            tells[0](scorer)  # as the deadline's thread does
            with pytest.raises(
                ApiError, match="the scorer of played version 3 took longer than 60 s"
            ) as error:
                await waiting
            assert error.value.status == 503 and not scorer.let_go.is_set()
            with pytest.raises(ApiError, match="this worker is being replaced"):
                executor.begin(played(scoring_of(scorer)), bytes(8))
            assert (await answer_of(executor.begin(played(None), b""))).buffer.size == 0
            scorer.let_go.set()
            executor.close()

    asyncio.run(run())


def test_a_late_scorer_stops_all_that_a_gpu_does(tells: list[Callable[[Scorer], object]]) -> None:
    """The thread that drives the GPU is stuck: requests of its batch, those that wait and those that come
    later are refused."""
    scorer = Stuck()

    async def run() -> None:
        batcher = batcher_of(PlayedDevice(), 1)
        running = [
            asyncio.ensure_future(run_in(batcher, played(s), bytes(8))) for s in (scoring_of(scorer), None)
        ]
        await until_began(scorer)
        tells[0](scorer)
        for error in await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 20):
            assert isinstance(error, ApiError) and "played version 3 took longer than 60 s" in error.message
        with pytest.raises(ApiError, match="this worker is being replaced"):
            await run_in(batcher, played(None), b"")
        scorer.let_go.set()
        batcher.close()

    asyncio.run(run())


class Failing(Stuck):
    """A scorer whose calls raise what a lost device makes of them."""

    def run(self, arrays: list[Floats]) -> Floats:
        raise TypeError("an illegal memory access was encountered")


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_device_that_a_scorer_loses_ends_the_worker(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the scorer raised; where the device is well the request alone is refused, with what the
    scorer raised."""
    signals: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, sig: signals.append(sig))

    async def run() -> list[Any]:
        batcher = batcher_of(PlayedDevice(is_lost), 2)
        requests = (played(scoring_of(Failing())), played(None))
        found = await asyncio.gather(
            *(run_in(batcher, r, bytes(8)) for r in requests), return_exceptions=True
        )
        batcher.close()
        return found

    scored, looked_up = asyncio.run(run())
    if is_lost:
        assert isinstance(scored, RuntimeError) and scored is looked_up and signals == [signal.SIGTERM]
        assert "lost to the scorer of played version 3" in str(scored)
    else:
        assert isinstance(scored, TypeError) and looked_up.buffer.size == 8 and not signals
