"""The backends of the CPU by name, native on each instruction set."""

from collections.abc import Iterator

from reference import backend_of

from tableside.quant import CpuBackend
from tableside.quant.cpu import _native

ISAS = _native.isas()
BACKENDS = ["reference", "fbgemm", *(f"native-{isa}" for isa in ISAS)]


def cpu_backend(name: str) -> Iterator[CpuBackend]:
    """One of BACKENDS, for as long as it is iterated over."""
    name, _, isa = name.partition("-")
    if isa:
        _native.use(isa)
    yield backend_of(name)
    if isa:
        _native.use(ISAS[0])
