"""Copies of a version on NUMA nodes. Binding is left out, as this host may have one node."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from killing import What, run_until
from support import files_of, flip_bit
from table_files import CHANGED, TABLES, check

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.errors import ModelError, NoSpace, SegmentError, VersionError
from tableside.loader.load.load import Loaded
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.loader.segment import numa
from tableside.loader.versions.versions import Model
from tableside.serving.service.scrub import damage_of

Publish = Callable[..., Loaded]
NODES, FP32 = [0, 1], dict.fromkeys(TABLES, "fp32")
OWN = {"1.segment", "1.1.rows", "1.2.rows", "1.3.rows"}
OF_NODES = {"1.node0.home", "1.node1.segment", "1.node1.1.rows", "1.node1.2.rows", "1.node1.3.rows"}


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host of two nodes; the nodes to which files were bound."""
    nodes: list[int] = []
    monkeypatch.setattr(numa, "nodes", lambda sys=None: NODES)
    monkeypatch.setattr("tableside.loader.segment.memory.bind", lambda at, size, node: nodes.append(node))
    monkeypatch.setattr("tableside.loader.segment.memory.check_room", lambda node, size: None)
    return nodes


@pytest.fixture
def model(every_table_is_large: None, publish: Publish, root: Path) -> Model:
    """Version 1 of three tables, each in a file of its own, on two nodes."""
    publish(TABLES, formats=FP32, copies=NODES, settings=LoadSettings(threads=1))
    return Model(root, "demo")


def again(publish: Publish, *only: str, copies: list[int] | None = NODES) -> Loaded:
    said = {} if copies is None else {"copies": copies}
    return publish(CHANGED, formats=FP32, settings=LoadSettings(threads=1, only=only), **said)


def test_each_node_has_the_bytes(model: Model, bound: list[int]) -> None:
    """Its process attaches its own files; others, and those of an unknown node, the version's."""
    assert files_of(model.folder) == OWN | OF_NODES and bound == [0] * 4 + [1] * 4
    assert model.nodes(1) == NODES
    for name in OWN:
        copy = model.folder / name.replace("1.", "1.node1.", 1)
        assert copy.read_bytes() == (model.folder / name).read_bytes()
        assert copy.stat().st_mode == (model.folder / name).stat().st_mode
    for node, segment in ((None, "1.segment"), (0, "1.segment"), (1, "1.node1.segment"), (2, "1.segment")):
        check(model.on(node))
        found = model.on(node).attach()
        assert found.path.name == segment and found.content() == model.attach().content()
        assert {f.path.name.startswith("1.node1") for f in found.files} == {node == 1}


def test_copies_go_with_their_version(model: Model, publish: Publish) -> None:
    again(publish, copies=None)
    assert model.nodes(2) == []
    model.remove(1)
    assert files_of(model.folder) == {n.replace("1.", "2.", 1) for n in OWN}
    model.remove_all()
    assert files_of(model.folder) == set()


def test_unchanged_tables_are_linked_on_each_node(model: Model, publish: Publish) -> None:
    """They are neither read nor written again."""
    again(publish, "b")
    for node in NODES:
        old, new = ({f.table: f.status.st_ino for f in model.on(node).attach(v).files} for v in (1, 2))
        assert [old[t] == new[t] for t in "abc"] == [True, False, True]
        check(model.on(node), 2, "b")


@pytest.mark.parametrize("nodes", [[0, 2, 1], [0, 2, 10], [10, 2, 0]])
@pytest.mark.drawn(1)
def test_nodes_in_any_order_share_unchanged_tables(
    model: Model, publish: Publish, nodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "nodes", lambda sys=None: [0, 1, 2, 10])
    for _ in range(2):
        again(publish, copies=nodes)
    assert model.nodes(3) == [nodes[0], *sorted(nodes[1:])] == model.nodes(2)
    for node in nodes:
        old, new = ({f.table: f.status.st_ino for f in model.on(node).attach(v).files} for v in (2, 3))
        assert [old[t] == new[t] for t in "abc"] == [True, True, True]


@pytest.mark.parametrize("nodes", [[1, 0], [0], [1]])
@pytest.mark.drawn(1)
def test_tables_that_lie_elsewhere_are_written_again(
    model: Model, publish: Publish, nodes: list[int], bound: list[int]
) -> None:
    before, count = {f.status.st_ino for f in model.attach().files}, len(bound)
    again(publish, "b", copies=nodes)
    assert not before & {f.status.st_ino for f in model.attach().files}
    assert bound[count:] == [node for node in nodes for _ in range(4)]
    for node in nodes:
        check(model.on(node), 2, "b")


