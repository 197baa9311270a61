"""Commands that publish, check, activate and remove versions."""

import argparse
import sys
from pathlib import Path
from typing import Any

from tableside.loader.deltas.apply import ApplySettings
from tableside.loader.deltas.compact import compact
from tableside.loader.errors import SegmentError, VersionError
from tableside.loader.hot.hot import clear_hot
from tableside.loader.load.as_delta import load_as_delta
from tableside.loader.load.load import Loaded
from tableside.loader.load.load import load as load_model
from tableside.loader.load.manifest import write_manifest
from tableside.loader.load.settings import LoadSettings
from tableside.loader.load.share import share_of
from tableside.loader.load.verification import summary
from tableside.loader.model.first_model import IDS_ALONE, first_model, module_model
from tableside.loader.model.hps import hps_model, hps_text, is_hps
from tableside.loader.model.model import read_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.model.text import write_model
from tableside.loader.versions.retention import collect_states
from tableside.loader.versions.states import state_of
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat, choose
from tableside.serving.cli.arguments import (
    KEEP,
    AddCommand,
    add_cluster_token,
    add_headers,
    add_json,
    add_keep_states,
    age,
    count,
    size,
    state,
    url,
)
from tableside.serving.cli.commands import showing
from tableside.serving.cli.commands.showing import describe_reused, describe_scorer
from tableside.serving.cli.output import (
    chosen,
    console,
    errors,
    mb,
    print_json,
    progress_bar,
    published,
    root_settings,
    token_of,
)
from tableside.serving.client.address import default_url
from tableside.serving.cluster.describe import remote_tables
from tableside.serving.errors import ServingError


def init(options: argparse.Namespace) -> int:
    """Writes a first model.toml for a checkpoint, with or without a module's description, or for HPS's
    ps.json. Prints notes to stdout, or to stderr where the model.toml goes to stdout."""
    out: Path = options.out
    is_printed = str(out) == "-"
    if not is_printed and out.exists() and not options.force:
        raise ServingError(f"{out} exists; choose another --out, or --force to replace it")
    text, spec, notes = _first_text(options, Path.cwd() if is_printed else out.resolve().parent)
    say = errors if is_printed else console
    for note in notes:
        say.print(note, markup=False)
    if is_printed:
        sys.stdout.write(text)
        return 0
    out.write_text(text, encoding="utf-8")
    names = ", ".join(t.name for t in spec.tables)
    console.print(
        f"wrote {out}: model {spec.name} with {len(spec.tables)} tables ({names}); next: tableside load {out}"
    )
    return 0


def _first_text(options: argparse.Namespace, folder: Path) -> tuple[str, ModelSpec, list[str]]:
    """Returns the text of a first model.toml, its model, and notes for the user. folder: its future
    folder."""
    asked = (options.checkpoint, options.name, RowFormat.parse(options.row_format), folder)
    module: Path | None = options.from_module
    if is_hps(options.checkpoint):
        if module is not None:
            raise ServingError(
                "--from-module is for checkpoints; a ps.json names its tables itself, so leave one of them "
                "out"
            )
        spec, notes = hps_model(*asked)
        return hps_text(spec, options.checkpoint, notes), spec, notes
    found = first_model(*asked) if module is None else module_model(module, *asked)
    notes = [f"left out: {line}" for line in found.left_out if line.endswith(IDS_ALONE)]
    return write_model(found.spec, found.left_out, found.sizes), found.spec, notes


def manifest(options: argparse.Namespace) -> int:
    """Writes a checkpoint's manifest."""
    with progress_bar("reading") as progress:
        path = write_manifest(options.checkpoint, options.out, progress)
    console.print(f"wrote {path}; tableside load checks the checkpoint's rows against it")
    return 0


def load(options: argparse.Namespace) -> int:
    """Loads a checkpoint and publishes a version, or the rows that differ; removes older versions beyond
    --keep."""
    spec = read_model(options.model)
    root = root_settings(options).root
    o = options
    if o.share is not None:
        spec = share_of(spec, o.share)
    remote = remote_tables(spec, choose(o.backend), token_of(options))
    if o.as_delta and _load_delta(spec, root, options):
        return 0
    settings = LoadSettings(o.threads, o.max_memory, o.backend, not o.no_activate, o.group, tuple(o.only))
    with progress_bar(spec.name) as progress:
        loaded = load_model(spec, root, settings, progress, remote)
    removed = [] if options.no_activate else Model(root, spec.name).collect(options.keep)
    if options.json:
        print_json(
            {
                "model": loaded.model,
                "version": loaded.version,
                "live": not options.no_activate,
                "path": str(loaded.path),
                "tables": len(loaded.header.tables),
                "remote_tables": len(loaded.header.remote),
                "bytes": loaded.segment_bytes,
                "source_bytes": loaded.source_bytes,
                "seconds": loaded.seconds,
                "removed": list(map(str, removed)),
            }
        )
        return 0
    console.print(describe_load(loaded))
    console.print(summary(loaded.header.source))
    for line in (*describe_reused(loaded.header.source), *describe_scorer(loaded.header)):
        console.print(line, markup=False)
    for path in removed:
        console.print(f"removed {path}")
    return 0


