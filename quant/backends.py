"""Picks a backend, openly: what `auto` chose is in the log and in the metadata, and a named one is never replaced."""

import logging
from functools import cache
from importlib import import_module
from typing import cast

from tableside.quant.cpu.backend import CpuBackend
from tableside.quant.errors import MissingBackend, QuantError
from tableside.quant.installed import check_pair, require

_CLASSES = {"native": "Native", "fbgemm": "Fbgemm", "reference": "Reference"}
_AUTO = ("native", "fbgemm")
_BUILD_NATIVE = "install tableside's wheel, or install Python.h (Debian: python3-dev) and then tableside again"

logger = logging.getLogger("tableside")


def backend_names() -> tuple[str, ...]:
    """What `choose` takes."""
    return ("auto", *_CLASSES)


@cache
def choose(name: str = "auto") -> CpuBackend:
    """The backend `name`; `auto`: the native kernel where it was built, else FBGEMM, with a warning that says what to do.

    MissingBackend: it is not part of this installation. QuantError: no such backend, or the installed fbgemm and torch do
    not belong together, whichever backend is asked for: an installation that is broken is refused at the start.
    """
    check_pair(required=False)
    if name == "auto":
        return _first()
    if name not in _CLASSES:
        raise QuantError(f"backend {name!r} is unknown; expected one of: {', '.join(backend_names())}")
    if name == "fbgemm":
        check_pair()
    if name == "reference":
        require("the reference backend", "torch", extra="torch")
    module = import_module(f"tableside.quant.cpu.{name}")
    return cast(CpuBackend, getattr(module, _CLASSES[name])())


@cache
def _first() -> CpuBackend:
    """The fastest backend that is installed."""
    missing = []
    for candidate in _AUTO:
        try:
            backend = choose(candidate)
        except MissingBackend as error:
            missing.append(str(error))
            continue
        if missing:
            logger.warning(
                "the native kernel is not part of this installation, so lookups and loads run on %s and take several times as "
                "long; %s", backend.description, _BUILD_NATIVE
            )  # fmt: skip
        return backend
    raise MissingBackend(
        f"nothing that looks rows up is installed; for the native kernel, {_BUILD_NATIVE}; for FBGEMM's, install "
        "tableside[fbgemm]"
    )
