"""Commands that show what is published: the versions that there are, and what one of them holds."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from tableside.loader.errors import SegmentError
from tableside.loader.header import Header, ScorerInput, StoredScorer
from tableside.loader.memory import available_bytes
from tableside.loader.nearest import did_you_mean
from tableside.loader.stored import StoredTable
from tableside.loader.verification import summary
from tableside.loader.versions import Model, models
from tableside.serving.cli.output import console, mb
from tableside.serving.settings import RootSettings, given


def list_models(options: argparse.Namespace) -> int:
    """Prints a line for each version, and how much shared memory is free."""
    settings = RootSettings(**given(options, RootSettings))
    root = settings.root
    table = Table("model", "version", "", "created", "tables", "bytes", "fp32", "scorer", box=None)
    for model in models(root, settings.owner):
        live = model.record().current
        for version in model.versions():
            try:
                segment = model.attach(version, "header")
            except SegmentError as error:
                table.add_row(model.name, str(version), "damaged", escape(str(error)))
                continue
            h = segment.header
            cells = (
                "live" if version == live else "",
                h.created,
                str(len(h.tables)),
                mb(segment.size),
                mb(h.fp32_bytes),
                escape(_scorer_cell(h.scorer)),
            )
            table.add_row(model.name, str(version), *cells)
        for version in model.loading_versions():
            table.add_row(model.name, str(version), "loading")
    console.print(table if table.row_count else f"nothing is published under {root}")
    free = available_bytes(root if root.exists() else Path("/dev/shm"))
    console.print(f"{mb(free)} of shared memory free")
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Prints the tables and features of a version."""
    settings = RootSettings(**given(options, RootSettings))
    segment = Model(settings.root, options.model, settings.owner).attach(options.version, "header")
    h = segment.header
    console.print(
        f"{h.model} version {h.version}, created {h.created}, {mb(segment.size)}, fp32 {mb(h.fp32_bytes)}, {segment.path}"
    )
    console.print(f"read from {h.source.get('path', '?')} in {h.load.get('seconds', float('nan')):.2f} s, {summary(h.source)}")
    if reused := describe_reused(h.source):
        console.print(reused)
    if (o := h.owner) is not None:
        console.print(f"the share of owner {o.number} of {o.owners} of version {o.version} of {o.model}")
    table = Table("table", "ids", "missing", "rows", "dim", "row format", "row bytes", "bytes", "key", box=None)
    for t in h.tables:
        table.add_row(
            t.name, _ids_of(t), t.ids.missing if t.ids else "error", f"{t.rows:,}", str(t.dim), t.row_format, str(t.row_bytes),
            mb(t.bytes), escape(t.key),
        )  # fmt: skip
    console.print(table)
    table = Table("feature", "table", "pooling", "output", box=None)
    for f in h.features:
        table.add_row(f.name, f.table, f.pooling, f.output)
    console.print(table)
    if h.scorer is not None:
        table = Table(f"{h.scorer.kind} scorer's input", "feature", "width", box=None)
        for i in h.scorer.inputs:
            table.add_row(escape(i.name), i.feature or "(dense: a request brings it)", str(i.width))
        console.print(table)
    return 0


def _ids_of(t: StoredTable) -> str:
    """How many ids a table has, for people; a table of raw ids has more rows, some of which no id has."""
    if t.ids is None:
        return f"{t.rows:,} row numbers"
    kind = f"raw, {t.ids.index.owned} of {t.ids.index.buckets} buckets" if t.ids.index else f"row numbers from {t.ids.first:,} on"
    return f"{t.ids.count:,} {kind}" + (f", {t.ids.backfilled:,} backfilled" if t.ids.backfilled else "")


def describe_reused(source: Mapping[str, Any]) -> str:
    """A line about tables that were taken over from another version, of the source in a header; "" where none were."""
    reused = source.get("reused")
    if not isinstance(reused, dict) or not isinstance(tables := reused.get("tables"), dict):
        return ""
    names = list(map(str, tables))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"taken over from version {reused.get('version')}: {', '.join(names[:5])}{more}"


def describe_scorer(header: Header) -> Iterator[str]:
    """Lines about what a version's scorer takes: its inputs, those that no feature gives, and the features that none takes."""
    if (scorer := header.scorer) is None:
        return
    yield f"scorer {_scorer_cell(scorer)}"
    taken = {i.feature for i in scorer.inputs if i.feature is not None}
    unused = [f.name for f in header.features if f.name not in taken]
    for i in scorer.inputs:
        if i.feature is None:
            yield (
                f"scorer input {i.name} is called like no feature: a request brings it as a dense tensor of width {i.width}"
                f"{did_you_mean(i.name, unused)}"
            )
    for name in unused:
        yield f"feature {name} is not scored: no input of the scorer is called like it, or given it by inputs of [scorer]"


def _scorer_cell(scorer: StoredScorer | None) -> str:
    """A scorer's kind and its inputs, for people: program(user, item=clicked, dense context)."""
    if scorer is None:
        return ""
    return f"{scorer.kind}({', '.join(map(_input, scorer.inputs))})"


def _input(i: ScorerInput) -> str:
    if i.feature is None:
        return f"dense {i.name}"
    return i.name if i.name == i.feature else f"{i.name}={i.feature}"
