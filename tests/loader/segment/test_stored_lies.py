"""The segment's format version 2, where ids are not row numbers: one test per way a file can lie."""

import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_segment import GOLDEN, resealed
from reference import backend_of

from tableside.loader.errors import SegmentError
from tableside.loader.segment.header import Header, Owner
from tableside.loader.segment.header_checks import check_header
from tableside.loader.segment.segment import Segment
from tableside.quant import Pooling


def entries(*changes: tuple[int, int]) -> Callable[[bytearray, Header], None]:
    """Writes first rows of buckets of "beside", which has 4 of them and 5 slots."""

    def change(data: bytearray, header: Header) -> None:
        for bucket, row in changes:
            struct.pack_into("<q", data, header.indexes[1].offset + 16 * bucket, row)

    return change


def seed_of(bucket: int, seed: int) -> Callable[[bytearray, Header], None]:
    """Writes the seed of a bucket of "beside"."""
    return lambda data, header: struct.pack_into("<q", data, header.indexes[1].offset + 16 * bucket + 8, seed)


LIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "format version 1": (
        lambda: _at(8, struct.pack("<I", 1)),
        "has what format version 2 has, the file says 1",
    ),
    "a flipped bit in an index": (
        lambda: _flipped(1, 3),
        "the id index of table 'beside': the checksum is wrong",
    ),
    "a flipped bit in the first index": (
        lambda: _flipped(0, 64),
        "the id index of table 'padded': the checksum is wrong",
    ),
    "a flipped bit in the spare bytes of an index": (
        lambda: _flipped(1, -1),
        "the id index of table 'beside'",
    ),
    "truncated in the index": (
        lambda: GOLDEN.read_bytes()[: Segment(GOLDEN).header.indexes[1].offset + 64],
        "it was truncated",
    ),
    "a seed of more than 32 bits": (lambda: resealed(seed_of(1, 2**32)), "has a seed of more than 32 bits"),
    "a negative seed": (lambda: resealed(seed_of(1, -1)), "has a seed of more than 32 bits"),
    "a directory that begins late": (
        lambda: resealed(entries((0, 1))),
        "the id index of table 'beside' points outside the table",
    ),
    "a directory that ends early": (lambda: resealed(entries((4, 4))), "points outside the table"),
    "a directory that ends late": (lambda: resealed(entries((4, 6))), "points outside the table"),
    "a directory that goes back": (lambda: resealed(entries((1, 4), (2, 3))), "points outside the table"),
    "a directory with a negative row": (lambda: resealed(entries((1, -1))), "points outside the table"),
    "a directory beyond the table": (
        lambda: resealed(entries((1, 2**40), (2, 2**40))),
        "points outside the table",
    ),
    "a directory whose differences wrap": (
        lambda: resealed(entries((1, 2**63 - 1), (2, -(2**63)))),
        "points outside the table",
    ),
    "ids that are no object": (
        lambda: resealed(_nothing, _text('"ids":{"backfilled":1', '"ids":[{"backfilled":1')),
        "is corrupt",
    ),
    "an owner that is no object": (
        lambda: resealed(_nothing, _text('{"created"', '{"owner":[],"created"')),
        "is corrupt",
    ),
}


def _nothing(data: bytearray, header: Header) -> None: ...


def _text(old: str, new: str) -> Callable[[bytes], bytes]:
    return lambda text: text.replace(old.encode(), new.encode(), 1)


def _at(at: int, value: bytes) -> bytes:
    data = GOLDEN.read_bytes()
    return data[:at] + value + data[at + len(value) :]


def _flipped(index: int, at: int) -> bytes:
    stored = Segment(GOLDEN).header.indexes[index]
    place = stored.offset + at % stored.bytes
    return _at(place, bytes([GOLDEN.read_bytes()[place] ^ 0x10]))


def test_the_golden_bytes_sealed_again_are_the_same() -> None:
    """So that each refusal below is that of the change."""
    assert resealed(_nothing) == GOLDEN.read_bytes()


@pytest.mark.parametrize("lie", LIES)
def test_a_segment_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    """Each way is found at attach, and the error says which file."""
    make, expected = LIES[lie]
    path = tmp_path / "1.segment"
    path.write_bytes(make())
    with pytest.raises(SegmentError, match=expected) as caught:
        Segment(path)
    assert str(path) in str(caught.value)


Change = Callable[[Header], Header]


def ids(number: int, **change: Any) -> Change:
    """A change of the ids of a table: 0 "padded", 1 "beside", 2 "dense"."""

    def changed(h: Header) -> Header:
        tables = list(h.tables)
        of = tables[number].ids
        assert of is not None
        tables[number] = replace(tables[number], ids=replace(of, **change))
        return replace(h, tables=tuple(tables))

    return changed


