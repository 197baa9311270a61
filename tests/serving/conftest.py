"""A real server: `tableside serve` in processes of its own, on a free loopback port."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from servers import Server, descendants, start_server
from support import end, rows_of, until

from loader.load import load
from loader.model import parse_model

TABLES = {"user": rows_of(1000, 64, 1), "item": rows_of(300, 32, 2), "word": rows_of(50, 16, 3)}
FORMATS = {"user": "int8", "item": "int4", "word": "fp16"}
FEATURES = {
    "clicked": {"table": "item", "pooling": "mean"},
    "user": {"table": "user", "pooling": "sum"},
    "liked": {"table": "item", "pooling": "sum", "output": "fp16"},
    "text": {"table": "word", "pooling": "none"},
}


def publish_demo(root: Path, folder: Path, tables: dict[str, np.ndarray] = TABLES, name: str = "demo") -> None:
    np.savez(folder / f"{name}.npz", **tables)
    raw = {
        "name": name,
        "checkpoint": f"{name}.npz",
        "tables": {t: {"key": t, "row_format": FORMATS.get(t, "fp32")} for t in tables},
        "features": {f: d for f, d in FEATURES.items() if d["table"] in tables},
    }
    load(parse_model(raw, folder), root)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with two workers over the demo model, for all tests of a module."""
    root = Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}"
    publish_demo(root, tmp_path_factory.mktemp("demo"))
    running = start_server(root, "--workers", 2)
    yield running
    try:
        assert end(running.process) == 0
    finally:
        shutil.rmtree(root)


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """start(*options) -> a server of this test alone, over the demo model."""
    running: list[Server] = []

    def run(*options: object, models: tuple[str, ...] = ("demo",)) -> Server:
        if not (root / "demo").exists():
            publish_demo(root, tmp_path)
        running.append(start_server(root, *options, models=models))
        return running[-1]

    yield run
    for one in running:
        below = descendants(one.process.pid)
        end(one.process)
        until(lambda below=below: not any(Path(f"/proc/{p}").exists() for p in below), what="the server's processes to end")
