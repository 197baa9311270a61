"""Asks the owners of rows for them. A request is split by owner, one message to each, and their rows are put
together here, so that what reads them is what reads a table of this host."""

import logging
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.segment.blocks import Breaker
from tableside.loader.segment.header import RemoteTable
from tableside.quant import RowFormat
from tableside.quant.contract import Bytes, Ids
from tableside.quant.cpu.owners import Owners
from tableside.quant.rows.fetched import FetchedTable, FetchTogether, RowReader, RowsAsked, RowState
from tableside.quant.rows.ids import RowMap
from tableside.serving.client.address import Address
from tableside.serving.client.messages import HttpRequest, HttpResponse
from tableside.serving.client.sockets import SocketConnection, SocketPool
from tableside.serving.cluster.protocol import (
    PATH,
    RowsLayout,
    TableIds,
    check_response,
    pack_request,
)

logger = logging.getLogger("tableside")

CAME, LATE = "came", "late"  # what became of rows, for counts
_LATE = "rows did not come in time"
_FIRST_USUAL_S, _LEAST_USUAL_S = 0.02, 0.001  # see `OwnerHost.usual_s`: before it is known, and at least
_HEDGED_SHARE, _MOST_HEDGES = 0.05, 10.0  # of requests that are sent to a second host early; at once


def address_of(owner: str, token: str | None) -> Address:
    """Returns the address of an owner, HOST:PORT, of a server of the same cluster token."""
    return Address.parse(f"http://{owner}", {} if token is None else {"Authorization": f"Bearer {token}"})


class OwnerHost:
    """A host that has rows. name: HOST:PORT. Any thread may call."""

    def __init__(self, name: str, token: str | None, timeout_s: float) -> None:
        self.name = name
        self.pool = SocketPool(address_of(name, token), timeout_s)
        self.waiting = 0  # requests that wait for it; written without a lock, as it need not be exact
        self._breaker, self._last = Breaker(source="it"), ""
        self._seconds: deque[float] = deque(maxlen=128)
        self.usual_s = _FIRST_USUAL_S  # within which it answers 95 of 100 requests

    def may_be_asked(self) -> bool:
        """Whether a request shall wait for it."""
        return not self._breaker.is_open()

    @property
    def hangs(self) -> bool:
        return self._breaker.hangs

    def told(self, began: float, rows: int, problem: str) -> None:
        """Takes note of a request of `rows` rows that began at `began`; problem: why they did not come."""
        if not problem:
            self._seconds.append(time.monotonic() - began)
            if len(self._seconds) % 16 == 0:
                self.usual_s = max(_LEAST_USUAL_S, float(np.percentile(list(self._seconds), 95)))
        change = self._breaker.told(began, 0 if problem else rows, rows if problem else 0)
        if problem not in ("", _LATE, self._last):
            logger.warning("owner %s: %s", self.name, problem)
        if change:
            logger.warning("owner %s: %s", self.name, change)
        self._last = problem or self._last


class _Hedges:
    """Keeps requests that are sent twice to a small share of all. Not exact where threads meet."""

    def __init__(self) -> None:
        self._left = _MOST_HEDGES

    def earn(self) -> None:
        """Counts a request."""
        self._left = min(_MOST_HEDGES, self._left + _HEDGED_SHARE)

    def may_spend(self) -> bool:
        """Whether one may be sent twice."""
        return self._left >= 1

    def spend(self) -> None:
        self._left -= 1


class OwnerHosts:
    """The hosts that a process asks, each once."""

    def __init__(self, token: str | None, timeout_s: float) -> None:
        self._token, self.timeout_s = token, timeout_s
        self.hedges = _Hedges()
        self._hosts: dict[str, OwnerHost] = {}
        self._lock = threading.Lock()

    def host(self, name: str) -> OwnerHost:
        with self._lock:
            if name not in self._hosts:
                self._hosts[name] = OwnerHost(name, self._token, self.timeout_s)
            return self._hosts[name]

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            for host in self._hosts.values():
                host.pool.close()


