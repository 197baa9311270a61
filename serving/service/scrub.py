"""The scrubber reads rows of the served versions against their checksums, from time to time.

    python -m tableside.serving.service.scrub ROOT MODEL VERSION OWNER
    prints {"damage": null}, or the damage as {"damage": [text, file]}

One worker at a time scrubs a model, in a process with SCHED_IDLE that rests nine tenths of its time. It holds
`scrub.lock`, which records the last version and time, for all servers of this user. A damaged version is
marked (`Model.mark_damaged`): nobody attaches it, and servers take the last good one. So is one of which a
request found rows on a disk that are not what was written, read twice.
"""

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path

from tableside.loader.errors import DamagedRows, LoaderError, SegmentError, VersionError
from tableside.loader.hot.hot import drop_damaged
from tableside.loader.versions.versions import Model
from tableside.serving.damage import Damage, ReadDamage, mark_damaged
from tableside.serving.metrics.metrics import SCRUBS
from tableside.serving.model.engine import Engine
from tableside.serving.service.child import Child, give_way, look_after

logger = logging.getLogger("tableside")

LOCK = "scrub.lock"
_REST = 9  # seconds of rest for each second of reading
_LOOKS = 20  # times that the scrubber looks whether a scrub is due, between two scrubs
_LONGEST_LOOK_S = 5.0


class Scrubber:
    """Scrubs the engines' versions every `every_s` seconds; 0: never, and marks what requests find. Belongs
    to one event loop."""

    def __init__(self, engines: Collection[Engine], every_s: float) -> None:
        self._engines, self._every_s = engines, every_s
        self._checked_at: dict[
            tuple[str, int], float
        ] = {}  # (model, version) -> time.time() of its last whole reading here
        self._read_damage = ReadDamage()
        self._child = Child()

    async def run(self) -> None:
        """Scrubs until it is cancelled."""
        every_s = min(_LONGEST_LOOK_S, (self._every_s or math.inf) / _LOOKS)
        await look_after(self._engines, every_s, self._look, "%s is not scrubbed: %s")

    def stop(self) -> None:
        self._child.stop()

    async def _look(self, engine: Engine) -> None:
        self._read_damage.mark(engine)
        await self._scrub_if_due(engine)

    def _is_due(self, engine: Engine, done_at: float) -> bool:
        served = engine.attached()
        checked_at = self._checked_at.setdefault((engine.model.name, served.version), served.verified_at)
        return self._every_s > 0 and time.time() - max(done_at, checked_at) >= self._every_s

    async def _scrub_if_due(self, engine: Engine) -> None:
        if not self._is_due(engine, 0.0):
            return
        with engine.model.opened() as folder, contextlib.suppress(VersionError), folder.lock(LOCK, 0):
            fd = folder.open(LOCK, os.O_RDWR)
            try:
                version = engine.attached().version
                if self._is_due(engine, _done_at(fd, version)):
                    await self._scrub(engine, version)
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{version} {time.time():.0f}".encode(), 0)
                self._checked_at[engine.model.name, version] = time.time()
            finally:
                os.close(fd)

    async def _scrub(self, engine: Engine, version: int) -> None:
        damage = await self._read(engine.model, version)
        if damage is None:
            SCRUBS.labels(engine.model.name, "whole").inc()
            return
        SCRUBS.labels(engine.model.name, "damaged").inc()
        mark_damaged(engine, version, damage)

    async def _read(self, model: Model, version: int) -> Damage | None:
        """Returns the damage of a version's rows, or None. ServingError: the reading process failed."""
        arguments = model.root, model.name, version, model.owner or ""
        found = (await self._child.run("serving.service.scrub", *arguments))["damage"]
        return None if found is None else Damage(*found)


def _done_at(fd: int, version: int) -> float:
    """When a version was read last, of time.time(), by the lock's file; 0: never."""
    try:
        number, at = os.pread(fd, 64, 0).split()
        return float(at) if int(number) == version else 0.0
    except ValueError:
        return 0.0


def damage_of(model: Model, version: int) -> Damage | None:
    """Reads every row of a version, with rests; returns the first damage, or None."""
    try:
        for segment in model.attach_all(version, "header"):
            segment.verify(rest=_REST)
    except DamagedRows as error:
        return Damage(str(error), error.file)
    except SegmentError as error:
        return Damage(str(error))
    return None


def main(arguments: list[str]) -> int:
    """Reads one version and prints its damage."""
    root, name, version, owner = arguments
    give_way()
    try:
        model = Model(Path(root), name, owner or None)
        damage = damage_of(model, int(version))
        if damage is None and (
            wrong := drop_damaged(model.root, model.attach(int(version), "header"), _REST)
        ):
            print(f"the hot rows of {name} changed, and are read no more: {wrong}", file=sys.stderr)
    except VersionError:
        damage = None  # it was removed meanwhile
    except LoaderError as error:
        damage = Damage(str(error))
    print(json.dumps({"damage": damage}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
