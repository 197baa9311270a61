"""The friendly JSON interface: POST /v1/lookup, GET /v1/models, GET /health, GET /metrics, and FastAPI's /docs."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.responses import PlainTextResponse
from fastapi_offline import FastAPIOffline
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from tableside.serving import VERSION, metrics
from tableside.serving.admission import JSON_GROWTH, Hold
from tableside.serving.errors import INTERNAL_ERROR, ApiError, Kind, short, wrong_method
from tableside.serving.http import static_page
from tableside.serving.http.asgi import (
    JSON_TYPE,
    Disconnected,
    Receive,
    Scope,
    Send,
    check_json_answer,
    check_json_size,
    error_response,
    holding,
    read_body,
    respond,
    respond_error,
)
from tableside.serving.http.ids import describe_ids
from tableside.serving.http.large_json import ANSWER_BYTES, BESIDE_BYTES, inputs_of, room
from tableside.serving.http.openapi import POSTS, complete, refusals, takes
from tableside.serving.http.v1_request import Body, JsonRequest, Layouts, encode, parse
from tableside.serving.metrics import MetricsOfModels, Stages
from tableside.serving.service import Service
from tableside.serving.version import ServedVersion

logger = logging.getLogger("tableside")


class Jagged(BaseModel):
    """A feature's ids with their bags."""

    values: list[int] = Field(description="ids, bag after bag")
    lengths: list[int] | None = Field(None, description="ids of each bag; not needed for an unpooled feature")
    weights: list[float] | None = Field(None, description="one an id")


class FeaturesRequest(BaseModel):
    """What both take."""

    model: str
    version: int | None = Field(None, description="the live one where left out")
    features: dict[str, list[list[int]] | Jagged] = Field(description="feature -> bags of ids, or values and lengths")


class LookupRequest(FeaturesRequest):
    """What POST /v1/lookup takes."""

    found: bool = Field(False, description="whether the answer says which ids the tables have")

    model_config = {"json_schema_extra": {"examples": [{"model": "demo", "features": {"clicked": [[1, 2, 3], [], [7]]}}]}}


class LookupResponse(BaseModel):
    """What it answers: one vector a bag, or one an id where the feature is not pooled."""

    model: str
    version: int
    sequence: int = Field(0, description="of the last change that answered; 0: none was applied")
    vectors: dict[str, list[list[float]]]
    found: dict[str, list[list[bool]] | list[bool]] | None = Field(
        None, description="feature -> whether its table has each id, in the shape of the ids; where it was asked for"
    )


class ScoreRequest(FeaturesRequest):
    """What POST /v1/score takes: one bag of each feature a row, and the scorer's dense tensors."""

    dense: dict[str, list[list[float]]] = Field({}, description="dense tensor -> rows of numbers")

    model_config = {
        "json_schema_extra": {"examples": [{"model": "ctr", "features": {"user": [[1]]}, "dense": {"context": [[0.5, 1.0]]}}]}
    }


class ScoreResponse(BaseModel):
    """What it answers: one score a row, or a list of them."""

    model: str
    version: int
    sequence: int = Field(0, description="of the last change that answered; 0: none was applied")
    scores: list[float] | list[list[float]]


class Health(BaseModel):
    """Whether this worker takes requests, and from which versions."""

    status: str
    models: dict[str, int]


class Models(BaseModel):
    """What a server serves: of itself its version, devices and doors; of each model its version, tables, features and more."""

    server: dict[str, Any]
    models: list[dict[str, Any]]


