"""Numbers: row formats, quantize, dequantize and lookup on packed rows.

Knows nothing of files, processes, settings or HTTP. Four backends share one contract (`quant.contract.Backend`):
`reference` (plain torch, the specification), `fbgemm`, `native` (our own CPU kernel) and `fused` (our own GPU kernel).
"""

from tableside.quant.backends import backend_names, choose
from tableside.quant.contract import Backend, CpuBackend, DeviceTable, Lookup, Plan, Pooling, Precision, Table
from tableside.quant.errors import BadIds, MissingBackend, QuantError
from tableside.quant.row_format import RowFormat, Source

__all__ = [
    "Backend",
    "BadIds",
    "CpuBackend",
    "DeviceTable",
    "Lookup",
    "MissingBackend",
    "Plan",
    "Pooling",
    "Precision",
    "QuantError",
    "RowFormat",
    "Source",
    "Table",
    "backend_names",
    "choose",
]
