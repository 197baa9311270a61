"""The worker's ASGI application: FastAPI with the routes of /v1, /v2 and the page. Every error is
{"error": ...}."""

import asyncio
import time

from fastapi import FastAPI, Request, Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException

from tableside.loader.errors import LoaderError
from tableside.quant import QuantError
from tableside.serving import VERSION
from tableside.serving.errors import (
    INTERNAL_ERROR,
    ApiError,
    ErrorKind,
    ServingError,
    not_found,
    short,
    wrong_method,
)
from tableside.serving.http import static_page
from tableside.serving.http.asgi import (
    MODEL,
    AsgiResponse,
    Disconnected,
    Receive,
    Scope,
    Send,
    error_response,
)
from tableside.serving.http.door import Door
from tableside.serving.http.v1 import routes as v1
from tableside.serving.http.v2 import routes as v2_routes
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
        v2 = V2(self.service)
        self.door, self.slices = Door(v2), self.service.slices
        self._app = _make_fastapi(self.service)
        v1.add_to(self._app, self.service, self.tell)
        v2_routes.add_to(self._app, self.service, v2)
        static_page.add_to(self._app)
        self._cpu_seconds = metrics.CPU_SECONDS.labels("worker")
        self._counted_cpu_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        path = scope["path"]
        if path.startswith("/v2/"):
            path = path.rstrip("/")
        method = (
            "GET" if scope["method"] == "HEAD" else scope["method"]
        )  # whoever sends the answer leaves its body out
        await self._app({**scope, "path": path, "method": method}, receive, send)

    def tell(self) -> None:
        """Writes down what this worker does now, and brings its counters up to date."""
        counters.tell(self.service.now(self.door.traffic.connections, self.door.traffic.in_flight))
        used = time.process_time()
        self._cpu_seconds.inc(used - self._counted_cpu_s)
        self._counted_cpu_s = used

    async def _go_on_telling(self) -> None:
        while True:
            self.tell()
            await asyncio.sleep(TELL_S)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        spans = None
        try:
            await self.service.start()
        except (LoaderError, QuantError, ServingError, OSError) as error:
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
        await self.service.stop()
        if spans is not None:
            await asyncio.get_running_loop().run_in_executor(None, spans.close)  # it may wait for a collector
        await send({"type": "lifespan.shutdown.complete"})


def _make_fastapi(service: Service) -> FastAPI:
    """FastAPI without routes, which answers every error as {"error": message}, and counts it."""
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

    @app.exception_handler(ApiError)
    async def refused(http: Request, error: ApiError) -> Response:
        named = http.scope["path"].split("/")[3:4] if is_v2(http) else [http.scope.get(MODEL)]
        model = named[0] if named and named[0] in service.engines else metrics.UNKNOWN
        metrics.refused(model, "v2" if is_v2(http) else "v1", error.kind, error.lacking)
        return AsgiResponse(error_response(error))

    @app.exception_handler(HTTPException)
    async def no_route(http: Request, error: HTTPException) -> Response:
        path = http.scope["path"]
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "GET").split(", ")
            return await refused(http, wrong_method(http.method, path, *allowed))
        if error.status_code == 404 and is_v2(http):
            return await refused(
                http, not_found(f"{short(path)} is not a path of this server; GET /v2 describes it")
            )
        known = "/v1/lookup, /v1/score, /v1/models, /v2, /health, /metrics, /docs, and a page for people at /"
        what = f"{http.method} {short(path)}: {error.detail}; this server has: {known}"
        kind = ErrorKind.NOT_FOUND if error.status_code == 404 else ErrorKind.BAD_REQUEST
        return await refused(http, ApiError(error.status_code, kind, what))

    @app.exception_handler(
        Exception
    )  # Starlette answers with it and raises the error again, so that it is logged
    async def internal(http: Request, error: Exception) -> Response:
        return await refused(http, ApiError(500, ErrorKind.INTERNAL, INTERNAL_ERROR))

    @app.exception_handler(Disconnected)
    async def left(http: Request, error: Disconnected) -> Response:
        return _Nothing()

    return app


class _Nothing(Response):
    """What a client gets that left, or that its connection answered already."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pass
