"""What clients may ask at most, and what becomes of those that leave or wait."""

import asyncio
import queue
import random
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_calls import INPUTS, infer_request, refused, sent
from grpc_health.v1 import health_pb2, health_pb2_grpc
from servers import Server
from support import end, run_tableside, until
from triton_grpc import triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tableside.serving.errors import ApiError
from tableside.serving.executors.admission import Slots
from tableside.serving.http.grpc.door import GrpcDoor
from tableside.serving.http.grpc.messages import NAME


@pytest.mark.drawn(0.5)
def test_a_stream_that_breaks_off_gives_all_back(start: Callable[..., Server]) -> None:
    """Where its client leaves before it has read an answer."""
    server = start("--grpc-port", 0)

    def held() -> list[float]:
        names = ("tableside_held_bytes", "tableside_waiting_requests", "tableside_in_flight_requests")
        text = server.get("/metrics").text
        return [float(re.findall(rf"^{name} (\S+)", text, re.MULTILINE)[0]) for name in names]

    request = infer_request(raw_input_contents=[np.zeros(2000, np.int64).tobytes()])
    request.inputs.add(name="text.values", datatype="INT64", shape=[2000])
    with grpc.insecure_channel(server.grpc) as channel:
        ask = channel.stream_stream(f"/{NAME}/ModelStreamInfer", _registered_method=False)
        for _ in range(20):
            answers = ask(iter([request.SerializeToString()] * 200), timeout=300)
            next(answers)
            answers.cancel()
    # the request for the metrics is in flight, and holds nothing
    until(lambda: held() == [0.0, 0.0, 1.0], what="the streams' bytes and places")


@pytest.mark.drawn(0.5)
def test_what_is_no_request_ends_nothing(server: Server, channel: grpc.Channel) -> None:
    """Bytes that were changed are an answer, or an error with a status; none is a fault of the server's."""
    whole = infer_request(id="r1")
    for name, values in INPUTS.items():
        whole.inputs.add(name=name, datatype=np_to_triton_dtype(values.dtype), shape=values.shape)
        whole.raw_input_contents.append(values.tobytes())
    data, rng = whole.SerializeToString(), random.Random(5)
    ask = channel.unary_unary(f"/{NAME}/ModelInfer", _registered_method=False)
    outcomes: dict[Any, int] = {}
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        try:
            ask(bytes(changed), timeout=300)
            status = grpc.StatusCode.OK
        except grpc.RpcError as error:
            status = error.code()
        outcomes[status] = outcomes.get(status, 0) + 1
    assert outcomes.keys() == {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
    }
    assert len(server.workers()) == 2


@pytest.mark.drawn(0.5)
def test_requests_are_as_large_as_those_of_http(start: Callable[..., Server]) -> None:
    one = start("--grpc-port", 0, "--max-body-bytes", 4096)
    with triton.InferenceServerClient(one.grpc) as client:
        client.infer("demo", sent(triton, {"user": np.zeros((1, 8), np.int64)}))
        with pytest.raises(InferenceServerException) as caught:
            client.infer("demo", sent(triton, {"user": np.zeros((1, 100_000), np.int64)}))
        assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def test_requests_take_slots() -> None:
    """Those of a worker that HTTP's take: they wait for one, and are refused where too many do."""
    door: Any = GrpcDoor.__new__(GrpcDoor)
    door._service = SimpleNamespace(slots=Slots(1, 1, 60.0))

    async def run() -> None:
        def turn() -> Any:
            return door._turn(lambda: True)

        first = await turn()
        assert door._service.slots.is_full
        oldest, newest = (asyncio.create_task(turn()) for _ in range(2))
        with pytest.raises(ApiError, match="max_waiting"):
            await oldest
        first.end()
        last = await newest
        assert door._service.slots.is_full
        gone = asyncio.create_task(turn())
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        last.end()
        assert not door._service.slots.waiting and not door._service.slots.is_full

    asyncio.run(run())


@pytest.mark.drawn(0.25)
def test_few_messages_are_read_at_once(start: Callable[..., Server]) -> None:
    """Large ones lie with their clients until they have a slot, and take its bytes then."""
    one = start("--grpc-port", 0, "--max-response-bytes", "1MiB", "--max-in-flight-bytes", "70MiB")
    (worker,) = one.workers()
    before, body = memory_of(worker), np.zeros((1, 6_000_000), np.int64)

    def ask() -> str:
        options = [("grpc.max_send_message_length", -1)]
        with triton.InferenceServerClient(one.grpc, channel_args=options) as client:
            try:
                client.infer("demo", sent(triton, {"user": body}))
            except InferenceServerException as error:
                return str(error.status())
        return "ok"

    with ThreadPoolExecutor(8) as pool:
        found = Counter(pool.map(lambda _: ask(), range(8)))
    assert found.keys() <= {"ok", "StatusCode.UNAVAILABLE"} and found["ok"]
    assert memory_of(worker) - before < 24 * body.nbytes  # 8 messages, as gRPC, protobuf and HTTP have each


def memory_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


def test_what_is_no_request_of_tensors_is_refused_before_it_is_read(channel: grpc.Channel) -> None:
    """Many fields without content, a shape of a million dimensions: they would take a hundred times their
    bytes."""
    whole = infer_request().SerializeToString()
    ask = channel.unary_unary(f"/{NAME}/ModelInfer", _registered_method=False)
    for data, what in (
        (whole + b"\x2a\x00" * (1 << 19), "fields or more; expected at most"),
        (whole + b"\x32\x00" * (1 << 19), "fields or more; expected at most"),
        (whole + b"\x1a" + b"\x80\x80\x80\x03" + bytes(3 << 21), "bytes beside tensors"),
    ):
        with pytest.raises(grpc.RpcError, match=what) as caught:
            ask(data, timeout=300)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    request = infer_request(raw_input_contents=[b""])
    request.inputs.add(name="user", datatype="INT64", shape=[1] * 10_000)
    assert "has 10,000 dimensions" in refused(channel, "ModelInfer", request)[1]
    request = infer_request(raw_input_contents=[bytes(8)])
    for name in ("user", "liked"):
        request.inputs.add(name=name, datatype="INT64", shape=[1, 1])
    request.inputs[1].parameters["shared_memory_region"].SetInParent()
    status, details = refused(channel, "ModelInfer", request)
    assert status is grpc.StatusCode.INVALID_ARGUMENT and "1 entries; expected 2" in details


def test_what_waits_does_not_hold_up_an_end(start: Callable[..., Server]) -> None:
    """A watcher of the health and an idle stream are told, and end."""
    one = start("--grpc-port", 0, "--shutdown-timeout-s", 250)
    with grpc.insecure_channel(one.grpc) as channel, triton.InferenceServerClient(one.grpc) as client:
        watching = iter(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put(result))
        client.async_stream_infer("demo", sent(triton, {"user": np.array([[1]])}))
        assert answers.get(timeout=300) is not None
        assert end(one.process, 200) == 0
        assert next(watching).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert next(watching, None) is None


@pytest.mark.drawn(0.25)
def test_a_port_that_is_taken_is_said(server: Server) -> None:
    """Also one that another server shares among its workers."""
    port = server.grpc.rsplit(":", 1)[1]
    found = run_tableside("serve", "demo", "--port", 0, "--grpc-port", port, root=server.root)
    assert found.returncode == 1 and f"cannot listen on 127.0.0.1:{port} for gRPC" in found.stderr
