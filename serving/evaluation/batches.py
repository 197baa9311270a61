"""Batches of a shard's rows as requests of every candidate, the table of a shard's scores, and time by stage.
A batch can be laid out on another thread than the one that scores it."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tableside.quant.contract import Unfound
from tableside.quant.errors import BadIds, Problem
from tableside.serving.errors import ApiError
from tableside.serving.evaluation.data import (
    DataError,
    Rows,
    Shard,
    floats_of,
    ids_of,
    labels_of,
    read,
    texts_of,
)
from tableside.serving.model.places import DenseInput
from tableside.serving.model.request import Answer, FeatureInput, Request
from tableside.serving.model.version import ServedVersion

# table -> reason -> ids, as `tableside_ids_without_row_total` of a server counts them
WithoutRow = dict[str, dict[str, int]]
# what a shard's table says of them in its metadata: JSON, a WithoutRow a candidate
WITHOUT_ROW = b"ids_without_row_total"
READING = "reading"  # waiting for rows that are not decoded yet
STAGING = "staging"  # copying batches to page-locked memory, and having them sent
SCORING = "scoring"  # launching lookups and scorers, and waiting for scores
WRITING = "writing"  # waiting for the part before to be written


@dataclass(frozen=True)
class Batch:
    """Rows that are scored together. labels: fp32 [size]. slices: a text per row, or None. requests: one per
    candidate. features: ids and lengths, per candidate."""

    file: str
    start: int
    size: int
    labels: NDArray[np.float32]
    slices: Any
    requests: tuple[tuple[Request, Any], ...]
    features: tuple[Sequence[FeatureInput], ...]

    def error(self, candidate: int, refused: ApiError) -> DataError:
        """Describes a candidate's refused request; names the row of a bad id."""
        cause = refused.__cause__
        if not isinstance(cause, BadIds) or cause.problem not in (Problem.ID, Problem.MISSING):
            return DataError(
                f"{self.file}, row {self.start} and on, a batch of {self.size}: {refused.message}"
            )
        request, inputs = self.requests[candidate]
        i = next(i for i in self.features[candidate] if i.feature == request.feature(cause.job))
        row = cause.position
        if i.lengths_at is not None:
            row = int(
                np.searchsorted(
                    np.cumsum(np.frombuffer(inputs, np.int32, self.size, i.lengths_at)), row, side="right"
                )
            )
        return DataError(
            f"{self.file}, row {self.start + row}, of a batch from row {self.start} on: {refused.message}"
        )

    def check(self, scores: NDArray[np.float32], model: str) -> None:
        """DataError: scores are no probabilities."""
        if not np.isfinite(scores).all() or scores.min(initial=0) < 0 or scores.max(initial=0) > 1:
            raise DataError(
                f"{self.file}, row {self.start} and on: scores of {model} lie in [{scores.min()}, "
                f"{scores.max()}]; expected probabilities: end the scorer with a sigmoid"
            )


@dataclass(frozen=True)
class BatchScores:
    """A batch with its scores fp32 [size] and ids without a row, per candidate."""

    batch: Batch
    scores: Sequence[NDArray[np.float32]]
    unfound: Sequence[Sequence[Unfound] | None]


def scored(
    batch: Batch, served: Sequence[ServedVersion], answers: Iterator[Answer | Exception]
) -> BatchScores:
    """The scores in the next answers, one a candidate. DataError: one was refused, or gives no
    probabilities."""
    scores, unfound = [], []
    for n, (one, (request, _)) in enumerate(zip(served, batch.requests, strict=True)):
        answer = next(answers)
        if isinstance(answer, ApiError):
            raise batch.error(n, answer) from answer
        if isinstance(answer, Exception):
            raise answer
        assert request.scoring is not None
        scores.append(np.array(request.scoring.output.view(answer.buffer)))
        unfound.append(answer.unfound)
        batch.check(scores[-1], one.header.model)
    return BatchScores(batch, scores, unfound)


def on_host(request: Request, inputs: Any, answer: Answer | None = None) -> Answer | ApiError:
    """Scores a request here, looked up if it has no answer yet; returns a refusal."""
    assert request.scoring is not None
    try:
        answer = answer or request.look_up(inputs)
        request.scoring.run(inputs, answer.buffer)
    except ApiError as error:
        return error
    return answer


