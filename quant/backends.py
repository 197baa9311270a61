"""Picks a backend, openly: its name is in the log and in the metadata, and it is never replaced."""

from functools import cache

from tableside.quant.cpu.backend import CpuBackend
from tableside.quant.cpu.native import Native
from tableside.quant.errors import QuantError
from tableside.quant.installed import check_pair

BACKENDS = ("native", "fbgemm")


@cache
def choose(name: str = "native") -> CpuBackend:
    """The backend `name`.

    MissingBackend: it is not part of this installation. QuantError: no such backend, or the installed fbgemm
    and torch do not belong together, whichever backend is asked for: an installation that is broken is
    refused at the start.
    """
    if name not in BACKENDS:
        raise QuantError(f"backend {name!r} is unknown; expected one of: {', '.join(BACKENDS)}")
    check_pair(required=name == "fbgemm")
    if name == "native":
        return Native()
    from tableside.quant.cpu.fbgemm import Fbgemm

    return Fbgemm()
