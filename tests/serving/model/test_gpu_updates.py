"""States of a version on a GPU: each answers as a dictionary of rows says, and shares what the version
has. The kernels run in Triton's interpreter, or on the GPU that --device names."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
from changing import DIM, IDS, MISSING, Oracle

from tableside.loader.deltas import apply as applying
from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch
from tableside.loader.deltas.compact import compact
from tableside.loader.versions.states import State, state_of
from tableside.quant import Pooling, choose
from tableside.quant.contract import Unfound
from tableside.quant.gpu.residence.memory import InHost
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.model.request import FeatureInput
from tableside.serving.model.version import ServedVersion
from tableside.serving.settings import ServerSettings

pytestmark = pytest.mark.for_gpu

ASKED = {
    "raw": np.concatenate([IDS[::3], np.arange(0, 1000, 5) * 7919 + 1, [-1, 2**62]]),
    "dense": np.arange(0, 1000, 3),
    "policy": np.arange(0, 1000, 3),
}


class Worker:
    """The engine of a worker on a GPU, and what its rows must be."""

    def __init__(self, root: Path, placement: str, begins: bool = True, **settings: Any) -> None:
        settings = {"hbm_budget": 1 << 20, "gather_threads": 0, "gpu_from_ids": 0, **settings}
        self.oracle = Oracle(root)
        self.placer = Placer(
            ServerSettings(devices=(tables.serve_device(),), placement=placement, **settings), choose()
        )
        self.placer.open()
        model = self.oracle.model
        self.engine = Engine(model, ServerSettings(), self.placer)
        if begins:
            self.take()

    def take(self) -> ServedVersion:
        """Takes the live state as a server does."""
        self.engine.swap(self.engine.attach(as_successor=True))
        return self.engine.served()

    def change(self, rows: int = 100) -> None:
        apply(self.oracle.model, ChangeBatch(self.oracle.change(rows)))

    def rows(self) -> dict[str, np.ndarray]:
        """What a lookup of each table must give now."""
        return {
            name: np.stack([self.oracle.rows.get((name, i), MISSING) for i in asked.tolist()])
            for name, asked in ASKED.items()
        }

    def check(self, served: ServedVersion, rows: dict[str, np.ndarray]) -> None:
        gpu = self.placer.gpu
        assert gpu is not None
        for name, asked in ASKED.items():
            found = gpu.lookup(served.placed.tables[name], asked, pooling=Pooling.NONE)
            np.testing.assert_array_equal(found, rows[name], name)


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("placement", ["hbm", "cached", "hybrid", "zero_copy", "host"])
def test_states_answer_as_a_dictionary_does(
    root: Path, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each for itself, while later ones are taken, deltas are merged, and the changes become a version."""
    monkeypatch.setattr(applying, "SMALL_BYTES", 1 << 15)
    worker = Worker(root, placement, hbm_budget=200_000 if placement == "hybrid" else 1 << 20)
    assert set(worker.engine.served().placed.placements.values()) == {placement}
    worker.placer._budget += 1 << 20
    states = [(worker.engine.served(), worker.rows())]
    for rows in (30, 100, 300):
        worker.change(rows)
        states.append((worker.take(), worker.rows()))
        for served, expected in states:
            worker.check(served, expected)
    compact(worker.oracle.model)
    states.append((worker.take(), worker.rows()))
    assert states[-1][0].version == 2
    for served, expected in states[-2:]:
        worker.check(served, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("placement", ["hbm", "cached"])
def test_a_state_takes_hbm_for_its_deltas_alone(root: Path, placement: str) -> None:
    """Rows in HBM and in the cache are those of the version, and stay; what a delta takes is counted, and
    given back with the last state that has it."""
    worker = Worker(root, placement)
    before = worker.engine.served()
    worker.check(before, worker.rows())
    hot = before.placed.on_gpu["raw"].residence.hot()
    held = worker.placer._held
    worker.change()
    first = worker.take()
    size = first.placed.hbm_bytes - before.placed.hbm_bytes
    assert worker.placer._held - held == size > 3 * 90 * DIM * 4
    assert first.placed.base is before.placed
    assert all(
        table.residence is before.placed.on_gpu[name].residence for name, table in first.placed.on_gpu.items()
    )
    assert set(hot) <= set(first.placed.on_gpu["raw"].residence.hot()) and (hot.size > 0) == (
        placement == "cached"
    )
    again = worker.engine.attach(State(1, 1))
    assert again.placed.base is before.placed and worker.placer._held - held == size
    back = worker.engine.attach(State(1))
    assert back.placed is before.placed
    worker.engine.swap(back)
    del first, again
    gc.collect()
    assert worker.placer._held == held


@pytest.mark.drawn(1)
@pytest.mark.parametrize("placement", ["hbm", "cached", "zero_copy"])
def test_a_state_is_served_where_the_budget_leaves_nothing(
    root: Path, placement: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its deltas are read in host memory, with what finds them; the log says so."""
    worker = Worker(root, placement)
    worker.placer._budget = worker.placer._held
    worker.change()
    served = worker.take()
    assert "rows and indexes of" in caplog.text and "1+1.delta are read in host memory" in caplog.text
    assert served.placed.hbm_bytes == served.placed.base.hbm_bytes
    worker.check(served, worker.rows())


@pytest.mark.thorough
@pytest.mark.parametrize("placement", ["hbm", "cached", "hybrid", "zero_copy"])
@pytest.mark.parametrize("share", [1.1, 0.3])
def test_states_and_versions_go_on_where_the_budget_is_small(
    root: Path, placement: str, share: float
) -> None:
    """Changes and compactions one after another: each live state is taken, whatever the one before it
    takes of the budget."""
    if placement == "hbm" and share < 1:
        pytest.skip("tables that the budget does not hold are refused at the start")
    size = sum(
        t.packed.nbytes for t in Worker(root / "sized", placement).engine.served().segment.tables.values()
    )
    worker = Worker(root, placement, hbm_budget=int(share * size) + 50_000)
    for _ in range(4):
        for _ in range(3):
            worker.change(250)
            worker.check(worker.take(), worker.rows())
        compact(worker.oracle.model)
        worker.change(250)
        served = worker.take()
        assert served.state == state_of(worker.oracle.model.record())
        worker.check(served, worker.rows())
        gc.collect()
    assert served.version == 5


@pytest.mark.thorough
def test_the_index_of_a_successor_is_read_in_host_memory_where_the_budget_leaves_nothing(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(root, "cached")
    worker.change()
    worker.take()
    compact(worker.oracle.model)
    worker.placer._budget = worker.placer._held - worker.engine.served().placed.hbm_bytes
    served = worker.take()
    assert served.version == 2 and "the id index of table raw is read in host memory" in caplog.text
    worker.check(served, worker.rows())


@pytest.mark.thorough
@pytest.mark.parametrize("placement", ["hbm", "cached"])
def test_rows_that_the_budget_does_not_hold_are_read_in_host_memory(
    root: Path, placement: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What finds them is in HBM; the log says so. A next delta that the budget holds is in HBM."""
    worker = Worker(root, placement)
    worker.placer._budget = worker.placer._held + 20_000
    worker.change(150)
    served = worker.take()
    assert "1+1.delta are read in host memory" in caplog.text
    assert all(
        level.in_host is InHost.SOME for table in served.placed.on_gpu.values() for level in table.layers
    )
    assert served.placed.hbm_bytes - served.placed.base.hbm_bytes < 20_000
    worker.check(served, worker.rows())
    worker.placer._budget += 1 << 20
    worker.change()
    later = worker.take()
    assert not any(table.layers[0].in_host for table in later.placed.on_gpu.values())
    worker.check(later, worker.rows())


@pytest.mark.drawn(0.5)
def test_what_deltas_need_is_compiled_with_the_version(root: Path) -> None:
    """The kernel that looks into deltas was launched before there is any, and no other one is launched for
    the first."""
    worker = Worker(root, "hbm", begins=False)
    assert worker.placer.gpu is not None
    resolvers, launched = worker.placer.gpu.launcher.resolvers, []
    for is_overlaid, kernel in list(resolvers.items()):
        resolvers[is_overlaid] = _Noting(kernel, is_overlaid, launched)
    worker.take()
    assert True in launched
    del launched[:]
    worker.change()
    worker.check(worker.take(), worker.rows())
    assert set(launched) == {True}


class _Noting:
    """A kernel that notes its launches."""

    def __init__(self, kernel: Any, name: bool, launched: list[bool]) -> None:
        self._kernel, self._name, self._launched = kernel, name, launched

    def __call__(self, programs: int, *arguments: Any) -> None:
        self._launched.append(self._name)
        self._kernel(programs, *arguments)


@pytest.mark.parametrize("placement", ["cached", "hybrid"])
@pytest.mark.drawn(1)
def test_a_full_budget_leaves_room_for_deltas(root: Path, placement: str) -> None:
    """A sixteenth of it, whatever else takes all that there is."""
    worker = Worker(root, placement, hbm_budget=1 << 18)
    assert worker.placer._budget - worker.placer._held >= 1 << 14


@pytest.mark.thorough
def test_requests_get_masks_and_counts_of_their_state(root: Path) -> None:
    """As a server lays them out: of each table some ids, of which a delta deleted some and inserted
    others."""
    worker = Worker(root, "cached")
    worker.placer._budget += 1 << 20
    states = [(worker.engine.served(), set(worker.oracle.rows))]
    worker.change(300)
    states.append((worker.take(), set(worker.oracle.rows)))
    starts = np.cumsum([0, *(asked.nbytes for asked in ASKED.values())]).tolist()
    inputs = [
        FeatureInput(name, at, asked.size, bags=1, bag_length=asked.size)
        for (name, asked), at in zip(ASKED.items(), starts, strict=False)
    ]
    for served, there in states:
        request = served.lay_out(inputs, found=list(ASKED))
        answer = request.look_up(b"".join(asked.tobytes() for asked in ASKED.values()))
        missing = []
        for mask, (name, asked) in zip(request.outputs[len(ASKED) :], ASKED.items(), strict=True):
            expected = np.array([(name, i) in there for i in asked.tolist()])
            np.testing.assert_array_equal(
                answer.buffer[mask.at : mask.at + mask.bytes].astype(bool), expected
            )
            missing.append(Unfound(int((~expected).sum()), 0))
        assert answer.unfound == missing
