"""Templates against the slow path: what a template says of a body is what the slow path says, byte for byte,
or nothing.

Headers are drawn, varied in their numbers as clients vary them, and mutated as nobody should.
"""

import gc
import random
import re
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served import Sum, engine_of
from support import rows_of

from tableside.serving.errors import ApiError
from tableside.serving.http.asgi import json_object
from tableside.serving.http.v2 import request as v2_request
from tableside.serving.http.v2 import templates
from tableside.serving.http.v2.request import InferRequest
from tableside.serving.http.v2.templates import Templates
from tableside.serving.model.version import ServedVersion
from tableside.serving.shm.regions import RegionRegistry, Regions

pytestmark = pytest.mark.quick

Publish = Callable[..., Any]
FEATURES = {
    "user": {"table": "t"},
    "item": {"table": "u", "pooling": "mean"},
    "half": {"table": "t", "output": "fp16"},
    "words": {"table": "u", "pooling": "none"},
    "a:b-c": {"table": "t"},
}
PARTS = {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32}


MOST_BYTES = 1 << 16  # of a response


@pytest.fixture
def version(publish: Publish, root: Path) -> ServedVersion:
    publish({"t": rows_of(50, 8), "u": rows_of(40, 6)}, features=FEATURES)
    served = engine_of(root, MOST_BYTES).attach()
    served.scorer = Sum()
    return served


def body_of(header: bytes, arrays: list[np.ndarray]) -> tuple[bytes, int]:
    return header + b"".join(a.tobytes() for a in arrays), len(header)


def answer(served: ServedVersion, infer: InferRequest) -> bytes | str:
    """The whole response, or what is wrong with its ids."""
    try:
        infer.request.check(infer.inputs)
        buffer = infer.request.run(infer.inputs)
        if infer.request.scoring is not None:
            infer.request.scoring.run(infer.inputs, buffer)
    except ApiError as error:
        return error.message
    assert buffer.size == infer.request.out_bytes
    head, parts = v2_request.encode(infer, buffer)
    return b"|".join(
        [
            head,
            b"".join(parts),
            repr((infer.request.ids, infer.request.vectors, infer.request.row_bytes)).encode(),
        ]
    )


def slowly(served: ServedVersion, body: bytes, header_bytes: int) -> InferRequest | str:
    try:
        header = json_object(body[:header_bytes])
        return v2_request.understand(served, header, memoryview(body)[header_bytes:])
    except ApiError as error:
        return error.message


def learn(memory: Templates, served: ServedVersion, body: bytes, header_bytes: int) -> None:
    """As the server does, for a header whose skeleton comes twice."""
    for _ in range(2):
        infer = slowly(served, body, header_bytes)
        assert not isinstance(infer, str), infer
        memory.learn(served, body[:header_bytes], json_object(body[:header_bytes]), infer)


def check_equal(memory: Templates, served: ServedVersion, body: bytes, header_bytes: int) -> bool:
    """Holds a template's answer against the slow path's; returns whether there was one."""
    found = memory.match(served, body, header_bytes)
    if found is None:
        return False
    expected = slowly(served, body, header_bytes)
    assert not isinstance(expected, str), f"a template took what the slow path refuses: {expected}"
    assert answer(served, found) == answer(served, expected)
    return True


