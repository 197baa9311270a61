"""A stand-in for CUDA's driver: a library of its name that knows two devices and launches nothing."""

import re
import subprocess
from pathlib import Path

import pytest
from triton.backends import nvidia

_KNOWN = """
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return number < 2 ? 0 : 101; }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{ *value = attribute == 75 ? %d : %d; return 0; }
"""
_NOT_SUPPORTED = 801


def stand_in_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    """Puts it where processes that are started from now on find it. major, minor: its devices' compute
    capability."""
    source = _KNOWN % (major, minor)
    sources = [Path(nvidia.__path__[0]) / name for name in ("driver.c", "driver.py")]
    called = {
        name for file in sources for name in re.findall(r"\bcu[A-Z]\w+(?=\()", file.read_text())
    }  # by Triton
    source += "".join(
        f"int {name}(void) {{ return {_NOT_SUPPORTED}; }}\n"
        for name in sorted(called)
        if f"{name}(" not in source
    )
    (folder / "driver.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "driver.c"], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(folder))
