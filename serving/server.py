"""`tableside serve`: one listening socket, workers (serving.worker) that a supervisor (serving.supervisor) looks after.

Workers are forked from a process that has imported everything and mapped nothing, so a worker adds a few MB and is ready in
a fraction of a second. Each attaches the models itself.
"""

import contextlib
import multiprocessing
import socket
from collections.abc import Callable

from tableside.loader.versions import Model
from tableside.quant import choose
from tableside.quant.installed import require
from tableside.serving.errors import ServingError
from tableside.serving.metrics_files import metrics_folder
from tableside.serving.model_list import ModelList
from tableside.serving.region_registry import RegionRegistry
from tableside.serving.scorers import needs_torch
from tableside.serving.settings import ServerSettings, admin_token
from tableside.serving.supervisor import Supervisor
from tableside.serving.worker import MakeApplication, WorkerConfig, make_application


def bind(settings: ServerSettings) -> socket.socket:
    """The listening socket; ServingError where the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
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
    token = admin_token(settings)
    if not settings.models and token is None:
        raise ServingError("no model is named; expected: tableside serve MODEL | model.toml | CHECKPOINT ...")
    published = [Model(settings.root, name, settings.owner) for name in settings.models]
    segments = [model.attach(model.good(), "header") for model in published]
    backend = choose(settings.backend)
    runs_torch = any(needs_torch(segment, "cuda" if settings.devices else "cpu") for segment in segments)
    del segments  # workers attach what is live when they start
    if runs_torch:
        require("a scorer that is an exported program", "torch", extra="torch")
    if settings.devices:
        require("--devices", "torch", "triton", extra="gpu")
    if settings.traces:
        require("--traces", "opentelemetry.sdk", extra="otel")
        from tableside.serving.http.tracing import exporter_named

        exporter_named(settings.traces)
    if len(settings.devices) > settings.workers:
        raise ServingError(
            f"{len(settings.devices)} devices and {settings.workers} workers; a worker uses one device, so start at least "
            f"--workers {len(settings.devices)}"
        )
    sock = bind(settings)
    host, port = sock.getsockname()[:2]
    what = f"{', '.join(settings.models) or 'no model yet'} on http://{f'[{host}]' if ':' in host else host}:{port}"
    where = f"fused on GPU {', '.join(settings.devices)}" if settings.devices else backend.description
    how = f"{settings.workers} workers, lookups on {where}"
    try:
        with metrics_folder(settings.root):
            preload = [
                *(["tableside.quant.gpu.backend"] if settings.devices else []),
                *(["tableside.quant.cpu.fbgemm"] if backend.name == "fbgemm" else []),
                *(["tableside.serving.program"] if runs_torch else []),
                "tableside.serving.preload",
            ]
            multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
            registry = RegionRegistry() if settings.allow_client_shm else None
            config = WorkerConfig(settings, make, registry, ModelList.of(settings.models) if token is not None else None)
            return Supervisor(config, [sock], lambda: announce(f"tableside serves {what} ({how})")).run()
    finally:
        sock.close()
