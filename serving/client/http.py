"""HTTP/1.1 for both transports: the bytes of a request, and a reader of responses. The parser is httptools (llhttp).

The parser reads a response's head. A body whose length is known then goes from the socket straight into the memory in which its
vectors are handed out. Any other body (chunked, or up to the connection's end) passes through the parser.
"""

import select
from base64 import b64encode
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httptools
import numpy as np

from tableside.serving import VERSION
from tableside.serving.client.messages import Request, Response

_HEAD_LIMIT = 1 << 16
_UPFRONT_LIMIT = 1 << 30  # a longer body takes memory only as it comes
_ALIGNMENT = 16
_BINARY = b"Content-Type: application/octet-stream\r\n\r\n"


@dataclass(frozen=True)
class Address:
    """Where a server is. lines: what every request's head says behind its first line."""

    base_url: str
    host: str
    port: int
    is_tls: bool
    prefix: str
    lines: bytes

    @classmethod
    def parse(cls, base_url: str) -> "Address":
        """ValueError: this is no http or https URL."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base_url is {base_url!r}; expected http://HOST:PORT or https://HOST:PORT")
        is_tls = url.scheme == "https"
        lines = f"Host: {url.netloc.rpartition('@')[2]}\r\nUser-Agent: tableside/{VERSION}\r\n"
        if url.username is not None:
            secret = b64encode(f"{unquote(url.username)}:{unquote(url.password or '')}".encode()).decode()
            lines += f"Authorization: Basic {secret}\r\n"
        prefix = quote(url.path.rstrip("/"), safe="/%")
        return cls(base_url, url.hostname, url.port or (443 if is_tls else 80), is_tls, prefix, lines.encode("ascii"))

    def head(self, request: Request) -> bytes:
        """The head of a request, up to its body."""
        first = f"{request.method} {self.prefix}{request.path} HTTP/1.1\r\n".encode("ascii")
        if not request.parts:
            return first + self.lines + b"\r\n"
        numbers = request.json_bytes or 0, sum(map(len, request.parts))
        return first + self.lines + b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n" % numbers + _BINARY


class _Message:
    """What the parser has found in a response."""

    def __init__(self) -> None:
        self.length: int | None = None
        self.json_bytes: int | None = None
        self.encoding = b""
        self.is_coded = False
        self.is_complete = False
        self.chunks: list[bytes] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length":
            self.length = int(value)
        elif name == b"inference-header-content-length":
            self.json_bytes = int(value)
        elif name == b"transfer-encoding":
            self.is_coded = True
        elif name == b"content-encoding":
            self.encoding = value

    def on_body(self, body: bytes) -> None:
        self.chunks.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


class ResponseReader:
    """Reads the responses of one connection, one after another.

    The transport writes what it receives to `buffer()`, tells how much by `take`, and says by `end` that the server closed.
    ConnectionError: what comes is no response, or not the whole of one.
    """

    def __init__(self) -> None:
        self._scratch = bytearray(_HEAD_LIMIT)
        self._view = memoryview(self._scratch)
        self.begin()

    def begin(self) -> None:
        """Waits for a new response."""
        self._message = _Message()
        self._parser: Any = None
        self._filled = 0
        self._body: memoryview | None = None
        self._missing = 0

    def buffer(self) -> memoryview:
        """Where the next bytes go."""
        if self._body is not None:
            return self._body[-self._missing :]
        return self._view[self._filled :]

    def take(self, count: int) -> Response | None:
        """`count` bytes have come. The response, where that was its last one."""
        if self._body is not None:
            self._missing -= count
            return None if self._missing else self._response(self._body, False)
        if self._parser is not None:
            return self._feed(count)
        self._filled += count
        return self._read_head()

    def end(self) -> Response:
        """The response, where the end of the connection ends it."""
        message = self._message
        if self._parser is not None and self._body is None and message.length is None and not message.is_coded:
            return self._response(memoryview(bytearray().join(message.chunks)), True)
        raise ConnectionResetError("the connection was closed before the response was complete")

    def _read_head(self) -> Response | None:
        while (end := self._scratch.find(b"\r\n\r\n", 0, self._filled) + 4) >= 4:
            self._parser = httptools.HttpResponseParser(self._message)
            self._parse(self._view[:end])
            rest = self._filled - end
            if self._parser.get_status_code() >= 200:
                return self._begin_body(end, rest)
            self._scratch[:rest] = self._scratch[end : self._filled]  # 100 Continue and its like; the response is to come
            self.begin()
            self._filled = rest
        if self._filled == _HEAD_LIMIT:
            raise ConnectionAbortedError(f"the response's head has more than {_HEAD_LIMIT} bytes")
        return None

    def _begin_body(self, end: int, rest: int) -> Response | None:
        message = self._message
        if message.encoding not in (b"", b"identity"):
            raise ConnectionAbortedError(f"the response's content-encoding is {message.encoding!r}, which was not asked for")
        if message.is_complete:  # it has no body
            return self._response(memoryview(b""), rest > 0)
        if message.length is None or message.is_coded or message.length > _UPFRONT_LIMIT:
            self._scratch[:rest] = self._scratch[end : self._filled]
            self._filled = 0
            return self._feed(rest) if rest else None
        length = message.length
        start = -(message.json_bytes or 0) % _ALIGNMENT
        self._body = memoryview(np.empty(start + length, np.uint8))[start:]  # type: ignore[arg-type]
        here = min(rest, length)
        self._body[:here] = self._view[end : end + here]
        self._missing = length - here
        return None if self._missing else self._response(self._body, rest > length)

    def _feed(self, count: int) -> Response | None:
        """A part of a body that the parser reads."""
        self._parse(self._view[:count])
        if not self._message.is_complete:
            return None
        return self._response(memoryview(bytearray().join(self._message.chunks)), False)

    def _parse(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ValueError) as error:
            raise ConnectionAbortedError(f"what came is no HTTP/1.1 response ({error})") from error

    def _response(self, content: memoryview, is_last: bool) -> Response:
        parser = self._parser
        is_last = is_last or not parser.should_keep_alive()
        return Response(parser.get_status_code(), content, self._message.json_bytes, is_last)


class Watch:
    """Says whether a connection that nobody uses can be read: then the server has closed it, or broken the protocol."""

    def __init__(self, descriptor: int) -> None:
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def is_quiet(self) -> bool:
        return not self._poll.poll(0)
