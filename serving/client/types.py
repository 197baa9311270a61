"""The types of what the clients take and return. The JSON of /v1/models and of V2's metadata is described for
the server, which writes it, too."""

from collections.abc import Mapping
from typing import Any, NotRequired, Protocol, TypeAlias, TypedDict

import numpy as np
from numpy.typing import NDArray

from tableside.serving.client.features import Ids, Jagged


class AnyTensor(Protocol):
    """What tells a torch tensor from other ids, where torch is not installed."""

    @property
    def requires_grad(self) -> bool: ...


Features: TypeAlias = Mapping[str, Ids]
"""Answered with arrays. A type checker knows nothing of tensors among other ids, which make all tensors."""
TensorFeatures: TypeAlias = Mapping[str, AnyTensor | Jagged[AnyTensor]]
Vectors: TypeAlias = NDArray[np.floating[Any]]
"""fp32 or fp16 [bags, dim], or [ids, dim] of an unpooled feature."""
Mask: TypeAlias = NDArray[np.bool_]
"""[bags, ids a bag] or [ids]: False for an id without a row."""
Scores: TypeAlias = NDArray[np.float32]
"""[batch] or [batch, n]."""


class DeltaInfo(TypedDict):
    """Changes over a version. rows, bytes: of the delta; made_at: seconds since 1970, None: unknown."""

    sequence: int
    rows: int
    bytes: int
    made_at: float | None
    applied_at: float


class IdsInfo(TypedDict):
    """A table's ids: "row", from first_id on, "raw", any int64, or "string". missing: model.toml's policy;
    backfilled: ids with a row of an older version."""

    ids: str
    id_count: int
    first_id: NotRequired[int]
    missing: str
    backfilled: int


class TableInfo(IdsInfo):
    """A table. bytes: of its rows on this host; placement: where they lie."""

    name: str
    row_format: str
    rows: int
    dim: int
    bytes: int
    placement: str


class FeatureInfo(TypedDict):
    """A feature: pooling "sum", "mean" or "none"; output "fp32" or "fp16"."""

    name: str
    table: str
    pooling: str
    output: str


class ModelInfo(TypedDict):
    """A served model: its live version with the last change's sequence, and all versions there are. example:
    the body of a lookup that is answered; None: no id is known that has a row here."""

    name: str
    version: int
    sequence: int
    behind_seconds: float
    deltas: list[DeltaInfo]
    versions: list[int]
    created: str
    backend: str
    segment_bytes: int
    fp32_bytes: int
    load_seconds: float | None
    tables: list[TableInfo]
    scorer: dict[str, Any] | None
    features: list[FeatureInfo]
    example: dict[str, Any] | None


class TensorInfo(TypedDict):
    """An input or output of V2; -1 in a shape: any size."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(TypedDict):
    """V2's metadata of a model. parameters: what this server says besides."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    parameters: dict[str, Any]
