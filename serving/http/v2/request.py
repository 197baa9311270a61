"""The Open Inference Protocol's infer request, with JSON or binary tensors. A binary body is a
JSON header of `Inference-Header-Content-Length` bytes, then each input's bytes. Tensors may lie in shared
memory (`serving.http.v2.shm`). This is the specification of `serving.http.v2.reader`, and names errors."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import orjson

from tableside.loader.model.model import SCORE
from tableside.serving.errors import bad_request, short
from tableside.serving.http.inputs import kjt
from tableside.serving.http.inputs.tensors import (
    DATATYPES,
    ID_DATATYPES,
    STRINGS,
    InputTensor,
    check_datatype,
    check_dense,
    check_lengths,
    check_shape,
    check_weights,
    feature_inputs,
    from_list,
    split_name,
    with_ids,
)
from tableside.serving.http.v2 import cuda_shm, shm
from tableside.serving.http.v2.answer import InferRequest, Sent, described
from tableside.serving.model.places import KJT, DenseInput, Output, mask_name, masked_feature
from tableside.serving.model.request import FeatureInput, Request
from tableside.serving.model.version import ServedVersion
from tableside.serving.shm import regions
from tableside.serving.shm.regions import DeviceRegion, PartlyOnDevice, Regions, Slice


def understand(
    served: ServedVersion, header: dict[str, Any], binary: Any, known: Regions | None = None
) -> InferRequest:
    """Reads a header with the bytes `binary` behind it. known: regions; None: not allowed. ApiError names the
    input or output, the value and what was expected."""
    dense = {} if served.scorer is None else served.scorer.dense
    tensors, sent, slices = _inputs(served, header, binary, dense, known)
    together = kjt.is_kjt(served, [t.name for t in tensors if t.name not in dense])
    cuda_shm.check_inputs(
        tensors, slices, dense, together, [n for n, b in served.features.items() if not b.is_pooled]
    )
    tensors, inputs = with_ids(tensors, sent)
    reads = [
        one._replace(at=tensor.at)
        for tensor, one in zip(tensors, slices, strict=True)
        if one is not None and _is_on_device(one)
    ]
    of_features = [t for t in tensors if t.name not in dense]
    check_weights(
        [t for t, one in zip(tensors, slices, strict=True) if t.name not in dense and not _is_on_device(one)],
        inputs,
    )
    given = [DenseInput(t.name, t.at, *t.shape) for t in tensors if t.name in dense]
    if together:
        names = kjt.features_of(served, _parameters(header, "the request"))
        features = kjt.feature_inputs(of_features, names, inputs)
    else:
        features = feature_inputs(of_features)
    score = _wants_score(header, served, {i.feature for i in features} | {d.name for d in given})
    asked = {o.get("name") for o in header.get("outputs", []) if isinstance(o, dict)} if score else set()
    is_on_device = bool(reads) or cuda_shm.is_asked_for(header, known)
    request = served.lay_out(
        features,
        given,
        score,
        together,
        warms_up=is_on_device,
        found=_wants_found(header),
        scores_alone=asked == {SCORE},
    )
    masks = [mask_name(KJT)] if together else [mask_name(i.feature) for i in features]
    outputs = _outputs(header, request, served.features, masks, known)
    cuda_shm.check_outputs(request, [(sent.output, sent.into) for sent in outputs], bool(reads))
    check_lengths(served, features, inputs)
    if is_on_device:
        writes = regions.joined(
            one for sent in outputs if (one := sent.into) is not None and _is_on_device(one)
        )
        inputs = PartlyOnDevice(inputs, tuple(regions.joined(reads)), tuple(writes))
    request_id = header.get("id", "")
    if not isinstance(request_id, str):
        raise bad_request(f"id is {short(request_id)}; expected a string")
    is_whole = all(s.is_binary for s in outputs) and tuple(s.output for s in outputs) == request.outputs
    parts = ((o.at, o.at + o.bytes) for o, is_binary, _ in outputs if is_binary and o.bytes)
    is_json = any(sent.is_json for sent in outputs)
    into = (sent.into for sent in outputs if sent.into is not None and not _is_on_device(sent.into))
    return InferRequest(
        request,
        inputs,
        b"" if is_json else orjson.dumps(described(request, request_id, outputs, None)),
        None if is_whole else tuple(parts),
        _offsets(request, served, features),
        any(sent.is_binary for sent in outputs),
        sum(sent.output.json_bytes for sent in outputs if sent.is_json),
        outputs,
        request_id,
        tuple(regions.joined(into)),
        _timeout_us(header),
    )


def _is_on_device(one: Slice | None) -> bool:
    return one is not None and isinstance(one.region, DeviceRegion)


def _offsets(
    request: Request, served: ServedVersion, features: Sequence[FeatureInput]
) -> tuple[int, bytes] | None:
    """Returns a kjt's offsets and their place in the output buffer."""
    at = next((o.at for o in request.outputs if o.is_offsets), None)
    if at is None:
        return None
    bound = ((served.features[i.feature], i) for i in features)
    values = [i.ids * b.table.dim for b, i in bound if not b.is_pooled]
    return at, np.cumsum([0, *values], dtype=np.int64).tobytes()


