"""Tables of raw ids in Parquet: an id column and a vector column in a file, or in part files in name order.

ids: integers within int64, or strings (loader.string_ids). vectors: lists of one length of float32, float16
or float64 (rounded to float32, with a note). Nulls are refused. Arrow reads them
(github.com/apache/parquet-format), some rows of a row group at a time. A piece is whole row groups. Page
checksums are checked if present. Arrow trusts sizes in page headers, so `parquet_pages` compares them with
the file first.

Keys are columns: of the file or a folder's part files, and "NAME/COLUMN" of a sub-folder or file NAME in it.
Names that begin with "_" or "." are ignored.
"""

import copy
import logging
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tableside.loader.checkpoint.keyed import keyed
from tableside.loader.checkpoint.keyed.keyed import Block, IdBlock, KeyedRows, KeyedTables
from tableside.loader.checkpoint.keyed.parquet_pages import check_pages
from tableside.loader.checkpoint.rows import LARGEST_DIM, Checkpoint, int64_ids, narrowed, some
from tableside.loader.errors import CheckpointError, LoaderError
from tableside.loader.files import open_regular
from tableside.loader.string_ids import ids_of_column, is_text
from tableside.quant import Source
from tableside.quant.contract import Ids

_READ_BYTES = 1 << 20  # of a column chunk at once
_SMALLER = 4  # than elsewhere are blocks: Arrow takes some 12 times a block's bytes, and is no slower
_ARROW_BYTES = 28 << 20  # that it takes besides, in huge pages
_SOURCES = {pa.float32(): Source.FP32, pa.float16(): Source.FP16, pa.float64(): Source.FP32}
_ID_NAMES = ("id", "ids", "key", "keys")
_log = logging.getLogger("tableside")


def read(path: Path, groups: dict[str, list[Path]]) -> Checkpoint:
    """Returns the tables of a Parquet file or folder. groups: key prefix -> files. CheckpointError: a file is
    damaged."""
    checkpoint = Checkpoint(path)
    checkpoint.tables = ParquetTables(checkpoint, groups)
    return checkpoint


class ParquetTables(KeyedTables):
    """Tables of groups of files. Names columns only where one holds vectors and one can hold its ids."""

    def __init__(self, checkpoint: Checkpoint, groups: dict[str, list[Path]]) -> None:
        self._path, self._groups = checkpoint.path, groups
        self.names, self.strings = {}, []
        for prefix, files in groups.items():
            if prefix.endswith(".parquet/") and "" in groups:
                continue  # a part of a table that is named already
            schema = _schema(files[0])
            ids = _id_columns(schema)
            for field in schema:
                if is_list(field.type) and field.type.value_type in _SOURCES:
                    if len(ids) == 1:
                        self.names[prefix + field.name] = ids[0]
                        self.strings += [prefix + field.name] if is_text(schema.field(ids[0]).type) else []
                    else:
                        unclear = f"which column holds its ids cannot be told: {some(ids)}"
                        checkpoint.skipped[prefix + field.name] = unclear if ids else _without_ids(schema)

    def open(self, key: str, id_key: str | None) -> KeyedRows:
        prefix = next((p for p in sorted(self._groups, reverse=True) if key.startswith(p)), "")
        column = key.removeprefix(prefix)
        if prefix not in self._groups:
            raise CheckpointError(
                f"{self._path}: there is no column {key!r}; columns of vectors there: {some(self.names)}"
            )
        id_key = id_key or self.names.get(key)
        if id_key is None:  # perhaps a part of a table that is named as a whole
            ids = _id_columns(_schema(self._groups[prefix][0]))
            if len(ids) != 1:
                raise CheckpointError(
                    f"{self._path}: say the column of the ids of {key!r} as id_key in model.toml"
                )
            (id_key,) = ids
        return ParquetRows(key, column, id_key.removeprefix(prefix), self._groups[prefix])


class _Group(NamedTuple):
    """A row group with rows. group: its number in the file; first: its first row in the table; in_file: in
    the file."""

    path: Path
    group: int
    first: int
    rows: int
    in_file: int


