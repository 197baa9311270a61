"""Which state of a model all hosts have that have its rows."""

import contextlib
import logging
import math
import select
import time
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import orjson

from tableside.loader.segment.remote import HostsState, RemoteTable
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import State
from tableside.loader.versions.versions import Model
from tableside.serving.client.messages import HttpRequest, HttpResponse
from tableside.serving.client.sockets import SocketConnection
from tableside.serving.cluster.calls import OwnerHost, OwnerHosts, hosts_of
from tableside.serving.cluster.known import KnownState, KnownStates, candidates, line_of
from tableside.serving.cluster.protocol import PATH
from tableside.serving.errors import ApiError, ErrorKind
from tableside.serving.settings import ServerSettings, cluster_token

logger = logging.getLogger("tableside")

_ANSWER_S, _ANSWER_BYTES, _HERE = 1.0, 16 << 20, 200  # of an answer
# between two times that owners are asked to keep a state, and that one is told of who is waited for
_HOLD_S, _TOLD_S = 1.0, 10.0
# that connecting takes at most, so that others are asked as well; that a host is waited for which hung
_CONNECT_S, _PROBE_S = 0.2, 0.2


class At(NamedTuple):
    """An owner's model at one of its hosts."""

    model: str
    host: str


class OwnedModel(NamedTuple):
    """The hosts of one owner's model. content: of its version."""

    model: str
    content: int
    hosts: tuple[str, ...]

    @property
    def places(self) -> list[At]:
        return [At(self.model, host) for host in self.hosts]

    def state(self, state: HostsState) -> HostsState:
        """Returns what its hosts call a state of the whole model."""
        return state._replace(content=self.content)


class NotAgreed(ApiError):
    """Owners lack a state, which passes once they have applied the same changes."""

    def __init__(self, message: str) -> None:
        super().__init__(503, ErrorKind.SWAP, message)
        self.args = (message,)  # what it is made of anew behind a pickle


class Agreement:
    """What a process that serves a model agrees on with the owners of its remote tables."""

    def __init__(self, model: Model, settings: ServerSettings) -> None:
        self._model, self._settings, self._known = model, settings, KnownStates(model)
        self._hold_at = self._told_at = 0.0
        self._waited_for: Sequence[RemoteTable] = ()  # owned tables of what was wanted last

    @property
    def _hosts(self) -> OwnerHosts:
        return hosts_of(cluster_token(self._settings), self._settings.disk_timeout_s)

    def first(self, wanted: State, remote: Sequence[RemoteTable], lacks_none: bool) -> State:
        """Returns the newest state that `wanted` follows from, or itself, of which each owner has one host
        with it. lacks_none: no owner may be out of reach; else those that are have no say. Blocks. NotAgreed:
        there is none."""
        return self._newest(line_of(self._known.look(), wanted), remote, False, lacks_none)

    def of_version(self, wanted: State, remote: Sequence[RemoteTable]) -> State:
        """The same, of the version of `wanted` alone."""
        line = [s for s in line_of(self._known.look(), wanted) if s.state.version == wanted.version]
        return self._newest(line, remote)

    def next(
        self, wanted: State, remote: Sequence[RemoteTable], served: State, sequence: int, is_patient: bool
    ) -> State:
        """The same after a served state, of this sequence. is_patient: every host is to have it. NotAgreed:
        none comes after the served one."""
        if wanted == served:  # its hot rows are others
            return wanted
        self._waited_for = remote
        states = candidates(self._known.look(), wanted, served, sequence)
        try:
            return self._newest(states, remote, is_patient)
        except NotAgreed as error:
            if not is_patient and time.monotonic() - self._told_at >= _TOLD_S:
                self._told_at = time.monotonic()
                logger.warning("model %s: %s", self._model.name, error)
            raise

    def _newest(
        self,
        states: Sequence[KnownState],
        remote: Sequence[RemoteTable],
        is_patient: bool = False,
        lacks_none: bool = True,
    ) -> State:
        owners = owners_of(remote)
        kept = states_of(self._hosts, owners)
        needed = [o for o in owners if lacks_none or any(at in kept for at in o.places)]
        lacking = "no state that its owners have is kept"
        for one in states:
            if one.name is None:
                lacking = f"state {one.state} has changes without a number, which no owner knows"
                continue
            names = {owner.model: str(owner.state(one.name)) for owner in owners}
            have = {at for at in kept if names[at.model] in kept[at]}
            if not (without := _without(needed, have, is_patient)):
                # They may have dropped it meanwhile
                without = _without(needed, set(_hold(self._hosts, owners, one.name)), is_patient)
            if not without:
                return one.state
            lacking = f"changes wait for {', '.join(without[:8])} to apply them, too"
        raise NotAgreed(lacking)

    def shall_hold(self, remote: Sequence[RemoteTable]) -> bool:
        """Whether the caller is to `hold` now: once in a while, and not while another one does."""
        if not remote or time.monotonic() < self._hold_at:
            return False
        self._hold_at = math.inf
        return True

    def hold(self, segments: Sequence[Segment]) -> None:
        """Has all hosts keep the states of segments for some seconds, and finds hosts that hung and are well:
        also owners of what is wanted, which may be others."""
        try:
            for segment in segments:
                if segment.header.owned and (name := segment.hosts_state()) is not None:
                    _hold(self._hosts, owners_of(segment.header.owned), name, asks_all=True)
            places = [at for owner in owners_of(self._waited_for) for at in owner.places]
            _ask(
                self._hosts, {at: "states" for at in places if self._hosts.host(at.host).hangs}, asks_all=True
            )
        finally:
            self._hold_at = time.monotonic() + _HOLD_S


