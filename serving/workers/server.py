"""`tableside serve`: a listening socket and supervised workers. They are forked from a process that imported
everything, so a worker adds a few MB and starts in a fraction of a second; each attaches the models."""

import contextlib
import errno
import multiprocessing
import os
import socket
from collections.abc import Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.quant.installed import require
from tableside.serving.errors import ServingError
from tableside.serving.metrics.files import metrics_folder
from tableside.serving.model.compiled_kernels import begin_to_compile
from tableside.serving.model.scorers import TORCH_MODULES, needs_torch
from tableside.serving.service.model_list import Following, published_models
from tableside.serving.settings import ServerSettings, admin_token, cluster_token
from tableside.serving.shm.regions import RegionRegistry
from tableside.serving.supervised import signals_kept_off
from tableside.serving.workers.supervisor import Supervisor
from tableside.serving.workers.worker import MakeApplication, WorkerConfig, make_application

_BACKLOG = 2048


def bind(settings: ServerSettings) -> socket.socket:
    """Returns the listening socket; ServingError: the address is taken or foreign."""
    if settings.uds is not None:
        return _bind_unix(settings.uds)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setblocking(False)
        sock.bind((settings.host, settings.port))
        sock.listen(_BACKLOG)  # also finds an address that another server listens on
    except OSError as error:
        sock.close()
        raise ServingError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            "choose another --port or --host, or end what holds it"
        ) from error
    return sock


def _bind_unix(path: Path) -> socket.socket:
    """Binds a socket path for this user and group; replaces a dead server's. ServingError: it is in use."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o117)
    try:
        sock.setblocking(False)
        _remove_unheard(path)
        sock.bind(os.fspath(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ServingError(
            f"cannot listen on {path}: {error.strerror or error}; choose another --uds of at most 107 "
            "bytes, in a folder that this user may write to, or end what listens there"
        ) from error
    finally:
        os.umask(before)
    return sock


def _remove_unheard(path: Path) -> None:
    """Removes a socket without a listener; leaves other files. OSError: somebody listens."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise FileExistsError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def reserve_grpc(settings: ServerSettings) -> socket.socket | None:
    """Returns a socket that holds the workers' gRPC port, and listens nowhere; None: there is none.
    ServingError: the address is taken or foreign."""
    if settings.grpc_port is None:
        return None
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock, port = socket.socket(family, socket.SOCK_STREAM), settings.grpc_port
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:  # another server may share its port, too
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((settings.host, port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((settings.host, port))
    except OSError as error:
        sock.close()
        raise ServingError(
            f"cannot listen on {settings.host}:{port} for gRPC: {error.strerror}; choose another --grpc-port "
            "or --host, or end what holds it"
        ) from error
    return sock


def _url(sock: socket.socket) -> str:
    """Returns a listening socket's URL for clients."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it any more
        print(line, flush=True)


def _first_models(settings: ServerSettings) -> tuple[str, ...]:
    """The models that are served first. ServingError: the settings name none, or contradict each other."""
    may_load = admin_token(settings) is not None
    if settings.all and may_load:
        raise ServingError(
            "--all serves every published model, so none is loaded by hand; leave it out, or the admin token"
        )
    if settings.all and settings.models:
        raise ServingError(
            f"--all serves every model, and {', '.join(settings.models)} is named; leave one of them out"
        )
    if not (settings.all or settings.models or may_load):
        raise ServingError(
            "no model is named; expected: tableside serve MODEL | model.toml | CHECKPOINT ..., or --all"
        )
    return published_models(settings) if settings.all else settings.models


def check(settings: ServerSettings) -> None:
    """Raises what `serve` would raise for the settings alone, before models are loaded."""
    _first_models(settings)
    _check_devices_and_extras(settings)
    if settings.uds is None:
        bind(settings).close()
    if (reserved := reserve_grpc(settings)) is not None:
        reserved.close()


def _check_devices_and_extras(settings: ServerSettings) -> None:
    cluster_token(settings)  # raises here, not in each worker
    if settings.devices:
        require("--devices", "torch", "triton", extra="gpu")
    if settings.grpc_port is not None:
        require("--grpc-port", "grpc", "grpc_health", "grpc_reflection", extra="grpc")
    if settings.traces:
        require("--traces", "opentelemetry.sdk", extra="otel")
        from tableside.serving.http.tracing import exporter_named

        exporter_named(settings.traces)
    if len(settings.devices) > settings.workers:
        raise ServingError(
            f"{len(settings.devices)} devices and {settings.workers} workers; a worker uses one device, so "
            f"start at least --workers {len(settings.devices)}"
        )


def serve(
    settings: ServerSettings, make: MakeApplication = make_application, came: Sequence[int] = ()
) -> int:
    """Serves until a signal; returns the exit code. make: builds the workers' application. came: signals to
    end that came before; it may grow. LoaderError, QuantError, ServingError: a model, the backend or the
    address is unusable; no worker was started."""
    settings = settings.model_copy(update={"models": _first_models(settings)})
    _check_devices_and_extras(settings)
    published = [Model(settings.root, name, settings.owner) for name in settings.models]
    segments = [model.attach(model.good(), "header") for model in published]
    backend = choose(settings.backend)
    runs_torch = any(needs_torch(segment, "cuda" if settings.devices else "cpu") for segment in segments)
    if runs_torch:
        require("a scorer that is an exported program", "torch", extra="torch")
    sock = bind(settings)
    try:
        reserved = reserve_grpc(settings)
    except ServingError:
        sock.close()
        raise
    named = ", ".join(settings.models) or "no model yet"
    if settings.all:
        named = f"all models of {settings.root} ({', '.join(settings.models) or 'none yet'})"
    what = f"{named} on {_url(sock)}"
    if reserved is not None:
        host, port = reserved.getsockname()[:2]
        settings = settings.model_copy(update={"grpc_port": port})
        what += f" and gRPC on {f'[{host}]' if ':' in host else host}:{port}"
    where = f"fused on GPU {', '.join(settings.devices)}" if settings.devices else backend.description
    how = f"{settings.workers} workers, lookups on {where}"
    try:
        with metrics_folder(settings.root):
            preload = [
                *(["tableside.quant.gpu.backend"] if settings.devices else []),
                *(["tableside.quant.cpu.fbgemm"] if backend.name == "fbgemm" else []),
                *(TORCH_MODULES if runs_torch else ()),
                "tableside.serving.workers.preload",
            ]
            multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
            resource_tracker.ensure_running()  # which lets SIGINT and SIGTERM through again
            with signals_kept_off():
                forkserver.ensure_running()
            registry = RegionRegistry() if settings.allow_client_shm else None
            config = WorkerConfig(settings, make, registry)
            begin_to_compile(settings, segments)
            del segments  # workers attach what is live when they start
            following = Following(settings, config.models) if settings.all else None
            supervisor = Supervisor(
                config, [sock], lambda: _say(f"tableside serves {what} ({how})"), following
            )
            return 128 + came[0] if came else supervisor.run()
    finally:
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)
        sock.close()
        if reserved is not None:
            reserved.close()
