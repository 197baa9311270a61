"""Chooses the tests of a run by a seed, the variable DRAW. A run without one takes any seed and prints it.

A run without options leaves out tests marked `thorough`, and runs `count` cases of a function marked
`drawn(count)`; with `drawn(0.5)` every other run has one. `--all` runs everything, and so does naming a test
by its id. `--rest FRACTION` runs that fraction of what a run with the same seed leaves out. The seed orders
the files too: tests that wait for processes lie in few folders, and are to run beside those that do not.
"""

import gc
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from random import Random

import pytest

SEED = os.environ.setdefault("DRAW", os.urandom(4).hex())  # xdist's workers inherit it


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("drawing")
    group.addoption("--all", action="store_true", help="run every test")
    group.addoption(
        "--rest",
        type=float,
        metavar="FRACTION",
        help="run this fraction of the tests that are left out otherwise",
    )


def pytest_report_header() -> str:
    return f"tests are drawn with DRAW={SEED}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests are a million objects that stay. A `gc.collect` of a test does not look at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("::" in argument for argument in config.args):
        return
    shuffle(items, SEED)
    if config.option.all:
        return
    chosen = usual(items, SEED)
    if config.option.rest is not None:
        left = [item for item in items if item not in chosen]
        chosen = set(Random(SEED).sample(left, round(config.option.rest * len(left))))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """Orders the files by the seed, and leaves each one's tests as they are."""
    files = defaultdict[Path, list[pytest.Item]](list)
    for item in items:
        files[item.path].append(item)
    names = list(files)
    Random(seed).shuffle(names)
    items[:] = [item for name in names for item in files[name]]


def usual(items: list[pytest.Item], seed: str) -> set[pytest.Item]:
    """The tests of a run without options."""
    chosen, drawn = set[pytest.Item](), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("drawn"):
            drawn[item.nodeid.partition("[")[0]].append(item)
        elif not item.get_closest_marker("thorough"):
            chosen.add(item)
    for name, cases in drawn.items():
        mark = cases[0].get_closest_marker("drawn")
        assert mark is not None
        count, random = mark.args[0], Random(seed + name)
        chosen.update(spread(cases, count if count >= 1 else int(random.random() < count), random))
    return chosen


def spread(cases: list[pytest.Item], count: int, random: Random) -> list[pytest.Item]:
    """Draws `count` cases: first those that show a parameter's value which no case before them shows."""
    shown = set[tuple[str, str]]()
    new, rest = list[pytest.Item](), list[pytest.Item]()
    for case in random.sample(cases, len(cases)):
        params = case.callspec.params if hasattr(case, "callspec") else {}
        values = {(name, str(value)) for name, value in params.items()}
        (rest if values <= shown else new).append(case)
        shown |= values
    return (new + rest)[:count]
