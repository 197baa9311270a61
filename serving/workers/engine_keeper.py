"""The supervisor's side of an engine process: it is started, looked at, and replaced.

Its address stays. So its doors connect to the next one at once, and wait until it serves.
"""

import logging
import time

from uvicorn.config import STARTUP_FAILURE

from tableside.serving.engine_process.main import run_engine
from tableside.serving.engine_process.messages import address_of, listen
from tableside.serving.workers.worker import WorkerConfig, WorkerProcess

logger = logging.getLogger("tableside")

RETRY_S = 5.0  # before an engine that could not start is tried again
_AGAIN_S = 0.5  # before one that ended before it served is tried again


class EngineKeeper:
    """The engine process of one device. address: where its doors connect."""

    def __init__(self, config: WorkerConfig, device: str) -> None:
        self._listening = listen()
        self.address, self._device = address_of(self._listening), device
        self._config = config.on(device, self.address)
        self._retry_at = 0.0
        self._made = self._make()

    @property
    def current(self) -> WorkerProcess:
        """The process that serves, or that ended last."""
        return self._made

    def start(self) -> None:
        self._made.start()

    def look(self, has_served: bool) -> bool:
        """Replaces an engine that ended or no longer answers. False: it cannot start, and never did.

        has_served: whether the server ever took requests.
        """
        if self._made.look() or time.monotonic() < self._retry_at:
            return True
        is_due, self._retry_at = self._retry_at > 0, 0.0
        if not is_due:
            self._made.kill()
            if not self._made.is_ready:
                return self._put_off(has_served)
        logger.error(
            "the engine process %s of device %s ended; it is replaced", self._made.process.pid, self._device
        )
        self._made = self._make()
        self._made.start()
        return True

    def close(self) -> None:
        """Gives up the address. The process has ended, or was not started."""
        self._listening.close()

    def _put_off(self, has_served: bool) -> bool:
        could_not_start = self._made.process.exitcode == STARTUP_FAILURE
        if could_not_start and not has_served:
            return False
        if could_not_start:
            logger.error(
                "the engine of device %s could not start (see above); it is tried again in %d s",
                self._device,
                RETRY_S,
            )
        self._retry_at = time.monotonic() + (RETRY_S if could_not_start else _AGAIN_S)
        return True

    def _make(self) -> WorkerProcess:
        return WorkerProcess(self._config, [self._listening], self._device, run_engine)
