"""Changes of a model over several hosts: a server of the whole answers from states that all owners have."""

import itertools
import json
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hosts import (
    RAW,
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
from servers import Server, start_server
from support import end, run_tableside, until

from tableside.loader.deltas.apply import ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.deltas.hosts import passed_fields
from tableside.loader.errors import ChangeError
from tableside.loader.load.load import load
from tableside.loader.segment.remote import HostsState
from tableside.loader.versions.retention import Retention
from tableside.loader.versions.states import attach_state, state_of
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.cluster.agreed import NotAgreed
from tableside.serving.cluster.describe import remote_tables
from tableside.serving.model.engine import Engine

FORMS = [("int8", "zero"), ("fp32", [0.5, -2.0] * 4), ("int4", "zero")]


@pytest.fixture(scope="module")
def owners() -> Iterator[Server]:
    """One server for all owners, which takes their models as they are published."""
    root = Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}"
    root.mkdir()
    server = start_server(root, "--all", models=())
    yield server
    try:
        assert end(server.process) == 0
    finally:
        shutil.rmtree(root)


class Hosts:
    """A model on one host, and the same on owners and a server of the whole, with changes to both."""

    def __init__(self, owners: Server, folder: Path, count: int, row_format: str, missing: object) -> None:
        checkpoint(folder)
        name = f"m{uuid.uuid4().hex[:8]}"
        tables = {
            "user": {"row_format": row_format, "missing": "zero"},
            "item": {"row_format": row_format, "missing": missing},
        }
        self.tables = tables
        self.spec = spec_of(folder, name, [place(owners)] * count, tables=tables, features=UNPOOLED)
        self.owners = [Model(owners.root, m) for m in load_shares(self.spec, [owners.root] * count)]
        for model in self.owners:
            until(lambda m=model.name: owners.get(f"/v2/rows/{m}").status_code == 200, what="the owners")
        load_door(self.spec, folder / "door")
        load(spec_of(folder, "whole", tables=tables, features=UNPOOLED), folder / "whole")
        self.door, self.whole = Model(folder / "door", name), Model(folder / "whole", "whole")
        self.draw, self.number = np.random.default_rng(0), 0

    def changes(self) -> list[TableChanges]:
        """Of all tables: ids twice, new ones and deletions."""
        made = []
        for table, dim, pool in (
            ("user", 16, np.arange(USER_ROWS)),
            ("item", 8, RAW),
            ("small", 4, np.arange(20)),
        ):
            ids = self.draw.choice(pool, 40).astype(np.int64)
            if table == "item":
                ids[::5] += 1
            deleted = self.draw.random(ids.size) < (0.0 if table == "small" else 0.2)
            vectors = self.draw.standard_normal((ids.size, dim)).astype(np.float32)
            made.append(TableChanges(table, ids, vectors, deleted))
        return made

    def batch(self, changes: list[TableChanges]) -> ChangeBatch:
        after = str(self.number - 1) if self.number > 1 else None
        content = b"".join(change.vectors.tobytes() for change in changes)
        passed = [passed_fields(str(self.number), [content])]
        return ChangeBatch(changes, "apply", str(self.number), after, passed=passed)

    def apply(self, models: list[Model], changes: list[TableChanges], merge_share: float = 0.25) -> None:
        for model in models:
            apply(model, self.batch(changes), ApplySettings(merge_share=merge_share))

    def asked(self) -> dict[str, np.ndarray]:
        strange = self.draw.integers(-(2**63), 2**63 - 1, 30)
        return {
            "user": np.concatenate([np.arange(USER_ROWS), [-1, USER_ROWS, 2**62]]),
            "item": np.concatenate([RAW, RAW + 1, strange]),
            "small": np.arange(20),
        }


