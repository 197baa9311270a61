"""A residence that one file adds (tests/fixtures/slow_rows), with rows from a Python function that takes a
while: a server on the CPU, an engine process and a module read through it, and nothing else changed."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import tables
from servers import publish_demo, start_server
from support import end, rows_of, until

from tableside.loader.deltas.apply import ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.retention import Retention
from tableside.loader.versions.states import attach_state, state_of
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.quant.gpu.residence.registry import KINDS, residence
from tableside.serving.client import Client, ClientError

PROGRAM = Path(__file__).parents[2] / "fixtures/slow_rows/slow_rows.py"
REQUEST = {"user": [[1, 2, 2], []], "clicked": [[5], [7, 299]], "liked": [[0], [1, 2]], "text": [[3, 4], [5]]}
OPTIONS = pytest.mark.parametrize(
    "options", [(), ("--devices", tables.serve_device(), "--gpu-from-ids", 0)], ids=["cpu", "engine"]
)
MODULE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import slow_rows, torch
from tableside.torch import EmbeddingBags
given = {name: [torch.tensor(part) for part in parts] for name, parts in json.loads(sys.argv[3]).items()}
module = EmbeddingBags("demo", list(given), root=sys.argv[2], placement="slow")
print(json.dumps({name: vectors.tolist() for name, vectors in module(given).items()}))
"""


def wanted(root: Path) -> dict[str, np.ndarray]:
    """What the rows in memory give."""
    model, found = Model(root, "demo"), {}
    segment = attach_state(model, state_of(model.record()))
    for f in segment.header.features:
        ids = np.array([i for bag in REQUEST[f.name] for i in bag], np.int64)
        pooling, lengths = Pooling.parse(f.pooling), np.array([len(b) for b in REQUEST[f.name]], np.int32)
        bags = None if pooling is Pooling.NONE else lengths
        found[f.name] = choose().lookup(
            segment.tables[f.table], ids, bags, pooling=pooling, half=f.output == "fp16"
        )
    return found


def change(root: Path) -> None:
    changes = [TableChanges("user", np.array([2, 3]), np.full((2, 64), 7.0, np.float32))]
    apply(Model(root, "demo"), ChangeBatch(changes), ApplySettings(keep=Retention(2)))


def publish_rows(root: Path, folder: Path, **missing: str) -> np.ndarray:
    """Publishes model "m", with a table and a feature by each name; returns the rows of each. missing: what
    ids without a row get."""
    values = rows_of(10, 8)
    np.savez(folder / "c.npz", v=values)
    raw = {
        "name": "m",
        "checkpoint": "c.npz",
        "tables": {n: {"key": "v", "row_format": "fp32", "missing": how} for n, how in missing.items()},
        "features": {name: {"table": name, "pooling": "none"} for name in missing},
    }
    load(parse_model(raw, folder), root)
    return values


@pytest.mark.drawn(0.25)
@OPTIONS
def test_a_server_reads_through_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...]
) -> None:
    """Also changed rows, and an id that is wrong."""
    log = tmp_path / "rows"
    monkeypatch.setenv("SLOW_ROWS", str(log))
    publish_demo(root, tmp_path)
    server = start_server(root, "--placement", "slow", *options, program=(PROGRAM,))
    try:
        with Client(server.url, retries=0) as client:
            told = server.get("/v1/models").json()["models"][0]["tables"]
            assert {table["placement"] for table in told} == {"slow"}
            assert read_by(client, root, log) == [2, 3, 6]  # each row once a table: of user, text and item
            change(root)
            until(lambda: client.lookup("demo", {"user": [[2]]})["user"][0, 0] == 7)
            assert read_by(client, root, log) == [1, 3, 6]  # a changed row lies in memory
            with pytest.raises(ClientError, match=r"feature 'clicked': id 300 at position 1 is outside"):
                client.lookup("demo", {"user": [[1]], "clicked": [[3, 300]]})
    finally:
        assert end(server.process) == 0


@pytest.mark.thorough
@OPTIONS
def test_an_answer_says_how_many_rows_came_late(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...]
) -> None:
    """They are the default row, and not missing ids; a table that has none refuses the request."""
    monkeypatch.setenv("SLOW_ROWS", str(tmp_path / "rows"))
    monkeypatch.setenv("LATE_ROW", "3")
    values = publish_rows(root, tmp_path, means="mean", strict="error")
    server = start_server(root, "--placement", "slow", *options, program=(PROGRAM,), models=("m",))
    try:
        with Client(server.url, retries=0) as client:
            found, masks = client.lookup("m", {"means": [[3, 99, 1, 3]]}, found=True)
            mean = choose().lookup(
                Model(root, "m").attach().tables["means"], np.array([99]), pooling=Pooling.NONE
            )
            expected = np.stack([mean[0], mean[0], values[1], mean[0]])
            np.testing.assert_array_equal(found["means"].reshape(4, 8), expected)
            assert masks["means"].tolist() == [False, False, True, False]
            assert client.answered_by() == (1, 0) and client.late_rows() == {"means": 2}
            client.lookup("m", {"means": [[1]], "strict": [[2]]})
            assert client.late_rows() == {}
            with pytest.raises(ClientError, match="of 1 rows to fetch 1 came too late") as e:
                client.lookup("m", {"strict": [[3]]})
            assert e.value.status == 503
        asked = {"model": "m", "features": {"means": [[3, 1]]}}
        answer = httpx.post(f"{server.url}/v1/lookup", json=asked).json()
        assert answer["degraded"] == {"means": 1}
        counts = server.get("/metrics").text
        for reason, count in (("missing", 1), ("late", 3)):
            of = f'model="m",reason="{reason}",table="means"'
            assert f"tableside_ids_without_row_total{{{of}}} {count}.0" in counts
    finally:
        assert end(server.process) == 0


