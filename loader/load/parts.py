"""The parts of a load, each of which fills a table. Any thread takes work of `reading`, then one calls
`complete`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tableside.loader.checkpoint import Matrix
from tableside.loader.checkpoint.keyed.keyed import Block
from tableside.loader.errors import CheckpointError
from tableside.loader.load.plan import PlannedTable
from tableside.loader.load.raw_ids import IndexedRows, RawTable
from tableside.loader.segment.layout import CHUNK_BYTES
from tableside.loader.segment.remote import RemoteTable
from tableside.loader.segment.stored import LONGEST_S, StoredTable, seconds
from tableside.quant.contract import Bytes
from tableside.quant.errors import NotRepresentable
from tableside.quant.rows.ids import set_bits

if TYPE_CHECKING:
    from tableside.loader.load.load import Load

Work = Callable[["PieceBuffers"], None]


class PieceBuffers(NamedTuple):
    """A thread's memory: a piece of the checkpoint, and room for column shards."""

    piece: bytearray
    scratch: bytearray


class RawLoad:
    """Fills a table of raw ids."""

    def __init__(self, load: "Load", p: PlannedTable, raw: RawTable, table: StoredTable) -> None:
        assert table.ids is not None and table.index is not None
        self.load, self.p, self.raw, self.source, self.table = load, p, raw, raw.source, table
        data = load.writer.rows(table.index, 0, table.index.rows).reshape(-1)
        self._written = IndexedRows(table.ids, raw.index, data, load.writer.rows(table, 0, table.rows))
        self._written.times[:] = seconds(load.now)
        self.rows, self.buffer_bytes = raw.source.rows, raw.source.buffer_bytes

    def reading(self) -> Iterator[Work]:
        return (partial(self._read_piece, piece) for piece in range(self.source.pieces))

    def _read_piece(self, piece: int, buffers: PieceBuffers) -> None:
        for block in self.source.blocks(piece):
            if self.load.is_stopping:
                return
            self._write(block)
            self.load.done(len(block.ids))

    def _write(self, block: Block) -> None:
        source, backend = self.source, self.load.backend
        packed = np.empty((len(block.ids), self.table.row_bytes), np.uint8)
        try:
            backend.quantize(block.values, source.source, self.p.spec.row_format, packed)
        except NotRepresentable as error:
            row = int(block.rows[error.row])
            what = f"{source.key!r}: {source.where(row)}: {error.describe(row)}"
            raise CheckpointError(what) from error
        ids, values = block.ids, block.values
        ages = source.ages_s(block.rows) if source.has_ages and self._written.times.size else None
        if (kept := self.raw.kept(ids, block.rows)) is not None:
            ids, values, packed = ids[kept], values[kept], packed[kept]
            ages = None if ages is None else ages[kept]
        rows = self._written.put(ids, packed)
        if ages is not None:
            self._written.times[rows] = np.clip(self.load.now - ages, 0, LONGEST_S)
        self.p.default_row.add(values, source.source, backend)

    def _copy_older(self) -> None:
        """Copies the rows of ids that only an older version has, and notes which they are."""
        if self.p.backfill is None:
            return
        for ids, rows, packed in self.p.backfill.blocks():
            if (kept := self.raw.kept(ids, rows + self.source.rows)) is not None:
                ids, packed = ids[kept], packed[kept]
            set_bits(self._written.bits, self._written.put(ids, packed))

    def complete(self) -> None:
        self.source.finish()
        self._copy_older()
        self._written.finish()
        self.p.default_row.write(self.load.writer, self.table, self.load.backend)


class MatrixLoad:
    """Fills a table whose ids are row numbers."""

    buffer_bytes = 0

    def __init__(self, load: "Load", p: PlannedTable, matrix: Matrix, table: StoredTable) -> None:
        self.load, self.p, self.matrix, self.table, self.rows = load, p, matrix, table, p.own

    def reading(self) -> Iterator[Work]:
        return (partial(self._quantize_chunk, chunk) for chunk in range(self.table.chunks))

    def _quantize_chunk(self, chunk: int, buffers: PieceBuffers) -> None:
        start, end = self.table.chunk_range(chunk)
        stop = min(end, self.rows)
        if start < stop:
            self._quantize(start, self.load.writer.rows(self.table, start, stop), buffers)
            self.load.done(stop - start)
        if stop == end:
            self.load.writer.finish_chunk(self.table, chunk)

    def _quantize(self, start: int, packed: Bytes, buffers: PieceBuffers) -> None:
        """Fills packed rows from `start` on."""
        load, matrix, table = self.load, self.matrix, self.table
        start += self.p.first  # rows of the matrix from here on
        stop = start + len(packed)
        # Reads are whole steps: some rows at a chunk's ends are read for both neighbours
        step = load.checks.step(table.name)
        read_rows = max(1, len(buffers.piece) // matrix.row_bytes // step) * step
        end = min(-(-stop // step) * step, matrix.rows)
        for first in range(start // step * step, end, read_rows):
            last = min(first + read_rows, end)
            values = matrix.empty(last - first, buffers.piece)
            load.checks.read(table.name, first, last, values, buffers.scratch)
            begin, last = max(first, start), min(last, stop)
            rows = values[begin - first : last - first]
            try:
                of = packed[begin - start : last - start]
                load.backend.quantize(rows, matrix.source, self.p.spec.row_format, of)
            except NotRepresentable as error:
                what = f"{load.checkpoint.path}: {matrix.key!r}: {error.describe(begin + error.row)}"
                raise CheckpointError(what) from error
            self.p.default_row.add(rows, matrix.source, load.backend)

    def complete(self) -> None:
        default_row, older = self.p.default_row, self.p.backfill
        end = self.table.rows - default_row.is_used
        # Rows that an older version has beyond those of the checkpoint
        if older is not None and end > self.rows:
            rows, used = self.load.writer.rows(self.table, self.rows, end), older.used_bytes
            rows[:, :used] = older.table.packed[self.rows : end, :used]
        default_row.write(self.load.writer, self.table, self.load.backend)


class RedisLoad(MatrixLoad):
    """Fills a table whose rows go to Redis, chunk by chunk."""

    def __init__(self, load: "Load", p: PlannedTable, matrix: Matrix, remote: RemoteTable) -> None:
        from tableside.loader.redis.writer import RedisWriter  # which needs the client

        place = remote.place
        chunk_rows = place.block_rows * max(1, CHUNK_BYTES // (place.block_rows * remote.row_bytes))
        shape = (
            p.own,
            remote.row_bytes,
            0,
            chunk_rows,
            0,
            remote.name,
            remote.key,
            remote.row_format,
            remote.dim,
        )
        super().__init__(load, p, matrix, StoredTable(*shape))
        self._redis = RedisWriter(remote)

    def _quantize_chunk(self, chunk: int, buffers: PieceBuffers) -> None:
        start, stop = self.table.chunk_range(chunk)
        packed = np.zeros((stop - start, self.table.row_bytes), np.uint8)
        self._quantize(start, packed, buffers)
        self._redis.write(start, packed)
        self.load.done(stop - start)

    def complete(self) -> None:
        self._redis.close()
