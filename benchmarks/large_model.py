"""A large model on a busy server: workers that are killed, a new version, and many workers that attach.

    python benchmarks/large_model.py               # 9 GB, two workers; some 3 minutes, and 20 GB of /dev/shm
    python benchmarks/large_model.py --gb 2        # smaller; printed and not written
    python benchmarks/large_model.py --cores 4 --gb 16   # the server has so many cores; a result of its own

The server has one core, or as many as are told, and the load generator another. Requests come at half the
rate that the server reached, at even times. A killed worker's successor is ready when it waits for
connections. A swap makes a version live that is published and that nobody on this host has read, and lasts
until 32 connections in a row get it. p99 is the median of rounds of a quarter of a second, those meanwhile
beside those of four seconds before each swap. Processes that attach have done their imports, begin together,
and find no note that the version was read on this host.
"""

import argparse
import http.client
import json
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import console, report, shared_folder
from http_cases import DIM, Case, Server, serving
from make_model import publish_random

from tableside.loader.segment.memory import processes_below
from tableside.loader.versions.folder import NOTE
from tableside.loader.versions.versions import Model
from tableside.serving.cli.commands import bench
from tableside.serving.cli.commands.generator import Load, run, run_at_rate

TABLES, CONNECTIONS, KILLS, ATTACHES, SWAPS, ANSWERS, ROUND_S = 26, 16, 5, 3, 6, 32, 0.25
READY_S, TAIL_RATIO, ATTACH_RATIO = 0.6, 1.3, 1.2
ROW_BYTES, BEFORE_S, MOST_S = 80, 4.0, 120.0
PAUSE_S = 0.01  # between looks; the load generator has the same core
NAME = "big"
CORES = sorted(os.sched_getaffinity(0))
context = multiprocessing.get_context("spawn")


def until(reached: Callable[[], bool], what: str) -> None:
    end = time.perf_counter() + MOST_S
    while not reached():
        if time.perf_counter() > end:
            raise SystemExit(f"{what}: not within {MOST_S:g} s")
        time.sleep(PAUSE_S)