class Drawn:
    """A request that is drawn: its form (which inputs, how) stays, its lengths differ at each call."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.is_kjt = rng.random() < 0.4
        self.names = rng.sample(list(FEATURES), rng.randint(1, len(FEATURES)))
        self.has_dense = rng.random() < 0.5
        if self.has_dense:
            self.names += [n for n in ("user", "item") if n not in self.names]
        self.narrow = {n: rng.random() < 0.3 for n in FEATURES}
        self.how = {n: rng.choice(["matrix", "jagged"]) for n in FEATURES}
        self.weighted = {n: rng.random() < 0.3 and FEATURES[n].get("pooling") != "none" for n in FEATURES}
        if self.is_kjt:
            self.names = [n for n in self.names if n != "half"] or ["user"]
            self.kjt_weights = rng.random() < 0.4 and "words" not in self.names
        self.id = rng.choice([None, "", "abc", "7", "größe", 'a"b'])
        self.asked = rng.choice([None, None, [], "some"])
        self.spaced = rng.choice([orjson.OPT_INDENT_2, 0])
        self.shuffled = rng.random() < 0.5

    def arrays(self, same_bags: int) -> list[tuple[str, np.ndarray]]:
        rng = np.random.default_rng(self.rng.getrandbits(32))
        found = []
        if self.is_kjt:
            lengths = rng.integers(0, 4, (len(self.names), same_bags)).astype(np.int32)
            ids = rng.integers(0, 40, int(lengths.sum())).astype(
                np.int32 if self.narrow["user"] else np.int64
            )
            found = [("kjt.values", ids), ("kjt.lengths", lengths)]
            if self.kjt_weights:
                found.append(("kjt.weights", rng.random(ids.size).astype(np.float32)))
        else:
            for n in self.names:
                dtype = np.int32 if self.narrow[n] else np.int64
                if self.how[n] == "matrix":
                    ids = rng.integers(0, 40, (same_bags, int(rng.integers(0, 3)))).astype(dtype)
                    found.append((n, ids))
                else:
                    lengths = rng.integers(0, 4, same_bags).astype(np.int32)
                    ids = rng.integers(0, 40, int(lengths.sum())).astype(dtype)
                    found += [(f"{n}.values", ids), (f"{n}.lengths", lengths)]
                if self.weighted[n]:
                    found.append((f"{n}.weights", rng.random(ids.size).astype(np.float32)))
        if self.has_dense:
            found.append(("context", rng.random((same_bags, 3)).astype(np.float32)))
        return found

    def body(self) -> tuple[bytes, int]:
        found = self.arrays(self.rng.randint(0, 5))
        if self.shuffled:
            random.Random(3).shuffle(found)
        kinds = {np.dtype(dtype): name for name, dtype in PARTS.items()}
        inputs = [
            {
                "name": n,
                "datatype": kinds[a.dtype],
                "shape": list(a.shape),
                "parameters": {"binary_data_size": a.nbytes},
            }
            for n, a in found
        ]
        header: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True, "priority": 3}}
        if self.is_kjt:
            header["parameters"]["kjt.features"] = self.names
        if self.id is not None:
            header["id"] = self.id + (str(self.rng.randint(0, 99)) if self.id == "abc" else "")
        if self.asked is not None:
            pooled = [n for n in self.names if n != "words"]
            names = ["kjt"] if self.is_kjt and pooled else [] if self.is_kjt else self.names[::-1][:2]
            if {"user", "item"} <= set(self.names) and self.has_dense:
                names.append("score")
            header["outputs"] = [{"name": n} for n in names] if self.asked else []
        return body_of(orjson.dumps(header, option=self.spaced), [a for _, a in found])


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**32))
def test_a_template_says_what_the_slow_path_says(session_version: ServedVersion, seed: int) -> None:
    """For lengths that differ each time, in every form; and each body but those with escapes is taken by
    the template."""
    drawn, memory = Drawn(random.Random(seed)), Templates()
    learn(memory, session_version, *drawn.body())
    for _ in range(6):
        taken = check_equal(memory, session_version, *drawn.body())
        assert taken or drawn.id in ('a"b', "größe")


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


@pytest.mark.thorough
@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32))
def test_mutated_headers_are_understood_alike_or_not_by_a_template(
    session_version: ServedVersion, seed: int
) -> None:
    """Numbers, whitespace, escapes, unicode, keys that come twice, nesting, single bytes; and lengths that
    do not add up."""
    rng = random.Random(seed)
    drawn, memory = Drawn(rng), Templates()
    learn(memory, session_version, *drawn.body())
    for _ in range(8):
        body, size = drawn.body()
        header = rng.choice(MUTATIONS)(rng, body[:size])
        binary = bytearray(body[size:])
        if binary and rng.random() < 0.3:
            binary[rng.randrange(len(binary))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.1:
            binary = binary[: rng.randint(0, len(binary))] + bytes(rng.choice([0, 8]))
        changed, whole = bytes(header) + bytes(binary), len(header)
        check_equal(memory, session_version, changed, whole)
        infer = slowly(session_version, changed, whole)
        if not isinstance(infer, str):  # a template of the mutated header says the same as well
            own = Templates()
            for _ in range(2):
                own.learn(session_version, bytes(header), json_object(bytes(header)), infer)
            check_equal(own, session_version, changed, whole)


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
def test_no_template_takes_what_is_refused(session_version: ServedVersion, lie: str) -> None:
    """One test for each check of the C routine: the true request is taken, the false one is left to the
    slow path's words."""
    memory, (true, false) = Templates(), LIES[lie]
    learn(memory, session_version, *true)
    assert check_equal(memory, session_version, *true)
    assert memory.match(session_version, *false) is None
    found = slowly(session_version, *false)
    assert isinstance(found, str) or isinstance(answer(session_version, found), str), "it is no lie"


