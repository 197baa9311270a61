"""Writes a model.toml with comments: sizes, choices of a key at its first use, and optional sections.

Scorer and evaluation are commented out, with the model's own features, ready to be enabled.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from tableside.loader.model.model import MISSING, OUTPUTS
from tableside.loader.model.specs import FeatureSpec, MissingSpec, ModelSpec, TableSpec
from tableside.quant import Pooling, RowFormat

_FORMATS = ", ".join(f.label for f in RowFormat)
_POOLINGS = ", ".join(p.label for p in Pooling)
_POLICIES = f'{", ".join(map(json.dumps, MISSING))}, [a number for each of dim], "backfill:MODEL@VERSION"'
_COMMENT_AT = 32  # column of a comment behind a short line


def write_model(spec: ModelSpec, left_out: Sequence[str], sizes: Mapping[str, str] | None = None) -> str:
    """Returns the text of a model.toml. left_out: lines about other tensors; sizes: of tables, by name."""
    lines = [f'name = "{spec.name}"', f'checkpoint = "{_escape(str(spec.checkpoint))}"']
    lines.append(_copies(spec.copies))
    if spec.disk_timeout_s is not None:
        lines.append(f"disk_timeout_s = {spec.disk_timeout_s}")
    if left_out:
        lines += ["", "# Left out. What is a table after all gets a section [tables.NAME] with its key."]
        lines += [f"#   {_escape(line)}" for line in left_out]
    for number, table in enumerate(spec.tables):
        lines += ["", *_table(table, (sizes or {}).get(table.name), is_first=number == 0)]
    for number, feature in enumerate(spec.features):
        lines += ["", *_feature(feature, is_first=number == 0)]
    if spec.scorer is None and spec.evaluation is None and spec.features:
        lines += ["", *_optional(spec.features)]
    return "\n".join(lines) + "\n"


def _copies(nodes: tuple[int, ...] | None) -> str:
    if nodes is None:
        return _commented('# copies = "numa"', "a copy on each NUMA node that has a GPU; or [0, 1]")
    return f"copies = {list(nodes)}" if nodes else 'copies = "numa"'


def _table(t: TableSpec, size: str | None, is_first: bool) -> Iterator[str]:
    yield f"[tables.{_key(t.name)}]"
    if size is not None:
        yield f"# {_escape(size)}"
    yield f'key = "{_escape(t.key)}"'
    yield _commented(f'row_format = "{t.row_format.label}"', _FORMATS if is_first else "")
    if t.dim is not None:
        yield _commented(f"dim = {t.dim}", "a checkpoint with other vectors is refused" if is_first else "")
    if t.raw is not None:
        yield f'ids = "{t.id_kind}"'
        if t.raw.key is not None:
            yield f'id_key = "{_escape(t.raw.key)}"'
    if t.missing == MissingSpec():
        if is_first:
            yield _commented('# missing = "error"', f"of an id without a row: {_POLICIES}")
        return
    vector = ", ".join(map(repr, t.missing.vector))
    yield f"missing = [{vector}]" if t.missing.policy == "constant" else f'missing = "{t.missing}"'


def _feature(f: FeatureSpec, is_first: bool) -> Iterator[str]:
    yield f"[features.{_key(f.name)}]"
    yield f'table = "{f.table}"'
    yield _commented(f'pooling = "{f.pooling}"', _POOLINGS if is_first else "")
    yield _commented(f'output = "{f.output}"', ", ".join(OUTPUTS) if is_first else "")


def _optional(features: Sequence[FeatureSpec]) -> Iterator[str]:
    one, other = features[0].name, features[-1].name
    what = "whose inputs are pooled features and, by any other name, dense tensors"
    yield f"# Scores are optional: an exported program, {what}"
    yield "# of the request (docs/scoring.md)."
    yield "# [scorer]"
    yield '# program = "scorer.pt2"'
    yield _commented(f'# inputs = {{ user = "{one}" }}', "only where an input is not called like its feature")
    yield "#"
    yield "# Or, of two towers, the product or the cosine of two pooled features of one dim."
    yield "# [scorer]"
    yield _commented('# kind = "cosine"', "dot, cosine")
    yield f'# features = ["{one}", "{other}"]'
    yield "#"
    yield "# What the columns of the data of `tableside eval` are called, optional too."
    yield "# [eval]"
    yield _commented('# label = "clicked"', "a column of 0 and 1")
    yield "# [eval.columns]"
    yield _commented(
        f'# {_key(one)} = "user_id"', "only where a column is not called like its feature or dense tensor"
    )


def _commented(line: str, comment: str) -> str:
    return f"{line.ljust(_COMMENT_AT)}# {comment}" if comment else line


def _escape(text: str) -> str:
    """Returns a basic string of TOML, without its quotes: JSON's escapes are among TOML's."""
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'
