"""The worker's ASGI application: FastAPI with /v1, /v2 and the page. Errors are {"error": ...}."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException

from tableside.serving import VERSION, errors
from tableside.serving.http import asgi, metadata
from tableside.serving.http.door import Door
from tableside.serving.http.v1 import routes as v1
from tableside.serving.http.v2 import routes as v2_routes
from tableside.serving.http.v2 import rows
from tableside.serving.http.v2.infer import V2
from tableside.serving.metrics import counters, metrics
from tableside.serving.service.service import Service
from tableside.serving.settings import ServerSettings

TELL_S = 0.4  # between two writings of what this worker does


class Application:
    """ASGI: `lifespan` attaches the models, `http` answers requests."""

    def __init__(self, settings: ServerSettings) -> None:
        self.service = Service(settings)
        self.in_flight, self.slots = self.service.in_flight, self.service.slots
        v2, owned = V2(self.service), rows.OwnedRows(self.service)
        self.door, self.slices = Door(v2, owned), self.service.slices
        self._app = _make_fastapi(self.service)
        v1.add_to(self._app, self.service, self.tell)
        v2_routes.add_to(self._app, self.service, v2)
        rows.add_to(self._app, self.service, owned)
        metadata.add_examples_to(self._app, self.service)
        _add_page(self._app)
        self._cpu_seconds = metrics.CPU_SECONDS.labels("worker")
        self._counted_cpu_s = 0.0
        self._grpc: Any = None

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        path = scope["path"]
        if path.startswith("/v2/"):
            path = path.rstrip("/")
        # whoever sends the answer leaves its body out
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self._app({**scope, "path": path, "method": method}, receive, send)

    def tell(self) -> None:
        """Writes the worker's gauges and its CPU seconds."""
        counters.tell(self.service.now(self.door.traffic.connections, self.door.traffic.in_flight))
        used = time.process_time()
        self._cpu_seconds.inc(used - self._counted_cpu_s)
        self._counted_cpu_s = used

    async def _go_on_telling(self) -> None:
        while True:
            self.tell()
            await asyncio.sleep(TELL_S)

    def end(self) -> None:
        """Begins to end what has no connection of uvicorn's."""
        if self._grpc is not None:
            self._grpc.end()

    async def _open_grpc(self) -> None:
        """Opens the worker's gRPC server, if it has one. ServingError: the address is taken."""
        if self.service.settings.grpc_port is None:
            return
        # It forks nothing that goes on without an exec, and would say so in the log
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        from tableside.serving.http.grpc.door import GrpcDoor  # of an extra, and never before a fork

        self._grpc = GrpcDoor(self.service, self.door.traffic)
        await self._grpc.start()

    async def _lifespan(self, receive: asgi.Receive, send: asgi.Send) -> None:
        await receive()
        spans = None
        try:
            await self.service.start()
            await self._open_grpc()
        except errors.UNUSABLE as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        if self.service.settings.traces:
            from tableside.serving.http.tracing import SpanWriter  # of an extra

            spans = self.door.traffic.spans = SpanWriter.named(self.service.settings.traces)
        telling = asyncio.create_task(self._go_on_telling())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        if self._grpc is not None:
            await self._grpc.stop()
        await self.service.stop()
        if spans is not None:
            await asyncio.get_running_loop().run_in_executor(None, spans.close)  # it may wait for a collector
        await send({"type": "lifespan.shutdown.complete"})


def _make_fastapi(service: Service) -> FastAPI:
    """FastAPI without routes. Counts errors and answers them as {"error": message}."""
    app: FastAPI = FastAPIOffline(
        title="Tableside",
        summary="Quantized embedding tables from shared memory",
        version=VERSION,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # ours are of whole requests
        static_url="/docs/files",
    )

    def is_v2(http: Request) -> bool:
        path: str = http.scope["path"]
        return path == "/v2" or path.startswith("/v2/")

    @app.exception_handler(errors.ApiError)
    async def refused(http: Request, error: errors.ApiError) -> Response:
        named = http.scope["path"].split("/")[3:4] if is_v2(http) else [http.scope[asgi.HOLD].model]
        model = named[0] if named and named[0] in service.engines else metrics.UNKNOWN
        metrics.refused(model, "v2" if is_v2(http) else "v1", error.kind, error.lacking)
        return asgi.AsgiResponse(asgi.error_response(error))

    @app.exception_handler(HTTPException)
    async def no_route(http: Request, error: HTTPException) -> Response:
        path = http.scope["path"]
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "GET").split(", ")
            return await refused(http, errors.wrong_method(http.method, path, *allowed))
        if error.status_code == 404 and is_v2(http):
            return await refused(
                http,
                errors.not_found(f"{errors.short(path)} is not a path of this server; GET /v2 describes it"),
            )
        known = "/v1/lookup, /v1/score, /v1/models, /v2, /health, /metrics, /docs, and a page for people at /"
        what = f"{http.method} {errors.short(path)}: {error.detail}; this server has: {known}"
        kind = errors.ErrorKind.NOT_FOUND if error.status_code == 404 else errors.ErrorKind.BAD_REQUEST
        return await refused(http, errors.ApiError(error.status_code, kind, what))

    # Starlette answers with it and raises the error again, so that it is logged
    @app.exception_handler(Exception)
    async def internal(http: Request, error: Exception) -> Response:
        return await refused(http, errors.ApiError(500, errors.ErrorKind.INTERNAL, errors.INTERNAL_ERROR))

    @app.exception_handler(asgi.Disconnected)
    async def left(http: Request, error: asgi.Disconnected) -> Response:
        return _Nothing()

    return app


class _Nothing(Response):
    """Sends nothing: the client left, or its connection answered already."""

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        pass


_PAGE = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def _add_page(app: FastAPI) -> None:
    """Serves the page for people at `/`, its files below `/page/`. It may load nothing from other hosts."""
    for file in sorted(_PAGE.iterdir()):
        if file.suffix in _TYPES:
            _add(
                app,
                "/" if file.name == "index.html" else f"/page/{file.name}",
                file.read_bytes(),
                _TYPES[file.suffix],
            )


def _add(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.get(path, include_in_schema=False)
    async def _() -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)
