"""A table of a published version as an fp32 tensor [ids, dim], read in parts.

Rows come in stored order: by row number, or for raw ids by bucket (`quant.rows.ids`), without empty slots and
the default row. Sizes are those of the linear fp32 tensor. A slot is empty if its id belongs to another slot.
The directory gives the ids per bucket, so a read can begin anywhere after reading at most one bucket, once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tableside.loader.errors import SegmentError, VersionError
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredTable
from tableside.quant import Pooling, QuantError, Table, choose
from tableside.quant.contract import Bytes, Floats, Ids, by_row_number

PIECE_ROWS = 1 << 16  # slots that are looked at together, and rows of a chunk unless asked otherwise
_FP32, _BYTE = "float32", "uint8"
_FP32_BYTES = 4


def ids_in(slots: Ids) -> Ids:
    """Returns the ids of buckets with these slots: the inverse of `quant.rows.ids.slots_for`."""
    return np.where(slots > 0, slots - 1 - (slots - 1) // 65, 0)


class RowsWithIds:
    """The rows of a table that have ids, counted from 0. Reads rows and index in place."""

    def __init__(self, stored: StoredTable, table: Table) -> None:
        self.stored, self.table, self.count = stored, table, stored.id_count
        self._index = None if table.row_map is None else table.row_map.index
        self._blocks: dict[int, Ids] = {}

    def numbers(self, start: int, stop: int) -> Iterator[Ids]:
        """Yields row numbers of rows [start, stop), at most PIECE_ROWS each. SegmentError: the index is
        damaged."""
        if self._index is None:
            for first in range(start, stop, PIECE_ROWS):
                yield np.arange(first, min(first + PIECE_ROWS, stop), dtype=np.int64)
            return
        left = stop - start
        at, skip = self._seek(start) if left > 0 else (0, 0)
        while left > 0:
            if at >= self._index.slots:
                raise self._damaged(f"{left} rows less than ids")
            found = self._taken(at, at + PIECE_ROWS)[skip : skip + left]
            if found.size:
                yield found
            left, at, skip = left - found.size, at + PIECE_ROWS, 0

    def ids(self, numbers: Ids) -> Ids:
        """Returns the ids of these rows."""
        if self._index is not None:
            found: Ids = self._index.ids[numbers]
            return found
        return numbers + np.int64(0 if self.table.row_map is None else self.table.row_map.first)

    def _taken(self, first: int, end: int) -> Ids:
        """Returns the row numbers in [first, end) that have an id."""
        assert self.table.row_map is not None and self._index is not None
        return self.table.row_map.rows_with_ids(first, min(end, self._index.slots))[0]

    def _seek(self, row: int) -> tuple[int, int]:
        """Returns a row number and the rows to skip from it."""
        assert self._index is not None
        bucket = int(np.searchsorted(self._before, row, side="right")) - 1
        row -= int(self._before[bucket])
        if not row:
            return int(self._index.directory[bucket, 0]), 0
        blocks = self._blocks_of(bucket)
        block = int(np.searchsorted(blocks, row, side="right")) - 1
        return int(self._index.directory[bucket, 0]) + block * PIECE_ROWS, row - int(blocks[block])

    @cached_property
    def _before(self) -> Ids:
        """Returns the number of rows before each bucket, and after the last."""
        assert self._index is not None
        counts = ids_in(np.diff(self._index.directory[:, 0]))
        before = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        if before[-1] != self.count:
            raise self._damaged(f"{before[-1]} ids by its directory, {self.count} by its header")
        return before

    def _blocks_of(self, bucket: int) -> Ids:
        """Returns the rows before each block of PIECE_ROWS slots of a bucket; cached."""
        assert self._index is not None
        first, end = (int(row) for row in self._index.directory[bucket : bucket + 2, 0])
        if end - first <= PIECE_ROWS:
            return np.zeros(1, np.int64)
        if bucket not in self._blocks:
            starts = range(first, end - PIECE_ROWS, PIECE_ROWS)
            counts = [self._taken(start, start + PIECE_ROWS).size for start in starts]
            self._blocks[bucket] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return self._blocks[bucket]

    def _damaged(self, found: str) -> SegmentError:
        return SegmentError(
            f"the id index of table {self.stored.name!r} has {found}; publish the version again"
        )


@dataclass(frozen=True, eq=False)
class PartialTensor:
    """Rows of a table as fp32 [rows, dim], or linear (values or bytes); lazy. start, stop: range along dim 0
    of `shape`. dtype: "float32", or "uint8" for their bytes. QuantError: no such part or view."""

    rows: RowsWithIds
    start: int
    stop: int
    dtype: str = _FP32
    is_linear: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def dim(self) -> int:
        return self.rows.stored.dim

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self),) if self.is_linear else (len(self), self._columns)

    def element_size(self) -> int:
        """Returns the bytes of a linear element: 4, or 1 for bytes. `packed().nbytes` gives stored bytes."""
        return _FP32_BYTES if self.dtype == _FP32 else 1

    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the linear tensor: numel times element_size."""
        return self.numel() * self.element_size()

    def narrow(self, dim: int, start: int, length: int) -> "PartialTensor":
        """Returns `length` rows (linear: elements) from `start`, which may be negative."""
        if dim not in (0, -len(self.shape)):
            raise QuantError(
                f"narrow along dim {dim}: rows are read whole; expected dim 0; narrow what numpy() returns "
                "instead"
            )
        first = start + len(self) if start < 0 else start
        if not 0 <= first <= len(self) or not 0 <= length <= len(self) - first:
            raise QuantError(f"narrow to {length} from {start} on is outside of [0, {len(self)})")
        return replace(self, start=self.start + first, stop=self.start + first + length)

    def view(self, *to: Any) -> "PartialTensor":
        """Returns the values linear (`view(-1)`), by rows (`view(-1, dim)`) or as bytes (`view(numpy.uint8)`,
        torch.uint8)."""
        if len(to) == 1 and isinstance(to[0], (tuple, list)):
            to = tuple(to[0])
        if len(to) == 1 and not isinstance(to[0], (int, np.integer)):
            return self._view_as(to[0])
        shape = self._complete(tuple(int(n) for n in to))
        if shape == self.shape:
            return self
        columns = self._columns
        if shape == (self.numel(),):
            return replace(self, start=self.start * columns, stop=self.stop * columns, is_linear=True)
        is_rows = (
            self.is_linear and len(shape) == 2 and shape[1] == columns and shape[0] * columns == len(self)
        )
        if not is_rows or self.start % columns:
            raise QuantError(
                f"view {list(to)} of a partial tensor {list(self.shape)}; expected [-1], whole rows [-1, "
                f"{columns}], or uint8"
            )
        return replace(self, start=self.start // columns, stop=self.stop // columns, is_linear=False)

    def numpy(self) -> NDArray[Any]:
        """Returns the values (or bytes) in a new array of `shape`."""
        unit = self._columns if self.is_linear else 1
        first, stop = self.start // unit, -(-self.stop // unit)
        values = np.empty((stop - first, self.dim), np.float32)
        at = 0
        for numbers in self.rows.numbers(first, stop):
            self._dequantize(numbers, values[at : at + numbers.size])
            at += numbers.size
        whole = values.view(self.dtype)
        part = slice(self.start - first * unit, self.stop - first * unit)
        return whole.reshape(-1)[part] if self.is_linear else whole

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a partial tensor has no array of its own to share; leave copy=False out")
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def packed(self) -> Bytes:
        """Returns rows as stored, uint8 [rows, row_bytes]: the segment's memory for dense ids, a copy for raw
        ids."""
        self._check_rows("packed()")
        table, count = self.rows.table, len(self)
        if table.row_map is None or table.row_map.index is None:
            return table.packed[self.start : self.stop]
        out, at = np.empty((count, table.row_bytes), np.uint8), 0
        for numbers in self.rows.numbers(self.start, self.stop):
            np.take(table.packed, numbers, axis=0, out=out[at : at + numbers.size])
            at += numbers.size
        return out

    def chunks(self, rows: int = PIECE_ROWS) -> Iterator[tuple[Ids, Floats]]:
        """Yields ids int64 [n] and values fp32 [n, dim], `rows` rows at a time."""
        for numbers in self._numbers(rows):
            yield self.rows.ids(numbers), self._dequantize(numbers)

    def id_chunks(self, rows: int = PIECE_ROWS) -> Iterator[Ids]:
        """Yields the ids of `chunks`, without reading rows beyond their ids."""
        for numbers in self._numbers(rows):
            yield self.rows.ids(numbers)

    def __repr__(self) -> str:
        t = self.rows.stored
        return f"PartialTensor(table {t.name!r}, {list(self.shape)}, {self.dtype}, stored as {t.row_format})"

    # ---- parts ----

    @property
    def _columns(self) -> int:
        return self.dim * (_FP32_BYTES // self.element_size())

    def _view_as(self, dtype: Any) -> "PartialTensor":
        name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
        if name == self.dtype:
            return self
        if (self.dtype, name) != (_FP32, _BYTE):
            raise QuantError(f"view as {name} of a partial tensor of {self.dtype}; expected uint8 of float32")
        unit = _FP32_BYTES if self.is_linear else 1
        return replace(self, start=self.start * unit, stop=self.stop * unit, dtype=_BYTE)

    def _complete(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Replaces the -1 of a shape, if possible."""
        rest = prod(n for n in shape if n != -1)
        if shape.count(-1) != 1 or rest <= 0 or self.numel() % rest:
            return shape
        return tuple(self.numel() // rest if n == -1 else n for n in shape)

    def _check_rows(self, what: str) -> None:
        if self.is_linear or self.dtype != _FP32:
            raise QuantError(
                f"{what} of a view {list(self.shape)} of {self.dtype}; expected rows: take it before the view"
            )

    def _numbers(self, rows: int) -> Iterator[Ids]:
        """Yields row numbers, so many at a time."""
        self._check_rows("chunks()")
        if rows < 1:
            raise QuantError(f"chunks of {rows} rows; expected 1 or more")
        held: list[Ids] = []
        count = 0
        for piece in self.rows.numbers(self.start, self.stop):
            held.append(piece)
            count += piece.size
            if count >= rows:
                numbers, whole = np.concatenate(held), count - count % rows
                yield from (numbers[first : first + rows] for first in range(0, whole, rows))
                held, count = [numbers[whole:]], count - whole
        if count:
            yield np.concatenate(held)

    def _dequantize(self, numbers: Ids, out: Floats | None = None) -> Floats:
        return choose().lookup(by_row_number(self.rows.table), numbers, pooling=Pooling.NONE, out=out)


def partial_tensor(segment: Segment, name: str) -> PartialTensor:
    """Returns a table of an attached version. VersionError: it has no table of this name."""
    for stored in segment.header.tables:
        if stored.name == name:
            rows = RowsWithIds(stored, segment.tables[name])
            return PartialTensor(rows, 0, rows.count)
    known = ", ".join(t.name for t in segment.header.tables)
    if name in (t.name for t in segment.header.remote):
        raise VersionError(
            f"{segment.path}: the rows of table {name!r} lie on other hosts, or in Redis; read the models of "
            "their owners, or the checkpoint"
        )
    raise VersionError(f"{segment.path}: there is no table {name!r}; expected one of: {known}")