def index(**change: Any) -> Change:
    """A change of the index of "beside": 4 buckets of 100 ids, 5 slots."""

    def changed(h: Header) -> Header:
        of = h.tables[1].ids
        assert of is not None and of.index is not None
        return ids(1, index=replace(of.index, **change))(h)

    return changed


def owner(**change: Any) -> Change:
    return lambda h: replace(h, owner=replace(Owner("golden", 8, 0, 2), **change))


IMPOSSIBLE: dict[str, tuple[Change, str]] = {
    "more ids than slots": (ids(1, count=6), "does not fit 6 ids in 5 slots"),
    "ids that are no number": (ids(1, count=True), "a number of the wrong type"),
    "negative ids": (ids(2, count=-1), "more of them backfilled than there are"),
    "another count of row numbers": (ids(2, count=4), "has 4 ids from 0 on in 4 rows"),
    "fewer row numbers than rows": (ids(2, count=2), "has 2 ids from 0 on in 4 rows"),
    "more backfilled than there are": (ids(2, backfilled=4), "more of them backfilled than there are"),
    "a negative number backfilled": (ids(0, backfilled=-1), "more of them backfilled than there are"),
    "backfilled ids without their bits": (ids(1, backfilled=1), "does not fit 3 ids"),
    "bits without backfilled ids": (ids(0, backfilled=0), "does not fit 5 ids"),
    "a policy that is no word": (ids(0, missing=3), "a number of the wrong type"),
    "a default row that is not the last": (ids(0, default_row=2), "has default row 2; expected the last one"),
    "a default row of row numbers that is not the last": (
        ids(2, default_row=2),
        "has default row 2; expected the last one, 3",
    ),
    "a default row outside": (ids(2, default_row=4), "has default row 4; expected the last one, 3"),
    "a default row that is no number": (ids(0, default_row="last"), "has default row last"),
    "no default row behind row numbers": (ids(2, default_row=None), "has 3 ids from 0 on in 4 rows"),
    "ids beyond 64 bits": (ids(2, first=2**63 - 2), "ids from 9223372036854775806 on"),
    "ids before 64 bits": (ids(2, first=-(2**63) - 1), "ids from -9223372036854775809 on"),
    "a first id that is no number": (ids(2, first=0.5), "a number of the wrong type"),
    "no index of raw ids": (ids(1, index=None), "has 3 ids from 0 on in 6 rows"),
    "buckets that are no power of two": (index(buckets=3), "has 3 buckets; expected a power of two"),
    "no buckets": (index(buckets=0), "has 0 buckets"),
    "too many buckets": (index(buckets=1 << 21), "has 2097152 buckets"),
    "more buckets than there are": (index(first_bucket=1), r"holds buckets \[1, \+4\) of 4"),
    "no bucket here": (index(owned=0), r"holds buckets \[0, \+0\) of 4"),
    "fewer buckets than the directory has": (index(owned=3, slots=5), "does not fit 3 ids in 5 slots"),
    "a negative number": (index(first_bucket=-1), "a number of the wrong type"),
    "a number that is none": (index(slots="6"), "a number of the wrong type"),
    "bucket ids beyond 64 bits": (index(bucket_ids=2**63), "expected a power of two"),
    "fewer slots than rows": (index(slots=4), "does not fit 3 ids in 4 slots of 6 rows"),
    "ids that lie in the values": (index(id_at=0), "does not fit"),
    "a place of ids that is no integer": (index(id_at=-1.0), "a number of the wrong type"),
    "fewer bytes than it needs": (index(rows=2), "does not fit"),
    "another unit": (index(row_bytes=128), "does not fit"),
    "other chunks": (index(chunk_rows=1), "does not fit"),
    "another one's checksums": (index(first_chunk=0), "has checksum 0 for its first; expected 4"),
    "an index outside the file": (index(offset=1 << 20), "an id index lies at bytes"),
    "an index over a table": (index(offset=4096), "two tables in one place"),
    "an index over the header": (index(offset=0), "two tables in one place"),
    "an index between two pages": (index(offset=4097), "an id index lies at bytes"),
    "times that the index has no room for": (index(has_times=True), "does not fit 3 ids in 5 slots"),
    "times that are no boolean": (index(has_times=1), "a number of the wrong type"),
    "a ttl without times": (ids(1, ttl_s=5), "has ttl or max_rows without times of its rows"),
    "a most of row numbers": (ids(2, max_rows=5), "has ttl or max_rows without times of its rows"),
    "a ttl that is no number": (ids(1, ttl_s="5"), "or a wrong number of them"),
    "a negative number that expired": (ids(1, expired=-1), "or a wrong number of them"),
    "an owner beyond the last": (owner(number=2), "that of owner 2 of 2"),
    "a negative owner": (owner(number=-1), "that of owner -1 of 2"),
    "owners that are no number": (owner(owners=True), "that of owner 0 of True"),
    "an owner of no version": (owner(version="8"), "that of owner 0 of 2"),
    "an owner of no model": (owner(model=None), "that of owner 0 of 2"),
}


