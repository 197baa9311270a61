"""Overload: more requests than a worker can answer. It answers what it can, soon, and refuses the rest at
once.

Promised: at 4 × capacity in open loop, goodput stays at least 90 % of its peak; what is answered is answered
within 3 × the p99 of 80 % load, counted from its sending; the worker's memory stays flat; health checks are
answered within 100 ms throughout. In closed loop with bodies of megabytes over many connections, goodput
stays at 90 % of the best that fewer connections reach. Requests for which no connection is free wait in the
generator's own line. No server can shorten that line but by answering all, so latencies from the time at
which a request was due are shown and promised nothing.

The oracle is the clock of a generator outside (overload.c), which counts latency from the time at which a
request was due. The worker has one core and the generator the other; the generator says how busy and how late
it was itself. The first answer of every run is compared with rows computed outside.
"""

import asyncio
import contextlib
import json
import os
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks import wire
from campaigns.common import TABLES, folders, publish, standalone, told, workers_of
from tableside.loader.segment.memory import pss_bytes
from tableside.serving.cli.commands.bench import request_bytes
from tableside.serving.cli.local import local_server
from tableside.serving.client import Client, Jagged

HERE = Path(__file__).parent
CONNECTIONS, REQUESTS, ROWS = 256, 64, 200_000
BAGS, IDS = 64, 250  # some 128 KB of ids a request, as 26 features of 20 ids for 32 rows have
LARGE_BYTES, LARGE_CONNECTIONS = 4 << 20, (2, 8, 64)
HEALTH_EVERY_S, HEALTH_TIMEOUT_S = 0.05, 10.0


def build(folder: Path) -> Path:
    """Compiles the generator. RuntimeError: there is no C compiler, or it does not accept the source."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("the overload campaign needs a C compiler for its load generator; install gcc")
    program = folder / "overload"
    command = [compiler, "-O2", "-Wall", "-o", str(program), str(HERE / "overload.c"), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{HERE / 'overload.c'} does not compile: {done.stderr}")
    return program


@dataclass(frozen=True)
class Generator:
    """The load generator over one server."""

    program: Path
    port: int
    seed: int

    def run(self, requests: Path, connections: int, rate: float, seconds: float) -> dict[str, Any]:
        """rate: requests a second in open loop; 0: closed loop. What overload.c counted."""
        arguments = (self.port, connections, f"{rate:.3f}", f"{seconds:.3f}", self.seed, requests)
        done = subprocess.run(
            [self.program, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=True,
            timeout=seconds + 60,
        )
        return dict(json.loads(done.stdout))


def write_requests(path: Path, url: str, bags: int, ids: int, count: int, seed: int) -> None:
    """`count` lookups of `bags` bags with about `ids` ids each, of lengths that differ, for the generator."""
    rng = np.random.default_rng(seed)
    with path.open("wb") as out:
        for _ in range(count):
            lengths = rng.integers(ids // 2, ids * 3 // 2 + 1, bags)
            bought = Jagged(rng.integers(0, ROWS, int(lengths.sum())), lengths)
            headers, body = wire.encode({"bought": bought})
            request = request_bytes(f"{url}/v2/models/demo/infer", headers, body)
            out.write(struct.pack("<I", len(request)) + request)


def answers_are_right(url: str, value: int) -> bool:
    """One answer, against rows computed here."""
    ids = np.arange(50) * 37 % ROWS
    with Client(url) as client:
        found = client.lookup("demo", {"bought": Jagged(ids, [50])})["bought"]
    return bool(np.array_equal(found[0], told(TABLES["item"], value, ids).sum(0)))


# ---- what is watched meanwhile ----


@dataclass
class Watch:
    """Health checks over new connections and the worker's private memory, asked from beside every 50 ms,
    answered or not."""

    port: int
    worker: int
    health_s: list[float] = field(default_factory=list)
    unanswered: int = 0
    private_bytes: list[int] = field(default_factory=list)

    async def until(self, stop: threading.Event) -> None:
        async with asyncio.TaskGroup() as checks:
            while not stop.is_set():
                checks.create_task(self._check())
                self.private_bytes.append(pss_bytes(self.worker)["private"])
                await asyncio.sleep(HEALTH_EVERY_S)

    async def _check(self) -> None:
        started, status = time.monotonic(), b""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                status = await reader.readline()
                writer.close()
        self.health_s.append(time.monotonic() - started)
        self.unanswered += not status.startswith(b"HTTP/1.1 200")


@contextmanager
def watching(port: int, worker: int) -> Iterator[Watch]:
    """Looks until the block ends."""
    watch, stop = Watch(port, worker), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(watch.until(stop)))
    thread.start()
    try:
        yield watch
    finally:
        stop.set()
        thread.join()


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """This thread, and what it starts meanwhile, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign. RuntimeError: no C compiler, or one core only."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError(
            "the overload campaign needs a core for the server and one for the load; this process has "
            f"{len(cores)}"
        )
    with folders() as (root, files):
        publish(root, files, value=1, rows=ROWS)
        program = build(files)
        with on_core(cores[0]):
            server = local_server(["demo"], root=root)
            running = server.__enter__()
        try:
            with on_core(cores[1]):
                (worker,) = workers_of(running.pid, root)
                generator = Generator(program, int(urlsplit(running.url).port or 0), seed)
                return _measure(generator, running.url, worker, files, seconds)
        finally:
            server.__exit__(None, None, None)


