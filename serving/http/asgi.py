"""HTTP shared by /v1 and /v2: reading a body, checking its JSON, responses.

Python's objects take up to 40 times the bytes of a JSON text, and parsing holds the GIL. So in a large text
objects and strings are counted first and limited to what a request for all inputs needs. One large text is
parsed at a time, beside the event loop, and its unpacked size counts in max_in_flight_bytes.
"""

import asyncio
import re
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
import orjson
from starlette.responses import Response as HttpResponse

from tableside.serving.client import attempts
from tableside.serving.errors import ApiError, ErrorKind, bad_request, short
from tableside.serving.executors.admission import RETRY_AFTER_S, Hold

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HOLD = "tableside.hold"  # the key of a request's `Hold` in its scope
# the header: how long a request waits for rows of a disk
DISK_TIMEOUT = attempts.DISK_TIMEOUT.lower().encode()
_MILLISECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,6})?")
_PIECE_BYTES = 1 << 18  # that are unpacked at once, some 0.5 ms
JSON_TYPE = (b"content-type", b"application/json")
BINARY_TYPE = (b"content-type", b"application/octet-stream")


class Disconnected(Exception):
    """The client went away before its request was complete. Nobody waits for an answer."""


async def read_body(scope: Scope, receive: Receive, limit: int, hold: Hold) -> bytes:
    """Returns the whole body, decompressed. Decompressed bytes count in `hold`; the connection counted the
    others. ApiError: 400 malformed, 413 more than `limit` bytes, 503 no room."""
    message = await receive()
    parts, size = [], 0
    while True:
        if message["type"] != "http.request":
            raise Disconnected
        part = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > limit:
            raise too_large(limit)
        if not message.get("more_body", False):
            break
        message = await receive()
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    encoding = (header(scope, b"content-encoding") or b"identity").lower()
    if encoding == b"identity":
        return body
    return await _inflate(body, encoding, limit, hold)


async def _inflate(body: bytes, encoding: bytes, limit: int, hold: Hold) -> bytes:
    """Decompresses a body in pieces and yields to the event loop between them."""
    if encoding not in (b"gzip", b"deflate"):
        what = f"content-encoding {encoding.decode('latin-1')!r}; expected gzip, deflate or none"
        raise ApiError(415, ErrorKind.BAD_REQUEST, what)
    inflater = zlib.decompressobj(wbits=47)  # gzip or zlib, by its first bytes
    plain, left = bytearray(), memoryview(body)
    try:
        while (left or inflater.unconsumed_tail) and not inflater.eof:
            packed = inflater.unconsumed_tail
            if not packed:
                packed, left = bytes(left[:_PIECE_BYTES]), left[_PIECE_BYTES:]
            piece = inflater.decompress(packed, _PIECE_BYTES)
            hold.grow(len(piece))
            plain += piece
            if len(plain) > limit:
                raise too_large(limit)
            if left or inflater.unconsumed_tail:
                await asyncio.sleep(0)
    except zlib.error as error:
        raise bad_request(f"the body is not {encoding.decode()}: {error}") from None
    if not inflater.eof:
        raise bad_request(f"the {encoding.decode()} body ends early")
    if behind := len(inflater.unused_data) + len(left):
        raise bad_request(
            f"{behind:,} bytes follow the end of the {encoding.decode()} body; send nothing behind it"
        )
    return bytes(plain)


