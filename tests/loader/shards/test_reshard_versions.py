"""Resharding: which versions are taken, what is refused, what an error leaves behind, and the command."""

import os
import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from raw_segments import DenseTable, publish_tables
from resharded import RANDOM, again, attached, bytes_of, raw
from support import rows_of, run_tableside

from tableside.loader.errors import ModelError, SegmentError, VersionError
from tableside.loader.segment.segment import Segment
from tableside.loader.shards import shares
from tableside.loader.shards.reshard import ReshardSettings, reshard
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat

# ---- versions ----


def test_a_version_by_its_number(root: Path) -> None:
    """--version is that of the whole model, in both directions; owners of several versions lie beside each
    other."""
    publish_tables(root, {"t": raw(RANDOM[:100])})
    publish_tables(root, {"t": raw(RANDOM[:50])})
    reshard(root, "demo", 2, ReshardSettings(version=1))
    reshard(root, "demo", 2)
    done = reshard(root, "demo", 3, ReshardSettings(2, version=1))
    assert sum(h.ids for h in done.after) == 100 and {
        s.header.owner.version for s in attached(root, 3) if s.header.owner
    } == {1}
    assert sum(h.ids for h in again(root, 3, 2).after) == 50


def test_owners_that_are_not_made_live(root: Path) -> None:
    publish_tables(root, {"t": raw(RANDOM[:100])})
    reshard(root, "demo", 2, ReshardSettings(activate=False))
    model = Model(root, "demo-owner-1-of-2")
    assert model.versions() == [1] and model.record().current == 0


def test_owners_of_two_versions_are_not_joined(root: Path) -> None:
    """One owner's model went back to an older version."""
    publish_tables(root, {"t": raw(RANDOM[:100])})
    again(root, 2)
    publish_tables(root, {"t": raw(RANDOM[:100])})
    again(root, 2)
    Model(root, "demo-owner-1-of-2").activate(1)
    with pytest.raises(
        VersionError, match="holds owner 1 of 2 of version 1 of 'demo'; expected owner 1 of 2 of version 2"
    ):
        again(root, 1, 2)
    assert sum(h.ids for h in reshard(root, "demo", 1, ReshardSettings(2, version=2)).after) == 100
    with pytest.raises(VersionError, match="has nothing of version 7"):
        reshard(root, "demo", 1, ReshardSettings(2, version=7))


def test_an_owner_that_is_not_there(root: Path) -> None:
    publish_tables(root, {"t": raw(RANDOM[:100])})
    again(root, 3)
    Model(root, "demo-owner-1-of-3").remove_all()
    with pytest.raises(VersionError, match="'demo-owner-1-of-3'"):
        again(root, 1, 3)


def test_another_number_of_owners_than_there_is(root: Path) -> None:
    """The error tells which owners there are, and which number to say; also where the whole model is not
    published."""
    publish_tables(root, {"t": raw(RANDOM[:100])})
    again(root, 3)
    publish_tables(root, {"t": raw(RANDOM[:100])}, "demo-owner-x")
    there = (
        r"of model 'demo' there is: the whole model \(--from 1\), 3 of 3 owners \(--from 3\); say with --from"
    )
    with pytest.raises(VersionError, match=rf"'demo-owner-0-of-2' is not published in .*; {there}"):
        again(root, 1, 2)
    Model(root, "demo").remove_all()
    Model(root, "demo-owner-1-of-3").remove_all()
    with pytest.raises(
        VersionError, match=r"'demo' is not published in .* there is: 2 of 3 owners \(--from 3\)"
    ):
        again(root, 2)
    with pytest.raises(
        VersionError, match=r"'other' is not published in .*; of model 'other' there is: nothing"
    ):
        reshard(root, "other", 2)


def test_another_model_under_an_owners_name(root: Path) -> None:
    publish_tables(root, {"t": raw(RANDOM[:100])})
    again(root, 2)
    publish_tables(root, {"t": raw(RANDOM[:100])}, "demo-owner-0-of-2")
    with pytest.raises(VersionError, match="holds a whole model; expected owner 0 of 2"):
        again(root, 1, 2)


def test_an_owner_is_not_resharded_alone(root: Path) -> None:
    publish_tables(root, {"t": raw(RANDOM[:100])})
    again(root, 2)
    with pytest.raises(
        VersionError, match="owner 0 of 2 of model 'demo'; name that model: tableside reshard demo --from 2"
    ):
        reshard(root, "demo-owner-0-of-2", 3)


# ---- what is refused ----


@pytest.mark.parametrize(("owners", "before"), [(1, 1), (3, 3), (0, 1), (2, 0)])
def test_numbers_of_owners_that_say_nothing(owners: int, before: int, root: Path) -> None:
    publish_tables(root, {"t": raw(RANDOM[:100])})
    with pytest.raises(ModelError, match="expected two numbers that differ"):
        again(root, owners, before)


def test_more_owners_than_buckets_or_rows(root: Path) -> None:
    """Nobody would hold the rest; said before anything is written."""
    publish_tables(root, {"t": raw(RANDOM[:100], buckets=4)})
    with pytest.raises(ModelError, match="table 't' has 4 buckets; expected at most as many owners"):
        again(root, 5)
    publish_tables(root, {"t": DenseTable(rows_of(3, 8), is_plain=True)})
    with pytest.raises(ModelError, match="table 't' has 3 rows, and some of 4 owners would have none"):
        again(root, 4)
    assert [m for m in os.listdir(root) if "owner" in m] == []


