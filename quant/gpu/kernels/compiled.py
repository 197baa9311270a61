"""The kernels of GPU lookups, by compile constants. The backend launches them; `quant.gpu.ahead` compiles
them without a GPU."""

from enum import IntEnum

from tableside.quant.cache.kernels.state import ProbeField
from tableside.quant.device.launch import Kernel
from tableside.quant.gpu.kernels import bag_starts as bag_starts_kernel
from tableside.quant.gpu.kernels import fill as fill_kernel
from tableside.quant.gpu.kernels import gather as gather_kernel
from tableside.quant.gpu.kernels import lookup as lookup_kernel
from tableside.quant.gpu.kernels import resolve as resolve_kernel
from tableside.quant.gpu.kernels import tensors as tensor_kernel
from tableside.quant.gpu.kernels.job import ResolveField
from tableside.quant.gpu.kernels.launch_config import LaunchConfig
from tableside.quant.gpu.kernels.wanted import KernelKey
from tableside.quant.row_format import RowFormat

GATHER_COLUMNS = 256  # chunks of rows that a program of `gather` reads at once
_STARTS_BLOCK = 1024  # bags that a program of `bag_starts` sums at once


def resolver(block: int, is_overlaid: bool = False) -> Kernel:
    """Makes row numbers of ids. block: ids of a program. is_overlaid: tables may have overlays."""
    return Kernel(resolve_kernel.resolve, 4, OVERLAID=is_overlaid, BLOCK=block)


def filler(block: int) -> Kernel:
    """Fills the matrices of what follows lookups. block: values of a program."""
    return Kernel(fill_kernel.fill, 4, BLOCK=block)


def bag_starts() -> Kernel:
    """Sums the lengths of bags."""
    return Kernel(bag_starts_kernel.bag_starts, 4, BLOCK=_STARTS_BLOCK)


def lookup(
    key: KernelKey,
    config: LaunchConfig,
    *,
    pooled: bool,
    is_weighted: bool,
    is_indirect: bool,
    of_tensors: bool = False,
) -> Kernel:
    """Looks up the jobs of a launch. of_tensors: jobs of `quant.gpu.tensors.tensors`."""
    return Kernel(
        tensor_kernel.look_up if of_tensors else lookup_kernel.lookup,
        config.warps,
        FORMATS=key.formats,
        POOLED=pooled,
        WEIGHTED=is_weighted,
        INDIRECT=is_indirect,
        WHOLE_WORDS=key.whole_words,
        UNROLL=config.unroll,
        COLUMNS=config.block_columns,
        LANES=config.lanes,
        TIGHT=is_indirect and key.is_tight,
    )


def gather(
    dim: int, row_format: int, precision: int, *, ids_32: bool, is_ordered: bool, has_heads: bool
) -> Kernel:
    """Gathers single rows of one table. row_format, precision: numbers of `RowFormat` and `Precision`."""
    packed = RowFormat(row_format)
    return Kernel(
        gather_kernel.gather,
        4,
        DIM=dim,
        FORMAT=row_format,
        PRECISION=precision,
        IDS_32=ids_32,
        ORDERED=is_ordered,
        HEADS=has_heads,
        PER_WORD=32 // packed.bits,
        HEADER=packed.value_bytes(0) // 4,
        COLUMNS=GATHER_COLUMNS,
    )


def spread_lanes(jobs: int) -> int:
    """The lane count for which `spread` is compiled, for so many jobs."""
    return 1 << (jobs - 1).bit_length()


def spread(is_resolve: bool, lanes: int, block: int) -> Kernel:
    """Returns the kernel that writes jobs of the resolve kernel or of the cache's. block: ids of its
    programs."""
    fields: type[IntEnum] = ResolveField if is_resolve else ProbeField
    other_at, other_bytes, first = (
        (ResolveField.TARGET_AT, 8, ResolveField.FIRST_PROGRAM)
        if is_resolve
        else (ProbeField.LOCATIONS_AT, 4, ProbeField.FIRST_BLOCK)
    )
    return Kernel(
        tensor_kernel.spread,
        4,
        LANES=lanes,
        SIZE=len(fields),
        IDS_AT=int(fields["IDS_AT"]),
        OTHER_AT=int(other_at),
        OTHER_BYTES=other_bytes,
        IDS=int(fields["IDS"]),
        FIRST=int(first),
        BLOCK=block,
    )
