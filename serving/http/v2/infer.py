"""Infer requests of the Open Inference Protocol V2 (github.com/kserve/open-inference-protocol) with the
binary tensor extension.

The `Door` brings them, or FastAPI's route of `serving.http.v2.routes`.
"""

import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tableside.serving.errors import bad_request, not_found, short
from tableside.serving.executors.admission import JSON_GROWTH, Hold
from tableside.serving.http.asgi import (
    JSON_TYPE,
    Response,
    check_json_answer,
    check_json_size,
    json_object,
    too_large,
)
from tableside.serving.http.inputs.large_json import ANSWER_BYTES, BESIDE_BYTES, inputs_of, room
from tableside.serving.http.v2 import request as v2_request
from tableside.serving.http.v2 import shm
from tableside.serving.http.v2.repeated import HeaderMemory
from tableside.serving.http.v2.request import InferRequest
from tableside.serving.http.v2.templates import Templates
from tableside.serving.metrics.metrics import MetricsOfModels, Stages
from tableside.serving.model.request import Answer
from tableside.serving.model.version import ServedVersion
from tableside.serving.service.service import Service
from tableside.serving.shm.regions import PartlyOnDevice

_BINARY_TYPE = (b"content-type", b"application/octet-stream")
LENGTH = b"inference-header-content-length"
Found = Answer | Exception  # what was looked up, or why it was not
_Times = tuple[float, float]  # when it was begun and understood, of time.perf_counter
Later = Callable[[Callable[[Found], Response], Found], None]


