"""Prometheus counts of stashed weights, for a training process: `REGISTRY.register(StashCollector())`."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tableside.quant.stash.registry import StashRegistry
from tableside.quant.stash.stash import registry

_COUNTERS = {
    "stashes": ("tableside_stash_stashes", "Stashes of weights begun."),
    "restores": ("tableside_stash_restores", "Restores of weights begun."),
    "bytes_out": ("tableside_stash_out_bytes", "Bytes of weights that left the device."),
    "bytes_back": ("tableside_stash_back_bytes", "Bytes of weights that came back."),
    "wait_s": ("tableside_stash_wait_seconds", "Seconds that streams stood still for weights to come back."),
}
_GAUGES = {
    "bytes_away": ("tableside_stash_away_bytes", "Bytes of weights that are in no memory of the device now."),
    "host_bytes": (
        "tableside_stash_host_bytes",
        "Bytes of copies in host memory, page-locked on a GPU's host.",
    ),
}


class StashCollector(Collector):
    """Collects this process's stash counts."""

    def __init__(self, stashed: StashRegistry = registry) -> None:
        self._registry = stashed

    def collect(self) -> Iterator[Metric]:
        counts = self._registry.counts()
        for field, (name, text) in _COUNTERS.items():
            yield CounterMetricFamily(name, text, value=float(getattr(counts, field)))
        for field, (name, text) in _GAUGES.items():
            yield GaugeMetricFamily(name, text, value=float(getattr(counts, field)))
