"""`tableside list` and `tableside inspect`."""

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from tableside.loader.errors import LoaderError, SegmentError, VersionError
from tableside.loader.hot.counts import counted_tables
from tableside.loader.hot.hot import hot_folder, newest_hot, open_hot
from tableside.loader.load.verification import summary
from tableside.loader.model.nearest import did_you_mean
from tableside.loader.segment.delta import Delta
from tableside.loader.segment.header import Header, ScorerInput, StoredScorer
from tableside.loader.segment.huge_pages import is_on_disk
from tableside.loader.segment.memory import available_bytes
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredTable
from tableside.loader.versions.states import State, attach_state, kept_states, resolve, state_of
from tableside.loader.versions.versions import Model, models
from tableside.serving.cli.arguments import client_of
from tableside.serving.cli.output import console, mb, print_json, published, root_settings, table_of

_UNKNOWN = dict.fromkeys(
    (
        "state", "created", "tables", "bytes", "shared_bytes", "delta_bytes", "fp32_bytes", "scorer",
        "error", "sequence", "states", "nodes", "expired", "evicted",
    )
)  # fmt: skip


def list_models(options: argparse.Namespace) -> int:
    """Prints a line per version and the free shared memory; with --url a server's models."""
    if options.url is not None:
        return _list_served(options)
    settings = root_settings(options)
    root = settings.root
    versions = [v for model in models(root, settings.owner) for v in _versions(model)]
    free = available_bytes(root if root.exists() else Path("/dev/shm"))
    if options.json:
        print_json({"root": str(root), "free_bytes": free, "versions": versions})
        return 0
    heads = ("model", "version", "created", "tables", "bytes", "changes", "shared", "scorer")
    rows: list[list[str]] = []
    for v in versions:
        named = f"{v['version']}+{v['sequence']}" if v["sequence"] else str(v["version"])
        cells = [v["model"], named if v["state"] == "published" else f"{named} {v['state']}"]
        if v["error"] is not None:
            cells.append(escape(v["error"]))
        elif v["created"] is not None:
            sizes = (mb(v[key]) if v[key] else "" for key in ("bytes", "delta_bytes", "shared_bytes"))
            cells += [
                escape(v["created"][5:16].replace("T", " ")),  # without the year
                str(v["tables"]),
                *sizes,
                v["scorer"]["kind"] if v["scorer"] else "",
            ]
        rows.append(cells + [""] * (len(heads) - len(cells)))
    shown = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    table = table_of([heads[place] for place in shown], ([row[place] for place in shown] for row in rows))
    table.collapse_padding, table.pad_edge = True, False  # 80 columns hold it
    console.print(table if rows else f"nothing is published under {root}")
    for v in versions:
        if v["expired"] or v["evicted"]:
            said = f"{v['expired']:,} ids expired, {v['evicted']:,} evicted"
            console.print(f"{v['model']} {v['version']}: {said}, since its load", markup=False)
    is_disk = root.exists() and is_on_disk(root)
    console.print(f"{mb(free)} free on the disk" if is_disk else f"{mb(free)} of shared memory free")
    return 0


def _list_served(options: argparse.Namespace) -> int:
    """Prints a line for each model of a running server."""
    with client_of(options) as client:
        served = client.models()
    if options.json:
        print_json({"url": options.url, "models": served})
        return 0
    table = Table("model", "version", "published", "tables", "features", "bytes", "fp32", box=None)
    for m in served:
        counts = (str(len(m[key])) for key in ("tables", "features"))
        published = ", ".join(map(str, m["versions"]))
        table.add_row(
            escape(m["name"]),
            str(m["version"]),
            published,
            *counts,
            mb(m["segment_bytes"]),
            mb(m["fp32_bytes"]),
        )
    console.print(table if table.row_count else f"{options.url} serves no model")
    return 0


def _versions(model: Model) -> Iterator[dict[str, Any]]:
    """Returns the JSON of `list` for a model (docs/commands.md)."""
    live = state_of(model.record())
    for version in model.versions():
        kept = kept_states(model, version)
        newest = live.sequence if version == live.version else kept[-1].sequence
        changes: dict[str, Any] = {"sequence": newest, "states": [str(s) for s in kept]}
        unknown: dict[str, Any] = {"model": model.name, "version": version, **_UNKNOWN, **changes}
        try:
            segment = model.attach(version, "header")
        except SegmentError as error:
            yield {**unknown, "state": "damaged", "error": str(error)}
            continue
        h = segment.header
        sizes = {"tables": len(h.tables) + len(h.remote), "bytes": segment.size, "fp32_bytes": h.fp32_bytes}
        sizes["shared_bytes"] = segment.shared_bytes
        state = "live" if version == live.version else "published"
        sizes["delta_bytes"] = sum(d.segment.size for d in _deltas(model, State(version, newest)))
        found = {"scorer": _scorer(h.scorer), "nodes": model.nodes(version)}
        dropped = {kind: sum(getattr(t.ids, kind, 0) for t in h.tables) for kind in ("expired", "evicted")}
        yield {**unknown, "state": state, "created": h.created, **sizes, **found, **dropped}
    for version in model.loading_versions():
        yield {"model": model.name, "version": version, **_UNKNOWN, "state": "loading"}


