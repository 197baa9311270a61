"""Owners that are stopped, killed, replaced, that lie or are another's: no answer is wrong, and late rows are
told."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import evaluated
import httpx
import numpy as np
import pytest
import torch
from changing_hosts import Hosts, step
from hosts import (
    ITEM_IDS,
    ITEMS,
    RAW,
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
from liars import Liar
from servers import Server, start_server
from support import end, run_tableside, until
from tables import serve_device

from tableside.loader.load.load import load
from tableside.loader.model.model import read_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.segment.memory import processes_below
from tableside.loader.segment.remote import HostsState
from tableside.loader.versions.versions import Model
from tableside.quant.errors import RowsNotRead
from tableside.serving.client import Client
from tableside.serving.cluster.calls import close_hosts, hosts_of
from tableside.serving.errors import ErrorKind
from tableside.torch import EmbeddingBags


def look_up(client: Client) -> dict[str, Any]:
    return client.lookup("ads", {"user": USERS[:, None], "item": ITEMS[:, None]})


def kill(server: Server) -> None:
    for pid in [server.process.pid, *processes_below(server.process.pid)]:
        os.kill(pid, signal.SIGKILL)
    server.process.wait()


def is_right(got: dict[str, Any], arrays: dict[str, np.ndarray]) -> bool:
    return np.array_equal(got["user"], arrays["user"][USERS]) and np.array_equal(
        got["item"], arrays["item"][::5]
    )


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_replica_answers_for_one_that_is_away(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server], how: signal.Signals
) -> None:
    """No request fails, and none gets late rows."""
    arrays = checkpoint(tmp_path)
    (name,) = load_shares(spec_of(tmp_path, owners=["a:1"], tables=ZERO, features=UNPOOLED), roots[:1])
    load_shares(spec_of(tmp_path, owners=["a:1"], tables=ZERO, features=UNPOOLED), roots[1:2])
    first, second = (serve(root, models=(name,)) for root in roots[:2])
    tier = [f"{place(first)}|{place(second)}"]
    load_door(spec_of(tmp_path, owners=tier, tables=ZERO, features=UNPOOLED), roots[2])
    door = serve(roots[2], models=("ads",))
    with Client(door.url) as client:
        assert is_right(look_up(client), arrays)
        for pid in [first.process.pid, *processes_below(first.process.pid)]:
            os.kill(pid, how)
        for _ in range(30):
            assert is_right(look_up(client), arrays)
    text = door.get("/metrics").text
    assert 'tableside_remote_rows_total{model="ads",outcome="came",table="user"}' in text
    assert 'outcome="late"' not in text


@pytest.mark.gpu
@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("on_device", [False, True])
def test_rows_of_an_owner_that_is_away_are_late_and_told(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server], on_device: bool
) -> None:
    """The other owner's rows are right; once it is back, all are. Also of a server with an engine process."""
    if on_device:
        pytest.importorskip("triton")
    devices = ("--devices", serve_device()) if on_device else ()
    arrays = checkpoint(tmp_path)
    names = load_shares(spec_of(tmp_path, owners=["a:1", "b:1"], tables=ZERO, features=UNPOOLED), roots[:2])
    first, second = (serve(root, models=(n,)) for root, n in zip(roots, names, strict=False))
    tier = [place(first), place(second)]
    load_door(spec_of(tmp_path, owners=tier, tables=ZERO, features=UNPOOLED), roots[2])
    door = serve(roots[2], "--disk-timeout-s", 0.2, *devices, models=("ads",))
    with Client(door.url) as client:
        assert is_right(look_up(client), arrays)
        kill(second)
        got = look_up(client)
        there = USERS < 500
        assert np.array_equal(got["user"][there], arrays["user"][USERS[there]])
        assert not got["user"][~there].any()
        asked = {"inputs": [{"name": "user", "shape": [2, 1], "datatype": "INT64", "data": [1, 999]}]}
        told = httpx.post(f"{door.url}/v2/models/ads/infer", json=asked).json()
        assert told["parameters"] == {"degraded": 1, "degraded.user": 1}
        late = 'tableside_remote_rows_total{model="ads",outcome="late",table="user"} %d.0'
        assert late % (np.sum(~there) + 1) in door.get("/metrics").text
        again = serve(roots[1], "--port", tier[1].rpartition(":")[2], models=(names[1],))
        assert place(again) == tier[1]
        until(lambda: is_right(look_up(client), arrays), what="the owner's rows to come again")
        with Client(door.url, headers={"Tableside-Disk-Timeout-Ms": "0"}) as hasty:
            for _ in range(3):
                assert not any(vectors.any() for vectors in look_up(hasty).values())
        assert is_right(look_up(client), arrays)


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("late", ["default", "error"])
def test_an_owner_that_is_stopped_holds_a_request_up_to_the_deadline(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server], late: str
) -> None:
    """Its rows are then the default row, or an error, as the setting says; soon nobody waits for it."""
    checkpoint(tmp_path)
    (name,) = load_shares(spec_of(tmp_path, owners=["a:1"], tables=ZERO, features=UNPOOLED), roots[:1])
    owner = serve(roots[0], models=(name,))
    load_door(spec_of(tmp_path, owners=[place(owner)], tables=ZERO, features=UNPOOLED), roots[2])
    version = served(roots[2], "ads", 0.1, disk_late=late)
    good = answer(version, {"user": [1, 2], "item": RAW[:2], "small": [3]})
    assert not good[1]
    for pid in processes_below(owner.process.pid):
        os.kill(pid, signal.SIGSTOP)
    got = answer(version, {"user": [1, 2], "item": RAW[:2], "small": [3]})
    if late == "error":
        assert got[0] is ErrorKind.NOT_READ and "came too late" in got[1]
    else:
        assert got[1] == [(0, 0, 2), (0, 0, 2), (0, 0, 0)]
        assert got[0][-16:] == good[0][-16:] and not any(got[0][:-16])
    host = hosts_of(None, 0.1).host(place(owner))
    until(lambda: bool(answer(version, {"user": [1]})) and host.hangs, what="nobody to wait any more")
    for pid in processes_below(owner.process.pid):
        os.kill(pid, signal.SIGCONT)
    until(lambda: answer(version, {"user": [1, 2], "item": RAW[:2], "small": [3]}) == good, what="its rows")


