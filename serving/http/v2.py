"""The Open Inference Protocol V2 (github.com/kserve/open-inference-protocol) with the binary tensor, statistics and
model configuration extensions, the model repository (`serving.http.repository`), and Triton's shared memory where the server
allows it (`serving.http.shm`, `serving.http.cuda_shm`). It is an ASGI application of its own, as the path that a lookup takes
must be short.

    GET  /v2                        GET  /v2/models/{m}[/versions/{v}]
    GET  /v2/health/live|ready      GET  /v2/models/{m}[/versions/{v}]/ready|config|stats
    GET  /v2/models/stats           POST /v2/models/{m}[/versions/{v}]/infer
    POST /v2/repository/...                 /v2/systemsharedmemory/...     /v2/cudasharedmemory/...
"""

import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tableside.serving import VERSION
from tableside.serving.admission import JSON_GROWTH, Hold
from tableside.serving.errors import bad_request, not_found, short, wrong_method
from tableside.serving.http import cuda_shm, kjt, repository, shm, v2_request
from tableside.serving.http.asgi import (
    JSON_TYPE,
    Receive,
    Response,
    Scope,
    Send,
    check_json_answer,
    check_json_size,
    header,
    holding,
    json_object,
    read_body,
    respond,
    respond_json,
    too_large,
)
from tableside.serving.http.ids import describe_ids
from tableside.serving.http.large_json import ANSWER_BYTES, BESIDE_BYTES, inputs_of, room
from tableside.serving.http.origins import check_type
from tableside.serving.http.repeated import Repeated
from tableside.serving.http.templates import Templates
from tableside.serving.http.v2_request import InferRequest
from tableside.serving.metrics import MetricsOfModels, Stages, statistics
from tableside.serving.regions import PartlyOnDevice
from tableside.serving.request import Answer
from tableside.serving.service import Service
from tableside.serving.version import ServedVersion

_BINARY_TYPE = (b"content-type", b"application/octet-stream")
LENGTH = b"inference-header-content-length"
Found = Answer | Exception  # what was looked up, or why it was not
Later = Callable[[Callable[[Found], Response], Found], None]


