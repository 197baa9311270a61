"""Published files are read whole once a host, and again where anything says that they may have changed."""

import json
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import files_of, flip_bit, rows_of

from tableside.loader.deltas.apply import apply
from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.errors import SegmentError
from tableside.loader.segment.segment import Segment, SegmentFile
from tableside.loader.versions import verified
from tableside.loader.versions.states import attach_state
from tableside.loader.versions.versions import Model

Publish = Callable[..., Any]
ROWS = 500


@pytest.fixture
def model(publish: Publish, root: Path) -> Model:
    publish({"t": rows_of(ROWS, 8)})
    return Model(root, "demo")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read whole, in order."""
    found: list[str] = []
    verify = Segment.verify_file

    def watched(self: Segment, file: SegmentFile, *arguments: Any) -> None:
        found.append(file.path.name)
        verify(self, file, *arguments)

    monkeypatch.setattr(Segment, "verify_file", watched)
    return found


def flip(path: Path) -> None:
    """Changes a bit of the last row."""
    table = Segment(path, "header").header.tables[0]
    flip_bit(path, table.offset + table.bytes - 16)


def test_a_version_is_read_by_the_first_process_alone(model: Model, read: list[str]) -> None:
    for _ in range(3):
        model.attach()
    assert read == ["1.segment"]
    at = model.verified_at(model.attach())
    assert at is not None and at <= os.stat(model.path(1)).st_ctime + 3600
    model.attach(verify="always")
    assert read == ["1.segment"] * 2
    attached = model.attach(verify="header")
    assert len(read) == 2
    assert model.verify(attached, "always") >= at and len(read) == 3
    assert model.verify(attached, "header") == 0 and len(read) == 3


def test_a_delta_is_read_once_as_well(model: Model, read: list[str]) -> None:
    apply(model, ChangeBatch(iter([TableChanges("t", np.array([1, 2]), rows_of(2, 8))])))
    for _ in range(3):
        attach_state(model)
    assert sorted(read) == ["1+1.delta", "1.segment"]
    assert files_of(model.folder) == {"1.segment", "1+1.delta"}


def test_a_file_that_was_written_to_is_read_again(model: Model, read: list[str]) -> None:
    model.attach()
    flip(model.path(1))
    for _ in range(2):
        with pytest.raises(SegmentError, match="the checksum is wrong"):
            model.attach()
    assert len(read) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"inode": 1},
        {"device": 0},
        {"bytes": 1},
        {"changed_ns": 0},
        {"header": 0},
        {"boot": "x"},
        {"at": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_note_of_another_file_is_not_believed(
    model: Model, read: list[str], change: dict[str, Any]
) -> None:
    """Or of another boot, or of no time."""
    model.attach()
    note = model.folder / "1.segment.verified"
    told = json.loads(note.read_text())
    note.write_text(json.dumps({**told, **change}))
    model.attach()
    assert len(read) == 2
    model.attach()
    assert len(read) == 2  # and it was written anew


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "{}", "\xff"])
def test_a_note_that_is_none_is_not_believed(model: Model, read: list[str], text: str) -> None:
    (model.folder / "1.segment.verified").write_bytes(text.encode("latin-1"))
    model.attach()
    assert read == ["1.segment"]


def test_a_note_goes_with_its_file(model: Model, publish: Publish) -> None:
    model.attach()
    publish({"t": rows_of(ROWS, 8)})
    model.attach()
    model.remove(1)
    assert files_of(model.folder) == {"2.segment"}
    assert (model.folder / "2.segment.verified").exists()


def test_a_damaged_file_gets_no_note(model: Model) -> None:
    flip(model.path(1))
    with pytest.raises(SegmentError):
        model.attach()
    assert not (model.folder / "1.segment.verified").exists()


def test_where_nothing_can_be_noted_it_is_read_each_time(
    model: Model, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is full, or the folder is another user's."""

    def full(self: Any, name: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tableside.loader.versions.folder.Folder.create", full)
    for _ in range(2):
        model.attach()
    assert len(read) == 2


def test_what_a_killed_process_left_of_a_note_goes_with_the_next_load(model: Model, publish: Publish) -> None:
    (model.folder / "1.segment.verified.77.partial").write_text("{")
    publish({"t": rows_of(ROWS, 8)})
    assert files_of(model.folder) == {"1.segment", "2.segment"}


def test_a_process_waits_for_the_one_that_reads(
    model: Model, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And reads nothing itself then."""
    begun, go_on, verify = threading.Event(), threading.Event(), Segment.verify_file

    def slow(self: Segment, *arguments: Any) -> None:
        begun.set()
        assert go_on.wait(300)
        verify(self, *arguments)

    monkeypatch.setattr(Segment, "verify_file", slow)
    threads = [threading.Thread(target=model.attach) for _ in range(2)]
    threads[0].start()
    assert begun.wait(300)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(300)
    assert read == ["1.segment"]


def test_who_holds_a_delta_is_not_waited_for(
    model: Model, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner holds those that other hosts ask for, as long as they do. It is read once, and noted."""
    monkeypatch.setattr(verified, "_WAIT_S", 0.0)
    apply(model, ChangeBatch(iter([TableChanges("t", np.array([1, 2]), rows_of(2, 8))])))
    (delta,) = attach_state(model, verify="header").deltas
    delta.hold()
    attach_state(model)
    assert (model.folder / "1+1.delta.verified").exists()
    attach_state(model)
    assert read.count("1+1.delta") == 1


@pytest.mark.drawn(0.5)
def test_a_process_that_reads_for_too_long_is_not_waited_for(
    model: Model, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "_WAIT_S", 0.0)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    holder = context.Process(target=hold, args=(model.path(1), theirs))
    holder.start()
    assert ours.recv() == "held"
    model.attach()
    assert read == ["1.segment"] and not (model.folder / "1.segment.verified").exists()
    ours.send("end")
    holder.join(300)
    model.attach()
    assert len(read) == 2 and (model.folder / "1.segment.verified").exists()


def hold(path: Path, pipe: Any) -> None:
    import fcntl

    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        pipe.send("held")
        pipe.recv()


def test_reading_rests_beside_requests(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: as many seconds of rest as are asked for each second of reading, by a thread
    that gives way to others."""
    from types import SimpleNamespace

    from tableside.loader.segment import segment as module

    spent = {"reading": 0.0, "rest": 0.0}
    niceness: set[int] = set()

    def read(*_: object) -> bool:
        spent["reading"] += 0.015
        niceness.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return True

    def rest(seconds: float) -> None:
        spent["rest"] += seconds

    attached = model.attach(verify="header")
    chunks = [(attached.header.tables[0], n, n + 1) for n in range(1000)]
    clock = SimpleNamespace(thread_time=lambda: spent["reading"], sleep=rest)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(Segment, "is_whole", read)
    monkeypatch.setattr(module, "_chunks", lambda stored: chunks)
    attached.verify(rest=9.0)
    assert spent["rest"] == pytest.approx(9 * spent["reading"])
    assert niceness == {max(10, os.nice(0))}
    before = spent["rest"]
    niceness.clear()
    attached.verify()
    assert spent["rest"] == before
    assert niceness == {os.nice(0)}
