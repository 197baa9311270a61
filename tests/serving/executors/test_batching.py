"""Batches on a GPU when things go wrong, and what a worker's tables may take of one: what a GPU does is
played."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batched import batcher_of, run_in
from played_batches import Device, Request
from support import rows_of

from tableside.loader.versions.states import State
from tableside.loader.versions.versions import Model
from tableside.quant import BadIds, choose
from tableside.quant.cache.statistics import Statistics, TableStatistics
from tableside.quant.contract import MatrixPlace, Unfound
from tableside.quant.errors import Problem
from tableside.serving.errors import ApiError, ServingError
from tableside.serving.executors.batching import Asked, Batcher
from tableside.serving.metrics import metrics
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.places import Output
from tableside.serving.model.scorer import Scorer, Scoring
from tableside.serving.settings import ServerSettings

pytestmark = pytest.mark.gpu

Publish = Callable[..., Any]


class Halves(Scorer):
    """Half of what it is given; refuses zeros."""

    kind = "program"

    def __init__(self) -> None:
        self.inputs = ()
        self.rows: list[int] = []
        self.error: Exception = ValueError("a zero")

    def run(self, arrays: list[Any]) -> Any:
        self.rows.append(len(arrays[0]))
        if (arrays[0] == 0).any():
            raise self.error
        return arrays[0][:, 0] / 2


async def answers(batcher: Batcher, requests: list[Request]) -> list[Any]:
    return await asyncio.gather(*(run_in(batcher, r, b"") for r in requests), return_exceptions=True)


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals that this process sent itself."""
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, sig: sent.append(sig))
    return sent


@pytest.fixture(autouse=True)
def metrics_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TABLESIDE_METRICS", raising=False)


def test_a_failed_batch_fails_alone(kills: list[int]) -> None:
    """Its requests get the error; those under way beside it, and those that wait, run."""
    device, failed = Device(), threading.Event()
    batcher = batcher_of(device, 2)

    def go_on(requests: list[Any]) -> Any:
        assert failed.wait(300)  # until the error was told
        return Device().answer(requests)

    def fail_once(requests: list[Any]) -> Any:
        device.answer = go_on
        raise ValueError("a short buffer")

    async def run() -> list[Any]:
        asked = [asyncio.ensure_future(run_in(batcher, Request(), b"")) for _ in range(7)]
        asked[0].add_done_callback(lambda _: failed.set())
        return await asyncio.gather(*asked, return_exceptions=True)

    device.answer = fail_once
    found = asyncio.run(run())
    assert [type(f).__name__ for f in found] == ["ValueError"] * 2 + ["Answer"] * 5
    assert device.sizes == [2, 2, 2, 1] and not kills


def test_a_lost_device_ends_the_worker_and_leaves_no_request_waiting(kills: list[int]) -> None:
    """What runs gets the error, what waits and what comes later a 503; one signal, whatever comes."""
    device = Device()
    batcher = batcher_of(device, 1)

    def lose(requests: list[Any]) -> Any:
        device.lost = True
        raise RuntimeError("an illegal memory access was encountered")

    device.answer = lose

    async def run() -> list[Any]:
        found = await answers(batcher, [Request() for _ in range(4)])
        return [*found, *await answers(batcher, [Request()])]

    found = asyncio.run(run())
    assert [type(f) for f in found[:2]] == [RuntimeError] * 2  # two were under way
    assert [f.status for f in found[2:]] == [503] * 3
    assert "lost its GPU and is being replaced" in str(found[4])
    assert device.sizes == [1, 1] and kills == [signal.SIGTERM]


def test_memory_that_runs_out_does_not_end_the_worker(kills: list[int]) -> None:
    device = Device()
    batcher = batcher_of(device, 8)

    def refuse(requests: list[Any]) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    device.answer = refuse
    assert [type(f) for f in asyncio.run(answers(batcher, [Request()]))] == [RuntimeError]
    assert not kills


