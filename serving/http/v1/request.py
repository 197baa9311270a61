"""/v1: from JSON to a laid-out `Request`, and from vectors to JSON. The C extension reads requests in one
pass (`serving/http/v2/native/_json_request.c`). What it does not take is wrong: reading it feature by feature
says what is wrong."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from tableside.loader.versions.states import State
from tableside.quant import Place
from tableside.serving.errors import bad_request, short
from tableside.serving.http.asgi import json_object
from tableside.serving.http.inputs.tensors import (
    DATATYPES,
    STRINGS,
    InputTensor,
    are_all,
    check_lengths,
    feature_inputs,
    from_list,
)
from tableside.serving.http.v2 import _reader
from tableside.serving.http.v2.reader import names_of, scoring_of
from tableside.serving.model.places import Buffer, DenseInput
from tableside.serving.model.request import Answer, Request
from tableside.serving.model.version import ServedVersion

_PLACE = np.dtype([(name, np.int64) for name in Place._fields])
INPUTS_PER_BYTE = _reader.INPUTS_PER_BYTE  # bytes of inputs that are made of one of JSON, at most


class JsonRequest(NamedTuple):
    """A laid-out request and its input buffer. are_bags: of each feature, whether its ids came as a list of
    bags. wants_found: the answer has found masks."""

    request: Request
    inputs: Any
    are_bags: Sequence[int]
    wants_found: bool = False


class Read(NamedTuple):
    """A request that was read without its model. held: of the extension."""

    held: Any
    model: str
    version: int | None


def read(text: bytes, score: bool) -> Read | None:
    """Reads a request's JSON; None: it is wrong or unusual. Makes INPUTS_PER_BYTE bytes for each of it."""
    found = _reader.read_json(text, score)
    return None if found is None else Read(*found)


def lay_out(served: ServedVersion, came: Read) -> JsonRequest | None:
    """Lays out a request that was read, once. None: it is wrong or unusual."""
    found = _reader.lay_out_json(came.held, names_of(served))
    if found is None:
        return None
    places, sizes, inputs, size, scores, wants_found, are_bags = found
    scoring = scoring_of(served, scores)
    request = served.request(places, sizes, scoring is not None, scoring=scoring)
    return JsonRequest(request, memoryview(inputs)[:size], are_bags, wants_found)


def parse(text: bytes, more: tuple[str, ...]) -> dict[str, Any]:
    """Parses a request's JSON. more: further allowed fields. ApiError: a field is wrong, or came twice."""
    with contextlib.suppress(ValueError, RecursionError):  # which `json_object` tells of
        json.loads(text, object_pairs_hook=_check_keys)
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
    return fields


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    """ApiError: a key came twice, of which one would be ignored."""
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for n, key in enumerate(keys) if key in keys[:n])
        raise bad_request(f"key {short(twice)} came twice in an object; send each key once")


def encode(state: State, names: object, laid_out: JsonRequest, answer: Answer) -> list[Any]:
    """Returns the parts of the answer's JSON: scores or vectors, and any found masks. state: the one that
    answered. names: of the version."""
    request, buffer = laid_out.request, answer.buffer
    found: dict[str, Any] = {"model": request.model, "version": state.version, "sequence": state.sequence}
    if (late := request.take_late(answer)) is not None:
        found["degraded"] = late.by_table
    if request.scoring is not None:
        found["scores"] = request.scoring.output.view(buffer)
        return [orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)]
    head, tail = orjson.dumps(found).removesuffix(b"}"), b"}"
    if laid_out.wants_found:
        places, late_at = np.frombuffer(request.places, _PLACE), {} if late is None else late.at
        features = [request.features.names[number] for number in places["kind"].tolist()]
        masks = {
            name: _mask(place, laid_out.inputs, buffer, is_bags, late_at.get(name, ()))
            for name, place, is_bags in zip(features, places, laid_out.are_bags, strict=True)
        }
        tail = b',"found":%b}' % orjson.dumps(masks)
    return [head + b',"vectors":', _reader.vectors(names, request.places, buffer), tail]


def _mask(place: Any, inputs: Any, buffer: Buffer, is_bags: int, late: Sequence[int]) -> list[Any]:
    """Returns a feature's found mask, in its ids' shape: a list per bag, or one flat list. late: ids of which
    it says None."""
    flat: list[bool | None] = np.ndarray(place["ids"], np.bool_, buffer, place["found_at"]).tolist()
    for at in late:
        flat[at] = None
    if not is_bags:
        return flat
    lengths = np.frombuffer(inputs, np.int32, place["bags"], place["lengths_at"])
    ends = itertools.accumulate(lengths.tolist(), initial=0)
    return [flat[start:end] for start, end in itertools.pairwise(ends)]


def lay_out_slowly(served: ServedVersion, fields: dict[str, Any], score: bool) -> JsonRequest:
    """Lays out a request of any form, feature by feature. ApiError: it is wrong."""
    features, dense = fields["features"], fields.get("dense", {})
    if not isinstance(features, dict) or not features:
        raise bad_request("features: expected an object of feature to ids, with at least one feature")
    wants_found = fields.get("found", False)
    tensors, parts, at = [], [], 0
    for feature, value in features.items():
        served.feature(feature)
        ids = STRINGS if served.features[feature].strings else "INT64"
        for part, array in _arrays(feature, value, ids):
            tensors.append(InputTensor(f"{feature}.{part}", DATATYPES[part], (array.size,), at))
            parts.append(array.tobytes())
            at += array.nbytes
    given, dense_parts = _dense_inputs(served, dense, at)
    asked, inputs = feature_inputs(tensors), b"".join([*parts, *dense_parts])
    request = served.lay_out(asked, given, score, found=features if wants_found else (), scores_alone=score)
    check_lengths(served, asked, inputs)
    are_bags = [isinstance(value, list) for value in features.values()]
    return JsonRequest(request, inputs, are_bags, wants_found)


def _arrays(feature: str, value: Any, ids: str) -> list[tuple[str, NDArray[Any]]]:
    """Returns a feature's values, lengths and weights. ids: the datatype of values. ApiError: it is something
    else."""
    if isinstance(value, list):
        if not are_all(list, value):
            raise bad_request(
                f"feature {feature!r}: expected a list of bags, [[id, ...], ...], or values and lengths"
            )
        lengths = np.fromiter(map(len, value), np.int32, len(value))
        return [("values", from_list(feature, ids, value)), ("lengths", lengths)]
    if not isinstance(value, dict) or "values" not in value or set(value) - {"values", "lengths", "weights"}:
        raise bad_request(
            f"feature {feature!r}: expected a list of bags, or an object of values, lengths, weights"
        )
    parts = [part for part in ("values", "lengths", "weights") if value.get(part) is not None]
    for part in parts:
        if isinstance(value[part], list) and any(isinstance(x, list) for x in value[part][:1]):
            raise bad_request(f"{short(f'{feature}.{part}')}: expected a list of numbers, not of lists")
    datatypes = {**DATATYPES, "values": ids}
    return [(part, from_list(f"{feature}.{part}", datatypes[part], value[part])) for part in parts]


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
