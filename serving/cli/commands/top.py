"""`tableside top`: a running server's rates, from two reads of /metrics."""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group
from rich.live import Live
from rich.table import Table

from tableside.serving.cli.arguments import client_of
from tableside.serving.cli.output import console, print_json, table_of
from tableside.serving.client import Client

Samples = Mapping[tuple[str, str], float]  # name of a sample, one label's value -> the sum of all with it
_LABELS = ("model", "table", "device")

# Rates, by their keys in JSON: the counter's name behind `tableside_`, and the head of a table's column.
_OF_MODELS = {
    "requests_per_s": ("requests_total", "requests/s"),
    "refused_per_s": ("requests_total_refused", "refused/s"),
    "ids_per_s": ("ids_total", "ids/s"),
    "ids_without_row_per_s": ("ids_without_row_total", "without row/s"),
    "row_bytes_per_s": ("row_bytes_total", "row MB/s"),
}
_OF_TABLES = {
    "ids_per_s": ("cache_ids_total", "ids/s"),
    "fetched_rows_per_s": ("cache_fetched_rows_total", "rows fetched/s"),
    "bus_bytes_per_s": ("cache_bus_bytes_total", "bus MB/s"),
    "in_place_ids_per_s": ("cache_in_place_ids_total", "in place/s"),
}
_OF_DISKS = {
    "in_place_ids_per_s": ("disk_rows_total_in_place", "in place/s"),
    "page_cache_rows_per_s": ("disk_rows_total_page_cache", "page cache/s"),
    "disk_rows_per_s": ("disk_rows_total_disk", "disk/s"),
    "late_rows_per_s": ("disk_rows_total_late", "late/s"),
    "failed_rows_per_s": ("disk_rows_total_failed", "failed/s"),
    "corrupt_rows_per_s": ("disk_rows_total_corrupt", "damaged/s"),
}
_OF_CACHES = {
    "admitted_rows_per_s": ("cache_inserted_rows_total", "admitted/s"),
    "evicted_rows_per_s": ("cache_evicted_rows_total", "evicted/s"),
    "staged_only_rows_per_s": ("cache_padded_rows_total", "staged only/s"),
    "no_free_slot_rows_per_s": ("cache_locked_out_rows_total", "no free slot/s"),
}
Counters = Mapping[str, tuple[str, str]]


def top(options: argparse.Namespace) -> int:
    """Prints rates of a server, once or until it is interrupted; as JSON a line for each look."""
    with client_of(options) as client:
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
    (docs/commands.md)."""

    def rate(name: str, label: str) -> float:
        return (now.get((name, label), 0.0) - before.get((name, label), 0.0)) / seconds

    def of(label: str, counters: Counters) -> dict[str, float]:
        return {key: rate(f"tableside_{name}", label) for key, (name, _) in counters.items()}

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
    of_disks = {f"tableside_{name}" for name, _ in _OF_DISKS.values()}
    for model in sorted({label for name, label in now if name in of_disks}):
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
    parts = [_table("model", found["models"], _OF_MODELS, "model", sequence="sequence")]
    if disks := found["disks"]:
        parts.append(_table("of a disk", disks, _OF_DISKS, "model", hot_fraction="hot"))
    if cached := found["cached_tables"]:
        parts.append(_table("cached table", cached, _OF_TABLES, "table", hit_fraction="hit rate"))
    if caches := found["caches"]:
        more = {"slots": "slots", "occupied_fraction": "occupied"}
        parts.append(_table("cache", caches, _OF_CACHES, "device", **more))
    return Group(*parts)


def _table(head: str, rows: Sequence[Mapping[str, Any]], counters: Counters, name: str, **more: str) -> Table:
    """A row for each of `rows`. more: heads of other keys, whose columns come first."""
    heads = {**more, **{key: text for key, (_, text) in counters.items()}}
    return table_of(
        (head, *heads.values()), ((r[name], *(_cell(key, r[key]) for key in heads)) for r in rows)
    )


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key.endswith("_fraction"):
        return f"{value:.1%}" if key == "occupied_fraction" else f"{value:.3f}"
    return f"{value / 1e6:,.1f}" if "bytes" in key else f"{value:,.0f}"
