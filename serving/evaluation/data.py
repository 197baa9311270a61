"""Data sets: Parquet and JSON Lines, cut into shards, read batch by batch into ids, dense tensors and labels.

A shard is a run of whole row groups of a Parquet file, or of lines of a JSON Lines file. A feature's column
holds an id or a list of ids per row, integers or strings (null: an empty bag); a dense tensor is a column of
lists, or several of numbers.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tableside.loader.checkpoint.keyed.parquet import id_remedy, is_list, type_name
from tableside.loader.string_ids import ids_of_column, is_text
from tableside.serving.errors import ServingError

_SUFFIXES = (".parquet", ".jsonl", ".ndjson")
_SCAN_BYTES = 1 << 24


class DataError(ServingError):
    """A data set that cannot be read, or holds something else than the model's inputs."""


@dataclass(frozen=True)
class Shard:
    """Rows [start, start + rows) of a file. first, last: row groups [first, last), or bytes."""

    number: int
    file: str
    start: int
    rows: int
    first: int
    last: int


@dataclass(frozen=True)
class Rows:
    """A batch of a shard: its columns by name, and the number of its first row in the file."""

    file: str
    start: int
    columns: Mapping[str, Any]

    @property
    def size(self) -> int:
        return len(next(iter(self.columns.values())))

    def where(self, row: int) -> str:
        return f"{self.file}, row {self.start + row}"


def data_files(path: Path, beside: Path | None = None) -> list[Path]:
    """Returns `path` or all data files in the folder, except `beside` and names that begin with "." or
    "_"."""
    files = [path]
    if path.is_dir():
        found = [
            f
            for f in path.rglob("*")
            if f.suffix in _SUFFIXES
            and f.is_file()
            and not any(part.startswith((".", "_")) for part in f.relative_to(path).parts)
        ]
        files = sorted(f for f in found if beside is None or not f.resolve().is_relative_to(beside.resolve()))
    if not files:
        raise DataError(f"{path} holds no files that end in {', '.join(_SUFFIXES)}")
    for file in files:
        if file.suffix not in _SUFFIXES:
            raise DataError(
                f"{file}: expected a file that ends in {', '.join(_SUFFIXES)}, or a folder of them"
            )
        if not file.is_file():
            raise DataError(f"{file} does not exist")
    return files


def plan_shards(files: Sequence[Path], rows: int) -> list[Shard]:
    """Shards of about `rows` rows, in order. DataError: a file cannot be read."""
    shards: list[Shard] = []
    for file in files:
        try:
            ranges = _row_groups(file, rows) if file.suffix == ".parquet" else _lines(file, rows)
            for start, count, first, last in ranges:
                shards.append(Shard(len(shards), str(file), start, count, first, last))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file} cannot be read: {error}") from error
    return shards


def _row_groups(file: Path, rows: int) -> Iterator[tuple[int, int, int, int]]:
    metadata = pq.read_metadata(file)
    start = count = first = 0
    for group in range(metadata.num_row_groups):
        count += metadata.row_group(group).num_rows
        if count >= rows or group == metadata.num_row_groups - 1:
            if count:
                yield start, count, first, group + 1
            start, count, first = start + count, 0, group + 1


def _lines(file: Path, rows: int) -> Iterator[tuple[int, int, int, int]]:
    start = count = first = at = 0
    with file.open("rb") as opened:
        while block := opened.read(_SCAN_BYTES):
            for end in np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + at + 1:
                count += 1
                if count == rows:
                    yield start, count, first, int(end)
                    start, count, first = start + count, 0, int(end)
            at += len(block)
            is_open = not block.endswith(b"\n")
    if at and is_open:  # a last line without a newline
        count += 1
    if count:
        yield start, count, first, at


def read(shard: Shard, columns: Sequence[str], batch_rows: int, whole: bool = False) -> Iterator[Rows]:
    """Reads a shard's `columns` batch by batch. whole: this thread decodes Parquet at once. DataError: a
    column is missing, or a line is no JSON object."""
    try:
        if not shard.file.endswith(".parquet"):
            yield from _json(shard, columns, batch_rows)
        else:
            yield from _parquet(shard, columns, batch_rows, whole)
    except (pa.ArrowException, OverflowError, OSError) as error:
        raise DataError(f"{shard.file}, rows [{shard.start}, {shard.start + shard.rows}): {error}") from error


def _opened(file: str) -> pq.ParquetFile:
    found = os.stat(file)
    return pq.ParquetFile(file, metadata=_footer(file, found.st_size, found.st_mtime_ns))


@lru_cache(8)
def _footer(file: str, size: int, changed_ns: int) -> pq.FileMetaData:
    """Reads a file's footer, once for all shards: it takes 9 µs per row group (docs/log.md)."""
    return pq.read_metadata(file)


def _parquet(shard: Shard, columns: Sequence[str], batch_rows: int, whole: bool) -> Iterator[Rows]:
    with _opened(shard.file) as file:
        _check_columns(shard.file, columns, file.schema_arrow.names)
        at, groups = shard.start, range(shard.first, shard.last)
        if whole:
            table = file.read_row_groups(groups, list(columns), use_threads=False).combine_chunks()
            batches = table.to_batches(batch_rows)
        else:
            batches = file.iter_batches(batch_rows, groups, list(columns), use_threads=pa.cpu_count() > 1)
        for batch in batches:
            yield Rows(shard.file, at, {name: _plain(batch.column(name)) for name in columns})
            at += batch.num_rows


