"""The states of owners' models that rows are asked of."""

import asyncio
import time
from dataclasses import dataclass

from tableside.loader.segment.remote import HostsState
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import State
from tableside.loader.versions.versions import Model
from tableside.serving.cluster.known import KnownStates
from tableside.serving.errors import UNUSABLE, not_found
from tableside.serving.model.engine import Engine

KEPT_S, _LOOK_S = 10.0, 1.0  # that a state stays after it was asked for; between two looks
_Key = tuple[str, HostsState]


@dataclass(slots=True, eq=False)
class _KeptState:
    """A state that was asked for. asked_at: last, of time.monotonic."""

    segment: Segment
    model: Model
    asked_at: float = 0.0


class KeptStates:
    """Finds states by what all hosts of a model call them, and keeps those that are asked for."""

    def __init__(self) -> None:
        self._held: dict[_Key, _KeptState] = {}
        self._known: dict[str, KnownStates] = {}  # by model
        self._looking = asyncio.Lock()
        self._is_forgetting = False

    async def known(self, engine: Engine) -> list[HostsState]:
        """Returns the states of a model whose files are here, the newest first."""
        found = await asyncio.to_thread(self._known_of(engine).look)
        return [one.name for one in found if one.name is not None]

    def held(self, engine: Engine, state: HostsState) -> Segment | None:
        """Returns a state that is attached, or None."""
        if (held := self._held.get((engine.model.name, state))) is None:
            return None
        held.asked_at = time.monotonic()
        return held.segment

    async def segment(self, engine: Engine, state: HostsState) -> Segment:
        """Returns a state, attached: the same files to all who ask while it is kept. ApiError 404: it is not
        here."""
        key = engine.model.name, state
        if key not in self._held:
            found = await self._attached(engine, state)
            if key not in self._held:  # nobody else attached it meanwhile, perhaps by files merged since
                self._keep(key, found, engine.model)
        held = self._held[key]
        held.asked_at = time.monotonic()
        return held.segment

    def _keep(self, key: _Key, segment: Segment, model: Model) -> None:
        self._held[key] = _KeptState(segment, model)
        for delta in segment.deltas:
            delta.hold()  # for this host's other workers
        if not self._is_forgetting:
            self._is_forgetting = True
            asyncio.get_running_loop().call_later(_LOOK_S, self._forget)

    async def _attached(self, engine: Engine, wanted: HostsState) -> Segment:
        live = engine.served().segment
        if live.hosts_state() == wanted:
            return live
        async with self._looking:
            for known in await asyncio.to_thread(self._known_of(engine).look):
                held = await asyncio.to_thread(_attach, engine, known.state) if known.name == wanted else None
                if held is not None and held.hosts_state() == wanted:
                    return held
        raise not_found(
            f"no state of {engine.model.name!r} that is kept here is {wanted}; it lacks changes that the "
            "asking host has, has dropped older ones (--keep-states), or was loaded from another checkpoint"
        )

    def _known_of(self, engine: Engine) -> KnownStates:
        return self._known.setdefault(engine.model.name, KnownStates(engine.model))

    def _forget(self) -> None:
        """Lets states go that nobody asks for any more, and those of versions that were found damaged."""
        old = time.monotonic() - KEPT_S
        for key, held in list(self._held.items()):
            if held.asked_at <= old or held.segment.header.version in held.model.damaged_versions():
                del self._held[key]
        self._is_forgetting = bool(self._held)
        if self._is_forgetting:
            asyncio.get_running_loop().call_later(_LOOK_S, self._forget)


def _attach(engine: Engine, state: State) -> Segment | None:
    """Attaches and verifies a state; None: it went, or is damaged."""
    try:
        return engine.attach(state).segment
    except UNUSABLE:
        return None
