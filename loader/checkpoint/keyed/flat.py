"""Tables of raw ids with ids and vectors row after row in files: tensor pairs, DynamicEmb dumps, HugeCTR
models.

They can be cut anywhere; a piece is about 64 MiB of vectors. CRC-32 of archives is checked.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.loader.checkpoint.crc import Crc32Check
from tableside.loader.checkpoint.keyed import keyed
from tableside.loader.checkpoint.keyed.keyed import Block, IdBlock, KeyedRows
from tableside.loader.checkpoint.rows import Checkpoint, Ids, Matrix, Seen, ShardedRows
from tableside.loader.errors import CheckpointError


class FlatRows(KeyedRows):
    """A tensor of ids and a matrix of as many rows, as places in the files of a checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        ids: Ids,
        values: Matrix,
        empty: int | None = None,
        ages_ns: Ids | None = None,
    ) -> None:
        """empty: the id of empty rows, which are skipped. ages_ns: how long ago rows were used, in
        nanoseconds. CheckpointError: ids and vectors do not fit, or a file is short."""
        if ids.rows != values.rows:
            raise CheckpointError(
                f"{checkpoint.path}: {ids.key!r} has {ids.rows:,} ids, {values.key!r} has {values.rows:,} "
                "vectors; expected as many of both, one of each a row"
            )
        self._checkpoint = checkpoint
        self._ids = ids.check(checkpoint.path)
        self._values, self._ages_ns, self.has_ages = values, ages_ns, ages_ns is not None
        self._empty = empty
        values.check(checkpoint.path)
        for tensor in (ids, values, *((ages_ns,) if ages_ns else ())):
            checkpoint.open_files(tensor)
        self.key, self.rows, self.dim, self.source = values.key, values.rows, values.dim, values.source
        self.paths = tuple(sorted({s.path for t in (ids, values) for s in t.shards}))
        row_bytes = values.row_bytes
        self._piece_rows = max(1, keyed.PIECE_BYTES // row_bytes)
        self._block_rows = max(1, keyed.BLOCK_BYTES // row_bytes)
        self.pieces = -(-self.rows // self._piece_rows)
        # Whole rows, and those of column shards
        self.buffer_bytes = 2 * self._block_rows * (row_bytes + 2 * ids.item_bytes)
        self._crc = Crc32Check({_IDS: ids, _VALUES: values})

    def ids(self, piece: int) -> Iterator[IdBlock]:
        buffer = self._id_buffer(keyed.ID_BLOCK_ROWS)
        for start, stop in self._cuts(piece, keyed.ID_BLOCK_ROWS):
            rows, ids, _ = self._read_ids(start, stop, buffer, None)
            if len(rows):
                yield IdBlock(rows, ids)

    def blocks(self, piece: int) -> Iterator[Block]:
        id_buffer = self._id_buffer(self._block_rows)
        buffer = self._values.empty(min(self._block_rows, self.rows))
        scratch = bytearray(
            0 if all(s.columns == self._values.width for s in self._values.shards) else buffer.nbytes
        )
        for start, stop in self._cuts(piece, self._block_rows):
            rows, ids, kept = self._read_ids(start, stop, id_buffer, partial(self._crc.take, _IDS))
            values = buffer[: stop - start]
            seen = partial(self._crc.take, _VALUES)
            self._checkpoint.read(self._values, start, stop, values, scratch, seen)
            if len(rows):
                yield Block(rows, ids, values if kept is None else values[kept])

    def ages_s(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        assert self._ages_ns is not None
        start, stop = int(rows[0]), int(rows[-1]) + 1
        part = np.empty((stop - start, 1), self._ages_ns.dtype)
        self._checkpoint.read(self._ages_ns, start, stop, part, bytearray(), None)
        ages: NDArray[np.int64] = part[rows - start, 0] // 1_000_000_000
        return np.maximum(ages, 0)

    def where(self, row: int) -> str:
        return place(self._ids, row)

    @property
    def verification(self) -> Mapping[str, str]:
        why = self._crc.unverified.get(_VALUES) or self._crc.unverified.get(_IDS)
        return {"not": why} if why else {"by": "CRC-32"}

    def finish(self) -> None:
        self._crc.finish(self._checkpoint.fill)

    def _cuts(self, piece: int, step: int) -> Iterator[tuple[int, int]]:
        begin = piece * self._piece_rows
        end = min(begin + self._piece_rows, self.rows)
        for start in range(begin, end, step):
            yield start, min(start + step, end)

    def _id_buffer(self, rows: int) -> NDArray[Any]:
        return np.empty((min(rows, self.rows, self._piece_rows), 1), self._ids.dtype)

    def _read_ids(
        self, start: int, stop: int, buffer: NDArray[Any], seen: Seen | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_] | None]:
        """Returns (rows, ids, which of them are kept; None: all)."""
        part = buffer[: stop - start]
        self._checkpoint.read(self._ids, start, stop, part, bytearray(), seen)
        rows, ids = np.arange(start, stop), part[:, 0].astype(np.int64, copy=False)
        if self._empty is None or (kept := ids != self._empty).all():
            return rows, ids, None
        return rows[kept], ids[kept], kept


_IDS, _VALUES = "ids", "values"


def place(tensor: ShardedRows, row: int) -> str:
    """Returns the place of a row of a tensor, for people: its file, and its number there."""
    shard = next(s for s in tensor.shards if s.row <= row < s.row + s.rows)
    inside = "" if len({s.path for s in tensor.shards}) == 1 else f" (row {row - shard.row:,} there)"
    return f"{shard.path}: {tensor.key!r}, row {row:,}{inside}"
