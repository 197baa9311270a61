"""The record of a model: its live version. A rename replaces it, so that readers see the old or the new one.

    current        {"current": 3, "latest": 4, "lived": [2, 3], "sequence": 17, "latest_sequence": 17}
    current.new    a page reserved for the next record, so that a flip works on a full file system;
                   after a kill between rename and flip, the next record

latest, latest_sequence: the highest version and delta numbers ever given. lived: the published versions that
were live once, including the current; absent in old records (all versions). sequence: the live delta.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from tableside.loader.errors import VersionError
from tableside.loader.segment.huge_pages import take_room, write_whole
from tableside.loader.versions.folder import Folder

CURRENT, NEXT = "current", "current.new"
_ROOM_BYTES = 4096


@dataclass(frozen=True)
class VersionRecord:
    """current, sequence: live version and delta; 0: none. latest, latest_sequence: highest ever given. lived:
    see above."""

    current: int = 0
    latest: int = 0
    lived: tuple[int, ...] | None = None
    sequence: int = 0
    latest_sequence: int = 0


def read_record(folder: Folder, model: str) -> VersionRecord:
    """Reads the record; VersionRecord() if never published. VersionError: it is damaged."""
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
    """Returns the record that a killed process was about to publish, or None."""
    try:
        return _parse(folder.read(NEXT))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # room without a record


def write_next(folder: Folder, record: VersionRecord) -> None:
    """Writes the next record beside the current one; needs the record lock. OSError: no space."""
    fd = _room(folder)
    try:
        raw = {k: v for k, v in asdict(record).items() if v is not None and (v or "sequence" not in k)}
        write_whole(fd, json.dumps(raw).encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def flip(folder: Folder) -> None:
    """Publishes the record of `write_next`, and reserves space for the one after it."""
    os.fsync(folder.fd)  # on a disk what the record names is there before it; in memory this is nothing
    folder.rename(NEXT, CURRENT)
    os.fsync(folder.fd)
    reserve_room(folder)


def reserve_room(folder: Folder) -> None:
    """Reserves space for the next record, if there is some."""
    with contextlib.suppress(OSError):
        os.close(_room(folder))


def _room(folder: Folder) -> int:
    """Opens the next record's file, with a page allocated."""
    try:
        return folder.open(NEXT, os.O_RDWR)
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


@contextlib.contextmanager
def unless_full() -> Iterator[None]:
    """Suppresses ENOSPC."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
