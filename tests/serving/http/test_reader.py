"""The reader in C against its specification, `serving.http.v2.request`: it gives the same places, the same
bytes of the answer and the same refusals for every header, drawn in every spelling and mutated as nobody
should.
"""

import gc
import os
import random
import re
import shutil
import uuid
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from infer_headers import DrawnModel, DrawnRequest
from served import Sum, engine_of
from support import rows_of

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.segment.header import ScorerInput
from tableside.quant import Place
from tableside.quant.contract import matrices_in
from tableside.serving.errors import ApiError
from tableside.serving.http.asgi import json_object
from tableside.serving.http.v2 import _reader, reader
from tableside.serving.http.v2 import request as v2_request
from tableside.serving.http.v2.reader import ReadBeside
from tableside.serving.http.v2.request import InferRequest
from tableside.serving.model.version import ServedVersion
from tableside.serving.shm.regions import RegionRegistry, Regions

pytestmark = pytest.mark.quick

FEATURES = {
    "user": {"table": "t"},
    "item": {"table": "u", "pooling": "mean"},
    "half": {"table": "t", "output": "fp16"},
    "words": {"table": "u", "pooling": "none"},
    "a:b-c": {"table": "t"},
}
PARTS = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32}
ROWS = 40
MOST_BYTES = 1 << 16  # of a response
MODELS = 12  # that are drawn in a run
SEED = int(os.environ.get("DRAW", "0").encode().hex(), 16) % 2**32  # of these models


class SumOf(Sum):
    """A scorer of these inputs."""

    def __init__(self, inputs: tuple[ScorerInput, ...]) -> None:
        self.inputs = inputs


@pytest.fixture(scope="module")
def root_of_module() -> Iterator[Path]:
    root = Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}"
    yield root
    shutil.rmtree(root, ignore_errors=True)


def attached(root: Path, folder: Path, features: dict[str, Any]) -> ServedVersion:
    values = {"t": rows_of(ROWS, 8), "u": rows_of(ROWS, 6)}
    np.savez(folder / "c.npz", **values)
    tables = {t: {"key": t, "row_format": "int8"} for t in values}
    raw = {"name": "demo", "checkpoint": "c.npz", "tables": tables, "features": features}
    load(parse_model(raw, folder), root)
    return engine_of(root, MOST_BYTES).attach()


@pytest.fixture(scope="module")
def version(root_of_module: Path, tmp_path_factory: pytest.TempPathFactory) -> ServedVersion:
    served = attached(root_of_module / "fixed", tmp_path_factory.mktemp("fixed"), FEATURES)
    served.scorer = Sum()
    return served


@pytest.fixture(scope="module")
def drawn_version(
    root_of_module: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], tuple[DrawnModel, ServedVersion]]:
    """The version of a drawn model, by number."""

    @cache
    def run(number: int) -> tuple[DrawnModel, ServedVersion]:
        model = DrawnModel.draw(random.Random(SEED + number))
        features = {
            n: {"table": "tu"[k % 2], "pooling": pooling, "output": output}
            for k, (n, (pooling, output)) in enumerate(model.features.items())
        }
        served = attached(root_of_module / str(number), tmp_path_factory.mktemp(f"m{number}"), features)
        if model.dense or number % 2:
            inputs = [ScorerInput(n, n, served.features[n].table.dim) for n in list(features)[:2]]
            inputs += [ScorerInput(n, None, width) for n, width in model.dense.items()]
            served.scorer = SumOf(tuple(inputs))
        return model, served

    return run


def body_of(header: bytes, arrays: list[np.ndarray]) -> tuple[bytes, int]:
    return header + b"".join(a.tobytes() for a in arrays), len(header)


def answer(infer: InferRequest) -> bytes | str:
    """The whole response, or what is wrong with its ids."""
    request = infer.request
    try:
        buffer = request.run(infer.inputs)
        if request.scoring is not None:
            request.scoring.run(infer.inputs, buffer)
    except ApiError as error:
        return error.message
    assert buffer.size == request.out_bytes
    head, parts = v2_request.encode(infer, buffer)
    counts = request.ids, request.vectors, request.row_bytes, infer.has_binary, infer.json_bytes
    alone = request.scoring is not None and request.scoring.is_alone
    return b"|".join([head, b"".join(parts), repr((counts, alone, request.numbers)).encode()])


def slowly(served: ServedVersion, body: bytes, header_bytes: int) -> InferRequest | str:
    try:
        header = json_object(body[:header_bytes])
        return v2_request.understand(served, header, memoryview(body)[header_bytes:])
    except ApiError as error:
        return error.message


