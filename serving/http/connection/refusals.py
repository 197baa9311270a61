"""What a connection refuses, and how: the answer that comes in place of the application's, and the reset
of a slow reader."""

import asyncio
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tableside.serving.errors import ApiError, ErrorKind
from tableside.serving.executors.admission import Bytes, Hold, Turn, WholeTurn
from tableside.serving.http.asgi import error_response
from tableside.serving.http.connection.held_back import HeldBack, HoldingFlow
from tableside.serving.http.connection.late_timer import LateTimer
from tableside.serving.http.door import Door, InferTarget, response_head
from tableside.serving.http.traffic import REQUEST_ID, Trace, Traffic
from tableside.serving.settings import ServerSettings

CLOSE = b"connection: close\r\n"
LINGER_S = 1.0


@dataclass(slots=True)
class OpenRequest:
    """A request whose response is not complete.

    since: when its first byte came, of time.perf_counter. trace: who asked. asked: what the door is asked;
    None: it goes through ASGI. body: of what the door is asked, until it is. turn: None where it needs no
    slot. is_whole: its body is here. shed: the refusal that it gets once its body was read. status: of its
    response; 0: it has none yet.
    """

    hold: Hold
    protocol: str
    since: float
    trace: Trace
    asked: InferTarget | None = None
    body: bytes | memoryview = b""
    turn: Turn | WholeTurn | None = None
    is_started: bool = False
    is_whole: bool = False
    shed: ApiError | None = None
    status: int = 0

    async def pass_on(self, app: ASGI3Application, scope: Any, receive: Any, send: Any) -> None:
        """ASGI: answers by `app`, and notes the status on the way."""

        async def noting(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                if self.trace.request_id is not None:
                    headers = [*message.get("headers", ()), (REQUEST_ID, self.trace.request_id)]
                    message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, noting)

    def end(self, traffic: Traffic, status: int) -> None:
        """Lets go of what it holds, and counts it. status: 0: its client left before it had the whole
        response."""
        self.hold.release()
        self.body = b""
        if self.turn is not None:
            self.turn.end()
        traffic.ended(self.protocol, status, self.since, self.trace)


class RefusingProtocol(HttpToolsProtocol):
    """A connection's deadline, its requests whose responses are to come, and the end of it. The first
    three are the worker's."""

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
        """Lets go of bodies that nobody reads any more. This object is in cycles, and may live until those
        are looked for."""
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
        """Looks again after write_timeout_s. A slow client has read some of the response by then, one that
        is gone nothing."""
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
        """Sets the deadline by which a part of the request must be here."""
        self._deadline.set(seconds, self._time_out, what, seconds)

    def _time_out(self, what: str, seconds: float) -> None:
        self._refuse(408, f"{what} did not arrive within {seconds:g} s; send the request in one go")

    def _refuse(self, status: int, message: str) -> None:
        """Answers in place of the application and closes. Once the application has begun to answer, it
        only closes."""
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
        """Sends the last answer of this connection, reads what still comes for a moment, and closes."""
        self.transport.write(answer)
        self._held_back.take()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)


def _last_answer(status: int, message: str) -> bytes:
    """The bytes of an error response behind which the connection is closed."""
    allow = ((b"allow", b"GET, HEAD, POST"),) if status == 405 else ()
    response = error_response(ApiError(status, ErrorKind.BAD_REQUEST, message, headers=allow))
    return b"".join([response_head(response), CLOSE, b"\r\n", *response.parts])
