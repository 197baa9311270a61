"""Tables of raw ids as folders of little-endian files: DynamicEmb dumps and HugeCTR sparse models. Also finds
folders of Parquet files (`parquet`).

DynamicEmb (github.com/NVIDIA/recsys-examples, corelib/dynamicemb/dynamicemb: batched_dynamicemb_tables.py,
encode_checkpoint_file_path and find_files; key_value_table.py, _dump_table) writes some files per rank, in
one folder or in a sub-folder per collection:

    <table>_emb_keys.rank_<R>.world_size_<W>       int64 [n]
    <table>_emb_values.rank_<R>.world_size_<W>     fp32 [n, dim], the vectors alone
    <table>_emb_scores.rank_<R>.world_size_<W>     int64 [n]
    <table>_opt_args.json                          {"evict_strategy": "EvictStrategy.KLru", ...}

Scores of the strategy KLru (TIMESTAMP) are how many nanoseconds before the dump each row was used last. Those
of others are not read, nor are other files (opt_values, counters). dim follows from the sizes alone, so a
truncation is noticed only if it changes dim or the ranks' dims differ.

HugeCTR (github.com/NVIDIA-Merlin/HugeCTR, HugeCTR/src/hps/modelloader.cpp, RawModelLoader::load;
docs/source/api/python_interface.md, save_params_to_files) writes a folder per table; keys always have 64
bits:

    key                                            int64 [n]
    emb_vector                                     fp32 [n, dim]
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tableside.loader.checkpoint.keyed.flat import FlatRows
from tableside.loader.checkpoint.keyed.keyed import KeyedRows, KeyedTables
from tableside.loader.checkpoint.rows import Checkpoint, Ids, Matrix, RowShard, some
from tableside.loader.errors import CheckpointError
from tableside.loader.files import open_regular, read_regular
from tableside.quant import Source

_DYNAMICEMB = re.compile(
    r"(?P<table>.+)_emb_(?P<item>keys|values|scores)\.rank_(?P<rank>\d{1,9})\.world_size_(?P<world>\d{1,9})"
)
_ID = np.dtype("<i8")
_LIMIT_JSON = 1 << 20
_LIMIT_FOLDERS, _LIMIT_DEPTH = 10_000, 4  # of HugeCTR's models below a folder


class FilePair(NamedTuple):
    """A file of ids and the file of their vectors; ages_ns: and that of their ages, if there is one."""

    ids: Path
    values: Path
    ages_ns: Path | None = None


class FolderTables(KeyedTables):
    """Tables with ids and vectors in separate files. parts: table -> its files, in row order."""

    def __init__(self, checkpoint: Checkpoint, tables: dict[str, list[FilePair]], kind: str) -> None:
        self._checkpoint, self._tables, self._kind = checkpoint, tables, kind
        self.names = dict.fromkeys(tables)

    def open(self, key: str, id_key: str | None) -> KeyedRows:
        if id_key is not None:
            raise CheckpointError(
                f"{self._checkpoint.path}: {self._kind} says where its ids lie; leave id_key of {key!r} out"
            )
        if key not in self._tables:
            raise CheckpointError(
                f"{self._checkpoint.path}: there is no table {key!r}; {self._kind} has: {some(self._tables)}"
            )
        ids, values, ages_ns = _tensors(key, self._tables[key])
        return FlatRows(self._checkpoint, ids, values, ages_ns=ages_ns)


def _tensors(key: str, parts: list[FilePair]) -> tuple[Ids, Matrix, Ids | None]:
    """The ids, vectors and ages of a table, one file after another. CheckpointError: their sizes do not
    fit."""
    counts, dims = [], dict[int, Path]()
    for part in parts:
        size, values = _size(part.ids), _size(part.values)
        count = size // _ID.itemsize
        if size % _ID.itemsize:
            raise CheckpointError(
                f"{part.ids}: {size:,} bytes are no whole number of int64 keys; it was truncated, or has "
                "other keys"
            )
        if (values and not count) or (count and (values % (4 * count) or not values)):
            raise CheckpointError(
                f"{part.values}: {values / 4:,.6g} fp32 values are no whole number, from 1, for each of the "
                f"{count:,} keys of {part.ids}; one of the two was truncated"
            )
        if part.ages_ns is not None and (scores := _size(part.ages_ns)) != size:
            raise CheckpointError(
                f"{part.ages_ns}: {scores:,} bytes; expected {size:,}, an int64 score for each of the "
                f"{count:,} keys of {part.ids}; one of the two was truncated"
            )
        if count:
            dims.setdefault(values // (4 * count), part.values)
        counts.append(count)
    if not dims:
        raise CheckpointError(
            f"{parts[0].ids.parent}: {key!r} has no keys in any of its {len(parts)} files, so no vectors "
            "either"
        )
    if len(dims) > 1:
        (dim, path), (other, other_path) = list(dims.items())[:2]
        raise CheckpointError(
            f"{other_path}: vectors of {other} values, in {path} they have {dim}; one of the two was "
            "truncated"
        )
    (dim,) = dims
    firsts = np.cumsum([0, *counts]).tolist()
    places = [place for place in zip(parts, firsts, counts, strict=False) if place[2]]
    id_shards = tuple(RowShard(p.ids, 0, first, n, 0, 1) for p, first, n in places)
    value_shards = tuple(RowShard(p.values, 0, first, n, 0, dim) for p, first, n in places)
    age_shards = tuple(RowShard(p.ages_ns, 0, first, n, 0, 1) for p, first, n in places if p.ages_ns)
    rows = firsts[-1]
    ages_ns = Ids(key, rows, _ID, age_shards) if age_shards else None
    return Ids(key, rows, _ID, id_shards), Matrix(key, rows, dim, Source.FP32, value_shards), ages_ns


def _size(path: Path) -> int:
    with open(open_regular(path, "a file of the checkpoint", CheckpointError), "rb") as file:
        return os.fstat(file.fileno()).st_size


# ---- DynamicEmb ----


def dynamicemb(path: Path) -> Checkpoint | None:
    """Returns a DynamicEmb dump, or None. CheckpointError: files of some ranks are missing."""
    found: dict[str, dict[tuple[str, int, int], Path]] = {}
    for folder in (path, *_folders(path)):
        for name in _names(folder):
            if named := _DYNAMICEMB.fullmatch(name):
                table = named["table"] if folder == path else f"{folder.name}/{named['table']}"
                found.setdefault(table, {})[named["item"], int(named["rank"]), int(named["world"])] = (
                    folder / name
                )
    found = {t: files for t, files in found.items() if any(item != "scores" for item, _, _ in files)}
    if not found:
        return None
    checkpoint = Checkpoint(path)
    checkpoint.tables = FolderTables(
        checkpoint, {t: _ranks(t, files) for t, files in sorted(found.items())}, "a DynamicEmb dump"
    )
    return checkpoint


def _ranks(table: str, files: dict[tuple[str, int, int], Path]) -> list[FilePair]:
    """Returns the files of a table, rank after rank. CheckpointError: they are not those of one dump."""
    rows = {key: file for key, file in files.items() if key[0] != "scores"}
    worlds, any_file = sorted({world for _, _, world in rows}), next(iter(rows.values()))
    if len(worlds) > 1:
        raise CheckpointError(
            f"{any_file.parent}: {table!r} was dumped by {worlds[0]} ranks and by {worlds[1]}; take the "
            "files of one dump alone"
        )
    folder, name = any_file.parent, table.rpartition("/")[2]
    has_ages = len(rows) < len(files) and _is_lru(folder / f"{name}_opt_args.json")
    for item in ("keys", "values", *("scores",) * has_ages):
        for rank in range(worlds[0]):
            if (item, rank, worlds[0]) not in files:
                lacking = folder / f"{name}_emb_{item}.rank_{rank}.world_size_{worlds[0]}"
                raise CheckpointError(
                    f"{lacking} is missing; expected files of all {worlds[0]} ranks of {table!r}"
                )
    if strange := [rank for _, rank, world in rows if rank >= world]:
        raise CheckpointError(
            f"{any_file.parent}: {table!r} has a file of rank {strange[0]}, of {worlds[0]} ranks"
        )
    world = worlds[0]
    return [
        FilePair(
            files["keys", rank, world],
            files["values", rank, world],
            files["scores", rank, world] if has_ages else None,
        )
        for rank in range(world)
    ]


def _is_lru(path: Path) -> bool:
    """Returns whether a table's scores are ages. CheckpointError: its arguments cannot be read."""
    if not os.path.exists(path):
        return False
    try:
        said = json.loads(read_regular(path, _LIMIT_JSON, "arguments of a table", CheckpointError))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}; expected the JSON that DynamicEmb writes") from error
    return isinstance(said, dict) and str(said.get("evict_strategy")).endswith("KLru")