class V2:
    """Answers everything under /v2. The caller answers with the ApiErrors that are raised."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._metrics = MetricsOfModels("v2")
        self._templates = Templates()
        self._repeated = Repeated()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/").split("/")[2:]
        if path[:1] == ["models"] and path[-1] == "infer":
            _check_method(scope, "POST")
            await self._infer(scope, receive, send, path[1:-1])
        elif path[:1] == [repository.PATH]:
            _check_method(scope, "POST")
            with holding(scope, self.service.in_flight) as hold:
                body = await read_body(scope, receive, BESIDE_BYTES, hold)
            found = await repository.answer(self.service, path[1:], body, header(scope, b"authorization"))
            await (respond(send, 200, ()) if found is None else respond_json(send, found))
        elif path[:1] in ([shm.PATH], [cuda_shm.PATH]):
            await self._share(scope, receive, send, path)
        else:
            _check_method(scope, "GET")
            await self._get(send, path)

    async def _get(self, send: Send, path: list[str]) -> None:
        match path:
            case []:
                await respond_json(send, _server_metadata(self.service))
            case ["health", "live"]:
                await respond_json(send, {"live": True})
            case ["health", "ready"]:
                await respond_json(send, {"ready": self.service.ready}, 200 if self.service.ready else 503)
            case ["models", "stats"]:
                stats = [s for engine in self.service.engines.values() for s in self._stats(engine.attached())]
                await respond_json(send, {"model_stats": stats})
            case ["models", _, *_]:
                named = path[1:]
                what = named.pop() if named[-1] in ("ready", "config", "stats") else ""
                served = await self._served(named)
                if what == "ready":
                    said = {"name": served.header.model, "ready": self.service.ready}
                    await respond_json(send, said, 200 if self.service.ready else 503)
                elif what == "config":
                    await respond_json(send, _config(served))
                elif what == "stats":
                    await respond_json(send, {"model_stats": self._stats(served)})
                else:
                    await respond_json(send, self._metadata(served))
            case _:
                raise not_found(f"{short('/v2/' + '/'.join(path))} is not a path of this server; GET /v2 describes it")

    async def _served(self, named: list[str]) -> ServedVersion:
        match named:
            case [model]:
                return self.service.live(model)
            case [model, "versions", version]:
                return await self.service.version(model, version)
            case _:
                raise not_found(f"{short('/v2/models/' + '/'.join(named))} is not a path of this server")

    async def _share(self, scope: Scope, receive: Receive, send: Send, path: list[str]) -> None:
        body = b""
        if scope["method"] == "POST":
            check_type(header(scope, b"content-type"))
            with holding(scope, self.service.in_flight) as hold:
                body = await read_body(scope, receive, BESIDE_BYTES, hold)
        regions = self.service.regions
        if path[0] == cuda_shm.PATH:
            found = await cuda_shm.answer(regions, self.service.link, scope["method"], path[1:], body)
        else:
            found = shm.answer(regions, scope["method"], path[1:], body)
        if found is None:  # an empty body, as Triton answers: its client reads none, and would close a connection that has more
            await respond(send, 200, ())
        else:
            await respond_json(send, found)

    async def _infer(self, scope: Scope, receive: Receive, send: Send, named: list[str]) -> None:
        with holding(scope, self.service.in_flight) as hold:
            body = await read_body(scope, receive, self.service.settings.max_body_bytes, hold)
            await self.service.slices.take()
            response = await self.infer(named, header(scope, LENGTH), body, hold)
            await respond(send, response.status, response.headers, *response.parts)

    def infer_soon(
        self, named: list[str], header_length: bytes | None, body: bytes | memoryview, hold: Hold, later: Later
    ) -> Response | Coroutine[Any, Any, Response] | None:
        """The response to an infer request that is understood by a template and looked up at once; else what gives it.

        None: `later` will be called with what makes the response, and what it makes it of. ApiError, from here or from what
        makes the response: the request is refused. body: is the caller's again when this returns.
        """
        started = time.perf_counter()
        if len(named) != 1 or (header_length is None and self.service.regions is None):
            return self.infer(named, header_length, bytes(body), hold)
        served = self.service.live(named[0])
        infer = self._templates.match(served, body, _json_bytes(header_length, body), self.service.regions)
        if infer is None:
            return self.infer(named, header_length, bytes(body), hold)
        hold.grow(infer.request.out_bytes + infer.made_bytes(body))
        times = started, time.perf_counter()
        answer = self.service.executor.run_now(infer.request, infer.inputs)
        if answer is None:
            done = functools.partial(later, functools.partial(self._encode_found, served, infer, len(body), times))
            if infer.is_inline and self.service.executor.run_soon(infer.request, infer.inputs, done):
                return None
            return self._run(served, infer._replace(inputs=bytes(infer.inputs)), len(body), times)
        if not infer.is_inline:
            return self._write(served, infer, answer, len(body), times)
        return self._encode(served, infer, answer, len(body), times)

    async def infer(self, named: list[str], header_length: bytes | None, body: bytes, hold: Hold) -> Response:
        """The response to an infer request. ApiError: it is refused."""
        started = time.perf_counter()
        served = self.service.live(named[0]) if len(named) == 1 else await self._served(named)
        infer = await self._understand(served, header_length, body, hold)
        infer.request.names_version = len(named) > 1
        check_json_answer(infer.json_bytes, self.service.settings.max_json_bytes)
        hold.grow(infer.request.out_bytes + JSON_GROWTH * infer.json_bytes)
        return await self._run(served, infer, len(body), (started, time.perf_counter()))

    async def _run(self, served: ServedVersion, infer: InferRequest, body_bytes: int, times: tuple[float, float]) -> Response:
        answer = await self.service.executor.run(infer.request, infer.inputs)
        if not infer.is_inline or infer.json_bytes > ANSWER_BYTES:
            return await self._write(served, infer, answer, body_bytes, times)
        return self._encode(served, infer, answer, body_bytes, times)

    def _encode_found(
        self, served: ServedVersion, infer: InferRequest, body_bytes: int, times: tuple[float, float], found: Found
    ) -> Response:
        """The response of what was found; or raises what was found instead."""
        if isinstance(found, Exception):
            raise found
        return self._encode(served, infer, found, body_bytes, times)

    async def _write(
        self, served: ServedVersion, infer: InferRequest, answer: Answer, body_bytes: int, times: tuple[float, float]
    ) -> Response:
        """As `_encode`, where so much is written, into regions or as JSON, that it is done beside the event loop."""
        looked_up = time.perf_counter()
        encoded = await self.service.beside(v2_request.encode, infer, answer.buffer)
        return self._answered(served, infer, answer, encoded, body_bytes, (*times, looked_up))

    def _encode(
        self, served: ServedVersion, infer: InferRequest, answer: Answer, body_bytes: int, times: tuple[float, float]
    ) -> Response:
        """The response to a request that was looked up. times: when the request was begun and understood."""
        looked_up = time.perf_counter()
        encoded = v2_request.encode(infer, answer.buffer)
        return self._answered(served, infer, answer, encoded, body_bytes, (*times, looked_up))

    def _answered(
        self,
        served: ServedVersion,
        infer: InferRequest,
        answer: Answer,
        encoded: tuple[bytes, list[Any]],
        body_bytes: int,
        times: tuple[float, float, float],
    ) -> Response:
        """Counts a request that is answered; its response. times: when it was begun, understood and looked up."""
        head, parts = encoded
        if answer.state is not None:
            head = v2_request.restated(head, answer.state)
        # Counted before it is sent: a worker that is killed in between has not answered, and no answer is left out.
        stages = Stages(*times, time.perf_counter())
        self._metrics[served.header.model].answered(infer.request, body_bytes, stages, answer.unfound)
        if infer.has_binary:
            return Response(200, (_BINARY_TYPE, (LENGTH, b"%d" % len(head))), [head, *parts])
        return Response(200, (JSON_TYPE,), [head])

    async def _understand(self, served: ServedVersion, header_length: bytes | None, body: bytes, hold: Hold) -> InferRequest:
        """The infer request: by a template where its header came before but for its numbers, else by the slow path."""
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

    async def _understand_anew(self, served: ServedVersion, body: bytes, length: int, hold: Hold, is_large: bool) -> InferRequest:
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
        infer = await self.service.beside(v2_request.understand, *arguments) if is_large else v2_request.understand(*arguments)
        hold.grow(max(0, infer.made_bytes(binary) - region_bytes))  # those of regions were counted before
        if not isinstance(infer.inputs, PartlyOnDevice):
            self._templates.learn(served, head, header, infer)
        return infer

    def _metadata(self, served: ServedVersion) -> dict[str, Any]:
        return {
            "name": served.header.model,
            "versions": [str(v) for v in self.service.published(served.header.model)],
            "platform": "tableside",
            "inputs": v2_request.input_names(served),
            "outputs": v2_request.output_names(served),
            "parameters": {
                "backend": served.backend.description,
                "segment_bytes": served.segment.size,
                "tables": {t.name: f"{t.row_format} [{t.rows}, {t.dim}]" for t in served.header.tables},
                "table_ids": {t.name: describe_ids(t) for t in served.header.tables},
                "pooling": {n: f.pooling.label for n, f in served.features.items()},
                **kjt.describe(served),
            },
        }

    def _stats(self, served: ServedVersion) -> list[dict[str, Any]]:
        """In the statistics extension's shape: counts and nanoseconds over all workers and all versions since the start."""
        found = statistics(served.header.model)
        count = found["lookup"][0]
        ns = {stage: {"count": n, "ns": round(seconds * 1e9)} for stage, (n, seconds) in found.items()}
        total = sum(ns[s]["ns"] for s in ("parse", "lookup", "encode"))
        nothing = {"count": 0, "ns": 0}
        return [
            {
                "name": served.header.model,
                "version": str(served.version),
                "inference_count": count,
                "execution_count": count,
                "inference_stats": {
                    "success": {"count": count, "ns": total},
                    "fail": {"count": found["refused"][0], "ns": 0},
                    "queue": {"count": count, "ns": 0},
                    "compute_input": ns["parse"],
                    "compute_infer": ns["lookup"],
                    "compute_output": ns["encode"],
                    "cache_hit": nothing,
                    "cache_miss": nothing,
                },
                "batch_stats": [],
            }
        ]


