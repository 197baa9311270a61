"""Numbers: row formats, quantize, dequantize and lookup on packed rows.

Knows nothing of files, processes, settings or HTTP. Three backends share one contract (`quant.contract.Backend`):
`reference` (plain torch, the specification), `fbgemm` and `native` (our own CPU kernel).
"""

from quant.backends import backend_names, choose
from quant.contract import Backend, Lookup, Plan, Pooling, Table
from quant.errors import BadIds, MissingBackend, QuantError
from quant.row_format import RowFormat, Source

__all__ = [
    "Backend",
    "BadIds",
    "Lookup",
    "MissingBackend",
    "Plan",
    "Pooling",
    "QuantError",
    "RowFormat",
    "Source",
    "Table",
    "backend_names",
    "choose",
]
