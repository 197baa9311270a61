"""From ids to row numbers, the one stage before anything reads rows. This file is the specification of the
kernels. Without a `RowMap` ids are row numbers. With one, an id that the table lacks becomes `default_row`, a
row behind the others, or is refused. An `IdIndex` finds raw int64 ids: an immutable perfect hash. In unsigned
64-bit arithmetic, with MIX, SEED, SPREAD, PILOT and SLOT as below:
    h = mix(id)                              mix: x ^= x >> 32; x *= MIX; x ^= x >> 32; x *= MIX; x ^= x >> 32
    bucket = h & (buckets - 1)               interleaved; chunked: id // bucket_ids, must lie in [0, buckets)
    g = (h ^ seed(bucket) * SEED) * SPREAD   seed, slots, first_row: of the bucket's directory entry
    g = (g ^ g >> 32) * MIX
    pilot = pilots[first_pilot + ((g >> 32) * (slots * 5 // 16 + 1) >> 32)]
    row = first_row + (((g ^ (pilot + 1) * PILOT) * SLOT >> 32) * slots >> 32)
    first_pilot = first_row * 5 // 16 + number of the bucket here
A bucket of n ids has n + n // 64 + 1 slots, or none if n = 0. Its pilots, five bytes for 16 slots, send no
two ids to one row. Each row keeps its id, in its padding if that has 8 bytes, else in an array. A slot
without an id keeps an int64 that hashes to another row, so no id is special. Buckets lie in order, so the
rows and pilots of a range of buckets are byte ranges and move unchanged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant.row_format import RowFormat

if TYPE_CHECKING:
    from tableside.quant.rows.hot import HotRows
    from tableside.quant.rows.overlay import Overlay

MIX = 0xD6E8FEB86659FD93
SEED = 0x9E3779B97F4A7C15
SPREAD = 0xBF58476D1CE4E5B9
PILOT = 0x94D049BB133111EB
SLOT = 0xC2B2AE3D27D4EB4F
ID_BYTES = 8

Ids = NDArray[np.int64]
U64 = NDArray[np.uint64]


class DirectoryField(NamedTuple):
    """An entry of a directory, one a bucket, int64 each. The last entry ends the last bucket."""

    first_row: int
    seed: int


def slots_for(ids: int) -> int:
    """Rows that a bucket of so many ids takes."""
    return ids + ids // 64 + 1 if ids else 0


def pilots_for(slots: int, buckets: int) -> int:
    """Bytes of pilots of a table of so many slots in all its buckets."""
    return slots * 5 // 16 + buckets


def id_at(row_format: RowFormat, dim: int) -> int:
    """Returns the byte of a row that holds its id, a multiple of 8; -1: the padding is too small, ids lie in
    an array."""
    row_bytes = row_format.row_bytes(dim)
    return row_bytes - ID_BYTES if row_bytes - row_format.used_bytes(dim) >= ID_BYTES else -1


def mix(ids: Ids) -> U64:
    """The hash of ids [n]: a bijection of 64 bits, so no two ids have one hash."""
    x = ids.astype(np.uint64) if ids.dtype != np.int64 else ids.view(np.uint64)
    for _ in range(2):
        x = x ^ (x >> np.uint64(32))
        x = x * np.uint64(MIX)
    return x ^ (x >> np.uint64(32))


def bucket_of(ids: Ids, buckets: int, bucket_ids: int) -> NDArray[np.int64]:
    """The bucket of each id [n] in the whole table; -1: it has none. bucket_ids: as in `IdIndex`."""
    if not bucket_ids:
        return (mix(ids) & np.uint64(buckets - 1)).astype(np.int64)
    bucket = ids // np.int64(bucket_ids)
    return np.where((ids >= 0) & (bucket < buckets), bucket, np.int64(-1))


def bits_at(bits: NDArray[np.uint8], at: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask [n] of set bits; bit n is bit n % 8 of byte n // 8."""
    return np.asarray(bits[at >> 3] >> (at & 7).astype(np.uint8) & 1, np.bool_)


def set_bits(bits: NDArray[np.uint8], at: NDArray[np.int64]) -> None:
    """Sets the bits with these numbers [n], each named any number of times."""
    np.bitwise_or.at(bits, at >> 3, np.left_shift(1, at & 7).astype(np.uint8))


