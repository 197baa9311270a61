"""Infer requests of the Open Inference Protocol V2 (github.com/kserve/open-inference-protocol) with binary
tensors. They come from the `Door`, or from FastAPI's route in `serving.http.v2.routes`."""

import functools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import orjson

from tableside.loader.versions.states import State
from tableside.serving.errors import INTERNAL_ERROR, ApiError, ErrorKind, bad_request, short
from tableside.serving.executors.admission import JSON_GROWTH, Hold
from tableside.serving.executors.pending import Found, Pending, answer_of
from tableside.serving.http import asgi, traffic
from tableside.serving.http.v2 import answer as v2_answer
from tableside.serving.http.v2 import reader, shm
from tableside.serving.http.v2 import request as v2_request
from tableside.serving.http.v2.answer import InferRequest
from tableside.serving.http.v2.reader import ReadBeside
from tableside.serving.metrics import metrics
from tableside.serving.metrics.metrics import MetricsOfModels, Stages
from tableside.serving.model.request import Answer, LateIds
from tableside.serving.model.version import ServedVersion
from tableside.serving.service.service import Service

logger = logging.getLogger("tableside")

LENGTH = b"inference-header-content-length"
_Times = tuple[float, float]  # when it was begun and understood, of time.perf_counter
Later = Callable[[Callable[[Found], asgi.Response], Found], None]


class InferTarget(NamedTuple):
    """What an infer request's path names, and the headers that it is read by. version: None: the live one.
    timeout: of `asgi.deadline_of`."""

    model: str
    version: str | None
    header_length: bytes | None = None
    timeout: bytes | None = None

    @property
    def protocol(self) -> str:
        return traffic.V2


