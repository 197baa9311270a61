"""What is installed and how: the base without extras, one name to import, what is declared, how the kernel
is compiled."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from scorers import Ctr, exported, publish_scored
from support import rows_of
from towers import publish_towers

import tableside
from tableside.quant.installed import pair_fits

TOP = Path(__file__).parent.parent
FIXTURES = TOP / "tests" / "fixtures"
PROJECT = tomllib.loads((TOP / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
ALL_EXTRAS = "torch fbgemm_gpu triton pyarrow ray safetensors opentelemetry.sdk"
NATIVE = "tableside.quant.cpu._native"


# ---- one name to import ----


def test_every_public_name_is_there_and_documented() -> None:
    for name in tableside.__all__:
        assert getattr(tableside, name).__doc__, name
        assert re.search(rf"\b{name}\b", tableside.__doc__ or ""), name


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'loadd'"):
        tableside.loadd  # noqa: B018


def test_a_client_imports_no_server_and_no_torch() -> None:
    script = (
        "import sys, tableside; from tableside import Client; print({'torch', 'fastapi', 'uvicorn'} & "
        "{*sys.modules})"
    )
    assert python("-c", script).stdout == "set()\n"


@pytest.mark.drawn(0.5)
def test_the_module_is_the_command() -> None:
    found = python("-m", "tableside", "--version")
    assert (found.returncode, found.stdout) == (0, f"tableside {metadata.version('tableside')}\n")


@pytest.mark.thorough
def test_a_users_own_modules_of_our_rooms_names_break_nothing(tmp_path: Path) -> None:
    """A project with its own loader.py, quant.py and serving/ loads, serves, looks up; `make wheel` runs it
    on the wheel, too.

    Once with the checkout on the path, and once with the editable installation where these tests run in one.
    """
    shutil.copytree(FIXTURES / "strangers_project", tmp_path / "project")
    ways = [{"PYTHONPATH": str(TOP)}, *([{"PYTHONPATH": ""}] if is_editable() else [])]
    for way in ways:
        found = python("main.py", cwd=tmp_path / "project", **way)
        assert found.returncode == 0, (way, found.stderr)
        assert found.stdout.endswith(f"tableside from {TOP / 'tableside'}\n")


def is_editable() -> bool:
    """Whether the tableside that is installed is this checkout's."""
    script = "import tableside; print(tableside.__file__)"
    return python("-c", script, cwd=Path("/"), PYTHONPATH="").stdout.startswith(str(TOP))


def python(*arguments: str, cwd: Path = TOP, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, *arguments], {**os.environ, **variables}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment, check=False
    )


# ---- without extras ----