class V2:
    """Answers infer requests. The caller answers with the ApiErrors that are raised."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._metrics = MetricsOfModels("v2")
        self._templates = Templates()
        self._repeated = HeaderMemory()

    async def _served(self, named: list[str]) -> ServedVersion:
        match named:
            case [model]:
                return self.service.live(model)
            case [model, "versions", version]:
                return await self.service.version(model, version)
            case _:
                raise not_found(f"{short('/v2/models/' + '/'.join(named))} is not a path of this server")

    def infer_soon(
        self,
        named: list[str],
        header_length: bytes | None,
        body: bytes | memoryview,
        hold: Hold,
        later: Later,
    ) -> Response | Coroutine[Any, Any, Response] | None:
        """The response to an infer request that is understood by a template and looked up at once; else what
        gives it.

        None: `later` will be called with what makes the response, and what it makes it of. ApiError, from
        here or from what makes the response: the request is refused. body: is the caller's again when this
        returns.
        """
        started = time.perf_counter()
        if len(named) != 1 or (header_length is None and self.service.regions is None):
            return self.infer(named, header_length, bytes(body), hold)
        served = self.service.live(named[0])
        infer = self._templates.match(served, body, _json_bytes(header_length, body), self.service.regions)
        if infer is None:
            return self.infer(named, header_length, bytes(body), hold)
        hold.grow(infer.request.out_bytes + infer.made_bytes(body))
        came = infer, len(body), (started, time.perf_counter())
        answer = self.service.executor.run_now(infer.request, infer.inputs)
        if answer is None:
            done = functools.partial(later, functools.partial(self._encode, *came))
            if infer.is_inline and self.service.executor.run_soon(infer.request, infer.inputs, done):
                return None
            return self._run(infer._replace(inputs=bytes(infer.inputs)), *came[1:])
        return self._encode(*came, answer) if infer.is_inline else self._write(*came, answer)

    async def infer(self, named: list[str], header_length: bytes | None, body: bytes, hold: Hold) -> Response:
        """The response to an infer request. ApiError: it is refused."""
        started = time.perf_counter()
        served = self.service.live(named[0]) if len(named) == 1 else await self._served(named)
        infer = await self._understand(served, header_length, body, hold)
        infer.request.names_version = len(named) > 1
        check_json_answer(infer.json_bytes, self.service.settings.max_json_bytes)
        hold.grow(infer.request.out_bytes + JSON_GROWTH * infer.json_bytes)
        return await self._run(infer, len(body), (started, time.perf_counter()))

    async def _run(self, infer: InferRequest, body_bytes: int, times: _Times) -> Response:
        came = infer, body_bytes, times
        answer = await self.service.executor.run(infer.request, infer.inputs)
        is_large = not infer.is_inline or infer.json_bytes > ANSWER_BYTES
        return await self._write(*came, answer) if is_large else self._encode(*came, answer)

    async def _write(self, infer: InferRequest, body_bytes: int, times: _Times, answer: Answer) -> Response:
        """As `_encode`, where so much is written, into regions or as JSON, that it is done beside the
        event loop."""
        looked_up = time.perf_counter()
        encoded = await self.service.beside(v2_request.encode, infer, answer.buffer)
        return self._answered(infer, body_bytes, (*times, looked_up), answer, encoded)

    def _encode(self, infer: InferRequest, body_bytes: int, times: _Times, found: Found) -> Response:
        """The response of what was found; or raises what was found instead."""
        if isinstance(found, Exception):
            raise found
        looked_up = time.perf_counter()
        encoded = v2_request.encode(infer, found.buffer)
        return self._answered(infer, body_bytes, (*times, looked_up), found, encoded)

    def _answered(
        self,
        infer: InferRequest,
        body_bytes: int,
        times: tuple[float, float, float],
        answer: Answer,
        encoded: tuple[bytes, list[Any]],
    ) -> Response:
        """Counts a request that is answered; its response. times: when it was begun, understood and looked
        up."""
        (head, parts), request = encoded, infer.request
        if answer.state is not None:
            head = v2_request.restated(head, answer.state)
        # Counted before it is sent: a worker that is killed in between has not answered, and no answer is
        # left out.
        stages = Stages(*times, time.perf_counter())
        self._metrics[request.model].answered(request, body_bytes, stages, answer.unfound)
        if infer.has_binary:
            return Response(200, (_BINARY_TYPE, (LENGTH, b"%d" % len(head))), [head, *parts])
        return Response(200, (JSON_TYPE,), [head])

    async def _understand(
        self, served: ServedVersion, header_length: bytes | None, body: bytes, hold: Hold
    ) -> InferRequest:
        """The infer request: by a template where its header came before but for its numbers, else by the
        slow path."""
        settings, regions = self.service.settings, self.service.regions
        generation = -1 if regions is None else regions.generation
        length = _json_bytes(header_length, body)
        is_header = regions is not None and length == len(body)
        if is_header and (known := self._repeated.find(served, body, generation)) is not None:
            return known
        if (known := self._templates.match(served, body, length, regions)) is not None:
            hold.grow(known.made_bytes(body))
            return known
        check_json_size(length, settings.max_json_bytes)
        if length <= BESIDE_BYTES:
            infer = await self._understand_anew(served, body, length, hold, False)
        else:
            async with room(self.service.large_json, body[:length], inputs_of(served), hold):
                infer = await self._understand_anew(served, body, length, hold, True)
        if is_header and isinstance(infer.inputs, PartlyOnDevice):
            self._repeated.keep(served, body, generation, infer)
        return infer

    async def _understand_anew(
        self, served: ServedVersion, body: bytes, length: int, hold: Hold, is_large: bool
    ) -> InferRequest:
        """By the slow path, which is beside the event loop where the header is large, or what follows it."""
        settings, regions = self.service.settings, self.service.regions
        head, binary = body[:length], memoryview(body)[length:]
        header = await self.service.beside(json_object, head) if is_large else json_object(head)
        region_bytes = 0
        if regions is not None and (region_bytes := shm.input_bytes(header, regions)):
            if region_bytes > settings.max_body_bytes:
                raise too_large(settings.max_body_bytes)
            hold.grow(region_bytes)
        arguments = served, header, binary, regions
        is_large = is_large or len(binary) + region_bytes > shm.INLINE_BYTES
        infer = (
            await self.service.beside(v2_request.understand, *arguments)
            if is_large
            else v2_request.understand(*arguments)
        )
        hold.grow(max(0, infer.made_bytes(binary) - region_bytes))  # those of regions were counted before
        if not isinstance(infer.inputs, PartlyOnDevice):
            self._templates.learn(served, head, header, infer)
        return infer


def _parse_length(value: bytes, size: int) -> int:
    if not value.isdigit() or len(value) > 18 or not 0 < int(value) <= size:
        raise bad_request(
            f"Inference-Header-Content-Length is {short(value.decode('latin-1'))}; "
            f"expected a number from 1 to the body's {size} bytes"
        )
    return int(value)


def _json_bytes(header_length: bytes | None, body: bytes | memoryview) -> int:
    """Of a request's JSON: all of its body where its headers do not say."""
    return len(body) if header_length is None else _parse_length(header_length, len(body))
