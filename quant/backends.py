"""Picks a backend, openly: its name is in the log and in the metadata, and it is never replaced."""

from functools import cache

from tableside.quant.cpu.backend import CpuBackend
from tableside.quant.cpu.native import Native
from tableside.quant.errors import QuantError
from tableside.quant.installed import check_pair

BACKENDS = ("native", "fbgemm")


@cache
def choose(name: str = "native") -> CpuBackend:
    """Returns the backend `name`. MissingBackend: it is not installed. QuantError: the name is unknown, or
    the installed fbgemm and torch do not match (checked for every backend, so that a broken installation
    fails at start)."""
    if name not in BACKENDS:
        raise QuantError(f"backend {name!r} is unknown; expected one of: {', '.join(BACKENDS)}")
    check_pair(required=name == "fbgemm")
    if name == "native":
        return Native()
    from tableside.quant.cpu.fbgemm import Fbgemm

    return Fbgemm()