def _load_delta(spec: ModelSpec, root: Path, options: argparse.Namespace) -> bool:
    """Publishes what differs in a checkpoint; False: it must be a version."""
    if options.only or options.no_activate or options.group:
        raise ServingError("--as-delta changes the live version; leave out --only, --no-activate and --group")
    with progress_bar(spec.name) as progress:
        settings = LoadSettings(options.threads, options.max_memory, options.backend)
        result, why_not, compared = load_as_delta(spec, root, settings, progress)
    if result is None:
        errors.print(f"{why_not}: it is loaded as a new version", markup=False)
        return False
    if options.json:
        state = {"model": result.model, "version": result.state.version, "sequence": result.state.sequence}
        counts = {"changed_rows": result.rows, "compared_rows": compared, "bytes": result.delta_bytes}
        print_json(state | counts | {"seconds": result.seconds})
        return True
    console.print(
        f"{result.model} state {result.state}: {result.rows:,} of {compared:,} rows differ, "
        f"{mb(result.delta_bytes)} of changes, in {result.seconds:.2f} s"
    )
    return True


def describe_load(loaded: Loaded) -> str:
    """A line about a load that is done: tables, bytes, time, pages."""
    fp32, stored = loaded.header.fp32_bytes, loaded.segment_bytes
    against = (
        f"{fp32 / stored:.1f} x less than fp32"
        if stored <= fp32 or not fp32
        else f"{stored / fp32:.1f} x the bytes of fp32"
    )
    return (
        f"{loaded.model} version {loaded.version}: {len(loaded.header.tables)} tables, "
        f"{f'{len(loaded.header.remote)} more on other hosts, ' * bool(loaded.header.remote)}"
        f"{mb(loaded.segment_bytes)} "
        f"({against}) in {loaded.seconds:.2f} s, {loaded.source_bytes / loaded.seconds / 1e9:.2f} GB/s read; "
        f"{loaded.huge_fraction:.0%} on {loaded.page_bytes >> 20} MiB pages; {loaded.path}"
    )


def verify(options: argparse.Namespace) -> int:
    """Reads every byte of the versions. Exit code 1: one of them is damaged."""
    named = chosen(options)
    if options.model and (options.version is not None or not named[0].versions()):
        named[0].attach(options.version, "header")  # says what is wrong with its name
    if not named and not options.json:
        console.print(f"nothing is published under {root_settings(options).root}")
    found: list[dict[str, Any]] = []
    for model in named:
        for version in model.versions() if options.version is None else [options.version]:
            damage = _damage(model, version)
            found.append({"model": model.name, "version": version, "damage": damage})
            if not options.json:
                console.print(f"{model.name} version {version}: {damage or 'whole'}")
    if options.json:
        print_json({"versions": found})
    return 1 if any(one["damage"] for one in found) else 0


def _damage(model: Model, version: int) -> str | None:
    """Reads every byte of a version; returns what is wrong with it."""
    try:
        list(model.attach_all(version, "always"))
    except SegmentError as error:
        return str(error)
    return None


def activate(options: argparse.Namespace) -> int:
    """Makes a version the live one."""
    model = published(options)
    model.activate(*options.version)
    console.print(
        f"{options.model} version {state_of(model.record())} is live; servers take it within a second"
    )
    return 0


def compact_model(options: argparse.Namespace) -> int:
    """Makes the live version and its deltas the next version; removes older versions beyond --keep."""
    model = published(options)
    with progress_bar(f"compacting {options.model}") as progress:
        done = compact(model, ApplySettings(threads=options.threads), progress)
    removed = [] if done is None else model.collect(options.keep, options.keep_for)
    if options.json:
        state = state_of(model.record()) if done is None else done.state
        found = {"model": model.name, "compacted": done is not None, "version": state.version}
        keys = ("rows", "merged", "expired", "evicted", "segment_bytes", "seconds")
        found |= {key: None if done is None else getattr(done, key) for key in keys}
        print_json(found | {"removed": list(map(str, removed))})
        return 0
    if done is None:
        console.print(
            f"{options.model} version {state_of(model.record())} has no changes over it; nothing was done"
        )
        return 0
    dropped = f"{done.expired:,} expired, {done.evicted:,} beyond max_rows, "
    console.print(
        f"{options.model} version {done.state} is live: {done.rows:,} rows, {done.merged:,} changes merged, "
        f"{dropped * bool(done.expired + done.evicted)}{mb(done.segment_bytes)} in {done.seconds:.2f} s, "
        f"{done.segment_bytes / done.seconds / 1e9:.2f} GB/s"
    )
    for path in removed:
        console.print(f"removed {path}")
    return 0


