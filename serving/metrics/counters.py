"""Counters and histograms over all processes of a server.

They count in its metrics files. `CountsCollector` shows the sums to prometheus_client.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tableside.serving.metrics import files as metrics_files

_lock = threading.Lock()


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


class Observations:
    """A histogram under its labels: the sum of all values, then how many each bucket has.

    One thread alone calls `add` and `add_all`, or any threads call `observe`.
    """

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
    """What counts by its labels. A process has a `Child` for each combination of labels that it counted."""

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
        """What Prometheus is shown. sums: of the doubles by labels."""
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


class CountsCollector(Collector):
    """Shows what all processes of a server counted, those that ended included."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        sums = metrics_files.sums(self._folder)
        return (metric.family(sums[metric.name]) for metric in LabelledMetric.declared if metric.name in sums)


RESTARTS = Counter(
    "tableside_worker_restarts_total",
    "Workers that ended by themselves, or were killed, and were replaced.",
    (),
)
