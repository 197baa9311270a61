"""Which state of a model all hosts have that have its rows."""

import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import orjson

from tableside.loader.segment.remote import HostsState, RemoteTable
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import State, attach_state, kept_states
from tableside.loader.versions.versions import Model
from tableside.serving.client.messages import HttpRequest
from tableside.serving.client.sockets import SocketConnection
from tableside.serving.cluster.calls import OwnerHost, OwnerHosts, hosts_of, receive_by
from tableside.serving.cluster.protocol import PATH
from tableside.serving.errors import ApiError, ErrorKind
from tableside.serving.settings import ServerSettings, cluster_token

_ANSWER_S, _ANSWER_BYTES = 1.0, 16 << 20  # of a list of states
_MOST_STATES = 256  # of the newest ones that are looked at


class Owner(NamedTuple):
    """The hosts of one owner's model. content: of its version."""

    model: str
    content: int
    hosts: tuple[str, ...]

    def state(self, state: HostsState) -> HostsState:
        """Returns what its hosts call a state of the whole model."""
        return state._replace(content=self.content)


class NotAgreed(ApiError):
    """Owners lack a state, which passes once they have applied the same changes."""

    def __init__(self, message: str) -> None:
        super().__init__(503, ErrorKind.SWAP, message)
        self.args = (message,)  # what it is made of anew behind a pickle


def agreed_state(
    model: Model,
    wanted: State,
    served: Segment | None,
    settings: ServerSettings,
    patient: bool,
) -> State:
    """Returns the newest state up to `wanted` that the owners of the model's remote tables have as well, and
    that comes after the served one; `wanted` where all tables are here. patient: every host has to have it;
    else one of each owner, if any is reached. Blocks. NotAgreed: there is none. Errors: of `attach_state`."""
    is_other = served is None or served.header.version != wanted.version
    segment = model.attach(wanted.version, "header") if is_other or served is None else served
    if not segment.header.remote:
        return wanted
    candidates = _candidates(model, wanted, served)
    hosts = hosts_of(cluster_token(settings), settings.disk_timeout_s)
    owners = owners_of(segment.header.remote)
    kept = states_of(hosts, owners)
    lacking = ""
    for state, known in named_states(model, candidates, segment):
        if known is None:
            lacking = lacking or f"state {state} has changes without a number, which no owner knows"
            continue
        without = [name for owner in owners for name in _lacking(owner, known, kept, patient)]
        if not without:
            return state
        lacking = lacking or f"state {state} waits for {', '.join(without[:8])} to apply the same changes"
    raise NotAgreed(f"model {model.name!r}: {lacking or f'no state up to {wanted} is kept'}")


def _candidates(model: Model, wanted: State, served: Segment | None) -> Sequence[State]:
    """Returns the states that may be served, the newest first."""
    kept = [state for state in reversed(kept_states(model, wanted.version)) if state <= wanted]
    if served is not None and served.header.version == wanted.version:
        now = served.deltas[0].sequence if served.deltas else 0
        if wanted.sequence < now:  # somebody went back, and to that state alone
            return [wanted]
        kept = [state for state in kept if state.sequence > now]
    return kept[:_MOST_STATES]


def named_states(
    model: Model, states: Sequence[State], reuse: Segment | None = None
) -> Iterator[tuple[State, HostsState | None]]:
    """Yields states with what all hosts call them. reuse: as of `attach_state`."""
    for state in states:
        reuse = attach_state(model, state, "header", reuse)
        yield state, reuse.hosts_state()


def owners_of(tables: Sequence[RemoteTable]) -> list[Owner]:
    """Returns the owners of a version's remote tables, each once."""
    found = {Owner(share.model, share.content, share.addresses) for t in tables for share in t.shares}
    return sorted(found)


def states_of(hosts: OwnerHosts, owners: Collection[Owner]) -> dict[tuple[str, str], set[str]]:
    """Asks all hosts which states they have; returns those of the reached ones, by model and host."""
    asked: list[tuple[str, OwnerHost, SocketConnection]] = []
    for model, name in sorted({(owner.model, name) for owner in owners for name in owner.hosts}):
        if (host := hosts.host(name)).hangs:
            continue
        request = HttpRequest("GET", f"{PATH}/{model}/states")
        try:
            asked.append((model, host, host.pool.begin(request, _ANSWER_S, _ANSWER_BYTES)))
        except OSError:
            continue
    deadline, found = time.monotonic() + _ANSWER_S, dict[tuple[str, str], set[str]]()
    for model, host, connection in asked:
        try:
            response = receive_by(connection, deadline)
        except OSError:
            connection.close()
            continue
        host.pool.give_back(connection, response)
        if response.status == 200:
            try:
                found[model, host.name] = {str(state) for state in orjson.loads(response.content)}
            except (ValueError, TypeError):
                continue
    return found


def _lacking(
    owner: Owner, known: HostsState, kept: dict[tuple[str, str], set[str]], patient: bool
) -> list[str]:
    """Returns the hosts of an owner that lack a state, if that is in its way."""
    state = str(owner.state(known))
    reached = [host for host in owner.hosts if (owner.model, host) in kept]
    have = [host for host in reached if state in kept[owner.model, host]]
    if len(have) == len(owner.hosts) if patient else have:
        return []
    return [host for host in (owner.hosts if patient else reached) if host not in have]
