"""Which state of a model all hosts have that have its rows."""

import contextlib
import time
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import orjson

from tableside.loader.segment.remote import HostsState, RemoteTable
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import State
from tableside.serving.client.messages import HttpRequest, HttpResponse
from tableside.serving.client.sockets import SocketConnection
from tableside.serving.cluster.calls import OwnerHost, OwnerHosts, hosts_of, receive_by
from tableside.serving.cluster.known import KnownState
from tableside.serving.cluster.protocol import PATH
from tableside.serving.errors import ApiError, ErrorKind
from tableside.serving.settings import ServerSettings, cluster_token

_ANSWER_S, _ANSWER_BYTES = 1.0, 16 << 20  # of a list of states
_MOST_STATES = 64  # of the newest ones that are looked at


class At(NamedTuple):
    """An owner's model at one of its hosts."""

    model: str
    host: str


class Owner(NamedTuple):
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


def agreed_state(
    states: Sequence[KnownState],
    owners: Sequence[Owner],
    settings: ServerSettings,
    patient: bool,
    is_first: bool,
) -> State:
    """Returns the first of some states that all owners have as well, who keep it for some seconds. patient:
    every host has to have it; else one host of each owner. is_first: owners of whom no host is reached are
    left out. Blocks. NotAgreed: there is none."""
    hosts = hosts_of(cluster_token(settings), settings.disk_timeout_s)
    kept = states_of(hosts, owners)
    needed = [o for o in owners if not is_first or any(at in kept for at in o.places)]
    lacking = "no state that its owners have is kept"
    for one in states[:_MOST_STATES]:
        if one.name is None:
            lacking = f"state {one.state} has changes without a number, which no owner knows"
            continue
        names = {owner.model: str(owner.state(one.name)) for owner in owners}
        have = {at for at in kept if names[at.model] in kept[at]}
        if not (without := _without(needed, have, patient)):
            # They may have dropped it meanwhile
            without = _without(needed, hold(hosts, owners, one.name), patient)
        if not without:
            return one.state
        lacking = f"changes wait for {', '.join(without[:8])} to apply them, too"
    raise NotAgreed(lacking)


def owners_of(tables: Sequence[RemoteTable]) -> list[Owner]:
    """Returns the owners of a version's remote tables, each once."""
    found = {Owner(share.model, share.content, share.addresses) for t in tables for share in t.shares}
    return sorted(found)


def states_of(hosts: OwnerHosts, owners: Sequence[Owner]) -> dict[At, set[str]]:
    """Asks all hosts which states they have; returns those of the hosts that answer."""
    found = {}
    for at, response in _ask(hosts, {at: "states" for owner in owners for at in owner.places}).items():
        with contextlib.suppress(ValueError, TypeError):
            found[at] = {str(state) for state in orjson.loads(response.content)}
    return found


def hold(hosts: OwnerHosts, owners: Sequence[Owner], name: HostsState) -> set[At]:
    """Has all hosts keep a state for some seconds; returns those that have it."""
    return set(_ask(hosts, {at: str(owner.state(name)) for owner in owners for at in owner.places}))


def hold_served(segment: Segment, settings: ServerSettings) -> None:
    """Has all hosts keep the state of a segment for some seconds, and finds those that hung and are well."""
    if (name := segment.hosts_state()) is not None:
        hosts = hosts_of(cluster_token(settings), settings.disk_timeout_s)
        owners = owners_of(segment.header.remote)
        _ask(hosts, {at: str(o.state(name)) for o in owners for at in o.places}, asks_all=True)


def _ask(hosts: OwnerHosts, what: Mapping[At, str], asks_all: bool = False) -> dict[At, HttpResponse]:
    """Asks hosts for something of their model, all at once; returns the answers that come in time, but
    refusals. asks_all: also hosts that hang, to see whether they still do."""
    asked: list[tuple[At, OwnerHost, SocketConnection]] = []
    deadline, found = time.monotonic() + _ANSWER_S, dict[At, HttpResponse]()
    for at, path in what.items():
        host, left = hosts.host(at.host), deadline - time.monotonic()
        if (host.hangs and not asks_all) or left <= 0:
            continue
        with contextlib.suppress(OSError):
            request = HttpRequest("GET", f"{PATH}/{at.model}/{path}")
            asked.append((at, host, host.pool.begin(request, left, _ANSWER_BYTES)))
    for at, host, connection in asked:
        try:
            response = receive_by(connection, deadline)
        except OSError:
            connection.close()
            continue
        host.pool.give_back(connection, response)
        host.is_well(deadline - _ANSWER_S)
        if response.status == 200:
            found[at] = response
    return found


def _without(owners: Sequence[Owner], have: Set[At], patient: bool) -> list[str]:
    """Returns the hosts that lack a state, of owners in whose way that is. have: hosts that have it."""
    found: list[At] = []
    for owner in owners:
        lacking = [at for at in owner.places if at not in have]
        found += lacking if patient or len(lacking) == len(owner.places) else []
    return [at.host for at in found]
