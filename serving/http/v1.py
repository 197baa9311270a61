"""The friendly JSON interface: POST /v1/lookup, GET /v1/models, GET /health, GET /metrics, and FastAPI's /docs."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from pydantic import BaseModel, Field
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.exceptions import HTTPException

from tableside.serving import metrics
from tableside.serving.admission import JSON_GROWTH, Hold
from tableside.serving.errors import INTERNAL_ERROR, ApiError, Kind, bad_request, short
from tableside.serving.http.asgi import (
    JSON_BESIDE_BYTES,
    Disconnected,
    check_json_answer,
    check_json_size,
    holding,
    json_object,
    read_body,
    retry_after,
)
from tableside.serving.http.tensors import DATATYPES, Tensor, feature_inputs, from_list
from tableside.serving.metrics import ModelMetrics, Stages
from tableside.serving.places import DenseInput, Output
from tableside.serving.request import Request
from tableside.serving.service import Service
from tableside.serving.version import ServedVersion


class Jagged(BaseModel):
    """A feature's ids with their bags."""

    values: list[int] = Field(description="ids, bag after bag")
    lengths: list[int] | None = Field(None, description="ids of each bag; not needed for an unpooled feature")
    weights: list[float] | None = Field(None, description="one an id")


class LookupRequest(BaseModel):
    """What POST /v1/lookup takes."""

    model: str
    version: int | None = Field(None, description="the live one where left out")
    features: dict[str, list[list[int]] | Jagged] = Field(description="feature -> bags of ids, or values and lengths")

    model_config = {"json_schema_extra": {"examples": [{"model": "demo", "features": {"clicked": [[1, 2, 3], [], [7]]}}]}}


class LookupResponse(BaseModel):
    """What it answers: one vector a bag, or one an id where the feature is not pooled."""

    model: str
    version: int
    vectors: dict[str, list[list[float]]]


class ScoreRequest(LookupRequest):
    """What POST /v1/score takes: one bag of each feature a row, and the scorer's dense tensors."""

    dense: dict[str, list[list[float]]] = Field({}, description="dense tensor -> rows of numbers")

    model_config = {
        "json_schema_extra": {"examples": [{"model": "ctr", "features": {"user": [[1]]}, "dense": {"context": [[0.5, 1.0]]}}]}
    }


class ScoreResponse(BaseModel):
    """What it answers: one score a row, or a list of them."""

    model: str
    version: int
    scores: list[float] | list[list[float]]


class Health(BaseModel):
    """Whether this worker takes requests, and from which versions."""

    status: str
    models: dict[str, int]


