"""`model.toml`: the specification of a model.

    name = "ads"                              # letters, digits, - and _
    checkpoint = "checkpoints/ads"            # a file or a folder; relative to this file
    copies = "numa"                           # optional: a copy on each NUMA node that has a GPU; or [0, 1]
    disk_timeout_s = 0.05                     # optional: how long a request waits for rows of a disk or of
                                              # another host, if the server's --disk-timeout-s is longer

    [tables.user]
    key = "embedding_bags.user.weight"        # the tensor's name in the checkpoint
    row_format = "int8"                       # int2, int4, int8, fp8, fp16, fp32, fp8_e4m3, …
    ids = "row"                               # ids are row numbers; "raw": any int64; "string": strings,
                                              # each with the id that it hashes to (loader/string_ids.py)
    row_alignment = 4                         # or 16, for a GPU that reads rows in place; without it: 16
                                              # on a machine with a GPU, else 4
    missing = "error"                         # for ids without a row: "error", "zero", "mean" (of all rows),
                                              # [0.1, ...] (a vector), "backfill:MODEL@VERSION" (its row)
    id_key = "user.ids"                       # raw ids: their tensor or column, if the format needs it
    duplicates = "error"                      # raw ids: "error", or the "first" or "last" row counts
    buckets = 1024                            # raw ids: units of tableside reshard, a power of two
    bucket_ids = 1000                         # raw ids: bucket = id // bucket_ids, for ids >= 0; else by hash
    ttl = "30d"                               # raw ids: compaction drops rows that no change wrote for longer
    max_rows = 1000000                        # raw ids: and, of more rows, the oldest (docs/updates.md)
    tier = "rows://a:8000,b:8000"             # its rows lie on two other hosts, a share each; a:8000|c:8000:
                                              # a host and a replica of it (docs/hosts.md); redis://a:6379:
                                              # they lie in Redis (docs/redis.md)

    [features.clicked]
    table = "user"
    pooling = "mean"                          # sum, mean, none
    output = "fp32"                           # fp32, fp16

    [scorer]                                  # optional
    program = "scorer.pt2"                    # exported program; inputs: features, dense tensors, by name
    inputs = { user = "user:ids" }            # only for inputs not named like their feature

    [scorer]                                  # or, for two towers
    kind = "dot"                              # dot, cosine
    features = ["user", "item"]

    [eval]                                    # optional: columns of evaluation data
    label = "clicked"                         # 0 or 1
    [eval.columns]
    user = "user_id"                          # only if not named like the feature or dense tensor
    context = ["hour", "price"]               # a dense tensor: columns of numbers, or one of lists

Without `features` each table has one sum-pooled feature of its name.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.errors import CheckpointError, ModelError
from tableside.loader.files import read_regular
from tableside.loader.model.specs import (
    DEFAULT_BUCKETS,
    EvalSpec,
    FeatureSpec,
    MissingSpec,
    ModelSpec,
    RawIds,
    ScorerSpec,
    TableSpec,
)
from tableside.loader.model.tiers import parse_tier, refuse_times
from tableside.quant import Pooling, QuantError, RowFormat
from tableside.quant.row_format import ALIGNMENTS

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
# No dot: `<feature>.values` is a tensor's name
FEATURE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_:-]{0,199}")
_NOT_IN_FEATURES = re.compile(r"[^A-Za-z0-9_:-]")
MISSING = ("error", "zero", "mean")  # policies that are one word
DUPLICATES = ("error", "first", "last")
ID_KINDS = ("row", "raw", "string")
LARGEST_BUCKETS = 1 << 20
_BACKFILL = re.compile(r"backfill:(?P<model>[^@]+)@(?P<version>[1-9][0-9]{0,17})")
OUTPUTS = ("fp32", "fp16")
SCORE = "score"  # the scorer's output
_FP32_MAX = (2 - 2**-23) * 2.0**127
_OF_RAW_IDS = ("id_key", "duplicates", "buckets", "bucket_ids", "ttl", "max_rows")
_AGE = re.compile(r"(?P<count>[0-9]{1,10})(?P<unit>[smhd])")
_SECONDS_OF = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_AGE_S = 2**32 - 1  # as long as the times of rows go
_LIMIT_BYTES = 16 << 20  # a table and a feature take some 200 bytes


def check_name(name: object, what: str = "model", pattern: re.Pattern[str] = NAME) -> str:
    """Returns `name`, or raises ModelError where it cannot be a file's or a tensor's name."""
    if not isinstance(name, str) or not pattern.fullmatch(name):
        raise ModelError(
            f"{what} name {name!r}: expected letters, digits, '-' and '_' (tables and features: ':' too), "
            "not '-' first"
        )
    return name


def as_feature_name(name: str) -> str:
    """Returns a name with `_` for characters that tables and features cannot have; may be too long."""
    found = _NOT_IN_FEATURES.sub("_", name)
    return f"_{found[1:]}" if found[:1] in ("-", ":") else found


def read_model(path: Path) -> ModelSpec:
    """Parses and checks a model.toml; ModelError names the place and what was expected."""
    if "\0" not in str(path) and not os.path.exists(path):
        raise ModelError(f"{path} does not exist; write one with: tableside init CHECKPOINT")
    try:
        raw = tomllib.loads(read_regular(path, _LIMIT_BYTES, "model.toml", ModelError).decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError, ModelError) as error:
        what = str(error) if isinstance(error, ModelError) else f"{path}: {error}"
        raise ModelError(_instead(path) or what) from error
    try:
        return parse_model(raw, path.parent)
    except (ModelError, QuantError) as error:
        raise ModelError(f"{path}: {error}") from error


def _instead(path: Path) -> str | None:
    """Returns what a user should give instead of a path that is no model.toml, where that can be told."""
    if os.path.isfile(path / "model.toml"):
        return f"{path} is a folder; expected the model.toml in it: {path / 'model.toml'}"
    try:
        with open_checkpoint(path):
            return (
                f"{path} is a checkpoint; expected a model.toml, which `tableside init {path}` writes; "
                f"to serve it at once: tableside serve {path}"
            )
    except CheckpointError:
        return None


def parse_model(raw: Mapping[str, Any], folder: Path) -> ModelSpec:
    """Builds the specification from parsed TOML; paths are relative to `folder`."""
    at_top = {"name", "checkpoint", "copies", "disk_timeout_s", "tables", "features", "scorer", "eval"}
    _only(raw, "the top level", at_top)
    checkpoint = raw.get("checkpoint")
    if not isinstance(checkpoint, str) or not checkpoint:
        raise ModelError(f"checkpoint is {checkpoint!r}; expected the path of a file or folder")
    tables = tuple(_table(name, t) for name, t in _section(raw, "tables").items())
    if not tables:
        raise ModelError("there is no [tables.NAME]; a model needs at least one table")
    if len({len(t.owners) for t in tables if t.owners}) > 1:
        raise ModelError("tables have tiers of different numbers of owners; expected the same for all")
    if len({t.redis for t in tables if t.owners or t.redis}) > 1:
        raise ModelError("tables have different tiers; expected owners for all of them, or one Redis")
    if any(t.owners for t in tables):
        refuse_times(t.name for t in tables if t.raw and t.raw.has_times)
    names = {t.name for t in tables}
    features = tuple(_feature(name, f, names) for name, f in _section(raw, "features").items())
    features = features or tuple(FeatureSpec(t.name, t.name) for t in tables)
    scorer = _scorer(raw["scorer"], {f.name for f in features}, folder) if "scorer" in raw else None
    evaluation = _evaluation(raw["eval"]) if "eval" in raw else None
    name, copies = check_name(raw.get("name")), _copies(raw.get("copies"))
    timeout_s = raw.get("disk_timeout_s")
    if timeout_s is not None and not is_disk_timeout(timeout_s):
        raise ModelError(f"disk_timeout_s is {timeout_s!r}; {DISK_TIMEOUTS}")
    return ModelSpec(
        name,
        folder / checkpoint,
        tables,
        features,
        scorer,
        evaluation,
        copies,
        disk_timeout_s=timeout_s,
    )


DISK_TIMEOUTS = "expected seconds, above 0 and at most 60"


def is_disk_timeout(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 60


def _copies(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if value == "numa":
        return ()
    are_nodes = isinstance(value, list) and all(type(node) is int and node >= 0 for node in value)
    if not are_nodes or not value or len(set(value)) != len(value):
        raise ModelError(f'copies is {value!r}; expected "numa", or NUMA nodes, each once, as [0, 1]')
    return tuple(value)


def _section(raw: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    section = raw.get(name, {})
    if not isinstance(section, dict) or not all(isinstance(v, dict) for v in section.values()):
        raise ModelError(f"{name}: expected sections [{name}.NAME]")
    return section


def _only(raw: Mapping[str, Any], where: str, known: set[str]) -> None:
    if unknown := sorted(set(raw) - known):
        raise ModelError(f"{where}: unknown key {unknown[0]!r}; expected one of: {', '.join(sorted(known))}")


def _choice(raw: Mapping[str, Any], key: str, where: str, known: tuple[str, ...], default: str) -> str:
    value = raw.get(key, default)
    if value not in known:
        raise ModelError(f"{where}: {key} is {value!r}; expected one of: {', '.join(known)}")
    return str(value)


def _table(name: str, raw: Mapping[str, Any]) -> TableSpec:
    where = f"[tables.{name}]"
    check_name(name, "table", FEATURE_NAME)
    _only(raw, where, {"key", "row_format", "row_alignment", "missing", "ids", "dim", "tier", *_OF_RAW_IDS})
    key = raw.get("key")
    if not isinstance(key, str) or not key:
        raise ModelError(f"{where}: key is {key!r}; expected the tensor's name in the checkpoint")
    row_format = RowFormat.parse(_choice(raw, "row_format", where, tuple(f.label for f in RowFormat), "int8"))
    is_raw = _choice(raw, "ids", where, ID_KINDS, "row") != "row"
    if not is_raw and (given := [k for k in _OF_RAW_IDS if k in raw]):
        raise ModelError(f'{where}: {given[0]} is for raw ids; add ids = "raw", or leave it out')
    alignment = raw.get("row_alignment")
    if alignment is not None and (type(alignment) is not int or alignment not in ALIGNMENTS):
        known = " or ".join(map(str, ALIGNMENTS))
        raise ModelError(f"{where}: row_alignment is {alignment!r}; expected {known}, or leave it out")
    dim = raw.get("dim")
    if dim is not None and (type(dim) is not int or dim < 1):
        raise ModelError(f"{where}: dim is {dim!r}; expected how many values a vector has, or leave it out")
    missing = _missing(raw.get("missing", "error"), where)
    if dim is not None and missing.vector and len(missing.vector) != dim:
        raise ModelError(
            f"{where}: missing has {len(missing.vector)} numbers, and dim is {dim}; expected one for each of "
            "dim"
        )
    ids = _raw_ids(raw, where) if is_raw else None
    owners, redis = parse_tier(raw["tier"], str(missing), is_raw, where) if "tier" in raw else ((), None)
    return TableSpec(name, key, row_format, missing, ids, dim, alignment, owners, redis)


def _raw_ids(raw: Mapping[str, Any], where: str) -> RawIds:
    key, buckets, bucket_ids = raw.get("id_key"), raw.get("buckets", DEFAULT_BUCKETS), raw.get("bucket_ids")
    if key is not None and (not isinstance(key, str) or not key):
        raise ModelError(
            f"{where}: id_key is {key!r}; expected the name of the tensor or column that holds the ids"
        )
    if type(buckets) is not int or not 1 <= buckets <= LARGEST_BUCKETS or buckets & (buckets - 1):
        raise ModelError(
            f"{where}: buckets is {buckets!r}; expected a power of two from 1 to {LARGEST_BUCKETS:,}"
        )
    if (strings := raw["ids"] == "string") and bucket_ids is not None:
        raise ModelError(f"{where}: bucket_ids cuts by ranges of ids, which strings lack; leave it out")
    if bucket_ids is not None and (type(bucket_ids) is not int or not 1 <= bucket_ids < 2**63):
        raise ModelError(
            f"{where}: bucket_ids is {bucket_ids!r}; expected how many ids a bucket holds, 1 or more"
        )
    duplicates = _choice(raw, "duplicates", where, DUPLICATES, "error")
    return RawIds(key, duplicates, buckets, bucket_ids, strings, *_life(raw, where))


def parse_age(text: str) -> int | None:
    """ "12h" -> 43200 seconds; None: it is no age, or longer than the times of rows go."""
    if (found := _AGE.fullmatch(text)) is None:
        return None
    age_s = int(found["count"]) * _SECONDS_OF[found["unit"]]
    return age_s if age_s <= _LONGEST_AGE_S else None


def _life(raw: Mapping[str, Any], where: str) -> tuple[int | None, int | None]:
    """Returns the seconds that a row lives without a change, and the most rows; None: all live."""
    ttl, max_rows, ttl_s = raw.get("ttl"), raw.get("max_rows"), None
    if ttl is not None:
        ttl_s = parse_age(ttl) if isinstance(ttl, str) else None
        if not ttl_s:
            raise ModelError(f"{where}: ttl is {ttl!r}; expected an age such as 90s, 30m, 12h or 30d")
    if max_rows is not None and (type(max_rows) is not int or not 1 <= max_rows < 2**63):
        raise ModelError(f"{where}: max_rows is {max_rows!r}; expected how many rows stay, 1 or more")
    if (ttl_s or max_rows) and "missing" not in raw:
        raise ModelError(
            f"{where}: ttl and max_rows drop ids, which requests may still name; say what they get then, as "
            'missing = "zero", or missing = "error" to have such requests refused'
        )
    return ttl_s, max_rows


def _missing(value: Any, where: str) -> MissingSpec:
    if isinstance(value, list):
        if not value or not all(type(x) in (int, float) and abs(x) <= _FP32_MAX for x in value):
            raise ModelError(
                f"{where}: missing is a list that is not all finite fp32 numbers; expected one for each of "
                "dim"
            )
        return MissingSpec("constant", tuple(map(float, value)))
    if value in MISSING:
        return MissingSpec(value)
    if isinstance(value, str) and (found := _BACKFILL.fullmatch(value)):
        name = check_name(found["model"], f"{where}: missing: model")
        return MissingSpec("backfill", model=name, version=int(found["version"]))
    raise ModelError(
        f"{where}: missing is {value!r}; expected one of: {', '.join(MISSING)}, a list of numbers, "
        "backfill:MODEL@VERSION"
    )


def _feature(name: str, raw: Mapping[str, Any], tables: set[str]) -> FeatureSpec:
    where = f"[features.{name}]"
    check_name(name, "feature", FEATURE_NAME)
    _only(raw, where, {"table", "pooling", "output"})
    table = raw.get("table", name)
    if not isinstance(table, str) or table not in tables:
        raise ModelError(
            f"{where}: table {table!r} is not described; expected one of: {', '.join(sorted(tables))}"
        )
    pooling = _choice(raw, "pooling", where, tuple(p.label for p in Pooling), "sum")
    return FeatureSpec(name, table, pooling, _choice(raw, "output", where, OUTPUTS, "fp32"))


def _scorer(raw: Any, features: set[str], folder: Path) -> ScorerSpec:
    if not isinstance(raw, dict):
        raise ModelError("scorer: expected a section [scorer]")
    if SCORE in features:
        raise ModelError(f"a feature is called {SCORE!r}, which is the scorer's output; give it another name")
    if "program" in raw:
        _only(raw, "[scorer]", {"program", "inputs"})
        program, inputs = raw["program"], raw.get("inputs", {})
        if not isinstance(program, str) or not program:
            raise ModelError(f"[scorer]: program is {program!r}; expected the path of a .pt2 file")
        if not isinstance(inputs, dict) or not all(
            isinstance(f, str) and f in features for f in inputs.values()
        ):
            raise ModelError(
                f"[scorer]: inputs are {inputs!r}; expected input = feature, of: "
                f"{', '.join(sorted(features))}"
            )
        return ScorerSpec("program", folder / program, tuple(inputs.items()))
    _only(raw, "[scorer]", {"kind", "features"})
    kind, pair = _choice(raw, "kind", "[scorer]", ("dot", "cosine"), ""), raw.get("features")
    if (
        not isinstance(pair, list)
        or len(pair) != 2
        or not all(isinstance(f, str) and f in features for f in pair)
    ):
        raise ModelError(f"[scorer]: features are {pair!r}; expected two of: {', '.join(sorted(features))}")
    return ScorerSpec(kind, features=tuple(pair))


def _evaluation(raw: Any) -> EvalSpec:
    if not isinstance(raw, dict):
        raise ModelError("eval: expected a section [eval]")
    _only(raw, "[eval]", {"label", "columns"})
    label, columns = raw.get("label"), raw.get("columns", {})
    if label is not None and (not isinstance(label, str) or not label):
        raise ModelError(f"[eval]: label is {label!r}; expected the name of a column")
    if not isinstance(columns, dict):
        raise ModelError(f"[eval]: columns are {columns!r}; expected name = column, or name = [columns]")
    found = []
    for name, value in columns.items():
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not listed or not all(isinstance(c, str) and c for c in listed):
            raise ModelError(
                f"[eval.columns]: {name} is {value!r}; expected a column's name, or a list of them"
            )
        found.append((name, tuple(listed)))
    return EvalSpec(label, tuple(found))
