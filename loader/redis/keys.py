"""What this host has in Redis, and its end. A load writes a note of a table's keys into the model's folder
before it writes the first of them:

    ROOT/MODEL/0f3c5a9e1b7d2468.redis      keys of the table with this seed: JSON of `RedisPlace`, and blocks

A note whose seed no published version names is that of a load that failed, or of a version that is gone: its
keys are removed, then the note. Who reads rows holds a lock (flock) on the note meanwhile.
"""

import contextlib
import fcntl
import json
import logging
import os
import re
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from tableside.loader.errors import RedisError
from tableside.loader.segment.remote import RedisPlace
from tableside.loader.versions.folder import Folder
from tableside.quant import QuantError

logger = logging.getLogger("tableside")

_NOTE = re.compile(r"([0-9a-f]{16})\.redis")
_NOTE_BYTES = 1 << 20


def note_name(seed: int) -> str:
    return f"{seed:016x}.redis"


def write_note(folder: Folder, place: RedisPlace, rows: int) -> None:
    """Notes the keys of a table that is about to be written. rows: of the table."""
    with folder.replacing(note_name(place.seed)) as name, os.fdopen(folder.create(name), "w") as file:
        json.dump({**asdict(place), "blocks": -(-rows // place.block_rows)}, file)


def hold_note(folder: Path, seed: int) -> int:
    """Has the keys of a seed stay until the descriptor that it returns is closed; -1: they are not kept here.
    folder: of a copy of a version, which has no notes, or of a version that is being removed."""
    try:
        fd = os.open(folder / note_name(seed), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return -1
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def notes_in(folder: Folder) -> list[str]:
    """Returns the names of notes."""
    return [name for name in folder.names() if _NOTE.fullmatch(name)]


def clear_keys(folder: Folder, used: Collection[int]) -> list[str]:
    """Removes the keys of all notes but those of the seeds that are `used`, or whose rows are read; then the
    notes, whose names it returns. Those of a Redis that is not reached stay for the next time."""
    removed, away = list[str](), set[tuple[str, ...]]()
    for name in notes_in(folder):
        if int(name.partition(".")[0], 16) in used:
            continue
        with os.fdopen(folder.open(name), "rb") as file, contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            note = json.loads(file.read(_NOTE_BYTES))
            blocks, addresses = note.pop("blocks"), tuple(note.pop("addresses"))
            if addresses in away:
                continue
            try:
                _remove(RedisPlace(addresses, **note), blocks)
            except (RedisError, QuantError) as error:
                logger.warning("keys of %s stay in Redis until the next load or gc: %s", folder.path, error)
                away.add(addresses)
                continue
            folder.unlink(name)
            removed.append(name)
    return removed


def _remove(place: RedisPlace, blocks: int) -> None:
    from tableside.loader.redis.writer import remove_keys  # which needs the client

    remove_keys(place, blocks)