def owners_of(tables: Sequence[RemoteTable]) -> list[OwnedModel]:
    """Returns the owners of a version's remote tables, each once."""
    found = {OwnedModel(share.model, share.content, share.addresses) for t in tables for share in t.shares}
    return sorted(found)


def states_of(
    hosts: OwnerHosts, owners: Sequence[OwnedModel], refused: dict[At, str] | None = None
) -> dict[At, set[str]]:
    """Asks all hosts which states they have; returns those of the hosts that say it. refused: takes what the
    others answered."""
    found = {}
    for at, response in _ask(hosts, {at: "states" for owner in owners for at in owner.places}).items():
        if response.status != _HERE:
            if refused is not None:
                refused[at] = f"{response.status}: {response.text[:300]!r}"
            continue
        with contextlib.suppress(ValueError, TypeError):
            found[at] = {str(state) for state in orjson.loads(response.content)}
    return found


def _hold(
    hosts: OwnerHosts, owners: Sequence[OwnedModel], name: HostsState, asks_all: bool = False
) -> dict[At, HttpResponse]:
    """Has hosts keep a state for some seconds; returns the answers of those that have it."""
    asked = {at: str(owner.state(name)) for owner in owners for at in owner.places}
    return {at: response for at, response in _ask(hosts, asked, asks_all).items() if response.status == _HERE}


def _ask(hosts: OwnerHosts, what: Mapping[At, str], asks_all: bool = False) -> dict[At, HttpResponse]:
    """Asks hosts for something of their model, all at once; returns the answers that come in time. asks_all:
    also hosts that hang, to see whether they still do."""
    waiting: dict[int, tuple[At, OwnerHost, SocketConnection]] = {}
    began, found, poll = time.monotonic(), dict[At, HttpResponse](), select.poll()
    for at, path in what.items():
        if (host := hosts.host(at.host)).hangs and not asks_all:
            continue
        try:
            request = HttpRequest("GET", f"{PATH}/{at.model}/{path}")
            connection = host.pool.begin(request, _CONNECT_S, _ANSWER_BYTES)
        except OSError:
            host.is_silent(began)
            continue
        waiting[connection.descriptor] = at, host, connection
        poll.register(connection.descriptor, select.POLLIN)
    are_well = any(not host.hangs for _, host, _ in waiting.values())
    deadline = began + (_ANSWER_S if are_well else _PROBE_S)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(1000 * left_s):
            at, host, connection = waiting[descriptor]
            try:
                if (response := connection.receive_some()) is None:
                    continue
            except OSError:
                connection.close()
                host.is_silent(began)
            else:
                host.pool.give_back(connection, response)
                host.is_well(began)
                found[at] = response
            poll.unregister(descriptor)
            del waiting[descriptor]
    for _, host, connection in waiting.values():
        connection.close()
        host.is_silent(began)
    return found


def _without(owners: Sequence[OwnedModel], have: Set[At], patient: bool) -> list[str]:
    """Returns the hosts that lack a state, of owners in whose way that is. have: hosts that have it."""
    found: list[At] = []
    for owner in owners:
        lacking = [at for at in owner.places if at not in have]
        found += lacking if patient or len(lacking) == len(owner.places) else []
    return [at.host for at in found]
