"""Compares a checkpoint with a live table: which rows differ, which ids came or are gone.

Every row is read, checked and quantized as a load does. Private memory holds the rows that differ, and a byte
for each live row of raw ids.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.checkpoint import Checkpoint, Matrix
from tableside.loader.checkpoint.keyed.keyed import KeyedRows
from tableside.loader.deltas.checks import check_ids
from tableside.loader.errors import ChangeError
from tableside.loader.load.plan import Sources
from tableside.loader.load.settings import PIECE_BYTES, LoadSettings, Progress, threads_of
from tableside.loader.load.verification import Verification
from tableside.loader.model.specs import TableSpec
from tableside.loader.segment.delta_writer import DeltaEntries
from tableside.quant import CpuBackend, Source, Table, choose
from tableside.quant.contract import Bytes, Ids
from tableside.quant.errors import NotRepresentable

_BLOCK_ROWS = 1 << 16
_FIRST = 64  # one piece in so many is compared before the others, since changes often lie together


class Unfit(Exception):
    """The checkpoint's rows are not to be published in this way; the message says why."""


def check_shape(spec: TableSpec, table: Table, sources: Sources) -> None:
    """Raises Unfit where the rows of a table cannot be those of `sources`, or cannot be compared."""
    where = f"table {spec.name!r}"
    if spec.missing.policy in ("mean", "backfill"):
        raise Unfit(f"{where} has missing = {spec.missing.policy!r}, which depends on all rows")
    if spec.raw is not None and spec.raw.has_times:
        raise Unfit(f"{where} has ttl or max_rows, and a load gives all of its rows new ages")
    if spec.raw is not None and spec.raw.duplicates != "error":
        raise Unfit(f"{where} has duplicates = {spec.raw.duplicates!r}")
    if sources.dims[spec.name] != table.dim:
        raise Unfit(f"{where} has vectors of {sources.dims[spec.name]} values, and not {table.dim}")
    if spec.raw is None and sources.rows[spec.name] != table.row_numbers[1]:
        raise Unfit(f"{where} has {sources.rows[spec.name]:,} rows, and not {table.row_numbers[1]:,}")


