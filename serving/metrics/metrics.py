"""Prometheus metrics, summed over all workers, ended ones too (`serving.metrics.counters`). The asked worker
collects gauges such as versions and sizes."""

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from tableside.loader.errors import LoaderError
from tableside.quant.contract import Unfound
from tableside.serving import VERSION
from tableside.serving.errors import ErrorKind, ServingError
from tableside.serving.metrics import files as metrics_files
from tableside.serving.metrics.counters import Counter, Histogram, counted
from tableside.serving.metrics.counters import workers as running_workers
from tableside.serving.model.engine import Engine
from tableside.serving.model.request import Request

if TYPE_CHECKING:
    from tableside.quant.cache.statistics import Statistics
    from tableside.quant.gpu.batch.clock import Times

_SECONDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
# Half as much again from one to the next where requests are: a quantile is that far too high at most
_REQUEST_MS = (0.1, 0.15, 0.2, 0.3, 0.45, 0.7, 1.0, 1.5, 2.0, 3.0, 4.5, 7.0, 10.0, 15.0, 20.0, 30.0)
_REQUEST_SECONDS = (*(ms / 1000 for ms in _REQUEST_MS), 0.1, 0.3, 1.0, 3.0, 10.0)
STAGES = ("parse", "lookup", "encode")
GPU_STAGES = ("queue", "staging", "copy_in", "kernels", "copy_out")
UNKNOWN = "unknown"

REQUESTS = Counter("tableside_requests_total", "Lookup requests answered.", ["model", "protocol", "outcome"])
ERRORS = Counter(
    "tableside_errors_total", "Requests refused and swaps that failed, by kind.", ["model", "kind"]
)
STAGE_SECONDS = Histogram(
    "tableside_stage_seconds",
    "Seconds a request spent in a stage.",
    ["model", "protocol", "stage"],
    bounds=_SECONDS,
)
REQUEST_SECONDS = Histogram(
    "tableside_request_seconds",
    "Seconds from the first byte of a request to the last byte of its response: ok, refused, unavailable, "
    "failed, aborted.",
    ["model", "protocol", "outcome"],
    bounds=_REQUEST_SECONDS,
)
CPU_SECONDS = Counter(
    "tableside_cpu_seconds_total", "Seconds that workers computed, those that ended included.", ["process"]
)
SCORE_SECONDS = Histogram(
    "tableside_score_seconds",
    "Seconds that the scorer took for a request, or for those of a GPU's batch together.",
    ["model"],
    bounds=_SECONDS,
)
IDS = Counter("tableside_ids_total", "Ids looked up.", ["model"])
WITHOUT_ROW = Counter(
    "tableside_ids_without_row_total",
    "Ids without a row of their own: missing (default row), backfilled (row of an older version), refused "
    "(400: the first id).",
    ["model", "table", "reason"],
)
VECTORS = Counter("tableside_vectors_total", "Vectors returned.", ["model"])
ROW_BYTES = Counter("tableside_row_bytes_total", "Bytes of quantized rows read.", ["model"])
REQUEST_BYTES = Counter("tableside_request_bytes_total", "Bytes of request bodies.", ["model"])
RESPONSE_BYTES = Counter("tableside_response_bytes_total", "Bytes of vectors returned.", ["model"])
GPU_SECONDS = Histogram(
    "tableside_gpu_seconds",
    "Seconds of a batch on the GPU by stage: queue (every request), staging, copy_in, kernels, copy_out (one "
    "batch of 16).",
    ["device", "stage"],
    bounds=(1e-6, 3e-6, *_SECONDS),
)
GPU_BATCH = Histogram(
    "tableside_gpu_batch_requests",
    "Requests that went to the GPU together.",
    ["device"],
    bounds=(1, 2, 4, 8, 16, 32, 64, 128, 256),
)
CACHE_TABLES = {
    "ids": Counter("tableside_cache_ids_total", "Ids looked up through a GPU's cache.", ["table"]),
    "hits": Counter("tableside_cache_hits_total", "Of them, those whose row was in a slot.", ["table"]),
    "fetched": Counter(
        "tableside_cache_fetched_rows_total", "Rows that were missing, each once a batch.", ["table"]
    ),
    "in_place": Counter(
        "tableside_cache_in_place_ids_total", "Ids whose row found no room and was read in place.", ["table"]
    ),
    "bus_bytes": Counter(
        "tableside_cache_bus_bytes_total", "Bytes of rows that came over the bus.", ["table"]
    ),
}
CACHE_EVENTS = {
    "inserted": Counter(
        "tableside_cache_inserted_rows_total", "Rows that were admitted to slots.", ["device"]
    ),
    "evicted": Counter(
        "tableside_cache_evicted_rows_total", "Rows that went from slots for others.", ["device"]
    ),
    "padded": Counter(
        "tableside_cache_padded_rows_total", "Rows read from a staging buffer and not admitted.", ["device"]
    ),
    "locked_out": Counter(
        "tableside_cache_locked_out_rows_total", "Rows that found every slot in use by a batch.", ["device"]
    ),
}
SCRUBS = Counter(
    "tableside_scrubs_total", "Readings of all rows of a served version, by outcome.", ["model", "outcome"]
)
SWAPS = Counter("tableside_swaps_total", "Versions taken into service by a worker.", ["model"])
UPDATES = Counter(
    "tableside_updates_total",
    "States of changed rows of a version taken into service by a worker.",
    ["model"],
)
UPDATE_LAG = Histogram(
    "tableside_update_lag_seconds",
    "From when the oldest of some changes was made, or applied where that is not known, until a worker "
    "answered from them.",
    ["model"],
    bounds=(0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60, 300, 3600),
)


