"""The load generator: sends prepared requests over several connections, on one thread.

Closed loop (`run`): a connection sends its next request after each answer. Open loop (`run_at_rate`):
requests are due at given times, and latency counts from then. Only `check` looks at answers' bodies, the
first of each connection.

All sockets share one read buffer; Content-Length ends an answer; parsed heads are cached by their bytes. An
answer costs a core some 12 us, most of it in the kernel; TLS costs more.
"""

import re
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Literal, get_args

import numpy as np

from tableside.serving.client.address import Address
from tableside.serving.errors import ServingError

Check = Callable[[bytes], None]

PATIENCE_S = 10.0  # that a connection may take to open, and answers to come after the end of a run
_BUFFER_BYTES = 1 << 20
_HEADS = 1024  # that are remembered, with what they say
_HEAD_END = b"\r\n\r\n"
_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r\n", re.IGNORECASE)


class LoadConnection:
    """One socket, with at most one request in flight. sent_at: start of the latency; 0: no request. unsent:
    bytes to send. begun: an incomplete head. missing: body bytes to come. kept: body parts; None: not
    kept."""

    __slots__ = (
        "begun", "fd", "is_checked", "kept", "missing", "recv_into", "send", "sent_at", "sock", "status",
        "unsent",
    )  # fmt: skip

    def __init__(self, sock: socket.socket, is_checked: bool) -> None:
        self.sock, self.fd = sock, sock.fileno()
        # Of TLS a call takes one record at most, which the buffer holds, so that nothing is left where epoll
        # does not see it.
        is_tls = isinstance(sock, ssl.SSLSocket)
        self.recv_into: Callable[[Any], int] = _blocking(sock.recv_into) if is_tls else sock.recv_into
        self.send: Callable[[Any], int] = _blocking(sock.send) if is_tls else sock.send
        self.sent_at, self.unsent = 0.0, memoryview(b"")
        self.status, self.begun, self.missing = 0, b"", 0
        self.is_checked = is_checked
        self.kept: list[bytes] | None = None if is_checked else []