def places_of(infer: InferRequest, base: int) -> bytes:
    """The places of lookups and of the scorer's inputs in the request's inputs. base: where these begin in
    their buffer. The reader has an order of its own in the outputs."""
    places = np.frombuffer(infer.request.places, np.int64).reshape(-1, len(Place._fields)).copy()
    for name in ("ids_at", "lengths_at", "weights_at"):
        column = places[:, Place._fields.index(name)]
        column[column >= 0] -= base
    for name in ("out_at", "found_at"):
        column = places[:, Place._fields.index(name)]
        column[column >= 0] = 0
    sources = b"" if infer.request.scoring is None else infer.request.scoring.sources
    matrices = matrices_in(sources).copy()
    matrices[:, 1] = np.where(matrices[:, 0] == 0, matrices[:, 1] - base, 0)
    return places.tobytes() + matrices.tobytes()


def check_alike(served: ServedVersion, body: bytes, header_bytes: int) -> bool:
    """The reader takes what its specification takes, and says the same; returns whether it took it."""
    found, expected = reader.read(served, body, header_bytes), slowly(served, body, header_bytes)
    if found is None:
        assert isinstance(expected, str), f"not taken: {body[:header_bytes]!r}"
        return False
    assert isinstance(found, InferRequest)
    assert not isinstance(expected, str), f"taken, though {expected}: {body[:header_bytes]!r}"
    assert places_of(found, header_bytes if found.inputs is body else 0) == places_of(expected, 0)
    assert answer(found) == answer(expected), body[:header_bytes]
    return True


Drawn = Callable[[int], tuple[DrawnModel, ServedVersion]]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_every_header_is_read_as_specified(drawn_version: Drawn, seed: int) -> None:
    """In every form and spelling, for models that are drawn too. Those that are right are all taken."""
    rng = random.Random(seed)
    model, served = drawn_version(rng.randrange(MODELS))
    drawn = DrawnRequest(rng, model, ROWS)
    for _ in range(5):
        check_alike(served, *drawn.body())


@pytest.mark.thorough
def test_two_hundred_thousand_headers_are_read_as_specified(drawn_version: Drawn) -> None:
    """A third of them mutated."""
    rng, taken = random.Random(SEED), 0
    for _ in range(20_000):
        model, served = drawn_version(rng.randrange(MODELS))
        drawn = DrawnRequest(rng, model, ROWS, plain=rng.random() < 0.3)
        for k in range(10):
            body, size = drawn.body()
            if k % 3 == 2:
                header = bytes(rng.choice(MUTATIONS)(rng, body[:size]))
                body, size = header + body[size:], len(header)
            taken += check_alike(served, body, size)
    assert taken > 80_000


MUTATIONS: list[Callable[[random.Random, bytes], bytes]] = [
    lambda r, h: re.sub(
        rb"\d+", lambda m: r.choice([m[0], b"0", b"-1", b"1e3", b"2.0", b"007", b"9" * r.randint(1, 40)]), h
    ),
    lambda r, h: re.sub(rb"\d+", lambda m: b"%d" % (int(m[0]) + r.choice([0, 0, 0, 1, -1, 8])), h),
    lambda r, h: h.replace(b",", r.choice([b" ,\n", b",\t", b",,"])),
    lambda r, h: h.replace(b"user", r.choice([b"\\u0075ser", b"u\xc3\xbcser", b"us\\er", b"item", b"\xff"])),
    lambda r, h: h.replace(
        b'"shape":[', r.choice([b'"shape":[1,', b'"shape":[[', b'"shape":5,"shape":[', b'"shape" : [ '])
    ),
    lambda r, h: h.replace(
        b'{"inputs"', r.choice([b'{"id":"x","inputs"', b'{"id":5,"inputs"', b'{"inputs":[],"inputs"', b"{'a"])
    ),
    lambda r, h: h.replace(
        b"binary_data_size", r.choice([b"binary_data_size ", b"data", b'x":1,"binary_data_size'])
    ),
    lambda r, h: h[: r.randint(0, len(h))] + bytes([r.randint(0, 255)]) + h[r.randint(0, len(h)) :],
    lambda r, h: b"".join(bytes([r.randint(0, 255)]) if r.random() < 0.005 else bytes([b]) for b in h),
    lambda r, h: h + r.choice([b" ", b"\n", b"0", b"}", b"\0"]),
    lambda r, h: h.replace(b"INT64", b"INT32") if r.random() < 0.5 else h.replace(b"FP32", b"INT32"),
    lambda r, h: h.replace(
        b'"kjt.features":[', r.choice([b'"kjt.features":["user",', b'"kjt.schema":"x","kjt.features":['])
    ),
]


