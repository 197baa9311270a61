"""The build backend: setuptools' own, which also sees to a C compiler for the native kernel.

A machine that has a compiler uses it. For one that has none, pip installs `ziglang` (clang in a wheel from PyPI) into the
folder that it builds in and then removes. So `pip install` of a checkout needs Python with Python.h and nothing else.

    pip wheel --config-settings=glibc=2.17 .

always builds with `ziglang`, for x86-64 and that release of glibc or a newer one, and fails where the kernel does not compile
(elsewhere the kernel is left out then, and `tableside serve` warns of that).
"""

import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)
from setuptools.warnings import InformationOnly

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = Mapping[str, str] | None
ZIG = "ziglang>=0.13"
OLDEST_GLIBC = "2.17"  # manylinux2014: what zig builds for where nobody asks for another


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_wheel(_for_setuptools(config_settings)), *_compiler(config_settings)]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*build_meta.get_requires_for_build_editable(_for_setuptools(config_settings)), *_compiler(config_settings)]


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    with _environment(config_settings):
        return build_meta.build_wheel(wheel_directory, _for_setuptools(config_settings), metadata_directory)


def build_editable(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    with _environment(config_settings), warnings.catch_warnings():
        # setuptools warns of a folder that is called as the package is, which a checkout has and means to have.
        warnings.filterwarnings("ignore", ".*Editable installation", InformationOnly)
        return build_meta.build_editable(wheel_directory, _for_setuptools(config_settings), metadata_directory)


def _glibc(settings: Settings) -> str | None:
    return (settings or {}).get("glibc")


def _for_setuptools(settings: Settings) -> dict[str, str]:
    return {name: value for name, value in (settings or {}).items() if name != "glibc"}


def _compiler(settings: Settings) -> list[str]:
    """What pip installs to compile with."""
    is_here = "CC" in os.environ or any(map(shutil.which, ("cc", "gcc", "clang")))
    return [ZIG] if _glibc(settings) or not is_here else []


@contextmanager
def _environment(settings: Settings) -> Iterator[None]:
    """The environment variables that setuptools and setup.py compile by."""
    variables = {}
    with tempfile.TemporaryDirectory(prefix="tableside-zig-") as cache:
        if _compiler(settings):
            target = f"{platform.machine()}-linux-gnu.{_glibc(settings) or OLDEST_GLIBC}"
            # Debian's Python.h includes a header of the folder above its own, which zig does not search for another target.
            above = Path(sysconfig.get_path("include")).parent
            command = f"{sys.executable} -m ziglang cc -target {target} -idirafter {above}"
            linker = f"{command} -shared"  # without the options of the compiler that Python was built with, which zig refuses
            variables |= {"CC": command, "LDSHARED": linker, "ZIG_GLOBAL_CACHE_DIR": cache}
        if _glibc(settings):
            variables["TABLESIDE_NATIVE"] = "required"
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
