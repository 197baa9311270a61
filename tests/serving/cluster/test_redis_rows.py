"""Rows in a Redis server that is killed, stopped, flushed, started empty, or changed, asks for a password, or
lies: no answer is wrong, and rows that do not come are told."""

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from hosts import answer, served
from liars import Liar
from redis_models import (
    ASKED,
    LATE,
    TABLES,
    USERS,
    load_both,
    look_up,
    node_of,
    right,
    rows_in,
    spec_of,
    taken_by,
    tier,
)
from redis_servers import RedisServer, needs_redis
from servers import Server
from support import rows_of, run_tableside, until
from tables import serve_device

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.errors import ChangeError, ModelError
from tableside.loader.load.load import load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.segment.blocks import OPENS_S
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat
from tableside.quant.errors import RowsNotRead
from tableside.serving.client import Client
from tableside.serving.errors import ErrorKind
from tableside.torch import Embeddings

pytestmark = needs_redis


@pytest.mark.drawn(0.5)
def test_answers_are_those_of_a_model_without_a_tier(
    roots: list[Path], tmp_path: Path, redis: RedisServer, serve: Callable[..., Server]
) -> None:
    """Bit by bit, over HTTP, of ids without a row, too. Metadata and commands say where rows are."""
    load_both(tmp_path, roots[0], tier(redis))
    door = serve(roots[0], models=("ads", "plain"))
    asked = {"user": [[1, 2], [USERS, 5]], "item": [[776, 0]], "small": [[3]]}
    with Client(door.url) as client:
        got, expected = (client.lookup(name, asked) for name in ("ads", "plain"))
        assert all(np.array_equal(got[name], expected[name]) for name in asked)
        asked = {name: ids[:, None] for name, ids in ASKED.items()}
        got, expected = (client.lookup(name, asked) for name in ("ads", "plain"))
        assert all(np.array_equal(got[name], expected[name]) for name in asked)
    table = next(t for t in door.get("/v1/models").json()["models"][0]["tables"] if t["name"] == "user")
    assert (table["placement"], table["id_count"]) == ("remote", USERS)
    counts = door.get("/metrics").text
    assert 'outcome="came"' in counts and 'outcome="late"' not in counts
    shown = run_tableside("inspect", "ads", "--root", roots[0])
    assert "in Redis" in shown.stdout and shown.returncode == 0


@pytest.mark.gpu
def test_a_device_beside_rows_in_redis(roots: list[Path], tmp_path: Path, redis: RedisServer) -> None:
    pytest.importorskip("triton")
    load_both(tmp_path, roots[0], tier(redis))
    on_device = {"devices": (serve_device(),), "hbm_budget": 1 << 20}
    assert look_up(served(roots[0], "ads", **on_device)) == right(roots[0])


