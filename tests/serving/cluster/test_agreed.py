"""Which state a server of the whole takes, and what its owners keep for it."""

import asyncio
import contextlib
import json
import shutil
import socket
import uuid
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from changing_hosts import Hosts, step, takes
from hosts import (
    UNPOOLED,
    answer,
    engine_of,
    load_door,
    place,
    spec_of,
)
from servers import Server, start_server
from support import end, run_tableside, until

from tableside.loader.deltas.apply import ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.load.load import load
from tableside.loader.load.share import share_of
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.retention import Retention
from tableside.loader.versions.states import attach_state, state_of
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.cluster.agreed import NotAgreed
from tableside.serving.cluster.describe import remote_tables
from tableside.serving.http.v2.kept_states import KeptStates
from tableside.serving.modules.published import ModuleSource, PublishedTables


@pytest.mark.drawn(0.25)
def test_a_state_that_an_owner_no_longer_keeps_is_given_while_it_is_asked_for(
    owners: Server, tmp_path: Path
) -> None:
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    door = engine_of(hosts.door.root, hosts.door.name)
    asked = hosts.asked()
    for hosts.number in range(1, 4):
        hosts.apply([hosts.door, *hosts.owners], hosts.changes())
    assert takes(door)
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


@pytest.mark.drawn(0.25)
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


def test_a_branch_that_was_left_is_not_served_again(owners: Server, tmp_path: Path) -> None:
    """Though owners keep it, and the new one has not come to all of them."""
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    door = engine_of(hosts.door.root, hosts.door.name)
    for hosts.number in range(1, 5):
        hosts.apply([hosts.door, *hosts.owners], hosts.changes())
    assert takes(door) and door.served().sequence == 4
    for model in (hosts.door, *hosts.owners):
        model.activate(1, 2)
    assert takes(door) and door.served().sequence == 2
    hosts.number, changes = 3, hosts.changes()
    for model in (hosts.door, *hosts.owners):
        assert not step(door) and door.served().sequence == 2
        assert engine_of(hosts.door.root, hosts.door.name).served().sequence == 2
        hosts.apply([model], changes)
    assert takes(door) and door.served().sequence == 5


@pytest.mark.drawn(0.25)
def test_a_server_goes_back_from_a_branch_to_where_it_began(owners: Server, tmp_path: Path) -> None:
    """Where it did not look while the others went back, and only some have the new branch."""
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    door = engine_of(hosts.door.root, hosts.door.name)
    for hosts.number in range(1, 5):
        hosts.apply([hosts.door, *hosts.owners], hosts.changes())
    assert takes(door)
    for model in (hosts.door, *hosts.owners):
        model.activate(1, 2)
    hosts.number = 3
    hosts.apply([hosts.door, hosts.owners[0]], hosts.changes())
    assert takes(door) and door.served().sequence == 2 and not step(door)


@pytest.mark.drawn(0.25)
def test_a_server_that_compacted_begins_with_an_older_state(owners: Server, tmp_path: Path) -> None:
    """Of the version before, which its owners have; `cluster status` shows it."""
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    for hosts.number in range(1, 4):
        hosts.apply([hosts.door, *hosts.owners], hosts.changes())
    hosts.number, changes = 4, hosts.changes()
    hosts.apply([hosts.door, hosts.owners[0]], changes)
    before = engine_of(hosts.door.root, hosts.door.name)
    assert compact(hosts.door) is not None
    door, asked = engine_of(hosts.door.root, hosts.door.name), hosts.asked()
    assert (door.served().version, door.served().sequence) == (1, 3) and not step(door)
    assert answer(door.served(), asked, tuple(asked)) == answer(before.served(), asked, tuple(asked))
    shown = run_tableside("cluster", "status", hosts.door.name, "--json", root=hosts.door.root)
    assert [owner["state"] for owner in json.loads(shown.stdout)["owners"]] == ["2", "1+3"]
    hosts.apply([hosts.owners[1]], changes)
    assert takes(door) and door.served().version == 2


@pytest.mark.drawn(0.25)
def test_an_owner_of_whom_no_host_is_reached_holds_changes_up(owners: Server, tmp_path: Path) -> None:
    """It may lack them when it is back, and then its rows would be late."""
    hosts = Hosts(owners, tmp_path, 1, "fp32", "zero")
    root = owners.root.parent / f"{owners.root.name}-gone"
    shutil.copytree(owners.root / hosts.owners[0].name, root / hosts.owners[0].name)
    other = start_server(root, models=(hosts.owners[0].name,))
    try:
        spec = spec_of(tmp_path, hosts.door.name, [place(other)], tables=hosts.tables, features=UNPOOLED)
        load_door(spec, tmp_path / "two")
        model = Model(tmp_path / "two", hosts.door.name)
        door = engine_of(model.root, model.name, timeout_s=0.01)
    finally:
        assert end(other.process) == 0
        shutil.rmtree(root)
    hosts.number = 1
    hosts.apply([model], hosts.changes())
    assert not step(door)
    until(lambda: door.behind_s > 0.01, what="it to be impatient")
    assert not step(door)
    assert engine_of(model.root, model.name).served().sequence == 1  # a start has nothing to lose


