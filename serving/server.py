"""`tableside serve`: one listening socket, workers that uvicorn supervises.

Workers are forked from a process that has imported everything and mapped nothing, so a worker adds a few MB and is ready in
a fraction of a second. Each attaches the models itself. uvicorn's supervisor, extended, replaces a worker that dies, on SIGHUP
replaces each one only when its successor is ready, and stops where workers cannot start and none is left that serves.
"""

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType
from typing import Any

import uvicorn
import uvicorn.supervisors.multiprocess as supervisor
from uvicorn._subprocess import subprocess_started
from uvicorn.config import STARTUP_FAILURE

from loader.versions import Model
from quant import MissingBackend, choose
from serving.errors import ServingError
from serving.metrics_files import metrics_folder
from serving.settings import ServerSettings

logger = logging.getLogger("tableside")
RETRY_S = 5


class Worker(uvicorn.Server):
    """A worker's server: readiness goes false, then for `drain_s` requests are still answered, then it closes."""

    def __init__(self, config: "_Config") -> None:
        super().__init__(config)
        self._drain_s = config.settings.drain_s
        self.is_ending = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        is_second, self.is_ending = self.is_ending, True
        if is_second or not self.started:
            super().handle_exit(sig, frame)
            return
        self.config.loaded_app.service.drain()
        loop, finish = asyncio.get_running_loop(), functools.partial(super().handle_exit, sig, frame)
        loop.call_soon_threadsafe(loop.call_later, self._drain_s, finish)


class WorkerProcess(supervisor.Process):
    """A worker as uvicorn's supervisor sees it: forked from the preloaded process, ended when its supervisor is gone."""

    config: "_Config"

    def __init__(self, config: "_Config", sockets: list[socket.socket], device: str = "") -> None:
        self.config, self.device = config, device
        self._server: uvicorn.Server | None = None
        self.parent_conn, self.child_conn = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        arguments = {"config": config, "target": self.target, "sockets": sockets, "stdin_fileno": None}
        self.process = context.Process(target=subprocess_started, kwargs=arguments)  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        # The worker must not hold the supervisor's end of the pipe, or it would never see that end close.
        return {**self.__dict__, "parent_conn": None, "process": None}

    @property
    def server(self) -> Worker:
        if not isinstance(self._server, Worker):
            self._server = Worker(self.config)
        return self._server

    def always_pong(self) -> None:
        try:
            super().always_pong()
        except (EOFError, OSError, pickle.UnpicklingError):
            # The pipe is closed where the supervisor asked for the end, which is then under way, or where it died.
            if not self.server.is_ending:
                os.kill(os.getpid(), signal.SIGTERM)

    def wait_until_ready(self, timeout: float, should_exit: threading.Event | None = None) -> bool:
        return super().wait_until_ready(self.config.settings.ready_timeout_s, should_exit)


def _device_of(process: supervisor.Process) -> str:
    return process.device if isinstance(process, WorkerProcess) else ""


MakeApplication = Callable[[ServerSettings], Any]


def make_application(settings: ServerSettings) -> Any:
    """The ASGI application, imported where it is built: in the worker."""
    from serving.app import Application

    return Application(settings)


class _Config(uvicorn.Config):
    """uvicorn's configuration of a worker. It travels to the worker, and makes application and protocol class there."""

    def __init__(self, settings: ServerSettings, make: MakeApplication) -> None:
        self.settings, self._make = settings, make
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
            log_config=_log_config(),
            timeout_keep_alive=settings.idle_timeout_s,
            timeout_graceful_shutdown=settings.shutdown_timeout_s,
            backlog=2048,
        )

    def on(self, device: str, sharing: int) -> "_Config":
        """This configuration for a worker on one device, which `sharing` workers share."""
        return _Config(self.settings.model_copy(update={"devices": (device,), "sharing": sharing}), self._make)

    def load(self) -> None:
        super().load()
        from serving.http import limited_protocol

        self.http_protocol_class = limited_protocol(self.settings)


def _log_config() -> dict[str, Any]:
    line = {"format": "%(asctime)s %(levelname)s [%(process)d] %(message)s"}
    handler = {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}
    loggers = {
        name: {"handlers": ["stderr"], "level": level, "propagate": False}
        for name, level in (("tableside", "INFO"), ("uvicorn", "WARNING"))
    }
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": line},
        "handlers": {"stderr": handler},
        "loggers": loggers,
    }