def _json(shard: Shard, columns: Sequence[str], batch_rows: int) -> Iterator[Rows]:
    with open(shard.file, "rb") as file:
        file.seek(shard.first)
        for at in range(0, shard.rows, batch_rows):
            parsed: dict[str, list[Any]] = {name: [] for name in columns}
            start = shard.start + at
            for row in range(min(batch_rows, shard.rows - at)):
                try:
                    line = orjson.loads(file.readline())
                except orjson.JSONDecodeError as error:
                    raise DataError(
                        f"{shard.file}, row {start + row}: not a line of JSON ({error})"
                    ) from error
                if not isinstance(line, dict):
                    raise DataError(f"{shard.file}, row {start + row}: expected an object")
                _check_columns(f"{shard.file}, row {start + row}", columns, line)
                for name in columns:
                    parsed[name].append(line[name])
            yield Rows(shard.file, start, {name: pa.array(values) for name, values in parsed.items()})


def _plain(column: Any) -> Any:
    """A column without its dictionary."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _check_columns(where: str, wanted: Sequence[str], found: Any) -> None:
    if isinstance(found, list) and (twice := [name for name in wanted if found.count(name) > 1]):
        raise DataError(f"{where} has two columns {twice[0]!r}")
    if missing := [name for name in wanted if name not in found]:
        raise DataError(
            f"{where} has no column {missing[0]!r}; it has: {', '.join(found)} (map columns in [eval] of "
            "model.toml)"
        )


def _list_lengths(column: Any) -> Any:
    import pyarrow.compute as pc  # takes as long to import as numpy, and most columns do without

    return pc.list_value_length(column)


def ids_of(
    rows: Rows, name: str, strings: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int32] | None]:
    """Converts a column to ids int64 [ids], lengths int32 [rows]; None: one id a row. strings: the column has
    strings."""
    column = rows.columns[name]
    if pa.types.is_null(column.type):
        return np.empty(0, np.int64), np.zeros(len(column), np.int32)
    if is_list(column.type):
        values = column.flatten()
        if pa.types.is_list(column.type) and not column.null_count:
            lengths = np.diff(column.offsets.to_numpy())
        else:
            lengths = _list_lengths(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int32)
        if pa.types.is_null(values.type) and not len(values):
            return np.empty(0, np.int64), lengths
    else:
        values = column.drop_null() if column.null_count else column
        lengths = (
            column.is_valid().to_numpy(zero_copy_only=False).astype(np.int32) if column.null_count else None
        )
    if not (is_text if strings else pa.types.is_integer)(values.type) or values.null_count:
        kind, remedy = ("strings", "") if strings else ("int64", id_remedy(values.type))
        expected = f"expected ids ({kind}), or lists of them without null{remedy}"
        raise DataError(f"{rows.where(0)}: column {name!r} holds {type_name(column.type)}; {expected}")
    if strings:
        return ids_of_column(values), lengths
    ids = values if pa.types.is_int64(values.type) else values.cast(pa.int64())
    return np.ascontiguousarray(ids.to_numpy(zero_copy_only=False)), lengths


def floats_of(rows: Rows, names: Sequence[str], width: int) -> NDArray[np.float32]:
    """A dense tensor's columns -> fp32 [rows, width]: one of lists, or `width` of numbers."""
    if len(names) == 1 and is_list((column := rows.columns[names[0]]).type):
        lengths = _list_lengths(column).to_numpy(zero_copy_only=False)
        if (odd := np.flatnonzero(~(lengths == width))).size:
            raise DataError(
                f"{rows.where(int(odd[0]))}: column {names[0]!r} has {lengths[odd[0]]} numbers; expected "
                f"{width}"
            )
        return _numbers(rows, names[0], column.flatten()).reshape(-1, width)
    if len(names) != width:
        raise DataError(
            f"columns {', '.join(names)} are {len(names)}; the scorer's dense tensor has {width} numbers a "
            "row"
        )
    numbers = np.empty((rows.size, width), np.float32)
    for n, name in enumerate(names):
        numbers[:, n] = _numbers(rows, name, rows.columns[name])
    return numbers


def _numbers(rows: Rows, name: str, values: Any) -> NDArray[np.float32]:
    is_number = (
        pa.types.is_integer(values.type)
        or pa.types.is_floating(values.type)
        or pa.types.is_boolean(values.type)
    )
    if not is_number or values.null_count:
        raise DataError(
            f"{rows.where(0)}: column {name!r} holds {values.type} with {values.null_count} null; expected "
            "numbers"
        )
    with np.errstate(over="ignore"):  # a number beyond fp32 is infinite, and its score an error
        return np.ascontiguousarray(values.to_numpy(zero_copy_only=False), np.float32)


def labels_of(rows: Rows, name: str) -> NDArray[np.float32]:
    """The labels, fp32 [rows] of 0 and 1."""
    labels = _numbers(rows, name, rows.columns[name])
    if (odd := np.flatnonzero((labels != 0) & (labels != 1))).size:
        raise DataError(f"{rows.where(int(odd[0]))}: label {name!r} is {labels[odd[0]]}; expected 0 or 1")
    return labels


def texts_of(rows: Rows, name: str) -> Any:
    """A column as text, for slices."""
    column = rows.columns[name]
    if is_list(column.type):
        raise DataError(f"column {name!r} holds {column.type}; expected one value a row to slice by")
    return column.cast(pa.string()).fill_null("null")