def mutated(rng: random.Random, body: bytes, size: int) -> tuple[bytes, int]:
    """A body whose header was mutated, and sometimes the bytes behind it too."""
    header = bytes(rng.choice(MUTATIONS)(rng, body[:size]))
    binary = bytearray(body[size:])
    if binary and rng.random() < 0.3:
        binary[rng.randrange(len(binary))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.1:
        binary = binary[: rng.randint(0, len(binary))] + bytes(rng.choice([0, 8]))
    return header + bytes(binary), len(header)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_mutated_headers_are_read_as_specified(drawn_version: Drawn, seed: int) -> None:
    """Numbers, whitespace, escapes, unicode, keys that come twice, nesting, single bytes; and lengths that
    do not add up."""
    rng = random.Random(seed)
    model, served = drawn_version(rng.randrange(MODELS))
    drawn = DrawnRequest(rng, model, ROWS, plain=rng.random() < 0.5)
    for _ in range(8):
        check_alike(served, *mutated(rng, *drawn.body()))


@pytest.mark.thorough
def test_a_million_mutated_headers_end_no_process(drawn_version: Drawn) -> None:
    """Only the reader reads them; each is mutated from the one before it."""
    rng = random.Random(SEED + 1)
    for _ in range(20_000):
        model, served = drawn_version(rng.randrange(MODELS))
        body, size = DrawnRequest(rng, model, ROWS, plain=rng.random() < 0.5).body()
        for _ in range(50):
            body, size = mutated(rng, body, size)
            if size > 1 << 14:
                break
            reader.read(served, body, size)


# ---- one test for each check ----


def request(tensors: dict[str, np.ndarray], change: Callable[[bytes], bytes] = bytes) -> tuple[bytes, int]:
    """A request of these tensors, which asks for everything; its header changed."""
    kinds = {np.dtype(dtype): name for name, dtype in PARTS.items()}
    inputs = [
        {
            "name": n,
            "datatype": kinds[a.dtype],
            "shape": list(a.shape),
            "parameters": {"binary_data_size": a.nbytes},
        }
        for n, a in tensors.items()
    ]
    header = change(orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}))
    return body_of(header, list(tensors.values()))


def scored(bags: int = 2, rows: int = 2, width: int = 3, weights: int = 4) -> dict[str, np.ndarray]:
    """Features and the dense tensor of the scorer: two ids a bag."""
    ids = np.zeros((bags, 2), np.int64)
    return {
        "user": ids,
        "user.weights": np.ones(weights, np.float32),
        "item": ids,
        "context": np.zeros((rows, width), np.float32),
    }


def together(lengths: list[list[int]], ids: int, weights: int) -> dict[str, np.ndarray]:
    """A kjt of all features but the unpooled one and the half one."""
    return {
        "kjt.values": np.zeros(ids, np.int64),
        "kjt.lengths": np.array(lengths, np.int32),
        "kjt.weights": np.ones(weights, np.float32),
    }


def of_three(header: bytes) -> bytes:
    return header.replace(
        b'"parameters":{"binary_data_output"',
        b'"parameters":{"kjt.features":"user,item,a:b-c","binary_data_output"',
    )


def of_user(header: bytes) -> bytes:
    return header.replace(b'"parameters":{"bi', b'"parameters":{"kjt.features":"user","bi')


def unpooled(ids: int, lengths: list[int]) -> dict[str, np.ndarray]:
    return {"words.values": np.zeros(ids, np.int64), "words.lengths": np.array(lengths, np.int32)}


