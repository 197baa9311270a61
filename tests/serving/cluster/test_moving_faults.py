"""Owners that fail, lie or change while a share is taken: an error by name, and nothing is published."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from changing_hosts import Hosts, step, takes
from hosts import (
    ITEMS,
    UNPOOLED,
    USERS,
    ZERO,
    answer,
    checkpoint,
    engine_of,
    load_door,
    load_shares,
    place,
    served,
    spec_of,
)
from liars import Cut, Flip, Liar
from servers import Server
from support import files_of, flip_bit, run_tableside, until

from tableside.loader.deltas.compact import compact
from tableside.loader.errors import LoaderError, SegmentError
from tableside.loader.load.load import load
from tableside.loader.load.share import share_of
from tableside.loader.model.tiers import TIER, owner_name
from tableside.loader.segment import layout, transfer
from tableside.loader.segment.memory import processes_below
from tableside.loader.segment.transfer import head_of
from tableside.loader.shards.moving import take_share
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model
from tableside.serving.cluster import sources
from tableside.serving.cluster.describe import Owners, turned_tables
from tableside.serving.cluster.sources import common_state
from tableside.serving.errors import ServingError


@pytest.fixture
def hosts(owners: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hosts:
    """Two owners with changes, in chunks of a few rows, which are asked for one by one."""
    monkeypatch.setattr(layout, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(transfer, "REQUEST_BYTES", 1024)
    monkeypatch.setattr(sources, "PATIENCE_S", 0.5)
    hosts = Hosts(owners, tmp_path, 2, "int8", "zero")
    for hosts.number in range(1, 3):
        hosts.apply([hosts.door, hosts.whole, *hosts.owners], hosts.changes())
    return hosts


@pytest.fixture
def liar(owners: Server) -> Iterator[Liar]:
    found = Liar(owners.port)
    yield found
    found.close()


def take(hosts: Hosts, addresses: Owners, root: Path) -> None:
    with common_state(hosts.spec.name, addresses, None) as found:
        take_share(root, 1, 3, found)


def is_empty(root: Path, model: str) -> bool:
    """Whether nothing of a model is there but locks and its record."""
    return not (root / model).exists() or not files_of(root / model)


@pytest.mark.drawn(0.25)
def test_a_transfer_goes_on_where_a_connection_was_cut(
    hosts: Hosts, owners: Server, liar: Liar, tmp_path: Path
) -> None:
    """Nothing that came is asked for again: the rows are those of a share that was taken without a cut."""
    addresses = ((liar.place,), (place(owners),))
    liar.change = counted = Cut(liar, -1, False)
    take(hosts, addresses, tmp_path / "whole")
    answers = counted.answers
    assert answers > 7
    name = owner_name(hosts.spec.name, 1, 3)
    for at in (1, 2, answers // 2, answers):
        liar.change = cut = Cut(liar, at, False)
        take(hosts, addresses, tmp_path / "cut")
        assert cut.answers == answers + 1, "one answer came twice"
        made = [attach_state(Model(tmp_path / of, name)) for of in ("whole", "cut")]
        assert made[0].hosts_state() == made[1].hosts_state() and made[0].content() == made[1].content()


@pytest.mark.drawn(0.25)
def test_an_owner_that_goes_is_an_error(hosts: Hosts, owners: Server, liar: Liar, tmp_path: Path) -> None:
    addresses = ((liar.place,), (place(owners),))
    for at in (1, 2, 7):
        liar.change = Cut(liar, at, True)
        with pytest.raises(ServingError, match=f"owner {liar.place} is not reached"):
            take(hosts, addresses, tmp_path / "new")
        assert is_empty(tmp_path / "new", owner_name(hosts.spec.name, 1, 3))


@pytest.mark.drawn(0.25)
def test_bits_that_flip_on_their_way_are_found(
    hosts: Hosts, owners: Server, liar: Liar, tmp_path: Path
) -> None:
    """In what describes the files, and in their bytes."""
    for at in itertools.count(1):
        liar.change = flip = Flip(at)
        try:
            take(hosts, ((liar.place,), (place(owners),)), tmp_path / "new")
        except (ServingError, SegmentError) as error:
            assert flip.pieces >= at and liar.place in str(error)
            assert is_empty(tmp_path / "new", owner_name(hosts.spec.name, 1, 3))
        else:
            assert flip.pieces < at, "a bit that flipped was not seen"
            break
    assert at > 4


def test_a_bit_that_flipped_at_an_owner_is_found(hosts: Hosts, owners: Server, tmp_path: Path) -> None:
    model = hosts.owners[0]
    stored = next(t for t in attach_state(model).header.tables if t.name == "user")
    flip_bit(model.path(1), stored.offset + stored.bytes - 1)
    why = r"table 'user', rows \[.*the checksum is wrong, so bytes changed there.*look there"
    with pytest.raises((ServingError, SegmentError), match=why):
        take(hosts, ((place(owners),),) * 2, tmp_path / "new")
    assert is_empty(tmp_path / "new", owner_name(hosts.spec.name, 1, 3))


@pytest.mark.drawn(0.25)
def test_a_state_is_held_while_nothing_is_asked(hosts: Hosts, owners: Server, liar: Liar) -> None:
    """As while memory is reserved for a large share."""
    held = 0

    def count(answer: bytes) -> bytes:
        nonlocal held
        held += answer.endswith(b"\r\n\r\n{}")
        return answer

    liar.change = count
    with common_state(hosts.spec.name, ((liar.place,), (place(owners),)), None):
        until(lambda: held > 1, what="the owner to be asked to keep the state")


@pytest.mark.drawn(0.25)
def test_a_state_is_given_to_its_end_whatever_becomes_live(
    hosts: Hosts, owners: Server, tmp_path: Path
) -> None:
    """Owners are compacted, get changes and lose the version: the share is that of the state that was asked
    for."""
    addresses, name = ((place(owners),),) * 2, owner_name(hosts.spec.name, 1, 3)
    take(hosts, addresses, tmp_path / "before")
    with common_state(hosts.spec.name, addresses, None) as found:
        for hosts.number in range(3, 6):
            hosts.apply(hosts.owners, hosts.changes())
        for model in hosts.owners:
            assert compact(model) is not None
            model.collect(0)
            live = str(attach_state(model).hosts_state())
            until(
                lambda m=model, s=live: s in owners.get(f"/v2/rows/{m.name}/states").json(),
                what="the next version",
            )
            assert model.versions() == [2]
        take_share(tmp_path / "after", 1, 3, found)
    made = [attach_state(Model(tmp_path / of, name)) for of in ("before", "after")]
    assert made[0].hosts_state() == made[1].hosts_state() and made[0].content() == made[1].content()


@pytest.mark.drawn(0.25)
def test_an_owner_that_came_back_with_other_files_is_an_error(
    hosts: Hosts,
    tmp_path: Path,
    roots: list[Path],
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was compacted while it was away, so that chunks have other bytes by the same numbers."""
    monkeypatch.setattr(sources, "PATIENCE_S", 60.0)
    roots[0].rmdir()
    shutil.copytree(hosts.owners[0].root, roots[0])
    names = tuple(model.name for model in hosts.owners)
    first = serve(roots[0], models=names)
    with common_state(hosts.spec.name, ((place(first),),) * 2, None) as found:
        for pid in [first.process.pid, *processes_below(first.process.pid)]:
            os.kill(pid, signal.SIGKILL)
        first.process.wait()
        for name in names:
            assert compact(Model(roots[0], name)) is not None
        assert place(serve(roots[0], "--port", first.port, models=names)) == place(first)
        with pytest.raises(ServingError, match=r"no file of this state is .* compacted meanwhile"):
            take_share(tmp_path / "new", 1, 3, found)
    assert is_empty(tmp_path / "new", owner_name(hosts.spec.name, 1, 3))


