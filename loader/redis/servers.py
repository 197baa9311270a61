"""Connections to the Redis servers of a tier, and which of them has a slot. Users and passwords come from the
environment and go nowhere else."""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from itertools import chain
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
    """A server, or a Sentinel, to which no password is told. name: HOST:PORT. is_replica: of a cluster; new
    connections may read then. Any thread may call."""

    def __init__(self, name: str, is_tls: bool, is_sentinel: bool = False) -> None:
        self.name, self._is_tls, self._is_sentinel, self._last = name, is_tls, is_sentinel, ""
        self.is_replica = False
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
        options |= {"username": None, "password": None} if self._is_sentinel else {}
        kind = redis.SSLConnection if options.pop("ssl", False) else redis.Connection
        try:
            host, port = host_and_port(self.name)
            made: Any = kind(host=host, port=port, **options)
            made.connect()
            if self.is_replica:
                made.send_command("READONLY")
                made.read_response()
        except (ValueError, OverflowError) as error:  # a server named it
            raise redis.ConnectionError(f"{self.name[:100]!r} is no address ({error})") from error
        return made

    def give_back(self, connection: Any) -> None:
        """Takes a connection back from which all answers were read."""
        self._free.append(connection)

    def close(self) -> None:
        while self._free:
            self._free.pop().disconnect()


class SlotMap(NamedTuple):
    """Who has a slot. by_slot: int64 [SLOTS], the place in `names`, HOST:PORT, or -1: it is not known.
    replicas: of each name."""

    names: tuple[str, ...]
    by_slot: Ids
    are_known: bool
    replicas: tuple[tuple[str, ...], ...] = ()


class RedisServers:
    """The servers of a tier. Any thread may call."""

    def __init__(self, tier: RedisTier) -> None:
        self._tier, self._lock = tier, threading.Lock()
        self._nodes: dict[str, RedisNode] = {}
        self._sentinels = [RedisNode(name, tier.is_tls, True) for name in tier.addresses if tier.service]
        self.slots, self._learn_at = SlotMap((), np.full(SLOTS, -1, np.int64), False), 0.0

    def node(self, name: str) -> RedisNode:
        if (found := self._nodes.get(name)) is not None:
            return found
        with self._lock:
            return self._nodes.setdefault(name, RedisNode(name, self._tier.is_tls))

    @property
    def are_in_doubt(self) -> bool:
        """Whether it is not known who has the slots, or others may have them now, or a server may be well."""
        names = chain(self.slots.names, *self.slots.replicas)
        return not self.slots.are_known or any(self.node(name).hangs for name in names)

    def reader(self, slots: SlotMap, number: int, turn: int) -> str:
        """Returns whom to ask for rows of a name, by its number: it and its replicas in turns, but those that
        hang."""
        names = slots.names[number], *slots.replicas[number]
        well = [name for name in names if not self.node(name).hangs] or names
        return well[turn % len(well)]

    def learn(self, deadline: float, is_patient: bool) -> None:
        """Asks who has which slot, at most once a second. Blocks until the deadline at most. is_patient: as
        of `RedisNode.may_be_asked`."""
        with self._lock:
            if self.slots.names and time.monotonic() < self._learn_at:
                return
            self._learn_at = time.monotonic() + OPENS_S
        known = dict.fromkeys((*self.slots.names, *self._tier.addresses))
        is_known = bool(self.slots.names) and not self._sentinels  # then rows tell whether a server hangs
        for node in self._sentinels or map(self.node, known):
            began = time.monotonic()
            if node.hangs if is_known else not node.may_be_asked(is_patient):
                continue
            try:
                connection = node.take(deadline)
                found = _told(connection, node.name, self._tier.service)
            except redis.RedisError as error:
                if is_patient:
                    node.told(began, 1, f"it does not say who has the rows ({error})")
                if time.monotonic() < deadline:
                    continue
                return
            node.give_back(connection)
            if self._sentinels:
                node.told(began, 1, "")
            if found:  # else it has forgotten its cluster
                self._take(found)
                self._look_again(deadline)
                return

    def _look_again(self, deadline: float) -> None:
        """Asks servers that hung whether they are well where others give their rows meanwhile, so that no
        request for rows has to."""
        for name, replicas in zip(self.slots.names, self.slots.replicas, strict=True):
            for node in (self.node(one) for one in (name, *replicas) if replicas):
                if node.hangs:
                    began = time.monotonic()
                    with contextlib.suppress(redis.RedisError):
                        connection = node.take(deadline)
                        _answer(connection, "PING")
                        node.give_back(connection)
                        node.told(began, 1, "")

    def _take(self, found: Sequence["_SlotRange"]) -> None:
        replicas = {of.names[0]: of.names[1:] for of in found}
        names, by_slot = tuple(replicas), np.full(SLOTS, -1, np.int64)
        for of in found:
            by_slot[of.first : of.last + 1] = names.index(of.names[0])
        for name in (*names, *chain(*replicas.values())):
            self.node(name).is_replica = name not in replicas and not self._tier.service
        self.slots = SlotMap(names, by_slot, bool((by_slot >= 0).all()), tuple(replicas.values()))

    def close(self) -> None:
        for node in (*self._sentinels, *self._nodes.values()):
            node.close()


