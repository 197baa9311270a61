"""The native kernel, which pyproject.toml cannot declare without a warning. Everything else is there.

TABLESIDE_NATIVE=required: the build fails where the kernel does not compile. Else the kernel is left out, and `tableside serve`
says so.
"""

import os
from pathlib import Path

from setuptools import Extension, setup

KERNEL = Path("quant/cpu")

setup(
    ext_modules=[
        Extension(
            "tableside.quant.cpu._native",
            sources=[str(KERNEL / f"_native{part}.c") for part in ("", "_avx512", "_avx2", "_portable")],
            depends=sorted(map(str, KERNEL.glob("*.h"))),
            extra_compile_args=["-O3", "-std=gnu11", "-fno-math-errno"],
            extra_link_args=["-pthread", "-s"],
            py_limited_api=True,
            optional=os.environ.get("TABLESIDE_NATIVE") != "required",
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
