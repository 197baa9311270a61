"""fp8_e4m3, fp8_e4m3_block32, nvfp4: formats with scales of rows or blocks. Quantizing gives the bytes that
torch's casts give, rows that are packed already are copied, and lookups give what those casts say."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from cpu_backends import ISAS, cpu_backend
from reference import REFERENCE, unpack
from rounding import expect
from tables import SCALED_FORMATS, gpu_backend, table_of

from tableside.quant import (
    Backend,
    CpuBackend,
    Lookup,
    Pooling,
    Precision,
    QuantError,
    RowFormat,
    Source,
    Table,
    choose,
)

pytestmark = pytest.mark.gpu

DIMS = [32, 64, 96, 160, 256, 288]
of_each = pytest.mark.parametrize("row_format", SCALED_FORMATS, ids=lambda f: f.label)


@pytest.fixture(params=ISAS)
def native(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    yield from cpu_backend(f"native-{request.param}")


def values_with(dim: int, scale: float) -> np.ndarray:
    """Rows of values of many sizes, with zeros of both signs and values that are a tie or the largest."""
    rng = np.random.default_rng(dim)
    values = rng.standard_normal((200, dim)) * np.exp(3 * rng.standard_normal((200, dim))) * scale
    values = values.clip(-(2.0**125), 2.0**125).astype(np.float32)
    values[0], values[1], values[2] = 0.0, -0.0, 1.0
    values[3, ::2], values[3, 1::2] = 448.0, np.nextafter(np.float32(448), np.float32(449))
    values[4] = np.resize(np.array([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -6, -5, -0.25]), dim)
    values[5] = np.finfo(np.float32).smallest_subnormal
    return values


def packed_of(values: np.ndarray, row_format: RowFormat, alignment: int = 4) -> np.ndarray:
    packed = np.full((len(values), row_format.row_bytes(values.shape[1], alignment)), 0xAA, np.uint8)
    REFERENCE.quantize(values, Source.FP32, row_format, packed)
    return packed


@pytest.mark.drawn(32)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("scale", "alignment"), [(1.0, 4), (1e-20, 16), (1e-38, 4), (1e-42, 4), (1e30, 16)])
@of_each
def test_quantized_bytes_equal_those_of_torchs_casts(
    native: CpuBackend, row_format: RowFormat, dim: int, scale: float, alignment: int
) -> None:
    """And the error is within the stated bound, per row."""
    values = values_with(dim, scale)
    packed = np.full((200, row_format.row_bytes(dim, alignment)), 0xAA, np.uint8)
    native.quantize(values, Source.FP32, row_format, packed)
    np.testing.assert_array_equal(packed, packed_of(values, row_format, alignment))
    error = np.abs(native.dequantize(Table(packed, row_format, dim)).astype(np.float64) - values).max(1)
    assert (error <= [row_format.error_bound(float(r.min()), float(r.max())) for r in values]).all()


@of_each
def test_the_bound_holds_halfway_between_two_values(native: CpuBackend, row_format: RowFormat) -> None:
    """There the roundings of the scale, the quotient and the product count, too."""
    largest = np.random.default_rng(3).uniform(0.5, 1, (20_000, 1)).astype(np.float32)
    halfway = np.array([448, 432, 400, 368, 336, 304, 272, 248, 6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25])
    values = np.hstack([largest, *(largest.astype(np.float64) * halfway / top for top in (448, 6))])
    values = np.clip(values, 0, largest).astype(np.float32)
    values = np.pad(values, ((0, 0), (0, 64 - values.shape[1])))
    packed = np.empty((len(values), row_format.row_bytes(64, 4)), np.uint8)
    native.quantize(values, Source.FP32, row_format, packed)
    error = np.abs(native.dequantize(Table(packed, row_format, 64)).astype(np.float64) - values).max(1)
    assert (error <= [row_format.error_bound(0.0, float(r.max())) for r in values]).all()


@pytest.mark.parametrize("dim", DIMS)
@of_each
def test_single_rows_are_what_torchs_casts_say_bit_for_bit(
    native: CpuBackend, row_format: RowFormat, dim: int
) -> None:
    """-0 stays -0; scales of 2 to the -127 are read."""
    packed = packed_of(values_with(dim, 1.0), row_format)
    if row_format is RowFormat.FP8_E4M3_BLOCK32:
        packed[6, dim : dim + dim // 32] = 0
    expected = unpack(torch.from_numpy(packed), row_format, dim).numpy()
    found = native.lookup(Table(packed, row_format, dim), np.arange(200), pooling=Pooling.NONE)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.fixture(params=[*ISAS, "fused"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "fused":
        yield gpu_backend()
    else:
        yield from cpu_backend(f"native-{request.param}")


@pytest.mark.drawn(4)
@pytest.mark.parametrize("pooling", list(Pooling), ids=lambda p: p.label)
@pytest.mark.parametrize("dim", DIMS)
@of_each
def test_lookups_equal_the_reference(
    backend: Backend, row_format: RowFormat, dim: int, pooling: Pooling
) -> None:
    """Pooled and not, with weights and without, in fp32 and fp16, of rows of either alignment."""
    lengths = np.array((0, 3, 1, 0, 40, 2, 27, 0), np.int32)
    bags = None if pooling is Pooling.NONE else lengths
    ids = np.random.default_rng(dim).integers(0, 200, int(lengths.sum()))
    weights = np.random.default_rng(1).standard_normal(ids.size).astype(np.float32)
    for weighted, half in product((None,) if bags is None else (None, weights), (False, True)):
        table = table_of(row_format, dim, alignment=16 if half else 4)
        precision = Precision.FP16 if half else Precision.FP32
        wanted = expect(table, ids, bags, pooling=pooling, weights=weighted, precision=precision)
        wanted.check(backend.lookup(table, ids, bags, pooling=pooling, weights=weighted, half=half))


@pytest.mark.parametrize("pooling", [Pooling.NONE, Pooling.SUM, Pooling.MEAN], ids=lambda p: p.label)
@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.label)
def test_bf16_vectors_are_the_fp32_ones_rounded(
    native: CpuBackend, row_format: RowFormat, pooling: Pooling
) -> None:
    """To nearest even, as torch rounds, in all columns."""
    table = table_of(row_format, 100)
    ids, lengths = np.arange(60, dtype=np.int64), np.array([7, 0, 1, 52], np.int32)
    vectors = 60 if pooling is Pooling.NONE else 4
    found = []
    for precision in (Precision.FP32, Precision.BF16):
        out = np.empty(vectors * table.dim * precision.bytes, np.uint8)
        lookup = Lookup(table, pooling, 0, 60, 0, precision, bags=4, lengths_at=ids.nbytes)
        native.plan([lookup]).run(ids.tobytes() + lengths.tobytes(), out)
        found.append(torch.from_numpy(out))
    np.testing.assert_array_equal(
        found[1].view(torch.int16), found[0].view(torch.float32).bfloat16().view(torch.int16)
    )


@pytest.mark.parametrize("dim", DIMS)
@of_each
def test_packed_rows_are_copied_into_their_format(
    native: CpuBackend, row_format: RowFormat, dim: int
) -> None:
    """Byte for byte, and padded; into another format they go as their values do."""
    packed = packed_of(values_with(dim, 1e-3), row_format)
    given = np.ascontiguousarray(packed[:, : row_format.used_bytes(dim)])
    source = Source(row_format)
    assert source.dim_of(given.shape[1]) == dim
    out = np.full((200, row_format.row_bytes(dim)), 0xAA, np.uint8)
    native.quantize(given, source, row_format, out)
    np.testing.assert_array_equal(out[:, : given.shape[1]], given)
    assert not out[:, given.shape[1] :].any()
    values = native.dequantize(Table(packed, row_format, dim))
    for other in RowFormat:
        if other not in (row_format, RowFormat.FP8, RowFormat.FP16):
            found = np.full((200, other.row_bytes(dim)), 0xAA, np.uint8)
            expected = np.full_like(found, 0xBB)
            native.quantize(given, source, other, found)
            native.quantize(values, Source.FP32, other, expected)
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**126 * 1.01])
@of_each
def test_values_that_no_scale_holds_are_refused(
    native: CpuBackend, row_format: RowFormat, value: float
) -> None:
    values = values_with(64, 1.0)
    values[7, 40] = values[9, 0] = value
    with pytest.raises(QuantError, match="row 7 holds a value"):
        native.quantize(values, Source.FP32, row_format, np.empty((200, row_format.row_bytes(64)), np.uint8))


@pytest.mark.parametrize(
    ("row_format", "at", "byte"),
    [
        (RowFormat.FP8_E4M3, 4 + 63, 0x7F),  # not a number
        (RowFormat.FP8_E4M3, 4, 0xFF),
        (RowFormat.FP8_E4M3, 3, 0xBF),  # a negative scale
        (RowFormat.FP8_E4M3, 3, 0x7F),
        (RowFormat.FP8_E4M3_BLOCK32, 0, 0x7F),
        (RowFormat.FP8_E4M3_BLOCK32, 65, 0xFF),
        (RowFormat.FP8_E4M3_BLOCK32, 64, 245),  # too large for fp32
        (RowFormat.NVFP4, 39, 0x7F),
        (RowFormat.NVFP4, 36, 0x81),
        (RowFormat.NVFP4, 35, 0xBF),
    ],
)
def test_packed_rows_with_what_is_no_number_are_refused(
    native: CpuBackend, row_format: RowFormat, at: int, byte: int
) -> None:
    """By the row's number, whatever they shall become."""
    packed = packed_of(values_with(64, 1.0), row_format)
    given = np.ascontiguousarray(packed[:, : row_format.used_bytes(64)])
    given[11, at] = byte
    for other in (row_format, RowFormat.FP32):
        with pytest.raises(QuantError, match=r"row 11 holds a value of .* or a scale"):
            native.quantize(given, Source(row_format), other, np.empty((200, other.row_bytes(64)), np.uint8))


