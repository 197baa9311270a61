"""`tableside cluster plan`, whose commands make the hosts that it plans, and `tableside cluster status`."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from changing_hosts import Hosts
from hosts import UNPOOLED, ZERO, checkpoint, load_shares, place, spec_of
from json_keys import documented_keys, keys_of
from redis_servers import free_port
from servers import Server
from support import run_tableside

from tableside.loader.load.load import load
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.client import Client
from tableside.serving.cluster.describe import remote_tables

MODEL = 'name = "ads"\ncheckpoint = "c.npz"\n[tables.user]\nkey = "user"\n[tables.small]\nkey = "small"\n'


def write_model(folder: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {"user": rng.standard_normal((9000, 64), np.float32), "small": np.ones((50, 8), np.float32)}
    np.savez(folder / "c.npz", **arrays)
    (folder / "model.toml").write_text(MODEL)
    return arrays


def planned(model: object, *options: object, root: Path) -> Any:
    found = run_tableside("cluster", "plan", model, *options, "--json", root=root)
    assert found.returncode == 0, found.stderr
    told = json.loads(found.stdout)
    assert keys_of(told) == documented_keys("cluster plan")
    return told


# ---- plan ----


@pytest.mark.drawn(0.25)
def test_the_commands_of_a_plan_make_its_hosts(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server]
) -> None:
    """As written, with addresses and roots of this machine: each host has the bytes that were planned, and
    the server of the whole answers."""
    rows = write_model(tmp_path)["user"][[0, 8999]]
    path, sizes = tmp_path / "model.toml", ("--hosts", 2, "--memory", "1200KiB")
    told = planned(path, *sizes, root=roots[0])
    said = run_tableside("cluster", "plan", path, *sizes, root=roots[0]).stdout
    lines = said.split("# on host0\n")[0].splitlines()
    ports = [free_port(), free_port()]
    for n, port in enumerate(ports):
        lines = [line.replace(f"host{n}:8000", f"127.0.0.1:{port}") for line in lines]
    tier = lines[lines.index("[tables.user]") + 1]
    path.write_text(MODEL.replace('key = "user"\n', f'key = "user"\n{tier}\n'))
    (tmp_path / "token").write_text("a token of enough characters, for tests\n")
    (tmp_path / "token").chmod(0o600)
    on_hosts, then = said.partition("# on host0\n")[2].split("# then on each host\n")
    commands = [re.findall("^tableside .*", part, re.MULTILINE) for part in (*on_hosts.split("# on"), then)]
    for n, (loads, serves) in enumerate(commands):
        words = shlex.split(loads.replace("cluster-token-file token", f"cluster-token-file {tmp_path}/token"))
        loaded = run_tableside(*words[1:], "--json", root=roots[n])
        assert loaded.returncode == 0, loaded.stderr
        host = told["hosts"][min(n, 1)]
        assert (
            0 <= json.loads(loaded.stdout)["bytes"] - host["share_bytes" if n < 2 else "local_bytes"] <= 4096
        )
        model, *options = shlex.split(serves)[2:]
        assert options[:3] == ["--host", "0.0.0.0", "--port"]
        port = ports[n] if n < 2 else 0
        server = serve(roots[n], "--port", port, "--cluster-token-file", tmp_path / "token", models=(model,))
    with Client(server.url) as client:
        got = client.lookup("ads", {"user": [[0], [8999]], "small": [[3], [4]]})
    assert np.allclose(got["user"], rows, atol=0.03) and (got["small"] == 1).all()


@pytest.mark.drawn(0.25)
def test_a_plan_of_a_published_model(roots: list[Path], tmp_path: Path) -> None:
    """Says what one of its model.toml says; a model that fits is told so."""
    write_model(tmp_path)
    of_file = planned(tmp_path / "model.toml", "--hosts", 3, "--memory", "1MiB", root=roots[0])
    assert run_tableside("load", tmp_path / "model.toml", root=roots[0]).returncode == 0
    assert planned("ads", "--hosts", 3, "--memory", "1MiB", root=roots[0]) == of_file
    assert [h["owner"] for h in of_file["hosts"]] == [f"ads-owner-{n}-of-3" for n in range(3)]
    fits = run_tableside("cluster", "plan", "ads", "--hosts", 2, "--memory", "1GiB", root=roots[0])
    assert "the whole model fits each host; no table needs a tier" in fits.stdout
    whole = planned("ads", "--hosts", 2, "--memory", "1GiB", root=roots[0])
    assert (whole["owners"], whole["tier"]) == (0, None)
    assert {(h["owner"], h["load_fraction"]) for h in whole["hosts"]} == {(None, 0.5)}


@pytest.mark.drawn(0.25)
def test_a_plan_that_does_not_fit_says_what_would(roots: list[Path], tmp_path: Path) -> None:
    write_model(tmp_path)
    asked = "cluster", "plan", tmp_path / "model.toml", "--memory", "300KiB", "--hosts"
    found = run_tableside(*asked, 2, root=roots[0])
    assert found.returncode == 1 and found.stderr.count("\n") == 1
    remedies = re.search(r"expected --hosts (\d+) or --memory (\d+MiB)$", found.stderr.strip())
    assert remedies is not None
    assert run_tableside(*asked, remedies[1], root=roots[0]).returncode == 0
    again = "cluster", "plan", tmp_path / "model.toml", "--hosts", 2, "--memory"
    assert run_tableside(*again, remedies[2], root=roots[0]).returncode == 0


# ---- status ----


def status(model: Model) -> Any:
    shown = run_tableside("cluster", "status", model.name, "--json", root=model.root)
    told = json.loads(shown.stdout)
    assert shown.returncode == bool(told["degraded"])
    return told


@pytest.mark.drawn(0.25)
def test_owners_are_shown_with_their_states(owners: Server, tmp_path: Path) -> None:
    """And how many states of this host each of them lacks."""
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    for hosts.number in range(1, 4):
        hosts.apply([hosts.door, hosts.owners[0]], hosts.changes())
    told = status(hosts.door)
    assert keys_of(told) - {"apply"} == documented_keys("cluster status")
    assert [(o["host"], o["reached"], o["state"], o["behind_states"]) for o in told["owners"]] == [
        (place(owners), True, "1+3", 0),
        (place(owners), True, "1", 3),
    ]
    assert [o["positions"] for o in told["owners"]] == [{"apply": "3"}, {}]
    assert told["owners"][0]["behind_s"] == 0 < told["owners"][1]["behind_s"]
    shown = run_tableside("cluster", "status", hosts.door.name, root=hosts.door.root)
    assert shown.returncode == 0 and f"{hosts.door.name} 1+3 is live here" in shown.stdout
    assert re.search(r" 1 +3 states, \d+\.\d s", shown.stdout)
    whole = run_tableside("cluster", "status", "whole", root=hosts.whole.root)
    assert whole.returncode == 1 and "all tables of model 'whole' are on this host" in whole.stderr


@pytest.mark.drawn(0.25)
def test_owners_that_refuse_a_token_are_told_from_lost_ones(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server]
) -> None:
    checkpoint(tmp_path)
    (token := tmp_path / "token").write_text("a token of enough characters")
    token.chmod(0o600)
    (name,) = load_shares(spec_of(tmp_path, owners=["a:1"], tables=ZERO), roots[:1])
    owner = serve(roots[0], "--cluster-token-file", token, models=(name,))
    spec = spec_of(tmp_path, owners=[place(owner)], tables=ZERO)
    load(spec, roots[1], remote=remote_tables(spec, choose(), token.read_text()))
    asked = "cluster", "status", "ads", "--root", roots[1]
    refused = run_tableside(*asked)
    assert refused.returncode == 1 and "not reached" not in refused.stdout
    assert f"{name}: {place(owner)} answered 401" in refused.stdout
    shown = run_tableside(*asked, "--cluster-token-file", token)
    assert shown.returncode == 0 and "answered" not in shown.stdout


@pytest.mark.drawn(0.25)
def test_an_owner_that_is_not_reached_is_degraded(owners: Server, tmp_path: Path) -> None:
    hosts = Hosts(owners, tmp_path, 2, "fp32", "zero")
    gone = ["127.0.0.1:9", place(owners)]
    spec = spec_of(tmp_path, hosts.door.name, gone, tables=hosts.tables, features=UNPOOLED)
    asked = remote_tables(hosts.spec, choose(), None)
    shares = [replace(t.shares[0], addresses=(gone[0],)) for t in asked]
    remote = [replace(t, shares=(s, *t.shares[1:])) for t, s in zip(asked, shares, strict=True)]
    load(spec, tmp_path / "lost", remote=remote)
    told = status(lost := Model(tmp_path / "lost", hosts.door.name))
    assert told["degraded"] == [hosts.owners[0].name]
    assert [(o["reached"], o["state"]) for o in told["owners"]] == [(False, None), (True, "1")]
    shown = run_tableside("cluster", "status", lost.name, root=lost.root)
    assert shown.returncode == 1 and "not reached" in shown.stdout
    assert f"{hosts.owners[0].name}: no host has a state that is here" in shown.stdout
