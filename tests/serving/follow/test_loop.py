"""The loop of a follower: what ends it, and what it leaves as it was."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from campaigns.follows import rows_now
from tableside.loader.deltas.apply import apply, position_of
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.deltas.pack import PackedChanges
from tableside.loader.segment import memory
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.serving.errors import SourceError
from tableside.serving.follow.loop import Step, Window, follow


class Counting:
    """A source whose positions are 1, 2 and so on; batch n writes row n. before: what is done before batch
    n is given."""

    name = "counting"

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        self.asked: list[str | None] = []
        self._before = before

    def read(
        self, after: str | None, rows: int, wait_s: float, most: int | None = None
    ) -> ChangeBatch | None:
        self.asked.append(after)
        number = int(after or 0) + 1
        self._before(number)
        return ChangeBatch(self._changes(number), self.name, str(number), after, 1e9)

    def _changes(self, number: int) -> list[TableChanges]:
        return [TableChanges("user", np.array([number]), np.full((1, 4), number, np.float32))]

    def content(self, position: str) -> dict[str, str]:
        return {}

    def close(self) -> None: ...


@pytest.fixture
def model(publish: Callable[..., Any], root: Path) -> Model:
    publish({"user": np.zeros((10, 4), np.float32)}, formats={"user": "fp32"})
    return Model(root, "demo")


def run(model: Model, source: Counting, batches: int, **options: Any) -> list[Step]:
    steps: list[Step] = []
    follow(model, source, 1, 0.0, lambda: len(steps) >= batches, steps.append, **options)
    return steps


def test_each_batch_begins_where_the_state_ends(model: Model) -> None:
    source = Counting()
    steps = run(model, source, 3)
    assert source.asked == [None, "1", "2"] and [s.position for s in steps] == ["1", "2", "3"]
    assert [s.applied.state.sequence for s in steps] == [1, 2, 3] and steps[0].lag_s > 1e8
    again = Counting()
    run(model, again, 1)
    assert again.asked == ["3"] and position_of(model, "counting") == "4"


def test_a_batch_without_a_row_keeps_its_position(model: Model) -> None:
    """Be it the first one of a version, or behind others."""

    class Sparse(Counting):
        def _changes(self, number: int) -> list[TableChanges]:
            return [] if number in (1, 3) else super()._changes(number)

    source = Sparse()
    steps = run(model, source, 3)
    assert source.asked == [None, "1", "2"] and [s.applied.rows for s in steps] == [0, 1, 0]
    assert position_of(model, "counting") == "3" and rows_now(model, "user")[:4, 0].tolist() == [0, 0, 2, 0]


def test_a_window_waits_for_its_first_change(model: Model) -> None:
    """While it has time."""

    class Late(Counting):
        def read(self, *asked: Any) -> ChangeBatch | None:  # type: ignore[override]
            batch = super().read(*asked)
            return batch if len(self.asked) > 2 else None

    window = Window(PackedChanges(attach_state(model)), None, None)
    window.read(source := Late(), 1, math.inf, lambda: False)
    assert source.asked == [None] * 3 and window.position == "1"


def test_a_group_is_one_batch(model: Model) -> None:
    """Whatever the time or the reads it comes in; what follows is another one. passed: of all reads."""

    class Groups(Counting):
        def read(
            self, after: str | None, rows: int, wait_s: float, most: int | None = None
        ) -> ChangeBatch | None:
            number = int(after or 0) + 1
            batch = super().read(after, rows, wait_s, most)
            assert batch is not None
            is_end = number == 6  # of 4 and 5 the end shows where the next one begins
            return replace(
                batch,
                group=str((number - 1) // 3),
                passed=(f"{number} a", f"{number} b"),
                is_group_end=is_end,
            )

    steps: list[Step] = []
    follow(model, Groups(), 1000, 60.0, lambda: len(steps) == 2, steps.append)
    assert [step.position for step in steps] == ["3", "6"] and [s.applied.rows for s in steps] == [3, 3]
    window, source = Window(PackedChanges(attach_state(model)), "6", "6", 60.0), Groups()
    window.read(source, 1000, 0.0, lambda: False)
    assert window.batch(source, "6").passed == [f"{n} {part}" for n in (7, 8, 9) for part in "ab"]


def test_room_in_shared_memory_is_waited_for(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a server that is away: said once, and the batch is applied once where there is room again; a
    follower that shall stop stops."""
    free = [0, 0, 0]

    def available(where: Path) -> int:
        return free.pop() if free else real(where)

    real = memory.available_bytes
    monkeypatch.setattr(memory, "available_bytes", available)
    steps = run(model, source := Counting(), 2)
    assert [s.position for s in steps] == ["1", "2"] and source.asked == [None, "1"] and not free
    assert rows_now(model, "user")[:4, 0].tolist() == [0, 1, 2, 0]
    told = [r.getMessage() for r in caplog.records if r.name == "tableside.follow"]
    assert len(told) == 2 and "0 bytes free" in told[0] and "nothing of the batch is visible" in told[0]
    assert "there was room again" in told[1]
    monkeypatch.setattr(memory, "available_bytes", lambda where: 0)
    asked = iter([False] * 3)
    follow(model, Counting(), 1, 0.0, lambda: next(asked, True), steps.append)
    assert len(steps) == 2 and position_of(model, "counting") == "2"


