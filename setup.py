"""What is compiled, which pyproject.toml cannot declare without a warning. Everything else is there.

Five extensions of Python's, and `libtableside`, the library for programs in C (tableside/tableside.h). The
kernels are compiled once, as a static library that both of those that read rows take in.
"""

from pathlib import Path

from setuptools import Extension, setup

KERNEL, ABI = "quant/cpu/kernel", "loader/native"
FAST = ("-O3", "-fno-math-errno")
HIDDEN = "-fvisibility=hidden"
SHARED = sorted(str(file) for folder in (KERNEL, ABI) for file in Path(folder).glob("*.[ch]"))


def extension(name: str, sources: str, *flags: str, threads: bool = False, linked: str = "") -> Extension:
    """A module of the C files of a folder, for every Python from 3.11 on. linked: what programs that are
    linked with it ask for."""
    return Extension(
        f"tableside.{name}",
        sources=sorted(map(str, Path(sources).glob("*.c"))),
        include_dirs=[sources, KERNEL, ABI],
        depends=[*SHARED, *map(str, Path(sources).glob("*.h"))],
        extra_compile_args=[*flags, HIDDEN, "-std=gnu11"],
        extra_link_args=[
            *(["-pthread"] if threads else []),
            *([f"-Wl,-soname,{linked}"] if linked else []),
            "-s",
        ],
        py_limited_api=True,
    )


kernels = {
    "sources": sorted(map(str, Path(KERNEL).glob("*.c"))),
    "include_dirs": [KERNEL],
    "obj_deps": {"": SHARED},
    "cflags": [*FAST, HIDDEN, "-fPIC", "-std=gnu11"],
}

setup(
    libraries=[("tableside_kernels", kernels)],
    ext_modules=[
        extension("quant.cpu._native", "quant/cpu/native", *FAST, threads=True),
        extension("loader.program._layers", "loader/program/native", *FAST, threads=True),
        extension("loader.segment._blocks", "loader/segment/native", "-O3", threads=True),
        extension("loader.redis._records", "loader/redis/native", "-O3"),
        extension("serving.http.v2._reader", "serving/http/v2/native", "-O3"),
        extension("libtableside", ABI, *FAST, threads=True, linked="libtableside.abi3.so"),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
