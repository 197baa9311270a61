"""Proposes a `model.toml` from a HugeCTR Hierarchical Parameter Server configuration: `tableside init
ps.json`.

It reads these fields of each entry of `models` (github.com/NVIDIA-Merlin/HugeCTR, v4.3.1,
HugeCTR/src/hps/inference_utils.cpp, parameter_server_config::init;
docs/source/hierarchical_parameter_server/hps_database_backend.md):

    model                          the model's name
    sparse_files                   a folder per table, with key and emb_vector (checkpoint/keyed/folders.py)
    embedding_table_names          default: sparse_embedding0, 1, ...
    embedding_vecsize_per_table    compared with the files
    default_value_for_each_table   value of a missing id's vector: missing = "zero", or a constant vector
    gpucache, gpucacheper          share of rows cached on a GPU: a comment with the budget that serves it

Other fields are named in a comment. Features are unpooled, as lookups there.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.errors import ModelError
from tableside.loader.files import read_regular
from tableside.loader.model.model import FEATURE_NAME, check_name
from tableside.loader.model.specs import FeatureSpec, MissingSpec, ModelSpec, RawIds, TableSpec
from tableside.loader.model.text import write_model
from tableside.quant import RowFormat

_LIMIT_BYTES = 16 << 20
_DEFAULT_CACHED = 0.2  # of gpucacheper
_READ = {
    *("model", "models", "sparse_files", "embedding_table_names", "embedding_vecsize_per_table"),
    *("default_value_for_each_table", "gpucache", "gpucacheper", "deployed_device_list"),
}
_INSTEAD = {
    "dense_file": "a scorer is an exported program, [scorer] in model.toml",
    "network_file": "a scorer is an exported program, [scorer] in model.toml",
    "volatile_db": "rows lie in shared memory, or on a disk (--root)",
    "persistent_db": "rows lie in shared memory, or on a disk (--root)",
    "update_source": "rows change by tableside follow (a folder, Redis or Kafka) and tableside apply",
    "supportlonglong": "ids are always int64",
}


def is_hps(path: Path) -> bool:
    """Returns whether a path is the name of a ps.json, and not of a checkpoint."""
    return path.suffix == ".json" and not path.name.endswith(".index.json")


def hps_model(
    path: Path, name: str | None, row_format: RowFormat, folder: Path
) -> tuple[ModelSpec, list[str]]:
    """Returns the specification of a ps.json's model, and lines about its gaps. name: which of several
    models, else the new name. folder: of the model.toml. ModelError: no ps.json, or no such model.
    CheckpointError: a table is damaged."""
    raw = _parsed(path)
    entry = _chosen(path, raw["models"], name)
    folders = [_folder(path, file) for file in _list(path, entry, "sparse_files", str)]
    root, keys = _root(path, folders)
    count = len(folders)
    names = _table_names(path, entry, count)
    dims = _list(path, entry, "embedding_vecsize_per_table", int, count)
    defaults = _list(path, entry, "default_value_for_each_table", (int, float), count)
    tables: list[TableSpec] = []
    packed_bytes = 0
    with open_checkpoint(root) as checkpoint:
        for key, table, dim, default in zip(keys, names, dims, defaults, strict=True):
            rows = checkpoint.keyed(key)
            if rows.dim != dim:
                raise ModelError(
                    f"{path}: embedding_vecsize_per_table says {dim} for {table!r}, the files in "
                    f"{root / key} have {rows.dim} "
                    "values for each key; expected keys of int64, and vectors of fp32"
                )
            tables.append(TableSpec(table, key, row_format, _missing(path, default, dim), RawIds(), dim))
            packed_bytes += rows.rows * tables[-1].row_bytes(dim)
    model = check_name(
        name or re.sub(r"[^A-Za-z0-9_-]", "_", str(entry.get("model", ""))).lstrip("_-") or "model"
    )
    checkpoint_path = root.relative_to(folder) if root.is_relative_to(folder) else root
    spec = ModelSpec(model, checkpoint_path, tuple(tables), tuple(FeatureSpec(t, t, "none") for t in names))
    return spec, list(_notes(raw, entry, packed_bytes))


def hps_text(spec: ModelSpec, path: Path, notes: list[str]) -> str:
    """Returns the text of the model.toml, with the notes as comments."""
    comments = "".join(f"#   {note}\n" for note in notes)
    return f"{write_model(spec, [])}\n# From {_plain(path.name)}:\n{comments}"


def _parsed(path: Path) -> dict[str, Any]:
    try:
        raw = orjson.loads(read_regular(path, _LIMIT_BYTES, "ps.json", ModelError))
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path}: not JSON ({error})") from error
    models = raw.get("models") if isinstance(raw, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(m, dict) for m in models):
        raise ModelError(
            f'{path}: expected HPS\'s configuration, with "models": [{{"model": ..., "sparse_files": [...]}}]'
        )
    return dict(raw)


def _chosen(path: Path, models: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    if len(models) == 1:
        return models[0]
    names = [str(m.get("model", "")) for m in models]
    if name not in names:
        raise ModelError(
            f"{path}: it describes {len(models)} models; choose one with --name: "
            f"{', '.join(map(_plain, names))}"
        )
    return models[names.index(name)]


def _list(path: Path, entry: Mapping[str, Any], key: str, kind: Any, count: int | None = None) -> list[Any]:
    """Returns a list of the model, of values of a kind, as many as there are tables."""
    found = entry.get(key)
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(found, list) or not found or not all(type(v) in kinds for v in found):
        raise ModelError(
            f"{path}: {key} is {found!r:.100}; expected a list of {kinds[-1].__name__}, one for each table"
        )
    if count is not None and len(found) != count:
        raise ModelError(
            f"{path}: {key} has {len(found)} entries, sparse_files has {count}; expected as many"
        )
    return found


def _table_names(path: Path, entry: Mapping[str, Any], count: int) -> list[str]:
    if "embedding_table_names" not in entry:
        return [f"sparse_embedding{i}" for i in range(count)]
    names = _list(path, entry, "embedding_table_names", str, count)
    if len(set(names)) < count:
        raise ModelError(
            f"{path}: two tables have the same name; expected {count} different embedding_table_names"
        )
    return [check_name(name, "table", FEATURE_NAME) for name in names]


def _folder(path: Path, file: str) -> Path:
    """A table's folder; relative ones are sought beside the ps.json, then in the working directory."""
    if "://" in file or "\0" in file:
        raise ModelError(
            f"{path}: sparse_files names {file!r}; expected a folder of this machine, so copy it here"
        )
    beside = path.resolve().parent / file
    found = beside if beside.exists() else Path(file).resolve()
    if not os.path.isdir(found):
        raise ModelError(
            f"{path}: the folder {file!r} of sparse_files does not exist; expected one with key and "
            "emb_vector"
        )
    return found.resolve()


