"""The compact form end to end: it answers what the named form answers, and follows models that change."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import torch
from compact_model import ALL_POOLED, draw, same
from servers import Server, publish_demo
from support import rows_of, until

from tableside.serving.client import AsyncClient, Client, ClientError, FeatureError, Jagged, calls
from tableside.serving.client.attempts import Attempts
from tableside.serving.client.calls import Calls
from tableside.serving.client.messages import HttpRequest, HttpResponse


@pytest.mark.parametrize(
    ("names", "weights", "dtype"),
    [
        (ALL_POOLED, False, np.int64),
        (ALL_POOLED, True, np.int64),
        (ALL_POOLED, True, np.int32),
        (("near", "words", "clicked", "seen", "user"), False, np.int32),
        (("seen", "words"), False, np.int64),
        (("words",), False, np.int64),
        (("half", "seen"), False, np.int64),
    ],
)
@pytest.mark.parametrize("bags", [0, 1, 7])
@pytest.mark.drawn(5)
def test_both_forms_answer_the_same(
    served: Server, names: tuple[str, ...], weights: bool, dtype: type, bags: int
) -> None:
    """Bit for bit, for every mixture of pooled and unpooled features, with and without weights, from both
    clients."""
    rng = np.random.default_rng(bags)

    async def ask(features: dict[str, Jagged]) -> dict[str, Any]:
        async with AsyncClient(served.url) as client:
            return await client.lookup("ads", features, compact=True)

    with Client(served.url) as client:
        for _ in range(3):
            features = {n: draw(rng, n, bags, weights, dtype) for n in names}
            expected = client.lookup("ads", features, compact=False)
            same(client.lookup("ads", features, compact=True), expected)
            same(asyncio.run(ask(features)), expected)
            tensors = {
                n: Jagged(torch.from_numpy(j.values), torch.from_numpy(j.lengths), j.weights)
                for n, j in features.items()
            }
            same(client.lookup("ads", tensors, compact=True), client.lookup("ads", tensors, compact=False))


def test_outputs_and_scores_of_the_compact_form(served: Server) -> None:
    """What is asked for comes, in the order asked, and the scores are the named form's."""
    rng = np.random.default_rng(0)
    with Client(served.url) as client:
        features = {n: draw(rng, n, 4) for n in ("user", "words", "near", "clicked")}
        for outputs in (["near"], ["words", "user"], ["score"], ["score", "near"], None):
            expected = client.lookup("ads", features, outputs=outputs, compact=False)
            same(client.lookup("ads", features, outputs=outputs, compact=True), expected)
        assert "score" in expected
        scored = {n: features[n] for n in ("user", "clicked")}
        np.testing.assert_array_equal(
            client.score("ads", scored, compact=True), client.score("ads", scored, compact=False)
        )
        with pytest.raises(ClientError, match=r"400: .*output 'nope' is unknown"):
            client.lookup("ads", features, outputs=["near", "nope"], compact=True)


def test_bad_ids_are_named_in_the_compact_form(served: Server) -> None:
    with Client(served.url) as client:
        features = {"user": Jagged([1, 2], [1, 1]), "near": Jagged([3, 200], [1, 1])}
        with pytest.raises(ClientError, match=r"400: .*near.*200"):
            client.lookup("ads", features, compact=True)


def ask_compact(served: Server, lengths: list[list[int]], ids: int, also: str = "") -> tuple[int, str]:
    """Status and error of a request for `user` and `words` in the compact form, and by name for the feature
    `also`.

    `words` is not pooled, so no kernel reads its lengths.
    """
    tensors: dict[str, np.ndarray] = {
        "kjt.values": np.zeros(ids, np.int64),
        "kjt.lengths": np.array(lengths, np.int32),
    }
    if also:
        tensors[also] = np.zeros((2, 1), np.int64)
    kinds = {"<i8": "INT64", "<i4": "INT32"}
    inputs = [
        {
            "name": n,
            "datatype": kinds[a.dtype.str],
            "shape": a.shape,
            "parameters": {"binary_data_size": a.nbytes},
        }
        for n, a in tensors.items()
    ]
    head = orjson.dumps(
        {"inputs": inputs, "parameters": {"kjt.features": "user,words", "binary_data_output": True}}
    )
    answer = httpx.post(
        f"{served.url}/v2/models/ads/infer",
        content=head + b"".join(a.tobytes() for a in tensors.values()),
        headers={"Inference-Header-Content-Length": str(len(head))},
    )
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]