def test_rows_of_a_folder_that_was_made_anew(owners: Server, tmp_path: Path) -> None:
    """Under the same numbers, where the server has deltas of before mapped."""
    hosts = Hosts(owners, tmp_path, 1, "fp32", "zero")
    (owner,) = hosts.owners
    for hosts.number in range(1, 4):
        hosts.apply([owner], hosts.changes())
    live = str(attach_state(owner).hosts_state())
    until(
        lambda: httpx.get(f"{owners.url}/v2/rows/{owner.name}/{live}").status_code == 200, what="its states"
    )
    shutil.rmtree(owners.root / owner.name)
    load(share_of(hosts.spec, 0), owners.root)
    for hosts.number in range(1, 3):
        hosts.apply([owner, hosts.door, hosts.whole], hosts.changes())
    door, whole = engine_of(hosts.door.root, hosts.door.name), engine_of(hosts.whole.root, "whole")
    if door.served().sequence < 2:
        assert takes(door)
    asked = hosts.asked()
    assert answer(door.served(), asked, tuple(asked)) == answer(whole.served(), asked, tuple(asked))


def test_an_owner_whose_folder_is_made_anew_says_what_it_has_now(owners: Server, tmp_path: Path) -> None:
    """Under the same numbers."""
    hosts = Hosts(owners, tmp_path, 1, "fp32", "zero")
    (owner,) = hosts.owners
    hosts.number = 1
    hosts.apply([owner], hosts.changes())
    shown = f"/v2/rows/{owner.name}/states"
    before = set(owners.get(shown).json())
    assert len(before) == 2
    shutil.rmtree(owners.root / owner.name)
    load(share_of(hosts.spec, 0), owners.root)
    hosts.apply([owner], hosts.changes())
    now = {str(attach_state(owner).hosts_state()), str(attach_state(owner).base.hosts_state())}
    assert len(now - before) == 1
    until(lambda: set(owners.get(shown).json()) == now, what="the owner to see its states")


def test_modules_wait_for_owners_too(owners: Server, tmp_path: Path) -> None:
    """And take a state as soon as the last one has it, though it was refused before."""
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    tables = PublishedTables(ModuleSource(hosts.door.name, str(hosts.door.root)))
    hosts.number, changes = 1, hosts.changes()
    for model in (hosts.door, *hosts.owners):
        assert not tables.look() and tables.now().served.sequence == 0
        hosts.apply([model], changes)
    assert tables.look() and tables.now().served.sequence == 1 and not tables.look()


@pytest.mark.drawn(0.25)
def test_an_owner_that_lags_by_many_states(owners: Server, tmp_path: Path) -> None:
    """As long as all hosts keep them."""
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    keep = ApplySettings(keep=Retention(1000))
    for number in range(1, 91):
        hosts.number = number
        batch = hosts.batch([TableChanges("small", np.array([1]), np.full((1, 4), number, np.float32))])
        for model in (hosts.door, hosts.owners[0], *hosts.owners[1 : 2 if number < 6 else 1]):
            apply(model, batch, keep)
    assert engine_of(hosts.door.root, hosts.door.name).served().sequence == 5


