"""Fields, formats and precisions as Triton constants: `JOB_TABLE`, `FORMAT_INT8`, `AS_FP16`, …; `MAP_FIRST`,
… (NativeRowMap), `LAYER_IDS`, … (NativeLayer), `HASH_MIX`, … (id index), FILTER_FACTOR, FILTER_BIT_0, …
(overlay filters)."""

import triton.language as tl

from tableside.quant.contract import Precision
from tableside.quant.device.launch import constants
from tableside.quant.gpu.kernels.job import (
    FIELDS,
    FillField,
    JobField,
    ReportField,
    ResolveField,
    TensorField,
)
from tableside.quant.row_format import RowFormat
from tableside.quant.rows import ids, overlay

globals().update(constants("JOB", JobField) | constants("FORMAT", RowFormat) | constants("AS", Precision))
globals().update(
    constants("RESOLVE", ResolveField) | constants("REPORT", ReportField) | constants("FILL", FillField)
)
globals().update(constants("TENSOR", TensorField, first=FIELDS))  # behind a job's fields
globals().update({f"MAP_{name.upper()}": tl.constexpr(n) for n, name in enumerate(ids.NativeRowMap._fields)})
globals().update(
    {f"HASH_{name}": tl.constexpr(getattr(ids, name)) for name in ("MIX", "SEED", "SPREAD", "PILOT", "SLOT")}
)
globals().update(
    {f"LAYER_{name.upper()}": tl.constexpr(n) for n, name in enumerate(overlay.NativeLayer._fields)}
)
globals().update({"LAYER_SIZE": tl.constexpr(len(overlay.NativeLayer._fields))})
globals().update({"FILTER_FACTOR": tl.constexpr(overlay.FILTER)})
globals().update({f"FILTER_BIT_{n}": tl.constexpr(shift) for n, shift in enumerate(overlay.FILTER_BITS)})