LIES: dict[str, tuple[tuple[bytes, int], tuple[bytes, int]]] = {
    "weights that are not the ids'": (request(scored()), request(scored(weights=3))),
    "rows of a dense tensor that are not the bags": (request(scored()), request(scored(rows=3))),
    "a dense tensor of another width": (request(scored()), request(scored(width=4))),
    "more bytes than a response may have": (
        request({"user": np.zeros((2, 0), int)}),
        request({"user": np.zeros((3000, 0), int)}),
    ),
    "a number with a leading zero": (
        request({"user": np.zeros((2, 1), int)}),
        request({"user": np.zeros((2, 1), int)}, lambda h: h.replace(b"[2,", b"[02,")),
    ),
    "a size that is not the shape's": (
        request({"user": np.zeros((2, 1), int)}),
        request({"user": np.zeros((2, 1), int)}, lambda h: h.replace(b"[2,", b"[1,")),
    ),
    "two tensors' sizes exchanged": (
        request({"user": np.zeros((2, 1), int), "item": np.zeros((1, 1), int)}),
        request(
            {"user": np.zeros((2, 1), int), "item": np.zeros((1, 1), int)},
            lambda h: (
                h.replace(b'size":16', b'size":0')
                .replace(b'size":8', b'size":16')
                .replace(b'size":0', b'size":8')
            ),
        ),
    ),
    "a bag of more ids than a length can say": (
        request({"user": np.zeros((0, 1), int)}),
        request({"user": np.zeros((0, 1), int)}, lambda h: h.replace(b"[0,1]", b"[0,2147483648]")),
    ),
    "a kjt's weights that are not its ids'": (
        request(together([[1], [1], [0]], 2, 2), of_three),
        request(together([[1], [1], [0]], 2, 3), of_three),
    ),
    "a kjt's lengths of fewer ids": (
        request(together([[1], [1], [0]], 2, 2), of_three),
        request(together([[1], [1], [0]], 3, 3), of_three),
    ),
    "a kjt's lengths of more ids": (
        request(together([[1], [1], [0]], 2, 2), of_three),
        request(together([[1], [1], [1]], 2, 2), of_three),
    ),
    "a kjt's negative length": (
        request(together([[1], [1], [0]], 2, 2), of_three),
        request(together([[3], [-1], [0]], 2, 2), of_three),
    ),
    "a kjt of another number of features": (
        request(together([[1], [1], [0]], 2, 2), of_three),
        request(together([[1], [1]], 2, 2), of_three),
    ),
    "an unpooled feature's lengths that do not add up": (
        request(unpooled(2, [1, 1])),
        request(unpooled(2, [1, 2])),
    ),
    "an unpooled feature's negative length": (request(unpooled(2, [1, 1])), request(unpooled(2, [3, -1]))),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_wrong_is_not_taken(version: ServedVersion, lie: str) -> None:
    """The true request is taken, the false one is left to the specification's words."""
    true, false = LIES[lie]
    assert check_alike(version, *true)
    assert not check_alike(version, *false)


def ask(inputs: Any, **more: Any) -> tuple[bytes, int]:
    header = orjson.dumps({"inputs": inputs, **more})
    return header, len(header)


def tensor(name: str, data: Any, datatype: str = "INT64", shape: Any = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape or [len(data)], "data": data, **more}


USER = {"name": "user", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]}
WRONG: dict[str, tuple[bytes, int]] = {
    "no inputs": ask([]),
    "inputs that are no list": ask({"a": USER}),
    "an input that is no object": ask([[USER]]),
    "a name that is no string": ask([{**USER, "name": 5}]),
    "an unknown feature": ask([{**USER, "name": "usr"}]),
    "a part of an unknown feature": ask([tensor("usr.values", [1])]),
    "an unknown part": ask([{**USER, "name": "user.ids"}]),
    "a part of a dense tensor": ask([tensor("context.values", [1])]),
    "no name before the dot": ask([tensor(".values", [1])]),
    "no datatype": ask([{k: v for k, v in USER.items() if k != "datatype"}]),
    "ids that are FP32": ask([{**USER, "datatype": "FP32"}]),
    "lengths that are INT64": ask([tensor("user.values", [1]), tensor("user.lengths", [1])]),
    "weights that are INT32": ask([USER, tensor("user.weights", [1, 2], "INT32")]),
    "a dense tensor of ids": ask([USER, tensor("context", [1, 2, 3], "INT64", [1, 3])]),
    "a shape that is no list": ask([{**USER, "shape": 2}]),
    "no dimension": ask([{**USER, "shape": []}]),
    "three dimensions": ask([{**USER, "shape": [1, 2, 1]}]),
    "a dimension that is a fraction": ask([{**USER, "shape": [1, 2.0]}]),
    "a dimension that is true": ask([{**USER, "shape": [True, 2]}]),
    "a negative dimension": ask([{**USER, "shape": [-1, 2]}]),
    "a dimension above 2**40": ask([{**USER, "shape": [2**40, 0], "data": []}]),
    "sizes that overflow": ask([{**USER, "shape": [2**39, 2**39]}]),
    "more numbers than the shape says": ask([{**USER, "data": [1, 2, 3]}]),
    "fewer numbers than the shape says": ask([{**USER, "data": [1]}]),
    "a shape of far more numbers than come": ask([{**USER, "shape": [2**30, 2**9], "data": [1]}]),
    "data that is no list": ask([{**USER, "data": {"a": 1}}]),
    "lists and numbers in one": ask([{**USER, "data": [[1], 2]}]),
    "numbers and lists in one": ask([{**USER, "data": [1, [2]]}]),
    "lists of lists of lists": ask([{**USER, "data": [[[1], [2]]]}]),
    "an id that is a fraction": ask([{**USER, "data": [1, 2.5]}]),
    "an id that is 1.0": ask([{**USER, "data": [1, 1.0]}]),
    "an id that is a string": ask([{**USER, "data": [1, "2"]}]),
    "an id that is true": ask([{**USER, "data": [1, True]}]),
    "an id beyond int64": ask([{**USER, "data": [1, 2**63]}]),
    "an id below int64": ask([{**USER, "data": [1, 2.0**70]}]),
    "an id beyond INT32": ask([{**USER, "datatype": "INT32", "data": [1, 2**31]}]),
    "a length beyond INT32": ask([tensor("user.values", [1]), tensor("user.lengths", [2**31], "INT32")]),
    "a weight beyond fp32": ask([USER, tensor("user.weights", [1, 1e39], "FP32")]),
    "parameters that are no object": ask([{**USER, "parameters": None}]),
    "data and a size": ask([{**USER, "parameters": {"binary_data_size": 16}}]),
    "neither data nor a size": ask([{**USER, "data": 0, "parameters": {}}]),
    "a size that is no number": (
        ask([{k: v for k, v in USER.items() if k != "data"} | {"parameters": {"binary_data_size": "16"}}])
    ),
    "one tensor in the body, one in the JSON": request(
        {"item": np.ones((1, 1), int)}, lambda h: h.replace(b"[{", b"[" + orjson.dumps(USER) + b",{", 1)
    ),
    "bytes that no tensor has": (
        orjson.dumps({"inputs": [USER]}) + b"12345678",
        len(orjson.dumps({"inputs": [USER]})),
    ),
    "a tensor twice": ask([USER, USER]),
    "ids and values": ask([USER, tensor("user.values", [1, 2])]),
    "ids and lengths": ask([USER, tensor("user.lengths", [2], "INT32")]),
    "ids of one dimension": ask([{**USER, "shape": [2]}]),
    "values of two dimensions": ask([tensor("words.values", [1, 2], shape=[1, 2])]),
    "lengths of two dimensions": ask(
        [tensor("user.values", [1, 2]), tensor("user.lengths", [2], "INT32", [1, 1])]
    ),
    "lengths alone": ask([tensor("user.lengths", [2], "INT32")]),
    "a pooled feature without lengths": ask([tensor("user.values", [1])]),
    "weights of an unpooled feature": ask(
        [tensor("words.values", [1]), tensor("words.weights", [1], "FP32")]
    ),
    "a dense tensor alone": ask([tensor("context", [1, 2, 3], "FP32", [1, 3])]),
    "a dense tensor of one dimension": ask([USER, tensor("context", [1, 2, 3], "FP32")]),
    "a dense tensor twice": ask([USER, *[tensor("context", [1, 2, 3], "FP32", [1, 3])] * 2]),
    "a kjt beside a feature": ask(
        [USER, tensor("kjt.values", []), tensor("kjt.lengths", [], "INT32", [5, 0])]
    ),
    "a kjt without lengths": ask([tensor("kjt.values", [])]),
    "a kjt without values": ask([tensor("kjt.lengths", [], "INT32", [5, 0])]),
    "a kjt of two precisions": ask([tensor("kjt.values", []), tensor("kjt.lengths", [], "INT32", [5, 0])]),
    **{
        f"a kjt's features that are {what}": ask(
            [tensor("kjt.values", []), tensor("kjt.lengths", [], "INT32", [2, 0])],
            parameters={"kjt.features": names},
        )
        for what, names in {
            "no names": 5,
            "none": [],
            "named twice": ["user", "user"],
            "unknown": ["user", "usr"],
            "numbers": ["user", 1],
            "an empty name": "user,",
            "three": "user,item,a:b-c",
            "weighted and not pooled": None,
        }.items()
    },
    "a kjt's other schema": ask(
        [tensor("kjt.values", []), tensor("kjt.lengths", [], "INT32", [1, 0])],
        parameters={"kjt.features": "user", "kjt.schema": "0" * 16},
    ),
    "a kjt's weights where one is not pooled": ask(
        [
            tensor("kjt.values", []),
            tensor("kjt.lengths", [], "INT32", [2, 0]),
            tensor("kjt.weights", [], "FP32"),
        ],
        parameters={"kjt.features": "user,words"},
    ),
    "outputs that are no list": ask([USER], outputs={}),
    "outputs that are null": ask([USER], outputs=None),
    "an output that is no object": ask([USER], outputs=["user"]),
    "an output without a name": ask([USER], outputs=[{}]),
    "an output that is unknown": ask([USER], outputs=[{"name": "usr"}]),
    "an output without its input": ask([USER], outputs=[{"name": "item"}]),
    "a mask without its input": ask([USER], outputs=[{"name": "item.found"}]),
    "a mask of nothing": ask([USER], outputs=[{"name": ".found"}]),
    "a kjt's output of named features": ask([USER], outputs=[{"name": "kjt"}]),
    "an output twice": ask([USER], outputs=[{"name": "user"}, {"name": "user"}]),
    "a classification": ask([USER], outputs=[{"name": "user", "parameters": {"classification": 3}}]),
    "a flag that is no flag": ask([USER], outputs=[{"name": "user", "parameters": {"binary_data": 1}}]),
    "an output's parameters that are no object": ask([USER], outputs=[{"name": "user", "parameters": []}]),
    "a default that is no flag": ask([USER], parameters={"binary_data_output": 1}),
    "the request's parameters that are no object": ask([USER], parameters=[]),
    "scores without their inputs": ask([USER], outputs=[{"name": "score"}]),
    "an id that is no string": ask([USER], id=5),
    "a region": ask(
        [USER],
        outputs=[
            {"name": "user", "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 64}}
        ],
    ),
    "a list": (b"[]", 2),
    "two objects": (b"{}{}", 4),
    "nothing": (b"", 0),
    "text that is no UTF-8": (b'{"inputs":[],"\xff":1}', 19),
    "a byte order mark": (b"\xef\xbb\xbf{}", 5),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_requests_are_not_taken(version: ServedVersion, case: str) -> None:
    assert not check_alike(version, *WRONG[case])


JSON_TEXTS = [
    *('"a\\u0041"', '"\\ud83d\\ude00"', '"\\ud800"', '"\\udc00"', '"\\ud800\\u0041"', '"\\u00g0"', '"\\x"'),
    *('"', '"\x00"', '"\x1f"', '"\x7f"', "NaN", "Infinity", "tru", "true", "false", "null", "nul"),
    *(
        "1",
        "-0",
        "01",
        "-",
        "+1",
        "1.",
        ".5",
        "1e5",
        "1e",
        "1E+2",
        "1e400",
        "-1e-400",
        "9" * 400,
        "0." + "1" * 400,
    ),
    *("[", "]", "[1,]", "[,1]", "[1 2]", "{}", '{"a"}', '{"a":}', '{"a":1,}', "{1:2}", '{"a":1 "b":2}'),
    *("[[[]]]", '{"a":{"b":[{}]}}', '{"a":' * 1500 + "1" + "}" * 1500),
    *("[" * n + "]" * n for n in (1020, 1021, 1022, 1023, 1024)),
]


@pytest.mark.parametrize("text", JSON_TEXTS, ids=lambda t: t[:12].encode().hex())
@pytest.mark.parametrize("place", ["top", "input", "parameters", "output"])
def test_json_that_nobody_asks_for_is_checked_as_well(version: ServedVersion, text: str, place: str) -> None:
    """What is JSON to orjson is JSON to the reader, and nothing else is, at any depth."""
    values = {"top": "0", "input": "0", "parameters": "0", "output": "0", place: text}
    texts = (values[key] for key in ("input", "parameters", "top", "output"))
    pieces = (
        '{"inputs":[{"name":"user","x":',
        ',"datatype":"INT64","shape":[1,1],"data":[3],"parameters":{"y":',
        '}}],"z":',
        ',"outputs":[{"name":"user","w":',
    )
    header = "".join(p + t for p, t in zip(pieces, texts, strict=True)).encode() + b"}]}"
    try:
        orjson.loads(header)
        is_json = True
    except orjson.JSONDecodeError:
        is_json = False
    assert check_alike(version, header, len(header)) == is_json


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=12))
def test_text_is_utf_8(version: ServedVersion, some: bytes) -> None:
    head = b'{"inputs":[{"name":"user","datatype":"INT64","shape":[1,1],"data":[3]}],"x":"'
    header = head + some + b'"}'
    check_alike(version, header, len(header))


