"""Fixtures that every room's tests share. Everything a test publishes lies under one folder that goes with
it."""

import logging
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tables
from support import drop_hot

from tableside.loader.load.load import Loaded, load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.segment.huge_pages import is_on_disk

pytest_plugins = ["drawing"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="interpreter", help="what GPU kernels run on: cuda:0, or Triton's interpreter"
    )


def pytest_configure(config: pytest.Config) -> None:
    # A shell ignores SIGINT in what it starts in the background, and the servers of tests would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    tables.DEVICE = config.getoption("--device")
    if tables.DEVICE == "interpreter":
        os.environ["TRITON_INTERPRET"] = (
            "1"  # read when the kernels are imported; servers that tests start inherit it
        )


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder of published models in shared memory, of this test alone."""
    folder = Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder of published models on a disk, of this test alone: where temporary files lie in memory, beside
    the tests."""
    beside = Path(__file__).parent.parent / "build"
    folder = (tmp_path if is_on_disk(tmp_path) else beside) / f"disk-{uuid.uuid4().hex[:12]}"
    if not is_on_disk(Path(__file__).parent):
        pytest.skip("no file system here is a disk's")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
    drop_hot(folder)


@pytest.fixture
def publish(root: Path, tmp_path: Path) -> Callable[..., Loaded]:
    """publish({"table": values}, name=..., formats={...}, features={...}) -> Loaded: loads arrays through
    a real checkpoint. said: other keys of model.toml."""

    def run(
        tables: dict[str, np.ndarray],
        name: str = "demo",
        formats: dict[str, str] | None = None,
        features: dict[str, dict[str, str]] | None = None,
        settings: LoadSettings = LoadSettings(),  # noqa: B008  (frozen)
        **said: object,
    ) -> Loaded:
        path = tmp_path / f"{name}-{uuid.uuid4().hex[:6]}.npz"
        np.savez(path, **tables)
        raw = {
            "name": name,
            "checkpoint": path.name,
            "tables": {t: {"key": t, "row_format": (formats or {}).get(t, "int8")} for t in tables},
            "features": features or {},
            **said,
        }
        return load(parse_model(raw, tmp_path), root, settings)

    return run


@pytest.fixture(autouse=True)
def _has_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests load as a machine without a GPU does; those of a GPU, or marked `for_gpu`, as one with it."""
    has_gpu = any(map(request.node.get_closest_marker, ("gpu", "for_gpu")))
    monkeypatch.setattr("tableside.loader.model.specs.has_gpu", lambda: has_gpu)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a developer's environment reaches a test, nor what a worker of an earlier test did to the
    log."""
    log = logging.getLogger("tableside")
    monkeypatch.setattr(log, "propagate", True)
    log.setLevel(logging.NOTSET)
    for name in [n for n in os.environ if n.startswith("TABLESIDE_")]:
        monkeypatch.delenv(name)
