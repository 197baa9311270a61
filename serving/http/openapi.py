"""/openapi.json: what FastAPI describes of /v1, with bodies and refusals, and /v2, which FastAPI does not answer.

Every operation tells what it refuses: {"error": message}, with the statuses that its path can have. 405 is any other method's.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

Json = dict[str, Any]

SCHEMAS = "#/components/schemas/"
_REFUSED = {
    400: "The request is wrong: the message names the field, what came and what was expected",
    401: "The admin token is missing or wrong",
    403: "This server has no admin token, so nobody may; or a page of another site sent the request, or it is for another Host",
    404: "No such model, version or path",
    405: "Another method; Allow names those that are answered",
    413: "The body or the answer is larger than a limit of this server, which the message names",
    415: "The body is compressed in a way that is not understood",
    503: "This worker does not take the request on now: try again after Retry-After",
    507: "The shared memory that an output was to be written to is full",
}
GETS, POSTS = (400, 403, 404, 405, 503), (400, 403, 404, 405, 413, 415, 503, 507)


class Refusal(BaseModel):
    """Why a request was refused."""

    error: str


def ref(schema: str) -> Json:
    """A reference to a schema of this page."""
    return {"$ref": SCHEMAS + schema}


def refusals(*statuses: int) -> dict[int | str, Json]:
    """The responses of these statuses."""
    return {status: {"description": _REFUSED[status], **_json(ref("Refusal"))} for status in statuses}


def takes(schema: type[BaseModel]) -> Json:
    """A body: a reference to a schema that `complete` adds."""
    return {"requestBody": {"required": True, **_json(ref(schema.__name__))}}


def complete(found: Json, taken: Sequence[type[BaseModel]]) -> Json:
    """What FastAPI described, with the schemas of bodies, which are parsed here, and with /v2."""
    schemas: list[type[BaseModel]] = [*taken, Refusal]
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [(schema, "validation") for schema in schemas]
    _, definitions = models_json_schema(modes, ref_template=SCHEMAS + "{model}")
    components = found.setdefault("components", {})
    components.setdefault("schemas", {}).update({**definitions["$defs"], **_SCHEMAS_OF_V2})
    components["securitySchemes"] = {"admin token": {"type": "http", "scheme": "bearer"}}
    for path, method, operation in _v2():
        found["paths"].setdefault(path, {})[method] = operation
    return found


def _json(schema: Json) -> Json:
    return {"content": {"application/json": {"schema": schema}}}


def _object(required: Sequence[str] = (), **properties: Json) -> Json:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _list(items: Json, **more: Any) -> Json:
    return {"type": "array", "items": items, **more}


_STRING, _COUNT, _BOOL = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
_PARAMETERS = {"type": "object", "additionalProperties": True}
_ID = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_DATA: Json = _list({"anyOf": [{"type": "number"}, {"type": "boolean"}, _list({"type": "number"})]})
_TENSOR = _object(["name", "datatype", "shape"], name=_STRING, datatype=_STRING, shape=_list({"type": "integer", "minimum": -1}))
_SCHEMAS_OF_V2: Json = {
    "InferInput": _object(
        ["name", "datatype", "shape"],
        name={"type": "string", "description": "a feature, <feature>.values, .lengths or .weights, kjt.…, or a dense tensor"},
        datatype={"type": "string", "enum": ["INT64", "INT32", "FP32"]},
        shape=_list({"type": "integer", "minimum": 0, "maximum": 2**40 - 1}, minItems=1, maxItems=2),
        data={
            **_list({"anyOf": [_ID, {"type": "number"}, _list({"anyOf": [_ID, {"type": "number"}]})]}),
            "description": "flat or nested",
        },
        parameters={**_PARAMETERS, "description": "binary_data_size, or shared_memory_region, _offset and _byte_size"},
    ),
    "InferOutput": _object(["name"], name=_STRING, parameters={**_PARAMETERS, "description": "binary_data"}),
    "InferRequest": {
        **_object(
            ["inputs"],
            id={"type": "string"},
            inputs=_list(ref("InferInput"), minItems=1),
            outputs=_list(ref("InferOutput")),
            parameters={**_PARAMETERS, "description": "binary_data_output, kjt.features, kjt.schema"},
        ),
        "examples": [{"inputs": [{"name": "user", "datatype": "INT64", "shape": [1, 2], "data": [3, 7]}]}],
    },
    "InferResponse": _object(
        ["model_name", "model_version", "outputs"],
        id=_STRING,
        model_name=_STRING,
        model_version=_STRING,
        outputs=_list(
            _object(
                ["name", "datatype", "shape"],
                name=_STRING,
                datatype=_STRING,
                shape=_list(_COUNT),
                data=_DATA,
                parameters=_PARAMETERS,
            )
        ),
    ),
    "ServerMetadata": _object(["name", "version", "extensions"], name=_STRING, version=_STRING, extensions=_list(_STRING)),
    "ModelMetadata": _object(
        ["name", "versions", "platform", "inputs", "outputs"],
        name=_STRING,
        versions=_list(_STRING),
        platform=_STRING,
        inputs=_list(_TENSOR),
        outputs=_list(_TENSOR),
        parameters=_PARAMETERS,
    ),
    "ModelReady": _object(["name", "ready"], name=_STRING, ready=_BOOL),
    "ModelStatistics": _object(["model_stats"], model_stats=_list(_object(["name", "version"], name=_STRING, version=_STRING))),
    "RepositoryIndex": _list(_object(["name", "version", "state"], name=_STRING, version=_STRING, state=_STRING, reason=_STRING)),
    "Regions": _list(
        _object(["name", "key", "offset", "byte_size"], name=_STRING, key=_STRING, offset=_COUNT, byte_size=_COUNT),
    ),
    "DeviceRegions": _list(
        _object(["name", "device_id", "byte_size"], name=_STRING, device_id=_COUNT, byte_size=_COUNT),
    ),
}
_MODEL = {"name": "model", "in": "path", "required": True, "schema": _STRING}
_VERSION = {"name": "version", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 1}}
_REGION = {"name": "region", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "description": "bytes of the JSON, where binary tensors follow it",
    "schema": {"type": "integer", "minimum": 1},
}
_PLACES = (("/v2/models/{model}", (_MODEL,)), ("/v2/models/{model}/versions/{version}", (_MODEL, _VERSION)))
_OPERATOR = [{"admin token": list[str]()}]


def _operation(tag: str, summary: str, answer: Json | None, *statuses: int, parameters: Sequence[Json] = (), **more: Any) -> Json:
    told: Json = {"description": "OK", **({} if answer is None else _json(answer))}
    responses = {"200": told, **{str(status): said for status, said in refusals(*statuses).items()}}
    return {"tags": [tag], "summary": summary, "parameters": list(parameters), "responses": responses, **more}


def _v2() -> Iterator[tuple[str, str, Json]]:
    """Path, method and operation of all that is answered under /v2."""
    v2 = "Open Inference Protocol V2"
    yield "/v2", "get", _operation(v2, "Name, version, extensions", ref("ServerMetadata"), *GETS)
    live, ready = _object(["live"], live=_BOOL), _object(["ready"], ready=_BOOL)
    yield "/v2/health/live", "get", _operation(v2, "Whether this worker lives", live, *GETS)
    waiting = _operation(v2, "Whether this worker takes requests", ready, *GETS)
    waiting["responses"]["503"] = {"description": "It drains, or its rows were found damaged", **_json(ready)}
    yield "/v2/health/ready", "get", waiting
    yield "/v2/models/stats", "get", _operation(v2, "Statistics of all models", ref("ModelStatistics"), *GETS)
    for place, parameters in _PLACES:
        of_model = (
            ("", "Inputs, outputs, tables", ref("ModelMetadata")),
            ("/ready", "Whether the model answers", ref("ModelReady")),
            ("/config", "The configuration, as Triton shows one", _object(["name"], name=_STRING)),
            ("/stats", "Statistics of the model over all workers", ref("ModelStatistics")),
        )
        for path, summary, answer in of_model:
            told = _operation(v2, summary, answer, *GETS, parameters=parameters)
            if path == "/ready":
                told["responses"]["503"] = {"description": "It does not", **_json({"anyOf": [answer, ref("Refusal")]})}
            yield place + path, "get", told
        infer = _operation(v2, "Look up and score", ref("InferResponse"), *POSTS, parameters=(*parameters, _LENGTH))
        whole: Json = {"type": "string", "format": "binary", "description": "the JSON, then each binary tensor (docs/http.md)"}
        infer["requestBody"] = {"required": True, **_json(ref("InferRequest"))}
        infer["requestBody"]["content"]["application/octet-stream"] = {"schema": whole}
        infer["responses"]["200"]["content"]["application/octet-stream"] = {"schema": whole}
        yield place + "/infer", "post", infer
    yield from _repository()
    asked = _object(["key", "byte_size"], key=_STRING, offset=_COUNT, byte_size={"type": "integer", "minimum": 1})
    yield from _regions("System shared memory", "/v2/systemsharedmemory", "Regions", asked)
    handle = _object(["b64"], b64=_STRING)
    size = {"type": "integer", "minimum": 1}
    asked = _object(["raw_handle", "device_id", "byte_size"], raw_handle=handle, device_id=_COUNT, byte_size=size)
    yield from _regions("CUDA shared memory", "/v2/cudasharedmemory", "DeviceRegions", asked)


def _repository() -> Iterator[tuple[str, str, Json]]:
    tag = "Model repository"
    index: Json = {"requestBody": {"required": False, **_json(_object(ready=_BOOL))}, "security": [{}, *_OPERATOR]}
    yield "/v2/repository/index", "post", _operation(tag, "Which models there are", ref("RepositoryIndex"), *POSTS, **index)
    for action, summary in (("load", "Serve a published model"), ("unload", "Let a model go")):
        body: Json = {"requestBody": {"required": False, **_json(_object(parameters=_PARAMETERS))}, "security": _OPERATOR}
        told = _operation(tag, summary, None, 401, 403, *POSTS, parameters=(_MODEL,), **body)
        yield f"/v2/repository/models/{{model}}/{action}", "post", told


def _regions(tag: str, top: str, listed: str, asked: Json) -> Iterator[tuple[str, str, Json]]:
    """One of the two extensions for regions. listed: what their status is; asked: what registers one."""
    yield f"{top}/status", "get", _operation(tag, "All regions", ref(listed), *GETS)
    yield f"{top}/unregister", "post", _operation(tag, "Unregister all regions", None, *POSTS)
    of_region = f"{top}/region/{{region}}"
    yield f"{of_region}/status", "get", _operation(tag, "A region", ref(listed), *GETS, parameters=(_REGION,))
    yield f"{of_region}/unregister", "post", _operation(tag, "Unregister a region", None, *POSTS, parameters=(_REGION,))
    body = {"requestBody": {"required": True, **_json(asked)}}
    yield f"{of_region}/register", "post", _operation(tag, "Register a region", None, *POSTS, parameters=(_REGION,), **body)
