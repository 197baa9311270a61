"""The two forms of a request: what the bytes say, read by the protocol's words alone."""

from typing import Any

import numpy as np
import orjson
import pytest
import torch

from benchmarks import wire
from tableside.serving.client import ClientError, FeatureError, Jagged
from tableside.serving.client.calls import cut, take_masks
from tableside.serving.client.compact import CompactForm, Feature, Schema, keyed, obstacle
from tableside.serving.client.features import columns
from tableside.serving.client.messages import HttpResponse
from tableside.serving.client.named import NamedForm

pytestmark = pytest.mark.quick

DTYPES = {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4", "FP16": "<f2"}


def parse(head: bytes, body: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A request's JSON and its tensors by name, as the protocol says, with every size checked."""
    header, found, at = orjson.loads(head), {}, 0
    for tensor in header["inputs"]:
        size = tensor["parameters"]["binary_data_size"]
        array = np.frombuffer(body[at : at + size], DTYPES[tensor["datatype"]]).reshape(tensor["shape"])
        assert tensor["name"] not in found and array.nbytes == size
        found[tensor["name"]] = array
        at += size
    assert at == len(body)
    return header, found


def split(encoded: tuple[int, tuple[Any, ...]]) -> tuple[bytes, bytes]:
    json_bytes, parts = encoded
    data = b"".join(parts)
    assert all(memoryview(p).itemsize == 1 for p in parts)  # transports count them by len()
    return data[:json_bytes], data[json_bytes:]


def same(found: dict[str, np.ndarray], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


# ---- by name ----


def draw(rng: np.random.Generator, kind: str) -> tuple[Any, dict[str, Any]]:
    """Ids of a kind, as a caller gives them, and the tensors that they are: suffix -> values."""
    bags = int(rng.integers(0, 5))
    lengths = rng.integers(0, 4, bags)
    ids, weights = (
        rng.integers(0, 2**40, int(lengths.sum())),
        rng.random(int(lengths.sum())).astype(np.float32),
    )
    ends = np.cumsum(lengths)
    match kind:
        case "rectangle":
            ids = rng.integers(0, 2**40, (bags, 3))
            return ids, {"": ids}
        case "lists":
            return [ids[e - n : e].tolist() for e, n in zip(ends, lengths, strict=True)], {
                ".values": ids,
                ".lengths": lengths,
            }
        case "ids":
            return Jagged(ids), {".values": ids}
        case "jagged":
            return Jagged(ids, lengths.astype(np.int32)), {".values": ids, ".lengths": lengths}
        case "weighted":
            return Jagged(ids, lengths, weights), {".values": ids, ".lengths": lengths, ".weights": weights}
        case "weighted lists":
            given = Jagged(ids.tolist(), lengths.tolist(), weights.tolist())
            return given, {".values": ids, ".lengths": lengths, ".weights": weights}
        case "strided":
            return Jagged(np.repeat(ids, 2)[::2], np.repeat(lengths, 2)[::2]), {
                ".values": ids,
                ".lengths": lengths,
            }
        case "tensors":
            return Jagged(torch.tensor(ids), torch.tensor(lengths)), {".values": ids, ".lengths": lengths}
    raise AssertionError(kind)


KINDS = ("rectangle", "lists", "ids", "jagged", "weighted", "weighted lists", "strided", "tensors")


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_of_feature_is_named_right(seed: int) -> None:
    """Features of mixed kinds, or all of one, become exactly their tensors, behind JSON whose length is a
    multiple of 8."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(KINDS, 6) if seed >= len(KINDS) else [KINDS[seed]] * 6
    drawn = {f"f{i}": draw(rng, kind) for i, kind in enumerate(kinds)}
    features = {name: given for name, (given, _) in drawn.items()}
    dense = {"context": rng.random((2, 3))}
    headers, body = wire.encode(features, ["f0", "score"], dense)
    json_bytes = int(headers[wire.HEADER_LENGTH])
    assert json_bytes % 8 == 0
    header, found = parse(body[:json_bytes], body[json_bytes:])
    expected = {
        f"{name}{suffix}": values for name, (_, parts) in drawn.items() for suffix, values in parts.items()
    }
    same(found, {**expected, "context": dense["context"].astype(np.float32)})
    assert header["parameters"] == {"binary_data_output": True}
    assert header["outputs"] == [{"name": "f0"}, {"name": "score"}]
    named = [t["name"].removesuffix(".values") for t in header["inputs"]]
    assert [n for n in named if n in features] == list(features)  # which is the order of the response


def test_a_template_takes_any_sizes() -> None:
    """The same form encodes requests whose sizes differ, as a new one would."""
    rng, form = np.random.default_rng(0), NamedForm(("a", "b"), "jr", (), None)
    for _ in range(20):
        features = {"a": draw(rng, "jagged")[0], "b": draw(rng, "rectangle")[0]}
        given = columns(features)
        assert split(form.encode(given, {})) == split(
            NamedForm(given.names, given.kinds, (), None).encode(given, {})
        )


NAMES = ('"quoted"', "100%d %b %%", "ключ", "a.values", "back\\slash", "", "\n")


def test_names_may_hold_anything() -> None:
    """Quotes, percent signs and other scripts arrive as they are, in both forms."""
    features = {name: Jagged(np.array([i]), np.array([1], np.int32)) for i, name in enumerate(NAMES)}
    headers, body = wire.encode(features, NAMES)
    json_bytes = int(headers[wire.HEADER_LENGTH])
    header, found = parse(body[:json_bytes], body[json_bytes:])
    assert {n: found[f"{n}.values"].tolist() for n in NAMES} == {n: [i] for i, n in enumerate(NAMES)}
    assert [o["name"] for o in header["outputs"]] == [*NAMES]
    schema = schema_of(*(Feature(n, 2, True, "FP32") for n in reversed(NAMES)))
    form = CompactForm(schema, NAMES, False, NAMES[:2], None)
    dense = {n: np.ones((1, 1), np.float32) for n in NAMES[:2]}
    header, found = parse(*split(form.encode(keyed(columns(features)), dense)))
    assert header["parameters"]["kjt.features"] == [*NAMES] and found.keys() >= dense.keys()


def response(outputs: list[tuple[str, str, np.ndarray]]) -> HttpResponse:
    """An infer response of these outputs: name, datatype, values."""
    described = [
        {"name": n, "datatype": d, "shape": list(a.shape), "parameters": {"binary_data_size": a.nbytes}}
        for n, d, a in outputs
    ]
    head = orjson.dumps({"model_name": "m", "model_version": "1", "outputs": described})
    data = bytearray(head + b"".join(a.tobytes() for _, _, a in outputs))
    return HttpResponse(200, memoryview(data), len(head), False)


def test_vectors_are_views_of_the_response() -> None:
    """Whatever types and shapes follow each other, and again where the next response is laid out
    otherwise."""
    rng, form = np.random.default_rng(2), NamedForm(("a",), "j", (), None)
    for shapes in ([(2, 4)] * 5, [(2, 4), (2, 4), (3, 1), (0, 4), (2, 4)], [(1, 8)], [(2, 4)] * 5):
        outputs = [
            (f"f{i}", d, rng.random(s).astype(DTYPES[d]))
            for i, s in enumerate(shapes)
            for d in ("FP32" if i % 3 else "FP16",)
        ]
        got = response(outputs)
        found = {
            name: array
            for names, block in form.outputs.read(got)
            for name, array in zip(names, block, strict=True)
        }
        same(found, {n: a for n, _, a in outputs})
        assert all(found[n].dtype == a.dtype for n, _, a in outputs)
        assert all(
            np.shares_memory(a, np.frombuffer(got.content, np.uint8)) for a in found.values() if a.size
        )


# ---- the compact form ----


def schema_of(*features: Feature) -> Schema:
    return Schema({f.name: f for f in features}, "0123abcd")


A, B, C = Feature("a", 2, True, "FP32"), Feature("b", 3, True, "FP32"), Feature("c", 3, True, "FP32")
S, T = Feature("s", 2, False, "FP16"), Feature("t", 4, False, "FP16")
SCHEMA = schema_of(A, S, B, T, C)


def jagged(lengths: list[int], dtype: type = np.int64, weights: bool = False) -> Jagged:
    ids = np.arange(sum(lengths), dtype=dtype) + 10 * len(lengths)
    return Jagged(
        ids, np.array(lengths, np.int32), np.linspace(0, 1, len(ids), dtype=np.float32) if weights else None
    )


@pytest.mark.parametrize(("dtype", "datatype"), [(np.int64, "INT64"), (np.int32, "INT32")])
@pytest.mark.parametrize("weights", [False, True])
def test_the_compact_request(dtype: type, datatype: str, weights: bool) -> None:
    """All ids in one tensor, feature by feature and bag by bag; int32 ids are not widened; the features are
    named where they are not all of the model's in its order.
    """
    features = {"b": jagged([2, 0], dtype, weights), "a": jagged([1, 3], dtype, weights)}
    given = columns(features)
    assert obstacle(given) == "" == SCHEMA.obstacle(given.names, weights)
    form = CompactForm(SCHEMA, given.names, weights, ("context",), None)
    dense = {"context": np.array([[1, 2], [3, 4]], np.float32)}
    head, body = split(form.encode(keyed(given), dense))
    header, found = parse(head, body)
    assert len(head) % 8 == 0
    assert [t["datatype"] for t in header["inputs"]] == [datatype, "INT32", *["FP32"] * weights, "FP32"]
    assert header["parameters"] == {
        "binary_data_output": True,
        "kjt.schema": "0123abcd",
        "kjt.features": ["b", "a"],
    }
    assert "outputs" not in header
    both = [features["b"], features["a"]]
    expected = {
        "kjt.values": np.concatenate([j.values for j in both]),
        "kjt.lengths": [[2, 0], [1, 3]],
        **dense,
    }
    same(
        found, {**expected, "kjt.weights": np.concatenate([j.weights for j in both])} if weights else expected
    )


def test_all_features_in_order_are_not_named() -> None:
    given = columns({f.name: jagged([1]) for f in (A, S, B, T, C)})
    header, _ = parse(*split(CompactForm(SCHEMA, given.names, False, (), None).encode(keyed(given), {})))
    assert header["parameters"] == {"binary_data_output": True, "kjt.schema": "0123abcd"}


def test_rectangles_become_jagged() -> None:
    """[bags, ids a bag] beside jagged features, where the compact form is asked for."""
    given = columns({"a": np.array([[1, 2], [3, 4]]), "b": jagged([0, 1])})
    assert obstacle(given) == ""
    _, found = parse(*split(CompactForm(SCHEMA, given.names, False, (), None).encode(keyed(given), {})))
    assert found["kjt.lengths"].tolist() == [[2, 2], [0, 1]] and found["kjt.values"].tolist() == [
        1,
        2,
        3,
        4,
        20,
    ]


@pytest.mark.parametrize("as_torch", [False, True])
@pytest.mark.parametrize("names", ["abc", "cab", "st", "ts", "asbtc", "tcbsa", "b"])
def test_the_compact_response(names: str, as_torch: bool) -> None:
    """Pooled vectors are cut by dims and unpooled ones by offsets, whatever the order; they come in the
    request's order."""
    rng = np.random.default_rng(4)
    asked = [SCHEMA.features[n] for n in names]
    bags, ids = 3, {"s": 2, "t": 5}
    expected = {
        f.name: rng.random((bags if f.is_pooled else ids[f.name], f.dim)).astype(DTYPES[f.datatype])
        for f in asked
    }
    outputs = []
    if pooled := [expected[f.name] for f in asked if f.is_pooled]:
        outputs.append(("kjt", "FP32", np.concatenate(pooled, 1)))
    if unpooled := [expected[f.name].reshape(-1) for f in asked if not f.is_pooled]:
        outputs.append(("kjt.sequences", "FP16", np.concatenate(unpooled)))
        outputs.append(("kjt.offsets", "INT64", np.cumsum([0, *map(len, unpooled)])))
    outputs.append(("score", "FP32", np.ones(bags, np.float32)))
    form = CompactForm(SCHEMA, tuple(names), False, (), None)
    found = form.vectors(form.read(response(outputs)), as_torch)
    assert list(found) == [*names, "score"]
    assert all(isinstance(v, torch.Tensor) for v in found.values()) is as_torch
    same({n: np.asarray(v) for n, v in found.items()}, {**expected, "score": np.ones(bags)})
    assert {n: np.asarray(v).dtype for n, v in found.items() if n in expected} == {
        n: v.dtype for n, v in expected.items()
    }


@pytest.mark.parametrize(
    ("outputs", "sent"),
    [
        (["b"], ["kjt"]),
        (["t", "score"], ["kjt.sequences", "kjt.offsets", "score"]),
        (["score"], ["score"]),
        (["s", "a"], ["kjt", "kjt.sequences", "kjt.offsets"]),
    ],
)
def test_outputs_of_the_compact_form(outputs: list[str], sent: list[str]) -> None:
    """Of the response only the tensors are asked for that hold what is wanted."""
    given = columns({f.name: jagged([1]) for f in (A, S, B, T, C)})
    header, _ = parse(*split(CompactForm(SCHEMA, given.names, False, (), outputs).encode(keyed(given), {})))
    assert [o["name"] for o in header["outputs"]] == sent


@pytest.mark.parametrize(
    "outputs",
    [
        [("kjt", "FP32", np.zeros((1, 4), np.float32))],
        [("kjt.sequences", "FP16", np.zeros(4, np.float16))],
        [("kjt.sequences", "FP16", np.zeros(4, np.float16)), ("kjt.offsets", "INT64", np.zeros(1, np.int64))],
    ],
)
def test_a_response_that_does_not_fit(outputs: list[tuple[str, str, np.ndarray]]) -> None:
    """Vectors are never cut by dims that are not the response's."""
    with pytest.raises(ClientError, match="output"):
        CompactForm(SCHEMA, ("a", "b", "s"), False, (), None).read(response(outputs))


def test_a_mask_that_does_not_fit() -> None:
    """One that is missing, unasked or of another size is refused, and never cut up by other lengths."""
    pooled = ("kjt", "FP32", np.zeros((1, 2), np.float32))
    with pytest.raises(ClientError, match=r"the response has no output kjt\.found"):
        CompactForm(SCHEMA, ("a",), False, (), None, found=True).read(response([pooled]))
    with pytest.raises(ClientError, match=r"the response has an unasked output kjt\.found"):
        CompactForm(SCHEMA, ("a",), False, (), None).read(
            response([pooled, ("kjt.found", "BOOL", np.ones(3, bool))])
        )
    with pytest.raises(ClientError, match=r"output kjt\.found has shape \[3\]; expected \[4\], one an id"):
        cut(np.ones(3, bool), ("a", "b"), [(2,), (1, 2)], ["a"], as_torch=False)
    with pytest.raises(ClientError, match=r"output a\.found has shape \[2\]; expected \[1\]"):
        take_masks({"a.found": np.ones(2, bool)}, columns({"a": jagged([1])}))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"a": jagged([1]), "b": Jagged([1])}, "b has no lengths"),
        ({"a": jagged([1]), "b": jagged([1], weights=True)}, "some features have weights and some have none"),
        ({"a": jagged([1]), "b": jagged([1, 1])}, "a has 1 bags and b 2"),
        ({}, "there are no features"),
    ],
)
def test_what_makes_no_compact_request(features: dict[str, Any], message: str) -> None:
    assert obstacle(columns(features)) == message


