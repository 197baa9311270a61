"""deploy/kubernetes/hosts: owners and servers of one model, against each other, and run as processes here."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from redis_servers import needs_redis, redis_server
from support import until

from tableside.loader.model.tiers import owner_name
from tableside.serving.client import Client, ClientError

TOP = Path(__file__).parents[2]
FOLDER = TOP / "deploy" / "kubernetes" / "hosts"
OBJECTS = [
    d for name in ("owners", "servers") for d in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text())
]
PODS = {
    d["kind"]: d["spec"]["template"]["spec"] for d in OBJECTS if d["kind"] in ("StatefulSet", "Deployment")
}
(GENERATED,) = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["configMapGenerator"]
NAMES = dict(one.split("=", 1) for one in GENERATED["literals"])


def containers(kind: str) -> dict[str, dict[str, Any]]:
    return {c["name"]: c for c in (*PODS[kind]["initContainers"], *PODS[kind]["containers"])}


def filled(words: list[str], values: Mapping[str, str]) -> list[str]:
    """Arguments as the kubelet hands them on."""
    return [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in words]


def test_names_fit_together() -> None:
    """Of objects, of the model's owners, and of what pods read."""
    owners, door = (next(d for d in OBJECTS if d["kind"] == kind) for kind in ("StatefulSet", "Deployment"))
    services = {d["metadata"]["name"]: d["spec"] for d in OBJECTS if d["kind"] == "Service"}
    budgets = {d["metadata"]["name"]: d["spec"] for d in OBJECTS if d["kind"] == "PodDisruptionBudget"}
    assert owners["spec"]["replicas"] == int(NAMES["OWNERS"])
    assert services[owners["spec"]["serviceName"]]["clusterIP"] == "None"
    for workload, service in ((owners, owners["spec"]["serviceName"]), (door, door["metadata"]["name"])):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert workload["spec"]["selector"]["matchLabels"] == services[service]["selector"] == labels
        assert budgets[workload["metadata"]["name"]]["selector"]["matchLabels"] == labels
    tier = [f"{owners['metadata']['name']}-{n}.{owners['spec']['serviceName']}:8000" for n in range(2)]
    assert f'tier = "rows://{",".join(tier)}"' in (FOLDER / "owners.yaml").read_text()
    served = containers("StatefulSet")["tableside"]["args"][0]
    assert filled([served], {**NAMES, "SHARE": "1"}) == [owner_name("ads", 1, 2)]
    for kind, pod in PODS.items():
        for container in containers(kind).values():
            assert container["envFrom"] == [{"configMapRef": {"name": GENERATED["name"]}}]
            assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
            assert container["securityContext"]["readOnlyRootFilesystem"]


class Pod:
    """A pod's containers as processes: its volumes are folders, its address a port of this host."""

    def __init__(self, kind: str, folder: Path, port: int, values: Mapping[str, str]) -> None:
        self._containers, self._folder, self._values, self.port = containers(kind), folder, values, port
        ours = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        ours |= {
            "TABLESIDE_HOST": "127.0.0.1",
            "TABLESIDE_PORT": str(port),
            "TABLESIDE_ROOT": str(folder / "shm"),
        }
        self._variables = {**os.environ, **ours, "TABLESIDE_CLUSTER_TOKEN_FILE": str(folder / "token")}
        (folder / "token").write_text("a token of enough characters, for tests\n")
        (folder / "token").chmod(0o440)
        self.processes: list[subprocess.Popen[bytes]] = []

    def load(self) -> None:
        found = self._run("load")
        _, said = found.communicate(timeout=300)
        assert found.returncode == 0, said

    def start(self) -> None:
        self.processes += [self._run(name) for name in ("tableside", "follow")]

    def _run(self, name: str) -> "subprocess.Popen[bytes]":
        container = self._containers[name]
        words = container.get("command") or [str(TOP / "docker" / "entrypoint.sh"), *container["args"]]
        here = {"/models/": f"{self._folder.parent}/", "0.0.0.0:9100": "127.0.0.1:0"}  # pods share this host
        words = filled(words, self._values)
        for there, ours in here.items():
            words = [word.replace(there, ours) for word in words]
        return subprocess.Popen(
            words, env=self._variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self._folder
        )


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[Pod]]:
    """Two owners and a server, before they load."""
    with redis_server(tmp_path) as stream, contextlib.ExitStack() as free:
        ports = [
            free.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(3)
        ]
        values = {**NAMES, "CHANGES": stream.url("ads-rows")}
        free.close()
        made = []
        for number, kind in enumerate(("StatefulSet", "StatefulSet", "Deployment")):
            (folder := tmp_path / f"pod{number}").mkdir()
            made.append(Pod(kind, folder, ports[number], {**values, "SHARE": str(number)}))
        yield made
        for process in (p for pod in made for p in pod.processes):
            process.terminate()
        for process in (p for pod in made for p in pod.processes):
            process.communicate(timeout=300)
            assert process.returncode == 0


@needs_redis
@pytest.mark.thorough
def test_the_pods_answer_and_follow(pods: list[Pod], tmp_path: Path) -> None:
    """Owners load and serve, then servers do; a change is seen through a server."""
    np.savez(tmp_path / "c.npz", user=np.zeros((100, 8), np.float32), small=np.ones((5, 4), np.float32))
    tier = ",".join(f"127.0.0.1:{pod.port}" for pod in pods[:2])
    (tmp_path / "model.toml").write_text(
        f'name = "ads"\ncheckpoint = "c.npz"\n[tables.user]\nkey = "user"\ntier = "rows://{tier}"\n'
        '[tables.small]\nkey = "small"\n'
    )
    for pod in pods:
        pod.load()
        pod.start()
        with Client(f"http://127.0.0.1:{pod.port}") as client:
            until(client.is_ready, what="a pod to be ready")
    import redis

    url = re.sub(r"\?.*", "", pods[0]._values["CHANGES"])
    with (
        contextlib.closing(redis.Redis.from_url(url)) as sender,
        Client(f"http://127.0.0.1:{pods[2].port}") as client,
    ):
        assert not client.lookup("ads", {"user": [[3], [99]]})["user"].any()
        ids, vectors = np.array([3, 99]), np.ones((2, 8), "<f4")
        sender.xadd("ads-rows", {"table": "user", "ids": ids.tobytes(), "vectors": vectors.tobytes()})

        def is_seen() -> bool:
            with contextlib.suppress(ClientError):
                return bool(client.lookup("ads", {"user": [[3], [99]]})["user"].all())
            return False

        until(is_seen, what="the change")