def send(url: str, requests: list[bytes], rate: float, stop: Any, found: Any) -> None:
    """Requests at a rate until `stop` is set, ROUND_S at a time. Puts each one's begin and Load."""
    loads: list[tuple[float, Load]] = []
    while not stop.is_set():
        begin = time.monotonic()
        load = run_at_rate(
            url,
            requests,
            rate=rate,
            concurrency=CONNECTIONS,
            seconds=ROUND_S,
            arrivals="even",
            first=len(loads),
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


def listening_at(port: int) -> set[str]:
    """This host's sockets that listen at a port, as /proc names them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}


def accepts(pid: int, sockets: set[str]) -> bool:
    """Whether a process waits for connections at one of these sockets, by epoll."""
    files = Path(f"/proc/{pid}/fd")
    try:
        links = {fd.name: os.readlink(fd) for fd in files.iterdir()}
        polls = [n for n, target in links.items() if target == "anon_inode:[eventpoll]"]
        texts = [Path(f"/proc/{pid}/fdinfo/{n}").read_text() for n in polls]
    except FileNotFoundError:  # it has ended, or closed a file meanwhile
        return False
    polled = [line.split()[1] for text in texts for line in text.splitlines() if line.startswith("tfd:")]
    return any(links.get(n) in sockets for n in polled)


def seconds_to_ready(server: Server) -> float:
    """Kills a worker; returns the seconds until its successor takes connections."""
    sockets = listening_at(int(server.url.rsplit(":", 1)[1]))

    def takers() -> set[int]:
        return {pid for pid in processes_below(server.process.pid) if accepts(pid, sockets)}

    until(lambda: len(takers()) == 2, "two workers take connections")
    before = takers()
    time.sleep(1.0)  # so that the supervisor knows as well that they are ready
    started = time.perf_counter()
    os.kill(max(before), signal.SIGKILL)
    until(lambda: bool(takers() - before), "the successor")
    return time.perf_counter() - started


def swap(model: Model, version: int, url: str) -> float:
    """Makes a version live that this host has not read; returns the seconds until answers come from it."""
    in_a_row = 0

    def reached() -> bool:
        nonlocal in_a_row
        in_a_row = in_a_row + 1 if live_version(url) == version else 0
        return in_a_row >= ANSWERS

    started = time.perf_counter()
    with model.opened() as folder, folder.lock("record.lock"):
        forget_read(folder.path, version)
        model._record_version(folder, version, 0)  # as a load does; `activate` would read it here
    until(reached, f"version {version}")
    return time.perf_counter() - started


def forget_read(folder: Path, version: int) -> None:
    """Removes the notes that this host has read a version's files."""
    for note in folder.glob(f"{version}.*{NOTE}"):
        note.unlink()


def live_version(url: str) -> int:
    """The version that answers on a new connection."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("GET", "/health")
    found = json.loads(connection.getresponse().read())["models"][NAME]
    connection.close()
    return int(found)


def p99_ms(loads: list[tuple[float, Load]], spans: list[tuple[float, float]]) -> float:
    """Of the requests of rounds that began within spans of time.monotonic: the median of the rounds' p99."""
    found = [load for at, load in loads if any(begin <= at < end for begin, end in spans)]
    return statistics.median(load.percentile_ms(99) for load in found)


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
    forget_read(root / NAME, 2)
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


def publish(root: Path, rows: int) -> None:
    publish_random(root, NAME, {f"t{i}": (rows, DIM, "int8") for i in range(TABLES)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=9.0, help="size of a version (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=1, help="the server's (default: %(default)s)")
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
        for _ in range(2):
            publish(root, rows)
        model = Model(root, NAME)
        ones, eights = zip(*[(attach_s(root, 1), attach_s(root, 8)) for _ in range(ATTACHES)], strict=True)
        one, eight = statistics.median(ones), statistics.median(eights)
        console.print(f"attaching: one process {one:.2f} s, eight {eight:.2f} s")
        add("attaching, eight processes over one", eight / one, ATTACH_RATIO)
        os.sched_setaffinity(0, set(CORES[: options.cores]))  # of the server, which inherits it
        command = "-m", "tableside", "serve", NAME, "--root", root, "--port", 0, "--workers", 2
        with serving(*command, "--scrub-hours", 0, "--drain-s", 0) as server:
            os.sched_setaffinity(0, {CORES[-1]})
            requests = bench.make_requests(described, server.url, case.shape(same=False), "named")
            rate = 0.5 * run(server.url, requests, concurrency=CONNECTIONS, seconds=3.0).requests_per_s
            with load_on(server.url, requests, rate):
                time.sleep(1.0)
                readies = [seconds_to_ready(server) for _ in range(KILLS)]
            console.print("kill -9 to ready, s:", ", ".join(f"{s:.2f}" for s in readies))
            add("kill -9 to ready, s, the worst of five", max(readies), READY_S)
            swap_s, spans = [], []
            with load_on(server.url, requests, rate) as loads:
                for n in range(SWAPS):
                    time.sleep(BEFORE_S + ROUND_S)
                    begin = time.monotonic()
                    swap_s.append(swap(model, 1 + n % 2, server.url))
                    spans.append((begin, begin + swap_s[-1]))
            during = p99_ms(loads, spans)
            before = p99_ms(loads, [(begin - BEFORE_S, begin - ROUND_S) for begin, _ in spans])
            took = statistics.median(swap_s)
            console.print(f"a swap in {took:.1f} s: p99 {before:.2f} ms before, {during:.2f} ms meanwhile")
            add("p99 during a swap over before", during / before, TAIL_RATIO)
    os.sched_setaffinity(0, CORES)  # which the report counts
    if options.cores == 1 and options.gb != parser.get_default("gb"):
        return
    more = {
        "attach s, one": one,
        "attach s, eight": eight,
        "kill to ready s": readies,
        "swap s": swap_s,
        "rate": rate,
    }
    workers = f"two workers on {options.cores} core{'s' if options.cores > 1 else ''}"
    title = f"a model of {options.gb:g} GB, int8 D {DIM}, {workers}, requests at half the rate reached"
    more |= {"p99_before_ms": before, "p99_during_ms": during}
    if options.cores == 1:
        report("large_model", title, found, **more)
    else:
        report("large_model_cores", title, found, **more)


if __name__ == "__main__":
    main()