def test_batches_are_bounded_and_leave_out_who_left() -> None:
    """By number, by bytes (one that is larger alone runs alone), and without requests whose client is
    gone."""
    device = Device()
    device.answer = lambda requests: [
        BadIds(Problem.ID, 0, 0, 7, 5) if n else np.zeros(4) for n in range(len(requests))
    ]
    batcher = batcher_of(device, 3)

    async def run() -> list[Any]:
        sizes = (100, 40 << 20, 40 << 20, 1 << 30, 100)
        left, *others = [asyncio.ensure_future(run_in(batcher, Request(size), b"")) for size in (100, *sizes)]
        await asyncio.sleep(0)  # all have come; no batch has begun
        left.cancel()
        return await asyncio.gather(*others, return_exceptions=True)

    found = asyncio.run(run())
    assert device.sizes == [2, 1, 1, 1]
    assert [type(f).__name__ for f in found] == ["Answer", "ApiError", "Answer", "Answer", "Answer"]


def test_what_a_device_did_not_find_comes_with_the_answer() -> None:
    """Of each request of a batch, so that its door counts it."""
    device = Device()
    counts = [None, [Unfound(2, 0)], [Unfound(0, 1), Unfound(0, 0)]]
    device.answer = lambda requests: [(np.full(4, n, np.uint8), counts[n]) for n in range(len(requests))]
    found = asyncio.run(answers(batcher_of(device, 3), [Request() for _ in counts]))
    assert [(a.buffer[0], a.unfound) for a in found] == list(enumerate(counts))


def test_a_batch_has_at_most_max_batch_requests() -> None:
    """Those that came beyond it form the next one."""
    device = Device()
    found = asyncio.run(answers(batcher_of(device, 3), [Request() for _ in range(7)]))
    assert device.sizes == [3, 3, 1] and len(found) == 7


def test_a_batch_is_started_while_the_device_works_on_the_one_before_it() -> None:
    """And no third one: what comes meanwhile goes together."""
    device = Device()
    go_on = threading.Semaphore(0)

    def wait(requests: list[Any]) -> Any:
        assert go_on.acquire(timeout=300)
        return [(np.zeros(4, np.uint8), None) for _ in requests], None

    device.wait = wait  # type: ignore[method-assign]

    async def run() -> list[Any]:
        batcher, asked = batcher_of(device, 8), []
        for under_way in ([1], [1, 1], [1, 1], [1, 1]):
            asked.append(asyncio.ensure_future(run_in(batcher, Request(), b"")))
            while device.sizes != under_way:
                await asyncio.sleep(0)
        for _ in range(3):
            go_on.release()
        return await asyncio.gather(*asked)

    assert len(asyncio.run(asyncio.wait_for(run(), 20))) == 4 and device.sizes == [1, 1, 2]


def test_results_of_a_batch_are_told_together_on_a_thread() -> None:
    """Where the futures allow that; the event loop has no part in it. What cannot be told does not stop
    the batches after it."""
    device, told, all_told = Device(), [], threading.Event()

    def tell(results: Any) -> None:
        told.append((threading.current_thread(), [result for _, result in results]))
        if len(told) == 1:
            raise OSError("no door")
        all_told.set()

    async def run() -> None:
        batcher = Batcher(device, 2, tell=tell)  # type: ignore[arg-type]
        batcher.submit_all([Asked(Request(), b"", asyncio.Future()) for _ in range(4)])  # type: ignore[misc]
        await asyncio.sleep(0)  # the threads are woken
        assert all_told.wait(300)  # while the event loop does nothing
        batcher.close()

    asyncio.run(run())
    assert [len(results) for _, results in told] == [2, 2] == device.sizes
    assert all(thread is not threading.main_thread() for thread, _ in told)


def test_a_closed_batcher_refuses() -> None:
    batcher = batcher_of(Device(), 3)
    batcher.close()
    assert [type(f) for f in asyncio.run(answers(batcher, [Request()]))] == [RuntimeError]


