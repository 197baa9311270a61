"""Which state of a model its owners have in common, and its files, for owners of another number of them."""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import orjson

from tableside.loader.errors import LoaderError
from tableside.loader.segment.delta import delta_name, overlaid
from tableside.loader.segment.remote import HostsState
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.transfer import TransferredSegment
from tableside.quant.contract import Bytes
from tableside.serving.cluster.agreed import At, OwnedModel
from tableside.serving.cluster.describe import AskedHost, Owners, ask_owners
from tableside.serving.cluster.protocol import FILES_PATH, PATH
from tableside.serving.errors import ServingError

PATIENCE_S = 10.0  # for which a host is asked again that is not reached, or busy
_HOLD_S = 1.0  # between two times that hosts are asked to keep the state
_HEADS_BYTES, _MOST_FILES, _SAID_BYTES = 1 << 30, 3, 1 << 16  # of a state; of an answer that refuses


class SourceState:
    """A state of an owner's model at one of its hosts. All is asked over one connection, so that one worker
    answers, which keeps the files that it has given, whatever becomes live there."""

    def __init__(self, at: At, state: HostsState, token: str | None) -> None:
        self._at, self._state, self._host = at, state, AskedHost(at.host, token)
        self._turn = threading.Lock()  # of the connection
        self._path = f"{FILES_PATH}/{at.model}/{state}"

    def segment(self) -> Segment:
        """Returns it, without its rows. ServingError: the host gives something else, or nothing."""
        body = np.frombuffer(self._get(self._path, _HEADS_BYTES), np.uint8)
        try:
            base, *deltas = (self._file(head) for head in _heads(body))
            segment = overlaid(base, [delta.as_delta() for delta in deltas]) if deltas else base
            found = segment.hosts_state()
        except (LoaderError, ValueError) as error:
            raise ServingError(
                f"owner {self._at.host} gives no state of {self._at.model}: {error}"
            ) from error
        if found != self._state or segment.header.model != self._at.model:
            raise ServingError(
                f"owner {self._at.host} gives state {found} of {segment.header.model}; expected "
                f"{self._state} of {self._at.model}"
            )
        return segment

    def _file(self, head: Bytes) -> TransferredSegment:
        path = Path(f"{self._at.host}/{self._at.model}")
        found = TransferredSegment(path / "version", head, self._chunks)
        if (delta := found.header.delta) is not None:
            found.path = path / delta_name(found.header.version, delta.sequence)
        return found

    def _chunks(self, identity: int, first: int, end: int, size: int) -> memoryview:
        path = f"{self._path}/{identity:016x}/{first}-{end}"
        return self._get(path, max(size, _SAID_BYTES))

    def _get(self, path: str, most: int) -> memoryview:
        with self._turn:
            return self._host.get(path, most, PATIENCE_S)

    def hold(self) -> None:
        """Has the host keep the state for some seconds, as each request for a part of it does."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            with contextlib.suppress(ServingError):  # who reads it sees it
                self._host.get(f"{PATH}/{self._at.model}/{self._state}", _SAID_BYTES)
        finally:
            self._turn.release()

    def close(self) -> None:
        self._host.close()


def _heads(body: Bytes) -> Iterator[Bytes]:
    """Yields the heads in an answer. ValueError: it is none."""
    count = int(body[:8].view("<i8")[0]) if body.size >= 8 else 0
    sizes = body[8 : 8 + 8 * count].view("<i8").tolist() if 0 < count <= _MOST_FILES else []
    if not sizes or min(sizes) < 0 or 8 + 8 * count + sum(sizes) != body.size:
        raise ValueError(f"{body.size:,} bytes name no files")
    at = 8 + 8 * count
    for size in sizes:
        yield body[at : at + size]
        at += size


@contextlib.contextmanager
def common_state(model: str, owners: Owners, token: str | None) -> Iterator[list[Segment]]:
    """Yields the state `in_common` of a model's owners, of each as one of its hosts has it, which keeps it
    meanwhile. ServingError: an owner is not reached, they do not fit, or have no state in common."""
    described = ask_owners(model, [owners], token)[owners]
    asked = [OwnedModel(d.model, d.content, hosts) for d, hosts in zip(described, owners, strict=True)]
    kept = {at: _states(at, token) for owner in asked for at in owner.places}
    with contextlib.ExitStack() as stack:
        sources = [SourceState(at, state, token) for at, state in in_common(asked, kept)]
        for source in sources:
            stack.callback(source.close)
        stack.enter_context(_held(sources))
        yield [source.segment() for source in sources]


def _states(at: At, token: str | None) -> list[HostsState]:
    """Asks a host which states it has; returns them, the newest first. ServingError: it says none."""
    with contextlib.closing(AskedHost(at.host, token)) as host:
        said = host.get(f"{PATH}/{at.model}/states", _HEADS_BYTES, PATIENCE_S)
    try:
        return [HostsState.parse(state) for state in orjson.loads(said)]
    except (ValueError, TypeError) as error:
        raise ServingError(f"owner {at.host} names no states of {at.model}: {error}") from error


def in_common(
    owners: Sequence[OwnedModel], kept: Mapping[At, Sequence[HostsState]]
) -> list[tuple[At, HostsState]]:
    """Returns a state that each owner has, the newest of a host of the first one, and a host of each that
    has it."""
    for state in (state for at in owners[0].places for state in kept[at]):
        found = list[tuple[At, HostsState]]()
        for owner in owners if state.content == owners[0].content else ():
            has = (at for at in owner.places if owner.state(state) in kept[at])
            found += [(at, owner.state(state)) for at in has][:1]
        if len(found) == len(owners):
            return found
    counts = ", ".join(f"{at.host} {len(kept[at])}" for owner in owners for at in owner.places)
    raise ServingError(
        f"the owners have no state in common (states that each keeps: {counts}); expected followers that "
        "apply the same changes, and keep enough states (--keep-states): take the share again once the last "
        "of them has caught up"
    )


@contextlib.contextmanager
def _held(sources: Sequence[SourceState]) -> Iterator[None]:
    """Has hosts keep states, by a thread."""
    is_over = threading.Event()

    def hold() -> None:
        while not is_over.wait(_HOLD_S):
            for source in sources:
                source.hold()

    thread = threading.Thread(target=hold, name="tableside-hold")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
