"""A model on owners against the same on one host: requests, what an owner does, bytes, slow replicas.

    python benchmarks/hosts.py                 # some two minutes; as --as hosts
    python benchmarks/hosts.py --rows 20000    # smaller; printed and not written
    python benchmarks/hosts.py --as hosts_cores # on a machine with more cores; docs/hosts.md shows both

Requests: 26 tables, 32 bags of 20 ids of each, uniform, from one connection, in turns to a server of the
whole model on one host and to one that asks two owners. All of them share this machine's cores. Every vector
is compared first. Milliseconds of CPU are those of a request: of the server, and of its owners together.
An owner: rows that it gives in a second of its CPU's time, to a client that asks for half of such a request;
and those of redis-py's MGET in a second of redis-server's, where that is installed.
Bytes: what an owner's answers have, by the bytes of the different rows that were asked for.
More owners: rows that 1, 2 and 4 owners give in a second, each to a client that is a process.
Slow replicas: the 99th percentile of requests to four owners, two for each half of the rows, alone, and while
one of them stands still for 30 ms in each 3 s; and how many more requests owners got then.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import report, shared_folder
from redis_rows import redis_server

from tableside.loader.load.load import load
from tableside.loader.load.share import share_of
from tableside.loader.model.model import parse_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.segment.memory import processes_below
from tableside.quant import RowFormat, choose
from tableside.serving.cli.local import LocalServer, local_server
from tableside.serving.client import Client
from tableside.serving.client.attempts import Attempts, Options
from tableside.serving.client.messages import HttpRequest
from tableside.serving.client.sockets import SocketPool
from tableside.serving.cluster.calls import address_of
from tableside.serving.cluster.describe import remote_tables
from tableside.serving.cluster.protocol import PATH, TableIds, pack_request

TABLES, DIM, BAGS, IDS = 26, 64, 32, 20
REQUESTS, ROUNDS, ASKED = 40, 6, 400
ROW_BYTES, MOST_OWNERS, GIVEN_S = RowFormat.INT8.row_bytes(DIM, 4), 4, 3.0
PAUSE_S, EVERY_S, PAUSED_S = 0.03, 3.0, 24.0


def spec_of(folder: Path, name: str, tier: str = "") -> ModelSpec:
    told = {"tier": f"rows://{tier}"} if tier else {}
    tables = {f"t{n}": {"key": f"t{n}", **told} for n in range(TABLES)}
    return parse_model({"name": name, "checkpoint": "c.npz", "tables": tables}, folder)


def place(server: LocalServer) -> str:
    return server.url.removeprefix("http://")


def workers_of(server: LocalServer) -> list[int]:
    """The processes that have a segment mapped."""
    return [p for p in processes_below(server.pid) if ".segment" in Path(f"/proc/{p}/maps").read_text()]


def cpu_s(pids: list[int]) -> float:
    """Seconds of CPU time that processes have taken."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(of[11]) + int(of[12]) for of in fields) / os.sysconf("SC_CLK_TCK")


def milliseconds(client: Client, requests: list[dict[str, Any]]) -> list[float]:
    found = []
    for request in requests:
        began = time.perf_counter()
        client.lookup("ads", request)
        found.append(1000 * (time.perf_counter() - began))
    return found