def test_owners_without_a_state_in_common_are_refused(hosts: Hosts, owners: Server, tmp_path: Path) -> None:
    """One has dropped those that the other one has."""
    hosts.number = 3
    hosts.apply(hosts.owners[:1], hosts.changes())
    assert compact(hosts.owners[0]) is not None
    hosts.owners[0].collect(0)
    until(
        lambda: len(owners.get(f"/v2/rows/{hosts.owners[0].name}/states").json()) == 1,
        what="the states to be dropped",
    )
    with pytest.raises(ServingError, match="have no state in common"):
        take(hosts, ((place(owners),),) * 2, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.drawn(0.25)
def test_what_is_no_request_for_chunks_is_refused(hosts: Hosts, owners: Server) -> None:
    model = hosts.owners[0]
    segment = attach_state(model)
    asked = f"/v2/buckets/{model.name}/{segment.hosts_state()}"
    heads = owners.get(asked)
    assert heads.status_code == 200 and heads.content[8:16] == len(head_of(segment.base)).to_bytes(
        8, "little"
    )
    identity = f"{segment.base.files[0].identity:016x}"
    assert owners.get(f"{asked}/{identity}/0-1").status_code == 200
    user = segment.header.tables[0]
    for chunks in ("1-1", "2-1", "0", "a-b", "0-1-2", "-1-1", f"0-{user.chunks + 1}", "10000000-10000001"):
        refused = owners.get(f"{asked}/{identity}/{chunks}")
        assert refused.status_code == 400 and "expected FIRST-END" in refused.json()["error"]
    assert owners.get(f"{asked}/{'0' * 16}/0-1").status_code == 404
    assert owners.get(f"/v2/buckets/{model.name}/{'0' * 16}.{'0' * 16}").status_code == 404
    assert owners.get(f"/v2/buckets/{model.name}/3").status_code == 400
    assert owners.get(f"/v2/buckets/nobody/{segment.hosts_state()}").status_code == 404


@pytest.mark.drawn(0.25)
def test_who_lacks_the_token_gets_nothing(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server]
) -> None:
    """And who has it, as a command, gets the share; the commands say what is wrong with their arguments."""
    checkpoint(tmp_path)
    (name,) = load_shares(spec_of(tmp_path, owners=["a:1"], tables=ZERO, features=UNPOOLED), roots[:1])
    tokens = [tmp_path / "token", tmp_path / "other"]
    for token in tokens:
        token.write_text(f"a {token.name} of enough characters, for tests\n")
        token.chmod(0o600)
    limit = "--max-response-bytes", 2048
    owner = serve(roots[0], "--cluster-token-file", tokens[0], *limit, models=(name,))
    segment = Model(roots[0], name).attach()
    asked = f"{owner.url}/v2/buckets/{name}/{segment.hosts_state()}"
    chunk = f"{asked}/{segment.files[0].identity:016x}/0-1"
    for path in (asked, chunk):
        assert httpx.get(path).status_code == 401
        assert httpx.get(path, headers={"Authorization": "Bearer another"}).status_code == 401
    right = {"Authorization": f"Bearer {tokens[0].read_text().strip()}"}
    refused = httpx.get(chunk, headers=right)
    assert refused.status_code == 413 and "max_response_bytes" in refused.json()["error"]
    owner = serve(roots[0], "--cluster-token-file", tokens[0], models=(name,))
    share = (
        "reshard",
        "ads",
        "--from",
        f"{TIER}{place(owner)}",
        "--owners",
        2,
        "--share",
        1,
        "--root",
        roots[1],
    )
    for more in ((), ("--cluster-token-file", tokens[1])):
        refused = run_tableside(*share, *more)
        assert refused.returncode == 1 and "answered 401" in refused.stderr
        assert not any(roots[1].iterdir())
    done = run_tableside(*share, "--cluster-token-file", tokens[0])
    assert done.returncode == 0 and "ads-owner-1-of-2" in done.stdout, done.stderr
    for arguments, code, said in (
        (("--share", 0), 1, "expected it with --from rows://HOST:PORT,... and without --version"),
        (("--from", f"{TIER}a:1"), 1, "expected it with --from"),
        (("--from", f"{TIER}a:1", "--share", 0, "--version", 3), 1, "without --version"),
        (
            ("--from", "redis://a:1", "--share", 0),
            2,
            "expected a whole number from 1 on; or rows://HOST:PORT",
        ),
        (("--from", f"{TIER}a", "--share", 0), 2, "expected rows://HOST:PORT,HOST:PORT"),
    ):
        refused = run_tableside("reshard", "ads", "--owners", 2, *arguments, "--root", roots[2])
        assert refused.returncode == code and said in refused.stderr, refused.stderr
    turned = run_tableside("cluster", "turn", "ads-owner-1-of-2", "--to", f"{TIER}a:1", "--root", roots[1])
    assert turned.returncode == 1 and "expected one whose model.toml names owners" in turned.stderr


