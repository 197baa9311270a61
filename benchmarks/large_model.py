"""A large model on a busy server: workers that are killed, a new version, and many workers that attach.

    python benchmarks/large_model.py               # 9 GB, two workers; some 3 minutes, and 20 GB of /dev/shm
    python benchmarks/large_model.py --gb 2        # smaller; printed and not written

Requests come at half the rate that the server reached, at even times. A killed worker's successor is ready
when it has taken a connection. A swap lasts from the publication of a version, which was written before,
until 32 connections in a row get it; p99 is of the requests that were due meanwhile, beside those of as long
a time before. Processes that attach have done their imports, begin together, and find no note that the
version was read on this host.
"""

import argparse
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import console, report, shared_folder
from http_cases import DIM, Case, Server, serving
from make_model import publish_random

from tableside.loader.segment.memory import processes_below
from tableside.loader.versions.folder import NOTE
from tableside.loader.versions.versions import Model
from tableside.serving.cli.commands import bench
from tableside.serving.cli.commands.generator import Load, run, run_at_rate

TABLES, CONNECTIONS, KILLS, ATTACHES, ANSWERS = 26, 16, 5, 3, 32
READY_S, TAIL_RATIO, ATTACH_RATIO = 0.6, 1.3, 1.2
ROW_BYTES, BEFORE_S, MOST_S = 80, 4.0, 120.0
NAME = "big"
context = multiprocessing.get_context("spawn")


def until(reached: Callable[[], bool], what: str) -> None:
    end = time.perf_counter() + MOST_S
    while not reached():
        if time.perf_counter() > end:
            raise SystemExit(f"{what}: not within {MOST_S:g} s")
        time.sleep(0.002)


def send(url: str, requests: list[bytes], rate: float, stop: Any, found: Any) -> None:
    """Requests at a rate until `stop` is set, half a second at a time. Puts each one's begin and Load."""
    loads: list[tuple[float, Load]] = []
    while not stop.is_set():
        begin = time.monotonic()
        load = run_at_rate(
            url, requests, rate=rate, concurrency=CONNECTIONS, seconds=0.5, arrivals="even", first=len(loads)
        )
        loads.append((begin, load))
    found.put(loads)


@contextmanager
def load_on(url: str, requests: list[bytes], rate: float) -> Iterator[list[tuple[float, Load]]]:
    """Requests come from another process; what it measured is there afterwards."""
    stop, found = context.Event(), context.Queue()
    loads: list[tuple[float, Load]] = []
    process = context.Process(target=send, args=(url, requests, rate, stop, found))
    process.start()
    try:
        yield loads
    finally:
        stop.set()
        loads += found.get(timeout=60)
        process.join()


def sockets_of(pid: int) -> set[str]:
    """The inodes of a process's sockets; none of one that has ended."""
    found = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link)
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except FileNotFoundError:
        return set()
    return found


