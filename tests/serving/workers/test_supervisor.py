"""The supervisor waits for no worker: what ends is replaced whatever another one does, and signals are
heard at any time."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
from support import is_running, until

from tableside.loader.segment.memory import processes_below
from tableside.serving.client import Client

Start = Callable[..., Any]


@pytest.mark.thorough
def test_a_worker_is_replaced_while_another_one_hangs(start: Start) -> None:
    """One is stopped, so that it answers nothing; one that is killed meanwhile has its successor before
    the first is given up."""
    server = start("--workers", 2)
    stopped, victim = server.workers()
    os.kill(stopped, signal.SIGSTOP)
    try:
        os.kill(victim, signal.SIGKILL)
        until(lambda: len(set(server.workers()) - {stopped, victim}) == 1, what="the successor")
        assert stopped in server.workers()
        until(lambda: stopped not in server.workers(), what="the one that hangs to be replaced")
        until(lambda: len(server.workers()) == 2, what="two workers")
    finally:
        if is_running(stopped):
            os.kill(stopped, signal.SIGKILL)


@pytest.mark.thorough
def test_kills_again_and_again(start: Start) -> None:
    """Whenever the supervisor is asked to look, both places are filled again, and a client with retries
    sees nothing of it."""
    server = start("--workers", 2)
    with Client(server.url, retries=5) as client:
        for n in range(10):
            before = server.workers()
            os.kill(before[n % 2], signal.SIGKILL)
            until(lambda b=before: len(set(server.workers()) - set(b)) == 1, what="the successor")
            for _ in range(10):
                client.lookup("demo", {"user": [[1]]})


@pytest.mark.thorough
def test_a_request_to_end_overtakes_those_to_replace(start: Start) -> None:
    """SIGTERM after many SIGHUPs, while a successor does not get ready: the server ends, and nothing of it
    is left."""
    server = start("--workers", 2, "--ready-timeout-s", 600)
    before = set(processes_below(server.process.pid))
    for _ in range(5):
        server.process.send_signal(signal.SIGHUP)
    until(lambda: set(processes_below(server.process.pid)) - before, what="a successor")
    for successor in set(processes_below(server.process.pid)) - before:
        os.kill(successor, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(300) == 0


@pytest.mark.thorough
def test_hangups_are_not_queued(start: Start) -> None:
    """Many SIGHUPs at once replace each worker, and then it is quiet."""
    server = start("--workers", 1)
    (before,) = server.workers()
    for _ in range(20):
        server.process.send_signal(signal.SIGHUP)
    until(lambda: server.workers() and before not in server.workers(), what="a new worker")
    assert server.get("/health").status_code == 200


@pytest.mark.drawn(0.25)
def test_a_successor_is_ready_before_its_predecessor_goes(start: Start) -> None:
    """The only worker is asked to end when its successor takes requests, and not as long as that one does
    not."""
    server = start("--workers", 1)
    (predecessor,) = server.workers()
    below = set(processes_below(server.process.pid))

    def successor() -> int | None:
        return next(iter(set(processes_below(server.process.pid)) - below), None)

    def is_replaced() -> bool:
        """False: the supervisor gave up the successor, which did not answer while it was stopped."""
        server.process.send_signal(signal.SIGHUP)
        until(successor, what="a successor")
        pid = successor()
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(5):  # the supervisor looks
                server.get("/health")
                time.sleep(0.02)
            assert predecessor in server.workers()
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        until(
            lambda: server.workers() == [pid] or not is_running(pid),
            what="the successor to be the only worker",
        )
        return is_running(pid)

    until(is_replaced, what="a successor that is not given up")


@pytest.mark.drawn(0.5)
def test_a_successor_stands_for_a_predecessor_that_was_killed(start: Start) -> None:
    """No other process is started in its place."""
    server = start("--workers", 1)
    (predecessor,) = server.workers()
    below = set(processes_below(server.process.pid))
    server.process.send_signal(signal.SIGHUP)
    until(lambda: set(processes_below(server.process.pid)) - below, what="a successor")
    (successor,) = set(processes_below(server.process.pid)) - below
    os.kill(predecessor, signal.SIGKILL)
    until(lambda: server.workers() == [successor], what="the successor to be the only worker")


@pytest.mark.thorough
def test_quit_ends_at_once(start: Start) -> None:
    """Whatever runs: a response that is being drained does not hold SIGQUIT up."""
    server = start("--workers", 2, "--drain-s", 300)
    below = processes_below(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    until(lambda: server.get("/v2/health/ready").status_code == 503, what="draining")
    server.process.send_signal(signal.SIGQUIT)
    assert server.process.wait(300) == 128 + signal.SIGQUIT
    until(lambda: not any(map(is_running, below)), what="the workers to be gone")


@pytest.mark.drawn(0.25)
def test_more_and_fewer_workers(start: Start) -> None:
    """SIGTTIN and SIGTTOU, while requests run; the last one stays."""
    server = start("--workers", 1)
    failed: list[Exception] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            try:
                with Client(server.url, retries=3) as client:
                    client.lookup("demo", {"user": [[1]]})
            except Exception as error:  # noqa: BLE001  # shown below
                failed.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    server.process.send_signal(signal.SIGTTIN)
    until(lambda: len(server.workers()) == 2, what="a second worker")
    for _ in range(3):
        server.process.send_signal(signal.SIGTTOU)
        until(lambda: len(server.workers()) == 1, what="one worker")
    stop.set()
    thread.join()
    assert not failed
    assert httpx.get(server.url + "/health").status_code == 200
