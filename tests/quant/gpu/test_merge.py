"""Requests of a batch put one after another: C writes what the reference in Python does, byte for byte."""

import gc
import mmap
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tables
from batch_reference import ReferenceBatch, Request
from drawn_lookups import Drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_tables import raw_table
from reference import REFERENCE
from tables import table_of

from tableside.quant import LookupKind, Place, Pooling, RowFormat, choose
from tableside.quant.cpu import _native
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.batch.layout import Layout
from tableside.quant.gpu.batch.placed import LOCKED_FROM, BatchLayout, Copy

pytestmark = pytest.mark.gpu

ROWS_AT = 1 << 40  # where gathered rows would lie

needs_interpreter = pytest.mark.skipif(
    "__import__('tables').DEVICE != 'interpreter'", reason="reads host memory that is not registered"
)


def layout_of(backend: GpuBackend, one: Request) -> Layout:
    return backend.planner(one.kinds).plan(one.places.tobytes(), one.out_bytes).layout


def check_alike(
    backend: GpuBackend, requests: list[Request], extras: list[int] | None = None, stays: Any = None
) -> ReferenceBatch:
    """What is launched, and the bytes that are sent to the device. Gaps between parts hold 0xEE."""
    extras, stays = extras or [0] * len(requests), stays or [False] * len(requests)
    wanted = ReferenceBatch(requests, extras, stays, backend, ROWS_AT)
    for has_header in (True, False):
        batch = BatchLayout([layout_of(backend, one) for one in requests], extras, stays)
        assert (batch.sizes, batch.bases, batch.outputs_at) == (
            wanted.sizes,
            wanted.bases,
            wanted.outputs_at,
        )
        if has_header:
            launches = batch.launches()
            assert [{**vars(a), "members": (*a.members,)} for a in launches.lookups] == [
                vars(b) for b in wanted.launches.lookups
            ]
            assert replace(launches, lookups=()) == replace(wanted.launches, lookups=())
        size = batch.sizes.inputs + has_header * batch.sizes.header
        host = np.full(size, 0xEE, np.uint8)
        inputs = [one.inputs for one in requests]
        assert batch.write([*inputs], host, batch.sizes.inputs, [], ROWS_AT) == []
        assert host.tobytes() == wanted.sent[:size]
    return wanted


@needs_interpreter
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_requests_of_several_planners(seed: int, count: int) -> None:
    """In HBM, split, mapped and of the CPU, pooled and not, with lengths and without, gathered and not, with
    what follows and outputs that stay."""
    drawn = [Drawn(seed), Drawn(seed + 1)]
    rng = drawn[0].rng
    backend = GpuBackend(tables.DEVICE, REFERENCE, gather_from=rng.choice([1, 4, 1000]))
    kinds = []
    for one in drawn:
        sources = [
            backend.place(how, t, None, share=512) if how == "hybrid" else backend.place(how, t, None)
            for t in one.tables
            for how in [rng.choice(["hbm", "hbm", "hybrid", "zero_copy", "host"])]
        ]
        kinds.append(one.over(sources))
    requests = []
    for _ in range(count):
        n = rng.randrange(2)
        places, inputs, out_bytes = drawn[n].request()
        requests.append(Request(kinds[n], places, inputs, out_bytes))
    check_alike(
        backend, requests, [rng.choice([0, 16, 48]) for _ in requests], [rng.random() < 0.3 for _ in requests]
    )


@needs_interpreter
@pytest.mark.parametrize("masks", [(), (1,), (0, 1)], ids=["no masks", "of raw ids", "of all"])
@pytest.mark.parametrize("how", ["hbm", "cached"])
def test_requests_whose_ids_become_row_numbers(how: str, masks: tuple[int, ...]) -> None:
    """Those of a table with raw ids, beside one without, through a cache and not, with found masks and
    without."""
    values = np.ones((100, 64), np.float32)
    table = raw_table(np.arange(100) * 1_000_003, values, RowFormat.INT8, missing=values[0])
    backend = GpuBackend(tables.DEVICE, REFERENCE)
    backend.open_cache(60_000, 16)
    held = backend.place("hbm", table) if how == "hbm" else backend.place("cached", table, None)
    dense = backend.place("cached", table_of(RowFormat.INT8, 8), None)
    kinds = [LookupKind(dense, Pooling.NONE), LookupKind(held, Pooling.MEAN)]
    requests = []
    for count in (3, 0, 1500):  # the last one takes several programs of each kernel
        out_bytes = 32 * count + 256
        asked = [
            Place(0, 0, count, -1, 0, 0, -1, 0),
            Place(1, 8 * count, count, -1, count, 1, -1, 32 * count),
        ]
        for n in masks:
            asked[n], out_bytes = asked[n]._replace(found_at=out_bytes), out_bytes + count
        inputs = np.arange(2 * count, dtype=np.int64).tobytes()
        requests.append(Request(kinds, np.array(asked, np.int64), inputs))
        layout = layout_of(backend, requests[-1])
        assert layout.asked_bytes == out_bytes and layout.is_direct == (0 not in masks)
    check_alike(backend, requests)


