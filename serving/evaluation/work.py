"""What one process of an evaluation does: attach the versions once, then score shard after shard."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tableside.loader.load import LoadSettings, load
from tableside.loader.model import read_model
from tableside.loader.versions import Model
from tableside.quant import choose
from tableside.quant.contract import Unfound
from tableside.serving.engine import Engine
from tableside.serving.errors import ApiError, ServingError
from tableside.serving.evaluation.data import DataError, Rows, Shard, floats_of, ids_of, labels_of, read, texts_of
from tableside.serving.placement import Placer
from tableside.serving.places import DenseInput
from tableside.serving.request import FeatureInput, Request
from tableside.serving.settings import ServerSettings
from tableside.serving.version import ServedVersion

_Item = TypeVar("_Item")
WithoutRow = dict[str, dict[str, int]]  # table -> reason -> ids, as `tableside_ids_without_row_total` of a server counts them
WITHOUT_ROW = b"ids_without_row_total"  # what a shard's table says of them in its metadata: JSON, a WithoutRow a candidate


@dataclass(frozen=True)
class Candidate:
    """A version that is evaluated. content: of its segment, the same on every machine; source: its model.toml, where known."""

    model: str
    version: int
    content: int = 0
    source: Path | None = None

    def __str__(self) -> str:
        return f"{self.model}@{self.version}"


@dataclass(frozen=True)
class Job:
    """An evaluation: what every process has to know. columns: feature or dense tensor -> columns of the data. stash: tables leave
    the GPU's memory while the dense part runs. needs_torch: a scorer runs by torch, which takes seconds to import."""

    root: Path
    candidates: tuple[Candidate, ...]
    label: str
    columns: Mapping[str, tuple[str, ...]]
    slice_by: str | None
    batch_rows: int
    parts: Path
    settings: ServerSettings
    stash: bool = False
    needs_torch: bool = True

    @property
    def wanted(self) -> tuple[str, ...]:
        """The columns that are read."""
        named = [c for columns in self.columns.values() for c in columns]
        return tuple(dict.fromkeys([*named, self.label, *([self.slice_by] if self.slice_by else [])]))

    def part(self, shard: Shard) -> Path:
        """Where a shard's scores lie (serving/evaluation/parts.py)."""
        return self.parts / f"{shard.number:05}.parquet"


def attach_or_publish(job: Job, candidate: Candidate) -> tuple[Model, int]:
    """The candidate on this machine: the version of its number, or, where its bytes are not those, one that has them.

    One that is not there is published from its model.toml, once, whoever asks first; it is not activated. LoaderError,
    ServingError: it is not here, and cannot be made.
    """
    model = Model(job.root, candidate.model, job.settings.owner)
    if (version := _published(model, candidate)) is not None:
        return model, version
    with model.alone("eval.lock"):
        if (version := _published(model, candidate)) is not None:  # somebody else was first
            return model, version
        if candidate.source is None:
            here = f"is not published on this machine ({job.root})"
            raise ServingError(f"{candidate} {here}; name its model.toml with --source, to publish it here")
        loaded = load(read_model(candidate.source), job.root, LoadSettings(activate=False))
        if model.attach(loaded.version, "header").content() != candidate.content:
            model.remove(loaded.version)
            raise ServingError(f"{candidate.source} gives other bytes here than {candidate} has; is the checkpoint the same?")
        return model, loaded.version


def _published(model: Model, candidate: Candidate) -> int | None:
    """The published version that has the candidate's bytes: the one of its number, or the newest."""
    published = model.versions()
    for version in (candidate.version, *reversed(published)):
        if version in published and model.attach(version, "header").content() == candidate.content:
            return version
    return None


