"""`tableside serve --all`: models that are published while the server runs are served, those that are
removed go."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tables
from servers import TABLES, Server, publish_demo, start_server
from support import end, run_tableside, until

from tableside.loader.versions.versions import Model
from tableside.serving.client import Client, ClientError
from tableside.serving.service import model_list
from tableside.serving.service.model_list import Following, ModelList, published_models
from tableside.serving.settings import RootSettings

USER = {"user": TABLES["user"]}


@pytest.fixture
def server(root: Path) -> Iterator[Server]:
    """A server of a root in which nothing is published yet."""
    one = start_server(root, "--all", "--workers", 2, models=())
    yield one
    assert end(one.process) == 0


def served(server: Server) -> list[str]:
    """The models that every worker has; any of them answers."""
    answers = set()
    for _ in range(6):
        with Client(server.url, retries=0) as client:  # a connection of its own
            answers.add(tuple(m["name"] for m in client.models()))
    return list(answers.pop()) if len(answers) == 1 else ["not all workers have the same"]


@pytest.mark.thorough
def test_models_come_and_go(server: Server, root: Path, tmp_path: Path) -> None:
    """A client sees nothing of it: none of its requests fails, and its worker stays."""
    assert served(server) == []
    assert server.get("/v2/health/ready").status_code == 200
    publish_demo(root, tmp_path, USER, "first")
    until(lambda: served(server) == ["first"], what="the first model")
    workers = server.workers()
    publish_demo(root, tmp_path, USER, "second")
    with Client(server.url, retries=0) as client:
        expected = client.lookup("first", {"user": [[3]]})["user"]

        def shown(models: list[str]) -> bool:
            np.testing.assert_array_equal(client.lookup("first", {"user": [[3]]})["user"], expected)
            return served(server) == models

        until(lambda: shown(["first", "second"]), what="the second model")
        assert run_tableside("remove", "second", "--all", root=root).returncode == 0
        until(lambda: shown(["first"]), what="the end of the second model")
        until(lambda: refusal(client, "second") == 404, what="the end of the second model at every worker")
    assert server.workers() == workers


def refusal(client: Client, model: str) -> int:
    """The status with which a lookup is refused; 200: it is answered."""
    try:
        client.lookup(model, {"user": [[3]]})
    except ClientError as error:
        return error.status
    return 200


def test_what_cannot_be_attached_is_no_model_to_serve(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would end every worker. One that is served already stays, and answers with why it cannot."""
    for name in ("good", "torn"):
        publish_demo(root, tmp_path, USER, name)
    settings = RootSettings(root=root)
    assert published_models(settings) == ("good", "torn")
    path = Model(root, "torn").path(1)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.truncate(1000)
    path.chmod(0o400)
    assert published_models(settings) == ("good",)
    assert "model torn is not served" in caplog.text
    assert published_models(settings, served=("torn",)) == ("good", "torn")
    shutil.rmtree(root / "good")
    assert published_models(settings) == ()


def test_what_a_worker_could_not_take_is_tried_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not sooner than RETRY_S after the list was written last; where all was taken the list stays."""
    monkeypatch.setattr(model_list, "LOOK_S", 0.0)
    publish_demo(root, tmp_path, USER, "good")
    models = ModelList.of([])
    one = Following(RootSettings(root=root), models)
    one.look()
    assert (models.wanted().serial, models.wanted().models) == (2, ["good"])
    models.tell(2, [], [("good", "no room")])
    one.look()
    assert models.wanted().serial == 2
    one._again_at = 0.0
    one.look()
    assert (models.wanted().serial, models.wanted().models) == (3, ["good"])
    models.tell(3, ["good"])
    one._again_at = 0.0
    one.look()
    assert models.wanted().serial == 3


@pytest.mark.thorough
def test_models_come_and_go_on_a_gpu(start: Callable[..., Server], root: Path, tmp_path: Path) -> None:
    """An engine process that takes another one's place serves those that there are now, and needs none
    that went."""
    server = start("--all", "--devices", tables.serve_device(), "--gpu-from-ids", 0, models=())
    publish_demo(root, tmp_path, USER, "second")
    until(lambda: served(server) == ["demo", "second"], what="the second model")
    assert run_tableside("remove", "demo", "--all", root=root).returncode == 0
    until(lambda: served(server) == ["second"], what="the end of the first model")
    (engine,), workers = server.engines(), server.workers()
    os.kill(engine, signal.SIGKILL)
    with Client(server.url, retries=0, timeout_s=300) as client:
        assert client.lookup("second", {"user": [[3]]})["user"].shape == (1, 64)
    assert server.engines() != [engine] and server.workers() == workers


@pytest.mark.thorough
def test_names_and_all_are_two_ways(root: Path) -> None:
    assert "leave one of them out" in run_tableside("serve", "demo", "--all", root=root).stderr
    assert "or --all" in run_tableside("serve", root=root).stderr
