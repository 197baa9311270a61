"""Workers are killed, stopped and replaced while clients ask and versions change.

Promised: no answer is wrong or mixed, no request fails through the client with its retries, and a killed
worker is replaced by one that answers within a second. A worker that is stopped (SIGSTOP) for a moment delays
requests and breaks none. A kill while a version is published leaves the server with the old version or the
new one, and soon with the new one.

The oracle: clients are processes of their own. They know each version's rows by formula (common.told),
compare every value, and call an answer stale when it comes from a version that had been replaced ten seconds
before the request was sent. A replacement is seen from outside: a process that is new below the supervisor
holds a connection of ours that was answered.
"""

import multiprocessing
import os
import random
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from campaigns.common import (
    DIM,
    ROWS,
    TABLES,
    answered_by,
    folders,
    publish,
    random_of,
    standalone,
    told,
    until,
    version_told,
    workers_of,
)
from tableside.serving.cli.local import local_server
from tableside.serving.client import Client, ClientError, Jagged

WORKERS, CLIENTS = 2, 2
STALE_AFTER_S, STOPPED_S, PUBLISH_EVERY_S = 10.0, 0.5, 1.5
COUNTS = ("checked", "wrong", "mixed", "stale", "failed")


class Board:
    """What the campaign and its clients share: which version is live, when to stop, and each client's
    counts."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.value, self.since = spawn.Value("q", 1), spawn.Value("d", 0.0)
        self.stop = spawn.Event()
        self.counts = spawn.Array("q", len(COUNTS) * CLIENTS, lock=False)

    def count(self, client: int, what: str, times: int = 1) -> None:
        self.counts[client * len(COUNTS) + COUNTS.index(what)] += times

    def total(self, what: str) -> int:
        return sum(self.counts[COUNTS.index(what) :: len(COUNTS)])


def ask(url: str, seed: int, client: int, board: Board, retries: int = 2) -> None:
    """A client's process: looks up, compares and counts until the board says stop."""
    rng = np.random.default_rng([seed, client])
    with Client(url, retries=retries) as connection:
        while not board.stop.is_set():
            ids = rng.integers(0, ROWS, 20)
            lengths = rng.multinomial(20, np.full(5, 0.2))
            live, since, began = board.value.value, board.since.value, time.monotonic()
            try:
                found = connection.lookup("demo", {"user": Jagged(ids, [20]), "bought": Jagged(ids, lengths)})
            except ClientError as error:
                print(f"kills: a request failed: {error}", flush=True)
                board.count(client, "failed")
                continue
            value = version_told(found["user"], ids)
            board.count(client, "checked")
            if value is None:
                board.count(client, "wrong")
            elif not np.array_equal(found["bought"], pooled(value, ids, lengths)):
                board.count(client, "mixed")
            elif value < live and began > since + STALE_AFTER_S:
                board.count(client, "stale")


def pooled(value: int, ids: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Sums of the item rows of each bag in that version: fp32 [bags, 8]."""
    bags = np.split(told(TABLES["item"], value, ids), np.cumsum(lengths)[:-1])
    return np.stack([bag.sum(0) if len(bag) else np.zeros(DIM, np.float32) for bag in bags])


def publish_until(board: Board, root: Path, files: Path, every_s: float = PUBLISH_EVERY_S) -> None:
    """A new version now and then, each of the next value."""
    while not board.stop.wait(every_s):
        publish(root, files, board.value.value + 1)
        (files / f"demo-{board.value.value}.npz").unlink(missing_ok=True)
        board.value.value, board.since.value = board.value.value + 1, time.monotonic()


class Tormentor:
    """Does things to a server's workers."""

    def __init__(self, supervisor: int, url: str, root: Path, chance: random.Random) -> None:
        self.supervisor, self.port, self.root, self.chance = (
            supervisor,
            int(urlsplit(url).port or 0),
            root,
            chance,
        )
        self.kills = self.stops = 0
        self.replaced_s: list[float] = []

    def workers(self) -> list[int]:
        return workers_of(self.supervisor, self.root)

    def kill(self, count: int) -> None:
        """Kills `count` workers at once, and waits until as many new ones have answered."""
        before = self.workers()
        for victim in self.chance.sample(before, min(count, len(before))):
            os.kill(victim, signal.SIGKILL)
            self.kills += 1
        started, heard = time.monotonic(), set[int]()
        until(
            lambda: self._heard_new(before, heard) >= count,
            what="a killed worker's replacement to answer",
            pause_s=0.002,
        )
        self.replaced_s.append(time.monotonic() - started)

    def _heard_new(self, before: list[int], heard: set[int]) -> int:
        """How many workers that are none of `before` have answered us by now; asks once more."""
        new = {pid for pid in self.workers() if pid not in before}
        if new - heard and (pid := answered_by(self.port, new)):
            heard.add(pid)
        return len(heard)

    def stop(self) -> None:
        """Stops a worker for a moment, which its clients wait out."""
        victim = self.chance.choice(self.workers())
        os.kill(victim, signal.SIGSTOP)
        try:
            time.sleep(self.chance.uniform(0, STOPPED_S))
        finally:
            os.kill(victim, signal.SIGCONT)
        self.stops += 1


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign."""
    board, chance = Board(), random_of(seed, "kills")
    with folders() as (root, files):
        publish(root, files, value=1)
        with local_server(["demo"], root=root, workers=WORKERS) as server:
            spawn = multiprocessing.get_context("spawn")
            clients = [spawn.Process(target=ask, args=(server.url, seed, c, board)) for c in range(CLIENTS)]
            publisher = threading.Thread(target=publish_until, args=(board, root, files))
            tormentor = Tormentor(server.pid, server.url, root, chance)
            publisher.start()
            for client in clients:
                client.start()
            try:
                _torment(tormentor, board, chance, seconds)
            finally:
                board.stop.set()
                publisher.join()
                for client in clients:
                    client.join()
    return {
        "requests checked": board.total("checked"),
        "wrong answers": board.total("wrong"),
        "answers mixed from two versions": board.total("mixed"),
        "stale answers": board.total("stale"),
        "failed through the client": board.total("failed") + sum(c.exitcode != 0 for c in clients),
        "kills": tormentor.kills,
        "stops": tormentor.stops,
        "versions published meanwhile": board.value.value,
        "replacement, median s": statistics.median(tormentor.replaced_s),
        "replacement, slowest s": max(tormentor.replaced_s),
    }


def _torment(tormentor: Tormentor, board: Board, chance: random.Random, seconds: float) -> None:
    """One thing after another until the time is up; the clients have begun before."""
    until(lambda: board.total("checked") > 0, what="the clients' first answer")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        what = chance.choices(("one", "two", "all", "stop"), (6, 2, 1, 2))[0]
        if what == "stop":
            tormentor.stop()
        else:
            tormentor.kill({"one": 1, "two": 2, "all": WORKERS}[what])
        time.sleep(chance.uniform(0, 0.3))


if __name__ == "__main__":
    standalone(run)
