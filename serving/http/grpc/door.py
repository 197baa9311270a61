"""A worker's gRPC server. It asks the same reader, executor, limits and extensions as the routes under /v2.

Workers listen on one port (SO_REUSEPORT), and the kernel spreads connections over them. An infer request
takes a slot before its message is read, and a slice of the event loop, as one of HTTP does. A refusal's
status is what Triton gives for it; the text is HTTP's.
"""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection import SERVICE_NAME as REFLECTION
from grpc_reflection.v1alpha.reflection import enable_server_reflection

from tableside.serving.errors import ApiError, ErrorKind, ServingError, bad_request
from tableside.serving.executors.admission import RETRY_AFTER_S, Hold, Turn, overloaded
from tableside.serving.executors.pending import settle
from tableside.serving.http import asgi
from tableside.serving.http.grpc import messages
from tableside.serving.http.grpc.calls import GrpcCalls, as_bytes, metadata_of
from tableside.serving.http.grpc.messages import NAME, POOL, SERVICE, filled, message
from tableside.serving.http.traffic import Trace, Traffic, trace_of
from tableside.serving.http.v2 import shm
from tableside.serving.http.v2.infer import V2, InferTarget
from tableside.serving.service.service import Service

_LABEL = "grpc"  # of the protocol in metrics
_INFER = "ModelInfer"  # the call that takes a slot
_LOOK_S = 0.5  # between two looks of a watcher at whether the worker is ready
_MESSAGE_BYTES = 1 << 16  # of a message beside its tensors
_BESIDE_BYTES = shm.INLINE_BYTES  # of a message, from which it is taken apart beside the event loop
_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}

Call = Callable[[Any, Any, Hold], Awaitable[Any]]


