"""Packed tables, what they may differ by, and the GPU backend on the device that the tests run on."""

from functools import cache

import numpy as np

from tableside.quant import Backend, Pooling, RowFormat, RowSource, Source, Table, choose

DEVICE = "interpreter"  # set by conftest.py from --device


def serve_device() -> str:
    """The same device, as `tableside serve --devices` names it."""
    return DEVICE.removeprefix("cuda:")


@cache
def gpu_backend() -> Backend:
    """The GPU backend: in Triton's interpreter, or on the GPU that --device names."""
    from tableside.quant.gpu.backend import GpuBackend

    return GpuBackend(DEVICE, choose())


def placed(table: Table) -> RowSource:
    """A table on the GPU backend's device."""
    return gpu_backend().to_hbm(table)  # type: ignore[attr-defined, no-any-return]


def values_of(rows: int, dim: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((rows, dim)) * rng.choice([1e-3, 1.0, 20.0], (rows, 1))).astype(np.float32)
    values[0], values[1] = 0.0, 0.25
    return values


def table_of(row_format: RowFormat, dim: int, rows: int = 200, seed: int = 0) -> Table:
    packed = np.zeros((rows, row_format.row_bytes(dim)), np.uint8)
    choose("reference").quantize(values_of(rows, dim, seed), Source.FP32, row_format, packed)
    return Table(packed, row_format, dim)


def expected_of(table: Table, ids: np.ndarray, lengths: np.ndarray | None = None, pooling: Pooling = Pooling.NONE) -> np.ndarray:
    """What the reference gives, fp32."""
    return choose("reference").lookup(table, ids, lengths, pooling=pooling)
