"""Infer requests of the Open Inference Protocol V2 (github.com/kserve/open-inference-protocol) with binary
tensors. They come from the `Door`, or from FastAPI's route in `serving.http.v2.routes`."""

import functools
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from tableside.serving.errors import bad_request, not_found, short
from tableside.serving.executors.admission import JSON_GROWTH, Hold
from tableside.serving.http import asgi
from tableside.serving.http.v2 import request as v2_request
from tableside.serving.http.v2 import shm
from tableside.serving.http.v2.request import InferRequest
from tableside.serving.http.v2.templates import Templates
from tableside.serving.metrics.metrics import MetricsOfModels, Stages
from tableside.serving.model.request import Answer
from tableside.serving.model.version import ServedVersion
from tableside.serving.service.service import Service
from tableside.serving.shm.regions import PartlyOnDevice

_KEPT, _LONGEST = 256, 64 << 10  # headers, and bytes of one


class HeaderMemory:
    """Meanings of the latest headers whose tensors all lie on a GPU. Belongs to one event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, bytes], tuple[weakref.ref[ServedVersion], int, InferRequest]] = (
            OrderedDict()
        )

    def find(self, served: ServedVersion, body: bytes, generation: int) -> InferRequest | None:
        """Returns a body's meaning, or None. generation: of the list of regions."""
        if len(body) > _LONGEST or (known := self._known.get(key := (served.header.model, body))) is None:
            return None
        version, then, infer = known
        if version() is not served or then != generation:
            del self._known[key]
            return None
        self._known.move_to_end(key)
        return infer

    def keep(self, served: ServedVersion, body: bytes, generation: int, infer: InferRequest) -> None:
        """Keeps a body's meaning if it does not depend on memory."""
        inputs: Any = infer.inputs
        if not isinstance(inputs, PartlyOnDevice) or not infer.head or infer.into or len(body) > _LONGEST:
            return
        if sum(one.size for one in inputs.reads) < memoryview(inputs.inputs).nbytes:
            return  # a tensor came with the body, or from a region of the host
        self._known[served.header.model, bytes(body)] = weakref.ref(served), generation, infer
        if len(self._known) > _KEPT:
            self._known.popitem(last=False)


_BINARY_TYPE = (b"content-type", b"application/octet-stream")
LENGTH = b"inference-header-content-length"
Found = Answer | Exception  # what was looked up, or why it was not
_Times = tuple[float, float]  # when it was begun and understood, of time.perf_counter
Later = Callable[[Callable[[Found], asgi.Response], Found], None]


class V2:
    """Answers infer requests. ApiErrors are the caller's to send."""

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
    ) -> asgi.Response | Coroutine[Any, Any, asgi.Response] | None:
        """Returns the response if a template knows the header and it is looked up at once, else a coroutine.
        None: `later` gets the response's maker and what it takes. ApiError: refused. `body` may be reused on
        return."""
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

    async def infer(
        self, named: list[str], header_length: bytes | None, body: bytes, hold: Hold
    ) -> asgi.Response:
        """Returns the response to an infer request. ApiError: it is refused."""
        started = time.perf_counter()
        served = self.service.live(named[0]) if len(named) == 1 else await self._served(named)
        infer = await self._understand(served, header_length, body, hold)
        infer.request.names_version = len(named) > 1
        asgi.check_json_answer(infer.json_bytes, self.service.settings.max_json_bytes)
        hold.grow(infer.request.out_bytes + JSON_GROWTH * infer.json_bytes)
        return await self._run(infer, len(body), (started, time.perf_counter()))

    async def _run(self, infer: InferRequest, body_bytes: int, times: _Times) -> asgi.Response:
        came = infer, body_bytes, times
        answer = await self.service.executor.run(infer.request, infer.inputs)
        is_large = not infer.is_inline or infer.json_bytes > asgi.ANSWER_BYTES
        return await self._write(*came, answer) if is_large else self._encode(*came, answer)

    async def _write(
        self, infer: InferRequest, body_bytes: int, times: _Times, answer: Answer
    ) -> asgi.Response:
        """Like `_encode`, beside the event loop, for large regions or JSON."""
        looked_up = time.perf_counter()
        encoded = await self.service.beside(v2_request.encode, infer, answer.buffer)
        return self._answered(infer, body_bytes, (*times, looked_up), answer, encoded)

    def _encode(self, infer: InferRequest, body_bytes: int, times: _Times, found: Found) -> asgi.Response:
        """Returns the response, or raises the error that was found instead."""
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
    ) -> asgi.Response:
        """Counts a request and returns its response. times: begun, understood, looked up."""
        (head, parts), request = encoded, infer.request
        if answer.state is not None:
            head = v2_request.restated(head, answer.state)
        # Counted before it is sent: a worker that is killed in between has not answered, and no answer is
        # left out.
        stages = Stages(*times, time.perf_counter())
        self._metrics[request.model].answered(request, body_bytes, stages, answer.unfound)
        if infer.has_binary:
            return asgi.Response(200, (_BINARY_TYPE, (LENGTH, b"%d" % len(head))), [head, *parts])
        return asgi.Response(200, (asgi.JSON_TYPE,), [head])

    async def _understand(
        self, served: ServedVersion, header_length: bytes | None, body: bytes, hold: Hold
    ) -> InferRequest:
        """Reads an infer request, by a template if its header is known, else by the slow path."""
        settings, regions = self.service.settings, self.service.regions
        generation = -1 if regions is None else regions.generation
        length = _json_bytes(header_length, body)
        is_header = regions is not None and length == len(body)
        if is_header and (known := self._repeated.find(served, body, generation)) is not None:
            return known
        if (known := self._templates.match(served, body, length, regions)) is not None:
            hold.grow(known.made_bytes(body))
            return known
        asgi.check_json_size(length, settings.max_json_bytes)
        if length <= asgi.BESIDE_BYTES:
            infer = await self._understand_anew(served, body, length, hold, False)
        else:
            async with asgi.room(self.service.large_json, body[:length], asgi.inputs_of(served), hold):
                infer = await self._understand_anew(served, body, length, hold, True)
        if is_header and isinstance(infer.inputs, PartlyOnDevice):
            self._repeated.keep(served, body, generation, infer)
        return infer

    async def _understand_anew(
        self, served: ServedVersion, body: bytes, length: int, hold: Hold, is_large: bool
    ) -> InferRequest:
        """Reads an infer request by the slow path, beside the event loop if it is large."""
        settings, regions = self.service.settings, self.service.regions
        head, binary = body[:length], memoryview(body)[length:]
        header = await self.service.beside(asgi.json_object, head) if is_large else asgi.json_object(head)
        region_bytes = 0
        if regions is not None and (region_bytes := shm.input_bytes(header, regions)):
            if region_bytes > settings.max_body_bytes:
                raise asgi.too_large(settings.max_body_bytes)
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
        what = f"Inference-Header-Content-Length is {short(value.decode('latin-1'))}"
        raise bad_request(f"{what}; expected a number from 1 to the body's {size} bytes")
    return int(value)


def _json_bytes(header_length: bytes | None, body: bytes | memoryview) -> int:
    """Length of the JSON part in bytes; the whole body without Inference-Header-Content-Length."""
    return len(body) if header_length is None else _parse_length(header_length, len(body))
