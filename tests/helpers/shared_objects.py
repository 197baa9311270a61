"""Objects of shared memory that tritonclient makes, and tensors for requests that name them."""

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

BYTES = 1 << 16
DATATYPES = {"int64": "INT64", "int32": "INT32", "float32": "FP32"}


class Shared:
    """An object of shared memory of BYTES bytes that tritonclient made, registered as a region of the same
    name."""

    def __init__(self, client: Any, name: str, size: int = BYTES) -> None:
        self.client, self.name, self.key = client, name, f"test-{uuid.uuid4().hex[:12]}"
        self.handle = shm.create_shared_memory_region(name, self.key, size, create_only=True)
        self.path = Path("/dev/shm") / self.key

    def register(self, size: int = BYTES, offset: int = 0) -> None:
        self.client.register_system_shared_memory(self.name, self.key, size, offset)

    def put(self, name: str, values: np.ndarray, offset: int = 0) -> Any:
        """An input whose values lie in the region."""
        shm.set_shared_memory_region(self.handle, [values], offset)
        found = triton.InferInput(name, list(values.shape), DATATYPES[str(values.dtype)])
        found.set_shared_memory(self.name, values.nbytes, offset)
        return found

    def ask(self, name: str, size: int, offset: int = 0) -> Any:
        """An output that is wanted in the region."""
        found = triton.InferRequestedOutput(name)
        found.set_shared_memory(self.name, size, offset)
        return found

    def get(self, result: Any, name: str, offset: int = 0) -> np.ndarray:
        """The output's values, as tritonclient's examples read them."""
        described = result.get_output(name)
        assert "data" not in described
        assert described["parameters"]["shared_memory_region"] == self.name
        dtype = {"FP32": np.float32, "FP16": np.float16, "BOOL": np.bool_, "INT64": np.int64}[
            described["datatype"]
        ]
        values = shm.get_contents_as_numpy(self.handle, dtype, described["shape"], offset)
        assert described["parameters"]["shared_memory_byte_size"] == values.nbytes
        return np.array(values)


def body(name: str, values: np.ndarray, binary: bool = True) -> Any:
    """An input in the body."""
    found = triton.InferInput(name, list(values.shape), DATATYPES[str(values.dtype)])
    found.set_data_from_numpy(values, binary_data=binary)
    return found


def refused(message: str) -> Any:
    return pytest.raises(InferenceServerException, match=message)


def user(**parameters: Any) -> list[dict[str, Any]]:
    return [{"name": "user", "datatype": "INT64", "shape": [1, 2], "parameters": parameters}]
