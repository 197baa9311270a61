"""Infer requests and requests for rows without ASGI: its scope, task and messages cost more than a small
lookup. The connection hands bodies to the `Door`. If a template knows the header and the executor runs at
once, or rows are in memory, the answer is there on return, else a task makes it. Requests that are
compressed, expect 100-continue or are unusual go through ASGI to the same code."""

import asyncio
import functools
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tableside.serving.executors.admission import Hold
from tableside.serving.executors.pending import Found
from tableside.serving.http.asgi import DISK_TIMEOUT, Response, error_response
from tableside.serving.http.traffic import Traffic
from tableside.serving.http.v2.infer import LENGTH, V2, InferTarget
from tableside.serving.http.v2.rows import OwnedRows, RowsTarget

_PATH, _INFER, _ROWS = b"/v2/models/", b"/infer", b"/v2/rows/"
_TOKEN = b"authorization"
_ODD = re.compile(rb"[%?#]")
_NOT_PLAIN = (b"content-encoding", b"expect", b"transfer-encoding")
READS = (*_NOT_PLAIN, LENGTH, DISK_TIMEOUT, _TOKEN)
"""The headers that `Door.asks` reads."""

Target = InferTarget | RowsTarget

SendWhole = Callable[[bytes, Sequence[Any]], None]
"""Sends a response: its head, but for the empty line that ends it, and the parts of its body."""


class DoorCycle:
    """Stands in for uvicorn's cycle object for requests that skip ASGI."""

    __slots__ = ("body", "disconnected", "keep_alive", "more_body", "response_complete", "response_started")
    waiting_for_100_continue = False
    scope: ClassVar[dict[str, str]] = {"method": "POST"}

    def __init__(self, keep_alive: bool) -> None:
        self.keep_alive = keep_alive
        self.body, self.more_body, self.disconnected = b"", True, False
        self.response_started = self.response_complete = False

    @property
    def message_event(self) -> "DoorCycle":
        return self

    def set(self) -> None:
        """Nobody waits for an event."""


class Door:
    """Answers a worker's infer requests, and those for rows. Belongs to one event loop."""

    def __init__(self, v2: V2, owned: OwnedRows) -> None:
        self._v2, self._owned, self.traffic = v2, owned, Traffic(v2.service.engines)
        self._tasks: set[asyncio.Task[None]] = set()

    def asks(self, method: bytes, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Target | None:
        """Returns a request's target; None: it goes through ASGI. headers: READS and any others."""
        if method != b"POST" or not url.startswith((_PATH, _ROWS)) or _ODD.search(url):
            return None
        found: dict[bytes, bytes] = {}
        for name, value in headers:
            if name in _NOT_PLAIN:
                return None
            found.setdefault(name, value)
        if url.startswith(_ROWS):
            model, slash, state = url[len(_ROWS) :].decode("latin-1").partition("/")
            return RowsTarget(model, state, found.get(_TOKEN)) if slash and "/" not in state else None
        if not url.endswith(_INFER):
            return None
        model, slash, version = url[len(_PATH) : -len(_INFER)].decode("latin-1").partition("/versions/")
        if "/" in model or "/" in version:
            return None
        return InferTarget(model, version if slash else None, found.get(LENGTH), found.get(DISK_TIMEOUT))

    def answer(
        self, asked: Target, body: bytes | memoryview, hold: Hold, send: SendWhole, host: str | None
    ) -> None:
        """Answers a whole request of a client at a host, now or later. `body` may be reused on return."""
        response: Response | Coroutine[Any, Any, Response] | None
        try:
            if isinstance(asked, RowsTarget):
                response = self._owned.answer(asked, host, body, hold)
            else:
                later = functools.partial(self._send_what, asked, send)
                response = self._v2.infer_soon(asked, body, hold, later)
        except Exception as error:  # noqa: BLE001  # an answer is owed whatever it is; what is no refusal is logged
            response = self._refusal(asked, error)
        if response is None:
            return
        if isinstance(response, Response):
            send(response_head(response), response.parts)
            return
        task = asyncio.get_running_loop().create_task(self._answer_later(asked, response, send))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send_what(
        self, asked: Target, send: SendWhole, encode: Callable[[Found], Response], found: Found
    ) -> None:
        try:
            response = encode(found)
        except Exception as error:  # noqa: BLE001  # as above
            response = self._refusal(asked, error)
        send(response_head(response), response.parts)

    async def _answer_later(
        self, asked: Target, coming: Coroutine[Any, Any, Response], send: SendWhole
    ) -> None:
        try:
            response = await coming
        except Exception as error:  # noqa: BLE001  # as above
            response = self._refusal(asked, error)
        send(response_head(response), response.parts)

    def _refusal(self, asked: Target, error: Exception) -> Response:
        return error_response(self._v2.refusal(asked.model, error))


def response_head(response: Response) -> bytes:
    """Returns a response's head without its final empty line."""
    lines = [b"content-length: %d" % sum(map(len, response.parts))]
    lines += [name + b": " + value for name, value in response.headers]
    return STATUS_LINE[response.status] + b"\r\n".join(lines) + b"\r\n"
