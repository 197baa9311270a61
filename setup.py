"""The C extensions, which pyproject.toml cannot declare without a warning. Everything else is there."""

from pathlib import Path

from setuptools import Extension, setup

KERNEL = "quant/cpu/kernel"  # headers that the extensions of rows and of dense layers share
FAST = ("-O3", "-fno-math-errno")


def extension(name: str, sources: str, *flags: str, threads: bool = False) -> Extension:
    """A module of the C files of a folder, for every Python from 3.11 on."""
    return Extension(
        f"tableside.{name}",
        sources=sorted(map(str, Path(sources).glob("*.c"))),
        include_dirs=[sources, KERNEL],
        depends=sorted(str(h) for folder in (sources, KERNEL) for h in Path(folder).glob("*.h")),
        extra_compile_args=[*flags, "-std=gnu11"],
        extra_link_args=[*(["-pthread"] if threads else []), "-s"],
        py_limited_api=True,
    )


setup(
    ext_modules=[
        extension("quant.cpu._native", "quant/cpu/native", *FAST, threads=True),
        extension("loader.program._layers", "loader/program/native", *FAST, threads=True),
        extension("loader.segment._blocks", "loader/segment/native", "-O3"),
        extension("serving.http.v2._reader", "serving/http/v2/native", "-O3"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
