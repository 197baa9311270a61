"""Slow and idle clients: hundreds of connections that send a byte now and then, nothing, or do not read what
they asked for.

Promised: with the server's own settings each of them is closed within 10 s (and the time that a refusal is
read on, and that hundreds of refusals at once take), while a client that behaves is answered, and afterwards
the worker has the descriptors that it had before. Not meant here: a connection that is kept between two
requests, which has a deadline of its own (idle_timeout_s).

The oracle: this side of each connection sees when the other side closes it; /proc says what the worker has
open. A client that does not read is not told that it was closed, so the worker's end of its connection is
looked for in /proc/net/tcp.
"""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks import wire
from campaigns.common import descriptors, folders, publish, random_of, standalone, version_told, workers_of
from tableside.serving.cli.commands.bench import request_bytes
from tableside.serving.cli.local import local_server
from tableside.serving.client import AsyncClient, Client, ClientError, Jagged

CLIENTS, DEADLINE_S, LATE_S, GIVEN_UP_S, DRIP_S = 500, 10.0, 3.0, 30.0, 0.5
HEAD = b"POST /v2/models/demo/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n"


@dataclass
class Seen:
    """What was seen: seconds until each kind of client was closed, and the answers of the one that
    behaves."""

    closed_s: dict[str, list[float]] = field(default_factory=dict)
    never_closed: int = 0
    answered: int = 0
    failed: int = 0
    wrong: int = 0
    slowest_s: float = 0.0


class Opened:
    """One connection of a slow client, opened and then left to its habit."""

    def __init__(self, port: int) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.setblocking(False)
        self.port = port

    async def connect(self) -> None:
        await asyncio.get_running_loop().sock_connect(self.socket, ("127.0.0.1", self.port))

    async def send(self, data: bytes) -> bool:
        """False where the other side has closed."""
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().sock_sendall(self.socket, data)
            return True
        return False

    async def drip(self, data: bytes) -> None:
        """A byte now and then, until the other side closes or the bytes are out."""
        for byte in data:
            if not await self.send(bytes([byte])):
                return
            await asyncio.sleep(DRIP_S)

    async def closed(self) -> None:
        """Returns when the other side has closed; reads what comes before."""
        with contextlib.suppress(OSError):
            while await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16):
                pass

    def is_established(self) -> bool:
        """Whether the kernel still has the connection as open on our side."""
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return info[0] == 1

    async def __aenter__(self) -> "Opened":
        return self

    async def __aexit__(self, *error: object) -> None:
        self.socket.close()


async def drips_headers(client: Opened) -> None:
    dripping = asyncio.create_task(client.drip(HEAD * 10))
    await client.closed()
    dripping.cancel()


async def drips_body(client: Opened) -> None:
    await client.send(HEAD + b"\r\n")
    dripping = asyncio.create_task(client.drip(b" " * 4000))
    await client.closed()
    dripping.cancel()


async def sends_nothing(client: Opened) -> None:
    await client.closed()


async def does_not_read(client: Opened) -> None:
    """Asks for more than any buffer holds, and leaves the answer where it is."""
    ids = np.zeros((20_000, 4), np.int64)
    headers, body = wire.encode({"user": ids, "bought": ids})
    await client.send(request_bytes("http://x/v2/models/demo/infer", headers, body))
    while client.is_established():
        await asyncio.sleep(0.1)


KINDS: dict[str, Callable[[Opened], Awaitable[None]]] = {
    "drips headers": drips_headers,
    "drips a body": drips_body,
    "sends nothing": sends_nothing,
    "does not read": does_not_read,
}


async def _slow(port: int, kind: str, seen: Seen, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    async with Opened(port) as client:
        await client.connect()
        started = time.monotonic()
        try:
            await asyncio.wait_for(KINDS[kind](client), GIVEN_UP_S)
        except TimeoutError:
            seen.never_closed += 1
        seen.closed_s.setdefault(kind, []).append(time.monotonic() - started)


async def _behaves(url: str, seen: Seen, stop: asyncio.Event, seed: int) -> None:
    """A client as they should be, until `stop`."""
    rng = np.random.default_rng(seed)
    async with AsyncClient(url) as client:
        while not stop.is_set():
            ids = rng.integers(0, 2000, 10)
            started = time.monotonic()
            try:
                found = await client.lookup("demo", {"user": Jagged(ids, [10])})
            except ClientError:
                seen.failed += 1
                continue
            seen.slowest_s = max(seen.slowest_s, time.monotonic() - started)
            seen.answered += 1
            seen.wrong += version_told(found["user"], ids) != 1
            await asyncio.sleep(0.02)


async def _all(url: str, clients: int, seen: Seen, chance: random.Random, seed: int) -> None:
    port, stop = int(urlsplit(url).port or 0), asyncio.Event()
    good = asyncio.create_task(_behaves(url, seen, stop, seed))
    kinds = [list(KINDS)[i % len(KINDS)] for i in range(clients)]
    await asyncio.gather(*(_slow(port, kind, seen, chance.uniform(0, 1)) for kind in kinds))
    stop.set()
    await good


def run(seconds: float, seed: int, clients: int = CLIENTS) -> dict[str, float]:
    """Rounds of `clients` slow clients, one at least; a round takes what the server's deadlines are."""
    seen, rounds, end = Seen(), 0, time.monotonic() + seconds
    with folders() as (root, files):
        publish(root, files, 1)
        with local_server(["demo"], root=root, workers=1) as server:
            (worker,) = workers_of(server.pid, root)
            with Client(server.url) as client:
                client.lookup("demo", {"user": [[1]]})  # what a first request opens is no leak
            before = _settled(worker)
            while rounds == 0 or time.monotonic() < end - DEADLINE_S:
                asyncio.run(_all(server.url, clients, seen, random_of(seed, rounds), seed))
                rounds += 1
            leaked = _settled(worker) - before
            is_same = workers_of(server.pid, root) == [worker]
    found: dict[str, Any] = {
        f"slowest close of one that {kind}, s": max(times) for kind, times in seen.closed_s.items()
    }
    late = sum(t > DEADLINE_S + LATE_S for times in seen.closed_s.values() for t in times)
    return {
        "slow clients": sum(map(len, seen.closed_s.values())),
        "closed late or never": late,
        **found,
        "answers meanwhile": seen.answered,
        "wrong or failed meanwhile": seen.wrong + seen.failed,
        "slowest answer meanwhile, s": seen.slowest_s,
        "descriptors leaked": max(0, leaked),
        "crashed workers": int(not is_same),
    }


def _settled(worker: int) -> int:
    """The fewest descriptors that the worker has open within two seconds."""
    counts = []
    for _ in range(20):
        time.sleep(0.1)
        counts.append(len(descriptors(worker)))
    return min(counts)


if __name__ == "__main__":
    standalone(run)
