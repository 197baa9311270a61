"""uvicorn's HTTP protocol with the limits that it lacks: on headers, bodies, slow clients and numbers of connections.

    what                                    limit                  answer
    request line and headers                max_header_bytes       431, close
    a body's declared or received length    max_body_bytes         413, close (with chunk sizes and trailers: twice that)
    bytes that all requests hold            max_in_flight_bytes    503, close
    first byte of a request to its headers  header_timeout_s       408, close
    a connection that sent no request yet   header_timeout_s       close
    a connection between two requests       idle_timeout_s         close
    headers to the end of the body          body_timeout_s         408, close
    connections of this worker              max_connections        the one that is idle for longest is closed; none is: 503, close
    a response that is not read             write_timeout_s        reset
    another server's Host, another site     allowed_hosts          403, close

After a refusal the connection is read for a moment more before it is closed. So a client that is still sending gets the answer
and not a reset.

Where a request ends must be beyond doubt, or bytes of one request become another. The parser (llhttp, strict) refuses two
lengths, and a length beside chunks. A transfer encoding other than chunked, and any of HTTP/1.0, is refused here. A client may
offer to upgrade the connection (Java's offers h2c by default), and a server may ignore that. But the offer makes the parser take
what follows for another protocol. So such a request is given to a new parser, its framing headers first, without the offer.
"""

import asyncio
import functools
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import httptools
import orjson
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tableside.serving import metrics
from tableside.serving.admission import Bytes, Hold, Slices, Slots, Turn, WholeTurn
from tableside.serving.errors import ApiError
from tableside.serving.http.asgi import HOLD, JSON_TYPE, retry_after
from tableside.serving.http.door import READS, Asked, Door, DoorCycle
from tableside.serving.http.heads import Heads, KnownHead, head_of
from tableside.serving.http.held_back import TURN_S, HeldBack, HoldingFlow, next_piece
from tableside.serving.http.late_timer import LateTimer
from tableside.serving.http.origins import READS as ORIGINS_READ
from tableside.serving.http.origins import Origins
from tableside.serving.http.traffic import REQUEST_ID, TRACED, V2, Trace, protocol_of, trace_of
from tableside.serving.settings import ServerSettings

LINGER_S = 1.0
IDLE_S = 0.1  # without a request, after which a connection may be closed for another one
_FRAMING = (b"content-length", b"transfer-encoding")
_WATCHED = frozenset((*_FRAMING, *READS, *TRACED, *ORIGINS_READ))
_CLOSE = b"connection: close\r\n"
_BUFFER_BYTES, _HEAD_BYTES, _SMALL_PART = 256 << 10, 4 << 10, 4 << 10


def limited_protocol(
    settings: ServerSettings, in_flight: Bytes, slots: Slots, slices: Slices, door: Door
) -> type[asyncio.Protocol]:
    """The protocol class with these limits, for uvicorn's Config(http=...). The others are the worker's."""
    common = {"limits": settings, "in_flight": in_flight, "slots": slots, "slices": slices, "door": door, "idle": {}}
    common |= {"heads": Heads(), "origins": Origins.of(settings)}
    protocol = type("LimitedProtocol", (_LimitedProtocol,), common)
    reader = {"protocol": protocol, "buffer": memoryview(bytearray(_BUFFER_BYTES))}
    return cast(type[asyncio.Protocol], type("Reader", (_Reader,), reader))


class _Reader(asyncio.BufferedProtocol):
    """Reads a connection for its `_LimitedProtocol` through one buffer that the worker has, which saves a copy of each body.

    Where requests must wait for slots only the head of a new one is read. Its body stays in the kernel.
    """

    protocol: "type[_LimitedProtocol]"
    buffer: memoryview

    def __init__(self, **options: Any) -> None:
        self._http = self.protocol(**options)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._http.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer if self._http.takes_all else self.buffer[:_HEAD_BYTES]

    def buffer_updated(self, count: int) -> None:
        self._http.data_received(self.buffer[:count])

    def eof_received(self) -> None:
        self._http.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()


@dataclass(slots=True)
class _Request:
    """A request whose response is not complete.

    since: when its first byte came, of time.perf_counter. trace: who asked. asked: what the door is asked; None: it goes through
    ASGI. body: of what the door is asked, until it is. turn: None where it needs no slot. is_whole: its body is here. shed: the
    refusal that it gets once its body was read. status: of its response; 0: it has none yet.
    """

    hold: Hold
    protocol: str
    since: float
    trace: Trace
    asked: Asked | None = None
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
                    message = {**message, "headers": [*message.get("headers", ()), (REQUEST_ID, self.trace.request_id)]}
            await send(message)

        await app(scope, receive, noting)


