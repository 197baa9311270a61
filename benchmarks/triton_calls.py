"""Requests as a program makes them with tritonclient: ids and vectors in bodies, or in a region of system
shared memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import orjson
import tritonclient.http as triton
from numpy.typing import NDArray
from tritonclient.utils import shared_memory

from tableside.serving.cli.commands.bench import HEADER_LENGTH

REGION = "triton"
Tensors = list[tuple[str, str, NDArray[Any]]]  # name, datatype and values of each input
DTYPES = {"INT64": np.int64, "INT32": np.int32}


def tensors(headers: dict[str, str], body: bytes) -> Tensors:
    """The inputs of a request that is encoded."""
    at = int(headers[HEADER_LENGTH])
    found: Tensors = []
    for entry in orjson.loads(body[:at])["inputs"]:
        size = entry["parameters"]["binary_data_size"]
        values = np.frombuffer(body[at : at + size], DTYPES[entry["datatype"]]).reshape(entry["shape"])
        found.append((entry["name"], entry["datatype"], values))
        at += size
    return found


class TritonCalls:
    """Calls of one client, each of which makes its inputs anew, and ends when all vectors can be read as
    arrays."""

    def __init__(self, url: str, model: str, outputs: dict[str, tuple[int, ...]], ids_bytes: int) -> None:
        """outputs: names and shapes of the vectors, fp32. ids_bytes: of one request's inputs, at most."""
        self._client = triton.InferenceServerClient(urlsplit(url).netloc)
        self._model, self._outputs = model, outputs
        self._sizes = {name: 4 * int(np.prod(shape)) for name, shape in outputs.items()}
        self._ids_at = sum(self._sizes.values())
        self._key = f"{REGION}-{id(self):x}"
        self._region = shared_memory.create_shared_memory_region(
            REGION, self._key, self._ids_at + ids_bytes, create_only=True
        )
        self._client.register_system_shared_memory(REGION, self._key, self._ids_at + ids_bytes)

    def body(self, inputs: Tensors) -> list[NDArray[np.float32]]:
        """The vectors of a request whose ids and vectors are bytes in bodies."""
        sent = []
        for name, datatype, values in inputs:
            sent.append(triton.InferInput(name, list(values.shape), datatype))
            sent[-1].set_data_from_numpy(values, binary_data=True)
        asked = [triton.InferRequestedOutput(name, binary_data=True) for name in self._outputs]
        result = self._client.infer(self._model, sent, outputs=asked)
        return [result.as_numpy(name) for name in self._outputs]

    def regions(self, inputs: Tensors) -> list[NDArray[np.float32]]:
        """The same, where ids and vectors lie in the region. The next call changes what is returned."""
        sent, at = [], self._ids_at
        for name, datatype, values in inputs:
            shared_memory.set_shared_memory_region(self._region, [values], at)
            sent.append(triton.InferInput(name, list(values.shape), datatype))
            sent[-1].set_shared_memory(REGION, values.nbytes, at)
            at += values.nbytes
        asked, found, at = [], [], 0
        for name, size in self._sizes.items():
            asked.append(triton.InferRequestedOutput(name))
            asked[-1].set_shared_memory(REGION, size, at)
            at += size
        self._client.infer(self._model, sent, outputs=asked)
        at = 0
        for name, shape in self._outputs.items():
            found.append(shared_memory.get_contents_as_numpy(self._region, np.float32, list(shape), at))
            at += self._sizes[name]
        return found

    def close(self) -> None:
        self._client.unregister_system_shared_memory(REGION)
        self._client.close()
        shared_memory.destroy_shared_memory_region(self._region)


@contextmanager
def triton_calls(
    url: str, model: str, outputs: dict[str, tuple[int, ...]], requests: Sequence[Tensors]
) -> Iterator[TritonCalls]:
    """A client with a region that has room for any of the requests."""
    calls = TritonCalls(
        url, model, outputs, max(sum(values.nbytes for _, _, values in one) for one in requests)
    )
    try:
        yield calls
    finally:
        calls.close()
