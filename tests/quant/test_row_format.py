"""RowFormat: sizes, names and error bounds."""

import numpy as np
import pytest
from reference import REFERENCE

from tableside.quant import QuantError, RowFormat, Source, Table

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("row_format", "dim", "expected"),
    [
        ("int8", 128, 144),
        ("int8", 64, 80),
        ("int4", 64, 48),
        ("int2", 64, 32),
        ("fp8", 64, 64),
        ("fp16", 3, 16),
        ("fp32", 1, 16),
    ],
)
def test_row_bytes(row_format: str, dim: int, expected: int) -> None:
    """Scale and bias in front where there are any, rows padded to 16 bytes (int8 of dim 128: 132 -> 144,
    as FBGEMM)."""
    assert RowFormat.parse(row_format).row_bytes(dim) == expected


@pytest.mark.parametrize(
    ("row_format", "dim", "sizes"),
    [
        ("int8", 64, (68, 80)),
        ("int4", 64, (36, 48)),
        ("int2", 16, (8, 16)),
        ("fp8", 10, (12, 16)),
        ("fp16", 8, (16,)),
    ],
)
def test_rows_have_one_of_two_alignments(row_format: str, dim: int, sizes: tuple[int, ...]) -> None:
    """4, or 16 where a GPU reads rows in host memory; a size that both give is of both."""
    found = RowFormat.parse(row_format)
    assert found.row_sizes(dim) == sizes
    of_each = [found.alignments(dim, size) for size in (sizes[0], sizes[-1], sizes[0] + 1)]
    assert of_each == ([{4}, {16}, set()] if len(sizes) > 1 else [{4, 16}, {4, 16}, set()])


@pytest.mark.parametrize(
    ("row_format", "dim"),
    [("int4", 3), ("int2", 6), ("int8", 0), ("fp32", -1), ("nvfp4", 24), ("fp8_e4m3_block32", 48)],
)
def test_a_dim_that_does_not_fill_bytes_is_refused(row_format: str, dim: int) -> None:
    with pytest.raises(QuantError, match="dim"):
        RowFormat.parse(row_format).row_bytes(dim)


@pytest.mark.parametrize("name", ["int3", "", "INT8 ", None, 8])
def test_an_unknown_format_names_the_known_ones(name: object) -> None:
    with pytest.raises(QuantError, match="int2, int4, int8, fp8, fp16, fp32"):
        RowFormat.parse(name)  # type: ignore[arg-type]


def test_table_refuses_rows_of_another_width() -> None:
    with pytest.raises(QuantError, match=r"expected uint8 \[rows, 68 or 80\]"):
        Table(np.zeros((4, 79), np.uint8), RowFormat.INT8, 64)


@pytest.mark.parametrize("row_format", list(RowFormat))
@pytest.mark.parametrize("spread", [1e-8, 1e-5, 1e-3, 1.0, 80.0])
@pytest.mark.parametrize("offset", [0.0, 1.0, -100.0])
def test_dequantized_values_stay_within_the_stated_bound(
    row_format: RowFormat, spread: float, offset: float
) -> None:
    """error_bound holds for every row, from rows that vanish in fp16 to rows far from zero."""
    rng = np.random.default_rng(7)
    values = (rng.standard_normal((400, 32)) * spread + offset).clip(-239, 239).astype(np.float32)
    values[0] = offset
    backend = REFERENCE
    packed = np.zeros((400, row_format.row_bytes(32)), np.uint8)
    backend.quantize(values, Source.FP32, row_format, packed)
    error = np.abs(backend.dequantize(Table(packed, row_format, 32)).astype(np.float64) - values).max(1)
    bound = [row_format.error_bound(float(r.min()), float(r.max())) for r in values]
    assert (error <= bound).all()
