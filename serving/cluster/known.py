"""What all hosts of a model call the states that are kept here, and how these follow from one another."""

import os
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tableside.loader.errors import LoaderError
from tableside.loader.segment.delta import delta_name
from tableside.loader.segment.remote import HostsState
from tableside.loader.versions.states import State, attach_state, kept_states
from tableside.loader.versions.versions import Model


class KnownState(NamedTuple):
    """A kept state. name: as of `Segment.hosts_state`. sequence: of its last change, also if compacted.
    after: of the state that this change was applied over."""

    state: State
    name: HostsState | None
    sequence: int
    after: int


class KnownStates:
    """The kept states of a model; each file is read once. Any thread may call."""

    def __init__(self, model: Model) -> None:
        self._model, self._lock = model, threading.Lock()
        self._known: dict[tuple[State, int, int], KnownState] = {}

    def look(self) -> list[KnownState]:
        """Returns all that are kept, the newest versions first, of each the newest states."""
        with self._lock:
            before, self._known = self._known, {}
            segment = None
            for at in self._files():
                if (known := before.get(at)) is None:
                    try:
                        segment = attach_state(self._model, at[0], "header", segment)
                    except (LoaderError, OSError):  # it went, or is damaged
                        continue
                    after = 0 if segment.change is None else segment.change.after
                    known = KnownState(at[0], segment.hosts_state(), segment.sequence, after)
                self._known[at] = known
            return list(self._known.values())

    def _files(self) -> Iterator[tuple[State, int, int]]:
        """Yields states with what tells their file from another one of its name."""
        for version in reversed(self._model.versions()):
            try:
                states = kept_states(self._model, version)
            except OSError:
                continue
            for state in reversed(states):
                name = delta_name(*state) if state.sequence else f"{version}.segment"
                try:
                    found = os.stat(self._model.folder / name)
                except OSError:
                    continue
                yield state, found.st_ino, found.st_mtime_ns


def line_of(known: Sequence[KnownState], wanted: State) -> list[KnownState]:
    """Returns a state and those before it that it follows from, as far as they are kept, the newest first."""
    now = next((one for one in known if one.state == wanted), None)
    found = []
    while now is not None:
        found.append(now)
        before = now
        now = next((one for one in known if _follows(before, one)), None)
    return found


def _follows(after: KnownState, one: KnownState) -> bool:
    """Whether a state was made by a change over another one."""
    if after.name is None or one.name is None or after.after >= after.sequence:
        return False
    return one.sequence == after.after and one.name.content == after.name.content


def candidates(
    known: Sequence[KnownState], wanted: State, served: State | None, sequence: int = 0
) -> list[KnownState]:
    """Returns the states that may be served in place of `wanted`, the newest first: those from which it
    follows, down to the served one, or to the one from which both follow. served: None: any will do;
    sequence: as of `KnownState`."""
    line = line_of(known, wanted)
    if served is None:
        return line
    before = {one.state for one in line_of(known, served)}
    found = list[KnownState]()
    for one in line:
        is_past = not before and one.sequence < sequence < line[0].sequence  # the served one's file is gone
        if one.state == served or is_past:
            break
        found.append(one)
        if one.sequence == sequence or one.state in before:
            break
    return found