def test_packed_rows_beyond_another_formats_range_are_refused_for_that(native: CpuBackend) -> None:
    packed = packed_of(np.full((3, 64), 1e6, np.float32), RowFormat.FP8_E4M3)
    given = np.ascontiguousarray(packed[:, : RowFormat.FP8_E4M3.used_bytes(64)])
    with pytest.raises(QuantError, match="row 0 holds a value that fp16 cannot represent"):
        native.quantize(given, Source.FP8_E4M3, RowFormat.FP16, np.empty((3, 128), np.uint8))


@of_each
def test_dims_that_do_not_fill_blocks_are_refused(row_format: RowFormat) -> None:
    if row_format.block:
        with pytest.raises(QuantError, match=f"expected a multiple of {row_format.block}"):
            row_format.row_bytes(row_format.block + 8)
    with pytest.raises(QuantError, match="are no row"):
        Source(row_format).dim_of(3)


@of_each
def test_fbgemm_refuses_what_it_lacks(row_format: RowFormat) -> None:
    table, fbgemm = table_of(row_format, 64), choose("fbgemm")
    with pytest.raises(QuantError, match=f"FBGEMM has no {row_format.label}"):
        fbgemm.lookup(table, np.arange(3), pooling=Pooling.NONE)
    with pytest.raises(QuantError, match=f"FBGEMM has no {row_format.label}"):
        fbgemm.quantize(values_with(64, 1.0), Source.FP32, row_format, table.packed.copy())
