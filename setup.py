"""The C extensions, which pyproject.toml cannot declare without a warning. Everything else is there."""

from collections.abc import Iterable
from pathlib import Path

from setuptools import Extension, setup

KERNEL, LAYERS = Path("quant/cpu"), Path("loader/program")
PARTS = ("", "_bags", "_tensors", "_index", "_pilots", "_overlay", "_jobs", "_batch", "_avx512", "_avx2", "_portable")


def extension(
    name: str, sources: Iterable[Path | str], *flags: str, headers: Iterable[Path] = (), link: Iterable[str] = ()
) -> Extension:
    """A module of C for every Python from 3.11 on. headers: which it is compiled anew after."""
    return Extension(
        f"tableside.{name}",
        sources=[*map(str, sources)],
        depends=sorted(map(str, headers)),
        extra_compile_args=[*flags, "-std=gnu11"],
        extra_link_args=[*link, "-s"],
        py_limited_api=True,
    )


kernel_sources = [KERNEL / f"_native{part}.c" for part in PARTS]
layers_sources = [LAYERS / f"_layers{part}.c" for part in ("", "_avx512", "_avx2", "_portable")]
kernel_headers, layers_headers = [*KERNEL.glob("*.h")], [*LAYERS.glob("*.h")]
headers_sources = ["serving/http/_headers.c", "serving/http/_match.c"]
fast = ("-O3", "-fno-math-errno")

setup(
    ext_modules=[
        extension("quant.cpu._native", kernel_sources, *fast, headers=kernel_headers, link=["-pthread"]),
        extension("loader.program._layers", layers_sources, *fast, headers=[*layers_headers, *kernel_headers], link=["-pthread"]),
        extension("serving.http._headers", headers_sources, "-O3", headers=[Path("serving/http/_headers.h")]),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
