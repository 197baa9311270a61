"""`make test-sanitized` would see a bug: planted ones end the process with a report that names the line."""

import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

TOP = Path(__file__).parent.parent
PLANTED = """
#include <stdint.h>
#include <stdlib.h>
int past_the_end(const char *bytes, long n) { return bytes[n]; }
int overflow(int x) { return x * 2; }
int shift(int x) { return 1 << x; }
int misaligned(const char *bytes, long n) { return *(const int32_t *)(bytes + n); }
int to_integer(int x) { return (int)((float)x * 4.0f); }
int freed(int x) { volatile char *p = malloc(8); p[0] = 1; free((void *)p); return p[0]; }
"""


def the_builder() -> ModuleType:
    """builder/sanitized.py as a module."""
    spec = spec_from_file_location("sanitized", TOP / "builder" / "sanitized.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with bugs, compiled as extensions are."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.c").write_text(PLANTED)
    builder = the_builder()
    try:
        builder.check_gcc()
    except builder.Unavailable as absent:
        pytest.skip(str(absent))
    # Python's own option for extensions comes first, as setuptools puts it there.
    command = ["gcc", "-shared", "-fPIC", "-fwrapv", *builder.COMPILED_WITH, "planted.c", "-o", "planted.so"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "planted.so"


def call(library: Path, reports: Path, what: str) -> tuple[int, str]:
    """A process that makes one call, and keeps what it writes to itself: its exit code and its report."""
    script = f"import ctypes; ctypes.CDLL({str(library)!r}).{what}"
    variables = the_builder().environment(library, reports, os.environ)
    code = subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, check=False
    ).returncode
    return code, "".join(report.read_text() for report in reports.iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("what", "report"),
    [
        ("past_the_end(b'abc', 4)", "heap-buffer-overflow"),
        ("overflow(2**31 - 1)", "signed integer overflow"),
        ("shift(40)", "shift exponent 40 is too large"),
        ("misaligned(b'abcdefghi', 1)", "misaligned address"),
        ("to_integer(2**30)", "outside the range of representable values"),
        ("freed(1)", "heap-use-after-free"),
    ],
)
def test_a_planted_bug_ends_the_process_and_is_reported(
    planted: Path, tmp_path: Path, what: str, report: str
) -> None:
    code, found = call(planted, tmp_path, what)
    assert code != 0
    assert report in found
    assert re.search(r"planted\.c:\d+", found)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "what", ["past_the_end(b'abc', 3)", "overflow(5)", "shift(3)", "misaligned(b'abcdefghi', 0)"]
)
def test_what_is_no_bug_is_not_reported(planted: Path, tmp_path: Path, what: str) -> None:
    """A bytes object ends with a zero that is its own."""
    assert call(planted, tmp_path, what) == (0, "")


def test_without_gcc_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    builder = the_builder()
    with pytest.raises(builder.Unavailable, match=r"gcc is not on the PATH.* apt-get install gcc"):
        builder.check_gcc()


def test_without_a_sanitizers_library_the_error_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """gcc answers with the bare name where it has no such file."""
    (tmp_path / "gcc").write_text("#!/bin/sh\necho libasan.so\n")
    (tmp_path / "gcc").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    builder = the_builder()
    with pytest.raises(builder.Unavailable, match=r"has no libasan\.so.* apt-get install gcc"):
        builder.check_gcc()
