"""A GPU's cache over tables on a disk, as a worker places them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
from disk_models import DIM, VALUES, load_floats

from tableside.loader.deltas.apply import ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.hot.warm import warm
from tableside.loader.segment.blocks import BlockReader
from tableside.loader.versions.retention import Retention
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.model.placement import Placer
from tableside.serving.model.placements import Placements
from tableside.serving.settings import ServerSettings

pytestmark = pytest.mark.gpu


@pytest.fixture
def model(disk: Path, tmp_path: Path) -> Model:
    load_floats(disk, tmp_path, VALUES)
    return Model(disk, "m")


@pytest.mark.drawn(0.5)
def test_a_cache_on_a_device_fetches_hot_rows_from_memory(model: Model) -> None:
    """Those that it missed before, also where newer changes lie over them."""
    cached = {"devices": (tables.serve_device(),), "placement": "cached", "hbm_budget": 1 << 20}
    read: list[int] = []

    def count_reads(reader: BlockReader, *table: str) -> None:
        reader.count = lambda where, rows: read.append(rows)

    settings = ServerSettings(host_cache=1 << 20, **cached)
    placer, segment = Placer(settings, choose(), count_reads=count_reads), model.attach()
    placer.open()
    placed, ids = placer.place(segment), np.arange(200)
    assert placed.placements["big"] == "cached_stored" and placer.cache is not None

    def check(placed: Placements, expected: np.ndarray) -> None:
        with placer.cache._working():  # type: ignore[union-attr]
            placer.cache._index.empty()  # type: ignore[union-attr]
        found = placer.gpu.lookup(placed.on_gpu["big"], ids, pooling=Pooling.NONE)  # type: ignore[union-attr]
        np.testing.assert_array_equal(found, expected)

    check(placed, VALUES[ids])
    assert sum(read) == 200 and placed.hot == 0 and not placer.has_hotter(segment, placed)
    assert warm(model, 1, 1 << 20).rows == 200 and placer.has_hotter(segment, placed)
    changes = [TableChanges("big", np.array([7]), np.full((1, DIM), 2.0, np.float32))]
    apply(model, ChangeBatch(changes), ApplySettings(keep=Retention(2)))
    changed = VALUES[ids]
    changed[7] = 2.0
    for state, expected in ((segment, VALUES[ids]), (attach_state(model, reuse=segment), changed)):
        hotter = placer.place(state)
        assert hotter.hot == 1 and not placer.has_hotter(state, hotter)
        check(hotter, expected)
    check(placed, VALUES[ids])  # which has no changes
    assert sum(read) == 200


def test_a_default_row_stands_for_no_late_row(disk: Path, tmp_path: Path) -> None:
    """So that no start waits for it. The CPU's lookups have it."""
    table = {"key": "big", "row_format": "fp32", "missing": "zero"}
    load_floats(disk, tmp_path, VALUES, tables={"big": table}, features={"big": {"table": "big"}})
    segment = Model(disk, "m").attach()
    settings: dict[str, Any] = {"devices": (tables.serve_device(),), "hbm_budget": 1 << 20}
    for placement, has_default in (("stored", True), ("cached", False)):
        placer = Placer(ServerSettings(placement=placement, **settings), choose())
        placer.open()
        (reader,) = placer.disk.readers(segment, placer.kinds(segment)).values()
        assert (reader.default is not None) is has_default
