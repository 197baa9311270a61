"""Requests of a batch put one after another: the C routine writes what Python does, byte for byte."""

import gc
import mmap
from typing import Any

import numpy as np
import pytest
import tables
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
from tableside.quant.gpu.batch.placed import (
    LOCKED_FROM,
    BatchLayout,
    Copy,
    NativeBatchLayout,
    batch_layout,
)

pytestmark = pytest.mark.gpu

needs_interpreter = pytest.mark.skipif(
    "__import__('tables').DEVICE != 'interpreter'", reason="reads host memory that is not registered"
)


def written(
    one: BatchLayout | NativeBatchLayout, inputs: list[bytes], with_header: bool
) -> tuple[Any, bytes]:
    """What is launched, and the bytes that are sent to the device. Gaps between parts hold 0xEE."""
    at, launches = one.sizes.inputs, None
    size, launches = one.launches(0) if with_header else (0, None)
    host = np.full(at + size, 0xEE, np.uint8)
    assert one.write(inputs, host, at, []) == []
    return launches, host.tobytes()


def check_alike(layouts: list[Layout], inputs: list[bytes], extras: list[int], stays: list[bool]) -> None:
    for with_header in (True, False):
        native, python = (
            batch_layout(layouts, extras, stays, tables.gpu_backend().device, natively)
            for natively in (True, False)
        )
        assert isinstance(native, NativeBatchLayout) and isinstance(python, BatchLayout)
        assert native.sizes == python.sizes
        assert (native.bases, native.outputs_at) == (python.bases, python.outputs_at)
        (launches, sent), (expected, wanted) = (written(one, inputs, with_header) for one in (native, python))
        assert sent == wanted
        if launches is not None:
            assert [(*vars(a).values(),) for a in launches.lookups] == [
                (*{**vars(b), "members": [*b.members]}.values(),) for b in expected.lookups
            ]
            assert (launches.resolve, launches.probe) == (expected.resolve, expected.probe)


@needs_interpreter
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_requests_of_several_planners(seed: int, count: int) -> None:
    """In HBM and split, pooled and not, with lengths and without, with what follows and outputs that stay."""
    backend: Any = tables.gpu_backend()
    drawn = [Drawn(seed), Drawn(seed + 1)]
    rng = drawn[0].rng
    planners = []
    for one in drawn:
        sources = [
            backend.place("hbm", t) if rng.random() < 0.5 else backend.place("hybrid", t, None, share=512)
            for t in one.tables
        ]
        planners.append(backend.planner(one.over(sources)))
    layouts, inputs = [], []
    for _ in range(count):
        n = rng.randrange(2)
        places, given, out_bytes = drawn[n].request()
        layouts.append(planners[n].plan(places.tobytes(), out_bytes).layout)
        inputs.append(given)
    check_alike(
        layouts, inputs, [rng.choice([0, 16, 48]) for _ in layouts], [rng.random() < 0.3 for _ in layouts]
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
    planner = backend.planner([LookupKind(dense, Pooling.NONE), LookupKind(held, Pooling.MEAN)])
    layouts, inputs = [], []
    for count in (3, 0, 1500):  # the last one takes several programs of each kernel
        out_bytes = 32 * count + 256
        asked = [
            Place(0, 0, count, -1, 0, 0, -1, 0),
            Place(1, 8 * count, count, -1, count, 1, -1, 32 * count),
        ]
        for n in masks:
            asked[n], out_bytes = asked[n]._replace(found_at=out_bytes), out_bytes + count
        layouts.append(planner.plan(np.array(asked, np.int64).tobytes()).layout)
        assert layouts[-1].native is not None and layouts[-1].asked_bytes == out_bytes
        assert layouts[-1].is_direct == (0 not in masks)
        inputs.append(np.arange(2 * count, dtype=np.int64).tobytes())
    check_alike(layouts, inputs, [0] * 3, [False] * 3)


@needs_interpreter
def test_small_requests_of_host_memory_are_laid_out_too() -> None:
    """The GPU reads their rows in place. From `gather_from` ids on the CPU gathers them, which Python lays
    out, and so it is where the CPU looks rows up."""
    backend = GpuBackend(tables.DEVICE, REFERENCE, gather_from=8)
    table = table_of(RowFormat.INT8, 8)
    mapped = backend.planner([LookupKind(backend.place("zero_copy", table, None), Pooling.NONE)])
    layouts = {}
    for ids in (7, 8):
        places = np.array([Place(0, 0, ids, -1, 0, 0, -1, 0)], np.int64).tobytes()
        layouts[ids] = mapped.plan(places).layout
        assert (layouts[ids].native is None) == bool(layouts[ids].gathers) == (ids == 8)
    check_alike([layouts[7]], [np.arange(7).tobytes()], [0], [False])
    raw = raw_table(
        np.arange(9), np.ones((9, 64), np.float32), RowFormat.INT8, missing=np.zeros(64, np.float32)
    )
    read = backend.planner([LookupKind(backend.place("zero_copy", raw, None), Pooling.NONE)])
    places = np.array([Place(0, 0, 8, -1, 0, 0, -1, 0)], np.int64).tobytes()
    assert read.plan(places).layout.native is not None  # the device finds their rows, however many
    on_host = backend.planner([LookupKind(backend.place("host", table), Pooling.NONE)])
    places = np.array([Place(0, 0, 1, -1, 0, 0, -1, 0)], np.int64).tobytes()
    assert on_host.plan(places).layout.native is None


def test_inputs_that_are_too_short_are_refused() -> None:
    """Nothing is read behind them, however the other requests are."""
    backend: Any = tables.gpu_backend()
    planner = backend.planner([LookupKind(backend.place("hbm", table_of(RowFormat.INT8, 8)), Pooling.NONE)])
    layout = planner.plan(np.array([Place(0, 0, 9, -1, 0, 0, -1, 0)], np.int64).tobytes()).layout
    one = batch_layout([layout, layout], [0, 0], [False, False], tables.gpu_backend().device)
    host = np.zeros(one.sizes.inputs + one.launches(0)[0], np.uint8)
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
        ([layout.native], bases[:-8], [inputs], host, 64, []),
        ([layout.native], bases, [], host, 64, []),
    ):
        with pytest.raises(TypeError, match="bases are bytes, sources a list"):
            _native.write_batch(*wrong, 0)
    with pytest.raises(TypeError, match="a range of memory is its begin and its end"):
        _native.write_batch([layout.native], bases, [inputs], host, 64, [7], 0)
    with pytest.raises(ValueError, match="at a multiple of 8 bytes"):
        _native.write_batch([layout.native], bases, [inputs], host, 60, [], 0)
    with pytest.raises(ValueError, match="blocks are positive"):
        _native.measure(kinds, measured, 0, 32, 0, 128, 256)


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
    one = batch_layout([plan.layout] * 4, [0] * 4, [False] * 4, tables.gpu_backend().device)
    host = np.zeros(one.sizes.inputs, np.uint8)
    left = one.write(asked, host, one.sizes.inputs, [(begin, begin + 2 * size - 1)])
    assert left == [Copy(one.bases[n].inputs, begin + 8, LOCKED_FROM) for n in (0, 3)]
    staged = host.view(np.int64).reshape(4, -1)
    assert [bool((staged[n] == inputs[1:]).all()) for n in range(4)] == [False, True, True, False]
    (small,) = batch_layout(
        [large_request(tables.gpu_backend(), 9)[0].layout], [0], [False], tables.gpu_backend().device
    ).write([view[:80]], host, 0, [(begin, begin + 2 * size)]) or [None]
    assert small is None
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
