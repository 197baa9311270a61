"""Ids that a table lacks, over every door: vectors, found masks, refusals and counts, held against a
dictionary."""

import asyncio
import gzip
import json
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from raw_demo import FEATURES, TABLES, Request, draw, expected, publish_raw, unfound
from servers import Server, start_server
from support import end, run_tableside

from benchmarks import wire
from tableside.loader.model.specs import FeatureSpec
from tableside.loader.segment.header import ScorerInput, StoredScorer
from tableside.serving.client import AsyncClient, Client, ClientError, LookedUp

Answer = tuple[dict[str, Any], dict[str, Any]]
PAIR = (FeatureSpec("old", "old", "sum", "fp32"), FeatureSpec("chunked", "chunked", "sum", "fp32"))


@pytest.fixture(scope="module", params=["native", "fbgemm"])
def served(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with one worker, for `raw` and for `scored`, the dot product of two of its tables.

    Of each backend of the CPU.
    """
    root = Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}"
    inputs = tuple(ScorerInput(f.name, f.name, 16) for f in PAIR)
    try:
        publish_raw(root, "raw", TABLES, FEATURES)
        publish_raw(
            root, "scored", {f.table: TABLES[f.table] for f in PAIR}, PAIR, (StoredScorer("dot", inputs), b"")
        )
        server = start_server(root, "--backend", request.param, models=("raw", "scored"))
        yield server
        assert end(server.process) == 0
    finally:
        shutil.rmtree(root)


def named(url: str, request: Request) -> LookedUp[dict[str, Any], Any]:
    with Client(url) as client:
        return client.lookup("raw", request, compact=False, found=True)


def compact(url: str, request: Request) -> LookedUp[dict[str, Any], Any]:
    with Client(url) as client:
        return client.lookup("raw", request, compact=True, found=True)


def from_async(url: str, request: Request, is_compact: bool) -> LookedUp[dict[str, Any], Any]:
    async def ask() -> LookedUp[dict[str, Any], Any]:
        async with AsyncClient(url) as client:
            return await client.lookup("raw", request, compact=is_compact, found=True)

    return asyncio.run(ask())


def keyed(url: str, request: Request) -> Answer:
    """TorchRec's KeyedJaggedTensor."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchrec = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="make dev installs TorchRec")
    lengths = [len(bag) for bags in request.values() for bag in bags]
    values = torch.tensor([i for bags in request.values() for i in flat(bags)], dtype=torch.int64)
    given = torchrec.KeyedJaggedTensor.from_lengths_sync(
        list(request), values, torch.tensor(lengths, dtype=torch.int32)
    )
    with Client(url) as client:
        found = client.lookup("raw", given, found=True)
    vectors = dict(found.vectors.pooled.to_dict()) | {
        n: j.values() for n, j in found.vectors.sequences.items()
    }
    return {n: v.numpy() for n, v in vectors.items()}, {n: m.numpy() for n, m in found.found.items()}


def infer(url: str, request: Request, binary: bool = False, compressed: bool = False) -> Answer:
    """The protocol's own JSON, with the tensors in it or, of the response, behind it. compressed: by way
    of ASGI."""
    inputs = []
    for name, bags in request.items():
        values, lengths = flat(bags), [len(bag) for bag in bags]
        inputs += [
            {"name": f"{name}.values", "datatype": "INT64", "shape": [len(values)], "data": values},
            {"name": f"{name}.lengths", "datatype": "INT32", "shape": [len(lengths)], "data": lengths},
        ]
    outputs = [
        {"name": n + part, "parameters": {"binary_data": binary}} for n in request for part in ("", ".found")
    ]
    body = json.dumps({"inputs": inputs, "outputs": outputs}).encode()
    content, headers = (gzip.compress(body), {"content-encoding": "gzip"}) if compressed else (body, {})
    response = httpx.post(f"{url}/v2/models/raw/infer", content=content, headers=headers)
    assert response.status_code == 200, response.text
    if binary:
        arrays = wire.decode(response.headers["Inference-Header-Content-Length"], response.content)[1]
    else:
        told = response.json()["outputs"]
        assert all(type(x) is bool for o in told if o["datatype"] == "BOOL" for x in o["data"])
        dtypes = {"FP32": np.float32, "BOOL": np.bool_}
        arrays = {o["name"]: np.array(o["data"], dtypes[o["datatype"]]).reshape(o["shape"]) for o in told}
    return {n: arrays[n] for n in request}, {n: arrays[f"{n}.found"] for n in request}


def flat(bags: list[list[Any]]) -> list[Any]:
    return [x for bag in bags for x in bag]


def v1(url: str, request: Request, is_jagged: bool) -> Answer:
    given: dict[str, Any] = dict(request)
    if is_jagged:
        given = {n: {"values": flat(bags), "lengths": [len(b) for b in bags]} for n, bags in request.items()}
    response = httpx.post(f"{url}/v1/lookup", json={"model": "raw", "features": given, "found": True})
    assert response.status_code == 200, response.text
    vectors, found = response.json()["vectors"], response.json()["found"]
    if not is_jagged:
        assert {n: list(map(len, f)) for n, f in found.items()} == {
            n: list(map(len, bags)) for n, bags in request.items()
        }
        found = {n: flat(f) for n, f in found.items()}
    dims = {f.name: TABLES[f.table].dim for f in FEATURES}
    return {n: np.array(v, np.float32).reshape(-1, dims[n]) for n, v in vectors.items()}, found


DOORS: dict[str, Callable[[str, Request], Answer]] = {
    "client, named": named,
    "client, compact": compact,
    "async client, named": lambda url, request: from_async(url, request, False),
    "async client, compact": lambda url, request: from_async(url, request, True),
    "TorchRec": keyed,
    "V2, JSON": infer,
    "V2, JSON in and bytes out": lambda url, request: infer(url, request, binary=True),
    "V2, compressed": lambda url, request: infer(url, request, compressed=True),
    "/v1, bags": lambda url, request: v1(url, request, False),
    "/v1, values and lengths": lambda url, request: v1(url, request, True),
}


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("door", DOORS)
def test_vectors_and_masks_are_the_dictionarys(served: Server, door: str) -> None:
    """Of raw tables with ids in the rows' padding and beside them, by hash and in ranges, with default
    rows of every kind, backfilled and empty ones, and of dense tables; the extremes and repeated ids among
    the ids. Whole numbers: bit for bit."""
    for seed in range(4):
        request = draw(seed, bags=1 + seed)
        vectors, masks = DOORS[door](served.url, request)
        wanted, has = expected(request)
        assert list(vectors) == list(masks) == list(request) or door == "TorchRec"
        for name in request:
            np.testing.assert_array_equal(vectors[name], wanted[name], f"{name}, seed {seed}")
            assert np.asarray(masks[name]).tolist() == has[name], f"{name}, seed {seed}"


@pytest.mark.parametrize("way", ["named", "compact", "v1"])
@pytest.mark.drawn(1)
def test_without_masks_the_answer_is_a_dict_as_ever(served: Server, way: str) -> None:
    """Masks are never sent unasked, by a template or without one; missing ids get the default row all the
    same."""
    with Client(served.url) as client:
        for seed in range(4):
            request = draw(seed)
            wanted = expected(request)[0]
            if way == "v1":
                found = httpx.post(
                    f"{served.url}/v1/lookup", json={"model": "raw", "features": request}
                ).json()["vectors"]
                found = {n: np.array(v, np.float32).reshape(wanted[n].shape) for n, v in found.items()}
            else:
                found = client.lookup("raw", request, compact=way == "compact")
            assert type(found) is dict and list(found) == list(request)
            for name, vectors in wanted.items():
                np.testing.assert_array_equal(found[name], vectors)


@pytest.mark.parametrize("is_compact", [False, True])
def test_masks_have_the_shape_of_the_ids(served: Server, is_compact: bool) -> None:
    """[bags, ids a bag] where the ids came so, else [ids]; torch tensors where the ids are; of the wanted
    outputs alone."""
    import torch

    there, lacking = int(TABLES["user"].ids[0]), 12345
    array = np.array([[there, lacking, there], [lacking, lacking, there]])
    with Client(served.url) as client:
        answer = client.lookup(
            "raw", {"user": array, "item": [[1], []]}, compact=is_compact, found=True, outputs=["user"]
        )
        assert list(answer.vectors) == list(answer.found) == ["user"]
        assert (
            answer.found["user"].dtype == np.bool_
            and answer.found["user"].tolist() == (array == there).tolist()
        )
        vectors, found = client.lookup(
            "raw", {"user": torch.from_numpy(array)}, compact=is_compact, found=True
        )
        assert torch.equal(found["user"], torch.from_numpy(array == there)) and vectors["user"].shape == (
            2,
            64,
        )
        empty = client.lookup("raw", {"user": np.zeros((2, 0), np.int64)}, compact=is_compact, found=True)
        assert empty.found["user"].shape == (2, 0) and not empty.vectors["user"].any()


@pytest.mark.drawn(1)
def test_only_a_mask_may_be_asked_for(served: Server) -> None:
    """And a mask whose input did not come, or that comes twice, is refused by its name."""
    told: dict[str, Any] = {
        "inputs": [{"name": "user", "datatype": "INT64", "shape": [1, 2], "data": [0, 12345]}]
    }
    url = f"{served.url}/v2/models/raw/infer"
    response = httpx.post(url, json={**told, "outputs": [{"name": "user.found"}]}).json()
    assert response["outputs"] == [
        {"name": "user.found", "datatype": "BOOL", "shape": [2], "data": [0 in TABLES["user"].ids, False]}
    ]
    for names, message in (
        (["item.found"], "output 'item.found' was asked for without its input; send item or item.values"),
        (["user.found", "user.found"], "output 'user.found' is asked for twice"),
        (["kjt.found"], "output 'kjt.found' is unknown; this request's inputs give: user, user.found"),
        (["user.found", "usr"], "output 'usr' is unknown; this request's inputs give: user, user.found"),
        (["nothing.found"], "output 'nothing.found' is unknown"),
    ):
        refused = httpx.post(url, json={**told, "outputs": [{"name": n} for n in names]})
        assert refused.status_code == 400 and message in refused.json()["error"]


@pytest.mark.drawn(1)
def test_v1_takes_true_or_false(served: Server) -> None:
    """Without `found` or with false the answer has no masks; anything else is refused, and so is a mask
    beside scores."""
    request = {"model": "raw", "features": {"user": [[0, 12345]]}}
    url = f"{served.url}/v1/lookup"
    for more in ({}, {"found": False}):
        assert set(httpx.post(url, json={**request, **more}).json()) == {
            "model",
            "version",
            "sequence",
            "vectors",
        }
    refused = httpx.post(url, json={**request, "found": "yes"})
    assert refused.status_code == 400 and refused.json()["error"] == "found is 'yes'; expected true or false"
    scored = {"model": "scored", "features": {"old": [[1]], "chunked": [[1]]}, "found": True}
    refused = httpx.post(f"{served.url}/v1/score", json=scored)
    assert refused.status_code == 400 and "field 'found' is unknown" in refused.json()["error"]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.drawn(8)
def test_an_id_that_is_refused_is_named(served: Server, door: str) -> None:
    """400 with feature, position, id and remedy, and nothing is looked up; a mask does not help."""
    there = TABLES["strict"].ids.tolist()
    request = {"user": [[1, 2], [3]], "strict": [[there[0], there[1]], [there[2], 4242, 4243]]}
    message = (
        "feature 'strict': id 4242 at position 3 is not among the table's 100 ids; send ids that it "
        "has, or publish"
    )
    with pytest.raises((ClientError, AssertionError), match=message):
        DOORS[door](served.url, request)


def counted(url: str, model: str = "raw") -> dict[tuple[str, str], float]:
    with Client(url) as client:
        text = client.metrics()
    samples = [
        s
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if s.labels.get("model") == model
    ]
    return {
        (s.labels["table"], s.labels["reason"]): s.value
        for s in samples
        if s.name == "tableside_ids_without_row_total"
    }


@pytest.mark.drawn(9)
@pytest.mark.parametrize("door", DOORS)
def test_every_id_without_a_row_is_counted(served: Server, door: str) -> None:
    """By table and reason, over every door; ids that have a row are not. A refused request counts its
    first one, and no other."""
    if door == "TorchRec":
        pytest.importorskip("torchrec")
    before = counted(served.url)
    requests = [draw(seed) for seed in (10, 11)]
    for request in requests:
        DOORS[door](served.url, request)
    with pytest.raises((ClientError, AssertionError)):
        DOORS[door](served.url, {"user": [[4242]], "strict": [[4242, 4243]]})
    after = counted(served.url)
    added = {
        key: value - before.get(key, 0.0) for key, value in after.items() if value != before.get(key, 0.0)
    }
    assert added == {**unfound(requests), ("strict", "refused"): 1.0}


@pytest.mark.parametrize("way", ["named", "compact", "v1"])
@pytest.mark.drawn(3)
def test_requests_of_the_short_paths_are_counted(served: Server, way: str) -> None:
    """Those that ask for no masks, by a template that parses no header, or all features at a time, count
    as the others do."""
    before = counted(served.url)
    requests = [draw(seed) for seed in range(20, 26)]
    with Client(served.url) as client:
        for request in requests:
            if way == "v1":
                httpx.post(
                    f"{served.url}/v1/lookup", json={"model": "raw", "features": request}
                ).raise_for_status()
            else:
                client.lookup("raw", request, compact=way == "compact")
    after = counted(served.url)
    assert {k: v - before.get(k, 0.0) for k, v in after.items() if v != before.get(k, 0.0)} == unfound(
        requests
    )


def test_a_gauge_says_how_many_rows_were_backfilled(served: Server) -> None:
    """Of tables whose policy is backfill, and of no other."""
    with Client(served.url) as client:
        text = client.metrics()
    assert 'tableside_backfilled_rows{model="raw",table="old"} 30.0' in text
    assert 'tableside_backfilled_rows{model="raw",table="user"}' not in text


@pytest.mark.parametrize("way", ["v1", "client", "compact"])
@pytest.mark.drawn(1)
def test_scores_of_missing_ids(served: Server, way: str) -> None:
    """A missing id's default row is scored as any other. The products are whole numbers below 2^24: bit
    for bit."""
    for seed in range(3):
        request = draw(seed, PAIR, bags=3)
        request = {n: [bag[:2] for bag in bags] for n, bags in request.items()}
        old, chunked = expected(request, PAIR)[0].values()
        wanted = (old.astype(np.float64) * chunked).sum(1).tolist()
        if way == "v1":
            found = httpx.post(
                f"{served.url}/v1/score", json={"model": "scored", "features": request}
            ).json()["scores"]
        else:
            with Client(served.url) as client:
                found = client.score("scored", request, compact=way == "compact").tolist()
        assert found == wanted
    assert counted(served.url, "scored")


@pytest.mark.thorough
def test_metadata_tells_of_ids(served: Server) -> None:
    """/v1/models and the protocol's metadata say which ids a table has, what becomes of others, and which
    masks there are."""
    with Client(served.url) as client:
        (raw,) = (m for m in client.models() if m["name"] == "raw")
        metadata = client.metadata("raw")
    tables = {t["name"]: t for t in raw["tables"]}
    kept = ("ids", "id_count", "first_id", "missing", "backfilled")
    told = {name: {k: t[k] for k in kept if k in t} for name, t in tables.items()}
    assert told["old"] == {"ids": "raw", "id_count": 100, "missing": "backfill:raw@1", "backfilled": 30}
    assert told["strict"] == {"ids": "raw", "id_count": 100, "missing": "error", "backfilled": 0}
    assert told["word"] == {"ids": "row", "id_count": 40, "first_id": 0, "missing": "zero", "backfilled": 0}
    assert told["plain"] == {"ids": "row", "id_count": 20, "first_id": 0, "missing": "error", "backfilled": 0}
    assert metadata["parameters"]["table_ids"] == told
    masks = [o for o in metadata["outputs"] if o["datatype"] == "BOOL"]
    assert masks == [{"name": f"{f.name}.found", "datatype": "BOOL", "shape": [-1]} for f in FEATURES]
    config = httpx.get(f"{served.url}/v2/models/raw/config").json()
    assert {"name": "user.found", "data_type": "TYPE_BOOL", "dims": [-1]} in config["output"]


@pytest.mark.thorough
def test_top_shows_ids_without_a_row(served: Server) -> None:
    """Of each model, a second."""
    result = run_tableside("top", "--url", served.url, "--once", "--seconds", "0.1")
    assert result.returncode == 0 and "without row/s" in result.stdout
