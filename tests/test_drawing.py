"""Tests of what a run without options draws."""

from types import SimpleNamespace
from typing import Any

import pytest
from drawing import shuffle, usual

pytestmark = pytest.mark.quick


def item(name: str, mark: str = "", *args: float, **params: int) -> Any:
    marks = {mark: SimpleNamespace(args=args)}
    called = {"callspec": SimpleNamespace(params=params)} if params else {}

    class Item(SimpleNamespace):
        __hash__ = object.__hash__

    return Item(nodeid=name, get_closest_marker=marks.get, **called)


def test_thorough_ones_are_left_out() -> None:
    items = [item("a"), item("b", "thorough")]
    assert usual(items, "seed") == {items[0]}


def test_so_many_cases_are_drawn_and_show_each_value() -> None:
    items = [item(f"f[{a}-{b}]", "drawn", 3, a=a, b=b) for a in (0, 1) for b in (0, 1)]
    for seed in "abcdef":
        found = [one.callspec.params for one in usual(items, seed)]
        assert len(found) == 3
        assert {p["a"] for p in found} == {p["b"] for p in found} == {0, 1}


def test_a_half_is_in_every_other_run_and_the_seed_says_in_which() -> None:
    one = item("f", "drawn", 0.5)
    chosen = [len(usual([one], str(seed))) for seed in range(1000)]
    assert 400 < sum(chosen) < 600  # 6 standard deviations of a fair coin
    assert chosen == [len(usual([one], str(seed))) for seed in range(1000)]


def test_files_come_in_an_order_of_the_seed() -> None:
    items = [SimpleNamespace(path=f"{file}", name=n) for file in range(9) for n in range(3)]
    orders: list[list[Any]] = [[*items] for _ in "aab"]
    for order, seed in zip(orders, "aab", strict=True):
        shuffle(order, seed)
        assert [one.name for one in order] == [0, 1, 2] * 9
        assert {one.path for one in order[:3]} == {order[0].path}
    assert orders[0] == orders[1] != orders[2]
