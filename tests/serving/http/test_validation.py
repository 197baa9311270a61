"""Bad requests: a 4xx with {"error": ...} that names field, value and bound, over both protocols; the
server stays well."""

import gzip
import json
import time
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tableside.serving.errors import ApiError
from tableside.serving.http.asgi import deadline_of

pytestmark = pytest.mark.quick


def post(server: Any, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, headers=headers, timeout=300)


def refused(response: httpx.Response, status: int, message: str) -> None:
    """The status, and a JSON error that holds `message`."""
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    assert message in response.json()["error"]


def v1(features: Any, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "features": features, **more}


V1 = [
    ({"clicked": [[True]]}, "value True at position 0 is not an integer"),
    ({"clicked": [["1"]]}, "value '1' at position 0 is not an integer"),
    ({"clicked": [[1, 1.0]]}, "value 1.0 at position 1 is not an integer"),
    ({"clicked": [[None]]}, "value None at position 0"),
    ({"clicked": [[[1]]]}, "value [1] at position 0"),
    ({"clicked": [[-1]]}, "feature 'clicked': id -1 at position 0 is outside the table's rows [0, 300)"),
    ({"clicked": [[5], [300]]}, "feature 'clicked': id 300 at position 1"),
    ({"clicked": [[2**63]]}, "is outside INT64's"),
    ({"clicked": [[10**30]]}, "is outside INT64's [-9223372036854775808, 9223372036854775807]"),
    (
        {"clicked": [[1, -(2**63) - 1]]},
        "at position 1 is outside INT64's [-9223372036854775808, 9223372036854775807]",
    ),
    ({"clicked": [1, 2]}, "expected a list of bags"),
    ({"clicked": [[1], 2]}, "expected a list of bags"),
    ({"clicked": "1"}, "expected a list of bags"),
    ({"clicked": {"values": [1, 2], "lengths": [1]}}, "the 1 lengths add up to 1, but there are 2 ids"),
    ({"clicked": {"values": [1], "lengths": [-1, 2]}}, "length -1 at position 0 is negative"),
    ({"clicked": {"values": [1], "lengths": [2**31]}}, "is outside INT32's"),
    ({"clicked": {"values": [1], "lengths": [True]}}, "value True at position 0 is not an integer"),
    ({"clicked": {"values": [1]}}, "came without lengths"),
    ({"clicked": {"values": [1], "lengths": [1], "weights": [1, 2]}}, "has 2 weights for 1 ids"),
    ({"clicked": {"values": [1], "lengths": [1], "weights": ["x"]}}, "is not a number"),
    ({"clicked": {"values": [1], "lengths": [1], "bias": []}}, "values, lengths, weights"),
    ({"text": {"values": [1], "lengths": [2]}}, "the 1 lengths add up to 2, but there are 1 ids"),
    ({"text": {"values": [1], "lengths": [1], "weights": [1.0]}}, "is not pooled and takes no weights"),
    ({"nope": [[1]]}, "feature 'nope' is unknown; model 'demo' has: clicked, user, liked, text"),
    ({}, "with at least one feature"),
    ([], "expected an object of feature to ids"),
]


@pytest.mark.parametrize(("features", "message"), V1, ids=[m[:40] for _, m in V1])
def test_v1_refuses(server: Any, features: Any, message: str) -> None:
    refused(post(server, "/v1/lookup", v1(features)), 400, message)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "is not JSON"),
        (b"[1]", 400, "is a JSON list; expected an object"),
        (b"\xff\xfe", 400, "is not JSON"),
        ({"features": {"user": [[1]]}}, 400, "field 'model' is missing"),
        ({"model": "demo"}, 400, "field 'features' is missing"),
        ({"model": "demo", "features": {"user": [[1]]}, "outputs": []}, 400, "field 'outputs' is unknown"),
        ({"model": "nope", "features": {"user": [[1]]}}, 404, "model 'nope' is not served here"),
        ({"model": ["demo"], "features": {"user": [[1]]}}, 404, "is not served here"),
        (
            {"model": "demo", "version": 9, "features": {"user": [[1]]}},
            404,
            "version 9 of model 'demo' is not published",
        ),
        ({"model": "demo", "version": True, "features": {"user": [[1]]}}, 400, "version is True"),
        ({"model": "demo", "version": -1, "features": {"user": [[1]]}}, 400, "expected a number from 1"),
    ],
)
def test_v1_bodies(server: Any, body: Any, status: int, message: str) -> None:
    refused(post(server, "/v1/lookup", body), status, message)


