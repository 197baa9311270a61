"""Builds id indexes (`quant.rows.ids`) with the native kernel.
Ids come in blocks, since memory may not hold them twice: one pass counts buckets, a second puts ids into them
as records in the caller's memory. Nothing here reads files."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tableside.quant.cpu import _native
from tableside.quant.errors import QuantError
from tableside.quant.rows.ids import (
    NO_ROW_MAP,
    DirectoryField,
    IdIndex,
    RowMap,
    pilots_for,
    slots_for,
)
from tableside.quant.rows.overlay import Marks

RECORD_BYTES = 16  # an id, and the number of its row in the source
KEEP = {"error": 0, "first": 1, "last": 2}
LARGEST_BUCKET = 1 << 29  # ids of one bucket that a builder takes
_RANGES = 64  # that buckets are built in, for threads to share


class DuplicateId(QuantError):
    """An id comes twice. first, second: numbers of the two rows in the source."""

    def __init__(self, id_: int, first: int, second: int) -> None:
        super().__init__(id_, first, second)
        self.id, self.first, self.second = id_, first, second

    def __str__(self) -> str:
        return f"id {self.id} comes twice, in rows {self.first} and {self.second}"


class IndexBuilder:
    """Builds one table's index: `count` all blocks, `put` all again into `records`, then `build`. buckets,
    bucket_ids: as in `IdIndex`. counts: ids of each. QuantError: an id has no bucket, or one is too large."""

    def __init__(self, buckets: int, bucket_ids: int = 0, threads: int = 1) -> None:
        self.buckets, self.bucket_ids, self._threads = buckets, bucket_ids, threads
        row_map = NO_ROW_MAP._replace(buckets=buckets, bucket_ids=bucket_ids, buckets_here=buckets)
        self._map = np.array(row_map, np.int64)
        self.counts = np.zeros(buckets, np.int64)
        self._starts = np.zeros(buckets + 1, np.int64)
        self._ends = np.zeros(buckets, np.int64)
        self.kept = np.zeros(buckets, np.int64)

    @property
    def ids(self) -> int:
        """Number of counted ids."""
        return int(self.counts.sum())

    def count(self, ids: NDArray[np.int64]) -> None:
        """Counts a block of ids [n]."""
        ids = np.ascontiguousarray(ids)
        outside = _native.count_buckets(self._map, ids, self.counts)
        if outside is not None:
            raise QuantError(
                f"id {ids[outside]} has no bucket: {self.buckets} buckets of {self.bucket_ids} ids hold ids "
                "from 0 to "
                f"{self.buckets * self.bucket_ids - 1}; set bucket_ids higher, or leave it out"
            )

    def begin(self) -> int:
        """After the last `count`: how many records there will be."""
        self._starts[1:] = np.cumsum(self.counts)
        self._ends[:] = self._starts[:-1]
        if (largest := int(self.counts.max())) > LARGEST_BUCKET:
            raise QuantError(
                f"a bucket has {largest:,} ids, the most is {LARGEST_BUCKET:,}; set more buckets"
            )
        return self.ids

    def put(self, ids: NDArray[np.int64], sources: NDArray[np.int64], records: NDArray[np.int64]) -> None:
        """Puts a block into records [ids, 2]. sources: source row of each id, ascending from block to
        block."""
        _native.put_in_buckets(
            self._map, np.ascontiguousarray(ids), np.ascontiguousarray(sources), self._ends, records
        )

    def distinct(
        self, records: NDArray[np.int64], duplicates: str, own: int = 2**63 - 1
    ) -> NDArray[np.int64]:
        """Keeps each id once and returns the records that it drops, int64 [n, 2]. duplicates: error, first or
        last. own: source rows from this number on are an older version's and lose to other rows. DuplicateId:
        there are duplicates."""
        self._over_buckets(lambda first, last: self._distinct(records, first, last, KEEP[duplicates], own))
        parts = [
            records[start + kept : end]
            for start, kept, end in zip(self._starts, self.kept, self._starts[1:], strict=False)
            if start + kept < end
        ]
        return np.concatenate(parts) if parts else np.empty((0, 2), np.int64)

    def _distinct(self, records: NDArray[np.int64], first: int, last: int, keep: int, own: int) -> None:
        if twice := _native.distinct(records, self._starts, first, last, keep, own, self.kept):
            raise DuplicateId(*twice)

    @property
    def slots(self) -> int:
        """Rows that the table takes, after `distinct`."""
        return sum(map(slots_for, self.kept.tolist()))

    def build(self, records: NDArray[np.int64], progress: Callable[[int], None] | None = None) -> IdIndex:
        """Returns the index; its `ids` are not filled. progress: called with the number of placed ids, from
        any thread."""
        directory = np.zeros((self.buckets + 1, len(DirectoryField._fields)), np.int64)
        directory[1:, 0] = np.cumsum([slots_for(n) for n in self.kept.tolist()])
        pilots = np.zeros(pilots_for(self.slots, self.buckets), np.uint8)

        def build(first: int, last: int) -> None:
            failed = _native.build(records, self._starts, self.kept, first, last, directory, pilots)
            if failed is not None:
                raise QuantError(
                    f"no pilots were found for bucket {failed} of {self.kept[failed]} ids; set another "
                    "number of buckets"
                )
            if progress is not None:
                progress(int(self.kept[first:last].sum()))

        self._over_buckets(build)
        return IdIndex(directory, pilots, np.empty(0, np.int64), self.buckets, self.bucket_ids)

    def _over_buckets(self, work: Callable[[int, int], None]) -> None:
        bounds = [self.buckets * i // _RANGES for i in range(_RANGES + 1)]
        threads = self._threads or len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(threads, thread_name_prefix="tableside-index") as pool:
            futures = [pool.submit(work, a, b) for a, b in pairwise(bounds) if a < b]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def find_rows(index: IdIndex, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the row where each id would lie; -1: its bucket is empty. It does not compare kept ids."""
    return place_rows(RowMap(index.slots, None, index), ids)[0]


def place_rows(row_map: RowMap, ids: NDArray[np.int64], table_rows: int = 0) -> tuple[NDArray[np.int64], int]:
    """As `find_rows`, for any map: rows of its overlay go first, and without an index other ids get the
    default row, or -1. table_rows: of the table; then it also counts ids that may lack a row of their own, or
    have one of an older version."""
    rows = np.empty(ids.size, np.int64)
    return rows, _native.place_rows(row_map.native, np.ascontiguousarray(ids), rows, table_rows)


def count_rows(counts: NDArray[np.uint8], rows: NDArray[np.int64], most: int, step: int) -> tuple[int, int]:
    """Adds `step` to the lower 7 bits of counts of rows [n], where they stay within `most`. Returns how many
    of the rows there are, and how many of them have bit 7."""
    found = np.zeros(2, np.int64)
    _native.count_rows(counts, np.ascontiguousarray(rows), found, most, step)
    return int(found[0]), int(found[1])


def fill_filter(ids: NDArray[np.int64], words: NDArray[np.uint64]) -> None:
    """Sets the bits of ids [n] in a filter, as `quant.rows.overlay` specifies it."""
    _native.fill_filter(np.ascontiguousarray(ids), words)


def fill_marks(ids: NDArray[np.int64], slots: NDArray[np.int64], marks: Marks) -> None:
    """Fills zeroed marks from ids [n] and their slots [n]. ValueError: an id has no mark, or comes twice."""
    _native.fill_marks(
        ids - np.int64(marks.first), np.ascontiguousarray(slots), marks.bits, marks.before, marks.slots
    )
