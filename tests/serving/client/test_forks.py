"""Clients that were used before a fork: each process gets the answers to its own requests."""

import asyncio
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tableside.serving.client import AsyncClient, Client

CHILDREN, CALLS = 4, 300


def ask(client: Client, number: int, calls: int = CALLS) -> None:
    """Asks for other ids than each other process does, and compares the rows. AssertionError: they are
    another's."""
    for call in range(calls):
        ids = np.array([[(number * 197 + call) % 1000]])
        assert np.array_equal(client.lookup("demo", {"user": ids})["user"], ROWS[ids[0]]), (
            f"process {number}, call {call}"
        )


async def ask_all(client: AsyncClient, number: int, calls: int = CALLS) -> None:
    async def one(call: int) -> None:
        ids = np.array([[(number * 197 + call) % 1000]])
        found = await client.lookup("demo", {"user": ids})
        assert np.array_equal(found["user"], ROWS[ids[0]]), f"process {number}, call {call}"

    for start in range(0, calls, 10):
        await asyncio.gather(*(one(call) for call in range(start, start + 10)))


ROWS = np.zeros((1000, 64), np.float32)


def learn_rows(client: Client) -> None:
    ROWS[:] = client.lookup("demo", {"user": np.arange(1000)[:, None]})["user"]


def fork(run: Callable[[], None]) -> int:
    """A child by a bare os.fork that runs `run`; its pid. Its exit code says whether that raised."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        run()
        code = 0
    except Exception:  # noqa: BLE001  (told by the exit code)
        traceback.print_exc()
    finally:
        os._exit(code)


@contextmanager
def forked(runs: list[Callable[[], None]]) -> Iterator[None]:
    """Children that run while the body does; each has to end without an error."""
    pids = [fork(run) for run in runs]
    try:
        yield
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * len(runs)


def test_forked_processes_have_connections_of_their_own(server: Any) -> None:
    """Prefork as a WSGI server does it: the parent asks, forks, and all ask at the same time."""
    with Client(server.url) as client:
        learn_rows(client)
        with forked([lambda n=n: ask(client, n) for n in range(1, CHILDREN + 1)]):
            ask(client, 0)


def test_children_of_multiprocessing(server: Any) -> None:
    with Client(server.url) as client:
        learn_rows(client)
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=ask, args=(client, n)) for n in range(CHILDREN)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0] * CHILDREN


class Looked(torch.utils.data.Dataset[Any]):
    """A data set that looks its items up with a client of the parent's."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def __len__(self) -> int:
        return 400

    def __getitem__(self, item: int) -> Any:
        return item, self.client.lookup("demo", {"user": [[item]]})["user"][0]


@pytest.mark.drawn(0.25)
def test_workers_of_a_data_loader(server: Any) -> None:
    with Client(server.url) as client:
        learn_rows(client)
        loader = torch.utils.data.DataLoader(
            Looked(client), num_workers=2, batch_size=1, multiprocessing_context="fork"
        )
        for item, vector in loader:
            assert np.array_equal(vector[0].numpy(), ROWS[int(item)])


def test_a_fork_in_a_thread_while_others_ask(server: Any) -> None:
    """A connection that another thread holds at the fork is not the child's."""
    with Client(server.url) as client:
        learn_rows(client)
        fillers = [
            threading.Thread(target=ask, args=(client, n, 20)) for n in range(6)
        ]  # so that connections are idle
        for filler in fillers:
            filler.start()
        for filler in fillers:
            filler.join()
        ending, wrong = threading.Event(), []

        def go_on(number: int) -> None:
            try:
                while not ending.is_set():
                    ask(client, number, 1)
            except Exception as error:  # noqa: BLE001  (told below)
                wrong.append(error)

        threads = [threading.Thread(target=go_on, args=(n,)) for n in range(2)]
        pids: list[int] = []

        def fork_some() -> None:
            pids.extend(fork(lambda n=n: ask(client, n, 50)) for n in range(2, 8))  # type: ignore[misc]

        threads.append(threading.Thread(target=fork_some))
        for thread in threads:
            thread.start()
        threads[-1].join()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        ending.set()
        for thread in threads:
            thread.join()
        assert (codes, wrong) == ([0] * 6, [])


def test_async_clients_in_forked_processes(server: Any) -> None:
    """The parent's loop goes on with its connections. A child's loop makes its own, and closes none of the
    parent's."""
    client, loop = AsyncClient(server.url), asyncio.new_event_loop()
    with Client(server.url) as plain:
        learn_rows(plain)
    try:
        loop.run_until_complete(ask_all(client, 0, 20))

        def in_child(number: int) -> None:
            async def run() -> None:
                await ask_all(client, number)
                await client.close()

            asyncio.run(run())

        with forked([lambda n=n: in_child(n) for n in range(1, 3)]):
            loop.run_until_complete(ask_all(client, 0))
        loop.run_until_complete(ask_all(client, 0, 20))
    finally:
        loop.run_until_complete(client.close())
        loop.close()