class Comparison:
    """Compares a checkpoint's rows with the live ones, on all threads."""

    def __init__(
        self,
        tables: Mapping[str, Table],
        checkpoint: Checkpoint,
        sources: Sources,
        settings: LoadSettings,
        progress: Progress,
        most_share: float,
    ) -> None:
        """tables: live ones, by name; most_share: of their bytes, in rows that differ."""
        self.tables, self.sources, self.backend = tables, sources, choose(settings.backend)
        self.checks = Verification(checkpoint, sources.matrices)
        pieces = max((keyed.buffer_bytes for keyed in sources.keyed.values()), default=0)
        self._threads = threads_of(settings, 4 * PIECE_BYTES + pieces)
        self._progress, self._lock = progress, Lock()
        self._done, self._total = 0, sum(sources.rows.values())
        self._changed, self._most_share = 0, most_share
        self._most = most_share * sum(t.packed.nbytes for t in tables.values())

    def entries(self, spec: TableSpec) -> DeltaEntries:
        """Returns what differs in a table. Unfit: too much, or what a delta cannot say."""
        table = _LiveTable(spec, self.tables[spec.name], self.backend)
        if spec.raw is None:
            parts = self._all(self._rows(table, self.sources.matrices[spec.name]))
            return table.entries(parts, np.zeros(0, np.int64))
        keyed = self.sources.keyed[spec.name]
        parts = self._all(partial(self._piece, table, keyed, n) for n in _spread(keyed.pieces))
        keyed.finish()
        gone = table.gone()
        self._count(0, gone.size * table.table.row_bytes)
        return table.entries(parts, gone)

    def _all(self, work: Iterator[Callable[[], list["_Rows"]]]) -> list["_Rows"]:
        with ThreadPoolExecutor(self._threads, "tableside-compare") as pool:
            futures = [pool.submit(one) for one in work]
            try:
                return [rows for future in futures for rows in future.result()]
            finally:
                for future in futures:
                    future.cancel()

    def _rows(self, table: "_LiveTable", matrix: Matrix) -> Iterator[Callable[[], list["_Rows"]]]:
        step = self.checks.step(table.spec.name)
        rows = max(1, PIECE_BYTES // matrix.row_bytes // step) * step
        for start in (n * rows for n in _spread(-(-matrix.rows // rows))):
            yield partial(self._slice, table, matrix, start, min(start + rows, matrix.rows))

    def _slice(self, table: "_LiveTable", matrix: Matrix, start: int, stop: int) -> list["_Rows"]:
        values = matrix.empty(stop - start)
        self.checks.read(table.spec.name, start, stop, values, bytearray(values.nbytes))
        first, _ = table.table.row_numbers
        ids = np.arange(start + first, stop + first, dtype=np.int64)
        return [self._counted(table.changed(ids, values, matrix.source), len(ids))]

    def _piece(self, table: "_LiveTable", keyed: KeyedRows, piece: int) -> list["_Rows"]:
        return [
            self._counted(table.changed(block.ids, block.values, keyed.source), len(block.ids))
            for block in keyed.blocks(piece)
        ]

    def _counted(self, rows: "_Rows", compared: int) -> "_Rows":
        self._count(compared, rows.packed.nbytes)
        return rows

    def _count(self, compared: int, changed_bytes: int) -> None:
        with self._lock:
            self._done += compared
            self._changed += changed_bytes
            self._progress(self._done, self._total)
            if self._changed > self._most:
                raise Unfit(f"more than {self._most_share:.0%} of the rows' bytes differ")


def _spread(pieces: int) -> list[int]:
    return [*range(0, pieces, _FIRST), *(n for n in range(pieces) if n % _FIRST)]


class _Rows(NamedTuple):
    """ids: int64 [n]; packed: uint8 [n, row_bytes]."""

    ids: Ids
    packed: Bytes


class _LiveTable:
    """A table of the live state, compared from several threads."""

    def __init__(self, spec: TableSpec, table: Table, backend: CpuBackend) -> None:
        self.spec, self.table, self._backend = spec, table, backend
        overlay = None if table.row_map is None else table.row_map.overlay
        self._is_raw = spec.raw is not None
        self._lock = Lock()
        # Rows of the version and of each layer, which an id of the checkpoint has
        self._layers = () if overlay is None else overlay.layers
        self._seen = [
            np.zeros(table.rows, np.bool_),
            *(np.zeros(x.index.slots, np.bool_) for x in self._layers),
        ]
        self._firsts = [0, *(layer.first_row for layer in self._layers)]

    def changed(self, ids: Ids, values: NDArray[np.generic], source: Source) -> _Rows:
        """Returns the rows that are not those of the live state. values: [n, dim]."""
        packed = np.zeros((len(ids), self.table.row_bytes), np.uint8)
        try:
            self._backend.quantize(values, source, self.table.row_format, packed)
        except NotRepresentable as error:
            what = f"a value that {self.table.row_format.label} cannot represent"
            raise Unfit(f"table {self.spec.name!r} has {what}") from error
        live, has_row = self._live(ids)
        used = self.table.row_format.used_bytes(self.table.dim)
        kind, words = (np.uint32, used // 4) if used % 4 == 0 else (np.uint8, used)
        differs = ~has_row | (packed.view(kind)[:, :words] != live.view(kind)[:, :words]).any(1)
        return _Rows(ids[differs], packed[differs])

    def _live(self, ids: Ids) -> tuple[Bytes, NDArray[np.bool_]]:
        """Returns the live rows of ids, uint8 [n, row_bytes], and which of them have one."""
        packed, row_map = self.table.packed, self.table.row_map
        if row_map is None:
            return packed[int(ids[0]) : int(ids[-1]) + 1], np.ones(len(ids), np.bool_)
        numbers = row_map.find(ids)
        is_base = (numbers >= 0) & (numbers < row_map.rows)
        if is_base.all() and not self._is_raw:
            first = int(numbers[0])
            return packed[first : first + len(ids)], is_base
        rows = np.zeros((len(ids), self.table.row_bytes), np.uint8)
        rows[is_base] = packed[numbers[is_base]]
        row_map.copy_elsewhere(numbers, rows)
        if self._is_raw:
            self._mark(numbers)
        return rows, numbers != -1

    def _mark(self, numbers: NDArray[np.int64]) -> None:
        with self._lock:
            for first, seen in zip(self._firsts, self._seen, strict=True):
                here = numbers - first
                here = here[(here >= 0) & (here < len(seen)) & (numbers != -1)]
                if seen[here].any() or np.unique(here).size != here.size:
                    raise Unfit(f"table {self.spec.name!r}: an id comes twice")
                seen[here] = True

    def gone(self) -> Ids:
        """Returns the live ids that did not come."""
        row_map, found = self.table.row_map, [np.zeros(0, np.int64)]
        assert row_map is not None
        for start in range(0, row_map.rows, _BLOCK_ROWS):
            rows, ids = row_map.rows_with_ids(start, min(start + _BLOCK_ROWS, row_map.rows))
            left = ~self._seen[0][rows]
            found.append(ids[left][row_map.find(ids[left]) == rows[left]])
        for layer, seen in zip(self._layers, self._seen[1:], strict=True):
            slots = np.flatnonzero(~seen)
            ids, has_id = layer.index.ids_of(slots)
            at = slots[has_id] + layer.first_row
            found.append(ids[has_id][row_map.find(ids[has_id]) == at])
        return np.concatenate(found)

    def entries(self, parts: list[_Rows], gone: Ids) -> DeltaEntries:
        """Returns the changes of the table. Unfit: it cannot have them."""
        ids = np.concatenate([*(part.ids for part in parts), gone])
        packed = np.concatenate(
            [*(part.packed for part in parts), np.zeros((1, self.table.row_bytes), np.uint8)]
        )
        deleted = np.arange(ids.size) >= ids.size - gone.size
        if np.unique(ids).size != ids.size:
            raise Unfit(f"table {self.spec.name!r}: an id comes twice")
        try:
            check_ids(self.table, self.spec.name, ids, deleted)
        except ChangeError as error:
            raise Unfit(str(error)) from error
        return DeltaEntries(ids, packed, np.where(deleted, 0, np.arange(ids.size)), deleted)
