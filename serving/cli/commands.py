"""What each command of the command line does. Tables for people go to stdout, progress to stderr where that is a terminal."""

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tableside.loader.errors import SegmentError, VersionError
from tableside.loader.first_model import first_model
from tableside.loader.load import Loaded, LoadSettings
from tableside.loader.load import Progress as LoadProgress
from tableside.loader.load import load as load_model
from tableside.loader.manifest import write_manifest
from tableside.loader.memory import available_bytes
from tableside.loader.model import check_name, read_model, write_model
from tableside.loader.verification import summary
from tableside.loader.versions import Model, damaged, models
from tableside.quant import RowFormat
from tableside.serving import wire
from tableside.serving.cli import bench as load_generator
from tableside.serving.client import Client
from tableside.serving.errors import ServingError
from tableside.serving.settings import RootSettings, ServerSettings, given

if TYPE_CHECKING:
    from tableside.serving.evaluation.run import Report
    from tableside.serving.evaluation.work import Candidate

console = Console(highlight=False, soft_wrap=True)


def _settings(options: argparse.Namespace) -> RootSettings:
    return RootSettings(**given(options, RootSettings))


def _model(options: argparse.Namespace) -> Model:
    settings = _settings(options)
    return Model(settings.root, options.model, settings.owner)


def _chosen(options: argparse.Namespace) -> list[Model]:
    """The model that is named, or all of them."""
    settings = _settings(options)
    return [_model(options)] if options.model else models(settings.root, settings.owner)


def mb(n: float) -> str:
    """Bytes for a person."""
    return f"{n / 1e9:,.2f} GB" if n >= 1e9 else f"{n / 1e6:,.1f} MB"


def parse_bytes(text: str) -> int:
    """ "256M" -> 268435456. ServingError: not a number with K, M or G."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ServingError(f"{text!r} is not a number of bytes; expected such as 256M or 2G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def init(options: argparse.Namespace) -> int:
    """Writes model.toml."""
    out: Path = options.out
    if out.exists() and not options.force:
        raise ServingError(f"{out} exists; choose another --out, or --force to replace it")
    spec, skipped = first_model(options.checkpoint, options.name, RowFormat.parse(options.row_format), out.resolve().parent)
    out.write_text(write_model(spec, skipped), encoding="utf-8")
    names = ", ".join(t.name for t in spec.tables)
    console.print(f"wrote {out}: model {spec.name} with {len(spec.tables)} tables ({names}); next: tableside load {out}")
    return 0


def manifest(options: argparse.Namespace) -> int:
    """Writes a checkpoint's manifest."""
    with progress_bar("reading") as progress:
        path = write_manifest(options.checkpoint, options.out, progress)
    console.print(f"wrote {path}; tableside load checks the checkpoint's rows against it")
    return 0


# ---- load ----


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed or 0:,.0f} rows/s")


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[LoadProgress | None]:
    """A bar with rows/s and time left on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn(label),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("load", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def load(options: argparse.Namespace) -> int:
    """Loads and publishes; removes versions beyond --keep."""
    spec = read_model(options.model)
    root = _settings(options).root
    settings = LoadSettings(
        options.threads, parse_bytes(options.max_memory), options.backend, not options.no_activate, options.group
    )
    with progress_bar(spec.name) as progress:
        loaded = load_model(spec, root, settings, progress)
    console.print(describe_load(loaded))
    console.print(summary(loaded.header.source))
    if not options.no_activate:
        for path in Model(root, spec.name).collect(options.keep):
            console.print(f"removed {path}")
    return 0


def describe_load(loaded: Loaded) -> str:
    """One line about a load that is done."""
    ratio = loaded.header.fp32_bytes / loaded.segment_bytes
    return (
        f"{loaded.model} version {loaded.version}: {len(loaded.header.tables)} tables, {mb(loaded.segment_bytes)} "
        f"({ratio:.1f} x less than fp32) in {loaded.seconds:.2f} s, {loaded.source_bytes / loaded.seconds / 1e9:.2f} GB/s read; "
        f"{loaded.huge_fraction:.0%} on 2 MiB pages; {loaded.path}"
    )


# ---- what is published ----


def list_models(options: argparse.Namespace) -> int:
    """A line a version."""
    settings = _settings(options)
    root = settings.root
    table = Table("model", "version", "", "created", "tables", "bytes", "fp32", box=None)
    for model in models(root, settings.owner):
        live = model.record().current
        for version in model.versions():
            try:
                segment = model.attach(version, "header")
            except SegmentError as error:
                table.add_row(model.name, str(version), "damaged", str(error))
                continue
            h = segment.header
            cells = (
                "live" if version == live else "",
                h.created,
                str(len(h.tables)),
                mb(segment.size),
                mb(h.fp32_bytes),
            )
            table.add_row(model.name, str(version), *cells)
        for version in model.loading_versions():
            table.add_row(model.name, str(version), "loading")
    console.print(table if table.row_count else f"nothing is published under {root}")
    free = available_bytes(root if root.exists() else Path("/dev/shm"))
    console.print(f"{mb(free)} of shared memory free")
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Tables and features of a version."""
    segment = _model(options).attach(options.version, "header")
    h = segment.header
    console.print(
        f"{h.model} version {h.version}, created {h.created}, {mb(segment.size)}, fp32 {mb(h.fp32_bytes)}, {segment.path}"
    )
    console.print(f"read from {h.source.get('path', '?')} in {h.load.get('seconds', float('nan')):.2f} s, {summary(h.source)}")
    table = Table("table", "rows", "dim", "row format", "row bytes", "bytes", "key", box=None)
    for t in h.tables:
        table.add_row(t.name, f"{t.rows:,}", str(t.dim), t.row_format, str(t.row_bytes), mb(t.bytes), t.key)
    console.print(table)
    table = Table("feature", "table", "pooling", "output", box=None)
    for f in h.features:
        table.add_row(f.name, f.table, f.pooling, f.output)
    console.print(table)
    return 0


