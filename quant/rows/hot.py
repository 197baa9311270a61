"""Rows of a table that lie at a second place, too: those of a disk that are used most, in memory. This file
is the specification. They are found by their row numbers. In unsigned 64-bit arithmetic:
    has it = bits[number >> 6] >> (number & 63) & 1
    slot = before[number >> 6] + popcount of the number & 63 lowest bits of bits[number >> 6]
A number that is found becomes `first_row + slot`, as one of a layer (`quant.rows.overlay`). Deltas go first.
The rows are the table's own, in their order. Kernels take one for a raw id only where it keeps that id, so
that nobody reads the row of the table to see whose it is."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tableside.quant.rows.ids import U64, array_address

_MARKED = 64  # row numbers of a word
WORD_BYTES = 16  # of bits, and of the count before them
_AT_ONCE = 1 << 18  # words that are looked at together
_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.int64)

Rows = NDArray[np.int64]


def hot_words(rows: int) -> int:
    """Words of marks of a table."""
    return -(-rows // _MARKED)


@dataclass(frozen=True, eq=False)
class HotRows:
    """marks: uint64 [words, 2], bits and the count before them. packed: uint8 [slots, row_bytes]. first_row:
    row number of slot 0, outside the table's and not -1."""

    marks: U64
    packed: NDArray[np.uint8]
    first_row: int

    def place(self, rows: Rows) -> Rows:
        """Returns the row numbers [n] of a table, with those that are hot replaced."""
        is_there = (rows >= 0) & (rows < _MARKED * len(self.marks))
        bits, before = self.marks[np.where(is_there, rows, 0) >> 6].T
        bit = (rows & (_MARKED - 1)).view(np.uint64)
        is_there &= (bits >> bit & np.uint64(1)).astype(np.bool_)
        lower = np.ascontiguousarray(bits & ((np.uint64(1) << bit) - np.uint64(1)))
        slots = before.astype(np.int64) + _ONES[lower.view(np.uint8).reshape(-1, 8)].sum(1)
        return np.where(is_there, slots + np.int64(self.first_row), rows)

    def numbers(self) -> Rows:
        """Returns the row number of each slot, ascending."""
        found = [np.empty(0, np.int64)]
        for start in range(0, len(self.marks), _AT_ONCE):
            words = np.ascontiguousarray(self.marks[start : start + _AT_ONCE, 0])
            each = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            found.append(each + _MARKED * start)
        return np.concatenate(found)

    @property
    def native(self) -> tuple[int, int, int, int]:
        """Returns address of the marks, `first_row`, slots, and row numbers that there are marks of, as
        `quant.rows.ids.NativeRowMap` has them."""
        return array_address(self.marks), self.first_row, len(self.packed), _MARKED * len(self.marks)


def fill_hot(rows: Rows, marks: U64) -> None:
    """Fills zeroed marks. rows: [n] numbers, ascending, each once."""
    words = rows >> 6
    starts = np.flatnonzero(np.diff(words, prepend=-1))
    if starts.size:
        bits = np.uint64(1) << (rows & (_MARKED - 1)).view(np.uint64)
        marks[words[starts], 0] = np.bitwise_or.reduceat(bits, starts)
        marks[words[starts], 1] = np.diff(starts, append=rows.size)
    marks[:, 1] = marks[:, 1].cumsum() - marks[:, 1]
