"""The entry point of the images, run as a real process: what it refuses before a server starts, and how it
loads, serves and ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import httpx
import numpy as np
import pytest
from image_files import ENTRYPOINT, PATH, PREFLIGHT, last
from safetensors.numpy import save_file
from support import end, rows_of, until

from tableside.loader.load.load import load
from tableside.loader.model.model import read_model
from tableside.quant import RowFormat

DEADLINE_S = 300  # of a check; one that hangs fails here

Run = subprocess.CompletedProcess[str]


# ---- a check that fails ----


def write_model(
    folder: Path, name: str = "ads", *, rows: int = 100, dim: int = 16, row_format: str = "int8"
) -> Path:
    """A model.toml beside a checkpoint of one table."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"user": rows_of(rows, dim)}, folder / "ads.safetensors")
    return describe(folder, "ads.safetensors", name, row_format)


def describe(folder: Path, checkpoint: str, name: str = "ads", row_format: str = "int8") -> Path:
    """A model.toml of the table `user` in a checkpoint."""
    path = folder / "model.toml"
    table = f'[tables.user]\nkey = "user"\nrow_format = "{row_format}"\n'
    path.write_text(f'name = "{name}"\ncheckpoint = "{checkpoint}"\n{table}')
    return path


def environment(root: Path, **variables: str) -> dict[str, str]:
    """What the container's processes see: no GPU but where `variables` say so."""
    inherited = {k: v for k, v in os.environ.items() if k != "NVIDIA_VISIBLE_DEVICES"}
    return {**inherited, "PATH": PATH, "TABLESIDE_ROOT": str(root), **variables}


def refused(
    root: Path, *arguments: object, prefix: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> str:
    """Runs the entry point; returns the one line that it ends with."""
    command = [*prefix, str(ENTRYPOINT), *map(str, arguments)]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(root, **(variables or {})),
        check=False,
    )
    assert result.returncode not in (0, 126, 127), result
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("tableside: ")
    return line


def private_mount(options: str, folder: Path) -> list[str]:
    """The start of a command that sees a tmpfs on `folder`; it is seen by no other process, and gone with
    the command."""
    script = f'mount -t tmpfs -o {options} tmpfs "$0" && exec "$@"'
    for kind in (["--mount"], ["--mount", "--map-root-user"]):
        prefix = ["unshare", *kind, "sh", "-c", script, str(folder)]
        if subprocess.run([*prefix, "true"], capture_output=True, timeout=300, check=False).returncode == 0:
            return prefix
    pytest.skip("neither this user nor a user namespace may mount a tmpfs here")


@pytest.mark.drawn(0.5)
def test_no_model_is_named(root: Path) -> None:
    assert "no model is named; expected the path of a model.toml or a checkpoint" in refused(root)
    assert "no model is named" in refused(root, "--", "--workers", "2")


@pytest.mark.parametrize(("arguments", "variables"), [(["--", "--all"], {}), ([], {"TABLESIDE_ALL": "true"})])
@pytest.mark.drawn(1)
def test_a_server_of_all_models_needs_no_name(
    root: Path, arguments: list[str], variables: dict[str, str]
) -> None:
    command = [sys.executable, str(PREFLIGHT), *arguments]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(root, **variables), check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_option_before_the_dashes(root: Path) -> None:
    line = refused(root, "ads", "--workers", "2")
    assert "found option --workers among the models" in line
    assert "MODEL... -- --workers" in line


def test_root_as_an_option(root: Path) -> None:
    """The load would publish where the server does not look."""
    assert "set TABLESIDE_ROOT instead" in refused(root, "ads", "--", "--root=/dev/shm/other")


def test_model_file_is_missing(root: Path, tmp_path: Path) -> None:
    line = refused(root, path := tmp_path / "model.toml")
    assert f"model {path} does not exist" in line
    assert f"docker run -v FOLDER:{tmp_path}:ro" in line


def test_model_file_is_damaged(root: Path, tmp_path: Path) -> None:
    (path := tmp_path / "model.toml").write_text("name = \n")
    assert f"{path}: " in refused(root, path)


def test_checkpoint_is_missing(root: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path)
    (tmp_path / "ads.safetensors").unlink()
    assert f"checkpoint {tmp_path / 'ads.safetensors'} does not exist" in refused(root, path)


def test_checkpoint_lacks_the_table(root: Path, tmp_path: Path) -> None:
    path = write_model(tmp_path)
    save_file({"item": rows_of(4, 4)}, tmp_path / "ads.safetensors")
    assert "there is no tensor 'user'; matrices there: item" in refused(root, path)


