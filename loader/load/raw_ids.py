"""A table of raw ids while it is loaded: its index is built from the ids alone, then the vectors are read and
go to their rows.

1. The ids are read twice: counted by bucket, then put into records (id, row of the source) of their buckets.
   The records lie in shared memory beside the segment, in a file without a name, which is gone before the
   segment is made.
2. Bucket by bucket ids that come twice are found, and pilots (`quant.cpu.index_builder`). Now the table's
  rows are known.
3. Ids and vectors are read once more, together. A block is quantized, its ids are put beside its rows, and
   each row is written to its place.

So neither ids nor vectors are ever whole in private memory; what stays there is the index, a third of a byte
an id.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from tableside.loader.checkpoint.keyed.keyed import Block, KeyedRows
from tableside.loader.errors import CheckpointError, ModelError
from tableside.loader.load.backfill import Backfill
from tableside.loader.model.model import RawIds, TableSpec
from tableside.loader.segment.memory import reserve
from tableside.loader.segment.stored import StoredIds, keep_zero_apart, plan_index, write_index
from tableside.quant import CpuBackend, QuantError, RowFormat
from tableside.quant.cpu.index_builder import RECORD_BYTES, DuplicateId, IndexBuilder, find_rows
from tableside.quant.errors import NotRepresentable
from tableside.quant.rows.ids import ID_BYTES, IdIndex, bits_at, id_at, set_bits

Progress = Callable[[int, int], None]  # (ids done, ids in all), from any thread
PASSES = 3  # of a table's ids while its index is built: they are counted, put into buckets, and placed


class Indexing:
    """What the indexes of a load share: threads, a place for records, progress. scratch: makes an empty file
    without a name in `folder`, returns its descriptor. total: ids of all tables, each as often as it is
    passed; progress: takes (ids done, total)."""

    def __init__(
        self, folder: Path, scratch: Callable[[], int], threads: int, total: int, progress: Progress
    ) -> None:
        self.folder, self.scratch, self.threads = folder, scratch, threads
        self._done, self._total, self._progress, self._lock = 0, total, progress, Lock()

    def done(self, ids: int) -> None:
        """So many ids more were passed once. Any thread may call."""
        with self._lock:
            self._done += ids
            self._progress(self._done, self._total)


@dataclass(frozen=True, eq=False)
class RawTable:
    """A table of raw ids whose index is built. dropped: a bit for each row of the source that another row
    with its id replaces; None: none."""

    source: KeyedRows
    row_format: RowFormat
    ids: StoredIds
    index: IdIndex
    dropped: NDArray[np.uint8] | None
    backfill: Backfill | None

    @property
    def rows(self) -> int:
        """Rows that it takes in a segment: its slots, and the default row, which is there even where it is
        not used."""
        return self.index.slots + 1

    def is_dropped(self, sources: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Which rows of the source are not written; None: all are."""
        if self.dropped is None:
            return None
        return bits_at(self.dropped, sources)