class V2:
    """Answers infer requests. ApiErrors are the caller's to send. protocol: their label in metrics."""

    def __init__(self, service: Service, protocol: str = "v2") -> None:
        self.service, self._protocol = service, protocol
        self._metrics = MetricsOfModels(protocol)
        self._most_region_bytes = min(shm.INLINE_BYTES, service.settings.max_body_bytes)

    def refusal(self, model: str, error: Exception) -> ApiError:
        """Counts a call that failed, and returns what its client is told. model: as it was named. What is no
        refusal is logged."""
        if not isinstance(error, ApiError):
            logger.error("a request of protocol %s failed", self._protocol, exc_info=error)
            error = ApiError(500, ErrorKind.INTERNAL, INTERNAL_ERROR)
        known = model if model in self.service.engines else metrics.UNKNOWN
        metrics.refused(known, self._protocol, error.kind, error.lacking)
        return error

    def _json_bytes(self, header_length: bytes | None, body: bytes | memoryview) -> int:
        """Length of the JSON part in bytes; the whole body without Inference-Header-Content-Length. ApiError:
        too much."""
        length = len(body) if header_length is None else _parse_length(header_length, len(body))
        asgi.check_json_size(length, self.service.settings.max_json_bytes)
        return length

    def infer_soon(
        self, asked: InferTarget, body: bytes | memoryview, hold: Hold, later: Later
    ) -> asgi.Response | Coroutine[Any, Any, asgi.Response] | None:
        """Returns the response if the request is small and looked up at once, or a coroutine. None: `later`
        gets the response's maker and what it takes. ApiError: refused. `body` may be reused on return."""
        started = time.perf_counter()
        length = self._json_bytes(asked.header_length, body)
        if asked.version is not None or _is_large(length, body):
            return self.infer(asked, bytes(body), hold)
        served = self.service.live(asked.model)
        infer = reader.read(served, body, length, self.service.regions, self._most_region_bytes)
        if infer is None or isinstance(infer, ReadBeside):
            return self.infer(asked, bytes(body), hold)
        infer.request.deadline = asgi.deadline_of(asked.timeout, infer.timeout_us)
        self._admit(infer, infer.made_bytes(body), hold)
        came = infer, len(body), (started, time.perf_counter())
        begun = self.service.executor.begin(infer.request, infer.inputs)
        if not infer.is_inline:
            return self._write(*came, begun)
        if isinstance(begun, Pending):
            hold.waits_for_rows = begun.waits_for_rows
            begun.then(functools.partial(later, functools.partial(self._encode, *came)))
            return None
        return self._encode(*came, begun)

    def _admit(self, infer: InferRequest, made_bytes: int, hold: Hold) -> None:
        """Counts what a request will hold. ApiError: too much JSON, or no room."""
        asgi.check_json_answer(infer.json_bytes, self.service.settings.max_json_bytes)
        hold.grow(infer.request.out_bytes + made_bytes + JSON_GROWTH * infer.json_bytes)

    async def infer(self, asked: InferTarget, body: bytes, hold: Hold) -> asgi.Response:
        """Returns the response to an infer request. ApiError: it is refused."""
        started = time.perf_counter()
        served = await self.service.version(asked.model, asked.version)
        infer = await self._understand(served, asked.header_length, body, hold)
        infer.request.names_version = asked.version is not None
        infer.request.deadline = asgi.deadline_of(asked.timeout, infer.timeout_us)
        came = infer, len(body), (started, time.perf_counter())
        begun = self.service.executor.begin(infer.request, infer.inputs)
        return (
            self._encode(*came, await answer_of(begun))
            if infer.is_inline
            else await self._write(*came, begun)
        )

    async def _write(
        self, infer: InferRequest, body_bytes: int, times: _Times, begun: Answer | Pending
    ) -> asgi.Response:
        """Like `_encode`, beside the event loop, for large regions or JSON."""
        answer = await answer_of(begun)
        looked_up, late = time.perf_counter(), infer.request.take_late(answer)
        encoded = await self.service.beside(v2_answer.encode, infer, answer.buffer)
        return self._answered(infer, body_bytes, (*times, looked_up), answer, encoded, late)

    def _encode(self, infer: InferRequest, body_bytes: int, times: _Times, found: Found) -> asgi.Response:
        """Returns the response, or raises the error that was found instead."""
        if isinstance(found, Exception):
            raise found
        looked_up, late = time.perf_counter(), infer.request.take_late(found)
        encoded = v2_answer.encode(infer, found.buffer)
        return self._answered(infer, body_bytes, (*times, looked_up), found, encoded, late)

    def _answered(
        self,
        infer: InferRequest,
        body_bytes: int,
        times: tuple[float, float, float],
        answer: Answer,
        encoded: tuple[bytes, list[Any]],
        late: LateIds | None,
    ) -> asgi.Response:
        """Counts a request and returns its response. times: begun, understood, looked up."""
        (head, parts), request = encoded, infer.request
        if answer.state is not None:
            head = _restated(head, answer.state)
        if late is not None:
            said: dict[str, int | str] = {f"degraded.{table}": ids for table, ids in late.by_table.items()}
            said |= {f"late.{feature}": ",".join(map(str, at)) for feature, at in late.at.items()}
            head = _with_parameters(head, {"degraded": sum(late.by_table.values()), **said})
        # Counted before it is sent: a worker that is killed in between has not answered, and no answer is
        # left out.
        stages = Stages(*times, time.perf_counter())
        self._metrics[request.model].answered(request, body_bytes, stages, answer.unfound)
        if infer.has_binary:
            return asgi.Response(200, (asgi.BINARY_TYPE, (LENGTH, b"%d" % len(head))), [head, *parts])
        return asgi.Response(200, (asgi.JSON_TYPE,), [head])

    async def _understand(
        self, served: ServedVersion, header_length: bytes | None, body: bytes, hold: Hold
    ) -> InferRequest:
        """Reads an infer request; the slow path says what is wrong with it."""
        settings, regions = self.service.settings, self.service.regions
        length, region_bytes = self._json_bytes(header_length, body), 0
        given = served, body, length, regions
        is_large = _is_large(length, body)
        read = reader.read
        inline = *given, self._most_region_bytes
        infer = await self.service.beside(read, *inline) if is_large else read(*inline)
        if isinstance(infer, ReadBeside):
            if (region_bytes := infer.region_bytes) > settings.max_body_bytes:
                raise asgi.too_large(settings.max_body_bytes)
            hold.grow(region_bytes)
            infer = await self.service.beside(read, *given)
        assert not isinstance(infer, ReadBeside), "it was read beside the loop"
        if infer is None:
            infer = await self._understand_slowly(served, body, length, hold)
        self._admit(infer, max(0, infer.made_bytes(body) - region_bytes), hold)
        return infer

    async def _understand_slowly(
        self, served: ServedVersion, body: bytes, length: int, hold: Hold
    ) -> InferRequest:
        settings, regions = self.service.settings, self.service.regions
        head, binary = body[:length], memoryview(body)[length:]
        if length > asgi.BESIDE_BYTES:
            async with asgi.room(self.service.large_json, head, served.inputs, hold):
                header = await self.service.beside(asgi.json_object, head)
                return await self.service.beside(v2_request.understand, served, header, binary, regions)
        header = asgi.json_object(head)
        region_bytes = 0 if regions is None else shm.input_bytes(header, regions)
        if region_bytes > settings.max_body_bytes:
            raise asgi.too_large(settings.max_body_bytes)
        if len(binary) + region_bytes > shm.INLINE_BYTES:
            return await self.service.beside(v2_request.understand, served, header, binary, regions)
        return v2_request.understand(served, header, binary, regions)


def _is_large(header_bytes: int, body: Any) -> bool:
    """Whether a request is read beside the event loop."""
    return header_bytes > asgi.READ_BYTES or len(body) - header_bytes > shm.INLINE_BYTES


def _parse_length(value: bytes, size: int) -> int:
    if not value.isdigit() or len(value) > 18 or not 0 < int(value) <= size:
        what = f"Inference-Header-Content-Length is {short(value.decode('latin-1'))}"
        raise bad_request(f"{what}; expected a number from 1 to the body's {size} bytes")
    return int(value)


def _restated(head: bytes, state: State) -> bytes:
    """Rewrites a response's JSON for the state that answered instead."""
    changed = {"sequence": state.sequence or None}
    return _with_parameters(head, changed, model_version=str(state.version))


def _with_parameters(head: bytes, changed: dict[str, Any], **fields: str) -> bytes:
    """Rewrites a response's JSON with other parameters. None: without that one."""
    response = {**orjson.loads(head), **fields}
    given = response.pop("parameters", {}) | changed
    parameters = {name: value for name, value in given.items() if value is not None}
    return orjson.dumps({**response, "parameters": parameters} if parameters else response)
