"""HTTP/1.1 for both transports. httptools parses heads; bodies of known length go from the socket to their
final memory."""

import select
from typing import Any

import httptools
import numpy as np

from tableside.serving.client.messages import HttpResponse

_HEAD_LIMIT = 1 << 15  # what is read with a head is copied once more
_UPFRONT_LIMIT = 1 << 30  # a longer body takes memory only as it comes
_ALIGNMENT = 16


class ResponseReader:
    """Reads the responses of one connection. The transport writes to `buffer()`, then calls `take`; `end`
    when the server closed. ConnectionError: the response is invalid or incomplete."""

    def __init__(self) -> None:
        self._scratch = bytearray(_HEAD_LIMIT)
        self._view = memoryview(self._scratch)
        self.begin()

    def begin(self, most: int | None = None, into: memoryview | None = None) -> None:
        """Waits for a new response. most: bytes of its body; None: any. into: memory that a body of just its
        length is read to; it may be written in part where none comes."""
        self._most, self._into = most, into
        self._parser: Any = None
        self._filled = 0
        self._body: memoryview | None = None
        self._missing = self._fed = 0
        # What the parser has found.
        self._length: int | None = None
        self._json_bytes: int | None = None
        self._retry_after: float | None = None
        self._is_chunked = self._keeps_alive = self._is_complete = False
        self._encoding = b""
        self._chunks: list[bytes] = []

    def buffer(self) -> memoryview:
        """Returns the buffer for the next bytes. What comes behind a whole body does not go there."""
        if self._body is not None:
            return self._body[-self._missing :] if self._missing else self._view
        return self._view[self._filled :]

    def take(self, count: int) -> HttpResponse | None:
        """Takes `count` bytes from the buffer; returns the response once it is complete."""
        if self._body is not None:
            self._missing -= count
            return None if self._missing else self._response(self._body)
        if self._parser is not None:
            return self._feed(count)
        self._filled += count
        return self._read_head()

    def end(self) -> HttpResponse:
        """Returns the response that the connection's end completes."""
        if self._parser is not None and self._length is None and not self._is_chunked:
            return self._response(memoryview(bytearray().join(self._chunks)))
        raise ConnectionResetError("the connection was closed before the response was complete")

    def _read_head(self) -> HttpResponse | None:
        while (end := self._scratch.find(b"\r\n\r\n", 0, self._filled) + 4) >= 4:
            self._parser = httptools.HttpResponseParser(self)
            self._parse(self._view[:end])
            rest = self._filled - end
            if self._parser.get_status_code() >= 200:
                return self._begin_body(end, rest)
            # 100 Continue and its like; the response is to come
            self._scratch[:rest] = self._scratch[end : self._filled]
            self.begin(self._most, self._into)
            self._filled = rest
        if self._filled == _HEAD_LIMIT:
            raise ConnectionAbortedError(f"the response's head has more than {_HEAD_LIMIT} bytes")
        return None

    def _begin_body(self, end: int, rest: int) -> HttpResponse | None:
        if self._encoding not in (b"", b"identity"):
            raise ConnectionAbortedError(
                f"the response's content-encoding is {self._encoding!r}, which was not asked for"
            )
        if self._is_complete:  # it has no body
            self._keeps_alive &= not rest
            return self._response(memoryview(b""))
        if self._length is None or self._is_chunked or self._length > _UPFRONT_LIMIT:
            self._scratch[:rest] = self._scratch[end : self._filled]
            self._filled = 0
            return self._feed(rest) if rest else None
        length = self._length
        if self._most is not None and length > self._most:
            raise self._too_long()
        if self._into is not None and len(self._into) == length:
            self._body = self._into
        else:
            start = -(self._json_bytes or 0) % _ALIGNMENT
            self._body = memoryview(np.empty(start + length, np.uint8))[start:]  # type: ignore[arg-type]
        here = min(rest, length)
        self._body[:here] = self._view[end : end + here]
        self._missing = length - here
        self._keeps_alive &= rest <= length
        return None if self._missing else self._response(self._body)

    def _too_long(self) -> ConnectionAbortedError:
        return ConnectionAbortedError(f"the response has more than {self._most:,} bytes")

    def _feed(self, count: int) -> HttpResponse | None:
        """A part of a body that the parser reads."""
        self._fed += count
        if self._most is not None and self._fed > self._most + _HEAD_LIMIT:
            raise self._too_long()
        self._parse(self._view[:count])
        return self._response(memoryview(bytearray().join(self._chunks))) if self._is_complete else None

    def _parse(self, data: memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ConnectionAbortedError(f"what came is no HTTP/1.1 response ({error})") from error

    def _response(self, content: memoryview) -> HttpResponse:
        status, is_last = self._parser.get_status_code(), not self._keeps_alive
        return HttpResponse(status, content, self._json_bytes, is_last, self._retry_after)

    # ---- called by the parser ----

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-length":
            self._length = int(value)
        elif name == b"inference-header-content-length":
            self._json_bytes = int(value)
        elif name == b"transfer-encoding":
            self._is_chunked = True
        elif name == b"content-encoding":
            self._encoding = value.lower()
        elif name == b"retry-after" and value.isdigit() and len(value) < 7:  # or a date, which is not read
            self._retry_after = float(value)

    def on_headers_complete(self) -> None:
        self._keeps_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True


class IdleWatch:
    """Says whether an idle connection became readable: the server closed it, or broke the protocol."""

    def __init__(self, descriptor: int) -> None:
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)

    def is_quiet(self) -> bool:
        return not self._poll.poll(0)