def verify(options: argparse.Namespace) -> int:
    """Reads every byte; exit code 1 where one is wrong."""
    chosen = _chosen(options)
    if options.model and options.version is not None:
        chosen[0].attach(options.version)
        console.print(f"{options.model} version {options.version}: whole")
        return 0
    if options.model and not chosen[0].versions():
        chosen[0].current()
    bad = 0
    for model in chosen:
        errors = damaged(model)
        for version in model.versions():
            console.print(f"{model.name} version {version}: {errors.get(version, 'whole')}")
        bad += len(errors)
    return 1 if bad else 0


def activate(options: argparse.Namespace) -> int:
    """Flips the live version."""
    _model(options).activate(options.version)
    console.print(f"{options.model} version {options.version} is live; servers take it within a second")
    return 0


def remove(options: argparse.Namespace) -> int:
    """Removes a version or a model."""
    model = _model(options)
    if options.all and options.version is not None:
        raise VersionError("--all removes every version; leave the version or --all out")
    if options.all:
        console.print(f"removed {options.model} with {model.remove_all()} versions")
    elif options.version is None:
        raise VersionError(f"say which version of {options.model!r}, or --all for the whole model")
    else:
        model.remove(options.version)
        console.print(f"removed {options.model} version {options.version}")
    return 0


def gc(options: argparse.Namespace) -> int:
    """Removes leftovers and old versions."""
    removed = [p for m in _chosen(options) for p in m.collect(options.keep)]
    for path in removed:
        console.print(f"removed {path}")
    console.print(f"{len(removed)} files removed")
    return 0


# ---- serving ----


def serve(options: argparse.Namespace) -> int:
    """Serves until a signal."""
    from tableside.serving.server import serve as run

    if options.models == []:
        options.models = None
    return run(ServerSettings(**given(options, ServerSettings)))


def lookup(options: argparse.Namespace) -> int:
    """Prints vectors."""
    features: dict[str, wire.Jagged] = {}
    for name, ids in map(_parse_feature, options.features):
        if name in features:
            raise ServingError(f"feature {name!r} is given twice; separate its bags by ';'")
        features[name] = ids
    with Client(options.url) as client:
        vectors = client.lookup(options.model, features)
    if options.json:
        print(orjson.dumps({k: v.astype(np.float32) for k, v in vectors.items()}, option=orjson.OPT_SERIALIZE_NUMPY).decode())
        return 0
    for name, array in vectors.items():
        console.print(f"{name} {array.dtype} {list(array.shape)}")
        for row in array:
            shown = " ".join(f"{x: .4f}" for x in row[:8])
            console.print(f"  {shown}{' ...' if len(row) > 8 else ''}")
    return 0


