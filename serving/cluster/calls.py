"""Requests for rows to the hosts that have them: which host is asked, and what is done where it is slow, is
gone, or answers with something else."""

import logging
import select
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tableside.loader.segment.blocks import OPENS_S, Breaker
from tableside.loader.segment.remote import HostsState
from tableside.quant.contract import Bytes
from tableside.quant.rows.turns import waiting
from tableside.serving.client.address import Address
from tableside.serving.client.messages import HttpRequest, HttpResponse
from tableside.serving.client.sockets import SocketConnection, SocketPool
from tableside.serving.cluster.protocol import PATH, TableIds, check_response, pack_request

logger = logging.getLogger("tableside")

_LATE = "rows did not come in time"
_FIRST_USUAL_S, _LEAST_USUAL_S = 0.02, 0.001  # see `OwnerHost.usual_s`: before it is known, and at least
_OF_REQUESTS = 64  # from which that is taken
_HEDGED_SHARE, _MOST_HEDGES = 0.05, 10.0  # of requests that are sent to a second host early; at once
_CONNECT_SHARE, _LEAST_CONNECT_S = 0.125, 0.005  # of the time that is left, that connecting may take
_SAID_BYTES = 1 << 16  # of an answer that refuses
_NOT_HERE = 404  # its status, where the state is not there


def address_of(owner: str, token: str | None) -> Address:
    """Returns the address of an owner, HOST:PORT, of a server of the same cluster token."""
    return Address.parse(f"http://{owner}", {} if token is None else {"Authorization": f"Bearer {token}"})


class OwnerHost:
    """A host that has rows. name: HOST:PORT. Any thread may call."""

    def __init__(self, name: str, token: str | None, timeout_s: float) -> None:
        self.name = name
        self.pool = SocketPool(address_of(name, token), timeout_s)
        self.waiting = 0  # requests that wait for it; written without a lock, as it need not be exact
        self.lacks: HostsState | None = None  # the state that it lacked, when it was asked last
        self._breaker, self._last = Breaker(source="it"), ""
        self._seconds: list[float] = []
        self.usual_s = _FIRST_USUAL_S  # after which another host is asked: twice what 95 of 100 took

    def may_be_asked(self) -> bool:
        """Whether a request shall wait for it."""
        return not self._breaker.is_open()

    @property
    def hangs(self) -> bool:
        return self._breaker.hangs

    def told(self, began: float, rows: int, problem: str) -> None:
        """Takes note of a request of `rows` rows that began at `began`; problem: why they did not come."""
        if not problem:
            self.lacks = None
            self._seconds.append(time.monotonic() - began)
            if len(self._seconds) == _OF_REQUESTS:
                self.usual_s = max(_LEAST_USUAL_S, 2 * float(np.percentile(self._seconds, 95)))
                self._seconds = []
        if problem not in ("", _LATE, self._last):
            logger.warning("owner %s: %s", self.name, problem)
        self._answered(began, 0 if problem else rows, rows if problem else 0)
        self._last = problem or self._last

    def lacked(self, began: float, state: HostsState, why: str) -> None:
        """Takes note that it is well and lacks a state, for which other hosts are asked first."""
        if self.lacks is None:
            logger.warning("owner %s: %s", self.name, why)
        self.lacks = state
        self.is_well(began)

    def is_silent(self, began: float) -> None:
        """Takes note that it did not answer a request that began at `began`."""
        self._answered(began, 0, 1)

    def is_well(self, began: float) -> None:
        """Takes note that it answered a request that began at `began`."""
        self._answered(began, 1, 0)

    def _answered(self, began: float, came: int, late: int) -> None:
        if change := self._breaker.told(began, came, late):
            logger.warning("owner %s: %s", self.name, change)


class OwnerHosts:
    """The hosts that a process asks, each once. hedges: how many requests may be sent to a second host early;
    each request adds a small share of one. Not exact where threads meet."""

    def __init__(self, token: str | None, timeout_s: float) -> None:
        self._token, self.timeout_s = token, timeout_s
        self.hedges = _MOST_HEDGES
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


_hosts: dict[tuple[str | None, float], OwnerHosts] = {}


def hosts_of(token: str | None, timeout_s: float) -> OwnerHosts:
    """Returns the hosts that this process asks with a token."""
    return _hosts.setdefault((token, timeout_s), OwnerHosts(token, timeout_s))


def close_hosts() -> None:
    """Closes the connections of `hosts_of`."""
    while _hosts:
        _hosts.popitem()[1].close()


class Replicas(NamedTuple):
    """The hosts that have the same rows, of a state of their model."""

    model: str
    state: HostsState
    addresses: tuple[str, ...]


class _Try(NamedTuple):
    """A request that was sent to one host, which has not answered. began: of time.monotonic."""

    host: OwnerHost
    connection: SocketConnection
    began: float


