"""Named tensors of a request to feature inputs, for both protocols. A feature comes as `<feature>` INT64
[bags, ids a bag], or `<feature>.values` INT64 [ids] with `<feature>.lengths` INT32 [bags]; either with
`<feature>.weights` FP32 [ids]. INT32 ids are widened; ids that are strings, BYTES, are hashed.
JSON lists become arrays of a tensor's datatype; what is wrong with one is found and named.
All features in one: `serving.http.inputs.kjt`."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.loader.string_ids import ids_of_bytes, string_ids
from tableside.quant import BadIds
from tableside.quant.errors import Problem
from tableside.serving.errors import ApiError, ErrorKind, bad_request, short
from tableside.serving.model.request import FeatureInput
from tableside.serving.model.version import ServedVersion

PARTS = ("values", "lengths", "weights")
STRINGS = "BYTES"  # the datatype of string ids
ID_DATATYPES = ("INT64", "INT32", STRINGS)
DATATYPES = {"": "INT64", "values": "INT64", "lengths": "INT32", "weights": "FP32"}
DTYPES: dict[str, np.dtype[Any]] = {
    "INT64": np.dtype("<i8"),
    "INT32": np.dtype("<i4"),
    "FP32": np.dtype("<f4"),
}


@dataclass(frozen=True)
class InputTensor:
    """A named tensor. at: its first byte in the input buffer. strings_bytes: of BYTES."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    at: int
    strings_bytes: int = 0

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        if self.datatype == STRINGS:
            return self.strings_bytes
        return self.elements * DTYPES[self.datatype].itemsize


def split_name(name: str) -> tuple[str, str]:
    """ "clicked.lengths" -> ("clicked", "lengths"); a bare feature has the part ""."""
    feature, _, part = name.rpartition(".")
    return (feature, part) if feature and part in PARTS else (name, "")


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Returns a shape of one or two non-negative integers. ApiError: it is something else."""
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= 2
        or not all(type(n) is int and 0 <= n < 2**40 for n in shape)
    ):
        what = f"input {short(name)}: shape is {short(shape)}"
        raise bad_request(f"{what}; expected a list of one or two non-negative integers")
    return tuple(shape)


def check_datatype(name: str, datatype: Any, expected: str) -> str:
    """Returns an input's datatype, which is `expected`; integer ids may be INT32. ApiError: it is another."""
    if datatype == "INT32" and expected == "INT64":
        return "INT32"
    if datatype != expected:
        more = {"INT64": " or INT32", STRINGS: ", since its ids are strings"}.get(expected, "")
        raise bad_request(f"input {short(name)}: datatype is {short(datatype)}; expected {expected}{more}")
    return expected


def is_converted(tensor: InputTensor) -> bool:
    """Returns whether ids came as something else than INT64."""
    is_narrow = tensor.datatype == "INT32" and split_name(tensor.name)[1] != "lengths"
    return is_narrow or tensor.datatype == STRINGS


def with_ids(tensors: Sequence[InputTensor], inputs: Any) -> tuple[list[InputTensor], Any]:
    """Returns the tensors with INT64 ids, and their buffer: `inputs` itself if all came so. ApiError: BYTES
    are not as many strings as their shape says."""
    if not any(map(is_converted, tensors)):
        return list(tensors), inputs
    moved, at = [], 0
    for tensor in tensors:
        datatype = "INT64" if is_converted(tensor) else tensor.datatype
        moved.append(InputTensor(tensor.name, datatype, tensor.shape, at))
        at += moved[-1].bytes
    wide = np.empty(at, np.uint8).data
    for tensor, to in zip(tensors, moved, strict=True):
        np.frombuffer(wide, DTYPES[to.datatype], to.elements, to.at)[:] = _values(tensor, inputs)
    return moved, wide


def _values(tensor: InputTensor, inputs: Any) -> NDArray[Any]:
    if tensor.datatype != STRINGS:
        return np.frombuffer(inputs, DTYPES[tensor.datatype], tensor.elements, tensor.at)
    ids = ids_of_bytes(memoryview(inputs)[tensor.at : tensor.at + tensor.bytes])
    if ids is None or ids.size != tensor.elements:
        found = "no strings" if ids is None else f"{ids.size} strings"
        raise bad_request(
            f"input {short(tensor.name)}: its {tensor.bytes} bytes are {found}; expected {tensor.elements}, "
            "before each its length as uint32"
        )
    return ids


def check_weights(tensors: Sequence[InputTensor], inputs: Any) -> None:
    """ApiError: a weight is not finite."""
    for tensor in tensors:
        if tensor.datatype == "FP32" and split_name(tensor.name)[1] == "weights":
            values = np.frombuffer(inputs, np.float32, tensor.elements, tensor.at)
            if not np.isfinite(values).all():
                at = int(np.flatnonzero(~np.isfinite(values))[0])
                raise bad_request(
                    f"input {short(tensor.name)}: value {values[at]} at position {at} is not a finite FP32"
                )


def check_lengths(served: ServedVersion, features: Sequence[FeatureInput], inputs: Any) -> None:
    """ApiError: an unpooled feature's lengths, which no kernel reads, are negative or do not add up."""
    for i in features:
        if i.lengths_at is None or served.features[i.feature].is_pooled:
            continue
        lengths = np.frombuffer(inputs, np.int32, i.bags or 0, i.lengths_at)
        if lengths.size and lengths.min() < 0:
            at = int(np.flatnonzero(lengths < 0)[0])
            error = BadIds(Problem.LENGTH, 0, at, int(lengths[at]), 0)
        elif (total := int(lengths.sum(dtype=np.int64))) != i.ids:
            error = BadIds(Problem.SUM, 0, lengths.size, total, i.ids)
        else:
            continue
        raise bad_request(error.describe(f"feature {i.feature!r}"), ErrorKind.BAD_ID)


