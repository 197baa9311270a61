"""The scrubber: one worker at a time, once in a while, where a core is idle, for a tenth of the time."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tableside.loader.versions.versions import Model
from tableside.serving.damage import ReadDamage
from tableside.serving.service import scrub
from tableside.serving.service.scrub import Scrubber, damage_of


class Reads:
    """Stands for the processes that read rows: counts them, and how many run at a time."""

    def __init__(self) -> None:
        self.count = self.running = self.most = 0

    async def __call__(self, model: Model, version: int) -> None:
        self.count, self.running = self.count + 1, self.running + 1
        self.most = max(self.most, self.running)
        for _ in range(20):  # turns of the loop, in which the other worker looks
            await asyncio.sleep(0)
        self.running -= 1


def worker_of(
    root: Path, every_s: float, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> tuple[Scrubber, Any]:
    """A worker's scrubber of the model, whose rows it never held against their checksums."""
    engine: Any = SimpleNamespace(
        model=Model(root, "demo"), attached=lambda: SimpleNamespace(version=1, verified_at=0.0)
    )
    scrubber = Scrubber([engine], every_s)
    monkeypatch.setattr(scrubber, "_read", reads)
    return scrubber, engine


def test_one_worker_at_a_time_scrubs_a_model(
    publish: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers that find a scrub due at the same time: one reads, the other leaves it."""
    publish({"t": np.ones((4, 8), np.float32)})
    reads = Reads()
    workers = [worker_of(root, 1000, reads, monkeypatch) for _ in range(2)]

    async def both() -> None:
        await asyncio.gather(*(scrubber._scrub_if_due(engine) for scrubber, engine in workers))

    asyncio.run(both())
    assert (reads.count, reads.most) == (1, 1)


def test_a_version_that_another_worker_read_is_not_read_again(
    publish: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before scrub_hours are over; then it is."""
    publish({"t": np.ones((4, 8), np.float32)})
    reads = Reads()
    for _ in range(3):
        scrubber, engine = worker_of(root, 1000, reads, monkeypatch)
        asyncio.run(scrubber._scrub_if_due(engine))
    assert reads.count == 1
    (root / "demo" / scrub.LOCK).write_text(f"1 {time.time() - 2000:.0f}")
    scrubber, engine = worker_of(root, 1000, reads, monkeypatch)
    asyncio.run(scrubber._scrub_if_due(engine))
    assert reads.count == 2


@pytest.mark.drawn(0.5)
def test_rows_are_read_where_a_core_is_idle() -> None:
    """The process that reads has the scheduling policy SCHED_IDLE."""
    script = (
        "import os; from tableside.serving.service import scrub; "
        "scrub.damage_of = lambda *_: str(os.sched_getscheduler(0)); scrub.main(['/dev/shm', 'demo', '1', "
        "''])"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    assert found.stdout == f'{{"damage": "{os.SCHED_IDLE}"}}\n'


def test_rows_are_read_for_a_tenth_of_the_time() -> None:
    """Nine seconds of rest for each second of reading."""
    asked: list[float] = []
    segment = SimpleNamespace(verify=lambda rest: asked.append(rest))
    model: Any = SimpleNamespace(attach_all=lambda version, verify: [segment])
    assert damage_of(model, 1) is None
    assert asked == [9]


def test_damage_that_requests_found_is_marked_until_the_mark_is_there() -> None:
    """Once, of whichever version is held; a mark that fails is tried again."""
    marked: list[tuple[int, str]] = []

    class Version:
        """Of a table on a disk. Segments have no equals, and may be held weakly."""

        def __init__(self, number: int, damage: str) -> None:
            self.header = SimpleNamespace(version=number)
            self.files = [SimpleNamespace(table="t", path=Path(f"{number}.1.rows"))]
            self.readers = {"t": SimpleNamespace(damage=damage)}

    versions = [Version(7, ""), Version(6, "row 3 is not what was written")]

    def mark(version: int, file: str) -> None:
        marked.append((version, file))
        if len(marked) == 1:
            raise OSError(28, "no space left")

    engine: Any = SimpleNamespace(
        model=SimpleNamespace(name="demo", mark_damaged=mark),
        held=lambda: [SimpleNamespace(segment=SimpleNamespace(base=v)) for v in versions],
    )
    read_damage = ReadDamage()
    with pytest.raises(OSError, match="no space left"):
        read_damage.mark(engine)
    for _ in range(2):
        read_damage.mark(engine)
    assert marked == [(6, "6.1.rows")] * 2
