"""A model whose rows lie on other hosts answers as one host does, bit by bit."""

import gzip
import itertools
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from hosts import (
    RAW,
    USER_ROWS,
    answer,
    bags,
    begun,
    checkpoint,
    load_door,
    load_shares,
    place,
    served,
    spec_of,
)
from raw_loads import save_parquet
from servers import Server
from string_tables import hashes, texts
from support import rows_of, until
from tables import serve_device

from tableside.loader.deltas.changes import TableChanges
from tableside.loader.deltas.hosts import changes_here
from tableside.loader.errors import ChangeError
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.segment.header import Header
from tableside.loader.segment.remote import HostsState
from tableside.serving.errors import ApiError, ServingError
from tableside.serving.http.v2.rows import OwnedRows
from tableside.serving.model.request import FeatureInput

pytestmark = pytest.mark.quick


POLICIES = {"error": "error", "zero": "zero", "vector": [0.5, -2.0] * 4}
FEATURES = {
    "user": {"pooling": "sum"},
    "seen": {"table": "user", "pooling": "none", "output": "fp16"},
    "item": {"pooling": "mean"},
    "small": {"pooling": "sum"},
}
CASES = list(itertools.product([1, 2, 5], POLICIES, ["int8", "fp16", "int4"], [None, 10**14]))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("count", "policy", "row_format", "bucket_ids"), CASES)
def test_answers_are_those_of_one_host(
    owners: Server,
    tmp_path: Path,
    count: int,
    policy: str,
    row_format: str,
    bucket_ids: int | None,
) -> None:
    """Vectors, found masks, counts and refusals, for any number of owners; ids that no table has, and no id
    at all."""
    checkpoint(tmp_path)
    of_item = {"missing": POLICIES[policy], "row_format": row_format}
    of_user = {"row_format": row_format, "missing": "zero" if policy == "zero" else "error"}
    own = RAW if bucket_ids is None else RAW[RAW >= 0]
    if bucket_ids is not None:  # of ids in buckets of a range, none is negative
        arrays = dict(np.load(tmp_path / "0.npz"))
        np.savez(tmp_path / "0.npz", **{**arrays, "item": arrays["item"][RAW >= 0], "item.ids": own})
        of_item["bucket_ids"] = bucket_ids // 3
    tables = {"user": of_user, "item": of_item}
    name = f"m{uuid.uuid4().hex[:8]}"
    tier = [owners.url.removeprefix("http://")] * count
    spec = spec_of(tmp_path, name, tier, tables=tables, features=FEATURES)
    for model in load_shares(spec, [owners.root] * count):
        until(lambda m=model: owners.get(f"/v2/rows/{m}").status_code == 200, what=f"{model} to be served")
    load_door(spec, tmp_path / "door")
    load(spec_of(tmp_path, "whole", tables=tables, features=FEATURES), tmp_path / "whole")
    door, whole = served(tmp_path / "door", name), served(tmp_path / "whole", "whole")
    draw = np.random.default_rng(0)
    for _ in range(12):
        lengths = draw.integers(0, 5, draw.integers(0, 40))
        n = int(lengths.sum())
        users, items = draw.integers(0, USER_ROWS, n), draw.choice(own, n)
        if draw.random() < 0.5:
            strange = draw.random(n) < 0.2
            items[strange] = draw.integers(-(2**63), 2**63 - 1, int(strange.sum()))
            users[draw.random(n) < 0.05] = draw.choice([-1, USER_ROWS, 2**62, -(2**63)])
        asked = {
            "user": bags(lengths, users, draw.standard_normal(n).astype(np.float32)),
            "seen": draw.integers(0, USER_ROWS, draw.integers(0, 30)),
            "item": bags(lengths, items),
            "small": bags(lengths, draw.integers(0, 20, n)),
        }
        chosen = draw.permutation(list(asked))[: draw.integers(1, 5)].tolist()
        features = {feature: asked[feature] for feature in chosen}
        for found in ((), tuple(features)):
            expected = answer(whole, features, found)
            got = answer(door, features, found)
            assert got == expected