def _deltas(model: Model, state: State) -> tuple[Delta, ...]:
    try:
        return attach_state(model, state, "header").deltas
    except (SegmentError, VersionError):  # a reader of them says what is wrong
        return ()


def inspect(options: argparse.Namespace) -> int:
    """Prints the tables and features of a version."""
    model = published(options)
    segment = attach_state(
        model, None if options.version is None else resolve(model, *options.version), "header"
    )
    h = segment.header
    if options.json:
        print_json(_version(segment))
        return 0
    console.print(
        f"{h.model} version {h.version}, created {h.created}, {mb(segment.size)}, fp32 {mb(h.fp32_bytes)}, "
        f"{segment.path}"
    )
    console.print(
        f"read from {h.source.get('path', '?')} in {h.load.get('seconds', float('nan')):.2f} s, "
        f"{summary(h.source)}"
    )
    for line in describe_reused(h.source):
        console.print(line, markup=False)
    for line in _changes(segment):
        console.print(line)
    if len(segment.files) > 1:
        shared = f", {mb(segment.shared_bytes)} of it shared with other versions" * (segment.shared_bytes > 0)
        console.print(f"{len(segment.files) - 1} tables in files of their own{shared}")
    if nodes := model.nodes(h.version):
        console.print(f"a copy on each of the NUMA nodes {', '.join(map(str, nodes))}", markup=False)
    if (o := h.owner) is not None:
        console.print(f"the share of owner {o.number} of {o.owners} of version {o.version} of {o.model}")
    if (disk := _on_disk(segment)) is not None:
        where = ["a disk"] * bool(segment.base.readers) + ["Redis"] * any(r.redis for r in h.remote)
        hot = f"{disk['hot_rows']:,} rows, {mb(disk['hot_bytes'])}" if disk["hot_rows"] else "none"
        console.print(
            f"rows of {', '.join(disk['tables'])} are read from {' and '.join(where)}, {mb(disk['bytes'])}; "
            f"in a hot segment: {hot}"
        )
    for table in _tables(h):
        console.print(table)
    return 0


def _on_disk(segment: Segment) -> dict[str, Any] | None:
    """Returns which tables are read from a disk or Redis by rows, and what is hot of them; None: none are."""
    version, hot = segment.base, None
    if not (tables := counted_tables(version)):
        return None
    root = version.path.parent.parent
    if number := newest_hot(root, version):
        with contextlib.suppress(LoaderError, OSError), hot_folder(root, version.header.model) as folder:
            hot = open_hot(folder, version, number, "header")
    return {
        "tables": [t.name for t in tables],
        "bytes": sum(t.bytes for t in tables),
        "hot_rows": 0 if hot is None else hot.entries,
        "hot_bytes": 0 if hot is None else hot.segment.size,
    }


def _changes(segment: Segment) -> Iterator[str]:
    """Lines about the changes that a state holds."""
    for delta in segment.deltas:
        c = delta.change
        yield (
            f"changes up to {c.sequence}, applied "
            f"{datetime.fromtimestamp(c.applied_at, UTC).isoformat(timespec='seconds')}: "
            f"{_rows_of(delta)}, {mb(delta.segment.size)}, {delta.path}"
        )
    if (last := segment.change) is not None:
        if not segment.deltas:
            yield f"made of changes up to {last.sequence}"
        for source, at in last.positions.items():
            yield f"changes of {source} up to {at}"


def _rows_of(delta: Delta) -> str:
    return f"{delta.entries:,} rows of {', '.join(delta.tables)}" if delta.tables else "no rows"


def _tables(h: Header) -> Iterator[Table]:
    """Yields the text tables of `inspect`."""
    table = Table(
        "table", "ids", "missing", "rows", "dim", "row format", "row bytes", "bytes", "key", box=None
    )
    for t in h.tables:
        table.add_row(
            t.name, _ids_of(t), t.ids.missing if t.ids else "error", f"{t.rows:,}", str(t.dim),
            t.row_format, str(t.row_bytes), mb(t.bytes), escape(t.key),
        )  # fmt: skip
    for r in h.remote:
        kinds = {"row": "row numbers", "raw": "raw", "string": "strings"}
        ids, hosts = f"{r.count:,} {kinds[r.id_kind]}", "in Redis" if r.redis else f"on {len(r.shares)} hosts"
        row = (ids, r.missing, f"{r.count:,}", str(r.dim), r.row_format, str(r.row_bytes), hosts)
        table.add_row(r.name, *row, escape(r.key))
    yield table
    rows = ((f.name, f.table, f.pooling, f.output) for f in h.features)
    yield table_of(("feature", "table", "pooling", "output"), rows)
    if h.scorer is not None:
        dense = "(dense: a request brings it)"
        inputs = ((escape(i.name), i.feature or dense, str(i.width)) for i in h.scorer.inputs)
        yield table_of((f"{h.scorer.kind} scorer's input", "feature", "width"), inputs)


