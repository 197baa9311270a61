"""The messages of `inference.proto`, in a pool of their own: other packages have the same names. Infer
requests are made those of HTTP, and their responses messages again: tensors are bytes in both, and their
description is JSON, which one reader understands (`serving.http.v2.reader`)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from google.protobuf import descriptor_pool, json_format, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from tableside.loader.string_ids import LENGTH_BYTES, as_bytes
from tableside.serving.errors import ApiError, ErrorKind, bad_request, short
from tableside.serving.http.inputs.tensors import STRINGS
from tableside.serving.http.v2.shm import REGION

NAME = "inference.GRPCInferenceService"

POOL = descriptor_pool.DescriptorPool()
for _file in FileDescriptorSet.FromString(Path(__file__).with_name("inference.pb").read_bytes()).file:
    POOL.AddSerializedFile(_file.SerializeToString())
SERVICE = POOL.FindServiceByName(NAME)


def message(name: str) -> Any:
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"inference.{name}"))


def filled(made: Any, found: dict[str, Any]) -> Any:
    """Returns a message with the fields of JSON that it has."""
    return json_format.ParseDict(found, made, ignore_unknown_fields=True, descriptor_pool=POOL)


_Response, _Output = message("ModelInferResponse"), message("ModelInferResponse.InferOutputTensor")
_CONTENTS = {
    "BOOL": ("bool_contents", np.bool_),
    "INT32": ("int_contents", np.int32),
    "INT64": ("int64_contents", np.int64),
    "UINT32": ("uint_contents", np.uint32),
    "UINT64": ("uint64_contents", np.uint64),
    "FP32": ("fp32_contents", np.float32),
    "FP64": ("fp64_contents", np.float64),
    STRINGS: ("bytes_contents", np.object_),
}


_RAW = message("ModelInferRequest").DESCRIPTOR.fields_by_name["raw_input_contents"].number
LOOKED_THROUGH = 1 << 16  # bytes of a message from which its fields are counted before it is read
_SPARE, _EACH = 256, 16  # fields of a message, and more for each input of the models
_MOST_DIMS = 64


def check_description(data: bytes, inputs: int, most_bytes: int) -> None:
    """Looks through a message's fields, before Python's objects take a hundred times their bytes. inputs:
    that models have. ApiError 413: more fields than a request of all can have, or more bytes beside the
    tensors' than JSON may have."""
    at, fields, described, most = 0, 0, len(data), _SPARE + _EACH * inputs
    while at < len(data) and fields <= most:
        tag, at = _varint(data, at)
        kind, size = tag & 7, {1: 8, 5: 4}.get(tag & 7, 0)
        if kind == 2:
            size, at = _varint(data, at)
        elif kind == 0:
            _, at = _varint(data, at)
        elif not size:
            return  # it is no message: who reads it says so
        described -= size if tag >> 3 == _RAW else 0
        at += size
        fields += 1
    for what, found, limit in (("fields", fields, most), ("bytes beside tensors", described, most_bytes)):
        if found > limit:
            text = f"the message has {found:,} {what} or more; expected at most {limit:,}"
            raise ApiError(413, ErrorKind.TOO_LARGE, text)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a number that begins at a byte, and where it ends."""
    found = shift = 0
    while at < len(data):
        found |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128 or shift > 63:
            break
        shift += 7
    return found, at


def body_bytes(request: Any) -> int:
    """Bytes of a request's tensors, as `as_body` makes them."""
    if request.raw_input_contents:
        return sum(map(len, request.raw_input_contents))
    return sum(
        sum(LENGTH_BYTES + len(s) for s in values)
        if dtype is np.object_
        else len(values) * np.dtype(dtype).itemsize
        for one in request.inputs
        if one.HasField("contents")
        for field, dtype in _CONTENTS.values()
        for values in (getattr(one.contents, field),)
    )


def as_body(request: Any) -> tuple[bytes, int]:
    """Returns a request as HTTP's body, and the bytes of its JSON. ApiError: its tensors are no bytes of
    their datatypes."""
    raw, parts, inputs = list(request.raw_input_contents), list[bytes](), []
    for one in request.inputs:
        parameters = _values(one.parameters)
        if REGION not in parameters:
            parts.append(_bytes_of(one) if not raw else raw[len(parts)] if len(parts) < len(raw) else b"")
            parameters["binary_data_size"] = len(parts[-1])
        if len(one.shape) > _MOST_DIMS:
            raise bad_request(f"input {short(one.name)} has {len(one.shape):,} dimensions; expected 1 or 2")
        described = {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
        inputs.append({**described, "parameters": parameters})
    if raw and len(raw) != len(parts):
        raise bad_request(
            f"raw_input_contents has {len(raw)} entries; expected {len(parts)}, one for each input that lies "
            "in no shared memory region"
        )
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
    """The bytes of a tensor whose values are numbers or strings. ApiError: they are not its datatype's."""
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
    values = getattr(tensor.contents, field)
    return as_bytes(values) if dtype is np.object_ else np.array(values, dtype).tobytes()


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
