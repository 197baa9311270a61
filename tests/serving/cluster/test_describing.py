"""Owners that do not fit at a load, or say what they cannot, are refused, and nothing is published."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tables
from hosts import (
    ITEMS,
    UNPOOLED,
    USERS,
    ZERO,
    answer,
    checkpoint,
    load_door,
    load_shares,
    place,
    served,
    spec_of,
)
from servers import Server
from support import run_tableside, until

from tableside.loader.errors import ModelError, VersionError
from tableside.loader.load.as_delta import load_as_delta
from tableside.loader.load.load import load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.load.share import share_of
from tableside.loader.shards.reshard import reshard
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.cluster.describe import describe, remote_tables
from tableside.serving.errors import ServingError
from tableside.torch import EmbeddingBags


@pytest.mark.drawn(0.25)
def test_owners_that_do_not_fit_are_refused_at_a_load(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server]
) -> None:
    """Of other checkpoints, of other settings, not there, or in another order."""
    checkpoint(tmp_path, 0)
    checkpoint(tmp_path, 1)
    specs = [spec_of(tmp_path, owners=["a:1", "b:1"], seed=s, tables=ZERO, features=UNPOOLED) for s in (0, 1)]
    names = load_shares(specs[0], roots[:2])
    first, second = (serve(root, "--all") for root in roots[:2])
    tier = [place(first), place(second)]

    def refusal(**change: Any) -> str:
        said: dict[str, Any] = {"owners": tier, "tables": ZERO, "features": UNPOOLED} | change
        with pytest.raises(ServingError) as caught:
            load_door(spec_of(tmp_path, **said), roots[2])
        return str(caught.value)

    assert "answered 404" in refusal(owners=tier[::-1])
    assert "has buckets" not in refusal(owners=[tier[0], "127.0.0.1:9"])
    assert "is not reached" in refusal(owners=[tier[0], "127.0.0.1:9"])
    other = {"user": {**ZERO["user"], "row_format": "int8"}, "item": ZERO["item"]}
    assert "row_format is 'int8' here" in refusal(tables=other)
    other = {"user": ZERO["user"], "item": {**ZERO["item"], "missing": "error"}}
    assert "missing is 'error' here" in refusal(tables=other)
    load(share_of(specs[1], 1), roots[1])
    until(lambda: second.get(f"/v2/rows/{names[1]}").json()["version"] == 2, what="the other checkpoint")
    assert "loaded from 2 checkpoints" in refusal()
    assert not Model(roots[2], "ads").versions()


@pytest.mark.drawn(0.5)
def test_what_needs_all_rows_on_one_host_is_refused(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server]
) -> None:
    """A mean of all rows, a GPU, a load that asked nobody."""
    checkpoint(tmp_path)
    for policy in ("mean", "backfill:ads@1"):
        with pytest.raises(ModelError, match="needs all rows on one host"):
            spec_of(tmp_path, owners=["a:1"], tables={"user": {"missing": policy}})
    spec = spec_of(tmp_path, owners=["a:1"])
    with pytest.raises(ModelError, match="owner 1 of model 'ads': its tables have 1 owners"):
        share_of(spec, 1)
    with pytest.raises(ModelError, match="owner 0 of model 'ads': its tables have 0 owners"):
        share_of(spec_of(tmp_path), 0)
    with pytest.raises(ModelError, match="which have not been asked about it"):
        load(spec, roots[2])
    (name,) = load_shares(spec_of(tmp_path, owners=["a:1"]), roots[:1])
    owner = serve(roots[0], models=(name,))
    spec = spec_of(tmp_path, owners=[place(owner)])
    load_door(spec, roots[2])
    with pytest.raises(ServingError, match="the CPU asks for them; leave the device out"):
        EmbeddingBags("ads", root=roots[2], device=tables.serve_device())
    with pytest.raises(VersionError, match="reshard the models of their owners, ads-owner-0-of-1"):
        reshard(roots[2], "ads", 2)
    with pytest.raises(ModelError, match="--only user: its rows lie on other hosts"):
        load(spec, roots[2], LoadSettings(only=("user",)), remote=remote_tables(spec, choose(), None))
    exported = run_tableside("export", "ads", "user", "--to", tmp_path / "u.npy", "--root", roots[2])
    assert exported.returncode == 1 and "lie on other hosts" in exported.stderr
    outcome = load_as_delta(spec, roots[2])
    assert outcome.result is None and "the rows of table 'user' have owners" in outcome.why_not


@pytest.mark.parametrize(
    "tier", ["", "rows://", "rows://a", "rows://a:0", "redis://a", "http://a:1", "rows://a:1,,b:1", 3]
)
def test_tiers_that_name_no_hosts_are_refused(tmp_path: Path, tier: object) -> None:
    with pytest.raises(ModelError, match="expected rows://HOST:PORT,HOST:PORT"):
        spec_of(tmp_path, tables={"user": {"tier": tier}})


class Describes:
    """An owner that says anything of its rows."""

    def __init__(self) -> None:
        self.says: Any = None

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                text = json.dumps(self.says).encode()
                handler.send_response(200)
                handler.send_header("content-length", str(len(text)))
                handler.end_headers()
                handler.wfile.write(text)

            def log_message(handler, *_: object) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.place = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def describes() -> Iterator[Describes]:
    found = Describes()
    yield found
    found.close()


OF_TABLE = [
    {"row_bytes": 10**13},
    {"row_bytes": 3},
    {"dim": 10**12},
    {"dim": -16},
    {"dim": "16"},
    {"end": 2**63},
    {"end": -3},
    {"own": 5},
    {"first": 1},
    {"row_format": "int9"},
    {"name": 7},
    {"buckets": 3},
    {"missing": None},
    {"more": 1},
]
OF_VERSION = [
    {"content": "-5"},
    {"content": "f" * 40},
    {"content": "x"},
    {"content": None},
    {"model": "../../etc\n"},
    {"model": "ads-owner-0-of-2"},
    {"number": 4},
    {"sample": ""},
    {"sample": 5},
    {"version": 1.5},
    {"tables": []},
    {"tables": 3},
]


@pytest.mark.drawn(6)
@pytest.mark.parametrize("change", [*({"tables": c} for c in OF_TABLE), *OF_VERSION], ids=str)
def test_what_no_owner_can_say_is_refused(
    describes: Describes, roots: list[Path], tmp_path: Path, change: dict[str, Any]
) -> None:
    """Before anything is published."""
    checkpoint(tmp_path)
    spec = spec_of(tmp_path, owners=[describes.place], tables=ZERO)
    load_shares(spec, roots[:1])
    told = describe(Model(roots[0], "ads-owner-0-of-1").attach())
    assert told is not None
    describes.says = told.to_json()
    remote_tables(spec, choose(), None)
    if isinstance(of_table := change.get("tables"), dict):
        describes.says["tables"][0] |= of_table
    else:
        describes.says |= change
    with pytest.raises(ServingError, match=f"(?s){describes.place}|tables.user"):
        remote_tables(spec, choose(), None)


@pytest.mark.drawn(0.25)
def test_a_server_of_something_else_is_no_owner(describes: Describes, tmp_path: Path) -> None:
    checkpoint(tmp_path)
    spec = spec_of(tmp_path, owners=[describes.place], tables=ZERO)
    for describes.says in (None, [], {"a": 1}):
        with pytest.raises(ServingError, match=f"owner {describes.place} .* with no description of rows"):
            remote_tables(spec, choose(), None)


@pytest.mark.drawn(0.5)
def test_owners_may_come_from_reshard(
    roots: list[Path], tmp_path: Path, serve: Callable[..., Server]
) -> None:
    """Those of another checkpoint, whose numbers are the same, are refused beside them."""
    arrays = checkpoint(tmp_path, 0)
    checkpoint(tmp_path, 1)
    for root, seed in zip(roots, (0, 1), strict=False):
        load(spec_of(tmp_path, seed=seed, tables=ZERO, features=UNPOOLED), root)
        reshard(root, "ads", 2)
    names = ("ads-owner-0-of-2", "ads-owner-1-of-2")
    first, second = (serve(root, models=names) for root in roots[:2])
    said: dict[str, Any] = {"tables": ZERO, "features": UNPOOLED}
    with pytest.raises(ServingError, match="loaded from 2 checkpoints"):
        load_door(spec_of(tmp_path, owners=[place(first), place(second)], **said), roots[2])
    load_door(spec_of(tmp_path, owners=[place(first)] * 2, **said), roots[2])
    asked = {"user": USERS, "item": ITEMS}
    expected = arrays["user"][USERS].tobytes() + arrays["item"][::5].tobytes()
    assert answer(served(roots[2], "ads"), asked) == (expected, [])
