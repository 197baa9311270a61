"""uvicorn's HTTP protocol with the limits that it lacks: on headers, bodies, slow clients and numbers of connections.

    what                                    limit                  answer
    request line and headers                max_header_bytes       431, close
    a body's declared or received length    max_body_bytes         413, close (with chunk sizes and trailers: twice that)
    first byte of a request to its headers  header_timeout_s       408, close (no byte at all: idle_timeout_s, close)
    headers to the end of the body          body_timeout_s         408, close
    connections of this worker              max_connections        503, close
    a response that is not read             write_timeout_s        reset

A refused connection is read on for a moment before it is closed, so that a client that is still sending gets the answer and
not a reset.
"""

import asyncio
import re
import socket
import struct
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from serving.settings import ServerSettings

LINGER_S = 1.0


def limited_protocol(settings: ServerSettings) -> type[HttpToolsProtocol]:
    """The protocol class with these limits, for uvicorn's Config(http=...)."""
    return type("LimitedProtocol", (_LimitedProtocol,), {"limits": settings})


_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


def _without_upgrade(data: bytes) -> bytes:
    """The first bytes of a request without an Upgrade header, which a server may ignore: we speak no other protocol.

    The parser would take what follows for that protocol, so that a POST lost its body (Java's client offers h2c by default).
    """
    end = data.find(b"\r\n\r\n")
    head = data[: end if end >= 0 else len(data)]
    return _UPGRADE.sub(b"", head) + data[len(head) :] if b"pgrade" in head else data


class _LimitedProtocol(HttpToolsProtocol):
    limits: ServerSettings

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._body_bytes = 0
        self._received_bytes = 0
        self._in_headers = False
        self._in_body = False
        self._completed = False
        self._refused = False
        self._is_over = False

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_over = len(self.connections) > self.limits.max_connections
        self._arm(self.limits.idle_timeout_s, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        began_in_headers, self._completed = self._in_headers, False
        self._received_bytes += len(data)
        if not self._in_body:
            data = _without_upgrade(data)
        super().data_received(data)
        if self._refused:
            return
        if not self._in_headers:
            if self._received_bytes > self.limits.max_header_bytes + 2 * self.limits.max_body_bytes:
                self._refuse_body(self._received_bytes)  # chunk sizes and trailers count too
            if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
                self._arm(self.limits.idle_timeout_s, self.transport.close)  # blank lines between requests are no request
            return
        if began_in_headers or not self._completed:  # else most of it was the request before, pipelined
            self._header_bytes += len(data)
        if self._header_bytes > self.limits.max_header_bytes:
            self._refuse_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    # ---- the parser's callbacks ----

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes, self._body_bytes, self._received_bytes = True, 0, 0, 0
        self._arm(self.limits.header_timeout_s, self._time_out, "the headers", self.limits.header_timeout_s)

    def on_headers_complete(self) -> None:
        self._in_headers, self._in_body = False, True
        self._disarm()
        if self._refused:
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._refuse_headers()
        elif self._is_over:
            self._refuse(
                503,
                f"this worker has {self.limits.max_connections} connections, its limit (max_connections); try again",
            )
        elif self._declared_bytes() > self.limits.max_body_bytes:
            self._refuse_body(self._declared_bytes())
        else:
            super().on_headers_complete()
            self._arm(self.limits.body_timeout_s, self._time_out, "the body", self.limits.body_timeout_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:
            super().on_header(name, value)
            return
        self._header_bytes += len(name) + len(value) + 4  # a trailer: counted, and not taken for a header
        if self._header_bytes > self.limits.max_header_bytes:
            self._refuse_headers()

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self.limits.max_body_bytes:
            self._refuse_body(self._body_bytes)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._completed, self._in_body = True, False
        self._disarm()
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    # ---- refusing ----

    def _watch_writing(self, unsent: int) -> None:
        """Looks again after write_timeout_s: a slow reader has taken some of the response by then, one that is gone nothing."""
        self._write_deadline = self.loop.call_later(self.limits.write_timeout_s, self._check_writing, unsent)

    def _check_writing(self, unsent: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < unsent:
            self._watch_writing(left)
        else:
            self._reset()

    def _reset(self) -> None:
        """Closes with a reset, so that the kernel too drops what the client does not read."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _declared_bytes(self) -> int:
        for name, value in self.headers:
            if name == b"content-length" and value.isdigit():
                return int(value)
        return 0

    def _refuse_headers(self) -> None:
        self._refuse(
            431,
            f"the request line and headers exceed {self.limits.max_header_bytes:,} bytes, the limit (max_header_bytes)",
        )

    def _refuse_body(self, size: int) -> None:
        self._refuse(
            413,
            f"the body has {size:,} bytes or more; the limit is {self.limits.max_body_bytes:,} (max_body_bytes)",
        )

    def _time_out(self, what: str, seconds: float) -> None:
        self._refuse(408, f"{what} did not arrive within {seconds:g} s; send the request in one go")

    def _refuse(self, status: int, message: str) -> None:
        """Answers in place of the application and closes. Once the application has begun to answer, only closes."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._disarm()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:  # a whole request that came before, pipelined: it is answered, and then this closes
                cycle.keep_alive = False
                return
            begun = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
            if begun:
                self.transport.close()
                return
        body = orjson.dumps({"error": message})
        lines = (
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
            b"",
            body,
        )
        self.transport.write(STATUS_LINE[status] + b"\r\n".join(lines))
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _arm(self, seconds: float, callback: Any, *arguments: Any) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(seconds, callback, *arguments)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