@settings(max_examples=500, deadline=None)
@given(
    st.one_of(
        st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
        st.floats(allow_nan=False, allow_infinity=False).map(repr),
        st.decimals(allow_nan=False, allow_infinity=False, places=9).map(str),
        st.from_regex(r"\A-?(0|[1-9][0-9]{0,24})(\.[0-9]{1,24})?([eE][+-]?[0-9]{1,2})?\Z"),
        st.integers(-(2**70), 2**70).map(str),
    )
)
@example("18446744073.709551616")  # 2 ** 64 without its point
def test_numbers_are_read_to_the_last_bit(version: ServedVersion, number: str) -> None:
    """fp32 of the double that is nearest to the number."""
    begin, _ = ask([{**USER, "shape": [1, 1], "data": [3]}], parameters={"binary_data_output": True})
    weights = '{"name":"user.weights","datatype":"FP32","shape":[1],"data":[' + number + "]},"
    header = begin.replace(b"[{", b"[" + weights.encode() + b"{", 1)
    if not check_alike(version, header, len(header)):
        with np.errstate(over="ignore"):
            assert not np.isfinite(np.float32(float(number)))


def test_ids_of_all_of_int64_are_read(version: ServedVersion) -> None:
    numbers = [0, 1, -1, 2**63 - 1, -(2**63), 10**18, -(10**18)]
    header, size = ask([tensor("words.values", numbers)])
    found = reader.read(version, header, size)
    assert isinstance(found, InferRequest)
    np.testing.assert_array_equal(np.frombuffer(found.inputs, np.int64), numbers)