def test_model_was_never_published(root: Path) -> None:
    line = refused(root, "ads")
    assert "no version is live" in line
    assert "docker run --ipc=host" in line


@pytest.mark.drawn(0.5)
def test_shared_memory_is_too_small(tmp_path: Path) -> None:
    """In the 64 MiB that a container gets, with the size that is asked for just enough."""
    shm = tmp_path / "shm"
    shm.mkdir()
    path = write_model(tmp_path, rows=300_000, dim=64, row_format="fp32")  # 73.2 MiB
    line = refused(shm / "tableside", path, prefix=private_mount("size=64m", shm))
    assert re.search(r"has 67,108,864 bytes free, the load needs 7[67],\d{3},\d{3};", line)
    assert line.endswith("docker run --shm-size=128m")
    enough = subprocess.run(
        [*private_mount("size=128m", shm), "tableside", "load", str(path)],
        capture_output=True, text=True, timeout=300, env=environment(shm / "tableside"), check=False,
    )  # fmt: skip
    assert enough.returncode == 0, enough.stderr


def test_a_file_of_torchs_is_estimated_without_it(tmp_path: Path) -> None:
    """A torch.save file is measured by its tables' shapes; torch is not imported (here, that would end the
    process)."""
    import torch

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit(99)")
    torch.save({"user": torch.zeros(1_700_000, 4)}, tmp_path / "ads.pt")  # of 16 bytes each as int8
    shm = tmp_path / "shm"
    shm.mkdir()
    path = describe(tmp_path, "ads.pt")
    prefix = private_mount("size=16m", shm)
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    line = refused(shm / "tableside", path, prefix=prefix, variables={"PYTHONPATH": search})
    assert line.endswith("docker run --shm-size=64m")


@pytest.mark.drawn(0.5)
def test_folder_is_not_writable(tmp_path: Path) -> None:
    """For root, whom permissions do not stop, on a file system that is read-only."""
    shm = tmp_path / "shm"
    shm.mkdir(mode=0o555)
    prefix = [] if os.geteuid() else private_mount("ro", shm)
    line = refused(shm / "tableside", write_model(tmp_path), prefix=prefix)
    assert f"{shm} is not writable by user {os.getuid()}" in line
    assert "set TABLESIDE_ROOT to another one" in line


LOW_MEMLOCK = ["prlimit", "--memlock=65536", "--"]


@pytest.mark.parametrize("variable", ["NVIDIA_VISIBLE_DEVICES", "TABLESIDE_DEVICES"])
@pytest.mark.drawn(1)
def test_memlock_limit_is_too_low_for_a_gpu(root: Path, tmp_path: Path, variable: str) -> None:
    path = write_model(tmp_path, rows=10_000)
    line = refused(root, path, prefix=LOW_MEMLOCK, variables={variable: "0"})
    assert "the memlock limit is 65,536 bytes" in line
    assert line.endswith("docker run --ulimit memlock=-1")


