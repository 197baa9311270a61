"""A first `model.toml` from a checkpoint and a description of the module that was trained: `tableside init --from-module FILE`.

Its tables, features and poolings are those of the module (`module_tables`), with the names that `swap_embeddings` looks for. Each
table must be in the checkpoint with the module's rows and dim. Of a table of raw ids the dim is compared alone, since only ids
that were trained have rows.
"""

import re
from pathlib import Path

from tableside.loader.checkpoint import Checkpoint, open_checkpoint
from tableside.loader.checkpoint.rows import some
from tableside.loader.errors import ModelError
from tableside.loader.first_model import FirstModel, not_taken, reason, shape, sizes_of, specification
from tableside.loader.model import Feature, RawIds, TableSpec
from tableside.loader.module_tables import ModuleTable, named_features, read_module
from tableside.quant import RowFormat

_COLLECTION = re.compile(r"(?:^|\.)(embedding_bags|embeddings)\.[^.]+\.weight$")


def module_model(module: Path, checkpoint: Path, name: str | None, row_format: RowFormat, folder: Path) -> FirstModel:
    """The specification of the module that the file `module` describes; else as `first_model`.

    ModelError: a table is not in the checkpoint with these rows and dim, or the file says nothing usable (`read_module`).
    """
    wanted = read_module(module)
    named = named_features(module, wanted)
    tables: dict[str, TableSpec] = {}
    features: list[Feature] = []
    problems = []
    with open_checkpoint(checkpoint) as found:
        raw = found.keyed_tables
        for table, of_it in zip(wanted, named, strict=True):
            try:
                key = _key_of(found, table)
                _check(found, key, table)
            except ModelError as error:
                problems.append(str(error))
                continue
            called = not_taken(table.name, tables)
            ids = RawIds(raw[key]) if key in raw else None
            tables[called] = TableSpec(called, key, row_format, raw=ids, dim=table.dim)
            features += [Feature(feature, called, pooling) for feature, pooling in of_it]
        left_out = [f"{k}: {reason(found, k)}" for k in found.skipped if k not in raw.values()]
        keys = {t.key for t in tables.values()}
        matrices = [(k, m) for k, m in found.matrices.items() if k not in keys]
        left_out += [f"{k}: {shape(m)}, which no embedding of {module.name} is" for k, m in matrices]
        sizes = sizes_of(found, tables.values())
    if problems:
        raise ModelError(f"{checkpoint} does not fit {module}:\n  " + "\n  ".join(problems))
    return FirstModel(specification(checkpoint, name, folder, tables, features), left_out, sizes)


def _key_of(found: Checkpoint, table: ModuleTable) -> str:
    """The key of a module's table in a checkpoint. ModelError: none could be it, or several."""
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
    raise ModelError(f"table {table.name}: looked for {', '.join(table.keys)}; the checkpoint has {some(here)}{skipped}")


def _check(found: Checkpoint, key: str, table: ModuleTable) -> None:
    """ModelError: the tensor has another shape than the module's table, or belongs to a collection that pools otherwise."""
    is_raw = key in found.keyed_tables
    matrix = found.matrices.get(key) or found.keyed(key, found.keyed_tables[key])
    if (matrix.rows, matrix.dim) != (matrix.rows if is_raw else table.rows, table.dim):
        raise ModelError(
            f"table {table.name}: the module has {table.rows:,} rows of dim {table.dim}, and {key} of the checkpoint "
            f"{matrix.rows:,} rows of dim {matrix.dim}; give the checkpoint of this module"
        )
    if (match := _COLLECTION.search(key)) and not any(key.endswith(k) and _COLLECTION.search(k) for k in table.keys):
        poolings = ", ".join(sorted({pooling for _, pooling in table.features}))
        raise ModelError(
            f"table {table.name}: {key} of the checkpoint lies in {match[1]}, and its pooling is {poolings}; "
            "expected SUM or MEAN in embedding_bags, and no pooling in embeddings"
        )