def make_app(service: Service) -> FastAPI:
    """The FastAPI application of a worker."""
    app = FastAPI(title="Tableside", summary="Quantized embedding tables from shared memory", redoc_url=None)
    counts = {name: ModelMetrics(name, "v1") for name in service.engines}
    _answer_errors(app)

    async def answer(http: HttpRequest, score: bool) -> Response:
        with holding(http.scope, service.in_flight) as hold:
            limit = service.settings.max_json_bytes
            body = await read_body(http.scope, http.receive, service.settings.max_body_bytes, hold)
            check_json_size(len(body), limit)
            await service.slices.take()
            return await work_on(http, body, score, hold)

    async def work_on(http: HttpRequest, body: bytes, score: bool, hold: Hold) -> Response:
        started = time.perf_counter()
        is_large = len(body) > JSON_BESIDE_BYTES
        more = ("dense",) if score else ()
        raw = await service.beside(_parse, body, more) if is_large else _parse(body, more)
        served = service.live(raw["model"])
        http.state.model = served.header.model
        if raw.get("version") is not None:
            served = await service.version(raw["model"], raw["version"])
        arguments = (served, raw["features"], raw.get("dense", {}), score)
        request, inputs = await service.beside(_lay_out, *arguments) if is_large else _lay_out(*arguments)
        check_json_answer(request.out_bytes, service.settings.max_json_bytes)
        hold.grow((1 + JSON_GROWTH) * request.out_bytes)
        parsed = time.perf_counter()
        buffer = await service.executor.run(request, inputs)
        looked_up = time.perf_counter()
        found: dict[str, Any] = {"model": served.header.model, "version": served.version}
        if request.scoring is not None:
            found["scores"] = request.scoring.output.view(buffer)
        else:
            found["vectors"] = {o.feature: _vectors(o, buffer) for o in request.outputs}
        response = Response(orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
        times = Stages(started, parsed, looked_up, time.perf_counter())
        counts[served.header.model].answered(request, len(body), times)
        return response

    @app.post("/v1/lookup", response_model=LookupResponse, openapi_extra=_takes(LookupRequest), summary="Look ids up")
    async def lookup(http: HttpRequest) -> Response:
        return await answer(http, score=False)

    @app.post("/v1/score", response_model=ScoreResponse, openapi_extra=_takes(ScoreRequest), summary="Score rows")
    async def score(http: HttpRequest) -> Response:
        return await answer(http, score=True)

    @app.get("/v1/models", summary="What is served")
    async def models() -> Response:
        return _json({"models": [_describe(service, name) for name in service.engines]})

    @app.get("/health", response_model=Health, summary="Whether this worker takes requests")
    async def health() -> Response:
        status = "ready" if service.ready else "draining"
        versions = {name: engine.attached().version for name, engine in service.engines.items()}
        return _json({"status": status, "models": versions}, 200 if service.ready else 503)

    @app.get("/metrics", summary="Prometheus metrics, summed over all workers", response_class=Response)
    async def prometheus() -> Response:
        text = await asyncio.get_running_loop().run_in_executor(None, metrics.exposition, service.engines.values())
        return Response(text, media_type="text/plain; version=0.0.4")

    _describe_bodies(app, LookupRequest, ScoreRequest)
    return app


_SCHEMAS = "#/components/schemas/"


def _takes(schema: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a body: a reference to a schema that `_describe_bodies` adds."""
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + schema.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def _describe_bodies(app: FastAPI, *taken: type[BaseModel]) -> None:
    """Adds the schemas of bodies to /openapi.json. FastAPI does not know them, as bodies are parsed here."""
    described = app.openapi
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [(schema, "validation") for schema in taken]
    _, definitions = models_json_schema(modes, ref_template=_SCHEMAS + "{model}")

    def openapi() -> dict[str, Any]:
        found = described()
        found.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return found

    app.openapi = openapi  # type: ignore[method-assign]


def _answer_errors(app: FastAPI) -> None:
    """Has every error answered as {"error": message}, and counted."""

    @app.exception_handler(ApiError)
    async def api_error(http: HttpRequest, error: ApiError) -> Response:
        metrics.refused(getattr(http.state, "model", metrics.UNKNOWN), "v1", error.kind)
        headers = {name.decode(): value.decode() for name, value in retry_after(error.status)}
        return Response(orjson.dumps({"error": error.message}), error.status, headers, "application/json")

    @app.exception_handler(HTTPException)
    async def http_error(http: HttpRequest, error: HTTPException) -> Response:
        metrics.refused(metrics.UNKNOWN, "v1", Kind.NOT_FOUND if error.status_code == 404 else Kind.BAD_REQUEST)
        known = "/v1/lookup, /v1/score, /v1/models, /v2, /health, /metrics, /docs"
        return _json(
            {"error": f"{http.method} {short(http.url.path)}: {error.detail}; this server has: {known}"},
            error.status_code,
        )

    @app.exception_handler(Exception)  # Starlette answers with it and raises the error again, so that it is logged
    async def internal(http: HttpRequest, error: Exception) -> Response:
        metrics.refused(getattr(http.state, "model", metrics.UNKNOWN), "v1", Kind.INTERNAL)
        return _json({"error": INTERNAL_ERROR}, 500)

    @app.exception_handler(Disconnected)
    async def disconnected(http: HttpRequest, error: Disconnected) -> Response:
        return Response(status_code=400)  # no one reads it


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _vectors(output: Output, buffer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return output.view(buffer).astype(np.float32, copy=False)


def _parse(body: bytes, more: tuple[str, ...]) -> dict[str, Any]:
    raw = json_object(body)
    known = ("model", "version", "features", *more)
    if unknown := sorted(set(raw) - set(known)):
        raise bad_request(f"field {short(unknown[0])} is unknown; expected {', '.join(known)}")
    for field in ("model", "features"):
        if field not in raw:
            raise bad_request(f"field {field!r} is missing")
    if raw.get("version") is not None and type(raw["version"]) is not int:
        raise bad_request(f"version is {short(raw['version'])}; expected a number from 1")
    return raw


def _lay_out(served: ServedVersion, features: Any, dense: Any, score: bool) -> tuple[Request, bytes]:
    if not isinstance(features, dict) or not features:
        raise bad_request("features: expected an object of feature to ids, with at least one feature")
    tensors, parts, at = [], [], 0
    for feature, value in features.items():
        served.feature(feature)
        for part, array in _arrays(feature, value):
            name = f"{feature}.{part}"
            tensors.append(Tensor(name, DATATYPES[part], (array.size,), at))
            parts.append(array.tobytes())
            at += array.nbytes
    given = []
    for name, array in _dense(served, dense):
        given.append(DenseInput(name, at, *array.shape))
        parts.append(array.tobytes())
        at += array.nbytes
    return served.lay_out(feature_inputs(tensors), given, score), b"".join(parts)


def _dense(served: ServedVersion, raw: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    widths = {} if served.scorer is None else served.scorer.dense
    if not isinstance(raw, dict):
        raise bad_request("dense: expected an object of dense tensor to rows")
    for name, rows in raw.items():
        if name not in widths:
            raise bad_request(f"dense tensor {short(name)} is unknown; the scorer has: {', '.join(widths) or 'none'}")
        if not isinstance(rows, list) or not all(isinstance(r, list) and len(r) == widths[name] for r in rows):
            raise bad_request(f"dense tensor {name!r}: expected a list of rows of {widths[name]} numbers each")
        yield name, from_list(name, "FP32", rows).reshape(len(rows), widths[name])


def _arrays(feature: str, value: Any) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """The values, lengths and weights of a feature, from its JSON. ApiError: it is something else."""
    if isinstance(value, list):
        if not all(isinstance(bag, list) for bag in value):
            raise bad_request(f"feature {feature!r}: expected a list of bags, [[id, ...], ...], or values and lengths")
        lengths = np.array([len(bag) for bag in value], np.int32)
        return [("values", from_list(feature, "INT64", value)), ("lengths", lengths)]
    if not isinstance(value, dict) or "values" not in value or set(value) - {"values", "lengths", "weights"}:
        raise bad_request(f"feature {feature!r}: expected a list of bags, or an object of values, lengths, weights")
    parts = [part for part in ("values", "lengths", "weights") if value.get(part) is not None]
    for part in parts:
        if isinstance(value[part], list) and any(isinstance(x, list) for x in value[part][:1]):
            raise bad_request(f"{short(f'{feature}.{part}')}: expected a list of numbers, not of lists")
    return [(part, from_list(f"{feature}.{part}", DATATYPES[part], value[part])) for part in parts]


def _describe(service: Service, name: str) -> dict[str, Any]:
    served = service.engines[name].attached()
    header, placements = served.header, served.placed.placements
    return {
        "name": name,
        "version": served.version,
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
                "placement": placements[t.name],
            }
            for t in header.tables
        ],
        "scorer": None if served.scorer is None else served.scorer.describe(),
        "features": [{"name": f.name, "table": f.table, "pooling": f.pooling, "output": f.output} for f in header.features],
    }