@pytest.mark.drawn(0.25)
def test_a_share_is_taken_again_after_a_kill(
    hosts: Hosts, owners: Server, liar: Liar, tmp_path: Path
) -> None:
    """What was written is removed by the next one, and nothing is served before that."""
    name, root = owner_name(hosts.spec.name, 1, 3), tmp_path / "new"
    tier = f"{TIER}{liar.place},{place(owners)}"
    command = (
        "reshard",
        hosts.spec.name,
        "--from",
        tier,
        "--owners",
        "3",
        "--share",
        "1",
        "--root",
        str(root),
    )
    is_held = True

    def stand_still(answer: bytes) -> bytes:
        if b"octet-stream" in answer and any(root.glob("*/*.partial")):
            until(lambda: not is_held)
        return answer

    liar.change = stand_still
    taking = subprocess.Popen([sys.executable, "-m", "tableside", *command], stderr=subprocess.DEVNULL)
    until(lambda: any(root.glob("*/*.segment.partial")), what="the first bytes")
    taking.send_signal(signal.SIGKILL)
    taking.wait()
    is_held = False
    model = Model(root, name)
    assert not model.record().current and not model.versions() and files_of(root / name)
    done = run_tableside(*command)
    assert done.returncode == 0, done.stderr
    assert files_of(root / name) == {"1.segment", "1+1.delta"}
    assert attach_state(model).hosts_state().mark == attach_state(hosts.owners[0]).hosts_state().mark  # type: ignore[union-attr]


