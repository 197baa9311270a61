"""Finds the published feature of a trained module's embedding: by the mapping; else by name and pooling; else
by pooling and the table loaded from its weight."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tableside.loader.model.model import as_feature_name
from tableside.loader.model.module_tables import collection_names
from tableside.quant import Pooling
from tableside.serving.model.version import BoundFeature, ServedVersion

MODES = {"sum": Pooling.SUM, "mean": Pooling.MEAN, "SUM": Pooling.SUM, "MEAN": Pooling.MEAN}


class ModuleFeature(NamedTuple):
    """A feature of a module. key: of its weight in the state dict. names: candidates, best first. input: its
    key in a KeyedJaggedTensor. output: the name of its vectors. rows, dim: of its weight. pooling None: not
    served."""

    key: str
    names: tuple[str, ...]
    input: str
    output: str
    rows: int
    dim: int
    pooling: Pooling | None


def of_module(path: str, module: Any, pooling: Pooling | None) -> list[ModuleFeature]:
    names = (path, as_feature_name(path), path.rpartition(".")[2])
    rows, dim = module.num_embeddings, module.embedding_dim
    return [ModuleFeature(f"{path}.weight", names, path, path, rows, dim, pooling)]


def of_configs(path: str, folder: str, configs: list[Any], pooled: bool) -> list[ModuleFeature]:
    """Yields the features of TorchRec's configurations in order. folder: of the tables in the state dict."""
    features = [f for c in configs for f in c.feature_names]
    found = []
    for c in configs:
        for f in c.feature_names:
            output = f"{f}@{c.name}" if features.count(f) > 1 else f
            # what tells most, first
            names = collection_names(path, f, c.name, several=features.count(f) > 1)[::-1]
            pooling = MODES.get(c.pooling.name) if pooled else Pooling.NONE
            key = ".".join(p for p in (path, folder, c.name, "weight") if p)
            found.append(
                ModuleFeature(key, (*names, output), f, output, c.num_embeddings, c.embedding_dim, pooling)
            )
    return found


def find_feature(wanted: ModuleFeature, served: ServedVersion, mapped: str | None) -> tuple[str, str | None]:
    """Returns the published feature, and what is wrong, or None."""
    if mapped is not None:
        candidates = [mapped] if mapped in served.features else []
    else:
        named = [n for n in wanted.names if n in served.features]
        fitting = [n for n in named if served.features[n].pooling == wanted.pooling]
        candidates = fitting[:1] or _by_key(wanted, served) or named[:1]
    if len(candidates) != 1:
        tried = mapped if mapped is not None else ", ".join(dict.fromkeys(wanted.names))
        what = "none of these" if not candidates else f"several ({', '.join(candidates)})"
        return (
            "",
            f"looked for feature {tried}, and for a table of {wanted.key}: found {what}; name it in "
            "`mapping`",
        )
    return candidates[0], _difference(wanted, served.features[candidates[0]], served)


def _by_key(wanted: ModuleFeature, served: ServedVersion) -> list[str]:
    """Returns features with this pooling over this weight's table: one key ends with the other."""
    keys = {t.name: t.key for t in served.header.tables}

    def is_it(key: str) -> bool:
        return key == wanted.key or key.endswith(f".{wanted.key}") or wanted.key.endswith(f".{key}")

    return [
        n for n, b in served.features.items() if b.pooling == wanted.pooling and is_it(keys[b.feature.table])
    ]


def _difference(wanted: ModuleFeature, bound: BoundFeature, served: ServedVersion) -> str | None:
    """Describes the difference between a module's feature and a published one."""
    stored = next(t for t in served.header.tables if t.name == bound.feature.table)
    # its ids are any, and its rows those that were trained
    is_raw = stored.ids is not None and stored.ids.index is not None
    pairs: Mapping[str, tuple[Any, Any]] = {
        "rows": (wanted.rows, wanted.rows if is_raw else stored.id_count),
        "dim": (wanted.dim, stored.dim),
        "pooling": ("another one" if wanted.pooling is None else wanted.pooling.label, bound.pooling.label),
    }
    differs = [
        f"{what} {there} where the module has {here}"
        for what, (here, there) in pairs.items()
        if here != there
    ]
    return f"feature {bound.feature.name!r} has {', '.join(differs)}" if differs else None