def without(packages: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line where `packages` are not installed."""
    path = os.pathsep.join([str(FIXTURES / "without"), str(TOP)])
    return python("-m", "tableside", *map(str, arguments), WITHOUT=packages, PYTHONPATH=path)


def refusal(packages: str, *arguments: object) -> str:
    """The one line that a command ends with where `packages` are not installed."""
    found = without(packages, *arguments)
    assert found.returncode == 1, found
    (line,) = found.stderr.splitlines()
    return line


def write_checkpoint(folder: Path, kind: str) -> Path:
    """A model.toml of one table in a checkpoint of a kind."""
    values, key = rows_of(40, 8), "user"
    name = f"checkpoint.{kind}"
    if kind == "npz":
        np.savez(folder / name, user=values)
    elif kind == "pt":
        torch.save({"user": torch.from_numpy(values)}, folder / name)
    elif kind == "safetensors":
        save_file({"user": values}, folder / name)
    else:
        shutil.copytree(FIXTURES / "torchrec_dcp", folder / name)
        from tableside.loader.checkpoint import open_checkpoint

        with open_checkpoint(folder / name) as found:
            key = min(found.matrices)
    path = folder / "model.toml"
    path.write_text(
        f'name = "demo"\ncheckpoint = "{name}"\n[tables.user]\nkey = "{key}"\nrow_format = "fp32"\n'
    )
    return path


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("kind", ["npz", "pt", "dcp", "safetensors"])
def test_the_base_loads_every_kind_of_checkpoint(kind: str, tmp_path: Path, root: Path) -> None:
    found = without(ALL_EXTRAS, "load", write_checkpoint(tmp_path, kind), "--root", root)
    assert (found.returncode, found.stderr) == (0, "")
    assert without(ALL_EXTRAS, "verify", "demo", "--root", root).stdout == "demo version 1: whole\n"


@pytest.mark.thorough
def test_the_base_serves_looks_up_and_scores_with_dot(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "strangers_project", tmp_path / "project")
    path = os.pathsep.join([str(FIXTURES / "without"), str(TOP)])
    found = python("main.py", cwd=tmp_path / "project", PYTHONPATH=path, WITHOUT=ALL_EXTRAS)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("lookups on native")


@pytest.mark.thorough
def test_a_program_without_torch_names_the_extra(tmp_path: Path, root: Path) -> None:
    """Where it would be published, and where it would be served."""
    program = exported(Ctr(8, 8, 4), user=8, clicked=8, context=4)
    (tmp_path / "s.pt2").write_bytes(program)
    path = write_checkpoint(tmp_path, "npz")
    path.write_text(path.read_text() + '[features.user]\ntable = "user"\n[scorer]\nprogram = "s.pt2"\n')
    assert refusal("torch", "load", path, "--root", root).endswith(
        "torch, which is not installed; install tableside[torch]"
    )
    publish_scored(root, tmp_path, one_feature())
    line = refusal("torch", "serve", "demo", "--root", root, "--port", "0")
    assert line.endswith("needs torch, which is not installed; install tableside[torch]")


def one_feature() -> bytes:
    """A program that takes the one feature of `publish_scored`'s model."""

    class Sum(torch.nn.Module):
        def forward(self, user: torch.Tensor) -> torch.Tensor:
            return user.sum(1)

    return exported(Sum(), user=8)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("absent", "options", "extra"),
    [
        ("torch triton", ("--devices", "0"), "gpu"),
        ("triton", ("--devices", "0"), "gpu"),
        ("fbgemm_gpu", ("--backend", "fbgemm"), "fbgemm"),
        ("torch fbgemm_gpu", ("--backend", "fbgemm"), "fbgemm"),
        ("opentelemetry.sdk", ("--traces", "console"), "otel"),
    ],
)
def test_a_server_without_a_package_names_the_extra(
    absent: str, options: tuple[str, ...], extra: str, tmp_path: Path, root: Path
) -> None:
    publish_towers(root, tmp_path)
    line = refusal(absent, "serve", "towers", "--root", root, "--port", "0", *options)
    assert line.endswith(f"not installed; install tableside[{extra}]")


@pytest.mark.drawn(0.5)
def test_an_evaluation_without_pyarrow_names_the_extra(tmp_path: Path, root: Path) -> None:
    publish_towers(root, tmp_path)
    (tmp_path / "data.jsonl").write_text('{"user": 1, "item": 2, "label": 1}\n')
    line = refusal(
        "pyarrow", "eval", "towers", tmp_path / "data.jsonl", "--out", tmp_path / "out", "--root", root
    )
    assert line.endswith("install tableside[eval]")


@pytest.mark.drawn(0.5)
def test_a_redis_stream_without_its_client_names_the_extra(tmp_path: Path, root: Path) -> None:
    publish_towers(root, tmp_path)
    line = refusal("hiredis", "follow", "towers", "redis://localhost?stream=k", "--root", root)
    assert line == "tableside: a Redis stream needs hiredis, which is not installed; install tableside[redis]"


@pytest.mark.drawn(0.5)
def test_fbgemm_modules_and_stashing_name_their_extras() -> None:
    path = os.pathsep.join([str(FIXTURES / "without"), str(TOP)])
    script = "from tableside.loader.tbe.tbe import init_tbe; init_tbe([])"
    found = python("-c", script, PYTHONPATH=path, WITHOUT="fbgemm_gpu")
    assert found.stderr.splitlines()[-1].endswith("is not installed; install tableside[fbgemm]")
    found = python("-c", "from tableside import stash_embedding_weights", PYTHONPATH=path, WITHOUT="torch")
    assert found.stderr.splitlines()[-1].endswith("is not installed; install tableside[torch]")


def test_without_its_extensions_the_command_ends_with_one_line(root: Path) -> None:
    """Which says what to do."""
    line = refusal(NATIVE, "list", "--root", root)
    assert line.startswith("tableside: tableside's C extensions do not import (")
    assert line.endswith(
        "install its wheel, or build a checkout with a C compiler and Python.h: pip install ."
    )


# ---- what is declared ----