def step(engine: Engine) -> bool:
    """What a watch does; whether another state is served then."""
    if (state := engine.changed()) is None:
        return False
    try:
        engine.swap(engine.attach(engine.agreed(state), as_successor=True))
    except NotAgreed:
        return False
    return True


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("count", "form"), list(itertools.product([1, 2, 3], FORMS)))
def test_answers_are_those_of_one_host_in_each_state(
    owners: Server, tmp_path: Path, count: int, form: tuple[str, object]
) -> None:
    """Hosts get the changes in any order. Until the last owner has them, answers stay those of the state
    before, whatever the others have. Owners are merged and compacted meanwhile."""
    hosts = Hosts(owners, tmp_path, count, *form)
    door, whole = engine_of(hosts.door.root, hosts.door.name), engine_of(hosts.whole.root, "whole")
    for number in range(1, 9):
        hosts.number, changes = number, hosts.changes()
        order = [hosts.door, *hosts.owners]
        hosts.draw.shuffle(order)
        asked = hosts.asked()
        before = answer(whole.served(), asked, tuple(asked))
        for model in order:
            hosts.apply([model], changes, merge_share=hosts.draw.choice([0.0, 0.25, 10.0]))
            assert step(door) == (model is order[-1])
            if model is not order[-1]:
                assert answer(door.served(), asked, tuple(asked)) == before
        hosts.apply([hosts.whole], changes)
        assert step(whole)
        expected = answer(whole.served(), asked, tuple(asked))
        assert expected != before
        assert answer(door.served(), asked, tuple(asked)) == expected
        if number % 3 == 0:
            for model in hosts.draw.permutation(hosts.owners):
                assert compact(model) is not None
                assert answer(door.served(), asked, tuple(asked)) == expected
        if number == 5:
            assert compact(hosts.door) is not None and step(door)
            assert answer(door.served(), asked, tuple(asked)) == expected
    for model in hosts.owners:
        assert compact(model) is not None
        model.collect(0)
    again = engine_of(hosts.door.root, hosts.door.name)
    assert again.served().state == door.served().state
    assert answer(again.served(), asked, tuple(asked)) == expected


def test_a_state_that_an_owner_no_longer_keeps_is_given_while_it_is_asked_for(
    owners: Server, tmp_path: Path
) -> None:
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    door = engine_of(hosts.door.root, hosts.door.name)
    asked = hosts.asked()
    for hosts.number in range(1, 4):
        hosts.apply([hosts.door, *hosts.owners], hosts.changes())
    assert step(door)
    expected = answer(door.served(), asked, tuple(asked))
    for hosts.number in range(4, 16):
        changes = hosts.changes()
        apply(hosts.owners[0], hosts.batch(changes), ApplySettings(keep=Retention(2)))
        apply(hosts.door, hosts.batch(changes))
        assert not step(door)
        assert answer(door.served(), asked, tuple(asked)) == expected


def test_a_server_begins_with_the_newest_state_that_its_owners_have(owners: Server, tmp_path: Path) -> None:
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    for hosts.number in range(1, 7):
        changes = hosts.changes()
        hosts.apply([hosts.door, hosts.owners[0]], changes)
        if hosts.number < 5:
            hosts.apply([hosts.owners[1], hosts.whole], changes)
    door, whole = engine_of(hosts.door.root, hosts.door.name), engine_of(hosts.whole.root, "whole")
    assert door.served().sequence == 4
    asked = hosts.asked()
    assert answer(door.served(), asked, tuple(asked)) == answer(whole.served(), asked, tuple(asked))


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
        assert step(door)
    whole = engine_of(hosts.whole.root, "whole")
    assert answer(door.served(), asked, tuple(asked)) == answer(whole.served(), asked, tuple(asked))


