"""How many threads of the CPU gather what a GPU's cache misses."""

import os
from typing import Any

import pytest

from tableside.quant import choose
from tableside.serving.placement import Placer
from tableside.serving.settings import ServerSettings

GIB = 1 << 30


@pytest.mark.parametrize(
    ("settings", "cores", "cached_bytes", "threads"),
    [
        ({}, 16, 4 * GIB, 8),
        ({}, 16, 4 * GIB - 1, 0),  # the GPU reads tables of a small span as fast as the bus carries them
        ({"workers": 3}, 16, 4 * GIB, 5),
        ({"workers": 5}, 16, 4 * GIB, 0),  # three threads gather no faster than the GPU reads
        ({"gather_threads": 2}, 16, 1, 2),
        ({"gather_threads": 0}, 16, 64 * GIB, 0),
    ],
)
def test_gather_threads(
    settings: dict[str, Any], cores: int, cached_bytes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's share of the cores, 8 at most, where it is 4 or more and tables span 4 GiB; or what the setting says."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert Placer(ServerSettings(**settings), choose())._gatherers(cached_bytes) == threads
