"""Marks of damaged versions: nobody attaches one that is marked, and servers take the last good one."""

import logging
from typing import NamedTuple
from weakref import WeakSet

from tableside.loader.segment.segment import Segment
from tableside.serving.errors import ErrorKind
from tableside.serving.metrics.metrics import ERRORS
from tableside.serving.model.engine import Engine

logger = logging.getLogger("tableside")


class Damage(NamedTuple):
    """What is wrong with a version, for people, and the name of the damaged file; "": of no one file."""

    text: str
    file: str = ""


def mark_damaged(engine: Engine, version: int, damage: Damage) -> None:
    """OSError, LoaderError: it cannot be marked now."""
    engine.model.mark_damaged(version, damage.file)
    ERRORS.labels(engine.model.name, ErrorKind.DAMAGED.value).inc()
    logger.critical(
        "version %d of %s is damaged and is served no more: %s", version, engine.model.name, damage.text
    )


class ReadDamage:
    """Marks versions of which this process's requests found damaged rows on a disk."""

    def __init__(self) -> None:
        self._marked: WeakSet[Segment] = WeakSet()

    def mark(self, engine: Engine) -> None:
        """As `mark_damaged`, of the versions that an engine holds, each once."""
        for version in (held.segment.base for held in engine.held()):
            files = {file.table: file.path.name for file in version.files}
            for table, reader in version.readers.items():
                if reader.damage and version not in self._marked:
                    mark_damaged(engine, version.header.version, Damage(reader.damage, files[table]))
                    self._marked.add(version)
