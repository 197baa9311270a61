"""Connections of blocking sockets, for any number of threads. A forked child makes its own."""

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from tableside.serving.client.address import Address
from tableside.serving.client.attempts import Attempts
from tableside.serving.client.http import IdleWatch, ResponseReader
from tableside.serving.client.messages import HttpRequest, HttpResponse

_IDLE_S = 30.0  # a connection that was not used for longer is closed


class SocketConnection:
    """One connection, used by one thread at a time. OSError: it broke; TimeoutError: no answer in time."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        made = address.connect(timeout_s)
        self._socket, self._is_tls, self._wait_s = made, address.is_tls, timeout_s
        self._reader = ResponseReader()
        self._watch = IdleWatch(made.fileno())
        self.used_at = 0.0

    @property
    def descriptor(self) -> int:
        return self._socket.fileno()

    def is_usable(self) -> bool:
        return self._watch.is_quiet()

    def send(
        self,
        head: bytes,
        request: HttpRequest,
        wait_s: Callable[[], float],
        most: int | None = None,
        into: memoryview | None = None,
    ) -> None:
        """Sends a request. Where it is refused before it is whole, the response says why. wait_s: how long
        each step may take; most, into: as `ResponseReader.begin`."""
        self._reader.begin(most, into)
        with suppress(BrokenPipeError, ConnectionResetError):
            self._send(head, request, wait_s)

    def wait_for(self, seconds: float) -> None:
        """Has each wait from now on take so long at most."""
        if seconds != self._wait_s:
            self._socket.settimeout(seconds)
            self._wait_s = seconds

    def receive(self, attempts: Attempts) -> HttpResponse:
        self.wait_for(attempts.wait_s())
        while (response := self.receive_some()) is None:
            self.wait_for(attempts.wait_s())
        return response

    def receive_some(self) -> HttpResponse | None:
        """Reads a part of the response; returns it once it is complete."""
        count = self._socket.recv_into(self._reader.buffer())
        return self._reader.take(count) if count else self._reader.end()

    def receive_ready(self) -> HttpResponse | None:
        """As `receive_some`, of all that is there, without a wait for more."""
        if self._is_tls:
            return self.receive_some()
        response = None
        with suppress(BlockingIOError):
            while response is None:  # a socket's own calls ask the kernel twice
                count = os.readv(self.descriptor, (self._reader.buffer(),))
                response = self._reader.take(count) if count else self._reader.end()
        if response is not None:
            self._reader.begin()  # the connection may live on, without what it read
        return response

    def _send(self, head: bytes, request: HttpRequest, wait_s: Callable[[], float]) -> None:
        parts, sent = (head, *request.parts), 0
        if self._is_tls:
            self.wait_for(wait_s())
            self._socket.sendall(b"".join(parts))
            return
        with suppress(BlockingIOError):
            sent = os.writev(self.descriptor, parts)
        for part in parts:
            if sent < len(part):
                self.wait_for(wait_s())
                self._socket.sendall(memoryview(part)[sent:])
            sent = max(0, sent - len(part))

    def close(self) -> None:
        self._socket.close()


class SocketPool:
    """The connections to one server: as many as threads ask at the same time."""

    def __init__(self, address: Address, timeout_s: float) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._idle: deque[SocketConnection] = deque()  # the one used last is on the right
        self._process = os.getpid()  # whose the idle connections are
        self._is_closed = False

    def send(self, request: HttpRequest, attempts: Attempts) -> HttpResponse:
        """The response to a request. OSError: the connection broke, or none could be made."""
        connection = self._take(attempts.wait_s())
        try:
            connection.send(attempts.options.address.head(request), request, attempts.wait_s)
            response = connection.receive(attempts)
        except BaseException:
            connection.close()
            raise
        self.give_back(connection, response)
        return response

    def begin(
        self,
        request: HttpRequest,
        timeout_s: float | None = None,
        most: int | None = None,
        into: memoryview | None = None,
    ) -> SocketConnection:
        """Sends a request; the caller reads its response, and gives the connection back or closes it.
        timeout_s: for connecting, and for each step of sending, None: that of the pool; most, into: as
        `ResponseReader.begin`. OSError: no connection could be made."""
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        connection = self._take(wait_s)
        try:
            connection.send(self._address.head(request), request, lambda: wait_s, most, into)
        except BaseException:
            connection.close()
            raise
        return connection

    def give_back(self, connection: SocketConnection, response: HttpResponse) -> None:
        """Takes a connection back whose last response was read."""
        if response.is_last:
            connection.close()
        else:
            self._give(connection)

    def _take(self, timeout_s: float) -> SocketConnection:
        if self._is_closed:
            raise RuntimeError("the client is closed")
        if self._process != os.getpid():
            self._drop_inherited()
        with suppress(IndexError):  # none is idle
            while not (connection := self._idle.pop()).is_usable():
                connection.close()
            return connection
        return SocketConnection(self._address, timeout_s)

    def _give(self, connection: SocketConnection) -> None:
        connection.used_at = now = time.monotonic()
        self._idle.append(connection)
        try:
            if now - self._idle[0].used_at > _IDLE_S:
                self._idle.popleft().close()
        except IndexError:
            return  # other threads took them
        if self._is_closed:
            self.close()

    def _drop_inherited(self) -> None:
        """Closes a forked child's copies of its parent's connections, which go on being the parent's."""
        inherited, self._idle = self._idle, deque()
        self._process = os.getpid()
        for connection in inherited:
            connection.close()

    def close(self) -> None:
        self._is_closed = True
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:
                return
