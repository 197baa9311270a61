"""A folder of files of changes: each file once, in order, and a number that is left out is an error that
names both."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tableside.loader.deltas.changes import ChangeBatch
from tableside.serving.errors import SourceError
from tableside.serving.follow.folder import FolderSource
from tableside.serving.follow.loop import open_source


def put(folder: Path, number: int | str, ids: list[int], suffix: str = "jsonl") -> Path:
    """Writes a file under another name, and renames it."""
    path, partial = folder / f"{number}.{suffix}", folder / f"{number}.partial"
    if suffix == "npz":
        with partial.open("wb") as file:
            np.savez(file, **{"user.ids": ids, "user.vectors": np.ones((len(ids), 2))})  # type: ignore[arg-type]
    else:
        partial.write_text(
            "".join(json.dumps({"table": "user", "id": i, "vector": [1, 2]}) + "\n" for i in ids)
        )
    partial.rename(path)
    return path


def opened(folder: Path, start: str = "start") -> Any:
    return open_source(str(folder), None, None, start, lambda: False)


def test_a_file_is_a_group(tmp_path: Path) -> None:
    """For a model over several hosts; it says what is in it."""
    for number in (1, 2):
        put(tmp_path, number, [number])
    source = open_source(str(tmp_path), None, None, "start", lambda: False, 1.0)
    first, second = source.read(None, 100, 0), source.read("1", 100, 0)
    assert ids(first) == [1] and ids(second) == [2] and first is not None and second is not None
    assert first.is_group_end and first.group != second.group
    put(tmp_path, 1, [5])
    other = source.read(None, 100, 0)
    assert other is not None and [str(one).split()[0] for one in (*other.passed, *first.passed)] == ["1", "1"]
    assert other.passed != first.passed
    assert opened(tmp_path).read(None, 100, 0).passed == ()


def ids(batch: ChangeBatch | None) -> list[int]:
    assert batch is not None
    return [int(i) for c in batch.changes for i in c.ids]


def test_files_are_read_in_order_each_once(tmp_path: Path) -> None:
    """Several make a batch, whose position is the last one's number, and which is as old as the first one."""
    for number, suffix in ((9, "jsonl"), (10, "npz"), (11, "npz")):
        os.utime(put(tmp_path, number, [number, number + 100], suffix), (number, number))
    put(tmp_path, "notes", [1])
    source = opened(tmp_path)
    assert source.name == f"folder:{tmp_path}"
    batch = source.read(None, 1000, 0)
    assert (batch.source, batch.after, batch.position, batch.made_at) == (source.name, None, "9", 9)
    assert ids(batch) == [9, 109]  # a .jsonl does not say how many rows it has, so it is a batch
    batch = source.read("9", 1000, 0)
    assert (batch.after, batch.position, ids(batch)) == ("9", "11", [10, 110, 11, 111])
    assert source.read("11", 1000, 0) is None
    assert ids(source.read("9", 2, 0)) == [10, 110], "2 rows are enough"
    assert ids(source.read("10", 2, 0)) == [11, 111], "also where that was read before"


def test_a_file_that_comes_is_waited_for(tmp_path: Path) -> None:
    source = opened(tmp_path)
    timer = threading.Timer(0.2, lambda: put(tmp_path, 1, [5]))
    timer.start()
    assert ids(source.read(None, 1, 30)) == [5]
    timer.join()


@pytest.mark.parametrize(("start", "first"), [("start", 4), ("5", 6), ("end", None)])
def test_where_it_begins(start: str, first: int | None, tmp_path: Path) -> None:
    """Where no position is kept; what is kept counts before that."""
    for number in (4, 5, 6):
        put(tmp_path, number, [number], "npz")
    source = opened(tmp_path, start)
    batch = source.read(None, 1, 0)
    assert (batch and batch.position) == (first and str(first))
    assert source.read("4", 1, 0).position == "5"
    if start == "end":
        put(tmp_path, 7, [7])
        assert ids(source.read(None, 1, 0)) == [7]


def test_a_number_that_is_left_out_is_an_error(tmp_path: Path) -> None:
    for number in (1, 2, 5):
        put(tmp_path, number, [number], "npz")
    source = opened(tmp_path)
    with pytest.raises(
        SourceError, match=r"the file after number 2 is number 5; expected 3; .* --reset --from 4"
    ):
        source.read("2", 1, 0)
    put(tmp_path, 3, [3], "npz")
    assert ids(source.read("2", 1, 0)) == [3], "and is read when it comes after all"


def test_a_file_that_the_folder_did_not_show_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is read while files come may show a later one alone; it is read again before that is
    called a gap."""
    source = opened(tmp_path)
    put(tmp_path, 4, [4], "npz")
    later = put(tmp_path, 5, [5], "npz")
    monkeypatch.setattr(FolderSource, "_changed", lambda _: {5: later})
    assert source.read("3", 1, 0).position == "4"
    assert source.read(None, 1, 0).position == "4"


def test_two_files_of_one_number_are_an_error(tmp_path: Path) -> None:
    put(tmp_path, 1, [1])
    put(tmp_path, "01", [1], "npz")
    with pytest.raises(SourceError, match="have one number; expected one file of each"):
        opened(tmp_path).read(None, 1, 0)


def test_what_is_no_folder_and_no_number(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there is no such folder"):
        opened(tmp_path / "a")
    with pytest.raises(SourceError, match="a position is the number of a file; found '1-1'"):
        opened(tmp_path, "1-1")


def test_a_follower_that_shall_stop_does_not_wait(tmp_path: Path) -> None:
    source = open_source(str(tmp_path), None, None, "start", lambda: True)
    began = time.monotonic()
    assert source.read(None, 1, 3600) is None
    assert time.monotonic() - began < 300
