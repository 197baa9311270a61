"""What /v1 and /v2 share of HTTP: reading a body, checking its JSON, and responses."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import orjson
from starlette.responses import Response as HttpResponse

from tableside.serving.errors import ApiError, ErrorKind, bad_request
from tableside.serving.executors.admission import RETRY_AFTER_S, Bytes, Hold

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HOLD = "tableside.hold"  # the key of a request's `Hold` in its scope
MODEL = "tableside.model"  # of the name of the model that a request was understood to name
_PIECE_BYTES = 1 << 18  # that are unpacked at once, some 0.5 ms
JSON_TYPE = (b"content-type", b"application/json")


class Disconnected(Exception):
    """The client went away before its request was complete. Nobody waits for an answer."""


async def read_body(scope: Scope, receive: Receive, limit: int, hold: Hold) -> bytes:
    """The whole body, decompressed where its headers say that it is compressed.

    hold: of the request. The connection has counted the bytes that came in; the bytes that they unpack to are
    counted here, as they come. ApiError: 400 where they are not what the headers say, 413 where there are
    more than `limit` bytes, 503 where there are more than may be held now.
    """
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


@contextmanager
def holding(scope: Scope, in_flight: Bytes) -> Iterator[Hold]:
    """The `Hold` of a request: its connection's, which is released when the response is sent, or one for
    the block."""
    if (hold := scope.get(HOLD)) is not None:
        yield hold
        return
    with in_flight.holding() as own:
        yield own


async def _inflate(body: bytes, encoding: bytes, limit: int, hold: Hold) -> bytes:
    """A body unpacked, piece by piece, as far as may be held; other work has its turn between two pieces."""
    if encoding not in (b"gzip", b"deflate"):
        raise ApiError(
            415,
            ErrorKind.BAD_REQUEST,
            f"content-encoding {encoding.decode('latin-1')!r}; expected gzip, deflate or none",
        )
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
    """The JSON object that a request consists of. ApiError: it is not JSON, or JSON of another kind."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the request is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_request(f"the request is a JSON {type(value).__name__}; expected an object")
    return value


def too_large(limit: int, name: str = "max_body_bytes") -> ApiError:
    """413: the body has more bytes than the limit of that name."""
    return ApiError(413, ErrorKind.TOO_LARGE, f"the body has more than {limit:,} bytes, the limit ({name})")


def check_json_size(size: int, limit: int) -> None:
    """ApiError 413: a JSON text of `size` bytes is too large. Binary tensors take a tenth of the time to
    parse."""
    if size > limit:
        raise ApiError(
            413,
            ErrorKind.TOO_LARGE,
            f"the JSON has {size:,} bytes; the limit is {limit:,} (max_json_bytes): send ids as binary "
            "tensors, POST /v2/models/"
            "MODEL/infer",
        )


def check_json_answer(size: int, limit: int) -> None:
    """ApiError 400: vectors of `size` bytes are too many for a JSON response."""
    if size > limit:
        raise bad_request(
            f"the request asks for {size:,} bytes of vectors as JSON; the limit is {limit:,} "
            "(max_json_bytes): ask for binary "
            "tensors, POST /v2/models/MODEL/infer with binary_data_output",
            ErrorKind.TOO_LARGE,
        )


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header called `name` (lower case), or None."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


class Response(NamedTuple):
    """A response: its body is the byte buffers `parts`, one after another. headers: but for its length."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    parts: Sequence[Any]


def error_response(error: ApiError) -> Response:
    """{"error": message}: the shape that the Triton client decodes."""
    return Response(
        error.status,
        (JSON_TYPE, *retry_after(error.status), *error.headers),
        [orjson.dumps({"error": error.message})],
    )


def retry_after(status: int) -> list[tuple[bytes, bytes]]:
    """The header of a 503 that says when to try again; none of any other status."""
    return [(b"retry-after", b"%d" % RETRY_AFTER_S)] if status == 503 else []


class AsgiResponse(HttpResponse):
    """A `Response` as FastAPI sends one: its parts are not joined."""

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
    """A value as JSON."""
    return HttpResponse(
        orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), status, media_type="application/json"
    )
