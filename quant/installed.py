"""Checks optional packages without importing them: what is installed, whether it fits together, and which
extra brings the rest."""

import os
from importlib import metadata
from importlib.util import find_spec

from tableside.quant.errors import MissingBackend, QuantError

PAIRS = {"1.6": "2.11", "1.7": "2.12", "1.8": "2.13", "1.9": "2.14"}  # fbgemm -> torch, by minor version


def version_of(*distributions: str) -> str | None:
    """The version of the first of `distributions` that is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def has_gpu() -> bool:
    """Whether this machine, or container, has a GPU of NVIDIA's; CUDA is not asked."""
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))


def fbgemm_version() -> str | None:
    return version_of("fbgemm-gpu-cpu", "fbgemm-gpu")


def require(what: str, *packages: str, extra: str) -> None:
    """Raises MissingBackend, naming the extra of tableside to install, if `what` lacks one of its
    packages."""
    if absent := [name for name in packages if not _is_there(name)]:
        raise MissingBackend(f"{what} needs {absent[0]}, which is not installed; install tableside[{extra}]")


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # what it is a part of is not there either
        return False


def check_pair(required: bool = True) -> None:
    """QuantError: torch and fbgemm do not match. MissingBackend: one is `required` and not installed."""
    torch, fbgemm = version_of("torch"), fbgemm_version()
    if torch is None or fbgemm is None:
        if not required:
            return
        missing = "torch" if torch is None else "fbgemm-gpu-cpu or fbgemm-gpu"
        raise MissingBackend(f"{missing} is not installed; install tableside[fbgemm]")
    if not pair_fits(fbgemm, torch):
        known = ", ".join(f"{f} with torch {t}" for f, t in PAIRS.items())
        raise QuantError(
            f"fbgemm {fbgemm} and torch {torch} do not belong together; install a pair that does: {known}"
        )


def pair_fits(fbgemm: str, torch: str) -> bool:
    """True if the two versions were built for each other."""
    return PAIRS.get(_minor(fbgemm)) == _minor(torch)


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])
