"""Hands a connection's requests to the door or to ASGI, and sends responses in order. A body stays unread
until its request has a slot."""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any, cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tableside.serving.errors import ApiError
from tableside.serving.executors.admission import Slices, Slots, Turn
from tableside.serving.http.asgi import HOLD, error_response
from tableside.serving.http.connection.refusals import CLOSE, OpenRequest, RefusingProtocol
from tableside.serving.http.door import DoorCycle, response_head
from tableside.serving.http.traffic import REQUEST_ID
from tableside.serving.metrics import metrics


class AnsweringProtocol(RefusingProtocol):
    """Runs requests from their headers to the last byte of the response. `slots`, `slices`: the worker's."""

    slots: Slots
    slices: Slices

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._door_tasks: set[asyncio.Task[None]] = set()
        self._is_patient = False  # the last request waited for rows: others go before the next one

    def _ask_application(self, request: OpenRequest) -> None:
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()  # makes the scope
        self.url, self.expect_100_continue = url, expects
        scope = cast(dict[str, Any], self.scope)
        self.headers = scope["headers"] = headers
        scope[HOLD] = request.hold
        super().on_headers_complete()

    def _ask_door(self) -> None:
        """Begins the request, or queues it behind earlier ones, as uvicorn does."""
        before = self.cycle
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        self.cycle = cast(RequestResponseCycle, DoorCycle(keep_alive))
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Begins the oldest request when it gets a slot; one without a body needs none."""
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

    def _begin(self, request: OpenRequest, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        request.is_started = True
        self.flow.resume_reading()
        if request.asked is None:
            super()._start_asgi_task(cycle, functools.partial(request.pass_on, app))
        elif request.is_whole:
            self.slices.run(functools.partial(self._answer, request, cycle), self._is_patient)
        if not request.is_whole:
            self._expect("the body", self.limits.body_timeout_s)

    def _answer(self, request: OpenRequest, cycle: RequestResponseCycle) -> None:
        if not self.transport.is_closing() and request.asked is not None:
            body, request.body = request.body, b""
            send = functools.partial(self._send, cycle)
            self.door.answer(request.asked, body, request.hold, send, self.client and self.client[0])
            self._is_patient = request.hold.waits_for_rows

    def _send(self, cycle: RequestResponseCycle, head: bytes, parts: Sequence[Any]) -> None:
        """Sends the door's answer once the client has read enough of earlier answers."""
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
        self.transport.writelines([head if cycle.keep_alive else head + CLOSE, b"\r\n", *parts])
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    async def _send_later(self, cycle: RequestResponseCycle, head: bytes, parts: Sequence[Any]) -> None:
        await self.flow.drain()
        self._send(cycle, head, parts)

    def _shed(self, request: OpenRequest, cycle: RequestResponseCycle, error: ApiError) -> None:
        """Refuses a request that waited. Drops the rest of its body; the connection stays open."""
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
            self._expect("the body", self.limits.body_timeout_s)

    def _answer_shed(self, cycle: RequestResponseCycle, error: ApiError) -> None:
        response = error_response(error)
        self._send(cycle, response_head(response), response.parts)

    def on_response_complete(self) -> None:
        request = self._open.popleft()
        if request.turn is not None:
            request.turn.end()
        if self.flow.write_paused:
            self._unsent.append(request)
        else:
            request.end(self._traffic, request.status or 500)
        self.server_state.total_requests += 1
        if self.cycle.response_complete:
            # one that the application did not read would stay as long as the connection
            self._forget_bodies()
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self.loop.call_soon(self._start_next, *self.pipeline.pop())
        if self._last_words is not None and not self._open:
            self._end_with(self._last_words)

    def _start_next(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if self._open and not self.transport.is_closing():
            self._start_asgi_task(cycle, app)