def test_v1_answers(server: Any) -> None:
    """And what is right is answered, empty bags and no ids too."""
    found = post(server, "/v1/lookup", v1({"user": [[1, 2], []], "text": {"values": []}})).json()
    assert (found["model"], found["version"]) == ("demo", 1)
    assert np.array(found["vectors"]["user"]).shape == (2, 64)
    assert found["vectors"]["user"][1] == [0.0] * 64
    assert found["vectors"]["text"] == []


def test_a_key_that_comes_twice_is_refused(server: Any) -> None:
    twice = b'{"model": "demo", "features": {"user": [[1]], "user": [[2]]}}'
    found = post(server, "/v1/lookup", twice)
    assert found.status_code == 400
    assert found.json() == {"error": "key 'user' came twice in an object; send each key once"}


def binary(inputs: list[tuple[str, str, list[int], bytes]], **request: Any) -> tuple[bytes, dict[str, str]]:
    described = [
        {"name": n, "datatype": d, "shape": s, "parameters": {"binary_data_size": len(b)}}
        for n, d, s, b in inputs
    ]
    head = json.dumps({"inputs": described, **request}).encode()
    return head + b"".join(b for *_, b in inputs), {"Inference-Header-Content-Length": str(len(head))}


ONE = np.array([[1]]).tobytes()
INFER = "/v2/models/demo/infer"
BINARY = [
    ([("user", "INT64", [1, 2], ONE)], {}, "binary_data_size is 8, but INT64 [1, 2] has 16 bytes"),
    ([("user", "INT64", [1, 0], ONE)], {}, "binary_data_size is 8"),
    ([("user", "FP64", [1, 1], ONE)], {}, "datatype is 'FP64'; expected INT64 or INT32"),
    ([("user", "INT64", [1], ONE)], {}, "shape is [1]; expected [bags, ids a bag]"),
    ([("user", "INT64", [-1, -1], ONE)], {}, "non-negative integers"),
    ([("user", "INT64", [], ONE)], {}, "non-negative integers"),
    ([("user", "INT64", [1.0, 1], ONE)], {}, "non-negative integers"),
    ([("user", "INT64", [2**40, 2**40], ONE)], {}, "non-negative integers"),
    ([("user", "INT64", [2**39, 0], b"")], {}, "bytes of vectors; the limit is"),
    ([("user", "INT64", [1, 1], ONE), ("user", "INT64", [1, 1], ONE)], {}, "came twice"),
    ([("user", "INT64", [1, 1], ONE), ("user.values", "INT64", [1], ONE)], {}, "came both as"),
    ([("user.lengths", "INT32", [2], ONE)], {}, "came without ids"),
    ([("user.values", "INT64", [1], ONE)], {}, "came without lengths"),
    ([("kjt.values", "INT64", [1], ONE)], {}, "a kjt came without kjt.lengths; send kjt.values [ids]"),
    ([("kjt.lengths", "INT32", [1, 1], b"\1\0\0\0")], {}, "a kjt came without kjt.values"),
    ([("user.values", "INT64", [1], ONE), ("user.lengths", "INT32", [1], b"\2\0\0\0")], {},
     "add up to 2, but there are 1"),
    ([("user.values", "INT64", [1, 1], ONE), ("user.lengths", "INT32", [1], b"\1\0\0\0")], {},
     "expected one dimension"),
    ([("text.values", "INT64", [1], ONE), ("text.weights", "FP32", [1], b"\0\0\x80?")], {},
     "is not pooled and takes no weights"),
    *(
        (
            [("user", "INT64", [1, 2], ONE * 2),
             ("user.weights", "FP32", [2], np.array([1, bad], np.float32).tobytes())],
            {},
            "at position 1 is not a finite FP32",
        )
        for bad in (np.nan, np.inf, -np.inf)
    ),
    ([("nope", "INT64", [1, 1], ONE)], {}, "feature 'nope' is unknown"),
    ([("user", "INT64", [1, 1], ONE)], {"outputs": [{"name": "nope"}]}, "output 'nope' is unknown"),
    ([("user", "INT64", [1, 1], ONE)], {"outputs": [{"name": "text"}]},
     "output 'text' was asked for without its input"),
    ([("user", "INT64", [1, 1], ONE)], {"outputs": [{"name": "user"}] * 2}, "asked for twice"),
    ([("user", "INT64", [1, 1], ONE)], {"outputs": [{"name": "user", "parameters": {"classification": 1}}]},
     "not supported"),
    ([("user", "INT64", [1, 1], ONE)], {"outputs": [{"name": []}]}, "output [] is unknown"),
    ([("user", "INT64", [0, 2**39], b"")], {}, "a bag has at most"),
    ([("user", "INT64", [2**39] * 3000, b"")], {}, "one or two non-negative integers"),
    ([("user", "INT64", [1, 1], ONE)], {"outputs": 3}, "expected a list of objects"),
    ([("user", "INT64", [1, 1], ONE)], {"id": 3}, "expected a string"),
    ([("user", "INT64", [1, 1], ONE)], {"parameters": {"binary_data_output": 1}}, "expected true or false"),
    ([("user", "INT64", [1, 1], np.array([1000]).tobytes())], {},
     "id 1000 at position 0 is outside the table's rows [0, 1000)"),
    ([], {}, "expected a list with at least one input"),
]  # fmt: skip