def score(options: argparse.Namespace) -> int:
    """Prints scores."""
    features = dict(map(_parse_feature, options.features))
    dense = dict(map(_parse_dense, options.dense or []))
    with Client(options.url) as client:
        scores = client.score(options.model, features, dense)
    for number, row in enumerate(np.atleast_1d(scores)):
        console.print(f"{number} {' '.join(f'{x:.6f}' for x in np.atleast_1d(row))}")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Scores a data set; prints the figures. Exit code 3: the gate did not pass."""
    from tableside.serving.evaluation.run import EvalSettings, check_out
    from tableside.serving.evaluation.run import evaluate as run

    root, owner = _settings(options).root, _settings(options).owner
    names = [options.model, *([options.against] if options.against else [])]
    if any(name.endswith(".toml") for name in names):
        check_out(options.out)  # before what is loaded is noted there
    candidates = [_candidate(name, root, owner, options.out) for name in names]
    for source in options.source or []:
        spec = read_model(source)
        candidates = [replace(c, source=source.resolve()) if c.model == spec.name and not c.source else c for c in candidates]
    if options.max_ne_increase is not None and not options.against:
        raise ServingError("--max-ne-increase compares; say --against VERSION or MODEL@VERSION")
    server = ServerSettings(**{**given(options, ServerSettings), "root": root, "owner": owner})
    settings = EvalSettings(
        options.data,
        options.out,
        server.workers,
        options.label,
        options.slice,
        options.shard_rows,
        options.batch,
        options.max_ne_increase,
        options.engine,
        options.ray_address,
        options.stash,
    )
    with progress_bar("evaluating") as progress:
        report = run(candidates, settings, server, progress)
    _print_report(report)
    return 3 if report.passed is False else 0


def _candidate(text: str, root: Path, owner: str | None, out: Path) -> "Candidate":
    """MODEL, MODEL@VERSION, or a model.toml that is loaded first, without being activated: once for each OUT."""
    from tableside.serving.evaluation.sources import remember, remembered
    from tableside.serving.evaluation.work import Candidate

    if text.endswith(".toml"):
        spec = read_model(Path(text))
        if (known := remembered(out, Path(text), spec, root)) is not None:
            console.print(f"{text} was loaded as {spec.name} version {known} when this evaluation began")
            return Candidate(spec.name, known, source=Path(text).resolve())
        with progress_bar(f"loading {spec.name}") as progress:
            loaded = load_model(spec, root, LoadSettings(activate=False), progress)
        remember(out, Path(text), spec, loaded.version)
        console.print(f"loaded {loaded.model} version {loaded.version}, not activated")
        return Candidate(loaded.model, loaded.version, source=Path(text).resolve())
    name, at, version = text.partition("@")
    if at and not version.isdecimal():
        raise ServingError(f"{text!r}: expected MODEL, MODEL@VERSION or a model.toml")
    return Candidate(check_name(name), int(version) if at else Model(root, name, owner).current())


def _print_report(report: "Report") -> None:
    speed = f", {report.rows_per_s:,.0f} rows/s" if report.rows > report.resumed_rows else ""
    resumed = f", {report.resumed_rows:,} of them by an earlier run" if report.resumed_rows else ""
    console.print(f"{report.rows:,} rows in {report.seconds:.1f} s{speed}{resumed}")
    table = Table("", "rows", "positives", "log loss", "NE", "AUC", "calibration", box=None)
    for title, found in (("all", report.overall), *report.slices.items()):
        for name, q in zip(report.candidates, found, strict=True):
            figures = ("-" if x is None else f"{x:.6f}" for x in (q.log_loss, q.ne, q.auc, q.calibration))
            table.add_row(f"{title}  {name}", f"{q.rows:,}", f"{q.positives:,}", *figures)
    console.print(table)
    if report.ne_increase is not None:
        console.print(f"NE of {report.candidates[0]} against {report.candidates[1]}: {report.ne_increase:+.6f}")
    if report.passed is not None:
        reason = "NE is not defined here: labels of one kind alone"
        if report.ne_increase is not None:
            reason = "the increase of NE is larger than --max-ne-increase allows"
        console.print("passed" if report.passed else f"FAILED: {reason}")


def _parse_dense(text: str) -> tuple[str, list[list[float]]]:
    name, equals, rows = text.partition("=")
    try:
        parsed = [[float(x) for x in row.split(",") if x.strip()] for row in rows.split(";")]
    except ValueError:
        parsed = []
    if not (name and equals and parsed and len({len(row) for row in parsed}) == 1):
        raise ServingError(f"{text!r}: expected NAME=ROWS such as context=0.5,1;0.25,2, every row as long")
    return name, parsed


def _parse_feature(text: str) -> tuple[str, wire.Jagged]:
    name, equals, ids = text.partition("=")
    try:
        bags = [[int(i) for i in bag.split(",") if i.strip()] for bag in ids.split(";")]
    except ValueError:
        bags = []
    if not (name and equals and bags):
        raise ServingError(f"{text!r}: expected FEATURE=IDS such as clicked=1,2,3;7")
    return name, wire.Jagged([i for bag in bags for i in bag], [len(bag) for bag in bags])


def bench(options: argparse.Namespace) -> int:
    """Loads a server; prints throughput and latencies."""
    with Client(options.url) as client:
        described = next((m for m in client.models() if m["name"] == options.model), None)
        if described is None:
            raise ServingError(f"model {options.model!r} is not served at {options.url}")
        requests = load_generator.make_requests(described, options.url, options.batch, options.ids, options.zipf)
    load = load_generator.run(f"{options.url}/v2", requests, concurrency=options.concurrency, seconds=options.seconds)
    ids = options.batch * options.ids * len(described["features"])
    table = Table("requests/s", "ids/s", "p50 ms", "p99 ms", "p99.9 ms", "failed", box=None)
    latencies = (f"{load.percentile_ms(p):.2f}" for p in (50, 99, 99.9))
    table.add_row(f"{load.requests_per_s:,.0f}", f"{load.requests_per_s * ids:,.0f}", *latencies, str(load.failed))
    console.print(
        f"{options.model}: {len(described['features'])} features x batch {options.batch} x {options.ids} ids, "
        f"{options.concurrency} connections, {load.seconds:.1f} s"
    )
    console.print(table)
    return 1 if load.failed else 0