def test_what_a_model_does_not_take_in_one_compact_request() -> None:
    half = Feature("h", 2, True, "FP16")
    schema = schema_of(A, S, half)
    assert schema.obstacle(("a", "z"), False) == "the model has no feature 'z'; it has a, s, h"
    assert schema.obstacle(("a", "h"), False).startswith("a has FP32 vectors and h FP16")
    assert schema.obstacle(("a", "s"), True).startswith("s is not pooled, so it takes no weights")
    assert schema.obstacle(("a", "s"), False) == ""


def test_schemas_of_metadata() -> None:
    """A server that does not know the compact form has none."""
    told = [
        {"name": "a", "dim": 2, "pooling": "mean", "datatype": "FP32"},
        {"name": "s", "dim": 2, "pooling": "none", "datatype": "FP16"},
    ]
    assert Schema.of({"parameters": {"kjt.features": told, "kjt.schema": "0123abcd"}}) == schema_of(A, S)
    assert Schema.of({"parameters": {"backend": "x"}}) is None is Schema.of({})


# ---- what cannot be sent ----


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"a": Jagged(np.zeros((2, 2), int), [2])}, r"a.values: shape \[2, 2\]; expected \[ids\]"),
        ({"a": Jagged([1, 2], [[2]])}, r"a.lengths: shape \[1, 1\]; expected \[bags\]"),
        ({"a": Jagged([1, 2], [2], [[1.0, 2.0]])}, r"a.weights: shape \[1, 2\]; expected \[ids\]"),
        ({"a": Jagged([1.0])}, "a.values: float64; expected int64"),
        ({"a": Jagged(np.array([True]))}, "a.values: bool; expected int64"),
        (
            {"a": jagged([1]), "b": Jagged(np.array([2**63], np.uint64), np.array([1]))},
            "b.values: values do not fit in int64",
        ),
        ({"a": jagged([1]), "b": Jagged([1], [2**31])}, "b.lengths: values do not fit in int32"),
        ({"a": Jagged([1], [1], ["x"])}, "a.weights: <U1; expected float32"),
        ({"a": Jagged([[1], [2, 3]], [1])}, "a.values: not an array of numbers"),
        ({"a": [[1], 2]}, "a: expected a list of bags"),
        ({"a": 7}, r"a: shape \[\]; expected \[bags, ids a bag\]"),
    ],
)
def test_what_cannot_be_sent_is_named(features: dict[str, Any], message: str) -> None:
    """The error names the tensor that is wrong, among features that are right too."""
    with pytest.raises(FeatureError, match=message):
        wire.encode(features)


def test_ids_of_any_integer_type_arrive() -> None:
    for dtype in ("int8", "uint16", "int32", "uint32", "int64", "uint64", ">i8"):
        ids = np.array([1, 2, 100], dtype)
        headers, body = wire.encode({"a": Jagged(ids, np.array([1, 2], dtype)), "b": ids.reshape(1, 3)})
        json_bytes = int(headers[wire.HEADER_LENGTH])
        _, found = parse(body[:json_bytes], body[json_bytes:])
        same(found, {"a.values": [1, 2, 100], "a.lengths": [1, 2], "b": [[1, 2, 100]]})
