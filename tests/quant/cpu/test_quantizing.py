"""Quantizing by reference, fbgemm and native (on each instruction set): the same bytes, and what is
refused."""

from collections.abc import Iterator

import numpy as np
import pytest
from cpu_backends import BACKENDS, cpu_backend
from reference import REFERENCE
from tables import FBGEMM_FORMATS, values_of

from tableside.quant import CpuBackend, QuantError, RowFormat, Source, choose

pytestmark = pytest.mark.gpu


@pytest.fixture(params=BACKENDS)
def quantizer(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    yield from cpu_backend(request.param)


@pytest.mark.drawn(32)
@pytest.mark.parametrize("dim", [8, 24, 64, 128, 136])
@pytest.mark.parametrize("row_format", FBGEMM_FORMATS, ids=lambda f: f.label)
@pytest.mark.parametrize(("scale", "alignment"), [(1.0, 4), (1e-6, 16), (50.0, 16), (1e-12, 4)])
def test_quantized_bytes_equal_fbgemms(
    quantizer: CpuBackend, row_format: RowFormat, dim: int, scale: float, alignment: int
) -> None:
    """All backends pack a row into the same bytes, constant and denormal rows included."""
    rng = np.random.default_rng(dim)
    values = (rng.standard_normal((300, dim)) * scale).clip(-240, 240).astype(np.float32)
    values[0], values[1], values[2, ::2] = 0.0, scale, -scale
    expected = np.empty((300, row_format.row_bytes(dim, alignment)), np.uint8)
    choose("fbgemm").quantize(values, Source.FP32, row_format, expected)
    packed = np.full_like(expected, 0xAA)
    quantizer.quantize(values, Source.FP32, row_format, packed)
    np.testing.assert_array_equal(packed, expected)


@pytest.mark.parametrize("row_format", FBGEMM_FORMATS, ids=lambda f: f.label)
def test_every_fp8_and_fp16_value_survives(quantizer: CpuBackend, row_format: RowFormat) -> None:
    """fp16 sources of every finite bit pattern quantize like the same values in fp32."""
    patterns = np.arange(2**16, dtype=np.uint16).view(np.float16)
    limit = 240 if row_format is RowFormat.FP8 else 65504
    with np.errstate(invalid="ignore"):  # of what is not a number, on some processors
        usable = patterns[np.isfinite(patterns) & (np.abs(patterns.astype(np.float32)) <= limit)]
    values = usable[: usable.size // 32 * 32].reshape(-1, 32)
    packed, expected = (np.empty((len(values), row_format.row_bytes(32)), np.uint8) for _ in range(2))
    quantizer.quantize(values, Source.FP16, row_format, packed)
    REFERENCE.quantize(values.astype(np.float32), Source.FP32, row_format, expected)
    np.testing.assert_array_equal(packed, expected)


def test_bf16_sources_are_read_exactly(quantizer: CpuBackend) -> None:
    bits = (values_of(50, 16).view(np.uint32) >> 16).astype(np.uint16)
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    packed = np.empty((50, RowFormat.FP32.row_bytes(16)), np.uint8)
    quantizer.quantize(bits, Source.BF16, RowFormat.FP32, packed)
    np.testing.assert_array_equal(packed.view(np.float32), exact)


@pytest.mark.drawn(32)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 5, 63, 71])
@pytest.mark.parametrize("row_format", FBGEMM_FORMATS, ids=lambda f: f.label)
def test_values_that_are_not_finite_are_refused(
    quantizer: CpuBackend, row_format: RowFormat, bad: float, column: int
) -> None:
    """The error names the first such row; nothing is repaired in silence."""
    values = values_of(20, 72)
    values[7, column] = values[11, column] = bad
    with pytest.raises(QuantError, match="row 7 holds a value"):
        quantizer.quantize(
            values, Source.FP32, row_format, np.empty((20, row_format.row_bytes(72)), np.uint8)
        )


@pytest.mark.parametrize(
    ("row_format", "value"), [(RowFormat.FP8, 241.0), (RowFormat.FP16, 70000.0), (RowFormat.INT8, -1e6)]
)
def test_values_outside_a_formats_range_are_refused(
    quantizer: CpuBackend, row_format: RowFormat, value: float
) -> None:
    values = values_of(5, 16)
    values[3, 2] = value
    with pytest.raises(QuantError, match="row 3"):
        quantizer.quantize(values, Source.FP32, row_format, np.empty((5, row_format.row_bytes(16)), np.uint8))
