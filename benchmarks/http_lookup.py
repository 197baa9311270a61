"""Lookups over HTTP by one worker on one core, with lengths that differ in every request, in both forms.

    python benchmarks/http_lookup.py            # some 5 minutes
    python benchmarks/http_lookup.py --quick    # about one

The worker has one core and the load generator another. All of these take turns, in rounds:

    same       the named form, as many ids in every bag, so one header for all requests
    named      the named form, lengths of its own in every request
    compact    the compact form, lengths of its own in every request
    fbgemm     the same bytes as compact, answered by FBGEMM's operator in a plain ASGI application
               (http_servers.py)
    echo       bodies of as many bytes as one of the above has, and answers of as many bytes, in Tableside's
               worker
    bare echo  the same bytes, answered by a C program (echo.c) at the rate of the way that it stands for
    equal      a bare echo that computes for as long as the way that it stands for, in C
    lookup     in process, the kernel's call alone, on inputs that were laid out before

`busy` is the share of the server's core that its processes used, and `cpu us` what they used for a request.
Where `busy` is well below 1, others used the core, and rates say little of the server. `of the floor` is the
time of a request, 1 / (requests/s), over the time of an echo of as many bytes and of the lookup in process
together; the goal is 1.1. Latencies are measured at half the rate that 4 connections reached, over 16
connections, from the time at which a request was due. Requests are due at even times, and at random ones
(Poisson); percentiles are of a round, the median over the rounds. At random times a server that takes equally
long for every request has a p99 of 4.3 x its p50 by its queue alone. `of the bare p99` is a p99 over that of
the bare echo and of the lookup together. A machine that stalls for 3 ms makes the requests of 3 ms late for a
server that is idle else, and those of 6 ms for one that is busy for half of its time. So `of the equal p99`
is a p99 over that of an echo that is as busy; the goal is 1.5 for even times. Answers are compared with the
lookups in process first.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import HERE, console, report, shared_folder
from http_cases import (
    CASES,
    DIM,
    WAYS,
    Case,
    InProcess,
    Server,
    check,
    line,
    prepare,
    publish,
    serving,
    warm_up,
)

from tableside.serving.cli.commands import bench
from tableside.serving.cli.commands.generator import ARRIVALS, Arrivals, Load, run, run_at_rate

SERVER_CORE, LOAD_CORE = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
FEW, MANY = 4, 16  # connections
LOADED = (*WAYS, "fbgemm")
ECHOES = 64  # different bodies of an echo
SAME_FRACTION, FLOOR_RATIO, TAIL_RATIO = 0.9, 1.1, 1.5
NAMED_RATES = {300: 5000, 1000: 1500}  # requests/s, by features
COMPACT_RATIOS = {26: 1.15, 300: 1.5}  # of the named form


@dataclass(frozen=True)
class Timing:
    """Rounds of a case, and the seconds of each way in each round: with FEW connections, with MANY, at
    half load."""

    rounds: int
    few_s: float
    many_s: float
    half_s: float


FULL, QUICK = Timing(5, 0.6, 0.4, 0.8), Timing(3, 0.15, 0.1, 0.1)


@dataclass
class Way:
    """One of what takes turns: where its requests go, and what was measured.

    answer_bytes: of a body. sent: requests so far. cpu_s: that the server took for those of `closed`.
    """

    server: Server
    requests: Sequence[bytes]
    answer_bytes: int
    loads: dict[str, list[Load]] = field(default_factory=dict)
    sent: int = 0
    cpu_s: dict[int, float] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.server.url

    def closed(self, connections: int, seconds: float) -> None:
        before = self.server.cpu_s()
        load = run(
            self.url,
            self.requests,
            concurrency=connections,
            seconds=seconds,
            first=self.sent,
            check=self._check,
        )
        self.cpu_s[connections] = self.cpu_s.get(connections, 0.0) + self.server.cpu_s() - before
        self._keep(f"{connections}", load)

    def at_rate(self, rate: float, arrivals: Arrivals, seconds: float, turn: int) -> None:
        load = run_at_rate(
            self.url,
            self.requests,
            rate=rate,
            concurrency=MANY,
            seconds=seconds,
            arrivals=arrivals,
            first=self.sent,
            seed=turn,
            check=self._check,
        )
        self._keep(arrivals, load)

    def rate(self, connections: int) -> float:
        """Requests a second, the median over the rounds."""
        return statistics.median(load.requests_per_s for load in self.loads[f"{connections}"])

    def busy(self, connections: int) -> float:
        """The share of its core that the server used."""
        return self.cpu_s[connections] / sum(load.seconds for load in self.loads[f"{connections}"])

    def cpu_us(self, connections: int) -> float:
        """Of the server, for one request."""
        return (
            1e6
            * self.cpu_s[connections]
            / sum(load.latencies_s.size for load in self.loads[f"{connections}"])
        )

    def percentile_ms(self, which: str, percent: float) -> float:
        """Of a round, the median over the rounds: a machine that stops for 0.2 s spoils one."""
        return statistics.median(load.percentile_ms(percent) for load in self.loads[which])

    def _keep(self, name: str, load: Load) -> None:
        if load.failed:
            raise SystemExit(
                f"{self.url}: {load.failed} of {load.latencies_s.size} requests failed: {load.failure}"
            )
        self.sent += load.latencies_s.size
        self.loads.setdefault(name, []).append(load)

    def _check(self, body: bytes) -> None:
        if len(body) != self.answer_bytes:
            raise SystemExit(f"{self.url}: an answer has {len(body)} bytes; expected {self.answer_bytes}")


def echoes(server: Server, requests: Sequence[bytes], answer_bytes: int) -> Way:
    """Bodies of as many bytes as some requests have, answered with as many bytes as theirs."""
    bodies = [request[request.index(b"\r\n\r\n") + 4 :] for request in requests[:ECHOES]]
    headers = {"Content-Type": "application/octet-stream"}
    url = f"{server.url}/echo/{answer_bytes}"
    return Way(server, [bench.request_bytes(url, headers, body) for body in bodies], answer_bytes)


def ways_of(case: Case, inside: InProcess, ours: Server, peer: Server, echo: Server) -> dict[str, Way]:
    """What takes turns, after the answers of each were compared."""
    ways = {}
    for way, requests in prepare(case, ours.url).items():
        ways[way] = Way(ours, requests, check(case, inside, ours.url, way, exact=True))
    ways["fbgemm"] = Way(
        peer, ways["compact"].requests, check(case, inside, peer.url, "compact", exact=False)
    )
    for way in WAYS:
        ways[f"echo of {way}"] = echoes(ours, ways[way].requests, ways[way].answer_bytes)
    for way in LOADED:
        ways[f"bare echo of {way}"] = echoes(echo, ways[way].requests, ways[way].answer_bytes)
    return ways


def equal_echo(way: Way, bare: Way) -> Way:
    """A bare echo that takes as much of its core as a way does. Both were measured with FEW connections."""
    path = f"/echo/{bare.answer_bytes}".encode()
    computed = f"/{max(0.0, way.cpu_us(FEW) - bare.cpu_us(FEW)):.1f}".encode()
    requests = [request.replace(path, path + computed, 1) for request in bare.requests]
    return Way(bare.server, requests, bare.answer_bytes)


def measure(
    case: Case, root: Path, servers: tuple[Server, Server, Server], timing: Timing
) -> list[dict[str, Any]]:
    """All ways in turns; a row for each."""
    inside = InProcess(root, case)
    ways = ways_of(case, inside, *servers)
    for way in ways.values():
        way.sent = warm_up(way.url, way.requests, FEW)
    lookups: list[float] = []
    for _ in range(timing.rounds):
        lookups += inside.seconds()
        for way in ways.values():
            way.closed(FEW, timing.few_s)
    for name in LOADED:
        ways[f"equal to {name}"] = equal_echo(ways[name], ways[f"bare echo of {name}"])
    for turn in range(timing.rounds):
        for name in LOADED:
            ways[name].closed(MANY, timing.many_s)
        for name in LOADED:
            for arrivals in ARRIVALS:
                rate = 0.5 * ways[name].rate(FEW)
                for which in (name, f"bare echo of {name}", f"equal to {name}"):
                    ways[which].at_rate(rate, arrivals, timing.half_s, turn)
    return [row(case, name, ways, lookups) for name in LOADED]


def row(case: Case, name: str, ways: dict[str, Way], lookups: list[float]) -> dict[str, Any]:
    """What was measured of one way. lookups: seconds of each."""
    way, echo = ways[name], ways[f"echo of {'compact' if name == 'fbgemm' else name}"]
    lookup_us, lookup_p99_ms = statistics.median(lookups) * 1e6, float(np.percentile(lookups, 99)) * 1e3
    bare, equal = (
        {arrivals: ways[of + name].percentile_ms(arrivals, 99) for arrivals in ARRIVALS}
        for of in ("bare echo of ", "equal to ")
    )
    us, echo_us = 1e6 / way.rate(FEW), 1e6 / echo.rate(FEW)
    return {
        "features x batch x ids": str(case),
        "way": name,
        "req/s": way.rate(FEW),
        "of same": way.rate(FEW) / ways["same"].rate(FEW),
        "busy": way.busy(FEW),
        "cpu us": way.cpu_us(FEW),
        f"req/s, {MANY} conns": way.rate(MANY),
        "us": us,
        "echo us": echo_us,
        "lookup us": lookup_us,
        "of the floor": us / (echo_us + lookup_us),
        **{f"{arrivals} p{p} ms": way.percentile_ms(arrivals, p) for arrivals in ARRIVALS for p in (50, 99)},
        **{f"{arrivals} bare echo p99 ms": floor for arrivals, floor in bare.items()},
        **{f"{arrivals} equal p99 ms": floor for arrivals, floor in equal.items()},
        "lookup p99 ms": lookup_p99_ms,
        **{
            f"{arrivals} of the bare p99": way.percentile_ms(arrivals, 99) / (floor + lookup_p99_ms)
            for arrivals, floor in bare.items()
        },
        **{
            f"{arrivals} of the equal p99": way.percentile_ms(arrivals, 99) / floor
            for arrivals, floor in equal.items()
        },
    }


def targets(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the rows are to reach, and whether they do; None where nothing was asked for."""
    found = []

    def add(case: str, target: str, value: float, is_met: bool | None) -> None:
        found.append({"features x batch x ids": case, "target": target, "found": value, "met": is_met})

    by_case: dict[str, dict[str, dict[str, Any]]] = {}
    for r in rows:
        by_case.setdefault(r["features x batch x ids"], {})[r["way"]] = r
    for case in CASES:
        ways = by_case[str(case)]
        named, compact = ways["named"], ways["compact"]
        ratio = compact["req/s"] / named["req/s"]
        add(
            str(case),
            f"named at least {SAME_FRACTION} x same",
            named["of same"],
            named["of same"] >= SAME_FRACTION,
        )
        if (rate := NAMED_RATES.get(case.features)) is not None:
            add(str(case), f"named at least {rate:,} requests/s", named["req/s"], named["req/s"] >= rate)
        if (least := COMPACT_RATIOS.get(case.features)) is not None:
            add(str(case), f"compact at least {least} x named", ratio, ratio >= least)
        for r in (named, compact):
            add(
                str(case),
                f"{r['way']} at most {FLOOR_RATIO} x the floor",
                r["of the floor"],
                r["of the floor"] <= FLOOR_RATIO,
            )
            for of, what in (("bare", "a bare echo's and the lookup's"), ("equal", "an equally busy echo's")):
                tail = r[f"even of the {of} p99"]
                target = f"{r['way']} at half load: p99 at most {TAIL_RATIO:g} x {what}"
                add(str(case), target, tail, tail <= TAIL_RATIO)
        add(str(case), "compact over FBGEMM's server", compact["req/s"] / ways["fbgemm"]["req/s"], None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="shorter rounds, printed and not written to a result file"
    )
    options = parser.parse_args()
    if SERVER_CORE == LOAD_CORE:
        raise SystemExit(
            "this process may use one core; expected two, one for the server and one for the load generator"
        )
    servers = HERE / "http_servers.py"
    rows: list[dict[str, Any]] = []
    with shared_folder() as root:
        publish(root)
        os.sched_setaffinity(0, {LOAD_CORE})
        with (
            serving(servers, "ours", root, SERVER_CORE) as ours,
            serving(servers, "fbgemm", root, SERVER_CORE) as peer,
            serving(servers, "echo", root, SERVER_CORE) as echo,
        ):
            for case in CASES:
                rows += measure(case, root, (ours, peer, echo), QUICK if options.quick else FULL)
                console.print(*map(line, rows[-len(WAYS) - 1 :]), sep="\n")
    if options.quick:
        console.print(*map(line, targets(rows)), sep="\n")
        return
    title = (
        f"lookups over HTTP, int8 D {DIM}, one worker on one core, {FEW} connections, load on another core"
    )
    report("http_lookup", title, rows)
    report("http_lookup_targets", "goals of these lookups", targets(rows))


if __name__ == "__main__":
    main()
