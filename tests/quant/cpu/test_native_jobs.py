"""The C kernel's own face, with arguments that no caller of ours sends: it refuses them, or does what the
reference does.

`make test-sanitized` runs these with the sanitizers, which see what a read beyond a buffer does not show
here.
"""

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import expect
from tables import expected_of, table_of, values_of

from tableside.quant import LookupKind, Place, Pooling, RowFormat, Source, choose
from tableside.quant.cpu import _native
from tableside.quant.rows.ids import array_address

HOSTILE = [
    -(2**63),
    -(2**32),
    -1,
    1,
    3,
    7,
    2**31 - 1,
    2**31,
    2**32,
    2**32 + 1,
    2**60,
    2**61,
    2**62,
    2**63 - 8,
    2**63 - 1,
]
LOOKUP_CHANGES = (
    "pooling",
    "kind",
    "ids_at",
    "ids",
    "lengths_at",
    "bag_length",
    "bags",
    "weights_at",
    "out_at",
    "out_row_bytes",
    "precision",
)
GATHER_CHANGES = ("ids_at", "ids", "out_at")
ROWS = 31


def matrix(fields: tuple[str, ...], *jobs: dict[str, int]) -> bytes:
    """Jobs as the kernel takes them: int64 [n, fields]."""
    return np.array([[job[name] for name in fields] for job in jobs], np.int64).tobytes()


@st.composite
def inputs_of(draw: st.DrawFn) -> tuple[bytes, int, int, bool]:
    """Ids, lengths and weights one after another at an odd offset; how many ids and bags; whether they are
    good."""
    lengths = draw(st.lists(st.sampled_from([0, 1, 2, 5, 70]), max_size=6))
    ids = draw(st.lists(st.integers(0, ROWS - 1), min_size=sum(lengths), max_size=sum(lengths)))
    is_good = draw(st.booleans())
    if not is_good:
        spoiled: list[int] = draw(st.sampled_from([ids, lengths]))
        if spoiled:
            spoiled[draw(st.integers(0, len(spoiled) - 1))] = draw(st.sampled_from([-1, ROWS, 2**31 - 1]))
    parts = [b"x", np.array(ids, np.int64).tobytes(), np.array(lengths, np.int32).tobytes()]
    weights = np.linspace(-1, 1, len(ids), dtype=np.float32)
    return b"".join([*parts, weights.tobytes()]), len(ids), len(lengths), is_good


def lookup(job: dict[str, int], inputs: Any, out: Any, threads: int = 1) -> Any:
    """What the kernel makes of one job with the fields of kinds and places together."""
    kinds, places = matrix(_native.KIND_FIELDS, job), matrix(_native.PLACE_FIELDS, job)
    return _native.run(kinds, places, inputs, out, threads, None)


def run(function: Any, *arguments: Any) -> Any:
    """What the kernel returns; its ValueError where it refuses the arguments."""
    try:
        return function(*arguments)
    except (ValueError, OverflowError) as refused:
        return refused


def test_ids_may_lie_elsewhere_than_the_inputs() -> None:
    """At an address for each lookup, or with 0 in the inputs; an array of another length is refused."""
    table, ids, other = table_of(RowFormat.FP32, 4, 9), np.array([3, 4]), np.array([7, 8])
    planner = choose().memory_planner([LookupKind(table, Pooling.NONE)] * 2, 1)
    places = np.array([Place(n, 0, 2, -1, 0, 0, -1, 32 * n) for n in range(2)], np.int64)
    out = np.zeros((4, 4), np.float32)
    planner.run_rows(places, ids, out, np.array([0, array_address(other)]))
    np.testing.assert_array_equal(out, expected_of(table, np.array([3, 4, 7, 8])))
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"{8 * count} bytes are no addresses for 2 lookups"):
            planner.run_rows(places, ids, out, np.zeros(count, np.int64))


