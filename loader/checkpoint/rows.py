"""`Matrix`: a checkpoint's tensor as places in files, which a format's reader finds. `Ids`: a tensor of ids.

Pairs of the two and other tables of raw ids are in `keyed`. Rows are read with preadv into the caller's
buffer, not through a mapping, so that a truncated file or failing disk gives an error instead of SIGBUS.
"""

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tableside.loader.checkpoint.archive import ArchiveRecord
from tableside.loader.checkpoint.keyed.keyed import KeyedRows, KeyedTables
from tableside.loader.checkpoint.window import read_into
from tableside.loader.errors import CheckpointError
from tableside.loader.files import open_regular
from tableside.quant import Source
from tableside.quant.cpu.backend import ITEM_TYPES

SOURCES = {
    "f32": Source.FP32, "float32": Source.FP32, "<f4": Source.FP32,
    "f16": Source.FP16, "float16": Source.FP16, "<f2": Source.FP16,
    "bf16": Source.BF16, "bfloat16": Source.BF16,
}  # fmt: skip
_ID_TYPES: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("i64", "int64", "<i8"), np.dtype("<i8")),
    **dict.fromkeys(("i32", "int32", "<i4"), np.dtype("<i4")),
}
LIMIT_TENSORS = 250_000  # of one checkpoint; each costs some 700 bytes of memory here
LARGEST_DIM = 1 << 22  # 16 MiB of fp32, which are read at once
# (shard, offset in its file, the bytes as they lie there), from any thread
Seen = Callable[["RowShard", int, memoryview], None]


@dataclass(frozen=True, slots=True)
class RowShard:
    """A contiguous part of a matrix: rows [row, row + rows), columns [column, column + columns), row-major.
    record: the archive record with its CRC-32, or None. constant: what each row has here, instead of what
    lies in a file."""

    path: Path
    offset: int
    row: int
    rows: int
    column: int
    columns: int
    record: ArchiveRecord | None = None
    constant: bytes | None = None


class Tensor(NamedTuple):
    """A tensor as a format's reader found it. dtype: the format's name, in small letters; shards: None: its
    values are not row-major."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[RowShard, ...] | None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class ShardedRows:
    """Base of matrices and tensors of ids: [rows, width] items of `item_bytes`, in shards that cover it."""

    __slots__ = ()
    key: str
    rows: int
    dim: int
    shards: tuple[RowShard, ...]

    @property
    def item_bytes(self) -> int:
        raise NotImplementedError

    @property
    def width(self) -> int:
        return self.dim

    @property
    def row_bytes(self) -> int:
        return self.width * self.item_bytes

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    def span(self, shard: RowShard) -> tuple[int, int]:
        """[begin, end) of a shard's bytes in its file."""
        if shard.constant is not None:
            return 0, 0
        return shard.offset, shard.offset + shard.rows * shard.columns * self.item_bytes

    def check(self, checkpoint: Path) -> Self:
        """Raises CheckpointError unless the shards cover every value once within their files."""
        if self.dim > LARGEST_DIM:
            raise CheckpointError(
                f"{checkpoint}: {self.key!r} has {self.rows:,} rows of {self.dim:,} values; expected at most "
                f"{LARGEST_DIM:,}: a file of it is longer than what was written there, or lacks rows"
            )
        sizes: dict[Path, int] = {}
        covered = 0
        for s in self.shards:
            if s.row < 0 or s.column < 0 or s.row + s.rows > self.rows or s.column + s.columns > self.width:
                raise CheckpointError(
                    f"{s.path}: a shard of {self.key!r} lies outside the tensor's [{self.rows}, {self.width}]"
                )
            covered += s.rows * s.columns
            if s.constant is not None:
                continue
            size = sizes[s.path] if s.path in sizes else sizes.setdefault(s.path, file_size(s.path))
            begin, end = self.span(s)
            if begin < 0 or end > size:
                raise CheckpointError(
                    f"{s.path}: {self.key!r} ends at byte {end}, the file at {size}; it was truncated or is "
                    "still being written"
                )
        if (twice := _overlapping(self.shards)) is not None:
            raise CheckpointError(
                f"{twice.path}: two shards of {self.key!r} hold the same values; the checkpoint is "
                "inconsistent"
            )
        if covered != self.rows * self.width:
            raise CheckpointError(
                f"{checkpoint}: {self.key!r} has [{self.rows}, {self.width}] values, its shards hold "
                f"{covered} of {self.rows * self.width}; a part of the checkpoint is missing"
            )
        return self


