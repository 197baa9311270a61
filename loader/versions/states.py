"""States of a model: a version and the live delta over it. A reader takes one state per request.

A state is named VERSION or VERSION+SEQUENCE. Delta numbers are never reused, so a name means one set of rows.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tableside.loader.errors import SegmentError, VersionError
from tableside.loader.files import take_lock
from tableside.loader.segment.delta import Delta, delta_name, overlaid, parse_delta_name
from tableside.loader.segment.segment import Segment, Verify
from tableside.loader.versions.folder import Folder, deltas_of, newest_delta
from tableside.loader.versions.record import VersionRecord, reserve_room
from tableside.loader.versions.verified import verify_once
from tableside.loader.versions.versions import Model

_NAMED = re.compile(r"(?P<version>[1-9][0-9]{0,17})(\+(?P<sequence>[0-9]{1,18}))?")
UNPUBLISHED = ".merged"  # suffix of an unpublished merge; its writer holds a lock on it
APPLY_LOCK, _TURN_LOCK = "apply.lock", "turn.lock"
_WAIT_S = 600.0  # for other processes that apply


class State(NamedTuple):
    """A version and the delta over it; sequence 0: there is none."""

    version: int
    sequence: int = 0

    def __str__(self) -> str:
        return f"{self.version}+{self.sequence}" if self.sequence else str(self.version)

    @property
    def number(self) -> int:
        """Returns a number unique among the model's states: the version in the lower 32 bits."""
        return self.sequence << 32 | self.version

    @classmethod
    def numbered(cls, number: int) -> "State":
        return cls(number & 0xFFFFFFFF, number >> 32)


def parse_state(text: str) -> tuple[int, int | None]:
    """Parses VERSION or VERSION+SEQUENCE (sequence None: not given). VersionError: neither."""
    if not (found := _NAMED.fullmatch(text)):
        raise VersionError(f"found {text!r}; expected VERSION or VERSION+SEQUENCE, as 3 or 3+17")
    return int(found["version"]), None if found["sequence"] is None else int(found["sequence"])


def state_of(record: VersionRecord) -> State:
    """Returns the live state; version 0: none."""
    return State(record.current, record.sequence)


def resolve(model: Model, version: int, sequence: int | None = None) -> State:
    """Returns a version with delta `sequence` (0: none; None: newest)."""
    if sequence is not None:
        return State(version, sequence)
    try:
        with model.opened() as folder:
            return State(version, newest_delta(folder, version, model.record().latest_sequence))
    except FileNotFoundError:
        return State(version)


def good_state(model: Model) -> State:
    """Returns the live state, or the last good version before it if damaged. VersionError: none is live."""
    live, good = state_of(model.record()), model.good()
    return live if live.version == good else resolve(model, good)


def check_bare(model: Model, version: int, what: str) -> None:
    """Raises VersionError if changes lie over a version, which `what` does not read."""
    if (state := resolve(model, version)).sequence:
        raise VersionError(
            f"changes up to {state} lie over version {version} of model {model.name!r}, and {what} reads "
            f"versions alone; make a version of them first, with: tableside compact {model.name}"
        )


def kept_states(model: Model, version: int) -> list[State]:
    """Returns the kept states of a version, oldest first, beginning without a delta."""
    with model.opened() as folder:
        return [State(version), *(State(version, sequence) for sequence in deltas_of(folder, version))]


def attach_state(
    model: Model, state: State | None = None, verify: Verify = "full", reuse: Segment | None = None
) -> Segment:
    """Maps a state (None: live). reuse: an attached segment; its base and deltas are shared where the state
    has them too. SegmentError: damaged. VersionError: not published, or no longer kept."""
    # The live state may be replaced and its files removed between reading its name and opening them
    for _ in range(3):
        wanted = state or State(model.current(), model.record().sequence)
        try:
            return _attach(model, wanted, verify, reuse)
        except FileNotFoundError:
            if state is not None or state_of(model.record()) == wanted:
                break
    known = ", ".join(map(str, kept_states(model, wanted.version)))
    raise VersionError(
        f"model {model.name!r} keeps no state {wanted}; of version {wanted.version} it has: {known}"
    )


def _attach(model: Model, state: State, verify: Verify, reuse: Segment | None) -> Segment:
    if reuse is not None and (reuse.header.model, reuse.header.version) != (model.name, state.version):
        reuse = None
    if reuse is not None and _is_replaced(reuse.base):
        reuse = None
    base = model.attach(state.version, verify) if reuse is None else reuse.base
    if not state.sequence:
        return base
    known = () if reuse is None else reuse.deltas
    there = {delta.sequence: delta for delta in known if not _is_replaced(delta.segment)}
    newest = there.get(state.sequence) or open_delta(model, state, verify)
    deltas, below = [newest], newest.change.below
    if below:
        deltas.append(there.get(below) or open_delta(model, State(state.version, below), verify))
        if deltas[1].change.below:
            raise SegmentError(
                f"{deltas[1].path} lies over another delta; expected one over the version; remove "
                f"{newest.path}"
            )
    return overlaid(base, deltas)


def _is_replaced(segment: Segment) -> bool:
    """Whether another file has the name of an attached one: the folder was made anew, and numbers begin
    again."""
    try:
        return not os.path.samestat(os.stat(segment.path), segment.files[0].status)
    except OSError:
        return False


def open_delta(model: Model, state: State, verify: Verify) -> Delta:
    """Opens a state's delta. FileNotFoundError: it is gone. SegmentError: it is damaged."""
    path = model.folder / delta_name(*state)
    with model.opened() as folder:
        delta = Delta(path, folder.open(path.name), "always" if verify == "always" else "header")
        if verify == "full":
            verify_once(folder, delta.segment)
    if delta.segment.header.model != model.name:
        raise SegmentError(f"{path} holds a delta of model {delta.segment.header.model!r}: remove it")
    return delta


@contextlib.contextmanager
def writing(model: Model, folder: Folder) -> Iterator[None]:
    """Holds the locks for writing deltas, in fair order; clears leftovers. VersionError after _WAIT_S."""
    with contextlib.ExitStack() as held:
        # Free while somebody writes: the one that holds it then is the next
        with folder.lock(_TURN_LOCK, _WAIT_S):
            held.enter_context(folder.lock(APPLY_LOCK, _WAIT_S))
        with folder.lock("record.lock"):
            clear_unpublished(folder, model.record())
            reserve_room(folder)
        yield


def clear_unpublished(folder: Folder, record: VersionRecord) -> list[Path]:
    """Removes unfinished deltas, abandoned merges and deltas never live. Needs both locks."""
    names = [n for n in folder.names() if n.endswith((".delta.partial", UNPUBLISHED))]
    names = [n for n in names if not n.endswith(UNPUBLISHED) or not is_held(folder, n)]
    for name in folder.names():
        version, sequence = parse_delta_name(name) or (0, 0)
        if sequence > record.latest_sequence or (sequence and not folder.exists(f"{version}.segment")):
            names.append(name)
    for name in names:
        folder.unlink(name)
    return [folder.path / name for name in names]


def is_held(folder: Folder, name: str) -> bool:
    """Returns whether a process holds a lock on a file, so that it is not to be removed."""
    try:
        fd = folder.open(name)
    except FileNotFoundError:
        return False
    try:
        return not take_lock(fd)
    finally:
        os.close(fd)
