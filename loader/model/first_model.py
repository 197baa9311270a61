"""Proposes a `model.toml` for a checkpoint: `tableside init`.

A matrix becomes a table if its name says embedding or it has at least four times as many rows as columns;
without any, all matrices do. A weight with a bias is a Linear's, never a table. Where the checkpoint has
tables of raw ids (`Checkpoint.keyed_tables`), those are used, and matrices named embedding.

With `tableside init --from-module FILE` tables, features and poolings are the module's (`module_tables`),
under the names that `swap_embeddings` looks for. Rows and dim must match the checkpoint; for raw ids the dim
alone.
"""

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from tableside.loader.checkpoint import Checkpoint, open_checkpoint
from tableside.loader.checkpoint.keyed.folders import FolderTables
from tableside.loader.checkpoint.rows import some
from tableside.loader.errors import CheckpointError, ModelError
from tableside.loader.model.model import check_name
from tableside.loader.model.module_tables import ModuleTable, named_features, read_module
from tableside.loader.model.specs import FeatureSpec, ModelSpec, RawIds, TableSpec
from tableside.quant import QuantError, RowFormat

_EMBEDDING = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.([^.]+)\.weight$")  # TorchRec's names
_COLLECTION = re.compile(r"(?:^|\.)(embedding_bags|embeddings)\.[^.]+\.weight$")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")
# What tensors of ids are called
_ID_NAME = re.compile(r"(?:^|[._/-])(?:ids?|keys?|_hash_zch_identities)$", re.IGNORECASE)
_LINEAR = ", with a bias beside it, as a Linear has"
IDS_ALONE = (
    "ids, and no vectors of as many rows are found by their name; if there are some, name both: key, id_key"
)
_TALL = 4  # rows for each column from which a matrix is taken for an embedding


class FirstModel(NamedTuple):
    """A proposed specification. left_out: lines "key: reason"; sizes: table -> rows, dim and bytes, for
    people."""

    spec: ModelSpec
    left_out: list[str]
    sizes: dict[str, str]


def first_model(checkpoint: Path, name: str | None, row_format: RowFormat, folder: Path) -> FirstModel:
    """Proposes a table and a sum-pooled feature per embedding. name: None: the checkpoint's file name.
    folder: of the model.toml; a checkpoint below it gets a relative path. ModelError: no table found, or a
    bad name. CheckpointError: it is unreadable."""
    with open_checkpoint(checkpoint) as found:
        raw = dict(found.keyed_tables)
        keys = _tables(found, raw)
        left_out = _left_out(found, keys, lambda k: _LINEAR if _is_linear(found, k) else "")
        if not keys:
            raise ModelError(
                f"{checkpoint}: no tensor in it is a matrix of fp32, fp16 or bf16 without a bias beside it, "
                "and no table of raw "
                "ids is found by its names" + "".join(f"; {line}" for line in left_out[:3])
            )
        tables: dict[str, TableSpec] = {}
        for key in keys:
            table = _table_name(key, tables)
            ids = _raw_ids(found, key)
            packed = found.matrices[key].source.packed if key in found.matrices else None
            tables[table] = TableSpec(
                table, key, packed or row_format, raw=ids, dim=_dim_of_sizes(found, key)
            )
        sizes = _sizes_of(found, tables.values())
    # Rows that were quantized before are those of layers that read single ones.
    poolings = {t.name: "none" if t.row_format >= RowFormat.FP8_E4M3 else "sum" for t in tables.values()}
    features = [FeatureSpec(name, name, pooling) for name, pooling in poolings.items()]
    return FirstModel(_specification(checkpoint, name, folder, tables, features), left_out, sizes)


def _specification(
    checkpoint: Path,
    name: str | None,
    folder: Path,
    tables: dict[str, TableSpec],
    features: list[FeatureSpec],
) -> ModelSpec:
    """Returns a specification as `first_model` gives it, of these tables and features."""
    absolute = checkpoint.resolve()
    model = check_name(name or _NOT_IN_A_NAME.sub("_", absolute.name.split(".")[0]).lstrip("_-") or "model")
    path = absolute.relative_to(folder) if absolute.is_relative_to(folder) else absolute
    return ModelSpec(model, path, tuple(tables.values()), tuple(features))


def _left_out(found: Checkpoint, keys: Collection[str], why: Callable[[str], str]) -> list[str]:
    """Lines "key: reason" for the tensors that are no tables. why: of a matrix, behind its shape."""
    others = [k for k in found.skipped if k not in found.keyed_tables.values()]
    matrices = [(k, m) for k, m in found.matrices.items() if k not in keys and k not in found.parts]
    return [
        *(f"{k}: {IDS_ALONE if k in found.ids and _ID_NAME.search(k) else found.skipped[k]}" for k in others),
        *(f"{k}: a matrix [{m.rows}, {m.dim}] of {m.source.label}{why(k)}" for k, m in matrices),
    ]


def _sizes_of(found: Checkpoint, tables: Iterable[TableSpec]) -> dict[str, str]:
    """Rows, dim and bytes of each table, by name, for people; of one that `load` would refuse, why."""
    return {t.name: _size(found, t) for t in tables}


def _size(found: Checkpoint, t: TableSpec) -> str:
    try:
        source = found.matrices[t.key] if t.raw is None else found.keyed(t.key, t.raw.key)
        packed = source.rows * t.row_bytes(source.dim)
    except (CheckpointError, QuantError) as error:
        return f"load refuses it: {error}"
    before = source.rows * source.source.row_bytes(source.dim)
    rows = f"{source.rows:,} rows" if t.raw is None else f"up to {source.rows:,} ids"
    rows += f" x {source.dim}"
    return (
        f"{rows}: {_megabytes(before)} of {source.source.label}, {_megabytes(packed)} as {t.row_format.label}"
    )


