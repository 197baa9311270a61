"""deploy/kubernetes: against Kubernetes's own schemas, against each other, and against the real server.

The schemas of Kubernetes's kinds come with kubernetes-validate. Those of the operators' kinds
(ServiceMonitor, PodMonitor, ScaledObject, ServingRuntime) do not, so their fields are compared with lists
from their API references.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import numpy as np
import pytest
import yaml
from manifests import FOLDER, TOP, documents, one
from support import until

from tableside.serving.metrics.metrics import REQUESTS
from tableside.serving.settings import ServerSettings, unknown_variables
from tableside.serving.sizes import parse_bytes
from tableside.serving.workers import supervisor

ENTRYPOINT = TOP / "docker" / "entrypoint.sh"
CUSTOM = {"ServiceMonitor", "PodMonitor", "ScaledObject", "ServingRuntime", "Kustomization"}
PATCHES = ("gpu", "follow")  # folders of patches over base
VERSIONS = ("1.29", kubernetes_validate.latest_version())


DEPLOYMENT = one("Deployment", "base")
POD = DEPLOYMENT["spec"]["template"]["spec"]
RUNTIME = one("ServingRuntime")["spec"]
CONTAINERS = {"Deployment": POD["containers"][0], "ServingRuntime": RUNTIME["containers"][0]}
both = pytest.mark.parametrize("kind", CONTAINERS)


# ---- the files ----


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_fit_the_schemas_of_kubernetes(version: str) -> None:
    """Without a key that the API does not know. A patch has parts of a Deployment alone, so it is checked
    once it is merged."""
    checked = [d for p, d in documents() if d["kind"] not in CUSTOM and p.parent.name not in PATCHES]
    assert {d["kind"] for d in checked} == {
        "Deployment",
        "Service",
        "PodDisruptionBudget",
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
        "StatefulSet",
    }
    for document in checked:
        kubernetes_validate.validate(document, version, strict=True)


def test_kustomizations_name_every_file() -> None:
    """A file that none names would be applied by nobody; one that is named has to be there."""
    for path in FOLDER.rglob("kustomization.yaml"):
        found = yaml.safe_load(path.read_text())
        assert (found["apiVersion"], found["kind"]) == ("kustomize.config.k8s.io/v1beta1", "Kustomization")
        named = {(path.parent / r).resolve() for r in found["resources"]} | {
            path.parent / p["path"] for p in found.get("patches", [])
        }
        assert all(p.exists() for p in named)
        assert {p for p, _ in documents() if p.parent == path.parent} <= named
    assert {p.parent.name for p, _ in documents()} == {
        p.parent.name for p in FOLDER.rglob("kustomization.yaml")
    }


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl has kustomize")
@pytest.mark.parametrize("name", sorted(p.parent.name for p in FOLDER.rglob("kustomization.yaml")))
@pytest.mark.drawn(2)
def test_kustomize_builds(name: str) -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / name)], capture_output=True, text=True, timeout=300, check=False
    )
    assert built.returncode == 0, built.stderr
    objects = [d for d in yaml.safe_load_all(built.stdout) if d["kind"] not in CUSTOM]
    for document in objects:
        kubernetes_validate.validate(document, VERSIONS[0], strict=True)
    if name == "gpu":
        (container,) = next(d for d in objects if d["kind"] == "Deployment")["spec"]["template"]["spec"][
            "containers"
        ]
        assert (
            container["image"] == "tableside:cuda" and container["resources"]["limits"]["nvidia.com/gpu"] == 1
        )
        assert environment(container)["TABLESIDE_DEVICES"] == "0"


def test_a_follower_lies_beside_the_server() -> None:
    """With the same tables, as confined, of the same image; and both fit the schema."""
    (follower,) = one("Deployment", "follow")["spec"]["template"]["spec"]["containers"]
    server = CONTAINERS["Deployment"]
    assert follower["securityContext"] == server["securityContext"]
    assert all(mount in server["volumeMounts"] for mount in follower["volumeMounts"])
    assert follower["image"] == server["image"] and follower["command"][:2] == ["tableside", "follow"]
    assert {v["name"] for v in follower["env"]} == set(
        re.findall(r"\$\((\w+)\)", " ".join(follower["command"]))
    )
    pod = {**POD, "containers": [server, follower]}
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}, VERSIONS[0], strict=True
    )


def test_a_serving_runtime_has_what_its_reference_lists() -> None:
    """Of KServe's API reference, serving.kserve.io/v1alpha1; the container has the name that KServe looks
    for."""
    assert one("ServingRuntime")["apiVersion"] == "serving.kserve.io/v1alpha1"
    assert set(RUNTIME) <= {
        "annotations", "affinity", "containers", "imagePullSecrets", "labels", "multiModel", "nodeSelector",
        "protocolVersions",
        "supportedModelFormats", "tolerations", "volumes",
    }  # fmt: skip
    assert set(RUNTIME["supportedModelFormats"][0]) <= {"name", "version", "autoSelect", "priority"}
    assert RUNTIME["protocolVersions"] == ["v2"] and RUNTIME["multiModel"] is False
    container = CONTAINERS["ServingRuntime"]
    assert container["name"] == "kserve-container" and container["args"] == ["/mnt/models"]
    pod = {"containers": [container], "volumes": RUNTIME["volumes"]}
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}, VERSIONS[0], strict=True
    )


def test_names_and_labels_fit_together() -> None:
    """The Service, the budget and the autoscaler mean the Deployment's pods; the adapter's rule makes the
    autoscaler's metric."""
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"] == labels
    assert (
        one("Service")["spec"]["selector"]
        == one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
        == labels
    )
    (port,) = one("Service")["spec"]["ports"]
    assert port["targetPort"] in [p["name"] for p in CONTAINERS["Deployment"]["ports"]]
    scaler = one("HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": DEPLOYMENT["metadata"]["name"],
    }
    assert (
        scaler["minReplicas"]
        == DEPLOYMENT["spec"]["replicas"]
        > 1
        == one("PodDisruptionBudget")["spec"]["maxUnavailable"]
    )
    (rule,) = yaml.safe_load((FOLDER / "autoscaling" / "prometheus-adapter-values.yaml").read_text())[
        "rules"
    ]["custom"]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == rule["name"]["as"]
    series = rule["seriesQuery"].partition("{")[0]
    assert series == REQUESTS.name  # the counter as it is exposed


