"""uvicorn's HTTP protocol with limits.

    limited                                 setting                answer
    request line and headers                max_header_bytes       431, close
    a body's declared or received length    max_body_bytes         413, close (framing included: twice that)
    bytes that all requests hold            max_in_flight_bytes    503, close
    first byte of a request to its headers  header_timeout_s       408, close
    a connection that sent no request yet   header_timeout_s       close
    a connection between two requests       idle_timeout_s         close
    headers to the end of the body          body_timeout_s         408, close
    connections of this worker              max_connections        close the longest idle one, else 503, close
    a response that is not read             write_timeout_s        reset
    another server's Host, another site     allowed_hosts          403, close

After a refusal the connection reads on for a moment, so a client that still sends gets the answer, no reset.
"""

import asyncio
import functools
import time
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tableside.serving.errors import ApiError
from tableside.serving.executors.admission import Bytes, Hold, Slices, Slots, WholeTurn
from tableside.serving.http.connection.heads import Heads, body_bytes_of, head_of
from tableside.serving.http.connection.held_back import TURN_S, next_piece
from tableside.serving.http.connection.parser import ParsingProtocol
from tableside.serving.http.connection.refusals import OpenRequest
from tableside.serving.http.door import Door, DoorCycle
from tableside.serving.http.origins import Origins
from tableside.serving.settings import ServerSettings

IDLE_S = 0.1  # without a request, after which a connection may be closed for another one
_BUFFER_BYTES, _HEAD_BYTES = 256 << 10, 4 << 10


def limited_protocol(
    settings: ServerSettings, in_flight: Bytes, slots: Slots, slices: Slices, door: Door
) -> type[asyncio.Protocol]:
    """Returns the protocol class with these limits, for uvicorn's Config(http=...)."""
    common = {"limits": settings, "in_flight": in_flight, "slots": slots, "slices": slices, "door": door}
    common |= {"heads": Heads(), "origins": Origins.of(settings), "idle": {}}
    protocol = type("LimitedProtocol", (_LimitedProtocol,), common)
    reader = {"protocol": protocol, "buffer": memoryview(bytearray(_BUFFER_BYTES))}
    return cast(type[asyncio.Protocol], type("Reader", (_Reader,), reader))


class _Reader(asyncio.BufferedProtocol):
    """Reads a connection through the worker's one buffer, which saves a copy of each body. While all slots
    are taken it reads only the head of a new request; the body stays in the kernel."""

    protocol: "type[_LimitedProtocol]"
    buffer: memoryview

    def __init__(self, **options: Any) -> None:
        self._http = http = self.protocol(**options)
        for name in ("connection_made", "connection_lost", "eof_received", "pause_writing", "resume_writing"):
            setattr(self, name, getattr(http, name))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer if self._http.takes_all else self.buffer[:_HEAD_BYTES]

    def buffer_updated(self, count: int) -> None:
        self._http.data_received(self.buffer[:count])


