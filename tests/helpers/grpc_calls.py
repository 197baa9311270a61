"""Calls over gRPC, by our messages and by tritonclient's."""

from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.utils import np_to_triton_dtype

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
