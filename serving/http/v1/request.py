"""/v1: from JSON to a laid-out `Request`, and from vectors to JSON. If all features come in one form they are
flattened, checked and laid out together, without a Python step per feature; real requests have hundreds.
Mixed forms, found masks and errors are handled feature by feature."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tableside.loader.versions.states import State
from tableside.quant import Place
from tableside.serving.errors import bad_request, short
from tableside.serving.http.asgi import json_object, text_of
from tableside.serving.http.inputs.json_lists import (
    Counts,
    FeatureLists,
    are_all,
    bags_of,
    from_list,
    jagged_of,
    starts_of,
)
from tableside.serving.http.inputs.tensors import DATATYPES, Tensor, feature_inputs
from tableside.serving.model.features import Features
from tableside.serving.model.places import Buffer, DenseInput, Output, masked_feature
from tableside.serving.model.request import FeatureInput, Request
from tableside.serving.model.version import ServedVersion

_PLACE = np.dtype([(name, np.int64) for name in Place._fields])


@dataclass(frozen=True)
class Body:
    """A request's JSON object. has_booleans: its text contains `true` or `false`."""

    fields: dict[str, Any]
    has_booleans: bool


@dataclass(frozen=True)
class JsonRequest:
    """A laid-out request and its input buffer. vectors: None if `request.outputs` has them. bags: lengths per
    feature that came as bags, if found masks are wanted."""

    request: Request
    inputs: bytes
    vectors: "_Vectors | None" = None
    bags: "Mapping[str, NDArray[np.int32]]" = field(default_factory=dict)


@dataclass(frozen=True)
class _Vectors:
    """Places of features' vectors in an output buffer. names: of the features. counts: vectors per
    feature."""

    names: tuple[str, ...]
    out_at: Counts
    counts: Counts
    dims: Counts
    is_half: NDArray[np.bool_]

    def read(self, buffer: Buffer) -> dict[str, NDArray[np.float32]]:
        """Returns each feature's vectors, fp32 [bags or ids, dim]."""
        counts, dims, is_half = self.counts, self.dims, self.is_half
        if (counts == counts[0]).all() and (dims == dims[0]).all() and (is_half == is_half[0]).all():
            dtype, shape = (
                np.dtype(np.float16 if is_half[0] else np.float32),
                (len(counts), counts[0], dims[0]),
            )
            found = np.ndarray(shape, dtype, buffer, self.out_at[0])
            return dict(zip(self.names, found.astype(np.float32, copy=False), strict=True))
        rows = zip(
            self.names, self.out_at.tolist(), counts.tolist(), dims.tolist(), is_half.tolist(), strict=True
        )
        return {
            feature: np.ndarray((count, dim), np.float16 if half else np.float32, buffer, at).astype(
                np.float32, copy=False
            )
            for feature, at, count, dim, half in rows
        }


def parse(text: bytes, more: tuple[str, ...]) -> Body:
    """Parses a request's JSON. more: further allowed fields. ApiError: a field is wrong."""
    fields = json_object(text)
    known = ("model", "version", "features", *more)
    if unknown := sorted(set(fields) - set(known)):
        raise bad_request(f"field {short(unknown[0])} is unknown; expected {', '.join(known)}")
    for needed in ("model", "features"):
        if needed not in fields:
            raise bad_request(f"field {needed!r} is missing")
    if fields.get("version") is not None and type(fields["version"]) is not int:
        raise bad_request(f"version is {short(fields['version'])}; expected a number from 1")
    if type(fields.get("found", False)) is not bool:
        raise bad_request(f"found is {short(fields['found'])}; expected true or false")
    return Body(fields, b"true" in text or b"false" in text)


def encode(state: State, laid_out: JsonRequest, buffer: Buffer) -> bytes:
    """Returns the answer's JSON: scores or vectors, and any found masks. state: the one that answered."""
    request = laid_out.request
    found: dict[str, Any] = {"model": request.model, "version": state.version, "sequence": state.sequence}
    if request.scoring is not None:
        found["scores"] = request.scoring.output.view(buffer)
    elif laid_out.vectors is not None:
        found["vectors"] = {
            feature: text_of(vectors) for feature, vectors in laid_out.vectors.read(buffer).items()
        }
    else:
        found["vectors"] = {o.feature: text_of(_as_fp32(o, buffer)) for o in request.outputs if not o.is_mask}
    if masks := [o for o in request.outputs if o.is_mask]:
        found["found"] = _found(masks, laid_out.bags, buffer)
    return orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)


def _as_fp32(output: Output, buffer: Buffer) -> NDArray[Any]:
    return output.view(buffer).astype(np.float32, copy=False)


def _found(masks: Sequence[Output], bags: Mapping[str, NDArray[np.int32]], buffer: Buffer) -> dict[str, Any]:
    """Maps each feature to its found mask, in its ids' shape: a list per bag, or one flat list."""
    found: dict[str, Any] = {}
    for mask in masks:
        feature = masked_feature(mask.feature) or ""
        flat = mask.view(buffer).tolist()
        starts = starts_of(bags[feature]).tolist() if feature in bags else None
        found[feature] = flat if starts is None else [flat[a:b] for a, b in itertools.pairwise(starts)]
    return found