@pytest.mark.drawn(0.5)
def test_an_owner_that_lags_by_more_states_than_are_kept(
    owners: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server stays where it is until the owner has caught up, and answers from there. One that starts
    meanwhile has no state to begin with."""
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    keep, late = ApplySettings(keep=Retention(2)), list[ChangeBatch]()
    door, whole = engine_of(hosts.door.root, hosts.door.name), engine_of(hosts.whole.root, "whole")
    asked = hosts.asked()
    for hosts.number in range(1, 9):
        batch = hosts.batch(hosts.changes())
        for model in (hosts.door, hosts.owners[0]):
            apply(model, batch, keep)
        if hosts.number <= 2:
            for model in (hosts.owners[1], hosts.whole):
                apply(model, batch, keep)
            assert takes(door) and takes(whole) and door.served().sequence == hosts.number
            continue
        late.append(batch)
        assert not step(door)
        assert answer(door.served(), asked, tuple(asked)) == answer(whole.served(), asked, tuple(asked))
    with monkeypatch.context() as impatient, pytest.raises(NotAgreed):
        impatient.setattr("tableside.serving.model.engine._BEGIN_S", 0.0)
        engine_of(hosts.door.root, hosts.door.name)
    shown = run_tableside("cluster", "status", hosts.door.name, "--json", root=hosts.door.root)
    assert json.loads(shown.stdout)["degraded"] == [hosts.owners[1].name]
    for batch in late:
        for model in (hosts.owners[1], hosts.whole):
            apply(model, batch, keep)
    assert takes(door) and takes(whole) and door.served().sequence == 8
    assert answer(door.served(), asked, tuple(asked)) == answer(whole.served(), asked, tuple(asked))
    assert engine_of(hosts.door.root, hosts.door.name).served().sequence == 8


def test_a_host_that_takes_no_connection_keeps_no_other_from_being_asked(
    owners: Server, tmp_path: Path
) -> None:
    """Its queue of connections is full; the other host of its owner has the rows."""
    hosts = Hosts(owners, tmp_path, 1, "fp32", "zero")
    with socket.create_server(("127.0.0.1", 0), backlog=1) as hole, contextlib.ExitStack() as full:
        place_of_hole = f"127.0.0.1:{hole.getsockname()[1]}"
        for _ in range(4):
            one = full.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(hole.getsockname())
        tables = remote_tables(hosts.spec, choose(), None)
        both = (place_of_hole, *tables[0].shares[0].addresses)
        remote = [replace(t, shares=(replace(t.shares[0], addresses=both),)) for t in tables]
        spec = spec_of(tmp_path, hosts.door.name, ["|".join(both)], tables=hosts.tables, features=UNPOOLED)
        load(spec, tmp_path / "two", remote=remote)
        model = Model(tmp_path / "two", hosts.door.name)
        door = engine_of(model.root, model.name, timeout_s=1.0)
        hosts.number = 1
        hosts.apply([model, *hosts.owners], hosts.changes())
        assert takes(door)


def test_a_named_version_is_answered_from_a_state_that_owners_have(owners: Server, tmp_path: Path) -> None:
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    for hosts.number in range(1, 3):
        hosts.apply([hosts.door, *hosts.owners], hosts.changes())
    door, asked = engine_of(hosts.door.root, hosts.door.name), hosts.asked()
    hosts.number, changes = 3, hosts.changes()
    hosts.apply([hosts.door], changes)
    assert compact(hosts.door) is not None
    named = door.attach_explicit(1)
    assert named.sequence == 2
    assert answer(named, asked, tuple(asked)) == answer(door.served(), asked, tuple(asked))
    with pytest.raises(NotAgreed):
        door.attach_explicit(2)
    hosts.apply(hosts.owners, changes)
    assert door.attach_explicit(2).version == 2


def test_all_who_ask_for_a_state_at_once_get_the_same_files(owners: Server, tmp_path: Path) -> None:
    """A follower may merge them between two attachments, and who moves rows reads files that it was named."""
    hosts = Hosts(owners, tmp_path, 1, "fp32", "zero")
    for hosts.number in (1, 2, 3):
        hosts.apply(hosts.owners, hosts.changes())
        if hosts.number == 2:
            state = attach_state(hosts.owners[0]).hosts_state()
    engine, kept = engine_of(hosts.owners[0].root, hosts.owners[0].name), KeptStates()

    async def ask() -> list[Segment]:
        return await asyncio.gather(*(kept.segment(engine, state) for _ in range(3)))

    first, *others = asyncio.run(ask())
    assert first.hosts_state() == state and all(other is first for other in others)


@pytest.mark.drawn(0.25)
def test_states_that_other_hosts_read_are_kept_for_all_workers(tmp_path: Path) -> None:
    """By the file, while one of them holds it; it goes with the next change after that."""
    root = Path("/dev/shm") / f"tableside-test-{uuid.uuid4().hex[:12]}"
    root.mkdir()
    server = start_server(root, "--all", "--workers", 2, models=())
    try:
        hosts = Hosts(server, tmp_path, 1, "fp32", "zero")
        (owner,) = hosts.owners
        for hosts.number in (1, 2):  # the first one lies below all others
            hosts.apply([owner], hosts.changes())
        held = f"{server.url}/v2/rows/{owner.name}/{attach_state(owner).hosts_state()}"
        for number in range(3, 14):
            assert httpx.get(held).status_code == 200
            hosts.number = number
            apply(owner, hosts.batch(hosts.changes()), ApplySettings(keep=Retention(2)))
        assert {httpx.get(held).status_code for _ in range(40)} == {200}
        path = owner.folder / "1+2.delta"
        assert path.exists()

        def is_gone() -> bool:
            hosts.number += 1
            apply(owner, hosts.batch(hosts.changes()), ApplySettings(keep=Retention(2)))
            return not path.exists()

        until(is_gone, what="the file to go where nobody asks")
        assert httpx.get(held).status_code == 404
    finally:
        assert end(server.process) == 0
        shutil.rmtree(root)


@pytest.mark.drawn(0.25)
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