def bind(settings: ServerSettings) -> socket.socket:
    """The listening socket; ServingError where the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((settings.host, settings.port))
        sock.listen(2048)  # also finds an address that another server listens on
    except OSError as error:
        sock.close()
        raise ServingError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            "choose another --port or --host, or end what holds it"
        ) from error
    return sock


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        print(line, flush=True)


def serve(
    settings: ServerSettings,
    announce: Callable[[str], None] = _say,
    make: MakeApplication = make_application,
) -> int:
    """Serves until a signal ends it; returns the exit code. `make` builds the application that workers run.

    LoaderError, QuantError, ServingError: a model, the backend or the address is not usable; no worker was started.
    """
    if not settings.models:
        raise ServingError("no model is named; expected: tableside serve MODEL [MODEL ...]")
    headers = [Model(settings.root, name, settings.owner).attach(verify="header").header for name in settings.models]
    backend = choose(settings.backend)
    if settings.devices and find_spec("triton") is None:
        raise MissingBackend("--devices needs triton, which is not installed; install tableside[cuda], or serve without")
    if len(settings.devices) > settings.workers:
        raise ServingError(
            f"{len(settings.devices)} devices and {settings.workers} workers; a worker uses one device, so start at least "
            f"--workers {len(settings.devices)}"
        )
    sock = bind(settings)
    host, port = sock.getsockname()[:2]
    what = f"{', '.join(settings.models)} on http://{f'[{host}]' if ':' in host else host}:{port}"
    where = f"fused on GPU {', '.join(settings.devices)}" if settings.devices else backend.description
    how = f"{settings.workers} workers, lookups on {where}"
    try:
        with metrics_folder(settings.root):
            preload = [
                *(["quant.fused"] if settings.devices else []),
                *(["quant.fbgemm"] if backend.name == "fbgemm" else []),
                *(["serving.program"] if any(h.scorer and h.scorer.kind == "program" for h in headers) else []),
                "serving.preload",
            ]
            multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
            runner = _Supervisor(_Config(settings, make), [sock], lambda: announce(f"tableside serves {what} ({how})"))
            runner.run()
        return 1 if runner.failed else 0
    finally:
        sock.close()


class _Supervisor(supervisor.Multiprocess):
    """uvicorn's supervisor; says when every worker is ready, and whether it stopped because workers could not start."""

    config: "_Config"

    def __init__(self, config: "_Config", sockets: list[socket.socket], announce: Callable[[], None]) -> None:
        super().__init__(config, sockets)
        supervisor.Process = self._worker  # type: ignore[misc, assignment]  # what uvicorn's supervisor makes workers with
        self._replaced: supervisor.Process | None = None
        self.failed = False
        self._announce, self._announced = announce, False
        self._retry_at: dict[int, float] = {}

    def _worker(self, config: "_Config", sockets: list[socket.socket]) -> WorkerProcess:
        """A new worker: on the device of the one it replaces, else on the one that has the fewest."""
        devices = config.settings.devices
        if not devices:
            return WorkerProcess(config, sockets)
        used = [_device_of(p) for p in self.processes]
        device = _device_of(self._replaced) if self._replaced else min(devices, key=used.count)
        sharing = -(-max(config.settings.workers, self.processes_num) // len(devices))
        return WorkerProcess(config.on(device, sharing), sockets, device)

    def restart_all(self) -> None:
        """Replaces workers one after another, each on its own device, until one cannot be."""
        everyone = self.processes
        try:
            for index, process in enumerate(everyone):
                self.processes, self._replaced = [process], process
                super().restart_all()
                everyone[index] = self.processes[0]
                if everyone[index] is process:
                    break
        finally:
            self.processes, self._replaced = everyone, None

    def init_processes(self) -> None:
        super().init_processes()
        # Here, not in a thread: the pipes to the workers are one thread's.
        while not self.signal_queue and all(p.process.is_alive() for p in self.processes):
            if all(p.is_ready(timeout=1) for p in self.processes):
                self._announce()
                self._announced = True
                return
            time.sleep(0.02)

    def keep_subprocess_alive(self) -> None:
        """Replaces workers that died. One that cannot start ends the server only where none has ever served, or none is left."""
        for index, process in enumerate(self.processes):
            if self.should_exit.is_set() or time.monotonic() < self._retry_at.get(index, 0.0):
                continue
            if process.is_alive(timeout=self.config.timeout_worker_healthcheck):
                continue
            process.kill()
            process.join()
            if process.exitcode == STARTUP_FAILURE and index not in self._retry_at:
                if not (self._announced and any(p.process.is_alive() for p in self.processes)):
                    self.failed = True
                    self.should_exit.set()
                    return
                logger.error("a worker could not start (see above); the others serve on, it is tried again in %d s", RETRY_S)
                self._retry_at[index] = time.monotonic() + RETRY_S
                continue
            self._retry_at.pop(index, None)
            logger.info("worker %s ended; it is replaced", process.pid)
            self._replaced = process
            self.processes[index] = self._worker(self.config, self.sockets)
            self._replaced = None
            self.processes[index].start()