@pytest.mark.drawn(0.5)
def test_memlock_counts_models_that_are_already_published(root: Path, tmp_path: Path) -> None:
    load(read_model(write_model(tmp_path, rows=10_000)), root)
    line = refused(root, "ads", prefix=LOW_MEMLOCK, variables={"NVIDIA_VISIBLE_DEVICES": "all"})
    assert "registering the models with the GPU needs" in line


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"NVIDIA_VISIBLE_DEVICES": ""},
        {"NVIDIA_VISIBLE_DEVICES": "void"},
        {"NVIDIA_VISIBLE_DEVICES": "all", "TABLESIDE_IMAGE": "cpu"},
    ],
    ids=str,
)
def test_memlock_limit_does_not_matter_without_a_gpu(
    root: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    path = write_model(tmp_path)
    command = [*LOW_MEMLOCK, sys.executable, str(PREFLIGHT), str(path), "--", "--workers", "2"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment(root, **variables), check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def preflight() -> ModuleType:
    """docker/preflight.py as a module; it is a script, and belongs to no package."""
    spec = spec_from_file_location("preflight", PREFLIGHT)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("rows", "dim", "row_format"), [(1, 1, "fp32"), (1000, 3, "int8"), (70_001, 128, "int4")]
)
def test_estimate_is_close_and_never_too_small(
    root: Path, tmp_path: Path, rows: int, dim: int, row_format: str
) -> None:
    spec = read_model(write_model(tmp_path, rows=rows, dim=dim, row_format=row_format))
    estimate = preflight().segment_bytes(spec)
    actual = load(spec, root).segment_bytes
    assert actual <= estimate <= actual + (2 << 20)


# ---- the server ----


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def container(root: Path, *arguments: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """The entry point in a session of its own, as a container would run it; nothing of the session
    outlives the block."""
    process = subprocess.Popen(
        [str(ENTRYPOINT), *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=environment(root, **variables),
    )  # fmt: skip
    try:
        yield process
        until(lambda: not session(process.pid), what="the end of the session's processes")
    finally:
        for pid in session(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        assert process.stdout
        process.stdout.close()


def session(leader: int) -> list[int]:
    """The processes of a session, from /proc/PID/stat: pid (command) state parent group session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, sid = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it ended meanwhile
            continue
        if int(sid) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def healthcheck(port: int) -> Run:
    """Runs the image's own check."""
    command = json.loads(last("cpu", "HEALTHCHECK").partition("CMD ")[2])
    variables = environment(Path("/"), TABLESIDE_PORT=str(port))
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=variables, check=False)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose path is short: sockets in it may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        yield Path(folder)


@pytest.mark.thorough
def test_serves_from_load_to_signal(root: Path, tmp_path: Path, temporary: Path) -> None:
    """A model.toml and a published name are served together; the image's check sees it; SIGTERM ends it
    all with 0."""
    load(read_model(write_model(tmp_path / "published", "older")), root)
    path, port = write_model(tmp_path / "new"), free_port()
    values = rows_of(100, 16)
    assert healthcheck(port).returncode == 1
    variables = {"TABLESIDE_PORT": str(port), "TABLESIDE_HOST": "127.0.0.1", "TMPDIR": str(temporary)}
    with container(root, "older", path, "--", "--workers", "1", **variables) as process:
        url = f"http://127.0.0.1:{port}"
        until(lambda: process.poll() is not None or answers(f"{url}/v2/health/ready"), what="readiness")
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert healthcheck(port).returncode == 0
        served = httpx.get(f"{url}/v1/models", trust_env=False).json()["models"]
        assert [model["name"] for model in served] == ["older", "ads"]
        request = {"model": "ads", "features": {"user": [[3, 5], [99]]}}
        response = httpx.post(f"{url}/v1/lookup", json=request, trust_env=False)
        assert response.status_code == 200, response.text
        vectors = np.array(response.json()["vectors"]["user"], np.float32)
        bound = RowFormat.INT8.error_bound(
            float(values.min()), float(values.max())
        )  # of a row; the first bag has two
        np.testing.assert_allclose(vectors, [values[3] + values[5], values[99]], rtol=0, atol=2 * bound)
        assert end(process) == 0
    assert sorted(p.name for p in (root / "ads").glob("*.segment")) == ["1.segment"]
    assert list(temporary.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.parametrize("named", ["model.toml", "ads.safetensors"])
def test_signal_during_the_load_ends_load_and_container(root: Path, tmp_path: Path, named: str) -> None:
    """SIGTERM that comes while rows are read: both processes end at once, nothing is published, the exit
    code is 143."""
    write_model(tmp_path, rows=10)
    slow_safetensors(tmp_path / "ads.safetensors", rows=8_000_000, dim=16)
    with container(root, tmp_path / named, TABLESIDE_HOST="127.0.0.1") as process:
        until(
            lambda: process.poll() is not None or list(root.glob("*/*.partial")), what="the start of the load"
        )
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert end(process) == 128 + signal.SIGTERM
    assert not list(root.glob("*/*.segment"))


def slow_safetensors(path: Path, rows: int, dim: int) -> None:
    """A checkpoint whose rows are a hole of half a GB, which takes no disk."""
    size = rows * dim * 4
    head = json.dumps({"user": {"dtype": "F32", "shape": [rows, dim], "data_offsets": [0, size]}}).encode()
    head = head.ljust(-(-len(head) // 8) * 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    os.truncate(path, 8 + len(head) + size)


@pytest.mark.thorough
def test_load_that_fails_is_the_containers_exit_code(root: Path, tmp_path: Path) -> None:
    """Nothing is served then; the load's own line comes before the server's."""
    path = write_model(tmp_path)
    save_file({"user": np.full((100, 16), np.inf, np.float32)}, tmp_path / "ads.safetensors")
    with container(root, path) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        assert process.wait(DEADLINE_S) == 1
    assert "was not loaded, so nothing is served" in text.splitlines()[-1]
    assert not list(root.glob("*/*.segment"))