@pytest.mark.thorough
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_changed_job_is_refused_or_stays_in_its_buffers(data: st.DataObject) -> None:
    """Up to two fields of a good lookup get values as large and as odd as int64 holds; the bytes around the
    output stay.

    A job that is not changed gives what the reference gives, or names the bad id or length.
    """
    inputs, n, bags, is_good = data.draw(inputs_of())
    table = table_of(
        data.draw(st.sampled_from(list(RowFormat))), data.draw(st.sampled_from([4, 8, 64, 72])), rows=ROWS
    )
    pooling = data.draw(st.sampled_from(list(Pooling)))
    job = {
        "table": table.address, "rows": ROWS, "row_bytes": table.row_bytes, "dim": table.dim,
        "row_format": table.row_format,
        "pooling": pooling, "kind": 0, "ids_at": 1, "ids": n,
        "lengths_at": 1 + 8 * n, "bag_length": 0, "bags": bags,
        "weights_at": -1 if pooling is Pooling.NONE else 1 + 8 * n + 4 * bags,
        "out_at": 4, "out_row_bytes": 4 * table.dim, "precision": 0, "row_map": 0, "is_away": 0,
        "found_at": -1,
    }  # fmt: skip
    fields = data.draw(st.lists(st.sampled_from(LOOKUP_CHANGES), max_size=2, unique=True))
    changes = {name: data.draw(st.sampled_from(HOSTILE)) for name in fields}
    outputs = n if pooling is Pooling.NONE else bags
    out = bytearray(b"\xee" * (4 + 4 * table.dim * outputs + 4))
    found = run(lookup, {**job, **changes}, inputs, out, data.draw(st.sampled_from([1, 2, 3])))
    if changes:
        return
    assert out[:4] == out[-4:] == b"\xee" * 4
    if is_good:
        assert found is None
        ids = np.frombuffer(inputs, np.int64, n, 1)
        lengths = None if pooling is Pooling.NONE else np.frombuffer(inputs, np.int32, bags, 1 + 8 * n)
        weights = (
            None if pooling is Pooling.NONE else np.frombuffer(inputs, np.float32, n, 1 + 8 * n + 4 * bags)
        )
        values = np.frombuffer(out, np.float32, outputs * table.dim, 4).reshape(-1, table.dim)
        expect(table, ids.copy(), _copied(lengths), pooling=pooling, weights=_copied(weights)).check(values)


def _copied(array: np.ndarray | None) -> np.ndarray | None:
    """The same values, aligned."""
    return None if array is None else array.copy()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.drawn(0.5)
def test_a_changed_gather_is_refused_or_stays_in_its_buffers(data: st.DataObject) -> None:
    """The same for rows that are copied as they are packed."""
    inputs, n, _, _ = data.draw(inputs_of())
    table = table_of(RowFormat.INT8, 8, rows=ROWS)
    job = {
        "table": table.address, "rows": ROWS, "row_bytes": table.row_bytes, "dim": 1, "row_format": 0,
        "pooling": 3, "kind": 0, "ids_at": 1, "ids": n, "lengths_at": -1, "bag_length": 0, "bags": 0,
        "weights_at": -1, "out_at": 4, "out_row_bytes": 0, "precision": 0, "row_map": 0, "is_away": 0,
        "found_at": -1,
    }  # fmt: skip
    fields = data.draw(st.lists(st.sampled_from(GATHER_CHANGES), max_size=2, unique=True))
    changes = {name: data.draw(st.sampled_from(HOSTILE)) for name in fields}
    out = bytearray(b"\xee" * (4 + table.row_bytes * n + 4))
    found = run(lookup, {**job, **changes}, inputs, out, 2)
    if not changes and found is None:
        assert out[:4] == out[-4:] == b"\xee" * 4
        assert bytes(out[4:-4]) == table.packed[np.frombuffer(inputs, np.int64, n, 1).copy()].tobytes()


@pytest.mark.parametrize(
    "change", [{"pooling": 2**32}, {"pooling": 2**32 + 1}, {"row_format": 2**32}], ids=str
)
def test_numbers_that_would_be_good_ones_in_32_bits_are_refused(change: dict[str, int]) -> None:
    """Pooling 2^32 is not unpooled, whose lengths nobody checks."""
    table = table_of(RowFormat.INT8, 64)
    job = {
        "table": table.address, "rows": table.rows, "row_bytes": table.row_bytes, "dim": 64,
        "row_format": table.row_format,
        "pooling": Pooling.SUM, "kind": 0, "ids_at": 0, "ids": 1, "lengths_at": 8, "bag_length": 0, "bags": 1,
        "weights_at": -1, "out_at": 0, "out_row_bytes": 256, "precision": 0, "row_map": 0, "is_away": 0,
        "found_at": -1,
    }  # fmt: skip
    inputs = np.array([5, 1], np.int64).tobytes()
    assert lookup(job, inputs, bytearray(256)) is None
    with pytest.raises(ValueError, match="out of range"):
        lookup({**job, **change}, inputs, bytearray(256))