# ---- what a pod may and gets ----


@both
def test_a_container_is_confined(kind: str) -> None:
    """No root, no capability, a root file system that is read-only, and two places to write to."""
    container = CONTAINERS[kind]
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] and context["capabilities"] == {"drop": ["ALL"]}
    assert context["allowPrivilegeEscalation"] is False
    user = POD["securityContext"] if kind == "Deployment" else context
    assert user["runAsNonRoot"] and user["runAsUser"] == int(
        re.findall(r"^USER (\d+)", dockerfile(), re.MULTILINE)[0]
    )
    mounts = {m["mountPath"]: m.get("readOnly", False) for m in container["volumeMounts"]}
    assert {path for path, is_read_only in mounts.items() if not is_read_only} == {"/dev/shm", "/tmp"}


def dockerfile() -> str:
    return (TOP / "docker" / "Dockerfile").read_text()


@both
def test_shared_memory_fits_the_containers_memory(kind: str) -> None:
    """/dev/shm is memory with a limit, and what lies there counts as the container's, which needs some
    more."""
    volumes = POD["volumes"] if kind == "Deployment" else RUNTIME["volumes"]
    (shm,) = [v["emptyDir"] for v in volumes if v["name"] == "shm"]
    resources = CONTAINERS[kind]["resources"]
    assert shm["medium"] == "Memory"
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    assert parse_bytes(f"{resources['limits']['memory']}B") >= parse_bytes(f"{shm['sizeLimit']}B") + (
        512 << 20
    )


