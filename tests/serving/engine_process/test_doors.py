"""The engine's end of its doors' connections, without an engine: what is no message of a door ends its
connection."""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from tableside.serving.engine_process import doors, link, messages
from tableside.serving.engine_process.doors import AnswerMemory, Doors
from tableside.serving.engine_process.link import EngineLink
from tableside.serving.engine_process.memory import SharedMemory
from tableside.serving.engine_process.messages import MessageKind
from tableside.serving.errors import ApiError
from tableside.serving.executors.pending import answer_of
from tableside.serving.model.request import Answer
from tableside.serving.settings import ServerSettings

HELLO = {"hello": ["demo"]}


class Nothing:
    """Stands for an engine: knows no model, and answers every hello."""

    def layouts(self, model: int, state: int) -> None:
        return None

    def read_inputs_in(self, memory: Any) -> None:
        pass

    def moved(self) -> None:
        pass

    async def serve(self, models: Any) -> dict[str, Any]:
        return {"welcome": list(models)}


async def talk(test: Callable[[str, Doors], Coroutine[Any, Any, None]], host: Any = None) -> None:
    listening = messages.listen()
    engine = Doors(host or Nothing(), listening, AnswerMemory(1 << 16))  # type: ignore[arg-type]
    engine.start()
    try:
        await asyncio.wait_for(test(messages.address_of(listening), engine), 30)
    finally:
        engine.stop()
        listening.close()


async def is_ended(connection: socket.socket) -> bool:
    """Whether the engine closes the connection; what it says before is read."""
    while await asyncio.get_running_loop().sock_recv(connection, 1 << 17):
        pass
    return True


def control(told: Any) -> bytes:
    return bytes([MessageKind.CONTROL]) + orjson.dumps(told)


