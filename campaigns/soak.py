"""Soak: every kind of request, for as long as there is time, while versions are swapped and, in the second
half, workers are replaced by signals.

Promised: answers stay right; what workers and supervisor hold stays flat: private memory, descriptors,
mappings, and the files below the root, the metrics folder among them.

The oracle: clients know each version's rows by formula (common.told), and what each wrong request must be
told. What processes hold is read from /proc twice a second; the second quarter's median is compared with the
last quarter's, so that a warm-up is no growth and a single reading decides nothing. Workers are watched in
the first half, in which they live on; supervisor and files in the second, in which SIGHUP and SIGKILL replace
workers.
"""

import http.client
import json
import multiprocessing
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks import wire
from campaigns.common import (
    ROWS,
    descriptors,
    folders,
    publish,
    random_of,
    standalone,
    version_told,
    workers_of,
)
from tableside.loader.segment.memory import processes_below, pss_bytes
from tableside.loader.versions.versions import Model
from tableside.serving.cli.commands.bench import HEADER_LENGTH
from tableside.serving.cli.local import local_server
from tableside.serving.client import Jagged

WORKERS, CLIENTS, ATTEMPTS = 2, 3, 5
LOOK_EVERY_S, SWAP_EVERY_S, REPLACE_EVERY_S = 0.5, 2.0, 2.0


class Asker:
    """One client's connection, opened again where it broke: at most ATTEMPTS times a request."""

    def __init__(self, port: int, seed: int) -> None:
        self.port, self.rng = port, np.random.default_rng(seed)
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, str | None, bytes]:
        """(status, Inference-Header-Content-Length, body). OSError, HTTPException: every attempt broke."""
        for attempt in range(ATTEMPTS):
            try:
                self.connection.request(method, path, body, headers or {})
                response = self.connection.getresponse()
                return response.status, response.headers.get(HEADER_LENGTH), response.read()
            except (OSError, http.client.HTTPException):
                self.connection.close()
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    # Each returns whether the answer is right.

    def looks_up(self) -> bool:
        ids = self.rng.integers(0, ROWS, 20)
        headers, body = wire.encode({"user": Jagged(ids, [20]), "bought": Jagged(ids, [5, 0, 15])})
        status, length, answer = self.ask("POST", "/v2/models/demo/infer", body, headers)
        return status == 200 and version_told(wire.decode(length, answer)[1]["user"], ids) is not None

    def looks_up_as_json(self) -> bool:
        ids = self.rng.integers(0, ROWS, 5)
        request = {"model": "demo", "features": {"user": [ids.tolist()]}}
        status, _, answer = self.ask("POST", "/v1/lookup", json.dumps(request).encode())
        return (
            status == 200
            and version_told(np.array(json.loads(answer)["vectors"]["user"], np.float32), ids) is not None
        )

    def names_a_wrong_id(self) -> bool:
        headers, body = wire.encode({"user": [[int(self.rng.integers(ROWS, 2**62))]]})
        status, _, answer = self.ask("POST", "/v2/models/demo/infer", body, headers)
        return status == 400 and b"is outside the table's rows" in answer

    def names_a_wrong_model(self) -> bool:
        return self.ask("POST", f"/v2/models/m{self.rng.integers(1 << 60)}/infer", b"{}")[0] == 404

    def sends_garbage(self) -> bool:
        return self.ask("POST", "/v1/lookup", self.rng.bytes(50))[0] == 400

    def asks_what_there_is(self) -> bool:
        paths = (
            "/v2",
            "/v2/models/demo",
            "/v1/models",
            "/health",
            "/v2/models/demo/config",
            "/v2/models/stats",
        )
        path = paths[self.rng.integers(len(paths))]
        status = self.ask("GET", path)[0]
        return status == 200 or (status, path) == (
            503,
            "/health",
        )  # a worker that SIGHUP replaces says that it drains

    def asks_for_metrics(self) -> bool:
        status, _, text = self.ask("GET", "/metrics")
        return status == 200 and b"tableside_requests_total" in text

    def kinds(self) -> tuple[list[Callable[[], bool]], list[float]]:
        """What it does, and how often."""
        return [
            self.looks_up,
            self.looks_up_as_json,
            self.names_a_wrong_id,
            self.names_a_wrong_model,
            self.sends_garbage,
            self.asks_what_there_is,
            self.asks_for_metrics,
        ], [0.699, 0.1, 0.05, 0.05, 0.05, 0.05, 0.001]


