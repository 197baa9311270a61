"""An unchanged tritonclient[http] is a first-class user."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as found:
        yield found


def expected(
    server: Any,
    table: str,
    ids: np.ndarray,
    lengths: np.ndarray | None,
    pooling: Pooling,
    weights: Any = None,
) -> np.ndarray:
    segment = Model(server.root, "demo").attach()
    return choose("native").lookup(
        segment.tables[table], ids.reshape(-1), lengths, pooling=pooling, weights=weights
    )


def tensor(name: str, values: np.ndarray, binary: bool) -> Any:
    datatype = {"int64": "INT64", "int32": "INT32", "float32": "FP32"}[str(values.dtype)]
    found = triton.InferInput(name, list(values.shape), datatype)
    found.set_data_from_numpy(values, binary_data=binary)
    return found


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("demo")
    assert client.is_model_ready("demo", "1")
    assert client.get_server_metadata()["extensions"][0] == "binary_tensor_data"
    metadata = client.get_model_metadata("demo")
    assert {"name": "user", "datatype": "FP32", "shape": [-1, 64]} in metadata["outputs"]
    assert {"name": "liked", "datatype": "FP16", "shape": [-1, 32]} in metadata["outputs"]
    assert {"name": "clicked.lengths", "datatype": "INT32", "shape": [-1]} in metadata["inputs"]
    assert metadata["parameters"]["backend"].startswith("native")
    config = client.get_model_config("demo")
    assert {"name": "user", "data_type": "TYPE_FP32", "dims": [-1, 64]} in config["output"]
    assert client.get_model_repository_index() == [{"name": "demo", "version": "1", "state": "READY"}]


@pytest.mark.parametrize("binary_out", [False, True], ids=["json out", "binary out"])
@pytest.mark.parametrize("binary_in", [False, True], ids=["json in", "binary in"])
def test_infer(client: Any, server: Any, binary_in: bool, binary_out: bool) -> None:
    """Dense and jagged inputs, weights, pooled and unpooled, fp32 and fp16, in one request, in either
    encoding."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, 1000, (4, 5))
    lengths = np.array([2, 0, 3, 1], np.int32)
    clicked, weights = rng.integers(0, 300, 6), rng.standard_normal(6).astype(np.float32)
    text = rng.integers(0, 50, 7)
    inputs = [
        tensor("user", user, binary_in),
        tensor("clicked.values", clicked, binary_in),
        tensor("clicked.lengths", lengths, binary_in),
        tensor("clicked.weights", weights, binary_in),
        tensor("liked.values", clicked, binary_in),
        tensor("liked.lengths", lengths, binary_in),
        tensor("text.values", text, binary_in),
    ]
    outputs = [
        triton.InferRequestedOutput(n, binary_data=binary_out) for n in ("text", "user", "clicked", "liked")
    ]
    for _ in range(2):  # the second one finds the header remembered
        result = client.infer("demo", inputs, outputs=outputs, request_id="r1")
        assert result.get_response()["id"] == "r1"
        assert result.get_response()["model_version"] == "1"
        fives = np.full(4, 5, np.int32)
        np.testing.assert_array_equal(
            result.as_numpy("user"), expected(server, "user", user, fives, Pooling.SUM)
        )
        np.testing.assert_array_equal(
            result.as_numpy("clicked"), expected(server, "item", clicked, lengths, Pooling.MEAN, weights)
        )
        np.testing.assert_array_equal(
            result.as_numpy("text"), expected(server, "word", text, None, Pooling.NONE)
        )
        liked = expected(server, "item", clicked, lengths, Pooling.SUM)
        if binary_out:  # JSON carries the fp16 values as numbers; the client decodes FP16 only from bytes
            np.testing.assert_array_equal(result.as_numpy("liked"), liked.astype(np.float16))


def test_without_named_outputs_every_input_is_answered(client: Any) -> None:
    result = client.infer(
        "demo", [tensor("user", np.zeros((2, 1), np.int64), True), tensor("text.values", np.arange(3), True)]
    )
    assert result.as_numpy("user").shape == (2, 64)
    assert result.as_numpy("text").shape == (3, 16)


def test_a_version_by_number(client: Any) -> None:
    result = client.infer("demo", [tensor("user", np.zeros((1, 1), np.int64), True)], model_version="1")
    assert result.get_response()["model_version"] == "1"
    with pytest.raises(InferenceServerException, match="version 77 of model 'demo' is not published"):
        client.infer("demo", [tensor("user", np.zeros((1, 1), np.int64), True)], model_version="77")


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(client: Any, algorithm: str) -> None:
    inputs = [tensor("user", np.zeros((2, 3), np.int64), True)]
    result = client.infer(
        "demo", inputs, request_compression_algorithm=algorithm, response_compression_algorithm=algorithm
    )
    assert result.as_numpy("user").shape == (2, 64)


def test_errors_are_decoded(client: Any) -> None:
    """The client shows our message, since it comes as {"error": ...}."""
    with pytest.raises(
        InferenceServerException,
        match=r"feature 'user': id 1000 at position 1 is outside the table's rows \[0, 1000\)",
    ) as caught:
        client.infer("demo", [tensor("user", np.array([[0, 1000]]), True)])
    assert caught.value.message().startswith("feature 'user'")  # else the client shows the whole JSON
    with pytest.raises(
        InferenceServerException, match="model 'nope' is not served here; this server has: demo"
    ):
        client.get_model_metadata("nope")


def test_statistics_count_requests_of_all_workers(client: Any) -> None:
    def counts() -> tuple[int, int, int]:
        (stats,) = client.get_inference_statistics("demo")["model_stats"]
        of = stats["inference_stats"]
        assert (
            of["success"]["ns"]
            == of["compute_input"]["ns"] + of["compute_infer"]["ns"] + of["compute_output"]["ns"]
        )
        return stats["inference_count"], of["fail"]["count"], of["compute_infer"]["ns"]

    before = counts()
    for _ in range(5):
        client.infer("demo", [tensor("user", np.zeros((2, 3), np.int64), True)])
    with pytest.raises(InferenceServerException):
        client.infer("demo", [tensor("user", np.array([[-1]]), True)])
    after = counts()
    assert (after[0] - before[0], after[1] - before[1]) == (5, 1)
    assert after[2] > before[2]


def test_large_requests_do_not_run_on_the_event_loop(client: Any) -> None:
    """Above INLINE_IDS, the same answer."""
    ids = np.random.default_rng(1).integers(0, 1000, (2, 150_000))
    found = client.infer("demo", [tensor("user", ids, True)]).as_numpy("user")
    again = client.infer("demo", [tensor("user", ids[:1], True)]).as_numpy("user")
    np.testing.assert_array_equal(found[:1], again)