def _wants_score(header: dict[str, Any], served: ServedVersion, given: Container[str]) -> bool:
    """Returns whether scores are wanted: named, or no output is named and all their inputs are given."""
    asked = header.get("outputs", [])
    if not asked:
        return served.can_score(given)
    is_named = isinstance(asked, list) and any(isinstance(o, dict) and o.get("name") == SCORE for o in asked)
    return is_named and SCORE not in served.features


def _wants_found(header: dict[str, Any]) -> set[str]:
    """Returns the features with a named found mask; KJT: one mask of all."""
    asked = header.get("outputs", [])
    names = [o.get("name") for o in asked if isinstance(o, dict)] if isinstance(asked, list) else []
    return {feature for n in names if isinstance(n, str) and (feature := masked_feature(n)) is not None}


def _datatype_of_ids(served: ServedVersion, header: dict[str, Any], name: str) -> str:
    """Returns the datatype of an input that has ids. ApiError: a kjt has features of both kinds."""
    names: Sequence[str] = (split_name(name)[0],)
    if kjt.is_kjt(served, [name]):
        names = kjt.features_of(served, _parameters(header, "the request"))
    strings = {served.features[n].strings: n for n in names if n in served.features}
    if len(strings) > 1:
        raise bad_request(
            f"the ids of feature {strings[True]!r} are strings, those of {strings[False]!r} integers; send "
            "each kind in a request of its own, or the features by name"
        )
    return STRINGS if True in strings else "INT64"


