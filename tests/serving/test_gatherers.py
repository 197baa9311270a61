"""What a worker's settings say of a GPU's cache: its policy, and how many threads of the CPU gather what it misses."""

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


def test_the_policy_of_a_cache_is_a_setting() -> None:
    """With LFU's half life; the library's own choice where nothing is said."""
    pytest.importorskip("triton")
    from tableside.quant.cache.settings import CacheSettings, Policy

    settings = ServerSettings(cache_policy="lru", cache_half_life=20, gather_threads=0)
    found = Placer(settings, choose())._cache_settings(GIB)
    assert (found.policy, found.half_life) == (Policy.LRU, 20)
    default = Placer(ServerSettings(gather_threads=0), choose())._cache_settings(GIB)
    assert (default.policy, default.half_life) == (CacheSettings().policy, CacheSettings().half_life)
