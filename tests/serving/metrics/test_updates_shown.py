"""What commands, metrics and evaluations say of changes."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from changing import Oracle
from support import run_tableside, until

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch
from tableside.loader.versions.states import State, state_of

Start = Callable[..., Any]


@pytest.fixture
def oracle(root: Path) -> Oracle:
    made = Oracle(root)
    for n in range(3):
        apply(
            made.model, ChangeBatch(made.change(50), "stream", str(n + 1), str(n) if n else None, made_at=1e9)
        )
    return made


@pytest.mark.thorough
def test_list_and_inspect(oracle: Oracle, root: Path) -> None:
    listed = json.loads(run_tableside("list", "--root", root, "--json").stdout)["versions"][0]
    assert (listed["sequence"], listed["state"], listed["states"]) == (3, "live", ["1", "1+1", "1+2", "1+3"])
    assert listed["delta_bytes"] > 0
    shown = run_tableside("list", "--root", root).stdout
    assert re.search(r"demo +1\+3 +live .* 0\.3 MB +0\.1 MB", shown) and "changes" in shown
    text = run_tableside("inspect", "demo", "--root", root).stdout
    assert re.search(r"changes up to 3, applied 20.*: \d+ rows of raw, dense, policy, ", text)
    assert "changes of stream up to 3" in text
    for named, sequence in (("1+2", 2), ("1+0", 0), ("1", 3)):
        shown = json.loads(run_tableside("inspect", "demo", named, "--root", root, "--json").stdout)
        assert shown["sequence"] == sequence
        assert len(shown["deltas"]) == (2 if sequence > 1 else sequence)
        assert shown["positions"] == ({"stream": str(sequence)} if sequence else {})


@pytest.mark.thorough
def test_activate_names_states(oracle: Oracle, root: Path) -> None:
    assert "demo version 1+2 is live" in run_tableside("activate", "demo", "1+2", "--root", root).stdout
    assert state_of(oracle.model.record()) == State(1, 2)
    refused = run_tableside("activate", "demo", "1+9", "--root", root)
    assert refused.returncode == 1 and "keeps no delta 1+9; it has: 1+1, 1+2, 1+3" in refused.stderr
    refused = run_tableside("activate", "demo", "1-2", "--root", root)
    assert refused.returncode == 2 and "expected VERSION or VERSION+SEQUENCE" in refused.stderr


@pytest.mark.thorough
def test_compact_and_gc(oracle: Oracle, root: Path) -> None:
    text = run_tableside("compact", "demo", "--root", root).stdout
    assert re.search(r"demo version 2\+4 is live: [\d,]+ rows, \d+ changes merged, .* GB/s", text)
    assert "was removed" not in text
    removed = run_tableside("gc", "--keep", "0", "--keep-states", "0", "--root", root).stdout
    assert oracle.model.versions() == [2] and "1.segment" in removed
    assert [p.name for p in oracle.model.folder.glob("*.delta")] == ["2+4.delta"]
    run_tableside("verify", "demo", "--root", root)


@pytest.mark.drawn(0.5)
def test_metrics_and_models(oracle: Oracle, start: Start) -> None:
    """The lag is from when the oldest change of the batch was made."""
    server = start()
    apply(oracle.model, ChangeBatch(oracle.change(10), "stream", "4", "3", made_at=1e9))

    def shown() -> Any:
        return server.get("/v1/models").json()["models"][0]

    until(lambda: shown()["sequence"] == 4, what="the change was seen")
    assert [d["sequence"] for d in shown()["deltas"]] == [4, 1] and shown()["deltas"][0]["made_at"] == 1e9
    assert shown()["behind_seconds"] == 0
    text = server.get("/metrics").text
    values = dict(re.findall(r'^(tableside_\w+)\{model="demo"\} (\S+)$', text, re.MULTILINE))
    assert float(values["tableside_sequence"]) == 4 and float(values["tableside_updates_total"]) == 1
    assert float(values["tableside_delta_rows"]) == sum(d["rows"] for d in shown()["deltas"])
    assert float(values["tableside_delta_bytes"]) == sum(d["bytes"] for d in shown()["deltas"])
    assert (
        float(values["tableside_update_lag_seconds_sum"]) > 5e8
        and float(values["tableside_behind_seconds"]) == 0
    )


@pytest.mark.drawn(0.5)
def test_a_worker_that_falls_behind_is_not_ready(oracle: Oracle, start: Start) -> None:
    """Here a delta is damaged, so no worker takes it. What they answer from is still what it was."""
    server = start("--max-behind-s", "0.3")
    assert httpx.get(f"{server.url}/v2/health/ready").status_code == 200
    name = oracle.model.folder / "1+4.delta"
    apply(oracle.model, ChangeBatch(oracle.change(10)))
    oracle.model.activate(1, 3)
    until(lambda: server.get("/v1/models").json()["models"][0]["sequence"] == 3, what="the state before it")
    name.chmod(0o600)
    data = bytearray(name.read_bytes())
    data[-200] ^= 1
    data[4096] ^= 1
    name.write_bytes(data)
    oracle.model.activate(1, 4)
    until(lambda: httpx.get(f"{server.url}/v2/health/ready").status_code != 200, what="it is not ready")
    body = {"model": "demo", "features": {"dense": [[1]]}}
    answer = httpx.post(f"{server.url}/v1/lookup", json=body).json()
    assert answer["sequence"] == 3
    assert 'tableside_errors_total{kind="swap",model="demo"} 1.0' in server.get("/metrics").text
    oracle.model.activate(1, 3)
    until(lambda: httpx.get(f"{server.url}/v2/health/ready").status_code == 200, what="it is ready again")


@pytest.mark.thorough
def test_what_reads_versions_alone_says_so(oracle: Oracle, root: Path, tmp_path: Path) -> None:
    """Rows that changed are not left out silently."""
    for command in (
        ("export", "demo", "raw", "--to", tmp_path / "raw.npz"),
        ("reshard", "demo", "--owners", 2),
    ):
        refused = run_tableside(*command, "--root", root)
        assert refused.returncode == 1, command
        assert re.search(
            r"changes up to 1\+3 lie over version 1 of model 'demo', .* tableside compact demo",
            refused.stderr,
        )
    assert not (tmp_path / "raw.npz").exists()
