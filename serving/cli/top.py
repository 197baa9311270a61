"""`tableside top`: what a running server does, from two looks at its /metrics."""

import argparse
import time
from collections.abc import Iterator, Mapping

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from tableside.serving.client import Client

Samples = Mapping[tuple[str, str], float]  # name of a sample, one label's value -> the sum of all with it
_LABELS = ("model", "table", "device")

console = Console(highlight=False)


def top(options: argparse.Namespace) -> int:
    """Prints rates of a server, once or until it is interrupted."""
    with Client(options.url) as client:
        looks = _looks(client, options.seconds)
        if options.once:
            console.print(next(looks))
            return 0
        with Live(console=console, auto_refresh=False) as live:
            try:
                for shown in looks:
                    live.update(shown, refresh=True)
            except KeyboardInterrupt:
                return 0
    return 0


def _looks(client: Client, seconds: float) -> Iterator[Group]:
    before, began = samples(client.metrics()), time.monotonic()
    while True:
        time.sleep(seconds)
        now, at = samples(client.metrics()), time.monotonic()
        yield tables(before, now, at - began)
        before, began = now, at


def samples(text: str) -> Samples:
    """The samples of an exposition. Each is the sum over all labels but model, table or device, whichever it has."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for s in family.samples:
            label = next((s.labels[name] for name in _LABELS if name in s.labels), "")
            refused = "_refused" if s.labels.get("outcome") == "refused" else ""
            found[s.name + refused, label] = found.get((s.name + refused, label), 0.0) + s.value
    return found


def tables(before: Samples, now: Samples, seconds: float) -> Group:
    """Tables of what happened in a second between two looks, and of what is held now."""

    def rate(name: str, label: str) -> float:
        return (now.get((name, label), 0.0) - before.get((name, label), 0.0)) / seconds

    models = Table("model", "requests/s", "refused/s", "ids/s", "without row/s", "row MB/s", box=None)
    for name in sorted(label for sample, label in now if sample == "tableside_version"):
        requests = "tableside_requests_total"
        counts = (requests, f"{requests}_refused", "tableside_ids_total", "tableside_ids_without_row_total")
        models.add_row(name, *(f"{rate(c, name):,.0f}" for c in counts), f"{rate('tableside_row_bytes_total', name) / 1e6:,.1f}")
    parts = [models]
    cached = sorted(label for sample, label in now if sample == "tableside_cache_ids_total")
    if cached:
        shown = Table("cached table", "ids/s", "hit rate", "rows fetched/s", "bus MB/s", "in place/s", box=None)
        for name in cached:
            ids, hits = rate("tableside_cache_ids_total", name), rate("tableside_cache_hits_total", name)
            shown.add_row(
                name,
                f"{ids:,.0f}",
                f"{hits / ids:.3f}" if ids else "-",
                f"{rate('tableside_cache_fetched_rows_total', name):,.0f}",
                f"{rate('tableside_cache_bus_bytes_total', name) / 1e6:,.1f}",
                f"{rate('tableside_cache_in_place_ids_total', name):,.0f}",
            )
        parts.append(shown)
    if devices := sorted(label for sample, label in now if sample == "tableside_cache_slots"):
        shown = Table("cache", "slots", "occupied", "admitted/s", "evicted/s", "staged only/s", "no free slot/s", box=None)
        for name in devices:
            slots = now["tableside_cache_slots", name]
            events = ("inserted", "evicted", "padded", "locked_out")
            occupied = now["tableside_cache_occupied_slots", name] / max(1.0, slots)
            shown.add_row(
                name,
                f"{slots:,.0f}",
                f"{occupied:.1%}",
                *(f"{rate(f'tableside_cache_{e}_rows_total', name):,.0f}" for e in events),
            )
        parts.append(shown)
    return Group(*parts)