@pytest.mark.drawn(1)
@pytest.mark.gpu
@pytest.mark.parametrize(("tables_here", "policy"), [("some", "zero"), ("none", "zero"), ("some", "error")])
def test_a_device_beside_tables_of_other_hosts(
    owners: Server, tmp_path: Path, tables_here: str, policy: str
) -> None:
    """Rows that the CPU asks for and those of the device's tables are one answer, as on one host, and so is
    an error, wherever the lookup that is wrong stands."""
    pytest.importorskip("triton")
    checkpoint(tmp_path)
    features = FEATURES if tables_here == "some" else {f: FEATURES[f] for f in ("user", "seen", "item")}
    more = {} if tables_here == "some" else {"small": {"tier": f"rows://{place(owners)}"}}
    tables = {"item": {"missing": policy}, **more}
    name = f"m{uuid.uuid4().hex[:8]}"
    spec = spec_of(tmp_path, name, [place(owners)], tables=tables, features=features)
    for model in load_shares(spec, [owners.root]):
        until(lambda m=model: owners.get(f"/v2/rows/{m}").status_code == 200, what=f"{model} to be served")
    load_door(spec, tmp_path / "door")
    load(
        spec_of(tmp_path, "whole", tables={"item": {"missing": policy}}, features=features),
        tmp_path / "whole",
    )
    device = {"devices": (serve_device(),), "hbm_budget": 1 << 20}
    door, whole = served(tmp_path / "door", name, **device), served(tmp_path / "whole", "whole")
    assert set(door.placed.placements.values()) == {"remote", *(["hbm"] if tables_here == "some" else [])}
    asked = {
        "user": bags([1, 2, 0], [0, 999, 0], np.array([1, -2, 0.5], np.float32)),
        "seen": [3, 3, 998],
        "item": bags([3], [RAW[0], 7 if policy == "zero" else RAW[1], RAW[0]]),
        "small": bags([2, 0, 1], [5, 19, 5]),
    }
    asked = {feature: asked[feature] for feature in features}
    for found in ((), tuple(asked)):
        expected = answer(whole, asked, found)
        assert isinstance(expected[0], bytes) and answer(door, asked, found) == expected
    unknown = {"item": bags([2], [RAW[0], 7])} if policy == "error" else {}
    small = {"small": bags([1], [20])} if tables_here == "some" else {}
    for wrong in ({"user": bags([1], [1000])}, {"seen": [-1]}, unknown, small):
        for order in (list(asked), list(asked)[::-1]):
            wanted = {feature: {**asked, **wrong}[feature] for feature in order}
            expected = answer(whole, wanted)
            assert isinstance(expected[1], str) == bool(wrong) and answer(door, wanted) == expected
            assert begun(door, wanted) == begun(whole, wanted) == expected


def test_a_whole_model_gives_no_rows(owners: Server, tmp_path: Path) -> None:
    """Nor does one that is not served."""
    checkpoint(tmp_path)
    load(spec_of(tmp_path, "whole2"), owners.root)
    until(lambda: owners.get("/v2/models/whole2").status_code == 200, what="the model to be served")
    for model, why in (("whole2", "is whole"), ("nobody", "is not served here")):
        got = owners.get(f"/v2/rows/{model}")
        assert got.status_code == 404 and why in got.json()["error"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "names 0 tables in 0 numbers"),
        (b"1234567", "expected int64 numbers"),
        (np.array([1, 0], "<i8").tobytes(), "names 1 tables in 2 numbers"),
        (np.array([1, 0, 2, 5], "<i8").tobytes(), "counts are not those of its 1 ids"),
        (np.array([1, 0, -1, 5], "<i8").tobytes(), "counts are not those of its 1 ids"),
        (np.array([2, 0, 2**62, 0, 2**62, 1], "<i8").tobytes(), "counts are not those of its 1 ids"),
        (np.array([1, 7, 1, 5], "<i8").tobytes(), "names tables [7]; expected numbers from 0 to 1"),
        (np.array([1, -1, 1, 5], "<i8").tobytes(), "names tables [-1]; expected numbers from 0 to 1"),
        (np.array([3, *[0] * 6], "<i8").tobytes(), "names 3 tables; expected at most 2"),
    ],
)
def test_requests_that_name_no_rows_are_refused(
    owners: Server, tmp_path: Path, body: bytes, why: str
) -> None:
    name = _share(owners, tmp_path)
    (state,) = owners.get(f"/v2/rows/{name}/states").json()
    got = httpx.post(f"{owners.url}/v2/rows/{name}/{state}", content=body)
    assert got.status_code == 400 and why in got.json()["error"]