@needs_interpreter
def test_rows_of_host_memory_are_read_in_place_by_small_requests() -> None:
    """From `gather_from` ids on the CPU gathers them, but not those of raw ids: the device finds their
    rows."""
    backend = GpuBackend(tables.DEVICE, REFERENCE, gather_from=8)
    table = table_of(RowFormat.INT8, 8)
    mapped = [LookupKind(backend.place("zero_copy", table, None), Pooling.NONE)]
    values = np.ones((9, 64), np.float32)
    raw = raw_table(np.arange(9), values, RowFormat.INT8, missing=np.zeros(64, np.float32))
    read = [LookupKind(backend.place("zero_copy", raw, None), Pooling.NONE)]
    for kinds, ids, gathered in ((mapped, 7, 0), (mapped, 8, 8 * table.row_bytes), (read, 8, 0)):
        places = np.array([Place(0, 0, ids, -1, 0, 0, -1, 0)], np.int64)
        one = Request(kinds, places, np.arange(ids).tobytes())
        assert layout_of(backend, one).rows_bytes == gathered
        check_alike(backend, [one, one])


@needs_interpreter
def test_gathered_rows_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup that does not fit is read in place; one behind it that does is gathered."""
    backend = GpuBackend(tables.DEVICE, REFERENCE, gather_from=1)
    table = table_of(RowFormat.INT8, 8)
    monkeypatch.setattr("tableside.quant.gpu.batch.layout.GATHER_BYTES", 10 * table.row_bytes)
    kinds = [LookupKind(backend.place("zero_copy", table, None), Pooling.NONE)]
    counts = (6, 5, 4, 1)
    places = [Place(0, 8 * sum(counts[:n]), c, -1, 0, 0, -1, 32 * n * 8) for n, c in enumerate(counts)]
    plan = backend.planner(kinds).plan(np.array(places, np.int64).tobytes())
    assert [(g.target, g.bytes) for g in plan.layout.gathers] == [(0, 10 * table.row_bytes)]
    ids = np.arange(sum(counts))
    out = np.zeros(4 * 256, np.uint8)
    plan.run(ids.tobytes(), out)
    expected = REFERENCE.lookup(table, ids, pooling=Pooling.NONE)
    for n, count in enumerate(counts):
        first = sum(counts[:n])
        got = out[256 * n : 256 * n + 32 * count].view(np.float32).reshape(count, 8)
        np.testing.assert_array_equal(got, expected[first : first + count])


def test_inputs_that_are_too_short_are_refused() -> None:
    """Nothing is read behind them, however the other requests are."""
    backend: Any = tables.gpu_backend()
    planner = backend.planner([LookupKind(backend.place("hbm", table_of(RowFormat.INT8, 8)), Pooling.NONE)])
    layout = planner.plan(np.array([Place(0, 0, 9, -1, 0, 0, -1, 0)], np.int64).tobytes()).layout
    one = BatchLayout([layout, layout])
    one.launches()
    host = np.zeros(one.sizes.inputs + one.sizes.header, np.uint8)
    with pytest.raises(ValueError, match="does not lie in its buffer"):
        one.write([bytes(72), bytes(71)], host, one.sizes.inputs, [])
    with pytest.raises(ValueError, match="the header of a batch"):
        one.write([bytes(72), bytes(72)], host[:-1], one.sizes.inputs, [])


def test_what_the_c_routines_are_not_meant_for_is_refused() -> None:
    """Before anything is read or written."""
    layout = large_request(tables.gpu_backend(), 3)[0].layout
    kinds, measured, *shared = layout.native
    host, inputs = np.zeros(4096, np.uint8), bytes(4096)
    bases = _native.place_batch([layout.native], None, None)[0]
    for wrong in (
        (kinds, measured),
        (kinds, measured[:-8], *shared),
        (bytearray(kinds), measured, *shared),
        [*layout.native],
    ):
        with pytest.raises(TypeError, match="a request of a batch is kinds"):
            _native.place_batch([wrong], None, None)
    for extras, stays in (([], None), (None, [False] * 2), (None, (False,))):
        with pytest.raises(TypeError, match="are lists of an item for each request"):
            _native.place_batch([layout.native], extras, stays)
    for wrong in (
        ([layout.native], bases[:-8], [inputs], host, 64, 0, []),
        ([layout.native], bases, [], host, 64, 0, []),
    ):
        with pytest.raises(TypeError, match="bases are bytes, sources a list"):
            _native.write_batch(*wrong, 0)
    with pytest.raises(TypeError, match="a range of memory is its begin and its end"):
        _native.write_batch([layout.native], bases, [inputs], host, 64, 0, [7], 0)
    with pytest.raises(ValueError, match="at a multiple of 8 bytes"):
        _native.write_batch([layout.native], bases, [inputs], host, 60, 0, [], 0)
    with pytest.raises(ValueError, match="blocks are positive"):
        _native.measure(kinds, measured, 0, 0, 32, 0, 128, 256)
    with pytest.raises(TypeError, match="a source is moves and a buffer"):
        _native.write_batch([layout.native], bases, [(inputs,)], host, 64, 0, [], 0)
    with pytest.raises(TypeError, match="what measure made of them"):
        _native.lay_out(kinds, measured[:-8])


def in_memory(size: int) -> np.ndarray:
    """Bytes that are mapped as those are that processes share."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def large_request(backend: Any, ids: int) -> tuple[Any, np.ndarray]:
    """A plan, and as its inputs that many ids."""
    planner = backend.planner([LookupKind(backend.place("hbm", table_of(RowFormat.INT8, 8)), Pooling.NONE)])
    return planner.plan(np.array([Place(0, 8, ids, -1, 0, 0, -1, 0)], np.int64).tobytes()), np.arange(
        -1, ids
    ) % 200