class V1:
    """ASGI: answers everything but /v2. Lookups and scores go a short path; FastAPI describes them, and answers the rest."""

    def __init__(self, service: Service, tell: Callable[[], None] = lambda: None) -> None:
        self._service = service
        self._counts = MetricsOfModels("v1")
        self._layouts = Layouts()
        self._app = _make_fastapi(service, self, tell)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        score = _IS_SCORE.get(scope["path"])
        if score is None or scope["type"] != "http" or scope["method"] != "POST":
            if scope["type"] == "http" and scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}  # whoever sends the answer leaves its body out
            await self._app(scope, receive, send)
        else:
            await self._answer_or_refuse(scope, receive, send, score)

    async def _answer_or_refuse(self, scope: Scope, receive: Receive, send: Send, score: bool) -> None:
        try:
            await respond(send, 200, (JSON_TYPE,), await self.answer(scope, receive, score))
        except ApiError as error:
            metrics.refused(_model_of(scope), "v1", error.kind, error.lacking)
            await respond_error(send, error)
        except Disconnected:
            logger.debug("a client left before its request was complete")
        except Exception:
            metrics.refused(_model_of(scope), "v1", Kind.INTERNAL)
            await respond_error(send, ApiError(500, Kind.INTERNAL, INTERNAL_ERROR))
            raise

    async def answer(self, scope: Scope, receive: Receive, score: bool) -> bytes:
        """The JSON of the answer to a lookup or a score. ApiError: the request is refused."""
        service = self._service
        with holding(scope, service.in_flight) as hold:
            body = await read_body(scope, receive, service.settings.max_body_bytes, hold)
            check_json_size(len(body), service.settings.max_json_bytes)
            await service.slices.take()
            return await self._work_on(scope, body, score, hold)

    async def _work_on(self, scope: Scope, text: bytes, score: bool, hold: Hold) -> bytes:
        service, started = self._service, time.perf_counter()
        served, laid_out = await self._laid_out(scope, text, score, hold)
        request = laid_out.request
        check_json_answer(request.out_bytes, service.settings.max_json_bytes)
        hold.grow((1 + JSON_GROWTH) * request.out_bytes + len(laid_out.inputs))
        parsed = time.perf_counter()
        answer = await service.executor.run(request, laid_out.inputs)
        looked_up = time.perf_counter()
        result = answer.state or served.state, laid_out, answer.buffer
        is_large = request.out_bytes > ANSWER_BYTES or len(text) > BESIDE_BYTES
        encoded = await service.beside(encode, *result) if is_large else encode(*result)
        times = Stages(started, parsed, looked_up, time.perf_counter())
        self._counts[served.header.model].answered(request, len(text), times, answer.unfound)
        return encoded

    async def _laid_out(self, scope: Scope, text: bytes, score: bool, hold: Hold) -> tuple[ServedVersion, JsonRequest]:
        """The request, and the version that it asks. What its JSON unpacked to is gone when this returns."""
        service = self._service
        if len(text) <= BESIDE_BYTES:
            body, understood = self._understand(scope, text, score)
            return understood or await self._of_version(body, score)
        inputs = max((inputs_of(engine.attached()) for engine in service.engines.values()), default=0)
        async with room(service.large_json, text, inputs, hold):
            body, understood = await service.beside(self._understand, scope, text, score)
            return understood or await self._of_version(body, score)

    async def _of_version(self, body: Body, score: bool) -> tuple[ServedVersion, JsonRequest]:
        """The request for the version that it names, which is attached where it is not yet."""
        served = await self._service.version(body.fields["model"], body.fields["version"])
        laid_out = await self._service.beside(self._layouts.lay_out, served, body, score)
        laid_out.request.names_version = True
        return served, laid_out

    def _understand(self, scope: Scope, text: bytes, score: bool) -> tuple[Body, tuple[ServedVersion, JsonRequest] | None]:
        """A request's JSON, and the request for the live version; None: it names another, which may have to be attached.

        Runs on the event loop or beside it, at once: each change of threads costs as much as parsing a thousand ids.
        """
        body = parse(text, ("dense",) if score else ("found",))
        served = self._service.live(body.fields["model"])
        scope[_MODEL] = served.header.model
        if body.fields.get("version") is not None:
            return body, None
        return body, (served, self._layouts.lay_out(served, body, score))


_IS_SCORE = {"/v1/lookup": False, "/v1/score": True}
_MODEL = "tableside.model"  # the key of the model that a request named, in its scope


def _model_of(scope: Scope) -> str:
    return str(scope.get(_MODEL, metrics.UNKNOWN))


def make_app(service: Service, tell: Callable[[], None]) -> V1:
    """The application of a worker, but for /v2. tell: brings what this worker counts up to date, before a scrape."""
    return V1(service, tell)


