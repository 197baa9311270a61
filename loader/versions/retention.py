"""Retention of states: the ones that can be gone back to, and their deltas.

The newest states stay, by number or age, over all published versions, and the newest state of each version.
"""

import contextlib
import os
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tableside.loader.errors import SegmentError, VersionError
from tableside.loader.segment.delta import delta_name, parse_delta_name
from tableside.loader.versions.folder import Folder
from tableside.loader.versions.record import VersionRecord
from tableside.loader.versions.states import (
    APPLY_LOCK,
    State,
    clear_unpublished,
    is_held,
    open_delta,
    state_of,
)
from tableside.loader.versions.versions import Model


class Retention(NamedTuple):
    """The states kept beside the live one: the `states` newest and those live in the last `age_s` seconds."""

    states: int = 8
    age_s: float = 0.0


DEFAULT, ALL = Retention(), Retention(1 << 62)


def forget_states(model: Model, folder: Folder, record: VersionRecord, keep: Retention) -> list[Path]:
    """Removes deltas that no kept state needs; mappings stay valid. Needs the record lock."""
    named = (parse_delta_name(name) for name in folder.names())
    there = [State(*found) for found in named if found is not None]
    there.sort(key=lambda state: (state.sequence, state.version))
    newest = {state.version: state for state in there}
    live = state_of(record)
    others = [state for state in there if state != live]
    recent = others[max(0, len(others) - keep.states) :]
    wanted = {live, *newest.values(), *recent, *_recent(folder, there, keep.age_s)}
    removed = []
    for state in sorted(set(there) - _needed(model, folder, wanted & set(there))):
        if is_held(folder, delta_name(*state)):  # other hosts ask for its rows
            continue
        folder.unlink(delta_name(*state))
        removed.append(folder.path / delta_name(*state))
    return removed


def collect_states(model: Model, keep: Retention) -> list[Path]:
    """Removes leftovers of killed applies and unneeded deltas, unless an apply runs or nothing was
    published."""
    with contextlib.ExitStack() as held:
        try:
            folder = held.enter_context(model.opened())
            held.enter_context(folder.lock(APPLY_LOCK, 0))
        except (FileNotFoundError, VersionError):
            return []
        held.enter_context(folder.lock("record.lock"))
        record = model.record()
        return clear_unpublished(folder, record) + forget_states(model, folder, record, keep)


def _recent(folder: Folder, there: list[State], age_s: float) -> list[State]:
    """Returns the states live in the last `age_s` seconds; the oldest was published before that."""
    if not age_s:
        return []
    since = time.time() - age_s
    first = next((n for n, state in enumerate(there) if _file(folder, state).st_mtime >= since), len(there))
    return there[max(0, first - 1) :]


def _needed(model: Model, folder: Folder, states: Iterable[State]) -> set[State]:
    """Returns these states and those below their deltas."""
    needed = set(states)
    for state in list(needed):
        # A damaged one is kept for who looks into it
        with contextlib.suppress(SegmentError, FileNotFoundError):
            if below := _below(model, state, _file(folder, state).st_mtime_ns):
                needed.add(State(state.version, below))
    return needed


@lru_cache(1 << 14)
def _below(model: Model, state: State, written_ns: int) -> int:
    """Returns the sequence of the delta below a state's delta (0: the version), read once."""
    return open_delta(model, state, "header").change.below


def _file(folder: Folder, state: State) -> os.stat_result:
    return os.stat(delta_name(*state), dir_fd=folder.fd, follow_symlinks=False)
