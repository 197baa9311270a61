"""Hosts of a test, and connections to owners, which go with it."""

import os
import shutil
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis_servers import RedisServer, free_port, redis_server
from servers import Server, start_server
from support import end, is_running, until

from tableside.loader.segment.memory import processes_below
from tableside.serving.cluster.calls import close_hosts


@pytest.fixture(autouse=True)
def no_connections_stay() -> Iterator[None]:
    yield
    close_hosts()
    if "tableside.loader.redis.servers" in sys.modules:
        sys.modules["tableside.loader.redis.servers"].close_servers()


@pytest.fixture
def roots(tmp_path: Path) -> Iterator[list[Path]]:
    """Folders of two owners and a door."""
    found = [Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}" for _ in range(3)]
    for root in found:
        root.mkdir()
    yield found
    for root in found:
        shutil.rmtree(root)


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def run(root: Path, *options: object, models: tuple[str, ...] = ()) -> Server:
        started.append(start_server(root, *options, models=models))
        return started[-1]

    yield run
    for server in started:
        below = processes_below(server.process.pid)
        for pid in [server.process.pid, *below]:
            if is_running(pid):
                os.kill(pid, signal.SIGCONT)
        end(server.process)
        until(lambda below=below: not any(map(is_running, below)), what="the server's processes to end")


@pytest.fixture(scope="module")
def owners() -> Iterator[Server]:
    """One server for all owners, which takes their models as they are published."""
    root = Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}"
    root.mkdir()
    server = start_server(root, "--all", models=())
    yield server
    try:
        assert end(server.process) == 0
    finally:
        shutil.rmtree(root)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path, False, port=free_port()) as running:
        yield running