@dataclass(frozen=True, slots=True)
class Matrix(ShardedRows):
    """A checkpoint's tensor [rows, dim]. source: type of its values; `check` proves that shards cover it.
    Rows that are packed lie in shards of bytes: columns of `row_format`'s rows."""

    key: str
    rows: int
    dim: int
    source: Source
    shards: tuple[RowShard, ...]

    @property
    def item_bytes(self) -> int:
        return self.source.item_bytes

    @property
    def width(self) -> int:
        return self.source.items(self.dim)

    def empty(self, rows: int, buffer: bytearray | None = None) -> NDArray[Any]:
        """Returns room for rows, [rows, width], in `buffer` or new memory."""
        dtype = ITEM_TYPES[self.source]
        if buffer is None:
            return np.empty((rows, self.width), dtype)
        return np.frombuffer(buffer, dtype, rows * self.width).reshape(rows, self.width)


@dataclass(frozen=True, slots=True)
class Ids(ShardedRows):
    """A tensor of ids [rows] or [rows, 1]. dtype: as they lie, int64 or int32."""

    key: str
    rows: int
    dtype: np.dtype[Any]
    shards: tuple[RowShard, ...]
    dim: ClassVar[int] = 1  # type: ignore[misc]  # a field of the others

    @property
    def item_bytes(self) -> int:
        return self.dtype.itemsize


def _overlapping(shards: Iterable[RowShard]) -> RowShard | None:
    """Returns a shard that overlaps another, or None. Sweeps rows with the sorted covered columns."""
    begins = [(s.row, 1, i, s) for i, s in enumerate(shards) if s.rows and s.columns]
    ends = [(s.row + s.rows, 0, i, s) for _, _, i, s in begins]
    here: list[tuple[int, int]] = []  # (first column, end column)
    for _, begin, _, s in sorted(begins + ends, key=lambda event: event[:3]):
        columns = (s.column, s.column + s.columns)
        at = bisect_left(here, columns)
        if not begin:
            del here[at]
            continue
        if (at < len(here) and here[at][0] < columns[1]) or (at and here[at - 1][1] > columns[0]):
            return s
        here.insert(at, columns)
    return None


