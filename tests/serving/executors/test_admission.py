"""What a worker takes on: turns, bytes in flight, JSON; in its own loop and over real sockets."""

import asyncio
import contextlib
import gzip
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from support import until
from uvicorn.server import ServerState

from tableside.loader.segment.memory import pss_bytes
from tableside.serving.client import Client
from tableside.serving.errors import ApiError
from tableside.serving.executors import admission
from tableside.serving.executors.admission import Bytes, Hold, Slices, Slots, Turn
from tableside.serving.http.connection.connection import limited_protocol
from tableside.serving.http.traffic import Traffic
from tableside.serving.settings import ServerSettings

pytestmark = pytest.mark.quick

Start = Callable[..., Any]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


class Request:
    """A request for a slot: what became of it."""

    def __init__(self, slots: Slots, name: str, log: list[str], is_whole: bool = False) -> None:
        self._name, self._log, self.is_whole = name, log, is_whole
        self.turn = Turn(slots, lambda: log.append(name), self._refuse, lambda: self.is_whole)
        slots.enter(self.turn)

    def _refuse(self, error: ApiError) -> None:
        assert error.status == 503
        self._log.append(f"{self._name}: {error.message}")


def test_those_who_wait_are_taken_in_order_and_late_ones_newest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Order is for those who have waited for a moment; beyond that the newest has the best chance of still
    being wanted."""

    async def test() -> None:
        for late, expected in ((False, ["a", "b", "c", "d"]), (True, ["a", "d", "c", "b"])):
            slots, log = Slots(1, 100, 10.0), list[str]()
            turns = {name: Request(slots, name, log, is_whole=True).turn for name in "abcd"}
            if late:
                monkeypatch.setattr(admission, "NEWEST_FIRST_AFTER_S", -1.0)
            for n in range(4):
                turns[log[n]].end()
            assert log == expected
            assert not slots.is_full

    run(test())


def test_who_waits_for_too_long_or_is_one_too_many_is_refused() -> None:
    async def test() -> None:
        slots, log = Slots(1, 2, 0.05), list[str]()
        turns = [Request(slots, name, log, is_whole=True).turn for name in "abcd"]
        assert log[1].startswith(
            "b: 2 requests wait for this worker, its limit (max_waiting); try again later"
        )
        while len(log) < 4:
            await asyncio.sleep(0.01)
        assert [line.partition(" s for")[0] for line in log[2:]] == [
            "c: the request waited 0.05",
            "d: the request waited 0.05",
        ]
        turns[0].end()
        assert len(log) == 4

    run(test())


def test_who_leaves_gives_back_what_it_had() -> None:
    """A slot, or a place among those who wait; ending twice gives back once."""

    async def test() -> None:
        slots, log = Slots(1, 10, 10.0), list[str]()
        a, b, c = (Request(slots, name, log).turn for name in "abc")
        b.end()
        a.end()
        a.end()
        assert log == ["a", "c"] and slots.is_full
        c.end()
        assert not slots.is_full

    run(test())


@pytest.mark.thorough
def test_a_body_that_comes_slowly_keeps_nobody_waiting() -> None:
    """After a moment its slot is for others, who have waited or come then."""

    async def test() -> None:
        slots, log = Slots(2, 10, 10.0), list[str]()
        for name in "abc":
            Request(slots, name, log)
        assert log == ["a", "b"]
        slots.enter(Turn(slots, lambda: None, lambda error: None, lambda: False))
        while log == ["a", "b"]:
            await asyncio.sleep(0.01)
        assert log == ["a", "b", "c"]

    run(test())


class NoDoor:
    """A door that leaves every request to the application."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def asks(self, method: bytes, url: bytes, headers: Any) -> None:
        return None


async def answer_at_once(scope: Any, receive: Any, send: Any) -> None:
    """An application that says 200, whatever is asked."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@contextlib.asynccontextmanager
async def without_a_free_slot(
    in_flight: Bytes,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a worker's protocol in this loop, all of whose slots are taken."""
    config = uvicorn.Config(answer_at_once, lifespan="off")
    config.load()
    protocol = limited_protocol(
        ServerSettings(models=("demo",)), in_flight, Slots(0, 10, 60.0), Slices(), NoDoor()
    )  # type: ignore[arg-type]
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        for connection in list(state.connections):
            connection.transport.abort()
        server.close()
        await asyncio.sleep(0)


