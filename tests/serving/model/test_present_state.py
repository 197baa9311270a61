"""A request that names no version is answered from the present state, whatever state, version or engine
went meanwhile."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tables
from served import engine_of
from support import until

from tableside.loader.deltas.apply import ApplySettings, apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.deltas.compact import compact
from tableside.loader.errors import SegmentError
from tableside.loader.versions.retention import Retention
from tableside.loader.versions.states import State, state_of
from tableside.loader.versions.versions import Model
from tableside.quant import choose
from tableside.serving.client import Client, ClientError
from tableside.serving.engine_process.versions import DoorEngine
from tableside.serving.errors import not_found
from tableside.serving.executors.admission import overloaded
from tableside.serving.settings import ServerSettings

MOST = 2000  # whole numbers up to which are exact in fp16


class Changing:
    """A model of which a thread changes row 7 of the table `word` all the time, and keeps no state but the
    live one.

    values: what the row is in each state.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.values = model, dict[State, int]()
        self.change()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def change(self) -> None:
        value = len(self.values) + 1
        changes = [TableChanges("word", np.array([7]), np.full((1, 16), value, np.float32))]
        state = apply(self.model, ChangeBatch(changes), ApplySettings(keep=Retention(0))).state
        self.values[state] = value
        if value % 20 == 0:
            compact(self.model)
            self.model.collect(0)
            self.values[state_of(self.model.record())] = value

    def _run(self) -> None:
        while not self._ending.is_set() and len(self.values) < MOST:
            self.change()

    def __enter__(self) -> "Changing":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()


class Asking:
    """Clients that ask for row 7 without naming a version. found: (state, value) of each answer; refused:
    what was refused."""

    def __init__(self, url: str, clients: int = 3) -> None:
        self.found: list[tuple[State, int]] = []
        self.refused: list[ClientError] = []
        self._url, self._ending = url, threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def _run(self) -> None:
        with Client(self._url, retries=0, timeout_s=300) as client:
            while not self._ending.is_set():
                try:
                    vectors = client.lookup("demo", {"text": [[7]]})["text"]
                except ClientError as error:
                    self.refused.append(error)
                    continue
                value = int(vectors[0, 0]) if (vectors == vectors[0, 0]).all() else -1
                self.found.append((State(*client.answered_by()), value))

    def go_on(self) -> None:
        count = len(self.found)
        until(lambda: len(self.found) > count + 10 or self.refused, what="answers")

    def __enter__(self) -> "Asking":
        for thread in self._threads:
            thread.start()
        self.go_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()


def test_a_process_begins_with_the_next_state_where_the_first_one_goes(
    publish: Callable[..., Any], root: Path
) -> None:
    """As it does where changes come while it starts; a state that is live and cannot be attached is an
    error."""
    publish({"user": np.zeros((10, 4), np.float32)}, formats={"user": "fp32"})
    engine = engine_of(root, 1 << 20)
    states = [State(1, 7), State(1, 8), State(1)]
    engine._first = lambda: states.pop(0)  # type: ignore[method-assign]
    engine.begin()
    assert engine.served().state == State(1) and not states
    (root / "demo/1.segment").write_bytes(b"")
    with pytest.raises(SegmentError):
        engine_of(root, 1 << 20).begin()


class Told:
    """What a link to an engine process says of the models that this serves, with all tables in host
    memory."""

    def __init__(self, state: State) -> None:
        self.live = {"demo": {"state": state.number}}
        self.described: dict[tuple[str, int], Any] = {}

    def attach(self, model: str, state: int) -> dict[str, Any]:
        return {
            "backend": "",
            "placements": {"user": "host"},
            "hbm_bytes": 0,
            "is_counted": False,
            "verified_at": 0.0,
        }

    def moved(self, model: str, state: int) -> None:
        """The engine process need not hear of it."""


@pytest.mark.parametrize("now", [State(1, 7), State(1, 8), State(2)])
def test_a_door_asks_again_for_what_the_next_engine_process_serves(
    publish: Callable[..., Any], root: Path, now: State
) -> None:
    """An engine process that took another one's place may not know the state that the door asked that one
    for."""
    publish({"user": np.zeros((10, 4), np.float32)}, formats={"user": "fp32"})
    door = DoorEngine(Told(now), Model(root, "demo"), choose(), ServerSettings())  # type: ignore[arg-type]
    unknown = not_found("version 1 of model 'demo' cannot be served")
    assert door.is_passing(State(1, 7), unknown) is (now != State(1, 7))
    assert door.is_passing(State(1, 7), overloaded("the engine process is being replaced"))


def test_the_states_of_a_version_share_its_names_at_a_door(publish: Callable[..., Any], root: Path) -> None:
    """The reader of /v2 keeps what it knows of a version by these."""
    publish({"user": np.zeros((10, 4), np.float32)}, formats={"user": "fp32"})
    model = Model(root, "demo")
    door = DoorEngine(Told(State(1)), model, choose(), ServerSettings())  # type: ignore[arg-type]
    door.swap(first := door.attach(State(1)))
    changes = [TableChanges("user", np.array([7]), np.ones((1, 4), np.float32))]
    changed = door.attach(apply(model, ChangeBatch(changes)).state)
    assert changed.sequence and changed.names is first.names


@pytest.mark.thorough
@pytest.mark.parametrize("device", [True, False], ids=["engine", "cpu"])
def test_requests_without_a_version_are_answered(
    start: Callable[..., Any], root: Path, tmp_path: Path, device: bool
) -> None:
    """While states and versions go as soon as newer ones come, and engine processes or workers are killed.
    Each answer has the rows of the state that it names."""
    options = ("--devices", tables.serve_device(), "--gpu-from-ids", 0) if device else ()
    server = start(*options, "--workers", 2)
    model = Model(root, "demo")
    with Changing(model) as changing, Asking(server.url) as asking:
        for _ in range(2 if device else 0):  # a request that three engines end over is refused
            (engine,) = server.engines()
            os.kill(engine, signal.SIGKILL)
            until(lambda gone=engine: server.engines() not in ([], [gone]), what="a successor")
            asking.go_on()
        changed = len(changing.values)
        until(lambda: len(changing.values) > changed + 10, what="changes")
        until(
            lambda: len({state for state, _ in asking.found[:]} & set(changing.values)) > 3,
            what="answers of several states",
        )
    assert [str(error) for error in asking.refused] == []
    wrong = [(state, value) for state, value in asking.found if changing.values.get(state, value) != value]
    assert wrong == []