class BatchReader:
    """Reads shards as batches of `batch_rows` rows. Any thread may call. columns: feature or dense tensor ->
    columns. wanted: the columns to read. whole: the reading thread decodes a shard at once, else Arrow's
    threads do by batches."""

    def __init__(
        self,
        served: Sequence[ServedVersion],
        columns: Mapping[str, Sequence[str]],
        *,
        wanted: Sequence[str],
        label: str,
        slice_by: str | None,
        batch_rows: int,
        whole: bool,
    ) -> None:
        self._served, self._columns, self._wanted, self._label = served, columns, wanted, label
        self._slice_by, self._batch_rows, self._whole = slice_by, batch_rows, whole

    def batches(self, shard: Shard) -> Iterator[Batch]:
        """DataError: the data cannot be read, or does not fit the models."""
        for rows in read(shard, self._wanted, self._batch_rows, self._whole):
            labels = labels_of(rows, self._label)
            slices = None if self._slice_by is None else texts_of(rows, self._slice_by)
            requests = [self._request(served, rows) for served in self._served]
            laid_out, features = tuple(r[:2] for r in requests), tuple(r[2] for r in requests)
            yield Batch(rows.file, rows.start, rows.size, labels, slices, laid_out, features)

    def _request(self, served: ServedVersion, rows: Rows) -> tuple[Request, Any, Sequence[FeatureInput]]:
        """Returns a candidate's request, its inputs, and their features."""
        scorer = served.scorer
        assert scorer is not None
        features, dense, at = [], [], 0
        parts: list[NDArray[Any]] = []
        for i in scorer.inputs:
            columns = self._columns[i.feature or i.name]
            if i.feature is None:
                values = floats_of(rows, columns, i.width)
                dense.append(DenseInput(i.name, at, rows.size, i.width))
                parts.append(values)
                at += values.nbytes
                continue
            ids, lengths = ids_of(rows, columns[0], served.features[i.feature].strings)
            parts.append(ids)
            if lengths is None:
                features.append(FeatureInput(i.feature, at, ids.size, rows.size, bag_length=1))
                at += ids.nbytes
                continue
            features.append(FeatureInput(i.feature, at, ids.size, rows.size, lengths_at=at + ids.nbytes))
            parts.append(lengths)
            at += ids.nbytes + lengths.nbytes
        try:
            request = served.lay_out(features, dense, score=True, scores_alone=True)
        except ApiError as error:
            raise DataError(f"{rows.where(0)} and on, a batch of {rows.size}: {error.message}") from error
        # numpy copies without the interpreter's lock, so that other threads read meanwhile.
        return request, np.concatenate([part.reshape(-1).view(np.uint8) for part in parts]), features


class ShardTable:
    """A shard's table: row, label, score_0 (and score_1, slice); its metadata counts ids without a row."""

    def __init__(self, shard: Shard, candidates: int, has_slices: bool) -> None:
        self._shard, self._candidates, self._has_slices = shard, candidates, has_slices
        self._batches: list[BatchScores] = []
        self._without_row: list[WithoutRow] = [{} for _ in range(candidates)]

    def add(self, scored: BatchScores) -> None:
        """The shard's next rows."""
        self._batches.append(scored)
        for (request, _), unfound, counts in zip(
            scored.batch.requests, scored.unfound, self._without_row, strict=True
        ):
            _count(request, unfound, counts)

    def finished(self) -> pa.Table:
        """DataError: it has not the shard's rows."""
        batches = [scored.batch for scored in self._batches]
        columns: dict[str, Any] = {
            "row": np.concatenate([np.arange(b.start, b.start + b.size) for b in batches]),
            "label": np.concatenate([b.labels for b in batches]),
        }
        columns |= {
            f"score_{n}": np.concatenate([s.scores[n] for s in self._batches])
            for n in range(self._candidates)
        }
        if self._has_slices:
            columns["slice"] = pa.chunked_array([b.slices for b in batches], pa.string())
        if len(columns["row"]) != self._shard.rows:
            file, read_now, before = self._shard.file, len(columns["row"]), self._shard.rows
            raise DataError(f"{file}: {read_now} rows were read where {before} were; it changed meanwhile")
        return pa.table(columns).replace_schema_metadata({WITHOUT_ROW: json.dumps(self._without_row)})


def _count(request: Request, found: Sequence[Unfound] | None, to: WithoutRow) -> None:
    """Adds ids without a row, by table."""
    for table, unfound in zip(request.tables, found or (), strict=False):
        for reason, ids in unfound._asdict().items():
            if ids:
                of_table = to.setdefault(table, {})
                of_table[reason] = of_table.get(reason, 0) + ids


class Spent:
    """Seconds of one thread, summed by stage."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((READING, STAGING, SCORING, WRITING), 0.0)

    @contextmanager
    def on(self, stage: str) -> Iterator[None]:
        """Counts the block's seconds."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started
