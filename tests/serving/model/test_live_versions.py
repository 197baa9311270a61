"""New versions while requests run: each answer whole from one version, none failed, and no version again
after a later one."""

import threading
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import run_tableside, until

from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model
from tableside.serving.client import Client

Start = Callable[..., Any]


def publish_constant(root: Path, folder: Path, value: float) -> int:
    """A version whose every value of every table is `value`."""
    tables = {"user": np.full((1000, 64), value, np.float32), "item": np.full((300, 32), value, np.float32)}
    np.savez(folder / "constant.npz", **tables)
    raw = {
        "name": "demo",
        "checkpoint": "constant.npz",
        "tables": {t: {"key": t, "row_format": "fp32"} for t in tables},
    }
    return load(parse_model(raw, folder), root).version


def versions_of_workers(server: Any, workers: int) -> set[int]:
    """What each worker answers from, seen over connections until all of them were heard."""
    heard: dict[int, int] = {}
    for _ in range(200):
        text = server.get("/health").json()
        heard[len(heard)] = text["models"]["demo"]
        if len(heard) >= 8 * workers:
            break
    return set(heard.values())


@pytest.mark.drawn(0.25)
def test_a_new_version_is_taken_by_all_workers_while_requests_run(
    start: Start, root: Path, tmp_path: Path
) -> None:
    """Every answer has one value in all its features, that of one version, in their order. None fails."""
    publish_constant(root, tmp_path, 1.0)
    server = start("--workers", 2)
    stop, failures = threading.Event(), []
    answers: list[list[set[float]]] = [[] for _ in range(4)]  # of each client, in their order

    def ask(to: list[set[float]]) -> None:
        with Client(server.url, retries=0) as client:
            while not stop.is_set():
                try:
                    found = client.lookup("demo", {"user": [[1, 2]] * 8, "item": [[3]] * 8})
                except Exception as error:  # noqa: BLE001  (any failure fails the test)
                    failures.append(error)
                    return
                to.append(
                    {
                        float(found["user"].max()) / 2,
                        float(found["user"].min()) / 2,
                        *map(float, np.unique(found["item"])),
                    }
                )

    threads = [threading.Thread(target=ask, args=(one,), daemon=True) for one in answers]
    for t in threads:
        t.start()
    values = (1.0, 2.0, 3.0, 4.0)
    for value in values:
        if value > 1:
            publish_constant(root, tmp_path, value)
        until(
            lambda v=value: failures or all(a[-1:] == [{v}] for a in answers),
            what=f"version of value {value}",
        )
    stop.set()
    for t in threads:
        t.join()
    assert not failures
    for of_one in answers:  # a client stays with its worker, which never goes back
        assert [found for found, _ in groupby(of_one)] == [{value} for value in values]


@pytest.mark.thorough
def test_rollback(start: Start, root: Path, tmp_path: Path) -> None:
    """`tableside activate` back to the version before; a named version is answered whichever is live."""
    publish_constant(root, tmp_path, 1.0)
    publish_constant(root, tmp_path, 2.0)
    server = start("--workers", 2)
    with Client(server.url) as client:
        assert client.lookup("demo", {"user": [[1]]})["user"][0, 0] == 2.0
        assert client.lookup("demo", {"user": [[1]]}, version=1)["user"][0, 0] == 1.0
        assert run_tableside("activate", "demo", 1, root=root).returncode == 0
        until(lambda: versions_of_workers(server, 2) == {1}, what="both workers to roll back")
        assert client.lookup("demo", {"user": [[1]]})["user"][0, 0] == 1.0
        counted = 'tableside_swaps_total{model="demo"} 2.0'
        until(lambda: counted in client.metrics(), what="each worker to have counted its swap")


@pytest.mark.drawn(0.25)
def test_a_damaged_version_is_not_taken(start: Start, root: Path, tmp_path: Path) -> None:
    """The old one is served on, the metrics count the failure, and the next good version is taken."""
    publish_constant(root, tmp_path, 1.0)
    server = start("--workers", 1)
    model = Model(root, "demo")
    spec = {
        "name": "demo",
        "checkpoint": "constant.npz",
        "tables": {"user": {"key": "user", "row_format": "fp32"}},
    }
    from tableside.loader.load.settings import LoadSettings

    staged = load(parse_model(spec, tmp_path), root, LoadSettings(activate=False))
    data = bytearray(staged.path.read_bytes())
    data[-100_000] ^= 1
    staged.path.chmod(0o644)
    staged.path.write_bytes(data)
    (model.folder / "current").write_text(f'{{"current": {staged.version}, "latest": {staged.version}}}')
    until(
        lambda: 'tableside_errors_total{kind="swap",model="demo"} 1.0' in server.get("/metrics").text,
        what="the failed swap",
    )
    assert server.get("/health").json()["models"] == {"demo": 1}
    publish_constant(root, tmp_path, 5.0)
    until(lambda: server.get("/health").json()["models"] == {"demo": 3}, what="the next version")


@pytest.mark.thorough
def test_a_removed_model_is_served_on(start: Start, root: Path, tmp_path: Path) -> None:
    """What is mapped stays; the server answers from it until there is another version, which has another
    number."""
    np.save(tmp_path / "t.npy", np.ones((5, 8), np.float32))
    other = parse_model({"name": "other", "checkpoint": "t.npy", "tables": {"t": {"key": "t"}}}, tmp_path)
    load(other, root)
    server = start("--workers", 1, models=("demo", "other"))
    Model(root, "demo").remove_all()
    for version in (
        2,
        3,
    ):  # once the server has taken the second one it has looked at all models since the removal
        load(other, root)
        until(
            lambda v=version: server.get("/health").json()["models"]["other"] == v,
            what=f"other's version {version}",
        )
    with Client(server.url) as client:
        assert client.lookup("demo", {"user": [[1]]})["user"].shape == (1, 64)
    assert server.get("/health").status_code == 200
    publish_constant(root, tmp_path, 7.0)
    until(
        lambda: server.get("/health").json()["models"]["demo"] == 2, what="a version loaded after the removal"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_two_models_in_one_server(start: Start, root: Path, tmp_path: Path, workers: int) -> None:
    np.save(tmp_path / "t.npy", np.ones((5, 8), np.float32))
    load(parse_model({"name": "other", "checkpoint": "t.npy", "tables": {"t": {"key": "t"}}}, tmp_path), root)
    server = start("--workers", workers, models=("demo", "other"))
    with Client(server.url) as client:
        assert {m["name"] for m in client.models()} == {"demo", "other"}
        np.testing.assert_allclose(client.lookup("other", {"t": [[1, 2]]})["t"], 2.0, rtol=1e-3)