def json_object(text: bytes) -> dict[str, Any]:
    """Parses a JSON object. ApiError: the text is not JSON, or not an object."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the request is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_request(f"the request is a JSON {type(value).__name__}; expected an object")
    return value


def too_large(limit: int) -> ApiError:
    """413: the body has more bytes than the limit."""
    what = f"the body has more than {limit:,} bytes, the limit (max_body_bytes)"
    return ApiError(413, ErrorKind.TOO_LARGE, what)


def check_json_size(size: int, limit: int) -> None:
    """ApiError 413: the JSON is too large. Binary tensors parse ten times faster."""
    if size > limit:
        raise ApiError(
            413,
            ErrorKind.TOO_LARGE,
            f"the JSON has {size:,} bytes; the limit is {limit:,} (max_json_bytes): send ids as binary "
            "tensors, POST /v2/models/MODEL/infer",
        )


def check_json_answer(size: int, limit: int) -> None:
    """ApiError 400: vectors of `size` bytes are too many for a JSON response."""
    if size > limit:
        raise bad_request(
            f"the request asks for {size:,} bytes of vectors as JSON; the limit is {limit:,} "
            "(max_json_bytes): ask for binary tensors, POST /v2/models/MODEL/infer with binary_data_output",
            ErrorKind.TOO_LARGE,
        )


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header called `name` (lower case), or None."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def deadline_of(value: bytes | None, timeout_us: int = 0) -> float | None:
    """The deadline, of time.monotonic, that the header DISK_TIMEOUT and V2's parameter `timeout` (0: it was
    not sent) say, the earlier one; None: neither was sent. ApiError: the header is no number of
    milliseconds."""
    if value is None:
        return time.monotonic() + timeout_us / 1e6 if timeout_us else None
    value = value.strip(b" \t")
    if not _MILLISECONDS.fullmatch(value):
        what = f"{attempts.DISK_TIMEOUT} is {short(value.decode('latin-1'))}"
        raise bad_request(f"{what}; expected milliseconds, as 5 or 0.5")
    seconds = float(value) / 1000
    return time.monotonic() + (min(seconds, timeout_us / 1e6) if timeout_us else seconds)


class Response(NamedTuple):
    """A response. Its body is the buffers `parts` in order; `headers` lack content-length."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    parts: Sequence[Any]


def error_response(error: ApiError) -> Response:
    """{"error": message}: the shape that the Triton client decodes."""
    again = [(b"retry-after", b"%d" % RETRY_AFTER_S)] if error.status == 503 else []
    return Response(
        error.status, (JSON_TYPE, *again, *error.headers), [orjson.dumps({"error": error.message})]
    )


class AsgiResponse(HttpResponse):
    """Sends a `Response` through FastAPI without joining its parts."""

    def __init__(self, response: Response) -> None:
        super().__init__(status_code=response.status)
        length = (b"content-length", b"%d" % sum(map(len, response.parts)))
        self.raw_headers, self._parts = [length, *response.headers], response.parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def json_response(value: Any, status: int = 200) -> HttpResponse:
    return HttpResponse(
        orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json"
    )


BESIDE_BYTES = 1 << 16  # of a text; a longer one is parsed on the thread beside the event loop
READ_BYTES = 1 << 18  # the same, where C reads it: some 0.4 ms
ANSWER_BYTES = 1 << 18  # of vectors; more are written as JSON beside the event loop
_OBJECTS, _STRINGS = 16, 64  # of an input, at most: its tensors, its outputs, and the parameters of each
_SPARE = 256  # of each, for what belongs to no input
# in memory: an int or float and the places that hold it; a list, however short
_NUMBER_BYTES, _LIST_BYTES = (64, 112)


@asynccontextmanager
async def room(turn: asyncio.Lock, text: bytes, inputs: int, hold: Hold) -> AsyncIterator[None]:
    """Holds the turn of a text and room for its parsed form. inputs: the model's. ApiError: 400 too many
    objects or strings, 503 no room."""
    codes = np.frombuffer(text, np.uint8)
    objects, lists, numbers, quotes = (int(np.count_nonzero(codes == ord(c))) for c in '{[,"')
    for what, found, each in (("objects", objects, _OBJECTS), ("strings", quotes // 2, _STRINGS)):
        if found > (most := _SPARE + each * inputs):
            raise bad_request(
                f"the JSON has {found:,} {what}; expected at most {most:,}, as the model has {inputs:,} "
                "inputs: name its features alone, each once"
            )
    async with turn:
        with hold.growing(_NUMBER_BYTES * numbers + _LIST_BYTES * lists):
            yield