def test_the_golden_header_is_possible() -> None:
    """So that each refusal below is that of the change; with an owner as well."""
    for header in (Segment(GOLDEN).header, owner()(Segment(GOLDEN).header)):
        check_header(header, 4096, GOLDEN.stat().st_size)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_header_is_refused_whatever_its_checksum(name: str) -> None:
    """One case for each check of ids, indexes and owners."""
    change, message = IMPOSSIBLE[name]
    with pytest.raises(SegmentError, match=message):
        check_header(change(Segment(GOLDEN).header), 4096, GOLDEN.stat().st_size)


@pytest.mark.parametrize("part", [Owner("golden", 8, 1, 2), None], ids=["owned", "whole"])
def test_a_header_reads_as_it_was_written(part: Owner | None) -> None:
    header = replace(Segment(GOLDEN).header, owner=part)
    assert Header.from_json(header.to_json()) == header


def test_a_directory_that_ascends_in_another_way_reads_no_other_memory(tmp_path: Path) -> None:
    """Buckets that claim other slots than pilots were made for: ids are missing, or found where they are
    kept, as specified."""
    path = tmp_path / "1.segment"
    path.write_bytes(resealed(entries((1, 5), (2, 5), (3, 5))))
    table = Segment(path).tables["beside"]
    assert table.row_map is not None
    table = replace(table, row_map=replace(table.row_map, default_row=5))
    asked = np.arange(-50, 500)
    found, expected = (
        backend_of(name).lookup(table, asked, pooling=Pooling.NONE) for name in ("native", "reference")
    )
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert (table.row_map.find(asked[asked >= 100]) == -1).all()  # type: ignore[union-attr]


@pytest.mark.thorough
def test_a_hostile_segment_never_ends_the_process(tmp_path: Path) -> None:
    """Bytes of indexes and numbers of the header drawn at random, with right checksums: the file is
    refused, or lookups end with vectors or BadIds. A process of its own tries it; many files must come
    through, else nothing was tried."""
    trials = 400
    script = f"""
        import random, re, sys
        sys.path[:0] = {[str(Path(__file__).parent.parent.parent / "helpers"), str(Path(__file__).parent)]!r}
        from pathlib import Path
        import numpy as np
        import golden_segment as t
        from tableside.quant import BadIds, Pooling, choose
        from tableside.loader.errors import SegmentError
        from tableside.loader.segment.segment import Segment
        path, rng, attached = Path({str(tmp_path / "x.segment")!r}), random.Random(7), 0
        numbers = [0, 1, -1, 2, 3, 5, 7, 64, 2**31, 2**32, 2**62, 2**63 - 1, -2**63]
        asked = np.concatenate([*t.IDS.values(), np.array([1, 98, 399, 400, -2]), np.arange(-40, 500)])
        def body(data, header):
            index = rng.choice(header.indexes)
            for _ in range(rng.randint(0, 3)):
                if rng.random() < 0.5:
                    at = index.offset + rng.randrange(index.bytes)
                    data[at] = rng.randrange(256)
                else:
                    at = index.offset + 8 * rng.randrange(2 * (index.owned + 1))
                    data[at : at + 8] = (rng.choice(numbers) % 2**64).to_bytes(8, "little")
        def text(written):
            found = list(re.finditer(rb'(?<=[a-z]":)-?[0-9]+', written))
            for _ in range(rng.choice([0, 0, 0, 1, 2])):
                one = rng.choice(found)
                new = str(rng.choice(numbers)).encode()
                if len(new) <= len(one[0]):
                    written = written[: one.start()] + new.ljust(len(one[0])) + written[one.end() :]
            return written
        for _ in range({trials}):
            path.unlink(missing_ok=True)
            path.write_bytes(t.resealed(body, text))
            try:
                tables = Segment(path).tables
            except SegmentError:
                continue
            attached += 1
            for table in tables.values():
                for backend in ("native", "fbgemm"):
                    try:
                        choose(backend).lookup(table, asked, pooling=Pooling.NONE)
                    except BadIds:
                        pass
        print(attached)
    """
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > trials // 8