def _other_first_byte(answer: bytes) -> bytes:
    """Changes the body's first byte, where the head came before or with it."""
    at = answer.find(b"\r\n\r\n") + 4 if answer[:4] == b"HTTP" else 0
    return answer if at == len(answer) else answer[:at] + bytes([answer[at] ^ 1]) + answer[at + 1 :]


LIES: dict[str, Callable[[bytes], bytes]] = {
    "a bit of a row": lambda answer: answer[:-50] + bytes([answer[-50] ^ 1]) + answer[-49:],
    "a found byte": _other_first_byte,
    "no HTTP": lambda answer: b"x" * len(answer),
    "cut short": lambda answer: answer[:-8],
    "another status": lambda answer: answer.replace(b"200", b"500", 1),
    "nothing": lambda answer: b"",
    "a longer one": lambda answer: answer.replace(b"content-length: ", b"content-length: 9", 1),
}


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_was_changed_on_its_way_is_not_taken(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server], lie: str
) -> None:
    """Its rows are late. With the next honest answer they are right."""
    checkpoint(tmp_path)
    (name,) = load_shares(spec_of(tmp_path, owners=["a:1"], tables=ZERO, features=UNPOOLED), roots[:1])
    liar = Liar(serve(roots[0], models=(name,)).port)
    try:
        load_door(spec_of(tmp_path, owners=[liar.place], tables=ZERO, features=UNPOOLED), roots[2])
        version = served(roots[2], "ads", 1.0)
        asked = {"user": USERS, "item": ITEMS}
        good = answer(version, asked)
        liar.change = LIES[lie]
        got = answer(version, asked)
        assert got[1] == [(0, 0, USERS.size), (0, 0, ITEMS.size)] and not any(got[0])
        liar.change = lambda answer: answer
        until(lambda: answer(version, asked) == good, what="honest rows")
    finally:
        close_hosts()
        liar.close()


@pytest.mark.drawn(0.25)
def test_a_door_reads_the_version_that_it_was_loaded_with(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server]
) -> None:
    """While owners take the next one, which it sees when it is loaded anew. A removed one is given while
    it is asked for. Rows of one that is damaged are late, not those of another one."""
    old, new = checkpoint(tmp_path, 0), checkpoint(tmp_path, 1)
    specs = [spec_of(tmp_path, owners=["a:1"], seed=s, tables=ZERO, features=UNPOOLED) for s in (0, 1)]
    (name,) = load_shares(specs[0], roots[:1])
    owner = serve(roots[0], models=(name,))
    tier = [place(owner)]
    load_door(spec_of(tmp_path, owners=tier, tables=ZERO, features=UNPOOLED), roots[2])
    before = served(roots[2], "ads")
    load_shares(specs[1], roots[:1])
    until(lambda: owner.get(f"/v2/rows/{name}").json()["version"] == 2, what="the owner's next version")
    assert answer(before, {"user": USERS})[0] == old["user"][USERS].tobytes()
    load_door(spec_of(tmp_path, owners=tier, seed=1, tables=ZERO, features=UNPOOLED), roots[2])
    after = served(roots[2], "ads")
    for _ in range(3):
        assert answer(after, {"user": USERS})[0] == new["user"][USERS].tobytes()
        assert answer(before, {"user": USERS})[0] == old["user"][USERS].tobytes()
    Model(roots[0], name).mark_damaged(1)
    until(lambda: bool(answer(before, {"user": USERS})[1]), what="the old version to go")
    assert not any(answer(before, {"user": USERS})[0])
    assert answer(after, {"user": USERS})[0] == new["user"][USERS].tobytes()