def is_cluster_refused(error: Exception) -> bool:
    """Whether a server says by an error that it is none of a cluster."""
    return "cluster support disabled" in str(error)


class _SlotRange(NamedTuple):
    """Slots from `first` to `last`. names: of their server, then of its replicas."""

    first: int
    last: int
    names: tuple[str, ...]


def _told(connection: Any, asked: str, service: str) -> list[_SlotRange]:
    """Returns who has slots: a server has all where there is no cluster. asked: who is, a Sentinel if there
    is a service. redis.RedisError: it does not say."""
    try:
        if service:
            return [_SlotRange(0, SLOTS - 1, _of_service(connection, service))]
        answer = _answer(connection, "CLUSTER", "SLOTS")
        return [
            _SlotRange(int(first), int(last), tuple(_name(one, host_and_port(asked)[0]) for one in servers))
            for first, last, *servers in answer
        ]
    except redis.ResponseError as error:
        if not is_cluster_refused(error):
            connection.disconnect()
            raise
        return [_SlotRange(0, SLOTS - 1, (asked,))]
    except redis.RedisError:
        connection.disconnect()
        raise
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        connection.disconnect()
        raise redis.InvalidResponse(f"it answers who has the slots with something else: {error}") from error


def _of_service(connection: Any, service: str) -> tuple[str, ...]:
    """Returns the server that Sentinel has for a service, and its replicas that are up to date."""
    if (main := _answer(connection, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)) is None:
        raise redis.ResponseError(f"it knows no servers of the name {service!r}")
    found = [
        dict(zip(r[::2], r[1::2], strict=True)) for r in _answer(connection, "SENTINEL", "REPLICAS", service)
    ]
    are_well = [r for r in found if r[b"flags"] == b"slave" and r[b"master-link-status"] == b"ok"]
    return _name(main, ""), *(_name((r[b"ip"], r[b"port"]), "") for r in are_well)


def _answer(connection: Any, *command: str) -> Any:
    connection.send_command(*command)
    return connection.read_response()


def _name(server: Sequence[Any], host: str) -> str:
    """Returns the HOST:PORT of a server as Redis tells it. host: of who tells it, for "here"."""
    return f"{(server[0] or b'').decode() or host}:{int(server[1])}"


_servers: dict[tuple[int, RedisTier], RedisServers] = {}


def servers_of(tier: RedisTier) -> RedisServers:
    """Returns the servers of a tier as this process knows them; a forked child has connections of its own."""
    here = os.getpid(), tier
    return _servers.get(here) or _servers.setdefault(here, RedisServers(tier))


def close_servers() -> None:
    """Closes the connections of `servers_of`."""
    while _servers:
        _servers.popitem()[1].close()
