"""A Redis stream, of a real server: batches, positions, what is gone or came anew, a server that is away
and comes back."""

import logging
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("redis", reason="the redis extra brings Redis's client")
pytest.importorskip("hiredis", reason="the redis extra brings it")

from redis_servers import RedisServer, needs_redis, redis_server

from tableside.serving.errors import SourceError
from tableside.serving.follow import redis_stream
from tableside.serving.follow.loop import open_source
from tableside.serving.follow.redis_stream import split_url

pytestmark = needs_redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


def opened(server: RedisServer, start: str = "start", **options: Any) -> Any:
    is_stopping, group_s = options.get("is_stopping", lambda: False), options.get("group_s", 0.0)
    return open_source(server.url("k"), None, "user", start, is_stopping, group_s)


def add(server: RedisServer, *ids: int, **options: Any) -> str:
    """One entry with rows of these ids; its id."""
    client = server.client()
    vectors = np.ones((len(ids), 2), "<f4").tobytes()
    entry: str = client.xadd(
        "k", {"ids": np.array(ids, "<i8").tobytes(), "vectors": vectors}, **options
    ).decode()
    client.close()
    return entry


def ids(batch: Any) -> list[int]:
    assert batch is not None
    return [int(i) for c in batch.changes for i in c.ids]


def test_a_batch_ends_with_its_rows_or_its_time(server: RedisServer) -> None:
    """It is as old as its first entry, and ends at its last one; entries are not cut."""
    source = opened(server)
    assert source.name == "redis:k" and source.read(None, 10, 0) is None, "there is no stream yet"
    first, *_, last = [add(server, i, i + 100) for i in range(30)]
    batch = source.read(None, 10**6, 0.05)
    assert (batch.source, batch.after, batch.position) == ("redis:k", None, last)
    assert batch.made_at == int(first.split("-")[0]) / 1000 and len(ids(batch)) == 60
    assert source.read(last, 10, 0.05) is None
    batch, found = source.read(None, 5, 30), []
    while batch is not None:
        assert len(ids(batch)) <= 10 or batch.position == last, (
            "as many as are asked for, by what an entry had"
        )
        found += ids(batch)
        batch = source.read(batch.position, 5, 0)
    assert found == [x for i in range(30) for x in (i, i + 100)]
    source.close()


