"""A share that is taken from other hosts' segments is what resharding on one host would have made of them."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from raw_segments import DenseTable, publish_tables
from resharded import RANDOM, TABLES, again, attached, bytes_of, raw
from support import files_of, rows_of

from tableside.loader.errors import ModelError, SegmentError, VersionError
from tableside.loader.segment.layout import CHUNK_BYTES
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.transfer import TransferredSegment, head_of, stored_range
from tableside.loader.shards.moving import take_share
from tableside.loader.versions.versions import Model


def fetched(segment: Segment, change: Callable[[np.ndarray], np.ndarray] = np.array) -> TransferredSegment:
    """A segment as another host sees it, and how its chunks change on their way."""

    def read(identity: int, first: int, end: int, size: int) -> bytes:
        assert identity == segment.files[0].identity
        stored, start, stop = stored_range(segment.header, first, end)
        ((_, rows),) = segment.rows(stored, start, stop)
        return change(rows.reshape(-1).copy()).tobytes()

    return TransferredSegment(segment.path, head_of(segment), read)


@pytest.mark.parametrize("case", TABLES)
@pytest.mark.drawn(7)
def test_a_taken_share_is_what_resharding_makes(case: str, root: Path, tmp_path: Path) -> None:
    """2 -> 3 and 3 -> 2, byte for byte, with the same content and ids."""
    publish_tables(root, {"t": TABLES[case]})
    again(root, 2)
    again(root, 3)
    for before, after in ((2, 3), (3, 2)):
        for number, expected in enumerate(attached(root, after)):
            done = take_share(tmp_path, number, after, [fetched(s) for s in attached(root, before)])
            found = Model(tmp_path, expected.header.model).attach()
            assert bytes_of(found) == bytes_of(expected)
            assert found.header.tables == expected.header.tables
            assert found.content() == expected.content()
            assert found.hosts_state() == expected.hosts_state()
            assert done.after[0].ids == expected.header.tables[0].id_count


def lying(number: int) -> Callable[[np.ndarray], np.ndarray]:
    """Flips a bit of the chunks that come at one time."""
    times = iter(range(number + 1))

    def change(rows: np.ndarray) -> np.ndarray:
        if next(times, None) == number:
            rows[len(rows) // 2] ^= 1
        return rows

    return change


@pytest.mark.parametrize(
    ("case", "requests"),
    [("int8 D 64: ids in the padding", 4), ("fp16 D 32: ids in an array", 5), ("plain", 2)],
)
def test_a_bit_that_flips_on_its_way_is_found(case: str, requests: int, root: Path, tmp_path: Path) -> None:
    """In a directory, a default row, rows, pilots or ids: the table and the rows are named, and nothing
    stays."""
    publish_tables(root, {"t": TABLES[case]})
    again(root, 2)
    first, second = attached(root, 2)
    for number in range(20):
        try:
            take_share(tmp_path, 1, 3, [fetched(first, lying(number)), fetched(second)])
        except SegmentError as error:
            assert "table 't'" in str(error) and "the checksum is wrong" in str(error)
            model = Model(tmp_path, "demo-owner-1-of-3")
            assert not model.folder.exists() or not files_of(model.folder)
        else:
            break
    assert number == requests, "of the first owner"
    assert Model(tmp_path, "demo-owner-1-of-3").versions() == [1]


def test_chunks_that_are_cut_or_too_long_are_refused(root: Path, tmp_path: Path) -> None:
    publish_tables(root, {"t": raw()})
    again(root, 2)
    first, second = attached(root, 2)
    for change in (lambda rows: rows[:-1], lambda rows: np.append(rows, rows[:1])):
        with pytest.raises(SegmentError, match="bytes came; expected"):
            take_share(tmp_path, 1, 3, [fetched(first, change), fetched(second)])


def test_heads_that_are_none_are_refused(root: Path) -> None:
    """Each bit of one is of consequence."""
    publish_tables(root, {"t": raw(RANDOM[:20])})
    segment = Model(root, "demo").attach()
    head = head_of(segment)
    draw = np.random.default_rng(0)
    cases = [head[:n] for n in (0, 10, 64, 100, head.size - 8)]
    for at in [*range(32), *draw.integers(64, head.size, 100)]:
        cases.append(head.copy())
        cases[-1][at] ^= 1 << draw.integers(8)
    for one in cases:
        with pytest.raises(SegmentError, match="demo"):
            TransferredSegment(segment.path, one, lambda *_: b"")


def test_sources_that_are_not_all_owners_in_their_order_are_refused(root: Path, tmp_path: Path) -> None:
    publish_tables(root, {"t": raw()})
    again(root, 3)
    owners = [fetched(segment) for segment in attached(root, 3)]
    for some in (owners[:2], owners[1:], [owners[0], owners[2], owners[1]], [owners[0]] * 3):
        with pytest.raises(VersionError, match="expected all owners in their order"):
            take_share(tmp_path, 0, 4, some)
    whole = fetched(Model(root, "demo").attach())
    with pytest.raises(VersionError, match="is not that of owner 0 of 1"):
        take_share(tmp_path, 0, 2, [whole])
    for number, count in ((2, 2), (-1, 2), (0, 3)):
        with pytest.raises(ModelError, match="expected another number of them, and a share from 0 on"):
            take_share(tmp_path, number, count, owners)
    with pytest.raises(ModelError, match="has 16 buckets"):
        take_share(tmp_path, 0, 17, owners)
    assert not any(tmp_path.iterdir())


def test_memory_is_that_of_indexes_and_pieces(root: Path, tmp_path: Path) -> None:
    """Rows go from what came to the new version: of the memory that stands for the source, few pages are
    written."""
    publish_tables(root, {"t": DenseTable(rows_of(100_000, 64), default=np.ones(64, np.float32))})
    again(root, 2)
    sources = [fetched(segment) for segment in attached(root, 2)]
    take_share(tmp_path, 1, 3, sources)
    for source in sources:
        written = os.fstat(source._fd).st_blocks * 512
        assert 0 < written < 2 * CHUNK_BYTES < source.header.table_bytes