def test_requests_without_a_body_do_not_wait() -> None:
    """A health check is answered where no slot is free."""

    async def test() -> None:
        async with without_a_free_slot(Bytes(1 << 30)) as (reader, writer):
            writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 200")

    run(test())


@pytest.mark.parametrize("turn_s", [60, 0])
def test_requests_that_wait_leave_their_bodies_in_the_kernel(
    turn_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a body of 64 MiB the worker holds what came with the head alone; its client can send what the
    sockets take.

    That is so where the rest of what was read waits for another turn of the loop, as on a busy machine."""
    body_bytes = 64 << 20
    monkeypatch.setattr("tableside.serving.http.connection.connection.TURN_S", turn_s)

    async def test() -> None:
        in_flight = Bytes(1 << 30)
        async with without_a_free_slot(in_flight) as (_, writer):
            writer.write(
                b"POST /v1/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % body_bytes
            )
            writer.write(bytes(body_bytes))
            unsent = [body_bytes, body_bytes + 1]
            while unsent[-1] != unsent[-2]:  # until no more is taken
                await asyncio.sleep(0.2)
                unsent.append(writer.transport.get_write_buffer_size())
            assert unsent[-1] > body_bytes // 2
            assert in_flight.held <= 1 << 16
            writer.transport.abort()

    run(test())


def test_bytes_are_counted_until_they_are_let_go() -> None:
    """Refused growth takes nothing; what a gone connection would hold is not kept for it."""
    total = Bytes(100)
    first, second = Hold(total), Hold(total)
    first.grow(60)
    with pytest.raises(
        ApiError, match=r"requests hold 60 bytes of this worker, this one needs 41 more; the limit is 100"
    ):
        second.grow(41)
    second.grow(40)
    assert total.held == 100
    first.release()
    first.release()
    first.grow(1000)
    assert total.held == 40


@pytest.fixture
def narrow(start: Start) -> Any:
    """A server that holds few bytes and reads little JSON."""
    return start(
        *("--max-body-bytes", 1 << 20, "--max-response-bytes", 8 << 20, "--max-in-flight-bytes", 20 << 20),
        *("--max-json-bytes", 200_000, "--write-timeout-s", 5),
    )


def asking(bags: int) -> dict[str, Any]:
    """A small request for `bags` vectors of 256 bytes."""
    return {
        "inputs": [{"name": "user", "datatype": "INT64", "shape": [bags, 0], "data": []}],
        "outputs": [{"name": "user", "parameters": {"binary_data": True}}],
    }


def unread(port: int, bags: int) -> socket.socket:
    """A connection that asks for vectors, and reads nothing."""
    body = json.dumps(asking(bags)).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(
        b"POST /v2/models/demo/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        + body
    )
    return connection


@pytest.mark.thorough
def test_responses_that_nobody_reads_are_bounded(narrow: Any) -> None:
    """Two of 8 MiB fit in 20 MiB; the third is refused, small requests are answered, and what was read or
    reset is free again."""
    held = [unread(narrow.port, 32_000) for _ in range(2)]
    with Client(narrow.url) as client:
        until(lambda: refused(narrow, 32_000), what="a third large response to be refused")
        assert client.lookup("demo", {"user": [[1]]})["user"].shape == (1, 64)
        response = ask(narrow, 32_000)
        assert response.headers["retry-after"] == "1"
        assert "bytes of this worker" in response.json()["error"]
    for connection in held:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
    until(lambda: not refused(narrow, 32_000), what="the room to be free again")


def ask(server: Any, bags: int) -> httpx.Response:
    return httpx.post(server.url + "/v2/models/demo/infer", json=asking(bags))


def refused(server: Any, bags: int) -> bool:
    return ask(server, bags).status_code == 503


def sent_back(connection: socket.socket) -> bytes:
    """What the server has said on a connection so far."""
    connection.setblocking(False)
    try:
        return connection.recv(4096)
    except OSError:  # nothing, or a reset
        return b""


@pytest.mark.thorough
def test_bodies_that_are_never_whole_are_bounded(narrow: Any) -> None:
    """Thirty clients that send all but the last byte of 1 MiB: the worker holds 20 MiB of it, refuses the
    rest, and frees it."""
    head = b"POST /v2/models/demo/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (1 << 20)
    (worker,) = narrow.workers()
    before = pss_bytes(worker)["private"]
    connections = [socket.create_connection(("127.0.0.1", narrow.port), 10) for _ in range(30)]

    def send(connection: socket.socket) -> None:
        try:
            connection.sendall(head + bytes((1 << 20) - 1))
        except OSError:  # refused while it was sending
            return

    threads = [threading.Thread(target=send, args=(c,)) for c in connections]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    with httpx.Client(base_url=narrow.url) as client:
        assert client.get("/health").status_code == 200
    refusals = [c for c in connections if b" 503 " in sent_back(c)]
    assert len(refusals) >= 10  # 20 of them fit
    assert pss_bytes(worker)["private"] - before < 3 * (
        20 << 20
    )  # a body lies there once, and once more as it is joined
    for connection in connections:
        connection.close()
    until(lambda: not refused(narrow, 32_000), what="the room to be free again")


@pytest.mark.drawn(0.25)
def test_json_has_a_limit_of_its_own(narrow: Any) -> None:
    """Text takes ten times the time of bytes; what is too long is refused with the way to send it, packed
    or not."""
    ids = list(range(1000)) * 60
    body = json.dumps({"model": "demo", "features": {"user": [ids]}}).encode()
    assert 200_000 < len(body) < 1 << 20
    for headers, content in (({}, body), ({"content-encoding": "gzip"}, gzip.compress(body))):
        found = httpx.post(narrow.url + "/v1/lookup", content=content, headers=headers)
        assert found.status_code == 413
        assert "the limit is 200,000 (max_json_bytes): send ids as binary tensors" in found.json()["error"]
    inputs = [{"name": "user", "datatype": "INT64", "shape": [1, len(ids)], "data": ids}]
    assert httpx.post(narrow.url + "/v2/models/demo/infer", json={"inputs": inputs}).status_code == 413
    with Client(narrow.url) as client:
        assert client.lookup("demo", {"user": np.array([ids])})["user"].shape == (1, 64)


@pytest.mark.drawn(0.25)
def test_json_answers_have_a_limit_too(narrow: Any) -> None:
    features = {"user": [[1]] * 1000}
    found = httpx.post(narrow.url + "/v1/lookup", json={"model": "demo", "features": features})
    assert found.status_code == 400
    assert (
        "asks for 256,000 bytes of vectors as JSON; the limit is 200,000 (max_json_bytes)"
        in found.json()["error"]
    )


@pytest.mark.thorough
def test_large_json_is_parsed_beside_the_loop_and_is_right(start: Start) -> None:
    """Beyond 64 KiB: the same vectors, as JSON and as V2's inline data."""
    server = start()
    ids = np.random.default_rng(0).integers(0, 1000, (500, 40))
    assert len(json.dumps(ids.tolist())) > 1 << 16
    with Client(server.url) as client:
        expected = client.lookup("demo", {"user": ids})["user"]
    v1 = httpx.post(
        server.url + "/v1/lookup", json={"model": "demo", "features": {"user": ids.tolist()}}
    ).json()
    np.testing.assert_array_equal(np.array(v1["vectors"]["user"], np.float32), expected)
    inputs = [
        {"name": "user", "datatype": "INT64", "shape": list(ids.shape), "data": ids.reshape(-1).tolist()}
    ]
    v2 = httpx.post(server.url + "/v2/models/demo/infer", json={"inputs": inputs}).json()
    np.testing.assert_array_equal(np.array(v2["outputs"][0]["data"], np.float32).reshape(-1, 64), expected)


def test_a_limit_that_one_request_exceeds_alone(root: Any) -> None:
    from support import run_tableside

    found = run_tableside("serve", "demo", "--max-in-flight-bytes", "1MiB", root=root)
    assert found.returncode == 2
    assert "the largest request and its response alone may take" in found.stderr