@pytest.mark.drawn(0.25)
@OPTIONS
def test_a_request_says_how_long_it_waits_for_rows(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[object, ...]
) -> None:
    """Small and large requests, of each protocol."""
    monkeypatch.setenv("SLOW_ROWS", str(tmp_path / "rows"))
    monkeypatch.setenv("DELAY_S", "0.2")
    values = publish_rows(root, tmp_path, t="zero")
    server = start_server(root, "--placement", "slow", *options, program=(PROGRAM,), models=("m",))
    try:
        for ids in ([1, 2, 2], [*range(10)] * 500):
            for timeout, is_late in (("60000", False), ("5", True), ("0.5", True), ("0", True)):
                expected = np.zeros((len(ids), 8), np.float32) if is_late else values[ids]
                headers = {"Tableside-Disk-Timeout-Ms": timeout}
                with Client(server.url, retries=0, disk_timeout_s=float(timeout) / 1000) as client:
                    found, masks = client.lookup("m", {"t": [ids]}, found=True)
                    np.testing.assert_array_equal(found["t"].reshape(expected.shape), expected)
                    assert client.late_rows() == ({"t": len(ids)} if is_late else {})
                    late = {"t": [*range(len(ids))]} if is_late else {}
                    assert {name: at.tolist() for name, at in client.late_ids().items()} == late
                    assert set(masks["t"].ravel().tolist()) == {not is_late}
                inputs = [{"name": "t", "shape": [1, len(ids)], "datatype": "INT64", "data": ids}]
                within = {"parameters": {"timeout": int(1000 * float(timeout))}}
                answer = httpx.post(
                    f"{server.url}/v2/models/m/infer", json={"inputs": inputs} | within
                ).json()
                is_bounded = is_late and timeout != "0"  # as Triton's clients mean it
                said = {"degraded": len(ids), "degraded.t": len(ids)} if is_bounded else None
                assert answer.get("parameters") == said
                asked = {"model": "m", "features": {"t": [ids]}, "found": True}
                answer = httpx.post(f"{server.url}/v1/lookup", json=asked, headers=headers).json()
                assert answer.get("degraded") == ({"t": len(ids)} if is_late else None)
                assert answer["found"] == {"t": [[None if is_late else True] * len(ids)]}
                vectors = np.array(answer["vectors"]["t"], np.float32).reshape(expected.shape)
                np.testing.assert_array_equal(vectors, expected)
        infer = {"inputs": [{"name": "t", "shape": [1, 1], "datatype": "INT64", "data": [1]}]}
        for url, body in (("/v1/lookup", asked), ("/v2/models/m/infer", infer)):
            answer = httpx.post(
                f"{server.url}{url}", json=body, headers={"tableside-disk-timeout-ms": "soon"}
            )
            assert answer.status_code == 400
            assert "Tableside-Disk-Timeout-Ms is 'soon'; expected milliseconds, as 5 or 0.5" in answer.text
        for wrong in ("soon", -1, 1.5, True, 2**63):
            answer = httpx.post(
                f"{server.url}/v2/models/m/infer", json={**infer, "parameters": {"timeout": wrong}}
            )
            assert answer.status_code == 400 and "expected microseconds, a number from 0" in answer.text
    finally:
        assert end(server.process) == 0


def read_by(client: Client, root: Path, log: Path) -> list[int]:
    """Looks up and checks; returns how many rows each call of the function was asked for."""
    before = log.read_text().count("\n")
    found = client.lookup("demo", REQUEST)
    for name, vectors in wanted(root).items():
        np.testing.assert_array_equal(found[name].reshape(vectors.shape), vectors)
    return sorted(int(line.split()[1]) for line in log.read_text().splitlines()[before:])


@pytest.mark.thorough
def test_a_module_reads_through_it(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "rows"
    monkeypatch.setenv("SLOW_ROWS", str(log))
    publish_demo(root, tmp_path)
    given = {"user": [[1, 2, 2], [0, 3]], "clicked": [[5, 7, 299], [0, 1]]}
    run = [sys.executable, "-c", MODULE, str(PROGRAM.parent), str(root), json.dumps(given)]
    found = json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)
    assert log.read_text().count("\n") >= 2
    for name in given:
        np.testing.assert_array_equal(np.array(found[name], np.float32), wanted(root)[name])


def test_kinds_are_what_the_registry_says() -> None:
    """What it knows without an import of them."""
    for name, kind in KINDS.items():
        assert residence(name).is_on_device is not kind.by_cpu