@pytest.fixture(scope="module")
def session_version(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The version of `version`, for tests that draw."""
    import shutil
    import uuid

    from tableside.loader.load.load import load
    from tableside.loader.model.model import parse_model

    root, folder = (
        Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}",
        tmp_path_factory.mktemp("templates"),
    )
    values = {"t": rows_of(50, 8), "u": rows_of(40, 6)}
    np.savez(folder / "c.npz", **values)
    tables = {t: {"key": t, "row_format": "int8"} for t in values}
    load(
        parse_model({"name": "demo", "checkpoint": "c.npz", "tables": tables, "features": FEATURES}, folder),
        root,
    )
    served = engine_of(root, MOST_BYTES).attach()
    served.scorer = Sum()
    yield served
    shutil.rmtree(root)


def named(bags: int) -> tuple[bytes, int]:
    """A header with one feature of `bags` bags of one id."""
    entry = {
        "name": "user",
        "datatype": "INT64",
        "shape": [bags, 1],
        "parameters": {"binary_data_size": 8 * bags},
    }
    header = {"inputs": [entry], "parameters": {"binary_data_output": True}}
    return body_of(orjson.dumps(header), [np.arange(bags)])


def test_a_skeleton_has_a_template_from_its_second_header_on(version: ServedVersion) -> None:
    """A client that sends a new one each time makes none. A template belongs to the version that made it."""
    memory = Templates()
    for bags in (1, 2):
        assert memory.match(version, *named(bags)) is None
        body, size = named(bags)
        infer = slowly(version, body, size)
        assert isinstance(infer, InferRequest)
        memory.learn(version, body[:size], json_object(body[:size]), infer)
    assert memory.match(version, *named(3)) is not None
    other = ServedVersion(version.segment, version.backend, version.placed)
    assert memory.match(other, *named(3)) is None


def test_headers_that_ask_for_masks_have_no_template(version: ServedVersion) -> None:
    """However often they come; and the template of the same header without masks does not take them."""
    memory = Templates()
    tensors = {"user.values": np.array([1, 2, 3]), "user.lengths": np.array([1, 2], np.int32)}

    def body(*outputs: str) -> tuple[bytes, int]:
        told = [{"name": n, "parameters": {"binary_data": True}} for n in outputs]
        inputs = [
            {"name": n, "datatype": k, "shape": [a.size], "parameters": {"binary_data_size": a.nbytes}}
            for k, (n, a) in zip(("INT64", "INT32"), tensors.items(), strict=True)
        ]
        return body_of(orjson.dumps({"inputs": inputs, "outputs": told}), list(tensors.values()))

    plain, masked = body("user"), body("user", "user.found")
    for _ in range(3):
        learn(memory, version, *masked)
        assert memory.match(version, *masked) is None
    learn(memory, version, *plain)
    assert memory.match(version, *plain) is not None and memory.match(version, *masked) is None
    found = slowly(version, *masked)
    assert not isinstance(found, str) and [o.datatype for o in found.request.outputs] == ["FP32", "BOOL"]
    found.request.run(found.inputs)


def test_templates_are_bounded(version: ServedVersion, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those not used for longest are forgotten first; skeletons that came once are bounded too."""
    monkeypatch.setattr(templates, "TEMPLATE_BYTES", 4000)
    memory = Templates()

    def padded(n: int) -> tuple[bytes, int]:
        body, size = named(2)
        return body[: size - 1] + b',"x%d":true}' % n + body[size:], size + len(b',"x%d":true' % n)

    for n in range(30):
        learn(memory, version, *padded(n))
        assert memory.match(version, *padded(0)) is not None or n > 0
    kept = [n for n in range(30) if memory.match(version, *padded(n)) is not None]
    assert 1 < len(kept) < 15 and kept[-1] == 29
    monkeypatch.setattr(templates, "SKELETONS", 3)
    fresh = Templates()
    for n in range(5):
        body, size = padded(n)
        infer = slowly(version, body, size)
        assert isinstance(infer, InferRequest)
        fresh.learn(version, body[:size], json_object(body[:size]), infer)
    learn_once = padded(0)
    infer = slowly(version, *learn_once)
    assert isinstance(infer, InferRequest)
    fresh.learn(version, learn_once[0][: learn_once[1]], json_object(learn_once[0][: learn_once[1]]), infer)
    assert fresh.match(version, *learn_once) is None, (
        "a skeleton that came once was remembered beyond the bound"
    )


def test_templates_keep_no_replaced_version(version: ServedVersion, root: Path) -> None:
    """Version, segment and mapping go when the version is let go, although its headers had templates."""
    memory = Templates()
    own = engine_of(root, MOST_BYTES).attach()
    learn(memory, own, *named(2))
    assert memory.match(own, *named(5)) is not None
    gone = [weakref.ref(x) for x in (own, own.segment, own.segment.mapping)]
    assert all(ref() is not None for ref in gone)
    del own
    gc.collect()
    assert all(ref() is None for ref in gone)


@pytest.mark.thorough
def test_a_hundred_thousand_features_are_refused_in_a_sentence(version: ServedVersion) -> None:
    """No limit is hit but those of the request: the first unknown feature is named."""
    entry = {"datatype": "INT64", "shape": [1, 1], "parameters": {"binary_data_size": 8}}
    inputs = [{"name": f"f{n}", **entry} for n in range(100_000)]
    header = orjson.dumps({"inputs": inputs})
    body = header + bytes(800_000)
    assert Templates().match(version, body, len(header)) is None
    message = slowly(version, body, len(header))
    assert isinstance(message, str) and "'f0' is unknown" in message


# ---- vectors in shared memory ----


@pytest.fixture
def shared() -> Iterator[tuple[Regions, Path]]:
    """A region `r` of 64 KiB, and its object."""
    path = Path(f"/dev/shm/test-{uuid.uuid4().hex[:12]}")
    path.write_bytes(bytes(65536))
    known = Regions(RegionRegistry())
    known.register("r", path.name, 0, 65536)
    yield known, path
    path.unlink()


@pytest.mark.parametrize("item_at", [16384 + 3 * 32, 16384 + 3 * 32 + 8])
def test_vectors_are_written_into_their_region(
    version: ServedVersion, shared: tuple[Regions, Path], item_at: int
) -> None:
    """In one piece and in two; ids are copied before, and where one is wrong nothing is written."""
    known, path = shared
    version.scorer = None
    ids = np.arange(12, dtype=np.int64).reshape(3, 4)

    def at(offset: int, size: int) -> dict[str, Any]:
        return {"shared_memory_region": "r", "shared_memory_byte_size": size, "shared_memory_offset": offset}

    inputs = [
        {"name": n, "datatype": "INT64", "shape": [3, 4], "parameters": at(0, 96)} for n in ("user", "item")
    ]
    outputs = [
        {"name": "user", "parameters": at(16384, 96)},
        {"name": "item", "parameters": at(item_at, 72)},
    ]
    header = orjson.dumps({"inputs": inputs, "outputs": outputs})
    with path.open("r+b") as file:
        file.write(ids.tobytes())
    expected = v2_request.understand(version, json_object(header), b"", known)
    buffer = expected.request.run(expected.inputs)
    memory = Templates()
    for _ in range(2):
        memory.learn(version, header, json_object(header), expected)
    found = memory.match(version, header, len(header), known)
    assert found is not None
    with path.open("r+b") as file:
        file.write(ids[::-1].tobytes())  # too late
    answered = found.request.run(found.inputs)
    head, parts = v2_request.encode(found, answered)
    assert (head, parts) == (expected.head, [])
    written = path.read_bytes()
    assert written[16384 : 16384 + 96] == buffer[:96].tobytes()
    assert written[item_at : item_at + 72] == buffer[96:].tobytes()
    with path.open("r+b") as file:
        file.write((ids + 50).tobytes())
    refused = memory.match(version, header, len(header), known)
    assert refused is not None
    with pytest.raises(ApiError, match="outside the table"):
        refused.request.run(refused.inputs)
    assert path.read_bytes()[16384:] == written[16384:]


@pytest.mark.parametrize("more", [b',"junk":[' + b"1," * 20_000 + b"1]", b" " * 70_000])
def test_a_header_that_is_longer_than_the_model_needs_has_no_template(
    version: ServedVersion, more: bytes
) -> None:
    """The slow path reads it each time. With numbers that nobody reads a template was made of each of
    them."""
    entry = {"name": "user", "datatype": "INT64", "shape": [1, 1], "parameters": {"binary_data_size": 8}}
    header = orjson.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}})
    memory = Templates()
    for one, is_known in ((header[:-1] + more + b"}", False), (header, True)):
        body, header_bytes = body_of(one, [np.array([1])])
        learn(memory, version, body, header_bytes)
        assert check_equal(memory, version, body, header_bytes) is is_known