def _check_method(scope: Scope, expected: str) -> None:
    if scope["method"] != expected and not (expected == "GET" and scope["method"] == "HEAD"):
        raise wrong_method(scope["method"], scope["path"], expected)


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


def _server_metadata(service: Service) -> dict[str, Any]:
    extensions = ["binary_tensor_data", "statistics", "model_configuration"]
    if service.admin_token is not None:
        extensions.append("model_repository")
    if service.regions is not None:
        extensions.append("system_shared_memory")
        if service.link is not None:
            extensions.append("cuda_shared_memory")
    return {"name": "tableside", "version": VERSION, "extensions": extensions}


def _config(served: ServedVersion) -> dict[str, Any]:
    kinds = {"INT64": "TYPE_INT64", "INT32": "TYPE_INT32", "FP32": "TYPE_FP32", "FP16": "TYPE_FP16", "BOOL": "TYPE_BOOL"}
    inputs = [
        {"name": i["name"], "data_type": kinds[i["datatype"]], "dims": i["shape"], "optional": True}
        for i in v2_request.input_names(served)
    ]
    outputs = [
        {"name": o["name"], "data_type": kinds[o["datatype"]], "dims": o["shape"]} for o in v2_request.output_names(served)
    ]
    return {
        "name": served.header.model,
        "platform": "tableside",
        "backend": "tableside",
        "version_policy": {"specific": {"versions": [served.version]}},
        "max_batch_size": 0,
        "input": inputs,
        "output": outputs,
        "parameters": {"backend": {"string_value": served.backend.description}},
    }