def _version(segment: Segment) -> dict[str, Any]:
    """Returns the JSON of `inspect` (docs/commands.md)."""
    h = segment.header
    tables = [
        {
            **{
                name: getattr(t, name)
                for name in ("name", "key", "rows", "dim", "row_format", "row_bytes", "bytes")
            },
            "ids": t.rows if t.ids is None else t.ids.count,
            "is_raw": t.ids is not None and t.ids.index is not None,
            "strings": t.id_kind == "string",
            "first_id": 0 if t.ids is None else t.ids.first,
            "backfilled": 0 if t.ids is None else t.ids.backfilled,
            "missing": "error" if t.ids is None else t.ids.missing,
            **{name: getattr(t.ids, name, 0) or None for name in ("ttl_s", "max_rows")},
            **{name: getattr(t.ids, name, 0) for name in ("expired", "evicted")},
        }
        for t in h.tables
    ]
    return {
        **{"model": h.model, "version": h.version, "created": h.created, "path": str(segment.path)},
        **{"bytes": segment.size, "shared_bytes": segment.shared_bytes, "fp32_bytes": h.fp32_bytes},
        **{
            "checkpoint": h.source.get("path"),
            "load_seconds": h.load.get("seconds"),
            "verification": summary(h.source),
        },
        "disk": _on_disk(segment),
        "disk_timeout_s": h.disk_timeout_s or None,
        "owner": None if h.owner is None else asdict(h.owner),
        "sequence": segment.sequence,
        "positions": {} if segment.change is None else segment.change.positions,
        "deltas": [
            {
                **{"sequence": d.sequence, "rows": d.entries, "bytes": d.segment.size, "path": str(d.path)},
                **{"made_at": d.change.made_at or None, "applied_at": d.change.applied_at},
            }
            for d in segment.deltas
        ],
        "tables": tables,
        "remote_tables": [asdict(r) for r in h.remote],
        "features": [asdict(f) for f in h.features],
        "scorer": _scorer(h.scorer),
    }


def _ids_of(t: StoredTable) -> str:
    """How many ids a table has, for people; a table of raw ids has more rows, some of which no id has."""
    if t.ids is None:
        return f"{t.rows:,} row numbers"
    kind = (
        f"{'strings' if t.ids.strings else 'raw'}, {t.ids.index.owned} of {t.ids.index.buckets} buckets"
        if t.ids.index
        else f"row numbers from {t.ids.first:,} on"
    )
    more = {
        f"{t.ids.backfilled:,} backfilled": t.ids.backfilled,
        f"ttl {t.ids.ttl_s:,} s": t.ids.ttl_s,
        f"{t.ids.expired:,} expired": t.ids.expired,
        f"at most {t.ids.max_rows:,}": t.ids.max_rows,
        f"{t.ids.evicted:,} evicted": t.ids.evicted,
    }
    return ", ".join([f"{t.ids.count:,} {kind}", *(what for what, is_so in more.items() if is_so)])


def describe_reused(source: Mapping[str, Any]) -> Iterator[str]:
    """Yields lines about tables that a version shares with another one, and whose rows came with ages, of a
    header's source."""
    if isinstance(aged := source.get("aged"), list):
        yield f"rows came with their ages: {', '.join(map(str, aged))}"
    for kind, said in (
        ("reused", "taken over from version {}: {}"),
        ("same", "the same as in version {}, whose files it shares: {}"),
    ):
        of = source.get(kind)
        if isinstance(of, dict) and isinstance(tables := of.get("tables"), dict | list):
            names = list(map(str, tables))
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            yield said.format(of.get("version"), ", ".join(names[:5]) + more)


def describe_scorer(header: Header) -> Iterator[str]:
    """Yields lines about a scorer: its inputs, the dense ones, and the features that it ignores."""
    if (scorer := header.scorer) is None:
        return
    yield f"scorer {scorer.kind}({', '.join(map(_input, scorer.inputs))})"
    taken = {i.feature for i in scorer.inputs if i.feature is not None}
    unused = [f.name for f in header.features if f.name not in taken]
    for i in scorer.inputs:
        if i.feature is None:
            yield (
                f"scorer input {i.name} is called like no feature: a request brings it as a dense tensor of "
                f"width {i.width}{did_you_mean(i.name, unused)}"
            )
    for name in unused:
        why = "no input of the scorer is called like it, or given it by inputs of [scorer]"
        yield f"feature {name} is not scored: {why}"


def _scorer(scorer: StoredScorer | None) -> dict[str, Any] | None:
    """Returns a scorer's kind and inputs for JSON; feature None: a dense input."""
    return None if scorer is None else {"kind": scorer.kind, "inputs": [asdict(i) for i in scorer.inputs]}


def _input(taken: ScorerInput) -> str:
    """What a scorer takes, for people: user, item=clicked, dense context."""
    if taken.feature is None:
        return f"dense {taken.name}"
    return taken.name if taken.name == taken.feature else f"{taken.name}={taken.feature}"