def lay_out(served: ServedVersion, body: Body, score: bool) -> JsonRequest:
    """Lays a request out for a version. ApiError: the request is wrong."""
    features, dense = body.fields["features"], body.fields.get("dense", {})
    if not isinstance(features, dict) or not features:
        raise bad_request("features: expected an object of feature to ids, with at least one feature")
    wants_found = body.fields.get("found", False)
    names = served.names
    numbers = np.array([names.numbers.get(f, -1) for f in features], np.int64)
    lists = None
    if not (body.has_booleans or wants_found or (numbers < 0).any()):
        lists = bags_of(features) or jagged_of(features)
    if lists is None or not (lists.are_sums or names.is_pooled[numbers].all()):
        return _one_by_one(served, features, dense, score, wants_found)
    places, counts = _places(lists, names, numbers)
    inputs = lists.ids + lists.lengths + lists.weights
    if score:
        given, parts = _dense_inputs(served, dense, len(inputs))
        return JsonRequest(
            served.lay_out(_feature_inputs(tuple(features), places), given, True, scores_alone=True),
            b"".join([inputs, *parts]),
        )
    out_bytes = int(names.vector_bytes[numbers] @ counts)
    if served.max_response_bytes is not None and out_bytes > served.max_response_bytes:
        return _one_by_one(served, features, dense, score)
    row_bytes = int(names.row_bytes[numbers] @ lists.id_counts)
    sizes = int(lists.id_counts.sum()), int(counts.sum()), row_bytes, out_bytes
    vectors = _Vectors(tuple(features), places["out_at"], counts, names.dims[numbers], names.is_half[numbers])
    return JsonRequest(served.request(places.tobytes(), sizes), inputs, vectors)


def _places(lists: FeatureLists, names: Features, numbers: Counts) -> tuple[NDArray[Any], Counts]:
    """Returns the features' places in `ids + lengths + weights` and the output, and their vectors."""
    counts = np.where(names.is_pooled[numbers], lists.bag_counts, lists.id_counts)
    id_starts = starts_of(lists.id_counts)[:-1]
    places = np.zeros(len(counts), _PLACE)
    places["kind"] = numbers
    places["ids_at"] = 8 * id_starts
    places["ids"] = lists.id_counts
    places["lengths_at"] = len(lists.ids) + 4 * starts_of(lists.bag_counts)[:-1]
    places["bags"] = lists.bag_counts
    places["weights_at"] = len(lists.ids) + len(lists.lengths) + 4 * id_starts if lists.weights else -1
    places["out_at"] = starts_of(counts * names.vector_bytes[numbers])[:-1]
    places["found_at"] = -1
    return places, counts


def _feature_inputs(features: tuple[str, ...], places: NDArray[Any]) -> list[FeatureInput]:
    """Converts places for a request with more than vectors."""
    columns = (places[part].tolist() for part in ("ids_at", "ids", "bags", "bag_length", "lengths_at"))
    weights_at = [None if at < 0 else at for at in places["weights_at"].tolist()]
    return list(map(FeatureInput, features, *columns, weights_at))


def _one_by_one(
    served: ServedVersion, features: dict[str, Any], dense: Any, score: bool, found: bool = False
) -> JsonRequest:
    """Lays out features of any form, and found masks. ApiError: the request is wrong."""
    tensors, parts, at = [], [], 0
    bags: dict[str, NDArray[np.int32]] = {}
    for feature, value in features.items():
        served.feature(feature)
        for part, array in _arrays(feature, value):
            tensors.append(Tensor(f"{feature}.{part}", DATATYPES[part], (array.size,), at))
            parts.append(array.tobytes())
            at += array.nbytes
            if part == "lengths" and isinstance(value, list):
                bags[feature] = array
    given, dense_parts = _dense_inputs(served, dense, at)
    request = served.lay_out(
        feature_inputs(tensors), given, score, found=features if found else (), scores_alone=score
    )
    return JsonRequest(request, b"".join([*parts, *dense_parts]), bags=bags if found else {})


def _arrays(feature: str, value: Any) -> list[tuple[str, NDArray[Any]]]:
    """Returns a feature's values, lengths and weights. ApiError: its JSON is something else."""
    if isinstance(value, list):
        if not are_all(list, value):
            raise bad_request(
                f"feature {feature!r}: expected a list of bags, [[id, ...], ...], or values and lengths"
            )
        lengths = np.fromiter(map(len, value), np.int32, len(value))
        return [("values", from_list(feature, "INT64", value)), ("lengths", lengths)]
    if not isinstance(value, dict) or "values" not in value or set(value) - {"values", "lengths", "weights"}:
        raise bad_request(
            f"feature {feature!r}: expected a list of bags, or an object of values, lengths, weights"
        )
    parts = [part for part in ("values", "lengths", "weights") if value.get(part) is not None]
    for part in parts:
        if isinstance(value[part], list) and any(isinstance(x, list) for x in value[part][:1]):
            raise bad_request(f"{short(f'{feature}.{part}')}: expected a list of numbers, not of lists")
    return [(part, from_list(f"{feature}.{part}", DATATYPES[part], value[part])) for part in parts]


def _dense_inputs(served: ServedVersion, raw: Any, at: int) -> tuple[list[DenseInput], list[bytes]]:
    """Returns a request's dense tensors and their bytes, from byte `at` on."""
    given, parts = [], []
    for name, array in _dense(served, raw):
        given.append(DenseInput(name, at, *array.shape))
        parts.append(array.tobytes())
        at += array.nbytes
    return given, parts


def _dense(served: ServedVersion, raw: Any) -> Iterator[tuple[str, NDArray[Any]]]:
    widths = {} if served.scorer is None else served.scorer.dense
    if not isinstance(raw, dict):
        raise bad_request("dense: expected an object of dense tensor to rows")
    for name, rows in raw.items():
        if name not in widths:
            raise bad_request(
                f"dense tensor {short(name)} is unknown; the scorer has: {', '.join(widths) or 'none'}"
            )
        if not isinstance(rows, list) or not are_all(list, rows) or not set(map(len, rows)) <= {widths[name]}:
            raise bad_request(
                f"dense tensor {name!r}: expected a list of rows of {widths[name]} numbers each"
            )
        yield name, from_list(name, "FP32", rows).reshape(len(rows), widths[name])
