"""Doors, engine processes and clients that hold regions die at random instants, while other clients ask and
versions change.

Promised: no answer is wrong or mixed, and no request fails through a client that tries again. What a door
dies of leaves its engine as it was. An engine that is killed or stopped, even while it starts, is replaced,
and doors keep their connections. A client that dies in the midst of a request leaves nothing: its regions end
with their objects, and what its door held for it is free again.

The oracle: clients are processes of their own, as in campaigns/kills.py; those with regions know every row
too, and compare what was written to their memory. What is replaced, and what stays, is read from /proc: an
engine by its name, the memory that doors and engine share by what processes have mapped.

Engines run on a GPU where there is one, else in Triton's interpreter.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from campaigns.common import (
    folders,
    publish,
    random_of,
    standalone,
    until,
    workers_of,
)
from campaigns.holders import GONE_S, REPLACED_S, Holders, regions_of
from campaigns.kills import CLIENTS, Board, ask, publish_until
from tableside.loader.segment.memory import processes_below
from tableside.quant.contract import INTERPRETER
from tableside.quant.device.architecture import architectures
from tableside.serving.cli.local import local_server
from tableside.serving.engine_process.main import NAME

DOORS = 2
RETRIES = 10  # a request in the interpreter takes so long that several of its doors may be killed
PUBLISH_EVERY_S, STOPPED_S = 4.0, 0.5
REQUEST_MEMORY = "tableside-requests"  # what a door shares with its engine, as /proc names it
KINDS = {
    "door": 4,
    "doors": 1,
    "engine": 3,
    "engine as it starts": 1,
    "engine stops": 1,
    "both": 1,
    "client": 4,
}  # how often


@contextmanager
def device() -> Iterator[str]:
    """What `tableside serve --devices` takes: the first GPU, or Triton's interpreter, for processes that
    are started within."""
    if architectures():
        yield "0"
        return
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield INTERPRETER
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]


# ---- what dies ----


class Tormentor:
    """Does things to a server's doors and to its engine."""

    def __init__(self, supervisor: int, port: int, root: Path, chance: random.Random) -> None:
        self.supervisor, self.port, self.root, self.chance = supervisor, port, root, chance
        self.door_kills = self.engine_kills = self.starting_kills = self.stops = self.engines_lost = (
            self.doors_lost
        ) = 0
        self.replaced_s: list[float] = []

    def doors(self) -> list[int]:
        return [pid for pid in workers_of(self.supervisor, self.root) if not is_engine(pid)]

    def engines(self) -> list[int]:
        return [pid for pid in workers_of(self.supervisor, self.root) if is_engine(pid)]

    def engine(self) -> int:
        """The engine. Its maps are read while it maps another version, so it may be missing for a moment."""
        found: list[int] = []

        def is_one() -> bool:
            found[:] = self.engines()
            return len(found) == 1

        until(is_one, REPLACED_S, "one engine")
        return found[0]

    def kill_doors(self, count: int) -> None:
        """Kills doors, and waits for their successors. The engine stays, or it is counted as lost."""
        engine = self.engine()
        self._end(self.chance.sample(self.doors(), count))
        self.settle()
        self.engines_lost += self.engine() != engine

    def kill_engine(self, *, twice: bool = False, with_door: bool = False) -> None:
        """Kills the engine, and waits for a successor that serves. Doors that were not killed stay, or are
        counted as lost.

        twice: its successor, too, while it starts.
        """
        engine, doors = self.engine(), self.doors()
        victims = doors[:1] if with_door else []
        started = time.monotonic()
        self._end([engine, *victims])
        if twice:
            until(lambda: self._starting(engine), REPLACED_S, "a successor that starts", pause_s=0.001)
            time.sleep(self.chance.uniform(0, 1))
            for pid in self._starting(engine):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.starting_kills += 1
        self.settle()
        self.replaced_s.append(time.monotonic() - started)
        self.doors_lost += bool({*doors[len(victims) :]} - {*self.doors()})

    def stop_engine(self) -> None:
        """Stops the engine for a moment, which requests wait out."""
        engine = self.engine()
        os.kill(engine, signal.SIGSTOP)
        try:
            time.sleep(self.chance.uniform(0, STOPPED_S))
        finally:
            os.kill(engine, signal.SIGCONT)
        self.stops += 1

    def settle(self) -> None:
        """Waits until there are as many doors as ever, and one engine, and the doors say that they are
        ready."""
        until(
            lambda: len(self.doors()) == DOORS and len(self.engines()) == 1,
            REPLACED_S,
            "every process's successor",
        )
        for _ in range(2 * DOORS):  # connections fall on any of them
            until(self._is_ready, REPLACED_S, "doors that are ready")

    def held(self) -> int:
        """How many doors' memory the engine has mapped."""
        engine = self.engine()
        with open(f"/proc/{engine}/maps") as maps:
            return sum(REQUEST_MEMORY in line for line in maps)

    def _end(self, pids: list[int]) -> None:
        for pid in pids:
            self.engine_kills += is_engine(pid)
            self.door_kills += not is_engine(pid)
            os.kill(pid, signal.SIGKILL)

    def _starting(self, ended: int) -> list[int]:
        """Engine processes other than one that ended, whether or not they have mapped anything."""
        return [pid for pid in processes_below(self.supervisor) if pid != ended and is_engine(pid)]

    def _is_ready(self) -> bool:
        with (
            contextlib.suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection,
        ):
            connection.sendall(
                b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            )
            return connection.recv(4096).startswith(b"HTTP/1.1 200")
        return False


