"""A worker: uvicorn's server, its configuration, and its process as the supervisor sees it."""

import asyncio
import functools
import multiprocessing
import multiprocessing.connection
import pickle
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import uvicorn

from tableside.serving.logs import log_config
from tableside.serving.service.model_list import ModelList
from tableside.serving.settings import ServerSettings
from tableside.serving.shm.regions import RegionRegistry
from tableside.serving.supervised import answer, take_signals

ACCEPTS = 64  # connections that a worker takes in one round of its loop
PING_S = 1.0  # between two questions whether a worker that serves still answers


class Worker(uvicorn.Server):
    """A worker's server. To end, it turns readiness off, answers for `drain_s` seconds, then closes."""

    def __init__(self, config: "WorkerConfig") -> None:
        super().__init__(config)
        self._drain_s = config.settings.drain_s
        self.is_ending = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        is_second, self.is_ending = self.is_ending, True
        if is_second or not self.started:
            super().handle_exit(sig, frame)
            return
        app, loop, close = self.config.loaded_app, asyncio.get_running_loop(), super().handle_exit
        app.service.drain()

        def finish() -> None:
            app.end()
            close(sig, frame)

        loop.call_soon_threadsafe(loop.call_later, self._drain_s, finish)


MakeApplication = Callable[[ServerSettings], Any]


def make_application(settings: ServerSettings) -> Any:
    """Imports and makes the ASGI application, in the worker."""
    from tableside.serving.http.app import Application

    return Application(settings)


class WorkerConfig(uvicorn.Config):
    """uvicorn's configuration, sent to the worker's process, which makes application and protocol class."""

    def __init__(
        self,
        settings: ServerSettings,
        make: MakeApplication,
        registry: RegionRegistry | None = None,
        models: ModelList | None = None,
    ) -> None:
        """registry: of clients' shared memory, or None. models: to serve; None: the settings'."""
        self.settings, self._make, self.registry = settings, make, registry
        self.models = models or ModelList.of(settings.models)
        super().__init__(
            functools.partial(make, settings),
            factory=True,
            workers=settings.workers,
            loop="uvloop",
            lifespan="on",
            ws="none",
            access_log=False,
            date_header=False,
            server_header=False,
            proxy_headers=False,
            log_config=log_config(settings.log_format),
            timeout_keep_alive=settings.idle_timeout_s,
            timeout_graceful_shutdown=settings.shutdown_timeout_s,
            backlog=2048,
        )

    def on(self, device: str, engine: str) -> "WorkerConfig":
        """Returns this configuration for a device's engine process at the address `engine`."""
        changed = {"devices": (device,), "engine": engine, "engines": len(self.settings.devices)}
        settings = self.settings.model_copy(update=changed)
        return WorkerConfig(settings, self._make, self.registry, self.models)

    def load(self) -> None:
        super().load()
        from tableside.serving.http.connection.connection import limited_protocol

        app = self.loaded_app
        app.service.share(self.models, self.registry)
        self.http_protocol_class = limited_protocol(
            self.settings, app.in_flight, app.slots, app.slices, app.door
        )


Run = Callable[[WorkerConfig, list[socket.socket], Connection], None]


class WorkerProcess:
    """A worker's or an engine's process, with a pipe for questions. `look` never waits. is_ready: it takes
    requests."""

    def __init__(
        self, config: WorkerConfig, sockets: list[socket.socket], device: str = "", run: Run | None = None
    ) -> None:
        """run: the process's function; None: a worker."""
        self.config, self.device, self.is_ready = config, device, False
        self._pipe, self._theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(
            target=run or _run, args=(config, sockets, self._theirs), name="tableside-worker"
        )
        self._asked_at: float | None = None
        self._answered_at = 0.0

    def start(self) -> None:
        """Starts the process. Closes this end's copy of its pipe, so that its death closes the pipe."""
        self.process.start()
        self._theirs.close()
        self._answered_at = time.monotonic()

    def look(self) -> bool:
        """Whether the worker lives and answers in time. Asks again from time to time."""
        if not self.process.is_alive():
            return False
        now = time.monotonic()
        try:
            while self._pipe.poll():
                self.is_ready = self._pipe.recv()
                self._asked_at, self._answered_at = None, now
            if self._asked_at is None and (not self.is_ready or now - self._answered_at >= PING_S):
                self._pipe.send(b"ping")
                self._asked_at = now
        except (
            OSError,
            EOFError,
            pickle.UnpicklingError,
        ):  # it is about to end, or sends nonsense: the deadline is for that
            pass
        return self._asked_at is None or now - self._asked_at < self.config.timeout_worker_healthcheck

    def terminate(self) -> None:
        """Asks the worker to end after its requests. Keeps the pipe: closing it would ask again."""
        if self.process.is_alive():
            self.process.terminate()

    def kill(self) -> None:
        """Ends the process at once, and waits until it has ended."""
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _run(config: WorkerConfig, sockets: list[socket.socket], pipe: Connection) -> None:
    take_signals()
    config.configure_logging()
    server = Worker(config)
    answer(server, pipe)
    # Whether it blocks is a property of the socket that all workers share. One that made it block, as `dup`
    # of a socket that is not known to be non-blocking does, would stop the others in the midst of accepting.
    for sock in sockets:
        sock.setblocking(False)
    # uvloop takes one connection from a socket in each round of its loop; several descriptors of it let it
    # take as many.
    server.run([sock.dup() for sock in sockets for _ in range(ACCEPTS)])
