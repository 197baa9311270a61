"""More or fewer owners: rows move between hosts as they lie there, and answers stay those of one host."""

import itertools
from pathlib import Path

import pytest
from changing_hosts import Hosts, takes
from hosts import answer, engine_of, place
from servers import Server
from support import until

from tableside.loader.deltas.compact import compact
from tableside.loader.model.tiers import owner_name
from tableside.loader.shards.moving import take_share
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.serving.cluster.describe import turned_tables
from tableside.serving.cluster.sources import common_state

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
    header = attach_state(hosts.door).header
    assert compact(hosts.door, remote=turned_tables(header, ((place(owners),),) * count, None)) is not None


@pytest.mark.drawn(2)
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