def test_a_replica_that_lags_is_waited_for_a_while(owners: Server, tmp_path: Path) -> None:
    """Then its rows come from the other one."""
    hosts = Hosts(owners, tmp_path, 1, "fp32", "zero")
    root = owners.root.parent / f"{owners.root.name}-replica"
    shutil.copytree(owners.root / hosts.owners[0].name, root / hosts.owners[0].name)
    other = start_server(root, models=(hosts.owners[0].name,))
    try:
        replicas = [f"{place(owners)}|{place(other)}"]
        load_door(
            spec_of(tmp_path, hosts.door.name, replicas, tables=hosts.tables, features=UNPOOLED),
            tmp_path / "two",
        )
        model = Model(tmp_path / "two", hosts.door.name)
        patient, asked = engine_of(model.root, model.name, timeout_s=60.0), hosts.asked()
        hosts.number = 1
        hosts.apply([model, hosts.whole, hosts.owners[0]], hosts.changes())
        assert not step(patient)
        door, whole = engine_of(model.root, model.name), engine_of(hosts.whole.root, "whole")
        assert door.served().sequence == 1
        for _ in range(20):
            assert answer(door.served(), asked, tuple(asked)) == answer(whole.served(), asked, tuple(asked))
    finally:
        assert end(other.process) == 0
        shutil.rmtree(root)


def test_going_back(owners: Server, tmp_path: Path) -> None:
    """A state that all hosts keep is served again, and changes go on from there, also other ones."""
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    door, whole = engine_of(hosts.door.root, hosts.door.name), engine_of(hosts.whole.root, "whole")
    everywhere = [hosts.door, hosts.whole, *hosts.owners]
    for hosts.number in range(1, 5):
        hosts.apply(everywhere, hosts.changes())
    assert step(door) and step(whole)
    asked = hosts.asked()
    for model in everywhere:
        model.activate(1, 2)
    assert step(door) and step(whole)
    expected = answer(whole.served(), asked, tuple(asked))
    assert answer(door.served(), asked, tuple(asked)) == expected
    hosts.number = 3
    hosts.apply(everywhere, hosts.changes())
    assert step(door) and step(whole)
    assert (
        answer(door.served(), asked, tuple(asked)) == answer(whole.served(), asked, tuple(asked)) != expected
    )


def test_hosts_that_began_elsewhere_do_not_belong_together(owners: Server, tmp_path: Path) -> None:
    """One missed a number, and all of them say that they are at the same one."""
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    door = engine_of(hosts.door.root, hosts.door.name)
    hosts.number = 1
    hosts.apply([hosts.door, hosts.owners[0]], hosts.changes())
    hosts.number, changes = 2, hosts.changes()
    hosts.apply([hosts.door, hosts.owners[0]], changes)
    apply(hosts.owners[1], ChangeBatch(changes, "apply", "2", None))
    assert not step(door)
    with pytest.raises(NotAgreed, match=r"changes wait for 127\.0\.0\.1:\d+ to apply them, too"):
        door.agreed(state_of(hosts.door.record()))


def test_owners_are_shown_with_their_states(owners: Server, tmp_path: Path) -> None:
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    said = "owners", hosts.door.name
    for hosts.number in range(1, 4):
        hosts.apply([hosts.door, hosts.owners[0]], hosts.changes())
    shown = run_tableside(*said, root=hosts.door.root)
    assert shown.returncode == 0 and f"{hosts.door.name} 1+3 is live here" in shown.stdout
    told = json.loads(run_tableside(*said, "--json", root=hosts.door.root).stdout)
    assert [(o["host"], o["reached"], o["state"]) for o in told["owners"]] == [
        (place(owners), True, "1+3"),
        (place(owners), True, "1"),
    ]
    whole = run_tableside("owners", "whole", root=hosts.whole.root)
    assert whole.returncode == 1 and "all tables of model 'whole' are on this host" in whole.stderr
    gone = ["127.0.0.1:9", place(owners)]
    spec = spec_of(tmp_path, hosts.door.name, gone, tables=hosts.tables, features=UNPOOLED)
    asked = remote_tables(hosts.spec, choose(), None)
    shares = [replace(t.shares[0], addresses=(gone[0],)) for t in asked]
    load(
        spec,
        tmp_path / "lost",
        remote=[replace(t, shares=(s, *t.shares[1:])) for t, s in zip(asked, shares, strict=True)],
    )
    lost = run_tableside(*said, root=tmp_path / "lost")
    assert lost.returncode == 1 and "not reached" in lost.stdout


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
