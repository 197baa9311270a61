"""A GPU's cache over a swap of versions: rows whose bytes did not change are kept, the others go. The
kernels run in Triton's interpreter, or on the GPU that --device names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
from cache_check import check
from keyed_tables import ids_of
from support import rows_of

from tableside.loader.load.load import load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.versions.states import State
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.settings import ServerSettings

pytestmark = pytest.mark.for_gpu

Publish = Callable[..., Any]
ROWS, DIM = 400, 64
SAME, CHANGED = (
    np.arange(100, 140),
    np.arange(200, 230),
)  # both are in the cache when the second version comes
FEATURES = {"t": {"table": "t", "pooling": "none"}, "u": {"table": "u", "pooling": "none"}}


def tables_of(changed: np.ndarray) -> dict[str, np.ndarray]:
    """Two tables, of which the first has other values in some rows."""
    values = rows_of(ROWS, DIM, 1)
    values[changed] += 1
    return {"t": values, "u": rows_of(ROWS // 2, DIM, 2)}


class Worker:
    """The engine of a worker on a GPU whose tables all go through a cache."""

    def __init__(self, root: Path) -> None:
        settings = ServerSettings(
            devices=(tables.serve_device(),),
            hbm_budget=1 << 20,
            placement="cached",
            gather_threads=0,
            gpu_from_ids=0,
        )
        self.placer = Placer(settings, choose())
        self.placer.open()
        self.root = root
        self.engine = Engine(Model(root, "demo"), settings, self.placer)
        self.engine.swap(self.engine.attach())

    def look_up(self, ids: np.ndarray, name: str = "t") -> tuple[int, int]:
        """(hits, rows fetched) of a lookup, whose vectors are those of the version that is served."""
        gpu, cache, served = self.placer.gpu, self.placer.cache, self.engine.served()
        assert gpu is not None and cache is not None
        table = served.placed.on_gpu[name]
        number = table.residence._registered.number  # type: ignore[attr-defined]
        before = cache.statistics(wait=True).tables[number]
        found = gpu.lookup(table, ids, pooling=Pooling.NONE)
        expected = choose().lookup(served.segment.tables[name], ids, pooling=Pooling.NONE)
        np.testing.assert_allclose(
            found, expected, rtol=1e-6, atol=1e-6
        )  # two roundings of fp32, at a bias of up to 4
        after = cache.statistics(wait=True).tables[number]
        return after.hits - before.hits, after.fetched - before.fetched

    def take(self, version: int) -> None:
        """Takes a version as `Service` does."""
        self.engine.swap(self.engine.attach(State(version), as_successor=True))

    def check(self) -> None:
        """Every slot holds the bytes of a row of the version that is served: of no other version is there
        any."""
        cache = self.placer.cache
        assert cache is not None
        names = {n: t.name.removeprefix("demo/") for n, t in cache.statistics(wait=True).tables.items()}
        packed = {name: table.packed for name, table in self.engine.served().segment.tables.items()}
        check(cache, lambda number, row: packed[names[number]][row].tobytes())


@pytest.fixture
def worker(publish: Publish, root: Path) -> Worker:
    """It serves version 1. Its cache has SAME and CHANGED, the former hotter."""
    publish(tables_of(np.arange(0)), features=FEATURES)
    made = Worker(root)
    made.look_up(np.concatenate([SAME, CHANGED]))
    for _ in range(3):
        made.look_up(SAME)
    assert made.look_up(SAME) == (SAME.size, 0)
    return made


@pytest.mark.thorough
def test_unchanged_rows_hit_at_once(worker: Worker, publish: Publish) -> None:
    """The first batch after the swap finds each of them, and fetches nothing; rows that changed and were
    not hot are fetched, and none is answered as it was."""
    publish(tables_of(CHANGED), features=FEATURES)
    worker.take(2)
    assert worker.look_up(SAME) == (SAME.size, 0)
    assert worker.look_up(CHANGED) == (0, CHANGED.size)
    worker.check()


@pytest.mark.thorough
def test_a_table_that_was_taken_over_stays_warm(worker: Worker, publish: Publish) -> None:
    """After `load --only t` all that the cache held of `u` is there, the coldest row too."""
    held = np.arange(20, 180)
    worker.look_up(held, "u")
    publish(tables_of(np.arange(ROWS)), features=FEATURES, settings=LoadSettings(only=("t",)))
    worker.take(2)
    assert worker.look_up(held, "u") == (held.size, 0)
    worker.check()


@pytest.mark.thorough
def test_the_served_version_keeps_its_rows_until_the_next_one_takes_over(
    worker: Worker, publish: Publish, root: Path
) -> None:
    """While the next version is placed, requests to the present one hit; its rows change hands in one
    step."""
    publish(tables_of(CHANGED), features=FEATURES)
    present = worker.engine.served()
    segment = Model(root, "demo").attach(2)
    placed = worker.placer.place(segment, present.placed)
    assert worker.look_up(SAME) == (SAME.size, 0)
    placed.take_over()
    cached = placed.on_gpu["t"].residence.hot()
    assert set(SAME) <= set(cached) and not set(CHANGED) & set(cached)
    assert worker.look_up(CHANGED) == (CHANGED.size, 0)  # these did not change hands
    assert worker.look_up(SAME) == (0, SAME.size)
    placed.take_over()  # a second call has nothing to do
    assert set(placed.on_gpu["t"].residence.hot()) == set(cached)


@pytest.mark.thorough
def test_hot_rows_that_changed_are_fetched_before_the_swap(worker: Worker, publish: Publish) -> None:
    """They are in the cache with their new bytes."""
    publish(tables_of(SAME), features=FEATURES)
    worker.take(2)
    hits, fetched = worker.look_up(SAME)
    # The hotter half of SAME, CHANGED and the first and last row, which the warm-up looks up: at least 34
    # rows of SAME.
    assert hits >= (SAME.size + CHANGED.size) // 2 - 2 and hits + fetched == SAME.size
    assert worker.look_up(CHANGED) == (CHANGED.size, 0)
    worker.check()


@pytest.mark.thorough
def test_a_replaced_version_is_let_go(worker: Worker, publish: Publish) -> None:
    """Nothing that was planned for the swap keeps the older segment mapped, generation after generation."""
    for version in (2, 3):
        publish(tables_of(CHANGED + version), features=FEATURES)
        before = worker.engine.served().segment.path
        worker.take(version)
        assert str(before) not in Path("/proc/self/maps").read_text()
        assert worker.look_up(SAME)[0] == SAME.size
    worker.check()


def publish_raw(root: Path, folder: Path, ids: np.ndarray, values: np.ndarray) -> None:
    """A version with one table of raw ids."""
    np.savez(folder / "raw.npz", **{"t.weight": values, "t.ids": ids})
    table = {"key": "t.weight", "ids": "raw", "missing": "zero", "buckets": 4}
    features = {"t": {"table": "t", "pooling": "none"}}
    load(
        parse_model(
            {"name": "demo", "checkpoint": "raw.npz", "tables": {"t": table}, "features": features}, folder
        ),
        root,
    )


@pytest.mark.drawn(0.5)
def test_raw_ids_keep_their_rows_wherever_these_lie_now(root: Path, tmp_path: Path) -> None:
    """The next version has more ids in another order, so rows have other numbers; what is cached of ids
    whose rows did not change hits at once. An id that is gone is answered by the policy."""
    ids, values = ids_of(ROWS), rows_of(ROWS, DIM, 1)
    publish_raw(root, tmp_path, ids, values)
    worker = Worker(root)
    gone = np.arange(300, 310)
    worker.look_up(ids[np.concatenate([SAME, CHANGED, gone])])
    for _ in range(3):
        worker.look_up(ids[SAME])
    values[CHANGED] += 1
    before = worker.engine.served().segment.tables["t"].row_map
    stays = np.setdiff1d(np.arange(ROWS), gone)[::-1]
    more = np.setdiff1d(np.arange(50), ids)
    publish_raw(
        root,
        tmp_path,
        np.concatenate([ids[stays], more]),
        np.concatenate([values[stays], rows_of(more.size, DIM, 3)]),
    )
    worker.take(2)
    after = worker.engine.served().segment.tables["t"].row_map
    assert (
        before is not None and after is not None and (before.find(ids[SAME]) != after.find(ids[SAME])).any()
    )
    assert worker.look_up(ids[SAME]) == (SAME.size, 0)
    assert (
        sum(worker.look_up(ids[CHANGED])) == CHANGED.size
    )  # hot ones may have been fetched anew; none is stale
    assert worker.look_up(ids[gone])[1] <= 1  # the default row
    worker.check()
