"""Scores: over JSON, the binary protocol, the client and the command, with versions that are swapped,
beside lookups."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tables
import torch
from scorers import Ctr, exported
from servers import Server, start_server
from support import end, rows_of, run_tableside, until

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.segment.memory import pss_bytes
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.client import AsyncClient, Client, ClientError
from tableside.serving.model.scorers import open_scorer

pytestmark = pytest.mark.gpu

TABLES = {"user": rows_of(200, 8), "item": rows_of(100, 4, 1), "near": rows_of(150, 8, 2)}
FEATURES = {
    "user": {"table": "user"},
    "clicked": {"table": "item", "pooling": "mean", "output": "fp16"},
    "near": {"table": "near"},
    "words": {"table": "item", "pooling": "none"},
}
IDS = {"user": [[1, 2], [3], []], "clicked": [[4, 5], [], [99]]}
CONTEXT = [[0.5, 1.0, -1.0], [0.0, 2.0, 0.25], [1.0, 1.0, 1.0]]


def publish(
    root: Path, folder: Path, scorer: Any, name: str = "ctr", module: torch.nn.Module | None = None
) -> None:
    np.savez(folder / "c.npz", **TABLES)
    (folder / "scorer.pt2").write_bytes(exported(module or Ctr(8, 4, 3), user=8, clicked=4, context=3))
    raw = {
        "name": name,
        "checkpoint": "c.npz",
        "tables": {t: {"key": t} for t in TABLES},
        "features": FEATURES,
        **({"scorer": scorer} if scorer else {}),
    }
    load(parse_model(raw, folder), root)


def vectors(root: Path, name: str, feature: str, bags: list[list[int]]) -> np.ndarray:
    """A feature's pooled vectors, as the scorer gets them."""
    table = Model(root, name).attach().tables[FEATURES[feature]["table"]]
    ids, lengths = (
        np.array([i for b in bags for i in b], np.int64),
        np.array([len(b) for b in bags], np.int32),
    )
    half = FEATURES[feature].get("output") == "fp16"
    found = choose().lookup(
        table, ids, lengths, pooling=Pooling.parse(FEATURES[feature].get("pooling", "sum")), half=half
    )
    return found.astype(np.float32)


