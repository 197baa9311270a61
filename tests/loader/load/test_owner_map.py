"""Which tables hosts with so much memory have, and that each takes the bytes that were planned."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tableside.loader.errors import ModelError
from tableside.loader.hot.counts import RowCounts
from tableside.loader.hot.hot import hot_folder
from tableside.loader.load.load import load
from tableside.loader.load.owner_map import HostRoom, OwnerMap, propose
from tableside.loader.load.share import share_of
from tableside.loader.load.sizes import SizedModel, SizedTable, sized_checkpoint, sized_version
from tableside.loader.model.model import parse_model
from tableside.loader.model.specs import ModelSpec
from tableside.loader.segment import layout
from tableside.loader.segment.header import Header
from tableside.loader.segment.stored import StoredTable
from tableside.loader.shards.reshard import reshard
from tableside.loader.versions.versions import Model

IDS = np.random.default_rng(0).choice(10**12, 30_000, replace=False)
KIND = {"user": {"missing": "zero"}, "item": {"ids": "raw", "id_key": "item.ids", "buckets": 64}, "small": {}}
HEADER = 4096  # bytes by which what a header says of a checkpoint may lengthen a version


def spec_of(folder: Path, names: Sequence[str] = tuple(KIND), owners: int = 0) -> ModelSpec:
    """A model over a checkpoint of all tables. owners: of user and item."""
    rng = np.random.default_rng(0)
    arrays = {
        "user": rng.standard_normal((50_000, 16), np.float32),
        "item": rng.standard_normal((IDS.size, 8), np.float32),
        "small": rng.standard_normal((100, 4), np.float32),
    }
    np.savez(folder / "c.npz", **arrays, **{"item.ids": IDS})
    tier = {"tier": "rows://" + ",".join(["h:1"] * owners)} if owners else {}
    tables: dict[str, dict[str, Any]] = {
        n: {"key": n, **KIND[n], **(tier if n != "small" else {})} for n in names
    }
    return parse_model({"name": "m", "checkpoint": "c.npz", "tables": tables}, folder)


def sized(spec: ModelSpec, root: Path) -> SizedModel:
    return sized_checkpoint(spec, Model(root, spec.name), lambda done, total: None)


# ---- bytes ----


@pytest.mark.parametrize("row_alignment", [4, 16])
def test_the_bytes_of_a_plan_are_those_of_the_loads(root: Path, tmp_path: Path, row_alignment: int) -> None:
    """Of each owner's share, and of the tables that each host has."""
    spec = spec_of(tmp_path, owners=3)
    for table in KIND.values():
        table["row_alignment"] = row_alignment
    model = sized(spec_of(tmp_path), root)
    cut = [t for t in model.tables if t.name != "small"]
    spec = spec_of(tmp_path, owners=3)
    for number in range(3):
        loaded = load(share_of(spec, number), root)
        assert 0 <= loaded.segment_bytes - model.share_bytes(cut, number, 3) <= HEADER
        for table, planned in zip(loaded.header.tables, (t.cut(number, 3) for t in cut), strict=True):
            assert (table.bytes, table.id_count) == (planned.bytes, planned.id_count)
    local = load(spec_of(tmp_path, ["small"]), root)
    assert 0 <= local.segment_bytes - model.bytes(t for t in model.tables if t.name == "small") <= HEADER


def test_the_bytes_of_a_published_model_are_those_of_its_shares(root: Path, tmp_path: Path) -> None:
    """As `reshard` makes them, and as a plan of its checkpoint says."""
    loaded = load(spec_of(tmp_path), root)
    model, before = sized_version(Model(root, "m")), sized(spec_of(tmp_path), root)
    assert model.bytes(model.tables) == before.bytes(before.tables)
    assert 0 <= loaded.segment_bytes - model.bytes(model.tables) <= HEADER
    of_tables = [model.share_bytes(model.tables, n, 4) for n in range(4)]
    assert of_tables == [before.share_bytes(before.tables, n, 4) for n in range(4)]
    for holding, planned in zip(reshard(root, "m", 4).after, of_tables, strict=True):
        assert 0 <= holding.bytes - planned <= HEADER


