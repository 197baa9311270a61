"""All campaigns: what each figure should be, and each campaign's share of the time.

What may never happen is a goal of every run (`none`); numbers of cases are goals of a full one (`at_least`),
which takes about an hour; what depends on the machine is shown beside its goal and breaks no run (`at_most`).
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from campaigns import (
    clients,
    engines,
    evals,
    files,
    flips,
    follows,
    forks,
    grpc_requests,
    headers,
    hosts,
    kills,
    loads,
    origins,
    overload,
    present,
    programs,
    redis_lies,
    requests,
    soak,
    states,
    traces,
)
from campaigns.common import Goal, Run, at_least, at_most, console, none

MOST_CHANGES, TRIED_CHANGES = 1000, 10


@dataclass(frozen=True)
class Campaign:
    """weight: its share of the time."""

    run: Run
    weight: float
    goals: Mapping[str, Goal] = field(default_factory=dict)


def _never(*figures: str) -> dict[str, Goal]:
    return dict.fromkeys(figures, none())


KILLS = {
    "requests checked": at_least(200_000),
    "kills": at_least(50),
    **_never(
        "wrong answers", "answers mixed from two versions", "stale answers", "failed through the client"
    ),
    "replacement, median s": at_most(1),
    "replacement, slowest s": at_most(1),
}
ENGINES = {
    "requests checked": at_least(5_000),
    "requests checked in regions": at_least(5_000),
    "doors killed": at_least(200),
    "engines killed": at_least(100),
    "clients killed that held a region": at_least(100),
    **_never(
        "wrong answers",
        "answers mixed from two versions",
        "stale answers",
        "failed through the client",
        "failed in regions",
    ),
    **_never("regions that outlived their object", "engines lost to a door", "doors lost to an engine"),
    **_never("memory of doors that an engine keeps"),
}
LOADS = {
    "loader kills": at_least(1000),
    **_never(
        "errors not told in one line", "loads that hung", "orphan bytes", "wrong rows", "wrong live version"
    ),
    **_never("numbers given twice", "whole loads that failed"),
}
REQUESTS = {
    "cases in process": at_least(1_000_000),
    **_never("exceptions", "wrongly refused", "wrongly answered"),
    "raw sockets": at_least(2000),
    **_never("raw: other answers than requests", "raw: answers of 500 and above"),
    "schemathesis cases": at_least(5000),
    **_never("schemathesis failures", "operations that /openapi.json describes with broken references"),
    **_never("internal errors in the metrics", "crashed workers", "descriptors leaked"),
}
CLIENTS = {
    "slow clients": at_least(clients.CLIENTS),
    **_never("closed late or never", "wrong or failed meanwhile", "descriptors leaked", "crashed workers"),
}
OVERLOAD = {
    **_never("wrong answers", "health checks unanswered"),
    "goodput at 4 x, share of peak": at_least(0.9, "figure"),
    "p99 at 4 x from the sending, times that at 80 %": at_most(3),
    "slowest health check at 80 %, ms": at_most(100),
    "slowest health check at 4 x, ms": at_most(100),
    "its growth from first to second half, MB": at_most(5),
    f"large bodies: goodput at {overload.LARGE_CONNECTIONS[-1]} connections, share of best": at_least(
        0.9, "figure"
    ),
    "generator's share of its core at 4 x": at_most(0.9),
}
SOAK = {
    "requests": at_least(1_000_000),
    **_never("wrong answers", "failed requests"),
    "a worker's growth: private memory, MB": at_most(2),
    "a worker's growth: descriptors": at_most(1),
    "a worker's growth: mappings": at_most(2),
    "the supervisor's growth: private memory, MB": at_most(2),
    "the supervisor's growth: descriptors": at_most(1),
    "the supervisor's growth: mappings": at_most(2),
    "growth of files": at_most(2),
}
HEADERS = {
    "requests": at_least(2000),
    **_never("crashed workers", "memory beyond what is counted, MB"),
    "health check beside one of them, slowest ms": at_most(1e3 * headers.SLOW_S),
}
ORIGINS = {
    "requests of pages": at_least(20_000),
    **_never("taken from a page", "own requests refused", "changes of memory", "changes of regions"),
}
PROGRAMS = _never("signals", "foreign_bytes", "hangs", "errors")
FLIPS = {"changes of each format": at_least(MOST_CHANGES), **_never("silent", "broken")}
FILES = {"mutations of each format": at_least(MOST_CHANGES), **_never("broken")}


# ---- campaigns with an interface of their own ----


def _told(failures: Any, name: str) -> None:
    for failure in list(failures)[:20]:
        console.print(f"{name}: {failure}", markup=False)


def _programs(seconds: float, seed: int) -> dict[str, float]:
    found = programs.run(seconds, seed)
    _told(found["bad"].items(), "programs")
    return {name: count for name, count in found.items() if isinstance(count, int)}


def _changes(name: str, run: Any, seconds: float, seed: int) -> tuple[int, dict[str, int]]:
    """A few changes of each format, then as many as fit into the time that those left; (changes of each,
    outcome -> how many)."""
    started = time.monotonic()
    found = [run(TRIED_CHANGES, seed)]
    took = time.monotonic() - started
    more = min(MOST_CHANGES, int(TRIED_CHANGES * (seconds - took) / took))
    if more > TRIED_CHANGES:
        found.append(run(more, seed))
    counts: dict[str, int] = {}
    for figures in found:
        _told(figures["failures"], name)
        for figure, value in figures.items():
            if "." in figure:
                outcome = figure.rpartition(".")[2]
                counts[outcome] = counts.get(outcome, 0) + value
    return max(more, TRIED_CHANGES), counts


def _flips(seconds: float, seed: int) -> dict[str, float]:
    changes, counts = _changes("flips", flips.run, seconds, seed)
    return {"changes of each format": changes, **counts}


def _files(seconds: float, seed: int) -> dict[str, float]:
    changes, counts = _changes("files", files.run, seconds, seed)
    return {"mutations of each format": changes, "broken": 0, **counts}


CAMPAIGNS = {
    "kills": Campaign(kills.run, 14, KILLS),
    "engines": Campaign(engines.run, 10, ENGINES),
    "loads": Campaign(loads.run, 12, LOADS),
    "requests": Campaign(requests.run, 24, REQUESTS),
    "grpc": Campaign(grpc_requests.run, 4, grpc_requests.GOALS),
    "clients": Campaign(clients.run, 3, CLIENTS),
    "overload": Campaign(overload.run, 8, OVERLOAD),
    "soak": Campaign(soak.run, 20, SOAK),
    "programs": Campaign(_programs, 5, PROGRAMS),
    "flips": Campaign(_flips, 4, FLIPS),
    "files": Campaign(_files, 4, FILES),
    "follows": Campaign(follows.run, 5, follows.GOALS),
    "hosts": Campaign(hosts.run, 10, hosts.GOALS),
    "forks": Campaign(forks.run, 2, forks.GOALS),
    "present": Campaign(present.run, 4, present.GOALS),
    "redis_lies": Campaign(redis_lies.run, 1, redis_lies.GOALS),
    "states": Campaign(states.run, 4, states.GOALS),
    "evals": Campaign(evals.run, 8, evals.GOALS),
    "headers": Campaign(headers.run, 4, HEADERS),
    "origins": Campaign(origins.run, 2, ORIGINS),
    "trace": Campaign(traces.run, 5, traces.GOALS),
}
