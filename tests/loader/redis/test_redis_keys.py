"""Keys in Redis belong to a version: what a load that ended early wrote goes, what is read stays."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hosts import served
from redis_models import load_both, look_up, right, spec_of
from redis_servers import RedisServer, free_port, needs_redis, redis_server

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.errors import CheckpointError, RedisError
from tableside.loader.load.load import load
from tableside.loader.redis import writer
from tableside.loader.versions.versions import Model

pytestmark = needs_redis


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path, False, port=free_port()) as running:
        yield running


def tier(server: RedisServer) -> str:
    return f"redis://{server.place}"


def notes(root: Path) -> list[str]:
    return sorted(file.name for file in (root / "ads").iterdir() if file.suffix == ".redis")


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_load_that_is_killed_leaves_nothing_for_long(
    root: Path, tmp_path: Path, redis: RedisServer, after: int
) -> None:
    """Nothing is served of it; `gc`, or the next load, removes its keys."""
    load_both(tmp_path, root, tier(redis))
    keys = redis.client().dbsize()
    _load_until_killed(tmp_path, root, redis, after)
    assert redis.client().dbsize() > keys if after else redis.client().dbsize() == keys
    assert len(notes(root)) == 4
    assert look_up(served(root, "ads")) == right(root)
    Model(root, "ads").collect(1)
    assert redis.client().dbsize() == keys and len(notes(root)) == 2
    _load_until_killed(tmp_path, root, redis, after)
    load(spec_of(tmp_path, tier(redis)), root)
    assert redis.client().dbsize() == 2 * keys and len(notes(root)) == 4


def _load_until_killed(folder: Path, root: Path, redis: RedisServer, after: int) -> None:
    """Loads in a process that is killed once so many blocks were written, by any of its threads."""
    if (pid := os.fork()) == 0:
        write, written = writer.RedisWriter.write, list[int]()

        def until(self: writer.RedisWriter, first: int, packed: np.ndarray) -> None:
            step = self._place.block_rows
            for at in range(0, len(packed), step):
                if len(written) >= after:
                    os.kill(os.getpid(), signal.SIGKILL)
                write(self, first + at, packed[at : at + step])
                written.append(first + at)

        writer.RedisWriter.write = until  # type: ignore[method-assign]
        load(spec_of(folder, tier(redis)), root)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.drawn(0.25)
def test_a_load_that_fails_leaves_nothing(root: Path, tmp_path: Path, redis: RedisServer) -> None:
    """Where the checkpoint is bad, the server is full, and where it is not reached."""
    load_both(tmp_path, root, tier(redis))
    keys, client = redis.client().dbsize(), redis.client()
    spec = spec_of(tmp_path, tier(redis))
    tables = dict(np.load(tmp_path / "tables.npz"))
    tables["user"][2999, 1] = np.nan
    np.savez(tmp_path / "tables.npz", **tables)
    with pytest.raises(CheckpointError, match="row 2999"):
        load(spec, root)
    assert client.dbsize() == keys and len(notes(root)) == 2
    spec = spec_of(tmp_path, tier(redis))
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 1000)
    with pytest.raises(RedisError, match="with room for all rows"):
        load(spec, root)
    client.config_set("maxmemory", 0)
    Model(root, "ads").collect(1)
    assert client.dbsize() == keys and len(notes(root)) == 2
    redis.end()
    with pytest.raises(RedisError, match="expected a server that this user may write to"):
        load(spec, root)
    assert Model(root, "ads").versions() == [1]


@pytest.mark.drawn(0.25)
def test_keys_of_a_server_that_is_away_go_later(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_server(tmp_path, True, port=free_port()) as redis:
        load_both(tmp_path, root, tier(redis))
        redis.end()
        assert Model(root, "ads").remove_all() == 1
        assert len(notes(root)) == 2 and "until the next load or gc" in caplog.text
        redis.start()
        assert redis.client().dbsize()
        Model(root, "ads").collect(1)
        assert not redis.client().dbsize() and not notes(root)


def test_rows_that_are_read_stay(root: Path, tmp_path: Path, redis: RedisServer) -> None:
    """A removed version answers while a process has it, and its keys go after that."""
    load_both(tmp_path, root, tier(redis))
    version, expected, keys = served(root, "ads"), right(root), redis.client().dbsize()
    load(spec_of(tmp_path, tier(redis)), root)
    Model(root, "ads").collect(0)
    assert Model(root, "ads").versions() == [2] and redis.client().dbsize() == 2 * keys
    assert look_up(version) == expected
    del version
    Model(root, "ads").collect(0)
    assert redis.client().dbsize() == keys and look_up(served(root, "ads")) == expected


def test_a_compacted_version_has_the_same_keys(root: Path, tmp_path: Path, redis: RedisServer) -> None:
    """They stay when the one that it was made of goes."""
    load_both(tmp_path, root, tier(redis))
    keys = redis.client().dbsize()
    changes = TableChanges("small", np.array([1]), np.full((1, 4), 9, np.float32))
    for name in ("ads", "plain"):
        apply(Model(root, name), ChangeBatch((changes,)))
    compact(Model(root, "ads"))
    Model(root, "ads").collect(0)
    assert Model(root, "ads").versions() == [2] and redis.client().dbsize() == keys
    assert look_up(served(root, "ads")) == right(root)
    Model(root, "ads").remove_all()
    assert not redis.client().dbsize()


@pytest.mark.usefixtures("every_table_is_large")
def test_a_table_goes_to_redis_and_back(root: Path, tmp_path: Path, redis: RedisServer) -> None:
    """Though the live version has the same rows in a file, which another load would link."""
    load(spec_of(tmp_path, None), root)
    load_both(tmp_path, root, tier(redis))
    assert redis.client().dbsize() and look_up(served(root, "ads")) == right(root)
    load(spec_of(tmp_path, None), root)
    Model(root, "ads").collect(0)
    assert not redis.client().dbsize() and look_up(served(root, "ads")) == right(root)


def test_hosts_with_one_redis_have_keys_of_their_own(root: Path, tmp_path: Path, redis: RedisServer) -> None:
    """Of one model, and one version number. A copy of a folder without its notes removes nothing."""
    other = root / "other"
    for one in (root, other):
        load_both(tmp_path, one, tier(redis))
    Model(other, "ads").remove_all()
    expected = right(root)
    assert look_up(served(root, "ads")) == expected
    copy = root / "copy"
    shutil.copytree(root / "ads", copy / "ads", ignore=shutil.ignore_patterns("*.redis"))
    assert look_up(served(copy, "ads")) == expected
    Model(copy, "ads").remove_all()
    assert look_up(served(root, "ads")) == expected
