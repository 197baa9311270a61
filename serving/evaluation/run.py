"""Runs an evaluation: plans shards, scores them by a pool, checks all parts, compares and reports.

OUT/plan.json            the evaluation's inputs; with the same plan a stopped one continues
OUT/parts/00000.parquet  the scores of one shard (serving/evaluation/parts.py)
OUT/report.json          the figures
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.loader.files import take_lock
from tableside.loader.segment.header import Header
from tableside.loader.versions.states import State, attach_state
from tableside.loader.versions.versions import Model
from tableside.quant.gpu.residence.registry import COPIED
from tableside.quant.installed import require
from tableside.serving.errors import ServingError
from tableside.serving.evaluation.batches import Spent, WithoutRow
from tableside.serving.evaluation.data import Shard, data_files, plan_shards
from tableside.serving.evaluation.parts import find_part, remove_partials, without_row
from tableside.serving.evaluation.pool import EvaluationPool
from tableside.serving.evaluation.quality import Quality, quality
from tableside.serving.evaluation.records import LOADED_FILE, DamagedRecord, read_record, write_record
from tableside.serving.evaluation.work import Candidate, Job
from tableside.serving.model.scorers import needs_torch
from tableside.serving.settings import ServerSettings

Progress = Callable[[int, int], None]  # (rows done, rows in all)
_TRIES = 3  # to read parts back as they were written


@dataclass(frozen=True)
class EvalSettings:
    """Options of `tableside eval`. shard_rows: approximate; batch_rows: rows scored at once. engine: local,
    or ray at ray_address (None: a new cluster). stash: tables leave the GPU's memory while the dense part
    runs."""

    data: Path
    out: Path
    workers: int = 1
    label: str | None = None
    slice_by: str | None = None
    shard_rows: int = 65_536
    batch_rows: int = 4096
    max_ne_increase: float | None = None
    engine: str = "local"
    ray_address: str | None = None
    stash: bool = False


@dataclass(frozen=True)
class Report:
    """The figures of an evaluation. overall, slices, ids_without_row_total: per candidate. rows_per_s: of
    this run. stage_seconds: summed over GPU processes (`evaluation.batches`); zeros on the CPU."""

    candidates: tuple[str, ...]
    rows: int
    resumed_rows: int
    seconds: float
    overall: tuple[Quality, ...]
    slices: Mapping[str, tuple[Quality, ...]]
    ids_without_row_total: tuple[WithoutRow, ...]
    ne_increase: float | None
    passed: bool | None
    max_ne_increase: float | None = None
    stage_seconds: Mapping[str, float] = field(default_factory=lambda: Spent().seconds)

    def figures(self) -> dict[str, Any]:
        """Returns the content of OUT/report.json (docs/scoring.md)."""
        return {**asdict(self), "rows_per_s": self.rows_per_s}

    @property
    def rows_per_s(self) -> float:
        return (self.rows - self.resumed_rows) / self.seconds if self.seconds else 0.0


def evaluate(
    candidates: Sequence[Candidate],
    settings: EvalSettings,
    server: ServerSettings,
    progress: Progress | None = None,
) -> Report:
    """Scores a data set with one or two candidates; writes the report. LoaderError, QuantError, ServingError:
    a version, the data or OUT is invalid; finished parts stay in OUT."""
    if settings.stash and (not server.devices or server.placement != COPIED):
        raise ServingError(
            "--stash gives back what tables take of a GPU's memory; name one with --devices, and --placement "
            f"{COPIED}"
        )
    segments = [
        attach_state(Model(server.root, c.model, server.owner), State(c.version, c.sequence), "header")
        for c in candidates
    ]
    candidates = [replace(c, content=s.content()) for c, s in zip(candidates, segments, strict=True)]
    headers = [s.header for s in segments]
    by_torch = any(needs_torch(s, "cuda" if server.devices else "cpu") for s in segments)
    data, out = settings.data.resolve(), settings.out.resolve()
    if data.is_relative_to(out):
        raise ServingError(f"{settings.out} holds the data; choose another --out")
    settings = replace(settings, data=data, out=out)
    job = replace(_job(candidates, headers, settings, server), needs_torch=by_torch)
    if by_torch:
        require("a scorer that is an exported program", "torch", extra="torch")
    if server.devices:
        require("--devices", "torch", "triton", extra="gpu")
    shards = plan_shards(data_files(settings.data, settings.out), settings.shard_rows)
    if not shards:
        raise ServingError(f"{settings.data} has no rows")
    with _own(settings.out):
        _open_out(settings, job, headers, shards)
        return _evaluate(job, settings, shards, progress)


def _evaluate(job: Job, settings: EvalSettings, shards: Sequence[Shard], progress: Progress | None) -> Report:
    left = [s for s in shards if find_part(job, s) is None]
    total = sum(s.rows for s in shards)
    resumed = done = total - sum(s.rows for s in left)

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        if progress:
            progress(done, total)

    advance(0)
    seconds, stages = 0.0, Spent().seconds
    for _ in range(_TRIES):
        started = time.monotonic()
        for stage, spent in _score(job, settings, left, advance).items():
            stages[stage] += spent
        seconds += time.monotonic() - started
        columns, counts, left = _columns(job, shards)
        if not left:
            return _report(job, settings, columns, counts, resumed, seconds, stages)
        advance(-sum(s.rows for s in left))
    raise ServingError(
        f"{job.part(left[0])} was not read as it had been written, {_TRIES} times over; check the disk, or "
        "choose another --out"
    )


def _score(
    job: Job, settings: EvalSettings, shards: Sequence[Shard], advance: Callable[[int], None]
) -> dict[str, float]:
    """Scores shards and removes unfinished files; returns seconds by stage on GPUs, if known."""
    try:
        if settings.engine == "ray":
            from tableside.serving.evaluation.on_ray import RayPool

            RayPool(job, settings.workers, advance, settings.ray_address).run(shards)
            return {}
        pool = EvaluationPool(job, settings.workers, advance)
        pool.run(shards)
        return pool.spent
    finally:
        remove_partials(job.parts)


def _columns(
    job: Job, shards: Sequence[Shard]
) -> tuple[dict[str, NDArray[Any]], list[WithoutRow], list[Shard]]:
    """Returns the columns of all parts, ids without a row, and the shards whose part is damaged or gone."""
    found: dict[str, list[NDArray[Any]]] = {}
    counts: list[WithoutRow] = [{} for _ in job.candidates]
    left = []
    for shard in shards:
        part = find_part(job, shard)
        if part is None:
            left.append(shard)
            continue
        for total, of_part in zip(counts, without_row(part, len(counts)), strict=True):
            for table, reasons in of_part.items():
                to = total.setdefault(table, {})
                to.update({reason: to.get(reason, 0) + ids for reason, ids in reasons.items()})
        for name in part.column_names:
            values = part.column(name)
            found.setdefault(name, []).append(
                values.to_numpy() if name != "slice" else np.array(values.to_pylist(), object)
            )
    return {name: np.concatenate(parts) for name, parts in found.items()}, counts, left


def check_out(out: Path) -> None:
    """ServingError: it is a folder of something else."""
    names = {p.name for p in out.iterdir()} if out.is_dir() else set()
    if names and not names & {"plan.json", "lock", LOADED_FILE}:
        raise ServingError(f"{out} is not empty and holds no evaluation; choose another --out")


@contextmanager
def _own(out: Path) -> Iterator[None]:
    """Locks OUT; the kernel unlocks it when the holder ends. ServingError: it is locked, or another kind of
    folder."""
    check_out(out)
    out.mkdir(parents=True, exist_ok=True)
    fd = os.open(out / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not take_lock(fd):
            what = f"{out} is being written by another evaluation"
            raise ServingError(f"{what}; wait for it, or choose another --out")
        yield
    finally:
        os.close(fd)


def _job(
    candidates: Sequence[Candidate], headers: Sequence[Header], settings: EvalSettings, server: ServerSettings
) -> Job:
    for header in headers:
        if header.scorer is None:
            raise ServingError(
                f"{header.model} version {header.version} has no scorer; publish it with [scorer] in "
                "model.toml"
            )
    spec = headers[0].evaluation
    label = settings.label or (spec.label if spec else None)
    if not label:
        raise ServingError("no label is named; say --label COLUMN, or label in [eval] of model.toml")
    columns: dict[str, tuple[str, ...]] = {}
    for header in headers:
        named = dict(header.evaluation.columns) if header.evaluation else {}
        for i in header.scorer.inputs if header.scorer else ():
            name = i.feature or i.name
            found = named.get(name, (name,))
            if columns.setdefault(name, found) != found:
                raise ServingError(
                    f"{name} is read from {', '.join(columns[name])} for {headers[0].model} and from "
                    f"{', '.join(found)} for {header.model}; let [eval.columns] of both say the same"
                )
            if i.feature is not None and len(found) != 1:
                raise ServingError(
                    f"feature {name} is read from one column; [eval.columns] names {', '.join(found)}"
                )
    parts = settings.out / "parts"
    by, batch, stash = settings.slice_by, settings.batch_rows, settings.stash
    return Job(server.root, tuple(candidates), label, columns, by, batch, parts, server, stash)


def _open_out(settings: EvalSettings, job: Job, headers: Sequence[Header], shards: Sequence[Shard]) -> None:
    """Makes OUT, or checks its plan; ServingError: it has another plan."""
    files = sorted({s.file for s in shards})
    stats = {f: [Path(f).stat().st_size, Path(f).stat().st_mtime_ns] for f in files}
    plan = {
        "candidates": [
            [h.model, c.sequence, h.version, h.created] for c, h in zip(job.candidates, headers, strict=True)
        ],
        "label": job.label,
        "columns": {k: list(v) for k, v in job.columns.items()},
        "slice": job.slice_by,
        "files": stats,
        "shards": [asdict(s) for s in shards],
        "scorer_dtype": job.settings.scorer_dtype,
    }
    path = settings.out / "plan.json"
    try:
        found = read_record(path)
    except FileNotFoundError:
        write_record(path, plan)
    except DamagedRecord as error:
        raise ServingError(f"{error}; remove {settings.out}, or choose another --out") from error
    else:
        found.setdefault("scorer_dtype", "fp32")  # of releases that had no other
        if different := ", ".join(k for k in plan if found.get(k) != plan[k]):
            raise ServingError(
                f"{settings.out} holds another evaluation (different: {different}); remove it, or choose "
                "another --out"
            )
    job.parts.mkdir(parents=True, exist_ok=True)
    remove_partials(job.parts)


def _report(
    job: Job,
    settings: EvalSettings,
    columns: Mapping[str, NDArray[Any]],
    counts: Sequence[WithoutRow],
    resumed: int,
    seconds: float,
    stages: Mapping[str, float],
) -> Report:
    labels, scores = columns["label"], [columns[f"score_{n}"] for n in range(len(job.candidates))]
    overall = tuple(quality(labels, s) for s in scores)
    slices = {}
    if job.slice_by is not None:
        values, of_row = np.unique(columns["slice"], return_inverse=True)
        order = np.argsort(of_row, kind="stable")
        for value, inside in zip(values, np.split(order, np.cumsum(np.bincount(of_row))[:-1]), strict=True):
            slices[str(value)] = tuple(quality(labels[inside], s[inside]) for s in scores)
    increase = passed = None
    if len(overall) == 2 and overall[0].ne is not None and overall[1].ne is not None:
        increase = overall[0].ne - overall[1].ne
    if settings.max_ne_increase is not None:
        # what is not defined does not pass
        passed = increase is not None and increase <= settings.max_ne_increase
    names = tuple(map(str, job.candidates))
    judged = (increase, passed, settings.max_ne_increase)
    report = Report(names, len(labels), resumed, seconds, overall, slices, tuple(counts), *judged, stages)
    write_record(settings.out / "report.json", report.figures())
    return report