def _blocking(call: Callable[[Any], int]) -> Callable[[Any], int]:
    """A call of a TLS socket that says as others do, by BlockingIOError, that it has to wait."""

    def called(data: Any) -> int:
        try:
            return call(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    return called


class Fleet:
    """The connections and measurements of a run. live: unbroken connections. idle: live ones without a
    request. waiting: number of requests in flight. latencies: seconds. failed, failure: as in `Load`."""

    def __init__(self, sockets: Sequence[socket.socket], check: Check | None) -> None:
        self.idle = deque(LoadConnection(sock, check is None) for sock in sockets)
        self.live = {c.fd: c for c in self.idle}
        self.waiting = 0
        self.latencies: list[float] = []
        self.failed, self.failure = 0, ""
        self._check = check
        self._buffer = bytearray(_BUFFER_BYTES)
        self._heads: dict[bytes, tuple[int, int]] = {}
        self._epoll = select.epoll()
        for fd in self.live:
            self._epoll.register(fd, select.EPOLLIN)

    def close(self) -> None:
        """Closes the selector; the caller closes the sockets."""
        self._epoll.close()

    def send(self, connection: LoadConnection, request: bytes, at: float) -> None:
        """Sends a request, the latency of which counts from `at`."""
        connection.sent_at = at
        self.waiting += 1
        try:
            sent = connection.send(request)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose(connection, error.strerror or str(error))
            return
        if sent < len(request):
            connection.unsent = memoryview(request)[sent:]
            self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)

    def poll(self, timeout_s: float) -> list[LoadConnection]:
        """Reads and writes after waiting up to `timeout_s`; returns connections with a complete answer."""
        complete = []
        for fd, event in self._epoll.poll(timeout_s):
            connection = self.live[fd]
            try:
                if event & select.EPOLLOUT:
                    self._send_rest(connection)
                if event != select.EPOLLOUT and self._take(connection, connection.recv_into(self._buffer)):
                    complete.append(connection)
            except BlockingIOError:
                continue
            except OSError as error:
                self._lose(connection, error.strerror or str(error))
        return complete

    def drain(self) -> None:
        """Waits up to PATIENCE_S for answers; the missing ones have failed."""
        end = time.perf_counter() + PATIENCE_S
        while self.waiting and (now := time.perf_counter()) < end:
            self.poll(end - now)
        self.fail(f"no answer within {PATIENCE_S:g} s after the end of the run", self.waiting)

    def fail(self, failure: str, count: int = 1) -> None:
        """Counts failed requests or connections, and keeps the first reason."""
        self.failed += count
        if count and not self.failure:
            self.failure = failure

    def _send_rest(self, connection: LoadConnection) -> None:
        connection.unsent = connection.unsent[connection.send(connection.unsent) :]
        if not connection.unsent:
            self._epoll.modify(connection.fd, select.EPOLLIN)

    def _take(self, connection: LoadConnection, count: int) -> bool:
        """Takes `count` bytes of the buffer; returns whether the answer is complete."""
        if not count or not connection.sent_at:
            why = "sent what no request had asked for" if count else "closed the connection"
            self._lose(connection, f"the server {why}")
            return False
        data: bytes | bytearray = self._buffer
        missing, body_at = connection.missing, 0
        if not missing:
            if connection.begun:
                data = connection.begun + data[:count]
                count, connection.begun = len(data), b""
            body_at = data.find(_HEAD_END, 0, count) + len(_HEAD_END)
            if body_at < len(_HEAD_END):
                connection.begun = bytes(data[:count])
                return False
            connection.status, missing = self._understand(bytes(data[:body_at]))
            missing += body_at
            if connection.status != 200 and not self.failure:
                connection.kept = []
        missing -= count
        if connection.kept is not None:
            connection.kept.append(bytes(data[body_at:count]))
        if missing > 0:
            connection.missing = missing
            return False
        connection.missing = 0
        if missing < 0:
            self._lose(connection, f"the answer has {-missing} bytes more than its Content-Length")
            return False
        self._complete(connection)
        return True

    def _understand(self, head: bytes) -> tuple[int, int]:
        """The status of an answer, and the bytes of its body. Heads are remembered, as most are equal."""
        if (known := self._heads.get(head)) is not None:
            return known
        length = _CONTENT_LENGTH.search(head)
        if not head.startswith(b"HTTP/1.") or not head[9:12].isdigit() or length is None:
            raise ServingError(
                f"the server answered {head[:100]!r}; expected HTTP/1.1 with a Content-Length, as of "
                "`tableside serve`"
            )
        if len(self._heads) >= _HEADS:
            self._heads.clear()
        self._heads[head] = found = int(head[9:12]), int(length[1])
        return found

    def _complete(self, connection: LoadConnection) -> None:
        self.latencies.append(time.perf_counter() - connection.sent_at)
        connection.sent_at = 0.0
        self.waiting -= 1
        if connection.status == 200 and connection.kept is None:
            return
        body = b"".join(connection.kept or [])
        if connection.status != 200:
            self.fail(f"{connection.status}: {body[:500].decode(errors='replace')}")
        elif self._check is not None and not connection.is_checked:
            self._check(body)
            connection.is_checked = True
        connection.kept = None if connection.is_checked else []

    def _lose(self, connection: LoadConnection, reason: str) -> None:
        """A connection that broke, with the request that was under way."""
        if connection.sent_at:
            self.waiting -= 1
        else:
            self.idle.remove(connection)
        self._epoll.unregister(connection.fd)
        del self.live[connection.fd]
        connection.sock.close()
        self.fail(reason)


@contextmanager
def connected(where: str | Address, concurrency: int, check: Check | None) -> Iterator[Fleet]:
    """Connects to a URL or an address; closes at the end. ServingError: there is no server."""
    address = where if isinstance(where, Address) else Address.parse(where)
    with ExitStack() as stack:
        sockets = []
        for _ in range(concurrency):
            try:
                sock = address.connect(PATIENCE_S)
            except OSError as error:
                raise ServingError(
                    f"cannot connect to {address.base_url}: {error.strerror or error}; is `tableside serve` "
                    "running there?"
                ) from error
            sockets.append(stack.enter_context(sock))
            sock.setblocking(False)
        fleet = Fleet(sockets, check)
        stack.callback(fleet.close)
        yield fleet


Arrivals = Literal["even", "poisson"]
ARRIVALS: tuple[Arrivals, ...] = get_args(Arrivals)

