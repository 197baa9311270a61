"""Row formats, quantize, dequantize and lookup on packed rows; no files, processes, settings or HTTP.
Three backends share one contract (`quant.contract.Backend`): our CPU kernel, FBGEMM and our GPU kernel.
tests/helpers/reference.py is their specification. Imports go one way: contract <- cpu <- device <- cache <-
gpu."""

from tableside.quant.backends import choose
from tableside.quant.contract import (
    Backend,
    Lookup,
    LookupKind,
    Place,
    Plan,
    Planner,
    Pooling,
    Precision,
    RowSource,
    Table,
)
from tableside.quant.cpu.backend import CpuBackend
from tableside.quant.errors import BadIds, MissingBackend, QuantError
from tableside.quant.row_format import RowFormat, Source

__all__ = [
    "Backend",
    "BadIds",
    "CpuBackend",
    "Lookup",
    "LookupKind",
    "MissingBackend",
    "Place",
    "Plan",
    "Planner",
    "Pooling",
    "Precision",
    "QuantError",
    "RowFormat",
    "RowSource",
    "Source",
    "Table",
    "choose",
]
