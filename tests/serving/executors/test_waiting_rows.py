"""Requests whose rows are not in memory: nobody waits for those of another request."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from batched import batcher_of, run_in
from dot_model import attach, scored
from fetched_tables import FromArray, fetched_table
from played_batches import Device, Request

from tableside.quant import choose
from tableside.quant.contract import Waiting
from tableside.quant.rows.fetched import FetchedTable, RowReader, RowState
from tableside.serving.errors import ApiError, ErrorKind
from tableside.serving.executors import pending
from tableside.serving.executors.admission import Bytes, Hold
from tableside.serving.executors.batching import Batcher
from tableside.serving.executors.executors import INLINE_FETCHED, INLINE_IDS, CpuExecutor
from tableside.serving.executors.pending import READERS, Pending, Readers, answer_of
from tableside.serving.http.v2.infer import V2, InferTarget
from tableside.serving.model.placements import Placements
from tableside.serving.model.request import Answer, FeatureInput
from tableside.serving.model.version import ServedVersion
from tableside.serving.settings import ServerSettings


@pytest.fixture(autouse=True)
def metrics_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TABLESIDE_METRICS", raising=False)


def over_fetched_rows(
    version: ServedVersion, states: Mapping[int, RowState] | None = None
) -> tuple[ServedVersion, dict[str, FetchedTable]]:
    """The same version with rows that are fetched."""
    tables = {name: fetched_table(table, states) for name, table in version.segment.tables.items()}
    placed = Placements(dict.fromkeys(tables, "host"), on_host=tables)
    return ServedVersion(version.segment, choose(), placed, scorer=version.scorer), tables


def source_of(table: FetchedTable) -> FromArray:
    assert isinstance(table.reader.fetch, FromArray)
    return table.reader.fetch


def run_held_up(table: FetchedTable, run: Callable[[CpuExecutor], Coroutine[Any, Any, None]]) -> None:
    """Runs with an executor while no row of the table comes, until `run` lets them."""
    with ThreadPoolExecutor(1) as beside:
        executor = CpuExecutor(beside, Readers())
        source_of(table).is_open.clear()
        try:
            asyncio.run(run(executor))
        finally:
            source_of(table).is_open.set()
            executor.close()


def test_a_request_that_waits_for_rows_has_a_thread_of_its_own(root: Path, tmp_path: Path) -> None:
    """Others go on beside it, inline and on the thread of large ones."""
    version, _ = attach(root, tmp_path, None)
    late, fetched = over_fetched_rows(version)
    source = source_of(fetched["user"])

    async def run(executor: CpuExecutor) -> None:
        request, inputs, expected = scored(late, 3)
        buffer = bytearray(inputs)
        begun = executor.begin(request, memoryview(buffer))
        buffer[:] = bytes(len(buffer))  # the next request lies there
        assert isinstance(begun, Pending) and begun.waits_for_rows
        asked = asyncio.ensure_future(answer_of(begun))
        plain, given, wanted = scored(version, 5)
        answer = executor.begin(plain, given)
        assert isinstance(answer, Answer) and not asked.done()
        np.testing.assert_allclose(plain.outputs[-1].view(answer.buffer), wanted, rtol=1e-4)
        many = version.lay_out([FeatureInput("user", 0, INLINE_IDS + 1, 1, INLINE_IDS + 1)])
        large = executor.begin(many, bytes(8 * many.ids))
        assert isinstance(large, Pending) and not large.waits_for_rows
        await answer_of(large)
        assert not asked.done()
        source.is_open.set()
        np.testing.assert_allclose(request.outputs[-1].view((await asked).buffer), expected, rtol=1e-4)

    run_held_up(fetched["user"], run)


def test_a_request_that_waits_for_rows_says_so_to_its_connection(root: Path, tmp_path: Path) -> None:
    """Which is patient then (test_heads.py)."""
    version, _ = attach(root, tmp_path, None)
    late, fetched = over_fetched_rows(version)
    head = {"inputs": [{"name": "user", "datatype": "INT64", "shape": [1, 2], "data": [0, 1]}]}
    body = json.dumps(head | {"outputs": [{"name": "user", "parameters": {"binary_data": True}}]}).encode()

    async def run(executor: CpuExecutor) -> None:
        service: Any = SimpleNamespace(settings=ServerSettings(), executor=executor, regions=None)
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        for served, waits in ((version, False), (late, True)):
            service.live, hold = lambda name, served=served: served, Hold(Bytes(1 << 20))
            asked = InferTarget("demo", None)
            found = V2(service).infer_soon(asked, body, hold, lambda _, came: answered.set_result(came))
            assert (found is None) == hold.waits_for_rows == waits
        source_of(fetched["user"]).is_open.set()
        assert isinstance(await answered, Answer)

    run_held_up(fetched["user"], run)


def test_rows_that_do_not_come_are_a_503(root: Path, tmp_path: Path) -> None:
    late, _ = over_fetched_rows(attach(root, tmp_path, None)[0], {2: RowState.CORRUPT})
    request, inputs, _ = scored(late, 3)
    begun = request.begin(inputs)
    assert isinstance(begun, Waiting)
    for read, given in ((request.look_up, inputs), (request.wait, begun)):
        with pytest.raises(
            ApiError, match="model 'demo': of 3 rows to fetch 0 came too late and 1 were"
        ) as e:
            read(given)  # type: ignore[operator]
        assert e.value.status == 503


def test_requests_that_wait_for_rows_are_bounded(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that those which need none have slots; and rows that need no wait are answered at once."""
    monkeypatch.setattr(pending, "MOST_READING", 2)
    version, _ = attach(root, tmp_path, None)
    late, fetched = over_fetched_rows(version)
    source = source_of(fetched["user"])
    tables = version.segment.tables.items()
    ready = {name: t.fetched_by(RowReader(FromArray(t), ready=FromArray(t))) for name, t in tables}
    there = ServedVersion(
        version.segment,
        choose(),
        Placements(dict.fromkeys(ready, "host"), on_host=ready),
        scorer=version.scorer,
    )

    async def run(executor: CpuExecutor) -> None:
        request, inputs, _ = scored(late, 3)
        asked = [asyncio.ensure_future(answer_of(executor.begin(request, inputs))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 requests wait for rows, the limit") as e:
            await answer_of(executor.begin(request, inputs))
        assert e.value.status == 503
        quick, given, wanted = scored(there, 4)
        answer = executor.begin(quick, given)
        assert isinstance(answer, Answer) and not any(one.done() for one in asked)
        np.testing.assert_allclose(quick.outputs[-1].view(answer.buffer), wanted, rtol=1e-4)
        source.is_open.set()
        await asyncio.gather(*asked)
        await answer_of(executor.begin(request, inputs))

    run_held_up(fetched["user"], run)


class Begun(Waiting):
    """Stands for rows that are waited for."""

    def wait(self, deadline: float | None = None) -> Any: ...


class ReadRequest(Request):
    """A request whose rows come when `came` is set, or not."""

    plan = SimpleNamespace(waits=True, begins_at_once=False)

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.came, self.error = threading.Event(), error

    def begin(self, inputs: Any) -> Any:
        return Begun()

    def wait(self, begun: Waiting, deadline: float | None = None) -> Any:
        assert self.came.wait(300)
        if self.error is not None:
            raise self.error
        return SimpleNamespace(waits=False, read=True)


def test_no_request_waits_for_the_rows_of_another() -> None:
    """It is answered first, and the other with its rows once they are here; what they fail with is told."""
    device = Device()
    batcher = batcher_of(device, 8)
    plans: list[Any] = []

    def note(requests: list[Any]) -> Any:
        plans.extend(plan for plan, _ in requests)
        return Device().answer(requests)

    device.answer = note
    late, broken = ReadRequest(), ReadRequest(OSError())
    lost = ReadRequest(ApiError(503, ErrorKind.NOT_READ, "lost"))

    async def run() -> list[Any]:
        asked = [asyncio.ensure_future(run_in(batcher, r, b"")) for r in (late, lost, broken)]
        first = await run_in(batcher, Request(), b"")
        assert not any(one.done() for one in asked)
        for request in (late, lost, broken):
            request.came.set()
        return [first, *await asyncio.gather(*asked, return_exceptions=True)]

    found = asyncio.run(run())
    assert [type(f).__name__ for f in found] == ["Answer", "Answer", "ApiError", "OSError"]
    assert device.sizes == [1, 1] and plans[1].read
    batcher.close()


class LargeRequest(ReadRequest):
    """One of many ids, whose rows are all in memory."""

    ids = INLINE_FETCHED + 1

    def begin(self, inputs: Any) -> Any:
        return SimpleNamespace(waits=False, read=True)


def test_a_large_request_whose_rows_are_in_memory_waits_for_no_other() -> None:
    """However many threads wait for rows: it begins on one of its own."""
    batcher = batcher_of(Device(), 8)
    late = [ReadRequest() for _ in range(READERS)]

    async def run() -> None:
        asked = [asyncio.ensure_future(run_in(batcher, r, b"")) for r in late]
        await run_in(batcher, LargeRequest(), b"")
        assert not any(one.done() for one in asked)
        for request in late:
            request.came.set()
        await asyncio.gather(*asked)

    asyncio.run(run())
    batcher.close()


def test_requests_that_wait_for_rows_are_bounded_and_end_with_the_batcher() -> None:
    batcher = Batcher(Device(), 8, 2, tell=lambda told: None)  # type: ignore[arg-type]
    requests = [ReadRequest() for _ in range(3)]

    async def run() -> list[Any]:
        asked = [asyncio.ensure_future(run_in(batcher, r, b"")) for r in requests]
        await asyncio.sleep(0)
        (refused,) = [one for one in asked if one.done()] or [asked[2]]
        refusal = await asyncio.gather(refused, return_exceptions=True)
        batcher.close()
        for request in requests:
            request.came.set()
        return [*refusal, *await asyncio.gather(*asked[:2], return_exceptions=True)]

    refused, *ended = asyncio.run(run())
    assert isinstance(refused, ApiError) and "2 requests wait for rows, the limit" in str(refused)
    assert [type(error) for error in ended] == [RuntimeError] * 2


def test_many_rows_that_come_at_once_are_answered_one_by_one() -> None:
    """In between the event loop looks at its connections."""
    order: list[str] = []

    async def ask(readers: Readers) -> None:
        await readers.run(lambda: None)
        order.append("answer")

    async def run() -> None:
        readers = Readers()
        asked = [asyncio.ensure_future(ask(readers)) for _ in range(5)]
        await asyncio.sleep(0)  # all have begun
        while len(readers._ended) < len(asked):
            time.sleep(0)
        while not all(one.done() for one in asked):
            order.append("look")
            await asyncio.sleep(0)
        readers.close()

    asyncio.run(run())
    assert order.count("answer") == 5 and "answer answer" not in " ".join(order)
