"""A worker's gRPC server. It asks the same reader, executor, limits and extensions as the routes under /v2.

Workers listen on one port (SO_REUSEPORT), and the kernel spreads connections over them. An infer request
takes a slot and the event loop's slices as one of HTTP does. A refusal's status is what Triton gives for it;
the text is HTTP's.
"""

import asyncio
import base64
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import orjson
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from tableside.serving.errors import INTERNAL_ERROR, ApiError, ErrorKind, ServingError, bad_request
from tableside.serving.executors.admission import RETRY_AFTER_S, Hold, Turn, WholeTurn
from tableside.serving.http import metadata
from tableside.serving.http.asgi import DISK_TIMEOUT
from tableside.serving.http.grpc import tensors
from tableside.serving.http.grpc.messages import NAME, POOL, SERVICE, filled, message
from tableside.serving.http.traffic import Trace, Traffic, trace_of
from tableside.serving.http.v2 import cuda_shm, repository, shm
from tableside.serving.http.v2.infer import V2, InferTarget
from tableside.serving.metrics import metrics
from tableside.serving.model.version import ServedVersion
from tableside.serving.service.service import Service
from tableside.serving.shm.regions import Regions

logger = logging.getLogger("tableside")

_LABEL = "grpc"  # of the protocol in metrics
_HEALTH = "grpc.health.v1.Health"
_LOOK_S = 0.5  # between two looks of a watcher at whether the worker is ready
_MESSAGE_BYTES = 1 << 16  # of a message beside its tensors
_BESIDE_BYTES = shm.INLINE_BYTES  # of a message, from which it is taken apart beside the event loop
_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}

Call = Callable[[Any, Any], Awaitable[Any]]


