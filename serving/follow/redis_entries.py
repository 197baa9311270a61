"""Entries of a Redis stream as changes, in one of these forms; numbers are little-endian:

    table, ids, vectors, dtype   rows: ids int64 [n], vectors [n, dim] fp32 (the default) or fp16
    table, ids, deleted          deletions: ids int64 [n], deleted is 1
    table, id, vector            one row: id as decimal text, vector as a JSON list, or null for a deletion

`table` may be omitted if all rows are of one. Of a table of string ids, id is the string, and ids are strings
as BYTES (loader.string_ids).
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tableside.loader.checkpoint.rows import narrowed
from tableside.loader.deltas.change_lines import PythonRows
from tableside.loader.deltas.changes import RowRules, TableChanges, changes
from tableside.loader.errors import ChangeError
from tableside.loader.string_ids import ids_of_bytes, string_ids
from tableside.quant.contract import Ids
from tableside.serving.follow.source import refusing

_NUMERIC = b"0123456789+-.eE,[] \t\r\n"
_DTYPES: dict[bytes, np.dtype[Any]] = {b"fp32": np.dtype("<f4"), b"fp16": np.dtype("<f2")}
_FORMS = ({b"ids", b"vectors"}, {b"ids", b"vectors", b"dtype"}, {b"ids", b"deleted"}, {b"id", b"vector"})
_EXPECTED = "expected the fields table and ids, vectors (and dtype), or ids, deleted, or id, vector"


class Entries:
    """Changes of entries, joined by table, those of one table in order. rows: how many they are."""

    def __init__(self, rules: RowRules) -> None:
        self.rows, self._rules = 0, rules
        self._tables: dict[str, _TableRun] = {}

    def add(self, entry: str, fields: Sequence[bytes]) -> int:
        """Adds an entry of alternating fields and values; returns its rows. ChangeError: it has none of the
        forms."""
        found = dict(zip(fields[::2], fields[1::2], strict=True))
        table = self._table(entry, found.pop(b"table", None))
        if set(found) not in _FORMS:
            there = ", ".join(sorted(f.decode("utf-8", "replace")[:40] for f in found)) or "none"
            raise self._rules.error(entry, f"found the fields {there} (and table); {_EXPECTED}")
        if (run := self._tables.get(table)) is None:
            run = self._tables[table] = _TableRun(self._rules, table)
        rows = run.add_row(entry, found) if b"id" in found else run.add_rows(entry, found)
        self.rows += rows
        return rows

    def changes(self) -> list[TableChanges]:
        """Returns all changes. ChangeError: a vector is invalid."""
        return [c for run in self._tables.values() for c in run.joined()]

    def told(self) -> Iterable[TableChanges]:
        """Returns all changes, or what raises ChangeError when it is read: a vector is invalid."""
        try:
            return self.changes()
        except ChangeError as error:
            return refusing(error)

    def _table(self, entry: str, name: bytes | None) -> str:
        if name is None:
            if self._rules.table is None:
                raise self._rules.error(
                    entry, f"it names no table; {_EXPECTED}; or say the table of all rows with --table"
                )
            return self._rules.table
        return self._rules.check_table(name.decode("utf-8", "replace"), entry)


class _TableRun:
    """The changes of one table. Single rows wait until they are parsed together."""

    def __init__(self, rules: RowRules, table: str) -> None:
        self._rules, self._table = rules, table
        self._parts: list[TableChanges] = []
        self._waiting: list[tuple[str, int | bytes, bytes]] = []  # (entry, id, vector as JSON)
        self._strings = table in rules.strings

    def add_row(self, entry: str, fields: dict[bytes, bytes]) -> int:
        self._waiting.append((entry, self._id(entry, fields[b"id"]), fields[b"vector"]))
        return 1

    def _id(self, entry: str, text: bytes) -> int | bytes:
        if self._strings:
            return text
        try:
            id_ = int(text) if len(text) <= 20 and b"_" not in text else 1 << 63
        except ValueError:
            id_ = 1 << 63
        if not -(2**63) <= id_ < 2**63:
            found = text[:40].decode("utf-8", "replace")
            raise self._rules.error(
                entry, f"its id is {found!r}; expected an integer that int64 holds, as decimal text"
            )
        return id_

    def add_rows(self, entry: str, fields: dict[bytes, bytes]) -> int:
        self._parse()
        ids = self._ids(entry, fields[b"ids"])
        if b"deleted" in fields:
            if fields[b"deleted"] != b"1":
                found = fields[b"deleted"][:40].decode("utf-8", "replace")
                raise self._rules.error(
                    entry, f"its field deleted is {found!r}; expected 1, or vectors instead"
                )
            none = np.zeros((0, self._rules.dim(self._table)), np.float32)
            deleted = np.ones(len(ids), bool)
            where = self._rules.where(entry)
            self._parts.append(changes(self._table, ids, none, deleted, none.shape[1], where, self._strings))
        elif len(ids):
            vectors = self._vectors(entry, fields, len(ids))
            where = self._rules.where(entry)
            self._parts.append(TableChanges(self._table, ids, vectors, None, where, self._strings))
        return len(ids)

    def _ids(self, entry: str, data: bytes) -> Ids:
        if self._strings:
            if (ids := ids_of_bytes(data)) is None:
                expected = "strings, before each its length as uint32"
                raise self._rules.error(entry, f"its ids are {len(data)} bytes; expected {expected}")
            return ids
        if len(data) % 8:
            raise self._rules.error(entry, f"its ids are {len(data)} bytes; expected 8 for each, as int64")
        return np.frombuffer(data, "<i8").astype(np.int64, copy=False)

    def _vectors(self, entry: str, fields: dict[bytes, bytes], rows: int) -> NDArray[Any]:
        name, data = fields.get(b"dtype", b"fp32"), fields[b"vectors"]
        if (dtype := _DTYPES.get(name)) is None:
            raise self._rules.error(
                entry, f"its dtype is {name[:40].decode('utf-8', 'replace')!r}; expected fp32 or fp16"
            )
        if len(data) % (rows * dtype.itemsize):
            told = f"a multiple of {rows * dtype.itemsize}"
            raise self._rules.error(
                entry,
                f"its vectors are {len(data)} bytes for {rows} ids; expected {told}, as {name.decode()}",
            )
        dim = len(data) // dtype.itemsize // rows
        self._rules.check_dim(self._table, dim, entry)
        return np.frombuffer(data, dtype).reshape(rows, dim)

    def joined(self) -> list[TableChanges]:
        """The changes in order, neighbours of one shape as one."""
        self._parse()
        runs = itertools.groupby(self._parts, lambda c: (c.vectors.dtype, c.vectors.shape[1]))
        return [_join(list(run)) for _, run in runs]

    def _parse(self) -> None:
        """Makes one change of the rows that wait."""
        rows, self._waiting = self._waiting, []
        if not rows:
            return
        deleted = np.array([text == b"null" for *_, text in rows])
        values = _numbers([text for *_, text in rows if text != b"null"])
        if values is None or (len(values) and not self._fits(values.shape[1], rows[0][0])):
            self._parts.append(self._parse_singly(rows))
            return
        dim, given = self._rules.dim(self._table), [i for _, i, _ in rows]
        ids = string_ids(given) if self._strings else np.array(given, np.int64)  # type: ignore[arg-type]
        values, where = values.reshape(len(values), dim), self._rules.where(rows[0][0])
        self._parts.append(changes(self._table, ids, values, deleted, dim, where, self._strings))

    def _fits(self, dim: int, entry: str) -> bool:
        """Whether the table's vectors have `dim` values, as far as is known."""
        if not self._rules.dim(self._table) and dim:
            self._rules.check_dim(self._table, dim, entry)
        return self._rules.dim(self._table) == dim

    def _parse_singly(self, rows: list[tuple[str, int | bytes, bytes]]) -> TableChanges:
        """As `_parse`, entry by entry, to find the invalid one."""
        found = PythonRows(self._rules, self._table)
        for entry, id_, text in rows:
            try:
                vector = orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise self._rules.error(
                    entry, f"its vector is not JSON ({error}); expected a list of numbers, or null"
                ) from error
            if vector is not None and not isinstance(vector, list):
                raise self._rules.error(
                    entry,
                    f"its vector is a JSON {type(vector).__name__}; expected a list of numbers, or null",
                )
            found.add(entry, id_, vector)
        return found.changes()


def _numbers(texts: list[bytes]) -> NDArray[Any] | None:
    """Lists of numbers, of one length, as fp32 [lists, numbers]; None: they are something else."""
    if not texts:
        return np.zeros((0, 0), np.float32)
    joined = b"[" + b",".join(texts) + b"]"
    if joined.translate(None, _NUMERIC):
        return None
    try:
        values = np.array(orjson.loads(joined), np.float64)
    except ValueError:  # not JSON, or of several lengths
        return None
    if values.ndim != 2 or len(values) != len(texts):
        return None
    found, bad = narrowed(values)
    return found if bad < 0 else None


def _join(parts: list[TableChanges]) -> TableChanges:
    if len(parts) == 1:
        return parts[0]
    deleted = None
    if any(c.deleted is not None for c in parts):
        deleted = np.concatenate([np.zeros(c.rows, bool) if c.deleted is None else c.deleted for c in parts])
    ids, vectors = np.concatenate([c.ids for c in parts]), np.concatenate([c.vectors for c in parts])
    return replace(parts[0], ids=ids, vectors=vectors, deleted=deleted)
