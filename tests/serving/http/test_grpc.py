"""gRPC: unchanged clients of Triton and KServe, and what HTTP answers beside it."""

import asyncio
import json
import queue
import random
import re
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shared
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_tools import protoc
from servers import TABLES, Server, running
from support import end, run_tableside, until
from triton_grpc import triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tableside.serving.errors import ApiError
from tableside.serving.executors.admission import Slots
from tableside.serving.http.grpc.door import GrpcDoor
from tableside.serving.http.grpc.messages import NAME, message

TOKEN = "a token of some length"
RNG = np.random.default_rng(7)
INPUTS = {
    "user": RNG.integers(0, 1000, (4, 5)),
    "clicked.values": RNG.integers(0, 300, 6),
    "clicked.lengths": np.array([2, 0, 3, 1], np.int32),
    "clicked.weights": RNG.standard_normal(6).astype(np.float32),
    "liked": RNG.integers(0, 300, (3, 2)).astype(np.int32),
    "text.values": RNG.integers(0, 50, 7),
    "text.lengths": np.array([7, 0], np.int32),
}
OUTPUTS = ("text", "user.found", "user", "clicked", "liked")


KSERVE = """
import asyncio, json, sys
import kserve, numpy as np

async def run():
    ids = np.array([[1, 2, 3], [5, 5, 999]])
    asked = kserve.InferInput("user", list(ids.shape), "INT64")
    asked.set_data_from_numpy(ids, binary_data=True)
    request = kserve.InferRequest(model_name="demo", infer_inputs=[asked], request_id="r1")
    async with kserve.InferenceGRPCClient(sys.argv[1]) as client:
        assert await client.is_server_live() and await client.is_model_ready("demo")
        found = await client.infer(request)
    assert found.id == "r1"
    print(json.dumps(found.outputs[0].as_numpy().tolist()))

asyncio.run(run())
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("grpc")
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    options = ("--workers", 2, "--grpc-port", 0, "--allow-client-shm", "--admin-token-file", folder / "token")
    with running(folder, *options) as one:
        yield one


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.grpc) as found:
        yield found


@pytest.fixture
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as found:
        yield found


def sent(protocol: Any, inputs: dict[str, np.ndarray]) -> list[Any]:
    found = []
    for name, values in inputs.items():
        found.append(protocol.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype)))
        found[-1].set_data_from_numpy(values)
    return found


def call(channel: grpc.Channel, name: str, request: Any, **options: Any) -> Any:
    """Calls a method by our messages."""
    response = message(f"{name}Response")
    ask = channel.unary_unary(
        f"/{NAME}/{name}", type(request).SerializeToString, response.FromString, _registered_method=False
    )
    return ask(request, timeout=300, **options)


def refused(channel: grpc.Channel, name: str, request: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, name, request, **options)
    return caught.value.code(), caught.value.details()


def infer_request(**fields: Any) -> Any:
    return message("ModelInferRequest")(model_name="demo", **fields)


def test_answers_are_those_of_http(server: Server, client: Any) -> None:
    """All forms of inputs, found masks, fp16; with outputs that are named and that are not."""
    with triton_http.InferenceServerClient(server.url.removeprefix("http://")) as http:
        for names in (OUTPUTS, ()):
            results = []
            for protocol, asking in ((triton, client), (triton_http, http)):
                outputs = [protocol.InferRequestedOutput(name) for name in names] or None
                results.append(asking.infer("demo", sent(protocol, INPUTS), outputs=outputs, request_id="r1"))
            found, expected = results
            response, by_http = found.get_response(), expected.get_response()
            assert (response.id, response.model_version) == ("r1", "1")
            described = [(o.name, o.datatype, list(o.shape)) for o in response.outputs]
            assert described == [(o["name"], o["datatype"], o["shape"]) for o in by_http["outputs"]]
            assert [name for name, _, _ in described] == list(names) or not names
            for name, _, _ in described:
                np.testing.assert_array_equal(found.as_numpy(name), expected.as_numpy(name))


def test_descriptions_are_those_of_http(server: Server, client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("demo") and client.is_model_ready("demo", "1")
    assert not client.is_model_ready("nothing")
    http = server.get("/v2/models/demo").json()
    metadata = client.get_model_metadata("demo", as_json=True)
    assert metadata["platform"] == http["platform"] and metadata["versions"] == http["versions"]
    for part in ("inputs", "outputs"):
        told = [(one["name"], one["datatype"], [int(n) for n in one["shape"]]) for one in metadata[part]]
        assert told == [(one["name"], one["datatype"], one["shape"]) for one in http[part]]
    config = client.get_model_config("demo").config
    assert [(o.name, o.data_type, list(o.dims)) for o in config.output][1] == ("user", 11, [-1, 64])
    assert [i.optional for i in config.input] == [True] * len(config.input)
    assert list(config.version_policy.specific.versions) == [1]
    assert client.get_server_metadata().extensions == server.get("/v2").json()["extensions"]
    statistics = client.get_inference_statistics("demo").model_stats[0]
    assert (statistics.name, statistics.version) == ("demo", "1")
    assert len(client.get_inference_statistics().model_stats) == 1


def test_numbers_instead_of_bytes(channel: grpc.Channel) -> None:
    """As clients send them that fill in `contents`."""
    request = infer_request()
    for name, field in (("clicked.values", "int64_contents"), ("clicked.lengths", "int_contents")):
        values = INPUTS[name]
        datatype = np_to_triton_dtype(values.dtype)
        tensor = request.inputs.add(name=name, datatype=datatype, shape=values.shape)
        getattr(tensor.contents, field).extend(values.tolist())
    found = call(channel, "ModelInfer", request)
    vectors = np.frombuffer(found.raw_output_contents[0], np.float32).reshape(4, 32)
    values, lengths = INPUTS["clicked.values"], INPUTS["clicked.lengths"]
    for vector, bag in zip(vectors, np.split(values, lengths.cumsum()[:-1]), strict=True):
        expected = TABLES["item"][bag].mean(0) if bag.size else 0.0
        np.testing.assert_allclose(vector, expected, atol=0.5)  # of int4
    request.inputs[1].contents.int64_contents.append(1)
    status, details = refused(channel, "ModelInfer", request)
    assert status is grpc.StatusCode.INVALID_ARGUMENT
    assert (
        "input 'clicked.lengths' has int64_contents, its datatype is INT32; expected int_contents" in details
    )
    request.inputs[1].datatype = "BYTES"
    assert "expected its bytes in raw_input_contents" in refused(channel, "ModelInfer", request)[1]
    request.raw_input_contents.append(b"")
    assert "raw_input_contents has 1 entries; expected 2" in refused(channel, "ModelInfer", request)[1]


def test_refusals_have_the_status_of_triton(client: Any, channel: grpc.Channel) -> None:
    wrong = {"user": np.array([[1, 1000]])}
    with pytest.raises(InferenceServerException, match="id 1000 at position 1 is outside the table's") as e:
        client.infer("demo", sent(triton, wrong))
    assert e.value.status() == "StatusCode.INVALID_ARGUMENT"
    for name, version, what in (("nothing", "", "is not served here"), ("demo", "77", "is not published")):
        with pytest.raises(InferenceServerException, match=what) as e:
            client.infer(name, sent(triton, INPUTS), model_version=version)
        assert e.value.status() == "StatusCode.NOT_FOUND"
    slow = (("tableside-disk-timeout-ms", "soon"),)
    request = infer_request(raw_input_contents=[np.array([1]).tobytes()])
    request.inputs.add(name="user", datatype="INT64", shape=[1, 1])
    status, details = refused(channel, "ModelInfer", request, metadata=slow)
    assert status is grpc.StatusCode.INVALID_ARGUMENT and "expected milliseconds" in details
    unknown = channel.unary_unary(f"/{NAME}/TraceSetting", _registered_method=False)
    with pytest.raises(grpc.RpcError) as caught:
        unknown(b"", timeout=300)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_stream_of_requests(client: Any) -> None:
    """Each is answered in its turn; an error ends no stream."""
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for n in range(3):
        ids = np.array([[n, 1000 if n == 1 else 0]])
        client.async_stream_infer("demo", sent(triton, {"user": ids}), request_id=str(n))
    found = [answers.get(timeout=300) for _ in range(3)]
    client.stop_stream()
    assert [None if r is None else r.get_response().id for r, _ in found] == ["0", None, "2"]
    assert "id 1000 at position 1" in str(found[1][1])


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


def test_models_are_loaded_by_operators(client: Any, channel: grpc.Channel) -> None:
    operator = {"authorization": f"Bearer {TOKEN}"}
    index = client.get_model_repository_index().models
    assert [(m.name, m.version, m.state) for m in index] == [("demo", "1", "READY")]
    request = message("RepositoryModelLoadRequest")(model_name="demo")
    assert refused(channel, "RepositoryModelLoad", request)[0] is grpc.StatusCode.UNAUTHENTICATED
    client.unload_model("demo", headers=operator)
    assert not client.get_model_repository_index().models
    client.load_model("demo", headers=operator)
    assert client.is_model_ready("demo")
    with pytest.raises(InferenceServerException, match="load takes no parameter 'config'"):
        client.load_model("demo", headers=operator, config="{}")


def test_tensors_in_shared_memory(client: Any) -> None:
    """Inputs and outputs in regions, beside an output that is sent."""
    ids = np.array([[1, 2], [3, 4]])
    key = f"test-{uuid.uuid4().hex[:12]}"
    made = shared.create_shared_memory_region("region", key, 4096)
    try:
        shared.set_shared_memory_region(made, [ids])
        client.register_system_shared_memory("region", key, 4096)
        status = client.get_system_shared_memory_status().regions["region"]
        assert (status.key, status.byte_size) == (key, 4096)
        user = triton.InferInput("user", [2, 2], "INT64")
        user.set_shared_memory("region", ids.nbytes)
        others = sent(triton, {"text.values": INPUTS["text.values"], "text.lengths": INPUTS["text.lengths"]})
        into = triton.InferRequestedOutput("user")
        into.set_shared_memory("region", 2 * 256, offset=1024)
        result = client.infer("demo", [user, *others], outputs=[into, triton.InferRequestedOutput("text")])
        there = shared.get_contents_as_numpy(made, np.float32, [2, 64], offset=1024)
        plain = client.infer("demo", sent(triton, {"user": ids}))
        np.testing.assert_array_equal(there, plain.as_numpy("user"))
        assert result.as_numpy("text").shape == (7, 16)
        client.unregister_system_shared_memory("region")
        with pytest.raises(InferenceServerException) as caught:
            client.infer("demo", [user])
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    finally:
        shared.destroy_shared_memory_region(made)


def test_health_and_reflection(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", NAME):
        found = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=300)
        assert found.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=300)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watching = health.Watch(health_pb2.HealthCheckRequest(), timeout=300)
    assert next(iter(watching)).status == health_pb2.HealthCheckResponse.SERVING
    watching.cancel()
    database = ProtoReflectionDescriptorDatabase(channel)
    assert NAME in database.get_services()
    assert database.FindFileContainingSymbol(NAME).service[0].method[-1].name == "CudaSharedMemoryUnregister"


def test_kserve_is_a_first_class_user(server: Server) -> None:
    """In a process of its own: its messages have the names of Triton's."""
    if find_spec("kserve") is None:
        pytest.skip("the dev extra brings KServe's client")
    found = subprocess.run(
        [sys.executable, "-c", KSERVE, server.grpc], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    vectors = np.array(json.loads(found.stdout))
    np.testing.assert_allclose(vectors, TABLES["user"][[[1, 2, 3], [5, 5, 999]]].sum(1), atol=0.1)


def test_requests_are_counted_by_protocol(server: Server, client: Any) -> None:
    client.infer("demo", sent(triton, {"user": np.array([[1]])}))
    text = server.get("/metrics").text
    assert 'tableside_requests_total{model="demo",outcome="ok",protocol="grpc"}' in text.replace(
        'outcome="ok",protocol="grpc",', 'outcome="ok",protocol="grpc"}'
    )
    assert 'tableside_request_seconds_count{outcome="ok",protocol="grpc"}' in text


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


def test_a_port_that_is_taken_is_said(server: Server) -> None:
    """Also one that another server shares among its workers."""
    port = server.grpc.rsplit(":", 1)[1]
    found = run_tableside("serve", "demo", "--port", 0, "--grpc-port", port, root=server.root)
    assert found.returncode == 1 and f"cannot listen on 127.0.0.1:{port} for gRPC" in found.stderr


def test_the_protocol_is_compiled(tmp_path: Path) -> None:
    """inference.pb is inference.proto: protoc -I serving/http/grpc --descriptor_set_out=inference.pb."""
    folder = resources.files("tableside.serving.http.grpc")
    made = tmp_path / "inference.pb"
    assert protoc.main(["", f"-I{folder}", f"--descriptor_set_out={made}", f"{folder}/inference.proto"]) == 0
    assert made.read_bytes() == (folder / "inference.pb").read_bytes()
