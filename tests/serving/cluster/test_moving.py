"""More or fewer owners: rows move between hosts as they lie there, and answers stay those of one host."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from changing_hosts import Hosts, takes
from hosts import UNPOOLED, ZERO, answer, checkpoint, engine_of, load_shares, place, spec_of
from resharded import bytes_of
from servers import Server
from support import until

from tableside.loader.deltas.compact import compact
from tableside.loader.model.tiers import owner_name
from tableside.loader.segment import layout
from tableside.loader.segment.remote import HostsState
from tableside.loader.shards.moving import take_share
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.serving.cluster.agreed import At, OwnedModel
from tableside.serving.cluster.describe import turned_tables
from tableside.serving.cluster.sources import common_state, in_common
from tableside.serving.errors import ServingError

FORMS = [("int8", "zero"), ("fp32", [0.5, -2.0] * 4), ("int4", "zero")]


def move(hosts: Hosts, owners: Server, count: int) -> list[Model]:
    """Publishes the shares of so many owners, and waits until they are served."""
    addresses = ((place(owners),),) * len(hosts.owners)
    for number in range(count):
        with common_state(hosts.spec.name, addresses, None) as sources:
            take_share(owners.root, number, count, sources)
    found = [Model(owners.root, owner_name(hosts.spec.name, number, count)) for number in range(count)]
    for model in found:
        wanted, asked = str(attach_state(model).hosts_state()), f"/v2/rows/{model.name}/states"
        until(lambda a=asked, w=wanted: w in owners.get(a).json(), what="the new owners")
    return found


def turn(hosts: Hosts, owners: Server, count: int) -> None:
    before = attach_state(hosts.door)
    remote = turned_tables(before.header, ((place(owners),),) * count, None)
    assert compact(hosts.door, remote=remote) is not None
    states = [state.hosts_state() for state in (before, attach_state(hosts.door))]
    assert states[0] is not None and states[1] is not None
    assert states[0].mark == states[1].mark and states[0].content != states[1].content


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize(("form", "compacted"), list(itertools.product(FORMS, [False, True])))
def test_answers_stay_those_of_one_host(
    owners: Server, tmp_path: Path, form: tuple[str, object], compacted: bool
) -> None:
    """2 -> 3 -> 2 owners between changes, of which some are compacted, each owner at another place."""
    hosts = Hosts(owners, tmp_path, 2, *form)
    door, whole = engine_of(hosts.door.root, hosts.door.name), engine_of(hosts.whole.root, "whole")
    numbers = itertools.count(1)

    def change(times: int) -> None:
        for hosts.number in itertools.islice(numbers, times):
            changes = hosts.changes()
            for model in hosts.owners:
                hosts.apply([model], changes, merge_share=hosts.draw.choice([0.0, 0.25, 10.0]))
                if compacted and hosts.draw.random() < 0.3:
                    compact(model)
            hosts.apply([hosts.door, hosts.whole], changes)
        assert takes(whole) and takes(door)

    def check() -> None:
        asked = hosts.asked()
        expected = answer(whole.served(), asked, tuple(asked))
        assert answer(door.served(), asked, tuple(asked)) == expected
        again = engine_of(hosts.door.root, hosts.door.name)
        assert answer(again.served(), asked, tuple(asked)) == expected

    for count in (3, 2, 1, 2):
        change(3)
        check()
        before, hosts.owners = hosts.owners, move(hosts, owners, count)
        check()
        turn(hosts, owners, count)
        assert takes(door)
        assert door.served().header.remote[0].shares[-1].model == hosts.owners[-1].name
        for model in before:
            model.remove_all()
        check()
    change(2)
    check()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("to_disk", [False, True], ids=["to memory", "to a disk"])
def test_a_share_that_moved_is_that_of_the_checkpoint(
    roots: list[Path],
    disk: Path,
    tmp_path: Path,
    serve: Callable[..., Server],
    to_disk: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a disk to memory, and the other way: each has what a load of this share has there."""
    monkeypatch.setattr(layout, "LARGE_PAGES", 0)
    checkpoint(tmp_path)
    source, target, loaded = (roots[0], disk, disk) if to_disk else (disk, roots[0], roots[1])
    said: dict[str, Any] = {"tables": ZERO, "features": UNPOOLED}
    (name,) = load_shares(spec_of(tmp_path, "before", ["a:1"], **said), [source])
    owner = serve(source, models=(name,))
    with common_state("before", ((place(owner),),), None) as found:
        for number in range(2):
            take_share(target, number, 2, found)
    loads = load_shares(spec_of(tmp_path, "after", ["a:1", "b:1"], **said), [loaded] * 2)
    for number, of_load in enumerate(loads):
        moved = Model(target, owner_name("before", number, 2)).attach()
        assert bytes_of(moved) == bytes_of(Model(loaded, of_load).attach())
        assert bool(moved.readers) == to_disk


def test_a_replica_that_lags_is_left_out() -> None:
    """A state of all owners is read of hosts that have it."""
    states = [HostsState(1, mark) for mark in range(4)]
    of_second = [state._replace(content=2) for state in states]
    owners = [OwnedModel("m-0", 1, ("a", "b")), OwnedModel("m-1", 2, ("c", "d"))]
    kept = {
        At("m-0", "a"): [states[1], states[0]],
        At("m-0", "b"): [states[3], states[2], states[1], states[0]],
        At("m-1", "c"): [of_second[0]],
        At("m-1", "d"): [of_second[2], of_second[1]],
    }
    assert in_common(owners, kept) == [(At("m-0", "a"), states[1]), (At("m-1", "d"), of_second[1])]
    kept[At("m-0", "a")] = []
    assert in_common(owners, kept) == [(At("m-0", "b"), states[2]), (At("m-1", "d"), of_second[2])]
    kept[At("m-1", "d")] = []
    assert in_common(owners, kept) == [(At("m-0", "b"), states[0]), (At("m-1", "c"), of_second[0])]
    kept[At("m-1", "c")] = [states[0]]
    why = r"no state in common \(states that each keeps: a 0, b 4, c 1, d 0\)"
    with pytest.raises(ServingError, match=why):
        in_common(owners, kept)


@pytest.mark.drawn(0.25)
def test_a_version_of_rows_of_several_places_is_no_state(owners: Server, tmp_path: Path) -> None:
    """Where owners were compacted. With its changes it is the state that they have in common, and shares that
    are taken at different places are replicas."""
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    addresses, taken = ((place(owners),),) * 2, []
    for hosts.number in range(1, 5):
        hosts.apply(hosts.owners, hosts.changes())
        if hosts.number < 3:
            assert compact(hosts.owners[hosts.number - 1]) is not None
            continue
        with common_state(hosts.spec.name, addresses, None) as found:
            take_share(tmp_path / f"{hosts.number}", 1, 3, found)
        taken.append(Model(tmp_path / f"{hosts.number}", owner_name(hosts.spec.name, 1, 3)))
        (of_owner, state) = (attach_state(m).hosts_state() for m in (hosts.owners[0], taken[-1]))
        assert of_owner is not None and state is not None and of_owner.mark == state.mark != 0
        assert taken[-1].attach().hosts_state() is None
    contents = {state.content for m in taken if (state := attach_state(m).hosts_state()) is not None}
    assert len(contents) == 1
