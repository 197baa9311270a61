"""Rows that override a table's, or extend it: what live updates put over a version. This file is the
specification.

An overlay has layers, the newest first. A layer is a small table of raw ids (`quant.rows.ids`) of its own: of
each id that it has it holds a row, or says that the id is deleted. What the newest layer that has an id says
of it counts; an id that no layer has is the table's own affair. This is decided while ids become row numbers,
so nothing that reads rows knows of it.

A layer's rows lie anywhere. They are numbered from `first_row` on, outside the numbers of the table's own
rows and not -1; who reads them chooses it. The kernels of the CPU find a row at `table + row * row_bytes`, so
there it is the distance between the two in rows, which may be negative.

Most ids are in no layer. A filter tells so of nearly all of them with one read: of each id that a layer has,
three bits of one word are set. In 64-bit arithmetic without signs, with FILTER an odd constant:

    h = id * FILTER
    word = filter[(h >> 32) * words >> 32]
    may be there = the bits h >> 26 & 63, h >> 20 & 63 and h >> 14 & 63 of the word are all set

Where a table's ids are row numbers, and a layer has enough of them, it has *marks* as well. A bit for each
number says whether the layer has it, and its place among those that it has is where its slot stands. No id is
hashed then, and none is compared:

    number = id - first
    has it = bits[number >> 6] >> (number & 63) & 1
    slot = slots[before[number >> 6] + how many of the number & 63 lowest bits of bits[number >> 6] are set]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.errors import QuantError
from tableside.quant.rows.ids import U64, IdIndex, Ids, bits_at

FILTER = 0x9FB21C651E98DF25
IDS_A_WORD = 2  # of a filter: 32 bits for an id; of ids that are not there some 0.2 % look as if they were
MARK_IDS = 64  # row numbers of a word of marks
MARK_BYTES = 8 + 4  # of a word of bits, and of the count before it
# marks take at most this part of the bytes of the rows that they lead to; with fewer rows filters are faster
MARKS_SHARE = 16
MOST_LAYERS = 2
NO_ROW = -1  # the number of no row: the id is missing
FILTER_BITS = (26, 20, 14)  # where an id's hash has the numbers of its bits of a word, 6 bits each


def filter_words(ids: int) -> int:
    """Words of a layer's filter."""
    return max(1, -(-ids // IDS_A_WORD))


def filter_bits(ids: Ids, words: int) -> tuple[NDArray[np.int64], U64]:
    """The word of a filter that each id [n] has, and the bits that are set in it."""
    h = ids.view(np.uint64) * np.uint64(FILTER)
    bits = np.zeros(h.shape, np.uint64)
    for shift in FILTER_BITS:
        bits |= np.uint64(1) << (h >> np.uint64(shift) & np.uint64(63))
    return ((h >> np.uint64(32)) * np.uint64(words) >> np.uint64(32)).astype(np.int64), bits


class Marks(NamedTuple):
    """Which row numbers a layer has, and where. first: the id whose number is 0; numbers: how many they tell
    of.

    bits: uint64 [words]; before: uint32 [words], how many numbers the layer has before each word's; slots:
    uint32 [slots of the layer], the slot of each number that it has, in ascending order.
    """

    first: int
    numbers: int
    bits: U64
    before: NDArray[np.uint32]
    slots: NDArray[np.uint32]


def mark_words(numbers: int) -> int:
    """Words of marks that tell of so many row numbers."""
    return -(-numbers // MARK_IDS)


def are_marks_worth_it(numbers: int, rows: int, row_bytes: int) -> bool:
    """Whether a layer of so many rows has marks, over a table of so many row numbers."""
    return mark_words(numbers) * MARK_BYTES * MARKS_SHARE <= rows * row_bytes


@dataclass(frozen=True, eq=False)
class OverlayLayer:
    """Some rows of an overlay.

    index: of the ids that it has, whole, in buckets made by the hash. packed: uint8 [slots or more,
    row_bytes], the row of each slot. filter: uint64 [words]. deleted: bit `slot` says that the id has no row
    any more, uint8 [(slots + 7) // 8]; None: of none. first_row: the number of the row in slot 0. marks:
    None: it has none.
    """

    index: IdIndex
    packed: NDArray[np.uint8]
    filter: U64
    deleted: NDArray[np.uint8] | None
    first_row: int
    marks: Marks | None = None

    def find(self, ids: Ids) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Which ids [n] the layer has, and the number of the row of each of these, NO_ROW of those that
        are deleted."""
        word, bits = filter_bits(ids, self.filter.size)
        has = self.filter[word] & bits == bits
        slots = self.index.find(ids[has])
        has[has] = slots >= 0
        slots = slots[slots >= 0]
        rows = slots + np.int64(self.first_row)
        if self.deleted is not None:
            rows[bits_at(self.deleted, slots)] = NO_ROW
        return has, rows

    @property
    def native(self) -> "NativeLayer":
        """The layer with the addresses of its arrays in this process."""
        m = self.marks
        return NativeLayer(
            filter=_address(self.filter),
            filter_words=self.filter.size,
            first_row=self.first_row,
            deleted=0 if self.deleted is None else _address(self.deleted),
            entries=_address(self.index.entries),
            pilots=_address(self.index.pilots),
            ids=_address(self.index.ids),
            id_step=self.index.ids.strides[0],
            buckets=self.index.buckets,
            slots=self.index.slots,
            marks=0 if m is None else _address(m.bits),
            marks_before=0 if m is None else _address(m.before),
            marked_slots=0 if m is None else _address(m.slots),
            first_marked=0 if m is None else m.first,
            marked=0 if m is None else m.numbers,
        )


class NativeLayer(NamedTuple):
    """A layer as kernels read it, int64 each; addresses are of fields of `OverlayLayer`, its index, its
    marks. deleted: 0: none is."""

    filter: int
    filter_words: int
    first_row: int
    deleted: int
    entries: int
    pilots: int
    ids: int
    id_step: int  # bytes from one slot's id to the next
    buckets: int
    slots: int
    marks: int  # the bits; 0: it has no marks, and what is below means nothing
    marks_before: int
    marked_slots: int
    first_marked: int
    marked: int  # row numbers that marks tell of


class Overlay:
    """Layers over one table, the newest first: 1 to MOST_LAYERS."""

    def __init__(self, layers: Sequence[OverlayLayer]) -> None:
        if not 1 <= len(layers) <= MOST_LAYERS:
            raise QuantError(
                f"an overlay of {len(layers)} layers; kernels read 1 to {MOST_LAYERS}: merge them"
            )
        self.layers = tuple(layers)
        self._native = np.array([layer.native for layer in self.layers], np.int64)

    @property
    def native_address(self) -> int:
        """Where the fields of a `NativeLayer` lie for each layer, as long as this object lives."""
        return _address(self._native)

    def override(self, ids: Ids, rows: NDArray[np.int64]) -> None:
        """Writes the number of the row of each id that a layer has to rows [n], which hold those of the
        table's own."""
        left = np.arange(ids.size)
        for layer in self.layers:
            has, found = layer.find(ids[left])
            rows[left[has]] = found
            left = left[~has]

    def rows(self, numbers: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Writes those rows of `numbers` [n] that are an overlay's to out [n, row_bytes], as they are
        packed."""
        for layer in self.layers:
            slots = numbers - np.int64(layer.first_row)
            here = np.flatnonzero((slots >= 0) & (slots < layer.index.slots))
            out[here] = layer.packed[slots[here]]


def _address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)
