"""Lookups over HTTP by one worker on one core, as real requests are: a subset of the features each time,
found masks, deltas that are applied meanwhile.

    python benchmarks/http_requests.py                          # some 4 minutes
    python benchmarks/http_requests.py --quick                  # about one
    python benchmarks/http_requests.py --before ../other        # beside the server of another checkout

The worker has one core and the load generator another. All of these take turns, in rounds, over 4
connections:

    same       as many ids in every bag: one header for all requests
    lengths    lengths of their own in every request
    subset     the same, of 80 % of the features, drawn for each request
    known      the same as lengths, with the lengths of one request in all: its header is known
    few        the same as subset, with the features and lengths of one request in all
    masks      the same as lengths, with the found mask of every feature
    deltas     the same as lengths, while a delta of 100 rows is applied each second
    json       the same as lengths, as JSON to /v1/lookup, answered as JSON

`ids` is how many ids a second come with such requests, over those of `same`; for `masks`, `deltas` and `json`
over those of `lengths`. `news` is the same over `known`, of `subset` over `few`: what it costs that a request
is another one each time, apart from how many tensors and ids it has. Answers are compared with the lookups in
process first. --before: that checkout, with its .venv, serves the same model on the same core.

`start`, `swap` and `delta` are requests as `subset`'s, 1,000 at a time: the first ones to a model, the first
once another version of it is live, and the first once a delta is applied, beside the 1,000 after those. Their
p99 is the median of 5, but for the start.
"""

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
from common import HERE, console, report, shared_folder
from http_cases import DIM, Case, InProcess, Server, line, publish_cases, serving, vectors
from numpy.typing import NDArray

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.versions.versions import Model
from tableside.serving.cli.commands import bench
from tableside.serving.cli.commands.bench import HEADER_LENGTH
from tableside.serving.cli.commands.generator import Load, merged, run

SERVER_CORE, LOAD_CORE = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
SHAPES = ((8, 8, 10), (26, 32, 20), (100, 8, 5), (100, 64, 5), (300, 1, 3), (1000, 1, 3))
CASES = tuple(Case(*shape) for shape in SHAPES)
WAYS = ("same", "lengths", "subset", "known", "few", "masks", "json", "deltas")
KNOWN = {"lengths": "known", "subset": "few"}
SUBSET, CONNECTIONS, FIRST, EVENTS = 0.8, 4, 1000, 5
MOST, MOST_BYTES = 4096, 256 << 20  # different requests of a way
GOAL, FIRST_GOAL = 0.9, 1.5  # of `same`, by ids; the p99 of first requests over that of later ones
DELTA_ROWS, DELTA_S = 100, 1.0


@dataclass
class Way:
    """One kind of requests at one server. ids: of a request, on average."""

    url: str
    requests: Sequence[bytes]
    ids: float
    loads: list[Load] = field(default_factory=list)
    sent: int = 0
    cpu_s: float = 0.0

    def run(self, server: Server, seconds: float) -> None:
        before = server.cpu_s()
        load = run(
            self.url, self.requests, concurrency=CONNECTIONS, seconds=seconds, first=self.sent, check=None
        )
        if load.failed:
            raise SystemExit(f"{self.url}: {load.failed} requests failed: {load.failure}")
        self.cpu_s += server.cpu_s() - before
        self.sent += load.latencies_s.size
        self.loads.append(load)

    @property
    def rate(self) -> float:
        return statistics.median(load.requests_per_s for load in self.loads)

    @property
    def cpu_us(self) -> float:
        return 1e6 * self.cpu_s / sum(load.latencies_s.size for load in self.loads)


@dataclass(frozen=True)
class Drawn:
    """A request, and what it asks for. features: by number."""

    headers: dict[str, str]
    body: bytes
    values: NDArray[np.int64]
    lengths: NDArray[np.int32]
    features: list[int]


def draw(case: Case, way: str, rng: np.random.Generator) -> Drawn:
    same = way == "same"
    names = list(range(case.features))
    each, rng = rng, np.random.default_rng(0) if way in KNOWN.values() else rng
    if way in ("subset", "few"):
        names = sorted(rng.choice(case.features, max(1, round(SUBSET * case.features)), False).tolist())
    described = dict(case.described)
    described["features"] = [described["features"][n] for n in names]
    values, lengths = bench.draw(rng, described, case.shape(same))
    if each is not rng:
        values = each.integers(0, case.rows, values.size)
    headers, body = bench.encode(described, values, lengths, same=same, form="named")
    if way == "masks":
        headers, body = with_masks(headers, body, [f["name"] for f in described["features"]])
    if way == "json":
        headers, body = {"Content-Type": "application/json"}, as_json(case, values, lengths)
    return Drawn(headers, body, values, lengths, names)


