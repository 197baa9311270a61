"""Requests over gRPC that are wrong in every way: their fields, their bytes, single calls and streams.

Promised: whatever comes is answered rightly or refused as its caller's fault, with a reason; no worker dies,
no descriptor leaks, and a stream goes on behind a request that was refused.

The oracle reads the message that was sent by tritonclient's classes, and knows rows by the formula of
campaigns/request_cases.py.
"""

import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from threading import Lock
from typing import Any
from unittest.mock import patch

import grpc
import numpy as np
from google.protobuf import descriptor_pool

from campaigns.common import (
    FEATURES,
    Goal,
    SameWorkers,
    at_least,
    folders,
    none,
    publish,
    random_of,
    standalone,
)
from campaigns.request_cases import HOSTILE, VALUE, Unclear, Vectors, answer_from, tensors
from campaigns.requests import same
from tableside.serving.cli.local import local_server
from tableside.serving.errors import INTERNAL_ERROR

_pool = descriptor_pool.DescriptorPool()  # KServe's client has messages of the same names
with patch.object(descriptor_pool, "Default", lambda: _pool):
    from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

LANES, STREAMED, TIMEOUT_S = 8, 0.2, 60.0
SERVICE = "/inference.GRPCInferenceService"
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
STATUS = {INTERNAL_ERROR: grpc.StatusCode.INTERNAL}  # streams have texts alone
FIELDS = {"INT64": "int64_contents", "INT32": "int_contents", "FP32": "fp32_contents"}
DTYPES = {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4"}
REGION = "shared_memory_region"
PARAMETERS = (REGION, "shared_memory_offset", "binary_data_size", "binary_data", "timeout", "é")
GOALS: dict[str, Goal] = {
    "requests": at_least(50_000),
    **dict.fromkeys(("wrongly refused", "wrongly answered", "faults", "crashed workers"), none()),
    **dict.fromkeys(("internal errors in the metrics", "descriptors leaked"), none()),
}


# ---- requests ----


def right(chance: random.Random) -> ModelInferRequest:
    """Some features, as bytes or as numbers."""
    request, is_raw = ModelInferRequest(model_name="demo"), chance.random() < 0.7
    for feature in chance.sample(sorted(FEATURES), chance.randint(1, len(FEATURES))):
        for name, datatype, values in tensors(chance, feature):
            one = request.inputs.add(name=name, datatype=datatype, shape=values.shape)
            if is_raw:
                request.raw_input_contents.append(values.tobytes())
            else:
                getattr(one.contents, FIELDS[datatype]).extend(values.reshape(-1).tolist())
    if chance.random() < 0.3:
        request.id, request.model_version = chance.choice(("7", "é")), "1"
    if chance.random() < 0.3:
        named = sorted({name.partition(".")[0] for name in (one.name for one in request.inputs)})
        for name in chance.sample(named, chance.randint(1, len(named))):
            request.outputs.add(name=name)
    return request


def mutated(request: ModelInferRequest, chance: random.Random) -> bytes:
    """One to three things changed: fields, then perhaps bytes."""
    for _ in range(chance.randint(1, 3)):
        chance.choice(CHANGES)(request, chance)
    data = bytearray(request.SerializeToString())
    if chance.random() < 0.3 and data:
        at = chance.randrange(len(data))
        changed = bytes(chance.randrange(256) for _ in range(chance.randint(0, 4)))
        data[at : at + chance.randint(0, 4)] = changed
    return bytes(data)


def _change_input(request: ModelInferRequest, chance: random.Random) -> None:
    if not request.inputs:
        return
    one = chance.choice(request.inputs)
    text = chance.choice([value for value in HOSTILE if isinstance(value, str)])
    whole = chance.choice([v for v in HOSTILE if type(v) is int and -(2**63) <= v < 2**63])
    what = chance.randrange(7)
    if what == 0:
        one.name = text
    elif what == 1:
        one.datatype = chance.choice((text, *FIELDS, "BYTES", "UINT64"))
    elif what == 2 and one.shape:
        one.shape[chance.randrange(len(one.shape))] = whole
    elif what == 3:
        one.shape.append(chance.choice((0, 1, whole)))
    elif what == 4:
        getattr(one.contents, chance.choice(list(FIELDS.values()))).append(1)
    elif what == 5:
        request.inputs.add().CopyFrom(one)
    else:
        _change_parameters(one.parameters, chance)


def _change_parts(request: ModelInferRequest, chance: random.Random) -> None:
    """The tensors' bytes: fewer or more of them, or others."""
    raw = request.raw_input_contents
    if not raw or chance.random() < 0.2:
        raw.append(chance.choice((b"", bytes(8))))
        return
    at = chance.randrange(len(raw))
    data = raw[at]
    raw[at] = chance.choice((b"", data[:-1], data + bytes(4), data + data, bytes(len(data)), data[::-1]))
    if chance.random() < 0.2:
        del raw[at]


def _change_request(request: ModelInferRequest, chance: random.Random) -> None:
    text = chance.choice([value for value in HOSTILE if isinstance(value, str)])
    what = chance.randrange(5)
    if what == 0:
        request.model_name = text
    elif what == 1:
        request.model_version = chance.choice((text, "1", "2", "01", "-1", "9" * 30))
    elif what == 2:
        request.outputs.add(name=text)
    elif what == 3 and request.inputs:
        del request.inputs[chance.randrange(len(request.inputs))]
    else:
        _change_parameters(request.parameters, chance)


def _change_parameters(parameters: Any, chance: random.Random) -> None:
    made = parameters[chance.choice(PARAMETERS)]
    chance.choice(
        (
            lambda: setattr(made, "int64_param", chance.choice((0, 1, -1, 2**62))),
            lambda: setattr(made, "string_param", chance.choice(("", "x", "1"))),
            lambda: setattr(made, "bool_param", True),
            lambda: setattr(made, "double_param", float("nan")),
            lambda: None,
        )
    )()


CHANGES: tuple[Callable[[ModelInferRequest, random.Random], None], ...] = (
    _change_input,
    _change_input,
    _change_parts,
    _change_request,
)


# ---- the reference ----


def answer_of(data: bytes) -> Vectors:
    """What a right answer holds, feature -> vectors. Unclear: the request must be refused."""
    try:
        return _answer(ModelInferRequest.FromString(data))
    except Unclear:
        raise
    except Exception as error:  # what the reference cannot read is no request
        raise Unclear(repr(error)) from error


def _answer(request: ModelInferRequest) -> Vectors:
    parts, shapes, raw = dict[str, Any](), dict[str, list[int]](), list(request.raw_input_contents)
    if request.model_name != "demo" or int(request.model_version or 1) != 1 or not request.inputs:
        raise Unclear("not this model's, or without inputs")
    if raw and len(raw) != len(request.inputs):
        raise Unclear("other tensors' bytes than tensors")
    for n, one in enumerate(request.inputs):
        is_empty = one.datatype == "BYTES" and 0 in one.shape  # no ids are of either kind
        datatype = "INT64" if is_empty else one.datatype
        fields = [field.name for field, _ in one.contents.ListFields()]
        in_region = REGION in one.parameters and one.parameters[REGION].WhichOneof("parameter_choice")
        if one.name in parts or in_region:
            raise Unclear("an input twice, or in a region")
        if raw:
            values = np.frombuffer(raw[n], DTYPES[datatype]).tolist()
        elif fields not in ([], [FIELDS[datatype]]):
            raise Unclear("numbers of another datatype")
        else:
            values = list(getattr(one.contents, FIELDS[datatype]))
        if len(values) != int(np.prod(list(one.shape), dtype=object)):
            raise Unclear("other values than its shape says")
        parts[one.name], shapes[one.name] = values, list(one.shape)
    return answer_from(parts, shapes, [output.name for output in request.outputs])


# ---- asking ----


@dataclass
class Counts:
    """What came of the requests. details: how to see a wrong one again."""

    requests: int = 0
    answered: int = 0
    refused: int = 0
    wrong: int = 0
    faults: int = 0

    def judge(self, data: bytes, is_right: bool, answer: Any, code: Any, text: str) -> str | None:
        """Counts one; returns what is wrong with it."""
        self.requests += 1
        if answer is None:
            if code not in REFUSALS or not text:
                self.faults += 1
                return f"{code}: {text[:200]}"
            self.refused += is_right
            return f"refused: {text[:200]}" if is_right else None
        self.answered += 1
        try:
            expected = answer_of(data)
        except Unclear as unclear:
            self.wrong += 1
            return f"answered, though the reference says: {unclear}"
        if not same(decoded(answer), expected):
            self.wrong += 1
            return "the vectors differ from the reference"
        return None


def decoded(answer: ModelInferResponse) -> Vectors:
    dtypes = {"FP32": np.float32, "FP16": np.float16}
    pairs = zip(answer.outputs, answer.raw_output_contents, strict=True)
    return {o.name: np.frombuffer(raw, dtypes[o.datatype]).astype(np.float64) for o, raw in pairs}


def _asked(channel: grpc.Channel, cases: list[bytes]) -> list[tuple[Any, Any, str]]:
    """(answer, status, text) of each request, one by one or as a stream."""
    if len(cases) > 1:
        stream = channel.stream_stream(
            f"{SERVICE}/ModelStreamInfer", None, ModelStreamInferResponse.FromString, _registered_method=False
        )
        found = [
            (None, STATUS.get(one.error_message, grpc.StatusCode.INVALID_ARGUMENT), one.error_message)
            if one.error_message
            else (one.infer_response, None, "")
            for one in stream(iter(cases), timeout=TIMEOUT_S)
        ]
        assert len(found) == len(cases), f"{len(found)} answers to a stream of {len(cases)} requests"
        return found
    ask = channel.unary_unary(
        f"{SERVICE}/ModelInfer", None, ModelInferResponse.FromString, _registered_method=False
    )
    try:
        return [(ask(cases[0], timeout=TIMEOUT_S), None, "")]
    except grpc.RpcError as error:
        return [(None, error.code(), error.details() or "")]


def ask_all(target: str, seconds: float, seed: int) -> Counts:
    end, counts, lock = time.monotonic() + seconds, Counts(), Lock()

    def lane(first: int) -> None:
        with grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            for number in count(first, LANES):
                chance = random_of(seed, "grpc", number)
                some = chance.randint(2, 4) if chance.random() < STREAMED else 1
                is_right = [chance.random() < 0.2 for _ in range(some)]
                made = [right(chance) for _ in range(some)]
                cases = [
                    request.SerializeToString() if good else mutated(request, chance)
                    for request, good in zip(made, is_right, strict=True)
                ]
                found = _asked(channel, cases)
                with lock:
                    for data, good, (answer, code, text) in zip(cases, is_right, found, strict=True):
                        if (wrong := counts.judge(data, good, answer, code, text)) is not None:
                            print(f"grpc: seed {seed} case {number}: {wrong}: {data[:300]!r}", flush=True)
                if time.monotonic() > end:
                    return

    with ThreadPoolExecutor(LANES) as pool:
        list(pool.map(lane, range(LANES)))
    return counts


def run(seconds: float, seed: int) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with folders() as (root, files):
        publish(root, files, VALUE)
        with local_server(["demo"], "--grpc-port", str(port), root=root, workers=1) as server:
            target = f"127.0.0.1:{port}"
            ask_all(target, 0, seed)  # what a first request opens is no leak
            workers = SameWorkers(server, root)
            counts = ask_all(target, seconds, seed)
            figures = workers.figures()
    return {
        "requests": counts.requests,
        "answered of them": counts.answered,
        "wrongly refused": counts.refused,
        "wrongly answered": counts.wrong,
        "faults": counts.faults,
        **figures,
    }


if __name__ == "__main__":
    standalone(run)