@pytest.mark.drawn(0.25)
def test_rows_are_given_to_servers_with_the_token_alone(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server]
) -> None:
    """And loads name it, too."""
    checkpoint(tmp_path)
    (name,) = load_shares(spec_of(tmp_path, owners=["a:1"], tables=ZERO, features=UNPOOLED), roots[:1])
    token = tmp_path / "token"
    token.write_text("a token of enough characters, for tests\n")
    token.chmod(0o600)
    limit = "--max-response-bytes", 8192
    owner = serve(roots[0], "--cluster-token-file", token, *limit, models=(name,))
    asked = f"{owner.url}/v2/rows/{name}"
    assert httpx.get(asked).status_code == 401
    assert httpx.get(f"{asked}/states").status_code == 401
    assert httpx.post(f"{asked}/{HostsState(1)}", content=b"").status_code == 401
    assert httpx.get(asked, headers={"Authorization": "Bearer another"}).status_code == 401
    right = {"Authorization": f"Bearer {token.read_text().strip()}"}
    (state,) = httpx.get(f"{asked}/states", headers=right).json()
    body = np.concatenate(([1, 0, 1000], np.arange(1000))).astype("<i8").tobytes()
    refused = httpx.post(f"{asked}/{state}", content=body, headers=right)
    assert refused.status_code == 413 and "asks for 65,008 bytes of rows" in refused.json()["error"]
    said = (tmp_path / "model.toml").write_text
    tables = "".join(
        f'[tables.{t}]\nkey = "{t}"\nmissing = "zero"\ntier = "rows://{place(owner)}"\n{more}'
        for t, more in (("user", 'row_format = "fp32"\n'), ("item", 'ids = "raw"\nid_key = "item.ids"\n'))
    )
    said(
        f'name = "ads"\ncheckpoint = "0.npz"\n{tables}'.replace(
            'id_key = "item.ids"', 'id_key = "item.ids"\nbuckets = 16\nrow_format = "fp32"'
        )
    )
    refused = run_tableside("load", tmp_path / "model.toml", "--root", roots[2])
    assert refused.returncode == 1 and "answered 401" in refused.stderr
    done = run_tableside("load", tmp_path / "model.toml", "--root", roots[2], "--cluster-token-file", token)
    assert done.returncode == 0 and "2 more on other hosts" in done.stdout, done.stderr
    door = serve(roots[2], "--cluster-token-file", token, models=("ads",))
    with Client(door.url) as client:
        assert client.lookup("ads", {"user": [[1]]})["user"].any()
    shown = run_tableside("inspect", "ads", "--root", roots[2])
    assert "700 raw" in shown.stdout and "on 1 hosts" in shown.stdout
    table = next(t for t in door.get("/v1/models").json()["models"][0]["tables"] if t["name"] == "item")
    assert (table["placement"], table["id_count"]) == ("remote", ITEM_IDS)


@pytest.mark.drawn(0.25)
def test_a_module_asks_owners_too(roots: list[Path], tmp_path: Path, serve: Callable[..., Server]) -> None:
    """It waits for rows, and takes no default row in their place."""
    arrays = checkpoint(tmp_path)
    (name,) = load_shares(spec_of(tmp_path, owners=["a:1"], tables=ZERO), roots[:1])
    owner = serve(roots[0], models=(name,))
    load_door(spec_of(tmp_path, owners=[place(owner)], tables=ZERO), roots[2])
    module = EmbeddingBags("ads", ["user", "item"], root=roots[2], output=torch.float32)
    bags = {"user": torch.from_numpy(USERS[:, None]), "item": torch.from_numpy(RAW[:143, None])}
    got = module(bags)
    for feature, expected in (("user", arrays["user"][USERS]), ("item", arrays["item"][:143])):
        assert np.array_equal(got[feature].numpy(), expected)
    kill(owner)
    with pytest.raises(RowsNotRead, match="143 came too late"):
        module(bags)


