"""Workers as processes: killed, replaced, drained, orphaned; and servers that cannot start."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from servers import publish_demo
from support import end, is_running, run_tableside, until

from tableside.loader.segment.memory import processes_below, pss_bytes
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.client import Client, ClientError

Start = Callable[..., Any]


@pytest.mark.drawn(0.25)
def test_a_worker_killed_under_load(start: Start, root: Path) -> None:
    """No wrong row, at most the requests in flight break, the worker is replaced, and counters go on from
    where they were."""
    server = start("--workers", 2)
    table = Model(root, "demo").attach().tables["user"]
    stop, wrong, broken, answered = threading.Event(), [], [], []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with Client(server.url, retries=0) as client:
            while not stop.is_set():
                ids = rng.integers(0, 1000, (4, 5))
                try:
                    found = client.lookup("demo", {"user": ids})["user"]
                except ClientError as error:
                    broken.append(error)
                    continue
                answered.append(1)
                if not np.array_equal(
                    found, choose("native").lookup(table, ids.reshape(-1), np.full(4, 5, np.int32))
                ):
                    wrong.append(ids)

    threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(4)]
    for t in threads:
        t.start()
    until(lambda: len(answered) > 50, what="load")
    before = set(server.workers())
    victim = max(before)
    os.kill(victim, signal.SIGKILL)
    until(
        lambda: len(set(server.workers()) - before) == 1 and len(server.workers()) == 2, what="a replacement"
    )
    count = len(answered)
    until(lambda: len(answered) > count + 50, what="load after the replacement")
    stop.set()
    for t in threads:
        t.join()
    assert not wrong
    assert len(broken) <= 16
    text = server.get("/metrics").text
    counted = float(
        text.split('tableside_requests_total{model="demo",outcome="ok",protocol="v2"} ')[1].split("\n")[0]
    )
    assert len(answered) <= counted <= len(answered) + len(broken)


@pytest.mark.thorough
def test_a_client_with_retries_does_not_notice(start: Start) -> None:
    """A lookup that breaks with a killed worker is sent again."""
    server = start("--workers", 2)
    with Client(server.url, retries=3) as client:
        for i in range(3):
            client.lookup("demo", {"user": [[1]]})
            os.kill(server.workers()[i % 2], signal.SIGKILL)
            for _ in range(20):
                client.lookup("demo", {"user": [[1]]})
            until(lambda: len(server.workers()) == 2, what="a replacement")


@pytest.mark.thorough
def test_readiness_goes_false_before_draining(start: Start) -> None:
    """After SIGTERM: not ready, but requests are still answered, for drain_s."""
    server = start("--workers", 1, "--drain-s", 600)
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/v2/health/ready").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        until(lambda: client.get("/v2/health/ready").status_code == 503, what="readiness to go")
        assert client.get("/v2/models/demo/ready").status_code == 503
        assert client.get("/v2/health/live").status_code == 200
        assert client.get("/health").json()["status"] == "draining"
        for _ in range(20):  # over new connections too
            body = {"model": "demo", "features": {"user": [[1]]}}
            assert httpx.post(server.url + "/v1/lookup", json=body).status_code == 200
    server.process.send_signal(signal.SIGQUIT)


@pytest.mark.drawn(0.25)
def test_a_server_ends_after_draining(start: Start) -> None:
    assert end(start("--workers", 1, "--drain-s", 0.5).process) == 0


@pytest.mark.thorough
def test_workers_end_when_their_supervisor_is_killed(start: Start) -> None:
    """No orphan holds the port."""
    server = start("--workers", 2, "--drain-s", 0)
    workers = server.workers()
    server.process.kill()
    server.process.wait()
    until(lambda: not any(map(is_running, workers)), what="the workers to end")
    until(lambda: _is_free(server.port), what="the port to be free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.thorough
def test_hangup_replaces_every_worker(start: Start) -> None:
    """SIGHUP: each successor is ready before its predecessor goes; no request fails."""
    server = start("--workers", 2, "--drain-s", 0.1)
    before = set(server.workers())
    failed, stop = [], threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                with Client(server.url, retries=1) as client:
                    client.lookup("demo", {"user": [[1]]})
            except ClientError as error:
                failed.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    server.process.send_signal(signal.SIGHUP)
    until(lambda: len(server.workers()) == 2 and not before & set(server.workers()), what="new workers")
    stop.set()
    thread.join()
    assert not failed


@pytest.mark.thorough
def test_a_taken_port(start: Start, root: Path) -> None:
    """One line with the remedy, exit code 1, and the server that has the port is not disturbed."""
    server = start("--workers", 1)
    found = run_tableside("serve", "demo", "--port", server.port, root=root)
    assert found.returncode == 1
    assert (
        f"cannot listen on 127.0.0.1:{server.port}: Address already in use; choose another --port"
        in found.stderr
    )
    assert found.stderr.count("\n") == 1
    assert server.get("/health").status_code == 200


@pytest.mark.drawn(0.5)
def test_a_model_that_is_not_published(root: Path) -> None:
    found = run_tableside("serve", "nope", "--port", 0, root=root)
    assert found.returncode == 1
    assert "model 'nope' in" in found.stderr
    assert "tableside load model.toml" in found.stderr


@pytest.mark.thorough
def test_a_version_that_is_damaged_at_start(start: Start, root: Path) -> None:
    """Workers refuse it at attach; the server says why and ends with exit code 1 instead of trying for
    ever."""
    server = start("--workers", 1)
    end(server.process)
    path = Model(root, "demo").path(1)
    data = bytearray(path.read_bytes())
    data[8192 + 33] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    found = run_tableside("serve", "demo", "--port", 0, root=root)
    assert found.returncode == 1
    assert "the checksum is wrong" in found.stderr


@pytest.mark.drawn(0.5)
def test_no_model_is_named(root: Path) -> None:
    found = run_tableside("serve", root=root)
    assert (found.returncode, "no model is named" in found.stderr) == (1, True)


@pytest.mark.thorough
def test_settings_from_the_environment_and_bad_ones(root: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TABLESIDE_PORT", "many")
    found = run_tableside("serve", "demo", root=root)
    assert found.returncode == 2
    assert "--port" in found.stderr
    assert "found 'many'" in found.stderr
    monkeypatch.delenv("TABLESIDE_PORT")
    assert run_tableside("serve", "demo", "--backend", "cuda", root=root).returncode == 2
    found = run_tableside("serve", "demo", "--workers", 0, root=root)
    assert "--workers: Input should be greater than or equal to 1" in found.stderr


@pytest.mark.thorough
def test_models_from_the_environment(root: Path, tmp_path: Path, start: Start, monkeypatch: Any) -> None:
    """TABLESIDE_MODELS=a,b, as a container sets it."""
    monkeypatch.setenv("TABLESIDE_MODELS", "demo")
    assert start("--workers", 1, models=()).get("/health").json()["models"] == {"demo": 1}


@pytest.mark.drawn(0.25)
def test_a_replaced_version_is_unmapped(start: Start, root: Path, tmp_path: Path) -> None:
    """After a swap no worker holds the old segment, though requests' layouts were remembered on it."""
    server = start("--workers", 1)
    with Client(server.url) as client:
        client.lookup("demo", {"user": [[1, 2]]})
        publish_demo(root, tmp_path)
        (worker,) = server.workers()
        until(lambda: "/2.segment" in Path(f"/proc/{worker}/maps").read_text(), what="the new version")
        client.lookup("demo", {"user": [[1, 2]]})
        until(
            lambda: "/1.segment" not in Path(f"/proc/{worker}/maps").read_text(), what="the old version to go"
        )


