"""Reads changes from JSON Lines (loader.deltas.change_files). Rows are counted from 1, like an editor's
lines."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson

from tableside.loader.checkpoint.rows import narrowed
from tableside.loader.deltas.changes import Row, RowRules, TableChanges, changes
from tableside.loader.errors import ChangeError
from tableside.loader.files import open_regular
from tableside.loader.string_ids import string_ids

_LINE_BYTES = 16 << 20  # the longest line that is read
_BLOCK_VALUES = 1 << 20  # some 32 bytes each, as Python has them
_KEYS = {"table", "id", "vector"}


class PythonRows:
    def __init__(self, rules: RowRules, table: str) -> None:
        self.rules, self.table = rules, table
        self.numbers: list[Row] = []
        self.ids: list[int | str | bytes] = []
        self.vectors: list[list[float]] = []
        self.deleted: list[bool] = []

    def add(self, number: Row, id_: int | str | bytes, vector: list[float] | None) -> None:
        """Adds a row; number: its number in the source. ChangeError: the vector is no list of `dim`
        numbers, or an id a string and one before it an integer."""
        if self.ids and type(id_) is not type(self.ids[0]):
            expected = f"one like {self.ids[0]!r:.60} before it, an integer or a string"
            raise self.rules.error(number, f"its id is {id_!r:.60}; expected {expected}")
        if vector is not None:
            self.rules.check_dim(self.table, len(vector), number)
            if not {*map(type, vector)} <= {int, float}:
                other = next(v for v in vector if type(v) not in (int, float))
                raise self.rules.error(number, f"its vector holds {str(other)[:60]!r}; expected numbers")
            self.vectors.append(vector)
        self.numbers.append(number)
        self.ids.append(id_)
        self.deleted.append(vector is None)

    def changes(self) -> TableChanges:
        """Returns the rows as arrays. ChangeError: a value is too large for float32."""
        dim, deleted = self.rules.dim(self.table), np.array(self.deleted)
        values, bad = narrowed(np.array(self.vectors, np.float64).reshape(-1, dim or 1))
        if bad >= 0:
            number = self.numbers[int(np.flatnonzero(~deleted)[bad // dim])]
            raise self.rules.error(number, "a value of its vector is too large for float32")
        strings, where = type(self.ids[0]) is not int, self.rules.where(self.numbers[0])
        ids = string_ids(self.ids) if strings else np.array(self.ids, np.int64)  # type: ignore[arg-type]
        return changes(self.table, ids, values, deleted, dim, where, strings)


def rows_in(path: Path) -> None:
    """Returns None: lines must be read to be counted."""


def blocks(path: Path, table: str | None) -> Iterator[TableChanges]:
    """As `change_files.read_changes`."""
    rules, waiting, values = RowRules(str(path), "line", table), dict[str, PythonRows](), 0
    with os.fdopen(open_regular(path, "a file of changes", ChangeError), "rb") as file:
        number = 0
        while line := file.readline(_LINE_BYTES + 1):
            number += 1
            if len(line) > _LINE_BYTES:
                raise rules.error(number, f"longer than {_LINE_BYTES:,} bytes; expected one row a line")
            if not line.strip():
                continue
            name, id_, vector = row_of(rules, number, line)
            if name not in waiting:
                waiting[name] = PythonRows(rules, name)
            waiting[name].add(number, id_, vector)
            values += 1 if vector is None else len(vector)
            if values >= _BLOCK_VALUES:
                yield from (rows.changes() for rows in waiting.values())
                waiting, values = {}, 0
    yield from (rows.changes() for rows in waiting.values())


def row_of(rules: RowRules, number: Row, line: bytes) -> tuple[str, int | str, list[float] | None]:
    """Returns (table, id, vector) of a row in JSON. ChangeError: it is no such row."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise rules.error(number, f"not JSON ({error}); expected one object, a row") from error
    if not isinstance(row, dict) or not {"id", "vector"} <= set(row) <= _KEYS:
        found = sorted(row) if isinstance(row, dict) else f"a JSON {type(row).__name__}"
        raise rules.error(
            number, f'found {found}; expected an object with "id", "vector" (or null) and "table"'
        )
    table = row.get("table", rules.table)
    if not isinstance(table, str):
        raise rules.error(
            number, f'its table is {table!r:.60}; expected a table\'s name, as "table" or with --table'
        )
    id_ = row["id"]
    if type(id_) is not str and (type(id_) is not int or not -(2**63) <= id_ < 2**63):
        raise rules.error(number, f"its id is {id_!r:.60}; expected an integer that int64 holds, or a string")
    if row["vector"] is not None and not isinstance(row["vector"], list):
        raise rules.error(number, f"its vector is {row['vector']!r:.60}; expected a list of numbers, or null")
    return rules.check_table(table, number), id_, row["vector"]
