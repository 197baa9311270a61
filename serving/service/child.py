"""Work of a server from time to time, in a process of its own, which takes no core that requests need."""

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from tableside.loader.errors import LoaderError
from tableside.serving.errors import ServingError
from tableside.serving.model.engine import Engine

logger = logging.getLogger("tableside")


async def look_after(
    engines: Collection[Engine], every_s: float, look: Callable[[Engine], Awaitable[None]], trouble: str
) -> None:
    """Calls `look` for each engine, every `every_s` seconds, until it is cancelled. trouble: is logged with
    the model and the error."""
    while True:
        await asyncio.sleep(every_s)
        for engine in list(engines):  # models come and go meanwhile
            try:
                await look(engine)
            except (LoaderError, ServingError, OSError) as error:
                logger.warning(trouble, engine.model.name, error)


class Child:
    """One such process at a time. Belongs to one event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, module: str, *arguments: object) -> Any:
        """Runs a module of this package, and returns the JSON that it prints. ServingError: it failed."""
        command = [sys.executable, "-m", f"tableside.{module}", *map(str, arguments)]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
        said, _ = await self._process.communicate()
        try:
            return json.loads(said)
        except ValueError as error:
            raise ServingError(
                f"the process of {module} {' '.join(map(str, arguments[1:3]))} ended with "
                f"{self._process.returncode}"
            ) from error

    def stop(self) -> None:
        """Ends the process, if one runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def give_way() -> None:
    """Lets this process run where a core is idle."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