class Stages(NamedTuple):
    """When a request's stages began and ended, in seconds of time.perf_counter."""

    started: float
    parsed: float
    looked_up: float
    encoded: float


class ModelMetrics:
    """The counters of one model and protocol. Their labels are resolved once. Belongs to one event loop."""

    def __init__(self, model: str, protocol: str) -> None:
        self._model = model
        self._ok = REQUESTS.labels(model, protocol, "ok")
        self._parse, self._lookup, self._encode = (
            STAGE_SECONDS.labels(model, protocol, stage) for stage in STAGES
        )
        counters = (IDS, VECTORS, ROW_BYTES, REQUEST_BYTES, RESPONSE_BYTES)
        self._ids, self._vectors, self._row_bytes, self._in, self._out = (c.labels(model) for c in counters)

    def answered(
        self, request: Request, body_bytes: int, times: Stages, unfound: Sequence[Unfound] | None = None
    ) -> None:
        """Counts a request that was answered. unfound: as `Plan.run` returns it."""
        self._ok.add(1)
        self._parse.add(times.parsed - times.started)
        self._lookup.add(times.looked_up - times.parsed)
        self._encode.add(times.encoded - times.looked_up)
        self._ids.add(request.ids)
        self._vectors.add(request.vectors)
        self._row_bytes.add(request.row_bytes)
        self._in.add(body_bytes)
        self._out.add(request.out_bytes)
        if unfound is not None:
            self._count_unfound(request.tables, unfound)

    def _count_unfound(self, tables: Sequence[str], unfound: Sequence[Unfound]) -> None:
        """Counts ids without a row. Labels are bounded by the served tables, and made at the first count."""
        for table, counts in zip(tables, unfound, strict=True):
            if not any(counts):
                continue
            for reason, count in zip(Unfound._fields, counts, strict=True):
                WITHOUT_ROW.labels(self._model, table, reason).add(count)


class MetricsOfModels(dict[str, ModelMetrics]):
    """The counters of each model that is served by one protocol, made when it first counts."""

    def __init__(self, protocol: str) -> None:
        super().__init__()
        self._protocol = protocol

    def __missing__(self, model: str) -> ModelMetrics:
        made = self[model] = ModelMetrics(model, self._protocol)
        return made


class GpuMetrics:
    """The histograms of one device, labels resolved once. One thread calls `waited`, another `answered`."""

    def __init__(self, device: str) -> None:
        self._requests = GPU_BATCH.labels(device)
        self._stages = {stage: GPU_SECONDS.labels(device, stage) for stage in GPU_STAGES}

    def waited(self, seconds: Sequence[float]) -> None:
        """Counts how long each request of a batch waited until it began."""
        self._stages["queue"].add_all(seconds)

    def answered(self, requests: int, times: "Times | None") -> None:
        """Counts a batch that the GPU answered. times: of its stages, if taken."""
        self._requests.add(requests)
        if times is not None:
            for stage, seconds in asdict(times).items():
                self._stages[stage].add(seconds)


