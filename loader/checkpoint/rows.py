"""`Matrix`: a tensor of a checkpoint as places in files. Every format's reader only finds the places; reading is here.

Rows are read with preadv into a buffer of the caller's, never through a mapping: a file that is truncated or a disk that
fails while it is read gives an error, not SIGBUS.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.errors import CheckpointError
from quant import Source

DTYPES: dict[Source, np.dtype[Any]] = {Source.FP32: np.dtype("<f4"), Source.FP16: np.dtype("<f2"), Source.BF16: np.dtype("<u2")}


@dataclass(frozen=True)
class Shard:
    """A part of a matrix that lies in one piece: rows [row, row + rows), columns [column, column + columns), row after row."""

    path: Path
    offset: int
    row: int
    rows: int
    column: int
    columns: int

    def overlaps(self, other: "Shard") -> bool:
        return (
            self.row < other.row + other.rows
            and other.row < self.row + self.rows
            and self.column < other.column + other.columns
            and other.column < self.column + self.columns
        )


@dataclass(frozen=True)
class Matrix:
    """A tensor [rows, dim] of a checkpoint. source: how its values are stored; its shards cover it exactly (`check`)."""

    key: str
    rows: int
    dim: int
    source: Source
    shards: tuple[Shard, ...]

    @property
    def bytes(self) -> int:
        return self.rows * self.dim * self.source.bytes

    def check(self) -> "Matrix":
        """Raises CheckpointError unless the shards cover every value once and lie inside their files."""
        covered = 0
        for i, s in enumerate(self.shards):
            if s.row < 0 or s.column < 0 or s.row + s.rows > self.rows or s.column + s.columns > self.dim:
                raise CheckpointError(f"{s.path}: a shard of {self.key!r} lies outside the tensor's [{self.rows}, {self.dim}]")
            if any(s.overlaps(t) for t in self.shards[:i]):
                raise CheckpointError(
                    f"{s.path}: two shards of {self.key!r} hold the same values; the checkpoint is inconsistent"
                )
            end = s.offset + s.rows * s.columns * self.source.bytes
            if s.offset < 0 or end > (size := file_size(s.path)):
                raise CheckpointError(
                    f"{s.path}: {self.key!r} ends at byte {end}, the file at {size}; it was truncated or is still being written"
                )
            covered += s.rows * s.columns
        if covered != self.rows * self.dim:
            raise CheckpointError(
                f"{self.key!r} has [{self.rows}, {self.dim}] values, its shards hold {covered} of {self.rows * self.dim}; "
                "a part of the checkpoint is missing"
            )
        return self


class Checkpoint:
    """The matrices of a checkpoint, by key, and the files that they are read from. A context manager; any thread may read."""

    def __init__(self, path: Path, matrices: Mapping[str, Matrix], skipped: Mapping[str, str]) -> None:
        """skipped: tensors that are not matrices of floats, with the reason."""
        self.path, self.matrices, self.skipped = path, dict(matrices), dict(skipped)
        self._files: dict[Path, int] = {}

    def matrix(self, key: str) -> Matrix:
        """The matrix `key`, its shards checked; CheckpointError says what else there is."""
        if key in self.matrices:
            return self.matrices[key].check()
        if key in self.skipped:
            raise CheckpointError(f"{self.path}: {key!r} cannot be a table: {self.skipped[key]}")
        near = ", ".join(sorted(self.matrices)[:10]) or "none"
        raise CheckpointError(
            f"{self.path}: there is no tensor {key!r}; matrices there: {near}{' ...' if len(self.matrices) > 10 else ''}"
        )

    def open_files(self, matrix: Matrix) -> None:
        """Opens the files of a matrix, ahead of reading it from several threads."""
        for shard in matrix.shards:
            if shard.path not in self._files:
                try:
                    self._files[shard.path] = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise CheckpointError(f"{shard.path}: {error.strerror}") from error

    def read(self, matrix: Matrix, start: int, stop: int, out: NDArray[Any], scratch: bytearray) -> None:
        """Fills out [stop - start, dim] with rows [start, stop). scratch: at least as many bytes as out, for column shards.

        Caller has opened the files. CheckpointError: a file ended early or could not be read.
        """
        for s in matrix.shards:
            first, last = max(start, s.row), min(stop, s.row + s.rows)
            if first >= last:
                continue
            row_bytes = s.columns * matrix.source.bytes
            offset = s.offset + (first - s.row) * row_bytes
            part = out[first - start : last - start]
            if s.columns == matrix.dim:
                self._fill(s.path, part.reshape(-1).view(np.uint8).data, offset)
            else:
                block = memoryview(scratch)[: (last - first) * row_bytes]
                self._fill(s.path, block, offset)
                part[:, s.column : s.column + s.columns] = np.frombuffer(block, out.dtype).reshape(-1, s.columns)

    def _fill(self, path: Path, into: memoryview, offset: int) -> None:
        while len(into):
            try:
                count = os.preadv(self._files[path], [into], offset)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read at byte {offset}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(
                    f"{path}: ends at byte {offset}, {len(into)} bytes early; it was truncated while it was read"
                )
            into, offset = into[count:], offset + count

    def fingerprint(self, matrices: Iterable[Matrix]) -> dict[str, list[int]]:
        """File -> [bytes, modification time in ns], of the files that hold `matrices`: what a version was made from."""
        paths = sorted({s.path for m in matrices for s in m.shards})
        return {str(p): [p.stat().st_size, p.stat().st_mtime_ns] for p in paths}

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


def file_size(path: Path) -> int:
    """Bytes of a file; CheckpointError where it is missing."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; a part of the checkpoint is missing or unreadable") from error


class Collector:
    """Gathers a checkpoint's tensors: matrices of floats go one way, everything else is skipped with a reason."""

    def __init__(self) -> None:
        self.matrices: dict[str, Matrix] = {}
        self.skipped: dict[str, str] = {}

    def add(self, key: str, shape: tuple[int, ...], dtype: str, shards: tuple[Shard, ...] | None) -> None:
        """dtype: the format's own name. shards None: the values do not lie row after row."""
        source = _SOURCES.get(dtype.removeprefix("torch.").lower())
        if source is None:
            self.skipped[key] = f"dtype {dtype}; expected fp32, fp16 or bf16"
        elif len(shape) != 2 or min(shape) < 1:
            self.skipped[key] = f"shape {list(shape)}; expected [rows, dim] with at least one of each"
        elif shards is None:
            self.skipped[key] = "its values do not lie row after row; save it with .contiguous()"
        else:
            self.matrices[key] = Matrix(key, shape[0], shape[1], source, shards)


_SOURCES = {
    "f32": Source.FP32, "float32": Source.FP32, "<f4": Source.FP32,
    "f16": Source.FP16, "float16": Source.FP16, "<f2": Source.FP16,
    "bf16": Source.BF16, "bfloat16": Source.BF16,
}  # fmt: skip


def whole(path: Path, offset: int, shape: tuple[int, ...]) -> tuple[Shard, ...] | None:
    """One shard that is the whole matrix."""
    return (Shard(path, offset, 0, shape[0], 0, shape[1]),) if len(shape) == 2 else None
