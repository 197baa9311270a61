"""Connections to the Redis servers of a tier, and which of them has a slot. Users and passwords come from the
environment and go nowhere else."""

import contextlib
import logging
import os
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from tableside.loader.model.tiers import PASSWORD, USERNAME, RedisTier
from tableside.loader.redis.blocks import SLOTS
from tableside.loader.segment.blocks import OPENS_S, Breaker
from tableside.quant.contract import Ids
from tableside.quant.installed import require

require("a tier in Redis", "redis", "hiredis", extra="redis")
import redis  # noqa: E402  (told in one line where it is missing)

logger = logging.getLogger("tableside")

_CONNECT_SHARE, _LEAST_CONNECT_S = 0.125, 0.005  # of the time that is left, that connecting may take
LATE_ROWS = "rows did not come in time"


def options_of(is_tls: bool) -> dict[str, Any]:
    """Returns what every connection of redis-py is made with."""
    name, password = (os.environ.get(variable) or None for variable in (USERNAME, PASSWORD))
    return {"username": name, "password": password, "protocol": 2, **({"ssl": True} if is_tls else {})}


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


class RedisNode:
    """A server. name: HOST:PORT. Any thread may call."""

    def __init__(self, name: str, is_tls: bool) -> None:
        self.name, self._is_tls, self._last = name, is_tls, ""
        self._breaker = Breaker(source="it")
        self._free: list[Any] = []  # connections; list operations are atomic

    @property
    def hangs(self) -> bool:
        return self._breaker.hangs

    def may_be_asked(self, is_patient: bool) -> bool:
        """Whether a request shall wait for it. is_patient: it waits long enough to tell whether it hangs."""
        return not (self._breaker.is_open() if is_patient else self._breaker.hangs)

    def told(self, began: float, rows: int, problem: str) -> None:
        """Takes note of a request of `rows` rows that began at `began`; problem: why they did not come."""
        if problem not in ("", LATE_ROWS, self._last):
            logger.warning("Redis %s: %s", self.name, problem)
        self._last = problem or self._last
        if change := self._breaker.told(began, 0 if problem else rows, rows if problem else 0):
            logger.warning("Redis %s: %s", self.name, change)

    def take(self, deadline: float) -> Any:
        """Returns a connection that nobody else uses. redis.RedisError: there is none."""
        left_s = max(_LEAST_CONNECT_S, _CONNECT_SHARE * (deadline - time.monotonic()))
        with contextlib.suppress(IndexError):
            connection = self._free.pop()
            connection._sock.settimeout(left_s)
            return connection
        options = {**options_of(self._is_tls), "socket_timeout": left_s, "socket_connect_timeout": left_s}
        kind = redis.SSLConnection if options.pop("ssl", False) else redis.Connection
        try:
            host, port = host_and_port(self.name)
            made: Any = kind(host=host, port=port, **options)
            made.connect()
        except (ValueError, OverflowError) as error:  # a server named it
            raise redis.ConnectionError(f"{self.name[:100]!r} is no address ({error})") from error
        return made

    def give_back(self, connection: Any) -> None:
        """Takes a connection back from which all answers were read."""
        self._free.append(connection)

    def close(self) -> None:
        while self._free:
            self._free.pop().disconnect()


class Slots(NamedTuple):
    """Who has a slot. by_slot: int64 [SLOTS], the place in `names`, HOST:PORT, or -1: it is not known."""

    names: tuple[str, ...]
    by_slot: Ids
    are_known: bool


class RedisServers:
    """The servers of a tier. Any thread may call."""

    def __init__(self, tier: RedisTier) -> None:
        self._tier, self._lock = tier, threading.Lock()
        self._nodes: dict[str, RedisNode] = {}
        self.slots, self._learn_at = Slots((), np.full(SLOTS, -1, np.int64), False), 0.0

    def node(self, name: str) -> RedisNode:
        with self._lock:
            return self._nodes.setdefault(name, RedisNode(name, self._tier.is_tls))

    def learn(self, deadline: float, is_patient: bool) -> None:
        """Asks who has which slot, at most once a second. Blocks until the deadline at most. is_patient: as
        of `RedisNode.may_be_asked`."""
        with self._lock:
            if self.slots.names and time.monotonic() < self._learn_at:
                return
            self._learn_at = time.monotonic() + OPENS_S
        known = dict.fromkeys((*self.slots.names, *self._tier.addresses))
        for node in map(self.node, known):
            began = time.monotonic()
            if not node.may_be_asked(is_patient):
                continue
            try:
                connection = node.take(deadline)
                found = _slots(connection, node.name)
            except redis.RedisError as error:
                if is_patient:
                    node.told(began, 1, f"it does not say who has the rows ({error})")
                if time.monotonic() < deadline:
                    continue
                return
            node.give_back(connection)
            if not found:  # a node that has forgotten its cluster
                continue
            names = tuple(dict.fromkeys(name for _, _, name in found))
            by_slot = np.full(SLOTS, -1, np.int64)
            for first, last, name in found:
                by_slot[first : last + 1] = names.index(name)
            self.slots = Slots(names, by_slot, bool((by_slot >= 0).all()))
            return

    def close(self) -> None:
        for node in self._nodes.values():
            node.close()


def is_cluster_refused(error: Exception) -> bool:
    """Whether a server says by an error that it is none of a cluster."""
    return "cluster support disabled" in str(error)


def _slots(connection: Any, asked: str) -> list[tuple[int, int, str]]:
    """Returns who has slots: from, to, HOST:PORT. asked: the server that is asked; it has all slots where
    there is no cluster. redis.RedisError: it does not say."""
    connection.send_command("CLUSTER", "SLOTS")
    try:
        answer = connection.read_response()
    except redis.ResponseError as error:
        if not is_cluster_refused(error):
            connection.disconnect()
            raise
        return [(0, SLOTS - 1, asked)]
    except redis.RedisError:
        connection.disconnect()
        raise
    try:
        return [
            (int(first), int(last), f"{(main[0] or b'').decode() or host_and_port(asked)[0]}:{int(main[1])}")
            for first, last, main, *_ in answer
        ]
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        connection.disconnect()
        raise redis.InvalidResponse(f"it answers CLUSTER SLOTS with something else: {error}") from error


_servers: dict[tuple[int, RedisTier], RedisServers] = {}


def servers_of(tier: RedisTier) -> RedisServers:
    """Returns the servers of a tier as this process knows them; a forked child has connections of its own."""
    here = os.getpid(), tier
    return _servers.get(here) or _servers.setdefault(here, RedisServers(tier))


def close_servers() -> None:
    """Closes the connections of `servers_of`."""
    while _servers:
        _servers.popitem()[1].close()
