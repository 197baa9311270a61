"""Fields, formats and precisions as Triton's kernels read them: `JOB_TABLE`, `FORMAT_INT8`, `AS_FP16`, … for each name."""

from tableside.quant.contract import Precision
from tableside.quant.device.launch import constants
from tableside.quant.gpu.job import JobField
from tableside.quant.row_format import RowFormat

globals().update(constants("JOB", JobField) | constants("FORMAT", RowFormat) | constants("AS", Precision))