def _make_fastapi(service: Service, v1: V1, tell: Callable[[], None]) -> FastAPI:
    """FastAPI's part. Requests of /v1/lookup and /v1/score go by it; it describes them, and refuses other methods."""
    app: FastAPI = FastAPIOffline(
        title="Tableside",
        summary="Quantized embedding tables from shared memory",
        version=VERSION,
        redoc_url=None,
        static_url="/docs/files",
    )
    refused = refusals(*POSTS)
    draining: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "It drains"}, **refusals(405)}
    _answer_errors(app)

    @app.post(
        "/v1/lookup",
        response_model=LookupResponse,
        openapi_extra=takes(LookupRequest),
        responses=refused,
        summary="Look ids up",
    )
    async def lookup(http: HttpRequest) -> Response:
        return Response(await v1.answer(http.scope, http.receive, score=False), media_type="application/json")

    @app.post(
        "/v1/score",
        response_model=ScoreResponse,
        openapi_extra=takes(ScoreRequest),
        responses=refused,
        summary="Score rows",
    )
    async def score(http: HttpRequest) -> Response:
        return Response(await v1.answer(http.scope, http.receive, score=True), media_type="application/json")

    @app.get("/v1/models", summary="What is served", response_model=Models, responses=refusals(405))
    async def models() -> Response:
        return _json(
            {"server": _describe_server(service), "models": [_describe_model(service, name) for name in service.engines]}
        )

    @app.get("/health", response_model=Health, summary="Whether this worker takes requests", responses=draining)
    async def health() -> Response:
        status = "ready" if service.ready else "draining"
        versions = {name: engine.attached().version for name, engine in service.engines.items()}
        return _json({"status": status, "models": versions}, 200 if service.ready else 503)

    @app.get(
        "/metrics",
        summary="Prometheus metrics, summed over all workers",
        response_class=PlainTextResponse,
        responses=refusals(405),
    )
    async def prometheus() -> Response:
        tell()
        text = await asyncio.get_running_loop().run_in_executor(None, metrics.exposition, service.engines.values())
        return Response(text, media_type="text/plain; version=0.0.4")

    static_page.add_to(app)
    _describe(app, LookupRequest, ScoreRequest)
    return app


def _describe(app: FastAPI, *taken: type[BaseModel]) -> None:
    """Completes /openapi.json: with the schemas of bodies, which FastAPI does not know as they are parsed here, and with /v2."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        is_new = app.openapi_schema is None
        found = described()
        return complete(found, taken) if is_new else found

    app.openapi = openapi  # type: ignore[method-assign]


def _answer_errors(app: FastAPI) -> None:
    """Has every error answered as {"error": message}, and counted."""

    @app.exception_handler(ApiError)
    async def api_error(http: HttpRequest, error: ApiError) -> Response:
        metrics.refused(_model_of(http.scope), "v1", error.kind, error.lacking)
        return _refusal(error)

    @app.exception_handler(HTTPException)
    async def http_error(http: HttpRequest, error: HTTPException) -> Response:
        metrics.refused(metrics.UNKNOWN, "v1", Kind.NOT_FOUND if error.status_code == 404 else Kind.BAD_REQUEST)
        known = "/v1/lookup, /v1/score, /v1/models, /v2, /health, /metrics, /docs, and a page for people at /"
        if error.status_code == 405:
            return _refusal(wrong_method(http.method, http.url.path, *(error.headers or {}).get("Allow", "GET").split(", ")))
        what = f"{http.method} {short(http.url.path)}: {error.detail}; this server has: {known}"
        return _json({"error": what}, error.status_code)

    @app.exception_handler(Exception)  # Starlette answers with it and raises the error again, so that it is logged
    async def internal(http: HttpRequest, error: Exception) -> Response:
        metrics.refused(_model_of(http.scope), "v1", Kind.INTERNAL)
        return _json({"error": INTERNAL_ERROR}, 500)

    @app.exception_handler(Disconnected)
    async def disconnected(http: HttpRequest, error: Disconnected) -> Response:
        return Response(status_code=400)  # no one reads it


def _refusal(error: ApiError) -> Response:
    status, headers, parts = error_response(error)
    return Response(parts[0], status, {name.decode(): value.decode() for name, value in headers})


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _describe_server(service: Service) -> dict[str, Any]:
    doors = ["HTTP: /v1 (JSON), /v2 (Open Inference Protocol)"]
    if service.regions is not None:
        doors.append("shared memory of clients")
    return {"version": VERSION, "devices": list(service.settings.devices), "doors": doors}


def _describe_model(service: Service, name: str) -> dict[str, Any]:
    served = service.engines[name].attached()
    header, placements = served.header, served.placed.placements
    return {
        "name": name,
        "version": served.version,
        "sequence": served.sequence,
        "behind_seconds": service.engines[name].behind_s,
        "deltas": [
            {
                "sequence": d.sequence,
                "rows": d.entries,
                "bytes": d.segment.size,
                "made_at": d.change.made_at or None,
                "applied_at": d.change.applied_at,
            }
            for d in served.segment.deltas
        ],
        "versions": service.published(name),
        "created": header.created,
        "backend": served.backend.description,
        "segment_bytes": served.segment.size,
        "fp32_bytes": header.fp32_bytes,
        "load_seconds": header.load.get("seconds"),
        "tables": [
            {
                "name": t.name,
                "row_format": t.row_format,
                "rows": t.rows,
                "dim": t.dim,
                "bytes": t.bytes,
                "placement": placements[t.name],
                **describe_ids(t),
            }
            for t in header.tables
        ],
        "scorer": None if served.scorer is None else served.scorer.describe(),
        "features": [{"name": f.name, "table": f.table, "pooling": f.pooling, "output": f.output} for f in header.features],
    }
