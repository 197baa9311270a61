"""Commands and replies in C against their specification in NumPy, and replies that are none."""

import random
from dataclasses import replace
from typing import Any

import hiredis
import numpy as np
import pytest

from tableside.loader.errors import SegmentError
from tableside.loader.model.tiers import RedisTier
from tableside.loader.redis import _records
from tableside.loader.redis.blocks import SUM_BYTES, RedisBlocks, new_place
from tableside.loader.segment.remote import RedisPlace, RemoteTable, check_remote
from tableside.quant.rows.fetched import RowState

SHAPES = [4, 8, 68, 260, 4096, 20000]
GOLDEN = RedisPlace(("a:1",), False, "tableside:ads:user:000000000000002a:", 42, 227)


def blocks_of(row_bytes: int) -> RedisBlocks:
    return RedisBlocks(new_place("ads", "user", RedisTier(("a:1",), False), row_bytes), row_bytes)


def drawn(blocks: RedisBlocks, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of rows, the rows, and their records."""
    values = np.random.default_rng(n)
    rows = np.sort(values.choice(10 * blocks.place.block_rows + 10 * n, n, replace=False))
    packed = values.integers(0, 256, (n, blocks.row_bytes), np.uint8)
    records = np.concatenate(
        [blocks.records(int(row), one[None]) for row, one in zip(rows, packed, strict=True)]
    )
    return rows, packed, records


def take(
    blocks: RedisBlocks, data: bytes, rows: np.ndarray, at: int = 0
) -> tuple[tuple[int, int, bool], list[int]]:
    out, state = np.zeros((rows.size, blocks.row_bytes), np.uint8), np.full(rows.size, 9, np.uint8)
    head = b"$%d\r\n" % blocks.record_bytes
    got = _records.take(data, 0, head, rows, np.arange(rows.size), blocks.words, out, state)
    return got, state.tolist()


def test_the_format_stays() -> None:
    """Rows that were written by this release are read by the next one."""
    blocks = RedisBlocks(GOLDEN, 8)
    assert blocks.key(0x123AB) == b"tableside:ads:user:000000000000002a:00012{3ab}"
    assert blocks.slots(np.array([0, 227 * 0x3AB])).tolist() == [13923, 10250]
    assert blocks.records(7, np.arange(16, dtype=np.uint8).reshape(2, 8)).tobytes().hex() == (
        "0001020304050607432d162508090a0b0c0d0e0f1a4a0071"
    )


@pytest.mark.parametrize("row_bytes", SHAPES)
def test_commands_read_records(row_bytes: int) -> None:
    """Each names the key and the bytes of its row, and they come in their order."""
    blocks = blocks_of(row_bytes)
    rows, _, _ = drawn(blocks, 100)
    reader = hiredis.Reader()
    reader.feed(blocks.commands(rows, b"*1\r\n$6\r\nASKING\r\n"))
    for row in rows.tolist():
        assert reader.gets() == [b"ASKING"]
        block, at = divmod(row, blocks.place.block_rows)
        start = at * blocks.record_bytes
        end = start + blocks.record_bytes - 1
        assert reader.gets() == [b"GETRANGE", blocks.key(block), b"%d" % start, b"%d" % end]
    assert reader.gets() is False


@pytest.mark.parametrize("row_bytes", SHAPES)
def test_records_come_in_any_pieces(row_bytes: int) -> None:
    """Whole ones are taken, and what begins one waits for its rest."""
    blocks = blocks_of(row_bytes)
    rows, packed, records = drawn(blocks, 20)
    data = b"".join(b"$%d\r\n%s\r\n" % (blocks.record_bytes, one.tobytes()) for one in records)
    size = len(data) // rows.size
    for end in {0, 1, 4, size - 1, size, size + 3, len(data) - 1, len(data)}:
        (taken, at, is_other), state = take(blocks, data[:end], rows)
        assert (taken, at, is_other) == (end // size, end // size * size, False)
        assert state == [RowState.HERE] * taken + [9] * (rows.size - taken)
    out, state = np.zeros((40, row_bytes), np.uint8), np.zeros(40, np.uint8)
    to, head = np.arange(20) * 2, b"$%d\r\n" % blocks.record_bytes
    assert _records.take(data, 0, head, rows, to, blocks.words, out, state)[0] == 20
    assert np.array_equal(out[::2], packed) and not out[1::2].any()


@pytest.mark.parametrize("row_bytes", SHAPES)
def test_each_bit_counts(row_bytes: int) -> None:
    """And so does the row that a record is of, and the table."""
    blocks, other = blocks_of(row_bytes), blocks_of(row_bytes)
    rows, _, records = drawn(blocks, 1)
    begin, end = b"$%d\r\n" % blocks.record_bytes, b"\r\n"
    value = records[0].tobytes()
    assert take(blocks, begin + value + end, rows) == ((1, len(begin + value + end), False), [RowState.HERE])
    for bit in range(0, 8 * len(value), max(1, len(value) // 100)):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8
        assert take(blocks, begin + bytes(flipped) + end, rows)[1] == [RowState.CORRUPT], bit
    assert take(blocks, begin + value + end, rows + 1)[1] == [RowState.CORRUPT]
    assert take(other, begin + value + end, rows)[1] == [RowState.CORRUPT]
    assert take(blocks, begin + bytes(len(value)) + end, rows)[1] == [RowState.CORRUPT]


def test_other_replies_are_told() -> None:
    blocks = blocks_of(68)
    rows, _, records = drawn(blocks, 2)
    good = b"$72\r\n" + records[0].tobytes() + b"\r\n"
    for other in (b"$0\r\n\r\n", b"-MOVED 1 a:1\r\n", b"$-1\r\n", b"$7", b"$72\r\n" + bytes(72) + b"xx"):
        is_other = other != b"$7"
        assert take(blocks, good + other, rows)[0] == (1, len(good), is_other)
        assert take(blocks, other, rows)[0] == (0, 0, is_other)


REMOTE = RemoteTable("user", "user", "int8", 64, 68, 1000, "error", "", 0, 0, (), redis=GOLDEN)


@pytest.mark.parametrize(
    "lie",
    [
        {"addresses": ()},
        {"addresses": ("a",)},
        {"addresses": (1,)},
        {"prefix": "tableside:ads:{user}:000000000000002a:"},
        {"prefix": "other:"},
        {"prefix": 1},
        {"seed": -1},
        {"seed": 1 << 63},
        {"block_rows": 0},
        {"block_rows": 1.5},
        {"is_tls": 1},
        {"service": None},
        {"service": "two words"},
    ],
)
def test_a_header_that_lies_is_refused(lie: dict[str, Any]) -> None:
    check_remote(REMOTE)
    with pytest.raises(SegmentError, match="in Redis"):
        check_remote(replace(REMOTE, redis=replace(REMOTE.place, **lie)))
    with pytest.raises(SegmentError, match="in Redis"):
        check_remote(replace(REMOTE, buckets=16))


def test_places_outside_are_refused() -> None:
    blocks = blocks_of(8)
    out, state, one = np.zeros((2, 8), np.uint8), np.zeros(2, np.uint8), np.zeros(1, np.int64)
    good = [b"", 0, b"$12\r\n", one, one, blocks.words, out, state]
    _records.take(*good)
    for at, bad in (
        (1, 1),
        (1, -1),
        (3, np.zeros(2, np.int64)),
        (4, one + 2),
        (4, one - 1),
        (5, blocks.words[:2]),
        (6, out[:0]),
        (7, state[:0]),
    ):
        with pytest.raises(ValueError, match="no place"):
            _records.take(*good[:at], bad, *good[at + 1 :])
    for bad in ((0, 8, one), (8, 0, one), (1 << 40, 1 << 40, one), (8, 8, one - 1)):
        with pytest.raises(ValueError, match="impossible"):
            _records.commands(b"", *bad[:2], b"", bad[2])


def test_replies_of_any_bytes_end() -> None:
    """None is read beyond its end, and none is taken that has no right checksum."""
    blocks, draw = blocks_of(8), random.Random(1)
    rows, _, records = drawn(blocks, 5)
    data = b"".join(b"$12\r\n%s\r\n" % one.tobytes() for one in records)
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(data))] = draw.choice([0, 13, 36, 49, 255])
        (taken, at, _), state = take(blocks, bytes(changed), rows)
        assert at == taken * 19 and SUM_BYTES == 4
        right = [bytes(changed[19 * n + 5 : 19 * n + 17]) == records[n].tobytes() for n in range(taken)]
        assert state[:taken] == [RowState.HERE if one else RowState.CORRUPT for one in right]