def with_masks(headers: dict[str, str], body: bytes, names: Sequence[str]) -> tuple[dict[str, str], bytes]:
    """The same request, which asks for every feature's found mask as well."""
    size = int(headers[HEADER_LENGTH])
    asked = [{"name": name + part} for name in names for part in ("", ".found")]
    head = orjson.dumps({**orjson.loads(body[:size]), "outputs": asked})
    head = head.ljust(-(-len(head) // 8) * 8)
    return {**headers, HEADER_LENGTH: str(len(head))}, head + body[size:]


def as_json(case: Case, values: NDArray[np.int64], lengths: NDArray[np.int32]) -> bytes:
    """The same request for /v1/lookup."""
    bags = iter(np.split(values, np.cumsum(lengths.reshape(-1))[:-1]))
    names = [f["name"] for f in case.described["features"]]
    features = {name: [next(bags).tolist() for _ in range(case.batch)] for name in names}
    return orjson.dumps({"model": case.model, "features": features})


def path_of(case: Case, way: str) -> str:
    return "/v1/lookup" if way == "json" else f"/v2/models/{case.model}/infer"


def make(case: Case, way: str, url: str) -> Way:
    rng = np.random.default_rng(WAYS.index(way))
    requests: list[bytes] = []
    ids = size = 0
    target = url + path_of(case, way)
    while len(requests) < MOST and size < MOST_BYTES:
        drawn = draw(case, way, rng)
        requests.append(bench.request_bytes(target, drawn.headers, drawn.body))
        ids, size = ids + drawn.values.size, size + len(drawn.body)
    return Way(url, requests, ids / len(requests))


def check(case: Case, way: str, inside: InProcess, url: str) -> None:
    """Compares three answers with the lookups in process, bit for bit."""
    rng = np.random.default_rng(99)
    for _ in range(3):
        drawn = draw(case, way, rng)
        reply = httpx.post(url + path_of(case, way), content=drawn.body, headers=drawn.headers, timeout=60)
        if reply.status_code != 200:
            raise SystemExit(f"{url} answered {case}, {way}: {reply.status_code} {reply.text[:500]}")
        if way == "json":
            found, masks = np.hstack([*map(np.float32, reply.json()["vectors"].values())]), None
        else:
            found, masks = outputs_of(reply.headers, reply.content)
        expected = inside.expected(drawn.values, drawn.lengths, drawn.features)
        assert np.array_equal(found, expected), f"{case}, {way}: other vectors"
        assert masks is None or (masks == 1).all()


def outputs_of(headers: Any, body: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]:
    """An answer's vectors side by side, and its masks."""
    at = int(headers[HEADER_LENGTH])
    described = orjson.loads(body[:at])["outputs"]
    if all(o["datatype"] == "FP32" for o in described):
        return vectors(headers, body), None
    found, masks = [], []
    for output in described:
        size = output["parameters"]["binary_data_size"]
        part = body[at : at + size]
        at += size
        if output["datatype"] == "BOOL":
            masks.append(np.frombuffer(part, np.uint8))
        else:
            found.append(np.frombuffer(part, np.float32).reshape(output["shape"]))
    return np.hstack(found), np.concatenate(masks)


@contextmanager
def changing(root: Path, case: Case) -> Iterator[list[float]]:
    """Applies a delta each second to the model's first table; gives the times at which each was visible."""
    model, stop, times = Model(root, case.model), threading.Event(), []
    rng = np.random.default_rng(3)

    def work() -> None:
        while not stop.is_set():
            apply(model, ChangeBatch(iter([a_change(case, rng)])))
            times.append(time.perf_counter())
            stop.wait(DELTA_S)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield times
    finally:
        stop.set()
        thread.join()


def measure(
    case: Case, root: Path, servers: dict[str, Server], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    inside = InProcess(root, case)
    ways: dict[str, dict[str, Way]] = {}
    begun = 0.0, 0.0
    for name, server in servers.items():
        check(case, "lengths", inside, server.url)
        made = {way: make(case, way, server.url) for way in WAYS[:-1]}
        ways[name] = {**made, "deltas": Way(server.url, made["lengths"].requests, made["lengths"].ids)}
        if name == "ours":
            begun = some(server, made["subset"]), some(server, made["subset"])
        for way in WAYS[:-1]:
            check(case, way, inside, server.url)
    for _ in range(rounds):
        for way in WAYS[:-1]:
            for name, server in servers.items():
                ways[name][way].run(server, seconds)
    with changing(root, case):
        for _ in range(rounds):
            for name, server in servers.items():
                ways[name]["deltas"].run(server, seconds)
    found = [*(row(case, way, ways) for way in WAYS), first_row(case, "start", [begun])]
    return found + first_requests(case, root, servers["ours"], ways["ours"]["subset"])


def first_requests(case: Case, root: Path, server: Server, way: Way) -> list[dict[str, Any]]:
    """p99 of the first requests after a swap and after a delta, EVENTS of each."""
    model, rng = Model(root, case.model), np.random.default_rng(5)

    def swap() -> None:
        before = model.record().current
        publish_cases(root, [case])
        until(server, case, lambda found: found["version"] != before)
        model.collect(0)

    def delta() -> None:
        sequence = apply(model, ChangeBatch(iter([a_change(case, rng)]))).state.sequence
        until(server, case, lambda found: found["sequence"] == sequence)

    rows = []
    for event, change in (("swap", swap), ("delta", delta)):
        found = []
        for _ in range(EVENTS):
            change()
            found.append((some(server, way), some(server, way)))
        rows.append(first_row(case, event, found))
    return rows


def first_row(case: Case, event: str, found: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """found: p99 of first and of later requests, in milliseconds."""
    first, later = np.median(found, axis=0).tolist()
    named = {"features x batch x ids": str(case), "way": event}
    return {
        **named,
        "first p99 ms": first,
        "later p99 ms": later,
        "met": bool(first <= FIRST_GOAL * later),
    }


def some(server: Server, way: Way) -> float:
    """Sends FIRST requests, or a few more; returns their p99 in milliseconds."""
    end = way.sent + FIRST
    while way.sent < end:
        way.run(server, 0.1)
    found = merged(way.loads).percentile_ms(99)
    way.loads.clear()
    way.cpu_s = 0.0
    return found


def until(server: Server, case: Case, reached: Callable[[dict[str, Any]], bool]) -> None:
    """Waits until the worker says so of the model."""
    while True:
        found = httpx.get(f"{server.url}/v1/models").json()["models"]
        if reached(next(m for m in found if m["name"] == case.model)):
            return
        time.sleep(0.02)


def a_change(case: Case, rng: np.random.Generator) -> TableChanges:
    ids = np.unique(rng.integers(0, case.rows, DELTA_ROWS))
    return TableChanges("t0", ids, rng.standard_normal((ids.size, DIM), dtype=np.float32))


def row(case: Case, way: str, ways: dict[str, dict[str, Way]]) -> dict[str, Any]:
    ours = ways["ours"]
    base = ours["lengths" if way in ("masks", "deltas", "json") else "same"]
    rates = {name: one.rate * one.ids for name, one in ours.items()}
    ids = rates[way] / (base.rate * base.ids)
    found: dict[str, Any] = {
        "features x batch x ids": str(case),
        "way": way,
        "req/s": ours[way].rate,
        "cpu us": ours[way].cpu_us,
        "p50 ms": merged(ours[way].loads).percentile_ms(50),
        "p99 ms": merged(ours[way].loads).percentile_ms(99),
        "ids": ids,
        "met": bool(ids >= GOAL),
        "news": rates[way] / rates[KNOWN[way]] if way in KNOWN else None,
    }
    if "before" in ways:
        found["req/s before"] = ways["before"][way].rate
        found["cpu us before"] = ways["before"][way].cpu_us
    return {k: found.get(k) for k in (*found, "req/s before", "cpu us before")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter rounds, printed and not written")
    parser.add_argument("--case", type=int, help="one of the cases, from 0 on; printed and not written")
    parser.add_argument("--before", type=Path, help="another checkout, whose server takes turns")
    options = parser.parse_args()
    if SERVER_CORE == LOAD_CORE:
        raise SystemExit("expected two cores, one for the server and one for the load generator")
    rounds, seconds = (3, 0.2) if options.quick else (7, 0.6)
    rows: list[dict[str, Any]] = []
    with shared_folder() as root, ExitStack() as stack:
        publish_cases(root, CASES)
        os.sched_setaffinity(0, {LOAD_CORE})
        arguments = "ours", root, SERVER_CORE
        servers = {"ours": stack.enter_context(serving(HERE / "http_servers.py", *arguments))}
        if options.before:
            checkout = options.before.resolve()
            script = checkout / "benchmarks/http_servers.py"
            servers["before"] = stack.enter_context(serving(script, *arguments, checkout=checkout))
        for case in CASES if options.case is None else CASES[options.case : options.case + 1]:
            rows += measure(case, root, servers, rounds, seconds)
            console.print(*map(line, rows[-len(WAYS) - 3 :]), sep="\n")
    if not options.quick and options.case is None:
        title = f"requests as they come, int8 D {DIM}, one worker on one core, {CONNECTIONS} connections"
        report("http_requests", title, rows)


if __name__ == "__main__":
    main()
