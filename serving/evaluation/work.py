"""One process of an evaluation: attaches the versions once, then scores shards. On a GPU, threads decode
ahead."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

import pyarrow as pa

from tableside.loader.errors import VersionError
from tableside.loader.load.load import load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import read_model
from tableside.loader.versions.states import State, attach_state
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.errors import ServingError
from tableside.serving.evaluation.batches import READING, BatchReader, ShardTable, Spent, on_host, scored
from tableside.serving.evaluation.data import DataError, Shard
from tableside.serving.evaluation.on_device import BatchesUnderWay, DeviceScoring, ShardsAhead
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.version import ServedVersion
from tableside.serving.settings import ServerSettings

AHEAD = 2  # groups of batches whose rows a cache brings before they are looked up
_MOST_READERS = 12  # threads; more decode no faster than one GPU scores
_AHEAD = (
    6  # shards that are ready, scored or written, beside those that threads decode: they are scored in order
)


@dataclass(frozen=True)
class Candidate:
    """An evaluated state. content: hash of its segment and deltas; source: its model.toml, if known.
    sequence: of the delta over the version; 0: none."""

    model: str
    version: int
    content: int = 0
    source: Path | None = None
    sequence: int = 0

    def __str__(self) -> str:
        return f"{self.model}@{State(self.version, self.sequence)}"


@dataclass(frozen=True)
class Job:
    """The description of an evaluation for its processes. columns: feature or dense tensor -> columns. stash:
    tables leave the GPU's memory while the dense part runs. needs_torch: a scorer runs by torch, whose import
    takes seconds."""

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
        named = [c for columns in self.columns.values() for c in columns]
        return tuple(dict.fromkeys([*named, self.label, *([self.slice_by] if self.slice_by else [])]))

    def part(self, shard: Shard) -> Path:
        """Returns the path of a shard's scores (serving/evaluation/parts.py)."""
        return self.parts / f"{shard.number:05}.parquet"


def attach_or_publish(job: Job, candidate: Candidate) -> tuple[Model, State]:
    """Attaches the candidate's state, or a version with its bytes; else publishes one from its model.toml,
    once per machine, not activated. LoaderError, ServingError: none can be made."""
    model = Model(job.root, candidate.model, job.settings.owner)
    if (state := _published(model, candidate)) is not None:
        return model, state
    with model.alone("eval.lock"):
        if (state := _published(model, candidate)) is not None:  # somebody else was first
            return model, state
        if candidate.source is None:
            here = f"is not published on this machine ({job.root})"
            raise ServingError(f"{candidate} {here}; name its model.toml with --source, to publish it here")
        loaded = load(read_model(candidate.source), job.root, LoadSettings(activate=False))
        if model.attach(loaded.version, "header").content() != candidate.content:
            model.remove(loaded.version)
            raise ServingError(
                f"{candidate.source} gives other bytes here than {candidate} has; is the checkpoint the same?"
            )
        return model, State(loaded.version)


def _published(model: Model, candidate: Candidate) -> State | None:
    """Returns the state with the candidate's bytes: its own, or the newest version without a delta."""
    published = model.versions()
    states = [State(version) for version in reversed(published)]
    for state in (State(candidate.version, candidate.sequence), *states):
        if state.version not in published:
            continue
        with contextlib.suppress(VersionError):  # such a delta is not kept here
            if attach_state(model, state, "header").content() == candidate.content:
                return state
    return None


class Evaluator:
    """The attached versions of a job. readers: threads that decode ahead; 0: none. LoaderError, QuantError,
    ServingError: a version cannot be attached."""

    def __init__(self, job: Job) -> None:
        self.job = job
        settings = job.settings
        # or Parquet takes the others' cores
        pa.set_cpu_count(max(1, len(os.sched_getaffinity(0)) // settings.workers))
        placer = Placer(settings, choose(settings.backend), stashable=job.stash, ahead=AHEAD)
        placer.open()
        self.served: list[ServedVersion] = []
        for candidate in job.candidates:
            model, state = attach_or_publish(job, candidate)
            self.served.append(Engine(model, settings, placer).attach(state))
            scorer = self.served[-1].scorer
            if scorer is None or scorer.width is not None:
                raise ServingError(f"{candidate} gives several scores a row; an evaluation needs one")
        self.readers = readers(settings) if placer.gpu is not None else 0
        self._device = None
        if (gpu := placer.gpu) is not None:
            self._device = DeviceScoring(gpu, self.served, job.stash, AHEAD if gpu.cache is not None else 0)
        self._reader = self._reads(
            job.batch_rows if self._device is None else self._device.batch_rows(job.batch_rows)
        )

    def _reads(self, batch_rows: int) -> BatchReader:
        job = self.job
        return BatchReader(
            self.served,
            job.columns,
            wanted=job.wanted,
            label=job.label,
            slice_by=job.slice_by,
            batch_rows=batch_rows,
            whole=self.readers > 0,
        )

    @property
    def spent(self) -> Spent | None:
        """Seconds of the scoring thread by stage; None on the CPU."""
        return None if self._device is None else self._device.spent

    def tables(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, pa.Table]]:
        """Each shard with its table, as `score` gives it. Readers decode those to come meanwhile."""
        if self._device is None:
            for shard in shards:
                yield shard, self.score(shard)
            return
        with ThreadPoolExecutor(self.readers, "tableside-read") as threads:
            coming, begun = (
                ShardsAhead(shards, threads, self._reader),
                BatchesUnderWay(self._device, self._name_fault),
            )
            while True:
                # Nothing waits for a shard that is not there while batches wait to be finished: it may come
                # after their tables.
                with self._device.spent.on(READING):
                    item = coming.get(wait=not begun)
                if item is None:
                    if not begun:
                        return
                    yield from begun.finish_one()
                    continue
                shard, batches = item
                yield from begun.begin(shard, batches, self._empty_table(shard))

    def score(self, shard: Shard) -> pa.Table:
        """Scores a shard; returns its table (see `ShardTable`). DataError: the data does not fit the
        model."""
        try:
            if self._device is not None:
                return self._on_device(self._device, shard, self._reader)
            table = self._empty_table(shard)
            for batch in self._reader.batches(shard):
                table.add(scored(batch, self.served, starmap(on_host, batch.requests)))
            return table.finished()
        except pa.ArrowException as error:
            raise DataError(
                f"{shard.file}, rows [{shard.start}, {shard.start + shard.rows}): {error}"
            ) from error

    def _on_device(self, device: DeviceScoring, shard: Shard, reader: BatchReader) -> pa.Table:
        begun = BatchesUnderWay(device, self._name_fault if reader is self._reader else lambda _: None)
        (found,) = [*begun.begin(shard, reader.batches(shard), self._empty_table(shard)), *begun.finish()]
        return found[1]

    def _name_fault(self, shard: Shard) -> None:
        """Scores a faulty shard again, by batches of the asked size. DataError: names the faulty row."""
        assert self._device is not None
        self._on_device(self._device, shard, self._reads(self.job.batch_rows))

    def _empty_table(self, shard: Shard) -> ShardTable:
        return ShardTable(shard, len(self.served), self.job.slice_by is not None)


def readers(settings: ServerSettings) -> int:
    """Returns the decoding threads of one GPU: a share of the host's cores, less one for the GPU."""
    return max(1, min(_MOST_READERS, len(os.sched_getaffinity(0)) // settings.workers - 1))


def shards_at_once(settings: ServerSettings) -> int:
    """Shards that a process of the pool has taken at a time."""
    return readers(settings) + _AHEAD if settings.devices else 1