class CacheMetrics:
    """The counters of one device's cache, which follow its statistics."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._seen: Statistics | None = None

    def update(self, now: "Statistics") -> None:
        """Counts the increase since the last call."""
        if now is self._seen:
            return
        if self._seen is not None and now.tickets < self._seen.tickets:
            return  # older than what was counted: it was under way meanwhile
        before, self._seen = self._seen, now
        for name, counter in CACHE_EVENTS.items():
            counter.labels(self._device).inc(max(0, getattr(now, name) - getattr(before, name, 0)))
        for number, table in now.tables.items():
            old = before.tables.get(number) if before else None
            if old is not None and (old.name != table.name or old.ids > table.ids):
                old = None  # another table has its number now
            for name, counter in CACHE_TABLES.items():
                counter.labels(table.name).inc(max(0, getattr(table, name) - getattr(old, name, 0)))


def refused(model: str, protocol: str, kind: ErrorKind, lacking: str | None = None) -> None:
    """Counts a request that was refused. model: one that is served, or UNKNOWN. lacking: as of `ApiError`."""
    REQUESTS.labels(model, protocol, "refused").inc()
    ERRORS.labels(model, kind.value).inc()
    if lacking is not None:
        WITHOUT_ROW.labels(model, lacking, "refused").inc()


def _live_version(engine: Engine, served: int) -> int:
    """Returns the record's live version; logs an unreadable record and returns the served one."""
    try:
        return engine.model.record().current or served
    except (LoaderError, OSError):
        return served


class _Now:
    """All counts, then gauges that are read at the scrape."""

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._engines = list(engines)

    def collect(self) -> Iterator[Metric]:
        yield from counted(_folder())
        text = "1 for the release that runs: its version, and Python's."
        build = GaugeMetricFamily("tableside_build_info", text, labels=["version", "python"])
        build.add_metric([VERSION, platform.python_version()], 1.0)
        yield build
        text = "When the server was started, in seconds since 1970."
        started = metrics_files.started_at(_folder())
        yield GaugeMetricFamily("process_start_time_seconds", text, value=started)
        names = {
            "tableside_version": "Number of the version that this worker serves.",
            "tableside_live_version": "Number of the live version.",
            "tableside_segment_bytes": "Bytes of the served version's segment.",
            "tableside_fp32_bytes": "Bytes that its tables would take in fp32.",
            "tableside_load_seconds": "Seconds that its load took.",
            "tableside_hbm_bytes": "Bytes of its tables in the memory of this worker's GPU.",
            "tableside_published_versions": "Versions of the model in shared memory.",
            "tableside_sequence": "Number of the last change in this worker's state; 0: none.",
            "tableside_delta_bytes": "Bytes of the deltas over the served version.",
            "tableside_delta_rows": "Rows that the deltas over the served version change.",
            "tableside_behind_seconds": "Seconds since the live state differs from this worker's.",
        }
        gauges = {name: GaugeMetricFamily(name, text, labels=["model"]) for name, text in names.items()}
        for engine in self._engines:
            served, label = engine.attached(), [engine.model.name]
            values = (
                served.version,
                _live_version(engine, served.version),
                served.segment.size,
                served.header.fp32_bytes,
                served.header.load.get("seconds", 0.0),
                served.placed.hbm_bytes,
                len(engine.model.versions()),
                served.sequence,
                sum(d.segment.size for d in served.segment.deltas),
                sum(d.entries for d in served.segment.deltas),
                engine.behind_s,
            )
            for gauge, value in zip(gauges.values(), values, strict=True):
                gauge.add_metric(label, float(value))
        yield from gauges.values()
        yield self._scorers()
        yield from self._of_tables()
        yield from _of_workers()
        for cache in {engine.cache for engine in self._engines} - {None}:
            assert cache is not None
            for name, value in zip(cache._fields[1:], cache[1:], strict=True):
                family = GaugeMetricFamily(
                    f"tableside_cache_{name}", "Of the cache of this worker's GPU.", labels=["device"]
                )
                family.add_metric([cache.device], float(value))
                yield family

    def _scorers(self) -> Metric:
        """Shows the kinds of the served versions' scorers."""
        text = "1 for the scorer of the served version: its kind, and what it computes in (fp32, bf16, fp16)."
        gauge = GaugeMetricFamily("tableside_scorer_info", text, labels=["model", "kind", "dtype"])
        for engine in self._engines:
            if (scorer := engine.attached().scorer) is not None:
                gauge.add_metric([engine.model.name, scorer.kind, scorer.dtype], 1.0)
        return gauge

    def _of_tables(self) -> tuple[Metric, Metric]:
        """Shows backfilled ids of tables with an older version for missing ids, and dropped ones of those
        with a ttl or max_rows, zeros too."""
        text = "Rows of the served version's table that came from an older version (missing = backfill)."
        backfilled = GaugeMetricFamily("tableside_backfilled_rows", text, labels=["model", "table"])
        text = "Ids that compactions dropped since the load: expired (ttl), evicted (max_rows)."
        dropped = GaugeMetricFamily("tableside_dropped_ids", text, labels=["model", "table", "reason"])
        for engine in self._engines:
            for table in engine.attached().header.tables:
                if (ids := table.ids) is None:
                    continue
                labels = [engine.model.name, table.name]
                if ids.backfilled or ids.missing.startswith("backfill"):
                    backfilled.add_metric(labels, float(ids.backfilled))
                if ids.ttl_s or ids.max_rows:
                    dropped.add_metric([*labels, "expired"], float(ids.expired))
                    dropped.add_metric([*labels, "evicted"], float(ids.evicted))
        return backfilled, dropped


