"""Heads of infer requests that came before: what they mean is known, and where a request ends stays the
parser's decision."""

import asyncio
import contextlib
import functools
import math
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from tableside.serving.executors.admission import Bytes, Slices, Slots, Turn
from tableside.serving.http.connection import connection, heads
from tableside.serving.http.connection.heads import Heads, KnownHead, body_bytes_of, head_of
from tableside.serving.http.door import Door
from tableside.serving.http.traffic import Trace, Traffic
from tableside.serving.http.v2.infer import InferTarget
from tableside.serving.settings import ServerSettings


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


class Echo(Door):
    """Takes requests as a door does, and answers each with its own body."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def answer(self, asked: Any, body: bytes | memoryview, hold: Any, send: Any, host: Any) -> None:
        send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n" % len(body), [bytes(body)])


class Talk:
    """A connection to a worker's protocol in this loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, in_flight: Bytes) -> None:
        self._reader, self._writer, self.in_flight = reader, writer, in_flight

    async def send(self, *pieces: bytes) -> None:
        """Each piece is read on its own."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            await asyncio.sleep(0.02 if len(pieces) > 1 else 0)

    async def answer(self) -> bytes:
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        return await self._reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))


@contextlib.asynccontextmanager
async def talk(
    limit: int = 1 << 30,
    door: Door | None = None,
    app: Any = None,
    slots: Slots | None = None,
    **settings: Any,
) -> AsyncIterator[Talk]:
    """app: answers what the door does not; None: every request is the door's."""

    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("every request is the door's")

    config, in_flight = uvicorn.Config(app or nothing, lifespan="off"), Bytes(limit)
    config.load()
    said = ServerSettings(models=("demo",), **settings)
    slots = slots or Slots(4, 10, 60.0)
    protocol = connection.limited_protocol(said, in_flight, slots, Slices(), door or Echo())
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config=config, server_state=state, app_state={}),  # type: ignore[call-arg]
        "127.0.0.1",
        0,
    )
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield Talk(reader, writer, in_flight)
    finally:
        writer.close()
        server.close()
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of parsing lasts as long as this machine needs; tests of admission shorten it."""
    monkeypatch.setattr(connection, "TURN_S", math.inf)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that parsers were given where a request begins, a number for each."""
    sizes: list[int] = []
    parse = connection._LimitedProtocol._parse

    def noting(self: Any, data: Any) -> None:
        if self._is_between:
            sizes.append(len(data))
        parse(self, data)

    monkeypatch.setattr(connection._LimitedProtocol, "_parse", noting)
    return sizes


def request(body: bytes, *lines: bytes) -> bytes:
    head = [
        b"POST /v2/models/demo/infer HTTP/1.1",
        b"Host: localhost",
        b"Content-Length: %d" % len(body),
        *lines,
        b"",
        b"",
    ]
    return b"\r\n".join(head) + body


def test_a_head_that_came_before_is_not_parsed_again(parsed: list[int]) -> None:
    """Its bodies are other ones, also longer ones. A head that differs in another byte, has an id, or says
    that the connection closes, is parsed."""

    async def test() -> None:
        async with talk() as one:
            for n in range(4):
                await one.send(request(b"body %d" % n))
                assert await one.answer() == b"body %d" % n
            assert len(parsed) == 1
            await one.send(request(b"longer body"))
            assert await one.answer() == b"longer body" and len(parsed) == 1
            await one.send(request(b"body", b"X-Other: 1"))
            assert await one.answer() == b"body" and len(parsed) == 2
            assert one.in_flight.held == 0
            for _ in range(2):
                await one.send(request(b"body 5", b"X-Request-Id: 7"))
                assert await one.answer() == b"body 5"
            for _ in range(2):
                async with talk() as other:
                    await other.send(request(b"body 6", b"Connection: close"))
                    assert await other.answer() == b"body 6"
            assert len(parsed) == 6

    run(test())


