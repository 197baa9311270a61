"""The load generator's connections: sockets with at most one request each, read by one thread.

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
from typing import Any

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