def _inputs(
    served: ServedVersion,
    header: dict[str, Any],
    binary: Any,
    dense: Mapping[str, int],
    known: Regions | None,
) -> tuple[list[InputTensor], Any, list[Slice | None]]:
    """Returns the tensors, their buffer (`binary` if all came there) and their regions. Tensors on a GPU are
    not written to the buffer."""
    raw = header.get("inputs")
    if not isinstance(raw, list) or not raw or not all(isinstance(r, dict) for r in raw):
        raise bad_request("inputs: expected a list with at least one input")
    tensors: list[InputTensor] = []
    # JSON's values, a part of a region, or the next bytes of the body
    sources: list[bytes | Slice | None] = []
    at = body_bytes = 0
    for entry in raw:
        name = entry.get("name")
        if not isinstance(name, str):
            raise bad_request(
                f"inputs: name is {short(name)}; expected a feature, <feature>.values, .lengths or .weights"
            )
        datatype, shape = entry.get("datatype"), check_shape(name, entry.get("shape"))
        expected = "FP32" if name in dense else DATATYPES[split_name(name)[1]]
        if expected == "INT64" and not prod(shape) and datatype in ID_DATATYPES:
            datatype = expected  # where there are none, they are of either kind
        elif expected == "INT64":
            expected = _datatype_of_ids(served, header, name)
        datatype = check_datatype(name, datatype, expected)
        tensor = InputTensor(name, datatype, shape, at)
        if name in dense:
            check_dense(tensor, dense[name], {t.name for t in tensors})
        parameters = _parameters(entry, f"input {short(name)}")
        if datatype == STRINGS:
            tensor = _of_strings(tensor, entry, parameters)
        if (part := _in_region(tensor, entry, parameters, known)) is not None:
            sources.append(part)
        elif "data" in entry:
            sources.append(_inline(tensor, datatype, entry, parameters))
        else:
            _check_binary(tensor, parameters)
            sources.append(None)
            body_bytes += tensor.bytes
        tensors.append(tensor)
        at += tensor.bytes
    if None in sources and any(isinstance(source, bytes) for source in sources):
        raise bad_request("inputs: some have data and some binary_data_size; send all tensors one way")
    if body_bytes != len(binary):
        if None not in sources:
            raise bad_request(f"{len(binary)} bytes follow the JSON, but no input has a binary_data_size")
        raise bad_request(
            f"the inputs' binary_data_size add up to {body_bytes} bytes, but {len(binary)} follow the JSON"
        )
    slices = [source if isinstance(source, Slice) else None for source in sources]
    if not any(slices):
        whole = (
            binary if None in sources else b"".join(source for source in sources if isinstance(source, bytes))
        )
        return tensors, whole, slices
    return tensors, _gathered(tensors, sources, memoryview(binary), at), slices


def _in_region(
    tensor: InputTensor, entry: dict[str, Any], parameters: dict[str, Any], known: Regions | None
) -> Slice | None:
    """Returns an input's place in a region, or None."""
    where = f"input {short(tensor.name)}"
    if (part := shm.part_of(parameters, where, known)) is None:
        return None
    region, offset, size = part
    if "data" in entry or "binary_data_size" in parameters:
        raise bad_request(f"{where} has a {shm.REGION} and data or a binary_data_size; send one of them")
    if size != tensor.bytes:
        what = f"{where}: {shm.SIZE} is {size}"
        raise bad_request(f"{what}, but {tensor.datatype} {list(tensor.shape)} has {tensor.bytes} bytes")
    return Slice(region, offset, size, tensor.at)


def _gathered(
    tensors: Sequence[InputTensor], sources: Sequence[bytes | Slice | None], binary: memoryview, size: int
) -> memoryview:
    """Returns a buffer with the values of tensors, some from regions."""
    buffer = np.empty(size, np.uint8).data
    body_at = 0
    for tensor, source in zip(tensors, sources, strict=True):
        if isinstance(source, Slice):
            continue
        values = binary[body_at : body_at + tensor.bytes] if source is None else source
        buffer[tensor.at : tensor.at + tensor.bytes] = values
        body_at += tensor.bytes if source is None else 0
    regions.read(regions.joined(source for source in sources if isinstance(source, Slice)), buffer)
    return buffer


def _parameters(entry: dict[str, Any], where: str) -> dict[str, Any]:
    parameters = entry.get("parameters", {})
    if not isinstance(parameters, dict):
        raise bad_request(f"{where}: parameters are {short(parameters)}; expected an object")
    return parameters


def _of_strings(tensor: InputTensor, entry: dict[str, Any], parameters: dict[str, Any]) -> InputTensor:
    """Returns a tensor of BYTES with its size; in JSON, that of its ids. ApiError: it is too small."""
    if "data" in entry:
        return replace(tensor, datatype="INT64")
    size = parameters.get(shm.SIZE if shm.REGION in parameters else "binary_data_size")
    if type(size) is not int:
        return tensor
    if size < 4 * tensor.elements:
        what = f"input {short(tensor.name)}: {size} bytes are too few for {tensor.elements} strings"
        raise bad_request(f"{what}; expected before each its length as uint32")
    return replace(tensor, strings_bytes=size)


