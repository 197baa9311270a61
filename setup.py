"""The native kernels, and the routine that understands headers, which pyproject.toml cannot declare without a warning.

Everything else is there. TABLESIDE_NATIVE=required: the build fails where they do not compile. Else they are left out, and
`tableside serve` says so.
"""

import os
from pathlib import Path

from setuptools import Extension, setup

KERNEL, LAYERS = Path("quant/cpu"), Path("loader/program")
PARTS = ("", "_bags", "_tensors", "_index", "_overlay", "_jobs", "_batch", "_avx512", "_avx2", "_portable")
OPTIONAL = os.environ.get("TABLESIDE_NATIVE") != "required"

setup(
    ext_modules=[
        Extension(
            "tableside.quant.cpu._native",
            sources=[str(KERNEL / f"_native{part}.c") for part in PARTS],
            depends=sorted(map(str, KERNEL.glob("*.h"))),
            extra_compile_args=["-O3", "-std=gnu11", "-fno-math-errno"],
            extra_link_args=["-pthread", "-s"],
            py_limited_api=True,
            optional=OPTIONAL,
        ),
        Extension(
            "tableside.loader.program._layers",
            sources=[str(LAYERS / f"_layers{part}.c") for part in ("", "_avx512", "_avx2", "_portable")],
            depends=sorted(map(str, (*LAYERS.glob("*.h"), *KERNEL.glob("*.h")))),
            extra_compile_args=["-O3", "-std=gnu11", "-fno-math-errno"],
            extra_link_args=["-pthread", "-s"],
            py_limited_api=True,
            optional=OPTIONAL,
        ),
        Extension(
            "tableside.serving.http._headers",
            sources=["serving/http/_headers.c"],
            extra_compile_args=["-O3", "-std=gnu11"],
            extra_link_args=["-s"],
            py_limited_api=True,
            optional=OPTIONAL,
        ),
        Extension(
            "tableside.serving._mapping",
            sources=["serving/_mapping.c"],
            extra_compile_args=["-O2", "-std=gnu11"],
            extra_link_args=["-s"],
            py_limited_api=True,
            optional=OPTIONAL,
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
