"""Clients with regions of shared memory that are killed while they ask."""

import contextlib
import http.client
import json
import multiprocessing
import os
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from campaigns.common import (
    DIM,
    ROWS,
    until,
    version_told,
)

HOLDERS, IDS = 2, 50
REPLACED_S, GONE_S = 60.0, 10.0


def regions_of(port: int) -> set[str]:
    """Names of the regions that are registered; asked until a door answers."""
    while True:
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection,
        ):
            connection.request("GET", "/v2/systemsharedmemory/status")
            return {region["name"] for region in json.loads(connection.getresponse().read())}


def hold(port: int, name: str, seed: int, counts: Any) -> None:
    """A client's process, to be killed: it asks for rows in a region of its own for as long as it lives.

    counts: [requests checked, wrong, failed]. A request that ends in an error is sent again over another
    connection, with the region registered anew.
    """
    rng = np.random.default_rng(seed)
    path, size = Path("/dev/shm") / name, 4096 + IDS * DIM * 4
    with path.open("w+b") as file:
        file.truncate(size)
        while True:
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection,
            ):
                _ask_in_region(connection, name, size, file, rng, counts)


def _ask_in_region(
    connection: http.client.HTTPConnection,
    name: str,
    size: int,
    file: Any,
    rng: np.random.Generator,
    counts: Any,
) -> None:
    """Requests over one connection. OSError, HTTPException: it broke."""
    _post(connection, f"/v2/systemsharedmemory/region/{name}/unregister", {})
    if (
        _post(connection, f"/v2/systemsharedmemory/region/{name}/register", {"key": name, "byte_size": size})[
            0
        ]
        != 200
    ):
        return
    at = {"shared_memory_region": name, "shared_memory_byte_size": 8 * IDS}
    out = {
        "shared_memory_region": name,
        "shared_memory_byte_size": 4 * IDS * DIM,
        "shared_memory_offset": 4096,
    }
    request = {
        "inputs": [{"name": "user.values", "datatype": "INT64", "shape": [IDS], "parameters": at}],
        "outputs": [{"name": "user", "parameters": out}],
    }
    while True:
        ids = rng.integers(0, ROWS, IDS)
        os.pwrite(file.fileno(), ids.tobytes(), 0)
        status, _ = _post(connection, "/v2/models/demo/infer", request)
        if status == 503:
            continue  # the engine is being replaced
        counts[2] += status != 200
        if status == 200:
            rows = np.frombuffer(os.pread(file.fileno(), 4 * IDS * DIM, 4096), np.float32).reshape(IDS, DIM)
            counts[0] += 1
            counts[1] += version_told(rows, ids) is None


def _post(connection: http.client.HTTPConnection, path: str, value: object) -> tuple[int, bytes]:
    connection.request("POST", path, json.dumps(value).encode())
    response = connection.getresponse()
    return response.status, response.read()


class Holders:
    """Clients with regions: `HOLDERS` at any time, each replaced when it was killed."""

    def __init__(self, port: int, seed: int) -> None:
        self._context, self._port, self._seed = multiprocessing.get_context("spawn"), port, seed
        self._counts: list[Any] = []
        self.running: list[tuple[BaseProcess, str, Any]] = [self._start() for _ in range(HOLDERS)]
        self.killed = self.stayed = 0

    def _start(self) -> tuple[BaseProcess, str, Any]:
        counts = self._context.Array("q", 3, lock=False)
        name = f"campaign-{uuid4().hex[:12]}"
        self._counts.append(counts)
        process = self._context.Process(
            target=hold, args=(self._port, name, self._seed + len(self._counts), counts), daemon=True
        )
        process.start()
        return process, name, counts

    def total(self, which: int) -> int:
        return sum(counts[which] for counts in self._counts)

    def kill(self, chance: random.Random) -> None:
        """Kills one that has asked at a random instant, and starts another; counts whether its region
        outlives its object."""
        n = chance.randrange(HOLDERS)
        process, name, counts = self.running[n]
        until(lambda: counts[0] > 0, REPLACED_S, "a client with a region to be answered")
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.join()
        self.killed += 1
        (Path("/dev/shm") / name).unlink()
        try:
            until(lambda: name not in regions_of(self._port), GONE_S, "its region's end")
        except TimeoutError:
            self.stayed += 1
        self.running[n] = self._start()

    def stop(self) -> None:
        for process, name, _ in self.running:
            process.kill()
            process.join()
            (Path("/dev/shm") / name).unlink(missing_ok=True)
