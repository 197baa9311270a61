"""The supervisor starts and replaces workers and engine processes, and handles signals.

    SIGTERM, SIGINT     workers finish what they have begun, and end
    SIGQUIT             workers are killed
    SIGHUP              workers are replaced one by one, each when its successor is ready
    SIGTTIN, SIGTTOU    one worker more, one less
    SIGUSR1, SIGUSR2    nothing

One loop looks at all workers at least four times a second, when one ends, and at a signal. It waits for none.
"""

import contextlib
import logging
import multiprocessing.connection
import os
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

from uvicorn.config import STARTUP_FAILURE

from tableside.serving.engine_process.main import run_engine
from tableside.serving.engine_process.messages import address_of, listen
from tableside.serving.metrics.counters import RESTARTS
from tableside.serving.service.model_list import Following
from tableside.serving.workers.worker import WorkerConfig, WorkerProcess

logger = logging.getLogger("tableside")
RETRY_S = 5.0  # before a worker that could not start is tried again
_AGAIN_S = 0.5  # before one that ended before it was ready is tried again
_GRACE_S = 5.0  # beyond the time that a worker takes to end
_LOOK_S, _EAGER_S = 0.25, 0.02
_KILLED_BY_QUIT = 128 + signal.SIGQUIT


class EngineKeeper:
    """A device's engine process. Its address stays, so workers connect to the next one at once. address: of
    the engine."""

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
        """Replaces an engine that ended or hangs. False: it cannot start, and the server never served."""
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


