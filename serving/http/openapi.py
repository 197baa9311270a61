"""Schemas and refusals for /openapi.json, as arguments of FastAPI's routes. A refusal is {"error":
message}."""

from typing import Any

from fastapi import Response
from pydantic import BaseModel

from tableside.serving.client import attempts

Json = dict[str, Any]

_REFUSED = {
    400: "The request is wrong: the message names the field, what came and what was expected",
    401: "The admin token is missing or wrong",
    403: "This server has no admin token, so nobody may; or a page of another site sent the request, "
    "or it is for another Host",
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


def refusals(*statuses: int) -> dict[int | str, Json]:
    return {status: {"model": Refusal, "description": _REFUSED[status]} for status in statuses}


def as_json(schema: Json) -> Json:
    return {"content": {"application/json": {"schema": schema}}}


def told(summary: str, answer: Json | None, *statuses: int, body: Json | None = None, **more: Any) -> Json:
    """Returns a route's arguments. answer: the 200's schema; None: empty. body: its schema. more:
    `openapi_extra`."""
    if body is not None:
        more["requestBody"] = {"required": True, **as_json(body)}
    responses = refusals(*statuses)
    if answer is None:
        return {"summary": summary, "responses": responses, "openapi_extra": more, "response_class": Response}
    return {"summary": summary, "responses": {200: as_json(answer), **responses}, "openapi_extra": more}


def an_object(*optional: str, **properties: Json) -> Json:
    """Returns an object's schema; all properties but `optional` are required."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def a_list(items: Json, **more: Any) -> Json:
    return {"type": "array", "items": items, **more}


def or_null(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def noted(schema: Json, description: str, **more: Any) -> Json:
    return {**schema, "description": description, **more}


STRING, BOOL, NUMBER = {"type": "string"}, {"type": "boolean"}, {"type": "number"}
COUNT: Json = {"type": "integer", "minimum": 0}
SIZE: Json = {"type": "integer", "minimum": 1}
ID: Json = {"type": ["integer", "string"], "minimum": -(2**63), "maximum": 2**63 - 1}
PARAMETERS: Json = {"type": "object", "additionalProperties": True}

_SHAPE = a_list({"type": "integer", "minimum": -1})
_TENSOR = {"name": STRING, "datatype": STRING, "shape": _SHAPE}
_TENSORS = a_list(an_object(**_TENSOR))
DISK_TIMEOUT: Json = {
    "name": attempts.DISK_TIMEOUT,
    "in": "header",
    "required": False,
    "description": "milliseconds for which the request waits for rows of a disk",
    "schema": {"type": "number", "minimum": 0},
}
_DATA = a_list({"anyOf": [NUMBER, BOOL, a_list(NUMBER)]})
_INPUT = an_object(
    "data",
    "parameters",
    name=noted(STRING, "a feature, <feature>.values, .lengths or .weights, kjt.…, or a dense tensor"),
    datatype={**STRING, "enum": ["INT64", "INT32", "FP32", "BYTES"]},
    shape=a_list({**COUNT, "maximum": 2**40 - 1}, minItems=1, maxItems=2),
    data=noted(a_list({"anyOf": [ID, NUMBER, a_list({"anyOf": [ID, NUMBER]})]}), "flat or nested"),
    parameters=noted(PARAMETERS, "binary_data_size, or shared_memory_region, _offset and _byte_size"),
)
_WANTED = an_object("parameters", name=STRING, parameters=noted(PARAMETERS, "binary_data"))
INFER_REQUEST = an_object(
    "id",
    "outputs",
    "parameters",
    id=STRING,
    inputs=a_list(_INPUT, minItems=1),
    outputs=a_list(_WANTED),
    parameters=noted(
        PARAMETERS, "binary_data_output, kjt.features, kjt.schema, timeout (us to wait for rows)"
    ),
)
_OUTPUT = an_object("data", "parameters", **_TENSOR, data=_DATA, parameters=PARAMETERS)
INFER_RESPONSE = an_object("id", id=STRING, model_name=STRING, model_version=STRING, outputs=a_list(_OUTPUT))
SERVER_METADATA = an_object(name=STRING, version=STRING, extensions=a_list(STRING))
_SIDES = {"inputs": _TENSORS, "outputs": _TENSORS}
MODEL_METADATA = an_object(
    name=STRING, versions=a_list(STRING), platform=STRING, **_SIDES, parameters=PARAMETERS
)
LIVE, READY = an_object(live=BOOL), an_object("name", name=STRING, ready=BOOL)
STATISTICS = an_object(model_stats=a_list(an_object(name=STRING, version=STRING)))
REPOSITORY_INDEX = a_list(an_object("reason", name=STRING, version=STRING, state=STRING, reason=STRING))
