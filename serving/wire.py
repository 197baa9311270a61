"""The client's side of the binary protocol: from features to a request's bytes, from a response's bytes to vectors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

HEADER_LENGTH = "Inference-Header-Content-Length"
_DTYPES = {"FP32": np.float32, "FP16": np.float16}


@dataclass(frozen=True)
class Jagged:
    """A feature's ids with their bags: values int64 [ids], lengths int32 [bags], weights fp32 [ids].

    Each is an array, a tensor or a list.
    """

    values: Any
    lengths: Any = None
    weights: Any = None


Ids = Any  # an array or tensor [bags, ids a bag], a list of lists, or Jagged


def is_torch(value: Any) -> bool:
    """Whether a feature's ids are a torch tensor (torch is not imported to find out)."""
    found = value.values if isinstance(value, Jagged) else value
    return type(found).__module__.partition(".")[0] == "torch"


class FeatureError(ValueError):
    """A feature's ids, lengths or weights, or a dense tensor, cannot be sent as they were given."""


def _array(value: Any, dtype: type, name: str) -> NDArray[Any]:
    try:
        array = value.detach().cpu().numpy() if hasattr(value, "detach") else np.asarray(value)
    except (ValueError, TypeError) as error:
        raise FeatureError(f"{name}: not an array of numbers ({error})") from error
    if array.size and array.dtype.kind not in ("iu" if np.issubdtype(dtype, np.integer) else "iuf"):
        raise FeatureError(f"{name}: {array.dtype}; expected {np.dtype(dtype)}")
    converted: NDArray[Any] = np.ascontiguousarray(array, dtype)
    if converted.dtype.kind == "i" and array.size and array.dtype != converted.dtype and not np.array_equal(converted, array):
        raise FeatureError(f"{name}: values do not fit in {np.dtype(dtype)}")
    return converted


def _tensors(name: str, value: Ids) -> list[tuple[str, str, NDArray[Any]]]:
    if isinstance(value, list | tuple):
        if not all(isinstance(bag, list | tuple | np.ndarray) for bag in value):
            raise FeatureError(f"{name}: expected a list of bags, [[id, ...], ...], or Jagged(values, lengths)")
        value = Jagged([i for bag in value for i in bag], [len(bag) for bag in value])
    if not isinstance(value, Jagged):
        ids = _array(value, np.int64, name)
        if ids.ndim != 2:
            raise FeatureError(f"{name}: shape {list(ids.shape)}; expected [bags, ids a bag], or Jagged(values, lengths)")
        return [(name, "INT64", ids)]
    tensors = [(f"{name}.values", "INT64", _array(value.values, np.int64, f"{name}.values"))]
    if value.lengths is not None:
        tensors.append((f"{name}.lengths", "INT32", _array(value.lengths, np.int32, f"{name}.lengths")))
    if value.weights is not None:
        tensors.append((f"{name}.weights", "FP32", _array(value.weights, np.float32, f"{name}.weights")))
    return tensors


def encode(
    features: Mapping[str, Ids], outputs: Sequence[str] | None = None, dense: Mapping[str, Any] | None = None
) -> tuple[dict[str, str], bytes]:
    """The headers and the body of an infer request. outputs: those that are asked for; None: all.

    FeatureError: a feature or a dense tensor cannot be sent.
    """
    tensors = [t for name, value in features.items() for t in _tensors(name, value)]
    tensors += [(name, "FP32", _array(value, np.float32, name)) for name, value in (dense or {}).items()]
    inputs = [
        {"name": n, "datatype": d, "shape": list(a.shape), "parameters": {"binary_data_size": a.nbytes}} for n, d, a in tensors
    ]
    request: dict[str, Any] = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    if outputs is not None:
        request["outputs"] = [{"name": name} for name in outputs]
    head = orjson.dumps(request)
    head = head.ljust(-(-len(head) // 8) * 8)  # ids that begin at a multiple of 8 are read a little faster
    headers = {HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}
    return headers, head + b"".join(a.tobytes() for _, _, a in tensors)


def decode(header_length: str | None, content: bytes) -> tuple[int, dict[str, NDArray[Any]]]:
    """The version and the vectors by feature of an infer response. The arrays are read-only views of `content`."""
    length = len(content) if header_length is None else int(header_length)
    head = orjson.loads(content[:length])
    vectors, at = {}, length
    for output in head["outputs"]:
        dtype, shape = _DTYPES[output["datatype"]], output["shape"]
        if "data" in output:
            vectors[output["name"]] = np.array(output["data"], dtype).reshape(shape)
            continue
        count = int(np.prod(shape))
        vectors[output["name"]] = np.frombuffer(content, dtype, count, at).reshape(shape)
        at += output["parameters"]["binary_data_size"]
    return int(head["model_version"]), vectors