def connections_at(port: int) -> set[str]:
    """The inodes of this host's accepted connections at a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "01"}


def takers(server: Server) -> set[int]:
    """The processes of a server that have taken a connection."""
    at_port = connections_at(int(server.url.rsplit(":", 1)[1]))
    return {pid for pid in processes_below(server.process.pid) if sockets_of(pid) & at_port}


def seconds_to_ready(server: Server) -> float:
    """Kills a worker; returns the seconds until its successor takes connections."""
    probes: list[httpx.Client] = []

    def are_two(pids: set[int]) -> bool:
        probes.append(httpx.Client(base_url=server.url))
        try:
            probes[-1].get("/health")
        except httpx.TransportError:  # it was the killed one's
            return False
        return len(takers(server) - pids) >= 2 - len(pids)

    until(lambda: are_two(set()), "two workers take connections")
    victim = max(takers(server))
    others = takers(server) - {victim}
    started = time.perf_counter()
    os.kill(victim, signal.SIGKILL)
    until(lambda: are_two(others | {victim}) or bool(takers(server) - others - {victim}), "the successor")
    found = time.perf_counter() - started
    for probe in probes:
        probe.close()
    return found


def swap(root: Path, rows: int, server: Server, requests: list[bytes], rate: float) -> tuple[float, Any, Any]:
    """Publishes version 2 beside requests; returns the seconds until answers come from it, and p99 in ms
    before and meanwhile."""
    in_a_row = 0

    def reached() -> bool:
        nonlocal in_a_row
        in_a_row = in_a_row + 1 if live_version(server.url) == 2 else 0
        return in_a_row >= ANSWERS

    with ExitStack() as stack:
        loads: list[tuple[float, Load]] = []

        def written() -> None:
            nonlocal loads
            loads = stack.enter_context(load_on(server.url, requests, rate))
            time.sleep(2.0 + BEFORE_S)

        publish(root, rows, written)
        begin = time.monotonic()
        until(reached, "version 2")
        end = time.monotonic()
        time.sleep(1.0)
    return end - begin, p99_ms(loads, begin - BEFORE_S, begin - 0.5), p99_ms(loads, begin - 0.5, end)


def live_version(url: str) -> int:
    return int(httpx.get(f"{url}/health", timeout=60).json()["models"][NAME])


def p99_ms(loads: list[tuple[float, Load]], begin: float, end: float) -> float:
    """Of the half seconds that lie between two times of time.monotonic."""
    latencies = [load.latencies_s for at, load in loads if begin <= at and at <= end]
    return float(np.percentile(np.concatenate(latencies), 99) * 1e3)


def attach(root: str, ready: Any, go: Any, found: Any) -> None:
    model = Model(Path(root), NAME)
    ready.release()
    go.wait()
    started = time.monotonic()
    segment = model.attach()
    found.put((started, time.monotonic()))
    del segment


def attach_s(root: Path, processes: int) -> float:
    """Seconds until so many processes have attached a version that none has read before."""
    (root / NAME / f"1.segment{NOTE}").unlink(missing_ok=True)
    ready, go, found = context.Semaphore(0), context.Event(), context.Queue()
    running = [context.Process(target=attach, args=(str(root), ready, go, found)) for _ in range(processes)]
    for process in running:
        process.start()
    for _ in running:
        ready.acquire()
    go.set()
    times = [found.get(timeout=MOST_S) for _ in running]
    for process in running:
        process.join()
    return float(max(end for _, end in times) - min(begin for begin, _ in times))


def publish(root: Path, rows: int, written: Callable[[], None] = lambda: None) -> None:
    publish_random(root, NAME, {f"t{i}": (rows, DIM, "int8") for i in range(TABLES)}, written=written)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=9.0, help="size of a version (default: %(default)s)")
    options = parser.parse_args()
    rows = int(options.gb * 1e9 / TABLES / ROW_BYTES)
    case = Case(TABLES, 32, 20)
    described = {
        "name": NAME,
        "tables": [{"name": f"t{i}", "rows": rows} for i in range(TABLES)],
        "features": [{"name": f"t{i}", "table": f"t{i}"} for i in range(TABLES)],
    }
    found: list[dict[str, Any]] = []

    def add(what: str, value: float, goal: float) -> None:
        found.append({"what": what, "found": value, "goal": goal, "met": bool(value <= goal)})
        console.print(found[-1])

    with shared_folder() as root:
        publish(root, rows)
        ones, eights = zip(*[(attach_s(root, 1), attach_s(root, 8)) for _ in range(ATTACHES)], strict=True)
        one, eight = statistics.median(ones), statistics.median(eights)
        console.print(f"attaching: one process {one:.2f} s, eight {eight:.2f} s")
        add("attaching, eight processes over one", eight / one, ATTACH_RATIO)
        command = "-m", "tableside", "serve", NAME, "--root", root, "--port", 0, "--workers", 2
        with serving(*command, "--scrub-hours", 0, "--drain-s", 0) as server:
            requests = bench.make_requests(described, server.url, case.shape(same=False), "named")
            rate = 0.5 * run(server.url, requests, concurrency=CONNECTIONS, seconds=3.0).requests_per_s
            with load_on(server.url, requests, rate):
                time.sleep(1.0)
                readies = [seconds_to_ready(server) for _ in range(KILLS)]
            console.print("kill -9 to ready, s:", ", ".join(f"{s:.2f}" for s in readies))
            add("kill -9 to ready, s, the worst of five", max(readies), READY_S)
            swap_s, before, during = swap(root, rows, server, requests, rate)
            console.print(f"a swap in {swap_s:.1f} s: p99 {before:.2f} ms before, {during:.2f} ms meanwhile")
            add("p99 during a swap over before", during / before, TAIL_RATIO)
    if options.gb != parser.get_default("gb"):
        return
    more = {"attach s, one": one, "attach s, eight": eight, "kill to ready s": readies, "swap s": swap_s}
    title = f"a model of {options.gb:g} GB, int8 D {DIM}, two workers, requests at half the rate reached"
    report("large_model", title, found, **more, p99_before_ms=before, p99_during_ms=during, rate=rate)


if __name__ == "__main__":
    main()