class GrpcDoor:
    """Answers a worker's gRPC calls. Belongs to one event loop."""

    def __init__(self, service: Service, traffic: Traffic) -> None:
        self._service, self._traffic, self._v2 = service, traffic, V2(service, _LABEL)
        self._calls, self._ending = GrpcCalls(service), asyncio.Event()
        self._most_reading = 2 * service.slots.slots  # messages that come, and streams that are open
        self._reading = self._streams = 0
        s = service.settings
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 1),
                ("grpc.max_receive_message_length", s.max_body_bytes + _MESSAGE_BYTES),
                ("grpc.max_send_message_length", -1),  # max_response_bytes is the limit
            ]
        )
        handlers = {m.name: self._handler(m) for m in SERVICE.methods}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(_Health(service, self._ending), self._server)
        enable_server_reflection((NAME, REFLECTION), self._server, POOL)
        host = f"[{s.host}]" if ":" in s.host else s.host
        try:
            self._server.add_insecure_port(f"{host}:{s.grpc_port}")
        except RuntimeError as error:
            raise ServingError(f"cannot listen on {host}:{s.grpc_port} for gRPC: {error}") from error

    async def start(self) -> None:
        await self._server.start()

    def end(self) -> None:
        """Takes no more calls; watchers and streams end with the request that they are at."""
        if not self._ending.is_set():
            self._ending.set()
            grace = self._service.settings.shutdown_timeout_s
            self._stopping = asyncio.get_running_loop().create_task(self._server.stop(grace))

    async def stop(self) -> None:
        """As `end`, and waits, for `shutdown_timeout_s` at most."""
        self.end()
        await self._stopping

    def _handler(self, method: Any) -> Any:
        # Handlers read their message: it stays with the client until the request has a slot.
        if method.name == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self._stream_infer)
        call = self._model_infer if method.name == _INFER else self._told(method)
        run = functools.partial(self._run, method.name, message(method.input_type.name), call)
        written = message(method.output_type.name).SerializeToString
        return grpc.stream_unary_rpc_method_handler(run, None, written)

    def _told(self, method: Any) -> Call:
        """A call that is answered by JSON's fields."""
        ask, response = getattr(self._calls, method.name), message(method.output_type.name)

        async def call(request: Any, context: Any, hold: Hold) -> Any:
            return filled(response(), await ask(request, context))

        return call

    async def _run(self, name: str, kind: Any, call: Call, requests: Any, context: Any) -> Any:
        """Makes a call, counts it, and gives its error a status."""
        since, status, request, whole = time.perf_counter(), 0, kind(), asyncio.Event()
        hold, turn = Hold(self._service.in_flight), None
        self._traffic.began()
        try:
            if name == _INFER:
                turn = await self._turn(whole.is_set)
            data = await self._message(context)
            whole.set()
            await self._parse(request, data, hold)
            del data  # its tensors were copied
            answer = await call(request, context, hold)
            status = 200
            return answer
        except Exception as error:  # noqa: BLE001  # an answer is owed whatever it is; what is no refusal is logged
            refusal = self._v2.refusal(getattr(request, "model_name", ""), error)
            status = refusal.status
            if status == 503:
                pushback = ("grpc-retry-pushback-ms", str(1000 * RETRY_AFTER_S))
                context.set_trailing_metadata((pushback,))
            await context.abort(_STATUS.get(status, grpc.StatusCode.INTERNAL), refusal.message)
        finally:
            hold.release()
            if turn is not None:
                turn.end()
            model = getattr(request, "model_name", "")
            self._traffic.ended(_LABEL, status, since, self._trace(name, context), model)

    def _trace(self, name: str, context: Any) -> Trace:
        path = f"/{NAME}/{name}".encode()
        if self._traffic.spans is None:
            return Trace(b"POST", path)
        given = [(key.encode(), as_bytes(value)) for key, value in context.invocation_metadata()]
        return trace_of(b"POST", path, given)

    # ---- messages ----

    async def _message(self, context: Any) -> bytes:
        """Reads a call's message. ApiError: none came, not in time, or too many others are coming."""
        if self._reading >= self._most_reading:
            raise overloaded(f"{self._most_reading} messages are coming already, the limit of a worker")
        self._reading += 1
        try:
            async with asyncio.timeout(self._service.settings.body_timeout_s):
                data = await context.read()
        except TimeoutError:
            limit = self._service.settings.body_timeout_s
            what = f"the message did not come within {limit:g} s (body_timeout_s)"
            raise ApiError(408, ErrorKind.BAD_REQUEST, what) from None
        finally:
            self._reading -= 1
        if data is grpc.aio.EOF:
            raise bad_request("the call has no message")
        return bytes(data)

    async def _parse(self, request: Any, data: bytes, hold: Hold) -> None:
        """Reads a message into `request`. ApiError: it is another one's, too large, or there is no room."""
        hold.grow(len(data))
        if len(data) > messages.LOOKED_THROUGH:
            most = sum(engine.attached().inputs for engine in self._service.engines.values())
            messages.check_description(data, most, self._service.settings.max_json_bytes)
        try:
            if len(data) > _BESIDE_BYTES:
                await self._service.beside(request.ParseFromString, data)
            else:
                request.ParseFromString(data)
        except DecodeError:
            name = request.DESCRIPTOR.full_name
            what = f"{len(data):,} bytes are no message {name}; expected its fields, as inference.proto says"
            raise bad_request(what) from None

    # ---- infer ----

    async def _model_infer(self, request: Any, context: Any, hold: Hold) -> Any:
        await self._service.slices.take()
        size, most = messages.body_bytes(request), self._service.settings.max_body_bytes
        if size > most:
            raise asgi.too_large(most)
        hold.grow(max(0, size - request.ByteSize()))  # numbers may come in fewer bytes
        is_large, beside = size > _BESIDE_BYTES, self._service.beside
        body, length = await beside(messages.as_body, request) if is_large else messages.as_body(request)
        named = request.model_name, request.model_version or None
        asked = InferTarget(*named, b"%d" % length, self._timeout(context))
        parts = [*(await self._v2.infer(asked, body, hold)).parts]
        if sum(map(len, parts)) > _BESIDE_BYTES:
            return await beside(messages.as_response, parts)
        return messages.as_response(parts)

    def _timeout(self, context: Any) -> bytes | None:
        """How long the request waits for rows of a disk, in milliseconds: no longer than for its answer."""
        left: float | None = context.time_remaining()
        given = metadata_of(context, asgi.DISK_TIMEOUT.decode())
        if given is None and left is not None and left < self._service.settings.disk_timeout_s:
            return b"%.3f" % (1000 * max(0.0, left))
        return given

    async def _turn(self, is_whole: Callable[[], bool]) -> Turn:
        """Waits for a slot. ApiError 503: too many wait. is_whole: as of `Turn`."""
        came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        begin, refuse = functools.partial(settle, came, None), functools.partial(settle, came)
        turn = Turn(self._service.slots, begin, refuse, is_whole)
        try:
            self._service.slots.enter(turn)
            await came
        except BaseException:
            turn.end()
            raise
        return turn

    async def _stream_infer(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        """Answers the requests of a stream one after another, as Triton's client asks them."""
        kind, response = message("ModelInferRequest"), message("ModelStreamInferResponse")
        if self._streams >= self._most_reading:
            what = f"{self._most_reading} streams are open, the limit of a worker"
            await context.abort(grpc.StatusCode.UNAVAILABLE, what)
        self._streams += 1
        self._traffic.began()
        since = time.perf_counter()
        try:
            while (data := await self._next(context)) is not None:
                hold = Hold(self._service.in_flight)
                try:
                    yield (await self._answer(kind(), data, hold, response, context)).SerializeToString()
                finally:
                    hold.release()
        finally:
            self._streams -= 1
            self._traffic.ended(_LABEL, 200, since, self._trace("ModelStreamInfer", context))

    async def _answer(self, request: Any, data: bytes, hold: Hold, response: Any, context: Any) -> Any:
        """Returns a stream's answer to one request, or what says why there is none."""
        turn = None
        try:
            turn = await self._turn(lambda: True)
            await self._parse(request, data, hold)
            return response(infer_response=await self._model_infer(request, context, hold))
        except Exception as error:  # noqa: BLE001  # as of `_run`
            refusal = self._v2.refusal(request.model_name, error)
            return response(error_message=refusal.message, infer_response={"id": request.id})
        finally:
            if turn is not None:
                turn.end()

    async def _next(self, context: Any) -> bytes | None:
        """The next message of a stream; None: it ends, or the server does."""
        reading, ending = asyncio.ensure_future(context.read()), asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait((reading, ending), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done() or (data := reading.result()) is grpc.aio.EOF:
                return None
            return bytes(data)
        finally:
            reading.cancel()
            ending.cancel()


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """The standard health service: of the server, and of the protocol by its name."""

    def __init__(self, service: Service, ending: asyncio.Event) -> None:
        self._service, self._ending = service, ending

    def _now(self, name: str) -> Any:
        status = health_pb2.HealthCheckResponse
        if name not in ("", NAME):
            return status(status=status.SERVICE_UNKNOWN)
        is_ready = self._service.ready and not self._ending.is_set()
        return status(status=status.SERVING if is_ready else status.NOT_SERVING)

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in ("", NAME):
            what = f"service {request.service!r} is not known here; expected '' or {NAME}"
            await context.abort(grpc.StatusCode.NOT_FOUND, what)
        return self._now(request.service)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        told, is_ending = None, False
        while not is_ending:
            is_ending = self._ending.is_set()  # before the last look
            if (now := self._now(request.service)) != told:
                told = now
                yield now
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._ending.wait()
            except TimeoutError:
                continue
