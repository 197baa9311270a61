"""Counts of rows that are read from a disk (loader.segment.blocks), or from other hosts (serving.cluster)."""

from collections.abc import Iterable
from functools import partial

from tableside.loader.segment.blocks import IN_PLACE, BlockReader
from tableside.serving.metrics.counters import Counter, Histogram, add_all

_ROWS = Counter(
    "tableside_disk_rows_total",
    "Rows of tables on a disk that lookups asked for: in_place (each id, read where the file is mapped), and "
    "each row of a request once: page_cache (copied), disk, late, failed (the disk refused), corrupt.",
    ["model", "table", "source"],
)
_SECONDS = Histogram(
    "tableside_disk_seconds",
    "Seconds that a request's lookups of one table waited for a disk.",
    ["model", "table"],
    bounds=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0),
)


_REMOTE = Counter(
    "tableside_remote_rows_total",
    "Rows of tables on other hosts or in Redis that lookups asked for, each of a request once: came, late; "
    "of Redis gone (it has them no more), corrupt.",
    ["model", "table", "outcome"],
)

_GIVEN_REQUESTS = Counter(
    "tableside_given_requests_total", "Requests of other hosts for rows that were answered.", ["model"]
)
_GIVEN_ROWS = Counter("tableside_given_rows_total", "Rows that other hosts were given.", ["model"])

_SAMPLED = Counter(
    "tableside_hot_ids_total",
    "A sample of the ids of tables on a disk or in Redis, by whether the hot segment has their rows: yes or "
    "no.",
    ["model", "table", "hot"],
)


def count_remote(model: str, outcome: str, rows: Iterable[tuple[str, int]]) -> None:
    """Counts rows that other hosts were asked for, by table."""
    add_all([(_REMOTE.labels(model, table, outcome), n) for table, n in rows if n])


def count_given(model: str, rows: int) -> None:
    """Counts a request of another host, and its rows."""
    _GIVEN_REQUESTS.labels(model).inc()
    _GIVEN_ROWS.labels(model).inc(rows)


def count_sample(model: str, table: str, ids: int, found: int) -> None:
    """Counts a sample of ids, and those of them whose row the hot segment has."""
    _SAMPLED.labels(model, table, "yes").inc(found)
    _SAMPLED.labels(model, table, "no").inc(ids - found)


def count_reads(reader: BlockReader, model: str, table: str) -> None:
    """Has a reader's rows and waits counted, on any thread."""

    def count(source: str, rows: int) -> None:
        if rows:
            _ROWS.labels(model, table, source).inc(rows)

    reader.count_in_place = _ROWS.labels(model, table, IN_PLACE).inc
    reader.count, reader.count_wait = count, _SECONDS.labels(model, table).observe
    reader.count_sample = partial(count_sample, model, table)
