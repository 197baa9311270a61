"""The worker's ASGI application: /v2 has a short path of its own, the rest is FastAPI's. Every error is {"error": ...}."""

import asyncio
import logging
import time

from tableside.loader.errors import LoaderError
from tableside.quant import QuantError
from tableside.serving import metrics, worker_gauges
from tableside.serving.errors import INTERNAL_ERROR, ApiError, Kind, ServingError
from tableside.serving.http.asgi import Disconnected, Receive, Scope, Send, respond_error
from tableside.serving.http.door import Door
from tableside.serving.http.v1 import make_app
from tableside.serving.http.v2 import V2
from tableside.serving.service import Service
from tableside.serving.settings import ServerSettings

logger = logging.getLogger("tableside")

TELL_S = 0.4  # between two writings of what this worker does


class Application:
    """ASGI: `lifespan` attaches the models, `http` answers requests."""

    def __init__(self, settings: ServerSettings) -> None:
        self.service = Service(settings)
        self.in_flight, self.slots = self.service.in_flight, self.service.slots
        self._v2 = V2(self.service)
        self.door, self.slices = Door(self._v2), self.service.slices
        self._v1 = make_app(self.service, self.tell)
        self._cpu_seconds = metrics.CPU_SECONDS.labels("worker")
        self._counted_cpu_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif path == "/v2" or path.startswith("/v2/"):
            await self._answer_v2(scope, receive, send)
        else:
            await self._v1(scope, receive, send)

    async def _answer_v2(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._v2(scope, receive, send)
        except ApiError as error:
            metrics.refused(self._model_of(scope["path"]), "v2", error.kind, error.lacking)
            await respond_error(send, error)
        except Disconnected:
            logger.debug("a client left before its request was complete")
        except Exception:
            metrics.refused(self._model_of(scope["path"]), "v2", Kind.INTERNAL)
            await respond_error(send, ApiError(500, Kind.INTERNAL, INTERNAL_ERROR))
            raise

    def _model_of(self, path: str) -> str:
        """The model that a path names, where it is one of ours."""
        part = path.split("/")[3:4]
        return part[0] if part and part[0] in self.service.engines else metrics.UNKNOWN

    def tell(self) -> None:
        """Writes down what this worker does now, and brings its counters up to date."""
        worker_gauges.tell(self.service.now(self.door.traffic.connections, self.door.traffic.in_flight))
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