@pytest.mark.gpu
@pytest.mark.thorough
@pytest.mark.parametrize("on_device", [False, True])
def test_an_evaluation_asks_owners_too(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server], on_device: bool
) -> None:
    """Its scores are those of one host."""
    if on_device:
        pytest.importorskip("triton")
    devices = ("--devices", serve_device(), "--batch", 100) if on_device else ()
    path, whole = evaluated.write(tmp_path, evaluated.data(300)), evaluated.model(tmp_path, "int8")
    load(read_model(whole), roots[1])

    def spec(tier: str) -> ModelSpec:
        text = whole.read_text().replace('key = "user"', f'key = "user"\ntier = "rows://{tier}"')
        (tmp_path / "remote.toml").write_text(text)
        return read_model(tmp_path / "remote.toml")

    (name,) = load_shares(spec("a:1"), roots[:1])
    load_door(spec(place(owner := serve(roots[0], models=(name,)))), roots[2])
    scores = []
    for root in roots[1:]:
        out = tmp_path / f"of-{root.name}"
        done = evaluated.evaluate(root, "ctr", path, "--out", out, *devices)
        assert done.returncode == 0, done.stderr
        scores.append(evaluated.parts(out).column("score_0").to_numpy())
    assert scores[0].size == 300 and np.array_equal(*scores)
    kill(owner)
    done = evaluated.evaluate(roots[2], "ctr", path, "--out", tmp_path / "late", *devices)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert str(path) in done.stderr and "model 'ctr': of" in done.stderr and "came too late" in done.stderr


@pytest.mark.drawn(0.25)
def test_tables_of_one_share_have_hosts_of_their_own(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server]
) -> None:
    """The same share of two tables lies on two hosts; each is asked for its own table's rows."""
    arrays = checkpoint(tmp_path)
    said: dict[str, Any] = {"tables": ZERO, "features": UNPOOLED}
    names = load_shares(spec_of(tmp_path, owners=["a:1", "b:1"], **said), roots[:2])
    first, second = (serve(root, models=(name,)) for root, name in zip(roots, names, strict=False))
    other = serve(roots[0], models=names[:1])
    tiers = {"user": [place(first), place(second)], "item": [place(other), place(second)]}
    tables = {name: {**ZERO[name], "tier": f"rows://{','.join(tier)}"} for name, tier in tiers.items()}
    load_door(spec_of(tmp_path, tables=tables, features=UNPOOLED), roots[2])
    expected = arrays["user"][USERS].tobytes() + arrays["item"][::5].tobytes()
    assert answer(served(roots[2], "ads"), {"user": USERS, "item": ITEMS}) == (expected, [])
    given = {server.url: server.get("/metrics").text for server in (first, other)}
    users, items = (f'tableside_given_rows_total{{model="{names[0]}"}} {n}.0' for n in (72, 70))
    assert users in given[first.url] and items not in given[first.url]


@pytest.mark.drawn(0.5)
def test_rows_beyond_one_response_are_asked_for_in_parts(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = checkpoint(tmp_path)
    said: dict[str, Any] = {"tables": ZERO, "features": UNPOOLED}
    (name,) = load_shares(spec_of(tmp_path, owners=["a:1"], **said), roots[:1])
    owner = serve(roots[0], "--max-response-bytes", 2048, models=(name,))
    load_door(spec_of(tmp_path, owners=[place(owner)], **said), roots[2])
    monkeypatch.setattr("tableside.serving.cluster.owners._RESPONSE_BYTES", 1500)
    expected = arrays["user"][USERS].tobytes() + arrays["item"][::5].tobytes()
    assert answer(served(roots[2], "ads"), {"user": USERS, "item": ITEMS}) == (expected, [])


@pytest.mark.drawn(0.25)
def test_owners_that_hung_before_their_version_was_served_are_asked_again(
    owners: Server, tmp_path: Path
) -> None:
    """Nobody asks them for rows yet, so nothing else would tell that they are well."""
    hosts = Hosts(owners, tmp_path, 1, "fp32", "zero")
    root = owners.root.parent / f"{owners.root.name}-next"
    shutil.copytree(owners.root / hosts.owners[0].name, root / hosts.owners[0].name)
    other = start_server(root, models=(hosts.owners[0].name,))
    processes = [other.process.pid, *processes_below(other.process.pid)]
    try:
        door = engine_of(hosts.door.root, hosts.door.name)
        load_door(
            spec_of(tmp_path, hosts.door.name, [place(other)], tables=hosts.tables, features=UNPOOLED),
            hosts.door.root,
        )
        host = hosts_of(None, 2.0).host(place(other))
        for pid in processes:
            os.kill(pid, signal.SIGSTOP)
        until(lambda: (step(door), host.hangs)[1], what="nobody to ask it any more")
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        assert not step(door)
        until(lambda: (door.hold(), step(door))[1], what="the next version to be served")
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        assert end(other.process) == 0
        shutil.rmtree(root)
