"""Infer requests of gRPC as those of HTTP, and their responses back. Tensors are bytes in both; their
description is JSON, which one reader understands (`serving.http.v2.reader`)."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import orjson

from tableside.serving.errors import bad_request, short
from tableside.serving.http.grpc.messages import message
from tableside.serving.http.v2.shm import REGION

_Response, _Output = message("ModelInferResponse"), message("ModelInferResponse.InferOutputTensor")
_CONTENTS = {
    "BOOL": ("bool_contents", np.bool_),
    "INT32": ("int_contents", np.int32),
    "INT64": ("int64_contents", np.int64),
    "UINT32": ("uint_contents", np.uint32),
    "UINT64": ("uint64_contents", np.uint64),
    "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
}


def named(model: str, version: str) -> list[str]:
    """Returns a model as `InferTarget` names it."""
    return [model, "versions", version] if version else [model]


def as_body(request: Any) -> tuple[bytes, int]:
    """Returns a request as HTTP's body, and the bytes of its JSON. ApiError: its tensors are no bytes of
    their datatypes."""
    raw, parts = list(request.raw_input_contents), list[bytes]()
    sent = [one for one in request.inputs if REGION not in one.parameters]
    if raw and len(raw) != len(sent):
        raise bad_request(
            f"raw_input_contents has {len(raw)} entries; expected {len(sent)}, one for each input that lies "
            "in no shared memory region"
        )
    inputs = []
    for one in request.inputs:
        parameters = _values(one.parameters)
        if REGION not in parameters:
            parts.append(raw[len(parts)] if raw else _bytes_of(one))
            parameters["binary_data_size"] = len(parts[-1])
        described = {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
        inputs.append({**described, "parameters": parameters})
    head: dict[str, Any] = {"inputs": inputs}
    if request.id:
        head["id"] = request.id
    given = _values(request.parameters)
    if request.outputs:
        head["outputs"] = [_asked(one) for one in request.outputs]
    else:
        given["binary_data_output"] = True
    if given:
        head["parameters"] = given
    text = orjson.dumps(head)
    return b"".join([text, *parts]), len(text)


def _asked(output: Any) -> dict[str, Any]:
    parameters = _values(output.parameters)
    if REGION not in parameters:
        parameters["binary_data"] = True
    return {"name": output.name, "parameters": parameters}


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in parameters.items():
        if kind := value.WhichOneof("parameter_choice"):
            found[name] = getattr(value, kind)
    return found


def _bytes_of(tensor: Any) -> bytes:
    """The bytes of a tensor whose values are numbers. ApiError: they are not its datatype's."""
    if (known := _CONTENTS.get(tensor.datatype)) is None:
        raise bad_request(
            f"input {short(tensor.name)} has datatype {short(tensor.datatype)}; expected its bytes in "
            f"raw_input_contents, or contents of {', '.join(_CONTENTS)}"
        )
    field, dtype = known
    if others := [f.name for f, _ in tensor.contents.ListFields() if f.name != field]:
        raise bad_request(
            f"input {short(tensor.name)} has {others[0]}, its datatype is {tensor.datatype}; expected {field}"
        )
    return np.array(getattr(tensor.contents, field), dtype).tobytes()


def as_response(parts: list[Any]) -> Any:
    """Returns an infer response's message. parts: of HTTP's body, the JSON first."""
    found = orjson.loads(parts[0])
    binary = memoryview(parts[1] if len(parts) == 2 else b"".join(parts[1:])).cast("B")
    outputs, raw, at = [], list[bytes](), 0
    for one in found.get("outputs", ()):
        parameters = one.get("parameters", {})
        size = parameters.pop("binary_data_size", 0)
        output = _Output(name=one["name"], datatype=one["datatype"], shape=one["shape"])
        _write(output.parameters, parameters)
        outputs.append(output)
        raw.append(bytes(binary[at : at + size]))  # empty for one in a region: clients count these
        at += size
    response = _Response(
        model_name=found["model_name"],
        model_version=found["model_version"],
        id=found.get("id", ""),
        outputs=outputs,
        raw_output_contents=raw,
    )
    _write(response.parameters, found.get("parameters", {}))
    return response


def _write(into: Any, parameters: dict[str, Any]) -> None:
    for name, value in parameters.items():
        if isinstance(value, bool):
            into[name].bool_param = value
        elif isinstance(value, int):
            into[name].int64_param = value
        elif isinstance(value, float):
            into[name].double_param = value
        else:
            into[name].string_param = value if isinstance(value, str) else orjson.dumps(value).decode()
