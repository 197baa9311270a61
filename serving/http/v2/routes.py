"""FastAPI's routes under /v2.

    GET  /v2                        GET  /v2/models/{m}[/versions/{v}]
    GET  /v2/health/live|ready      GET  /v2/models/{m}[/versions/{v}]/ready|config|stats
    GET  /v2/models/stats           POST /v2/models/{m}[/versions/{v}]/infer
    POST /v2/repository/...                 /v2/systemsharedmemory/...     /v2/cudasharedmemory/...

Connections hand most infer requests to the `Door` instead.
"""

import functools
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from fastapi import FastAPI, Request, Response, Security
from fastapi.security import HTTPBearer

from tableside.serving.http import asgi, metadata, openapi
from tableside.serving.http.openapi import (
    COUNT,
    GETS,
    PARAMETERS,
    POSTS,
    SIZE,
    STRING,
    Json,
    a_list,
    an_object,
    as_json,
    told,
)
from tableside.serving.http.origins import check_type
from tableside.serving.http.v2 import cuda_shm, repository, shm
from tableside.serving.http.v2.infer import LENGTH, V2, InferTarget
from tableside.serving.model.version import ServedVersion
from tableside.serving.service.service import Service

_PROTOCOL: list[str | Enum] = ["Open Inference Protocol V2"]


def _in_path(name: str, schema: Json) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": schema}


_MODEL, _REGION = _in_path("model", STRING), _in_path("region", {"type": "string", "minLength": 1})
_PLACES = (
    ("/v2/models/{model}", [_MODEL]),
    ("/v2/models/{model}/versions/{version}", [_MODEL, _in_path("version", SIZE)]),
)
_WHOLE = {
    "type": "string",
    "format": "binary",
    "description": "the JSON, then each binary tensor (docs/http.md)",
}
_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "description": "bytes of the JSON, where binary tensors follow it",
    "schema": SIZE,
}


def add_to(app: FastAPI, service: Service, v2: V2) -> None:
    _add_server(app, service)
    for place, parameters in _PLACES:
        _add_model(app, service, place, parameters)
        _add_infer(app, v2, place, parameters)
    _add_repository(app, service)
    key = an_object("offset", key=STRING, offset=COUNT, byte_size=SIZE)
    _add_regions(app, service, "System shared memory", shm.PATH, key, shm)
    handle = an_object(b64=STRING)
    handle = an_object(raw_handle=handle, device_id=COUNT, byte_size=SIZE)
    _add_regions(app, service, "CUDA shared memory", cuda_shm.PATH, handle, cuda_shm)


def _ready(summary: str, **more: Any) -> dict[str, Any]:
    found = told(summary, openapi.READY, *GETS, **more)
    refusal = {"$ref": "#/components/schemas/Refusal"}
    found["responses"][503] = {
        "description": "It drains, or rows were found damaged",
        **as_json({"anyOf": [openapi.READY, refusal]}),
    }
    return found


def _add_server(app: FastAPI, service: Service) -> None:
    @app.get("/v2", tags=_PROTOCOL, **told("Name, version, extensions", openapi.SERVER_METADATA, *GETS))
    async def server() -> Response:
        return asgi.json_response(metadata.server_metadata(service))

    @app.get("/v2/health/live", tags=_PROTOCOL, **told("Whether this worker lives", openapi.LIVE, *GETS))
    async def live() -> Response:
        return asgi.json_response({"live": True})

    @app.get("/v2/health/ready", tags=_PROTOCOL, **_ready("Whether this worker takes requests"))
    async def ready() -> Response:
        return asgi.json_response({"ready": service.ready}, 200 if service.ready else 503)

    @app.get(
        "/v2/models/stats", tags=_PROTOCOL, **told("Statistics of all models", openapi.STATISTICS, *GETS)
    )
    async def statistics_of_all() -> Response:
        served = [engine.attached() for engine in service.engines.values()]
        return asgi.json_response(
            {"model_stats": [s for one in served for s in metadata.model_statistics(one)]}
        )


def _add_model(app: FastAPI, service: Service, place: str, parameters: list[Json]) -> None:
    async def served(http: Request) -> ServedVersion:
        return await service.version(http.path_params["model"], http.path_params.get("version"))

    def add(
        path: str, summary: str, schema: Json, describe: Callable[[ServedVersion], Mapping[str, Any]]
    ) -> None:
        @app.get(place + path, tags=_PROTOCOL, **told(summary, schema, *GETS, parameters=parameters))
        async def show(http: Request) -> Response:
            return asgi.json_response(describe(await served(http)))

    add(
        "",
        "Inputs, outputs, tables",
        openapi.MODEL_METADATA,
        functools.partial(metadata.model_metadata, service),
    )
    named = an_object(name=STRING)
    add("/config", "The configuration, as Triton shows one", named, metadata.model_configuration)
    about = "Statistics of the model over all workers"
    add("/stats", about, openapi.STATISTICS, lambda one: {"model_stats": metadata.model_statistics(one)})

    @app.get(f"{place}/ready", tags=_PROTOCOL, **_ready("Whether the model answers", parameters=parameters))
    async def ready(http: Request) -> Response:
        found = {"name": (await served(http)).header.model, "ready": service.ready}
        return asgi.json_response(found, 200 if service.ready else 503)