class _LimitedProtocol(ParsingProtocol):
    """One connection: what it reads and how long it stays. The attributes are the worker's."""

    heads: Heads

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._is_over = not self._close_an_idle_one()
        self._traffic.connections = len(self.connections)
        self.idle[self] = self.loop.time()
        self._deadline.set(self.limits.header_timeout_s, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.pop(self, None)
        super().connection_lost(exc)
        self._traffic.connections = len(self.connections)

    def _close_an_idle_one(self) -> bool:
        """Closes the longest idle connection. False: none is idle for IDLE_S."""
        longest = next(iter(self.idle), None)
        if longest is None or self.loop.time() - self.idle[longest] < IDLE_S:
            return False
        del self.idle[longest]
        self.connections.discard(longest)
        longest.transport.close()
        return True

    @property
    def takes_all(self) -> bool:
        """Whether to read all bytes: a slot is free, or a started body is incomplete."""
        last = self._open[-1] if self._open else None
        return not self.slots.is_full or (last is not None and last.is_started and not last.is_whole)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._held_back:
            self.loop.call_soon(self._go_on)
        if not self._refused and self.cycle.response_complete and not self._in_headers:
            self._rest()

    def _rest(self) -> None:
        """Marks the connection idle: it closes after idle_timeout_s, or to make room."""
        self.idle[self] = self.loop.time()
        self._deadline.set(self.limits.idle_timeout_s, self.transport.close)

    def data_received(self, data: "bytes | memoryview") -> None:
        if self._refused:
            return
        head = b""
        if self._is_between and not self._open and (head := head_of(data)) and self._take_known(head, data):
            return
        self._take(data)
        if self._refused or not head:
            return
        form, body_bytes = body_bytes_of(head)
        is_alone = self._is_between and self._body_bytes == len(data) - len(head) == body_bytes
        if is_alone and self._plain is not None:
            self.heads.learn(form, self._plain)

    def _take(self, data: "bytes | memoryview") -> None:
        """Parses bytes in pieces until a request waits for its answer or the turn is over."""
        data, began = memoryview(data), time.perf_counter()
        if self._held_back:  # it comes first
            self._hold_back(data)
            return
        while data and not self._refused:
            if self._open and self._open[-1].is_whole:
                self._hold_back(data)  # until it is answered
                return
            left = self._declared_body - self._body_bytes if self._declared_body else 0
            size = next_piece(data, self._is_between, self._in_headers, left)
            self._take_piece(data[:size])
            data = data[size:]
            if data and not self._refused and time.perf_counter() - began > TURN_S:
                self._hold_back(data)
                self.loop.call_soon(self._go_on)
                return

    def _hold_back(self, data: memoryview) -> None:
        try:
            self._held_back.put(data)
        except ApiError as error:
            self._refuse(error.status, error.message)

    def _go_on(self) -> None:
        if self._held_back and not self.transport.is_closing():
            self._take(self._held_back.take())

    def _take_piece(self, data: memoryview) -> None:
        self._completed = False
        self._received_bytes += len(data)
        self._parse(data)
        if self._refused:
            return
        if not self._in_headers:
            if self._received_bytes > self.limits.max_header_bytes + 2 * self.limits.max_body_bytes:
                self._refuse_body(self._received_bytes)  # chunk sizes and trailers count too
            if not self._deadline.is_set and (self.cycle is None or self.cycle.response_complete):
                self._rest()  # blank lines between requests are no request
            return
        if not self._completed:  # else most of it was requests before, pipelined
            self._header_bytes += len(data)
        if self._header_bytes > self.limits.max_header_bytes:
            self._refuse_headers()

    def _take_known(self, head: bytes, data: "bytes | memoryview") -> bool:
        """Begins a whole request with a known head. False: leave it to the parser."""
        form, body_bytes = body_bytes_of(head)
        known = self.heads.get(form)
        if known is None or not 0 < body_bytes <= self.limits.max_body_bytes:
            return False
        if len(data) != len(head) + body_bytes:
            return False
        if self.slots.is_full or self._is_over or self.transport.is_closing():
            return False
        hold = Hold(self.in_flight)
        try:
            hold.grow(body_bytes)
        except ApiError:
            return False
        self.idle.pop(self, None)
        self._deadline.clear()
        body, turn, now = memoryview(data)[len(head) :], WholeTurn(self.slots), time.perf_counter()
        request = OpenRequest(
            hold,
            known.asked.protocol,
            now,
            known.trace,
            known.asked,
            body,
            turn,
            is_started=True,
            is_whole=True,
        )
        self._open.append(request)
        self._traffic.began()
        self.cycle = cycle = cast(RequestResponseCycle, DoorCycle(keep_alive=True))
        cycle.more_body = False
        self.slices.run(functools.partial(self._answer, request, cycle), self._is_patient)
        if request.body is body:  # it waits for a slice, and what comes next is read into the same buffer
            request.body = bytes(body)
        return True
