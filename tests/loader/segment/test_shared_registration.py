"""One segment, registered with CUDA by several processes of one GPU at once."""

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tables
from support import rows_of

from tableside.loader.versions.versions import Model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("__import__('tables').DEVICE == 'interpreter'", reason="needs a GPU"),
]

DEADLINE_S = 120  # of an answer; the first one imports torch and compiles kernels
WORKER = """
import gc, sys
from pathlib import Path
import numpy as np
from reference import REFERENCE
from tableside.loader.segment.registration import Registration
from tableside.loader.segment.segment import Segment
from tableside.quant import Pooling, choose
from tableside.quant.gpu.backend import GpuBackend

device, segment = sys.argv[2], Segment(Path(sys.argv[1]))
backend, table, stored = GpuBackend(device, choose()), segment.tables["t"], segment.header.tables[0]
ids = np.arange(0, table.rows, 7)
for line in sys.stdin:
    if line == "register\\n":
        registration = Registration(segment, device)
        placed = backend.place("zero_copy", table, registration.view(stored.offset, stored.bytes))
    elif line == "look up\\n":
        found = backend.lookup(placed, ids, pooling=Pooling.NONE)
        np.testing.assert_array_equal(found, REFERENCE.lookup(table, ids, pooling=Pooling.NONE))
    elif line == "unregister\\n":
        del placed
        gc.collect()
        registration.close()
        Registration(segment, device).close()  # CUDA refuses pages that this process still has registered
    print(line, end="", flush=True)
"""


class Worker:
    """A process of its own that does what it is told."""

    def __init__(self, path: Path) -> None:
        top = Path(__file__).parents[3]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(top), str(top / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")]
            ),
        }
        command = [sys.executable, "-c", WORKER, str(path), tables.DEVICE]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def tell(self, what: str) -> None:
        assert self.process.stdin
        print(what, file=self.process.stdin, flush=True)

    def did(self, what: str) -> bool:
        """Whether it did what it was told; an exception in it ends it."""
        assert self.process.stdout
        assert select.select([self.process.stdout], [], [], DEADLINE_S)[0], (
            f"no answer to {what!r} within {DEADLINE_S} s"
        )
        return self.process.stdout.readline() == what + "\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def begin(publish: Callable[..., Any], root: Path) -> Iterator[Callable[[], Worker]]:
    """begin() -> a worker over one published segment."""
    publish({"t": rows_of(5000, 64)})
    path, begun = Model(root, "demo").attach().path, []

    def run() -> Worker:
        begun.append(Worker(path))
        return begun[-1]

    yield run
    for worker in begun:
        worker.kill()


def test_two_processes_register_one_segment_and_one_is_killed(begin: Callable[[], Worker]) -> None:
    """Both read its rows at once. The one that is left reads on, a third one joins, and each undoes its
    own registration."""
    first, second = begin(), begin()
    for what in ("register", "look up"):
        for worker in (first, second):
            worker.tell(what)
        assert first.did(what) and second.did(what)
    first.kill()
    third = begin()
    third.tell("register")
    assert third.did("register")
    for what in ("look up", "unregister"):
        for worker in (second, third):
            worker.tell(what)
        assert second.did(what) and third.did(what)


def test_a_process_that_undoes_its_registration_leaves_the_others(begin: Callable[[], Worker]) -> None:
    first, second = begin(), begin()
    for worker in (first, second):
        worker.tell("register")
    assert first.did("register") and second.did("register")
    for worker, what in ((first, "unregister"), (second, "look up"), (second, "unregister")):
        worker.tell(what)
        assert worker.did(what)
