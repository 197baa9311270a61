"""Counters, histograms and workers' gauges over all processes of a server, in its metrics files.

Gauges stand at a file's beginning. A worker writes them twice a second and when asked; any worker sums them
over the running ones. Memory and files are read from /proc.
"""

import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from tableside.serving.metrics import files as metrics_files

_lock = threading.Lock()
_MEMORY = {"RssAnon": "private", "RssFile": "file", "RssShmem": "shared"}


class Count:
    """A counter under its labels. One thread alone calls `add`, or any threads call `inc`."""

    __slots__ = ("_values",)

    def __init__(self, values: "memoryview[float]") -> None:
        self._values = values

    def add(self, amount: float) -> None:
        self._values[0] += amount

    def inc(self, amount: float = 1) -> None:
        with _lock:
            self._values[0] += amount


def add_all(counts: Iterable[tuple[Count, float]]) -> None:
    """Adds to several counters; any threads call it."""
    with _lock:
        for count, amount in counts:
            count.add(amount)


class Observations:
    """A histogram's sum, then its bucket counts. One thread calls `add` and `add_all`, or any call
    `observe`."""

    __slots__ = ("_bounds", "_values")

    def __init__(self, values: "memoryview[float]", bounds: Sequence[float]) -> None:
        self._values, self._bounds = values, bounds

    def add(self, value: float) -> None:
        values = self._values
        values[0] += value
        values[1 + bisect_left(self._bounds, value)] += 1

    def add_all(self, values: Sequence[float]) -> None:
        counts, bounds = self._values, self._bounds
        counts[0] += sum(values)
        for value in values:
            counts[1 + bisect_left(bounds, value)] += 1

    def observe(self, value: float) -> None:
        with _lock:
            self.add(value)


Child = TypeVar("Child", Count, Observations)


class LabelledMetric(Generic[Child]):
    """A metric with labels; a process has a `Child` per combination that it counted."""

    declared: ClassVar[list[Any]] = []

    def __init__(self, name: str, text: str, labels: Sequence[str]) -> None:
        self.name, self._text, self._labels = name, text, labels
        self._children: dict[tuple[str, ...], Child] = {}
        LabelledMetric.declared.append(self)

    def labels(self, *labels: str) -> Child:
        """Any thread may call."""
        if (found := self._children.get(labels)) is None:
            assert len(labels) == len(self._labels), self.name
            found = self._children[labels] = self._child(labels)
        return found

    def _child(self, labels: Sequence[str]) -> Child:
        raise NotImplementedError

    def family(self, sums: Mapping[tuple[str, ...], Sequence[float]]) -> Metric:
        """Makes Prometheus's family. sums: of the doubles by labels."""
        raise NotImplementedError


class Counter(LabelledMetric[Count]):
    """A number that goes up. name: with _total at its end."""

    def _child(self, labels: Sequence[str]) -> Count:
        return Count(metrics_files.doubles(self.name, labels, 1))

    def family(self, sums: Mapping[tuple[str, ...], Sequence[float]]) -> Metric:
        found = CounterMetricFamily(self.name, self._text, labels=self._labels)
        for labels, (value,) in sums.items():
            found.add_metric(labels, value)
        return found


class Histogram(LabelledMetric[Observations]):
    """How many values are at most each of some bounds, and their sum."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        super().__init__(name, text, labels)
        self._bounds = bounds

    def _child(self, labels: Sequence[str]) -> Observations:
        return Observations(metrics_files.doubles(self.name, labels, len(self._bounds) + 2), self._bounds)

    def family(self, sums: Mapping[tuple[str, ...], Sequence[float]]) -> Metric:
        found = HistogramMetricFamily(self.name, self._text, labels=self._labels)
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for labels, (total, *buckets) in sums.items():
            found.add_metric(labels, list(zip(bounds, accumulate(buckets), strict=True)), total)
        return found


def counted(folder: Path) -> Iterator[Metric]:
    """Returns the counts of all processes of a server, ended ones too."""
    sums = metrics_files.sums(folder)
    return (metric.family(sums[metric.name]) for metric in LabelledMetric.declared if metric.name in sums)


RESTARTS = Counter(
    "tableside_worker_restarts_total",
    "Workers that ended by themselves, or were killed, and were replaced.",
    (),
)


@dataclass(frozen=True)
class Now:
    """A worker's gauges. is_ready: 1 or 0. held_bytes: of bodies and responses."""

    is_ready: float
    in_flight_requests: float
    waiting_requests: float
    open_connections: float
    held_bytes: float
    max_connections: float


@dataclass(frozen=True)
class WorkerNow:
    """A running worker. memory_bytes: by kind: private, file (its code), shared (touched tables)."""

    now: Now
    memory_bytes: dict[str, int]
    open_files: int


def tell(now: Now) -> None:
    """Writes this worker's gauges."""
    metrics_files.set_head((1, os.getpid(), *astuple(now)))


def workers(folder: Path) -> Iterator[WorkerNow]:
    for is_worker, pid, *now in metrics_files.heads(folder):
        if is_worker:
            process = Path(f"/proc/{pid:.0f}")
            try:
                memory = dict(_memory((process / "status").read_text()))
                yield WorkerNow(Now(*now), memory, len(os.listdir(process / "fd")))
            except OSError:
                continue  # it ended


def _memory(status: str) -> Iterator[tuple[str, int]]:
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in _MEMORY:
            yield _MEMORY[name], int(value.split()[0]) << 10
