"""A connection's refusals: the answer sent in place of the application's, and the reset of slow readers."""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tableside.serving.errors import ApiError, ErrorKind
from tableside.serving.executors.admission import Bytes, Hold, Turn, WholeTurn
from tableside.serving.http.asgi import error_response
from tableside.serving.http.connection.held_back import HeldBack, HoldingFlow
from tableside.serving.http.door import Door, Target, response_head
from tableside.serving.http.traffic import REQUEST_ID, Trace, Traffic
from tableside.serving.settings import ServerSettings


class LateTimer:
    """Calls a function at a deadline unless the deadline moves or is cleared. Belongs to one event loop. A
    timer per request would cost as much as a small lookup: a running timer stays when the deadline moves on,
    and checks it when it ends, within `horizon_s`. Only a nearer deadline makes a new timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, horizon_s: float) -> None:
        self._loop, self._horizon_s = loop, horizon_s
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._call: tuple[Callable[..., object], tuple[Any, ...]] | None = None

    @property
    def is_set(self) -> bool:
        return self._call is not None

    def set(self, seconds: float, callback: Callable[..., object], *arguments: Any) -> None:
        self._due, self._call = self._loop.time() + seconds, (callback, arguments)
        if self._timer is None or self._timer.when() > self._due:
            self._start()

    def clear(self) -> None:
        self._call = None

    def end(self) -> None:
        self._call = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(min(self._due, self._loop.time() + self._horizon_s), self._look)

    def _look(self) -> None:
        self._timer = None
        if self._call is None:
            return
        if self._due > self._loop.time():
            self._start()
            return
        (callback, arguments), self._call = self._call, None
        callback(*arguments)


CLOSE = b"connection: close\r\n"
LINGER_S = 1.0


@dataclass(slots=True)
class OpenRequest:
    """A request without a complete response. since: time.perf_counter() of its first byte. asked: the door's
    target; None: through ASGI. turn: None if it needs no slot. is_whole: its body is complete. shed: the
    refusal to send after its body. status: 0 before the response."""

    hold: Hold
    protocol: str
    since: float
    trace: Trace
    asked: Target | None = None
    body: bytes | memoryview = b""
    turn: Turn | WholeTurn | None = None
    is_started: bool = False
    is_whole: bool = False
    shed: ApiError | None = None
    status: int = 0

    async def pass_on(self, app: ASGI3Application, scope: Any, receive: Any, send: Any) -> None:
        async def noting(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                if self.trace.request_id is not None:
                    headers = [*message.get("headers", ()), (REQUEST_ID, self.trace.request_id)]
                    message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, noting)

    def end(self, traffic: Traffic, status: int) -> None:
        """Releases and counts the request. status 0: the client left before the response's end."""
        self.hold.release()
        self.body = b""
        if self.turn is not None:
            self.turn.end()
        model = self.hold.model if self.asked is None else self.asked.model
        traffic.ended(self.protocol, status, self.since, self.trace, model)


class RefusingProtocol(HttpToolsProtocol):
    """A connection's deadline, open requests and end. The first three attributes are the worker's."""

    limits: ServerSettings
    in_flight: Bytes
    door: Door

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._traffic = self.door.traffic
        self._deadline = LateTimer(self.loop, self.limits.header_timeout_s)  # the nearest one that there is
        self._write_deadline = LateTimer(self.loop, self.limits.write_timeout_s)
        self._open: deque[OpenRequest] = deque()  # requests whose responses are to come, in order
        self._unsent: list[OpenRequest] = []  # whose responses the client has not read yet
        self._parts: list[bytes | bytearray] = []  # of the body that is being read
        self._since = 0.0  # when the first byte of the request that is read came
        self._refused = False
        self._last_words: bytes | None = None  # a refusal that waits for the answers before it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = flow = HoldingFlow(transport)
        self._held_back = HeldBack(flow, self.in_flight)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.end()
        self._held_back.drop()
        for request in self._open:
            request.end(self._traffic, request.status if self._refused else 0)
        for request in self._unsent:
            request.end(self._traffic, 0)
        self._write_deadline.end()
        super().connection_lost(exc)
        self._forget_bodies()

    def _forget_bodies(self) -> None:
        """Drops unread bodies: this object is in cycles and may live on for a while."""
        self._parts = []
        if self.cycle is not None:
            self.cycle.body = b""  # type: ignore[assignment]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        while self._unsent:
            (request := self._unsent.pop()).end(self._traffic, request.status or 500)
        self._write_deadline.clear()

    def _watch_writing(self, unsent: int) -> None:
        """Checks after write_timeout_s whether the client has read anything."""
        self._write_deadline.set(self.limits.write_timeout_s, self._check_writing, unsent)

    def _check_writing(self, unsent: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < unsent:
            self._watch_writing(left)
            return
        connection = self.transport.get_extra_info("socket")  # a reset: the kernel drops what is not read too
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse_headers(self) -> None:
        most = self.limits.max_header_bytes
        self._refuse(431, f"the request line and headers exceed {most:,} bytes, the limit (max_header_bytes)")

    def _refuse_body(self, size: int) -> None:
        most = self.limits.max_body_bytes
        self._refuse(413, f"the body has {size:,} bytes or more; the limit is {most:,} (max_body_bytes)")

    def _expect(self, what: str, seconds: float) -> None:
        self._deadline.set(seconds, self._time_out, what, seconds)

    def _time_out(self, what: str, seconds: float) -> None:
        self._refuse(408, f"{what} did not arrive within {seconds:g} s; send the request in one go")

    def _refuse(self, status: int, message: str) -> None:
        """Answers and closes; only closes if the application has begun to answer."""
        if self._refused or self.transport.is_closing():
            return
        self._refused, self._parts = True, []
        self._deadline.clear()
        cycle = self.cycle
        if self._open and not self._open[-1].is_whole:
            self._open[-1].status = status
        else:  # its headers are not complete, or it is no request
            self._traffic.refused(status, self._since)
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body or len(self._open) > 1:  # those before it are answered first, in order
                if cycle.more_body:  # the last one has not begun, and is forgotten
                    self.pipeline.popleft()
                    self._open.pop().end(self._traffic, status)
                self._last_words = _last_answer(status, message)
                return
            begun = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
            if begun:
                self.transport.close()
                return
        self._end_with(_last_answer(status, message))

    def _end_with(self, answer: bytes) -> None:
        """Sends the connection's last answer, reads on for LINGER_S, and closes."""
        self.transport.write(answer)
        self._held_back.take()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)


def _last_answer(status: int, message: str) -> bytes:
    """Returns the bytes of an error response that ends the connection."""
    allow = ((b"allow", b"GET, HEAD, POST"),) if status == 405 else ()
    response = error_response(ApiError(status, ErrorKind.BAD_REQUEST, message, headers=allow))
    return b"".join([response_head(response), CLOSE, b"\r\n", *response.parts])
