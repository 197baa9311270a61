"""Rows in a cluster of Redis servers: slots move, and nodes are killed and stopped."""

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hosts import served
from redis_models import ASKED, load_both, look_up, right, rows_in, spec_of
from redis_servers import SLOTS, RedisCluster, needs_redis, redis_cluster
from support import until

from tableside.loader.errors import RedisError
from tableside.loader.load.load import load
from tableside.loader.redis.blocks import RedisBlocks
from tableside.loader.versions.versions import Model
from tableside.serving.model.version import ServedVersion

pytestmark = needs_redis


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path) as running:
        yield running


def tier(cluster: RedisCluster) -> str:
    return f"redis://{cluster.nodes[0].place},{cluster.nodes[1].place}"


@pytest.mark.drawn(0.5)
def test_rows_come_from_all_nodes(roots: list[Path], tmp_path: Path, cluster: RedisCluster) -> None:
    """Which have no key any more once the model is removed."""
    load_both(tmp_path, roots[0], tier(cluster))
    keys = [node.client().dbsize() for node in cluster.nodes]
    assert all(keys)
    assert look_up(served(roots[0], "ads")) == right(roots[0])
    load(spec_of(tmp_path, tier(cluster)), roots[0])
    assert sum(node.client().dbsize() for node in cluster.nodes) == 2 * sum(keys)
    Model(roots[0], "ads").collect(0)
    assert sum(node.client().dbsize() for node in cluster.nodes) == sum(keys)
    Model(roots[0], "ads").remove_all()
    assert not any(node.client().dbsize() for node in cluster.nodes)


@pytest.mark.drawn(0.25)
def test_slots_that_nobody_had_are_asked_about_again(
    roots: list[Path], tmp_path: Path, cluster: RedisCluster
) -> None:
    """Of a server that starts while a node lacks its slots."""
    load_both(tmp_path, roots[0], tier(cluster))
    first, last = SLOTS * 2 // 3, SLOTS - 1  # of the third node, which keeps their keys
    for node in cluster.nodes:
        node.client().execute_command("CLUSTER", "DELSLOTSRANGE", first, last)
    version, expected = served(roots[0], "ads"), right(roots[0])
    got = look_up(version)
    assert 0 < got[1][0][2] < ASKED["user"].size
    cluster.nodes[2].client().execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
    until(lambda: look_up(version) == expected, what="rows of all slots")


@pytest.mark.drawn(0.25)
def test_a_slot_moves(roots: list[Path], tmp_path: Path, cluster: RedisCluster) -> None:
    """Rows are right before, while none, some or all of its keys have moved, and after."""
    load_both(tmp_path, roots[0], tier(cluster))
    version, expected = served(roots[0], "ads"), right(roots[0])
    assert look_up(version) == expected
    (user, *_) = version.header.remote
    blocks = RedisBlocks(user.place, user.row_bytes)
    (slot,) = blocks.slots(np.array([0])).tolist()
    assert slot == cluster.nodes[0].client().execute_command("CLUSTER", "KEYSLOT", blocks.key(0))
    of = slot * len(cluster.nodes) // SLOTS
    to = (of + 1) % len(cluster.nodes)
    # So that some of a slot's keys have moved while others have not
    for n in range(3):
        cluster.nodes[of].client().set(b"other%d" % n + b"{000}", "")
    cluster.begin_move(slot, of, to)
    assert look_up(version) == expected
    while cluster.move_keys(slot, of, to, 1):
        assert look_up(version) == expected
    cluster.end_move(slot, to)
    assert cluster.nodes[to].client().exists(blocks.key(0))
    assert look_up(version) == expected
    Model(roots[0], "ads").remove_all()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_rows_of_a_node_that_is_away_are_late(
    roots: list[Path], tmp_path: Path, cluster: RedisCluster, how: signal.Signals
) -> None:
    """Those of the others are right; a server that starts meanwhile serves these, too."""
    load_both(tmp_path, roots[0], tier(cluster))
    version, expected = served(roots[0], "ads", 0.5), right(roots[0])
    until(lambda: look_up(version) == expected, what="rows in time, on a busy machine, too")
    node = cluster.nodes[0].process
    assert node is not None
    node.send_signal(how)

    def others_come(one: ServedVersion) -> bool:
        got = look_up(one)
        late = got[1][0][2]
        assert late > 0
        came = rows_in(got)["user"].any(1)
        assert came.sum() == ASKED["user"].size - late
        assert np.array_equal(rows_in(got)["user"][came], rows_in(expected)["user"][came])
        return late < ASKED["user"].size

    for one in (version, served(roots[0], "ads", 0.5)):
        until(lambda one=one: others_come(one), what="the rows of the others")
    if how == signal.SIGSTOP:
        node.send_signal(signal.SIGCONT)
        until(lambda: look_up(version) == expected, what="the node's rows")


@pytest.mark.drawn(0.25)
def test_a_load_needs_all_nodes(
    roots: list[Path], tmp_path: Path, cluster: RedisCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """What it wrote to the others goes once all are there."""
    load(spec_of(tmp_path, tier(cluster)), roots[0])
    first, *others = cluster.nodes
    keys = [node.client().dbsize() for node in others]
    first.end(signal.SIGKILL)
    with pytest.raises(RedisError, match="expected a server that this user may write to"):
        load(spec_of(tmp_path, f"redis://{others[0].place}"), roots[0])
    assert Model(roots[0], "ads").versions() == [1] and "until the next load or gc" in caplog.text
    first.start()
    until(lambda: bool(Model(roots[0], "ads").collect(1)), what="the keys of the failed load to go")
    assert [node.client().dbsize() for node in others] == keys


@pytest.mark.drawn(0.25)
def test_a_node_that_gave_its_slots_away_may_go(
    roots: list[Path], tmp_path: Path, cluster: RedisCluster
) -> None:
    """Rows come from whoever has the slots now."""
    load_both(tmp_path, roots[0], tier(cluster))
    version, expected = served(roots[0], "ads"), right(roots[0])
    assert look_up(version) == expected
    of, to = 0, 1
    for slot in {int(s) for s in _slots_with_keys(cluster, of)}:
        cluster.begin_move(slot, of, to)
        while cluster.move_keys(slot, of, to, 100):
            pass
        cluster.end_move(slot, to)
    process = cluster.nodes[of].process
    assert process is not None
    process.kill()
    until(lambda: look_up(version) == expected, what="rows of the node that has the slots now")


def _slots_with_keys(cluster: RedisCluster, node: int) -> Iterator[int]:
    client = cluster.nodes[node].client()
    for key in client.scan_iter():
        yield client.execute_command("CLUSTER", "KEYSLOT", key)