def _add_infer(app: FastAPI, v2: V2, place: str, parameters: list[Json]) -> None:
    about = told(
        "Look up and score",
        openapi.INFER_RESPONSE,
        *POSTS,
        body=openapi.INFER_REQUEST,
        parameters=[*parameters, _LENGTH, openapi.DISK_TIMEOUT],
    )
    about["openapi_extra"]["requestBody"]["content"]["application/octet-stream"] = {"schema": _WHOLE}
    about["responses"][200]["content"]["application/octet-stream"] = {"schema": _WHOLE}

    @app.post(f"{place}/infer", tags=_PROTOCOL, **about)
    async def infer(http: Request) -> Response:
        service, named, hold = v2.service, http.path_params, http.scope[asgi.HOLD]
        hold.model = named["model"]
        body = await asgi.read_body(http.scope, http.receive, service.settings.max_body_bytes, hold)
        await service.slices.take()
        headers = (asgi.header(http.scope, name) for name in (LENGTH, asgi.DISK_TIMEOUT))
        target = InferTarget(named["model"], named.get("version"), *headers)
        return asgi.AsgiResponse(await v2.infer(target, body, hold))


def _add_repository(app: FastAPI, service: Service) -> None:
    tags: list[str | Enum] = ["Model repository"]
    token = Security(HTTPBearer(scheme_name="admin token", auto_error=False))
    ready, parameters = (
        as_json(an_object("ready", ready=openapi.BOOL)),
        as_json(an_object("parameters", parameters=PARAMETERS)),
    )
    about = told("Which models there are", openapi.REPOSITORY_INDEX, *POSTS, requestBody=ready)

    async def asked(http: Request) -> dict[str, Any]:
        body = await _body(http)
        return asgi.json_object(body) if body.strip() else {}

    @app.post("/v2/repository/index", tags=tags, **about)
    async def index(http: Request) -> Response:
        return asgi.json_response(
            repository.index(service, await asked(http), asgi.header(http.scope, b"authorization"))
        )

    for action, summary in (("load", "Serve a published model"), ("unload", "Let a model go")):
        about = told(summary, None, 401, *POSTS, parameters=[_MODEL], requestBody=parameters)

        @app.post(f"/v2/repository/models/{{model}}/{action}", tags=tags, dependencies=[token], **about)
        async def change(http: Request) -> Response:
            action, token = http.scope["path"].rpartition("/")[2], asgi.header(http.scope, b"authorization")
            await repository.change(service, action, http.path_params["model"], await asked(http), token)
            return Response()


async def _body(http: Request) -> bytes:
    return await asgi.read_body(http.scope, http.receive, asgi.BESIDE_BYTES, http.scope[asgi.HOLD])


def _add_regions(app: FastAPI, service: Service, tag: str, path: str, body: Json, kind: Any) -> None:
    """Adds one region extension's routes. body: registration's schema. kind: its module."""
    top, is_device = f"/v2/{path}", kind is cuda_shm
    listed = a_list(an_object(name=STRING, byte_size=COUNT))

    about = told("Register a region", None, *POSTS, body=body, parameters=[_REGION])

    @app.post(f"{top}/region/{{region:path}}/register", tags=[tag], **about)
    async def register(http: Request) -> Response:
        check_type(asgi.header(http.scope, b"content-type"))
        given = await _body(http)
        await kind.register(shm.allowed(service.regions), service.link, http.path_params["region"], given)
        return Response()

    for place, parameters in ((f"{top}/region/{{region:path}}", [_REGION]), (top, [])):
        about = told("Which regions there are", listed, *GETS, parameters=parameters)

        @app.get(f"{place}/status", tags=[tag], **about)
        async def status(http: Request) -> Response:
            regions, name = shm.allowed(service.regions), http.path_params.get("region")
            found = regions.status(name, on_device=is_device)
            return asgi.json_response([kind.describe(entry) for entry in found])

        about = told("Unregister regions", None, *POSTS, parameters=parameters)

        @app.post(f"{place}/unregister", tags=[tag], **about)
        async def unregister(http: Request) -> Response:
            check_type(asgi.header(http.scope, b"content-type"))
            await _body(http)
            regions, name = shm.allowed(service.regions), http.path_params.get("region")
            regions.unregister(name, on_device=is_device)
            return Response()  # an empty body, as Triton answers: its client reads none
