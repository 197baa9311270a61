"""Modules that were called before a fork, in four forked children at once, under load: each answers
rightly, none waits."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from module_tables import ROWS

from tableside.serving.modules import published
from tableside.torch import BadFeatureIds, EmbeddingBags, Embeddings

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",  # of forks while threads run
    "ignore::UserWarning",  # of more workers than cores
)
CHILDREN, CALLS, IDS, LONGEST_S = 4, 40, 20_000, 120
Tables = dict[str, np.ndarray]


class Answers:
    """Modules whose every answer is checked against the trained rows, by numpy: torch's own threads do not
    survive a second fork.

    The ids of a seed are its own.
    """

    def __init__(self, root: str, tables: Tables) -> None:
        self.ids, self.bags = (
            Embeddings("ads", ["user_ids"], root=root, threads=2),
            EmbeddingBags("ads", ["item_mean"], root=root),
        )
        self.user, self.item = tables["user"], tables["item"]

    def check(self, seed: int, calls: int) -> None:
        chance = np.random.default_rng(seed)
        for _ in range(calls):
            ids = chance.integers(0, ROWS, IDS)
            told = torch.from_numpy(ids)
            assert np.array_equal(self.ids({"user_ids": told})["user_ids"].numpy(), self.user[ids])
            assert np.array_equal(
                self.bags({"item_mean": told.view(-1, 1)})["item_mean"].numpy(), self.item[ids]
            )
        with pytest.raises(BadFeatureIds):
            self.bags({"item_mean": torch.tensor([[ROWS]])})
        self.ids.refresh()
        self.ids.check()
        assert self.ids.version == 1 and not any(self.ids.missing_ids()["user_ids"])


@pytest.fixture
def busy(model: str, tables: Tables) -> Iterator[Answers]:
    """Modules that three threads call, refresh and count meanwhile."""
    answers, ending = Answers(model, tables), threading.Event()
    failed: list[BaseException] = []

    def load(seed: int) -> None:
        try:
            while not ending.is_set():
                answers.check(seed, 1)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        ending.set()
        for thread in threads:
            thread.join()
    assert not failed


def forked(body: Callable[[], object]) -> int:
    """A child that runs `body` and ends; its process id. It ends by a signal where it takes too long."""
    if child := os.fork():
        return child
    code = 1
    try:
        signal.alarm(LONGEST_S)
        body()
        code = 0
    finally:
        os._exit(code)


def codes_of(children: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.mark.drawn(0.5)
def test_processes_of_multiprocessing(busy: Answers) -> None:
    """Forked together."""
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=busy.check, args=(seed, CALLS)) for seed in range(CHILDREN)]
    for child in children:
        child.start()
    for child in children:
        child.join(LONGEST_S)
        if child.is_alive():
            child.kill()
            child.join()
    assert [child.exitcode for child in children] == [0] * CHILDREN


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["the main thread", "another thread"])
def test_os_fork(busy: Answers, where: str) -> None:
    """Again and again, and a child's own child as well."""

    def once(seed: int) -> None:
        busy.check(seed, CALLS // 4)
        assert codes_of([forked(lambda: busy.check(seed + 1, 1))]) == [0]

    def forks() -> None:
        for turn in range(4):
            codes.extend(
                codes_of([forked(lambda seed=seed: once(seed)) for seed in range(turn, turn + CHILDREN)])
            )  # type: ignore[misc]

    codes: list[int] = []
    if where == "the main thread":
        forks()
    else:
        thread = threading.Thread(target=forks)
        thread.start()
        thread.join()
    assert codes == [0] * 4 * CHILDREN


class Looks(torch.utils.data.Dataset[torch.Tensor]):
    """Vectors of ids that the index says, looked up in the worker that is asked."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers

    def __len__(self) -> int:
        return CHILDREN * CALLS

    def __getitem__(self, at: int) -> torch.Tensor:
        found: torch.Tensor = self.answers.ids(
            {"user_ids": torch.from_numpy(np.arange(at, at + IDS) % ROWS)}
        )["user_ids"]
        return found


@pytest.mark.thorough
def test_workers_of_a_data_loader(busy: Answers) -> None:
    """Four, each with its own answers."""
    loader: Any = torch.utils.data.DataLoader(
        Looks(busy), batch_size=None, num_workers=CHILDREN, multiprocessing_context="fork", timeout=LONGEST_S
    )
    count = 0
    for at, found in enumerate(loader):
        assert np.array_equal(found.numpy(), busy.user[np.arange(at, at + IDS) % ROWS])
        count += 1
    assert count == CHILDREN * CALLS


def test_a_lock_that_a_thread_held_is_free_in_a_child(model: str, tables: Tables) -> None:
    """Each lock of modules is held by another thread at the fork, all at once."""
    answers = Answers(model, tables)
    answers.check(0, 1)
    locks: list[Any] = [published._opening, published.watch._starting]
    for one in (answers.ids._published, answers.bags._published):
        locks += [one._attaching, one.missing._lock, one.pending._lock]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            held.set()
            done.wait()

    def in_the_child() -> None:
        answers.check(1, 1)
        more = Embeddings("ads", ["item_ids"], root=model, threads=1)
        assert np.array_equal(more({"item_ids": torch.arange(9)})["item_ids"].numpy(), answers.item[:9])
        for one in (answers.ids, answers.bags):
            one._published.pending.sweep()
        looks = published.watch._thread
        assert looks is not None and looks.is_alive()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        child = forked(in_the_child)
    finally:
        done.set()
        thread.join()
    assert codes_of([child]) == [0]