def test_a_hundred_thousand_inputs_are_read(version: ServedVersion) -> None:
    """No limit is hit but those of the request: the first unknown feature is named."""
    entry = {"datatype": "INT64", "shape": [1, 1], "parameters": {"binary_data_size": 8}}
    header = orjson.dumps({"inputs": [{"name": f"f{n}", **entry} for n in range(100_000)]})
    body = header + bytes(800_000)
    assert reader.read(version, body, len(header)) is None
    message = slowly(version, body, len(header))
    assert isinstance(message, str) and "'f0' is unknown" in message


def test_names_go_with_their_version(root: Path, tmp_path: Path) -> None:
    """Version, segment and mapping go when the version is let go. Another state takes the same names."""
    own = attached(root, tmp_path, FEATURES)
    body = ask([USER])
    assert reader.read(own, *body) is not None
    other = own.with_deltas(own.segment, own.placed)
    assert reader.read(other, *body) is not None and reader.names_of(own) is reader.names_of(other)
    gone = [weakref.ref(x) for x in (own, own.segment, own.segment.mapping, own.names)]
    del own, other
    gc.collect()
    assert all(ref() is None for ref in gone)


@pytest.mark.parametrize(
    "arguments",
    [
        (b"x",),
        (b"12345678", b""),
        (np.full(8, -1, np.int64).tobytes(), b""),
        (np.array([1, 0, 0, 0, 0, 0, 0, 9], np.int64).tobytes(), b""),
        (np.array([2**40, 0, 0, 0, 0, 0, 0, 9], np.int64).tobytes(), b""),
        (np.array([0, 0, 1, 0, 0, 0, 0, 9, 0, 0, 0], np.int64).tobytes(), b""),
        (np.array([0, 0, 0, 0, 0, 0, 0, 9, 5, 0], np.int64).tobytes(), b"1234"),
    ],
)
def test_words_that_are_no_names_are_refused(arguments: tuple[bytes, ...]) -> None:
    with pytest.raises((ValueError, TypeError)):
        _reader.names(*arguments)


