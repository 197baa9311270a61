"""Files of large tables that are not what the version says."""

import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from support import flip_bit
from table_files import PAGE, check, put, rewrite_header

from tableside.loader.errors import AccessError, LoaderError, SegmentError
from tableside.loader.load.load import Loaded
from tableside.loader.versions.versions import Model

Publish = Callable[..., Loaded]
pytestmark = pytest.mark.usefixtures("every_table_is_large")


def _swap(model: Model) -> None:
    """Gives table b of version 1 the file of another one."""
    (model.folder / "1.2.rows").unlink()
    shutil.copy(model.folder / "2.2.rows", model.folder / "1.2.rows")


WRONG: dict[str, tuple[Callable[[Model], object], type[LoaderError], str]] = {
    "missing": (
        lambda m: (m.folder / "1.2.rows").unlink(),
        SegmentError,
        r"1\.2\.rows is gone, the file of a table of \S+1\.segment",
    ),
    "of another version": (_swap, SegmentError, "not the file of table 'b' that the version names"),
    "of another table": (
        lambda m: shutil.copy(m.folder / "1.1.rows", (m.folder / "1.2.rows").resolve()),
        SegmentError,
        "not the file of table 'b' that the version names",
    ),
    "truncated": (
        lambda m: os.truncate(m.folder / "1.2.rows", PAGE - 1),
        SegmentError,
        "the file of table 'b' has 2097151 bytes; the version says 2097152",
    ),
    "its head flipped": (
        lambda m: flip_bit(m.folder / "1.2.rows", 17),
        SegmentError,
        "not the file of table 'b' that the version names",
    ),
    "a row flipped": (
        lambda m: flip_bit(m.folder / "1.2.rows", 4096 + 64 * 7),
        SegmentError,
        r"table 'b', rows \[0, 16384\): the checksum is wrong",
    ),
    "a link": (
        lambda m: (
            (m.folder / "1.2.rows").rename(m.folder / "x"),
            (m.folder / "1.2.rows").symlink_to(m.folder / "x"),
        ),
        AccessError,
        r"1\.2\.rows is a symbolic link",
    ),
    "of others": (
        lambda m: (m.folder / "1.2.rows").chmod(0o666),
        AccessError,
        "users other than .* can change it",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.drawn(4)
def test_a_wrong_file_is_refused_by_name(model: Model, again: Callable[..., Loaded], wrong: str) -> None:
    """Attached, activated or linked."""
    again("b")
    model.activate(1)
    damage, error, text = WRONG[wrong]
    damage(model)
    for call in (lambda: model.attach(1), lambda: again("a"), lambda: model.activate(1)):
        with pytest.raises(error, match=text):
            call()
    check(model, 2, "b")
    assert 3 not in model.versions()


LIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a name that is a list": (put(["a"], "tables", 0, "name"), "a file of table 'a'"),
    "a file's table is a list": (put(["a"], "files", 0, "table"), "or with no number"),
    "of no table": (put("d", "files", 0, "table"), "a file of table 'd'"),
    "a table twice": (put("a", "files", 1, "table"), "a file of table 'a'"),
    "another order": (put(lambda f: f[::-1], "files"), "expected a multiple of 4096 from 2097152 on"),
    "no number": (put("1", "files", 0, "checksum"), "or with no number"),
    "no bytes": (put(0, "files", 2, "bytes"), "expected a multiple of 4096"),
    "more than there is": (put(1 << 60, "files", 2, "bytes"), "expected a multiple of 4096"),
    "4 TiB": (put(1 << 42, "files", 2, "bytes"), "the version says 4398046511104"),
    "a table over the head": (put(lambda at: at - 4096, "tables", 0, "offset"), "table 'a' lies at bytes"),
    "a table in another's file": (put(lambda at: at + PAGE, "tables", 0, "offset"), "table 'a' lies at"),
    "a table in the segment": (put(8192, "tables", 0, "offset"), "table 'a' lies at bytes"),
    "another checksum": (put(5, "files", 0, "checksum"), "not the file of table 'a'"),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.drawn(3)
def test_a_header_that_lies_about_files_is_refused(model: Model, lie: str) -> None:
    change, text = LIES[lie]
    rewrite_header(model.path(1), change)
    with pytest.raises(SegmentError, match=text):
        model.attach(1, "header")


def test_a_segment_of_no_whole_pages_before_files_is_refused(model: Model) -> None:
    def change(header: dict[str, Any]) -> None:
        for file in header["files"]:
            file["offset"] -= 100

    rewrite_header(model.path(1), change, PAGE - 100)
    with pytest.raises(SegmentError, match="the segment has 2097052 bytes before files of tables"):
        model.attach(1, "header")