def test_numbers_are_counted_before_they_are_kept(version: ServedVersion) -> None:
    """A header with more of them than it may have is no header for a template, however short."""
    assert templates._headers.spans(b"[1,2,3]", 3) == [(1, 2, 0), (3, 4, 0), (5, 6, 0)]
    assert templates._headers.spans(b"[1,2,3]", 2) is None


def test_large_int32_ids_are_widened_beside_the_event_loop(version: ServedVersion) -> None:
    """A template leaves such a body to the slow path, and takes a smaller one of the same skeleton."""
    memory = Templates()
    for ids in (1, 1 << 21):
        entry = {
            "name": "words.values",
            "datatype": "INT32",
            "shape": [ids],
            "parameters": {"binary_data_size": 4 * ids},
        }
        header = orjson.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}})
        body, header_bytes = body_of(header, [np.zeros(ids, np.int32)])
        version.max_response_bytes = None
        learn(memory, version, body, header_bytes)
        found = memory.match(version, body, header_bytes)
        assert (found is None) == (ids > 1)
        assert found is None or found.made_bytes(body) >= 8 * ids


@pytest.mark.parametrize("weight", [np.nan, np.inf, -np.inf, -np.float32(np.nan)])
def test_weights_that_are_no_numbers_are_left_to_the_slow_path(version: ServedVersion, weight: float) -> None:
    """It refuses them, in named tensors and in a kjt."""
    memory = Templates()
    for feature, shape in (("user", (1,)), ("kjt", (1, 1))):
        for last, is_taken in ((2.0, True), (weight, False)):
            tensors = {
                "values": ("INT64", np.array([1, 2])),
                "lengths": ("INT32", np.full(shape, 2, np.int32)),
                "weights": ("FP32", np.array([1, last], np.float32)),
            }
            entries = [
                {
                    "name": f"{feature}.{n}",
                    "datatype": d,
                    "shape": a.shape,
                    "parameters": {"binary_data_size": a.nbytes},
                }
                for n, (d, a) in tensors.items()
            ]
            asked = {"binary_data_output": True, **({"kjt.features": ["user"]} if feature == "kjt" else {})}
            header = orjson.dumps({"inputs": entries, "parameters": asked})
            body, header_bytes = body_of(header, [a for _, a in tensors.values()])
            if is_taken:
                learn(memory, version, body, header_bytes)
            assert (memory.match(version, body, header_bytes) is not None) is is_taken
            assert isinstance(slowly(version, body, header_bytes), str) is not is_taken
