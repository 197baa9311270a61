"""Infer requests and responses as bytes, for tests and campaigns, which have connections of their own.
Features go by name."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from tableside.serving.cli.commands.bench import HEADER_LENGTH
from tableside.serving.client.features import Array, Ids, array, columns
from tableside.serving.client.messages import DTYPES
from tableside.serving.client.named import NamedForm


def encode(
    features: Mapping[str, Ids], outputs: Sequence[str] | None = None, dense: Mapping[str, Any] | None = None
) -> tuple[dict[str, str], bytes]:
    """The headers and the body of an infer request. outputs: those that are asked for; None: all.

    FeatureError: a feature or a dense tensor cannot be sent.
    """
    given = columns(features)
    arrays = {name: array(value, np.dtype("<f4"), name) for name, value in (dense or {}).items()}
    json_bytes, parts = NamedForm(given.names, given.kinds, tuple(arrays), outputs).encode(given, arrays)
    return {HEADER_LENGTH: str(json_bytes), "Content-Type": "application/octet-stream"}, b"".join(parts)


def decode(header_length: str | None, content: bytes) -> tuple[int, dict[str, Array]]:
    """The version and the vectors by feature of an infer response. Those that came as bytes are views of
    `content`."""
    length = len(content) if header_length is None else int(header_length)
    head = orjson.loads(content[:length])
    vectors, at = {}, length
    for output in head["outputs"]:
        dtype, shape = DTYPES[output["datatype"]], output["shape"]
        if "data" in output:
            vectors[output["name"]] = np.array(output["data"], dtype).reshape(shape)
            continue
        vectors[output["name"]] = np.ndarray(shape, dtype, content, at)
        at += output["parameters"]["binary_data_size"]
    return int(head["model_version"]), vectors