def test_an_id_without_a_row_is_refused_as_without_a_tier(
    roots: list[Path], tmp_path: Path, redis: RedisServer
) -> None:
    load_both(tmp_path, roots[0], tier(redis), missing="error")
    asked = {"user": [1, USERS]}
    assert answer(served(roots[0], "ads"), asked) == answer(served(roots[0], "plain"), asked)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("late", ["default", "error"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_rows_of_a_server_that_is_away_are_late(
    roots: list[Path],
    tmp_path: Path,
    redis: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    how: signal.Signals,
    late: str,
) -> None:
    """They are the default row, or an error, as the setting says; soon nobody waits for them but one request
    in a second. Once the server answers again, with its rows, they are right."""
    redis.end()
    redis.keeps = True
    redis.start()
    load_both(tmp_path, roots[0], tier(redis))
    version = served(roots[0], "ads", 0.2, disk_late=late)
    assert look_up(version) == right(roots[0])
    process = redis.process
    assert process is not None
    process.send_signal(how)
    if how == signal.SIGKILL:
        process.wait()
    got = look_up(version)
    if late == "error":
        assert got[0] is ErrorKind.NOT_READ and "came too late" in got[1]
    else:
        assert got[1] == LATE
        assert not rows_in(got)["user"].any() and np.array_equal(rows_in(got)["small"], TABLES["small"])
    node = node_of(redis)
    until(lambda: bool(look_up(version)) and node.hangs, what="nobody to wait any more")
    began, taken = time.monotonic(), taken_by(monkeypatch)
    for _ in range(50):
        look_up(version)
    # One that looks asks again once, and asks for the slots
    assert len(taken) <= 3 * (2 + (time.monotonic() - began) / OPENS_S)
    if how == signal.SIGKILL:
        redis.process = None
        redis.start()
    else:
        process.send_signal(signal.SIGCONT)
    until(lambda: look_up(version) == right(roots[0]), what="its rows")


def test_threads_ask_at_once(roots: list[Path], tmp_path: Path, redis: RedisServer) -> None:
    """Each on a connection of its own, which is used again."""
    load_both(tmp_path, roots[0], tier(redis))
    version, expected = served(roots[0], "ads"), right(roots[0])
    with ThreadPoolExecutor(8) as pool:
        assert all(got == expected for got in pool.map(lambda _: look_up(version), range(200)))
    assert 1 <= len(redis.client().client_list()) <= 8 + 3


def test_who_waits_for_nothing_gets_no_row(
    roots: list[Path], tmp_path: Path, redis: RedisServer, serve: Callable[..., Server]
) -> None:
    """And does not make others wait, or give up."""
    load_both(tmp_path, roots[0], tier(redis), user={"row_format": "fp32"})
    door = serve(roots[0], models=("ads",))
    with (
        Client(door.url) as client,
        Client(door.url, headers={"Tableside-Disk-Timeout-Ms": "0.001"}) as hasty,
    ):
        for _ in range(5):
            hasty.lookup("ads", {"user": ASKED["user"][:, None]})
            got = client.lookup("ads", {"user": ASKED["user"][:, None]})
            assert np.array_equal(got["user"], TABLES["user"][ASKED["user"]])


def test_a_forked_process_asks_by_itself(roots: list[Path], tmp_path: Path, redis: RedisServer) -> None:
    """Its answers and its parent's do not meet on one connection."""
    load_both(tmp_path, roots[0], tier(redis))
    version, expected = served(roots[0], "ads"), right(roots[0])
    assert look_up(version) == expected
    children = []
    for _ in range(3):
        if (pid := os.fork()) == 0:
            os._exit(0 if all(look_up(version) == expected for _ in range(30)) else 1)
        children.append(pid)
    assert all(look_up(version) == expected for _ in range(30))
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 3


def test_a_module_asks_redis_too(roots: list[Path], tmp_path: Path, redis: RedisServer) -> None:
    """It waits for rows, and takes no default row in their place."""
    load_both(tmp_path, roots[0], tier(redis), user={"row_format": "fp32"})
    module = Embeddings("ads", ["user"], root=roots[0], output=torch.float32)
    bags = {"user": torch.from_numpy(ASKED["user"])}
    assert np.array_equal(module(bags)["user"].numpy(), TABLES["user"][ASKED["user"]])
    redis.client().flushall()
    with pytest.raises(RowsNotRead, match=f"{ASKED['user'].size} came too late"):
        module(bags)


def test_a_server_that_starts_without_redis_takes_it_up(
    roots: list[Path], tmp_path: Path, redis: RedisServer
) -> None:
    redis.end()
    redis.keeps = True
    redis.start()
    load_both(tmp_path, roots[0], tier(redis))
    redis.end()
    version = served(roots[0], "ads", 0.2)
    assert look_up(version)[1] == LATE
    redis.start()
    until(lambda: look_up(version) == right(roots[0]), what="the server's rows")


def test_an_answer_says_that_it_is_degraded(
    roots: list[Path], tmp_path: Path, redis: RedisServer, serve: Callable[..., Server]
) -> None:
    load_both(tmp_path, roots[0], tier(redis))
    door = serve(roots[0], models=("ads",))
    redis.client().flushall()
    asked = {"inputs": [{"name": "user", "shape": [2, 1], "datatype": "INT64", "data": [1, 999]}]}
    told = httpx.post(f"{door.url}/v2/models/ads/infer", json=asked).json()
    assert told["parameters"] == {"degraded": 2, "degraded.user": 2}
    assert 'outcome="gone"' in door.get("/metrics").text


def test_rows_that_are_gone_are_late_until_the_next_load(
    roots: list[Path], tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a server that started empty, too; the log says so. One block that is gone takes its rows alone."""
    load_both(tmp_path, roots[0], tier(redis))
    version, expected = served(roots[0], "ads"), right(roots[0])
    (key,) = redis.client().keys("tableside:ads:user:*:00000{001}")
    redis.client().unlink(key)
    got = look_up(version)
    lost = got[1][0][2]
    assert 0 < lost < ASKED["user"].size and got[1][1:] == [(0, 0, 0), (0, 0, 0)]
    is_zero = ~rows_in(got)["user"].any(1)
    assert is_zero.sum() == lost
    assert np.array_equal(rows_in(got)["user"][~is_zero], rows_in(expected)["user"][~is_zero])
    assert "is gone; load the model again" in caplog.text
    redis.end(signal.SIGKILL)
    redis.start()
    until(lambda: look_up(version)[1] == LATE and not node_of(redis).hangs, what="a server without rows")
    load(spec_of(tmp_path, tier(redis)), roots[0])
    assert look_up(served(roots[0], "ads")) == expected


def test_a_server_that_ends_idle_connections_is_asked_anew(
    roots: list[Path], tmp_path: Path, redis: RedisServer
) -> None:
    """No row is late."""
    load_both(tmp_path, roots[0], tier(redis))
    version = served(roots[0], "ads")
    assert look_up(version) == right(roots[0])
    redis.client().client_kill_filter(_type="normal")
    assert look_up(version) == right(roots[0])


def test_damaged_rows_are_an_error(
    roots: list[Path], tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a bit that changed, a block in place of another one, one that was cut; the log names the key."""
    load_both(tmp_path, roots[0], tier(redis))
    version, client = served(roots[0], "ads"), redis.client()
    first, second = (client.keys(f"tableside:ads:user:*:00000{{00{n}}}")[0] for n in (0, 1))
    for damage in (
        lambda value: value[:10] + bytes([value[10] ^ 1]) + value[11:],
        lambda value: client.get(second),
        lambda value: value[:7],
    ):
        value = client.get(first)
        client.set(first, damage(value))
        got = look_up(version)
        assert got[0] is ErrorKind.NOT_READ and re.search(" and [1-9][0-9]* were damaged", got[1])
        client.set(first, value)
        assert look_up(version) == right(roots[0])
    assert first.decode() in caplog.text and "not what was written" in caplog.text


LIES: dict[str, Callable[[bytes], bytes]] = {
    "no protocol": lambda data: b"x" * len(data),
    "cut short": lambda data: data[:-8],
    "nothing": lambda data: b"",
    "a longer value": lambda data: data.replace(b"$72\r\n", b"$99\r\n", 1),
    "a server that is none": lambda data: b"-MOVED 1 a..b:99999\r\n" + data,
    "an array": lambda data: b"*-1\r\n" + data,
}


@pytest.mark.parametrize("lie", LIES)
def test_replies_that_were_changed_on_their_way_are_nottaken_by(
    roots: list[Path], tmp_path: Path, redis: RedisServer, lie: str
) -> None:
    """Rows are right, late or damaged, and none is wrong. With the next honest answers all are right."""
    liar = Liar(redis.port)
    try:
        load_both(tmp_path, roots[0], f"redis://{liar.place}")
        version, good = served(roots[0], "ads", 0.5), right(roots[0])
        until(lambda: look_up(version) == good, what="rows in time, on a busy machine, too")
        liar.change = LIES[lie]
        got = look_up(version)
        assert got != good
        if got[0] is not ErrorKind.NOT_READ:
            for name, rows in rows_in(got).items():
                came = rows.any(1)
                assert np.array_equal(rows[came], rows_in(good)[name][came])
        liar.change = lambda data: data
        until(lambda: look_up(version) == good, what="honest rows")
    finally:
        liar.close()


def test_a_server_that_loads_its_data_or_refuses_is_told(
    roots: list[Path], tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    load_both(tmp_path, roots[0], tier(redis))
    version = served(roots[0], "ads")
    (key,) = redis.client().keys("tableside:ads:item:*:00000{000}")
    redis.client().delete(key)
    redis.client().lpush(key, "a list")
    got = look_up(version)
    assert got[1] == [(0, 0, 0), LATE[1], (0, 0, 0)] and "it refuses: WRONGTYPE" in caplog.text
    assert np.array_equal(rows_in(got)["user"], rows_in(right(roots[0]))["user"])


def test_what_rows_in_redis_lack_is_refused(roots: list[Path], tmp_path: Path, redis: RedisServer) -> None:
    for user, match in (
        ({"ids": "raw", "id_key": "x"}, "raw ids have no tier in Redis"),
        ({"tier": "redis://me:word@a:1"}, "has a user or a password"),
        ({"tier": "redis://a:1|b:1"}, "expected rows://HOST:PORT"),
        ({"tier": "redis://a:1/rows"}, "expected rows://HOST:PORT"),
        ({"tier": "redis+sentinel://a:1,b:1"}, "Sentinels, as redis\\+sentinel://HOST:PORT,HOST:PORT/NAME"),
        ({"tier": "rediss+sentinel://a:1/a b"}, "Sentinels, as redis\\+sentinel"),
        ({"missing": "mean"}, "needs all rows on one host"),
        ({"tier": "rows://a:1"}, "expected owners for all of them, or one Redis"),
        ({"tier": "redis://a:1"}, "expected owners for all of them, or one Redis"),
    ):
        with pytest.raises(ModelError, match=match) as refused:
            spec_of(tmp_path, tier(redis), user=user)
        assert "word" not in str(refused.value).replace("password", "")
    spec = spec_of(tmp_path, tier(redis))
    load(spec, roots[0])
    with pytest.raises(ModelError, match="without --only"):
        load(spec, roots[0], LoadSettings(only=("small",)))
    changes = TableChanges("user", np.array([1]), np.zeros((1, 64), np.float32))
    with pytest.raises(ChangeError, match="in Redis, which take no changes"):
        apply(Model(roots[0], "ads"), ChangeBatch((changes,)))


def test_other_tables_change_over_it(roots: list[Path], tmp_path: Path, redis: RedisServer) -> None:
    load_both(tmp_path, roots[0], tier(redis))
    changes = TableChanges("small", np.array([1]), np.full((1, 4), 9, np.float32))
    for name in ("ads", "plain"):
        apply(Model(roots[0], name), ChangeBatch((changes,)))
    assert look_up(served(roots[0], "ads")) == right(roots[0])
    assert rows_in(right(roots[0]))["small"][1].tolist() == [9] * 4


def test_rows_take_a_fifth_more_at_most(roots: list[Path], tmp_path: Path, redis: RedisServer) -> None:
    """Of int8 with 64 values, with keys, checksums, and what Redis needs for both."""
    rows = 100_000
    before = redis.client().info("memory")["used_memory"]
    np.savez(tmp_path / "large.npz", user=rows_of(rows, 64))
    tables = {"user": {"key": "user", "tier": tier(redis)}}
    load(parse_model({"name": "ads", "checkpoint": "large.npz", "tables": tables}, tmp_path), roots[0])
    payload = rows * RowFormat.INT8.row_bytes(64, 4)
    assert redis.client().info("memory")["used_memory"] - before <= 1.2 * payload