@pytest.mark.parametrize(("inputs", "request_", "message"), BINARY, ids=[m[:40] for *_, m in BINARY])
def test_v2_refuses(server: Any, inputs: Any, request_: dict[str, Any], message: str) -> None:
    body, headers = binary(inputs, **request_)
    refused(post(server, INFER, body, **headers), 400, message)


@pytest.mark.parametrize("length", ["0", "-1", "x", "99999999", "1.5", "", "1e2", "9" * 5000])
def test_v2_header_lengths_that_lie(server: Any, length: str) -> None:
    body, _ = binary([("user", "INT64", [1, 1], ONE)])
    refused(
        post(server, INFER, body, **{"Inference-Header-Content-Length": length}),
        400,
        "Inference-Header-Content-Length is",
    )


def test_v2_bytes_too_few_and_too_many(server: Any) -> None:
    """Both where the header was never seen and where it is remembered."""
    body, headers = binary([("user", "INT64", [1, 1], ONE)])
    for _ in range(3):
        refused(post(server, INFER, body[:-1], **headers), 400, "add up to 8 bytes, but 7 follow")
        refused(post(server, INFER, body + b"\0", **headers), 400, "add up to 8 bytes, but 9 follow")
        assert post(server, INFER, body, **headers).status_code == 200


def test_v2_json_data(server: Any) -> None:
    """Strict as v1; data and shape must agree."""

    def infer(**entry: Any) -> httpx.Response:
        return post(
            server, INFER, {"inputs": [{"name": "user", "datatype": "INT64", "shape": [1, 2], **entry}]}
        )

    assert infer(data=[1, 2]).json()["outputs"][0]["shape"] == [1, 64]
    assert infer(data=[[1, 2]]).status_code == 200
    refused(infer(data=[1]), 400, "shape [1, 2] holds 2 values, data has 1")
    refused(infer(data=[1, True]), 400, "value True at position 1 is not an integer")
    refused(infer(data=[1, 2.0]), 400, "value 2.0 at position 1")
    refused(infer(data=7), 400, "expected a list of numbers")
    refused(infer(), 400, "neither data nor a binary_data_size")
    refused(infer(data=[1, 2], parameters={"binary_data_size": 16}), 400, "has both")
    refused(
        infer(data=[1, 2], parameters={"shared_memory_region": "x"}),
        400,
        "shared memory regions are not supported",
    )


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v2/models/nope", 404, "model 'nope' is not served here"),
        ("GET", "/v2/models/demo/versions/0", 400, "expected a number from 1"),
        ("GET", "/v2/models/demo/versions/one", 400, "version is 'one'"),
        ("GET", "/v2/models/demo/versions/5/config", 404, "version 5 of model 'demo' is not published"),
        ("GET", "/v2/models/demo/nope", 404, "not a path of this server"),
        ("GET", "/v2/nope", 404, "not a path of this server"),
        ("GET", "/v2/models", 404, "not a path of this server"),
        ("GET", "/v2/models/demo/infer", 405, "expected POST"),
        ("POST", "/v2/models/demo", 405, "expected GET"),
        ("GET", "/nope", 404, "this server has: /v1/lookup"),
        ("GET", "/v1/lookup", 405, "expected POST"),
    ],
)
def test_paths(server: Any, method: str, path: str, status: int, message: str) -> None:
    refused(httpx.request(method, server.url + path, timeout=300), status, message)