def ask_until(port: int, seed: int, client: int, counts: Any, stop: Any) -> None:
    """A client's process. counts: requests, wrong, failed, three for each client."""
    asker, rng = Asker(port, seed * 1000 + client), np.random.default_rng([seed, client])
    kinds, weights = asker.kinds()
    while not stop.is_set():
        for kind in rng.choice(len(kinds), 100, p=weights):
            try:
                if not kinds[kind]():
                    counts[3 * client + 1] += 1
                    print(f"soak: {kinds[kind].__name__}: another answer than expected", flush=True)
            except (OSError, http.client.HTTPException, ValueError) as error:
                counts[3 * client + 2] += 1
                print(f"soak: {kinds[kind].__name__}: {error!r}", flush=True)
            counts[3 * client] += 1


class Series:
    """Readings over time of what some processes hold."""

    def __init__(self) -> None:
        self.readings: dict[str, list[float]] = {}

    def look(self, processes: list[int], root: Path) -> None:
        """The largest reading of any of the processes, and the files below the root. A process that ends
        meanwhile counts not."""
        found: dict[str, list[float]] = {"private memory, MB": [], "descriptors": [], "mappings": []}
        for pid in processes:
            try:
                found["private memory, MB"].append(pss_bytes(pid)["private"] / 1e6)
                found["descriptors"].append(len(descriptors(pid)))
                found["mappings"].append(len(Path(f"/proc/{pid}/maps").read_text().splitlines()))
            except (OSError, KeyError):
                continue
        for name, values in found.items():
            if values:
                self.readings.setdefault(name, []).append(max(values))
        self.readings.setdefault("files", []).append(sum(len(files) for _, _, files in os.walk(root)))

    def growth(self, name: str) -> float:
        """From the second quarter's median to the last quarter's."""
        values = self.readings.get(name, [0.0])
        quarter = max(1, len(values) // 4)
        return statistics.median(values[-quarter:]) - statistics.median(
            values[quarter : 2 * quarter] or values
        )


class Disturbance:
    """Swaps versions, and replaces workers where it may, until told to stop."""

    def __init__(self, supervisor: int, root: Path, files: Path, chance: random.Random) -> None:
        self.supervisor, self.root, self.files, self.chance = supervisor, root, files, chance
        self.swaps = self.kills = self.hangups = 0
        self.value = 1
        self.may_replace, self._stop = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=t) for t in (self._swap, self._replace)]

    def _swap(self) -> None:
        while not self._stop.wait(SWAP_EVERY_S):
            self.value += 1
            publish(self.root, self.files, self.value)
            (self.files / f"demo-{self.value}.npz").unlink()
            Model(self.root, "demo").collect(keep=1)
            self.swaps += 1

    def _replace(self) -> None:
        while not self._stop.wait(REPLACE_EVERY_S):
            if not self.may_replace.is_set():
                continue
            if self.chance.random() < 0.3:
                os.kill(self.supervisor, signal.SIGHUP)
                self.hangups += 1
            elif len(workers := workers_of(self.supervisor, self.root)) == WORKERS:
                os.kill(self.chance.choice(workers), signal.SIGKILL)
                self.kills += 1

    def __enter__(self) -> "Disturbance":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign."""
    spawn = multiprocessing.get_context("spawn")
    stop, counts = spawn.Event(), spawn.Array("q", 3 * CLIENTS, lock=False)
    workers, everyone = Series(), Series()
    with folders() as (root, files):
        publish(root, files, 1)
        with local_server(["demo"], root=root, workers=WORKERS) as server:
            port = urlsplit(server.url).port
            clients = [
                spawn.Process(target=ask_until, args=(port, seed, c, counts, stop)) for c in range(CLIENTS)
            ]
            for client in clients:
                client.start()
            try:
                with Disturbance(server.pid, root, files, random_of(seed, "soak")) as disturbance:
                    _watch(workers, seconds / 2, lambda: workers_of(server.pid, root), root)
                    disturbance.may_replace.set()
                    _watch(everyone, seconds / 2, lambda: _keepers(server.pid, root), root)
            finally:
                stop.set()
                for client in clients:
                    client.join()
    return {
        "requests": sum(counts[0::3]),
        "wrong answers": sum(counts[1::3]),
        "failed requests": sum(counts[2::3]) + sum(client.exitcode != 0 for client in clients),
        "swaps": disturbance.swaps,
        "kills": disturbance.kills,
        "hangups": disturbance.hangups,
        **{
            f"a worker's growth: {name}": workers.growth(name)
            for name in ("private memory, MB", "descriptors", "mappings")
        },
        **{
            f"the supervisor's growth: {name}": everyone.growth(name)
            for name in ("private memory, MB", "descriptors", "mappings")
        },
        "growth of files": everyone.growth("files"),
    }


def _keepers(supervisor: int, root: Path) -> list[int]:
    """The processes that outlive workers: the supervisor, and what workers are forked from."""
    workers = set(workers_of(supervisor, root))
    return [supervisor, *(pid for pid in processes_below(supervisor) if pid not in workers)]


def _watch(series: Series, seconds: float, processes: Callable[[], list[int]], root: Path) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        series.look(processes(), root)
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    standalone(run)