@pytest.mark.parametrize(
    ("lengths", "ids", "also", "why"),
    [
        ([[1, 1], [2, -1]], 3, "", "feature 'words': length -1 at position 1 is negative"),
        ([[1, 1], [0, 0]], 3, "", "the 4 lengths add up to 2, but there are 3 ids"),
        ([[1, 1], [0, 2]], 3, "", "the 4 lengths add up to 4, but there are 3 ids"),
        ([[1, 1], [0, 1]], 3, "clicked", "input 'clicked' came beside kjt.values"),
        ([[1, 1]], 2, "", "expected [2, bags], a row a feature"),
    ],
)
@pytest.mark.drawn(1)
def test_bad_lengths_are_named_in_the_compact_form(
    served: Server, lengths: list[list[int]], ids: int, also: str, why: str
) -> None:
    """Before any row is read; the same with the lengths right is answered, twice, so that a template
    answers as well."""
    for _ in range(3):
        assert ask_compact(served, [[1, 1], [0, 1]], 3) == (200, "")
        status, error = ask_compact(served, lengths, ids, also)
        assert status == 400
        assert why in error


@pytest.mark.parametrize(
    ("features", "why"),
    [
        ({"user": Jagged([1], [1]), "half": Jagged([1], [1])}, "user has FP32 vectors and half FP16"),
        ({"user": Jagged([1], [1]), "seen": Jagged([1])}, "seen has no lengths"),
        ({"user": Jagged([1], [1]), "near": Jagged([1], [1, 0])}, "user has 1 bags and near 2"),
        ({"user": Jagged([1], [1]), "nope": Jagged([1], [1])}, "the model has no feature 'nope'"),
    ],
)
def test_what_the_compact_form_cannot_say(served: Server, features: dict[str, Jagged], why: str) -> None:
    """Where it was asked for, the error says why not."""
    with (
        Client(served.url) as client,
        pytest.raises(FeatureError, match=f"cannot be sent in the compact form: {why}"),
    ):
        client.lookup("ads", features, compact=True)


# ---- the choice of a form ----


class Sent:
    """The inputs' names of each infer request that a client sends, and how often it read metadata."""

    def __init__(self, client: Client) -> None:
        self.inputs: list[list[str]] = []
        self.metadata = 0
        self._send = client._pool.send
        client._pool.send = self  # type: ignore[method-assign]

    def __call__(self, request: HttpRequest, attempts: Attempts) -> HttpResponse:
        if request.method == "GET":
            self.metadata += 1
        else:
            header = orjson.loads(b"".join(request.parts)[: request.json_bytes])
            self.inputs.append([t["name"] for t in header["inputs"]])
        return self._send(request, attempts)


