"""What a cache admits and how it divides its pages, over many batches; and that its own check finds
damage."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cached_tables import CachedTables, run, settings

from tableside.quant.cache import cache
from tableside.quant.cache.kernels.state import occupied_at
from tableside.quant.cache.settings import Policy

pytestmark = pytest.mark.gpu


def hits_of(t: CachedTables, ids: np.ndarray) -> int:
    """How many of these ids of table 0 are hits."""
    before = t.hits()
    t.look_up({0: ids})
    return t.hits() - before


def full(t: CachedTables, uses: int) -> np.ndarray:
    """Ids that fill the cache, each used so many times."""
    ids = run(t.cache.slots)
    for _ in range(uses):
        t.look_up({0: ids})
    return ids


@pytest.mark.drawn(0.5)
def test_a_row_that_is_missed_often_is_admitted() -> None:
    """Misses are remembered though they are not admitted: the fourth one in a row weighs more than two
    uses of the others."""
    t = CachedTables(6_000, settings(Policy.LFU), {"a": (1000, 48)})
    full(t, 2)
    asked = run(4, 500)
    assert [hits_of(t, asked) for _ in range(6)][-1] == 4


@pytest.mark.thorough
def test_old_uses_count_less() -> None:
    """Rows that were used eight times, many half lives ago, go for rows that are used twice now."""
    t = CachedTables(6_000, settings(Policy.LFU, half_life=2), {"a": (1000, 48)})
    full(t, 8)
    for _ in range(16):
        t.look_up({0: run(1, 900)})
    asked = run(t.cache.slots // 2, 500)
    hits_of(t, asked)
    assert hits_of(t, asked) >= asked.size // 2


@pytest.mark.thorough
def test_pages_go_to_the_rows_that_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one size of rows evicts what was just used and the other what was not used for long, pages
    move from this to that."""
    monkeypatch.setattr(cache, "_REBALANCE_EVERY", 4)
    monkeypatch.setattr(cache, "_SNAPSHOT_EVERY", 1)
    t = CachedTables(20_000, settings(Policy.LRU), {"a": (1000, 48), "b": (1000, 144)})
    before = [len(c.pages) for c in t.cache._pages.classes]
    for n in range(13):
        t.look_up({0: run(100, 100 * (n % 5)), 1: run(1, n)})
    t.check_integrity()
    after = [len(c.pages) for c in t.cache._pages.classes]
    assert after[0] > before[0] and after[1] < before[1]


@pytest.mark.drawn(0.5)
def test_a_row_that_goes_leaves_its_chain() -> None:
    """Its node is reached from the bucket of its new key alone."""
    t = CachedTables(6_000, settings(Policy.LRU), {"a": (1000, 48)})
    full(t, 1)
    t.look_up({0: run(10, 500)})
    t.check_integrity()


def change(tensor: torch.Tensor, at: int, by: int) -> None:
    tensor[at] = tensor[at] + by


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: change(c._memory.state, occupied_at(0), 1), "20 keys in its slots, 21 counted"),
        (lambda c: c._memory.heads.fill_(-1), "20 keys in slots, 0 in chains: a conflict miss"),
        (
            lambda c: change(next(iter(c._tables)).dirty, 0, 1),
            "a map still names misses of a batch that is over",
        ),
        (lambda c: c._memory.pages.view(torch.uint8)[:, -600:].add_(1), "holds other bytes"),
    ],
    ids=["a count", "the chains", "a map", "rows"],
)
@pytest.mark.drawn(2)
def test_the_check_finds_damage(damage: Callable[[Any], Any], message: str) -> None:
    t = CachedTables(9_000, settings(), {"a": (1000, 48)})
    t.look_up({0: run(20)})
    t.check_integrity()
    damage(t.cache)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the check reads on the cache's stream
    with pytest.raises(AssertionError, match=message):
        t.check_integrity()
