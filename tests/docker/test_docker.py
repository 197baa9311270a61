"""The images' files, checked without a Docker engine: linted and parsed."""

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from image_files import DOCKER, ENTRYPOINT, PATH, REPOSITORY, last, stages

from tableside.serving.settings import ServerSettings
from tableside.serving.sizes import parse_bytes
from tableside.serving.workers import supervisor


def linted(tool: str, *files: Path) -> str:
    """What a linter says of files; it comes with the extra `dev`."""
    found = shutil.which(tool, path=PATH)
    assert found, f"{tool} is missing; pip install -e '.[dev]'"
    result = subprocess.run(
        [found, *map(str, files)], capture_output=True, text=True, timeout=300, check=False
    )
    return result.stdout + result.stderr


def test_hadolint_has_nothing_to_say_of_the_dockerfile() -> None:
    assert linted("hadolint", DOCKER / "Dockerfile") == ""


def test_shellcheck_has_nothing_to_say_of_the_scripts() -> None:
    assert linted("shellcheck", ENTRYPOINT, MAKE_WHEEL) == ""


MAKE_WHEEL = REPOSITORY / "builder" / "make_wheel.sh"


@pytest.mark.parametrize("script", [ENTRYPOINT, MAKE_WHEEL], ids=lambda p: p.name)
def test_script_parses_and_may_be_executed(script: Path) -> None:
    assert os.access(script, os.X_OK)
    shell = (
        script.read_text().splitlines()[0].split()[-1].rpartition("/")[2]
    )  # of "#!/bin/sh", "#!/usr/bin/env bash"
    subprocess.run([shell, "-n", script], timeout=300, check=True)


@pytest.mark.parametrize(
    ("target", "extras"),
    [("slim", ""), ("cpu", "torch,eval,grpc,kafka,redis"), ("cuda", "gpu,eval,grpc,kafka,redis")],
)
def test_image_is_small_unprivileged_and_checked(target: str, extras: str) -> None:
    """A final image runs as a numeric user that is not root, has a compiler only for Triton, and says when
    it is healthy."""
    assert int(last(target, "USER")) > 0
    assert last(target, "EXPOSE") == "8000"
    assert json.loads(last(target, "ENTRYPOINT")) == ["/opt/tableside/entrypoint.sh"]
    assert "--start-period=" in last(target, "HEALTHCHECK")
    commands = " ".join(rest for name, rest in stages()[target] if name == "RUN")
    assert ("gcc" in commands) == (target == "cuda")
    assert (
        commands.count("apt-get install")
        == commands.count("rm -rf /var/lib/apt/lists/*")
        == (target == "cuda")
    )
    assert re.findall(r"\[([a-z,]+)\]", commands) == [e for e in [extras] if e]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert {e for e in extras.split(",") if e} <= set(project["optional-dependencies"])


@pytest.mark.parametrize("target", ["slim", "cpu", "cuda"])
def test_an_image_says_what_it_is(target: str) -> None:
    """Its labels are OCI's predefined ones, and what the package says of itself."""
    labels = dict(word.split("=", 1) for word in shlex.split(last(target, "LABEL")))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    keys = {"title": "name", "description": "description", "version": "version", "licenses": "license"}
    assert labels == {f"org.opencontainers.image.{label}": project[key] for label, key in keys.items()}


