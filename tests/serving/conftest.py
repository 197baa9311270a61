"""A real server: `tableside serve` in processes of its own, on a free loopback port."""

import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import Server, publish_demo, start_server
from support import end, is_running, until

from tableside.loader.memory import processes_below


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
        below = processes_below(one.process.pid)
        end(one.process)
        until(lambda below=below: not any(map(is_running, below)), what="the server's processes to end")
