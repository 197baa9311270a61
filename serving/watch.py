"""The watch over live versions: a process takes a new one into service while requests run."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from tableside.loader.versions.states import State
from tableside.serving.errors import UNUSABLE, ErrorKind
from tableside.serving.metrics.metrics import ERRORS, SWAPS, UPDATE_LAG, UPDATES
from tableside.serving.model.engine import Engine
from tableside.serving.model.version import ServedVersion

logger = logging.getLogger("tableside")
_HOLDERS = 2  # threads that have owners keep states


class Watch:
    """Looks at engines every `poll_s` seconds. Belongs to one event loop. engines: returns them. look: called
    each time. taken: called with an engine that changed version. is_lost: asked after a failure; True ends
    the watch."""

    def __init__(
        self,
        engines: Callable[[], Iterable[Engine]],
        poll_s: float,
        *,
        is_lost: Callable[[], bool] = lambda: False,
        look: Callable[[], object] = lambda: None,
        taken: Callable[[Engine], object] = lambda engine: None,
    ) -> None:
        self._engines, self._poll_s = engines, poll_s
        self._is_lost, self._look, self._taken = is_lost, look, taken
        self._task: asyncio.Task[None] | None = None
        # of their own: hosts that stand still take them up
        self._holders = ThreadPoolExecutor(_HOLDERS, thread_name_prefix="tableside-hold")

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(_log_end)

    async def stop(self) -> None:
        """Ends the watch, also before it began."""
        self._holders.shutdown(wait=False, cancel_futures=True)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Goes on whatever a published file holds."""
        while True:
            await asyncio.sleep(self._poll_s)
            self._look()
            for engine in list(self._engines()):
                state = None
                try:
                    engine.forget_removed()
                    if engine.shall_hold():
                        asyncio.get_running_loop().run_in_executor(self._holders, engine.hold)
                    state = engine.changed()
                    if state is not None:
                        await self._take(engine, state)
                except Exception as error:  # noqa: BLE001  # `_refuse` logs it; whatever a file holds, the watch goes on
                    self._refuse(engine, state, error)
                    if self._is_lost():
                        return

    async def _take(self, engine: Engine, state: State) -> None:
        before = engine.attached().state
        engine.swap(await asyncio.get_running_loop().run_in_executor(None, _attached, engine, state))
        self._taken(engine)
        if (state := engine.attached().state) == before:  # its hot rows are others
            return
        if (change := engine.attached().segment.change) is not None and state.sequence:
            UPDATES.labels(engine.model.name).inc()
            UPDATE_LAG.labels(engine.model.name).observe(
                max(0.0, time.time() - (change.made_at or change.applied_at))
            )
        if state.version == before.version:  # changes come all the time
            logger.debug("serving %s version %s from now on", engine.model.name, state)
            return
        SWAPS.labels(engine.model.name).inc()
        logger.info("serving %s version %s from now on", engine.model.name, state)

    def _refuse(self, engine: Engine, state: State | None, error: Exception) -> None:
        """Logs and counts that a state is not taken, once. The present one is served on."""
        if state is None:
            logger.exception("the versions of %s cannot be looked at", engine.model.name)
            return
        if engine.is_passing(state, error) or not engine.refuse(state):
            return
        is_expected = isinstance(error, UNUSABLE)
        logger.error(
            "version %s of %s is not taken: %s", state, engine.model.name, error, exc_info=not is_expected
        )
        ERRORS.labels(engine.model.name, ErrorKind.SWAP.value).inc()


def _attached(engine: Engine, state: State) -> ServedVersion:
    return engine.attach(engine.agreed(state), as_successor=True)


def _log_end(watch: asyncio.Task[None]) -> None:
    if not watch.cancelled() and (error := watch.exception()):
        logger.critical(
            "the watch over versions ended: new ones are not taken until this worker is replaced",
            exc_info=error,
        )