def _root(path: Path, folders: list[Path]) -> tuple[Path, list[str]]:
    """Returns (the folder that holds all tables, each table's key in it)."""
    if len(set(folders)) == 1:
        return folders[0], [folders[0].name] * len(folders)
    root = Path(os.path.commonpath([f.parent for f in folders]))
    if root == Path(root.anchor):
        raise ModelError(
            f"{path}: the sparse_files have no folder in common, which a model.toml names; move or link them "
            "into one"
        )
    return root, [f.relative_to(root).as_posix() for f in folders]


def _missing(path: Path, default: float, dim: int) -> MissingSpec:
    if not math.isfinite(default):
        raise ModelError(f"{path}: default_value_for_each_table has {default}; expected finite numbers")
    return MissingSpec("constant", (float(default),) * dim) if default else MissingSpec("zero")


def _notes(raw: Mapping[str, Any], entry: Mapping[str, Any], packed_bytes: int) -> Iterator[str]:
    """Yields what the ps.json says and a model.toml does not."""
    cached, devices = entry.get("gpucacheper", _DEFAULT_CACHED), entry.get("deployed_device_list", [0])
    is_share = type(cached) in (int, float) and 0 < cached <= 1
    if entry.get("gpucache", True) is True and is_share and isinstance(devices, list):
        budget = -(-int(packed_bytes * cached) // 2**20)
        named = ",".join(str(d) for d in devices if type(d) is int and d >= 0) or "0"
        flags = f"--devices {named} --hbm-budget {budget}MiB"
        yield f"gpucacheper {cached}: tableside serve {flags}, and more for the ids"
    others = [key for key in (*raw, *entry) if key not in _READ]
    for reason in dict.fromkeys(_INSTEAD.values()):
        if named_keys := [k for k in others if _INSTEAD.get(k) == reason]:
            yield f"{', '.join(named_keys)}: {reason}"
    if rest := sorted({_plain(k) for k in others if k not in _INSTEAD}):
        yield f"without meaning here: {', '.join(rest)}"


def _plain(text: str) -> str:
    """Text of the file as it may stand in a comment and in an error."""
    return text if re.fullmatch(r"[\w.-]+", text) else orjson.dumps(text).decode().replace("\x7f", "?")