def test_builder_gets_every_package_and_installs_no_compiler() -> None:
    """pip brings the compiler for the build alone (builder/native_build.py)."""
    builder = stages()["builder"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    copied = {source for name, rest in builder if name == "COPY" for source in rest.split()[:-1]}
    setuptools = project["tool"]["setuptools"]
    folders = {"tableside", *setuptools["package-dir"].values(), *project["build-system"]["backend-path"]}
    files = {"pyproject.toml", "setup.py", project["project"]["readme"], *project["project"]["license-files"]}
    assert copied == folders | files
    (command,) = [rest for name, rest in builder if name == "RUN"]
    assert "--config-settings=glibc=" in command
    assert "apt-get" not in command


def test_build_sees_all_that_it_copies() -> None:
    """.dockerignore lets exactly the sources of the COPY lines through."""
    copies = [rest.split()[:-1] for stage in stages().values() for name, rest in stage if name == "COPY"]
    sources = {source for words in copies for source in words if not source.startswith("--")}
    ignore = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    assert sources == {line[1:] for line in ignore if line.startswith("!")}


def test_nothing_is_fetched_by_a_url_and_no_image_is_latest() -> None:
    """No ADD, no host in a tracked file but this machine's, and a tag on every image."""
    assert not [1 for stage in stages().values() for name, _ in stage if name == "ADD"]
    assert "://" not in "".join(p.read_text() for p in DOCKER.iterdir() if p.is_file())
    text = (DOCKER / "Dockerfile").read_text()
    based_on = {image for image in re.findall(r"^FROM (\S+)", text, re.MULTILINE) if image not in stages()}
    assert based_on == {"${PYTHON_IMAGE}"}  # a digest of it can be given where images are built
    images = re.findall(r"^ARG PYTHON_IMAGE=(\S+)", text, re.MULTILINE)
    choices = [s["image"] for s in compose()["services"].values() if "image" in s]
    choices.append(compose()["services"]["tableside"]["build"]["args"]["PYTHON_IMAGE"])
    images += [re.fullmatch(r"\$\{\w+_IMAGE:-(.+)\}", choice)[1] for choice in choices]  # type: ignore[index]
    assert images[0] == images[-1]
    assert all(re.fullmatch(r"[\w./-]+:v?\d[\w.-]*", image) for image in images)


def compose() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return parsed


def test_compose_runs_the_server() -> None:
    """The CPU image with room for its tables, models it cannot change, reachable from this machine only."""
    service = compose()["services"]["tableside"]
    assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).samefile(
        DOCKER / "Dockerfile"
    )
    assert service["build"]["target"] in stages()
    assert last("cpu", "ARG").rstrip("=") in service["build"]["args"]
    assert int(service["shm_size"].removesuffix("gb")) >= 1
    assert service["ulimits"]["memlock"] == -1
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert [v.rsplit(":", 2)[1:] for v in service["volumes"]] == [["/models", "ro"]]
    assert all(m.startswith("/models/") for m in service["command"])
    assert "disable" not in service["healthcheck"]


@pytest.mark.parametrize("name", ["tableside", "prometheus"])
def test_compose_confines_its_services(name: str) -> None:
    """They come back after a crash, hold no capability, write to no image, and have a bound on memory and
    logs."""
    service = compose()["services"][name]
    assert service["restart"] == "unless-stopped" and service["read_only"] is True
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert service["mem_limit"] and service["logging"]["options"]["max-size"]


def test_compose_waits_for_an_orderly_end() -> None:
    """Longer than drain, the running requests and the supervisor's patience; what lies in /dev/shm counts
    as memory."""
    service, settings = compose()["services"]["tableside"], ServerSettings(models=())
    patience_s = settings.drain_s + settings.shutdown_timeout_s + supervisor._GRACE_S
    assert float(service["stop_grace_period"].removesuffix("s")) > patience_s
    assert parse_bytes(service["mem_limit"].upper()) > parse_bytes(service["shm_size"].upper()) + (512 << 20)
    assert [m.partition(":")[0] for m in service["tmpfs"]] == ["/tmp"]  # the forkserver's socket lies there


def test_prometheus_scrapes_the_server() -> None:
    services = compose()["services"]
    mounted, target, mode = services["prometheus"]["volumes"][0].split(":")
    assert (target, mode) == ("/etc/prometheus/prometheus.yml", "ro")
    (job,) = yaml.safe_load((DOCKER / mounted).read_text())["scrape_configs"]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    (host, port) = job["static_configs"][0]["targets"][0].split(":")
    assert host in services
    assert port == last("cpu", "EXPOSE")
