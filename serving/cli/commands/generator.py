"""The load generator: sends prepared requests over several connections, on one thread.

Closed loop (`run`): a connection sends its next request after each answer. Open loop (`run_at_rate`):
requests are due at given times, and latency counts from then. Only `check` looks at answers' bodies, the
first of each connection.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal, get_args

import numpy as np

from tableside.serving.cli.connections import PATIENCE_S, Check, Fleet, connected
from tableside.serving.client.address import Address

Arrivals = Literal["even", "poisson"]
ARRIVALS: tuple[Arrivals, ...] = get_args(Arrivals)

_SPIN_S = 0.002  # before a request is due; epoll's timeouts are too coarse for less


@dataclass(frozen=True)
class Load:
    """The measurements. seconds: time of sending. requests: answers with status 200. failed: other answers,
    broken connections, and requests unanswered PATIENCE_S after the end. latencies_s: sorted. failure: the
    first failure; or ""."""

    seconds: float
    requests: int
    failed: int
    latencies_s: np.ndarray
    failure: str = ""

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    def percentile_ms(self, percent: float) -> float:
        """Latency in milliseconds that `percent` of the requests stayed within."""
        return (
            float(np.percentile(self.latencies_s, percent) * 1e3) if self.latencies_s.size else float("nan")
        )


def merged(loads: Sequence[Load]) -> Load:
    """Several measurements as one: their times, counts and latencies taken together."""
    latencies = np.sort(np.concatenate([load.latencies_s for load in loads]))
    failure = next((load.failure for load in loads if load.failure), "")
    seconds, requests, failed = (
        sum(getattr(load, n) for load in loads) for n in ("seconds", "requests", "failed")
    )
    return Load(seconds, requests, failed, latencies, failure)


def run(
    url: str | Address,
    requests: Sequence[bytes],
    *,
    concurrency: int,
    seconds: float,
    first: int = 0,
    check: Check | None = None,
) -> Load:
    """Sends `requests` in turn over `concurrency` connections for `seconds`. first: the index of the first
    request. ServingError: no server at `url`, or its answers lack Content-Length."""
    following = _in_turn(requests, first)
    with connected(url, concurrency, check) as fleet:
        started = time.perf_counter()
        end = started + seconds
        while fleet.idle:
            fleet.send(fleet.idle.popleft(), next(following), time.perf_counter())
        while fleet.live and (now := time.perf_counter()) < end:
            for connection in fleet.poll(end - now):
                fleet.send(connection, next(following), time.perf_counter())
        elapsed, answered = time.perf_counter() - started, len(fleet.latencies)
        fleet.drain()
        return _measured(fleet, elapsed, answered)


def run_at_rate(
    url: str | Address,
    requests: Sequence[bytes],
    *,
    rate: float,
    concurrency: int,
    seconds: float,
    arrivals: Arrivals = "poisson",
    check: Check | None = None,
    first: int = 0,
    seed: int = 0,
) -> Load:
    """Sends `requests` at `rate` a second for `seconds`, over at most `concurrency` connections. Latency
    counts from the due time, also while all connections are busy. Keeps one core busy. first, ServingError:
    as `run`."""
    due = deque(due_times(rate, seconds, arrivals, seed))
    following = _in_turn(requests, first)
    with connected(url, concurrency, check) as fleet:
        started = time.perf_counter()
        end, answered = started + seconds, 0
        while fleet.live and (due or fleet.waiting) and (now := time.perf_counter()) < end + PATIENCE_S:
            while due and fleet.idle and started + due[0] <= now:
                fleet.send(fleet.idle.popleft(), next(following), started + due.popleft())
            if now < end:
                answered = len(fleet.latencies)
            next_at = started + due[0] if due and fleet.idle else end + PATIENCE_S
            fleet.idle.extend(fleet.poll(max(0.0, next_at - now - _SPIN_S)))
        fleet.fail(
            f"{len(due):,} requests were due and not sent {PATIENCE_S:g} s after the end of the run", len(due)
        )
        fleet.drain()
        return _measured(fleet, seconds, answered)


def due_times(rate: float, seconds: float, arrivals: Arrivals, seed: int = 0) -> list[float]:
    """Returns when requests are due, in seconds after the start: evenly, or at random as independent clients
    send."""
    count = max(1, round(rate * seconds))
    if arrivals == "even":
        return list((np.arange(count) / rate).tolist())
    return list(np.sort(np.random.default_rng(seed).random(count) * seconds).tolist())


def _in_turn(requests: Sequence[bytes], first: int) -> Iterator[bytes]:
    return islice(cycle(requests), first % len(requests), None)


def _measured(fleet: Fleet, seconds: float, answered: int) -> Load:
    return Load(seconds, answered, fleet.failed, np.sort(np.array(fleet.latencies)), fleet.failure)