@both
def test_settings_are_known_and_services_make_none(kind: str) -> None:
    variables = environment(CONTAINERS[kind])
    assert [*unknown_variables(variables)] == []
    assert variables["TABLESIDE_WORKERS"] == CONTAINERS[kind]["resources"]["requests"]["cpu"]
    ServerSettings(**{name.removeprefix("TABLESIDE_").lower(): value for name, value in variables.items()})
    assert POD["enableServiceLinks"] is False


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    return {v["name"]: v["value"] for v in container["env"]}


@both
def test_the_grace_is_longer_than_an_orderly_end(kind: str) -> None:
    """Drain, then the running requests, then the supervisor's patience. Kubernetes gives 30 s where
    nothing is said."""
    grace_s = POD["terminationGracePeriodSeconds"] if kind == "Deployment" else 30
    drain_s = float(environment(CONTAINERS[kind])["TABLESIDE_DRAIN_S"])
    assert grace_s > drain_s + ServerSettings(models=()).shutdown_timeout_s + supervisor._GRACE_S
    probe = CONTAINERS[kind]["readinessProbe"]
    assert drain_s > probe["periodSeconds"] * probe["failureThreshold"]


# ---- the real thing ----


@pytest.fixture
def pod(root: Path, tmp_path: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """The Deployment's container as a process here: its arguments and environment; its volumes are
    folders."""
    np.savez(tmp_path / "c.npz", user=np.ones((10, 8), np.float32))
    (tmp_path / "model.toml").write_text('name = "ads"\ncheckpoint = "c.npz"\n[tables.user]\nkey = "user"\n')
    container = CONTAINERS["Deployment"]
    arguments = [a.replace("/models/", f"{tmp_path}/") for a in container["args"]]
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="ts-") as temporary:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ours = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "TMPDIR": temporary}
        ours |= {"TABLESIDE_HOST": "127.0.0.1", "TABLESIDE_PORT": str(port), "TABLESIDE_ROOT": str(root)}
        variables = {**os.environ, **environment(container), "TABLESIDE_DRAIN_S": "1", **ours}
        with (
            (tmp_path / "log").open("w") as log,
            subprocess.Popen([str(ENTRYPOINT), *arguments], env=variables, stderr=log) as p,
        ):
            yield f"http://127.0.0.1:{port}", p
            p.kill()


@pytest.mark.thorough
def test_probes_see_a_pod_come_and_go(pod: tuple[str, "subprocess.Popen[bytes]"], tmp_path: Path) -> None:
    """Start, readiness and liveness as the manifest asks; readiness goes first when the pod ends, and the
    exit code is 0.

    The autoscaler's series is in /metrics under the path that the monitor scrapes.
    """
    url, process = pod
    container = CONTAINERS["Deployment"]
    paths = {p: container[f"{p}Probe"]["httpGet"]["path"] for p in ("startup", "readiness", "liveness")}
    until(
        lambda: process.poll() is not None or status(url + paths["startup"]) == 200, what="the startup probe"
    )
    assert process.poll() is None, (tmp_path / "log").read_text()
    assert [status(url + path) for path in paths.values()] == [200, 200, 200]
    asked = httpx.post(
        f"{url}/v1/lookup", json={"model": "ads", "features": {"user": [[1]]}}, trust_env=False
    )
    assert asked.status_code == 200
    (endpoint,) = one("ServiceMonitor")["spec"]["endpoints"]
    assert "tableside_requests_total{" in httpx.get(url + endpoint["path"], trust_env=False).text
    process.send_signal(signal.SIGTERM)
    seen = set()
    end_s = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < end_s:
        seen.add((status(url + paths["readiness"]), status(url + paths["liveness"])))
        time.sleep(0.02)
    assert process.returncode == 0
    assert any(ready not in (0, 200) and live == 200 for ready, live in seen)


def status(url: str) -> int:
    try:
        return httpx.get(url, trust_env=False, timeout=300).status_code
    except httpx.TransportError:
        return 0