def test_large_inputs_in_locked_memory_are_left_to_the_device() -> None:
    """All else is staged: small ones, those that lie elsewhere, and those that end behind the memory."""
    plan, inputs = large_request(tables.gpu_backend(), LOCKED_FROM // 8)
    size = inputs.nbytes
    memory = in_memory(2 * size)
    memory[:size] = memory[size:] = inputs.view(np.uint8)
    begin, view = int(memory.ctypes.data), memory.data
    asked = [view[:size], inputs.tobytes(), view[size:], view[:size]]
    one = BatchLayout([plan.layout] * 4)
    host = np.zeros(one.sizes.inputs, np.uint8)
    left = one.write(asked, host, one.sizes.inputs, [(begin, begin + 2 * size - 1)])
    assert left == [Copy(one.bases[n].inputs, begin + 8, LOCKED_FROM) for n in (0, 3)]
    staged = host.view(np.int64).reshape(4, -1)
    assert [bool((staged[n] == inputs[1:]).all()) for n in range(4)] == [False, True, True, False]
    small = BatchLayout([large_request(tables.gpu_backend(), 9)[0].layout])
    assert small.write([view[:80]], host, 0, [(begin, begin + 2 * size)]) == []
    with pytest.raises(ValueError, match="does not lie in its buffer"):
        one.write([view[: size - 1], *asked[1:]], host, one.sizes.inputs, [(begin, begin + 2 * size)])


@pytest.mark.drawn(0.5)
def test_what_the_device_copies_by_itself_gives_the_same_vectors() -> None:
    """In a batch with a request that the CPU stages; the memory is let go with its last view."""
    backend = GpuBackend(tables.DEVICE, choose())
    plan, inputs = large_request(backend, LOCKED_FROM // 8)
    other, few = large_request(backend, 5)
    memory = in_memory(inputs.nbytes)
    memory[:] = inputs.view(np.uint8)
    backend.batches.read_inputs_in(memory)
    view = memory.data
    del memory
    assert len(backend.batches.locked.ranges) == 1
    inside, beside, outside = tables.run_batch(
        backend, [(plan, view), (other, few.tobytes()), (plan, inputs.tobytes())]
    )
    assert (
        isinstance(inside, np.ndarray) and isinstance(outside, np.ndarray) and isinstance(beside, np.ndarray)
    )
    np.testing.assert_array_equal(inside, outside)
    np.testing.assert_array_equal(beside[: 5 * 32], inside[: 5 * 32])
    del view
    gc.collect()
    assert not backend.batches.locked.ranges
