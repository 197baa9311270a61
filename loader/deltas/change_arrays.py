"""Reads changes from .npz files (loader.deltas.change_files), stored or compressed, as streams of blocks."""

import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tableside.loader.checkpoint.numpy_files import npy_header
from tableside.loader.checkpoint.rows import LARGEST_DIM, int64_ids, narrowed
from tableside.loader.deltas.changes import BLOCK_BYTES, MOST_ROWS, RowRules, TableChanges, changes
from tableside.loader.errors import ChangeError
from tableside.loader.files import open_regular

_SUFFIX = ".npy"
_PARTS = {
    "ids": ("iu", 1, "integers [n]"),
    "vectors": ("f", 2, "floats [n, dim]"),
    "deleted": ("b", 1, "bool [n]"),
}
_DTYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")


def rows_in(path: Path) -> int:
    """Returns the number of ids in all tables. ChangeError: the file is damaged."""
    with _opened(path) as archive:
        names = [n for n in archive.namelist() if n.removesuffix(_SUFFIX).rpartition(".")[2] == "ids"]
        with ExitStack() as stack:
            return sum(_array(stack, archive, path, name.removesuffix(_SUFFIX)).rows for name in names)


def blocks(path: Path, table: str | None) -> Iterator[TableChanges]:
    """As `change_files.read_changes`."""
    rules = RowRules(str(path), table=table)
    with _opened(path) as archive:
        for name, prefix in _tables(archive, path, table).items():
            with ExitStack() as stack:
                there = [part for part in _PARTS if f"{prefix}{part}{_SUFFIX}" in archive.namelist()]
                parts = {part: _array(stack, archive, path, prefix + part) for part in there}
                own = RowRules(f"{path}: {prefix}ids", table=name, dims=rules.dims)
                yield from _changes(own, name, parts)


def _tables(archive: zipfile.ZipFile, path: Path, table: str | None) -> dict[str, str]:
    """Returns table -> prefix of its arrays. ChangeError: an array belongs to no table, or one is missing."""
    found: dict[str, str] = {}
    names = archive.namelist()
    for name in names:
        prefix, dot, part = name.removesuffix(_SUFFIX).rpartition(".")
        if (
            part not in _PARTS
            or not name.endswith(_SUFFIX)
            or (not dot and table is None)
            or names.count(name) > 1
        ):
            expected = "TABLE.ids, TABLE.vectors and TABLE.deleted, once each"
            raise ChangeError(
                f"{path}: it holds {name!r}; expected the arrays "
                f"{expected}{'' if dot else ', or give --table'}"
            )
        if f"{prefix}{dot}ids{_SUFFIX}" not in names:
            raise ChangeError(
                f"{path}: {name.removesuffix(_SUFFIX)!r} has no {prefix + dot + 'ids'!r} beside it; add the "
                "ids"
            )
        if dot and table is not None and prefix != table:
            raise ChangeError(
                f"{path}: {name.removesuffix(_SUFFIX)!r} is of table {prefix!r}; expected {table!r}"
            )
        found[prefix if dot else str(table)] = prefix + dot
    return found


@dataclass
class _NpyStream:
    """An array read row by row. stream: at its values. one: the shape of a row."""

    name: str
    stream: IO[bytes]
    dtype: np.dtype[Any]
    rows: int
    one: tuple[int, ...]

    def read(self, rows: int) -> NDArray[Any]:
        size = rows * self.dtype.itemsize * math.prod(self.one)
        data = self.stream.read(size)
        if len(data) != size:
            raise EOFError(f"{self.name!r} ends early")
        return np.frombuffer(data, self.dtype, size // self.dtype.itemsize).reshape(rows, *self.one)


def _array(stack: ExitStack, archive: zipfile.ZipFile, path: Path, name: str) -> _NpyStream:
    """Opens an array. ChangeError: it is not what its name says."""
    info = archive.getinfo(name + _SUFFIX)
    stream = stack.enter_context(archive.open(info))
    try:
        descr, fortran, shape, _ = npy_header(lambda _, count: stream.read(count), info.file_size)
    except ValueError as error:
        raise ChangeError(f"{path}: {name!r} is not a .npy array ({error})") from error
    kinds, axes, expected = _PARTS[name.rpartition(".")[2]]
    dtype = np.dtype(descr) if _DTYPE.fullmatch(descr) else None
    if dtype is None or dtype.kind not in kinds or len(shape) != axes or (fortran and axes > 1):
        order = ", columns first" if fortran else ""
        raise ChangeError(
            f"{path}: {name!r} is {descr if dtype is None else dtype} {list(shape)}{order}; expected "
            f"{expected}, rows first"
        )
    if math.prod(shape[1:]) > LARGEST_DIM:
        raise ChangeError(f"{path}: {name!r} has {shape[1]:,} values a row; expected at most {LARGEST_DIM:,}")
    size = dtype.itemsize * math.prod(shape)
    if stream.tell() + size != info.file_size:
        raise ChangeError(
            f"{path}: {name!r} has {info.file_size:,} bytes; its header says {stream.tell() + size:,}"
        )
    return _NpyStream(name, stream, dtype, shape[0], shape[1:])


def _changes(rules: RowRules, table: str, parts: dict[str, _NpyStream]) -> Iterator[TableChanges]:
    ids, vectors, deleted = parts["ids"], parts.get("vectors"), parts.get("deleted")
    for part in parts.values():
        if part.rows != ids.rows:
            raise ChangeError(
                f"{rules.source}: {ids.rows:,} ids and {part.rows:,} rows of {part.name!r}; expected as many"
            )
    dim = 0 if vectors is None else vectors.one[0]
    if vectors is not None and not dim and ids.rows:
        raise rules.error(0, "a vector without values; expected at least 1")
    row_bytes = dim * vectors.dtype.itemsize if vectors else 0
    step = max(1, min(MOST_ROWS, BLOCK_BYTES // row_bytes)) if row_bytes else MOST_ROWS
    for first in range(0, ids.rows, step):
        rows = min(step, ids.rows - first)
        found, bad = int64_ids(ids.read(rows))
        if bad >= 0:
            raise rules.error(first + bad, "the id does not fit an int64; expected one below 2**63")
        gone = None if deleted is None else deleted.read(rows)
        kept = np.ones(rows, bool) if gone is None else ~gone
        if vectors is None:
            if kept.any():
                raise rules.error(
                    first + int(kept.argmax()),
                    "there is no vector for it; expected one, or the id as deleted",
                )
            yield changes(table, found, np.zeros((0, 0), np.float32), gone, 0, rules.where(first))
            continue
        read = vectors.read(rows)
        values, bad = narrowed(read if gone is None else read[kept])
        if bad >= 0:
            row = int(np.flatnonzero(kept)[bad // dim])
            raise rules.error(first + row, "a value of its vector is too large for float32")
        yield changes(table, found, values, gone, dim, rules.where(first))


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Opens a .npz file. ChangeError: it is none, or damaged, now or later."""
    fd = open_regular(path, "a file of changes", ChangeError)
    try:
        with os.fdopen(fd, "rb") as file, zipfile.ZipFile(file) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError) as error:
        raise ChangeError(
            f"{path}: not a whole .npz file, it may be half-written or damaged ({error})"
        ) from error
