"""Processes fork while they use a client, and parents and children go on asking at the same time.

Promised: each gets the answers to its own requests, none fails, and what a child does to its client changes
nothing for its parent. Forks come from the main thread and from others, between calls and while threads are
in the midst of one, with sync and async clients; children fork again.

The oracle: rows encode their ids, and every process asks for other ids.
"""

import asyncio
import os
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

import numpy as np

from campaigns.common import ROWS, TABLES, Goal, at_least, folders, none, publish, random_of, standalone, told
from tableside.serving.cli.local import local_server
from tableside.serving.client import AsyncClient, Client

CALLS, IDS = 40, 5
NEVER = ("processes that got another's answers", "processes whose requests failed")
_WRONG, _FAILED = 3, 4  # exit codes


def check(ids: np.ndarray, vectors: np.ndarray) -> None:
    """ArithmeticError: these are not the rows of these ids."""
    if not np.array_equal(vectors, told(TABLES["user"], 1, ids)):
        raise ArithmeticError(f"asked for {ids[:3]}, and got others")


def ask(client: Client, number: int, calls: int = CALLS) -> None:
    rng = np.random.default_rng(number)
    for _ in range(calls):
        ids = rng.integers(0, ROWS, IDS)
        check(ids, client.lookup("demo", {"user": ids[:, None]})["user"])


async def ask_all(client: AsyncClient, number: int) -> None:
    async def one(rng: np.random.Generator) -> None:
        ids = rng.integers(0, ROWS, IDS)
        check(ids, (await client.lookup("demo", {"user": ids[:, None]}))["user"])

    rng = np.random.default_rng(number)
    for _ in range(CALLS // 8):
        await asyncio.gather(*(one(rng) for _ in range(8)))


def fork(run: Callable[[], None]) -> int:
    """A child that runs `run`; its exit code says how that ended."""
    if pid := os.fork():
        return pid
    code = _FAILED
    try:
        run()
        code = 0
    except ArithmeticError:
        code = _WRONG
    except Exception:  # noqa: BLE001  (told by the exit code)
        traceback.print_exc()
    finally:
        os._exit(code)


class Family:
    """A process, its threads and its children, all of which use one client."""

    def __init__(self, chance: random.Random) -> None:
        self.counts, self._chance = Counter[str](), chance

    def live(self, client: Client, depth: int = 0) -> None:
        """Forks children, from this thread or another, while threads and this one ask; waits for all of them.

        ArithmeticError, ClientError: of this process; children's are counted.
        """
        ask(client, self._chance.randrange(1 << 30), 2)
        ending = threading.Event()
        threads = [
            threading.Thread(target=self._go_on, args=(client, ending))
            for _ in range(self._chance.randrange(3))
        ]
        for thread in threads:
            thread.start()
        pids: list[int] = []
        runs = [self._child(client, depth) for _ in range(self._chance.randint(1, 3))]
        forker = threading.Thread(target=lambda: pids.extend(map(fork, runs)))
        if self._chance.random() < 0.5:
            pids.extend(map(fork, runs))
        else:
            forker.start()
            forker.join()
        try:
            ask(client, self._chance.randrange(1 << 30))
        finally:
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            ending.set()
            for thread in threads:
                thread.join()
        self.counts["forks"] += len(pids)
        self.counts[NEVER[0]] += codes.count(_WRONG)
        self.counts[NEVER[1]] += len([code for code in codes if code not in (0, _WRONG)])
        ask(client, self._chance.randrange(1 << 30), 2)

    def _go_on(self, client: Client, ending: threading.Event) -> None:
        number = threading.get_ident()
        try:
            while not ending.is_set():
                ask(client, number, 1)
        except ArithmeticError:
            self.counts[NEVER[0]] += 1

    def _child(self, client: Client, depth: int) -> Callable[[], None]:
        number, forks_again, closes = (
            self._chance.randrange(1 << 30),
            self._chance.random() < 0.3,
            self._chance.random() < 0.3,
        )

        def run() -> None:
            if forks_again and depth < 2:
                family = Family(random.Random(number))
                family.live(client, depth + 1)
                if bad := family.counts[NEVER[0]] + family.counts[NEVER[1]]:
                    raise ArithmeticError(f"{bad} of its children")
            ask(client, number)
            if closes:
                client.close()

        return run

    def live_async(self, client: AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        """The same with an event loop: a child has one of its own."""
        loop.run_until_complete(ask_all(client, self._chance.randrange(1 << 30)))
        numbers = [self._chance.randrange(1 << 30) for _ in range(2)]

        async def in_child(number: int) -> None:
            await ask_all(client, number)
            await client.close()

        pids = [fork(lambda n=n: asyncio.run(in_child(n))) for n in numbers]  # type: ignore[misc]
        try:
            loop.run_until_complete(ask_all(client, self._chance.randrange(1 << 30)))
        finally:
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        self.counts["forks of event loops"] += len(pids)
        self.counts[NEVER[0]] += codes.count(_WRONG)
        self.counts[NEVER[1]] += len([code for code in codes if code not in (0, _WRONG)])


def run(seconds: float, seed: int) -> dict[str, float]:
    """The campaign."""
    chance, counts = (
        random_of(seed, "forks"),
        Counter[str](dict.fromkeys(("forks", "forks of event loops", *NEVER), 0)),
    )
    with folders() as (root, files):
        publish(root, files, value=1)
        with local_server(["demo"], root=root, workers=2) as server:
            end = time.monotonic() + seconds
            while time.monotonic() < end or not counts["forks"]:
                family = Family(chance)
                with Client(server.url, timeout_s=60) as client:
                    family.live(client)
                loop = asyncio.new_event_loop()
                made = AsyncClient(server.url, timeout_s=60)
                family.live_async(made, loop)
                loop.run_until_complete(made.close())
                loop.close()
                counts.update(family.counts)
    return dict(counts)


GOALS: dict[str, Goal] = {
    "forks": at_least(1000),
    "forks of event loops": at_least(500),
    **dict.fromkeys(NEVER, none()),
}


if __name__ == "__main__":
    standalone(run)
