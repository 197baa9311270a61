"""What a worker's settings say of a GPU's cache: its policy, and how many threads of the CPU gather what
it misses."""

import os
from typing import Any

import pytest

from tableside.quant import choose
from tableside.serving.model.placement import Placer
from tableside.serving.settings import ServerSettings
from tableside.serving.workers.worker import WorkerConfig, make_application

GIB = 1 << 30


@pytest.mark.parametrize(
    ("settings", "cores", "cached_bytes", "threads"),
    [
        ({}, 16, 4 * GIB, 8),
        ({}, 16, 4 * GIB - 1, 0),  # the GPU reads tables of a small span as fast as the bus carries them
        ({"workers": 12}, 16, 4 * GIB, 4),
        ({"workers": 4, "engines": 2}, 16, 4 * GIB, 6),
        ({"workers": 4, "engines": 4}, 16, 4 * GIB, 3),
        ({"workers": 16}, 16, 4 * GIB, 1),
        ({"workers": 20}, 16, 4 * GIB, 1),
        ({"gather_threads": 2}, 16, 1, 2),
        ({"gather_threads": 0}, 16, 64 * GIB, 0),
    ],
)
def test_gather_threads(
    settings: dict[str, Any], cores: int, cached_bytes: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's share of the cores that workers leave, from 1 to 8, where tables span 4 GiB; or what the
    setting says."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert Placer(ServerSettings(**settings), choose())._gatherers(cached_bytes) == threads


def test_each_engine_knows_how_many_there_are() -> None:
    """As it is told of its own device alone."""
    config = WorkerConfig(ServerSettings(devices=("0", "1", "3"), workers=3), make_application)
    assert config.on("1", "").settings.engines == 3 and config.settings.engines == 1


def test_batches_that_begin_ahead_have_buffers_of_their_own() -> None:
    pytest.importorskip("triton")
    assert Placer(ServerSettings(), choose(), ahead=2)._cache_settings(1).staging_buffers == 3


def test_the_policy_of_a_cache_is_a_setting() -> None:
    """The library's own choice where nothing is said."""
    pytest.importorskip("triton")
    from tableside.quant.cache.settings import CacheSettings, Policy

    settings = ServerSettings(cache_policy="lru", gather_threads=0)
    assert Placer(settings, choose())._cache_settings(GIB).policy == Policy.LRU
    default = Placer(ServerSettings(gather_threads=0), choose())._cache_settings(GIB)
    assert default.policy == CacheSettings().policy