def test_a_damaged_source_is_not_copied(root: Path) -> None:
    """Its checksums would be made anew, over the damage."""
    publish_tables(root, {"t": raw(RANDOM[:100])})
    path = Model(root, "demo").path(1)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(Segment(path).header.tables[0].offset + 5)
        file.write(b"\xff")
    with pytest.raises(SegmentError, match="checksum is wrong"):
        again(root, 2)


def test_a_directory_with_other_ids_than_the_header_says(root: Path) -> None:
    """Counted by the slots of each bucket, as the counts of all owners are."""
    publish_tables(root, {"t": raw(RANDOM[:100])})
    segment = Model(root, "demo").attach()
    (part,) = shares.parts_of([segment], "t")
    ids = part.stored.ids
    assert ids is not None and part.index is not None
    lying = type(ids)(**{**vars(ids), "count": 99})
    stored = type(part.stored)(**{**vars(part.stored), "ids": lying})
    with pytest.raises(SegmentError, match="has 99 ids by its header, 100 by its directory"):
        shares.shares_of([replace(part, stored=stored)], 2)


def test_parts_that_do_not_belong_together(root: Path) -> None:
    """Two owners in the wrong order, one of them alone, and a second owner's table of another row format or
    size of rows."""
    publish_tables(root, {"t": raw(RANDOM[:100])})
    again(root, 2)
    first, second = attached(root, 2)
    publish_tables(root, {"t": raw(RANDOM[:100], 64, RowFormat.FP32), "u": raw(RANDOM[:10])}, "other")
    reshard(root, "other", 2)
    other = Model(root, "other-owner-1-of-2").attach()
    for segments in ([second, first], [first], [first, other]):
        with pytest.raises(SegmentError, match="table 't' is not of one piece"):
            shares.parts_of(segments, "t")
    with pytest.raises(SegmentError, match="has no table 'u'"):
        shares.parts_of([other, first], "u")
    part = shares.parts_of([first, second], "t")[0]
    wider = replace(part, stored=replace(part.stored, row_bytes=part.stored.row_bytes + 16))
    assert shares._kind(part) != shares._kind(wider)


# ---- what is left behind ----


def test_nothing_is_published_where_one_owner_is_being_loaded(root: Path) -> None:
    publish_tables(root, {"t": raw(RANDOM[:100])})
    with Model(root, "demo-owner-1-of-2").loading(), pytest.raises(VersionError, match="is under way"):
        again(root, 2)
    assert Model(root, "demo-owner-0-of-2").versions() == []
    assert list(root.rglob("*.partial")) == []


def test_nothing_is_left_where_one_owner_finds_no_room(root: Path) -> None:
    """Bytes that the second owner's file may not have stand for a full file system; the first owner's was
    written whole."""
    ids = np.concatenate([[0], 1000 + np.arange(900)])
    publish_tables(root, {"t": raw(ids, buckets=2, bucket_ids=1000)})
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            again(root, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(root.rglob("*.partial")) == [] and list(root.rglob("*owner*/*.segment")) == []
    assert [h.ids for h in again(root, 2).after] == [1, 900]
    assert (
        Model(root, "demo-owner-0-of-2").attach().size
        < 40_000
        < Model(root, "demo-owner-1-of-2").attach().size
    )


# ---- the command ----


@pytest.mark.drawn(0.25)
def test_the_command_shows_what_was_there_and_what_is(root: Path) -> None:
    """Rows, ids and bytes of each model, before and after, and of all together."""
    publish_tables(root, {"t": raw(RANDOM[:100]), "u": DenseTable(rows_of(9, 8), is_plain=True)})
    done = run_tableside("reshard", "demo", "--owners", 2, root=root)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[1][:5] == [
        "before",
        "demo",
        "1",
        f"{Model(root, 'demo').attach().header.tables[0].rows + 9}",
        "109",
    ]
    assert [line[:3] for line in lines[2:4]] == [["after", f"demo-owner-{k}-of-2", "1"] for k in range(2)]
    assert lines[4][:2] == ["after", "together"] and lines[4][3] == "109"
    joined = run_tableside("reshard", "demo", "--owners", 1, "--from", 2, root=root)
    assert joined.returncode == 0 and Model(root, "demo").versions() == [1, 2], joined.stderr
    assert bytes_of(Model(root, "demo").attach(1)) == bytes_of(Model(root, "demo").attach(2))


@pytest.mark.thorough
def test_the_command_keeps_as_many_older_owners_as_it_is_told(root: Path) -> None:
    publish_tables(root, {"t": raw(RANDOM[:100])})
    for _ in range(3):
        assert run_tableside("reshard", "demo", "--owners", 2, "--keep", 1, root=root).returncode == 0
    assert Model(root, "demo-owner-0-of-2").versions() == [2, 3]
    refused = run_tableside("reshard", "demo", "--owners", 17, root=root)
    assert (
        refused.returncode == 1
        and "table 't' has 16 buckets" in refused.stderr
        and refused.stderr.count("\n") == 1
    )
