"""A short run of each campaign: what may never happen does not, and the campaign did what it is for."""

import pytest
from redis_servers import needs_redis
from support import LONGEST_S

from campaigns.common import Result
from campaigns.goals import CAMPAIGNS

pytestmark = pytest.mark.thorough

SEED = 1
WAYS = ("attached", "by a module", "over HTTP", "by evaluations")
SHORT = {
    "kills": (4, ("kills", "requests checked")),
    "engines": (
        4,
        (
            "doors killed",
            "engines killed",
            "clients killed that held a region",
            "requests checked in regions",
        ),
    ),
    "loads": (
        4,
        (
            "of them at random instants, forked",
            "system calls killed at",
            "errors injected",
            "readers stopped",
        ),
    ),
    "requests": (8, ("cases in process", "raw sockets", "schemathesis cases")),
    "grpc": (4, ("requests", "answered of them")),
    "overload": (4, ("capacity, requests/s",)),
    "follows": (3, ("kills", "of them while a batch was under way", "kills of Redis")),
    "hosts": (5, ("rows read",)),
    "forks": (3, ("forks", "forks of event loops")),
    "present": (6, ("requests", "batches applied", "kills")),
    "redis_lies": (2, ("handmade lies", "random changes", "refused")),
    "states": (
        4,
        (*(f"rows read {way}" for way in WAYS), "batches applied", "kills of the writer", "compactions"),
    ),
    "soak": (4, ("requests", "swaps")),
    "headers": (4, ("requests",)),
    "origins": (4, ("requests of pages", "own requests")),
    "trace": (4, ("modules", "traced answers")),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[needs_redis] if n in ("follows", "hosts") else []) for n in SHORT]
)
def test_a_short_run(name: str) -> None:
    if name in ("engines", "present"):
        pytest.importorskip("triton")
    if name == "redis_lies":
        pytest.importorskip("redis", reason="the redis extra brings Redis's client")
    seconds, did = SHORT[name]
    measured = CAMPAIGNS[name].run(seconds, SEED)
    while not all(measured[figure] > 0 for figure in did) and seconds < LONGEST_S:  # other work has the cores
        seconds *= 4
        measured = CAMPAIGNS[name].run(seconds, SEED)
    result = Result(name, seconds, SEED, measured, CAMPAIGNS[name].goals)
    missed = [row for row in result.rows() if row[3] == "MISSED" and result.goals[row[0]].kind == "must"]
    assert not missed, f"seed {SEED}: {missed}"
    assert all(result.measured[figure] > 0 for figure in did), result.measured


def test_slow_clients_are_closed() -> None:
    """A tenth as many as in a full run; with the server's own deadlines, so it takes those."""
    from campaigns import clients

    found = clients.run(0, SEED, clients=50)
    assert found["slow clients"] == 50
    assert found["closed late or never"] == 0, found
    assert found["wrong or failed meanwhile"] == 0, found
    assert found["descriptors leaked"] == 0, found
