"""A Redis server for tests, on a socket in a folder of the test, that is stopped, killed and started
again."""

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COMMAND = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(
    COMMAND is None, reason="redis-server is not installed (Debian: apt-get install redis-server)"
)


class RedisServer:
    """redis-server with its data in a folder. keeps: whether what was written outlives it."""

    def __init__(self, folder: Path, keeps: bool = True) -> None:
        self.folder, self.keeps = folder, keeps
        self.socket = folder / "redis.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def url(self, stream: str) -> str:
        return f"unix://{self.socket}?stream={stream}"

    def client(self) -> Any:
        redis = pytest.importorskip("redis", reason="the redis extra brings Redis's client")
        return redis.Redis.from_url(f"unix://{self.socket}")

    def start(self) -> None:
        """Returns when it answers."""
        assert COMMAND is not None and self.process is None
        kept = ["--appendonly", "yes", "--appendfsync", "always"] if self.keeps else ["--appendonly", "no"]
        command = [
            COMMAND,
            "--port",
            "0",
            "--unixsocket",
            str(self.socket),
            "--dir",
            str(self.folder),
            "--save",
            "",
            *kept,
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 300
        while not self.is_up():
            assert self.process.poll() is None and time.monotonic() < deadline, "redis-server did not come up"
            time.sleep(0.01)

    def is_up(self) -> bool:
        with contextlib.closing(self.client()) as client:
            try:
                return bool(client.ping())
            except Exception as error:
                if type(error).__name__ not in ("ConnectionError", "TimeoutError", "BusyLoadingError"):
                    raise
                return False

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(300)
            self.process = None

    def wipe(self) -> None:
        """Removes its data, while it does not run."""
        assert self.process is None
        shutil.rmtree(self.folder / "appendonlydir", ignore_errors=True)


@contextlib.contextmanager
def redis_server(folder: Path, keeps: bool = True) -> Iterator[RedisServer]:
    server = RedisServer(folder, keeps)
    try:
        yield server
    finally:
        server.end(signal.SIGKILL)
