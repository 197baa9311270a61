"""Makes hot segments anew while a server runs (`loader.hot`).

    python -m tableside.serving.service.warm ROOT MODEL VERSION OWNER BYTES
    prints {"warmed": [share, share before, rows, bytes]}, or null where another process does it

One worker at a time looks, every `host_cache_s` seconds, for all servers of this user. Workers take a new
hot segment as they take a new state.
"""

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path

from tableside.loader.errors import LoaderError, VersionError
from tableside.loader.hot.hot import hot_folder
from tableside.loader.hot.warm import Warmed, warm
from tableside.loader.versions.versions import Model
from tableside.quant import QuantError
from tableside.serving.model.engine import Engine
from tableside.serving.service.child import Child, give_way, look_after

logger = logging.getLogger("tableside")

_LOCK = "warming.lock"


class Warmer:
    """Keeps the hot segments of engines up to date, of `budget` bytes each; 0: there are none. Belongs to one
    event loop."""

    def __init__(self, engines: Collection[Engine], budget: int, every_s: float) -> None:
        self._engines, self._budget, self._every_s = engines, budget, every_s
        self._child = Child()

    async def run(self) -> None:
        """Looks until it is cancelled."""
        if self._budget:
            await look_after(
                self._engines, self._every_s, self._warm, "the hot rows of %s stay as they are: %s"
            )

    def stop(self) -> None:
        self._child.stop()

    async def _warm(self, engine: Engine) -> None:
        if not engine.attached().placed.is_counted:
            return
        model, version = engine.model, engine.attached().version
        with (
            hot_folder(model.root, model.name) as folder,
            contextlib.suppress(VersionError),
            folder.lock(_LOCK, 0),
        ):
            looked = os.stat(_LOCK, dir_fd=folder.fd)
            if looked.st_size and time.time() - looked.st_mtime < self._every_s / 2:  # another worker
                return
            arguments = model.root, model.name, version, model.owner or "", self._budget
            try:
                said = (await self._child.run("serving.service.warm", *arguments))["warmed"]
            finally:  # also where it failed, so that not each worker tries
                fd = folder.open(_LOCK, os.O_RDWR)
                os.pwrite(fd, b"1", 0)
                os.close(fd)
            found = None if said is None else Warmed(*said)
            if found is not None and found.rows:
                told = (
                    found.rows,
                    model.name,
                    version,
                    found.bytes / 1e6,
                    100 * found.share,
                    100 * found.before,
                )
                logger.info(
                    "%d rows of %s version %d are in memory, %.1f MB: they have %.1f %% of the ids that were "
                    "counted, those before them %.1f %%",
                    *told,
                )


def main(arguments: list[str]) -> int:
    """Makes the hot segment of one version."""
    root, name, version, owner, budget = arguments
    give_way()
    warmed: Warmed | None = None
    try:
        warmed = warm(Model(Path(root), name, owner or None), int(version), int(budget))
    except VersionError:
        pass  # it is gone, or somebody else makes one
    except (LoaderError, QuantError, OSError) as error:
        print(f"no hot rows of {name} version {version}: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"warmed": warmed}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