def expected(root: Path, module: torch.nn.Module | None = None) -> np.ndarray:
    inputs = [vectors(root, "ctr", f, IDS[f]) for f in ("user", "clicked")] + [np.array(CONTEXT, np.float32)]
    with torch.inference_mode():
        found: np.ndarray = (module or Ctr(8, 4, 3)).eval()(*map(torch.from_numpy, inputs)).numpy()
    return found.squeeze(1) if found.shape[1] == 1 else found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for three models: a program, two towers, and none."""
    import shutil
    import uuid

    root, folder = (
        Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}",
        tmp_path_factory.mktemp("score"),
    )
    publish(root, folder, {"program": "scorer.pt2"})
    publish(root, folder, {"kind": "dot", "features": ["user", "near"]}, "dot")
    publish(root, folder, {"kind": "cosine", "features": ["user", "near"]}, "cosine")
    publish(root, folder, None, "plain")
    server = start_server(root, "--workers", 2, models=("ctr", "dot", "cosine", "plain"))
    yield server
    try:
        assert end(server.process) == 0
    finally:
        shutil.rmtree(root)


@pytest.mark.thorough
def test_workers_share_what_opening_a_scorer_imports(served: Server) -> None:
    """That is 100 MB, and each has less than 60 MB of its own."""
    private = [pss_bytes(worker)["private"] for worker in served.workers()]
    assert len(private) == 2
    assert max(private) < 60e6, private


def ask(server: Server, **change: Any) -> httpx.Response:
    body = {"model": "ctr", "features": IDS, "dense": {"context": CONTEXT}, **change}
    return httpx.post(f"{server.url}/v1/score", json=body, timeout=300)


@pytest.mark.drawn(0.25)
def test_json_scores(served: Server) -> None:
    answer = ask(served).json()
    assert (answer["model"], answer["version"]) == ("ctr", 1)
    np.testing.assert_allclose(answer["scores"], expected(served.root), rtol=1e-5)


async def _async_score(url: str) -> Any:
    async with AsyncClient(url) as client:
        return await client.score("ctr", IDS, {"context": CONTEXT})


@pytest.mark.drawn(0.5)
def test_the_clients_and_the_command(served: Server) -> None:
    import asyncio

    wanted = expected(served.root)
    with Client(served.url) as client:
        np.testing.assert_allclose(client.score("ctr", IDS, {"context": CONTEXT}), wanted, rtol=1e-5)
        as_tensors = client.score("ctr", IDS, {"context": torch.tensor(CONTEXT)})
        assert isinstance(as_tensors, torch.Tensor)
    np.testing.assert_allclose(asyncio.run(_async_score(served.url)), wanted, rtol=1e-5)
    dense = "context=" + ";".join(",".join(map(str, row)) for row in CONTEXT)
    result = run_tableside(
        "score", "ctr", "user=1,2;3;", "clicked=4,5;;99", "--dense", dense, "--url", served.url
    )
    assert result.returncode == 0, result.stderr
    np.testing.assert_allclose(
        [float(line.split()[1]) for line in result.stdout.splitlines()], wanted, atol=1e-6
    )
    as_json = run_tableside(
        *("score", "ctr", "user=1,2;3;", "clicked=4,5;;99"), "--dense", dense, "--url", served.url, "--json"
    )
    np.testing.assert_allclose(json.loads(as_json.stdout)["scores"], wanted, rtol=1e-5)


@pytest.mark.drawn(0.25)
def test_two_towers(served: Server) -> None:
    """An empty bag is a vector of zeros, whose cosine is 0."""
    features = {"user": IDS["user"], "near": [[7], [8, 9], [10]]}
    a, b = (vectors(served.root, "dot", f, features[f]) for f in ("user", "near"))
    dot = (a * b).sum(1)
    with Client(served.url) as client:
        np.testing.assert_allclose(client.score("dot", features), dot, rtol=1e-4, atol=1e-5)
        lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        cosine = client.score("cosine", features)
        np.testing.assert_allclose(cosine[:2], (dot / np.maximum(lengths, 1e-30))[:2], rtol=1e-4, atol=1e-5)
        assert cosine[2] == 0


def infer(
    server: Server, model: str, inputs: list[dict[str, Any]], outputs: list[str] | None = None
) -> httpx.Response:
    body: dict[str, Any] = {"inputs": inputs}
    if outputs is not None:
        body["outputs"] = [{"name": o} for o in outputs]
    return httpx.post(f"{server.url}/v2/models/{model}/infer", json=body, timeout=300)


USER = {"name": "user", "datatype": "INT64", "shape": [2, 1], "data": [[1], [2]]}
CLICKED = {"name": "clicked", "datatype": "INT64", "shape": [2, 1], "data": [[4], [5]]}
DENSE = {"name": "context", "datatype": "FP32", "shape": [2, 3], "data": [[0.5, 1, 1], [0, 0, 0]]}


def test_what_is_asked_for_is_computed(served: Server) -> None:
    """Scores where they are named, or where nothing is named and all that they need is there; the rest
    stays lookups."""

    def names(*arguments: Any) -> list[str]:
        response = infer(served, "ctr", *arguments)
        assert response.status_code == 200, response.text
        return [o["name"] for o in response.json()["outputs"]]

    assert names([USER, CLICKED, DENSE]) == ["user", "clicked", "score"]
    assert names([DENSE, CLICKED, USER], ["score"]) == ["score"]
    assert names([USER, CLICKED, DENSE], ["clicked", "score"]) == ["clicked", "score"]
    assert names([USER, CLICKED, DENSE], ["clicked"]) == ["clicked"]
    assert names([USER]) == ["user"]
    assert names([USER, DENSE]) == ["user"]


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ([USER, CLICKED], ["score"], "the score needs user, clicked, context; the request lacks context"),
        ([USER, DENSE], ["score"], "the request lacks clicked"),
        ([DENSE], None, "no feature is asked for; model 'ctr' has: user, clicked"),
        ([DENSE], ["score"], "no feature is asked for"),
        (
            [USER, CLICKED, {**DENSE, "shape": [3, 2]}],
            ["score"],
            r"input 'context': shape is [3, 2]; expected [batch, 3]",
        ),
        ([USER, CLICKED, {**DENSE, "shape": [6]}], ["score"], r"shape is [6]; expected [batch, 3]"),
        ([USER, CLICKED, {**DENSE, "datatype": "FP16"}], ["score"], "datatype is 'FP16'; expected FP32"),
        ([USER, CLICKED, DENSE, DENSE], ["score"], "input 'context' came twice"),
        (
            [USER, {**CLICKED, "shape": [1, 1], "data": [[4]]}, DENSE],
            ["score"],
            "as many bags of each feature as rows of each dense tensor; found user 2, clicked 1, context 2",
        ),
    ],
)
def test_requests_that_cannot_be_scored(served: Server, inputs: Any, outputs: Any, message: str) -> None:
    response = infer(served, "ctr", inputs, outputs)
    assert response.status_code == 400
    assert message in response.json()["error"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "plain"}, "dense tensor 'context' is unknown; the scorer has: none"),
        (
            {"model": "plain", "dense": {}},
            "model 'plain' has no scorer; publish one with [scorer] in model.toml",
        ),
        ({"dense": {}}, "the request lacks context"),
        ({"dense": {"context": [[1, 2]]}}, "expected a list of rows of 3 numbers each"),
        ({"dense": {"context": [["1", 2, 3]] * 3}}, "value '1' at position 0 is not a number"),
        ({"dense": []}, "dense: expected an object"),
        ({"features": {**IDS, "user": [[200], [1], [1]]}}, "feature 'user': id 200 at position 0"),
        ({"score": 1}, "field 'score' is unknown; expected model, version, features, dense"),
    ],
)
def test_json_requests_that_cannot_be_scored(served: Server, change: dict[str, Any], message: str) -> None:
    response = ask(served, **change)
    assert response.status_code == 400
    assert message in response.json()["error"]


def test_metadata_and_metrics_name_the_scorer(served: Server) -> None:
    metadata = served.get("/v2/models/ctr").json()
    assert {"name": "context", "datatype": "FP32", "shape": [-1, 3]} in metadata["inputs"]
    assert metadata["outputs"][-1] == {"name": "score", "datatype": "FP32", "shape": [-1]}
    config = served.get("/v2/models/ctr/config").json()
    assert config["output"][-1] == {"name": "score", "data_type": "TYPE_FP32", "dims": [-1]}
    described = {m["name"]: m["scorer"] for m in served.get("/v1/models").json()["models"]}
    assert described["plain"] is None and described["dot"]["kind"] == "dot"
    ask(served)
    assert 'tableside_score_seconds_count{model="ctr"}' in served.get("/metrics").text


def test_large_batches_of_scores(served: Server) -> None:
    """More rows than are scored on the event loop."""
    rng = np.random.default_rng(0)
    features = {"user": rng.integers(0, 200, (3000, 2)), "clicked": rng.integers(0, 100, (3000, 1))}
    context = rng.standard_normal((3000, 3)).astype(np.float32)
    with Client(served.url) as client:
        scores = client.score("ctr", features, {"context": context})
        one = client.score("ctr", {f: ids[2999:] for f, ids in features.items()}, {"context": context[2999:]})
    assert scores.shape == (3000,)
    np.testing.assert_allclose(scores[2999:], one, rtol=1e-5)


class Centred(Ctr):
    """Scores around their mean over the batch."""

    def forward(self, user: torch.Tensor, clicked: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        scores = super().forward(user, clicked, context)
        return scores - scores.mean(0)


@pytest.mark.parametrize(("module", "is_row_wise"), [(Ctr, True), (Centred, False)])
@pytest.mark.drawn(1)
def test_scorers_that_look_at_other_rows_are_known(
    root: Path, tmp_path: Path, module: type[Ctr], is_row_wise: bool
) -> None:
    """They are not asked about several requests at once."""
    publish(root, tmp_path, {"program": "scorer.pt2"}, module=module(8, 4, 3))
    scorer = open_scorer(Model(root, "ctr").attach())
    assert scorer is not None and scorer.is_row_wise is is_row_wise


@pytest.mark.thorough
def test_scorer_and_tables_are_swapped_as_one(
    start: Callable[..., Server], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of another scorer, with several scores a row, is taken; one whose scorer does not run is
    not."""
    publish(root, tmp_path, {"program": "scorer.pt2"}, "demo")
    server = start()
    other = Ctr(8, 4, 3, scores=2)
    with Client(server.url) as client:
        assert client.score("demo", IDS, {"context": CONTEXT}).shape == (3,)
        publish(root, tmp_path, {"program": "scorer.pt2"}, "demo", other)
        until(lambda: client.models()[0]["version"] == 2, what="version 2")
        found = client.score("demo", IDS, {"context": CONTEXT})
        inputs = [vectors(root, "demo", f, IDS[f]) for f in ("user", "clicked")] + [
            np.array(CONTEXT, np.float32)
        ]
        np.testing.assert_allclose(
            found, other.eval()(*map(torch.from_numpy, inputs)).detach().numpy(), rtol=1e-5
        )

        class Transposed(Ctr):
            def forward(
                self, user: torch.Tensor, clicked: torch.Tensor, context: torch.Tensor
            ) -> torch.Tensor:
                return super().forward(user, clicked, context).t()

        # Refused where it is published, too; so that is left out, as by who can write to shared memory.
        monkeypatch.setattr("tableside.loader.program.measure.check_shapes", lambda program: None)
        publish(root, tmp_path, {"program": "scorer.pt2"}, "demo", Transposed(8, 4, 3))
        until(
            lambda: 'tableside_errors_total{kind="swap",model="demo"} 1.0' in client.metrics(),
            what="a refusal",
        )
        assert client.models()[0]["version"] == 2
        with pytest.raises(ClientError, match="404"):
            client.score("demo", IDS, {"context": CONTEXT}, version=9)


@pytest.mark.thorough
def test_scores_of_a_gpu_worker(start: Callable[..., Server], root: Path, tmp_path: Path) -> None:
    """The vectors come from the fused kernel, the scorer runs on the worker's device."""
    publish(root, tmp_path, {"program": "scorer.pt2"}, "ctr")
    publish(root, tmp_path, {"program": "scorer.pt2"}, "demo")
    server = start("--devices", tables.serve_device(), models=("ctr",))
    with Client(server.url) as client:
        np.testing.assert_allclose(client.score("ctr", IDS, {"context": CONTEXT}), expected(root), rtol=1e-3)
        assert set(client.lookup("ctr", IDS)) == {"user", "clicked"}