@pytest.mark.thorough
def test_the_metrics_folder_goes_with_the_server(start: Start, root: Path) -> None:
    """And that of a server that was killed goes when the next one starts; one that runs keeps its own."""
    first = start("--workers", 1)
    assert len(list(root.glob(".metrics-*"))) == 1
    first.process.kill()
    first.process.wait()
    second, third = start("--workers", 1), start("--workers", 1)
    assert len(list(root.glob(".metrics-*"))) == 2
    assert "demo" in second.get("/metrics").text
    assert end(second.process) == 0
    assert end(third.process) == 0
    assert not list(root.glob(".metrics-*"))


@pytest.mark.thorough
def test_a_worker_that_cannot_be_replaced_does_not_end_the_others(start: Start, root: Path) -> None:
    """The model was removed and a worker dies: the other one serves on, and a later version brings the
    second back."""
    server = start("--workers", 2)
    Model(root, "demo").remove_all()
    victim, other = server.workers()
    os.kill(victim, signal.SIGKILL)
    until(
        lambda: processes_below(server.process.pid) and server.workers() == [other],
        what="the worker to be gone",
    )
    end_of_watch = time.monotonic() + 2
    while time.monotonic() < end_of_watch:
        assert server.get("/health").status_code == 200
    assert server.process.poll() is None


@pytest.mark.thorough
def test_a_second_worker_adds_little_memory(start: Start) -> None:
    """Workers share imports with the process they were forked from: each has less than 40 MB of its own."""
    server = start("--workers", 3)
    private = [pss_bytes(w)["private"] for w in server.workers()]
    assert len(private) == 3
    assert max(private) < 40e6, private