def _measure(generator: Generator, url: str, worker: int, files: Path, seconds: float) -> dict[str, float]:
    small, large = files / "small", files / "large"
    write_requests(small, url, bags=BAGS, ids=IDS, count=REQUESTS, seed=generator.seed)
    write_requests(large, url, bags=BAGS, ids=LARGE_BYTES // 8 // BAGS, count=4, seed=generator.seed)
    wrong = int(not answers_are_right(url, 1))
    generator.run(small, 64, 0, min(1.0, seconds / 10))  # an untimed pass
    capacity = _goodput(generator.run(small, 64, 0, seconds * 0.15))
    with watching(generator.port, worker) as quiet:
        steady = generator.run(small, CONNECTIONS, 0.8 * capacity, seconds * 0.25)
    with watching(generator.port, worker) as busy:
        flood = generator.run(small, CONNECTIONS, 4 * capacity, seconds * 0.35)
    bulk = [
        _goodput(generator.run(large, n, 0, seconds * 0.25 / len(LARGE_CONNECTIONS)))
        for n in LARGE_CONNECTIONS
    ]
    wrong += not answers_are_right(url, 1)
    half = len(busy.private_bytes) // 2
    return {
        "wrong answers": wrong,
        "capacity, requests/s": capacity,
        "p99 at 80 % load, ms": _p99_ms(steady),
        "goodput at 4 x, share of peak": _goodput(flood) / max(capacity, _goodput(steady)),
        "p99 of answered at 4 x, ms": _p99_ms(flood),
        "the same from the sending, ms": 1e3 * flood["served"].get("p99_s", float("inf")),
        "p99 at 4 x, times that at 80 %": _p99_ms(flood) / _p99_ms(steady),
        "p99 at 4 x from the sending, times that at 80 %": flood["served"].get("p99_s", float("inf"))
        / steady["served"]["p99_s"],
        "refused with 503 at 4 x": flood["by_status"].get("503", 0),
        "other refusals": sum(n for s, n in flood["by_status"].items() if s not in ("200", "503")),
        "broken connections": flood["broken"] + steady["broken"],
        "unsent or unanswered at 4 x": flood["unsent"] + flood["unanswered"],
        "slowest health check at 80 %, ms": 1e3 * max(quiet.health_s),
        "slowest health check at 4 x, ms": 1e3 * max(busy.health_s),
        "health checks unanswered": quiet.unanswered + busy.unanswered,
        "private memory at 80 %, MB": max(quiet.private_bytes) / 1e6,
        "private memory at 4 x, MB": max(busy.private_bytes) / 1e6,
        "its growth from first to second half, MB": (
            max(busy.private_bytes[half:]) - max(busy.private_bytes[:half])
        )
        / 1e6,
        "large bodies: goodput of the best number of connections, requests/s": max(bulk),
        f"large bodies: goodput at {LARGE_CONNECTIONS[-1]} connections, share of best": bulk[-1] / max(bulk),
        "generator's share of its core at 4 x": flood["generator_core_fraction"],
        "generator's p99 lateness at 4 x, ms": 1e3 * flood["late"]["p99_s"],
    }


def _goodput(found: dict[str, Any]) -> float:
    """Requests a second that were answered 200 within the run."""
    return float(sum(found["good_each_second"]) / found["seconds"])


def _p99_ms(found: dict[str, Any]) -> float:
    return float(1e3 * found["good"].get("p99_s", float("inf")))


if __name__ == "__main__":
    standalone(run)
