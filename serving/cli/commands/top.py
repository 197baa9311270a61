"""`tableside top`: a running server's rates, from two reads of /metrics."""

import argparse
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.live import Live

from tableside.serving.cli import remote
from tableside.serving.cli.output import console, print_json, table_of
from tableside.serving.client import Client

Samples = Mapping[tuple[str, str], float]  # name of a sample, one label's value -> the sum of all with it
_LABELS = ("model", "table", "device")

# Rates, by their keys in JSON, in the order of the tables' columns.
_OF_MODELS = {
    "requests_per_s": "tableside_requests_total",
    "refused_per_s": "tableside_requests_total_refused",
    "ids_per_s": "tableside_ids_total",
    "ids_without_row_per_s": "tableside_ids_without_row_total",
    "row_bytes_per_s": "tableside_row_bytes_total",
}
_OF_TABLES = {
    "ids_per_s": "tableside_cache_ids_total",
    "fetched_rows_per_s": "tableside_cache_fetched_rows_total",
    "bus_bytes_per_s": "tableside_cache_bus_bytes_total",
    "in_place_ids_per_s": "tableside_cache_in_place_ids_total",
}
_OF_DISKS = {
    "in_place_ids_per_s": "tableside_disk_rows_total_in_place",
    "page_cache_rows_per_s": "tableside_disk_rows_total_page_cache",
    "disk_rows_per_s": "tableside_disk_rows_total_disk",
    "late_rows_per_s": "tableside_disk_rows_total_late",
    "failed_rows_per_s": "tableside_disk_rows_total_failed",
    "corrupt_rows_per_s": "tableside_disk_rows_total_corrupt",
}
_OF_CACHES = {
    "admitted_rows_per_s": "tableside_cache_inserted_rows_total",
    "evicted_rows_per_s": "tableside_cache_evicted_rows_total",
    "staged_only_rows_per_s": "tableside_cache_padded_rows_total",
    "no_free_slot_rows_per_s": "tableside_cache_locked_out_rows_total",
}


def top(options: argparse.Namespace) -> int:
    """Prints rates of a server, once or until it is interrupted; as JSON a line for each look."""
    with remote.client(options) as client:
        looks = _looks(client, options.seconds)
        try:
            if options.json or options.once:
                for found in islice(looks, 1 if options.once else None):
                    print_json(found) if options.json else console.print(tables(found))
                return 0
            with Live(console=console, auto_refresh=False) as live:
                for found in looks:
                    live.update(tables(found), refresh=True)
        except KeyboardInterrupt:
            return 0
    return 0


def _looks(client: Client, seconds: float) -> Iterator[dict[str, Any]]:
    before, began = samples(client.metrics()), time.monotonic()
    while True:
        time.sleep(seconds)
        now, at = samples(client.metrics()), time.monotonic()
        yield rates(before, now, at - began)
        before, began = now, at


def samples(text: str) -> Samples:
    """Parses an exposition; sums samples over all labels but model, table or device. The name of a refused
    request's, and of one with a source or a label `hot`, ends in that."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for s in family.samples:
            label = next((s.labels[name] for name in _LABELS if name in s.labels), "")
            kinds = ("refused" if s.labels.get("outcome") == "refused" else "", s.labels.get("source", ""))
            name = "_".join(filter(None, (s.name, *kinds, s.labels.get("hot", ""))))
            found[name, label] = found.get((name, label), 0.0) + s.value
    return found


def rates(before: Samples, now: Samples, seconds: float) -> dict[str, Any]:
    """Returns rates per second between two looks, and current gauges: the output of `--json`
    (docs/operations.md)."""

    def rate(name: str, label: str) -> float:
        return (now.get((name, label), 0.0) - before.get((name, label), 0.0)) / seconds

    def of(label: str, counters: Mapping[str, str]) -> dict[str, float]:
        return {key: rate(name, label) for key, name in counters.items()}

    def labels(sample: str) -> list[str]:
        return sorted(label for name, label in now if name == sample)

    tables, caches = [], []
    for table in labels("tableside_cache_ids_total"):
        looked_up = of(table, _OF_TABLES)
        ids, hits = looked_up["ids_per_s"], rate("tableside_cache_hits_total", table)
        tables.append({"table": table, **looked_up, "hit_fraction": hits / ids if ids else None})
    for device in labels("tableside_cache_slots"):
        slots, occupied = now["tableside_cache_slots", device], now["tableside_cache_occupied_slots", device]
        held = {"device": device, "slots": slots, "occupied_fraction": occupied / max(1.0, slots)}
        caches.append({**held, **of(device, _OF_CACHES)})
    disks = []
    for model in sorted({label for name, label in now if name in _OF_DISKS.values()}):
        hot, cold = (rate(f"tableside_hot_ids_total_{answer}", model) for answer in ("yes", "no"))
        hot_fraction = hot / (hot + cold) if hot + cold else None
        disks.append({"model": model, **of(model, _OF_DISKS), "hot_fraction": hot_fraction})
    models = [
        {"model": m, "sequence": now.get(("tableside_sequence", m), 0.0), **of(m, _OF_MODELS)}
        for m in labels("tableside_version")
    ]
    return {
        "seconds": seconds,
        "models": models,
        "disks": disks,
        "cached_tables": tables,
        "caches": caches,
    }


def tables(found: Mapping[str, Any]) -> Group:
    """`rates` as tables."""
    heads: tuple[str, ...] = (
        "model",
        "sequence",
        "requests/s",
        "refused/s",
        "ids/s",
        "without row/s",
        "row MB/s",
    )
    rows: Iterator[tuple[str, ...]] = (
        (m["model"], f"{m['sequence']:,.0f}", *(f"{m[key]:,.0f}" for key in [*_OF_MODELS][:-1]),
         f"{m['row_bytes_per_s'] / 1e6:,.1f}")
        for m in found["models"]
    )  # fmt: skip
    parts = [table_of(heads, rows)]
    if found["disks"]:
        heads = (
            *("of a disk", "in place/s", "page cache/s", "disk/s"),
            *("late/s", "failed/s", "damaged/s", "hot"),
        )
        rows = (
            (d["model"], *(f"{d[key]:,.0f}" for key in _OF_DISKS),
             "-" if d["hot_fraction"] is None else f"{d['hot_fraction']:.3f}")
            for d in found["disks"]
        )  # fmt: skip
        parts.append(table_of(heads, rows))
    if found["cached_tables"]:
        heads = ("cached table", "ids/s", "hit rate", "rows fetched/s", "bus MB/s", "in place/s")
        rows = (
            (t["table"], f"{t['ids_per_s']:,.0f}",
             "-" if t["hit_fraction"] is None else f"{t['hit_fraction']:.3f}",
             f"{t['fetched_rows_per_s']:,.0f}", f"{t['bus_bytes_per_s'] / 1e6:,.1f}",
             f"{t['in_place_ids_per_s']:,.0f}")
            for t in found["cached_tables"]
        )  # fmt: skip
        parts.append(table_of(heads, rows))
    if found["caches"]:
        heads = ("cache", "slots", "occupied", "admitted/s", "evicted/s", "staged only/s", "no free slot/s")
        rows = (
            (c["device"], f"{c['slots']:,.0f}", f"{c['occupied_fraction']:.1%}",
             *(f"{c[key]:,.0f}" for key in _OF_CACHES))
            for c in found["caches"]
        )  # fmt: skip
        parts.append(table_of(heads, rows))
    return Group(*parts)
