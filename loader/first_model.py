"""A first `model.toml`, proposed from what a checkpoint holds: `tableside init`.

A matrix becomes a table where its name says that it is an embedding, or where it has at least four times as many rows as columns.
Where there is none of those, every matrix becomes one. A weight with a bias beside it is a Linear's, and no table whatever its
shape. Where the checkpoint tells of tables of raw ids (`Checkpoint.keyed_tables`), those are the tables, and beside them only
what is called an embedding.

Where the module that was trained is described, `module_model` knows better.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tableside.loader.checkpoint import Checkpoint, Matrix, open_checkpoint
from tableside.loader.checkpoint.keyed_folders import FolderTables
from tableside.loader.errors import CheckpointError, ModelError
from tableside.loader.model import Feature, ModelSpec, RawIds, TableSpec, check_name
from tableside.quant import QuantError, RowFormat

_EMBEDDING = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.([^.]+)\.weight$")  # TorchRec's names
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")
ID_NAME = re.compile(r"(?:^|[._/-])(?:ids?|keys?|_hash_zch_identities)$", re.IGNORECASE)  # what tensors of ids are called
LINEAR = ", with a bias beside it, as a Linear has"
IDS_ALONE = "ids, and no vectors of as many rows are found by their name; if there are some, name both: key, id_key"
_TALL = 4  # rows for each column from which a matrix is taken for an embedding


class FirstModel(NamedTuple):
    """A proposed specification. left_out: lines "key: reason"; sizes: rows, dim and bytes of each table, by name, for people."""

    spec: ModelSpec
    left_out: list[str]
    sizes: dict[str, str]


def first_model(checkpoint: Path, name: str | None, row_format: RowFormat, folder: Path) -> FirstModel:
    """A specification with one table, and one sum-pooled feature, for each embedding of a checkpoint.

    name: the model's; None: the checkpoint's file name. folder: where the model.toml will lie; a checkpoint below it is named
    relative to it.

    ModelError: the checkpoint holds no matrix that could be a table, or the name cannot be a model's. CheckpointError: it cannot
    be read.
    """
    with open_checkpoint(checkpoint) as found:
        raw = dict(found.keyed_tables)
        keys = _tables(found, raw)
        left_out = [f"{k}: {reason(found, k)}" for k in found.skipped if k not in raw.values()]
        matrices = [(k, m) for k, m in found.matrices.items() if k not in keys]
        left_out += [f"{k}: {shape(m)}{LINEAR if _is_linear(found, k) else ''}" for k, m in matrices]
        if not keys:
            raise ModelError(
                f"{checkpoint}: no tensor in it is a matrix of fp32, fp16 or bf16 without a bias beside it, and no table of raw "
                "ids is found by its names" + "".join(f"; {line}" for line in left_out[:3])
            )
        tables: dict[str, TableSpec] = {}
        for key in keys:
            table = _table_name(key, tables)
            ids = RawIds(raw[key]) if key in raw else None
            tables[table] = TableSpec(table, key, row_format, raw=ids, dim=_dim_of_sizes(found, key))
        sizes = sizes_of(found, tables.values())
    return FirstModel(specification(checkpoint, name, folder, tables, [Feature(t, t) for t in tables]), left_out, sizes)


def specification(
    checkpoint: Path, name: str | None, folder: Path, tables: dict[str, TableSpec], features: list[Feature]
) -> ModelSpec:
    """A specification as `first_model` gives it, of these tables and features."""
    absolute = checkpoint.resolve()
    model = check_name(name or _NOT_IN_A_NAME.sub("_", absolute.name.split(".")[0]).lstrip("_-") or "model")
    path = absolute.relative_to(folder) if absolute.is_relative_to(folder) else absolute
    return ModelSpec(model, path, tuple(tables.values()), tuple(features))


def reason(found: Checkpoint, key: str) -> str:
    """Why a tensor is no table."""
    return IDS_ALONE if key in found.ids and ID_NAME.search(key) else found.skipped[key]


def shape(matrix: Matrix) -> str:
    """What a tensor is, for people."""
    return f"a matrix [{matrix.rows}, {matrix.dim}] of {matrix.source.label}"


def sizes_of(found: Checkpoint, tables: Iterable[TableSpec]) -> dict[str, str]:
    """Rows, dim and bytes of each table, by name, for people; of one that `load` would refuse, why."""
    return {t.name: _size(found, t) for t in tables}


def _size(found: Checkpoint, t: TableSpec) -> str:
    try:
        source = found.matrices[t.key] if t.raw is None else found.keyed(t.key, t.raw.key)
        packed = source.rows * t.row_format.row_bytes(source.dim)
    except (CheckpointError, QuantError) as error:
        return f"load refuses it: {error}"
    before = source.rows * source.dim * source.source.bytes
    rows = f"{source.rows:,} rows x {source.dim}" if t.raw is None else f"up to {source.rows:,} ids x {source.dim}"
    return f"{rows}: {_megabytes(before)} of {source.source.label}, {_megabytes(packed)} as {t.row_format.label}"


def _dim_of_sizes(found: Checkpoint, key: str) -> int | None:
    """The dim that the sizes of a table's files give, where nothing else says it: the next ones may be cut. Else None."""
    if not isinstance(found.tables, FolderTables):
        return None
    try:
        return found.keyed(key).dim
    except CheckpointError:
        return None  # what `sizes_of` says why


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 50_000 else f"{count:,} bytes"


def _is_linear(found: Checkpoint, key: str) -> bool:
    """Whether a matrix is the weight of a Linear: a bias lies beside it."""
    stem, _, last = key.rpartition("weight")
    return not last and f"{stem}bias" in found.skipped


def _tables(found: Checkpoint, raw: dict[str, str | None]) -> list[str]:
    """The keys that become tables."""
    matrices = {k: m for k, m in found.matrices.items() if k in raw or not _is_linear(found, k)}
    keys = [k for k, m in matrices.items() if k in raw or "emb" in k.lower() or (not raw and m.rows >= _TALL * m.dim)]
    return (keys or list(matrices)) + [k for k in raw if k not in found.matrices]


def _table_name(key: str, taken: dict[str, TableSpec]) -> str:
    """A name for the table of tensor `key`: what the key calls the embedding, with a number where another table has that name."""
    match = _EMBEDDING.search(key)
    name = _NOT_IN_A_NAME.sub("_", match[1] if match else key.removesuffix(".weight").replace(".", "_")) or "table"
    return not_taken(name, taken)


def not_taken(name: str, taken: dict[str, TableSpec]) -> str:
    """The name, with a number where another table has it."""
    return next(n for n in (name, *(f"{name}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)
