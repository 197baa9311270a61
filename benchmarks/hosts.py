"""A model on two owners against the same on one host: requests, what an owner does, bytes, slow replicas.

    python benchmarks/hosts.py                 # some two minutes
    python benchmarks/hosts.py --rows 20000    # smaller; printed and not written

Requests: 26 tables, 32 bags of 20 ids of each, uniform, from one connection, in turns to a server of the
whole model on one host and to one that asks two owners. All of them share this machine's cores. Every vector
is compared first.
An owner: rows that it gives in a second of its CPU's time, to a client that asks for half of such a request.
Bytes: what an owner's answers have, by the bytes of the different rows that were asked for.
Slow replicas: the 99th percentile of requests to two replicas of one owner, alone, while one of them stands
still for 30 ms in each 3 s, and how many more requests owners got then.
"""

import argparse
import os
import re
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from common import report, shared_folder

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


def against_one_host(one: Client, door: Client, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for request in requests[:5]:
        whole, came = one.lookup("ads", request), door.lookup("ads", request)
        assert all(np.array_equal(whole[name], came[name]) for name in request)
    times: dict[str, list[float]] = {"one host": [], "two owners": []}
    for _ in range(ROUNDS):
        for name, client in (("one host", one), ("two owners", door)):
            times[name] += milliseconds(client, requests)
    return [
        {"from": name, "p50_ms": float(np.median(ms)), "p99_ms": float(np.percentile(ms, 99))}
        for name, ms in times.items()
    ]


def of_an_owner(owner: LocalServer, rows: int) -> dict[str, float]:
    """Rows in a second of CPU time, and bytes by those of the rows."""
    model, rng = "ads-owner-0-of-2", np.random.default_rng(2)
    (state,) = httpx.get(f"{owner.url}{PATH}/{model}/states").json()
    n, row_bytes = BAGS * IDS // 2, RowFormat.INT8.row_bytes(DIM, 4)
    bodies = [
        pack_request([TableIds(t, rng.choice(rows // 2, n, replace=False)) for t in range(TABLES)])
        for _ in range(20)
    ]
    address = address_of(place(owner), None)
    pool, options = SocketPool(address, 60), Options(address, 60, 0, None)
    workers = workers_of(owner)
    before, size = cpu_s(workers), 0
    for number in range(ASKED):
        response = pool.send(
            HttpRequest("POST", f"{PATH}/{model}/{state}", bodies[number % len(bodies)]), Attempts(options)
        )
        assert response.status == 200
        size += len(response.content)
    spent = cpu_s(workers) - before
    pool.close()
    rows_given = ASKED * TABLES * n
    return {"mrows_s": rows_given / spent / 1e6, "bytes_ratio": size / (rows_given * row_bytes)}


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
    """Percentiles alone and while one of two replicas stands still for a hundredth of the time."""
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
        owners = []
        for number in range(2):
            share = share_of(spec_of(base, "ads", "a:1,b:1"), number)
            load(share, base / str(number))
            owners.append(stack.enter_context(local_server([share.name], root=base / str(number))))
        spec = spec_of(base, "ads", ",".join(map(place, owners)))
        load(spec, base / "door", remote=remote_tables(spec, choose(), None))
        replicas, share = [], share_of(spec_of(base, "ads", "a:1"), 0)
        for number in range(2):
            load(share, base / f"replica{number}")
            replicas.append(stack.enter_context(local_server([share.name], root=base / f"replica{number}")))
        spec = spec_of(base, "ads", "|".join(map(place, replicas)))
        load(spec, base / "replicated", remote=remote_tables(spec, choose(), None))
        (base / "c.npz").unlink()
        clients = [
            stack.enter_context(Client(stack.enter_context(local_server(["ads"], root=base / name)).url))
            for name in ("one", "door", "replicated")
        ]
        requests = requests_of(rows)
        found = against_one_host(clients[0], clients[1], requests)
        owner = of_an_owner(owners[0], rows)
        paused = with_pauses(clients[2], replicas, requests)
        if rows < 200_000:
            os.environ["TRIAL"] = "1"
        report(
            "hosts",
            f"{TABLES} tables of {rows:,} rows, int8 dim {DIM}; requests of {BAGS} bags of {IDS} ids of each",
            found,
            p50_ratio=found[1]["p50_ms"] / found[0]["p50_ms"],
            owner_mrows_s=owner["mrows_s"],
            bytes_ratio=owner["bytes_ratio"],
            pauses=paused,
            pauses_p99_ratio=paused[1]["p99_ms"] / paused[0]["p99_ms"],
            more_requests=paused[1]["asked"] / paused[0]["asked"] - 1,
        )


if __name__ == "__main__":
    main()
