"""Four backends, one contract: every test of lookups runs over reference, fbgemm, native (on each
instruction set) and the GPU's."""

import ctypes
import mmap
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from cpu_backends import BACKENDS, ISAS, cpu_backend
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import backend_of
from rounding import Expected, expect
from tables import FBGEMM_FORMATS, gpu_backend, placed, table_of

from tableside.quant import (
    Backend,
    BadIds,
    Lookup,
    Pooling,
    Precision,
    QuantError,
    RowFormat,
    Source,
    Table,
    choose,
)
from tableside.quant.cpu import _native
from tableside.quant.errors import Problem
from tableside.quant.row_format import ALIGNMENTS

pytestmark = pytest.mark.gpu

DIMS = [4, 8, 12, 20, 32, 36, 64, 72, 100, 128, 200, 256, 384]
FUSED_DIMS = [4, 36, 128]  # Triton's interpreter takes a tenth of a second a lookup


@pytest.fixture(params=[*BACKENDS, "fused"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "fused":
        yield gpu_backend()
    else:
        yield from cpu_backend(request.param)


class Case(NamedTuple):
    """A lookup that every backend is asked for, and what it gives, by its weights."""

    table: Table
    ids: np.ndarray
    lengths: np.ndarray | None
    expected: tuple[tuple[np.ndarray | None, Expected], ...]


LENGTHS = (0, 3, 1, 0, 40, 2, 70, 0)
FUSED_LENGTHS = (
    0,
    3,
    1,
    0,
    40,
    2,
    27,
    0,
)  # bags as long on average as a launch of long bags has, and half of the other's turns


@cache
def case_of(row_format: RowFormat, dim: int, pooling: Pooling, half: bool, lengths: tuple[int, ...]) -> Case:
    table = table_of(row_format, dim, alignment=ALIGNMENTS[(dim // 4 + half) % 2])
    rng = np.random.default_rng(dim)
    ids = rng.integers(0, table.rows, sum(lengths))
    ids[:3] = [0, table.rows - 1, table.rows - 1]
    bags = None if pooling is Pooling.NONE else np.array(lengths, np.int32)
    precision = Precision.FP16 if half else Precision.FP32
    found = []
    for weights in (
        [None] if pooling is Pooling.NONE else [None, rng.standard_normal(ids.size).astype(np.float32)]
    ):
        found.append(
            (weights, expect(table, ids, bags, pooling=pooling, weights=weights, precision=precision))
        )
    return Case(table, ids, bags, tuple(found))


@pytest.mark.drawn(32)
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("pooling", list(Pooling), ids=lambda p: p.label)
@pytest.mark.parametrize(
    ("backend", "dim"),
    [*((b, d) for b in BACKENDS for d in DIMS), *(("fused", d) for d in FUSED_DIMS)],
    indirect=["backend"],
)
@pytest.mark.parametrize("row_format", FBGEMM_FORMATS, ids=lambda f: f.label)
def test_lookup_equals_the_reference(
    backend: Backend, row_format: RowFormat, dim: int, pooling: Pooling, half: bool
) -> None:
    """Pooled and not, with weights and without, empty bags, repeated ids, the first and the last row."""
    case = case_of(row_format, dim, pooling, half, FUSED_LENGTHS if backend.name == "fused" else LENGTHS)
    for weights, expected in case.expected:
        found = backend.lookup(
            case.table, case.ids, case.lengths, pooling=pooling, weights=weights, half=half
        )
        assert found.dtype == (np.float16 if half else np.float32)
        expected.check(found)


@pytest.mark.parametrize("row_format", FBGEMM_FORMATS, ids=lambda f: f.label)
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "portable"])
def test_native_sums_equal_fbgemms_bit_for_bit(row_format: RowFormat, isa: str) -> None:
    """Without weights, in the widths that fill vectors, our kernel adds in FBGEMM's order."""
    _native.use(isa)
    lengths = np.array([5, 0, 20, 1, 33], np.int32)
    for dim, alignment in product((64, 128, 256), ALIGNMENTS):
        table = table_of(row_format, dim, alignment=alignment)
        ids = np.random.default_rng(1).integers(0, table.rows, int(lengths.sum()))
        for pooling in (Pooling.SUM, Pooling.MEAN):
            ours, theirs = (
                choose(b).lookup(table, ids, lengths, pooling=pooling) for b in ("native", "fbgemm")
            )
            np.testing.assert_array_equal(ours, theirs)
    _native.use(ISAS[0])


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dim", [4, 20, 128, 200])
@pytest.mark.parametrize("row_format", [f for f in FBGEMM_FORMATS if not f.has_bias], ids=lambda f: f.label)
def test_the_sum_of_one_row_is_that_row_bit_for_bit(
    backend: Backend, row_format: RowFormat, dim: int
) -> None:
    """-0 stays -0: unpooled, in a bag of one row beside others, in fp32 and fp16, in a plan. Sums of more
    or no rows begin at +0, as torch's and FBGEMM's do."""
    values = np.zeros((3, dim), np.float32)
    values[0], values[2, ::3] = -0.0, -0.0
    packed = np.zeros((3, row_format.row_bytes(dim)), np.uint8)
    choose("native").quantize(values, Source.FP32, row_format, packed)
    table = Table(packed, row_format, dim)
    signs = np.signbit(values)
    alone = np.array([0, 1, 2], np.int64)
    for half in (False, True):
        assert (np.signbit(backend.lookup(table, alone, pooling=Pooling.NONE, half=half)) == signs).all()
    for others, pooling in product(
        (2, 9, 400), (Pooling.SUM, Pooling.MEAN)
    ):  # by how long bags are, a GPU's launch is cut up
        ids, lengths = np.array([0, 2, *[0] * others], np.int64), np.array([1, 1, 0, others], np.int32)
        expected = [*signs[[0, 2]], *np.zeros((2, dim), bool)]
        for weights in (None, np.ones(ids.size, np.float32)):
            found = backend.lookup(table, ids, lengths, pooling=pooling, weights=weights)
            assert (np.signbit(found) == expected).all(), (others, pooling, weights)
        held = placed(table) if backend.name == "fused" else table
        out = np.empty((4, dim), np.float32)
        plan = backend.plan([Lookup(held, pooling, 0, ids.size, 0, bags=4, lengths_at=ids.nbytes)])
        plan.run(ids.tobytes() + lengths.tobytes(), out.reshape(-1).view(np.uint8))
        assert (np.signbit(out) == expected).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.label)
def test_nothing_behind_the_last_row_is_read(row_format: RowFormat, isa: str) -> None:
    """Rows without padding end at a page that may not be read."""
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None)
    _native.use(isa)
    with mmap.mmap(-1, 16 * page) as memory:
        whole = np.frombuffer(memory, np.uint8)
        barred = ctypes.c_void_p(whole.ctypes.data + 15 * page)
        assert libc.mprotect(barred, ctypes.c_size_t(page), 0) == 0
        for dim in (4, 16, 24, 36, 64, 100, 128, 256):
            table = table_of(row_format, dim, rows=40, alignment=4)
            at = whole[15 * page - table.packed.size : 15 * page].reshape(table.packed.shape)
            at[:] = table.packed
            ids = np.array([39, 38, 39] * 20)
            for lengths, pooling in ((None, Pooling.NONE), (np.array([0, 59, 1], np.int32), Pooling.SUM)):
                found, expected = (
                    choose("native").lookup(Table(rows, row_format, table.dim), ids, lengths, pooling=pooling)
                    for rows in (at, table.packed)
                )
                np.testing.assert_array_equal(found, expected)
        del whole, at
    _native.use(ISAS[0])


@pytest.mark.parametrize("rows", [1, 3])
def test_tiny_tables_and_no_ids(backend: Backend, rows: int) -> None:
    """One row, no ids, no bags."""
    table = table_of(RowFormat.INT8, 16, rows=max(rows, 2))
    table = Table(table.packed[:rows], table.row_format, table.dim)
    empty = np.empty(0, np.int64)
    assert backend.lookup(table, empty, np.zeros(3, np.int32)).tolist() == [[0.0] * 16] * 3
    assert backend.lookup(table, empty, np.empty(0, np.int32)).shape == (0, 16)
    assert backend.lookup(table, empty, pooling=Pooling.NONE).shape == (0, 16)
    assert backend.lookup(table, np.zeros(1, np.int64), pooling=Pooling.NONE).shape == (1, 16)


@pytest.mark.drawn(32)
@pytest.mark.parametrize("value", [-1, 200, 2**31, 2**32 + 5, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("position", [0, 17, 19])
def test_ids_outside_the_table_are_refused(backend: Backend, value: int, position: int) -> None:
    """Ids stay 64 bits wide: 2^32 + 5 is not row 5. The error names position, id and bound."""
    ids = np.arange(20)
    ids[position] = value
    with pytest.raises(BadIds) as caught:
        backend.lookup(table_of(RowFormat.INT4, 64), ids, np.array([20], np.int32))
    error = caught.value
    assert (error.problem, error.position, error.value, error.bound) == (Problem.ID, position, value, 200)


@pytest.mark.parametrize(
    ("lengths", "problem", "position", "value"),
    [
        ([5, -1, 6], Problem.LENGTH, 1, -1),
        ([5, 6], Problem.SUM, 2, 11),
        ([2**31 - 1] * 4, Problem.SUM, 4, 4 * (2**31 - 1)),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    backend: Backend, lengths: list[int], problem: Problem, position: int, value: int
) -> None:
    with pytest.raises(BadIds) as caught:
        backend.lookup(table_of(RowFormat.INT4, 64), np.arange(10), np.array(lengths, np.int32))
    assert (caught.value.problem, caught.value.position, caught.value.value) == (problem, position, value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"ids": np.arange(4, dtype=np.int32)},
        {"ids": np.arange(4).reshape(2, 2)},
        {"lengths": np.array([4])},
        {"lengths": None},
        {"weights": np.ones(3, np.float32)},
        {"weights": np.ones(4)},
        {"out": np.empty((1, 63), np.float32)},
        {"out": np.empty((1, 64), np.float16)},
        {"pooling": Pooling.NONE},
        {"ids": np.arange(8)[::2]},
    ],
    ids=lambda a: "-".join(f"{k}" for k in a),
)
def test_arguments_of_the_wrong_type_or_shape_are_refused(
    backend: Backend, arguments: dict[str, object]
) -> None:
    call = {"ids": np.arange(4), "lengths": np.array([4], np.int32), "pooling": Pooling.SUM, **arguments}
    with pytest.raises(QuantError, match=r"expected|takes neither"):
        backend.lookup(table_of(RowFormat.INT8, 64), **call)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.drawn(0.25)
def test_a_plan_gives_what_single_lookups_give(data: st.DataObject) -> None:
    """Several tables, poolings and widths laid out in one buffer at odd offsets, by every backend, with 1
    to 3 threads."""
    lookups, reference, parts, at, out_at = [], [], [b"x" * 3], 3, 0
    for _ in range(data.draw(st.integers(1, 4))):
        table = table_of(
            data.draw(st.sampled_from(FBGEMM_FORMATS)), data.draw(st.sampled_from([8, 64, 72])), rows=31
        )
        pooling = data.draw(st.sampled_from(list(Pooling)))
        lengths = np.array(data.draw(st.lists(st.integers(0, 9), max_size=12)), np.int32)
        n = int(lengths.sum())
        ids = np.array(data.draw(st.lists(st.integers(0, 30), min_size=n, max_size=n)), np.int64)
        weighted = pooling is not Pooling.NONE and data.draw(st.booleans())
        weights = np.linspace(-1, 1, n, dtype=np.float32) if weighted else None
        half = data.draw(st.booleans())
        lk = Lookup(
            table,
            pooling,
            at,
            n,
            out_at,
            Precision.FP16 if half else Precision.FP32,
            len(lengths),
            at + 8 * n,
            0,
            at + 8 * n + 4 * len(lengths) if weighted else None,
        )
        parts += [ids.tobytes(), lengths.tobytes(), b"" if weights is None else weights.tobytes(), b"y"]
        at, out_at = at + sum(map(len, parts[-4:])), out_at + lk.out_bytes
        lookups.append(lk)
        reference.append((table, ids, lengths, pooling, weights, half))
    for name in ("native", "fbgemm", "reference", "fused"):
        out = bytearray(out_at)
        on_device = [replace(lk, table=placed(lk.table)) for lk in lookups] if name == "fused" else lookups
        chosen = gpu_backend() if name == "fused" else backend_of(name)
        chosen.plan(on_device, threads=data.draw(st.integers(1, 3))).run(b"".join(parts), out)
        for lk, (table, ids, lengths, pooling, weights, half) in zip(lookups, reference, strict=True):
            bags = None if pooling is Pooling.NONE else lengths
            dtype = np.float16 if half else np.float32
            found = np.frombuffer(out, dtype, lk.outputs * table.dim, lk.out_at).reshape(-1, table.dim)
            expect(table, ids, bags, pooling=pooling, weights=weights, precision=lk.precision).check(found)


def test_a_plan_with_a_bad_id_writes_nothing(backend: Backend) -> None:
    """The second of two lookups is wrong: the first one's output stays untouched, and the error says which
    lookup."""
    table = table_of(RowFormat.INT8, 64)
    table = placed(table) if backend.name == "fused" else table
    lookups = [Lookup(table, Pooling.SUM, 8 * i, 1, 256 * i, bags=1, bag_length=1) for i in range(2)]
    out = bytearray(b"\xee" * 512)
    with pytest.raises(BadIds) as caught:
        backend.plan(lookups).run(np.array([3, 200]).tobytes(), out)
    assert caught.value.job == 1
    assert out == b"\xee" * 512


def test_a_plan_never_reads_or_writes_past_its_buffers(backend: Backend) -> None:
    """Buffers shorter than the plan says are refused."""
    table = table_of(RowFormat.INT8, 64)
    table = placed(table) if backend.name == "fused" else table
    plan = backend.plan([Lookup(table, Pooling.SUM, 0, 2, 0, bags=1, bag_length=2)])
    with pytest.raises(ValueError):
        plan.run(np.arange(1).tobytes(), bytearray(256))
    with pytest.raises(ValueError):
        plan.run(np.arange(2).tobytes(), bytearray(255))


@pytest.mark.parametrize(
    "change",
    [
        {"ids_at": -8},
        {"ids": 2**61},
        {"ids": -1},
        {"bags": 2**62, "bag_length": 4},
        {"bag_length": -1},
        {"out_at": -256},
        {"weights_at": 2**63 - 1},
        {"lengths_at": 15},
    ],
    ids=str,
)
def test_native_plans_that_wrap_around_are_refused(change: dict[str, int]) -> None:
    """Offsets and sizes are a caller's; none of them makes the kernel read or write elsewhere."""
    good = {"ids_at": 0, "ids": 2, "out_at": 0, "bags": 1, "bag_length": 2}
    lookup = Lookup(table_of(RowFormat.INT8, 64), Pooling.SUM, **{**good, **change})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"do not lie in|out of range"):
        choose("native").plan([lookup]).run(np.arange(2).tobytes(), bytearray(256))


def test_threads_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="threads"):
        choose("native").lookup(
            table_of(RowFormat.INT8, 64), np.arange(2), np.array([2], np.int32), threads=0
        )


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(QuantError, match="expected one of: native, fbgemm"):
        choose("cuda11")