@dataclass(frozen=True, eq=False)
class IdIndex:
    """The index of raw ids described above; it has the buckets from `first_bucket` on, one fewer than
    directory entries. directory: int64 [buckets here + 1, fields of DirectoryField]; pilots: uint8
    [pilots_for(slots, buckets here)]; ids: int64 [slots], at any stride; backfilled: uint8 [(slots + 7) //
    8], bit `row`: the row came from an older version; None: none did. bucket_ids: ids of a bucket; 0: the
    hash chooses the bucket."""

    directory: NDArray[np.int64]
    pilots: NDArray[np.uint8]
    ids: Ids
    buckets: int
    bucket_ids: int = 0
    first_bucket: int = 0
    backfilled: NDArray[np.uint8] | None = None

    @property
    def slots(self) -> int:
        return int(self.directory[-1, 0])

    @cached_property
    def entries(self) -> NDArray[np.uint32]:
        """Returns the directory as resolvers read it: uint32 [buckets here, 4]; see `NativeRowMap`."""
        entries = np.empty((len(self.directory) - 1, 4), np.uint32)
        entries[:, :2] = np.ascontiguousarray(self.directory[:-1, 0]).view(np.uint32).reshape(-1, 2)
        entries[:, 2] = np.diff(self.directory[:, 0])
        entries[:, 3] = self.directory[:-1, 1]
        return entries

    def part(self, first: int, end: int) -> "IdIndex":
        """Returns the index with buckets [first, end) alone, while all of the others are empty."""
        if (first, end) == (0, len(self.directory) - 1):
            return self
        pilots = self.pilots[first : first + pilots_for(self.slots, end - first)]
        directory = np.ascontiguousarray(self.directory[first : end + 1])
        return replace(self, directory=directory, pilots=np.ascontiguousarray(pilots), first_bucket=first)

    def bucket_of(self, ids: Ids) -> NDArray[np.int64]:
        """The bucket of each id, counted from `first_bucket`; -1: it has none here."""
        bucket = bucket_of(ids, self.buckets, self.bucket_ids)
        here = bucket - self.first_bucket
        return np.where((bucket >= 0) & (here >= 0) & (here < len(self.directory) - 1), here, -1)

    def places(self, ids: Ids) -> NDArray[np.int64]:
        """The row that each id has if it is there; -1: its bucket is empty or not here."""
        bucket = self.bucket_of(ids)
        at = np.maximum(bucket, 0)
        first = self.directory[at, 0]
        slots = self.directory[at + 1, 0] - first
        wide = np.uint64(32)
        g = (mix(ids) ^ (self.directory[at, 1].astype(np.uint64) * np.uint64(SEED))) * np.uint64(SPREAD)
        g = (g ^ (g >> wide)) * np.uint64(MIX)
        pilots = (slots * 5 // 16 + 1).astype(np.uint64)
        pilot_at = first * 5 // 16 + at + ((g >> wide) * pilots >> wide).astype(np.int64)
        pilot = self.pilots[pilot_at].astype(np.uint64) + np.uint64(1)
        slot = ((g ^ (pilot * np.uint64(PILOT))) * np.uint64(SLOT) >> wide) * slots.astype(np.uint64) >> wide
        return np.where((bucket >= 0) & (slots > 0), first + slot.astype(np.int64), -1)

    def find(self, ids: Ids) -> NDArray[np.int64]:
        """The row of each id; -1: it is not there."""
        rows = self.places(ids)
        if not self.slots:
            return rows
        kept = self.ids[np.maximum(rows, 0)]
        return np.where((rows >= 0) & (kept == ids), rows, -1)

    def ids_of(self, rows: NDArray[np.int64]) -> tuple[Ids, NDArray[np.bool_]]:
        """Returns the kept id of each row, and a mask of rows with a real id (an empty slot's id hashes
        elsewhere)."""
        if not self.slots:
            return rows, np.zeros(rows.shape, np.bool_)
        ids = np.ascontiguousarray(self.ids[np.clip(rows, 0, self.slots - 1)])
        return ids, self.places(ids) == rows


@dataclass(frozen=True, eq=False)
class RowMap:
    """How one table's ids become row numbers.
    count: ids with a row of their own. default_row: row of all other ids; None: they are refused. index: of
    raw ids; None: ids are [first, first + count). own: without an index, the leading rows that did not come
    from an older version; None: all. overlay: rows over these; hot: some of these at a second place, too; the
    other fields ignore both."""

    count: int
    default_row: int | None = None
    index: IdIndex | None = None
    first: int = 0
    own: int | None = None
    overlay: "Overlay | None" = None
    hot: "HotRows | None" = None

    def find(self, ids: Ids) -> NDArray[np.int64]:
        """Returns the row of each id; -1: none. Rows of the overlay and hot ones lie outside the table's
        numbers and may be negative."""
        if self.index is not None:
            rows = self.index.find(ids)
        else:
            rows = ids - np.int64(self.first) if self.first else ids
            rows = np.where((ids >= self.first) & (ids < self.first + self.count), rows, -1)
        if self.hot is not None:
            rows = self.hot.place(rows)
        if self.overlay is not None:
            self.overlay.override(ids, rows)
        return rows

    @property
    def elsewhere(self) -> Sequence[tuple[int, NDArray[np.uint8]]]:
        """Returns the rows that lie outside the table, those of layers and hot ones: the number of the first
        one, and uint8 [rows, row_bytes]."""
        layers = () if self.overlay is None else self.overlay.layers
        found = [(layer.first_row, layer.packed[: layer.index.slots]) for layer in layers]
        return found if self.hot is None else [*found, (self.hot.first_row, self.hot.packed)]

    def copy_elsewhere(self, numbers: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Copies the packed rows that lie outside the table among `numbers` [n] to out [n, row_bytes]."""
        for first, packed in self.elsewhere:
            slots = numbers - np.int64(first)
            here = np.flatnonzero((slots >= 0) & (slots < len(packed)))
            out[here] = packed[slots[here]]

    @property
    def rows(self) -> int:
        """Rows of the table that ids can have, which are the first ones."""
        return self.count if self.index is None else self.index.slots

    @property
    def has_backfilled(self) -> bool:
        """True if rows were copied from an older version at load."""
        return (self.own is not None) if self.index is None else self.index.backfilled is not None

    @property
    def is_plain(self) -> bool:
        """True if ids are row numbers and all others are refused, so the map only serves layers."""
        return self.index is None and self.default_row is None and not self.first

    def ids_of(self, rows: NDArray[np.int64]) -> tuple[Ids, NDArray[np.bool_]]:
        """Inverts `find` of the table's own rows: the id of each row, and a mask of those that have one."""
        if self.index is not None:
            return self.index.ids_of(rows)
        return rows + np.int64(self.first), (rows >= 0) & (rows < self.count)

    def rows_with_ids(self, start: int, stop: int) -> tuple[NDArray[np.int64], Ids]:
        """Returns the rows of [start, stop) that have an id, and their ids."""
        rows = np.arange(start, stop, dtype=np.int64)
        ids, has_id = self.ids_of(rows)
        return rows[has_id], ids[has_id]

    def is_backfilled(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mask [n] of rows copied from an older version at load. `rows` must not contain -1. Overlay rows:
        False."""
        result = (rows >= 0) & (rows < self.rows)
        if self.index is None:
            return result & (rows >= (self.count if self.own is None else self.own))
        if (bits := self.index.backfilled) is None:
            return np.zeros(rows.shape, np.bool_)
        result[result] = bits_at(bits, rows[result])
        return result

    @cached_property
    def native(self) -> NDArray[np.int64]:
        """The `NativeRowMap` fields, valid while this object lives."""
        found = native_row_map(self)
        return np.array(
            found if self.index is None else found._replace(entries=array_address(self.index.entries)),
            np.int64,
        )

    @property
    def native_address(self) -> int:
        """Address of the `NativeRowMap` fields, valid while this object lives."""
        return array_address(self.native)


class NativeRowMap(NamedTuple):
    """A RowMap as kernels read it, int64 each. Absent addresses are 0; default_row -1: unknown ids are
    refused."""

    id_count: int
    default_row: int
    first: int
    own: int
    directory: int
    entries: int  # the same for the resolver, of 16 bytes: first_row int64, slots uint32, seed uint32
    pilots: int
    ids: int
    id_step: int  # bytes from one row's id to the next
    buckets: int
    bucket_ids: int
    first_bucket: int
    buckets_here: int
    backfilled: int
    layers: int  # of an overlay: int64 [layer_count, fields of quant.rows.overlay.NativeLayer]
    layer_count: int
    hot: int  # marks of hot rows; 0: there are none
    hot_first: int
    hot_slots: int
    hot_rows: int  # row numbers that there are marks of


NO_ROW_MAP = NativeRowMap(*[0] * len(NativeRowMap._fields))


def native_row_map(of: RowMap) -> NativeRowMap:
    """Returns the map with this process's array addresses, without the entries that only resolvers need."""
    default, own = (
        (-1 if of.default_row is None else of.default_row),
        (of.count if of.own is None else of.own),
    )
    found = NO_ROW_MAP._replace(id_count=of.count, default_row=default, first=of.first, own=own)
    if of.overlay is not None:
        found = found._replace(layers=of.overlay.native_address, layer_count=len(of.overlay.layers))
    if of.hot is not None:
        found = NativeRowMap(*found[:-4], *of.hot.native)
    if (index := of.index) is None:
        return found
    return found._replace(
        directory=array_address(index.directory),
        pilots=array_address(index.pilots),
        ids=array_address(index.ids),
        id_step=index.ids.strides[0] if index.ids.size else ID_BYTES,
        buckets=index.buckets,
        bucket_ids=index.bucket_ids,
        first_bucket=index.first_bucket,
        buckets_here=len(index.directory) - 1,
        backfilled=0 if index.backfilled is None else array_address(index.backfilled),
    )


def array_address(array: NDArray[Any]) -> int:
    """Returns the address of its first byte; the array must live while that is used."""
    return int(array.__array_interface__["data"][0])  # sooner than `ctypes.data`
