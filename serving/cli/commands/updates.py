"""Commands that change rows of a published model: a file of changes, or a stream of them."""

import argparse
import contextlib
import logging
import logging.config
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tableside.loader.deltas.apply import ApplyResult, ApplySettings, position_of
from tableside.loader.deltas.apply import apply as apply_changes
from tableside.loader.deltas.change_files import read_changes, rows_in
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.hosts import passed_file
from tableside.loader.errors import ChangeError
from tableside.loader.load.settings import Progress
from tableside.loader.segment.header import Header
from tableside.loader.versions.versions import Model
from tableside.serving.cli.arguments import (
    AddCommand,
    add_json,
    add_keep_states,
    count,
    host_port,
    seconds,
    share,
)
from tableside.serving.cli.output import console, mb, print_json, progress_bar, published, table_of
from tableside.serving.cli.parser import Parser
from tableside.serving.errors import ServingError
from tableside.serving.follow.loop import BadChangeFile, Compactions, Step, open_source
from tableside.serving.follow.loop import follow as follow_source
from tableside.serving.follow.status import Status
from tableside.serving.logs import log_config

_TOLD_EVERY_S = 10.0
_log = logging.getLogger("tableside.follow")


def apply(options: argparse.Namespace) -> int:
    """Applies a file of changes, or says that its number was applied before."""
    model, began = published(options), time.monotonic()
    counted = _Meter()
    source, after = _place(model, options)
    if options.number is not None and after is not None and options.number <= int(after):
        return _say_done(options, after)
    path: Path = options.file
    header = _header(model)
    with progress_bar(model.name) as progress:
        changes = counted.passed(
            read_changes(path, options.table or _only_table(header)), rows_in(path), progress
        )
        position = None if options.number is None else str(options.number)
        made_at = path.stat().st_mtime if path.exists() else None
        passed = [passed_file(position, path)] if position and header.is_over_hosts and path.exists() else ()
        batch = ChangeBatch(changes, source, position, after, made_at, passed)
        settings = ApplySettings(options.threads, keep=options.keep_states)
        try:
            applied = apply_changes(model, batch, settings)
        except ChangeError as error:
            raise error if str(path) in str(error) else ServingError(f"{path}: {error}") from error
    _say_applied(options, applied, counted, time.monotonic() - began)
    return 0


def _place(model: Model, options: argparse.Namespace) -> tuple[str | None, str | None]:
    """Returns (source, last applied number) of a numbered file. ServingError: it is not the next one."""
    if options.number is None:
        if options.source or options.first:
            raise ServingError(
                "--source and --first are for files with a number; give --number, or leave them out"
            )
        return None, None
    source = options.source or "apply"
    kept = position_of(model, source)
    if kept is not None and not kept.isdecimal():
        raise ServingError(
            f"what was applied from {source!r} ends at {kept!r}, which is no number; choose another --source"
        )
    after = int(kept or 0)
    if options.number > after + 1 and not (options.first and kept is None):
        what = f"number {after} was applied last" if kept else "nothing was applied yet"
        remedy = "apply what lies between first" + (
            "" if kept else ", or give --first where it is meant to be the first one"
        )
        raise ServingError(
            f"--number {options.number} from {source!r}: {what}, so expected {after + 1}; {remedy}"
        )
    return source, kept


def _only_table(header: Header) -> str | None:
    """Returns the name of a model's only table, or None: an owner does not know of all tables."""
    if header.owner is not None:
        return None
    tables = [*(t.name for t in header.tables), *(t.name for t in header.remote)]
    return tables[0] if len(tables) == 1 else None


def _header(model: Model) -> Header:
    return model.attach(verify="header").header


