"""Owners and a server of the whole follow one stream. Clients read rows that say what they came with."""

import contextlib
import itertools
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from following import following, killed
from hosts import RAW, UNPOOLED, USER_ROWS, checkpoint, load_door, load_shares, place, spec_of
from redis_servers import RedisServer, needs_redis, redis_server
from servers import Server
from support import until

from tableside.loader.versions.versions import Model
from tableside.serving.client import Client

TABLES = {
    "user": {"row_format": "fp32", "missing": "zero"},
    "item": {"row_format": "fp32", "missing": "zero"},
}
IDS = {"user": np.arange(0, USER_ROWS, 9), "item": np.sort(RAW[::7]), "small": np.arange(20)}
DIMS = {"user": 16, "item": 8, "small": 4}


def write(server: RedisServer, number: int) -> None:
    """Has all rows of a table become one number, one table after another."""
    with contextlib.closing(server.client()) as client:
        for table, ids in IDS.items():
            vectors = np.full((ids.size, DIMS[table]), number, "<f4")
            client.xadd("rows", {"table": table, "ids": ids.tobytes(), "vectors": vectors.tobytes()})


def numbers(client: Client) -> dict[str, int]:
    """The number that all rows of each table have: of one state."""
    got, found = client.lookup("ads", {table: ids[:, None] for table, ids in IDS.items()}), {}
    for table, vectors in got.items():
        assert (vectors == vectors[0, 0]).all(), f"{table} has rows of several entries"
        found[table] = int(vectors[0, 0])
    order = [found["user"], found["item"], found["small"]]
    assert order == sorted(order, reverse=True) and order[0] - order[2] <= 1, found
    return found


@needs_redis
@pytest.mark.thorough
@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on a disk"])
def test_a_request_is_answered_from_one_place_of_the_stream(
    roots: list[Path], tmp_path: Path, disk: Path, serve: Callable[..., Server], on_disk: bool
) -> None:
    """While followers are killed, stand still and are started again, and owners are compacted."""
    checkpoint(tmp_path)
    if on_disk:
        roots = [disk, *roots[1:]]
    spec = spec_of(tmp_path, owners=["a:1", "b:1"], tables=TABLES, features=UNPOOLED)
    names = load_shares(spec, roots[:2])
    owners = [serve(root, models=(name,)) for root, name in zip(roots, names, strict=False)]
    tier = [place(owner) for owner in owners]
    load_door(spec_of(tmp_path, owners=tier, tables=TABLES, features=UNPOOLED), roots[2])
    door = serve(roots[2], models=("ads",))
    hosts = list(zip(roots, [*names, "ads"], strict=True))
    with redis_server(tmp_path) as stream, contextlib.ExitStack() as running:

        def start(number: int) -> "subprocess.Popen[str]":
            root, model = hosts[number]
            options = ("--every-s", 0.1, "--compact-at", 0.3)
            return running.enter_context(following(root, stream.url("rows"), *options, model=model))

        followers = [start(number) for number in range(3)]
        client = running.enter_context(Client(door.url))
        write(stream, 1)
        until(lambda: client.lookup("ads", {"small": [[0]]})["small"][0, 0] == 1, what="the first changes")
        written, seen = itertools.count(2), numbers(client)

        def go_on(steps: int) -> int:
            nonlocal seen
            for _ in range(steps):
                write(stream, number := next(written))
                before, seen = seen, numbers(client)
                assert all(seen[table] >= before[table] for table in seen), "rows went back"
                assert client.late_rows() == {}
            return number

        for turn in range(6):
            number = go_on(10)
            until(lambda number=number: numbers(client)["small"] == number, what="all changes")
            follower = followers[turn % 3]
            if turn < 3:
                killed(follower)
                number = go_on(10)
                assert numbers(client)["small"] < number
                followers[turn] = start(turn)
            else:
                follower.send_signal(signal.SIGSTOP)
                number = go_on(10)
                assert numbers(client)["small"] < number
                follower.send_signal(signal.SIGCONT)
            until(lambda number=number: numbers(client)["small"] == number, what="all changes")
    assert all(Model(root, model).versions()[-1] > 1 for root, model in hosts[:2]), "they were compacted"