class _Part(NamedTuple):
    """Rows of one table that one owner has. rows: asked of it; out, state: where they go."""

    table: RemoteTable
    number: int
    rows: Ids
    out: Bytes
    state: NDArray[np.uint8]


class _Owner(NamedTuple):
    """The hosts that have the same rows. content, model: of their version."""

    model: str
    content: int
    addresses: tuple[str, ...]


class RemoteTables:
    """The remote tables of a version, as sources of rows. late_is_default: the default row stands for rows
    that do not come in time. count: is told a table, CAME or LATE, and how many rows."""

    def __init__(
        self,
        tables: Sequence[RemoteTable],
        hosts: OwnerHosts,
        late_is_default: bool,
        count: Callable[[str, str, int], object] = lambda table, where, rows: None,
    ) -> None:
        self._tables, self._hosts, self._count = {t.name: t for t in tables}, hosts, count
        self._late_is_default = late_is_default

    def sources(self) -> Mapping[str, FetchedTable]:
        """Returns the tables by name."""
        return {name: self._source(table) for name, table in self._tables.items()}

    def _source(self, t: RemoteTable) -> FetchedTable:
        default = np.frombuffer(bytes.fromhex(t.default), np.uint8) if t.default else None
        stands = default is not None and self._late_is_default
        owners = Owners(np.array([s.end for s in t.shares], np.int64), t.buckets, t.bucket_ids)
        together = FetchTogether(t.name, owners.split, self.fetch)
        reader = RowReader(
            partial(_fetch_alone, together),
            wait_s=self._hosts.timeout_s,
            default=(lambda: default) if stands else None,
            together=together,
        )
        # What is said of an id that is refused
        row_map = None if t.buckets else RowMap(t.count, None if default is None else t.count)
        shape = t.count, t.row_bytes, RowFormat.parse(t.row_format), t.dim
        return FetchedTable(*shape, reader, row_map, default=default)

    def fetch(self, asked: Sequence[RowsAsked], deadline: float | None) -> None:
        """Reads rows of these tables, as `quant.rows.fetched.Fetch`: each owner is asked once."""
        deadline = time.monotonic() + self._hosts.timeout_s if deadline is None else deadline
        parts: dict[_Owner, list[_Part]] = {}
        for one in asked:
            table, start = self._tables[one.table], 0
            for share, end in zip(table.shares, one.ends, strict=False):
                if start < end:
                    of = slice(start, end)
                    part = _Part(table, share.table, one.rows[of], one.out[of], one.state[of])
                    owner = _Owner(share.model, share.content, share.addresses)
                    parts.setdefault(owner, []).append(part)
                start = end
            one.state[start:] = RowState.MISSING
        calls = [_Call(self._hosts, owner, of_owner, deadline) for owner, of_owner in parts.items()]
        for call in calls:
            call.begin()
        for call in calls:
            body = call.finish()
            for number, part in enumerate(call.parts):
                _take(part, call.layout, number, body)
                self._count(part.table.name, LATE if body is None else CAME, part.rows.size)


def _fetch_alone(
    together: FetchTogether, rows: Ids, out: Bytes, state: NDArray[np.uint8], deadline: float | None
) -> None:
    """Reads rows of one table, as `quant.rows.fetched.Fetch`."""
    distinct, at, ends = together.split(rows)
    came, states = np.empty((distinct.size, out.shape[1]), np.uint8), np.zeros(distinct.size, np.uint8)
    together.call([RowsAsked(together.table, distinct, ends, came, states)], deadline)
    out[:], state[:] = came[at], states[at]


def _take(part: _Part, layout: RowsLayout, number: int, body: Bytes | None) -> None:
    """Puts rows where they were asked for. number: of the part; body: None: they did not come."""
    if body is None:
        part.state[:] = RowState.LATE
        return
    found_at, rows_at = layout.found_at[number], layout.rows_at[number]
    part.out.reshape(-1)[:] = body[rows_at : rows_at + part.out.size]
    found = body[found_at : found_at + part.rows.size]
    if not found.all():
        part.state[:] = np.where(found, np.uint8(RowState.HERE), np.uint8(RowState.MISSING))


