"""Counts of how often rows are asked for."""

from pathlib import Path

import numpy as np
from hot_reading import DIM, IDS, ROWS, Reading, ask, publish

from tableside.loader.hot.counts import HOT, MOST, STEP, RowCounts, counts_name
from tableside.loader.hot.hot import hot_folder, hot_path
from tableside.loader.hot.warm import warm
from tableside.loader.versions.versions import Model
from tableside.quant import LookupKind, Place, Pooling, choose


def test_of_a_request_all_lookups_are_counted_or_none(reading: Reading) -> None:
    """Else those at its front would be counted more often."""
    kinds = [LookupKind(reading.placed.tables[name], Pooling.NONE) for name in ("dense", "raw")]
    places = [Place(k, 8 * k * ROWS, ROWS, -1, 0, 0, -1, 4 * k * ROWS * DIM) for k in range(2)]
    inputs, out = np.concatenate((np.arange(ROWS), IDS)).tobytes(), np.empty(8 * ROWS * DIM, np.uint8)
    planner = choose().planner(kinds)
    for _ in range(5):
        planner.plan(np.array(places).tobytes()).run(inputs, out)
    dense, raw = (reading.counts.tables[name].sum() for name in ("dense", "raw"))
    assert dense == raw > 0 and reading.counts.sampled == 2 * dense / STEP


def test_counts_are_halved_and_do_not_overflow(model: Model, reading: Reading) -> None:
    ask(reading, "dense", np.arange(10), 300)
    with hot_folder(model.root, "m") as folder:
        counts = RowCounts.opened(folder, reading.version)
        assert counts is not None
        assert set(counts.tables["dense"][:10].tolist()) == {MOST // STEP * STEP}
        counts.mark({"dense": np.array([3])})
        counts.add("dense", np.array([3, 20]), np.array([100, 5], np.uint8))
        assert counts.tables["dense"][[2, 3, 20]].tolist() == [120, MOST | HOT, 5]
        assert counts.sampled == 3000
        counts.age()
        assert counts.tables["dense"][[2, 3, 20]].tolist() == [60, MOST // 2 | HOT, 2]
        assert counts.sampled == 0
        assert counts.histogram("dense")[2] == 1
        counts.mark({})
        assert counts.tables["dense"][3] == MOST // 2


def test_counts_are_taken_over_once(model: Model, reading: Reading, tmp_path: Path) -> None:
    ask(reading, "dense", np.arange(100))
    publish(model.root, tmp_path)
    assert reading.follow()
    for _ in range(3):
        assert warm(model, 2, 1).rows == 0  # not one row has room
        assert reading.counts.tables["dense"].max() == STEP


def test_counts_that_went_are_begun_anew(model: Model, reading: Reading) -> None:
    (hot_path(model.root, "m") / counts_name(1)).unlink()
    assert reading.follow() and not reading.follow()
    ask(reading, "dense", np.arange(100))
    assert warm(model, 1, 1 << 20).rows >= 100