class OwnerCall:
    """One request to an owner: sent to the host that has least to do; to another one as well where that takes
    long, or in its place where it fails. The first answer counts. asked: ids of tables; size: of the
    response; place: where it may be read to. body: the response; None: it has not come, or not in time;
    is_in_place: it is what is there now. until: when something is to be done though nothing comes."""

    def __init__(
        self,
        hosts: OwnerHosts,
        owner: Replicas,
        asked: TableIds,
        size: int,
        deadline: float,
        place: memoryview | None = None,
    ) -> None:
        self.until, self._size, self._place = deadline, size, place
        self.is_in_place = False
        self.body: Bytes | None = None
        self._answered_from = 0.0  # when the host was asked whose answer it is
        self._all_hosts, self._state, self._deadline = hosts, owner.state, deadline
        self._rows = asked.ids.size
        # Who waits for less neither says that a host hangs, nor is the one that looks whether it does
        self._is_patient = deadline - time.monotonic() >= min(hosts.timeout_s, OPENS_S) / 2
        path = f"{PATH}/{owner.model}/{owner.state}"
        self._request = HttpRequest("POST", path, pack_request(asked))
        known = [hosts.host(name) for name in owner.addresses]
        self._hosts = sorted(known, key=lambda h: (h.hangs, h.lacks == owner.state, h.waiting))
        self.tries: list[_Try] = []
        hosts.hedges = min(_MOST_HEDGES, hosts.hedges + _HEDGED_SHARE)
        self._begin_next()
        # To one that hung, too, where it is time to see whether it still does
        hung = next((host for host in self._hosts if host.hangs and self._may_ask(host)), None)
        if self.tries and hung is not None:
            self._hosts.remove(hung)
            self._send(hung)

    def _begin_next(self) -> None:
        """Sends the request to the next host that may be asked, if there is one."""
        while self._hosts and (now := time.monotonic()) < self._deadline:
            host = self._hosts.pop(0)
            if not self._may_ask(host) or not self._send(host):
                continue
            self.until = self._deadline
            if self._hosts:
                half = now + (self._deadline - now) / 2  # then the next one is asked, whatever it costs
                early = now + host.usual_s if self._all_hosts.hedges >= 1 else half
                self.until = min(half, early)
            return
        self.until = self._deadline

    def _may_ask(self, host: OwnerHost) -> bool:
        return host.may_be_asked() if self._is_patient else not host.hangs

    def _send(self, host: OwnerHost) -> bool:
        began = time.monotonic()
        timeout_s = max(_LEAST_CONNECT_S, _CONNECT_SHARE * (self._deadline - began))
        most = max(self._size, _SAID_BYTES)
        try:
            # Two hosts' answers would mix
            into = None if self.tries else self._place
            self.tries.append(_Try(host, host.pool.begin(self._request, timeout_s, most, into), began))
        except OSError as error:
            if self._is_patient:
                host.told(began, self._rows, f"it is not reached ({error})")
            return False
        host.waiting += 1
        return True

    def is_over(self) -> bool:
        """Whether nothing more will come. Asks the next host where it is time to."""
        if self.body is None and self.tries and time.monotonic() < self.until:
            return False
        if self.body is None and self.tries and self.until < self._deadline:
            self._all_hosts.hedges -= 1
            self._begin_next()
            return False
        if self.body is None and not self.tries:
            self._begin_next()
            if self.tries:
                return False
        for late in self.tries:
            # One that was asked after the one that answered may be as fast
            is_slow = self.body is None or late.began < self._answered_from
            self._end(late, _LATE if is_slow else None)
            late.connection.close()
        return True

    def read(self, one: _Try) -> None:
        """Reads what has come from a host."""
        problem, response, is_lacking = "", None, False
        try:
            if (response := one.connection.receive_ready()) is None:
                return
            is_lacking = response.status == _NOT_HERE
            self.body, self._answered_from = self._checked(response), one.began
        except (OSError, ValueError) as error:
            problem = f"its answer is not taken: {error}"
        self.tries.remove(one)
        if response is None:
            one.connection.close()
        else:
            one.host.pool.give_back(one.connection, response)
        if is_lacking:
            one.host.lacked(one.began, self._state, problem)
        self._end(one, None if is_lacking else problem)

    def _end(self, one: _Try, problem: str | None) -> None:
        """problem: as of `OwnerHost.told`; None: nothing is to be told."""
        one.host.waiting -= 1
        if problem is not None and (self._is_patient or problem != _LATE):
            one.host.told(one.began, self._rows, problem)

    def _checked(self, response: HttpResponse) -> Bytes:
        if response.status != 200:
            raise ValueError(f"{response.status}: {response.text[:300]!r}")
        body = np.frombuffer(response.content, np.uint8)
        check_response(body, self._size, self._state)
        self.is_in_place = response.content is self._place
        return body


def receive_by(connection: SocketConnection, deadline: float) -> HttpResponse:
    """Reads a response. TimeoutError: it is not whole at the deadline, of time.monotonic."""
    poll = select.poll()
    poll.register(connection.descriptor, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0 and poll.poll(1000 * left_s):
        if (response := connection.receive_some()) is not None:
            return response
    raise TimeoutError("its answer did not come in time")


def wait_for(calls: Sequence[OwnerCall]) -> None:
    """Waits until each call has its response, or none will come."""
    left = [call for call in calls if not call.is_over()]
    while left:
        poll, of = select.poll(), {}
        for call in left:
            for one in call.tries:
                poll.register(one.connection.descriptor, select.POLLIN)
                of[one.connection.descriptor] = call, one
        until = min(call.until for call in left)
        with waiting():
            ready = poll.poll(max(0.0, 1000 * (until - time.monotonic())))
        for descriptor, _ in ready:
            call, one = of[descriptor]
            if call.body is None:
                call.read(one)
        left = [call for call in left if not call.is_over()]
