"""Unchanged clients of Triton and KServe, and what HTTP answers beside them."""

import json
import queue
import subprocess
import sys
import uuid
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shared
from grpc_calls import INPUTS, OUTPUTS, TOKEN, call, infer_request, refused, sent
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_tools import protoc
from servers import TABLES, Server
from triton_grpc import triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tableside.serving.http.grpc.messages import NAME, message

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
    request.inputs[1].datatype = "BF16"
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


@pytest.mark.drawn(0.25)
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
    assert 'tableside_request_seconds_count{model="demo",outcome="ok",protocol="grpc"}' in text


def test_the_protocol_is_compiled(tmp_path: Path) -> None:
    """inference.pb is inference.proto: protoc -I serving/http/grpc --descriptor_set_out=inference.pb."""
    folder = resources.files("tableside.serving.http.grpc")
    made = tmp_path / "inference.pb"
    assert protoc.main(["", f"-I{folder}", f"--descriptor_set_out={made}", f"{folder}/inference.proto"]) == 0
    assert made.read_bytes() == (folder / "inference.pb").read_bytes()
