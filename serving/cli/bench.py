"""A load generator: prepared requests over a number of connections, each of which waits for its answer before the next.

Requests are built before the clock starts. Of a response only the status and the time are taken; `check` sees the first response
of each connection. So one core can load a server that runs on another. A run is bounded in time. Load hosts of your own only.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools
import numpy as np

from tableside.serving import wire
from tableside.serving.errors import ServingError


@dataclass(frozen=True)
class Load:
    """What was measured. latencies_s: of every answered request, sorted. failed: connections that broke, and answers not 200."""

    seconds: float
    requests: int
    failed: int
    latencies_s: np.ndarray

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    def percentile_ms(self, percent: float) -> float:
        """Latency in milliseconds that `percent` of the requests stayed within."""
        return float(np.percentile(self.latencies_s, percent) * 1e3) if self.latencies_s.size else float("nan")


class _Connection(asyncio.Protocol):
    def __init__(self, requests: Sequence[bytes], first: int, check: Callable[[bytes], None] | None) -> None:
        self.requests, self.next, self.check = requests, first, check
        self.latencies: list[float] = []
        self.failed = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.stopping = False
        self._body: list[bytes] = []
        self._started = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self._send()

    def _send(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self._body = []
        self._started = time.perf_counter()
        self.transport.write(self.requests[self.next % len(self.requests)])
        self.next += 1

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if self.check is not None:
            self._body.append(body)

    def on_message_complete(self) -> None:
        self.latencies.append(time.perf_counter() - self._started)
        if self.parser.get_status_code() != 200:
            self.failed += 1
        elif self.check is not None:
            self.check(b"".join(self._body))
            self.check = None
        if self.stopping:
            self.transport.close()
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.stopping:
            self.failed += 1
        if not self.done.done():
            self.done.set_result(None)


def request_bytes(url: str, headers: dict[str, str], body: bytes, method: str = "POST") -> bytes:
    """One HTTP/1.1 request, ready to be sent again and again."""
    parts = urlsplit(url)
    lines = [
        f"{method} {parts.path or '/'} HTTP/1.1",
        f"Host: {parts.netloc}",
        f"Content-Length: {len(body)}",
    ]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def make_requests(
    described: dict[str, Any], url: str, batch: int, ids: int, zipf: float | None, count: int = 64, seed: int = 0
) -> list[bytes]:
    """`count` different binary lookups of all features of a model, as /v1/models describes it."""
    rng = np.random.default_rng(seed)
    rows = {t["name"]: t["rows"] for t in described["tables"]}
    requests = []
    for _ in range(count):
        features = {f["name"]: draw_ids(rng, rows[f["table"]], (batch, ids), zipf) for f in described["features"]}
        headers, body = wire.encode(features)
        requests.append(request_bytes(f"{url}/v2/models/{described['name']}/infer", headers, body))
    return requests


def draw_ids(rng: np.random.Generator, rows: int, shape: tuple[int, int], zipf: float | None) -> np.ndarray:
    """ids int64 [bags, ids a bag] in [0, rows): uniform, or by Zipf's law, its hot ids scattered over the table.

    shape: [bags, ids a bag]. zipf: the law's exponent, not 1; None: uniform. Ranks are drawn by the inverse of the continuous
    law's distribution.
    """
    if zipf is None:
        return rng.integers(0, rows, shape)
    power = 1.0 - zipf
    ranks = ((float(rows + 1) ** power - 1.0) * rng.random(shape) + 1.0) ** (1.0 / power)
    ranks = np.minimum(ranks, rows).astype(np.uint64) - np.uint64(1)
    # A bijection of the rows where they and the factor have no common divisor, which is a prime.
    scattered: np.ndarray = (ranks * np.uint64(2654435761) % np.uint64(rows)).astype(np.int64)
    return scattered


def _same(connection: _Connection) -> _Connection:
    return connection


async def _run(
    url: str,
    requests: Sequence[bytes],
    concurrency: int,
    seconds: float,
    check: Callable[[bytes], None] | None,
) -> Load:
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    connections: list[_Connection] = []
    started = time.perf_counter()
    for i in range(concurrency):
        connection = _Connection(requests, i, check)
        try:
            await loop.create_connection(functools.partial(_same, connection), parts.hostname or "", parts.port or 80)
        except OSError as error:
            raise ServingError(
                f"cannot connect to {url}: {error.strerror or error}; is `tableside serve` running there?"
            ) from error
        connections.append(connection)
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - started
    answered = sum(len(c.latencies) for c in connections)
    for connection in connections:
        connection.stopping = True
    _, late = await asyncio.wait([c.done for c in connections], timeout=10)
    for connection in connections:
        connection.transport.abort()
    latencies = np.sort(np.concatenate([np.array(c.latencies) for c in connections]))
    return Load(elapsed, answered, sum(c.failed for c in connections) + len(late), latencies)


def run(
    url: str,
    requests: Sequence[bytes],
    *,
    concurrency: int,
    seconds: float,
    check: Callable[[bytes], None] | None = None,
) -> Load:
    """Sends `requests` in turn over `concurrency` connections for `seconds`. ServingError: no server at `url`."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(url, requests, concurrency, seconds, check))
