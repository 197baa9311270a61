"""All features of a request in one pair of tensors, like TorchRec's KeyedJaggedTensor.

    kjt.values   INT64 or INT32 [N]   ids: feature by feature, bag by bag
    kjt.lengths  INT32 [F, B]         ids of each bag
    kjt.weights  FP32 [N]             optional, one an id

Features of string ids have kjt.values BYTES, in a kjt of their own.

Parameter `kjt.features` names the features in order, as a list or comma-separated; default: all of the
model's. `kjt.schema` may hold the digest that `describe` gave. Outputs: `serving.model.places.kjt_outputs`,
and `kjt.found` if named.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import orjson

from tableside.quant import BadIds
from tableside.quant.errors import Problem
from tableside.serving.errors import ErrorKind, bad_request, short
from tableside.serving.http.inputs.tensors import InputTensor
from tableside.serving.model.places import KJT
from tableside.serving.model.request import FeatureInput
from tableside.serving.model.version import ServedVersion

VALUES, LENGTHS, WEIGHTS = f"{KJT}.values", f"{KJT}.lengths", f"{KJT}.weights"
FEATURES, SCHEMA = f"{KJT}.features", f"{KJT}.schema"  # parameters


def is_kjt(served: ServedVersion, names: Sequence[str]) -> bool:
    """Returns whether these inputs are a kjt. A model with a feature of that name has none."""
    return KJT not in served.features and any(n in (VALUES, LENGTHS, WEIGHTS) for n in names)


def describe(served: ServedVersion) -> dict[str, Any]:
    """Describes the model's features with their digest, for metadata."""
    features = [
        {
            **{"name": n, "dim": f.table.dim, "pooling": f.pooling.label},
            "datatype": "FP16" if f.half else "FP32",
            **({"ids": "string"} if f.strings else {}),
        }
        for n, f in served.features.items()
    ]
    return {FEATURES: features, SCHEMA: _digest(features)}


def _digest(features: list[dict[str, Any]]) -> str:
    return sha256(orjson.dumps(features)).hexdigest()[:16]


def features_of(served: ServedVersion, parameters: dict[str, Any]) -> tuple[str, ...]:
    """Returns a kjt's features in order. ApiError: no name, a double, an unknown one, or another schema."""
    if SCHEMA in parameters and parameters[SCHEMA] != (known := describe(served)[SCHEMA]):
        raise bad_request(
            f"{SCHEMA} is {short(parameters[SCHEMA])}; version {served.version} of model "
            f"{served.header.model!r} has {known}: read the model's metadata again"
        )
    named = parameters.get(FEATURES)
    if named is None:
        return tuple(served.features)
    if isinstance(named, str):
        named = named.split(",")
    if not isinstance(named, list) or not named or not all(isinstance(n, str) for n in named):
        raise bad_request(
            f"{FEATURES} is {short(named)}; expected names of features, as a list or with commas between"
        )
    if len(set(named)) < len(named):
        twice = next(n for k, n in enumerate(named) if n in named[:k])
        raise bad_request(f"{FEATURES} names {short(twice)} twice; name each feature once")
    for name in named:
        served.feature(name)
    return tuple(named)


def feature_inputs(
    tensors: Sequence[InputTensor], features: tuple[str, ...], inputs: Any
) -> list[FeatureInput]:
    """Returns the inputs of a kjt's features. inputs: the tensors' buffer, ids as INT64. ApiError: a tensor
    is missing, doubled or misshapen, or lengths are negative or do not add up."""
    by_name: dict[str, InputTensor] = {}
    for tensor in tensors:
        if tensor.name not in (VALUES, LENGTHS, WEIGHTS):
            what = f"input {short(tensor.name)} came beside {VALUES}"
            raise bad_request(f"{what}; send all features in the kjt, or each by its name")
        if tensor.name in by_name:
            raise bad_request(f"input {short(tensor.name)} came twice; send each tensor once")
        by_name[tensor.name] = tensor
    for needed in (VALUES, LENGTHS):
        if needed not in by_name:
            raise bad_request(
                f"a kjt came without {needed}; send {VALUES} [ids] and {LENGTHS} [features, bags]"
            )
    values, lengths, weights = by_name[VALUES], by_name[LENGTHS], by_name.get(WEIGHTS)
    for one in (values, weights):
        if one is not None and len(one.shape) != 1:
            raise bad_request(f"input {short(one.name)}: shape is {list(one.shape)}; expected one dimension")
    if len(lengths.shape) != 2 or lengths.shape[0] != len(features):
        what = f"input {LENGTHS!r}: shape is {list(lengths.shape)}"
        raise bad_request(f"{what}; expected [{len(features)}, bags], a row a feature")
    if weights is not None and weights.elements != values.elements:
        raise bad_request(
            f"input {WEIGHTS!r} has {weights.elements} weights for {values.elements} ids; expected one an id"
        )
    bags = lengths.shape[1]
    counts = np.frombuffer(inputs, np.int32, lengths.elements, lengths.at).reshape(len(features), bags)
    sums = _sums(features, counts, values.elements)
    found, first = [], 0
    for row, (feature, ids) in enumerate(zip(features, sums, strict=True)):
        weights_at = None if weights is None else weights.at + 4 * first
        found.append(
            FeatureInput(
                feature, values.at + 8 * first, ids, bags, 0, lengths.at + 4 * bags * row, weights_at
            )
        )
        first += ids
    return found


def _sums(features: tuple[str, ...], counts: np.ndarray[Any, Any], ids: int) -> list[int]:
    """Counts each feature's ids. ApiError: a length is negative, or their sum is wrong."""
    if counts.size and counts.min() < 0:
        row, bag = (int(n) for n in np.argwhere(counts < 0)[0])
        problem = BadIds(Problem.LENGTH, 0, bag, int(counts[row, bag]), 0)
        raise bad_request(problem.describe(f"feature {features[row]!r}"), ErrorKind.BAD_ID)
    sums: list[int] = counts.sum(axis=1, dtype=np.int64).tolist()
    if sum(sums) != ids:
        raise bad_request(
            BadIds(Problem.SUM, 0, counts.size, sum(sums), ids).describe(LENGTHS), ErrorKind.BAD_ID
        )
    return sums