def test_a_compaction_keeps_the_nodes(model: Model) -> None:
    apply(model, ChangeBatch(iter([TableChanges("a", np.array([3]), CHANGED["a"][3:4])])))
    compact(model.on(1))
    assert model.nodes(2) == NODES
    assert len(files_of(model.folder) - {"1+1.delta"}) == len(OWN | OF_NODES) * 2
    assert [(f.path.parent / f"1{f.path.name[1:]}").samefile(f.path) for f in model.attach(2).files[1:]] == [
        False, True, True,
    ]  # fmt: skip
    for node in NODES:
        found = model.on(node).attach(2, "always")
        rows = found.tables["a"].packed.view(np.float32)
        np.testing.assert_array_equal(
            rows[:5], np.concatenate([TABLES["a"][:3], CHANGED["a"][3:4], TABLES["a"][4:5]])
        )


def test_a_compaction_refuses_nodes_that_are_gone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(model, ChangeBatch(iter([TableChanges("a", np.array([3]), CHANGED["a"][3:4])])))
    monkeypatch.setattr(numa, "nodes", lambda sys=None: [0])
    with pytest.raises(ModelError, match=r"names the NUMA nodes \[1\]; this host has memory on \[0\]"):
        compact(model)
    assert model.versions() == [1]


def test_a_model_that_was_never_published_lies_nowhere(root: Path) -> None:
    model = Model(root, "ghost")
    assert model.nodes(3) == []
    with pytest.raises(VersionError, match="version 3 is not published"):
        list(model.attach_all(3, "header"))


def test_a_damaged_copy_is_found(model: Model) -> None:
    """The scrubber reads each copy; what is found of one says that the version is damaged."""
    assert damage_of(model, 1) is None
    flip_bit(model.folder / "1.node1.2.rows", 4096 + 77)
    damage = damage_of(model, 1)
    assert damage is not None and "1.node1.2.rows: table 'b', rows [" in damage.text
    model.mark_damaged(1, damage.file)
    with pytest.raises(SegmentError, match="rows were found to have changed"):
        model.attach(1)


def test_another_file_is_no_copy(model: Model, publish: Publish) -> None:
    again(publish)
    copy = model.folder / "1.node1.segment"
    copy.unlink()
    shutil.copy(model.folder / "2.node1.segment", copy)
    with pytest.raises(SegmentError, match=r"1.node1.segment is no copy of 1.segment"):
        model.on(1).attach(1)
    check(model.on(0), 1)


def test_no_room_on_a_node_is_said_before_anything_is_published(
    model: Model, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(node: int, size: int) -> None:
        if node == 1:
            raise NoSpace("NUMA node 1 is full")

    monkeypatch.setattr("tableside.loader.segment.memory.check_room", refuse)
    with pytest.raises(NoSpace, match="node 1 is full"):
        again(publish)
    assert files_of(model.folder) == OWN | OF_NODES and model.current() == 1


def test_a_disk_has_no_copies(publish: Publish, disk: Path, tmp_path: Path) -> None:
    from tableside.loader.load.load import load

    np.savez(tmp_path / "a.npz", a=TABLES["a"])
    raw = {
        "name": "demo",
        "checkpoint": "a.npz",
        "copies": [0],
        "tables": {"a": {"key": "a", "row_format": "int8"}},
    }
    with pytest.raises(ModelError, match=r"copies: .* lies on a disk"):
        load(parse_model(raw, tmp_path), disk)
    assert files_of(disk / "demo") == set()


@pytest.mark.parametrize("said", ["gpu", [], [0, 0], [-1], [True], 0, ["0"]])
def test_what_copies_may_be(said: object, publish: Publish) -> None:
    with pytest.raises(ModelError, match=r'copies is .*; expected "numa", or NUMA nodes, each once'):
        publish(TABLES, copies=said)


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("what", ["kill", "full"])
@pytest.mark.parametrize("only", [(), ("b",)])
def test_every_step(
    model: Model, publish: Publish, only: tuple[str, ...], what: What, tmp_path: Path
) -> None:
    """A load that is killed, or finds no room, leaves versions that are whole on each node, and no other
    file after `gc`."""
    kept = tmp_path / "kept"
    shutil.copytree(model.folder, kept)
    for step in itertools.count(1):
        shutil.rmtree(model.folder)
        shutil.copytree(kept, model.folder)
        was_ended = run_until(step, what, lambda: again(publish, *only), (NoSpace, OSError))
        model.collect(8)
        expected = set()
        for version in model.versions():
            expected |= {name.replace("1.", f"{version}.", 1) for name in OWN | OF_NODES}
            for node in NODES:
                check(model.on(node), version, *((only or "abc") if version > 1 else ()))
        assert files_of(model.folder) == expected
        if not was_ended:
            break
    assert step > 12 and model.current() == 2
