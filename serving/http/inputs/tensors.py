"""From the named tensors of a request to the inputs of its features, for the binary and the JSON protocol
alike.

A feature is sent as `<feature>` INT64 [bags, ids a bag], or as `<feature>.values` INT64 [ids] with
`<feature>.lengths` INT32 [bags]. `<feature>.weights` FP32 may come with either, one weight for each id. Ids
may be INT32; they are widened before anything reads them. All features together are a kjt
(`serving.http.inputs.kjt`).
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tableside.serving.errors import bad_request, short
from tableside.serving.model.request import FeatureInput

PARTS = ("values", "lengths", "weights")
DATATYPES = {"": "INT64", "values": "INT64", "lengths": "INT32", "weights": "FP32"}
DTYPES: dict[str, np.dtype[Any]] = {
    "INT64": np.dtype("<i8"),
    "INT32": np.dtype("<i4"),
    "FP32": np.dtype("<f4"),
}


@dataclass(frozen=True)
class Tensor:
    """One named tensor. at: the byte of the input buffer where its values begin."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    at: int

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * DTYPES[self.datatype].itemsize


def split_name(name: str) -> tuple[str, str]:
    """ "clicked.lengths" -> ("clicked", "lengths"); a bare feature has the part ""."""
    feature, _, part = name.rpartition(".")
    return (feature, part) if feature and part in PARTS else (name, "")


def check_shape(name: str, shape: Any) -> tuple[int, ...]:
    """A shape: a list of one or two non-negative integers, as no input has more dimensions. ApiError: it
    is something else."""
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= 2
        or not all(type(n) is int and 0 <= n < 2**40 for n in shape)
    ):
        raise bad_request(
            f"input {short(name)}: shape is {short(shape)}; expected a list of one or two non-negative "
            "integers"
        )
    return tuple(shape)


def check_datatype(name: str, datatype: Any, expected: str | None = None) -> str:
    """The datatype of an input: `expected` or, where that is None, the one of its part of a feature. Ids may
    be INT32 as well.

    ApiError: it is another.
    """
    expected = expected or DATATYPES[split_name(name)[1]]
    if datatype == "INT32" and expected == "INT64":
        return "INT32"
    if datatype != expected:
        or_narrow = " or INT32" if expected == "INT64" else ""
        raise bad_request(
            f"input {short(name)}: datatype is {short(datatype)}; expected {expected}{or_narrow}"
        )
    return expected


def is_narrow(tensor: Tensor) -> bool:
    """Whether a tensor holds ids as INT32."""
    return tensor.datatype == "INT32" and split_name(tensor.name)[1] != "lengths"


def widened(tensors: Sequence[Tensor], inputs: Any) -> tuple[list[Tensor], Any]:
    """The tensors with INT64 ids, and the input buffer that they lie in: `inputs` where no ids were INT32."""
    if not any(map(is_narrow, tensors)):
        return list(tensors), inputs
    moved, at = [], 0
    for tensor in tensors:
        moved.append(Tensor(tensor.name, "INT64" if is_narrow(tensor) else tensor.datatype, tensor.shape, at))
        at += moved[-1].bytes
    wide = np.empty(at, np.uint8).data
    for tensor, to in zip(tensors, moved, strict=True):
        values = np.frombuffer(inputs, DTYPES[tensor.datatype], tensor.elements, tensor.at)
        np.frombuffer(wide, DTYPES[to.datatype], to.elements, to.at)[:] = values
    return moved, wide


def check_weights(tensors: Sequence[Tensor], inputs: Any) -> None:
    """ApiError: a weight is infinite or no number."""
    for tensor in tensors:
        if tensor.datatype == "FP32" and split_name(tensor.name)[1] == "weights":
            values = np.frombuffer(inputs, np.float32, tensor.elements, tensor.at)
            if not np.isfinite(values).all():
                at = int(np.flatnonzero(~np.isfinite(values))[0])
                raise bad_request(
                    f"input {short(tensor.name)}: value {values[at]} at position {at} is not a finite FP32"
                )


def check_dense(tensor: Tensor, width: int, before: Container[str]) -> None:
    """ApiError: a scorer's dense tensor is not [batch, width], or is among `before`, the names of inputs
    before it."""
    if len(tensor.shape) != 2 or tensor.shape[1] != width:
        raise bad_request(
            f"input {short(tensor.name)}: shape is {list(tensor.shape)}; expected [batch, {width}]"
        )
    if tensor.name in before:
        raise bad_request(f"input {short(tensor.name)} came twice; send each tensor once")


def feature_inputs(tensors: Sequence[Tensor]) -> list[FeatureInput]:
    """The inputs of features, in the order of their first tensors. ApiError: a part is missing, doubled or
    of a wrong shape."""
    parts: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        feature, part = split_name(tensor.name)
        if part in parts.setdefault(feature, {}):
            raise bad_request(f"input {short(tensor.name)} came twice; send each tensor once")
        parts[feature][part] = tensor
    return [_feature_input(feature, found) for feature, found in parts.items()]


def _feature_input(feature: str, parts: dict[str, Tensor]) -> FeatureInput:
    dense, values, lengths, weights = (parts.get(p) for p in ("", *PARTS))
    if dense is not None and (values is not None or lengths is not None):
        raise bad_request(
            f"feature {short(feature)} came both as [bags, ids] and as values; send one of them"
        )
    ids = dense or values
    if ids is None:
        raise bad_request(f"feature {short(feature)} came without ids; send {feature} or {feature}.values")
    if dense is not None and len(dense.shape) != 2:
        raise bad_request(
            f"input {short(feature)}: shape is {list(dense.shape)}; expected [bags, ids a bag], or send "
            f"{feature}.values"
        )
    for tensor in (values, lengths):
        if tensor is not None and len(tensor.shape) != 1:
            raise bad_request(
                f"input {short(tensor.name)}: shape is {list(tensor.shape)}; expected one dimension"
            )
    if weights is not None and weights.elements != ids.elements:
        raise bad_request(
            f"input {short(weights.name)} has {weights.elements} weights for {ids.elements} ids; expected "
            "one an id"
        )
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
