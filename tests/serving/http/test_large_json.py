"""Large JSON and compressed bodies: what is not looked at, what is counted, and that the event loop has
its turn."""

import asyncio
import gzip
import zlib
from typing import Any

import numpy as np
import pytest

from tableside.serving.errors import ApiError
from tableside.serving.executors.admission import Bytes, Hold
from tableside.serving.http.asgi import read_body, room

NUMBERS = b"[" + b"7," * 100_000 + b"7]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            b"[" + b"{}," * 400 + b"{}]",
            "the JSON has 401 objects; expected at most 304, as the model has 3 inputs",
        ),
        (
            b"[" + b'"",' * 500 + b'""]',
            "the JSON has 501 strings; expected at most 448, as the model has 3 inputs",
        ),
    ],
)
def test_more_than_a_model_has_inputs_for_is_refused_unread(text: bytes, said: str) -> None:
    """Where the model has more inputs the same text is read."""

    async def test() -> None:
        turn, total = asyncio.Lock(), Bytes(1 << 30)
        with pytest.raises(ApiError, match=said) as error:
            async with room(turn, text, 3, Hold(total)):
                raise AssertionError("it is not read")
        assert error.value.status == 400 and total.held == 0
        async with room(turn, text, 30, Hold(total)):
            assert total.held > 0

    asyncio.run(test())


def test_what_a_text_unpacks_to_is_counted_while_it_is_there() -> None:
    """A hundred thousand numbers are some MB; a request that finds no room for them gets a 503."""

    async def test() -> None:
        total = Bytes(8 << 20)
        async with room(asyncio.Lock(), NUMBERS, 1, Hold(total)):
            assert total.held > 40 * 100_000
        assert total.held == 0
        with pytest.raises(ApiError, match="max_in_flight_bytes") as error:
            async with room(asyncio.Lock(), NUMBERS * 2, 1, Hold(total)):
                raise AssertionError("it is not read")
        assert error.value.status == 503 and total.held == 0

    asyncio.run(test())


def test_one_text_is_unpacked_at_a_time() -> None:
    """Of twelve that come together."""
    inside = 0

    async def test() -> None:
        turn, total = asyncio.Lock(), Bytes(8 << 20)

        async def one() -> None:
            nonlocal inside
            async with room(turn, NUMBERS, 1, Hold(total)):
                inside += 1
                await asyncio.sleep(0)
                assert inside == 1
                inside -= 1

        await asyncio.gather(*(one() for _ in range(12)))

    asyncio.run(test())


def test_a_turn_is_given_back_where_the_client_left() -> None:
    """A hold that was released meanwhile gives nothing back twice."""

    async def test() -> None:
        total = Bytes(8 << 20)
        hold = Hold(total)
        async with room(asyncio.Lock(), NUMBERS, 1, hold):
            hold.release()
            assert total.held == 0
        assert total.held == 0

    asyncio.run(test())


async def unpacked(body: bytes, limit: int, total: Bytes, encoding: bytes = b"gzip") -> bytes:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return await read_body({"headers": [(b"content-encoding", encoding)]}, receive, limit, Hold(total))


@pytest.mark.drawn(0.5)
def test_a_body_is_unpacked_in_turns() -> None:
    """Other work has its turn while 16 MiB are unpacked, and what was unpacked is counted."""
    plain = np.random.default_rng(1).integers(0, 4, 16 << 20, np.uint8).tobytes()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def test() -> None:
        other, total = asyncio.create_task(count()), Bytes(1 << 30)
        assert await unpacked(gzip.compress(plain, 1), 16 << 20, total) == plain
        assert total.held == 16 << 20
        assert await unpacked(zlib.compress(plain, 1), 16 << 20, total, b"deflate") == plain
        other.cancel()

    asyncio.run(test())
    assert turns > 64


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (gzip.compress(b"x") + b"garbage", 400, "7 bytes follow the end of the gzip body"),
        (gzip.compress(b"x") + bytes(600_000), 400, "600,000 bytes follow the end of the gzip body"),
        (gzip.compress(b"x")[:-1], 400, "the gzip body ends early"),
        (b"", 400, "the gzip body ends early"),
        (b"no gzip", 400, "the body is not gzip"),
        (gzip.compress(bytes(1_000_001)), 413, "more than 1,000,000 bytes"),
        (gzip.compress(bytes(4 << 20)), 413, "more than 1,000,000 bytes"),
    ],
    ids=["garbage behind", "much behind", "short", "empty", "other", "large", "larger"],
)
def test_a_compressed_body_that_is_none(body: bytes, status: int, said: str) -> None:
    with pytest.raises(ApiError, match=said) as error:
        asyncio.run(unpacked(body, 1_000_000, Bytes(1 << 30)))
    assert error.value.status == status


def test_no_more_is_unpacked_than_may_be_held() -> None:
    """A bomb is given up at the limit of all requests, where its own is larger."""
    total = Bytes(1 << 20)
    with pytest.raises(ApiError, match="max_in_flight_bytes") as error:
        asyncio.run(unpacked(gzip.compress(bytes(64 << 20)), 64 << 20, total))
    assert error.value.status == 503 and total.held <= total.limit
