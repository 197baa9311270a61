"""Packed tables, what they may differ by, and the GPU backend on the device that the tests run on."""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from reference import REFERENCE

from tableside.quant import (
    Backend,
    BadIds,
    CpuBackend,
    Plan,
    Pooling,
    RowFormat,
    RowSource,
    Source,
    Table,
    choose,
)
from tableside.quant.row_format import GPU_ALIGNMENT

FBGEMM_FORMATS = [f for f in RowFormat if f <= RowFormat.FP32]
SCALED_FORMATS = [f for f in RowFormat if f > RowFormat.FP32]
DEVICE = "interpreter"  # set by conftest.py from --device


def serve_device() -> str:
    """The same device, as `tableside serve --devices` names it."""
    return DEVICE.removeprefix("cuda:")


@cache
def gpu_backend() -> Backend:
    """The GPU backend: in Triton's interpreter, or on the GPU that --device names."""
    from tableside.quant.gpu.backend import GpuBackend

    return GpuBackend(DEVICE, choose())


def run_batch(backend: Any, requests: Sequence[tuple[Plan, Any]]) -> list[Any]:
    """Runs requests as one batch of a GPU; returns the outputs or the BadIds of each."""
    results, _ = backend.batches.run(requests)
    return [result if isinstance(result, BadIds) else result.outputs for result in results]


def placed(table: Table) -> RowSource:
    """A table on the GPU backend's device."""
    return gpu_backend().place("hbm", table)  # type: ignore[attr-defined, no-any-return]


def values_of(rows: int, dim: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((rows, dim)) * rng.choice([1e-3, 1.0, 20.0], (rows, 1))).astype(np.float32)
    values[0], values[1] = 0.0, 0.25
    return values


def fitting(row_format: RowFormat, dim: int) -> int:
    """`dim`, or the next one that fills the format's blocks."""
    return -(-dim // row_format.block) * row_format.block if row_format.block else dim


def table_of(
    row_format: RowFormat, dim: int, rows: int = 200, seed: int = 0, alignment: int = GPU_ALIGNMENT
) -> Table:
    dim = fitting(row_format, dim)
    packed = np.zeros((rows, row_format.row_bytes(dim, alignment)), np.uint8)
    REFERENCE.quantize(values_of(rows, dim, seed), Source.FP32, row_format, packed)
    return Table(packed, row_format, dim)


def expected_of(
    table: Table, ids: np.ndarray, lengths: np.ndarray | None = None, pooling: Pooling = Pooling.NONE
) -> np.ndarray:
    """What the reference gives, fp32."""
    return REFERENCE.lookup(table, ids, lengths, pooling=pooling)


def check_vectors(
    backend: CpuBackend, table: Table, asked: np.ndarray, plain: Table, rows: np.ndarray
) -> None:
    """Every pooling of a request, with lengths and weights, in fp32 and fp16: bit for bit what the backend
    makes of these rows of `plain`, whose ids are row numbers."""
    rng = np.random.default_rng(asked.size)
    lengths = rng.multinomial(asked.size, np.ones(9) / 9).astype(np.int32)
    lengths[3] += lengths[4]
    lengths[4] = 0
    weights = rng.standard_normal(asked.size).astype(np.float32)
    for pooling in Pooling:
        bags = None if pooling is Pooling.NONE else lengths
        for weighted, half in product((None,) if bags is None else (None, weights), (False, True)):
            how: dict[str, Any] = {"pooling": pooling, "weights": weighted, "half": half}
            found = backend.lookup(table, asked, bags, **how)
            np.testing.assert_array_equal(found, backend.lookup(plain, rows, bags, **how))
