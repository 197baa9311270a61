"""Picks a backend, openly: what `auto` chose is in the log and in the metadata, and a named one is never replaced."""

from functools import cache
from importlib import import_module
from typing import cast

from tableside.quant.cpu.backend import CpuBackend
from tableside.quant.errors import MissingBackend, QuantError
from tableside.quant.installed import check_pair

_CLASSES = {"native": "Native", "fbgemm": "Fbgemm", "reference": "Reference"}
_AUTO = ("native", "fbgemm")


def backend_names() -> tuple[str, ...]:
    """What `choose` takes."""
    return ("auto", *_CLASSES)


@cache
def choose(name: str = "auto") -> CpuBackend:
    """The backend `name`; `auto`: the native kernel where it was built, else FBGEMM.

    MissingBackend: it is not part of this installation. QuantError: no such backend, or the installed fbgemm and torch do
    not belong together, whichever backend is asked for: an installation that is broken is refused at the start.
    """
    check_pair(required=False)
    if name == "auto":
        missing = []
        for candidate in _AUTO:
            try:
                return choose(candidate)
            except MissingBackend as error:
                missing.append(str(error))
        raise MissingBackend("no backend is installed: " + "; ".join(missing))
    if name not in _CLASSES:
        raise QuantError(f"backend {name!r} is unknown; expected one of: {', '.join(backend_names())}")
    module = import_module(f"tableside.quant.cpu.{name}")
    return cast(CpuBackend, getattr(module, _CLASSES[name])())
