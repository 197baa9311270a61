"""Rows of a file on a disk, read in blocks with checksums (loader.segment.blocks)."""

import ctypes
import mmap
import os
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
from block_files import AT, HOUR, SEED, File, crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from support import until

from tableside.loader.segment import _blocks, blocks
from tableside.loader.segment.blocks import BlockReader
from tableside.quant.rows.fetched import RowState


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 700), st.sampled_from([2, 20, 68, 80, 264, 4096, 5000]), st.integers(1, 300), st.randoms()
)
@pytest.mark.drawn(0.25)
def test_rows_are_read_in_blocks(
    tmp_path_factory: pytest.TempPathFactory, rows: int, row_bytes: int, chunk_rows: int, random: object
) -> None:
    """Of any shape, in one block or several, and each block has its checksum."""
    file = File.of(tmp_path_factory.mktemp("rows") / "f", rows, row_bytes, chunk_rows)
    asked = np.unique(np.random.default_rng(rows).integers(0, rows, 1 + rows // 3))
    out, state = file.read(asked)
    np.testing.assert_array_equal(out, file.rows[asked])
    assert not state.any()
    data, chunk = file.rows.tobytes(), min(chunk_rows, rows) * row_bytes
    for number in {0, chunk // 4096, file.sums.size - 1} & {
        *range(file.sums.size)
    }:  # the specification is slow
        numbers = SEED.to_bytes(8, "little") + number.to_bytes(8, "little")
        assert file.sums[number] == crc32c(numbers + data[4096 * number : 4096 * (number + 1)])
    assert crc32c(b"123456789") == 0xE3069283


def of_block(block: int) -> range:
    """Rows of 80 bytes with bytes in a block."""
    return range(4096 * block // 80, min(-(-4096 * (block + 1) // 80), 1000))


def test_a_block_that_changed_is_told_from_the_others(file: File) -> None:
    """One bit of a row damages its block alone; two blocks that changed places are both damaged."""
    every = np.arange(1000)
    file.write(60 * 80 + 7, bytes([file.rows[60, 7] ^ 4]))
    out, state = file.read(every)
    assert set(np.flatnonzero(state)) == set(of_block(1))
    assert set(state[list(of_block(1))]) == {RowState.CORRUPT}
    whole = state == RowState.HERE
    np.testing.assert_array_equal(out[whole], file.rows[whole])
    file.write(0, file.rows.tobytes())
    assert not file.read(every)[1].any()
    data = file.rows.tobytes()
    for one, other in ((9, 10), (10, 9)):
        file.write(4096 * one, data[4096 * other : 4096 * (other + 1)])
    assert set(np.flatnonzero(file.read(every)[1])) == {*of_block(9), *of_block(10)}


def test_a_block_of_another_file_is_damaged(file: File) -> None:
    """Also one with the same number and bytes: its seed is another one."""
    assert not file.read(np.arange(1000))[1].any()
    reader = file.reader()
    place = np.frombuffer(reader._where[0], np.int64).copy()
    place[3] ^= 1 << 40
    reader._where = place.tobytes(), *reader._where[1:]
    state = np.zeros(1000, np.uint8)
    reader(np.arange(1000), np.zeros((1000, 80), np.uint8), state, None)
    assert set(state) == {RowState.CORRUPT}


def test_a_file_that_was_cut_is_damaged_where_it_was(file: File) -> None:
    """Its rows, or their checksums, are not there."""
    os.truncate(file.path, AT + 1000 * 80 + 4 * (file.sums.size - 1))
    last = list(of_block(file.sums.size - 1))
    _, state = file.read(np.arange(1000))
    assert set(np.flatnonzero(state)) == set(last) and set(state[last]) == {RowState.CORRUPT}
    os.truncate(file.path, AT + 990 * 80)
    assert set(file.read(np.arange(1000))[1]) == {RowState.CORRUPT}


def read_twice(file: File, **ages: int) -> tuple[BlockReader, np.ndarray, np.ndarray]:
    """A reader that has checked every block, and where it writes rows and states."""
    reader, out, state = file.reader(True, **ages), np.zeros((1000, 80), np.uint8), np.zeros(1000, np.uint8)
    for _ in range(2):
        reader(np.arange(1000), out, state, None)
        assert not state.any()
        np.testing.assert_array_equal(out, file.rows)
    return reader, out, state


def test_checked_rows_are_read_where_they_are_mapped(file: File) -> None:
    """While looks at the page cache find them there: what changes is believed."""
    reader, out, state = read_twice(file)
    file.write(60 * 80 + 7, bytes([file.rows[60, 7] ^ 4]))
    reader(np.arange(1000), out, state, None)
    assert not state.any()
    np.testing.assert_array_equal(np.flatnonzero((out != file.rows).any(1)), [60])


def test_rows_may_be_read_where_they_lie_once_all_are_checked_and_there(file: File) -> None:
    """In any order and at any alignment, any number of times; numbers that the table has not do not count."""
    reader = file.reader(True)
    some = np.array([999, 3, 3, 60, -1, 1000, 2**62])
    assert reader.away(some).tolist() == [0, 1, 2, 3]
    for _ in range(2):
        reader(np.arange(500, 1000), np.zeros((500, 80), np.uint8), np.zeros(500, np.uint8), None)
    assert reader.away(some).tolist() == [1, 2, 3] and not reader.away(np.arange(999, 549, -1)).size
    reader, *_ = read_twice(file)
    assert not reader.away(some).size and not reader.away(np.arange(1000)).size
    assert not reader.away(some[:0]).size
    assert not reader.away(np.frombuffer(b"x" + some.tobytes(), np.int64, offset=1)).size
    os.truncate(file.path, AT + 990 * 80)
    assert reader.away(some).tolist() == [0, 1, 2, 3] == file.reader().away(some).tolist()


@pytest.mark.parametrize("how", ["a page went", "looks are old", "nothing is believed"])
def test_rows_may_not_be_read_where_a_page_may_be_another(file: File, how: str) -> None:
    """Of a part that was looked at whole as well. A row whose page is there still may."""
    reader, *_ = read_twice(file, believed_ms=HOUR if how == "looks are old" else 0)
    if how == "looks are old":
        reader._where[2].view(np.uint32)[:1] -= HOUR  # of the last look; it wraps, as clocks do
    elif how == "a page went":
        forget(reader)
    assert reader.away(np.arange(1000)).size


def test_blocks_are_checked_again_after_a_while(file: File) -> None:
    """Without looks for so long that pages may have gone and come back."""
    reader, out, state = read_twice(file, believed_ms=0, trusted_ms=0)
    file.write(60 * 80 + 7, bytes([file.rows[60, 7] ^ 4]))
    reader(np.arange(1000), out, state, None)
    assert set(np.flatnonzero(state)) == set(of_block(1))


def test_blocks_whose_page_went_are_checked_again(file: File) -> None:
    """A look that misses the page makes them unchecked, also after it came back."""
    reader, out, state = read_twice(file, believed_ms=0)
    file.write(60 * 80 + 7, bytes([file.rows[60, 7] ^ 4]))
    forget(reader)
    reader(np.arange(900, 1000), out[900:], state[900:], None)  # a look, as others ask for rows near it
    file.path.read_bytes()
    reader(np.arange(1000), out, state, None)
    assert set(np.flatnonzero(state)) == set(of_block(1))
    assert set(state[list(of_block(1))]) == {RowState.CORRUPT}


def forget(reader: BlockReader) -> None:
    """Has the page cache forget the file."""
    libc, mapped, there = ctypes.CDLL(None), reader._mapped, (ctypes.c_ubyte * 32)()
    assert mapped is not None
    first = ctypes.c_void_p(mapped.ctypes.data - AT)  # of the file
    os.fsync(reader._file.fd)

    def is_gone() -> bool:
        assert not libc.madvise(first, ctypes.c_size_t(AT + mapped.nbytes), mmap.MADV_DONTNEED)
        os.posix_fadvise(reader._file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert not libc.mincore(first, ctypes.c_size_t(AT + mapped.nbytes), there)
        return not any(page & 1 for page in there)

    until(is_gone)


def test_a_file_that_is_cut_is_not_read_where_it_is_mapped(file: File) -> None:
    reader, out, state = read_twice(file)
    os.truncate(file.path, AT + 400 * 80)
    reader(np.arange(1000), out, state, None)
    assert set(np.flatnonzero(state == RowState.CORRUPT)) >= set(range(400, 1000))


@pytest.mark.parametrize("depth", [1, 3, 1000])
def test_the_disk_is_asked_for_many_blocks_at_once(file: File, depth: int) -> None:
    """Every row comes, those of a damaged block as corrupt; rows that came before are not touched."""
    file.write(60 * 80 + 7, bytes([file.rows[60, 7] ^ 4]))
    reader = file.reader(True)
    forget(reader)
    rows = np.array([0, 1, 50, 60, 61, 400, 401, 777, 999])
    out, state = np.zeros((rows.size, 80), np.uint8), np.full(rows.size, 3, np.uint8)
    state[5] = RowState.HERE
    given = *reader._where, rows, out, state
    assert _blocks.bring(*given, depth, HOUR, HOUR) == 0
    is_damaged = np.isin(rows, list(of_block(1)))
    np.testing.assert_array_equal(state == RowState.CORRUPT, is_damaged)
    assert not state[~is_damaged].any() and not out[5].any()
    whole = ~is_damaged & (np.arange(rows.size) != 5)
    np.testing.assert_array_equal(out[whole], file.rows[rows[whole]])


def test_many_rows_are_asked_for_by_some_threads(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a part of them; what one of them does not get in time is read as few rows are."""
    monkeypatch.setattr(blocks, "_PART_ROWS", 100)
    in_threads, asked = _blocks.in_threads, list[tuple[int, int, int]]()

    def noted(*given: Any) -> None:
        state, depth = given[9:11]
        asked.append((given[2], np.count_nonzero(state == 3), depth))
        if depth:  # as if the disk took long for the first
            state[:150] = RowState.LATE
        in_threads(*given)
        state[state == RowState.LATE] = 3

    monkeypatch.setattr(_blocks, "in_threads", noted)
    monkeypatch.setattr(_blocks, "fetch", away_at_first(_blocks.fetch))
    rows, out, state = np.arange(0, 1000, 2), np.zeros((500, 80), np.uint8), np.zeros(500, np.uint8)
    file.reader()(rows, out, state, None)
    assert asked == [(5, 500, blocks._DEPTH), (32, 150, 0)] and not state.any()
    np.testing.assert_array_equal(out, file.rows[rows])


def away_at_first(fetch: Callable[..., int]) -> Callable[..., int]:
    """As if the page cache had nothing when it is asked first."""
    calls = count()
    return lambda *given: given[3].size if next(calls) == 0 else fetch(*given)


def test_who_waits_for_no_block_gets_what_is_there(file: File) -> None:
    """And the rows behind the first one that is not stay left."""
    reader = file.reader()
    rows = np.arange(0, 1000, 51)
    for is_there in (True, False):
        file.path.read_bytes()
        if not is_there:
            forget(file.reader(True))
        out, state = np.zeros((rows.size, 80), np.uint8), np.full(rows.size, 3, np.uint8)
        left = _blocks.bring(*reader._where, rows, out, state, 4, 0, 0)
        assert np.count_nonzero(state == 3) == left <= (0 if is_there else rows.size)
        np.testing.assert_array_equal(np.flatnonzero(state), np.arange(rows.size - left, rows.size))
        np.testing.assert_array_equal(out[state == 0], file.rows[rows[state == 0]])


def test_limits_that_make_no_sense_are_refused(file: File) -> None:
    reader, out, state = file.reader(), np.zeros((1, 80), np.uint8), np.zeros(1, np.uint8)
    for limits in ((0, 1, 1), (1, -1, 1), (1, 1, -1)):
        with pytest.raises(ValueError, match="bring: a limit is negative, or the depth is 0"):
            _blocks.bring(*reader._where, np.array([3]), out, state, *limits)


def test_a_disk_is_asked_for_blocks_that_are_read_later(file: File) -> None:
    """Any rows, however many; only once each block, and none while it hangs."""
    reader = file.reader(True)
    for rows in (np.arange(1000), np.array([3, 3, 999, -1, 1000, 2**62]), np.zeros(0, np.int64)):
        reader.ask(rows)
    with pytest.raises(ValueError, match="ask: rows do not fit this table"):
        _blocks.ask(reader, reader._device, b"1234", np.array([1]), 3)
    with pytest.raises(ValueError, match="ask: rows do not fit this table"):
        _blocks.ask(reader, reader._device, reader._where[0], b"1234", 3)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": np.array([-1])},
        {"rows": np.array([1000])},
        {"state": np.zeros(2, np.uint8)},
        {"out": np.zeros(79, np.uint8)},
        {"bits": np.zeros(2, np.uint8)},
        {"regions": np.zeros(2 * _blocks.REGION_SIZE - 1, np.uint8)},
        {"place": np.zeros(9, np.int64)},
        {"place": np.zeros(8, np.int64)},
        {"place": np.array([0, AT, -1, SEED, 80, 1000, 0, 0, 0])},
        {"place": np.array([0, AT, AT, SEED, 80, 2**62, 0, 0, 0])},
        {"place": np.array([0, AT + 8, AT, SEED, 80, 1000, 0, 0, 0])},
        {"place": np.array([0, AT, AT, SEED, 80, 1000, 8, 0, 0])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_does_not_fit_is_refused(file: File, change: dict[str, np.ndarray]) -> None:
    """Before a byte is read or written."""
    given_: dict[str, np.ndarray] = {
        "place": np.array([0, AT, AT, SEED, 80, 1000, 0, 0, 0]),
        "bits": np.zeros(3, np.uint8),
        "regions": np.zeros(2 * _blocks.REGION_SIZE, np.uint8),
        "rows": np.array([3]),
        "out": np.zeros(80, np.uint8),
        "state": np.zeros(1, np.uint8),
    } | change
    with pytest.raises(ValueError, match="fetch: rows, states or bits do not fit this table"):
        _blocks.fetch(*given_.values(), True)
    if change.keys().isdisjoint({"state", "out"}) and "rows" not in change:
        with pytest.raises(ValueError, match="away: rows or bits do not fit this table"):
            _blocks.away(*[*given_.values()][:5])


def test_checksums_without_room_are_refused() -> None:
    for first, size, room in ((-1, 80, 1), (0, 80, 2), (0, 4096, 0), (0, 4097, 1)):
        with pytest.raises(ValueError, match="sums: these blocks have no room"):
            _blocks.sums(np.zeros(size, np.uint8), SEED, first, np.zeros(room, np.uint32))