@pytest.mark.parametrize(
    "pieces",
    [
        [request(b"body 1") + request(b"body 2")],
        [request(b"body 1")[:-3], b"y 1" + request(b"body 2")],
        [request(b"body 1")[:20], request(b"body 1")[20:] + request(b"body 2")[:-6], b"body 2"],
        [request(b"body 1") + b"\r\n", request(b"body 2")],
    ],
)
def test_where_a_known_request_ends_the_parser_says(pieces: Sequence[bytes], parsed: list[int]) -> None:
    """Requests that come together, in parts, or with blank lines between them are answered one by one, in
    order."""

    async def test() -> None:
        async with talk() as one:
            await one.send(request(b"body 0"))
            assert await one.answer() == b"body 0" and len(parsed) == 1
            await one.send(*pieces)
            assert [await one.answer(), await one.answer()] == [b"body 1", b"body 2"]

    run(test())


def test_a_known_request_that_finds_no_bytes_is_refused() -> None:
    """As one that is parsed."""

    async def test() -> None:
        async with talk(limit=100) as one:
            await one.send(request(b"x" * 60))
            assert await one.answer() == b"x" * 60
            one.in_flight.held += 50
            await one.send(request(b"y" * 60))
            with pytest.raises(AssertionError):
                await one.answer()

    run(test())


def test_a_known_head_with_a_longer_body_is_refused() -> None:
    """As one that is parsed, where the body is beyond the limit."""

    async def test() -> None:
        async with talk(max_body_bytes=1024) as one:
            await one.send(request(b"x" * 1024))
            assert await one.answer() == b"x" * 1024
            await one.send(request(b"y" * 1025))
            assert (await one._reader.readline()).startswith(b"HTTP/1.1 413")

    run(test())


def test_heads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes; one that is long is no head."""
    monkeypatch.setattr(heads, "MOST", 2)
    known, meant = Heads(), KnownHead(InferTarget(["demo"], None), Trace(b"POST", b"/"))
    for head in (b"a", b"b", b"c"):
        known.learn(head, meant)
    assert [known.get(h) for h in (b"a", b"b", b"c")] == [None, meant, meant]
    assert head_of(b"POST / HTTP/1.1\r\n\r\nbody") == b"POST / HTTP/1.1\r\n\r\n"
    assert body_bytes_of(request(b"xyz")[:-3]) == (request(b"")[:-5] + b"\r\n\r\n", 3)
    assert head_of(b"x" * 5000 + b"\r\n\r\n") == head_of(b"POST / HTTP/1.1\r\n") == b""


def test_a_known_request_that_waits_for_a_slice_keeps_its_body(
    monkeypatch: pytest.MonkeyPatch, parsed: list[int]
) -> None:
    """What comes behind it is read into the same buffer before it is answered."""
    waiting: list[Any] = []

    async def test() -> None:
        async with talk() as one:
            await one.send(request(b"body 0"))
            assert await one.answer() == b"body 0" and len(parsed) == 1
            monkeypatch.setattr(Slices, "run", lambda self, work, is_patient=False: waiting.append(work))
            await one.send(request(b"body 1"))
            while not waiting:
                await asyncio.sleep(0)
            await one.send(b"GET / HTTP/1.1\r\nX-Long: " + b"z" * 500)
            while one.in_flight.held < 500:  # it is held back
                await asyncio.sleep(0)
            waiting.pop()()
            assert await one.answer() == b"body 1"

    run(test())


def test_a_connection_whose_request_waited_for_rows_is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next request, until one waits for none. Heads that are known, and those that are not."""
    found: list[bool] = []
    run_now = Slices.run

    def note(self: Slices, work: Callable[[], None], is_patient: bool = False) -> None:
        found.append(is_patient)
        run_now(self, work)

    class Reading(Echo):
        def answer(self, asked: Any, body: bytes | memoryview, hold: Any, send: Any, host: Any) -> None:
            hold.waits_for_rows = bytes(body) == b"waits"
            super().answer(asked, body, hold, send, host)

    async def test() -> None:
        async with talk(door=Reading()) as one:
            for body in (b"quick", b"waits", b"waits", b"quick", b"quick"):
                await one.send(request(body))
                assert await one.answer() == body

    monkeypatch.setattr(Slices, "run", note)
    run(test())
    assert found == [False, False, True, True, False]