def is_engine(pid: int) -> bool:
    """Whether a process lives and has the name of an engine."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and Path(f"/proc/{pid}/comm").read_text().startswith(NAME)
    return False


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign: each kind of death once, then in a random order until the time is up."""
    board, chance = Board(), random_of(seed, "engines")
    with folders() as (root, files), device() as name:
        publish(root, files, value=1)
        placed = (
            ("hbm",) if name == INTERPRETER else ("cached", "--hbm-budget", "1MiB")
        )  # the interpreter takes a second for a cache
        options = ("--devices", name, "--gpu-from-ids", "0", "--placement", *placed)
        with local_server(["demo"], *options, "--allow-client-shm", root=root, workers=DOORS) as server:
            port = int(urlsplit(server.url).port or 0)
            spawn = multiprocessing.get_context("spawn")
            clients = [
                spawn.Process(target=ask, args=(server.url, seed, c, board, RETRIES)) for c in range(CLIENTS)
            ]
            publisher = threading.Thread(target=publish_until, args=(board, root, files, PUBLISH_EVERY_S))
            tormentor, holders = Tormentor(server.pid, port, root, chance), Holders(port, seed)
            publisher.start()
            for client in clients:
                client.start()
            try:
                until(lambda: board.total("checked") > 0, REPLACED_S, "the clients' first answer")
                _torment(tormentor, holders, chance, seconds)
            finally:
                board.stop.set()
                publisher.join()
                for client in clients:
                    client.join()
                holders.stop()
            tormentor.settle()
            leaked = _leaked(tormentor, port)
    return {
        "requests checked": board.total("checked"),
        "requests checked in regions": holders.total(0),
        "wrong answers": board.total("wrong") + holders.total(1),
        "answers mixed from two versions": board.total("mixed"),
        "stale answers": board.total("stale"),
        "failed through the client": board.total("failed") + sum(c.exitcode != 0 for c in clients),
        "failed in regions": holders.total(2),
        "doors killed": tormentor.door_kills,
        "engines killed": tormentor.engine_kills,
        "of their successors killed as they started": tormentor.starting_kills,
        "engines stopped for a moment": tormentor.stops,
        "clients killed that held a region": holders.killed,
        "regions that outlived their object": holders.stayed,
        "engines lost to a door": tormentor.engines_lost,
        "doors lost to an engine": tormentor.doors_lost,
        "memory of doors that an engine keeps": leaked,
        "versions published meanwhile": board.value.value,
        "engine served again, median s": statistics.median(tormentor.replaced_s),
        "engine served again, slowest s": max(tormentor.replaced_s),
    }


def _torment(tormentor: Tormentor, holders: Holders, chance: random.Random, seconds: float) -> None:
    end = time.monotonic() + seconds
    first = list(KINDS)
    chance.shuffle(first)
    while first or time.monotonic() < end:
        match first.pop() if first else chance.choices([*KINDS], [*KINDS.values()])[0]:
            case "door":
                tormentor.kill_doors(1)
            case "doors":
                tormentor.kill_doors(DOORS)
            case "engine":
                tormentor.kill_engine()
            case "engine as it starts":
                tormentor.kill_engine(twice=True)
            case "both":
                tormentor.kill_engine(with_door=True)
            case "engine stops":
                tormentor.stop_engine()
            case "client":
                holders.kill(chance)
        time.sleep(chance.uniform(0, 0.3))


def _leaked(tormentor: Tormentor, port: int) -> int:
    """Doors' memory that the engine has mapped beyond that of the doors there are, once nobody asks."""
    with contextlib.suppress(TimeoutError):
        until(lambda: tormentor.held() == DOORS and not regions_of(port), GONE_S, "memory to be given back")
    return abs(tormentor.held() - DOORS)


if __name__ == "__main__":
    standalone(run)
