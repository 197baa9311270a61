"""Infer requests and responses as bytes, for load generators and campaigns, which have connections of their own.

Features go by name (`serving.client.named`). `Client` is what looks up.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from tableside.serving.client.features import Array, Ids, array, columns
from tableside.serving.client.features import Jagged as Jagged
from tableside.serving.client.messages import read_outputs
from tableside.serving.client.named import NamedForm, vectors

HEADER_LENGTH = "Inference-Header-Content-Length"


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
    """The version and the vectors by feature of an infer response. The arrays are views of `content`."""
    head = content if header_length is None else content[: int(header_length)]
    found = vectors([(run.names, run.view(memoryview(content))) for run in read_outputs(head)], as_torch=False)
    return int(orjson.loads(head)["model_version"]), found
