"""The parser's callbacks. llhttp (strict) refuses two lengths, and a length beside chunks; this file refuses
transfer encodings other than chunked, and any with HTTP/1.0: otherwise bytes of one request could become
another. An offer to upgrade (Java offers h2c) is ignored, but makes the parser take what follows for another
protocol. So a new parser gets that request's framing headers without the offer."""

import functools
import time
from typing import Any

import httptools

from tableside.serving.errors import ApiError
from tableside.serving.executors.admission import Hold
from tableside.serving.http.connection.answering import AnsweringProtocol
from tableside.serving.http.connection.heads import KnownHead
from tableside.serving.http.connection.refusals import OpenRequest
from tableside.serving.http.door import READS
from tableside.serving.http.origins import READS as ORIGINS_READ
from tableside.serving.http.origins import Origins
from tableside.serving.http.traffic import TRACED, protocol_of, trace_of

_FRAMING = (b"content-length", b"transfer-encoding")
_WATCHED = frozenset((*_FRAMING, *READS, *TRACED, *ORIGINS_READ))
_SMALL_PART = 4 << 10


class ParsingProtocol(AnsweringProtocol):
    """Reads a connection's requests with llhttp. The attributes are the worker's."""

    origins: Origins
    idle: "dict[ParsingProtocol, float]"  # connections without a request, since when; longest first

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._header_bytes = 0  # received for headers that are not complete, and for trailers
        self._watched: list[tuple[bytes, bytes]] = []  # headers that say how the request is read
        self._named_bytes = 0  # of the names and values of all headers
        self._body_bytes = self._declared_body = 0
        self._received_bytes = 0
        self._completed = self._in_headers = False
        self._is_over = False  # one connection too many
        self._offers_upgrade = False  # the parser takes what follows the headers for another protocol
        self._is_said_again = False  # a new parser is given the framing headers that came before
        self._is_between = True  # the parser has read whole requests, and nothing of the next one
        self._plain: KnownHead | None = None  # what the last head means, where it can be learned

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
        """Makes a new parser; returns the method, version and framing headers for it."""
        version, method = self.parser.get_http_version().encode(), self.parser.get_method()
        lines = [name + b": " + value for name, value in self.headers if name in _FRAMING]
        said = b",".join(value for name, value in self.headers if name == b"connection").lower()
        tokens = [token.strip() for token in said.split(b",")]
        lines += [b"connection: " + token for token in tokens if token in (b"close", b"keep-alive")]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._offers_upgrade, self._is_said_again = False, True
        return b"\r\n".join([method + b" / HTTP/" + version, *lines, b"", b""])

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
        self._expect("the headers", self.limits.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        if not self._is_said_again:
            super().on_url(url)

    def on_headers_complete(self) -> None:
        self._is_said_again = False
        if self._refused:
            return
        if self.parser.get_method() == b"CONNECT":
            self._refuse(405, "CONNECT: this server is no proxy")  # its Allow: `_last_answer`
            return
        if self.parser.should_upgrade():
            self._offers_upgrade = True  # `_parse` goes on from here, with another parser
            return
        self._in_headers = False
        self._deadline.clear()
        method = self.parser.get_method()
        self._declared_body = declared = self._declared_bytes()
        if len(self.url) + self._named_bytes > self.limits.max_header_bytes:
            self._refuse_headers()
        elif self._is_over:
            most = self.limits.max_connections
            self._refuse(503, f"this worker has {most} connections, its limit (max_connections); try again")
        elif declared > self.limits.max_body_bytes:
            self._refuse_body(declared)
        elif (why := self.origins.refusal(method, self._watched)) is not None:
            self._refuse(403, why)
        elif self._check_encoding():
            self._hand_over(method)

    def _hand_over(self, method: bytes) -> None:
        asked = self.door.asks(method, self.url, self._watched)
        protocol = asked.protocol if asked is not None else protocol_of(method, self.url)
        trace = trace_of(method, self.url, self._watched)
        self._open.append(request := OpenRequest(Hold(self.in_flight), protocol, self._since, trace, asked))
        self._traffic.began()
        if asked is None:
            self._ask_application(request)
            return
        self._ask_door()
        if self.cycle.keep_alive and self._declared_body and not (trace.request_id or trace.parent):
            # with an id of its own it would not come again
            self._plain = KnownHead(asked, trace)

    def _declared_bytes(self) -> int:
        for name, value in self._watched:
            if name == b"content-length" and value.isdigit():
                return int(value)
        return 0

    def _check_encoding(self) -> bool:
        """Returns whether the parser reads this transfer encoding; else refuses the request."""
        codings = [v.strip().lower() for n, v in self._watched if n == b"transfer-encoding"]
        if codings and codings != [b"chunked"]:
            self._refuse(
                501,
                "the transfer encoding is not chunked alone, which is the only one that this server reads",
            )
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
                self.slices.run(functools.partial(self._answer, request, self.cycle), self._is_patient)
            return
        if self.cycle.response_complete:
            return
        self.cycle.body = body  # type: ignore[assignment]
        super().on_message_complete()
