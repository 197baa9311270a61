"""A client that threads or tasks share: each gets its own answers, and connections go when nobody needs them.
The server is a script on a socket."""

import asyncio
import gc
import socket
import threading
import time
import warnings
from contextlib import suppress
from typing import Any

import pytest
from scripted import MODELS, Script, answer, received, scripted
from support import until

from tableside.serving.client import AsyncClient, Client, sockets, streams


def echo(script: Script, connection: socket.socket) -> None:
    """Answers each request for a model's metadata with its path, after a moment in which others ask."""
    while path := script.read(connection):
        time.sleep(0.002)
        connection.sendall(answer({"name": path.decode()}))


def test_threads_share_a_client() -> None:
    """Each gets its own answers, and there are no more connections than threads. They ask at the same
    time, round by round."""
    wrong: list[Any] = []
    round_of_all = threading.Barrier(8)
    with scripted(echo) as script, Client(script.url) as client:

        def ask(number: int) -> None:
            for i in range(20):
                round_of_all.wait(300)
                found = client.metadata(f"{number}-{i}")["name"]
                if found != f"/v2/models/{number}-{i}":
                    wrong.append((number, i, found))

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(script.heads) == 160 and len(script.connections) <= 8
    assert not wrong


def test_connections_that_were_idle_for_long_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that many threads once needed do not stay open while one is used."""
    both = threading.Barrier(2)

    def handle(script: Script, connection: socket.socket) -> None:
        while path := script.read(connection):
            if path.endswith(b"both"):
                both.wait(300)
            connection.sendall(MODELS)

    with scripted(handle) as script, Client(script.url) as client:
        threads = [threading.Thread(target=client.metadata, args=("both",)) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        client.models()
        assert [c.fileno() == -1 for c in script.connections] == [False, False]
        monkeypatch.setattr(sockets, "_IDLE_S", 0.0)
        client.models()
        until(
            lambda: sum(c.fileno() == -1 for c in script.connections) == 1,
            what="the idle connection to be closed",
        )
        assert len(script.connections) == 2


def test_a_client_that_is_closed_during_a_call() -> None:
    """The call gets its answer; then its connection is closed too."""
    closed, found = threading.Event(), []

    def handle(script: Script, connection: socket.socket) -> None:
        while script.read(connection):
            closed.wait(300)
            connection.sendall(MODELS)

    with scripted(handle) as script:
        client = Client(script.url)
        thread = threading.Thread(target=lambda: found.append(client.models()))
        thread.start()
        until(lambda: script.heads, what="the request")
        client.close()
        closed.set()
        thread.join(300)
        assert found == [[]]
        until(lambda: script.connections[0].fileno() == -1, what="the connection to be closed")


def test_tasks_share_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets its own answer; more of them than connections wait for each other."""
    monkeypatch.setattr(streams, "_CONNECTIONS", 4)

    async def ask(url: str) -> list[str]:
        async with AsyncClient(url) as client:
            return [
                found["name"] for found in await asyncio.gather(*(client.metadata(str(i)) for i in range(60)))
            ]

    with scripted(echo) as script:
        assert asyncio.run(ask(script.url)) == [f"/v2/models/{i}" for i in range(60)]
        assert len(script.connections) <= 4


def test_a_cancelled_call_leaves_no_answer_behind() -> None:
    """Its connection is closed at once: what still comes on it is nobody's answer."""

    def handle(script: Script, connection: socket.socket) -> None:
        while path := script.read(connection):
            if path.endswith(b"cancelled"):
                received(connection)
            connection.sendall(answer({"name": path.decode()}))

    async def ask(url: str) -> str:
        async with AsyncClient(url) as client:
            call = asyncio.create_task(client.metadata("cancelled"))
            while not script.heads:
                await asyncio.sleep(0.001)
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            await asyncio.to_thread(
                until, lambda: script.connections[0].fileno() == -1, what="the connection to be closed"
            )
            return str((await client.metadata("next"))["name"])

    with scripted(handle) as script:
        assert asyncio.run(ask(script.url)) == "/v2/models/next"
        assert len(script.connections) == 2


def test_a_client_of_a_loop_that_ended() -> None:
    """Its idle connections were the other loop's; it makes new ones."""
    with scripted(echo) as script:

        async def make() -> AsyncClient:
            client = AsyncClient(script.url)
            await client.metadata("a")
            return client

        async def ask(client: AsyncClient) -> str:
            found = await client.metadata("b")
            await client.close()
            return str(found["name"])

        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ResourceWarning
            )  # nobody can close a connection of a loop that has ended
            client = asyncio.run(make())
            assert asyncio.run(ask(client)) == "/v2/models/b"
            del client
            gc.collect()