def test_a_request_that_is_compressed_gets_the_same_rows(owners: Server, tmp_path: Path) -> None:
    name = _share(owners, tmp_path)
    (state,) = owners.get(f"/v2/rows/{name}/states").json()
    url, body = f"{owners.url}/v2/rows/{name}/{state}", np.array([1, 0, 2, 5, 10**9], "<i8").tobytes()
    plain = httpx.post(url, content=body)
    packed = httpx.post(url, content=gzip.compress(body), headers={"Content-Encoding": "gzip"})
    assert plain.status_code == 200 and plain.content[:8] == bytes([1, 0, 0, 0, 0, 0, 0, 0])
    assert packed.status_code == 200 and packed.content == plain.content


def test_without_a_token_rows_stay_on_the_host() -> None:
    owned = OwnedRows(SimpleNamespace(cluster_token=None))  # type: ignore[arg-type]
    for host in (None, "127.0.0.1", "::1"):
        owned.check(host, None)
    with pytest.raises(ApiError, match="by a server with a cluster token") as refused:
        owned.check("10.1.2.3", b"Bearer one")
    assert refused.value.status == 403


def test_rows_of_a_version_that_is_not_there(owners: Server, tmp_path: Path) -> None:
    name = _share(owners, tmp_path)
    body = np.array([1, 0, 1, 5], "<i8").tobytes()
    got = httpx.post(f"{owners.url}/v2/rows/{name}/{HostsState(1, 2)}", content=body)
    assert got.status_code == 404 and "is 0000000000000001.0000000000000002" in got.json()["error"]
    for state in ("first", "0x" + "1" * 14 + ".0", f"{1:017x}.{2:016x}", f"{1:016x}.-{2:015x}", "1" * 5000):
        got = httpx.post(f"{owners.url}/v2/rows/{name}/{state}", content=body)
        assert got.status_code == 400 and "expected 16 hexadecimal digits, a dot" in got.json()["error"]
        assert len(got.content) < 300


def _share(owners: Server, folder: Path) -> str:
    """A share that is served."""
    name = "gives"
    if owners.get(f"/v2/rows/{name}-owner-0-of-1").status_code != 200:
        checkpoint(folder)
        load_shares(spec_of(folder, name, ["a:1"]), [owners.root])
        until(lambda: owners.get(f"/v2/rows/{name}-owner-0-of-1").status_code == 200, what="it to be served")
    return f"{name}-owner-0-of-1"


@pytest.mark.gpu
@pytest.mark.parametrize("on_device", [False, True])
def test_a_request_for_tables_of_this_host_waits_for_nobody(
    owners: Server, tmp_path: Path, on_device: bool
) -> None:
    """Beside tables that are asked for; with a device, where the CPU looks up those of this host, too."""
    checkpoint(tmp_path)
    name = f"m{uuid.uuid4().hex[:8]}"
    spec = spec_of(tmp_path, name, [place(owners)], features=FEATURES)
    for model in load_shares(spec, [owners.root]):
        until(lambda m=model: owners.get(f"/v2/rows/{m}").status_code == 200, what=f"{model} to be served")
    load_door(spec, tmp_path / "door")
    if on_device:
        pytest.importorskip("triton")
    device = {"devices": (serve_device(),), "placement": "host"} if on_device else {}
    door = served(tmp_path / "door", name, **device)
    plans = {f: door.lay_out([FeatureInput(f, 0, 1, 1, 1)]).plan for f in ("small", "user")}
    assert [(p.waits, p.begins_at_once) for p in plans.values()] == [(False, False), (True, True)]
    assert answer(door, {"small": bags([1], [3])})[1] == []