MODULES = {
    "confluent-kafka": "confluent_kafka",
    "typing-extensions": "typing_extensions",
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "posix-ipc": "posix_ipc",
    "prometheus-client": "prometheus_client",
    "protobuf": "google",
    "pydantic-settings": "pydantic_settings",
    "fbgemm-gpu-cpu": "fbgemm_gpu",
    "pyyaml": "yaml",
    "fastapi-offline": "fastapi_offline",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}

BY_NAME = {
    "uvloop",
    "hiredis",
}  # uvicorn imports the one, as the workers' configuration names it, and redis the other


def modules(requirements: list[str]) -> set[str]:
    """What the packages of requirements are imported as."""
    names = [re.split(r"[\[<>=; ]", r)[0] for r in requirements]
    return {MODULES.get(name, name) for name in names}


def imported_packages() -> set[str]:
    """What the rooms import of others."""
    found = set()
    for file in (
        f for room in ("tableside", "quant", "loader", "serving") for f in (TOP / room).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"tableside"}


CALLERS = {"torchrec"}  # imported where a caller gives its tensors, and so has it


@pytest.mark.drawn(0.5)
def test_what_is_imported_is_declared_and_what_is_declared_imported() -> None:
    base = modules(PROJECT["project"]["dependencies"])
    names = ("torch", "fbgemm", "gpu", "eval", "grpc", "kafka", "otel", "ray", "redis")
    extras = modules([requirement for name in names for requirement in EXTRAS[name]])
    assert not base & extras
    assert (imported_packages() - CALLERS) | BY_NAME == base | extras


def test_fbgemm_comes_with_the_torch_that_it_was_built_for() -> None:
    versions = dict(r.split("==") for r in EXTRAS["fbgemm"])
    assert pair_fits(versions["fbgemm-gpu-cpu"], versions["torch"])


@pytest.mark.parametrize(("alias", "extras"), [("cpu", "torch,fbgemm"), ("cuda", "gpu"), ("test", "dev")])
def test_extras_by_their_old_names(alias: str, extras: str) -> None:
    assert EXTRAS[alias] == [f"tableside[{extras}]"]


def test_every_package_is_listed() -> None:
    """A folder that is not would be missing from a wheel."""
    setuptools = PROJECT["tool"]["setuptools"]
    rooms = {"tableside": "tableside", **setuptools["package-dir"]}
    folders = {
        ".".join([name, *f.parent.relative_to(TOP / at).parts])
        for name, at in rooms.items()
        for f in (TOP / at).rglob("*.py")
    }
    assert {f for f in folders if "__pycache__" not in f} == set(setuptools["packages"])


# ---- how the kernel is compiled ----


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """builder/native_build.py, as pip imports it, where the environment names no compiler."""
    monkeypatch.delenv("CC", raising=False)
    spec = spec_from_file_location("native_build", TOP / "builder" / "native_build.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_checkout_is_compiled_by_what_is_there(backend: ModuleType) -> None:
    assert backend.ZIG not in backend.get_requires_for_build_wheel()
    with backend._compiler(None, "aarch64"):
        assert "CC" not in os.environ


def test_a_wheel_for_a_glibc_brings_its_compiler(backend: ModuleType) -> None:
    """And for a processor, for the build alone; the environment is as before afterwards."""
    assert backend.ZIG in backend.get_requires_for_build_wheel({"glibc": "2.28"})
    before = dict(os.environ)  # setuptools has added to it
    with backend._compiler("2.28", "aarch64"):
        assert re.fullmatch(
            r"\S+ -m ziglang cc -target aarch64-linux-gnu\.2\.28 -idirafter \S+", os.environ["CC"]
        )
        assert sysconfig.get_platform() == "linux-aarch64"
    assert dict(os.environ) == before


@pytest.mark.thorough
def test_the_wheel_builds_for_the_oldest_glibc(tmp_path: Path) -> None:
    """As `make wheel` builds it. A function that glibc has since then does not exist there."""
    shutil.copytree(TOP, tmp_path / "here", ignore=shutil.ignore_patterns(".*", "build", "dist", "*.so"))
    old = "--config-settings", "glibc=2.17", "--wheel-dir", str(tmp_path)
    found = python("-m", "pip", "wheel", "--quiet", "--no-deps", *old, ".", cwd=tmp_path / "here")
    assert found.returncode == 0, found.stderr[-2000:]
    assert len([*tmp_path.glob("tableside-*.whl")]) == 1
