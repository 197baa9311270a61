"""Files that are opened with care: what is no file is refused at once, in one line."""

import os
import socket
from pathlib import Path

import pytest

from tableside.loader.errors import LoaderError, ModelError
from tableside.loader.files import open_regular, read_regular
from tableside.loader.model.model import read_model


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(str(path))


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_fifo, "is a FIFO; expected a regular file"),
        (_socket, "is a socket; expected a regular file"),
        (_device, "is a device; expected a regular file"),
        (Path.mkdir, "is a folder; expected a regular file"),
        (lambda path: None, "No such file or directory; expected a readable file"),
        (lambda path: path.symlink_to(path), "Too many levels"),
    ],
    ids=["fifo", "socket", "device", "folder", "missing", "loop"],
)
def test_what_is_no_file_is_refused_at_once(make: object, message: str, tmp_path: Path) -> None:
    """Without waiting: nobody ever writes to the FIFO, and the device never ends."""
    make(tmp_path / "x")
    with pytest.raises(LoaderError, match=message) as found:
        open_regular(tmp_path / "x", "checkpoint")
    assert "\n" not in str(found.value) and str(tmp_path / "x") in str(found.value)
    with pytest.raises(ModelError, match="x"):
        read_model(tmp_path / "x")


@pytest.mark.parametrize("name", ["a\0b", "a" * 300, "a\ud800"])
def test_names_that_no_file_can_have(name: str, tmp_path: Path) -> None:
    for read in (lambda path: open_regular(path, "checkpoint"), read_model):
        with pytest.raises(LoaderError):
            read(tmp_path / name)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    """At the limit all of it; one byte more is an error, not a part of the file."""
    (tmp_path / "x").write_bytes(b"12345")
    assert read_regular(tmp_path / "x", 5, "index") == b"12345"
    with pytest.raises(ModelError, match="index is larger than 4 bytes"):
        read_regular(tmp_path / "x", 4, "index", ModelError)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LoaderError):
        open_regular(tmp_path, "checkpoint")
    assert len(os.listdir("/proc/self/fd")) == before
