"""A table of a published version as a tensor of which parts are read: fp32 [ids, dim], never whole unless it
is asked for.

Its rows are those that ids have, in the order in which they are stored: row numbers in a table of dense ids,
in a table of raw ids the rows by bucket (`quant.rows.ids`), without empty slots. The default row is no part
of it. Sizes are those of the linear fp32 tensor that the rows dequantize to, whatever they take as they are
stored.

Empty slots are found where they are passed: slot s is empty where the id that it keeps belongs to another
slot. How many ids a bucket has follows from the directory, so that to begin anywhere reads no more than one
bucket, and a large one only once.
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


def ids_in(slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids of buckets that have so many slots: the inverse of `quant.rows.ids.slots_for`."""
    return np.where(slots > 0, slots - 1 - (slots - 1) // 65, 0)


class TableRows:
    """The rows of a table that ids have, counted from 0, and their row numbers. Reads rows and index where
    they lie."""

    def __init__(self, stored: StoredTable, table: Table) -> None:
        self.stored, self.table, self.count = stored, table, stored.id_count
        self._index = None if table.row_map is None else table.row_map.index
        self._blocks: dict[int, NDArray[np.int64]] = {}

    def numbers(self, start: int, stop: int) -> Iterator[Ids]:
        """Row numbers of rows [start, stop), in arrays of at most PIECE_ROWS. SegmentError: the index
        lacks some of them."""
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
        """The id of each of these rows."""
        if self._index is not None:
            found: Ids = self._index.ids[numbers]
            return found
        return numbers + np.int64(0 if self.table.row_map is None else self.table.row_map.first)

    def _taken(self, first: int, end: int) -> Ids:
        """The row numbers in [first, end) that are of an id."""
        assert self.table.row_map is not None and self._index is not None
        return self.table.row_map.rows_with_ids(first, min(end, self._index.slots))[0]

    def _seek(self, row: int) -> tuple[int, int]:
        """A row number, and how many rows to skip from there on."""
        assert self._index is not None
        bucket = int(np.searchsorted(self._before, row, side="right")) - 1
        row -= int(self._before[bucket])
        if not row:
            return int(self._index.directory[bucket, 0]), 0
        blocks = self._blocks_of(bucket)
        block = int(np.searchsorted(blocks, row, side="right")) - 1
        return int(self._index.directory[bucket, 0]) + block * PIECE_ROWS, row - int(blocks[block])

    @cached_property
    def _before(self) -> NDArray[np.int64]:
        """The rows before each bucket, and behind the last one."""
        assert self._index is not None
        before = np.concatenate([[0], np.cumsum(ids_in(np.diff(self._index.directory[:, 0])))]).astype(
            np.int64
        )
        if before[-1] != self.count:
            raise self._damaged(f"{before[-1]} ids by its directory, {self.count} by its header")
        return before

    def _blocks_of(self, bucket: int) -> NDArray[np.int64]:
        """The rows of a bucket before each of its blocks of PIECE_ROWS slots; counted once."""
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
    """Rows of a table as an fp32 tensor, or as its bytes: [rows, dim], or one after another. Nothing is read
    until asked for.

    rows: of the table. start, stop: what of them this is, along dim 0 of `shape`: rows, or where it is linear
    values or bytes. dtype: "float32", or "uint8" for the bytes of those. QuantError: a part or a view that is
    not there.
    """

    rows: TableRows
    start: int
    stop: int
    dtype: str = _FP32
    is_linear: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def dim(self) -> int:
        """Values of a row."""
        return self.rows.stored.dim

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self),) if self.is_linear else (len(self), self._columns)

    def element_size(self) -> int:
        """Bytes of an element, as the linear tensor has it: 4, or 1 of a view of bytes. What rows take is
        `packed().nbytes`."""
        return _FP32_BYTES if self.dtype == _FP32 else 1

    def numel(self) -> int:
        """Elements in all."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the linear tensor: numel times element_size."""
        return self.numel() * self.element_size()

    def narrow(self, dim: int, start: int, length: int) -> "PartialTensor":
        """`length` rows (of a linear view: elements) from `start` on, which counts from the end where it
        is negative."""
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
        """The same values one after another (`view(-1)`), again by rows (`view(-1, dim)`), or as bytes
        (`view(numpy.uint8)`, or torch's). There is no other shape."""
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
        """The values (or bytes), read: a new array of `shape`."""
        unit = self._columns if self.is_linear else 1
        first, stop = self.start // unit, -(-self.stop // unit)
        values = np.empty((stop - first, self.dim), np.float32)
        at = 0
        for numbers in self.rows.numbers(first, stop):
            self._dequantize(numbers, values[at : at + numbers.size])
            at += numbers.size
        whole = values.view(self.dtype)
        return (
            whole.reshape(-1)[self.start - first * unit : self.stop - first * unit]
            if self.is_linear
            else whole
        )

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a partial tensor has no array of its own to share; leave copy=False out")
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=False)

    def packed(self) -> Bytes:
        """The rows as they are stored, uint8 [rows, row_bytes]. Of dense ids they are the segment's own
        memory, of raw ids a copy with the id in the row, where it lies there."""
        self._check_rows("packed()")
        table, count = self.rows.table, len(self)
        if table.row_map is None or table.row_map.index is None:
            return table.packed[self.start : self.stop]
        out, at = np.empty((count, table.row_bytes), np.uint8), 0
        for numbers in self.rows.numbers(self.start, self.stop):
            np.take(table.packed, numbers, axis=0, out=out[at : at + numbers.size])
            at += numbers.size
        return out

    def chunks(self, rows: int = PIECE_ROWS) -> Iterator[tuple[Ids, NDArray[np.float32]]]:
        """Ids int64 [n] and values fp32 [n, dim] of `rows` rows each time, at last fewer. Holds one chunk
        at a time."""
        for numbers in self._numbers(rows):
            yield self.rows.ids(numbers), self._dequantize(numbers)

    def id_chunks(self, rows: int = PIECE_ROWS) -> Iterator[Ids]:
        """The ids of `chunks`, without reading a row but for its id."""
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
        """A shape with its -1 filled in, where there is one that can be."""
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
        """Row numbers, so many at a time."""
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
    """A table of an attached version. VersionError: it has no table of this name."""
    for stored in segment.header.tables:
        if stored.name == name:
            rows = TableRows(stored, segment.tables[name])
            return PartialTensor(rows, 0, rows.count)
    known = ", ".join(t.name for t in segment.header.tables)
    raise VersionError(f"{segment.path}: there is no table {name!r}; expected one of: {known}")