@pytest.mark.skipif("os.environ.get('TRITON_INTERPRET') != '1'", reason="plays a GPU in the interpreter")
@pytest.mark.drawn(0.5)
def test_the_budget_holds_for_all_models_and_versions_of_a_worker(publish: Publish, root: Path) -> None:
    """What one took is not there for the next; a live version's successor may take its place; what goes
    gives back."""
    publish({"t": rows_of(100, 12)}, name="a")  # 1,600 bytes
    publish({"t": rows_of(100, 12)}, name="b")
    settings = ServerSettings(devices=("interpreter",), hbm_budget=2000)
    placer = Placer(settings, choose())
    placer.open()
    engines = {n: Engine(Model(root, n), settings, placer) for n in "ab"}
    for name, wanted in (("a", "hbm"), ("b", "zero_copy")):
        engines[name].swap(engines[name].attach())
        assert engines[name].served().placed.placements == {"t": wanted}
    publish({"t": rows_of(100, 12, 1)}, name="a")
    successor = engines["a"].attach(as_successor=True)
    assert successor.placed.placements == {"t": "hbm"}
    engines["a"].swap(successor)
    del successor
    gc.collect()
    explicit = engines["a"].attach(State(1))
    assert explicit.placed.placements == {"t": "zero_copy"}
    assert placer._held == 1600
    del engines
    gc.collect()
    assert placer._held == 0


@pytest.mark.parametrize(
    ("bad", "error", "is_row_wise", "calls"),
    [
        (None, None, True, [6]),
        (None, None, False, [1, 2, 3]),
        (1, ValueError("a zero"), True, [6, 1, 2, 3]),
        (1, TypeError("a zero"), True, [6, 1, 2, 3]),
    ],
)
def test_scores_of_a_batch_are_computed_together(
    bad: int | None, error: Exception | None, is_row_wise: bool, calls: list[int]
) -> None:
    """One call for the requests of a scorer that sees each row alone; where it fails, each is asked alone,
    and only the one at fault is told so."""
    scorer = Halves()
    scorer.is_row_wise = is_row_wise
    scorer.error = error or scorer.error

    async def run() -> list[Any]:
        batcher = batcher_of(Device(), 8)
        waiting = []
        for n in range(3):
            values = np.full((n + 1, 1), 0.0 if n == bad else 2.0 * n + 2, np.float32)
            source = np.array(MatrixPlace(0, 0, 4, 0, 1), np.int64).tobytes()
            scoring = Scoring(scorer, source, Output("score", 0, 4 * (n + 1), (n + 1,), False))
            waiting.append(run_in(batcher, Request(scoring=scoring), values.tobytes()))
        found = await asyncio.gather(*waiting, return_exceptions=True)
        batcher.close()
        return found

    found = asyncio.run(run())
    assert scorer.rows == calls
    for n, answer in enumerate(found):
        if n == bad and isinstance(error, ValueError):
            assert isinstance(answer, ApiError)
            assert answer.message == "the scorer does not take these 2 rows: a zero"
        elif n == bad:
            assert answer is error
        else:
            assert answer.buffer.view(np.float32)[: n + 1].tolist() == [n + 1.0] * (n + 1)


def test_whatever_a_device_raises_is_a_version_that_cannot_be_served(
    publish: Publish, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch over versions goes on after an error that it does not know."""
    publish({"t": rows_of(10, 8)})
    placer = Placer(ServerSettings(), choose())

    def fail(*arguments: object) -> None:
        raise RuntimeError("ptxas failed")

    monkeypatch.setattr(placer, "place", fail)
    engine = Engine(Model(root, "demo"), ServerSettings(), placer)
    with pytest.raises(
        ServingError, match=r"demo version 1 cannot be served: RuntimeError\('ptxas failed'\)"
    ):
        engine.attach()


def test_cache_metrics_count_what_came_since() -> None:
    """Counters go up by differences; a number that another table has now starts anew."""

    def now(tickets: int, name: str, ids: int, hits: int) -> Statistics:
        table = TableStatistics(name, ids, hits, ids - hits, 0, 16)
        return Statistics(
            tickets, 100, 50, inserted=ids, evicted=0, padded=0, locked_out=0, tables={0: table}
        )

    kept = metrics.CacheMetrics("played")
    first = now(1, "ads/played", 10, 4)
    for statistics in (first, first, now(2, "ads/played", 30, 20), now(3, "ads/next", 5, 1)):
        kept.update(statistics)
    for name, table, value in (
        ("hits", "ads/played", 20),
        ("ids", "ads/played", 30),
        ("bus_bytes", "ads/next", 4 * 16),
    ):
        assert metrics.CACHE_TABLES[name].labels(table)._values[0] == value
