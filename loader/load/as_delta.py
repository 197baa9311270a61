"""A checkpoint as changes of the live state: `tableside load --as-delta`.

Every row of the checkpoint is read, checked and quantized as a load does, and compared with the live state's.
The rows that differ, ids that came and ids that are gone become one delta (loader.deltas.apply). Its position
of the stream CHECKPOINT is the digest of model.toml and the checkpoint's files, and the checkpoint's path.
Nothing is published where a delta cannot say it: a damaged live state, another model.toml, other rows of row
numbers, ids that come twice, a mean of all rows, or more changes than MOST_SHARE of the rows' bytes. Private
memory holds the changed rows, and a byte for each live row of raw ids.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.checkpoint import Checkpoint, Matrix, open_checkpoint
from tableside.loader.checkpoint.keyed.keyed import KeyedRows
from tableside.loader.checkpoint.rows import DTYPES
from tableside.loader.deltas.apply import ApplyResult, apply
from tableside.loader.deltas.changes import ChangeBatch
from tableside.loader.deltas.pack import PackedChanges, check_ids
from tableside.loader.errors import ChangeError, SegmentError, VersionError
from tableside.loader.load.load import PIECE_BYTES, LoadSettings, Progress, threads_of
from tableside.loader.load.origin import CHECKPOINT, Origin, origin_of
from tableside.loader.load.plan import Sources
from tableside.loader.load.verification import Verification
from tableside.loader.model.model import ModelSpec, TableSpec
from tableside.loader.segment.delta_writer import DeltaEntries
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import State, attach_state, state_of
from tableside.loader.versions.versions import Model
from tableside.quant import CpuBackend, Source, Table, choose
from tableside.quant.contract import Bytes, Ids
from tableside.quant.errors import NotRepresentable

DEFAULTS = LoadSettings()
MOST_SHARE = 0.1  # of the rows' bytes
_BLOCK_ROWS = 1 << 16


class LoadedDelta(NamedTuple):
    """result: what was published, None: nothing, and `why_not` says why. compared: rows."""

    result: ApplyResult | None
    why_not: str = ""
    compared: int = 0


class _Unfit(Exception):
    """The checkpoint cannot be said by a delta; the message says why."""


def load_as_delta(
    spec: ModelSpec, root: Path, settings: LoadSettings = DEFAULTS, progress: Progress | None = None
) -> LoadedDelta:
    """Publishes what differs in a checkpoint as the next state of the live version. progress: counts rows.
    Errors: of `load` and `apply`; nothing changes then."""
    model, started = Model(root, spec.name), time.monotonic()
    with open_checkpoint(spec.checkpoint) as checkpoint, model.loading():
        try:
            live, segment = _live(model)
            sources = Sources(spec.tables, checkpoint)
            origin = origin_of(spec, sources)
            _check_model(spec, segment, sources, origin)
            work = _Comparison(segment, checkpoint, sources, settings, progress or (lambda done, total: None))
            packed = PackedChanges(segment)
            for table in spec.tables:
                entries = work.entries(table)
                if entries.ids.size:
                    packed.tables[table.name] = [entries]
                    packed.rows += entries.ids.size
            work.checks.finish()
        except _Unfit as error:
            return LoadedDelta(None, str(error))
        positions = {} if segment.change is None else segment.change.positions
        batch = ChangeBatch((), CHECKPOINT, f"{origin.digest} {spec.checkpoint}", positions.get(CHECKPOINT))
        applied = apply(model, batch, packed=packed, over=live)
        applied = replace(applied, seconds=time.monotonic() - started)
        return LoadedDelta(applied, compared=sum(sources.rows.values()))


def _live(model: Model) -> tuple[State, Segment]:
    """Returns the live state, verified. _Unfit: there is none, or it is damaged."""
    try:
        if not (live := state_of(model.record())).version:
            raise _Unfit("no version is live")
        return live, attach_state(model, live, "full")
    except (SegmentError, VersionError) as error:
        raise _Unfit(str(error)) from error


def _check_model(spec: ModelSpec, segment: Segment, sources: Sources, origin: Origin) -> None:
    header = segment.header
    if header.source.get("spec") != origin.spec or header.owner is not None:
        raise _Unfit(f"version {header.version} was loaded with another model.toml or program")
    for t in spec.tables:
        table, where = segment.base.tables[t.name], f"table {t.name!r}"
        if t.missing.policy in ("mean", "backfill"):
            raise _Unfit(f"{where} has missing = {t.missing.policy!r}, which depends on all rows")
        if t.raw is not None and t.raw.duplicates != "error":
            raise _Unfit(f"{where} has duplicates = {t.raw.duplicates!r}")
        if sources.dims[t.name] != table.dim:
            raise _Unfit(f"{where} has vectors of {sources.dims[t.name]} values, and not {table.dim}")
        if t.raw is None and sources.rows[t.name] != table.row_numbers[1]:
            raise _Unfit(f"{where} has {sources.rows[t.name]:,} rows, and not {table.row_numbers[1]:,}")


class _Comparison:
    """Compares a checkpoint's rows with the live ones, on all threads."""

    def __init__(
        self,
        segment: Segment,
        checkpoint: Checkpoint,
        sources: Sources,
        settings: LoadSettings,
        progress: Progress,
    ) -> None:
        self.segment, self.sources, self.backend = segment, sources, choose(settings.backend)
        self.checks = Verification(checkpoint, sources.matrices)
        pieces = max((keyed.buffer_bytes for keyed in sources.keyed.values()), default=0)
        self._threads = threads_of(settings, 4 * PIECE_BYTES + pieces)
        self._progress, self._lock = progress, Lock()
        self._done, self._total = 0, sum(sources.rows.values())
        self._changed, self._most = 0, MOST_SHARE * segment.header.table_bytes

    def entries(self, spec: TableSpec) -> DeltaEntries:
        """Returns what differs in a table. _Unfit: too much, or what a delta cannot say."""
        table = _LiveTable(spec, self.segment.tables[spec.name], self.backend)
        if spec.raw is None:
            parts = self._all(self._rows(table, self.sources.matrices[spec.name]))
            return table.entries(parts, np.zeros(0, np.int64))
        keyed = self.sources.keyed[spec.name]
        parts = self._all(partial(self._piece, table, keyed, n) for n in range(keyed.pieces))
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
        rows = max(1, PIECE_BYTES // (matrix.dim * matrix.source.bytes) // step) * step
        for start in range(0, matrix.rows, rows):
            yield partial(self._slice, table, matrix, start, min(start + rows, matrix.rows))

    def _slice(self, table: "_LiveTable", matrix: Matrix, start: int, stop: int) -> list["_Rows"]:
        values = np.empty((stop - start, matrix.dim), DTYPES[matrix.source])
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
                raise _Unfit(f"more than {MOST_SHARE:.0%} of the rows' bytes differ")


class _Rows(NamedTuple):
    """ids: int64 [n]; packed: uint8 [n, row_bytes]."""

    ids: Ids
    packed: Bytes


class _LiveTable:
    """A table of the live state, compared from several threads."""

    def __init__(self, spec: TableSpec, table: Table, backend: CpuBackend) -> None:
        self.spec, self.table, self._backend = spec, table, backend
        self._overlay = None if table.row_map is None else table.row_map.overlay
        self._is_raw = spec.raw is not None
        self._lock = Lock()
        # Rows of the version and of each layer, which an id of the checkpoint has
        layers = () if self._overlay is None else self._overlay.layers
        self._seen = [np.zeros(table.rows, np.bool_), *(np.zeros(x.index.slots, np.bool_) for x in layers)]
        self._firsts = [0, *(layer.first_row for layer in layers)]

    def changed(self, ids: Ids, values: NDArray[np.generic], source: Source) -> _Rows:
        """Returns the rows that are not those of the live state. values: [n, dim]."""
        packed = np.zeros((len(ids), self.table.row_bytes), np.uint8)
        try:
            self._backend.quantize(values, source, self.table.row_format, packed)
        except NotRepresentable as error:
            what = f"a value that {self.table.row_format.label} cannot represent"
            raise _Unfit(f"table {self.spec.name!r} has {what}") from error
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
        if self._overlay is not None:
            self._overlay.rows(numbers, rows)
        if self._is_raw:
            self._mark(numbers)
        return rows, numbers != -1

    def _mark(self, numbers: NDArray[np.int64]) -> None:
        with self._lock:
            for first, seen in zip(self._firsts, self._seen, strict=True):
                here = numbers - first
                here = here[(here >= 0) & (here < len(seen)) & (numbers != -1)]
                if seen[here].any() or np.unique(here).size != here.size:
                    raise _Unfit(f"table {self.spec.name!r}: an id comes twice")
                seen[here] = True

    def gone(self) -> Ids:
        """Returns the live ids that did not come."""
        row_map, found = self.table.row_map, [np.zeros(0, np.int64)]
        assert row_map is not None
        for start in range(0, row_map.rows, _BLOCK_ROWS):
            rows, ids = row_map.rows_with_ids(start, min(start + _BLOCK_ROWS, row_map.rows))
            left = ~self._seen[0][rows]
            found.append(ids[left][row_map.find(ids[left]) == rows[left]])
        layers = () if self._overlay is None else self._overlay.layers
        for layer, seen in zip(layers, self._seen[1:], strict=True):
            slots = np.flatnonzero(~seen)
            ids, has_id = layer.index.ids_of(slots)
            at = slots[has_id] + layer.first_row
            found.append(ids[has_id][row_map.find(ids[has_id]) == at])
        return np.concatenate(found)

    def entries(self, parts: list[_Rows], gone: Ids) -> DeltaEntries:
        """Returns the changes of the table. _Unfit: it cannot have them."""
        ids = np.concatenate([*(part.ids for part in parts), gone])
        packed = np.concatenate(
            [*(part.packed for part in parts), np.zeros((1, self.table.row_bytes), np.uint8)]
        )
        deleted = np.arange(ids.size) >= ids.size - gone.size
        if np.unique(ids).size != ids.size:
            raise _Unfit(f"table {self.spec.name!r}: an id comes twice")
        try:
            check_ids(self.table, self.spec.name, ids, deleted)
        except ChangeError as error:
            raise _Unfit(str(error)) from error
        return DeltaEntries(ids, packed, np.where(deleted, 0, np.arange(ids.size)), deleted)
