"""The images that `make image` built, run as containers in a chroot: who they are, how large, and that they serve.

`make image` builds and then runs these tests. Elsewhere they are skipped, as a build takes minutes, root and buildah.
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
    not STORAGE.is_dir() or os.geteuid() != 0 or shutil.which("buildah") is None, reason="make image builds the images"
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
    return subprocess.run(full, capture_output=True, text=True, timeout=120, env=buildah.environment, check=False)


def test_what_an_image_has(buildah: Any, container: tuple[str, str]) -> None:
    """It runs as nobody's user, with the command; torch is in the image that offers every scorer, the slim one is small."""
    target, name = container
    assert said(buildah, name, "id", "-u").stdout == "10001\n"
    assert "usage: tableside" in said(buildah, name, "tableside", "--help").stdout
    has = {m: said(buildah, name, "python3", "-c", f"import {m}").returncode == 0 for m in ("torch", "pyarrow", "tableside")}
    assert has == {"torch": target == "cpu", "pyarrow": target == "cpu", "tableside": True}
    native = said(buildah, name, "python3", "-c", "from tableside.quant import choose; print(choose('auto').name)")
    assert native.stdout == "native\n", native.stderr
    if target == "slim":
        assert buildah.size_bytes(f"localhost/tableside:{target}") < SLIM_BYTES


def test_an_image_loads_and_serves(buildah: Any, container: tuple[str, str], root: Path, tmp_path: Path) -> None:
    """From a volume that it only reads, as its own user; SIGTERM ends it with 0. A chroot has the host's /dev/shm."""
    _, name = container
    values = np.random.default_rng(0).standard_normal((100, 16)).astype(np.float32)
    np.savez(tmp_path / "c.npz", user=values)
    (tmp_path / "model.toml").write_text('name = "ads"\ncheckpoint = "c.npz"\n[tables.user]\nkey = "user"\nrow_format = "fp32"\n')
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    port = free_port()
    url, variables = f"http://127.0.0.1:{port}", {"TABLESIDE_PORT": str(port), "TABLESIDE_ROOT": str(root)}
    options = ["--volume", f"{tmp_path}:/models:ro", *(f"--env={n}={v}" for n, v in variables.items())]
    command = buildah.command(
        "run", *options, name, "--", "/opt/tableside/entrypoint.sh", "/models/model.toml", "--", "--workers", "2"
    )
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=buildah.environment)
        try:
            until(lambda: process.poll() is not None or is_ready(url), 90, "readiness")
            assert process.poll() is None, (tmp_path / "log").read_text()
            body = {"model": "ads", "features": {"user": [[3, 5]]}}
            (found,) = httpx.post(f"{url}/v1/lookup", json=body, trust_env=False).json()["vectors"]["user"]
            np.testing.assert_allclose(found, values[3] + values[5], rtol=1e-6)
            assert [(f.name, f.stat().st_uid) for f in (root / "ads").glob("*.segment")] == [("1.segment", 10001)]
            supervisor = supervisor_of(port)
            os.kill(supervisor, signal.SIGTERM)
            assert process.wait(60) == 0, (tmp_path / "log").read_text()
        finally:
            if process.poll() is None:
                os.kill(supervisor_of(port), signal.SIGKILL)
                process.wait(60)


def supervisor_of(port: int) -> int:
    """The process of `tableside serve` that was given the port by its environment and has no parent of that name."""
    (found,) = [pid for pid in processes_of("tableside serve") if f"TABLESIDE_PORT={port}" in environ(pid)]
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v2/health/ready", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def processes_of(command: str) -> list[int]:
    """Processes whose command line has these words, in this order, after the interpreter's name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if " ".join(w.decode(errors="replace").rpartition("/")[2] for w in words[1:3]) == command:
            found.append(int(path.parent.name))
    return found


def environ(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []
