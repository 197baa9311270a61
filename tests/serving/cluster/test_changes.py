"""Changes of a model over several hosts: a server of the whole answers from states that all owners have."""

import itertools
import shutil
import uuid
from pathlib import Path

import numpy as np
import pytest
from changing_hosts import Hosts, step, takes
from hosts import (
    UNPOOLED,
    USER_ROWS,
    answer,
    checkpoint,
    engine_of,
    load_door,
    load_shares,
    place,
    spec_of,
)
from servers import Server
from support import run_tableside, until
from tables import serve_device

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.errors import ChangeError
from tableside.loader.load.load import load
from tableside.loader.segment.remote import HostsState
from tableside.loader.shards.reshard import reshard
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.serving.errors import ServingError
from tableside.serving.model.engine import Engine

FORMS = [("int8", "zero"), ("fp32", [0.5, -2.0] * 4), ("int4", "zero")]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("count", "form"), list(itertools.product([1, 2, 3], FORMS)))
def test_answers_are_those_of_one_host_in_each_state(
    owners: Server, tmp_path: Path, count: int, form: tuple[str, object]
) -> None:
    """Hosts get the changes in any order. Until the last owner has them, answers stay those of the state
    before, whatever the others have. Owners are merged and compacted meanwhile."""
    hosts = Hosts(owners, tmp_path, count, *form)
    door, whole = engine_of(hosts.door.root, hosts.door.name), engine_of(hosts.whole.root, "whole")
    _follow_changes(hosts, door, whole)


@pytest.mark.gpu
@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("form", FORMS)
def test_answers_of_a_device_are_those_of_one_host_in_each_state(
    owners: Server, tmp_path: Path, form: tuple[str, object]
) -> None:
    """The same, where a device has the tables of this host and the CPU asks for those of the others."""
    pytest.importorskip("triton")
    hosts = Hosts(owners, tmp_path, 2, *form)
    door = engine_of(hosts.door.root, hosts.door.name, devices=(serve_device(),), hbm_budget=1 << 22)
    _follow_changes(hosts, door, engine_of(hosts.whole.root, "whole"))


def _follow_changes(hosts: Hosts, door: Engine, whole: Engine) -> None:
    for number in range(1, 9):
        hosts.number, changes = number, hosts.changes()
        order = [hosts.door, *hosts.owners]
        hosts.draw.shuffle(order)
        asked = hosts.asked()
        before = answer(whole.served(), asked, tuple(asked))
        for model in order:
            hosts.apply([model], changes, merge_share=hosts.draw.choice([0.0, 0.25, 10.0]))
            assert takes(door) if model is order[-1] else not step(door)
            if model is not order[-1]:
                assert answer(door.served(), asked, tuple(asked)) == before
        hosts.apply([hosts.whole], changes)
        assert takes(whole)
        expected = answer(whole.served(), asked, tuple(asked))
        assert expected != before
        assert answer(door.served(), asked, tuple(asked)) == expected
        if number % 3 == 0:
            for model in hosts.draw.permutation(hosts.owners):
                assert compact(model) is not None
                assert answer(door.served(), asked, tuple(asked)) == expected
        if number == 5:
            assert compact(hosts.door) is not None and takes(door)
            assert answer(door.served(), asked, tuple(asked)) == expected
    for model in hosts.owners:
        assert compact(model) is not None
        model.collect(0)
    again = engine_of(hosts.door.root, hosts.door.name)
    assert again.served().state == door.served().state
    assert answer(again.served(), asked, tuple(asked)) == expected


@pytest.mark.drawn(0.25)
def test_a_copy_of_a_host_goes_on_where_it_was_made(owners: Server, tmp_path: Path) -> None:
    """As a host does that comes later, when the first changes are gone."""
    hosts = Hosts(owners, tmp_path, 2, "int8", "zero")
    for hosts.number in range(1, 4):
        hosts.apply([hosts.door, hosts.whole, *hosts.owners], hosts.changes())
    shutil.copytree(hosts.door.root, tmp_path / "copy")
    copied = Model(tmp_path / "copy", hosts.door.name)
    hosts.number = 4
    hosts.apply([copied, hosts.whole, *hosts.owners], hosts.changes())
    door, whole = engine_of(copied.root, copied.name), engine_of(hosts.whole.root, "whole")
    asked = hosts.asked()
    assert door.served().sequence == 4
    assert answer(door.served(), asked, tuple(asked)) == answer(whole.served(), asked, tuple(asked))


def test_a_load_over_owners_with_changes_begins_without_them(owners: Server, tmp_path: Path) -> None:
    """Their first state is there; it gets all changes in turn, while they have a new version of all rows."""
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    batches = []
    for hosts.number in range(1, 4):
        batches.append((hosts.number, hosts.changes()))
        hosts.apply([hosts.whole, *hosts.owners], batches[-1][1])
    for model in hosts.owners:
        assert compact(model) is not None
    load_door(hosts.spec, tmp_path / "later")
    later, asked = Model(tmp_path / "later", hosts.door.name), hosts.asked()
    door, first = engine_of(later.root, later.name), engine_of(hosts.door.root, hosts.door.name)
    assert answer(door.served(), asked, tuple(asked)) == answer(first.served(), asked, tuple(asked))
    for hosts.number, changes in batches:
        hosts.apply([later], changes)
        assert takes(door)
    whole = engine_of(hosts.whole.root, "whole")
    assert answer(door.served(), asked, tuple(asked)) == answer(whole.served(), asked, tuple(asked))


