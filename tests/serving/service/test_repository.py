"""The model repository extension: operators load and unload models in every worker, through an unchanged
tritonclient."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import tables
import tritonclient.http as triton
from servers import TABLES, Server, publish_demo
from support import end, rows_of, run_tableside, until
from tritonclient.utils import InferenceServerException

from tableside.serving.client import Client
from tableside.serving.service.model_list import ModelEntry, ModelList

Start = Callable[..., Server]
TOKEN = "a-token-of-an-operator"
OPERATOR = {"Authorization": f"Bearer {TOKEN}"}
OTHER = {"user": rows_of(200, 64, 9), "item": rows_of(300, 32, 2), "word": rows_of(50, 16, 3)}


@pytest.fixture
def both(start: Start, root: Path, tmp_path: Path) -> Server:
    """A server of `demo` with three workers and a token, and `other` published beside it."""
    publish_demo(root, tmp_path)
    publish_demo(root, tmp_path, OTHER, "other")
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o640)
    return start("--workers", 3, "--admin-token-file", file)


def answers(server: Server, model: str, count: int = 30) -> list[int]:
    """The statuses of lookups over connections of their own, so that every worker is asked."""
    asked = {"model": model, "features": {"user": [[1]]}}
    return [httpx.post(f"{server.url}/v1/lookup", json=asked, timeout=300).status_code for _ in range(count)]


@pytest.mark.thorough
def test_a_model_is_loaded_and_unloaded_in_every_worker(both: Server) -> None:
    """When a call returns all workers have followed: none refuses the model that is loaded, none answers
    the one that is gone."""
    with triton.InferenceServerClient(f"127.0.0.1:{both.port}") as client:
        assert "model_repository" in client.get_server_metadata()["extensions"]
        assert client.get_model_repository_index(headers=OPERATOR) == [
            {"name": "demo", "version": "1", "state": "READY"},
            {"name": "other", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        ]
        assert [m["name"] for m in client.get_model_repository_index()] == [
            "demo"
        ]  # others are an operator's to see
        assert set(answers(both, "other")) == {404}
        client.load_model("other", headers=OPERATOR)
        assert set(answers(both, "other")) == {200} and client.is_model_ready("other")
        client.load_model("other", headers=OPERATOR)  # again does nothing
        ids = np.array([[7]])
        asked = triton.InferInput("user", [1, 1], "INT64")
        asked.set_data_from_numpy(ids)
        np.testing.assert_allclose(
            client.infer("other", [asked]).as_numpy("user")[0], OTHER["user"][7], atol=0.05
        )
        client.unload_model("demo", headers=OPERATOR)
        assert set(answers(both, "demo")) == {404} and set(answers(both, "other")) == {200}
        client.unload_model("other", headers=OPERATOR)
        assert client.is_server_ready() and set(answers(both, "other")) == {404}


@pytest.mark.thorough
def test_workers_that_start_later_serve_what_was_loaded(both: Server) -> None:
    assert httpx.post(f"{both.url}/v2/repository/models/other/load", headers=OPERATOR).status_code == 200
    assert httpx.post(f"{both.url}/v2/repository/models/demo/unload", headers=OPERATOR).status_code == 200
    before = both.workers()
    os.kill(before[0], signal.SIGKILL)
    until(lambda: len(set(both.workers()) - set(before)) == 1, what="the successor")
    both.process.send_signal(signal.SIGHUP)
    until(
        lambda: not set(both.workers()) & set(before) and len(both.workers()) == 3, what="all to be replaced"
    )
    assert set(answers(both, "other")) == {200} and set(answers(both, "demo")) == {404}


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}])
def test_whoever_has_not_the_token_is_refused(both: Server, headers: dict[str, str]) -> None:
    for call in ("models/other/load", "models/demo/unload"):
        found = httpx.post(f"{both.url}/v2/repository/{call}", headers=headers)
        assert found.status_code == 401 and found.headers["www-authenticate"] == "Bearer"
        assert "only an operator may" in found.json()["error"]
    assert set(answers(both, "demo", 3)) == {200} and set(answers(both, "other", 3)) == {404}


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["bearer", "BEARER", "Bearer "])
def test_the_scheme_is_written_in_any_case(start: Start, scheme: str) -> None:
    """As HTTP has it; the token itself is compared as it is."""
    server = start("--admin-token", TOKEN)
    for token, status in ((TOKEN, 200), (TOKEN.swapcase(), 401)):
        headers = {"Authorization": f"{scheme} {token}"}
        assert (
            httpx.post(f"{server.url}/v2/repository/models/demo/load", headers=headers).status_code == status
        )


@pytest.mark.drawn(0.25)
def test_without_a_token_nothing_can_be_loaded(start: Start) -> None:
    """The calls say what is missing, and the extension is not announced."""
    server = start()
    for call in ("models/demo/load", "models/demo/unload"):
        found = httpx.post(f"{server.url}/v2/repository/{call}", headers=OPERATOR)
        assert found.status_code == 403 and "--admin-token-file" in found.json()["error"]
    assert "model_repository" not in server.get("/v2").json()["extensions"]
    assert httpx.post(f"{server.url}/v2/repository/index").json() == [
        {"name": "demo", "version": "1", "state": "READY"}
    ]


@pytest.mark.drawn(0.5)
def test_what_cannot_be_loaded_is_refused_and_leaves_all_as_it_was(both: Server, root: Path) -> None:
    (root / "other" / "1.segment").chmod(0o600)
    (root / "other" / "1.segment").write_bytes(b"no segment")
    (root / "other" / "1.segment").chmod(0o400)
    with triton.InferenceServerClient(f"127.0.0.1:{both.port}") as client:
        for name, message in (
            ("other", "cannot be loaded"),
            ("nothing", "no version of it is live on this host"),
            ("..", "expected letters"),
        ):
            with pytest.raises(InferenceServerException, match=message):
                client.load_model(name, headers=OPERATOR)
        with pytest.raises(InferenceServerException, match="model 'nothing' is not served here"):
            client.unload_model("nothing", headers=OPERATOR)
        with pytest.raises(InferenceServerException, match="load takes no parameter 'config'"):
            client.load_model("demo", headers=OPERATOR, config="{}")
    assert [m["name"] for m in both.get("/v1/models").json()["models"]] == ["demo"]
    assert set(answers(both, "demo", 5)) == {200}


@pytest.mark.thorough
def test_the_index_may_leave_out_what_is_not_ready(both: Server) -> None:
    found = httpx.post(f"{both.url}/v2/repository/index", headers=OPERATOR, json={"ready": True})
    assert found.json() == [{"name": "demo", "version": "1", "state": "READY"}]
    assert httpx.post(f"{both.url}/v2/repository/index", json={"ready": 1}).status_code == 400


@pytest.mark.thorough
def test_a_server_with_a_token_may_begin_without_a_model(start: Start, root: Path) -> None:
    server = start("--admin-token", TOKEN, models=())
    assert (
        server.get("/v2/health/ready").status_code == 200 and server.get("/v1/models").json()["models"] == []
    )
    assert httpx.post(f"{server.url}/v2/repository/models/demo/load", headers=OPERATOR).status_code == 200
    assert set(answers(server, "demo", 3)) == {200}


def test_a_cluster_token_that_is_none_is_refused_at_the_start(root: Path, tmp_path: Path) -> None:
    """By the command, not by each worker that it would start."""
    publish_demo(root, tmp_path)
    done = run_tableside("serve", "demo", "--port", 0, "--cluster-token-file", "/nobody", root=root)
    assert done.returncode == 1 and done.stderr.startswith("tableside: the cluster token's file /nobody")


@pytest.mark.thorough
def test_a_token_that_is_none_is_refused_at_the_start(root: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short\n")
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "open").write_text(TOKEN + "\n")
    (tmp_path / "open").chmod(0o644)
    for options, message in (
        (("--admin-token-file", tmp_path / "token"), "holds no admin token; expected one line of 16 or more"),
        (("--admin-token-file", tmp_path / "none"), "cannot be read"),
        (("--admin-token-file", tmp_path / "open"), "has mode 0644, so every user may use it; chmod o-rwx"),
        (("--cluster-token-file", tmp_path / "open"), "has mode 0644, so every user may use it; chmod o-rwx"),
        (("--admin-token", "short"), "at least 16"),
        (("--admin-token", TOKEN, "--admin-token-file", tmp_path / "token"), "both set"),
    ):
        done = run_tableside("serve", "demo", *options, root=root)
        assert done.returncode in (1, 2) and message in done.stderr


def test_the_list_knows_who_is_late() -> None:
    """A worker that has not told the newest serial is late; one that ended is not waited for."""
    models = ModelList.of(["a"])
    models.tell(1, ["a"])
    serial = models.want("b", True)
    assert serial == 2 and models.want("b", True) == 2 and models.wanted().models == ["a", "b"]
    assert len(models.late(serial)) == 1
    models.tell(serial, ["a"], [("b", "it is damaged")])
    assert models.late(serial) == [] and models.reasons() == {"b": "it is damaged"}
    models.change(lambda entries: [*entries, ModelEntry("1 1", 0, [])])  # a process of before
    assert models.late(serial) == []
    models.tell(serial, ["a", "b"])
    assert models.reasons() == {} and len(models.read()[1]) == 2


@pytest.mark.thorough
def test_the_token_is_nowhere_to_be_seen(both: Server) -> None:
    """Neither in what the server answers, nor in what it printed."""
    shown = "".join(both.get(path).text for path in ("/v2", "/v1/models", "/metrics", "/health"))
    assert TOKEN not in shown
    assert end(both.process) == 0


@pytest.mark.thorough
@pytest.mark.for_gpu
def test_models_come_and_go_on_a_gpu(start: Start, root: Path, tmp_path: Path) -> None:
    """With a cache that models share: the rows of each are its own, also when one comes back to what
    another one left."""
    publish_demo(root, tmp_path, OTHER, "other")
    device = (
        "--devices",
        tables.serve_device(),
        "--gpu-from-ids",
        0,
        "--placement",
        "cached",
        "--hbm-budget",
        "1MiB",
    )
    server = start(*device, "--admin-token", TOKEN)
    with Client(server.url) as client:
        for _ in range(2):
            assert (
                httpx.post(
                    f"{server.url}/v2/repository/models/other/load", headers=OPERATOR, timeout=300
                ).status_code
                == 200
            )
            for model, values in (("demo", TABLES), ("other", OTHER), ("demo", TABLES)):
                found = client.lookup(model, {"user": [[7], [11]]})["user"]
                np.testing.assert_allclose(found, values["user"][[7, 11]], atol=0.05)
            assert (
                httpx.post(f"{server.url}/v2/repository/models/other/unload", headers=OPERATOR).status_code
                == 200
            )
        assert 'tableside_version{model="other"}' not in client.metrics()


@pytest.mark.thorough
def test_a_model_that_was_loaded_is_scrubbed(start: Start, root: Path, tmp_path: Path) -> None:
    """As those are that the server began with, and by workers that began after it was loaded."""
    publish_demo(root, tmp_path, OTHER, "other")
    server = start("--admin-token", TOKEN, "--scrub-hours", "0.0001", models=("demo",))
    assert httpx.post(f"{server.url}/v2/repository/models/other/load", headers=OPERATOR).status_code == 200

    def scrubs() -> str:
        return server.get("/metrics").text.partition("tableside_scrubs_total{")[2]

    until(
        lambda: 'model="other",outcome="whole"' in scrubs() and 'model="demo",outcome="whole"' in scrubs(),
        what="scrubs",
    )
