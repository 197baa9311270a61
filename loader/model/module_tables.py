"""The embeddings of a trained module, read from a file: `tableside init CHECKPOINT --from-module FILE`.

    *.pt2                  an exported program (torch.export.save), program/embeddings.py: torch.nn.Embedding
                           and EmbeddingBag; of TorchRec collections the tables, not the features
    *.json, *.yaml, *.yml  TorchRec configurations: a list of EmbeddingBagConfig or EmbeddingConfig, or a
                           mapping from collection paths to such lists. Fields read: name, num_embeddings,
                           embedding_dim, feature_names, pooling (absent: EmbeddingConfig, unpooled)

Features are named as `swap_embeddings` looks for them: a module by its path with `_` for dots; a collection's
feature by its name, by `feature:table` if several tables have it, and by `path_feature:table` if still
ambiguous.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from tableside.loader.errors import ModelError
from tableside.loader.files import read_regular
from tableside.loader.model.model import FEATURE_NAME, as_feature_name, check_name
from tableside.loader.program.embeddings import EmbeddingCall, embedding_calls

_LIMIT_BYTES = 16 << 20
# A table of TorchRec's, by its module
_COLLECTION = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.([^.]+)$")
_POOLINGS = {"SUM": "sum", "MEAN": "mean", "NONE": "none"}


class ModuleTable(NamedTuple):
    """A table. keys: its tensor's names or their ends, best first; features: (names, plainest first, pooling)
    each."""

    name: str
    keys: tuple[str, ...]
    rows: int
    dim: int
    features: tuple[tuple[tuple[str, ...], str], ...]


def read_module(path: Path) -> list[ModuleTable]:
    """Returns a module's tables. ModelError: an unknown kind of file, or a module that cannot be served."""
    if path.suffix == ".pt2":
        return _of_calls(embedding_calls(path))
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ModelError(
            f"{path}: expected an exported program (.pt2), or TorchRec's configurations (.json, .yaml)"
        )
    return list(_of_configs(path, _parsed(path)))


def named_features(path: Path, tables: Iterable[ModuleTable]) -> list[list[tuple[str, str]]]:
    """Returns (name, pooling) per feature of each table, with the plainest unique names. path: for errors.
    ModelError: names collide or are too long."""
    features = [(n, names, pooling) for n, table in enumerate(tables) for names, pooling in table.features]
    level = [0] * len(features)
    while True:
        chosen = [names[at] for (_, names, _), at in zip(features, level, strict=True)]
        often = {name for name, times in Counter(chosen).items() if times > 1}
        again = [i for i, name in enumerate(chosen) if name in often]
        if not again:
            break
        if stuck := [chosen[i] for i in again if level[i] + 1 == len(features[i][1])]:
            raise ModelError(
                f"{path}: two features would be called {stuck[0]!r}; give the collections apart, as "
                '{"path of a collection": [its configurations]}, or rename one of the modules'
            )
        for i in again:
            level[i] += 1
    found: list[list[tuple[str, str]]] = [[] for _ in tables]
    for (n, _, pooling), name in zip(features, chosen, strict=True):
        found[n].append((check_name(name, "feature", FEATURE_NAME), pooling))
    return found


# ---- exported programs ----


def _of_calls(calls: list[EmbeddingCall]) -> list[ModuleTable]:
    tables = []
    for key in dict.fromkeys(c.key for c in calls):
        of_it = [c for c in calls if c.key == key]
        path = of_it[0].path
        collected = _COLLECTION.search(path)
        features = {(c.path, c.pooling): (_module_names(c.path), c.pooling) for c in of_it}
        name = as_feature_name(collected[1] if collected else path)
        # A weight of two modules may be saved once
        keys = tuple(dict.fromkeys((key, *(f"{c.path}.weight" for c in of_it))))
        tables.append(ModuleTable(name, keys, of_it[0].rows, of_it[0].dim, tuple(features.values())))
    return tables