def _dim_of_sizes(found: Checkpoint, key: str) -> int | None:
    """Returns the dim that the files' sizes imply, or None; later files may be cut."""
    if not isinstance(found.tables, FolderTables):
        return None
    try:
        return found.keyed(key).dim
    except CheckpointError:
        return None  # what `_sizes_of` says why


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 50_000 else f"{count:,} bytes"


def _is_linear(found: Checkpoint, key: str) -> bool:
    """Returns whether a matrix is the weight of a Linear: a bias lies beside it."""
    stem, _, last = key.rpartition("weight")
    return not last and f"{stem}bias" in found.skipped


def _tables(found: Checkpoint, raw: dict[str, str | None]) -> list[str]:
    """Returns the keys that become tables."""
    matrices = {
        k: m for k, m in found.matrices.items() if k in raw or not (k in found.parts or _is_linear(found, k))
    }
    tall = set() if raw else {k for k, m in matrices.items() if m.rows >= _TALL * m.dim}
    keys = [k for k in matrices if k in raw or "emb" in k.lower() or k in tall]
    return (keys or list(matrices)) + [k for k in raw if k not in found.matrices]


def _raw_ids(found: Checkpoint, key: str) -> RawIds | None:
    """Returns the ids of a table; None: they are row numbers."""
    if key not in found.keyed_tables:
        return None
    return RawIds(found.keyed_tables[key], strings=key in found.string_tables)


def _table_name(key: str, taken: dict[str, TableSpec]) -> str:
    """Returns a free table name for tensor `key`, from what the key calls the embedding."""
    match = _EMBEDDING.search(key)
    name = match[1] if match else key.removesuffix(".weight").replace(".", "_")
    return _not_taken(_NOT_IN_A_NAME.sub("_", name) or "table", taken)


def _not_taken(name: str, taken: dict[str, TableSpec]) -> str:
    """Returns the name, with a number where another table has it."""
    return next(n for n in (name, *(f"{name}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)


# ---- from a module ----


def module_model(
    module: Path, checkpoint: Path, name: str | None, row_format: RowFormat, folder: Path
) -> FirstModel:
    """Returns the specification of the module in file `module`; else as `first_model`. ModelError: a table is
    not in the checkpoint with these rows and dim, or the file is unusable."""
    wanted = read_module(module)
    named = named_features(module, wanted)
    tables: dict[str, TableSpec] = {}
    features: list[FeatureSpec] = []
    problems = []
    with open_checkpoint(checkpoint) as found:
        for table, of_it in zip(wanted, named, strict=True):
            try:
                key = _key_of(found, table)
                _check(found, key, table)
            except ModelError as error:
                problems.append(str(error))
                continue
            called = _not_taken(table.name, tables)
            ids = _raw_ids(found, key)
            tables[called] = TableSpec(called, key, row_format, raw=ids, dim=table.dim)
            features += [FeatureSpec(feature, called, pooling) for feature, pooling in of_it]
        why = f", which no embedding of {module.name} is"
        left_out = _left_out(found, {t.key for t in tables.values()}, lambda _: why)
        sizes = _sizes_of(found, tables.values())
    if problems:
        raise ModelError(f"{checkpoint} does not fit {module}:\n  " + "\n  ".join(problems))
    return FirstModel(_specification(checkpoint, name, folder, tables, features), left_out, sizes)


def _key_of(found: Checkpoint, table: ModuleTable) -> str:
    """Returns the key of a module's table in a checkpoint. ModelError: none could be it, or several."""
    here = [*found.matrices, *(k for k in found.keyed_tables if k not in found.matrices)]
    keys: list[str] = []
    for wanted in table.keys:
        longer = [k for k in here if k.endswith((f".{wanted}", f"/{wanted}"))]
        keys = [wanted] if wanted in here else longer or [k for k in here if wanted.endswith(f".{k}")]
        if keys:
            break
    if len(keys) == 1:
        return keys[0]
    if keys:
        raise ModelError(
            f"table {table.name}: {some(keys)} of the checkpoint could be it; say where it lies, as "
            '{"path of a collection": [its configurations]}'
        )
    skipped = next((f"; {k}: {found.skipped[k]}" for k in table.keys if k in found.skipped), "")
    raise ModelError(
        f"table {table.name}: looked for {', '.join(table.keys)}; the checkpoint has {some(here)}{skipped}"
    )


def _check(found: Checkpoint, key: str, table: ModuleTable) -> None:
    """Raises ModelError if the tensor's shape or its collection's pooling is not that of the module's
    table."""
    is_raw = key in found.keyed_tables
    matrix = found.matrices.get(key) or found.keyed(key, found.keyed_tables[key])
    if (matrix.rows, matrix.dim) != (matrix.rows if is_raw else table.rows, table.dim):
        raise ModelError(
            f"table {table.name}: the module has {table.rows:,} rows of dim {table.dim}, and {key} of the "
            f"checkpoint {matrix.rows:,} rows of dim {matrix.dim}; give the checkpoint of this module"
        )
    if (match := _COLLECTION.search(key)) and not any(
        key.endswith(k) and _COLLECTION.search(k) for k in table.keys
    ):
        poolings = ", ".join(sorted({pooling for _, pooling in table.features}))
        raise ModelError(
            f"table {table.name}: {key} of the checkpoint lies in {match[1]}, and its pooling is {poolings}; "
            "expected SUM or MEAN in embedding_bags, and no pooling in embeddings"
        )