def test_groups_are_the_same_for_all_followers(server: RedisServer) -> None:
    """Entries of some seconds are one, of which a read ends where the next one begins, wherever it began. Old
    ones are sixteen times as long. Each says what passed, which another content changes."""
    now_ms = time.time_ns() // 10**6 // 10_000 * 10_000
    old_ms = (now_ms - 3_600_000) // 160_000 * 160_000  # where a group of old ones begins
    made = [old_ms + s * 1000 for s in range(30, 430, 10)] + [now_ms, now_ms + 9_999, now_ms + 10_000]
    for ms in made:
        add(server, ms % 1000, id=f"{ms}-1")
    source = opened(server, group_s=10.0)
    found, after = [], None
    while (batch := source.read(after, 10**6, 0)) is not None:
        found.append([int(one.split("-")[0]) for one in batch.passed])
        assert batch.is_group_end == (batch.position != f"{made[-1]}-1")
        after = batch.position
    assert [len(group) for group in found][-2:] == [2, 1]
    assert [ms for group in found for ms in group] == made
    for group in found[:-2]:
        assert len({ms // 160_000 for ms in group}) == 1
    assert [len(group) for group in found[:-2]] == [13, 16, 11]
    inside = found[0][len(found[0]) // 2]
    batch = opened(server, group_s=10.0).read(f"{inside}-1", 10**6, 0)
    assert batch is not None and batch.position == f"{found[0][-1]}-1" and batch.is_group_end
    (before,) = opened(server, f"{made[-2]}-1", group_s=10.0).read(None, 9, 0).passed
    server.client().delete("k")
    add(server, 7, 8, id=f"{made[-1]}-1")
    (other,) = opened(server, group_s=10.0).read(None, 9, 0).passed
    assert before.split()[0] == other.split()[0] and before != other
    assert opened(server).read(None, 9, 0).passed == []
    source.close()


def test_entries_that_come_are_waited_for(server: RedisServer) -> None:
    source = opened(server)
    timer = threading.Timer(0.3, lambda: add(server, 5))
    timer.start()
    assert ids(source.read(None, 1, 60)) == [5]
    timer.join()


def test_where_it_begins(server: RedisServer) -> None:
    entries = [add(server, i) for i in range(3)]
    assert ids(opened(server).read(None, 9, 0)) == [0, 1, 2]
    assert ids(opened(server, entries[0]).read(None, 9, 0)) == [1, 2]
    source = opened(server, "end")
    assert source.read(None, 9, 0) is None
    add(server, 7)
    assert ids(source.read(None, 9, 0)) == [7], "the end is where it was when it was asked for"


def test_an_entry_that_was_trimmed_before_it_was_read(server: RedisServer) -> None:
    """Trimmed behind what was read: an error that names both. Trimmed up to it: none."""
    entries = [add(server, i) for i in range(6)]
    source, client = opened(server), server.client()
    client.xtrim("k", minid=entries[2], approximate=False)
    assert ids(source.read(entries[2], 9, 0)) == [3, 4, 5]
    client.xtrim("k", minid=entries[4], approximate=False)
    with pytest.raises(
        SourceError,
        match=rf"entry {entries[2]}, which was applied last, is gone, .* it and {entries[4]} may be",
    ):
        source.read(entries[2], 9, 0)
    client.xtrim("k", maxlen=0, approximate=False)
    assert source.read(entries[5], 9, 0) is None, "nothing came behind it"
    with pytest.raises(SourceError, match=rf"between it and {entries[5]} may be"):
        source.read(entries[4], 9, 0)
    assert source.read(None, 9, 0) is None, "who begins has nothing to miss"
    add(server, 9)
    assert ids(source.read(None, 9, 0)) == [9]


def test_an_entry_that_was_deleted_before_it_was_read(server: RedisServer) -> None:
    entries = [add(server, i) for i in range(4)]
    server.client().xdel("k", entries[2])
    source = opened(server, entries[2])
    with pytest.raises(
        SourceError,
        match=rf"entry {entries[2]} was deleted before it was read; {entries[1]} was applied last",
    ):
        source.read(entries[1], 9, 0)
    assert ids(source.read(None, 9, 0)) == [3], "--from goes past it"
    assert ids(source.read(entries[3], 9, 0) or source.read(None, 9, 0)) == [3]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_server_that_is_killed_and_started_again(keeps: bool, tmp_path: Path) -> None:
    """With its data it goes on; without, what was applied is named beside what is there, whether it is
    less or more."""
    with redis_server(tmp_path, keeps) as server:
        source, last = opened(server), [add(server, i) for i in range(3)][-1]
        server.end(signal.SIGKILL)
        server.start()
        if keeps:
            add(server, 3)
            assert ids(source.read(last, 9, 0.5)) == [3]
            return
        with pytest.raises(SourceError, match=f"it is gone; what was applied ends at {last}"):
            source.read(last, 9, 5)
        add(server, 8, id="1-1")
        with pytest.raises(SourceError, match=f"its last entry is 1-1, and what was applied ends at {last}"):
            source.read(last, 9, 0)
        newer = add(server, 9)
        with pytest.raises(
            SourceError, match=rf"entry {last}, which was applied last, is gone, .* between it and {newer}"
        ):
            source.read(last, 9, 0)


def test_a_server_that_is_away_is_waited_for(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """The log says once that it is, and once that it is back. A server that hangs is away as well."""
    source, last = opened(server), add(server, 1)
    server.end()
    with caplog.at_level(logging.WARNING, "tableside"):
        for _ in range(3):
            assert source.read(last, 9, 0.1) is None
        server.start()
        add(server, 2)
        assert ids(source.read(last, 1, 60)) == [2]
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2 and "cannot be reached" in told[0] and "is reached again" in told[1]


def test_a_server_that_hangs_is_away(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(redis_stream, "_ANSWER_S", 0.2)
    source, last = opened(server), add(server, 1)
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        assert source.read(last, 9, 0.1) is None
        assert "Timeout" in caplog.text
    finally:
        server.process.send_signal(signal.SIGCONT)
    add(server, 2)
    assert ids(source.read(last, 1, 60)) == [2]


def test_what_was_read_before_a_server_went_is_not_lost(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes a batch of its own: the server may come back without it."""
    monkeypatch.setattr(redis_stream, "FIRST", 1)
    source, (first, *_) = opened(server), [add(server, i) for i in range(3)]
    ask, asked = source._ask, 0

    def gone_after_one(*given: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == 2:
            server.end(signal.SIGKILL)
            server.wipe()
            server.start()
        return ask(*given)

    monkeypatch.setattr(source, "_ask", gone_after_one)
    batch = source.read(None, 9, 5)
    assert (ids(batch), batch.position) == ([0], first) and asked > 1
    with pytest.raises(SourceError, match=f"it is gone; what was applied ends at {first}"):
        source.read(first, 9, 5)


def test_a_follower_that_shall_stop_does_not_wait(server: RedisServer) -> None:
    began = time.monotonic()
    assert opened(server, is_stopping=lambda: True).read(None, 9, 3600) is None
    assert time.monotonic() - began < 300


def test_what_is_no_stream(server: RedisServer) -> None:
    server.client().set("k", 1)
    with pytest.raises(SourceError, match="WRONGTYPE"):
        opened(server).read(None, 9, 0)
    with pytest.raises(SourceError, match="a position is an entry's id, as 1732300000000-0; found 'x'"):
        opened(server, "x")
    server.client().config_set("requirepass", "secret")
    with pytest.raises(SourceError, match="name the user as"):
        opened(server).read(None, 9, 0)


def test_urls() -> None:
    """A password is shown by no error."""
    assert split_url("redis://u:p@h:1/2?stream=a%2Fb&ssl_cert_reqs=none") == (
        "redis://u:p@h:1/2?ssl_cert_reqs=none",
        "a/b",
    )
    assert split_url("unix:///tmp/x?stream=k") == ("unix:///tmp/x", "k")
    with pytest.raises(SourceError, match=r"^redis://h:1 names 0 streams"):
        split_url("redis://u:p@h:1")
    with pytest.raises(SourceError, match="URL of the Redis stream is wrong"):
        open_source("http://h?stream=k", None, None, "start", lambda: False)
