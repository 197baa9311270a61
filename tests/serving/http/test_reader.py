"""The reader in C against its specification, `serving.http.v2.request`: it gives the same places, the same
bytes of the answer and the same refusals for every header, drawn in every spelling and mutated as nobody
should.
"""

import gc
import os
import random
import re
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from infer_headers import DrawnModel, DrawnRequest
from read_headers import FEATURES, ROWS, USER, ask, attached, check_alike, slowly, tensor
from served import Sum

from tableside.loader.segment.header import ScorerInput
from tableside.serving.http.v2 import reader
from tableside.serving.http.v2.answer import InferRequest
from tableside.serving.model.version import ServedVersion

pytestmark = pytest.mark.quick

MODELS = 12  # that are drawn in a run
SEED = int(os.environ.get("DRAW", "0").encode().hex(), 16) % 2**32  # of these models


class SumOf(Sum):
    """A scorer of these inputs."""

    def __init__(self, inputs: tuple[ScorerInput, ...]) -> None:
        self.inputs = inputs


@pytest.fixture(scope="module")
def drawn_version(
    root_of_module: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], tuple[DrawnModel, ServedVersion]]:
    """The version of a drawn model, by number."""

    @cache
    def run(number: int) -> tuple[DrawnModel, ServedVersion]:
        model = DrawnModel.draw(random.Random(SEED + number))
        features = {
            n: {"table": ("sv" if n in model.strings else "tu")[k % 2], "pooling": pooling, "output": output}
            for k, (n, (pooling, output)) in enumerate(model.features.items())
        }
        served = attached(root_of_module / str(number), tmp_path_factory.mktemp(f"m{number}"), features)
        if model.dense or number % 2:
            inputs = [ScorerInput(n, n, served.features[n].table.dim) for n in list(features)[:2]]
            inputs += [ScorerInput(n, None, width) for n, width in model.dense.items()]
            served.scorer = SumOf(tuple(inputs))
        return model, served

    return run


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
@pytest.mark.parametrize("part", range(8))
def test_two_hundred_thousand_headers_are_read_as_specified(drawn_version: Drawn, part: int) -> None:
    """A third of them mutated."""
    rng, taken = random.Random(SEED + part), 0
    for _ in range(2_500):
        model, served = drawn_version(rng.randrange(MODELS))
        drawn = DrawnRequest(rng, model, ROWS, plain=rng.random() < 0.3)
        for k in range(10):
            body, size = drawn.body()
            if k % 3 == 2:
                header = bytes(rng.choice(MUTATIONS)(rng, body[:size]))
                body, size = header + body[size:], len(header)
            taken += check_alike(served, body, size)
    assert taken > 9_000


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
    lambda r, h: h.replace(b"INT64", b"BYTES") if r.random() < 0.5 else h.replace(b"BYTES", b"INT64"),
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


@pytest.mark.parametrize("more", [b',"junk":[' + b"1," * 20_000 + b"1]", b" " * 70_000])
def test_long_headers_are_read(version: ServedVersion, more: bytes) -> None:
    """Without Python's lock."""
    header, _ = ask([USER])
    body = header[:-1] + more + b"}"
    assert check_alike(version, body, len(body))
