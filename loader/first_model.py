"""A first `model.toml`, proposed from what a checkpoint holds: `tableside init`.

A tensor becomes a table where its name says that it is an embedding. Where no name does, every matrix with at least four times as
many rows as columns becomes one, and where there is none of those, every matrix. Where the checkpoint tells of tables of raw ids
(`Checkpoint.keyed_tables`), those are the tables, and beside them only what is called an embedding.

Where the module that was trained is described, `module_model` knows better.
"""

import re
from pathlib import Path

from tableside.loader.checkpoint import Checkpoint, open_checkpoint
from tableside.loader.errors import ModelError
from tableside.loader.model import Feature, ModelSpec, RawIds, TableSpec, check_name
from tableside.quant import RowFormat

_EMBEDDING = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.([^.]+)\.weight$")  # TorchRec's names
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_-]")
ID_NAME = re.compile(r"(?:^|[._/-])(?:ids?|keys?|_hash_zch_identities)$", re.IGNORECASE)  # what tensors of ids are called
IDS_ALONE = "ids, and no vectors of as many rows are found by their name; if there are some, name both: key, id_key"
_TALL = 4  # rows for each column from which a matrix is taken for an embedding


def first_model(checkpoint: Path, name: str | None, row_format: RowFormat, folder: Path) -> tuple[ModelSpec, list[str]]:
    """A specification with one table, and one sum-pooled feature, for each embedding of a checkpoint; and what was left out.

    name: the model's; None: the checkpoint's file name. folder: where the model.toml will lie; a checkpoint below it is named
    relative to it. What was left out comes as lines "key: reason".

    ModelError: the checkpoint holds no matrix, or the name cannot be a model's. CheckpointError: it cannot be read.
    """
    with open_checkpoint(checkpoint) as found:
        raw = dict(found.keyed_tables)
        keys = _tables(found, raw)
        skipped = [f"{k}: {reason(found, k)}" for k in found.skipped if k not in raw.values()]
        skipped += [f"{k}: a matrix" for k in found.matrices if k not in keys]
    if not keys:
        raise ModelError(
            f"{checkpoint}: no tensor in it is a matrix of fp32, fp16 or bf16, and no table of raw ids is found by its names"
            + "".join(f"; {line}" for line in skipped[:3])
        )
    tables: dict[str, TableSpec] = {}
    for key in keys:
        table = _table_name(key, tables)
        tables[table] = TableSpec(table, key, row_format, raw=RawIds(raw[key]) if key in raw else None)
    return specification(checkpoint, name, folder, tables, [Feature(t, t) for t in tables]), skipped


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


def _tables(found: Checkpoint, raw: dict[str, str | None]) -> list[str]:
    """The keys that become tables."""
    keys = [k for k in found.matrices if k in raw or "emb" in k.lower()]
    keys = keys or [k for k, m in found.matrices.items() if m.rows >= _TALL * m.dim] or list(found.matrices)
    return keys + [k for k in raw if k not in found.matrices]


def _table_name(key: str, taken: dict[str, TableSpec]) -> str:
    """A name for the table of tensor `key`: what the key calls the embedding, with a number where another table has that name."""
    match = _EMBEDDING.search(key)
    name = _NOT_IN_A_NAME.sub("_", match[1] if match else key.removesuffix(".weight").replace(".", "_")) or "table"
    return not_taken(name, taken)


def not_taken(name: str, taken: dict[str, TableSpec]) -> str:
    """The name, with a number where another table has it."""
    return next(n for n in (name, *(f"{name}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)
