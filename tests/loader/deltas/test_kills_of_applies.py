"""Applies, merges and compactions that are killed before each of their steps, or find no room from it on.

The steps are the calls that change files and names (helpers/killing.py). After each the live state is that
before a batch or that after it, whole; what follows works; and `gc` leaves what is live alone.
"""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from changing import Oracle
from killing import What, run_until
from support import files_of

from campaigns.common import until
from tableside.loader.deltas import apply as applying
from tableside.loader.deltas.apply import ApplySettings, apply, position_of
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.deltas.merging import Merges
from tableside.loader.errors import NoSpace
from tableside.loader.versions.retention import Retention, collect_states
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model

SETTINGS = ApplySettings(threads=1, keep=Retention(0))
Changes = list[TableChanges]


class Story:
    """A model with two deltas, the batches that come next, and what the rows are after each. begun: how
    many were applied."""

    def __init__(self, root: Path) -> None:
        self.oracle = Oracle(root)
        self.root, self.rows, self.batches = root, [dict(self.oracle.rows)], list[Changes]()
        for rows in (500, 5, 300, 5, 5):
            self.batches.append(self.oracle.change(rows))
            self.rows.append(dict(self.oracle.rows))
        self.begun = 2
        for _ in range(self.begun):
            self.apply_next(Model(root, "demo"))

    def apply_next(self, model: Model, merges: Merges | None = None) -> bool:
        """Applies the batch behind the live state; False: there is none."""
        done = position_of(model, "story")
        if (number := int(done or 0)) == len(self.batches):
            return False
        apply(
            model, ChangeBatch(self.batches[number], "story", str(number + 1), done), SETTINGS, merges=merges
        )
        return True

    def check(self, model: Model) -> None:
        """The live state is whole: its rows are those after the batch at its position."""
        segment = attach_state(model, None, "full")
        number = int(position_of(model, "story") or 0)
        assert self.begun <= number <= len(self.batches)
        self.oracle.rows = self.rows[number]
        self.oracle.check(segment)

    def collect(self, model: Model) -> None:
        """`gc` leaves nothing but what is live, and locks."""
        model.collect(0)
        collect_states(model, Retention(0))
        segment = attach_state(model, None, "header")
        live = {segment.path.name, *(delta.path.name for delta in segment.deltas)}
        assert files_of(model.folder) == live


def apply_one(story: Story, model: Model) -> None:
    story.apply_next(model)


def apply_beside_merges(story: Story, model: Model) -> None:
    """As a follower does. One batch is published with a merged delta below it."""
    with Merges(model, 1) as merges:
        while story.apply_next(model, merges):
            if merges.is_running():
                until(merges._running.done, what="the merge to end")


def compact_with_changes(story: Story, model: Model) -> None:
    """While a batch is applied, which is carried over."""
    compact(
        model,
        SETTINGS,
        lambda done, total: None if position_of(model, "story") != "2" else apply_one(story, model),
    )


WORKS: dict[str, Callable[[Story, Model], Any]] = {
    "apply": apply_one,
    "merges beside": apply_beside_merges,
    "compact": compact_with_changes,
}
FEWEST = {"apply": 6, "merges beside": 30, "compact": 20}  # steps that it has at least


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(tmp_path_factory.mktemp("story"))


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["kill", "full"])
@pytest.mark.parametrize("name", WORKS)
def test_every_step(story: Story, root: Path, name: str, what: What, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is, the state is that before a batch or after it; files of the dead go with the next
    change, or by `gc`."""
    monkeypatch.setattr(applying, "SMALL_BYTES", 1 << 14)
    for step in itertools.count(1):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(story.root, root)
        model = Model(root, "demo")
        was_ended = run_until(step, what, lambda m=model: WORKS[name](story, m), (NoSpace, OSError))  # type: ignore[misc]
        story.check(model)
        if what == "full":
            assert not [n for n in os.listdir(model.folder) if n.endswith((".partial", ".merged"))]
        if step % 2:
            story.collect(model)
        if name == "compact" and step % 4 < 2:
            compact(model, SETTINGS)
        story.apply_next(model)
        story.collect(model)
        story.check(model)
        if not was_ended:
            break
    assert step > FEWEST[name], f"it has {step - 1} steps"