def check_dense(tensor: InputTensor, width: int, before: Container[str]) -> None:
    """ApiError: a dense tensor is not [batch, width], or its name is in `before`."""
    if len(tensor.shape) != 2 or tensor.shape[1] != width:
        raise bad_request(
            f"input {short(tensor.name)}: shape is {list(tensor.shape)}; expected [batch, {width}]"
        )
    if tensor.name in before:
        raise bad_request(f"input {short(tensor.name)} came twice; send each tensor once")


def feature_inputs(tensors: Sequence[InputTensor]) -> list[FeatureInput]:
    """Returns feature inputs by first tensor. ApiError: a part is missing, doubled or misshapen."""
    parts: dict[str, dict[str, InputTensor]] = {}
    for tensor in tensors:
        feature, part = split_name(tensor.name)
        if part in parts.setdefault(feature, {}):
            raise bad_request(f"input {short(tensor.name)} came twice; send each tensor once")
        parts[feature][part] = tensor
    return [_feature_input(feature, found) for feature, found in parts.items()]


def _feature_input(feature: str, parts: dict[str, InputTensor]) -> FeatureInput:
    dense, values, lengths, weights = (parts.get(p) for p in ("", *PARTS))
    if dense is not None and (values is not None or lengths is not None):
        raise bad_request(
            f"feature {short(feature)} came both as [bags, ids] and as values; send one of them"
        )
    ids = dense or values
    if ids is None:
        raise bad_request(f"feature {short(feature)} came without ids; send {feature} or {feature}.values")
    if dense is not None and len(dense.shape) != 2:
        what = f"input {short(feature)}: shape is {list(dense.shape)}"
        raise bad_request(f"{what}; expected [bags, ids a bag], or send {feature}.values")
    for tensor in (values, lengths):
        if tensor is not None and len(tensor.shape) != 1:
            raise bad_request(
                f"input {short(tensor.name)}: shape is {list(tensor.shape)}; expected one dimension"
            )
    if weights is not None and weights.elements != ids.elements:
        what = f"input {short(weights.name)} has {weights.elements} weights for {ids.elements} ids"
        raise bad_request(f"{what}; expected one an id")
    weights_at = None if weights is None else weights.at
    if dense is not None:
        bags, bag_length = dense.shape
        if bag_length >= 2**31:
            raise bad_request(
                f"input {short(feature)}: shape is {list(dense.shape)}; a bag has at most {2**31 - 1} ids"
            )
        return FeatureInput(feature, dense.at, dense.elements, bags, bag_length, None, weights_at)
    bags_given = None if lengths is None else lengths.shape[0]
    return FeatureInput(
        feature, ids.at, ids.elements, bags_given, 0, None if lengths is None else lengths.at, weights_at
    )


# ---- JSON lists of numbers and of string ids ----

_ALLOWED: dict[str, tuple[set[type], str]] = {
    "FP32": ({int, float}, "a number"),
    STRINGS: ({str}, "a string"),
}


def are_all(kind: type, values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= {kind}


def from_list(name: str, datatype: str, data: Any) -> np.ndarray[Any, Any]:
    """Makes an array of JSON numbers; of BYTES, the ids of strings. Other ids and lengths must be integers;
    FP32 takes any numbers."""
    flat = flatten(data)
    kinds = set(map(type, flat))
    allowed, expected = _ALLOWED.get(datatype, ({int}, "an integer"))
    if not kinds <= allowed:
        at = next(i for i, x in enumerate(flat) if type(x) not in allowed)
        # what the parser makes of an integer that int64 does not hold
        if type(flat[at]) is float and abs(flat[at]) >= 2.0**63 and datatype != STRINGS:
            raise _outside(name, datatype, flat, at)
        raise bad_request(f"{short(name)}: value {short(flat[at])} at position {at} is not {expected}")
    if datatype == STRINGS:
        return string_ids(flat)
    dtype = DTYPES[datatype]
    try:
        with np.errstate(over="ignore"):
            array = np.array(flat, dtype)
        if datatype == "FP32" and not np.isfinite(array).all():
            at = int(np.flatnonzero(~np.isfinite(array))[0])
            raise bad_request(f"{short(name)}: value {short(flat[at])} at position {at} is not a finite FP32")
        return array
    except OverflowError:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        at = next(i for i, x in enumerate(flat) if not low <= x <= high)
        raise _outside(name, datatype, flat, at) from None


def _outside(name: str, datatype: str, flat: list[Any], at: int) -> ApiError:
    info = np.iinfo(DTYPES[datatype])
    return bad_request(
        f"{short(name)}: value {short(flat[at])} at position {at} is outside {datatype}'s [{info.min}, "
        f"{info.max}]"
    )


def flatten(data: Any) -> list[Any]:
    """Flattens a list, or a list of lists in row-major order, the protocol's two forms."""
    if not isinstance(data, list):
        raise bad_request(f"data is {short(data)}; expected a list of numbers")
    if data and isinstance(data[0], list):
        if not are_all(list, data):
            row = next(row for row in data if not isinstance(row, list))
            raise bad_request(f"data mixes lists and {short(row)}; expected lists of numbers")
        return list(chain.from_iterable(data))
    return data
