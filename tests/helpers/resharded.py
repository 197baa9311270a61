"""A table to be resharded, and what its owners hold."""

from pathlib import Path

import numpy as np
from raw_segments import RawTable
from support import rows_of

from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredRows
from tableside.loader.shards.reshard import ReshardResult, ReshardSettings, owner_names, reshard
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat

EXTREMES = np.array([-(2**63), 2**63 - 1, -1, 0, 1, 1 << 32, -(1 << 32)], np.int64)
RANDOM = np.random.default_rng(1).permutation(
    np.unique(np.concatenate([EXTREMES, np.random.default_rng(2).integers(-(2**63), 2**63 - 1, 900)]))
)


def raw(
    ids: np.ndarray = RANDOM, dim: int = 64, row_format: RowFormat = RowFormat.INT8, **how: object
) -> RawTable:
    return RawTable(ids, rows_of(ids.size, dim), row_format, **{"buckets": 16, **how})  # type: ignore[arg-type]


def attached(root: Path, owners: int) -> list[Segment]:
    """The live versions of so many owners."""
    return [Model(root, name).attach() for name in owner_names("demo", owners)]


def again(root: Path, owners: int, before: int = 1) -> ReshardResult:
    """Reshards what so many hold."""
    return reshard(root, "demo", owners, ReshardSettings(before))


def bytes_of(segment: Segment) -> list[bytes]:
    """All rows and indexes."""
    return [stored_bytes(segment, s) for s in segment.header.stored]


def stored_bytes(segment: Segment, s: StoredRows) -> bytes:
    return segment.mapping.bytes[s.offset : s.offset + s.bytes].tobytes()