def test_compressed_bodies_that_lie(server: Any) -> None:
    body, headers = binary([("user", "INT64", [1, 1], ONE)])
    refused(post(server, INFER, body, **headers, **{"Content-Encoding": "gzip"}), 400, "the body is not gzip")
    refused(
        post(server, INFER, gzip.compress(body)[:-4], **headers, **{"Content-Encoding": "gzip"}),
        400,
        "ends early",
    )
    refused(
        post(server, INFER, body, **headers, **{"Content-Encoding": "br"}),
        415,
        "expected gzip, deflate or none",
    )
    bomb = gzip.compress(bytes(80 << 20))
    refused(
        post(server, INFER, bomb, **headers, **{"Content-Encoding": "gzip"}),
        413,
        "the limit (max_body_bytes)",
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["values", "lengths", "name", "shape", "x"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@pytest.mark.thorough
@settings(max_examples=80, deadline=None)
@given(features=json_values, where=st.sampled_from(["features", "inputs", "outputs"]))
def test_no_json_breaks_the_server(server: Any, features: Any, where: str) -> None:
    """Whatever the JSON is, the answer is 200 or a 4xx with an error, never a 5xx."""
    inputs = [{"name": "user", "datatype": "INT64", "shape": [1, 1], "data": [1]}]
    for path, body in (
        ("/v1/lookup", {"model": "demo", "features": features}),
        (INFER, {"inputs": inputs, where: features}),
    ):
        response = post(server, path, body)
        assert response.status_code in (200, 400, 404), response.text


@pytest.mark.thorough
@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200), length=st.integers(0, 250))
def test_no_bytes_break_the_server(server: Any, data: bytes, length: int) -> None:
    response = post(server, INFER, data, **{"Inference-Header-Content-Length": str(length)})
    assert response.status_code == 400
    assert "error" in response.json()


@pytest.mark.parametrize("value", [b"5", b"5 \t", b" 0.5", b"0", b"999999999", b"0.000001"])
def test_milliseconds_of_a_header(value: bytes) -> None:
    before, found = time.monotonic(), deadline_of(value)
    assert found is not None and 0 <= found - before - float(value) / 1000 < 60


@pytest.mark.parametrize(
    "value", [b"", b" ", b"-1", b"1e3", b"inf", b"nan", b"+5", b"5.", b"5 0", b"0x5", b"\xb2"]
)
def test_what_are_no_milliseconds(value: bytes) -> None:
    with pytest.raises(ApiError, match=r"expected milliseconds, as 5 or 0\.5"):
        deadline_of(value)