def test_arguments_of_the_reader_are_checked(version: ServedVersion) -> None:
    names = _reader.names(np.array([0, 0, 0, 0, 0, 0, 0, 9, 0, 0], np.int64).tobytes(), b"")
    for wrong in ((names, b"", b"{}", 3, None, None), (names, b"", b"{}", -1, None, None)):
        with pytest.raises(ValueError, match="the header is longer than the body"):
            _reader.read(*wrong)
    with pytest.raises(ValueError, match="an argument is missing"):
        _reader.read(names, b"", b"{}", 2, b"", None)
    with pytest.raises(TypeError):
        _reader.read(names, b"", "{}", 2, None, None)
    with pytest.raises(ValueError):
        _reader.read(object(), b"", b"{}", 2, None, None)


# ---- tensors in shared memory ----


@pytest.fixture
def shared() -> Iterator[tuple[Regions, Path]]:
    yield from _shared()


def _shared() -> Iterator[tuple[Regions, Path]]:
    """A region `r` of 64 KiB, and its object."""
    path = Path(f"/dev/shm/test-{uuid.uuid4().hex[:12]}")
    path.write_bytes(bytes(65536))
    known = Regions(RegionRegistry())
    known.register("r", path.name, 0, 65536)
    yield known, path
    path.unlink()


def at(offset: int, size: int, region: str = "r") -> dict[str, Any]:
    return {
        "shared_memory_region": region,
        "shared_memory_byte_size": size,
        "shared_memory_offset": offset,
    }


def in_region(name: str, datatype: str, shape: list[int], offset: int) -> dict[str, Any]:
    size = int(np.prod(shape)) * np.dtype(PARTS[datatype]).itemsize
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": at(offset, size)}


@pytest.fixture(scope="module")
def shared_by_all() -> Iterator[tuple[Regions, Path]]:
    yield from _shared()