def _module_names(path: str) -> tuple[str, ...]:
    whole = as_feature_name(path)
    return (as_feature_name(found[1]), whole) if (found := _COLLECTION.search(path)) else (whole,)


# ---- TorchRec's configurations ----


def _parsed(path: Path) -> Any:
    data = read_regular(path, _LIMIT_BYTES, "the configurations", ModelError)
    if path.suffix == ".json":
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise ModelError(f"{path}: not JSON ({error})") from error
    try:
        import yaml
    except ImportError as error:
        raise ModelError(
            f"{path}: YAML is read by PyYAML, which does not import ({error}); install tableside[torch], or "
            "write JSON"
        ) from error
    try:
        return yaml.safe_load(data)
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: not YAML ({str(error)[:200]})") from error


def collection_names(of: str, feature: str, table: str, several: bool) -> tuple[str, ...]:
    """Returns names for a collection's feature, plainest first. of: the collection's path or ""; several:
    several of its tables have this feature."""
    by_table = (f"{feature}:{table}", *((f"{of}_{feature}:{table}",) if of else ()))
    return tuple(map(as_feature_name, by_table if several else (feature, *by_table)))


class _Config(NamedTuple):
    """What is read of a configuration."""

    name: str
    rows: int
    dim: int
    features: list[str]
    pooling: str


def _of_configs(path: Path, raw: Any) -> Iterator[ModuleTable]:
    collections: Mapping[Any, Any] = raw if isinstance(raw, dict) else {"": raw}
    for of, found in collections.items():
        if not isinstance(of, str) or not isinstance(found, list) or not found:
            raise ModelError(
                f"{path}: expected a list of TorchRec's configurations, or {{path of a collection: such a "
                f"list}}; found {type(found).__name__}"
            )
        configs = [_config(path, config) for config in found]
        times = Counter(feature for c in configs for feature in c.features)
        for c in configs:
            # of the state dict
            key = f"{'embeddings' if c.pooling == 'none' else 'embedding_bags'}.{c.name}.weight"
            keys = (*((f"{of}.{key}",) if of else ()), key, f"{c.name}.weight", c.name)
            named = tuple((collection_names(of, f, c.name, times[f] > 1), c.pooling) for f in c.features)
            yield ModuleTable(as_feature_name(c.name), keys, c.rows, c.dim, named)


def _config(path: Path, raw: Any) -> _Config:
    if not isinstance(raw, dict) or not isinstance(name := raw.get("name"), str) or not name:
        raise ModelError(
            f"{path}: expected the fields of an EmbeddingBagConfig, which begin with a name; found "
            f"{_shown(raw)}"
        )
    for field in ("num_embeddings", "embedding_dim"):
        if type(raw.get(field)) is not int or raw[field] < 1:
            raise ModelError(
                f"{path}: {field} of {name!r:.100} is {_shown(raw.get(field))}; expected a number from 1"
            )
    features = raw.get("feature_names") or [name]  # as TorchRec does
    if not isinstance(features, list) or not all(isinstance(f, str) and f for f in features):
        raise ModelError(
            f"{path}: feature_names of {name!r:.100} are {_shown(features)}; expected a list of names"
        )
    label = raw.get("pooling", "NONE")
    pooling = _POOLINGS.get(label.removeprefix("PoolingType.").upper()) if isinstance(label, str) else None
    if pooling is None:
        raise ModelError(
            f"{path}: pooling of {name!r:.100} is {_shown(label)}; expected SUM or MEAN, or no pooling "
            "(EmbeddingConfig)"
        )
    return _Config(name, raw["num_embeddings"], raw["embedding_dim"], features, pooling)


def _shown(value: Any) -> str:
    """Returns a value as an error may show it: YAML's aliases make small files of endless values."""
    return (
        repr(value)[:100] if value is None or isinstance(value, str | int | float) else type(value).__name__
    )