def test_ids_that_come_twice_are_planned_for_twice(root: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", t=np.ones((6, 4), np.float32), ids=np.array([1, 2, 3, 1, 2, 3]))
    of = {"key": "t", "ids": "raw", "id_key": "ids", "duplicates": "last", "buckets": 1}
    spec = parse_model({"name": "m", "checkpoint": "c.npz", "tables": {"t": of}}, tmp_path)
    (table,) = sized(spec, root).tables
    assert table.cut(0, 1).id_count == 6 and load(spec, root).header.tables[0].id_count == 3


def test_a_model_that_is_for_one_host_is_refused(root: Path, tmp_path: Path) -> None:
    """Whose rows have an age; and one whose rows lie on others already."""
    np.savez(tmp_path / "c.npz", t=np.ones((6, 4), np.float32), ids=np.arange(6))
    of = {"key": "t", "ids": "raw", "id_key": "ids", "missing": "zero", "ttl": "1d"}
    spec = parse_model({"name": "m", "checkpoint": "c.npz", "tables": {"t": of}}, tmp_path)
    load(spec, root)
    for plan in (lambda: sized(spec, root), lambda: sized_version(Model(root, "m"))):
        with pytest.raises(ModelError, match="ttl and max_rows are for models on one host"):
            plan()
    owner = load(share_of(spec_of(tmp_path, owners=2), 0), root).model
    with pytest.raises(ModelError, match="one of several hosts already"):
        sized_version(Model(root, owner))


# ---- maps ----


def fake(rows: int, most_owners: int | None = None, uses: Sequence[int] = ()) -> SizedTable:
    """A table of rows of 1 MiB, named by their number. uses: of equal parts of it."""

    def cut(number: int, owners: int) -> StoredTable:
        here = rows * (number + 1) // owners - rows * number // owners
        return StoredTable(here, 1 << 20, 0, 1, 0, str(rows), "k", "int8", 4)

    def used(number: int, owners: int) -> int:
        return sum(uses[len(uses) * number // owners : len(uses) * (number + 1) // owners])

    return SizedTable(str(rows), rows if most_owners is None else most_owners, cut, used if uses else None)


def mapped(
    tables: Sequence[SizedTable], hosts: int, mib: int, versions: int = 1, replicas: int = 1
) -> OwnerMap:
    """A map for hosts of so many MiB, and one for headers."""
    model = SizedModel(tuple(tables), Header("m", 1, "", (), ()), b"")
    return propose(model, HostRoom(hosts, (mib + 1) * versions << 20, versions, replicas))


def names(found: OwnerMap) -> list[str]:
    return [t.name for t in found.tables]


def test_a_model_that_fits_is_not_cut() -> None:
    found = mapped([fake(10), fake(5)], 3, 15)
    assert (names(found), found.hosts) == ([], ()) and found.local_bytes >> 20 == 15


def test_as_few_tables_are_cut_as_fit() -> None:
    """The largest ones, whatever their order."""
    tables = [fake(10), fake(100), fake(20)]
    assert names(mapped(tables, 10, 40)) == ["100"]
    assert names(mapped(tables, 10, 38)) == ["100", "20"]
    assert names(mapped(tables, 10, 13)) == ["10", "100", "20"]


def test_a_table_that_cannot_be_cut_stays_whole() -> None:
    assert names(mapped([fake(50, 1), fake(40), fake(30)], 4, 68)) == ["40", "30"]
    with pytest.raises(ModelError, match="tables that cannot be cut: 50; expected --memory 6"):
        mapped([fake(50, 1), fake(40)], 4, 49)
    assert names(mapped([fake(50, 2), fake(48)], 6, 73)) == ["50"]
    assert names(mapped([fake(50, 2), fake(48)], 6, 50)) == ["50", "48"]


def test_hosts_that_are_left_are_replicas() -> None:
    """Of all owners as many, where that is so for some number of owners."""
    assert mapped([fake(120)], 4, 60).hosts == ((0, 2), (1, 3))
    assert mapped([fake(120)], 6, 40).hosts == ((0, 3), (1, 4), (2, 5))
    assert [len(hosts) for hosts in mapped([fake(100)], 5, 50).hosts] == [1] * 5
    assert [len(hosts) for hosts in mapped([fake(100)], 5, 50, replicas=2).hosts] == [3, 2]


def test_hosts_that_are_left_go_to_what_is_asked_most() -> None:
    found = mapped([fake(100, uses=[70, 10, 10, 10])], 7, 25)
    assert found.is_counted and found.load == (0.7, 0.1, 0.1, 0.1)
    assert found.hosts == ((0, 4, 5, 6), (1,), (2,), (3,))
    assert found.host_load(0) == 0.175
    by_rows = mapped([fake(100, uses=[1, 0]), fake(90)], 4, 95)
    assert not by_rows.is_counted and by_rows.load == (0.5, 0.5)


def test_every_version_that_is_there_while_one_is_loaded_fits() -> None:
    assert len(mapped([fake(90)], 3, 30, versions=3).hosts) == 3
    with pytest.raises(ModelError, match="does not fit 3 hosts"):
        mapped([fake(90)], 3, 29, versions=3)


def test_what_does_not_fit_is_told_what_would() -> None:
    """And that does."""
    tables = [fake(100), fake(7)]
    with pytest.raises(ModelError, match=r"expected --hosts 6 or --memory 38MiB"):
        mapped(tables, 3, 19)
    mapped(tables, 6, 19)
    mapped(tables, 3, 37)
    with pytest.raises(ModelError, match=r"expected --hosts 12 or --memory"):
        mapped(tables, 3, 19, replicas=2)
    mapped(tables, 12, 19, replicas=2)


# ---- counts ----


def test_rows_that_were_counted_say_which_owner_is_asked_most(disk: Path, tmp_path: Path) -> None:
    """Of row numbers, and of raw ids by their bucket."""
    np.savez(
        tmp_path / "c.npz",
        dense=np.ones((3000, 64), np.float32),
        raw=np.ones((3000, 64), np.float32),
        ids=np.arange(3000),
    )
    raw = {"key": "raw", "ids": "raw", "id_key": "ids", "buckets": 4, "bucket_ids": 1000}
    tables = {"dense": {"key": "dense"}, "raw": raw}
    with pytest.MonkeyPatch.context() as patch:  # tables in files of their own, which are counted
        patch.setattr(layout, "LARGE_PAGES", 0)
        load(parse_model({"name": "m", "checkpoint": "c.npz", "tables": tables}, tmp_path), disk)
    model = Model(disk, "m")
    segment = model.attach()
    assert all(t.uses is None for t in sized_version(model).tables)
    with hot_folder(disk, "m") as folder:
        counts = RowCounts.shared(folder, segment)
        counts.add("dense", np.array([0, 2999]), np.array([10, 30], np.uint8))
        row_map = segment.tables["raw"].row_map
        assert row_map is not None
        counts.add("raw", row_map.find(np.array([5, 1500])), np.array([50, 10], np.uint8))
    found = sized_version(model)
    assert [[t.uses(n, 2) for n in range(2)] for t in found.tables if t.uses] == [[10, 30], [60, 0]]
    cut = propose(found, HostRoom(3, found.share_bytes(found.tables, 0, 2) + HEADER, 1))
    assert (cut.is_counted, cut.load, cut.hosts) == (True, (0.7, 0.3), ((0, 2), (1,)))
