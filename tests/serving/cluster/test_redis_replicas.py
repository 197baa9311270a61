"""Rows come from replicas too, and from those that take a server's place: in a cluster, and by Sentinel."""

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hosts import served
from redis_models import load_both, look_up, right, spec_of
from redis_models import tier as plain_tier
from redis_servers import (
    RedisCluster,
    RedisServer,
    free_port,
    needs_redis,
    redis_cluster,
    redis_sentinel,
    redis_server,
)
from support import until

from tableside.loader.errors import RedisError
from tableside.loader.load.load import load
from tableside.loader.model.tiers import RedisTier
from tableside.loader.redis.servers import servers_of

pytestmark = needs_redis


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[RedisServer]]:
    """A server and its replica."""
    for name in ("main", "replica"):
        (tmp_path / name).mkdir()
    with redis_server(tmp_path / "main", False, port=free_port()) as main:
        options = ["--replicaof", "127.0.0.1", str(main.port), "--repl-diskless-sync-delay", "0"]
        with redis_server(tmp_path / "replica", False, port=free_port(), options=options) as replica:
            until(
                lambda: replica.client().info("replication")["master_link_status"] == "up", what="the replica"
            )
            yield [main, replica]


def reads_of(server: RedisServer) -> int:
    """How many rows it was asked for."""
    return int(server.client().info("commandstats").get("cmdstat_getrange", {}).get("calls", 0))


def in_step(main: RedisServer, *replicas: RedisServer) -> None:
    """Waits until replicas have what their server has."""
    until(lambda: {r.client().dbsize() for r in replicas} == {main.client().dbsize()}, what="replicas")


@pytest.mark.drawn(0.25)
def test_sentinel_says_where_the_rows_are(
    roots: list[Path], tmp_path: Path, pair: list[RedisServer], caplog: pytest.LogCaptureFixture
) -> None:
    """Both servers give rows; where one is killed no row is late. Loads go to the other one in the end."""
    main, replica = pair
    with redis_sentinel(tmp_path / "sentinel", "rows", main) as sentinel:
        tier = f"redis+sentinel://127.0.0.1:9,{sentinel}/rows"
        load_both(tmp_path, roots[0], tier)
        in_step(main, replica)
        version, expected = served(roots[0], "ads"), right(roots[0])
        for _ in range(6):
            assert look_up(version) == expected
        assert reads_of(main) and reads_of(replica)
        main.end(signal.SIGKILL)
        for _ in range(20):
            assert look_up(version) == expected

        def is_loaded() -> bool:
            try:
                return load(spec_of(tmp_path, tier), roots[0]).version > 1
            except RedisError:
                return False

        until(is_loaded, what="the replica to take the place")
        assert look_up(served(roots[0], "ads")) == look_up(version) == expected


@pytest.mark.drawn(0.25)
def test_a_name_that_sentinel_does_not_know(
    roots: list[Path], tmp_path: Path, pair: list[RedisServer]
) -> None:
    with (
        redis_sentinel(tmp_path / "sentinel", "rows", pair[0]) as sentinel,
        pytest.raises(RedisError, match=r"No master found for 'other'"),
    ):
        load(spec_of(tmp_path, f"redis+sentinel://{sentinel}/other"), roots[0])


@pytest.mark.drawn(0.25)
def test_a_server_that_stands_still_is_not_waited_for(
    roots: list[Path], tmp_path: Path, pair: list[RedisServer]
) -> None:
    """Before Sentinel has another one, and after."""
    main, replica = pair
    with redis_sentinel(tmp_path / "sentinel", "rows", main) as sentinel:
        load_both(tmp_path, roots[0], f"redis+sentinel://{sentinel}/rows")
        in_step(main, replica)
        version, expected = served(roots[0], "ads", 0.5), right(roots[0])
        assert look_up(version) == expected
        assert main.process is not None
        main.process.send_signal(signal.SIGSTOP)
        until(
            lambda: look_up(version) == expected and look_up(version) == expected, what="the replica's rows"
        )
        servers = servers_of(RedisTier((sentinel,), False, "rows"))
        until(lambda: (look_up(version), servers.slots.names)[1] == (replica.place,), what="another server")
        for _ in range(10):
            assert look_up(version) == expected
        main.process.send_signal(signal.SIGCONT)


def test_what_a_replica_lacks_comes_from_its_server(
    roots: list[Path], tmp_path: Path, redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Since it is behind, or is none."""
    (tmp_path / "other").mkdir()
    load_both(tmp_path, roots[0], plain_tier(redis))
    with redis_server(tmp_path / "other", False, port=free_port()) as empty:
        version, expected = served(roots[0], "ads"), right(roots[0])
        assert look_up(version) == expected
        servers = servers_of(RedisTier((redis.place,), False))
        servers.slots = servers.slots._replace(replicas=((empty.place,),))
        for _ in range(4):
            assert look_up(version) == expected
        assert reads_of(empty) and not [r for r in caplog.records if r.levelno > logging.INFO]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RedisCluster]:
    """Of three nodes, and one that is a replica of the first."""
    with redis_cluster(tmp_path, 3, replicas=1) as running:
        yield running


@pytest.mark.drawn(0.25)
def test_replicas_of_a_cluster_give_rows(roots: list[Path], tmp_path: Path, cluster: RedisCluster) -> None:
    """Also where their node stands still, and once they have its slots."""
    (replica,) = cluster.replicas
    load_both(tmp_path, roots[0], f"redis://{cluster.nodes[1].place}")
    in_step(cluster.nodes[0], replica)
    version, expected = served(roots[0], "ads", 0.5), right(roots[0])
    for _ in range(4):
        assert look_up(version) == expected
    asked = np.array([reads_of(node) for node in (*cluster.nodes, replica)])
    assert asked.all()
    main, servers = cluster.nodes[0].process, servers_of(RedisTier((cluster.nodes[1].place,), False))
    assert main is not None
    main.send_signal(signal.SIGSTOP)
    node = servers.node(cluster.nodes[0].place)
    until(lambda: (look_up(version), node.hangs)[1], what="the node to be given up")
    for _ in range(4):
        assert look_up(version) == expected
    main.send_signal(signal.SIGCONT)
    until(cluster.nodes[0].is_up, what="the node")
    before = reads_of(cluster.nodes[0])  # and none of those that came while it stood still
    until(
        lambda: look_up(version) == expected and reads_of(cluster.nodes[0]) > before,
        what="rows of both again",
    )
    main.send_signal(signal.SIGSTOP)
    replica.client().execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
    until(
        lambda: (look_up(version), replica.place in servers.slots.names)[1],
        what="the cluster to say who has them",
    )
    assert look_up(version) == expected
    main.send_signal(signal.SIGCONT)
    until(lambda: look_up(version) == expected and not servers.are_in_doubt, what="all nodes to be well")
