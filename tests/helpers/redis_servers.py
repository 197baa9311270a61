"""Redis servers for tests, on sockets in folders of the test, that are stopped, killed and started again; and
clusters of them."""

import contextlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

COMMAND = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(
    COMMAND is None, reason="redis-server is not installed (Debian: apt-get install redis-server)"
)


class RedisServer:
    """redis-server with its data in a folder. keeps: whether what was written outlives it. port: of TCP; 0:
    none. password: that it asks for."""

    def __init__(
        self, folder: Path, keeps: bool = True, port: int = 0, password: str = "", options: Sequence[str] = ()
    ) -> None:
        self.folder, self.keeps, self.port, self.password = folder, keeps, port, password
        self._options = [*options, *(["--requirepass", password] if password else [])]
        self.socket = folder / "redis.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def url(self, stream: str) -> str:
        return f"unix://{self.socket}?stream={stream}"

    def client(self) -> Any:
        redis = pytest.importorskip("redis", reason="the redis extra brings Redis's client")
        return redis.Redis.from_url(f"unix://{self.socket}", password=self.password or None)

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it answers."""
        assert COMMAND is not None and self.process is None
        kept = ["--appendonly", "yes", "--appendfsync", "always"] if self.keeps else ["--appendonly", "no"]
        command = [
            COMMAND,
            "--port",
            str(self.port),
            "--unixsocket",
            str(self.socket),
            "--dir",
            str(self.folder),
            "--save",
            "",
            *kept,
            *self._options,
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


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def redis_server(folder: Path, keeps: bool = True, **more: Any) -> Iterator[RedisServer]:
    server = RedisServer(folder, keeps, **more)
    try:
        yield server
    finally:
        server.end(signal.SIGKILL)


@contextlib.contextmanager
def redis_sentinel(folder: Path, name: str, main: RedisServer) -> Iterator[str]:
    """A Sentinel that has a replica take a server's place soon after that is gone; yields its HOST:PORT."""
    import redis

    folder.mkdir()
    port, written = free_port(), folder / "sentinel.conf"
    written.write_text(
        f"port {port}\ndir {folder}\nsentinel monitor {name} 127.0.0.1 {main.port} 1\n"
        f"sentinel down-after-milliseconds {name} 500\nsentinel failover-timeout {name} 1000\n"
    )
    assert COMMAND is not None
    process = subprocess.Popen([COMMAND, str(written), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port) as client:
            deadline = time.monotonic() + 300
            while True:
                with contextlib.suppress(redis.RedisError):
                    if client.execute_command("SENTINEL", "REPLICAS", name):
                        break
                assert process.poll() is None and time.monotonic() < deadline, "Sentinel found no replica"
                time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


SLOTS = 16384


class RedisCluster:
    """Nodes of a cluster, which have slots alike. replicas: of the first ones."""

    def __init__(self, nodes: Sequence[RedisServer], replicas: Sequence[RedisServer] = ()) -> None:
        self.nodes, self.replicas = nodes, replicas
        first, *others = (node.client() for node in nodes)
        for n, client in enumerate((first, *others)):
            start, end = (SLOTS * k // len(nodes) for k in (n, n + 1))
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", start, end - 1)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
        followers = [replica.client() for replica in replicas]
        for node, client in zip((*nodes[1:], *replicas), (*others, *followers), strict=True):
            bus = client.config_get("cluster-port")["cluster-port"]
            first.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        self._wait(lambda: all(self._is_ok(client) for client in (first, *others, *followers)))
        for n, client in enumerate(followers):
            client.execute_command("CLUSTER", "REPLICATE", self._id(n))
        told = first, *others
        self._wait(lambda: all(self._replicas(client) == len(followers) for client in told))

    @staticmethod
    def _wait(is_up: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 300
        while not is_up():
            assert time.monotonic() < deadline, "the cluster did not come up"
            time.sleep(0.05)

    @staticmethod
    def _replicas(client: Any) -> int:
        return sum(
            len(servers) - 1 for _, _, *servers in client.execute_command("CLUSTER SLOTS", NEVER_DECODE=True)
        )

    def _is_ok(self, client: Any) -> bool:
        info = client.execute_command("CLUSTER INFO")
        return info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == len(
            [*self.nodes, *self.replicas]
        )

    def begin_move(self, slot: int, of: int, to: int) -> None:
        """Has a node of these begin to give a slot to another one."""
        ids = [self._id(n) for n in (of, to)]
        self.nodes[to].client().execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        self.nodes[of].client().execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])

    def move_keys(self, slot: int, of: int, to: int, most: int) -> int:
        """Moves so many of a slot's keys; returns how many there were."""
        client = self.nodes[of].client()
        keys = client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, most)
        if keys:
            client.migrate("127.0.0.1", self.nodes[to].port, keys, 0, 60000)
        return len(keys)

    def end_move(self, slot: int, to: int) -> None:
        for node in self.nodes:
            node.client().execute_command("CLUSTER", "SETSLOT", slot, "NODE", self._id(to))

    def _id(self, node: int) -> str:
        found: bytes = self.nodes[node].client().execute_command("CLUSTER", "MYID")
        return found.decode()


@contextlib.contextmanager
def redis_cluster(folder: Path, nodes: int = 3, replicas: int = 0) -> Iterator[RedisCluster]:
    with contextlib.ExitStack() as running:
        started = []
        for n in range(nodes + replicas):
            (folder / f"node{n}").mkdir()
            options = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
            # A node that is stopped for a moment keeps its slots, and the others answer meanwhile
            options += ["--cluster-node-timeout", "60000", "--cluster-require-full-coverage", "no"]
            server = redis_server(folder / f"node{n}", False, port=free_port(), options=options)
            started.append(running.enter_context(server))
        yield RedisCluster(started[:nodes], started[nodes:])