class GrpcDoor:
    """Answers a worker's gRPC calls. Belongs to one event loop."""

    def __init__(self, service: Service, traffic: Traffic) -> None:
        self._service, self._traffic, self._v2 = service, traffic, V2(service, _LABEL)
        s = service.settings
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 1),
                ("grpc.max_receive_message_length", s.max_body_bytes + _MESSAGE_BYTES),
                ("grpc.max_send_message_length", -1),  # max_response_bytes is the limit
            ],
            maximum_concurrent_rpcs=service.slots.slots + s.max_waiting,
        )
        handlers = {m.name: self._handler(m) for m in SERVICE.methods}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(_Health(service), self._server)
        enable_server_reflection((NAME, REFLECTION), self._server, POOL)
        host = f"[{s.host}]" if ":" in s.host else s.host
        try:
            self._server.add_insecure_port(f"{host}:{s.grpc_port}")
        except RuntimeError as error:
            raise ServingError(f"cannot listen on {host}:{s.grpc_port} for gRPC: {error}") from error

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        """Takes no more calls, and ends those that take longer than `shutdown_timeout_s`."""
        await self._server.stop(self._service.settings.shutdown_timeout_s)

    def _handler(self, method: Any) -> Any:
        written = message(method.output_type.name).SerializeToString
        if method.name == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self._stream_infer, None, written)
        call = self._model_infer if method.name == "ModelInfer" else self._told(method)
        run = functools.partial(self._run, method.name, message(method.input_type.name), call)
        return grpc.unary_unary_rpc_method_handler(run, None, written)

    def _told(self, method: Any) -> Call:
        """A call that is answered by JSON's fields."""
        ask, response = getattr(self, method.name), message(method.output_type.name)

        async def call(request: Any, context: Any) -> Any:
            return filled(response(), await ask(request, context))

        return call

    async def _run(self, name: str, kind: Any, call: Call, data: bytes, context: Any) -> Any:
        """Makes a call, counts it, and gives its error a status."""
        since, status, request = time.perf_counter(), 0, kind()
        self._traffic.began()
        try:
            _read(request, data)
            answer = await call(request, context)
            status = 200
            return answer
        except Exception as error:  # noqa: BLE001  # an answer is owed whatever it is; what is no refusal is logged
            refusal = self._refusal(request, error)
            status = refusal.status
            if status == 503:
                pushback = ("grpc-retry-pushback-ms", str(1000 * RETRY_AFTER_S))
                context.set_trailing_metadata((pushback,))
            await context.abort(_STATUS.get(status, grpc.StatusCode.INTERNAL), refusal.message)
        finally:
            self._traffic.ended(_LABEL, status, since, self._trace(name, context))

    def _trace(self, name: str, context: Any) -> Trace:
        path = f"/{NAME}/{name}".encode()
        if self._traffic.spans is None:
            return Trace(b"POST", path)
        given = [(key.encode(), _bytes(value)) for key, value in context.invocation_metadata()]
        return trace_of(b"POST", path, given)

    def _refusal(self, request: Any, error: Exception) -> ApiError:
        named = getattr(request, "model_name", "")
        model = named if named in self._service.engines else metrics.UNKNOWN
        if not isinstance(error, ApiError):
            logger.error("a gRPC call failed", exc_info=error)
            error = ApiError(500, ErrorKind.INTERNAL, INTERNAL_ERROR)
        metrics.refused(model, _LABEL, error.kind, error.lacking)
        return error

    # ---- infer ----

    async def _model_infer(self, request: Any, context: Any) -> Any:
        size, beside = request.ByteSize(), self._service.beside
        hold, turn = Hold(self._service.in_flight), None
        try:
            hold.grow(size)
            turn = await self._turn()
            is_large = size > _BESIDE_BYTES
            body, length = await beside(tensors.as_body, request) if is_large else tensors.as_body(request)
            path = tensors.named(request.model_name, request.model_version)
            asked = InferTarget(path, b"%d" % length, self._timeout(context))
            parts = [*(await self._v2.infer(asked, body, hold)).parts]
            if sum(map(len, parts)) > _BESIDE_BYTES:
                return await beside(tensors.as_response, parts)
            return tensors.as_response(parts)
        finally:
            hold.release()
            if turn is not None:
                turn.end()

    def _timeout(self, context: Any) -> bytes | None:
        """How long the request waits for rows of a disk, in milliseconds: no longer than for its answer."""
        left: float | None = context.time_remaining()
        given = _metadata(context, DISK_TIMEOUT.decode())
        if given is None and left is not None and left < self._service.settings.disk_timeout_s:
            return b"%.3f" % (1000 * max(0.0, left))
        return given

    async def _turn(self) -> Turn | WholeTurn:
        """Waits for a slot and a slice of the event loop. ApiError 503: too many wait."""
        slots = self._service.slots
        if not slots.is_full:
            turn: Turn | WholeTurn = WholeTurn(slots)
        else:
            came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            turn = Turn(slots, functools.partial(_settle, came, None), functools.partial(_settle, came), _yes)
            slots.enter(turn)
            try:
                await came
            except BaseException:
                turn.end()
                raise
        try:
            await self._service.slices.take()
        except BaseException:
            turn.end()
            raise
        return turn

    async def _stream_infer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answers the requests of a stream one after another, as Triton's client asks them."""
        kind, response = message("ModelInferRequest"), message("ModelStreamInferResponse")
        self._traffic.began()
        since = time.perf_counter()
        try:
            async for data in requests:
                request = kind()
                try:
                    _read(request, data)
                    yield response(infer_response=await self._model_infer(request, context))
                except Exception as error:  # noqa: BLE001  # as of `_run`
                    refusal = self._refusal(request, error)
                    yield response(error_message=refusal.message, infer_response={"id": request.id})
        finally:
            self._traffic.ended(_LABEL, 200, since, self._trace("ModelStreamInfer", context))

    # ---- what is told in HTTP's JSON, by the protocol's names ----

    async def ServerLive(self, request: Any, context: Any) -> dict[str, Any]:
        return {"live": True}

    async def ServerReady(self, request: Any, context: Any) -> dict[str, Any]:
        return {"ready": self._service.ready}

    async def ServerMetadata(self, request: Any, context: Any) -> dict[str, Any]:
        return metadata.server_metadata(self._service)

    async def ModelReady(self, request: Any, context: Any) -> dict[str, Any]:
        await self._served(request)
        return {"ready": self._service.ready}

    async def ModelMetadata(self, request: Any, context: Any) -> dict[str, Any]:
        return metadata.model_metadata(self._service, await self._served(request))

    async def ModelConfig(self, request: Any, context: Any) -> dict[str, Any]:
        return {"config": metadata.model_configuration(await self._served(request))}

    async def ModelStatistics(self, request: Any, context: Any) -> dict[str, Any]:
        named = [await self._served(request)] if request.name else None
        served = named or [engine.attached() for engine in self._service.engines.values()]
        return {"model_stats": [s for one in served for s in metadata.model_statistics(one)]}

    async def _served(self, request: Any) -> ServedVersion:
        if not request.version:
            return self._service.live(request.name)
        return await self._service.version(request.name, request.version)

    async def RepositoryIndex(self, request: Any, context: Any) -> dict[str, Any]:
        token = _metadata(context, "authorization")
        return {"models": repository.index(self._service, {"ready": request.ready}, token)}

    async def RepositoryModelLoad(self, request: Any, context: Any) -> dict[str, Any]:
        return await self._change("load", request, context)

    async def RepositoryModelUnload(self, request: Any, context: Any) -> dict[str, Any]:
        return await self._change("unload", request, context)

    async def _change(self, action: str, request: Any, context: Any) -> dict[str, Any]:
        asked, token = {"parameters": dict.fromkeys(request.parameters)}, _metadata(context, "authorization")
        await repository.change(self._service, action, request.model_name, asked, token)
        return {}

    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> dict[str, Any]:
        return self._status(request, shm)

    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> dict[str, Any]:
        asked = {"key": request.key, "offset": request.offset, "byte_size": request.byte_size}
        return await self._register(request, shm, asked)

    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> dict[str, Any]:
        return self._unregister(request, shm)

    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> dict[str, Any]:
        return self._status(request, cuda_shm)

    async def CudaSharedMemoryRegister(self, request: Any, context: Any) -> dict[str, Any]:
        handle = {"b64": base64.b64encode(request.raw_handle).decode()}
        asked = {"raw_handle": handle, "device_id": request.device_id, "byte_size": request.byte_size}
        return await self._register(request, cuda_shm, asked)

    async def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> dict[str, Any]:
        return self._unregister(request, cuda_shm)

    @property
    def _regions(self) -> Regions:
        if self._service.regions is None:
            raise shm.not_allowed("")
        return self._service.regions

    def _status(self, request: Any, kind: Any) -> dict[str, Any]:
        found = self._regions.status(request.name or None, on_device=kind is cuda_shm)
        return {"regions": {entry.name: kind.describe(entry) for entry in found}}

    async def _register(self, request: Any, kind: Any, asked: dict[str, Any]) -> dict[str, Any]:
        await kind.register(self._regions, self._service.link, request.name, orjson.dumps(asked))
        return {}

    def _unregister(self, request: Any, kind: Any) -> dict[str, Any]:
        self._regions.unregister(request.name or None, on_device=kind is cuda_shm)
        return {}


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """The standard health service: of the server, and of the protocol by its name."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _now(self, name: str) -> Any:
        status = health_pb2.HealthCheckResponse
        if name not in ("", NAME):
            return status(status=status.SERVICE_UNKNOWN)
        return status(status=status.SERVING if self._service.ready else status.NOT_SERVING)

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in ("", NAME):
            what = f"service {request.service!r} is not known here; expected '' or {NAME}"
            await context.abort(grpc.StatusCode.NOT_FOUND, what)
        return self._now(request.service)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        told = None
        while True:
            if (now := self._now(request.service)) != told:
                told = now
                yield now
            await asyncio.sleep(_LOOK_S)


def _read(request: Any, data: bytes) -> None:
    """Reads a message. ApiError: the bytes are another one's, or none's."""
    try:
        request.ParseFromString(data)
    except DecodeError:
        what = f"{len(data):,} bytes are no message {request.DESCRIPTOR.full_name}; expected those of its "
        raise bad_request(f"{what}fields, as inference.proto says") from None


def _settle(came: "asyncio.Future[None]", error: Exception | None) -> None:
    if came.done():
        return
    if error is None:
        came.set_result(None)
    else:
        came.set_exception(error)


def _yes() -> bool:
    return True


def _metadata(context: Any, name: str) -> bytes | None:
    """The first value of the call's metadata by name; None: there is none."""
    return next((_bytes(value) for key, value in context.invocation_metadata() if key == name), None)


def _bytes(value: str | bytes) -> bytes:
    return value.encode("latin-1", "replace") if isinstance(value, str) else value
