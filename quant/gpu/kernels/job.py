"""A lookup for the GPU's kernels: a row of int64 fields, `JobField`; before it, if the table maps ids, a row
for the resolve kernel, `ResolveField`. Imports neither torch nor Triton."""

from enum import IntEnum

SPLIT_BLOCK = 1024  # rows; a split table has the first `share` rows of each block in HBM


class JobField(IntEnum):
    """Fields of a job. Offsets are bytes in the named buffer; -1: absent."""

    TABLE = 0  # address of row 0, or of the first gathered row
    # of the table, or gathered rows; ids must be below, both as uint64. -1: any id but -1, as the table has
    # an overlay
    ROWS = 1
    ROW_BYTES = 2
    DIM = 3
    FORMAT = 4  # a RowFormat
    MEAN = 5  # 1: sums are divided by the bag's length
    IDS_AT = 6  # offset in inputs, int64 [ids]; -1: id i of the job reads row i
    IDS = 7
    LENGTHS_AT = 8  # offset in inputs, int32 [bags]; -1: every bag has BAG_LENGTH ids
    BAG_LENGTH = 9
    VECTORS = 10  # that the job writes: bags, or ids where it is not pooled
    WEIGHTS_AT = 11  # offset in inputs, fp32 [ids]
    OUT_AT = 12  # offset in outputs, [VECTORS, DIM] of PRECISION, OUT_STEP values apart
    PRECISION = 13  # a Precision
    FIRST_PROGRAM = 14  # of the launch, that works on this job
    # index in scratch, int32 [2 + VECTORS]: a verdict, then where each bag starts, then where the last one
    # ends
    STARTS_AT = 15
    HBM_ROWS = 16  # address of slot 0 of the cache, or of the first HBM row of a split table
    # offset in locations, int32 [ids], which the cache writes (see the kernel's _row_address); -1: no cache
    LOCATIONS_AT = 17
    HBM_SHARE = 18  # rows of each SPLIT_BLOCK that are in HBM; 0: the table is not split
    OUT_STEP = 19  # values from one output vector to the next; DIM where they lie one after another


class TensorField(IntEnum):
    """Fields behind JobField's for a caller's tensors on the device."""

    OFFSETS_AT = 0  # offset in offsets, of where the first bag begins; -1: every bag has BAG_LENGTH ids
    OFFSET_BYTES = 1  # of one: 4 or 8
    # that may be read from OFFSETS_AT on: VECTORS, or one more. Where there is none, a bag ends with the ids
    OFFSETS = 2
    IS_FIRST = 3  # 1: the first bag must begin at id 0
    IS_LAST = 4  # 1: the last bag must end with the ids
    ASKED_AT = 5  # offset of the ids as they came, as IDS_AT is of the row numbers
    NAME = 6  # a number for reports


class ResolveField(IntEnum):
    """The fields of a job of `quant.gpu.kernels.resolve`."""

    ROW_MAP = 0  # address of the table's NativeRowMap on the device
    IDS_AT = 1  # offset in the source, int64 [IDS]
    TARGET_AT = 2  # offset in inputs, int64 [IDS], where row numbers go
    IDS = 3
    FOUND_AT = 4  # offset in outputs, uint8 [IDS]: 1 where the table has the id; -1: none is written
    FIRST_PROGRAM = 5  # of the launch, that works on this job


class FillField(IntEnum):
    """The fields of a job of `quant.gpu.kernels.fill`."""

    SOURCE = 0  # address of the first value, fp32 or fp16; 0: zeros are written
    IS_HALF = 1  # 1: the values are fp16
    VALUES = 2
    WIDTH = 3  # values of a row
    STEP = 4  # values from one row of the source to the next
    TARGET = 5  # address of [VALUES] of PRECISION
    FIRST_PROGRAM = 6  # of the launch, that works on this job
    PRECISION = 7  # a Precision: what the target is written as


class ReportField(IntEnum):
    """The first error of a tensor lookup, int64 each, in page-locked memory."""

    IS_THERE = 0  # 1: the others are written
    NAME = 1  # of the job
    BAG = 2  # number of the bag whose offsets are wrong; -1: an id is
    POSITION = 3  # of the id, among the job's
    VALUE = 4  # the id, or where the bag begins
    END = 5  # of the bag
    IDS = 6  # of the job


FIELDS = len(JobField)
TENSOR_JOB_FIELDS = FIELDS + len(TensorField)


def split_rows(rows: int, share: int) -> int:
    """Number of a split table's rows in HBM."""
    blocks, rest = divmod(rows, SPLIT_BLOCK)
    return blocks * share + min(rest, share)
