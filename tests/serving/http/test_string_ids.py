"""Requests of string ids, by every door and in every form: answered as the model of hashed ids answers."""

import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
import tritonclient.http as triton_http
from servers import Server, start_server
from string_tables import hashes, publish_strings, texts
from support import end, rows_of, run_tableside
from triton_grpc import triton

from tableside.loader.string_ids import as_bytes
from tableside.serving.client import BadRequest, Client, FeatureError, Jagged

TEXTS, VALUES = texts(60), rows_of(60, 8)
BAGS = [["", "a\0", "日本語"], [], ["nobody", TEXTS[30]]]
FEATURES = {
    "name": {"table": "s"},
    "words": {"table": "s", "pooling": "none"},
    "strict": {"table": "w", "pooling": "mean", "output": "fp16"},
    "number": {"table": "n"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves the model `demo`, and `hashed`, whose tables have the int64 that the strings hash to."""
    root = Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}"
    folder = tmp_path_factory.mktemp("strings")
    of = {"s": {"missing": "zero"}}
    more = {"of": of, "features": FEATURES}
    numbers = (np.arange(60), VALUES)
    publish_strings(
        folder, root, {"s": (TEXTS, VALUES), "w": (TEXTS[::2], VALUES[::2]), "n": numbers}, **more
    )
    tables = {"s": (hashes(TEXTS), VALUES), "w": (hashes(TEXTS[::2]), VALUES[::2]), "n": numbers}
    publish_strings(folder, root, tables, **more, name="hashed")
    options = ("--workers", 1, "--grpc-port", 0, "--allow-client-shm")
    started = start_server(root, *options, models=("demo", "hashed"))
    yield started
    try:
        assert end(started.process) == 0
    finally:
        shutil.rmtree(root)


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as found:
        yield found


def hashed(bags: list[list[str]]) -> list[list[int]]:
    return [hashes(bag).tolist() for bag in bags]


def post(server: Server, path: str, body: Any, **more: Any) -> Any:
    return httpx.post(server.url + path, content=orjson.dumps(body), **more)


# ---- JSON ----


def test_lookups_of_v1(server: Server) -> None:
    """In bags, and as values, lengths and weights, beside a feature of integers; found masks too."""
    jagged = {"values": [s for bag in BAGS for s in bag], "lengths": [3, 0, 2], "weights": [1, 2, 3, 4, 5]}
    for form in (BAGS, jagged):
        asked = {"name": form, "words": {"values": TEXTS}, "number": [[1, 2]]}
        found = post(server, "/v1/lookup", {"model": "demo", "features": asked, "found": True}).json()
        asked["name"] = (
            hashed(BAGS) if form is BAGS else {**jagged, "values": hashes(jagged["values"]).tolist()}
        )
        asked["words"] = {"values": hashes(TEXTS).tolist()}
        expected = post(server, "/v1/lookup", {"model": "hashed", "features": asked, "found": True}).json()
        assert found["vectors"] == expected["vectors"] and found["found"] == expected["found"]
    assert found["found"]["name"] == [True, True, True, False, True] and any(found["vectors"]["name"][0])


@pytest.mark.parametrize(
    ("features", "said"),
    [
        ({"name": [[1]]}, "'name': value 1 at position 0 is not a string"),
        ({"name": [["a", 1]]}, "'name': value 1 at position 1 is not a string"),
        ({"name": [["a", None]]}, "'name': value None at position 1 is not a string"),
        ({"number": [["1"]]}, "'number': value '1' at position 0 is not an integer"),
        ({"name": ["a"]}, "expected a list of bags"),
        ({"strict": [["", "gone"]]}, "'strict': the string of hash -?[0-9]+ at position 1 is not among the"),
    ],
)
def test_what_v1_refuses(server: Server, features: Any, said: str) -> None:
    answer = post(server, "/v1/lookup", {"model": "demo", "features": features})
    assert answer.status_code == 400
    assert re.search(said, answer.json()["error"]), answer.text


def infer(server: Server, inputs: list[dict[str, Any]], model: str = "demo", **more: Any) -> httpx.Response:
    return post(server, f"/v2/models/{model}/infer", {"inputs": inputs, **more})


def test_json_of_v2(server: Server) -> None:
    """Flat and nested, with escapes; a mask where it is named."""
    flat = [s for bag in BAGS for s in bag]
    outputs = [{"name": "name"}, {"name": "name.found"}]
    lengths = {"name": "name.lengths", "datatype": "INT32", "shape": [3], "data": [3, 0, 2]}
    ids = {"name": "name.values", "datatype": "BYTES", "shape": [5], "data": flat}
    found = infer(server, [ids, lengths], outputs=outputs).json()["outputs"]
    numbers = {**ids, "datatype": "INT64", "data": hashes(flat).tolist()}
    assert found == infer(server, [numbers, lengths], "hashed", outputs=outputs).json()["outputs"]
    square = {"name": "name", "datatype": "BYTES", "shape": [2, 2], "data": [TEXTS[:2], TEXTS[2:4]]}
    (nested,) = infer(server, [square]).json()["outputs"]
    (rows,) = infer(server, [{**square, "data": TEXTS[:4]}]).json()["outputs"]
    assert nested == rows and any(rows["data"])


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        ({"datatype": "INT64", "shape": [1, 1], "data": [1]}, "expected BYTES, since its ids are strings"),
        ({"datatype": "BYTES", "shape": [1, 1], "data": [1]}, "value 1 at position 0 is not a string"),
        ({"datatype": "BYTES", "shape": [1, 2], "data": ["a"]}, "holds 2 values, data has 1"),
        ({"name": "number", "datatype": "BYTES", "shape": [1, 1], "data": ["a"]}, "expected INT64 or INT32"),
        ({"name": "name.weights", "datatype": "BYTES", "shape": [1], "data": ["a"]}, "expected FP32"),
    ],
)
def test_what_v2_refuses(server: Server, tensor: dict[str, Any], said: str) -> None:
    answer = infer(server, [{"name": "name", **tensor}])
    assert answer.status_code == 400 and said in answer.json()["error"]


# ---- bytes ----


def binary(server: Server, tensors: list[tuple[str, str, list[int], bytes]], **parameters: Any) -> Any:
    inputs = [
        {"name": n, "datatype": d, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for n, d, shape, data in tensors
    ]
    head = orjson.dumps({"inputs": inputs, "parameters": parameters})
    body = head + b"".join(data for *_, data in tensors)
    return httpx.post(
        f"{server.url}/v2/models/demo/infer",
        content=body,
        headers={"Inference-Header-Content-Length": str(len(head))},
    )


@pytest.mark.parametrize(
    ("shape", "data", "said"),
    [
        ([1, 2], as_bytes([b"a"]), "5 bytes are too few for 2 strings"),
        ([1, 1], as_bytes([b"a", b"b"]), "its 10 bytes are 2 strings; expected 1"),
        ([1, 1], as_bytes([b"abc"])[:-1], "its 6 bytes are no strings; expected 1"),
        ([1, 1], b"\xff\xff\xff\xff", "its 4 bytes are no strings"),
        ([2**30, 1], b"", "0 bytes are too few for 1073741824 strings"),
    ],
)
def test_bytes_that_are_no_strings(server: Server, shape: list[int], data: bytes, said: str) -> None:
    answer = binary(server, [("name", "BYTES", shape, data)])
    assert answer.status_code == 400 and said in answer.json()["error"], answer.text


def test_bytes_are_hashed_as_they_are(server: Server) -> None:
    """Also those that are no UTF-8; and no ids are of either kind."""
    data = as_bytes([b"\xff\xfe", "日本語".encode()])
    lengths = ("words.lengths", "INT32", [1], np.array([2], np.int32).tobytes())
    answer = binary(server, [("words.values", "BYTES", [2], data), lengths])
    (found,) = answer.json()["outputs"]
    assert not any(found["data"][:8]) and any(found["data"][8:])
    for datatype in ("INT64", "INT32", "BYTES"):
        assert binary(server, [("name", datatype, [3, 0], b"")]).json()["outputs"][0]["shape"] == [3, 8]
        assert binary(server, [("number", datatype, [3, 0], b"")]).status_code == 200


def test_a_kjt_has_ids_of_one_kind(server: Server) -> None:
    lengths = ("kjt.lengths", "INT32", [2, 1], np.array([1, 1], np.int32).tobytes())
    values = ("kjt.values", "BYTES", [2], as_bytes([b"", b""]))
    answer = binary(server, [values, lengths], **{"kjt.features": "name,number"})
    assert "'name' are strings, those of 'number' integers; send each" in answer.json()["error"]
    assert binary(server, [values, lengths], **{"kjt.features": "name,words"}).status_code == 200


def test_metadata_says_it(server: Server) -> None:
    """As Triton's clients read it."""
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
        kinds = {i["name"]: i["datatype"] for i in client.get_model_metadata("demo")["inputs"]}
        configured = {i["name"]: i["data_type"] for i in client.get_model_config("demo")["input"]}
    assert kinds["name"] == kinds["name.values"] == "BYTES" and kinds["number"] == "INT64"
    assert configured["name"] == "TYPE_STRING" and kinds["name.lengths"] == "INT32"
    said = httpx.get(f"{server.url}/v2/models/demo").json()["parameters"]
    kinds_in_kjt = {f["name"]: f.get("ids") for f in said["kjt.features"]}
    assert kinds_in_kjt == {"name": "string", "words": "string", "strict": "string", "number": None}
    assert said["table_ids"]["s"]["ids"] == "string"
    (model,) = (m for m in httpx.get(f"{server.url}/v1/models").json()["models"] if m["name"] == "demo")
    assert {t["name"]: t["ids"] for t in model["tables"]} == {"s": "string", "w": "string", "n": "raw"}


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "contents"])
def test_triton_clients(server: Server, client: Client, raw: bool) -> None:
    """Over HTTP in binary and JSON, and over gRPC raw and as bytes_contents, unchanged."""
    ids = np.array([["", "日本語"], ["a\0b", "nobody"]], object)
    expected = client.lookup("hashed", {"name": hashes(ids.flat).reshape(2, 2)})["name"]
    asked = triton_http.InferInput("name", [2, 2], "BYTES")
    asked.set_data_from_numpy(ids, binary_data=raw)
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as http:
        np.testing.assert_array_equal(http.infer("demo", [asked]).as_numpy("name"), expected)
    over_grpc = triton.InferInput("name", [2, 2], "BYTES")
    if raw:
        over_grpc.set_data_from_numpy(ids)
    else:
        over_grpc._input.contents.bytes_contents.extend(s.encode() for s in ids.flat)
        over_grpc._raw_content = None
    with triton.InferenceServerClient(server.grpc) as grpc:
        np.testing.assert_array_equal(grpc.infer("demo", [over_grpc]).as_numpy("name"), expected)