class _Meter:
    """Changes on their way: rows and deletions of each table."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.deleted: dict[str, int] = {}

    def passed(
        self, changes: Iterator[TableChanges], total: int | None, progress: Progress | None
    ) -> Iterator[TableChanges]:
        """Passes the changes through and reports progress, if the total is known."""
        for c in changes:
            yield c
            self.rows[c.table] = self.rows.get(c.table, 0) + c.rows
            gone = 0 if c.deleted is None else int(c.deleted.sum())
            self.deleted[c.table] = self.deleted.get(c.table, 0) + gone
            if progress and total:
                progress(sum(self.rows.values()), total)

    def tables(self) -> list[dict[str, Any]]:
        return [{"name": t, "rows": n, "deleted": self.deleted[t]} for t, n in self.rows.items()]


def _say_done(options: argparse.Namespace, after: str) -> int:
    if options.json:
        number = options.number
        print_json({"model": options.model, "applied": False, "number": number, "last_number": int(after)})
    else:
        console.print(
            f"number {options.number} was applied before, as the last one is {after}; nothing was done",
            markup=False,
        )
    return 0


def _say_applied(options: argparse.Namespace, applied: ApplyResult, counted: _Meter, seconds: float) -> None:
    if options.json:
        version = applied.state.version
        found = {"model": options.model, "applied": True, "number": options.number, "version": version}
        more = {
            "sequence": applied.state.sequence,
            "delta_bytes": applied.delta_bytes,
            "seconds": round(seconds, 3),
        }
        print_json({**found, **more, "tables": counted.tables()})
        return
    rows_of = ((t["name"], f"{t['rows']:,}", f"{t['deleted']:,}") for t in counted.tables())
    console.print(table_of(("table", "changes", "deletions"), rows_of))
    rows = sum(counted.rows.values())
    console.print(
        f"{options.model} {applied.state}: {rows:,} changes in {seconds:.2f} s, {rows / seconds:,.0f} "
        f"rows/s; all changes of version {applied.state.version} take {mb(applied.delta_bytes)}",
        markup=False,
    )


class _BatchReport:
    """Reports batches: a JSON line each, or a log line now and then."""

    def __init__(self, model: str, as_json: bool) -> None:
        self._model, self._json = model, as_json
        self._since, self._rows, self._batches, self._lag_s = time.monotonic(), 0, 0, 0.0
        self._last: Step | None = None
        self.skipped: BadChangeFile | None = None  # counts what was left out

    def __call__(self, step: Step) -> None:
        self._rows, self._batches, self._last = self._rows + step.applied.rows, self._batches + 1, step
        self._lag_s = max(self._lag_s, step.lag_s or 0.0)
        if self._json:
            done = {
                "version": step.applied.state.version,
                "sequence": step.applied.state.sequence,
                "rows": step.applied.rows,
            }
            done |= {} if self.skipped is None else {"skipped": self.skipped.count}
            lags = {"lag_s": step.lag_s, "read_s": step.read_s, "apply_s": step.apply_s}
            print_json({**done, "position": step.position, **lags})
        elif time.monotonic() - self._since >= _TOLD_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Logs what was applied since the last line."""
        seconds, step = time.monotonic() - self._since, self._last
        if step is not None and not self._json:
            where = f"{self._model} {step.applied.state}"
            rows, rate = f"{self._rows:,}", f"{self._rows / seconds:,.0f}"
            _log.info(
                "%s: %s rows in %d batches, %s rows/s, up to %s; at most %.1f s from made to visible",
                *(where, rows, self._batches, rate, step.position, self._lag_s),
            )
        self._since, self._rows, self._batches, self._lag_s, self._last = time.monotonic(), 0, 0, 0.0, None