_SPIN_S = 0.002  # before a request is due; epoll's timeouts are too coarse for less


@dataclass(frozen=True)
class Load:
    """The measurements. seconds: time of sending. requests: answers with status 200. failed: other answers,
    broken connections, and requests unanswered PATIENCE_S after the end. latencies_s: sorted. failure: the
    first failure; or ""."""

    seconds: float
    requests: int
    failed: int
    latencies_s: np.ndarray
    failure: str = ""

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    def percentile_ms(self, percent: float) -> float:
        """Latency in milliseconds that `percent` of the requests stayed within."""
        return (
            float(np.percentile(self.latencies_s, percent) * 1e3) if self.latencies_s.size else float("nan")
        )


def merged(loads: Sequence[Load]) -> Load:
    """Several measurements as one: their times, counts and latencies taken together."""
    latencies = np.sort(np.concatenate([load.latencies_s for load in loads]))
    failure = next((load.failure for load in loads if load.failure), "")
    seconds, requests, failed = (
        sum(getattr(load, n) for load in loads) for n in ("seconds", "requests", "failed")
    )
    return Load(seconds, requests, failed, latencies, failure)


def run(
    url: str | Address,
    requests: Sequence[bytes],
    *,
    concurrency: int,
    seconds: float,
    first: int = 0,
    check: Check | None = None,
) -> Load:
    """Sends `requests` in turn over `concurrency` connections for `seconds`. first: the index of the first
    request. ServingError: no server at `url`, or its answers lack Content-Length."""
    following = _in_turn(requests, first)
    with connected(url, concurrency, check) as fleet:
        started = time.perf_counter()
        end = started + seconds
        while fleet.idle:
            fleet.send(fleet.idle.popleft(), next(following), time.perf_counter())
        while fleet.live and (now := time.perf_counter()) < end:
            for connection in fleet.poll(end - now):
                fleet.send(connection, next(following), time.perf_counter())
        elapsed, answered = time.perf_counter() - started, len(fleet.latencies)
        fleet.drain()
        return _measured(fleet, elapsed, answered)


def run_at_rate(
    url: str | Address,
    requests: Sequence[bytes],
    *,
    rate: float,
    concurrency: int,
    seconds: float,
    arrivals: Arrivals = "poisson",
    check: Check | None = None,
    first: int = 0,
    seed: int = 0,
) -> Load:
    """Sends `requests` at `rate` a second for `seconds`, over at most `concurrency` connections. Latency
    counts from the due time, also while all connections are busy. Keeps one core busy. first, ServingError:
    as `run`."""
    due = deque(due_times(rate, seconds, arrivals, seed))
    following = _in_turn(requests, first)
    with connected(url, concurrency, check) as fleet:
        started = time.perf_counter()
        end, answered = started + seconds, 0
        while fleet.live and (due or fleet.waiting) and (now := time.perf_counter()) < end + PATIENCE_S:
            while due and fleet.idle and started + due[0] <= now:
                fleet.send(fleet.idle.popleft(), next(following), started + due.popleft())
            if now < end:
                answered = len(fleet.latencies)
            next_at = started + due[0] if due and fleet.idle else end + PATIENCE_S
            fleet.idle.extend(fleet.poll(max(0.0, next_at - now - _SPIN_S)))
        fleet.fail(
            f"{len(due):,} requests were due and not sent {PATIENCE_S:g} s after the end of the run", len(due)
        )
        fleet.drain()
        return _measured(fleet, seconds, answered)


def due_times(rate: float, seconds: float, arrivals: Arrivals, seed: int = 0) -> list[float]:
    """Returns when requests are due, in seconds after the start: evenly, or at random as independent clients
    send."""
    count = max(1, round(rate * seconds))
    if arrivals == "even":
        return list((np.arange(count) / rate).tolist())
    return list(np.sort(np.random.default_rng(seed).random(count) * seconds).tolist())


def _in_turn(requests: Sequence[bytes], first: int) -> Iterator[bytes]:
    return islice(cycle(requests), first % len(requests), None)


def _measured(fleet: Fleet, seconds: float, answered: int) -> Load:
    return Load(seconds, answered, fleet.failed, np.sort(np.array(fleet.latencies)), fleet.failure)
