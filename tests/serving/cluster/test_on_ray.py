"""`tableside serve --engine ray`, on clusters of Ray whose nodes are processes of this machine."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hosts import RAW, checkpoint
from servers import start_server
from support import end, is_running, until

from tableside.loader.segment.memory import processes_below

pytest.importorskip("ray", reason="the ray extra brings Ray")

MODEL = """
name = "{name}"
checkpoint = "0.npz"
[tables.user]
key = "user"
row_format = "fp32"
tier = "rows://a:1,b:1"
[tables.item]
key = "item"
row_format = "fp32"
ids = "raw"
id_key = "item.ids"
buckets = 16
tier = "rows://a:1,b:1"
[tables.small]
key = "small"
[features.user]
table = "user"
[features.item]
table = "item"
"""
# nodes are found dead within two seconds, not half a minute
QUICK = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}


@pytest.fixture
def root() -> Iterator[Path]:
    found = Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}"
    found.mkdir()
    yield found
    shutil.rmtree(found)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without room for owners, and three nodes with a core each."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ts-ray-")  # a short path: sockets lie below
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 << 20, "temp_dir": folder}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)  # where Ray writes its address down, in a folder that is there
        (Path(folder) / "ray").mkdir()
        found = Cluster(initialize_head=True, head_node_args={**head, "_system_config": QUICK})
        for _ in range(3):
            found.add_node(num_cpus=1, object_store_memory=80 << 20)
        yield found
        found.shutdown()
    shutil.rmtree(folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    checkpoint(tmp_path)
    (tmp_path / "model.toml").write_text(MODEL.format(name=f"m{uuid.uuid4().hex[:8]}"))
    return tmp_path / "model.toml"


def servers_of(root: Path) -> list[int]:
    """The servers of owners over a root."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:  # it ended
            continue
        if "serve" in words and str(root) in words and any("-owner-" in word for word in words):
            found.append(int(folder.name))
    return found


@pytest.mark.drawn(0.5)
def test_ray_places_owners_and_replaces_one_whose_node_is_lost(
    cluster: Any, root: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are those of the checkpoint before and after. An owner's server ends with its node and with the
    command, in whose folder paths are."""
    arrays = checkpoint(model.parent)
    monkeypatch.chdir(model.parent)
    relative = Path(os.path.relpath(root, model.parent))
    common = "--engine", "ray", "--ray-address", cluster.address
    server = start_server(relative, *common, models=("model.toml",))
    root = relative.absolute()
    model_name = re.findall(r"serves (\S+)", server.said)[0]
    users, items = [3, 999], [0, 600]
    asked = {"user": [[user] for user in users], "item": [[int(RAW[item])] for item in items]}
    wanted = {"user": arrays["user"][users], "item": arrays["item"][items]}

    def answers() -> bool:
        answer = httpx.post(
            f"{server.url}/v1/lookup", json={"model": model_name, "features": asked}, timeout=60
        )
        if answer.status_code == 503:
            return False
        assert answer.status_code == 200, answer.text
        found = answer.json()["vectors"]
        return all(np.array_equal(np.float32(found[name]), wanted[name]) for name in wanted)

    assert answers()
    before = servers_of(root)
    assert len(before) == 2
    nodes = cluster.worker_nodes
    held = {node: set(processes_below(node.all_processes["raylet"][0].process.pid)) for node in nodes}
    lost = next(node for node in nodes if held[node] & set(before))
    (gone,) = held[lost] & set(before)
    cluster.remove_node(lost, allow_graceful=False)
    until(lambda: not is_running(gone), what="the lost owner's server to end")
    until(lambda: len(servers_of(root)) == 2, what="another owner to start")
    until(answers, what="the servers to have its rows again")
    assert set(before) & set(servers_of(root)), "the other owner's server was left alone"
    assert end(server.process) == 0
    until(lambda: not servers_of(root), what="the owners' servers to end")


def refused(*options: object) -> str:
    """What `tableside serve --engine ray` says that refuses."""
    command = [
        sys.executable,
        "-m",
        "tableside",
        "serve",
        "--engine",
        "ray",
        "--port",
        "0",
        *map(str, options),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout) == (1, ""), ran
    return ran.stderr


@pytest.mark.drawn(0.25)
def test_an_owner_that_cannot_load_is_an_error(cluster: Any, root: Path, model: Path) -> None:
    """It says which owner, and what its load said; no server is left."""
    model.write_text(model.read_text().replace("a:1,b:1", "a:1"))
    (model.parent / "0.npz.manifest.json").write_text("{}")
    said = refused(model, "--ray-address", cluster.address, "--root", root)
    assert "-owner-" in said and "manifest" in said
    until(lambda: not servers_of(root), what="the owners' servers to end")


@pytest.mark.drawn(0.25)
def test_a_model_without_owners_and_a_cluster_that_is_not_there_are_refused(root: Path, model: Path) -> None:
    """Before anything is loaded."""
    assert "no Ray cluster is reached" in refused(model, "--ray-address", "127.0.0.1:1", "--root", root)
    assert "found ads; expected a model.toml" in refused("ads", "--root", root)
    text = model.read_text()
    model.write_text(re.sub("tier = .*", "", text))
    assert "has owners; expected a tier" in refused(model, "--root", root)
    assert "serves one model" in refused(model, model, "--root", root)
    assert "found --all; expected a model.toml" in refused("--all", "--root", root)
    assert not list(root.iterdir())
