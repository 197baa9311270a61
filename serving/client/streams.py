"""Connections of asyncio, for the tasks of one event loop. A forked child makes its own."""

import asyncio
import os
import time
from collections import deque
from typing import Any

from tableside.serving.client.address import Address
from tableside.serving.client.attempts import Attempts, Options
from tableside.serving.client.http import IdleWatch, ResponseReader
from tableside.serving.client.messages import HttpRequest, HttpResponse

_CONNECTIONS = 100  # more calls than this at one time wait for each other


class _StreamConnection(asyncio.BufferedProtocol):
    """One connection, used by one task at a time. OSError: it broke; TimeoutError: no answer in time."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._timeout_s = 0.0
        self._reader = ResponseReader()
        self._transport: Any = None
        self._watch: IdleWatch | None = None
        self._waiter: asyncio.Future[HttpResponse] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    def is_usable(self) -> bool:
        is_ours = self.loop is asyncio.get_running_loop() and not self._transport.is_closing()
        return is_ours and self._watch is not None and self._watch.is_quiet()

    async def exchange(self, head: bytes, request: HttpRequest, timeout_s: float) -> HttpResponse:
        """Sends a request and waits for its response. timeout_s: of each wait."""
        self._reader.begin()
        if timeout_s != self._timeout_s and self._timer is not None:
            self._timer.cancel()  # it may be later
            self._timer = None
        self._timeout_s = timeout_s
        self._waiter = self.loop.create_future()
        self._deadline = self.loop.time() + self._timeout_s
        self._unsent = 0
        if self._timer is None:
            self._timer = self.loop.call_at(self._deadline, self._check_deadline)
        self._transport.write(b"".join((head, *request.parts)) if request.parts else head)
        return await self._waiter

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.loop.is_closed():
            self._transport.abort()

    def _check_deadline(self) -> None:
        """Fails the request, or sets the connection's one timer to the moved deadline."""
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        unsent = self._transport.get_write_buffer_size()
        if unsent and unsent != self._unsent:  # the server still takes the request
            self._unsent, self._deadline = unsent, self.loop.time() + self._timeout_s
        if self.loop.time() >= self._deadline:
            self._fail(TimeoutError("timed out"))
        else:
            self._timer = self.loop.call_at(self._deadline, self._check_deadline)

    # ---- called by the loop ----

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._watch = IdleWatch(transport.get_extra_info("socket").fileno())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        if self._waiter is None or self._waiter.done():
            self._transport.abort()  # nothing was asked, or nobody waits for it
            return
        self._deadline = self.loop.time() + self._timeout_s
        try:
            response = self._reader.take(nbytes)
        except ConnectionError as error:
            self._fail(error)
            return
        if response is not None:
            self._waiter.set_result(response)

    def eof_received(self) -> None:
        if self._waiter is None or self._waiter.done():
            return
        try:
            self._waiter.set_result(self._reader.end())
        except ConnectionError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the connection was closed"))

    def _fail(self, error: OSError) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)


class StreamPool:
    """The connections to one server."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._inherited: list[deque[_StreamConnection]] = []
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()  # whose the connections are
        self._idle: deque[_StreamConnection] = deque()
        self._room = asyncio.Semaphore(_CONNECTIONS)

    def _leave_inherited(self) -> None:
        """Leaves a parent's connections open in a fork: closing removes them from the shared epoll."""
        if self._process != os.getpid():
            self._inherited.append(self._idle)
            self._begin()

    async def send(self, request: HttpRequest, attempts: Attempts) -> HttpResponse:
        """The response to a request. OSError: the connection broke, or none could be made."""
        self._leave_inherited()
        if attempts.ends is None:
            return await self._send(request, attempts.options)
        async with asyncio.timeout(attempts.ends - time.monotonic()):
            return await self._send(request, attempts.options)

    async def _send(self, request: HttpRequest, options: Options) -> HttpResponse:
        async with self._room:
            connection = self._take() or await self._connect(options.timeout_s)
            try:
                response = await connection.exchange(
                    options.address.head(request), request, options.timeout_s
                )
            except BaseException:
                connection.close()
                raise
        if response.is_last or self._is_closed:
            connection.close()
        else:
            self._idle.append(connection)
        return response

    def _take(self) -> _StreamConnection | None:
        if self._is_closed:
            raise RuntimeError("the client is closed")
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable():
                return connection
            connection.close()
        return None

    async def _connect(self, timeout_s: float) -> _StreamConnection:
        loop, address = asyncio.get_running_loop(), self._address
        async with asyncio.timeout(timeout_s):
            if address.path is not None:
                _, connection = await loop.create_unix_connection(_StreamConnection, address.path)
            else:
                _, connection = await loop.create_connection(
                    _StreamConnection, address.host, address.port, ssl=address.tls
                )
        return connection

    def close(self) -> None:
        self._is_closed = True
        self._leave_inherited()
        while self._idle:
            self._idle.pop().close()
