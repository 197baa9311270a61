"""An engine reads the copy of its NUMA node, under deltas as well. Binding is left out: this host may have
one node."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import rows_of

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.load.load import Loaded
from tableside.loader.segment import numa
from tableside.loader.versions.versions import Model
from tableside.quant import Pooling, choose
from tableside.serving.model.engine import Engine
from tableside.serving.model.placement import Placer
from tableside.serving.settings import ServerSettings

ROWS = rows_of(500, 8)


@pytest.mark.parametrize(
    ("node", "file"), [(0, "1.segment"), (1, "1.node1.segment"), (None, "1.segment"), (5, "1.segment")]
)
def test_the_copy_of_its_node_is_served(
    publish: Callable[..., Loaded], root: Path, monkeypatch: pytest.MonkeyPatch, node: int | None, file: str
) -> None:
    monkeypatch.setattr(numa, "nodes", lambda sys=None: [0, 1])
    monkeypatch.setattr("tableside.loader.segment.memory.bind", lambda *_: None)
    monkeypatch.setattr("tableside.loader.segment.memory.check_room", lambda *_: None)
    monkeypatch.setattr("tableside.serving.model.placement.node_of", lambda pci: node)
    publish({"t": ROWS}, formats={"t": "fp32"}, copies=[0, 1])
    model = Model(root, "demo")
    engine = Engine(model, ServerSettings(), Placer(ServerSettings(), choose()))
    engine.begin()
    assert engine.served().segment.path.name == file
    apply(model, ChangeBatch(iter([TableChanges("t", np.array([7]), ROWS[:1])])))
    engine.swap(engine.attach())
    served = engine.served()
    assert served.segment.base.path.name == file and served.state.sequence == 1
    ids = np.array([6, 7, 8])
    found = choose().lookup(served.placed.tables["t"], ids, pooling=Pooling.NONE)
    np.testing.assert_array_equal(found, ROWS[[6, 0, 8]])
