"""`Collector`: keeps the matrices of floats and the tensors of ids that a format's reader finds."""

from pathlib import Path
from typing import Any

import numpy as np

from tableside.loader.checkpoint.archive import ArchiveRecord
from tableside.loader.checkpoint.rows import Checkpoint, Ids, Matrix, RowShard
from tableside.loader.errors import CheckpointError
from tableside.quant import Source

LIMIT_TENSORS = 250_000  # of one checkpoint; each costs some 700 bytes of memory here


class Collector:
    """Gathers a checkpoint's tensors: keeps matrices of floats, skips others with a reason."""

    def __init__(self) -> None:
        self.matrices: dict[str, Matrix] = {}
        self.ids: dict[str, Ids] = {}
        self.skipped: dict[str, str] = {}

    def checkpoint(self, path: Path) -> Checkpoint:
        return Checkpoint(path, self.matrices, self.skipped, self.ids)

    def add(self, key: str, shape: tuple[int, ...], dtype: str, shards: tuple[RowShard, ...] | None) -> None:
        """dtype: the format's name. shards: as for `rows_of`; None: the values are not row-major."""
        named = dtype.removeprefix("torch.").lower()
        source = _SOURCES.get(named)
        if len(self.matrices) + len(self.skipped) >= LIMIT_TENSORS:
            raise CheckpointError(f"more than {LIMIT_TENSORS:,} tensors; save the tables alone")
        if key in self.matrices or key in self.skipped:
            self.matrices.pop(key, None)
            self.ids.pop(key, None)
            self.skipped[key] = "two tensors have this name"
        elif source is None:
            self.skipped[key] = f"dtype {dtype}; expected fp32, fp16 or bf16"
            if named in _ID_TYPES and (rows_of(shape) or (0, 0))[1] == 1 and shards is not None:
                self.ids[key] = Ids(key, shape[0], _ID_TYPES[named], shards)
        elif len(shape) != 2 or min(shape) < 1:
            self.skipped[key] = f"shape {list(shape)}; expected [rows, dim] with at least one of each"
        elif shards is None:
            self.skipped[key] = "its values do not lie row after row; save it with .contiguous()"
        else:
            self.matrices[key] = Matrix(key, shape[0], shape[1], source, shards)

    def skip(self, key: str, why: str) -> None:
        if key in self.skipped or len(self.skipped) < LIMIT_TENSORS:
            self.skipped[key] = why


_SOURCES = {
    "f32": Source.FP32, "float32": Source.FP32, "<f4": Source.FP32,
    "f16": Source.FP16, "float16": Source.FP16, "<f2": Source.FP16,
    "bf16": Source.BF16, "bfloat16": Source.BF16,
}  # fmt: skip


_ID_TYPES: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("i64", "int64", "<i8"), np.dtype("<i8")),
    **dict.fromkeys(("i32", "int32", "<i4"), np.dtype("<i4")),
}


def rows_of(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns a tensor's shape as [rows, columns], [n] as [n, 1]; None where it has other dimensions."""
    if len(shape) == 1:
        return shape[0], 1
    return (shape[0], shape[1]) if len(shape) == 2 else None


def whole(
    path: Path, offset: int, shape: tuple[int, ...], record: ArchiveRecord | None = None
) -> tuple[RowShard, ...] | None:
    """One shard that is the whole tensor; None where it has no rows and columns."""
    if (flat := rows_of(shape)) is None:
        return None
    return (RowShard(path, offset, 0, flat[0], 0, flat[1], record),)
