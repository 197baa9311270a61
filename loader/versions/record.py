"""The record of a model: which of its versions is live. Replaced as a whole by a rename, so that a reader
sees one or the other.

    current        {"current": 3, "latest": 4, "lived": [2, 3], "sequence": 17, "latest_sequence": 17}
    current.new    room for the next one: a page that was taken while there was some, so that the flip works on a full file
                   system; after a kill between a rename and the flip, the record that was about to be

latest: the highest number that was ever given. lived: the published versions that were live once, the current
one among them; absent in records of older releases, which take every published version for one. sequence: of
the delta that is live over the current version (loader.segment.delta), and the highest that was ever given;
absent where there was none.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass

from tableside.loader.errors import VersionError
from tableside.loader.segment.huge_pages import take_room, write_whole
from tableside.loader.versions.folder import Folder

CURRENT, NEXT = "current", "current.new"
_ROOM_BYTES = 4096


@dataclass(frozen=True)
class VersionRecord:
    """Which version is live (0: none), the highest number ever given, and the versions that were live (None:
    not known). sequence: of the live delta; 0: none. latest_sequence: the highest ever given."""

    current: int = 0
    latest: int = 0
    lived: tuple[int, ...] | None = None
    sequence: int = 0
    latest_sequence: int = 0


def read_record(folder: Folder, model: str) -> VersionRecord:
    """The record; Record() of a model that was never published. VersionError: it is damaged."""
    try:
        return _parse(folder.read(CURRENT))
    except FileNotFoundError:
        return VersionRecord()
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise VersionError(
            f"{folder.path / CURRENT} is unreadable ({error!r}); write it anew with: tableside activate "
            f"{model} VERSION"
        ) from error


def intended(folder: Folder) -> VersionRecord | None:
    """The record that a killed process was about to make current, or None."""
    try:
        return _parse(folder.read(NEXT))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # room without a record


def write_next(folder: Folder, record: VersionRecord) -> None:
    """Writes the next record beside the current one. Caller holds the record lock. OSError: there is no
    room for it."""
    fd = _room(folder)
    try:
        raw = {k: v for k, v in asdict(record).items() if v is not None and (v or "sequence" not in k)}
        write_whole(fd, json.dumps(raw).encode())
    finally:
        os.close(fd)


def flip(folder: Folder) -> None:
    """Makes the record that `write_next` wrote the current one, and takes room for the one after it."""
    folder.rename(NEXT, CURRENT)
    reserve_room(folder)


def reserve_room(folder: Folder) -> None:
    """Takes room for the next record where there is some. Without it the next record is still written if
    there is room then."""
    with contextlib.suppress(OSError):
        os.close(_room(folder))


def _room(folder: Folder) -> int:
    """A descriptor of the next record's file, with a page of memory behind it."""
    try:
        return folder.open_for_writing(NEXT)
    except FileNotFoundError:
        fd = folder.create(NEXT)
    try:
        take_room(fd, _ROOM_BYTES)
    except OSError:
        folder.unlink(NEXT)
        os.close(fd)
        raise
    return fd


def _parse(text: bytes) -> VersionRecord:
    raw = json.loads(text.rstrip(b"\0"))  # zeros: on a hugetlbfs
    if not isinstance(raw, dict):
        raise ValueError(f"a JSON {type(raw).__name__}")
    lived = raw.get("lived")
    sequences = raw.get("sequence", 0), raw.get("latest_sequence", 0)
    numbers = [raw["current"], raw["latest"], *(lived or ()), *sequences]
    if not all(type(n) is int and 0 <= n < 2**53 for n in numbers):
        raise ValueError(f"versions {numbers}")
    return VersionRecord(raw["current"], raw["latest"], None if lived is None else tuple(lived), *sequences)
