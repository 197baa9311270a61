"""Writes rows to Redis, and removes them. redis-py finds the servers of a cluster's slots, also while these
move."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import RedisClusterException
from redis.sentinel import Sentinel

from tableside.loader.errors import RedisError
from tableside.loader.redis.blocks import RedisBlocks
from tableside.loader.redis.servers import host_and_port, is_cluster_refused, options_of
from tableside.loader.segment.remote import RedisPlace, RemoteTable
from tableside.quant.contract import Bytes

_ANSWER_S = 30.0  # that a server may take
_KEYS = 1000  # that are removed by one pipeline


class RedisWriter:
    """Writes the rows of a table. Any thread may call."""

    def __init__(self, table: RemoteTable) -> None:
        """RedisError: no server is reached, or it lets nobody in."""
        self._place, self._blocks = table.place, RedisBlocks(table.place, table.row_bytes)
        self._client = _client(self._place)

    def write(self, first: int, packed: Bytes) -> None:
        """Writes whole blocks, the table's last one at most short. first: the number of the first row.
        packed: uint8 [rows, row_bytes]. RedisError: a server does not take them."""
        step = self._place.block_rows
        records = self._blocks.records(first, packed)
        with _telling(self._place), self._client.pipeline(transaction=False) as line:
            for at in range(0, len(records), step):
                line.set(self._blocks.key((first + at) // step), records[at : at + step].tobytes())
            line.execute()

    def close(self) -> None:
        self._client.close()


def remove_keys(place: RedisPlace, blocks: int) -> None:
    """Removes the keys of a table, which may be there or not. RedisError: as of `RedisWriter`."""
    keys, client = RedisBlocks(place, 4), _client(place)
    with _telling(place):
        for start in range(0, blocks, _KEYS):
            with client.pipeline(transaction=False) as line:
                for block in range(start, min(start + _KEYS, blocks)):
                    line.unlink(keys.key(block))
                line.execute()
    client.close()


def _client(place: RedisPlace) -> Any:
    """Returns a client of a server, of that which Sentinels name, or of a cluster."""
    timeouts = {"socket_timeout": _ANSWER_S, "socket_connect_timeout": _ANSWER_S}
    options = {**options_of(place.is_tls), **timeouts}
    with _telling(place):
        if place.service:
            found: Any = Sentinel  # which has no types
            how = {**timeouts, **({"ssl": True} if place.is_tls else {})}
            sentinels = found([*map(host_and_port, place.addresses)], sentinel_kwargs=how)
            return sentinels.master_for(place.service, **options)
        error: Exception = redis.ConnectionError("no address")
        for host, port in map(host_and_port, place.addresses):
            client: Any = redis.Redis(host=host, port=port, **options)
            try:
                client.execute_command("CLUSTER SLOTS")
            except redis.ResponseError as refused:
                if is_cluster_refused(refused):
                    return client
                raise
            except (redis.ConnectionError, redis.TimeoutError) as failed:
                error = failed
                continue
            client.close()
            node_of: Any = ClusterNode
            nodes = [node_of(*host_and_port(address)) for address in place.addresses]
            return RedisCluster(startup_nodes=nodes, **options)
        raise error


@contextmanager
def _telling(place: RedisPlace) -> Iterator[None]:
    """Says of which Redis an error is."""
    try:
        yield
    except (redis.RedisError, RedisClusterException) as error:
        raise RedisError(
            f"Redis {', '.join(place.addresses)}: {error}; expected a server that this user may write to, "
            "with room for all rows"
        ) from error
