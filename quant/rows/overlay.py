"""Overlays: rows of live updates that replace or extend a table's. This file is the specification.
An overlay is a stack of layers, newest first. A layer is a small table of raw ids (`quant.rows.ids`) that
holds a row for each id or marks it deleted. The newest layer with an id decides; if no layer has the id, the
base table answers. All this happens while ids become row numbers; nothing after it knows of overlays. A layer
numbers its rows from `first_row` on, outside the table's row numbers and not -1. CPU kernels find a row at
`table + row * row_bytes`, so `first_row` is the distance of the two in rows and may be negative. Most ids are
in no layer; a filter rejects nearly all of them with one read. In unsigned 64-bit arithmetic:
    h = id * FILTER                               FILTER: an odd constant
    word = filter[(h >> 32) * words >> 32]
    may be there = the bits h >> 26 & 63, h >> 20 & 63 and h >> 14 & 63 of the word are all set
If ids are row numbers and a layer has enough of them, it also has *marks*, which need neither hash nor
comparison:
    number = id - first
    has it = bits[number >> 6] >> (number & 63) & 1
    slot = slots[before[number >> 6] + popcount of the number & 63 lowest bits of bits[number >> 6]]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.errors import QuantError
from tableside.quant.rows.ids import U64, IdIndex, Ids, array_address, bits_at

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
    """The row numbers that a layer has, and their slots. first: the id with number 0; numbers: how many are
    covered. bits: uint64 [words]; before: uint32 [words], count of marked numbers before each word; slots:
    uint32 [slots of the layer], in ascending order of numbers."""

    first: int
    numbers: int
    bits: U64
    before: NDArray[np.uint32]
    slots: NDArray[np.uint32]


def mark_words(numbers: int) -> int:
    """Words of marks that tell of so many row numbers."""
    return -(-numbers // MARK_IDS)


def are_marks_worth_it(numbers: int, rows: int, row_bytes: int) -> bool:
    """True if a layer of `rows` rows should have marks over so many row numbers."""
    return mark_words(numbers) * MARK_BYTES * MARKS_SHARE <= rows * row_bytes


@dataclass(frozen=True, eq=False)
class OverlayLayer:
    """Some rows of an overlay.
    index: of its ids, complete, with hashed buckets. packed: uint8 [slots or more, row_bytes]. filter: uint64
    [words]. deleted: uint8 [(slots + 7) // 8], bit `slot`: the id was deleted; None: no id was. first_row:
    row number of slot 0."""

    index: IdIndex
    packed: NDArray[np.uint8]
    filter: U64
    deleted: NDArray[np.uint8] | None
    first_row: int
    marks: Marks | None = None

    def find(self, ids: Ids) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Returns a mask of the ids [n] in this layer, and the row number of each of those; NO_ROW if
        deleted."""
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
            filter=array_address(self.filter),
            filter_words=self.filter.size,
            first_row=self.first_row,
            deleted=0 if self.deleted is None else array_address(self.deleted),
            entries=array_address(self.index.entries),
            pilots=array_address(self.index.pilots),
            ids=array_address(self.index.ids),
            id_step=self.index.ids.strides[0],
            buckets=self.index.buckets,
            slots=self.index.slots,
            marks=0 if m is None else array_address(m.bits),
            marks_before=0 if m is None else array_address(m.before),
            marked_slots=0 if m is None else array_address(m.slots),
            first_marked=0 if m is None else m.first,
            marked=0 if m is None else m.numbers,
        )


class NativeLayer(NamedTuple):
    """A layer as kernels read it, int64 each: addresses of `OverlayLayer`'s fields, its index and marks.
    deleted 0: none."""

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
        """Address of the `NativeLayer` fields of each layer, valid while this object lives."""
        return array_address(self._native)

    def override(self, ids: Ids, rows: NDArray[np.int64]) -> None:
        """Overwrites rows [n], the table's row numbers of `ids`, with those of the layers."""
        left = np.arange(ids.size)
        for layer in self.layers:
            has, found = layer.find(ids[left])
            rows[left[has]] = found
            left = left[~has]