def test_many_jagged_features_go_compact_and_others_by_name(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without being told, and what the compact form cannot say goes by name with the same answer as ever."""
    monkeypatch.setattr(calls, "COMPACT_FEATURES", 3)
    rng = np.random.default_rng(0)
    three = {n: draw(rng, n, 2) for n in ALL_POOLED}
    by_name = [
        {n: three[n] for n in ("user", "near")},
        {**three, "user": np.array([[1], [2]])},
        {**three, "user": Jagged([1, 2], [1, 1], [0.5, 0.5])},
        {**three, "seen": Jagged([1, 2])},
        {**three, "near": Jagged([1], [1])},
        {**three, "half": draw(rng, "half", 2)},
    ]
    with Client(served.url) as client:
        sent = Sent(client)
        for features in (three, {n: [[1], [2, 3]] for n in ALL_POOLED}):
            same(client.lookup("ads", features), client.lookup("ads", features, compact=False))
        assert [inputs[0] for inputs in sent.inputs] == ["kjt.values", "clicked.values"] * 2
        assert sent.metadata == 1
        sent.inputs.clear()
        for features in by_name:
            assert set(client.lookup("ads", features)) >= set(features)
        client.lookup("ads", three, outputs=["user"])
        assert (
            not any("kjt.values" in inputs for inputs in sent.inputs) and len(sent.inputs) == len(by_name) + 1
        )
        with pytest.raises(ClientError, match="feature 'nope' is unknown"):
            client.lookup("ads", {**three, "nope": three["user"]})


# ---- models that change ----

METADATA = {
    "parameters": {
        "kjt.features": [{"name": "a", "dim": 2, "pooling": "sum", "datatype": "FP32"}],
        "kjt.schema": "one",
    }
}
STALE = (400, {"error": "kjt.schema is 'one'; version 2 of model 'm' has 'two'"})


def respond(status: int, value: Any) -> HttpResponse:
    return HttpResponse(status, memoryview(bytearray(orjson.dumps(value))), None, False)


def step(call: Any, response: HttpResponse | None) -> str:
    """The next request of a call: its method and path, and its schema."""
    request = call.send(response)
    header = (
        orjson.loads(b"".join(request.parts)[: request.json_bytes]) if request.parts else {"parameters": {}}
    )
    return f"{request.method} {request.path} {header['parameters'].get('kjt.schema')}"


def test_a_schema_that_is_not_known_is_read_again_once() -> None:
    """The request is repeated with the new schema; a second refusal is the caller's."""
    made = Calls()
    for first in (True, False):
        call = made.lookup("m", {"a": Jagged([1], [1])}, None, None, True)
        asked = step(call, None)
        if first:
            assert asked == "GET /v2/models/m None"
            asked = step(call, respond(200, METADATA))
        assert asked == "POST /v2/models/m/infer one"
        assert step(call, respond(*STALE)) == "GET /v2/models/m None"
        two = {"parameters": {**METADATA["parameters"], "kjt.schema": "two"}}
        assert step(call, respond(200, two)) == "POST /v2/models/m/infer two"
        with pytest.raises(ClientError, match=r"kjt\.schema"):
            call.send(respond(*STALE))
        made._schemas.clear()
        made._schemas["/v2/models/m"] = calls.Schema.of(METADATA) or False


def test_features_that_came_later_are_looked_for_in_new_metadata() -> None:
    """Where the compact form is the only way; and only once, so that what is wrong does not cost a request
    each time."""
    made, metadata = Calls(), respond(200, METADATA)
    call = made.lookup("m", {"a": Jagged([1], [1])}, None, None, True)
    assert [step(call, None), step(call, metadata)] == [
        "GET /v2/models/m None",
        "POST /v2/models/m/infer one",
    ]
    call = made.lookup("m", {"b": Jagged([1], [1])}, None, None, True)
    assert step(call, None) == "GET /v2/models/m None"
    with pytest.raises(FeatureError, match="the model has no feature 'b'"):
        call.send(metadata)


def test_a_server_that_does_not_know_the_compact_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The named form is taken, and the metadata is read once; who insists is told."""
    monkeypatch.setattr(calls, "COMPACT_FEATURES", 1)
    made, features = Calls(), {"a": Jagged([1], [1])}
    call = made.lookup("m", features, None, None, None)
    assert step(call, None) == "GET /v2/models/m None"
    assert step(call, respond(200, {"parameters": {}})) == "POST /v2/models/m/infer None"
    assert step(made.lookup("m", features, None, None, None), None) == "POST /v2/models/m/infer None"
    call = made.lookup("m", features, None, None, True)
    assert step(call, None) == "GET /v2/models/m None"
    with pytest.raises(FeatureError, match="the server does not know it"):
        call.send(respond(200, {"parameters": {}}))


@pytest.mark.thorough
def test_a_version_with_other_dims(start: Callable[..., Server], root: Path, tmp_path: Path) -> None:
    """Vectors are cut by the dims of the version that answers, and no call fails when they change."""
    features = {"user": Jagged([1, 2, 3], [2, 1]), "clicked": Jagged([4, 5], [1, 1])}
    server = start("--workers", 2)
    with Client(server.url) as client, Client(server.url) as other:
        assert client.lookup("demo", features, compact=True)["user"].shape == (2, 64)
        publish_demo(
            root, tmp_path, {"user": rows_of(1000, 16), "item": rows_of(300, 24), "word": rows_of(50, 16)}
        )

        def is_new() -> bool:
            # Workers take the new version one by one. Metadata and lookups may come from different ones,
            # which is refused.
            try:
                found = client.lookup("demo", features, compact=True)
            except ClientError as error:
                assert "kjt.schema" in error.message
                return False
            widths = tuple(found[n].shape[1] for n in features)
            assert widths in ((64, 32), (16, 24))
            if widths == (64, 32):
                return False
            named = other.lookup("demo", features, compact=False)
            if named["user"].shape[1] == 64:
                return False  # its worker has the old version still
            same(found, named)
            return True

        until(lambda: all(is_new() for _ in range(20)), what="the new version to be taken by all workers")
