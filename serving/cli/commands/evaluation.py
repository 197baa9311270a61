"""`tableside eval`: scores a data set with one or two versions, and prints the quality of the scores."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tableside.loader.errors import VersionError
from tableside.loader.load.load import load as load_model
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import check_name, read_model
from tableside.loader.versions.states import State, parse_state, resolve
from tableside.loader.versions.versions import Model
from tableside.serving.cli.arguments import AddCommand, add_json, count, finite
from tableside.serving.cli.output import check_no_path, console, errors, print_json, progress_bar
from tableside.serving.errors import ServingError
from tableside.serving.settings import RootSettings, ServerSettings, add_options, given

if TYPE_CHECKING:  # the evaluation needs pyarrow, which the other commands do without
    from tableside.serving.evaluation.run import Report
    from tableside.serving.evaluation.work import Candidate


def evaluate(options: argparse.Namespace) -> int:
    """Scores a data set and prints the figures. Exit code 3: NE rose by more than --max-ne-increase."""
    from tableside.serving.evaluation.run import EvalSettings, check_out
    from tableside.serving.evaluation.run import evaluate as run

    shared = RootSettings(**given(options, RootSettings))
    root, owner = shared.root, shared.owner
    names = [options.model, *([options.against] if options.against else [])]
    if any(name.endswith(".toml") for name in names):
        check_out(options.out)  # before what is loaded is noted there
    say = errors if options.json else console
    candidates = [_candidate(name, root, owner, options.out, say) for name in names]
    for source in options.source or []:
        spec = read_model(source)
        candidates = [
            replace(c, source=source.resolve()) if c.model == spec.name and not c.source else c
            for c in candidates
        ]
    if options.max_ne_increase is not None and not options.against:
        raise ServingError("--max-ne-increase compares; say --against VERSION or MODEL@VERSION")
    own = {"root": root, "owner": owner, "disk_late": "error"}
    server = ServerSettings(**{**given(options, ServerSettings), **own})
    o = options
    settings = EvalSettings(
        o.data, o.out, server.workers, o.label, o.slice, o.shard_rows, o.batch, o.max_ne_increase,
        o.engine, o.ray_address, o.stash,
    )  # fmt: skip
    with progress_bar("evaluating") as progress:
        report = run(candidates, settings, server, progress)
    if options.json:
        print_json(report.figures())
    else:
        _print_report(report)
    return 3 if report.passed is False else 0


def _candidate(text: str, root: Path, owner: str | None, out: Path, say: Console) -> "Candidate":
    """Returns the version of MODEL, MODEL@VERSION or a model.toml, which is loaded once per `out`, not
    activated."""
    from tableside.serving.evaluation.records import remember, remembered
    from tableside.serving.evaluation.work import Candidate

    if text.endswith(".toml"):
        spec = read_model(Path(text))
        if (known := remembered(out, Path(text), spec, root)) is not None:
            say.print(f"{text} was loaded as {spec.name} version {known} when this evaluation began")
            return Candidate(spec.name, known, source=Path(text).resolve())
        with progress_bar(f"loading {spec.name}") as progress:
            loaded = load_model(spec, root, LoadSettings(activate=False), progress)
        remember(out, Path(text), spec, loaded.version)
        say.print(f"loaded {loaded.model} version {loaded.version}, not activated")
        return Candidate(loaded.model, loaded.version, source=Path(text).resolve())
    check_no_path(text)
    name, at, named = text.partition("@")
    model = Model(root, check_name(name), owner)
    try:
        state = resolve(model, *parse_state(named)) if at else State(model.current(), model.record().sequence)
    except VersionError as error:
        if model.versions():
            raise ServingError(
                f"{text!r}: expected MODEL, MODEL@VERSION, MODEL@VERSION+SEQUENCE or a model.toml"
            ) from error
        raise
    return Candidate(name, state.version, sequence=state.sequence)


def _print_report(report: "Report") -> None:
    speed = f", {report.rows_per_s:,.0f} rows/s" if report.rows > report.resumed_rows else ""
    resumed = f", {report.resumed_rows:,} of them by an earlier run" if report.resumed_rows else ""
    console.print(f"{report.rows:,} rows in {report.seconds:.1f} s{speed}{resumed}")
    if total := sum(report.stage_seconds.values()):
        console.print(
            "on GPUs: " + ", ".join(f"{stage} {s / total:.0%}" for stage, s in report.stage_seconds.items())
        )
    table = Table("", "rows", "positives", "log loss", "NE", "AUC", "calibration", box=None)
    for title, found in (("all", report.overall), *report.slices.items()):
        for name, q in zip(report.candidates, found, strict=True):
            figures = ("-" if x is None else f"{x:.6f}" for x in (q.log_loss, q.ne, q.auc, q.calibration))
            table.add_row(f"{title}  {name}", f"{q.rows:,}", f"{q.positives:,}", *figures)
    console.print(table)
    for name, tables in zip(report.candidates, report.ids_without_row_total, strict=True):
        for where, reasons in sorted(tables.items()):
            counts = ", ".join(f"{reason} {ids:,}" for reason, ids in reasons.items())
            console.print(f"{name}: ids_without_row_total of table {where}: {counts}")
    if report.ne_increase is not None:
        console.print(
            f"NE of {report.candidates[0]} against {report.candidates[1]}: {report.ne_increase:+.6f}"
        )
    if report.passed is not None:
        reason = "NE is not defined here: labels of one kind alone"
        if report.ne_increase is not None:
            reason = "the increase of NE is larger than --max-ne-increase allows"
        console.print("passed" if report.passed else f"FAILED: {reason}")


def add_commands(command: AddCommand) -> None:
    p = command("eval", evaluate, "score a data set, and say what the scores are worth")
    p.sections["examples"] = (
        "  tableside eval ads clicks.parquet --out runs/1 --workers 4",
        "  tableside eval ads@8 clicks/ --out runs/2 --against ads@7  # two versions",
        "  tableside eval model.toml clicks/ --out runs/3 --slice country --json",
    )
    p.option(
        "model", "MODEL (the live version), MODEL@VERSION, or a model.toml, loaded first", metavar="MODEL"
    )
    p.option("data", "a .parquet or .jsonl file, or a folder of them", type=Path)
    p.option(
        "--out", "folder of the scores and the report; a stopped run goes on there", type=Path, required=True
    )
    p.option("--against", "the same for another version, to compare with", metavar="MODEL")
    p.option("--max-ne-increase", "exit with 3 where NE is larger by more than this", type=finite)
    p.option("--label", "the label's column (default: that of [eval] in model.toml)")
    p.option("--slice", "figures for each value of a column, too", metavar="COLUMN")
    add_json(p)
    with p.group("parts of the data"):
        p.option("--batch", "rows scored at once", type=count(1), default=4096)
        p.option("--shard-rows", "rows of a shard, about", type=count(1), default=65536)
    with p.group("Ray"):
        p.option(
            "--engine", "processes here, or actors of a cluster", choices=("local", "ray"), default="local"
        )
        p.option("--ray-address", "the cluster (default: one of its own, on this machine)")
        p.option(
            "--source",
            "publishes the model where a machine has it not",
            type=Path,
            action="append",
            metavar="MODEL.TOML",
        )
    kept = ("workers", "backend", "threads", "verify", "devices", "placement", "hbm_budget", "scorer_dtype")
    left_out = tuple(n for n in ServerSettings.model_fields if n not in kept)
    add_options(p, ServerSettings, skip=left_out, title="processes and GPUs")
    p.option(
        "--stash",
        "give the GPU's memory to the dense part while it runs (placement hbm)",
        action="store_true",
    )
