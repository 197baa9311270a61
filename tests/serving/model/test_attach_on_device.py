"""How a version is attached on a device: rows are verified while they are placed, and nothing damaged is
served."""

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
from raw_segments import RawTable, publish_tables
from support import flip_bit, rows_of

pytest.importorskip("triton")
from tableside.loader.errors import SegmentError
from tableside.loader.load.settings import LoadSettings
from tableside.loader.segment import layout
from tableside.loader.segment.segment import Segment, SegmentFile
from tableside.loader.versions.versions import Model
from tableside.quant import Lookup, Pooling, choose
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.settings import ServerSettings

Publish = Callable[..., Any]


@pytest.fixture
def engine(root: Path, publish: Publish) -> Engine:
    """Of a model with one table; nothing is attached."""
    publish_rows(publish)
    return engine_of(root)


@pytest.fixture
def table_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each table gets a file of its own."""
    monkeypatch.setattr(layout, "LARGE_PAGES", 0)


def publish_rows(publish: Publish) -> None:
    publish(
        {"t": rows_of(3000, 256)}, formats={"t": "fp32"}, features={"f": {"table": "t", "pooling": "none"}}
    )


def engine_of(root: Path) -> Engine:
    placer = Placer(ServerSettings(devices=(tables.serve_device(),), hbm_budget=64 << 20), choose())
    placer.open()
    return Engine(Model(root, "demo"), ServerSettings(), placer)


def damage(engine: Engine, at: int) -> None:
    """Flips a bit of the published file."""
    flip_bit(engine.model.path(1), at)


def test_rows_are_verified_while_they_are_placed(
    engine: Engine, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other to have begun; and the version is there only when both are done."""
    verifying, placing = threading.Event(), threading.Event()
    verify, place = Segment.verify_file, Placer.place
    verified: list[int] = []

    def slow_verify(self: Segment, file: SegmentFile, threads: int = 1, rest: float = 0.0) -> None:
        verifying.set()
        assert placing.wait(300)
        verify(self, file, threads, rest)
        verified.append(threads)

    def slow_place(self: Placer, *arguments: Any) -> Any:
        placing.set()
        assert verifying.wait(300)
        return place(self, *arguments)

    monkeypatch.setattr(Segment, "verify_file", slow_verify)
    monkeypatch.setattr(Placer, "place", slow_place)
    served = engine.attach()
    assert verified == [4] and served.verified_at > 0
    engine.swap(served)
    publish_rows(publish)
    engine.attach(as_successor=True)
    assert verified == [4, 1]  # requests run beside it


@pytest.mark.usefixtures("table_files")
@pytest.mark.drawn(0.5)
def test_a_table_that_did_not_change_stays_in_hbm(root: Path, publish: Publish) -> None:
    """A version that replaces another shares the memory of tables in the same file; what else that one had
    goes with it."""
    values = {name: rows_of(300, 16, n) for n, name in enumerate("ab")}
    formats = dict.fromkeys(values, "fp32")
    features = {name: {"table": name, "pooling": "none"} for name in values}
    publish(values, formats=formats, features=features)
    engine = engine_of(root)
    engine.swap(engine.attach())
    before = dict(engine.served().placed.on_gpu)
    segment = weakref.ref(engine.served().segment)
    publish(
        {"a": 2 * values["a"], "b": 3 * values["b"]},
        formats=formats,
        features=features,
        settings=LoadSettings(only=("b",)),
    )
    alone = engine.attach().placed.on_gpu  # beside version 1, which stays
    assert alone["a"].residence is not before["a"].residence
    del alone
    engine.swap(engine.attach(as_successor=True))
    after = engine.served().placed.on_gpu
    assert after["a"].residence is before["a"].residence
    assert after["b"].residence is not before["b"].residence
    del before
    gc.collect()
    assert segment() is None
    for name, expected in (("a", values["a"]), ("b", 3 * values["b"])):
        plan = engine.served().backend.plan([Lookup(after[name], Pooling.NONE, 0, 300, 0)])
        out = np.empty((300, 16), np.float32)
        plan.run(np.arange(300).tobytes(), out.reshape(-1).view(np.uint8))
        np.testing.assert_array_equal(out, expected)


def test_a_version_with_a_damaged_row_is_refused(engine: Engine) -> None:
    """Wherever it lies: threads read parts of all rows."""
    (stored,) = engine.model.attach().header.tables
    for row in (0, 1700, 2999):
        damage(engine, stored.offset + row * stored.row_bytes + 7)
        with pytest.raises(
            SegmentError, match=r"table 't', rows \[\d+, \d+\): the checksum is wrong"
        ) as refused:
            engine.attach()
        first, after = map(int, str(refused.value).partition("rows [")[2].partition(")")[0].split(", "))
        assert first <= row < after
        damage(engine, stored.offset + row * stored.row_bytes + 7)
    np.testing.assert_array_equal(
        engine.attach().segment.tables["t"].packed, engine.model.attach().tables["t"].packed
    )


def test_a_damaged_index_is_found_before_anything_reads_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would lead kernels anywhere."""
    publish_tables(root, {"t": RawTable(np.arange(100, 400) * 977, rows_of(300, 8))})
    engine = engine_of(root)
    (stored,) = engine.model.attach().header.tables
    assert stored.ids is not None and stored.ids.index is not None
    damage(engine, stored.ids.index.offset + 150)  # behind the directory, which is checked with the header
    monkeypatch.setattr(Placer, "place", lambda *arguments: pytest.fail("the version was placed"))
    with pytest.raises(SegmentError, match="the id index of table 't': the checksum is wrong"):
        engine.attach()