def remove(options: argparse.Namespace) -> int:
    """Removes a version or a model."""
    model = published(options)
    if options.all and options.version is not None:
        raise VersionError("--all removes every version; leave the version or --all out")
    if options.all:
        console.print(f"removed {options.model} with {model.remove_all()} versions")
    elif options.version is None:
        raise VersionError(f"say which version of {options.model!r}, or --all for the whole model")
    else:
        model.remove(options.version)
        console.print(f"removed {options.model} version {options.version}")
    clear_hot(model.root, model.name, model.versions)
    return 0


def gc(options: argparse.Namespace) -> int:
    """Removes leftovers of killed loads, and old versions."""
    removed = [
        p
        for m in chosen(options)
        for p in [*m.collect(options.keep), *collect_states(m, options.keep_states)]
    ]
    removed += [p for m in chosen(options) for p in clear_hot(m.root, m.name, m.versions)]
    if options.json:
        print_json({"removed": list(map(str, removed))})
        return 0
    for path in removed:
        console.print(f"removed {path}")
    console.print(f"{len(removed)} files removed")
    return 0


def add_commands(command: AddCommand) -> None:
    p = command("init", init, "write a first model.toml from what a checkpoint holds")
    p.option("checkpoint", type=Path)
    p.option(
        "--from-module",
        "tables and features of the module: an exported program (.pt2), or TorchRec's JSON",
        type=Path,
        metavar="FILE",
    )
    p.option("--out", "file to write; -: print it", type=Path, default=Path("model.toml"))
    p.option("--name", "the model's name (default: the checkpoint's)")
    p.option(
        "--row-format",
        "of values that are not quantized: " + ", ".join(f.label for f in RowFormat),
        default="int8",
    )
    p.option("--force", "replace the file where there is one", action="store_true")

    p = command("manifest", manifest, "write checksums of a checkpoint's rows, which every load checks")
    p.option("checkpoint", type=Path)
    p.option("--out", "file to write (default: beside the checkpoint, where load finds it)", type=Path)

    p = command("load", load, "quantize a checkpoint into shared memory as a new version")
    p.sections["examples"] = (
        "  tableside load model.toml                     # the next version, live at once",
        "  tableside load model.toml --no-activate       # tableside activate releases it",
        "  tableside load model.toml --only user         # one table; the others stay",
    )
    p.option("model", type=Path, metavar="MODEL.TOML")
    p.option("--keep", "older versions to keep for a rollback", type=KEEP, default=1)
    p.option(
        "--only",
        "load this table, keep the others of the live version; may be repeated",
        action="append",
        default=[],
        metavar="TABLE",
    )
    p.option(
        "--as-delta",
        "publish the rows that differ from the live ones as changes, where they are few",
        action="store_true",
    )
    p.option("--no-activate", "publish without making it the live version", action="store_true")
    p.option("--group", "a group that may read the model (default: this user alone)")
    add_json(p)
    with p.group("threads and memory"):
        p.option("--threads", "threads that quantize; 0: one a core", type=count(0), default=0)
        p.option(
            "--max-memory", "private memory for buffers, at most", type=size, default="64MiB", metavar="BYTES"
        )
        p.option("--backend", "native or fbgemm", default="native")
    with p.group("tables with a tier"):
        p.option("--share", "load this share of them alone, from 0", type=int, metavar="N")
        add_cluster_token(p)

    p = command("list", showing.list_models, "list models and versions of this host, or of a running server")
    add_json(p)
    with p.group("a server"):
        p.option(
            "--url",
            "list what this server serves (alone: TABLESIDE_URL)",
            type=url,
            nargs="?",
            const=default_url(),
        )
        add_headers(p)

    p = command("inspect", showing.inspect, "show what a version holds")
    p.option("model")
    p.option("version", "(default: the live state)", type=state, nargs="?", metavar="VERSION[+SEQUENCE]")
    add_json(p)

    p = command("verify", verify, "read every byte of the versions and compare checksums")
    p.option("model", "(default: all models)", nargs="?")
    p.option("version", "(default: all versions)", type=count(1), nargs="?")
    add_json(p)

    p = command("activate", activate, "make a published version the live one, a newer or an older")
    p.option("model")
    p.option(
        "version",
        "a version with its newest changes, or those up to one",
        type=state,
        metavar="VERSION[+SEQUENCE]",
    )

    p = command("remove", remove, "remove a version that is not live, or a whole model")
    p.option("model")
    p.option("version", type=count(1), nargs="?")
    p.option("--all", "the whole model, the live version too", action="store_true")

    p = command("gc", gc, "remove what killed loads left, and old versions")
    p.option("model", "(default: all models)", nargs="?")
    p.option("--keep", "older versions to keep for a rollback", type=KEEP, default=1)
    add_keep_states(p)
    add_json(p)

    p = command("compact", compact_model, "make a version of the live one and the changes over it")
    p.option("model")
    p.option("--keep", "older versions to keep for a rollback", type=KEEP, default=1)
    p.option(
        "--keep-for", "keep those too that were live in this time, as 1h", type=age, default=0, metavar="AGE"
    )
    p.option("--threads", "(default: one a core)", type=count(0), default=0)
    add_json(p)
