"""The supervisor: starts workers, replaces those that end, and does what signals ask for.

    SIGTERM, SIGINT     workers answer what they have begun, and end; whatever else was asked for is left
    SIGQUIT             workers are killed, now
    SIGHUP              every worker is replaced, one after another, each when its successor is ready
    SIGTTIN, SIGTTOU    one worker more, one less
    SIGUSR1, SIGUSR2    nothing

One loop looks at all workers at least four times a second, and at once when one ends. Nothing in it waits for
a worker. So a worker that ended gets a successor at once, whatever the others do and whatever else is under
way.
"""

import logging
import multiprocessing.connection
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

from uvicorn.config import STARTUP_FAILURE

from tableside.serving.metrics.counters import RESTARTS
from tableside.serving.workers.engine_keeper import EngineKeeper
from tableside.serving.workers.following import Following
from tableside.serving.workers.worker import WorkerConfig, WorkerProcess

logger = logging.getLogger("tableside")

RETRY_S = 5.0  # before a worker that could not start is tried again
_AGAIN_S = 0.5  # before one that ended before it was ready is tried again
_GRACE_S = 5.0  # beyond the time that a worker takes to end
_LOOK_S, _EAGER_S = 0.25, 0.02
_KILLED_BY_QUIT = 128 + signal.SIGQUIT


class Supervisor:
    """The workers of one configuration, over `sockets`. announce: called once, when all workers are ready.

    following: has workers serve the models of the root, where they follow those.
    """

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

    def _wait(self) -> None:
        """Waits until a worker ends or it is time to look again."""
        is_eager = not self._announced or self._successor is not None
        processes = (*self._everyone(), *(engine.current for engine in self._engines.values()))
        sentinels = [p.process.sentinel for p in processes if p.process.is_alive()]
        multiprocessing.connection.wait(sentinels, _EAGER_S if is_eager else _LOOK_S)

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
        """Starts another worker for one that ended or no longer answers.

        A worker that cannot start ends the server only where none has ever served, or none is left.
        """
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
        """A worker ended before it served: its successor is started later, or the server ends where no
        worker can start."""
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
        """One step of what SIGHUP asked for: a successor is started, is waited for, or takes its place."""
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
        """The device that has the fewest workers; "" where there are none."""
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
        """Ends all workers; returns the exit code.

        Workers answer what they have begun, unless SIGQUIT comes. One that takes too long for that is killed.
        """
        if self._successor is not None:
            self._successor[1].kill()  # it has answered nothing yet
        everyone = self._everyone()
        for worker in everyone:
            if worker.is_ready:
                worker.terminate()
            elif worker.process.is_alive():
                worker.kill()  # it has answered nothing yet, and may wait for an engine that does not come
        self._await_end(everyone)
        engines = [
            engine.current for engine in self._engines.values()
        ]  # workers answer by them until they have ended
        for engine in engines:
            engine.terminate()
        self._await_end(engines)
        for keeper in self._engines.values():
            keeper.close()
        if self._is_at_once:
            return _KILLED_BY_QUIT
        return 1 if self.failed else 0

    def _await_end(self, processes: list[WorkerProcess]) -> None:
        """Waits until processes that were asked to end have ended; kills those that take too long."""
        deadline = (
            time.monotonic()
            + self.config.settings.drain_s
            + self.config.settings.shutdown_timeout_s
            + _GRACE_S
        )
        while alive := [p for p in processes if p.process.is_alive()]:
            if self._is_at_once or time.monotonic() > deadline:
                for process in alive:
                    process.kill()
            multiprocessing.connection.wait([p.process.sentinel for p in alive], _LOOK_S)