# ---- our client ----

FLAT = [s for bag in BAGS for s in bag]
LENGTHS = np.array([len(bag) for bag in BAGS], np.int32)
FORMS: dict[str, Any] = {
    "lists": BAGS,
    "lists of bytes": [[s.encode() for s in bag] for bag in BAGS],
    "tuples": tuple(map(tuple, BAGS)),
    "arrays in a list": [np.array(bag, object) for bag in BAGS],
    "jagged": Jagged(FLAT, LENGTHS),
    "jagged array": Jagged(np.array(FLAT, object), LENGTHS),
    "jagged pandas": Jagged(pd.Series(FLAT), LENGTHS),
    "jagged pyarrow": Jagged(pa.array(FLAT), LENGTHS),
    "jagged categories": Jagged(pd.Series(FLAT).astype("category"), LENGTHS),
    "pyarrow": pa.array(BAGS, pa.list_(pa.string())),
    "large pyarrow": pa.chunked_array([BAGS[:1], BAGS[1:]], pa.large_list(pa.large_string())),
    "pandas": pd.Series(BAGS),
    "polars": pl.Series(BAGS, dtype=pl.List(pl.String)),
    "offsets": Jagged.from_offsets(FLAT, [0, 3, 3]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compact", [False, True])
def test_forms_of_the_client(client: Client, form: str, compact: bool) -> None:
    """With masks; in the compact form, too."""
    expected = client.lookup("hashed", {"name": hashed(BAGS)}, found=True)
    found = client.lookup("demo", {"name": FORMS[form]}, found=True, compact=compact)
    np.testing.assert_array_equal(found.vectors["name"], expected.vectors["name"])
    assert found.found["name"].tolist() == expected.found["name"].tolist() == [True, True, True, False, True]


SQUARES: dict[str, Any] = {
    "objects": np.array([["a\0b", "é"], ["", "nobody"]], object),
    "unicode": np.array([["a\0b", "é"], ["", "nobody"]]),
    "bytes": np.array([[b"a\0b", "é".encode()], [b"", b"nobody"]], "S"),
    "fixed lists": pa.array([["a\0b", "é"], ["", "nobody"]], pa.list_(pa.string(), 2)),
}


@pytest.mark.parametrize("form", SQUARES)
@pytest.mark.parametrize("compact", [False, True])
def test_equal_bags(client: Client, form: str, compact: bool) -> None:
    ids = hashes(["a\0b", "é", "", "nobody"]).reshape(2, 2)
    expected = client.lookup("hashed", {"name": ids}, found=True)
    found = client.lookup("demo", {"name": SQUARES[form]}, found=True, compact=compact)
    np.testing.assert_array_equal(found.vectors["name"], expected.vectors["name"])
    np.testing.assert_array_equal(found.found["name"], expected.found["name"])


def test_strings_beside_integers(client: Client) -> None:
    """By name; empty bags, and a tensor, too. The compact form says why it cannot be."""
    asked = {"name": BAGS, "number": torch.tensor([[1, 2], [3, 4], [5, 6]]), "words": [[], [], []]}
    expected = client.lookup("hashed", {**asked, "name": hashed(BAGS)})
    found = client.lookup("demo", asked)
    assert all(torch.equal(found[n], expected[n]) for n in asked)
    with pytest.raises(FeatureError, match="of some features are strings and those of some integers"):
        client.lookup("demo", asked, compact=True)
    only_strings = {"name": BAGS, "words": [[], [], []]}
    compact = client.lookup("demo", only_strings, compact=True)
    assert torch.equal(torch.from_numpy(compact["name"]), found["name"])


def test_gathering(client: Client) -> None:
    """A long list, in parts."""
    found = client.gather("demo", "words", TEXTS, at_once=7)
    np.testing.assert_array_equal(found, client.gather("hashed", "words", hashes(TEXTS)))


@pytest.mark.parametrize(
    ("ids", "error", "said"),
    [
        ([["a", None]], FeatureError, "name.values: None is among the strings; expected ids of one kind"),
        ([["a", 7]], FeatureError, "7 is among the strings"),
        ([["\ud800"]], FeatureError, "a string cannot be encoded"),
        ([[7]], BadRequest, "'name.values': datatype is 'INT64'; expected BYTES, since its ids are strings"),
        (["a"], FeatureError, "expected a list of bags"),
    ],
)
def test_what_the_client_refuses(client: Client, ids: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        client.lookup("demo", {"name": ids})


@pytest.mark.drawn(0.25)
def test_the_command_line(server: Server, client: Client) -> None:
    """A number is a string where the table has strings."""
    expected = client.lookup("hashed", {"name": hashed([["7", "日本語"], ["é"]]), "number": [[7], [8]]})
    asked = ("lookup", "demo", "name=7,日本語;é", "number=7;8", "--json", "--url", server.url)
    found = orjson.loads(run_tableside(*asked).stdout)
    np.testing.assert_allclose(found["name"], expected["name"])
    np.testing.assert_allclose(found["number"], expected["number"])
    refused = run_tableside("bench", "demo", "--url", server.url)
    assert "has string ids, which a server does not tell, so none can be drawn" in refused.stderr