class Supervisor:
    """The workers of one configuration, over `sockets`. announce: called once all are ready. following: of
    the root's models, or None."""

    def __init__(
        self,
        config: WorkerConfig,
        sockets: list[socket.socket],
        announce: Callable[[], None],
        following: Following | None = None,
    ) -> None:
        self.config, self._sockets, self._announce, self._following = config, sockets, announce, following
        self.workers: list[WorkerProcess] = []
        self.failed = False
        self._announced = self._is_ending = self._is_at_once = False
        self._asked: list[int] = []  # signals that wait to be looked at
        self._to_replace: list[WorkerProcess] = []  # by SIGHUP
        self._successor: tuple[WorkerProcess, WorkerProcess, float] | None = (
            None  # (old, new, when the new one is given up)
        )
        self._retiring: list[WorkerProcess] = []
        self._engines = {device: EngineKeeper(config, device) for device in config.settings.devices}
        self._retry_at: dict[int, float] = {}  # place -> when its worker is started anew
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # by a signal
        for sig in (
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGQUIT,
            signal.SIGHUP,
            signal.SIGTTIN,
            signal.SIGTTOU,
        ):
            signal.signal(sig, self._on_signal)
        for sig in (signal.SIGUSR1, signal.SIGUSR2):  # which others send to have a log opened again
            signal.signal(sig, signal.SIG_IGN)

    def run(self) -> int:
        """Serves until a signal; returns the exit code."""
        RESTARTS.labels()  # so that it is shown before it counts
        for engine in self._engines.values():
            engine.start()
        for _ in range(self.config.settings.workers):
            self.workers.append(self._started(self._device()))
        while not self._is_ending:
            self._wait()
            self._look()
        return self._end()

    # ---- the loop ----

    def _on_signal(self, sig: int, frame: FrameType | None) -> None:
        if sig in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            self._is_ending, self._is_at_once = True, self._is_at_once or sig == signal.SIGQUIT
        elif sig not in self._asked:  # asked for twice before it began: done once
            self._asked.append(sig)
        os.eventfd_write(self._woken, 1)

    def _wait(self) -> None:
        """Waits until a worker ends, a signal comes, or it is time to look again."""
        is_eager = not self._announced or self._successor is not None
        processes = (*self._everyone(), *(engine.current for engine in self._engines.values()))
        sentinels = [p.process.sentinel for p in processes if p.process.is_alive()]
        multiprocessing.connection.wait([*sentinels, self._woken], _EAGER_S if is_eager else _LOOK_S)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._woken)

    def _look(self) -> None:
        while self._asked and not self._is_ending:
            self._do(self._asked.pop(0))
        for engine in self._engines.values():
            if not self._is_ending and not engine.look(self._announced):
                self.failed = self._is_ending = True
        for place, worker in enumerate(self.workers):
            if not worker.look() and not self._is_ending:
                self._replace_ended(place, worker)
        self._go_on_replacing()
        self._retiring = [w for w in self._retiring if w.process.is_alive()]
        if not self._announced and self.workers and all(w.is_ready for w in self.workers):
            self._announced = True
            self._announce()
        if self._following is not None and self._announced:
            self._following.look()

    def _do(self, sig: int) -> None:
        if sig == signal.SIGHUP:
            self._to_replace = list(self.workers)
        elif sig == signal.SIGTTIN:
            self.workers.append(self._started(self._device()))
        elif len(self.workers) > 1:
            self._retire(self.workers.pop())

    # ---- workers that ended ----

    def _replace_ended(self, place: int, worker: WorkerProcess) -> None:
        """Replaces a worker that ended or hangs. One that cannot start ends the server only if none ever
        served, or none is left."""
        if time.monotonic() < self._retry_at.get(place, 0.0):
            return
        is_due = self._retry_at.pop(place, None) is not None
        worker.kill()
        if not is_due and not worker.is_ready:
            self._put_off(place, worker)
            return
        if self._successor is not None and self._successor[0] is worker:
            self.workers[place] = self._successor[1]
            self._successor = None
            return
        logger.info("worker %s ended; it is replaced", worker.process.pid)
        RESTARTS.labels().inc()
        self.workers[place] = self._started(worker.device)

    def _put_off(self, place: int, worker: WorkerProcess) -> None:
        """Starts the successor of a failed start later, or ends the server if no worker can start."""
        if worker.process.exitcode != STARTUP_FAILURE:
            self._retry_at[place] = time.monotonic() + _AGAIN_S
        elif self._announced and any(w.process.is_alive() for w in self.workers):
            logger.error(
                "a worker could not start (see above); the others serve on, it is tried again in %d s",
                RETRY_S,
            )
            self._retry_at[place] = time.monotonic() + RETRY_S
        else:
            self.failed = self._is_ending = True

    # ---- workers that are replaced while they serve ----

    def _go_on_replacing(self) -> None:
        """Takes one step of SIGHUP: starts a successor, waits for it, or swaps it in."""
        if self._successor is None:
            if not self._retiring:
                self._begin_replacing()
            return
        old, new, deadline = self._successor
        if not new.look() or time.monotonic() > deadline:
            new.kill()
            logger.error(
                "worker %s is kept: its successor %s was not ready in time", old.process.pid, new.process.pid
            )
            self._successor, self._to_replace = None, []
        elif new.is_ready:
            self.workers[self.workers.index(old)] = new
            self._successor = None
            self._retire(old)

    def _begin_replacing(self) -> None:
        while self._to_replace:
            old = self._to_replace.pop(0)
            if old in self.workers and old.process.is_alive():  # else it ended, and has been replaced
                new = self._started(old.device)
                self._successor = (old, new, time.monotonic() + self.config.settings.ready_timeout_s)
                return

    def _retire(self, worker: WorkerProcess) -> None:
        worker.terminate()
        self._retiring.append(worker)

    # ---- starting and ending ----

    def _device(self) -> str:
        """Returns the device with the fewest workers; "" without devices."""
        devices = self.config.settings.devices
        used = [w.device for w in self.workers]
        return min(devices, key=used.count) if devices else ""

    def _started(self, device: str) -> WorkerProcess:
        config = self.config.on(device, self._engines[device].address) if device else self.config
        worker = WorkerProcess(config, self._sockets, device)
        worker.start()
        return worker

    def _everyone(self) -> list[WorkerProcess]:
        return [*self.workers, *self._retiring, *([self._successor[1]] if self._successor else [])]

    def _end(self) -> int:
        """Ends all workers; returns the exit code. SIGQUIT or a timeout kills them."""
        if self._successor is not None:
            self._successor[1].kill()  # it has answered nothing yet
        everyone = self._everyone()
        for worker in everyone:
            if worker.is_ready:
                worker.terminate()
            elif worker.process.is_alive():
                worker.kill()  # it has answered nothing yet, and may wait for an engine that does not come
        self._await_end(everyone)
        # workers answer by them until they have ended
        engines = [engine.current for engine in self._engines.values()]
        for engine in engines:
            engine.terminate()
        self._await_end(engines)
        for keeper in self._engines.values():
            keeper.close()
        if self._is_at_once:
            return _KILLED_BY_QUIT
        return 1 if self.failed else 0

    def _await_end(self, processes: list[WorkerProcess]) -> None:
        """Waits for processes that were asked to end; kills the slow ones."""
        settings = self.config.settings
        deadline = time.monotonic() + settings.drain_s + settings.shutdown_timeout_s + _GRACE_S
        while alive := [p for p in processes if p.process.is_alive()]:
            if self._is_at_once or time.monotonic() > deadline:
                for process in alive:
                    process.kill()
            multiprocessing.connection.wait([p.process.sentinel for p in alive], _LOOK_S)