def _inline(tensor: InputTensor, datatype: str, entry: dict[str, Any], parameters: dict[str, Any]) -> bytes:
    """Returns the values of JSON in the tensor's datatype. datatype: that of the request."""
    if "binary_data_size" in parameters:
        raise bad_request(
            f"input {short(tensor.name)} has both data and a binary_data_size; send one of them"
        )
    array = from_list(f"input {tensor.name}", datatype, entry["data"])
    if array.size != prod(tensor.shape):
        what = f"input {short(tensor.name)}: shape {list(tensor.shape)} holds {prod(tensor.shape)} values"
        raise bad_request(f"{what}, data has {array.size}")
    return array.tobytes()


def _check_binary(tensor: InputTensor, parameters: dict[str, Any]) -> None:
    size = parameters.get("binary_data_size")
    if type(size) is not int:
        raise bad_request(
            f"input {short(tensor.name)} has neither data nor a binary_data_size (found {short(size)})"
        )
    if size != tensor.bytes:
        what = f"input {short(tensor.name)}: binary_data_size is {short(size)}"
        raise bad_request(f"{what}, but {tensor.datatype} {list(tensor.shape)} has {tensor.bytes} bytes")


def _outputs(
    header: dict[str, Any],
    request: Request,
    features: Container[str],
    masks: Sequence[str],
    known: Regions | None,
) -> tuple[Sent, ...]:
    """features: the model's; masks: names of possible masks."""
    binary_default = _flag(_parameters(header, "the request"), "binary_data_output", False)
    by_name = {o.feature: o for o in request.outputs}
    asked = header.get("outputs", [])
    if not isinstance(asked, list) or not all(isinstance(o, dict) for o in asked):
        raise bad_request("outputs: expected a list of objects")
    if not asked:
        return tuple(Sent(o, binary_default) for o in request.outputs)
    chosen: dict[str, Sent] = {}
    for entry in asked:
        name = entry.get("name")
        if not isinstance(name, str) or name not in by_name:
            given = ", ".join(dict.fromkeys([*by_name, *masks]))
            feature = masked_feature(name) or name if isinstance(name, str) else None
            if isinstance(feature, str) and feature in features:
                why = f"output {short(name)} was asked for without its input"
                raise bad_request(f"{why}; send {feature} or {feature}.values")
            raise bad_request(f"output {short(name)} is unknown; this request's inputs give: {given}")
        if name in chosen:
            raise bad_request(f"output {short(name)} is asked for twice")
        parameters = _parameters(entry, f"output {short(name)}")
        if "classification" in parameters:
            raise bad_request(f"output {short(name)}: classification is not supported")
        into = _into_region(by_name[name], parameters, known)
        chosen[name] = Sent(
            by_name[name], into is None and _flag(parameters, "binary_data", binary_default), into
        )
    if regions.overlap([sent.into for sent in chosen.values() if sent.into is not None]):
        raise bad_request(
            "outputs: two of them have bytes of shared memory in common; give each output bytes of its own"
        )
    return tuple(chosen.values())


def _into_region(output: Output, parameters: dict[str, Any], known: Regions | None) -> Slice | None:
    where = f"output {short(output.feature)}"
    if (part := shm.part_of(parameters, where, known)) is None:
        return None
    region, offset, size = part
    if _flag(parameters, "binary_data", False):
        raise bad_request(f"{where} has a {shm.REGION} and binary_data; ask for one of them")
    if size < output.bytes:
        what = f"{where}: {shm.SIZE} is {size}"
        raise bad_request(f"{what}, but {output.datatype} {list(output.shape)} has {output.bytes} bytes")
    return Slice(region, offset, output.bytes, output.at)


def _flag(parameters: dict[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise bad_request(f"{name} is {short(value)}; expected true or false")
    return value


def _timeout_us(header: dict[str, Any]) -> int:
    value = _parameters(header, "the request").get("timeout", 0)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise bad_request(f"timeout is {short(value)}; expected microseconds, a number from 0")
    return value