# ---- HugeCTR ----


def hugectr(path: Path) -> Checkpoint | None:
    """Returns one HugeCTR sparse model or several, named by relative path; or None."""
    if _is_sparse_model(path):
        found = {path.resolve().name or "table": path}
    else:
        found = {folder.relative_to(path).as_posix(): folder for folder in _sparse_models(path)}
    if not found:
        return None
    checkpoint = Checkpoint(path)
    parts = {key: [FilePair(folder / "key", folder / "emb_vector")] for key, folder in sorted(found.items())}
    checkpoint.tables = FolderTables(checkpoint, parts, "a sparse model of HugeCTR")
    return checkpoint


def _is_sparse_model(folder: Path) -> bool:
    return os.path.exists(folder / "key") and os.path.exists(folder / "emb_vector")


def _sparse_models(path: Path) -> Iterator[Path]:
    waiting, seen = [(path, 0)], 0
    while waiting:
        folder, depth = waiting.pop()
        seen += 1
        if seen > _LIMIT_FOLDERS:
            raise CheckpointError(
                f"{path}: more than {_LIMIT_FOLDERS:,} folders; name the one that holds the sparse models"
            )
        if _is_sparse_model(folder):
            yield folder
        elif depth < _LIMIT_DEPTH:
            waiting += [(inner, depth + 1) for inner in _folders(folder)]


# ---- Parquet ----


def parquet(path: Path) -> dict[str, list[Path]]:
    """Returns a folder's Parquet files by key prefix: "" for the folder's own, "NAME/" for a sub-folder or a
    file."""
    parts = _parts(path)
    groups = {f"{folder.name}/": files for folder in _folders(path) if (files := _parts(folder))}
    return groups | ({"": parts} if parts else {}) | {f"{p.name}/": [p] for p in parts}


def _parts(folder: Path) -> list[Path]:
    names = [n for n in _names(folder) if n.endswith(".parquet") and n[0] not in "._"]
    return [folder / n for n in names if not os.path.isdir(folder / n)]


# ---- folders ----


def _folders(path: Path) -> list[Path]:
    with os.scandir(path) as entries:
        return sorted(
            path / e.name for e in entries if e.is_dir(follow_symlinks=False) and e.name[0] not in "._"
        )


def _names(path: Path) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(e.name for e in entries)