@pytest.mark.parametrize(
    "message",
    [
        bytes([MessageKind.ASKS]) + messages.ASK.pack(1, 0, 8, 40, 0, 0, 0),
        control({"left": "demo"}),
        control({"moved": ["demo", 1]}),
        control({"attach": ["demo", 1]}),
        control({"region": "r"}),
        control({"hello": ["demo"]}),  # without its memory
        control({}),
        control(7),
        bytes([MessageKind.CONTROL]) + b"{",
        bytes([9]),
    ],
)
def test_whoever_says_no_hello_first_is_left(message: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """In one line of the log; nothing of it leaves the reader as an error of our own."""

    async def test(address: str, engine: Doors) -> None:
        with messages.connect(address) as connection:
            connection.send(message)
            assert await is_ended(connection)
        assert not engine.open

    asyncio.run(talk(test))
    assert [record.name for record in caplog.records] == ["tableside"]


@pytest.mark.parametrize(
    "told",
    [
        {"moved": [[], 1]},
        {"moved": ["demo", "1"]},
        {"moved": 1},
        {"attach": ["demo"]},
        {"attach": [1, 1]},
        HELLO,
        {"hello": [1]},
        [],
    ],
)
def test_what_is_no_message_after_hello_ends_the_connection(told: Any) -> None:
    async def test(address: str, engine: Doors) -> None:
        memory = SharedMemory.create("door", 1 << 16)
        with messages.connect(address) as connection:
            socket.send_fds(connection, [control(HELLO)], [memory.fd])
            answer = await asyncio.get_running_loop().sock_recv(connection, 1 << 17)
            assert b"welcome" in answer
            connection.send(control(told))
            assert await is_ended(connection)

    asyncio.run(talk(test))


def test_parts_add_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that sends more is ended; one that sends less is read, and descriptors that came with a
    part are closed."""
    monkeypatch.setattr(messages, "MOST_PARTS", 200_000)

    async def test(address: str, engine: Doors) -> None:
        part = bytes([MessageKind.PART]) + b" " * 50_000
        memory = SharedMemory.create("door", 1 << 16)
        loop = asyncio.get_running_loop()
        with messages.connect(address) as connection:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                socket.send_fds(connection, [part], [memory.fd])
                while len(os.listdir("/proc/self/fd")) > before + 1:  # and the engine's end
                    await asyncio.sleep(0)
            socket.send_fds(connection, [control(HELLO)], [memory.fd])
            assert b"welcome" in await loop.sock_recv(connection, 1 << 17)
        with messages.connect(address) as connection:
            for _ in range(4):
                await loop.sock_sendall(connection, part)
            assert await is_ended(connection)

    asyncio.run(talk(test))


def test_whoever_is_silent_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A door that said hello may be silent for as long as it likes."""
    monkeypatch.setattr(doors, "HELLO_S", 0.2)

    async def test(address: str, engine: Doors) -> None:
        memory = SharedMemory.create("door", 1 << 16)
        with messages.connect(address) as greeted, messages.connect(address) as silent:
            socket.send_fds(greeted, [control(HELLO)], [memory.fd])
            assert await is_ended(silent)
            await asyncio.sleep(0.3)
            assert len(engine.open) == 1

    asyncio.run(talk(test))


def test_doors_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one beyond it is refused, and finds a place when another has gone."""
    monkeypatch.setattr(doors, "MOST_DOORS", 2)

    async def test(address: str, engine: Doors) -> None:
        first, second = messages.connect(address), messages.connect(address)
        with messages.connect(address) as third:
            assert await is_ended(third)
        first.close()
        while len(engine.open) > 1:
            await asyncio.sleep(0)
        with messages.connect(address):
            while len(engine.open) < 2:
                await asyncio.sleep(0)
        second.close()

    asyncio.run(talk(test))


class Holding(Nothing):
    """Stands for an engine that keeps what it is asked. It is its own batcher, and lays requests out
    itself."""

    state = 0

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.batcher = self

    def layouts(self, *wanted: object) -> "Holding":  # type: ignore[override]
        return self

    def request(self, description: bytes) -> None:
        return None

    def submit_all(self, asked: list[Any]) -> None:
        self.asked += asked

    async def serve(self, models: Any) -> dict[str, Any]:
        return {"hello": []}


async def open_link(address: str) -> EngineLink:
    """A door's end, with memory for 4 KiB of requests where REQUESTS_BYTES is 0."""
    one = EngineLink(ServerSettings(engine=address, max_body_bytes=2048, max_wait_s=60))
    await one.open(["demo"])
    return one


REQUEST: Any = SimpleNamespace(is_small=False, names_version=False, deadline=None)


def test_requests_wait_for_room_in_the_memory_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of these fit at a time; all four are answered."""
    monkeypatch.setattr(link, "describe", lambda request: bytes(48))
    monkeypatch.setattr(link, "REQUESTS_BYTES", 0)
    host = Holding()

    async def test(address: str, engine: Doors) -> None:
        one = await open_link(address)
        body, running = bytearray(1500), []
        for n in range(4):
            body[:] = bytes([n]) * len(body)  # each request comes where the one before lay
            running.append(asyncio.ensure_future(answer_of(one.begin(REQUEST, memoryview(body)))))
        for asked in (2, 4):
            while len(host.asked) < asked:
                await asyncio.sleep(0.001)
            assert len(one._waiting) == 4 - asked == len([r for r in running if not r.done()]) - 2
            for n in (asked - 2, asked - 1):
                inputs, reply = host.asked[n].inputs, host.asked[n].future
                assert bytes(inputs) == bytes([n]) * 1500
                reply.set_result(Answer(engine.answers.take(8)))
        assert all(answer.buffer.size == 8 for answer in await asyncio.gather(*running))
        one.close()

    asyncio.run(talk(test, host))


def test_a_request_that_its_engine_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "describe", lambda request: bytes(48))
    monkeypatch.setattr(link, "TIMEOUT_S", 0.2)

    async def test(address: str, engine: Doors) -> None:
        one = await open_link(address)
        with pytest.raises(ApiError, match=r"the engine process did not answer within 0\.2 s") as refused:
            await answer_of(one.begin(REQUEST, bytes(8)))
        assert refused.value.status == 503
        one.close()

    asyncio.run(talk(test, Holding()))
