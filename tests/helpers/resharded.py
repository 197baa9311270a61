"""A table to be resharded, and what its owners hold."""

from pathlib import Path

import numpy as np
from raw_segments import DenseTable, RawTable
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


def some(count: int, every: int) -> np.ndarray:
    return np.arange(count) % every == 1


TABLES = {
    "int8 D 64: ids in the padding": raw(),
    "fp16 D 32: ids in an array": raw(RANDOM[:300], 32, RowFormat.FP16),
    "a default row": raw(RANDOM[:200], default=np.ones(64, np.float32)),
    "chunked": raw(np.arange(3, 1600, 2, dtype=np.int64), 8, RowFormat.FP16, bucket_ids=100),
    "chunked, most buckets empty": raw(np.array([205, 299, 700, 1400]), 8, RowFormat.FP16, bucket_ids=100),
    "extremes": raw(EXTREMES, 16, RowFormat.INT4),
    "one id": raw(np.array([-1]), 8, RowFormat.FP32),
    "no id": raw(np.empty(0, np.int64), 8, RowFormat.FP32),
    "backfilled": raw(RANDOM, 32, RowFormat.FP16, backfilled=some(RANDOM.size, 3)),
    "backfilled in one bucket": raw(
        np.arange(1600), 8, RowFormat.FP32, bucket_ids=100, backfilled=np.arange(1600) // 100 == 7
    ),
    "plain": DenseTable(rows_of(101, 16), is_plain=True),
    "dense, a default row": DenseTable(rows_of(3, 16), default=np.ones(16, np.float32)),
    "dense, ids from -50 on": DenseTable(rows_of(101, 16), RowFormat.FP32, first=-50),
    "dense, backfilled": DenseTable(rows_of(101, 16), RowFormat.FP32, backfilled=40),
}


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