def test_a_version_that_becomes_live_meanwhile(model: Model, publish: Callable[..., Any], root: Path) -> None:
    """Nothing of the batch is applied to it; the follower ends, as the new version says nothing of its
    source."""

    def publish_another(number: int) -> None:
        if number == 2:
            publish({"user": np.ones((10, 4), np.float32)}, formats={"user": "fp32"})

    class Late(Counting):
        def _changes(self, number: int) -> Any:
            publish_another(number)
            yield from super()._changes(number)

    with pytest.raises(SourceError, match="applied it up to 1, and the model's state says nothing of it"):
        run(model, Late(), 9)
    assert model.current() == 2 and position_of(model, "counting") is None


def test_another_state_becomes_live_meanwhile(model: Model) -> None:
    """As one does when an operator goes back by a file that was applied, in the moment before the batch is
    visible: the batch lies over that state."""
    run(model, Counting(), 1)
    apply(model, ChangeBatch([TableChanges("user", np.array([9]), np.ones((1, 4), np.float32))]))

    class Crossed(Counting):
        def _changes(self, number: int) -> Any:
            if len(self.asked) == 1:
                model.activate(1, 1)
            yield from super()._changes(number)

    source = Crossed()
    steps = run(model, source, 2)
    assert source.asked == ["1", "2"] and [s.position for s in steps] == ["2", "3"]
    assert rows_now(model, "user")[:, 0].tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0, 0]


def test_a_batch_is_read_again_where_a_compaction_ended_meanwhile(model: Model) -> None:
    """Its rows were packed for the version before, and the new one keeps the positions."""
    run(model, Counting(), 1)

    class Crossed(Counting):
        def _changes(self, number: int) -> Any:
            if len(self.asked) == 1:
                compact(model)
            yield from super()._changes(number)

    source = Crossed()
    steps = run(model, source, 2)
    assert source.asked == ["1", "1", "2"] and [s.position for s in steps] == ["2", "3"]
    assert [s.applied.state.version for s in steps] == [2, 2]
    assert rows_now(model, "user")[:, 0].tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0, 0]


def test_a_window_takes_several_reads_and_packs_what_comes(model: Model) -> None:
    """One state for all that came until it was time, with the place of the last read and the time of the
    first."""
    source = Counting()
    steps: list[Step] = []
    follow(model, source, 5, 60.0, lambda: bool(steps), steps.append)
    assert source.asked == [None, "1", "2", "3", "4"]
    (step,) = steps
    assert (step.applied.rows, step.applied.state.sequence, step.position) == (5, 1, "5") and step.lag_s > 1e8
    assert rows_now(model, "user")[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 0]


def test_what_came_before_a_bad_read_is_applied(model: Model) -> None:
    """Be it refused by the source or by the model; then the follower ends and names the bad part alone."""

    class Wrong(Counting):
        def _changes(self, number: int) -> list[TableChanges]:
            good = super()._changes(number)
            return (
                good
                if number != 3
                else [*good, TableChanges("user", np.array([99]), np.zeros((1, 4), np.float32))]
            )

    with pytest.raises(SourceError, match=r"what lies at 3 was refused: .*id 99 is outside"):
        follow(model, Wrong(), 100, 60.0, lambda: False, lambda _: None)
    assert position_of(model, "counting") == "2" and rows_now(model, "user")[:4, 0].tolist() == [0, 1, 2, 0]


def test_a_reset_begins_anew_once(model: Model) -> None:
    run(model, Counting(), 3)
    source = Counting()
    run(model, source, 2, reset=True)
    assert source.asked == [None, "1"] and position_of(model, "counting") == "2"


def test_a_position_that_somebody_else_moved_ends_a_follower(model: Model) -> None:
    """Between two of its batches."""
    with pytest.raises(
        SourceError, match="counting: this follower applied it up to 1, and the model's state says 2; another"
    ):
        follow(model, Counting(), 1, 0.0, lambda: False, lambda _: print(run(model, Counting(), 1)))
    assert position_of(model, "counting") == "2"


def test_two_that_read_the_same_batch(model: Model) -> None:
    """The second one to apply it is refused, with both positions; the state is the first one's."""
    source = Counting(lambda number: run(model, Counting(), 1) and None if number == 3 else None)
    with pytest.raises(SourceError, match=r"counting.*2.*3"):
        run(model, source, 9)
    assert position_of(model, "counting") == "3"
