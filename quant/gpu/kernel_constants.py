"""Fields, formats and precisions as Triton's kernels read them: `JOB_TABLE`, `FORMAT_INT8`, `AS_FP16`, … for each name;
`MAP_FIRST`, … are the fields of a NativeRowMap, and `HASH_MIX`, … the constants of the id index."""

import triton.language as tl

from tableside.quant import ids
from tableside.quant.contract import Precision
from tableside.quant.device.launch import constants
from tableside.quant.gpu.job import FIELDS, FillField, JobField, ReportField, ResolveField, TensorField
from tableside.quant.row_format import RowFormat

globals().update(constants("JOB", JobField) | constants("FORMAT", RowFormat) | constants("AS", Precision))
globals().update(constants("RESOLVE", ResolveField) | constants("REPORT", ReportField) | constants("FILL", FillField))
globals().update(constants("TENSOR", TensorField, first=FIELDS))  # behind a job's fields
globals().update({f"MAP_{name.upper()}": tl.constexpr(n) for n, name in enumerate(ids.NativeRowMap._fields)})
globals().update({f"HASH_{name}": tl.constexpr(getattr(ids, name)) for name in ("MIX", "SEED", "SPREAD", "PILOT", "SLOT")})
