"""The images that `make image` built, run as containers in a chroot: who they are, how large, and that they
serve.

`make image` builds and then runs these tests. Elsewhere they are skipped, as a build takes minutes, root and
buildah.
"""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support import until

TOP = Path(__file__).parents[2]
STORAGE = TOP / "build" / "images"
TARGETS = ("slim", "cpu")
SLIM_BYTES = 450_000_000
pytestmark = pytest.mark.skipif(
    not STORAGE.is_dir() or os.geteuid() != 0 or shutil.which("buildah") is None,
    reason="make image builds the images",
)


@pytest.fixture(scope="module")
def buildah() -> Any:
    """The builder's own way to call buildah, of the script beside the Dockerfile."""
    spec = spec_from_file_location("build_image", TOP / "docker" / "build_image.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Buildah(STORAGE)


@pytest.fixture(params=TARGETS)
def container(request: pytest.FixtureRequest, buildah: Any) -> Iterator[tuple[str, str]]:
    """A container of each image that was built: (target, container)."""
    image = f"localhost/tableside:{request.param}"
    if not buildah.has(image):
        pytest.skip(f"{image} was not built")
    name = buildah.run("from", "--pull-never", image)
    yield request.param, name
    buildah.run("rm", name)


def said(buildah: Any, container: str, *command: str) -> subprocess.CompletedProcess[str]:
    full = buildah.command("run", container, "--", *command)
    return subprocess.run(
        full, capture_output=True, text=True, timeout=300, env=buildah.environment, check=False
    )


def test_what_an_image_has(buildah: Any, container: tuple[str, str]) -> None:
    """It runs as nobody's user, with the command; torch is in the image that offers every scorer, the slim
    one is small."""
    target, name = container
    assert said(buildah, name, "id", "-u").stdout == "10001\n"
    assert "usage: tableside" in said(buildah, name, "tableside", "--help").stdout
    has = {
        m: said(buildah, name, "python3", "-c", f"import {m}").returncode == 0
        for m in ("torch", "pyarrow", "tableside")
    }
    assert has == {"torch": target == "cpu", "pyarrow": target == "cpu", "tableside": True}
    native = said(buildah, name, "python3", "-c", "from tableside.quant import choose; print(choose().name)")
    assert native.stdout == "native\n", native.stderr
    if target == "slim":
        assert buildah.size_bytes(f"localhost/tableside:{target}") < SLIM_BYTES


# What an engine does for a container of compose.yaml or of the manifests, in a mount namespace: root and
# models are read-only, /dev/shm and /tmp are memory, the user is the image's, with no capability. Everything
# is exec, so that signals arrive.
CONFINED = """
set -e
cd "$0"
mount --bind "$0" "$0"
mount --bind /dev "$0/dev"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$0/dev/shm"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$0/tmp"
mount --bind "$1" "$0/mnt"
mount -o remount,bind,ro "$0/mnt"
mount --rbind /proc "$0/proc"
mount -o remount,bind,ro "$0"
shift
exec chroot "$PWD" setpriv --reuid 10001 --regid 10001 --clear-groups \\
    --bounding-set=-all --inh-caps=-all --no-new-privs \\
    env -i PATH=/usr/local/bin:/usr/bin:/bin "$@"
"""


def test_an_image_loads_and_serves_confined(buildah: Any, container: tuple[str, str], tmp_path: Path) -> None:
    """As compose and the manifests run it; it holds no capability, and SIGTERM ends it with 0."""
    _, name = container
    values = np.random.default_rng(0).standard_normal((100, 16)).astype(np.float32)
    models = tmp_path / "models"
    models.mkdir()
    np.savez(models / "c.npz", user=values)
    (models / "model.toml").write_text(
        'name = "ads"\ncheckpoint = "c.npz"\n[tables.user]\nkey = "user"\nrow_format = "fp32"\n'
    )
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    entry = [
        f"TABLESIDE_PORT={port}",
        "TABLESIDE_WORKERS=2",
        "/opt/tableside/entrypoint.sh",
        "/mnt/model.toml",
    ]
    mounted = buildah.run("mount", name)
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", CONFINED, mounted, models, *entry], stdout=log, stderr=log
        )
        try:
            until(lambda: process.poll() is not None or is_ready(url), 90, "readiness")
            assert process.poll() is None, (tmp_path / "log").read_text()
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert (
                "Uid:\t10001\t" in status
                and "CapEff:\t0000000000000000\n" in status
                and "NoNewPrivs:\t1\n" in status
            )
            body = {"model": "ads", "features": {"user": [[3, 5]]}}
            (found,) = httpx.post(f"{url}/v1/lookup", json=body, trust_env=False).json()["vectors"]["user"]
            np.testing.assert_allclose(found, values[3] + values[5], rtol=1e-6)
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0, (tmp_path / "log").read_text()
        finally:
            process.kill()
            process.wait()
            buildah.run("umount", name)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v2/health/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
