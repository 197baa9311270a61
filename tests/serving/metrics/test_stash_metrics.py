"""The counts of stashed weights, as a Prometheus client of the training process tells them."""

import torch
from prometheus_client import CollectorRegistry, generate_latest

from tableside.quant.stash.registry import StashRegistry
from tableside.serving.stash_metrics import StashCollector


def test_every_count_is_told() -> None:
    stashed, told = StashRegistry(), CollectorRegistry()
    told.register(StashCollector(stashed))
    stashed.totals.stashes, stashed.totals.bytes_out, stashed.totals.wait_s = 3, 1024, 0.5
    kept = torch.zeros(8)
    stashed._host_copies[kept] = torch.zeros(32, dtype=torch.uint8)
    text = generate_latest(told).decode()
    for line in (
        "tableside_stash_stashes_total 3.0",
        "tableside_stash_restores_total 0.0",
        "tableside_stash_out_bytes_total 1024.0",
        "tableside_stash_back_bytes_total 0.0",
        "tableside_stash_wait_seconds_total 0.5",
        "tableside_stash_away_bytes 0.0",
        "tableside_stash_host_bytes 32.0",
    ):
        assert line in text.splitlines()
