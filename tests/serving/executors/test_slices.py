"""The event loop's time, shared between requests and sockets."""

import asyncio
import functools
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from tableside.serving.executors.admission import SLICE_S, Slices

pytestmark = pytest.mark.quick


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def test_the_sockets_are_read_between_two_slices() -> None:
    """Requests that each take a slice do not keep the loop: what else is ready runs between any two, and
    all are taken."""

    async def test() -> None:
        slices, seen = Slices(), list[int]()
        seen_before: list[int] = []

        async def request(n: int) -> None:
            await slices.take()
            seen.append(n)
            end = time.perf_counter() + 2 * SLICE_S
            while time.perf_counter() < end:
                pass

        async def health() -> None:
            while len(seen) < 8:
                seen_before.append(len(seen))
                await asyncio.sleep(0)

        await asyncio.gather(health(), *(request(n) for n in range(8)))
        assert seen == list(range(8))
        assert max(np.diff(seen_before)) == 1

    run(test())


def test_patient_requests_are_behind_all_others() -> None:
    """One runs in each round of the loop, and what came meanwhile goes before the next one."""

    async def test() -> None:
        slices, seen = Slices(), list[str]()
        for n in range(3):
            slices.run(functools.partial(seen.append, f"patient {n}"), True)
        slices.run(functools.partial(seen.append, "other 0"))
        assert seen == ["other 0"]
        for n in range(1, 4):
            await asyncio.sleep(0)
            slices.run(functools.partial(seen.append, f"other {n}"))
        while len(seen) < 7:
            await asyncio.sleep(0)
        assert seen == [f"{who} {n}" for n in range(3) for who in ("other", "patient")] + ["other 3"]

    run(test())