def test_going_back(owners: Server, tmp_path: Path) -> None:
    """A state that all hosts keep is served again, and changes go on from there, also other ones."""
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    door, whole = engine_of(hosts.door.root, hosts.door.name), engine_of(hosts.whole.root, "whole")
    everywhere = [hosts.door, hosts.whole, *hosts.owners]
    for hosts.number in range(1, 5):
        hosts.apply(everywhere, hosts.changes())
    assert takes(door) and takes(whole)
    asked = hosts.asked()
    for model in everywhere:
        model.activate(1, 2)
    assert takes(door) and takes(whole)
    expected = answer(whole.served(), asked, tuple(asked))
    assert answer(door.served(), asked, tuple(asked)) == expected
    hosts.number = 3
    hosts.apply(everywhere, hosts.changes())
    assert takes(door) and takes(whole)
    assert (
        answer(door.served(), asked, tuple(asked)) == answer(whole.served(), asked, tuple(asked)) != expected
    )


def test_owners_that_were_cut_of_changed_rows_are_refused(owners: Server, tmp_path: Path) -> None:
    """The checkpoint, from which the other tables are loaded, lacks the changes."""
    checkpoint(tmp_path)
    name = f"m{uuid.uuid4().hex[:8]}"
    load(spec_of(tmp_path, name, features=UNPOOLED), tmp_path / "all")
    model = Model(tmp_path / "all", name)
    apply(model, ChangeBatch([TableChanges("user", np.array([3]), np.ones((1, 16), np.float32))]))
    assert compact(model) is not None
    reshard(model.root, name, 2)
    for owner in (f"{name}-owner-{number}-of-2" for number in range(2)):
        shutil.copytree(model.root / owner, owners.root / owner)
        until(lambda m=owner: owners.get(f"/v2/rows/{m}").status_code == 200, what="the owners")
    with pytest.raises(ServingError, match=r"version 1 was cut of a version with changes"):
        load_door(spec_of(tmp_path, name, [place(owners)] * 2, features=UNPOOLED), tmp_path / "door")


@pytest.mark.drawn(0.25)
def test_commands_that_change_rows_of_several_hosts(owners: Server, tmp_path: Path) -> None:
    """A number is needed, and a change is not left out by one host alone."""
    hosts = Hosts(owners, tmp_path, 1, "fp32", "zero")
    changes = tmp_path / "changes.npz"
    np.savez(changes, **{"user.ids": np.array([3]), "user.vectors": np.ones((1, 16), np.float32)})
    bare = run_tableside("apply", hosts.door.name, changes, root=hosts.door.root)
    assert bare.returncode == 1 and "give the file one on each host" in bare.stderr
    for model in (hosts.door, *hosts.owners):
        done = run_tableside("apply", model.name, changes, "--number", 1, root=model.root)
        assert done.returncode == 0, done.stderr
    states = {attach_state(model).hosts_state().mark for model in (hosts.door, *hosts.owners)}  # type: ignore[union-attr]
    assert len(states) == 1 and 0 not in states
    said = "follow", hosts.door.name, tmp_path, "--skip-bad", tmp_path / "bad"
    left_out = run_tableside(*said, root=hosts.door.root)
    assert left_out.returncode == 1 and "leave out --skip-bad" in left_out.stderr


def test_changes_without_a_number_are_refused(owners: Server, tmp_path: Path) -> None:
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    for model in (hosts.door, hosts.owners[0]):
        with pytest.raises(ChangeError, match=r"lies on several hosts.*--number"):
            apply(model, ChangeBatch(hosts.changes()))
        assert attach_state(model).hosts_state() == HostsState(attach_state(model).base.content())


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("table", "ids", "dim", "deleted", "why"),
    [
        ("user", [USER_ROWS], 16, False, r"id 1000 is outside the table's ids"),
        ("user", [-1], 16, False, r"id -1 is outside the table's ids"),
        ("user", [3], 15, False, r"expected float32 or float16 \[1, 16\]"),
        ("user", [3], 16, True, "cannot be deleted"),
        ("item", [3], 9, False, r"expected float32 or float16 \[1, 8\]"),
        ("nobody", [3], 9, False, "has no table 'nobody'; it has: small, user, item"),
    ],
)
def test_a_change_that_no_owner_takes_is_refused_by_the_server(
    owners: Server, tmp_path: Path, table: str, ids: list[int], dim: int, deleted: bool, why: str
) -> None:
    checkpoint(tmp_path)
    name = "refusing"
    spec = spec_of(tmp_path, name, [place(owners)] * 2, features=UNPOOLED)
    if not (owners.root / f"{name}-owner-0-of-2").exists():
        for model in load_shares(spec, [owners.root] * 2):
            until(lambda m=model: owners.get(f"/v2/rows/{m}").status_code == 200, what="the owners")
    load_door(spec, tmp_path / "door")
    changes = TableChanges(table, np.array(ids), np.zeros((1, dim), np.float32), np.array([deleted]))
    with pytest.raises(ChangeError, match=why):
        apply(Model(tmp_path / "door", name), ChangeBatch([changes], "apply", "1"))