@pytest.mark.parametrize("item_at", [16384 + 3 * 32, 16384 + 3 * 32 + 8])
def test_vectors_are_written_into_their_region(
    version: ServedVersion, shared: tuple[Regions, Path], item_at: int
) -> None:
    """In one piece and in two; ids are copied before, and where one is wrong nothing is written."""
    known, path = shared
    ids = np.arange(12, dtype=np.int64).reshape(3, 4)
    header, size = ask(
        [in_region(n, "INT64", [3, 4], 0) for n in ("user", "item")],
        outputs=[
            {"name": "user", "parameters": at(16384, 96)},
            {"name": "item", "parameters": at(item_at, 72)},
        ],
    )
    with path.open("r+b") as file:
        file.write(ids.tobytes())
    expected = v2_request.understand(version, json_object(header), b"", known)
    buffer = expected.request.run(expected.inputs)
    found = reader.read(version, header, size, known)
    assert isinstance(found, InferRequest)
    with path.open("r+b") as file:
        file.write(ids[::-1].tobytes())  # too late
    answered = found.request.run(found.inputs)
    assert v2_request.encode(found, answered) == (expected.head, [])
    written = path.read_bytes()
    assert written[16384 : 16384 + 96] == buffer[:96].tobytes()
    assert written[item_at : item_at + 72] == buffer[96:].tobytes()
    with path.open("r+b") as file:
        file.write((ids + 50).tobytes())
    refused = reader.read(version, header, size, known)
    assert isinstance(refused, InferRequest)
    with pytest.raises(ApiError, match="outside the table"):
        refused.request.run(refused.inputs)
    assert path.read_bytes()[16384:] == written[16384:]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_tensors_in_regions_are_read_as_specified(
    version: ServedVersion, shared_by_all: tuple[Regions, Path], seed: int
) -> None:
    """Some in the body or the JSON, with INT32 ids among them, outputs to the region and not."""
    known, path = shared_by_all
    rng = random.Random(seed)
    model = DrawnModel({n: (f.get("pooling", "sum"), f.get("output", "fp32")) for n, f in FEATURES.items()})
    drawn = DrawnRequest(rng, model, ROWS, plain=True)
    drawn.in_text = False
    arrays = drawn.arrays()
    header, memory, body, end = drawn.header(arrays), bytearray(65536), b"", 0
    way = rng.choice(["body", "text"])
    for entry, (_, values) in zip(header["inputs"], arrays, strict=True):
        if rng.random() < 0.6:
            memory[end : end + values.nbytes] = values.tobytes()
            entry["parameters"] = at(end, values.nbytes)
            end += values.nbytes + rng.choice([0, 0, 8])
        elif way == "text":
            del entry["parameters"]
            entry["data"] = values.reshape(-1).tolist()
        else:
            body += values.tobytes()
    out_at = 32768
    for output in header.get("outputs", ()):
        if rng.random() < 0.5:
            output["parameters"] = at(out_at, rng.choice([4096, 4096, 64]))
            out_at += rng.choice([4096, 4096, 4096, 100])
    path.write_bytes(memory)
    text = orjson.dumps(header)
    try:
        expected: Any = v2_request.understand(version, json_object(text), memoryview(body), known)
    except ApiError as error:
        expected = error.message
    found = reader.read(version, text + body, len(text), known)
    if found is None:
        assert isinstance(expected, str), text
        return
    assert isinstance(found, InferRequest) and not isinstance(expected, str), (expected, text)
    answers, written = [], []
    for one in (found, expected):
        path.write_bytes(memory)
        answers.append(answer(one))
        written.append(path.read_bytes())
    assert answers[0] == answers[1] and written[0] == written[1]


def test_many_bytes_in_regions_are_left_to_a_thread(
    version: ServedVersion, shared: tuple[Regions, Path]
) -> None:
    known, _ = shared
    header, size = ask([in_region("words.values", "INT64", [100], 0)])
    assert reader.read(version, header, size, known, 799) == ReadBeside(800)
    assert isinstance(reader.read(version, header, size, known, 800), InferRequest)
    with pytest.raises(ApiError, match="is not registered"):
        reader.read(version, header.replace(b'"r"', b'"s"'), size, known)


@pytest.mark.parametrize("more", [b',"junk":[' + b"1," * 20_000 + b"1]", b" " * 70_000])
def test_long_headers_are_read(version: ServedVersion, more: bytes) -> None:
    """Without Python's lock."""
    header, _ = ask([USER])
    body = header[:-1] + more + b"}"
    assert check_alike(version, body, len(body))


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf, -np.float32(np.nan)])
def test_weights_that_are_no_numbers_are_not_taken(version: ServedVersion, weight: float) -> None:
    """In named tensors and in a kjt."""
    for feature, shape in (("user", (1,)), ("kjt", (1, 1))):
        for last, is_taken in ((2.0, True), (weight, False)):
            tensors = {
                f"{feature}.values": np.array([1, 2]),
                f"{feature}.lengths": np.full(shape, 2, np.int32),
                f"{feature}.weights": np.array([1, last], np.float32),
            }
            body, size = request(tensors, of_user if feature == "kjt" else bytes)
            assert check_alike(version, body, size) is is_taken
