"""What an infer request was understood as, and its response: the Open Inference Protocol's JSON, and the
outputs' bytes behind it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from tableside.serving.http.asgi import ANSWER_BYTES
from tableside.serving.http.v2 import _reader, shm
from tableside.serving.model.places import Buffer, Output
from tableside.serving.model.request import Request
from tableside.serving.shm import regions
from tableside.serving.shm.regions import PartlyOnDevice, Slice


class Sent(NamedTuple):
    """How an output is sent: as bytes, as JSON, or as bytes `into` a region."""

    output: Output
    is_binary: bool
    into: Slice | None = None

    @property
    def is_json(self) -> bool:
        return not self.is_binary and self.into is None


class InferRequest(NamedTuple):
    """A laid-out infer request with its input buffer. head: the response's JSON, empty if an output is sent
    as JSON. parts: (start, end) in the output buffer to send; None: all. offsets: a kjt's offsets and their
    place in the output buffer. outputs: () if head, parts and `into` suffice. json_bytes: of outputs in JSON.
    into: parts of the output buffer to write into regions. timeout_us: for which it waits for rows; 0: as
    long as the server says."""

    request: Request
    inputs: Any
    head: bytes
    parts: tuple[tuple[int, int], ...] | None
    offsets: tuple[int, bytes] | None
    has_binary: bool = True
    json_bytes: int = 0
    outputs: tuple[Sent, ...] = ()
    request_id: str = ""
    into: tuple[Slice, ...] = ()
    timeout_us: int = 0

    def made_bytes(self, came: Any) -> int:
        """Bytes of inputs that were copied, from regions, JSON or INT32 ids. came: the client's bytes."""
        made = self.inputs.inputs if isinstance(self.inputs, PartlyOnDevice) else self.inputs
        return 0 if made is came else len(made)

    @property
    def is_inline(self) -> bool:
        """Whether JSON and regions take so few bytes that the event loop may write them."""
        if not self.into:
            return self.json_bytes <= ANSWER_BYTES
        return self.json_bytes + sum(s.size for s in self.into) <= shm.INLINE_BYTES


def described(
    request: Request, request_id: str, outputs: Sequence[Sent], buffer: Buffer | None
) -> dict[str, Any]:
    """Returns a response's JSON. buffer: of the outputs; None: none of them is JSON."""
    named = []
    for output, is_binary, into in outputs:
        entry: dict[str, Any] = {
            "name": output.feature,
            "datatype": output.datatype,
            "shape": list(output.shape),
        }
        if is_binary:
            entry["parameters"] = {"binary_data_size": output.bytes}
        elif into is not None:
            entry["parameters"] = {shm.REGION: into.region.entry.name, shm.SIZE: output.bytes}
        else:
            assert buffer is not None
            values = output.view(buffer).reshape(-1)
            is_float = values.dtype.kind == "f"
            entry["data"] = orjson.Fragment(_reader.floats(values, output.half)) if is_float else values
        named.append(entry)
    response: dict[str, Any] = {
        "model_name": request.model,
        "model_version": str(request.version),
        "outputs": named,
    }
    if request.sequence:
        response["parameters"] = {"sequence": request.sequence}
    return {"id": request_id, **response} if request_id else response


def encode(infer: InferRequest, buffer: Buffer) -> tuple[bytes, list[Any]]:
    """Returns the response's JSON and its binary parts, views of `buffer`. Writes outputs to regions.
    ApiError: a region is gone or full."""
    if infer.offsets is not None:
        at, values = infer.offsets
        buffer[at : at + len(values)] = np.frombuffer(values, np.uint8)
    regions.write(infer.into, buffer.data)
    head = infer.head or orjson.dumps(
        described(infer.request, infer.request_id, infer.outputs, buffer), option=orjson.OPT_SERIALIZE_NUMPY
    )
    if infer.parts is None:
        return head, [buffer.data] if buffer.size else []
    return head, [buffer[start:end].data for start, end in infer.parts if end > start]