def follow(options: argparse.Namespace) -> int:
    """Applies a stream until a signal ends it; the batch under way is finished."""
    logging.config.dictConfig(log_config("text"))
    os.nice(options.nice)
    model, came = published(options), list[int]()
    header = _header(model)
    if header.is_over_hosts and options.skip_bad is not None:
        raise ServingError(
            f"model {model.name!r} lies on several hosts, and a change that one of them refuses may be taken "
            "by another; leave out --skip-bad"
        )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda sig, _: came.append(sig))

    status: Status | None = None

    def stop() -> bool:
        if status is not None:
            status.alive(0 if told.skipped is None else told.skipped.count)
        return bool(came)

    source = open_source(
        options.source, options.name, options.table or _only_table(header), options.start, stop,
        options.every_s if header.is_over_hosts else 0.0, header.string_tables,
    )  # fmt: skip
    told = _BatchReport(model.name, options.json)
    compactions = Compactions(model, options.compact_at, options.keep_states.age_s)

    def applied(step: Step) -> None:
        told(step)
        if status is not None:
            status.applied(step)
        compactions.look(step.applied)

    kept = position_of(model, source.name)
    settings = ApplySettings(options.threads, keep=options.keep_states)
    begin = f"behind {kept}" if kept and not options.reset else f"from {options.start}"
    _log.info("%s follows %s, %s", model.name, source.name, begin)
    with contextlib.ExitStack() as ended:
        ended.callback(compactions.finish)
        ended.callback(source.close)
        ended.callback(told.flush)
        skip = (
            ended.enter_context(BadChangeFile(source, options.skip_bad))
            if options.skip_bad is not None
            else None
        )
        told.skipped = skip
        if options.metrics is not None:
            status = Status(model.name, source.name, *options.metrics)
            ended.callback(status.close)
            _log.info("%s: /metrics and /health on port %d", model.name, status.port)
        follow_source(
            model, source, options.rows, options.every_s, stop, applied,
            settings=settings, reset=options.reset, skip=skip,
        )  # fmt: skip
    _log.info("%s no longer follows %s", model.name, source.name)
    return 0


def add_commands(command: AddCommand) -> None:
    p = command("apply", apply, "insert, overwrite and delete rows of the live version")
    p.sections["examples"] = (
        "  tableside apply ads changes.npz               # the rows that the file names",
        "  tableside apply ads 7.parquet --number 7      # once, however often it is sent",
        "  tableside apply ads new.jsonl --table user    # rows that name no table",
    )
    p.option("model")
    p.option(
        "file", "a .parquet, .npz or .jsonl file with tables, ids and vectors (docs/updates.md)", type=Path
    )
    _add_changes(p)
    add_json(p)
    with p.group("numbered files"):
        p.option(
            "--number", "the sender's count: an applied one does nothing, a gap is an error", type=count(1)
        )
        p.option("--source", "the sender, where several count for themselves (default: apply)")
        p.option("--first", "the count begins with --number, and not with 1", action="store_true")

    p = command("follow", follow, "apply a stream of changes, until SIGTERM or SIGINT")
    p.sections["examples"] = (
        "  tableside follow ads changes/                 # files 1.npz, 2.npz ...",
        "  tableside follow ads 'redis://HOST:6379/0?stream=rows' --metrics 9100",
        "  tableside follow ads kafka://HOST/rows --compact-at 0.1   # tidies up, too",
    )
    p.option("model")
    p.option(
        "source",
        "a folder of files NUMBER.parquet, .npz or .jsonl, redis://HOST:6379/0?stream=KEY, or kafka://HOST/TOPIC",
    )
    _add_changes(p)
    told = (
        "seconds until changes are visible, if applying takes less than half of that (default: %(default)s)"
    )
    p.option("--every-s", told, type=seconds, default=1.0)
    p.option("--rows", "rows after which a batch ends, about", type=count(1), default=1000000)
    p.option(
        "--from",
        "where to begin without a kept position: start, end, or a position",
        dest="start",
        default="start",
        metavar="POSITION",
    )
    p.option(
        "--compact-at",
        "compact beyond this share of the version's bytes; 0: never (default: 0)",
        type=share,
        default=0.0,
        metavar="SHARE",
    )
    told = "answer /metrics and /health here (127.0.0.1 if no host is named); 0: any free port"
    p.option("--metrics", told, type=host_port, metavar="[HOST:]PORT")
    add_json(p)
    with p.group("what it does less often"):
        told = "niceness, 0 to 19: above 0 servers' lookups come first (default: %(default)s)"
        p.option("--nice", told, type=int, choices=range(20), default=10, metavar="N")
        told = "write refused changes to this file, a line of JSON each, and go on (default: end)"
        p.option("--skip-bad", told, type=Path, metavar="FILE")
        p.option("--reset", "begin at --from, whatever was applied", action="store_true")
        p.option("--name", "the stream's name in the state (default: folder:PATH, redis:KEY or kafka:TOPIC)")


def _add_changes(p: Parser) -> None:
    p.option("--table", "the table of all rows (default: the model's only one, or each row's)")
    p.option("--threads", "threads that quantize; 0: one a core (default: 0)", type=count(0), default=0)
    add_keep_states(p)
