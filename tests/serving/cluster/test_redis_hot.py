"""Rows in Redis that are used most, in a hot segment: answers stay the same, and need no Redis."""

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hosts import answer, engine_of, served
from redis_models import TABLES, USERS, load_both, tier
from redis_servers import RedisServer, needs_redis
from servers import Server
from support import drop_hot, run_tableside, until
from tables import serve_device

from tableside.loader.hot.warm import warm
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model
from tableside.quant.errors import RowsNotRead
from tableside.serving.client import Client
from tableside.serving.model.engine import Engine

pytestmark = needs_redis
OFTEN, SELDOM = np.arange(0, USERS, 3), np.arange(1, USERS, 3)
BUDGET = 1 << 20


@pytest.fixture(autouse=True)
def no_hot_segments_stay(roots: list[Path]) -> Iterator[None]:
    yield
    for root in roots:
        drop_hot(root)


@pytest.fixture
def root(roots: list[Path], tmp_path: Path, redis: RedisServer) -> Path:
    load_both(tmp_path, roots[0], tier(redis))
    return roots[0]


def engine(root: Path, timeout_s: float = 2.0, **settings: object) -> Engine:
    return engine_of(root, "ads", timeout_s, host_cache=BUDGET, **settings)


def follow(of: Engine) -> None:
    state = of.changed()
    assert state is not None
    of.swap(of.attach(state, as_successor=True))
    assert of.changed() is None


def ask(of: Engine, user: np.ndarray, item: np.ndarray, times: int = 5) -> None:
    for _ in range(times):
        answer(of.served(), {"user": user, "item": item})


DEVICE = {"devices": (serve_device(),), "hbm_budget": 1 << 20}


@pytest.mark.parametrize("settings", [{}, pytest.param(DEVICE, marks=pytest.mark.gpu)], ids=["cpu", "device"])
def test_hot_rows_need_no_redis(root: Path, redis: RedisServer, settings: dict[str, object]) -> None:
    """Of the rows of a request those that are not hot are asked for, and are late where it is away. Ids
    without a row are missing as ever."""
    if settings:
        pytest.importorskip("triton")
    of, plain = engine(root, 0.3, **settings), served(root, "plain")
    items = np.arange(0, 777, 5)
    ask(of, OFTEN, items)
    made = warm(Model(root, "ads"), 1, BUDGET)
    assert made.rows == OFTEN.size + items.size and made.share > 0.99
    follow(of)
    mixed = np.concatenate((OFTEN, SELDOM, [USERS, -1], OFTEN[::-1]))
    asked = {"user": mixed, "item": items, "small": np.arange(20)}
    for found in ((), ("user", "item")):
        assert answer(of.served(), asked, found) == answer(plain, asked, found)
    redis.end(signal.SIGKILL)
    hot = {"user": OFTEN[::-1], "item": items[:3], "small": np.array([3])}
    for found in ((), ("user",)):
        assert answer(of.served(), hot, found) == answer(plain, hot, found)
    values, unfound = answer(of.served(), asked)
    expected = np.frombuffer(answer(plain, asked)[0], np.float32)
    dim = TABLES["user"].shape[1]
    user = expected[: mixed.size * dim].reshape(-1, dim).copy()
    user[OFTEN.size : OFTEN.size + SELDOM.size] = 0  # late
    got = np.frombuffer(values, np.float32)
    np.testing.assert_array_equal(got[: user.size].reshape(user.shape), user)
    np.testing.assert_array_equal(got[user.size :], expected[user.size :])
    assert unfound == [(2, 0, SELDOM.size), (0, 0, 0), (0, 0, 0)]


def test_a_backend_that_reads_no_rows_elsewhere_asks_for_all(root: Path) -> None:
    of = engine(root, backend="fbgemm")
    ask(of, OFTEN, np.arange(9))
    warm(Model(root, "ads"), 1, BUDGET)
    follow(of)
    asked = {"user": OFTEN, "item": np.arange(9), "small": np.arange(3)}
    assert answer(of.served(), asked) == answer(served(root, "plain", backend="fbgemm"), asked)


def test_the_next_version_begins_with_the_counts(root: Path, tmp_path: Path, redis: RedisServer) -> None:
    """Its hot rows are its own. Rows of one that is used most come first where room is short."""
    of = engine(root)
    ask(of, OFTEN, np.arange(9))
    ask(of, OFTEN[:50], np.arange(1))
    row_bytes = of.served().segment.header.remote[0].row_bytes
    few = warm(Model(root, "ads"), 1, 50 * row_bytes)
    assert 50 <= few.rows < OFTEN.size and few.bytes < 100 * row_bytes + 64 * 1024
    follow(of)
    TABLES["user"][:] *= 2
    try:
        load_both(tmp_path, root, tier(redis))
    finally:
        TABLES["user"][:] /= 2
    follow(of)
    assert of.served().segment.header.version == 2
    assert warm(Model(root, "ads"), 2, BUDGET).rows >= OFTEN.size
    follow(of)
    redis.end(signal.SIGKILL)
    asked = {"user": OFTEN, "item": np.arange(9), "small": np.arange(3)}
    assert answer(of.served(), asked) == answer(served(root, "plain"), asked)


