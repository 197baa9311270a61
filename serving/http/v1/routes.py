"""The JSON interface: POST /v1/lookup and /v1/score, GET /v1/models, /health and /metrics."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from tableside.serving.executors.admission import JSON_GROWTH, Hold
from tableside.serving.executors.pending import answer_of
from tableside.serving.http import asgi, metadata, openapi
from tableside.serving.http.v1.request import (
    INPUTS_PER_BYTE,
    JsonRequest,
    encode,
    lay_out,
    lay_out_slowly,
    parse,
    read,
)
from tableside.serving.http.v2.reader import names_of
from tableside.serving.metrics import metrics
from tableside.serving.metrics.metrics import MetricsOfModels, Stages
from tableside.serving.model.version import ServedVersion
from tableside.serving.service.service import Service

_Result = TypeVar("_Result")


_HEADERS: openapi.Json = {"parameters": [openapi.DISK_TIMEOUT]}


class V1:
    """Answers a worker's lookups and scores. ApiError: the request is refused."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._counts = MetricsOfModels("v1")

    async def answer(self, scope: asgi.Scope, receive: asgi.Receive, score: bool) -> asgi.Response:
        settings, hold = self._service.settings, scope[asgi.HOLD]
        body = await asgi.read_body(scope, receive, settings.max_body_bytes, hold)
        asgi.check_json_size(len(body), settings.max_json_bytes)
        await self._service.slices.take()
        return asgi.Response(200, (asgi.JSON_TYPE,), await self._work_on(scope, body, score))

    async def _work_on(self, scope: asgi.Scope, text: bytes, score: bool) -> list[Any]:
        service, started, hold = self._service, time.perf_counter(), scope[asgi.HOLD]
        served, laid_out = await self._laid_out(scope, text, score, hold)
        request = laid_out.request
        request.deadline = asgi.deadline_of(asgi.header(scope, asgi.DISK_TIMEOUT))
        asgi.check_json_answer(request.out_bytes, service.settings.max_json_bytes)
        hold.grow((1 + JSON_GROWTH) * request.out_bytes)
        parsed = time.perf_counter()
        answer = await answer_of(service.executor.begin(request, laid_out.inputs))
        looked_up = time.perf_counter()
        result = answer.state or served.state, names_of(served), laid_out, answer
        has_long_masks = laid_out.wants_found and len(text) > asgi.BESIDE_BYTES
        is_large = request.out_bytes > asgi.ANSWER_BYTES or has_long_masks
        encoded = await service.beside(encode, *result) if is_large else encode(*result)
        times = Stages(started, parsed, looked_up, time.perf_counter())
        self._counts[served.header.model].answered(request, len(text), times, answer.unfound)
        return encoded

    async def _laid_out(
        self, scope: asgi.Scope, text: bytes, score: bool, hold: Hold
    ) -> tuple[ServedVersion, JsonRequest]:
        hold.grow(INPUTS_PER_BYTE * len(text))
        came = await self._call(len(text) > asgi.READ_BYTES, read, text, score)
        if came is not None:
            served = await self._served(scope, came.model, came.version)
            laid_out = lay_out(served, came)
            if laid_out is not None:
                laid_out.request.names_version = came.version is not None
                return served, laid_out
        return await self._laid_out_slowly(scope, text, score, hold)

    async def _laid_out_slowly(
        self, scope: asgi.Scope, text: bytes, score: bool, hold: Hold
    ) -> tuple[ServedVersion, JsonRequest]:
        """The same for a request that is most likely wrong. The parsed JSON is gone on return."""
        is_large = len(text) > asgi.BESIDE_BYTES
        async with self._room(text, hold) if is_large else contextlib.nullcontext():
            fields = await self._call(is_large, parse, text, ("dense",) if score else ("found",))
            version = fields.get("version")
            served = await self._served(scope, fields["model"], version)
            laid_out = await self._call(is_large, lay_out_slowly, served, fields, score)
        laid_out.request.names_version = version is not None
        return served, laid_out

    async def _served(self, scope: asgi.Scope, model: str, version: int | None) -> ServedVersion:
        served = self._service.live(model)
        scope[asgi.HOLD].model = served.header.model
        return served if version is None else await self._service.version(served.header.model, version)

    async def _call(self, is_long: bool, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Calls beside the event loop what takes long."""
        return await self._service.beside(function, *arguments) if is_long else function(*arguments)

    def _room(self, text: bytes, hold: Hold) -> contextlib.AbstractAsyncContextManager[None]:
        inputs = max((e.attached().inputs for e in self._service.engines.values()), default=0)
        return asgi.room(self._service.large_json, text, inputs, hold)


def add_to(app: FastAPI, service: Service, tell: Callable[[], None]) -> None:
    """Adds the routes. tell: updates this worker's counts before a scrape."""
    v1 = V1(service)

    @app.post(
        "/v1/lookup", **openapi.told("Look ids up", _LOOKED_UP, *openapi.POSTS, body=_LOOKUP, **_HEADERS)
    )
    async def lookup(http: Request) -> Response:
        return asgi.AsgiResponse(await v1.answer(http.scope, http.receive, score=False))

    @app.post("/v1/score", **openapi.told("Score rows", _SCORED, *openapi.POSTS, body=_SCORE, **_HEADERS))
    async def score(http: Request) -> Response:
        return asgi.AsgiResponse(await v1.answer(http.scope, http.receive, score=True))

    @app.get("/v1/models", **openapi.told("What is served", _MODELS, 405))
    async def models() -> Response:
        served = [metadata.describe_model(service, name) for name in service.engines]
        return asgi.json_response({"server": metadata.describe_server(service), "models": served})

    about = openapi.told("Whether this worker takes requests", _HEALTH, 405)
    about["responses"][503] = {"description": "It drains", **openapi.as_json(_HEALTH)}

    @app.get("/health", **about)
    async def health() -> Response:
        status = "ready" if service.ready else "draining"
        versions = {name: engine.attached().version for name, engine in service.engines.items()}
        return asgi.json_response({"status": status, "models": versions}, 200 if service.ready else 503)

    summary = "Prometheus metrics, summed over all workers"

    @app.get("/metrics", summary=summary, response_class=PlainTextResponse, responses=openapi.refusals(405))
    async def prometheus() -> Response:
        tell()
        text = await asyncio.to_thread(metrics.exposition, [*service.engines.values()])
        return Response(text, media_type="text/plain; version=0.0.4")


def _by_name(schema: openapi.Json, description: str) -> openapi.Json:
    return openapi.noted({"type": "object", "additionalProperties": schema}, description)


def _request(**more: openapi.Json) -> openapi.Json:
    version = openapi.noted(openapi.or_null(openapi.SIZE), "the live one where left out")
    found = openapi.an_object(
        "version", *more, model=openapi.STRING, version=version, features=_FEATURES, **more
    )
    return {**found, "additionalProperties": False}


def _answer(*optional: str, **values: openapi.Json) -> openapi.Json:
    sequence = openapi.noted(openapi.COUNT, "of the last change that answered; 0: none was applied")
    return openapi.an_object(
        *optional, "sequence", model=openapi.STRING, version=openapi.COUNT, sequence=sequence, **values
    )


_JAGGED = openapi.an_object(
    "lengths",
    "weights",
    values=openapi.noted(openapi.a_list(openapi.ID), "ids, bag after bag"),
    lengths=openapi.noted(
        openapi.or_null(openapi.a_list(openapi.COUNT)), "ids of each bag; not needed for an unpooled feature"
    ),
    weights=openapi.noted(openapi.or_null(openapi.a_list(openapi.NUMBER)), "one an id"),
)
_FEATURES = _by_name(
    {"anyOf": [openapi.a_list(openapi.a_list(openapi.ID)), _JAGGED]},
    "feature -> bags of ids, or values and lengths",
)
_ROWS = openapi.a_list(openapi.a_list(openapi.NUMBER))
_LOOKUP = _request(
    found=openapi.noted(openapi.BOOL, "whether the answer says which ids the tables have"),
)
_MASKS = openapi.a_list({"anyOf": [openapi.BOOL, openapi.a_list(openapi.BOOL)]})
_DEGRADED = _by_name(openapi.COUNT, "table -> ids whose rows came late from a disk, and are its default row")
_LOOKED_UP = _answer(
    "found",
    "degraded",
    vectors=_by_name(_ROWS, "feature -> one vector a bag, or one an id where the feature is not pooled"),
    found=_by_name(_MASKS, "feature -> whether its table has each id, in the ids' shape"),
    degraded=_DEGRADED,
)
_SCORE = _request(
    dense=_by_name(_ROWS, "dense tensor -> rows of numbers"),
)
_SCORED = _answer(
    "degraded",
    scores=openapi.a_list({"anyOf": [openapi.NUMBER, openapi.a_list(openapi.NUMBER)]}),
    degraded=_DEGRADED,
)
_MODELS = openapi.an_object(server=openapi.PARAMETERS, models=openapi.a_list(openapi.PARAMETERS))
_HEALTH = openapi.an_object(
    status=openapi.STRING, models=_by_name(openapi.COUNT, "model -> the version that answers")
)
