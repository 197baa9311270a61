"""Requests for the fuzz campaign: right ones by chance, mutations of them, and a plain reference that says
what is right.

The reference reads a V2 or v1 request with json and loops, knows rows by formula (common.told), and shares no
code with the server. `answer_of` raises Unclear where a request says what the protocol does not: then no
answer but a refusal is right.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from campaigns.common import DIM, FEATURES, ROWS, TABLES, told

VALUE = 1  # of the version that is served
SIZES = {"INT64": 8, "INT32": 4, "FP32": 4}
HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 1.0, 0.5, 2**31, 2**32, 2**40, 2**63, 2**64, -(2**63), 1e308, 10**30, "",
    "1", "user", "\x00",
    "x" * 300, "é\u2028\U0001f600", [], [[]], [[[1]]], [1, "1"], [True], {}, {"name": "user"},
    {"values": [1]}, [None], [1e400],
    "FP32", "INT64", "BYTES", [1, 1], [0, 0], [2**62, 4], [-1, -1], ROWS, ROWS - 1,
]  # fmt: skip
Vectors = dict[str, NDArray[np.float64]]


class Unclear(Exception):
    """The request says what the protocol does not."""


@dataclass(frozen=True)
class Case:
    """One request. header_length: the value of Inference-Header-Content-Length, None where it is not sent."""

    path: str
    body: bytes
    header_length: bytes | None = None


# ---- right requests ----


def right_v2(chance: random.Random) -> Case:
    """Some features, in one of the ways in which they may be sent."""
    inline, inputs, binary = chance.random() < 0.3, [], []
    for feature in chance.sample(sorted(FEATURES), chance.randint(1, len(FEATURES))):
        for name, datatype, values in tensors(chance, feature):
            shape = list(values.shape)
            entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
            if inline:
                entry["data"] = values.tolist() if chance.random() < 0.5 else values.reshape(-1).tolist()
            else:
                entry["parameters"] = {"binary_data_size": values.nbytes}
                binary.append(values.tobytes())
            inputs.append(entry)
    request: dict[str, Any] = {"inputs": inputs}
    if chance.random() < 0.3:
        request["id"] = chance.choice(["", "7", "é"])
    if chance.random() < 0.6:
        request["parameters"] = {"binary_data_output": chance.random() < 0.8}
    if chance.random() < 0.3:
        named = sorted({_feature_of(e["name"]) for e in inputs})
        request["outputs"] = [{"name": n} for n in chance.sample(named, chance.randint(1, len(named)))]
    head = json.dumps(request).encode()
    body = head + b"".join(binary)
    return Case(
        "/v2/models/demo/infer", body, str(len(head)).encode() if binary or chance.random() < 0.5 else None
    )


def tensors(chance: random.Random, feature: str) -> list[tuple[str, str, NDArray[Any]]]:
    """The inputs of one feature: [bags, ids], or values with lengths and perhaps weights."""
    pooled, found = FEATURES[feature]["pooling"] != "none", list[tuple[str, str, NDArray[Any]]]()
    if chance.random() < 0.4:
        shape = (chance.randint(0, 3), chance.randint(0, 4))
        ids = np.array([chance.randrange(ROWS) for _ in range(shape[0] * shape[1])], np.int64).reshape(shape)
        found.append((feature, "INT64", ids))
    else:
        lengths = np.array([chance.randint(0, 3) for _ in range(chance.randint(0, 4))], np.int32)
        ids = np.array([chance.randrange(ROWS) for _ in range(int(lengths.sum()))], np.int64)
        found.append((f"{feature}.values", "INT64", ids))
        if pooled or chance.random() < 0.5:
            found.append((f"{feature}.lengths", "INT32", lengths))
    if pooled and chance.random() < 0.3:
        weights = np.array([chance.choice((0.5, 1, 2, -1)) for _ in range(ids.size)], np.float32)
        found.append((f"{feature}.weights", "FP32", weights))
    return found


def right_v1(chance: random.Random) -> Case:
    features: dict[str, Any] = {}
    for feature in chance.sample(sorted(FEATURES), chance.randint(1, len(FEATURES))):
        bags = [
            [chance.randrange(ROWS) for _ in range(chance.randint(0, 3))] for _ in range(chance.randint(0, 3))
        ]
        jagged = {"values": [i for bag in bags for i in bag], "lengths": [len(bag) for bag in bags]}
        features[feature] = bags if chance.random() < 0.5 else jagged
    request = {"model": "demo", "features": features, **({"version": 1} if chance.random() < 0.2 else {})}
    return Case("/v1/lookup", json.dumps(request).encode())


# ---- mutations ----


def mutated(case: Case, chance: random.Random) -> Case:
    """A case with one to three things changed: in its JSON, in its bytes, or in the length that its header
    claims."""
    for _ in range(chance.randint(1, 3)):
        case = chance.choice((_json_changed, _json_changed, _bytes_changed, _length_changed))(case, chance)
    return case


def _json_changed(case: Case, chance: random.Random) -> Case:
    """A value somewhere in the JSON replaced, removed or repeated; the length is made to fit again."""
    size = int(case.header_length) if case.header_length and case.header_length.isdigit() else len(case.body)
    try:
        request = json.loads(case.body[:size])
    except ValueError:
        return _bytes_changed(case, chance)
    places = list(_places(request))
    if not places:
        return case
    holder, key = chance.choice(places)
    what = chance.random()
    if what < 0.6:
        holder[key] = chance.choice(HOSTILE)
    elif what < 0.8:
        del holder[key]
    elif isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[chance.choice(("name", "data", "lengths", "parameters", "é"))] = holder[key]
    head = json.dumps(request).encode()
    length = case.header_length if case.header_length is None else str(len(head)).encode()
    return Case(case.path, head + case.body[size:], length)


def _places(value: Any) -> "list[tuple[Any, Any]]":
    """Every (container, key) in nested lists and objects."""
    keys = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def _bytes_changed(case: Case, chance: random.Random) -> Case:
    body = bytearray(case.body)
    at = chance.randint(0, len(body))
    change: Callable[[], None] = chance.choice(
        (
            lambda: body.__setitem__(slice(at, at + 1), bytes([chance.randrange(256)])),
            lambda: body.__setitem__(
                slice(at, at), bytes(chance.randrange(256) for _ in range(chance.randint(1, 8)))
            ),
            lambda: body.__delitem__(slice(at, at + chance.randint(1, 8))),
            lambda: body.__delitem__(slice(at, None)),
            lambda: body.extend(body[at:]),
        )
    )
    change()
    return Case(case.path, bytes(body), case.header_length)


def _length_changed(case: Case, chance: random.Random) -> Case:
    if not case.path.startswith("/v2"):
        return _bytes_changed(case, chance)
    near = str(len(case.body) + chance.randint(-9, 9)).encode()
    lengths = (
        None,
        b"",
        b"0",
        b"-1",
        b"1e2",
        b"+5",
        b" 5",
        b"0x10",
        b"9" * 30,
        "٣".encode(),
        near,
        b"00" + near,
    )
    return Case(case.path, case.body, chance.choice(lengths))


# ---- the reference ----


def answer_of(case: Case) -> Vectors:
    """What a right answer holds, feature -> vectors. Unclear: the request must be refused."""
    try:
        found = _answer_v1(json.loads(case.body)) if case.path.startswith("/v1") else _answer_v2(case)
    except (
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise Unclear(repr(error)) from error
    return found


def _answer_v1(request: Any) -> Vectors:
    found = {}
    _need(request["model"] == "demo" and request.get("version") in (None, 1) and len(request["features"]) > 0)
    for feature, given in request["features"].items():
        if isinstance(given, list):
            given = {"values": [i for bag in given for i in bag], "lengths": [len(bag) for bag in given]}
        lengths = given.get("lengths")
        found[feature] = vectors(feature, given["values"], lengths, given.get("weights"))
    return found


def _answer_v2(case: Case) -> Vectors:
    size = len(case.body) if case.header_length is None else int(case.header_length)
    request, at, parts = json.loads(case.body[:size]), size, dict[str, list[Any]]()
    shapes: dict[str, list[int]] = {}
    for entry in request["inputs"]:
        name, count = entry["name"], int(np.prod(entry["shape"], dtype=object))
        _need(name not in parts and 0 <= count < 10**6)
        if "data" in entry:
            values = [v for row in entry["data"] for v in (row if isinstance(row, list) else [row])]
        else:
            is_empty = entry["datatype"] == "BYTES" and not count  # no ids are of either kind
            datatype = "INT64" if is_empty else entry["datatype"]
            dtype = {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4"}[datatype]
            values = np.frombuffer(case.body, dtype, count, at).tolist()
            at += count * SIZES[datatype]
        _need(len(values) == count)
        parts[name], shapes[name] = values, entry["shape"]
    _need("data" in request["inputs"][0] or at == len(case.body))
    return answer_from(parts, shapes, [o["name"] for o in request.get("outputs") or []])


def answer_from(parts: dict[str, list[Any]], shapes: dict[str, list[int]], named: list[str]) -> Vectors:
    """What a right answer to these inputs holds, of all features or those that are named."""
    found = {}
    for feature in dict.fromkeys(map(_feature_of, parts)):
        lengths = parts.get(f"{feature}.lengths")
        if (
            feature in parts and FEATURES[feature]["pooling"] != "none"
        ):  # else [2**32, 0] is a shape of no ids like any other
            lengths = [shapes[feature][1]] * shapes[feature][0]
        found[feature] = vectors(
            feature,
            parts.get(feature, parts.get(f"{feature}.values")),
            lengths,
            parts.get(f"{feature}.weights"),
        )
    return {name: found[name] for name in named} if named else found


def vectors(feature: str, ids: Any, lengths: Any, weights: Any) -> NDArray[np.float64]:
    """One feature's answer, fp64 [bags or ids, 8]."""
    _need(all(type(i) is int and 0 <= i < ROWS for i in ids))
    rows = told(TABLES[FEATURES[feature]["table"]], VALUE, np.array(ids, np.int64)).astype(np.float64)
    pooling = FEATURES[feature]["pooling"]
    _need(lengths is None or (sum(lengths) == len(ids) and all(type(n) is int and n >= 0 for n in lengths)))
    if pooling == "none":
        _need(weights is None)
        return rows
    _need(lengths is not None)
    if weights is not None:
        _need(len(weights) == len(ids) and all(type(w) in (int, float) for w in weights))
        factors = np.array([float(w) for w in weights])
        _need(np.isfinite(factors.astype(np.float32)).all())
        rows = rows * factors.reshape(-1, 1)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(int)
    bags = [rows[a:b].sum(0) / (b - a if pooling == "mean" and b > a else 1) for a, b in pairwise(ends)]
    return np.array(bags, np.float64).reshape(-1, DIM)


def _feature_of(name: str) -> str:
    feature, _, part = name.rpartition(".")
    return feature if feature and part in ("values", "lengths", "weights") else name


def _need(condition: object) -> None:
    if not condition:
        raise Unclear