def test_rows_that_are_gone_do_not_become_hot(root: Path, redis: RedisServer) -> None:
    """The others do."""
    of = engine(root, 0.3)
    ask(of, OFTEN, np.arange(9))
    with redis.client() as client:
        blocks = sorted(client.scan_iter("*:user:*"))
        client.unlink(blocks[0])
    made = warm(Model(root, "ads"), 1, BUDGET)
    assert OFTEN.size / 2 < made.rows < OFTEN.size + 9
    follow(of)
    assert answer(of.served(), {"user": OFTEN})[1][0][2] == OFTEN.size + 9 - made.rows  # late
    assert not warm(Model(root, "ads"), 1, BUDGET).rows  # nothing is gained
    ask(of, SELDOM[-120:], np.arange(9), 15)  # so often that counts are halved, too
    assert warm(Model(root, "ads"), 1, BUDGET).rows >= made.rows + 120


def test_nothing_is_made_where_most_rows_are_gone(root: Path, redis: RedisServer) -> None:
    of = engine(root, 0.3)
    ask(of, OFTEN, np.arange(9))
    with redis.client() as client:
        client.unlink(*client.scan_iter("*:user:*"))
    with pytest.raises(RowsNotRead, match="came too late"):
        warm(Model(root, "ads"), 1, BUDGET)


def test_a_table_on_a_disk_beside_one_in_redis(disk: Path, tmp_path: Path, redis: RedisServer) -> None:
    """One hot segment has rows of both."""
    values = np.random.default_rng(3).standard_normal((20_000, 32)).astype(np.float32)
    np.savez(tmp_path / "both.npz", big=values, user=TABLES["user"])
    tables = {"big": {"key": "big", "row_format": "fp32"}, "user": {"key": "user", "tier": tier(redis)}}
    features = {name: {"table": name, "pooling": "none"} for name in tables}
    for name in ("ads", "plain"):
        raw = {"name": name, "checkpoint": "both.npz", "tables": tables, "features": features}
        load(parse_model(raw, tmp_path), disk)
        tables["user"].pop("tier", None)
    of = engine(disk)
    for _ in range(5):
        answer(of.served(), {"big": np.arange(500), "user": OFTEN})
    assert warm(Model(disk, "ads"), 1, BUDGET).rows >= 500 + OFTEN.size  # and what a start looked up
    follow(of)
    asked = {"big": np.arange(0, 1000, 3), "user": np.arange(0, USERS, 2)}
    assert answer(of.served(), asked) == answer(served(disk, "plain"), asked)
    redis.end(signal.SIGKILL)
    asked = {"big": np.arange(0, 500, 3), "user": OFTEN}
    assert answer(of.served(), asked) == answer(served(disk, "plain"), asked)


def test_nothing_is_made_while_redis_is_away(root: Path, redis: RedisServer) -> None:
    of = engine(root)
    ask(of, OFTEN, np.arange(9))
    redis.end(signal.SIGKILL)
    with pytest.raises(RowsNotRead, match=r"of (\d+) rows to fetch \1 came too late"):
        warm(Model(root, "ads"), 1, BUDGET)
    assert of.changed() is None


@pytest.mark.drawn(0.5)
def test_a_server_keeps_hot_rows_of_redis(
    root: Path, redis: RedisServer, serve: Callable[..., Server]
) -> None:
    """Two workers take them; requests for them are not degraded once Redis stopped."""
    door = serve(root, "--host-cache", "1MiB", "--host-cache-s", 0.2, "--workers", 2, models=("ads", "plain"))
    asked = {"user": OFTEN[:200, None].tolist()}
    with Client(door.url) as client:
        expected = client.lookup("plain", asked)["user"]

        def is_hot() -> bool:
            client.lookup("ads", asked)
            return bool(re.search('hot="yes",model="ads",table="user"} [1-9]', door.get("/metrics").text))

        until(is_hot, what="hot rows")
        shown = json.loads(run_tableside("inspect", "ads", "--json", root=root).stdout)["disk"]
        assert shown["tables"] == ["user", "item"] and shown["hot_rows"] == 200
        redis.end(signal.SIGKILL)

    def none_is_late() -> bool:
        with Client(door.url) as other:  # of any worker
            got = other.lookup("ads", asked)["user"]
            return not other.late_rows() and np.array_equal(got, expected)

    until(lambda: all(none_is_late() for _ in range(12)), what="both workers to have them")