class Late(Echo):
    """Keeps what it is asked, and answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[], None]] = []

    def answer(self, asked: Any, body: bytes | memoryview, hold: Any, send: Any, host: Any) -> None:
        self.waiting.append(functools.partial(super().answer, asked, bytes(body), hold, send, host))


def test_the_body_of_a_request_that_waited_is_read() -> None:
    """What came with its head, and the rest, once it has a slot."""

    async def test() -> None:
        slots, body = Slots(1, 10, 60.0), bytes(8 << 20)
        other = Turn(slots, lambda: None, lambda error: None, lambda: True)
        slots.enter(other)
        async with talk(slots=slots) as one:
            sending = asyncio.create_task(one.send(request(body)))
            while not slots.waiting:
                await asyncio.sleep(0)
            other.end()
            assert await one.answer() == body
            await sending

    run(test())


@pytest.mark.parametrize("count", [3, 40_000])
def test_pipelined_requests_wait_unparsed_and_counted(count: int, parsed: list[int]) -> None:
    """While the first one has no answer no other is parsed; what was read of them is held. All are
    answered in order."""

    async def test() -> None:
        door = Late()
        async with talk(door=door) as one:
            sending = asyncio.create_task(one.send(b"".join(request(b"body %d" % n) for n in range(count))))
            while not door.waiting:
                await asyncio.sleep(0.001)
            for _ in range(1000):  # in which it could read more
                await asyncio.sleep(0)
            first = len(request(b"body 0"))
            assert parsed == [first - 6] and first < one.in_flight.held < 1 << 20
            for n in range(min(count, 500)):
                while not door.waiting:
                    await asyncio.sleep(0)
                door.waiting.pop()()
                assert not door.waiting
                assert await one.answer() == b"body %d" % n
            sending.cancel()
        while one.in_flight.held:  # the client is gone, which the server sees when it answers
            if door.waiting:
                door.waiting.pop()()
            await asyncio.sleep(0.001)

    run(test())


def test_what_is_pipelined_beyond_the_limit_is_refused() -> None:
    """The request before it gets its answer; what follows would hold more than all requests may, and gets
    a 503."""

    async def test() -> None:
        door = Late()
        async with talk(limit=2000, door=door) as one:
            await one.send(b"".join(request(b"body %d" % n) for n in range(100)))
            while not door.waiting:
                await asyncio.sleep(0.001)
            door.waiting.pop()()
            assert await one.answer() == b"body 0"
            assert (await one._reader.readline()).startswith(b"HTTP/1.1 503")

    run(test())


def test_a_body_in_the_smallest_chunks_takes_no_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand chunks of two bytes are kept together; the body arrives whole."""
    sizes: list[int] = []
    complete = connection._LimitedProtocol.on_message_complete

    def noting(self: Any) -> None:
        sizes.append(sum(map(sys.getsizeof, self._parts)) + sys.getsizeof(self._parts))
        self._parts = [b"Z" if bytes(b"".join(self._parts)) == b"xy" * 100_000 else b"other"]
        complete(self)

    monkeypatch.setattr(connection._LimitedProtocol, "on_message_complete", noting)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"%d" % len(body))],
            }
        )
        await send({"type": "http.response.body", "body": body})

    async def test() -> None:
        async with talk(app=answer) as one:
            head = (
                b"POST /v2/models/demo/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: "
                b"chunked\r\n\r\n"
            )
            await one.send(head + b"2\r\nxy\r\n" * 100_000 + b"0\r\n\r\n")
            assert await one.answer() == b"Z"
        assert sizes[0] < 300_000

    run(test())


def test_a_body_that_nobody_reads_goes_with_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An application that refuses a request unread would leave its body with the connection, as long as
    that is open."""
    connections: list[Any] = []
    made = connection._LimitedProtocol.connection_made

    def noting(self: Any, transport: Any) -> None:
        connections.append(self)
        made(self, transport)

    monkeypatch.setattr(connection._LimitedProtocol, "connection_made", noting)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.05)  # the body is here by then
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def test() -> None:
        async with talk(app=answer) as one:
            await one.send(request(b"x" * 100_000).replace(b"/infer", b"/other"))
            assert await one.answer() == b""
            assert connections[0].cycle.body == b"" and connections[0]._parts == []

    run(test())
