"""Lookups on the CPU: the native kernel, and FBGEMM's operators."""

try:
    from tableside.quant.cpu import _native as _native
except ImportError as error:
    raise ImportError(
        f"tableside's C extensions do not import ({error}); install its wheel, or build a checkout with a C "
        "compiler and "
        "Python.h: pip install ."
    ) from error