class _LimitedProtocol(HttpToolsProtocol):
    """One connection. The attributes below are the worker's, set by `limited_protocol`."""

    limits: ServerSettings
    in_flight: Bytes
    slots: Slots
    slices: Slices
    door: Door
    heads: Heads
    origins: Origins
    idle: "dict[_LimitedProtocol, float]"  # connections of this worker without a request, since when; longest first

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._traffic = self.door.traffic
        self._deadline = LateTimer(self.loop, self.limits.header_timeout_s)  # the nearest deadline that there is
        self._write_deadline: asyncio.TimerHandle | None = None
        self._header_bytes = 0  # received for headers that are not complete, and for trailers
        self._watched: list[tuple[bytes, bytes]] = []  # headers that say how the request is read
        self._named_bytes = 0  # of the names and values of all headers
        self._body_bytes = self._declared_body = 0
        self._received_bytes = 0
        self._in_headers = False
        self._completed = False
        self._refused = False
        self._is_over = False
        self._last_words: bytes | None = None  # a refusal that waits for the answers before it
        self._offers_upgrade = False  # the parser takes what follows the headers for another protocol
        self._is_said_again = False  # a new parser is given the framing headers that came before
        self._is_between = True  # the parser has read whole requests, and nothing of the next one
        self._plain: KnownHead | None = None  # what the head that was read last means, where it can be learned
        self._open: deque[_Request] = deque()  # requests whose responses are to come, in order
        self._parts: list[bytes | bytearray] = []  # of the body that is being read
        self._unsent: list[_Request] = []  # whose responses the client has not read yet
        self._since = 0.0  # when the first byte of the request that is read came
        self._door_tasks: set[asyncio.Task[None]] = set()

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = flow = HoldingFlow(transport)
        self._held_back = HeldBack(flow, self.in_flight)
        if len(self.connections) > self.limits.max_connections:
            self._is_over = not self._close_an_idle_one()
        self._traffic.connections = len(self.connections)
        self.idle[self] = self.loop.time()
        self._deadline.set(self.limits.header_timeout_s, transport.close)

    def _close_an_idle_one(self) -> bool:
        """Closes the connection that has had no request for longest. False: none has been idle for more than a moment."""
        longest = next(iter(self.idle), None)
        if longest is None or self.loop.time() - self.idle[longest] < IDLE_S:
            return False
        del self.idle[longest]
        self.connections.discard(longest)
        longest.transport.close()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.end()
        self._held_back.drop()
        self.idle.pop(self, None)
        for request in self._open:
            self._end_request(request, request.status if self._refused else 0)
        for request in self._unsent:
            self._end_request(request, 0)
        if self._write_deadline is not None:
            self._write_deadline.cancel()
        super().connection_lost(exc)
        self._forget_bodies()
        self._traffic.connections = len(self.connections)

    def _forget_bodies(self) -> None:
        """Lets go of bodies that nobody reads any more. This object is in cycles, and may live until those are looked for."""
        self._parts = []
        if self.cycle is not None:
            self.cycle.body = b""  # type: ignore[assignment]

    @property
    def takes_all(self) -> bool:
        """Whether to read as much as there is: the rest of a body that is wanted, or anything where no request has to wait."""
        return not self.slots.is_full or (bool(self._open) and self._open[-1].is_started and not self._open[-1].is_whole)

    def data_received(self, data: "bytes | memoryview") -> None:
        if self._refused:
            return
        head = b""
        if self._is_between and not self._open and (head := head_of(data)) and self._take_known(head, data):
            return
        self._take(data)
        if self._refused or not head:
            return
        is_alone = self._is_between and self._body_bytes == len(data) - len(head)
        if is_alone and (known := self._plain) is not None and known.body_bytes == self._body_bytes:
            self.heads.learn(head, known)

    def _take(self, data: "bytes | memoryview") -> None:
        """Parses what was read, piece by piece, up to a request that waits for its answer, or as long as this turn lasts."""
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
        """Parses what was held back. A request that still waits for its answer has the rest held back again."""
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
        """Begins a whole request whose head is known. False: it is another, or is not taken on as it is; the parser reads it."""
        known = self.heads.get(head)
        if known is None or len(data) != len(head) + known.body_bytes:
            return False
        if self.slots.is_full or self._is_over or self.transport.is_closing():
            return False
        hold = Hold(self.in_flight)
        try:
            hold.grow(known.body_bytes)
        except ApiError:
            return False
        self.idle.pop(self, None)
        self._deadline.clear()
        body, turn = memoryview(data)[len(head) :], WholeTurn(self.slots)
        request = _Request(hold, V2, time.perf_counter(), known.trace, known.asked, body, turn, is_started=True, is_whole=True)
        self._open.append(request)
        self._traffic.began()
        self.cycle = cycle = cast(RequestResponseCycle, DoorCycle(keep_alive=True))
        cycle.more_body = False
        self.slices.run(functools.partial(self._answer, request, cycle))
        if request.body is body:  # it waits for a slice, and what comes next is read into the same buffer
            request.body = bytes(body)
        return True

    def _parse(self, data: "bytes | memoryview") -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if self._refused:
                    return
                data = self._head_without_offer() + bytes(data[offer.args[0] :])
            except httptools.HttpParserError:
                self.send_400_response("the request is not valid HTTP/1.1, or says in two ways where it ends")
                return

    def _head_without_offer(self) -> bytes:
        """Makes a new parser; returns what it must know of the request: method, version and framing headers."""
        version, method = self.parser.get_http_version().encode(), self.parser.get_method()
        lines = [name + b": " + value for name, value in self.headers if name in _FRAMING]
        tokens = [t.strip().lower() for name, value in self.headers if name == b"connection" for t in value.split(b",")]
        lines += [b"connection: " + token for token in tokens if token in (b"close", b"keep-alive")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does: pipelined after the last one
        self._offers_upgrade, self._is_said_again = False, True
        return b"\r\n".join([method + b" / HTTP/" + version, *lines, b"", b""])

    def _rest(self) -> None:
        """The connection has no request. It may stay for a while, and is closed where another connection needs its place."""
        self.idle[self] = self.loop.time()
        self._deadline.set(self.limits.idle_timeout_s, self.transport.close)

    def on_response_complete(self) -> None:
        request = self._open.popleft()
        if request.turn is not None:
            request.turn.end()
        if self.flow.write_paused:
            self._unsent.append(request)
        else:
            self._end_request(request, request.status or 500)
        self.server_state.total_requests += 1
        if self.cycle.response_complete:
            self._forget_bodies()  # one that the application did not read would stay as long as the connection
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self._held_back:
                self.loop.call_soon(self._go_on)
            if self.pipeline:
                self.loop.call_soon(self._start_next, *self.pipeline.pop())
            elif self._last_words is None and self.cycle.response_complete and not self._in_headers:
                self._rest()
        if self._last_words is not None and not self._open:
            self._end_with(self._last_words)

    def _end_request(self, request: _Request, status: int) -> None:
        """Lets go of what a request holds, and counts it. status: 0: its client left before it had the whole response."""
        request.hold.release()
        request.body = b""
        if request.turn is not None:
            request.turn.end()
        self._traffic.ended(request.protocol, status, request.since, request.trace)

    def _start_next(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if self._open and not self.transport.is_closing():
            self._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        while self._unsent:
            self._end_request((request := self._unsent.pop()), request.status or 500)
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    # ---- the parser's callbacks ----

    def on_message_begin(self) -> None:
        if self._is_said_again:
            return
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._watched, self._named_bytes, self._since = [], 0, time.perf_counter()
        self._is_between, self._plain = False, None
        self.idle.pop(self, None)
        self._parts = []
        self._in_headers, self._header_bytes, self._body_bytes, self._received_bytes = True, 0, 0, 0
        self._declared_body = 0
        self._deadline.set(self.limits.header_timeout_s, self._time_out, "the headers", self.limits.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        if not self._is_said_again:
            super().on_url(url)

    def on_headers_complete(self) -> None:
        self._is_said_again = False
        if self._refused:
            return
        if self.parser.get_method() == b"CONNECT":
            self._refuse(405, "CONNECT: this server is no proxy")  # its Allow: `_plain_answer`
            return
        if self.parser.should_upgrade():
            self._offers_upgrade = True  # `_parse` goes on from here, with another parser
            return
        self._in_headers = False
        self._deadline.clear()
        if len(self.url) + self._named_bytes > self.limits.max_header_bytes:
            self._refuse_headers()
        elif self._is_over:
            self._refuse(
                503,
                f"this worker has {self.limits.max_connections} connections, its limit (max_connections); try again",
            )
        elif (declared := self._declared_bytes()) > self.limits.max_body_bytes:
            self._refuse_body(declared)
        elif (why := self.origins.refusal(self.parser.get_method(), self._watched)) is not None:
            self._refuse(403, why)
        elif not self._check_encoding():
            return
        else:
            self._declared_body = declared
            method = self.parser.get_method()
            asked = self.door.asks(method, self.url, self._watched)
            protocol = V2 if asked is not None else protocol_of(method, self.url)
            request = _Request(Hold(self.in_flight), protocol, self._since, trace_of(method, self.url, self._watched), asked)
            self._open.append(request)
            self._traffic.began()
            if asked is not None:
                self._ask_door()
                if self.cycle.keep_alive and declared and not (request.trace.request_id or request.trace.parent):
                    self._plain = KnownHead(asked, request.trace, declared)  # with an id of its own it would not come again
            else:
                self._ask_application(request)

    def _ask_application(self, request: _Request) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()  # makes the scope
        self.url, self.expect_100_continue = url, expects
        scope = cast(dict[str, Any], self.scope)
        self.headers = scope["headers"] = headers
        scope[HOLD] = request.hold
        super().on_headers_complete()

    def _ask_door(self) -> None:
        """As uvicorn does it: the request begins, or waits for those before it."""
        before = self.cycle
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        self.cycle = cast(RequestResponseCycle, DoorCycle(keep_alive))
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Begins the oldest request when it gets a slot. One without a body needs none: it is answered whatever the load."""
        request = self._open[0]
        if cycle.scope["method"] != "POST":
            self._begin(request, cycle, app)
            return
        begin = functools.partial(self._begin, request, cycle, app)
        shed = functools.partial(self._shed, request, cycle)
        turn = Turn(self.slots, begin, shed, lambda: request.is_whole)
        request.turn = turn  # known before it begins: it may end at once
        self.slots.enter(turn)
        if not request.is_started:
            self.flow.pause_reading()

    def _begin(self, request: _Request, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        request.is_started = True
        self.flow.resume_reading()
        if request.asked is None:
            super()._start_asgi_task(cycle, functools.partial(request.pass_on, app))
        elif request.is_whole:
            self.slices.run(functools.partial(self._answer, request, cycle))
        if not request.is_whole:
            self._deadline.set(self.limits.body_timeout_s, self._time_out, "the body", self.limits.body_timeout_s)

    def _answer(self, request: _Request, cycle: RequestResponseCycle) -> None:
        if not self.transport.is_closing() and request.asked is not None:
            body, request.body = request.body, b""
            self.door.answer(request.asked, body, request.hold, functools.partial(self._send, cycle))

    def _send(self, cycle: RequestResponseCycle, head: bytes, parts: Sequence[Any]) -> None:
        """Sends what the door answers, once the client has read enough of what came before."""
        if cycle.disconnected or self.transport.is_closing():
            return
        if self.flow.write_paused:
            self._door_tasks.add(task := self.loop.create_task(self._send_later(cycle, head, parts)))
            task.add_done_callback(self._door_tasks.discard)
            return
        cycle.response_started = cycle.response_complete = True
        answered = self._open[0]
        answered.status = int(head[9:12])  # behind "HTTP/1.1 "
        if answered.trace.request_id is not None:
            head += b"%s: %s\r\n" % (REQUEST_ID, answered.trace.request_id)
        self.transport.writelines([head if cycle.keep_alive else head + _CLOSE, b"\r\n", *parts])
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    async def _send_later(self, cycle: RequestResponseCycle, head: bytes, parts: Sequence[Any]) -> None:
        await self.flow.drain()
        self._send(cycle, head, parts)

    def _shed(self, request: _Request, cycle: RequestResponseCycle, error: ApiError) -> None:
        """Refuses a request that waited. The rest of its body is dropped, then it is answered. The connection stays open."""
        metrics.refused(metrics.UNKNOWN, "http", error.kind)
        self.flow.resume_reading()
        if cycle.waiting_for_100_continue:  # its body does not come
            self._refuse(error.status, error.message)
            return
        request.shed = error
        request.hold.release()
        if request.is_whole:
            self._answer_shed(cycle, error)
        else:
            self._deadline.set(self.limits.body_timeout_s, self._time_out, "the body", self.limits.body_timeout_s)

    def _answer_shed(self, cycle: RequestResponseCycle, error: ApiError) -> None:
        cycle.response_started = cycle.response_complete = True
        self._open[0].status = error.status
        self.transport.write(_plain_answer(error.status, error.message, cycle.keep_alive, self._open[0].trace.request_id))
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def _check_encoding(self) -> bool:
        """Whether the parser reads the body as its headers say; refuses the request otherwise."""
        codings = [v.strip().lower() for n, v in self._watched if n == b"transfer-encoding"]
        if codings and codings != [b"chunked"]:
            self._refuse(501, "the transfer encoding is not chunked alone, which is the only one that this server reads")
        elif codings and self.parser.get_http_version() == "1.0":
            self._refuse(400, "a request of HTTP/1.0 has no transfer encoding; send it as HTTP/1.1")
        return not self._refused

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_said_again:
            return
        if self._in_headers:
            name = name.lower()
            self.headers.append((name, value))
            self._named_bytes += len(name) + len(value) + 4
            if name in _WATCHED:
                self._watched.append((name, value))
                self.expect_100_continue |= name == b"expect" and value.lower() == b"100-continue"
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
            return
        if not self._open or (request := self._open[-1]).shed is not None:
            return  # it was answered already, or will be refused
        try:
            request.hold.grow(len(body))
        except ApiError as error:
            self._refuse(error.status, error.message)
            return
        if self._parts and len(body) < _SMALL_PART:  # one by one they would take many times their bytes
            if not isinstance(last := self._parts[-1], bytearray):
                self._parts.append(last := bytearray())
            last += body
        else:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        if self._offers_upgrade:
            return
        self._completed = self._is_between = True
        self._deadline.clear()
        if self._refused:
            return
        if self._open:  # else it was answered before its body was here
            self._open[-1].is_whole = True
            if (error := self._open[-1].shed) is not None:
                self._answer_shed(self.cycle, error)
                return
        # The application gets the body whole, and as it is: uvicorn would copy it twice more.
        body = bytes(self._parts[0]) if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = []
        if self._open and (request := self._open[-1]).asked is not None:
            request.body, self.cycle.more_body = body, False
            if request.is_started:
                self.slices.run(functools.partial(self._answer, request, self.cycle))
            return
        if self.cycle.response_complete:
            return
        self.cycle.body = body  # type: ignore[assignment]
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    # ---- refusing ----

    def _watch_writing(self, unsent: int) -> None:
        """Looks again after write_timeout_s. A slow client has read some of the response by then, one that is gone nothing."""
        self._write_deadline = self.loop.call_later(self.limits.write_timeout_s, self._check_writing, unsent)

    def _check_writing(self, unsent: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < unsent:
            self._watch_writing(left)
        else:
            self._reset()

    def _reset(self) -> None:
        """Closes with a reset, so that the kernel as well drops what the client does not read."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _declared_bytes(self) -> int:
        for name, value in self._watched:
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
        """Answers in place of the application and closes. Once the application has begun to answer, it only closes."""
        if self._refused or self.transport.is_closing():
            return
        self._refused, self._parts = True, []
        self._deadline.clear()
        cycle = self.cycle
        is_open = bool(self._open) and not self._open[-1].is_whole  # else its headers are not complete, or it is none
        if is_open:
            self._open[-1].status = status
        else:
            self._traffic.refused(status, self._since)
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body or len(self._open) > 1:  # those before it are answered first, in order
                if cycle.more_body:
                    self._give_up_last()
                self._last_words = _plain_answer(status, message, keep_alive=False)
                return
            begun = cycle.response_started
            cycle.disconnected = True
            cycle.message_event.set()
            if begun:
                self.transport.close()
                return
        self._end_with(_plain_answer(status, message, keep_alive=False))

    def _end_with(self, answer: bytes) -> None:
        """Sends the last answer of this connection, reads what still comes for a moment, and closes."""
        self.transport.write(answer)
        self._held_back.take()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _give_up_last(self) -> None:
        """Forgets the request that is being read. It has not begun, as others before it are under way."""
        self.pipeline.popleft()
        request = self._open.pop()
        self._end_request(request, request.status)


def _plain_answer(status: int, message: str, keep_alive: bool, request_id: bytes | None = None) -> bytes:
    """The bytes of an error response that comes from the connection and not from the application."""
    body = orjson.dumps({"error": message})
    headers = [JSON_TYPE, (b"content-length", b"%d" % len(body)), *retry_after(status)]
    if status == 405:
        headers.append((b"allow", b"GET, HEAD, POST"))
    if request_id is not None:
        headers.append((REQUEST_ID, request_id))
    if not keep_alive:
        headers.append((b"connection", b"close"))
    return STATUS_LINE[status] + b"\r\n".join([*(name + b": " + value for name, value in headers), b"", body])