def _of_workers() -> Iterator[Metric]:
    """Yields the workers' gauges, summed over the running ones."""
    seen = list(running_workers(_folder()))
    most_files = max((w.open_files for w in seen), default=0)
    summed = {
        "in_flight_requests": "Requests whose responses are not complete, in all workers.",
        "waiting_requests": "Of them, those that wait for their turn.",
        "open_connections": "Connections of all workers.",
        "max_connections": "Connections that all workers may have.",
        "held_bytes": "Bytes of bodies and responses that all workers hold.",
    }
    for name, text, value in (
        ("workers", "Workers that run.", len(seen)),
        ("ready_workers", "Workers that take requests.", sum(w.now.is_ready for w in seen)),
        *((name, text, sum(getattr(w.now, name) for w in seen)) for name, text in summed.items()),
        ("open_files", "Open files of the worker that has most.", most_files),
    ):
        yield GaugeMetricFamily(f"tableside_{name}", text, value=float(value))
    text = "Resident bytes of all workers: private, file (code), shared (tables that each has touched)."
    memory = GaugeMetricFamily("tableside_memory_bytes", text, labels=["kind"])
    for kind in ("private", "file", "shared"):
        memory.add_metric([kind], float(sum(w.memory_bytes.get(kind, 0) for w in seen)))
    yield memory


def _folder() -> Path:
    folder = os.environ.get(metrics_files.VARIABLE)
    if not folder:
        raise ServingError(
            f"{metrics_files.VARIABLE} is not set; workers are started by `tableside serve`, which sets it"
        )
    return Path(folder)


def exposition(engines: Iterable[Engine]) -> bytes:
    """The text that /metrics answers."""
    registry = CollectorRegistry()
    registry.register(_Now(engines))
    return generate_latest(registry)


def statistics(model: str) -> dict[str, tuple[int, float]]:
    """Returns stage -> (count, seconds) of a model's answers, and "refused" -> (count, 0), over all
    workers."""
    found = dict.fromkeys((*STAGES, "refused"), (0, 0.0))
    sums = metrics_files.sums(_folder())
    for (of, _, stage), (seconds, *buckets) in sums.get(STAGE_SECONDS.name, {}).items():
        if of == model:
            found[stage] = (found[stage][0] + int(sum(buckets)), found[stage][1] + seconds)
    for (of, _, outcome), (count,) in sums.get(REQUESTS.name, {}).items():
        if (of, outcome) == (model, "refused"):
            found["refused"] = (found["refused"][0] + int(count), 0.0)
    return found