@pytest.mark.drawn(1)
@pytest.mark.parametrize("backend", ["native", "fbgemm"])
def test_other_tables_of_a_request_lie_on_a_disk(
    owners: Server, tmp_path: Path, disk: Path, backend: str
) -> None:
    """Rows come from two places, and an error is that of the first lookup with one, wherever its rows lie."""
    checkpoint(tmp_path)
    arrays = dict(np.load(tmp_path / "0.npz"))
    arrays["small"] = np.random.default_rng(2).standard_normal((80_000, 4)).astype(np.float32)
    np.savez(tmp_path / "0.npz", **arrays)
    tables = {"user": {"row_format": "fp32"}, "item": {"missing": "zero"}}
    name = f"m{uuid.uuid4().hex[:8]}"
    spec = spec_of(tmp_path, name, [owners.url.removeprefix("http://")] * 2, tables=tables, features=FEATURES)
    for model in load_shares(spec, [owners.root] * 2):
        until(lambda m=model: owners.get(f"/v2/rows/{m}").status_code == 200, what=f"{model} to be served")
    load_door(spec, disk)
    load(spec_of(tmp_path, "whole", tables=tables, features=FEATURES), tmp_path / "whole")
    door = served(disk, name, backend=backend)
    whole = served(tmp_path / "whole", "whole", backend=backend)
    assert set(door.placed.placements.values()) == {"stored", "remote"}
    good = {
        "small": bags([2, 0, 1], [5, 79_999, 5]),
        "user": bags([1, 2, 0], [0, 999, 0], np.array([1, -2, 0.5], np.float32)),
        "item": bags([3], [RAW[0], 7, RAW[0]]),
        "seen": [3, 3, 998],
    }
    bad = {
        "small": bags([1], [80_000]),
        "user": bags([1], [-1]),
        "item": bags([2, 2], [1, 2]),
        "seen": [1000],
    }
    names = list(good)
    for order in itertools.permutations(names, 3):
        for wrong in itertools.product((False, True), repeat=3):
            asked = {n: (bad if is_bad else good)[n] for n, is_bad in zip(order, wrong, strict=True)}
            for found in ((), order):
                assert answer(door, asked, found) == answer(whole, asked, found), (order, wrong)
    assert answer(door, {"item": bags([2, 2], [1, 2, 3, 4])}) == answer(
        whole, {"item": bags([2, 2], [1, 2, 3, 4])}
    )


@pytest.mark.drawn(0.25)
def test_strings_of_a_table_that_owners_have(owners: Server, tmp_path: Path) -> None:
    """The server of the whole hashes them; owners whose ids are others are refused when it is loaded."""
    name, tier = f"m{uuid.uuid4().hex[:8]}", "rows://" + ",".join([owners.url.removeprefix("http://")] * 2)
    strings, values = texts(300), rows_of(300, 8)
    for kind, ids in (("string", strings), ("raw", hashes(strings))):
        save_parquet(tmp_path, {"s": (ids, values)})
        (tmp_path / "c").rename(tmp_path / kind)

    def specified(kind: str, model: str, **more: Any) -> ModelSpec:
        table = {"key": "s/weight", "ids": kind, "missing": "zero", "id_key": "ids", **more}
        return parse_model({"name": model, "checkpoint": kind, "tables": {"s": table}}, tmp_path)

    for model in load_shares(specified("string", name, tier=tier), [owners.root] * 2):
        until(lambda m=model: owners.get(f"/v2/rows/{m}").status_code == 200, what=f"{model} to be served")
    load_door(specified("string", name, tier=tier), tmp_path / "door")
    load(specified("raw", "whole"), tmp_path / "whole")
    door, whole = served(tmp_path / "door", name), served(tmp_path / "whole", "whole")
    assert door.features["s"].strings and door.header.format_version == 11
    assert Header.from_json(door.header.to_json()) == door.header
    asked = {"s": bags([3, 0, 2], hashes(["", "nobody", *strings[7:10]]))}
    assert answer(door, asked, ("s",)) == answer(whole, asked, ("s",))
    change = TableChanges("s", hashes(["a"]), values[:1])
    with pytest.raises(ChangeError, match="table 's': the ids are integers; expected strings"):
        changes_here(door.segment, change)
    assert changes_here(door.segment, replace(change, strings=True)) is None
    with pytest.raises(ServingError, match=r"ids is 'raw' here; owner .* has 'string'"):
        load_door(specified("raw", name, tier=tier), tmp_path / "other")