class ParquetRows(KeyedRows):
    def __init__(self, key: str, column: str, id_column: str, files: list[Path]) -> None:
        """CheckpointError: a file is damaged, or lacks a column, or has one of another type."""
        self.key, self.paths, self._column, self._id_column = key, tuple(files), column, id_column
        self._groups: list[_Group] = []
        self.rows, kinds = 0, dict[tuple[Any, int], Path]()
        self._seed, of_strings = 0, dict[bool, Path]()
        for path in files:
            with open_parquet(path) as file:
                kind = _kind(file, path, column, id_column)
                of_strings.setdefault(is_text(file.schema_arrow.field(id_column).type), path)
                if kind[1] or file.metadata.num_rows:
                    kinds.setdefault((kind[0], kind[1] or _first_length(file, path, column)), path)
                self._add(path, file.metadata)
        if not kinds:
            raise CheckpointError(
                f"{files[0]}: {column!r} has no rows, and as a list it does not say how many values a vector "
                "has"
            )
        if len(kinds) > 1:
            ((kind, dim), path), ((other, other_dim), other_path) = list(kinds.items())[:2]
            raise CheckpointError(
                f"{other_path}: vectors of {other_dim} {other} values, in {path} they are of {dim} {kind}; "
                "name a "
                f'file as "{path.name}/{column}" where each is a table of its own'
            )
        if len(of_strings) > 1:
            raise CheckpointError(
                f"{of_strings[True]}: the ids {id_column!r} are strings, in {of_strings[False]} they are "
                "integers; write them alike"
            )
        ((kind, self.dim),), (self.strings,) = kinds, of_strings
        self.source, self._is_told = _SOURCES[kind], kind != pa.float64()
        if self.dim > LARGEST_DIM:
            raise CheckpointError(
                f"{files[0]}: {column!r} has {self.dim:,} values a row; expected at most {LARGEST_DIM:,}"
            )
        self._pieces = list(self._cut(max(1, keyed.PIECE_BYTES // self.source.row_bytes(self.dim))))
        self._block_rows = max(1, keyed.BLOCK_BYTES // _SMALLER // self.source.row_bytes(self.dim))
        self.pieces, self.buffer_bytes = len(self._pieces), _ARROW_BYTES + 12 * keyed.BLOCK_BYTES // _SMALLER

    @property
    def verification(self) -> Mapping[str, str]:
        return {"not": "Parquet has checksums only where its writer was asked for them"}

    def finish(self) -> None:
        """Nothing is left: pages are compared while they are read."""

    def _add(self, path: Path, metadata: Any) -> None:
        in_file = 0
        for group in range(metadata.num_row_groups):
            if rows := metadata.row_group(group).num_rows:
                self._groups.append(_Group(path, group, self.rows, rows, in_file))
            self.rows, in_file = self.rows + rows, in_file + rows

    def _cut(self, most: int) -> Iterator[list[_Group]]:
        """Returns pieces: adjacent row groups of a file up to `most` rows, or one. So files are opened
        seldom."""
        piece: list[_Group] = []
        for group in self._groups:
            if piece and (group.path != piece[0].path or group.first + group.rows - piece[0].first > most):
                yield piece
                piece = []
            piece.append(group)
        if piece:
            yield piece

    def ids(self, piece: int) -> Iterator[IdBlock]:
        for first, batch in self._batches(piece, [self._id_column], keyed.ID_BLOCK_ROWS):
            yield IdBlock(np.arange(first, first + len(batch)), self._ids_of(batch, first))

    def blocks(self, piece: int) -> Iterator[Block]:
        for first, batch in self._batches(piece, [self._id_column, self._column], self._block_rows):
            rows = np.arange(first, first + len(batch))
            yield Block(rows, self._ids_of(batch, first), self._values_of(batch, first))

    def where(self, row: int) -> str:
        group = self._groups[bisect_right(self._groups, row, key=lambda g: g.first) - 1]
        return f"{group.path}: row {row - group.first + group.in_file:,} (row group {group.group})"

    def rehashed(self) -> "ParquetRows":
        other = copy.copy(self)
        other._seed = self._seed + 1
        return other

    def text(self, row: int) -> str:
        piece = bisect_right(self._pieces, row, key=lambda p: p[0].first) - 1
        for first, batch in self._batches(piece, [self._id_column], keyed.ID_BLOCK_ROWS):
            if row < first + len(batch):
                break
        found = batch.column(self._id_column)[row - first].as_py()
        return found.decode("utf-8", "backslashreplace") if isinstance(found, bytes) else str(found)

    def _batches(self, piece: int, columns: list[str], rows: int) -> Iterator[tuple[int, Any]]:
        """Yields (row in the table, batch) of a piece. CheckpointError: it is unreadable."""
        groups = self._pieces[piece]
        path, first = groups[0].path, groups[0].first
        end = groups[-1].first + groups[-1].rows
        with open_parquet(path) as file:
            for at in groups:
                if (
                    file.metadata.num_row_groups <= at.group
                    or file.metadata.row_group(at.group).num_rows != at.rows
                ):
                    raise CheckpointError(
                        f"{path}: its row groups changed while it was read; load it when it is whole"
                    )
            for batch in file.batches(rows, columns, [g.group for g in groups]):
                if len(batch) and first + len(batch) <= end:
                    yield first, batch
                first += len(batch)
        if first != end:
            raise CheckpointError(
                f"{path}: a column has {first - end:+,} rows against the file's footer; it is damaged"
            )

    def _ids_of(self, batch: Any, first: int) -> Ids:
        column = batch.column(self._id_column)
        if column.null_count:
            text = f"{self._id_column!r} is null; expected an id in every row"
            raise self._error(first + first_null(column), text)
        if self.strings:
            return ids_of_column(column, self._seed)
        ids, bad = int64_ids(column.to_numpy(zero_copy_only=False))
        if bad >= 0:
            text = f"id {column[bad]} does not fit an int64; expected ids below 2**63"
            raise self._error(first + bad, text)
        return ids

    def _values_of(self, batch: Any, first: int) -> NDArray[Any]:
        column = batch.column(self._column)
        if column.null_count:
            text = f"{self._column!r} is null; expected a vector in every row"
            raise self._error(first + first_null(column), text)
        if not pa.types.is_fixed_size_list(column.type):
            lengths = column.value_lengths().to_numpy(zero_copy_only=False)
            if (other := lengths != self.dim).any():
                at = int(other.argmax())
                text = f"a vector of {lengths[at]} values; the first one has {self.dim}"
                raise self._error(first + at, text)
        values = column.flatten()
        if values.null_count:
            at = first_null(values) // self.dim
            raise self._error(first + at, f"a value of {self._column!r} is null; expected numbers")
        found, bad = narrowed(values.to_numpy(zero_copy_only=True))
        if bad >= 0:
            text = f"a value of {self._column!r} is {values[bad]}; expected one that float32 holds"
            raise self._error(first + bad // self.dim, text)
        if not self._is_told:
            self._is_told = True
            _log.warning(
                "%s: the values of %r are float64; they are rounded to float32", self.paths[0], self._column
            )
        return found.reshape(-1, self.dim)

    def _error(self, row: int, text: str) -> CheckpointError:
        return CheckpointError(f"{self.where(row)}: {text}")


class _File(pq.ParquetFile):  # type: ignore[misc]  # it has no types
    """A file whose pages are checked before any is read."""

    def __init__(self, fd: int, source: Any) -> None:
        super().__init__(source, buffer_size=_READ_BYTES, pre_buffer=False, page_checksum_verification=True)
        self._fd = fd

    def batches(self, rows: int, columns: list[str], groups: Sequence[int] | None = None) -> Iterator[Any]:
        """Record batches of some rows of these columns, and of these row groups (None: of all)."""
        groups = range(self.metadata.num_row_groups) if groups is None else groups
        for group in groups:
            check_pages(self._fd, self.metadata, group, columns)
        yield from self.iter_batches(rows, row_groups=list(groups), columns=columns, use_threads=False)


@contextmanager
def open_parquet(
    path: Path, what: str = "a file of the checkpoint", failure: type[LoaderError] = CheckpointError
) -> Iterator[_File]:
    """Opens a Parquet file as a stream. failure: raised if it is no regular file, or damaged, now or
    later."""
    fd = open_regular(path, what, failure)
    try:
        with pa.OSFile(f"/proc/self/fd/{fd}") as source:
            yield _File(fd, source)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise failure(
            f"{path}: not a whole Parquet file, it may be half-written or damaged ({_line(error)})"
        ) from error
    finally:
        os.close(fd)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _schema(path: Path) -> Any:
    with open_parquet(path) as file:
        return file.schema_arrow


def is_list(kind: Any) -> bool:
    """Returns whether a column is of lists, of one length or of any."""
    return any(
        is_one(kind) for is_one in (pa.types.is_fixed_size_list, pa.types.is_list, pa.types.is_large_list)
    )


def _id_columns(schema: Any) -> list[str]:
    """Returns the columns that may hold ids: those with a name for them, else all integers, else all
    strings."""
    ids = [f.name for f in schema if pa.types.is_integer(f.type)]
    texts = [f.name for f in schema if is_text(f.type)]
    return [n for n in ids + texts if n.lower() in _ID_NAMES] or ids or texts


def _without_ids(schema: Any) -> str:
    """Returns why no column of a file can be ids."""
    named = next((f for f in schema if f.name.lower() in _ID_NAMES), None)
    return "no column of integers or strings" + (
        "" if named is None else f"; {named.name!r} is of type {type_name(named.type)}{id_remedy(named.type)}"
    )


def _kind(file: Any, path: Path, column: str, id_column: str) -> tuple[Any, int]:
    """Returns (value type, dim) of the vectors; dim 0: the type lacks it. CheckpointError: a column is
    unusable."""
    schema = file.schema_arrow

    def wrong(text: str) -> CheckpointError:
        return CheckpointError(f"{path}: {text}")

    for name in (column, id_column):
        if (count := len(schema.get_all_field_indices(name))) != 1:
            raise wrong(f"{count} columns are called {name!r}; expected one, of: {some(schema.names)}")
    ids, vectors = schema.field(id_column).type, schema.field(column).type
    if not (pa.types.is_integer(ids) or is_text(ids)):
        expected = f"expected int64 or strings{id_remedy(ids)}"
        raise wrong(f"the ids {id_column!r} are of type {type_name(ids)}; {expected}")
    if not is_list(vectors):
        raise wrong(f"the vectors {column!r} are of type {vectors}; expected lists of float32 or float16")
    if vectors.value_type not in _SOURCES:
        raise wrong(
            f"the values of {column!r} are of type {vectors.value_type}; expected float32, float16 or "
            "float64, so cast them when the file is written"
        )
    dim = vectors.list_size if pa.types.is_fixed_size_list(vectors) else 0
    if dim == 0 and pa.types.is_fixed_size_list(vectors):
        raise wrong(f"the vectors {column!r} have no values; expected at least one")
    return vectors.value_type, dim


def _first_length(file: Any, path: Path, column: str) -> int:
    """How many values the first vector of a file has; CheckpointError: none, or it is null."""
    for batch in file.batches(1, [column]):
        if len(batch):
            if length := batch.column(column).value_lengths()[0].as_py():
                return int(length)
            break
    raise CheckpointError(
        f"{path}: row 0: {column!r} is null or has no values; expected a vector in every row"
    )


def type_name(kind: Any) -> str:
    return f"categories of {kind.value_type}" if pa.types.is_dictionary(kind) else str(kind)


def id_remedy(kind: Any) -> str:
    """Returns how a column of this type, as pandas writes some, becomes ids; "": it is integer or unknown."""
    of = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_floating(of):
        why = "pandas makes floats of integers where one is missing"
        return f' ({why}: leave such rows out, and write astype("int64"))'
    if is_text(of):
        return ' (where they are numbers, write astype("int64"); else load the table with ids = "string")'
    return ' (write astype("int64"))' if of is not kind and pa.types.is_integer(of) else ""


def first_null(column: Any) -> int:
    return int(column.is_null().to_numpy(zero_copy_only=False).argmax())