def plan_raw_table(
    spec: TableSpec, raw: RawIds, source: KeyedRows, backfill: Backfill | None, work: Indexing
) -> RawTable:
    """Builds the index of a table. CheckpointError: ids come twice, or cannot be read. ModelError: ids do not
    fit the buckets. NoSpace: the records have no room."""
    try:
        builder = IndexBuilder(raw.buckets, raw.bucket_ids or 0, work.threads)
        for ids, _ in _all_ids(source, backfill):
            builder.count(ids)
            work.done(len(ids))
        records = reserve_records(builder.begin() * RECORD_BYTES, work.scratch, work.folder)
        for ids, rows in _all_ids(source, backfill):
            builder.put(ids, rows, records)
            work.done(len(ids))
        dropped = builder.distinct(records, raw.duplicates, source.rows)
        work.done(dropped.size)
        index = builder.build(records, work.done)
    except DuplicateId as error:
        raise CheckpointError(
            f"{source.key!r}: id {error.id} comes twice: {source.where(error.first)} and "
            f"{source.where(error.second)}; "
            'remove one, or set duplicates = "first" or "last"'
        ) from error
    except QuantError as error:
        raise ModelError(f"[tables.{spec.name}]: {error}") from error
    kept = int(builder.kept.sum())
    backfilled = 0 if backfill is None else backfill.rows - int((dropped >= source.rows).sum())
    stored = plan_index(
        spec.row_format,
        source.dim,
        index.slots,
        raw.buckets,
        raw.bucket_ids or 0,
        has_backfilled=backfilled > 0,
    )
    ids_of = StoredIds(kept, str(spec.missing), backfilled=backfilled, index=stored)
    bits = None
    if dropped.size:
        bits = np.zeros((source.rows + (backfill.rows_there if backfill else 0) + 7) // 8, np.uint8)
        set_bits(bits, dropped)
    return RawTable(source, spec.row_format, ids_of, index, bits, backfill)


def _all_ids(
    source: KeyedRows, backfill: Backfill | None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(ids, rows of the source): those of an older version come last, numbered from `source.rows` on."""
    for piece in range(source.pieces):
        for block in source.ids(piece):
            yield block.ids, block.rows
    if backfill is not None:
        for ids, rows in backfill.ids():
            yield ids, rows + source.rows


def reserve_records(size: int, scratch: Callable[[], int], folder: Path) -> NDArray[np.int64]:
    """Zeros in shared memory that go with the array, int64 [records, 2]. scratch, folder: as for
    `Indexing`."""
    if not size:
        return np.zeros((0, 2), np.int64)
    fd = scratch()
    try:
        return reserve(fd, -(-size // 4096) * 4096, folder).bytes[:size].view(np.int64).reshape(-1, 2)
    finally:
        os.close(fd)


class RawWriter:
    """Writes the rows of a planned table to a segment: any thread calls `write`, then one `write_older`, then
    `finish`.

    packed: uint8 [rows, row_bytes], the table's rows in the segment; index: the bytes of its index, uint8 [n,
    64]; both zeros.
    """

    def __init__(
        self, table: RawTable, packed: NDArray[np.uint8], index: NDArray[np.uint8], backend: CpuBackend
    ) -> None:
        self.table, self._packed, self._backend = table, packed, backend
        self._id_at = id_at(table.row_format, table.source.dim)
        self._kept, self._bits = write_index(table.ids, table.index, index.reshape(-1), packed)
        self._items = packed.view(f"V{packed.shape[1]}")[:, 0]
        self._has_zero = False

    def write(self, block: Block) -> NDArray[np.bool_] | None:
        """Quantizes a block and writes its rows; returns which of them were written, or None: all.
        CheckpointError: the row format cannot represent a value."""
        dropped = self.table.is_dropped(block.rows)
        packed = np.empty((len(block.ids), self._packed.shape[1]), np.uint8)
        try:
            self._backend.quantize(block.values, self.table.source.source, self.table.row_format, packed)
        except NotRepresentable as error:
            source = self.table.source
            raise CheckpointError(
                f"{source.key!r}: {source.where(int(block.rows[error.row]))}: "
                f"{error.describe(int(block.rows[error.row]))}"
            ) from error
        if dropped is None or not dropped.any():
            self._put(block.ids, packed)
            return None
        self._put(block.ids[~dropped], packed[~dropped])
        return ~dropped

    def _put(self, ids: NDArray[np.int64], packed: NDArray[np.uint8]) -> NDArray[np.int64]:
        rows = np.empty(len(ids), np.int64)
        find_rows(self.table.index, ids, rows)
        if self._id_at >= 0:
            packed[:, self._id_at : self._id_at + ID_BYTES] = (
                np.ascontiguousarray(ids).view(np.uint8).reshape(-1, ID_BYTES)
            )
        else:
            self._kept[rows] = ids
        self._items[rows] = packed.view(f"V{packed.shape[1]}")[:, 0]
        if not ids.all():
            self._has_zero = True  # and never false again: threads write at the same time
        return rows

    def write_older(self) -> None:
        """Copies the rows of ids that only the older version has, and notes which they are."""
        if (backfill := self.table.backfill) is None:
            return
        for ids, sources, packed in backfill.blocks():
            dropped = self.table.is_dropped(sources + self.table.source.rows)
            here = slice(None) if dropped is None else ~dropped
            rows = self._put(ids[here], packed[here])
            set_bits(self._bits, rows)

    def finish(self) -> None:
        """Call it after all rows. Rows without an id keep 0: makes sure that id 0, unless the table has it,
        leads to none of them."""
        keep_zero_apart(self.table.index, self._kept, self._has_zero)