class Checkpoint:
    """A checkpoint's matrices, tensors of ids (ids) and tables of raw ids (tables, set by `open_checkpoint`),
    by key. A context manager; any thread may read."""

    def __init__(self, path: Path) -> None:
        """Of no tensors yet: a format's reader adds them."""
        self.path = path
        self.matrices: dict[str, Matrix] = {}
        self.tensors: dict[str, Tensor] = {}  # all whose places are known, by key
        self.parts: set[str] = set()  # tensors that are a part of another matrix
        self.ids: dict[str, Ids] = {}
        self.skipped: dict[str, str] = {}  # that are no matrices of floats, those of ids as well: the reason
        self.tables: KeyedTables | None = None
        self._files: dict[Path, int] = {}

    def add(self, key: str, shape: tuple[int, ...], dtype: str, shards: tuple[RowShard, ...] | None) -> None:
        """Keeps a matrix of floats or a tensor of ids, skips others. dtype: the format's name. shards: as for
        `rows_of`; None: the values are not row-major."""
        named = dtype.removeprefix("torch.").lower()
        source = SOURCES.get(named)
        if len(self.matrices) + len(self.skipped) >= LIMIT_TENSORS:
            raise CheckpointError(f"more than {LIMIT_TENSORS:,} tensors; save the tables alone")
        if key in self.matrices or key in self.skipped:
            self.matrices.pop(key, None)
            self.tensors.pop(key, None)
            self.ids.pop(key, None)
            self.skipped[key] = "two tensors have this name"
            return
        self.tensors[key] = Tensor(named, shape, shards)
        if source is None:
            self.skipped[key] = f"dtype {dtype}; expected fp32, fp16 or bf16"
            if named in _ID_TYPES and shape and (rows_of(shape) or (0, 0))[1] == 1 and shards is not None:
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

    def replace(self, key: str, matrix: Matrix) -> None:
        """Keeps a matrix in place of what `add` took the tensor for."""
        self.skipped.pop(key, None)
        self.matrices[key] = matrix

    @property
    def keyed_tables(self) -> Mapping[str, str | None]:
        """Returns the tables of raw ids: key -> the ids' key, or None where the format implies it."""
        return {} if self.tables is None else self.tables.names

    @property
    def string_tables(self) -> Collection[str]:
        """Returns the keys of the tables of raw ids whose ids are strings."""
        return () if self.tables is None else self.tables.strings

    def keyed(self, key: str, id_key: str | None = None) -> KeyedRows:
        """Opens the ids and vectors of a table of raw ids. CheckpointError: there is none, or it is
        damaged."""
        if self.tables is None:
            raise CheckpointError(
                f"{self.path}: it holds no ids for {key!r}; expected a tensor of ids, int64 or int32 [rows], "
                "beside the vectors, "
                'or leave out ids = "raw" where an id is a row number'
            )
        return self.tables.open(key, id_key)

    def matrix(self, key: str) -> Matrix:
        """Returns the matrix `key`, its shards checked; CheckpointError says what else there is."""
        if key in self.matrices:
            return self.matrices[key].check(self.path)
        if key in self.skipped:
            raise CheckpointError(f"{self.path}: {key!r} cannot be a table: {self.skipped[key]}")
        if key in self.keyed_tables:
            what = f"{self.path}: the rows of {key!r} are found by ids"
            raise CheckpointError(f'{what}; add ids = "raw" to its table in model.toml')
        raise CheckpointError(
            f"{self.path}: there is no tensor {key!r}; matrices there: {some(self.matrices)}"
        )

    def open_files(self, matrix: ShardedRows) -> None:
        """Opens the files of a matrix, ahead of reading it from several threads."""
        for shard in matrix.shards:
            if shard.constant is None and shard.path not in self._files:
                self._files[shard.path] = open_regular(
                    shard.path, "a file of the checkpoint", CheckpointError
                )

    def read(
        self,
        matrix: ShardedRows,
        start: int,
        stop: int,
        out: NDArray[Any],
        scratch: bytearray,
        seen: Seen | None = None,
    ) -> None:
        """Fills out [stop - start, width] with rows [start, stop), unconverted. scratch: as large as out, for
        column shards. seen: called with each shard's bytes. Files must be open. CheckpointError: a file is
        short or unreadable."""
        for s in matrix.shards:
            first, last = max(start, s.row), min(stop, s.row + s.rows)
            if first >= last:
                continue
            row_bytes = s.columns * matrix.item_bytes
            offset = s.offset + (first - s.row) * row_bytes
            part = out[first - start : last - start]
            if s.constant is not None:
                part[:, s.column : s.column + s.columns] = np.frombuffer(s.constant, out.dtype)
                continue
            if s.columns == matrix.width:
                block = part.reshape(-1).view(np.uint8).data
                self.fill(s.path, block, offset)
            else:
                block = memoryview(scratch)[: (last - first) * row_bytes]
                self.fill(s.path, block, offset)
                part[:, s.column : s.column + s.columns] = np.frombuffer(block, out.dtype).reshape(
                    -1, s.columns
                )
            if seen is not None:
                seen(s, offset, block)

    def fill(self, path: Path, into: memoryview, offset: int) -> None:
        """Fills a buffer with the bytes at `offset` of a file that is open."""
        read_into(into, self._files[path], path, offset)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()


def rows_of(shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns a tensor's shape as [rows, columns], [n] as [n, 1], a scalar as [1, 1]; None where it has other
    dimensions."""
    if not shape:
        return 1, 1
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


def file_size(path: Path) -> int:
    """Returns the bytes of a file. CheckpointError: it is missing."""
    try:
        return os.stat(path).st_size
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(
            f"{path}: {reason}; a part of the checkpoint is missing or unreadable"
        ) from error


def some(names: Iterable[str]) -> str:
    """Returns the first names in their order, for people."""
    listed = sorted(names)
    return (", ".join(listed[:10]) or "none") + (" ..." if len(listed) > 10 else "")


def int64_ids(values: NDArray[Any]) -> tuple[NDArray[np.int64], int]:
    """Returns integers as int64, and the index of the first that overflows, or -1."""
    if values.dtype == np.uint64 and (large := values >> np.uint64(63)).any():
        return values.astype(np.int64), int(large.argmax())
    return values.astype(np.int64, copy=False), -1


def narrowed(values: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """Returns values as fp32 or fp16, and the index of the first that overflows fp32, or -1."""
    if values.dtype in (np.float32, np.float16):
        return values.astype(values.dtype.newbyteorder("="), copy=False), -1
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    bad = np.isinf(narrow) & np.isfinite(values)
    return narrow, int(bad.argmax()) if bad.any() else -1
