"""Plans a load: places of the tables in the checkpoint, rows of each, and how ids become rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tableside.loader.checkpoint import Checkpoint, Matrix
from tableside.loader.checkpoint.keyed.keyed import KeyedRows
from tableside.loader.errors import ModelError
from tableside.loader.load.backfill import Backfill
from tableside.loader.load.default_rows import DefaultRow
from tableside.loader.load.raw_ids import PASSES, Indexing, RawTable, plan_raw_table
from tableside.loader.load.settings import Progress
from tableside.loader.model.specs import TableSpec
from tableside.loader.segment.stored import StoredIds, StoredTable
from tableside.loader.versions.versions import Model
from tableside.quant import QuantError


class Sources:
    """Where the tables of a model lie in a checkpoint: matrices, or, of raw ids, ids and vectors."""

    def __init__(self, tables: Sequence[TableSpec], checkpoint: Checkpoint) -> None:
        """CheckpointError: a table is missing. ModelError: its dim is not the specified one."""
        self.matrices = {t.name: checkpoint.matrix(t.key) for t in tables if t.raw is None}
        for matrix in self.matrices.values():
            checkpoint.open_files(matrix)
        self.keyed = {t.name: checkpoint.keyed(t.key, t.raw.key) for t in tables if t.raw is not None}
        for t in tables:
            if t.raw is not None and (strings := self.keyed[t.name].strings) is not t.raw.strings:
                found = "strings" if strings else "integers"
                raise ModelError(
                    f"[tables.{t.name}]: ids is {t.id_kind!r}, and the checkpoint's ids of {t.key!r} are "
                    f'{found}; set ids = "{"string" if strings else "raw"}"'
                )
        both: dict[str, Matrix | KeyedRows] = {**self.matrices, **self.keyed}
        for t in tables:
            t.check_dim(both[t.name].dim, f"the checkpoint's {t.key!r}")
        self.dims = {name: source.dim for name, source in both.items()}
        self.rows = {name: source.rows for name, source in both.items()}
        self.bytes = sum(s.rows * s.source.row_bytes(s.dim) for s in both.values())
        self.paths = {s.path for m in self.matrices.values() for s in m.shards}
        self.paths |= {path for k in self.keyed.values() for path in k.paths}


@dataclass(frozen=True, eq=False)
class PlannedTable:
    """A table of a load. rows: in the segment; ids: None: ids are row numbers, others are refused; first: row
    of the source that is row 0; own: rows of the source that are taken."""

    spec: TableSpec
    rows: int
    dim: int
    ids: StoredIds | None
    source: Matrix | RawTable
    default_row: DefaultRow
    backfill: Backfill | None
    first: int = 0
    own: int = 0


def plan(
    tables: Sequence[TableSpec],
    sources: Sources,
    model: Model,
    scratch: Callable[[], int],
    threads: int,
    progress: Progress,
    share: tuple[int, int] | None = None,
) -> list[PlannedTable]:
    """Builds the indexes of raw ids and plans the rows of each table. scratch, progress: see `Indexing`.
    share: see `ModelSpec`."""
    planned = []
    backfilled = [t for t in tables if t.missing.policy == "backfill"]
    older = {t.name: Backfill(model.root, t, sources.dims[t.name]) for t in backfilled}
    ids_of = {
        t.name: sources.rows[t.name] + (older[t.name].rows if t.name in older else 0)
        for t in tables
        if t.raw is not None
    }
    work = Indexing(model.root, scratch, threads, PASSES * sum(ids_of.values()), progress)
    for t in tables:
        dim = sources.dims[t.name]
        backfill = older.get(t.name)
        default_row = DefaultRow(t, dim, backfill)
        try:
            t.row_bytes(dim)
        except QuantError as error:
            raise ModelError(f"model {model.name!r}: {error}") from error
        if t.raw is None:
            first, end = _cut(t, sources.rows[t.name], share)
            ids, rows = _ids_of_rows(t, end - first, backfill, default_row)
            if share is not None:
                ids = replace(ids or StoredIds(rows, str(t.missing)), first=first)
            matrix = sources.matrices[t.name]
            planned.append(PlannedTable(t, rows, dim, ids, matrix, default_row, backfill, first, end - first))
            continue
        raw = plan_raw_table(t, t.raw, sources.keyed[t.name], backfill, work, share)
        ids = replace(raw.ids, default_row=raw.rows - 1) if default_row.is_used else raw.ids
        planned.append(PlannedTable(t, raw.rows, dim, ids, raw, default_row, backfill))
    return planned


def stored_table(
    spec: TableSpec, rows: int, dim: int, ids: StoredIds | None, chunk_rows: int = 1
) -> StoredTable:
    """Returns a table as a header has it, without its place. chunk_rows: whose multiple a chunk is."""
    place = rows, spec.row_bytes(dim), 0, chunk_rows, 0
    return StoredTable(*place, spec.name, spec.key, spec.row_format.label, dim, ids)


def _cut(t: TableSpec, rows: int, share: tuple[int, int] | None) -> tuple[int, int]:
    """Returns the rows [first, end) of a share. ModelError: there are none."""
    number, owners = share or (0, 1)
    if rows < owners:
        raise ModelError(f"[tables.{t.name}]: {rows} rows for {owners} owners; expected one or more for each")
    return rows * number // owners, rows * (number + 1) // owners


def _ids_of_rows(
    t: TableSpec, own: int, backfill: Backfill | None, default_row: DefaultRow
) -> tuple[StoredIds | None, int]:
    """Returns the ids of a table of row numbers, and its rows; own: rows of the checkpoint."""
    count = max(own, 0 if backfill is None else backfill.rows)
    if count == own and not default_row.is_used and t.missing.policy == "error":
        return None, own
    rows = count + default_row.is_used
    return StoredIds(count, str(t.missing), rows - 1 if default_row.is_used else None, 0, count - own), rows
