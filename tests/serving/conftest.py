"""A real server: `tableside serve` in processes of its own, on a free loopback port."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import Server, publish_demo, running, start_server
from support import end, is_running, until

from tableside.loader.segment.memory import processes_below


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with two workers over the demo model, for all tests that change nothing of it."""
    with running(tmp_path_factory.mktemp("demo"), "--workers", 2) as one:
        yield one


@pytest.fixture
def start(root: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """start(*options) -> a server of this test alone, over the demo model."""
    started: list[Server] = []

    def run(*options: object, models: tuple[str, ...] = ("demo",)) -> Server:
        if not (root / "demo").exists():
            publish_demo(root, tmp_path)
        started.append(start_server(root, *options, models=models))
        return started[-1]

    yield run
    for one in started:
        below = processes_below(one.process.pid)
        end(one.process)
        until(lambda below=below: not any(map(is_running, below)), what="the server's processes to end")
