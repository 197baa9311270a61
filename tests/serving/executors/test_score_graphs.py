"""Scorers whose calls are replayed as graphs: which rows a graph has, and what is called without one."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tableside.serving.errors import ApiError, ErrorKind
from tableside.serving.model import device_calls
from tableside.serving.model.device_calls import DeviceCalls, _Graph

pytestmark = pytest.mark.for_gpu


class Replayed(DeviceCalls):
    """Plays graphs where there is no GPU: a replay runs the scorer on its room again, all of it."""

    def __init__(self, *arguments: Any, fails: bool = False, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._captures, self.fails, self.captured = self._captures or more.get("is_row_wise", True), fails, []

    def _captured(self, room: Any) -> Any:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured.append(room.rows)
        scores = self._run(room.inputs)

        class Graph:
            @staticmethod
            def replay() -> None:
                scores.copy_(self._run(room.inputs))

        return _Graph(Graph(), scores)


def calls_of(**more: Any) -> tuple[Replayed, list[int]]:
    rows: list[int] = []

    def run(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        rows.append(len(inputs[0]))
        return (inputs[0].sum(1) + inputs[1].sum(1)).unsqueeze(1)

    arguments = {"rows": (1, 1 << 20), "is_row_wise": True, "name": "played version 3"} | more
    return Replayed(run, [4, 2], torch.device("cpu"), **arguments), rows


def fill(calls: DeviceCalls, count: int, value: float) -> Any:
    room = calls.room(count)
    for matrix in room.inputs:
        matrix[:count] = value
    return room


def test_a_graph_has_the_rows_of_the_next_power_of_two() -> None:
    """Made once for each; rows behind those of the batch do not count, whatever they are."""
    calls, rows = calls_of()
    for count, value in ((5, 1.0), (8, 2.0), (6, 3.0), (3, 4.0)):
        room = fill(calls, count, value)
        np.testing.assert_array_equal(calls.score(room, 0, count, True), np.full(count, 6 * value))
    assert calls.captured == [8, 4]
    assert set(rows) == {8, 4}


def test_scores_stay_while_two_other_batches_begin() -> None:
    """As many as are under way, and one that ends."""
    calls, _ = calls_of()
    begun = [(calls.score(fill(calls, 3, value), 0, 3, True), value) for value in (1.0, 2.0, 3.0)]
    for scores, value in begun:
        np.testing.assert_array_equal(scores, np.full(3, 6 * value))


def test_parts_of_a_batch_and_many_rows_are_called_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """One room of many rows is there at a time."""
    monkeypatch.setattr(device_calls, "GRAPH_ROWS", 8)
    calls, rows = calls_of()
    room = fill(calls, 7, 1.0)
    np.testing.assert_array_equal(calls.score(room, 2, 3, False), np.full(3, 6.0))
    for count in (9, 40, 9):
        np.testing.assert_array_equal(
            calls.score(fill(calls, count, 2.0), 0, count, True), np.full(count, 12.0)
        )
    assert rows == [3, 9, 40, 9] and not calls.captured
    assert sorted(calls._rooms) == [8, 16]


@pytest.mark.parametrize("more", [{"rows": (6, 7)}, {"is_row_wise": False}])
def test_scorers_that_take_no_more_rows_are_called_as_they_are(more: dict[str, Any]) -> None:
    """Programs that were exported for so many rows alone, and those that look at other rows."""
    calls, rows = calls_of(**more)
    calls.warm_up(lambda count: None)
    assert not rows
    np.testing.assert_array_equal(calls.score(fill(calls, 7, 1.0), 0, 7, True), np.full(7, 6.0))
    assert rows == [7] and not calls.captured


def test_a_scorer_that_is_not_captured_runs_without(caplog: pytest.LogCaptureFixture) -> None:
    """The log says so once."""
    calls, _ = calls_of(fails=True)
    with caplog.at_level(logging.WARNING, "tableside"):
        for count in (5, 30, 5):
            np.testing.assert_array_equal(
                calls.score(fill(calls, count, 1.0), 0, count, True), np.full(count, 6.0)
            )
    assert [r.getMessage() for r in caplog.records] == [
        "the scorer of played version 3 is not captured as a CUDA graph, and runs without: "
        "operation not permitted when stream is capturing"
    ]


@pytest.mark.parametrize(("most", "graphs"), [(1 << 20, 11), (40, 6)])
def test_graphs_of_few_rows_are_there_before_the_first_request(most: int, graphs: int) -> None:
    """As far as a call may have so many rows."""

    def admit(count: int) -> None:
        if count > most:
            raise ApiError(413, ErrorKind.TOO_LARGE, "too many")

    calls, _ = calls_of()
    calls.warm_up(admit)
    assert calls.captured == [1 << n for n in range(graphs)]