class Evaluator:
    """The versions of a job, attached by this process. LoaderError, QuantError, ServingError: one of them cannot be."""

    def __init__(self, job: Job) -> None:
        self.job = job
        settings, backend = job.settings, choose(job.settings.backend)
        pa.set_cpu_count(max(1, len(os.sched_getaffinity(0)) // settings.workers))  # or Parquet takes the others' cores
        placer = Placer(settings, backend, stashable=job.stash)
        placer.open()
        self._fused = placer.gpu if job.stash else None
        looks_ahead = placer.gpu is not None and not job.stash
        self._threads = [ThreadPoolExecutor(1, f"tableside-{what}") for what in ("read", "lookup")] if looks_ahead else []
        self.served: list[ServedVersion] = []
        for candidate in job.candidates:
            model, version = attach_or_publish(job, candidate)
            engine = Engine(
                model,
                backend,
                placer,
                threads=settings.threads,
                verify=settings.verify,
                max_response_bytes=settings.max_response_bytes,
            )
            self.served.append(engine.attach(version))
            scorer = self.served[-1].scorer
            if scorer is None or scorer.width is not None:
                raise ServingError(f"{candidate} gives several scores a row; an evaluation needs one")

    @contextmanager
    def _tables_away(self) -> Iterator[None]:
        """Gives the GPU's memory to the dense part, where that is wanted; tables come back while the next batch is read."""
        if self._fused is None:
            yield
            return
        self._fused.stash()
        yield
        self._fused.restore()

    def score(self, shard: Shard) -> pa.Table:
        """A shard's rows: row, label, score_0 (and score_1, slice); in its metadata ids without a row.

        DataError: the data does not fit the model.
        """
        try:
            return self._table(shard)
        except pa.ArrowException as error:
            raise DataError(f"{shard.file}, rows [{shard.start}, {shard.start + shard.rows}): {error}") from error

    def _table(self, shard: Shard) -> pa.Table:
        labels, slices, starts = [], [], []
        scores: list[list[NDArray[np.float32]]] = [[] for _ in self.served]
        without_row: list[WithoutRow] = [{} for _ in self.served]
        for rows, looked_up in self._looked_up(shard):
            labels.append(labels_of(rows, self.job.label))
            starts.append(np.arange(rows.start, rows.start + rows.size))
            if self.job.slice_by is not None:
                slices.append(texts_of(rows, self.job.slice_by))
            with self._tables_away():
                for served, batch, found in zip(self.served, looked_up, scores, strict=True):
                    found.append(self._score(served, rows, batch))
            for batch, counts in zip(looked_up, without_row, strict=True):
                batch.count(counts)
        columns: dict[str, Any] = {"row": np.concatenate(starts), "label": np.concatenate(labels)}
        columns |= {f"score_{n}": np.concatenate(found) for n, found in enumerate(scores)}
        if self.job.slice_by is not None:
            columns["slice"] = pa.chunked_array(slices, pa.string())
        if len(columns["row"]) != shard.rows:
            raise DataError(f"{shard.file}: {len(columns['row'])} rows were read where {shard.rows} were; it changed meanwhile")
        return pa.table(columns).replace_schema_metadata({WITHOUT_ROW: json.dumps(without_row)})

    def _looked_up(self, shard: Shard) -> Iterator[tuple[Rows, list["_LookedUp"]]]:
        """Batches of rows with their vectors; where a GPU looks up, those to come are read and looked up while one is scored."""
        read_rows = self._ahead(read(shard, self.job.wanted, self.job.batch_rows), 0)
        return self._ahead(((rows, [self._lookup(s, rows) for s in self.served]) for rows in read_rows), 1)

    def _ahead(self, items: Iterator[_Item], thread: int) -> Iterator[_Item]:
        """The items, the next of which is made on a thread of its own meanwhile, if there are threads."""
        if not self._threads:
            yield from items
            return
        coming = self._threads[thread].submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = self._threads[thread].submit(next, items, None)
            yield item

    def _lookup(self, served: ServedVersion, rows: Rows) -> "_LookedUp":
        scorer = served.scorer
        assert scorer is not None
        features, dense, at = [], [], 0
        parts: list[NDArray[Any]] = []
        for i in scorer.inputs:
            columns = self.job.columns[i.feature or i.name]
            if i.feature is None:
                values = floats_of(rows, columns, i.width)
                dense.append(DenseInput(i.name, at, rows.size, i.width))
                parts.append(values)
                at += values.nbytes
                continue
            ids, lengths = ids_of(rows, columns[0])
            parts.append(ids)
            if lengths is None:
                features.append(FeatureInput(i.feature, at, ids.size, rows.size, bag_length=1))
                at += ids.nbytes
                continue
            features.append(FeatureInput(i.feature, at, ids.size, rows.size, lengths_at=at + ids.nbytes))
            parts.append(lengths)
            at += ids.nbytes + lengths.nbytes
        try:
            request = served.lay_out(features, dense, score=True)
            inputs = b"".join(part.data for part in parts)
            return _LookedUp(request, inputs, *request.look_up(inputs))
        except ApiError as error:
            raise DataError(f"{rows.where(0)} and on, a batch of {rows.size}: {error.message}") from error

    def _score(self, served: ServedVersion, rows: Rows, found: "_LookedUp") -> NDArray[np.float32]:
        scoring = found.request.scoring
        assert scoring is not None
        try:
            scoring.run(found.inputs, found.buffer)
        except ApiError as error:
            raise DataError(f"{rows.where(0)} and on, a batch of {rows.size}: {error.message}") from error
        scores = scoring.output.view(found.buffer)
        if not np.isfinite(scores).all() or scores.min(initial=0) < 0 or scores.max(initial=0) > 1:
            raise DataError(
                f"{rows.where(0)} and on: scores of {served.header.model} lie in [{scores.min()}, {scores.max()}]; expected "
                "probabilities: end the scorer with a sigmoid"
            )
        return scores.copy()


@dataclass(frozen=True)
class _LookedUp:
    """Rows that are scored together, as one request: its inputs, its vectors, and what was not found."""

    request: Request
    inputs: bytes
    buffer: NDArray[np.uint8]
    unfound: Sequence[Unfound] | None

    def count(self, to: WithoutRow) -> None:
        """Adds what was not found, by the tables that were asked."""
        for table, unfound in zip(self.request.tables, self.unfound or (), strict=False):
            for reason, ids in unfound._asdict().items():
                if ids:
                    of_table = to.setdefault(table, {})
                    of_table[reason] = of_table.get(reason, 0) + ids