# ---- servers of the whole ----


@pytest.mark.drawn(0.25)
def test_a_server_stays_until_the_new_owners_have_its_state(hosts: Hosts, owners: Server) -> None:
    """It answers from the present owners, as long as a new one lags."""
    addresses = ((place(owners),),) * 2
    for number in range(3):
        with common_state(hosts.spec.name, addresses, None) as found:
            take_share(owners.root, number, 3, found)
    new = [Model(owners.root, owner_name(hosts.spec.name, number, 3)) for number in range(3)]
    for model in new:
        until(lambda m=model: owners.get(f"/v2/rows/{m.name}").status_code == 200, what="the new owners")
    door, whole = engine_of(hosts.door.root, hosts.door.name), engine_of(hosts.whole.root, "whole")
    hosts.number = 3
    changes, asked = hosts.changes(), hosts.asked()
    hosts.apply([hosts.door, hosts.whole, *hosts.owners, *new[:2]], changes)
    assert takes(door) and takes(whole)
    remote = turned_tables(attach_state(hosts.door).header, ((place(owners),),) * 3, None)
    assert compact(hosts.door, remote=remote) is not None
    for _ in range(3):
        assert not step(door)
        expected = answer(whole.served(), asked, tuple(asked))
        assert answer(door.served(), asked, tuple(asked)) == expected
    hosts.apply(new[2:], changes)
    assert takes(door)
    assert door.served().header.remote[0].shares[0].model == new[0].name
    assert answer(door.served(), asked, tuple(asked)) == expected


@pytest.mark.drawn(0.25)
def test_owners_of_other_rows_are_refused(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server]
) -> None:
    """Those of another checkpoint, of other settings, and any if the present ones cannot be asked."""
    for seed in (0, 1):
        checkpoint(tmp_path, seed)
    said: dict[str, Any] = {"tables": ZERO, "features": UNPOOLED}
    load_shares(spec_of(tmp_path, owners=["a:1", "b:1"], **said), roots[:1] * 2)
    present = serve(roots[0], "--all", models=())
    load_door(spec_of(tmp_path, owners=[place(present)] * 2, **said), roots[2])
    door = Model(roots[2], "ads")

    def refusal(**change: Any) -> str:
        (name,) = load_shares(spec_of(tmp_path, owners=["a:1"], **{**said, **change}), roots[1:2])
        other = serve(roots[1], models=(name,))
        with pytest.raises((ServingError, LoaderError)) as caught:
            turned_tables(door.attach().header, ((place(other),),), None)
        return str(caught.value)

    assert "the present owners of model 'ads' are of checkpoint" in refusal(seed=1)
    of_item = {"user": ZERO["user"], "item": {**ZERO["item"], "missing": "error"}}
    assert "missing is 'zero' here" in refusal(tables=of_item)
    load(share_of(spec_of(tmp_path, seed=1, owners=["a:1", "b:1"], **said), 0), roots[0])
    name = owner_name("ads", 0, 2)
    until(lambda: present.get(f"/v2/rows/{name}").json()["version"] == 2, what="the other checkpoint")
    asked = {"user": USERS, "item": ITEMS}
    before = answer(served(roots[2], "ads"), asked)
    for pid in [present.process.pid, *processes_below(present.process.pid)]:
        os.kill(pid, signal.SIGKILL)
    assert "none of the present owners of model 'ads' says what rows it has" in refusal()
    assert door.versions() == [1] and before[1] == []
