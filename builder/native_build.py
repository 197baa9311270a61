"""The build backend: setuptools' own, which also builds wheels for an old glibc.

A checkout is built by the machine's C compiler.

    pip wheel --config-settings=glibc=2.17 .

builds with `ziglang` (clang in a wheel from PyPI) instead, for this processor and that release of glibc or a
newer one; with `--config-settings=processor=aarch64` too for that processor. pip installs it into the folder
that it builds in and then removes.
"""

import os
import platform
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
    get_requires_for_build_editable,
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


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    zig = [ZIG] if _glibc(config_settings) else []
    return [*build_meta.get_requires_for_build_wheel(_for_setuptools(config_settings)), *zig]


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    with _compiler(_glibc(config_settings), (config_settings or {}).get("processor", platform.machine())):
        return build_meta.build_wheel(wheel_directory, _for_setuptools(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    with warnings.catch_warnings():
        # setuptools warns of a folder that is called as the package is, which a checkout has and means to
        # have.
        warnings.filterwarnings("ignore", ".*Editable installation", InformationOnly)
        return build_meta.build_editable(wheel_directory, config_settings, metadata_directory)


def _glibc(settings: Settings) -> str | None:
    return (settings or {}).get("glibc")


def _for_setuptools(settings: Settings) -> dict[str, str]:
    ours = "glibc", "processor"
    return {name: value for name, value in (settings or {}).items() if name not in ours}


@contextmanager
def _compiler(glibc: str | None, processor: str) -> Iterator[None]:
    """The environment variables by which setuptools compiles for this glibc and processor; None: those that
    are there."""
    if glibc is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tableside-zig-") as cache:
        # Debian's Python.h includes a header of the folder above its own, which zig does not search for
        # another target.
        above = Path(sysconfig.get_path("include")).parent
        command = f"{sys.executable} -m ziglang cc -target {processor}-linux-gnu.{glibc} -idirafter {above}"
        # without the options of the compiler that Python was built with, which zig refuses
        linker = f"{command} -shared"
        before = dict(os.environ)
        os.environ |= {"CC": command, "LDSHARED": linker, "ZIG_GLOBAL_CACHE_DIR": cache}
        os.environ["_PYTHON_HOST_PLATFORM"] = f"linux-{processor}"  # which the wheel's name says
        try:
            yield
        finally:
            os.environ.clear()
            os.environ |= before