@pytest.mark.parametrize("threads", [2**31, 2**32, 2**32 + 1, 2**63 - 1])
def test_more_threads_than_there_can_be_are_as_many_as_there_can_be(threads: int) -> None:
    """2^32 threads are not none, which would leave a task that nobody takes."""
    table = table_of(RowFormat.INT8, 64)
    found = choose("native").lookup(table, np.arange(20), np.array([20], np.int32), threads=threads)
    np.testing.assert_array_equal(
        found, choose("native").lookup(table, np.arange(20), np.array([20], np.int32))
    )


@pytest.mark.parametrize("row_bytes", [-16, 0, 1, 67, 2**61])
def test_quantizing_into_rows_that_are_too_short_is_refused(row_bytes: int) -> None:
    """A row of 64 int8 values has 68 bytes; into fewer none are written."""
    out = bytearray(b"\xee" * 160)
    with pytest.raises(ValueError, match=r"out of range|do not lie in"):
        _native.quantize(RowFormat.INT8, Source.FP32, np.ones((2, 64), np.float32), 2, 64, out, row_bytes)
    assert out == b"\xee" * 160


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("source", [Source.FP32, Source.FP16, Source.BF16], ids=lambda s: s.name)
@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.label)
def test_values_at_odd_addresses_quantize_like_others(
    row_format: RowFormat, source: Source, isa: str
) -> None:
    """A checkpoint may have its values at any byte."""
    values = values_of(5, 96)
    sent = (
        values
        if source is Source.FP32
        else values.astype(np.float16)
        if source is Source.FP16
        else values.view(np.uint16)[:, 1::2]
    )
    aligned = bytearray(5 * row_format.row_bytes(96))
    odd = bytearray(len(aligned))
    _native.use(isa)
    try:
        for data, out in ((sent.tobytes(), aligned), (memoryview(b"x" + sent.tobytes())[1:], odd)):
            assert _native.quantize(row_format, source, data, 5, 96, out, row_format.row_bytes(96)) == -1
    finally:
        _native.use(_native.isas()[0])
    assert odd == aligned


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(("first", "end"), [(0, 2**31), (7, 900), (3, 3), (900, 7)])
def test_listed_rows_are_gathered_to_their_units(first: int, end: int, threads: int) -> None:
    """What CUDA calls for the cache: rows of 4 to 48 bytes, padded to 16. Those are copied that go to
    units in [first, end)."""
    rng = np.random.default_rng(3)
    words_each = rng.integers(1, 13, 1200)
    units_each = -(-words_each // 4)
    source = rng.integers(0, 256, (1200, 48), np.uint8)
    starts = np.concatenate([[0], np.cumsum(units_each)])
    listed = np.zeros(2 + 1200, np.int64)
    listed[0], listed[2:] = 1200, source.ctypes.data + 48 * np.arange(1200) | words_each << 48
    units = starts[:-1].astype(np.int32)
    room = np.full((starts[-1] + 1) * 16, 0xEE, np.uint8)
    at = -room.ctypes.data % 16  # copies are of 16 bytes, aligned
    staging = room[at : at + starts[-1] * 16]
    request = np.array(
        [listed.ctypes.data, units.ctypes.data, staging.ctypes.data, threads, first, end], np.int64
    )
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_native.gather_rows())(request.ctypes.data)
    expected = np.full_like(staging, 0xEE)
    for row, unit, words in zip(source, units, words_each, strict=True):
        if first <= unit < end:
            padded = np.pad(row[: words * 4], (0, -words * 4 % 16))
            expected[unit * 16 : unit * 16 + padded.size] = padded
    np.testing.assert_array_equal(staging, expected)
