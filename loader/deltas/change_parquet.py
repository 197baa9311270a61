"""Reads changes from Parquet (loader.deltas.change_files). Vectors are copied only where ids are deleted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tableside.loader.checkpoint.keyed.parquet import first_null, id_remedy, is_list, open_parquet, type_name
from tableside.loader.checkpoint.rows import int64_ids, narrowed
from tableside.loader.deltas.changes import BLOCK_BYTES, MOST_ROWS, RowRules, TableChanges, changes
from tableside.loader.errors import ChangeError
from tableside.loader.string_ids import ids_of_column, is_text
from tableside.quant.contract import Ids

_WHAT = "a file of changes"


def rows_in(path: Path) -> int:
    """Rows that the footer names. ChangeError: the file is damaged."""
    with open_parquet(path, _WHAT, ChangeError) as file:
        return int(file.metadata.num_rows)


def blocks(path: Path, table: str | None) -> Iterator[TableChanges]:
    """As `change_files.read_changes`."""
    with open_parquet(path, _WHAT, ChangeError) as file:
        columns = _columns(file.schema_arrow, path, table)
        rules, first = RowRules(str(path), table=table), 0
        for batch in file.batches(_block_rows(file), columns):
            yield from _Block(rules, batch, first).changes()
            first += len(batch)
    if first != file.metadata.num_rows:
        raise ChangeError(
            f"{path}: {first:,} rows were read; its footer says {file.metadata.num_rows:,}; it is damaged"
        )


def _columns(schema: Any, path: Path, table: str | None) -> list[str]:
    """Returns the columns to read. ChangeError: one is missing, there twice or of another type."""
    names = [n for n in ("table", "id", "vector") if n != "table" or table is None or n in schema.names]
    for name in names:
        if (count := schema.names.count(name)) != 1:
            known = ", ".join(schema.names) or "none"
            remedy = "; or say the table of all rows with --table" if name == "table" else ""
            raise ChangeError(
                f"{path}: {count} columns are called {name!r}; expected one{remedy} (columns there: {known})"
            )
    for name in names:
        kind, expected = schema.field(name).type, _is_expected[name]
        if not expected[0](kind):
            remedy = id_remedy(kind) if name == "id" else ""
            raise ChangeError(
                f"{path}: the column {name!r} is of type {type_name(kind)}; expected {expected[1]}{remedy}"
            )
    return names


def _is_string(kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_vector(kind: Any) -> bool:
    return is_list(kind) and pa.types.is_floating(kind.value_type)


_is_expected = {
    "table": (_is_string, "strings"),
    "id": (lambda kind: pa.types.is_integer(kind) or is_text(kind), "integers or strings"),
    "vector": (_is_vector, "lists of float32, float16 or float64"),
}


def _block_rows(file: Any) -> int:
    """Returns the rows that take about BLOCK_BYTES."""
    kind = file.schema_arrow.field("vector").type
    a_row = kind.list_size * kind.value_type.bit_width // 8 if pa.types.is_fixed_size_list(kind) else 0
    for group in range(file.metadata.num_row_groups):
        found = file.metadata.row_group(group)
        a_row = max(a_row, found.total_byte_size // max(1, found.num_rows))
    return max(1, min(MOST_ROWS, BLOCK_BYTES // max(1, a_row)))


class _Block:
    """Some rows of a file. first: the number of the first one, from 0 on."""

    def __init__(self, rules: RowRules, batch: Any, first: int) -> None:
        self.rules, self.batch, self.first = rules, batch, first
        self.strings = is_text(batch.column("id").type)
        self.ids = self._ids(batch.column("id"))
        vectors = batch.column("vector")
        self.kept = vectors.is_valid().to_numpy(zero_copy_only=False) if vectors.null_count else None
        self.lengths = self._lengths(vectors)
        self.values = self._values(vectors.flatten())

    def changes(self) -> Iterator[TableChanges]:
        """Yields the changes of each table, those of one table in order."""
        for table, rows in self._tables():
            ids, kept = self.ids, self.kept
            if rows is not None:
                ids, kept = ids[rows], None if kept is None else kept[rows]
            vectors, dim = self._vectors(table, rows, kept)
            where = self.rules.where(self.first + (0 if rows is None else int(rows[0])))
            yield changes(table, ids, vectors, None if kept is None else ~kept, dim, where, self.strings)

    def _vectors(
        self, table: str, rows: Ids | None, kept: NDArray[np.bool_] | None
    ) -> tuple[NDArray[Any], int]:
        """Returns (vectors of the kept rows, dim); rows: of the block, None: all."""
        here = np.arange(len(self.ids)) if rows is None else rows
        here = here if kept is None else here[kept]
        if not len(here):
            return np.zeros((0, self.rules.dim(table)), np.float32), self.rules.dim(table)
        lengths = self.lengths[here]
        dim = int(lengths[0])
        self.rules.check_dim(table, dim, self.first + int(here[0]))
        if (other := lengths != dim).any():
            at = int(other.argmax())
            self.rules.check_dim(table, int(lengths[at]), self.first + int(here[at]))
        if len(here) * dim == len(self.values):
            return self.values.reshape(-1, dim), dim
        starts = np.cumsum(self.lengths) - self.lengths
        if len(self.values) % dim == 0 and not (starts[here] % dim).any():
            return self.values.reshape(-1, dim)[starts[here] // dim], dim
        return self.values[starts[here][:, None] + np.arange(dim)], dim

    def _tables(self) -> Iterator[tuple[str, Ids | None]]:
        """Yields (table, its rows in the block; None: all)."""
        if "table" not in self.batch.schema.names:
            assert self.rules.table is not None
            yield self.rules.table, None
            return
        column = self.batch.column("table")
        column = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        if column.null_count:
            raise self._error(first_null(column), "its table is null; expected a table's name")
        codes, names = column.indices.to_numpy(zero_copy_only=False), column.dictionary.to_pylist()
        order = np.argsort(codes, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
            if not len(rows):
                continue  # of a block without rows
            table = self.rules.check_table(names[codes[rows[0]]], self.first + int(rows[0]))
            yield table, None if len(rows) == len(codes) else rows

    def _ids(self, column: Any) -> Ids:
        if column.null_count:
            raise self._error(first_null(column), "its id is null; expected an integer or a string")
        if self.strings:
            return ids_of_column(column)
        ids, bad = int64_ids(column.to_numpy(zero_copy_only=False))
        if bad >= 0:
            raise self._error(bad, f"its id is {column[bad]}; expected one below 2**63, which int64 holds")
        return ids

    def _lengths(self, vectors: Any) -> Ids:
        """Returns the length of each row's vector; 0 for null."""
        if pa.types.is_fixed_size_list(vectors.type):
            lengths = np.full(len(vectors), vectors.type.list_size)
        else:
            lengths = vectors.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        return lengths if self.kept is None else np.where(self.kept, lengths, 0)

    def _values(self, values: Any) -> NDArray[Any]:
        if values.null_count:
            raise self._error(
                self._row_of(first_null(values)), "a value of its vector is null; expected numbers"
            )
        found, bad = narrowed(values.to_numpy(zero_copy_only=True))
        if bad >= 0:
            raise self._error(
                self._row_of(bad), f"a value of its vector is {values[bad]}, which float32 does not hold"
            )
        return found

    def _row_of(self, value: int) -> int:
        """Returns the row that has a value, by its place among all."""
        return int(np.searchsorted(np.cumsum(self.lengths), value, side="right"))

    def _error(self, row: int, text: str) -> ChangeError:
        return self.rules.error(self.first + row, text)