class _Try(NamedTuple):
    """A request that was sent to one host, which has not answered. began: of time.monotonic."""

    host: OwnerHost
    connection: SocketConnection
    began: float


class _Call:
    """One request to an owner: sent to the host that has least to do; to another one as well where that takes
    long, or in its place where it fails. The first answer counts."""

    def __init__(self, hosts: OwnerHosts, owner: _Owner, parts: Sequence[_Part], deadline: float) -> None:
        self.parts, self._all_hosts, self._owner, self._deadline = parts, hosts, owner, deadline
        self._rows = sum(part.rows.size for part in parts)
        self.layout = RowsLayout.of([(part.rows.size, part.table.row_bytes) for part in parts])
        path = f"{PATH}/{owner.model}/{owner.content:016x}"
        self._request = HttpRequest("POST", path, pack_request([TableIds(p.number, p.rows) for p in parts]))
        known = [hosts.host(name) for name in owner.addresses]
        self._hosts = sorted(known, key=lambda host: (host.hangs, host.waiting))
        self._tries: list[_Try] = []

    def begin(self) -> None:
        """Sends the request to the first host, and to one that hung, where it is time to see whether it still
        does."""
        self._begin_next()
        hung = next((host for host in self._hosts if host.hangs and host.may_be_asked()), None)
        if self._tries and hung is not None:
            self._hosts.remove(hung)
            self._send(hung)

    def _begin_next(self) -> None:
        """Sends the request to the next host that may be asked, if there is one."""
        while self._hosts and time.monotonic() < self._deadline:
            host = self._hosts.pop(0)
            if host.may_be_asked() and self._send(host):
                return

    def _send(self, host: OwnerHost) -> bool:
        began = time.monotonic()
        try:
            self._tries.append(_Try(host, host.pool.begin(self._request), began))
        except OSError as error:
            host.told(began, self._rows, f"it is not reached ({error})")
            return False
        host.waiting += 1
        return True

    def finish(self) -> Bytes | None:
        """Returns the response's body, as `layout` says; None: it did not come in time."""
        self._all_hosts.hedges.earn()
        try:
            while self._tries or self._hosts:
                if not self._tries:
                    self._begin_next()
                elif (one := self._answering()) is not None:
                    if (found := self._taken(one)) is not None:
                        return found
                elif time.monotonic() >= self._deadline:
                    return None
                else:
                    self._all_hosts.hedges.spend()
                    self._begin_next()
            return None
        finally:
            for late in self._tries:
                self._end(late, _LATE)
                late.connection.close()

    def _answering(self) -> _Try | None:
        """Waits for an answer, or for the time to ask one more host; returns the request that is answered."""
        poll, until = select.poll(), self._deadline
        for one in self._tries:
            poll.register(one.connection.descriptor, select.POLLIN)
        if self._hosts:
            last = self._tries[-1]
            half = last.began + (self._deadline - last.began) / 2  # whatever it costs
            until = min(half, last.began + last.host.usual_s) if self._all_hosts.hedges.may_spend() else half
        ready = poll.poll(max(0.0, 1000 * (until - time.monotonic())))
        if not ready:
            return None
        return next(one for one in self._tries if one.connection.descriptor == ready[0][0])

    def _taken(self, one: _Try) -> Bytes | None:
        """Reads an answer; None: it is not taken."""
        self._tries.remove(one)
        problem, found = "", None
        try:
            found = self._read(one.host.pool.finish(one.connection, self._deadline))
        except TimeoutError:
            problem = _LATE
        except (OSError, ValueError) as error:
            problem = f"its answer is not taken: {error}"
        self._end(one, problem)
        return found

    def _end(self, one: _Try, problem: str) -> None:
        one.host.waiting -= 1
        one.host.told(one.began, self._rows, problem)

    def _read(self, response: HttpResponse) -> Bytes:
        if response.status != 200:
            raise ValueError(f"{response.status}: {response.text[:300]}")
        body = np.frombuffer(response.content, np.uint8)
        check_response(body, self.layout, self._owner.content)
        return body