def requests_of(rows: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    names = [f"t{n}" for n in range(TABLES)]
    return [{name: rng.integers(0, rows, (BAGS, IDS)) for name in names} for _ in range(REQUESTS)]


def against_one_host(
    servers: dict[str, list[LocalServer]], clients: list[Client], requests: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """servers: by name that which a client asks, then its owners."""
    for request in requests[:5]:
        whole, came = (client.lookup("ads", request) for client in clients)
        assert all(np.array_equal(whole[name], came[name]) for name in request)
    times = {name: list[float]() for name in servers}
    spent = {name: [0.0, 0.0] for name in servers}
    for _ in range(ROUNDS):
        for (name, (door, *owners)), client in zip(servers.items(), clients, strict=True):
            parts = workers_of(door), [pid for one in owners for pid in workers_of(one)]
            before = [cpu_s(pids) for pids in parts]
            times[name] += milliseconds(client, requests)
            for n, pids in enumerate(parts):
                spent[name][n] += (cpu_s(pids) - before[n]) * 1000 / ROUNDS / len(requests)
    return [
        {
            "from": name,
            "p50_ms": float(np.median(ms)),
            "p99_ms": float(np.percentile(ms, 99)),
            "cpu_ms": spent[name][0],
            "owners_cpu_ms": spent[name][1],
        }
        for name, ms in times.items()
    ]


class Asker:
    """Asks an owner for half of a request's rows, all different."""

    def __init__(self, url: str, model: str, rows: int) -> None:
        rng, n = np.random.default_rng(2), BAGS * IDS // 2
        (state,) = httpx.get(f"{url}{PATH}/{model}/states").json()
        address = address_of(url.removeprefix("http://"), None)
        self._pool, self._options = SocketPool(address, 60), Options(address, 60, 0, None)
        self._path, self.rows = f"{PATH}/{model}/{state}", TABLES * n
        self._bodies = []
        for _ in range(20):
            ids = np.concatenate([rng.choice(rows // 2, n, replace=False) for _ in range(TABLES)])
            self._bodies.append(pack_request(TableIds(np.arange(TABLES), np.full(TABLES, n), ids)))

    def ask(self, number: int) -> int:
        """Returns the bytes of an answer."""
        body = self._bodies[number % len(self._bodies)]
        response = self._pool.send(HttpRequest("POST", self._path, body), Attempts(self._options))
        assert response.status == 200
        return len(response.content)


def of_an_owner(owner: LocalServer, rows: int) -> dict[str, float]:
    """Rows in a second of CPU time, and bytes by those of the rows."""
    asker, workers = Asker(owner.url, "ads-owner-0-of-2", rows), workers_of(owner)
    before, size = cpu_s(workers), 0
    for number in range(ASKED):
        size += asker.ask(number)
    given = ASKED * asker.rows
    return {"mrows_s": given / (cpu_s(workers) - before) / 1e6, "bytes_ratio": size / (given * ROW_BYTES)}


def of_redis(folder: Path, rows: int) -> float | None:
    """Rows in a second of redis-server's CPU time, M; None: it is not installed."""
    if shutil.which("redis-server") is None:
        return None
    import redis

    rng, n, keys = np.random.default_rng(2), TABLES * BAGS * IDS // 2, min(rows, 20_000) * TABLES // 2
    with redis_server(folder) as port:
        client = redis.Redis(port=port)
        for start in range(0, keys, 1000):
            client.mset({b"%d" % key: bytes(ROW_BYTES) for key in range(start, start + 1000)})
        asked = [[b"%d" % key for key in rng.integers(0, keys - 1000, n)] for _ in range(20)]
        before, given = client.info("cpu"), 0
        for number in range(ASKED // 10):
            got = client.mget(asked[number % len(asked)])
            assert None not in got
            given += len(got)
        after = client.info("cpu")
    spent = sum(float(after[of]) - float(before[of]) for of in ("used_cpu_user", "used_cpu_sys"))
    return given / spent / 1e6


def _give(url: str, model: str, rows: int, seconds: float, ready: Any) -> int:
    """Rows that an owner gave, once all askers are ready."""
    asker = Asker(url, model, rows)
    ready.wait()
    given, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        asker.ask(given // asker.rows)
        given += asker.rows
    return given


def together(owners: list[tuple[LocalServer, str]], rows: int) -> list[dict[str, float]]:
    """Rows in a second of 1, 2 and 4 owners. owners: with their models."""
    found = []
    with multiprocessing.get_context("spawn").Manager() as manager:
        for count in (1, 2, MOST_OWNERS):
            ready = manager.Barrier(count)
            with multiprocessing.get_context("spawn").Pool(count) as pool:
                asked = [(one.url, model, rows, GIVEN_S, ready) for one, model in owners[:count]]
                given = sum(pool.starmap(_give, asked, chunksize=1))
            found.append({"owners": count, "mrows_s": given / GIVEN_S / 1e6})
    return [{**one, "of_linear": one["mrows_s"] / found[0]["mrows_s"] / one["owners"]} for one in found]


def asked_of(owners: list[LocalServer]) -> float:
    """Requests for rows that owners have answered."""
    found = 0.0
    for owner in owners:
        for line in httpx.get(f"{owner.url}/metrics").text.splitlines():
            if line.startswith("tableside_given_requests_total"):
                found += float(re.split(r"\s", line)[-1])
    return found


def with_pauses(
    door: Client, owners: list[LocalServer], requests: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Percentiles alone and while one of the owners stands still for a hundredth of the time."""
    small = [{name: ids[:4] for name, ids in request.items()} for request in requests]
    found = []
    for name in ("alone", "pauses"):
        over = threading.Event()
        pauses = threading.Thread(target=_pause, args=(workers_of(owners[0]), over))
        if name == "pauses":
            pauses.start()
        ms: list[float] = []
        before, until = asked_of(owners), time.monotonic() + PAUSED_S
        while time.monotonic() < until:
            ms += milliseconds(door, small)
        over.set()
        if name == "pauses":
            pauses.join()
        asked = (asked_of(owners) - before) / len(ms)
        percentiles = dict(
            zip(("p50_ms", "p99_ms", "p999_ms"), np.percentile(ms, (50, 99, 99.9)), strict=True)
        )
        found.append({"replicas": name, **{k: float(v) for k, v in percentiles.items()}, "asked": asked})
    return found


def _pause(pids: list[int], over: threading.Event) -> None:
    while not over.wait(EVERY_S - PAUSE_S):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="of each table")
    parser.add_argument("--as", dest="name", default="hosts", help="the result's name (default: %(default)s)")
    options = parser.parse_args()
    with ExitStack() as stack:
        base = stack.enter_context(shared_folder())
        base.mkdir()
        rng, rows = np.random.default_rng(0), options.rows
        arrays: dict[str, Any] = {
            f"t{n}": rng.standard_normal((rows, DIM), np.float32) for n in range(TABLES)
        }
        np.savez(base / "c.npz", **arrays)
        load(spec_of(base, "ads"), base / "one")
        owners = list[tuple[LocalServer, str]]()
        for number in range(MOST_OWNERS):
            share = share_of(spec_of(base, "ads", "a:1,b:1"), number % 2)
            load(share, base / str(number))
            server = stack.enter_context(local_server([share.name], root=base / str(number)))
            owners.append((server, share.name))
        hosts = [server for server, _ in owners]
        a, b, c, d = map(place, hosts)
        for name, tier in (("door", f"{a},{b}"), ("replicated", f"{a}|{c},{b}|{d}")):
            spec = spec_of(base, "ads", tier)
            load(spec, base / name, remote=remote_tables(spec, choose(), None))
        (base / "c.npz").unlink()
        servers = {
            name: stack.enter_context(local_server(["ads"], root=base / name))
            for name in ("one", "door", "replicated")
        }
        clients = [stack.enter_context(Client(server.url)) for server in servers.values()]
        requests = requests_of(rows)
        asked = {"one host": [servers["one"]], "two owners": [servers["door"], *hosts[:2]]}
        found = against_one_host(asked, clients[:2], requests)
        owner = of_an_owner(hosts[0], rows)
        by_count = together(owners, rows)
        paused = with_pauses(clients[2], hosts, requests)
        if rows < 200_000:
            os.environ["TRIAL"] = "1"
        report(
            options.name,
            f"{TABLES} tables of {rows:,} rows, int8 dim {DIM}; requests of {BAGS} bags of {IDS} ids of each",
            found,
            p50_ratio=found[1]["p50_ms"] / found[0]["p50_ms"],
            owner_mrows_s=owner["mrows_s"],
            redis_mrows_s=of_redis(base, rows),
            bytes_ratio=owner["bytes_ratio"],
            owners=by_count,
            pauses=paused,
            pauses_p99_ratio=paused[1]["p99_ms"] / paused[0]["p99_ms"],
            more_requests=paused[1]["asked"] / paused[0]["asked"] - 1,
        )


if __name__ == "__main__":
    main()
