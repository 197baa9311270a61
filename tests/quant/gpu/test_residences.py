"""Where the GPU backend reads rows: in place or gathered, split between device and host, beyond 4 GiB."""

import mmap
import os
from typing import Any

import kernel_steps
import numpy as np
import pytest
import tables
import torch
import triton
import triton.language as tl
from reference import backend_of
from rounding import expect
from tables import expected_of, gpu_backend, table_of

from tableside.quant import BadIds, Lookup, Pooling, QuantError, RowFormat, RowSource, Table, choose
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.kernels import lookup as k

pytestmark = pytest.mark.gpu

needs_interpreter = pytest.mark.skipif(
    "__import__('tables').DEVICE != 'interpreter'", reason="reads host memory that is not registered"
)


def viewed(table: Table) -> RowSource:
    """A table that the interpreter reads where it lies."""
    return gpu_backend().place("zero_copy", table, None)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.drawn(1)
@needs_interpreter
@pytest.mark.parametrize("cpu", ["native", "reference"])
@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.label)
def test_rows_in_place_and_gathered_are_the_same(row_format: RowFormat, cpu: str) -> None:
    """Gathered rows keep every bit, also where their bytes, read as numbers, would be signaling NaNs."""
    table = table_of(row_format, 12, rows=300)
    ids = np.random.default_rng(0).integers(0, 300, 80)
    lengths = np.array([20, 60], np.int32)
    for pooling in (Pooling.NONE, Pooling.SUM):
        bags = None if pooling is Pooling.NONE else lengths
        found = []
        for gather_from in (1, 10_000):
            backend = GpuBackend("interpreter", backend_of(cpu), gather_from=gather_from)
            found.append(backend.lookup(backend.place("zero_copy", table, None), ids, bags, pooling=pooling))
        np.testing.assert_array_equal(found[0], found[1])


@needs_interpreter
@pytest.mark.parametrize("position", [0, 699])
def test_a_bad_id_among_gathered_rows(position: int) -> None:
    """Its request is refused, and the others of the batch are answered."""
    table = table_of(RowFormat.INT8, 12)
    ids = np.arange(700) % 200
    bad = ids.copy()
    bad[position] = -7
    backend = GpuBackend("interpreter", choose(), gather_from=1)
    plan = backend.plan([Lookup(backend.place("zero_copy", table, None), Pooling.NONE, 0, 700, 0)])
    assert plan.layout.gathers
    refused, answered = tables.run_batch(backend, [(plan, bad.tobytes()), (plan, ids.tobytes())])
    assert isinstance(refused, BadIds) and isinstance(answered, np.ndarray)
    assert (refused.position, refused.value, refused.bound) == (position, -7, 200)
    np.testing.assert_array_equal(answered.view(np.float32).reshape(700, 12), expected_of(table, ids))


@needs_interpreter
def test_rows_beyond_4_gib_are_found() -> None:
    """A table of 10^9 rows over memory that is not there but for a few pages: offsets pass 2^31 and 2^32
    bytes."""
    rows, row_bytes = 10**9, RowFormat.INT2.row_bytes(16)
    fd = os.memfd_create("sparse")
    os.ftruncate(fd, rows * row_bytes)
    memory = mmap.mmap(fd, rows * row_bytes)
    os.close(fd)
    packed = np.frombuffer(memory, np.uint8).reshape(rows, row_bytes)
    small = table_of(RowFormat.INT2, 16, rows=5)
    ids = np.array([0, 2**31 // row_bytes, 2**32 // row_bytes + 1, 2**29 + 3, rows - 1])
    packed[ids] = small.packed
    table = Table(packed, RowFormat.INT2, 16)
    wanted = expected_of(small, np.arange(5))
    np.testing.assert_array_equal(gpu_backend().lookup(viewed(table), ids, pooling=Pooling.NONE), wanted)  # type: ignore[arg-type]
    with pytest.raises(BadIds):
        gpu_backend().lookup(viewed(table), ids + 2**32, pooling=Pooling.NONE)  # type: ignore[arg-type]


@needs_interpreter
def test_rows_beyond_the_limit_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that asks for gigabytes of host rows takes no gigabytes of page-locked memory."""
    monkeypatch.setattr("tableside.quant.gpu.batch.layout.GATHER_BYTES", 300 * 16)
    backend = GpuBackend("interpreter", choose(), gather_from=1)
    table = table_of(RowFormat.INT8, 12)
    ids = np.arange(400) % 200
    held = backend.place("zero_copy", table, None)
    assert backend.plan([Lookup(held, Pooling.NONE, 0, 400, 0)]).layout.rows_bytes == 0
    assert backend.plan([Lookup(held, Pooling.NONE, 0, 300, 0)]).layout.rows_bytes == 300 * 16
    np.testing.assert_array_equal(backend.lookup(held, ids, pooling=Pooling.NONE), expected_of(table, ids))


@needs_interpreter
def test_the_rows_of_many_ids_are_gathered() -> None:
    """From 4,096 ids of a request on, 65,536 rows at a time; each part lies behind the one before."""
    backend = GpuBackend("interpreter", choose())
    held = backend.place("zero_copy", table_of(RowFormat.INT8, 12), None)

    def gathers(*ids: int) -> list[tuple[int, int]]:
        lookups = [Lookup(held, Pooling.NONE, 0, n, 48 * sum(ids[:i])) for i, n in enumerate(ids)]
        return [(g.target, g.bytes) for g in backend.plan(lookups).layout.gathers]

    assert gathers(4095) == []
    assert gathers(4096) == [(0, 4096 * 16)]
    assert gathers(2048, 2048) == [(0, 4096 * 16)]
    assert gathers(70_000) == [(0, 65_536 * 16), (65_536 * 16, (70_000 - 65_536) * 16)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "row_format",
    [pytest.param(RowFormat.INT8, marks=pytest.mark.sanitized_gpu), RowFormat.FP16],
    ids=lambda f: f.label,
)
@pytest.mark.parametrize("share", [1, 300, 1023])
def test_split_tables(row_format: RowFormat, share: int) -> None:
    """Some rows of every block on the device, the others on the host: pooled, not pooled, more ids than
    would be gathered."""
    backend: Any = gpu_backend()
    table = table_of(row_format, 24, rows=2500)
    memory = None
    if not backend.device.reads_all_memory:
        memory = torch.empty(table.packed.size, dtype=torch.uint8, pin_memory=True)
        memory.numpy()[:] = table.packed.reshape(-1)
    split = backend.place("hybrid", table, memory, share=share)
    ids = np.concatenate(
        [[0, 1023, 1024, 2047, 2048, 2499], np.random.default_rng(1).integers(0, 2500, 6000)]
    )
    np.testing.assert_array_equal(backend.lookup(split, ids, pooling=Pooling.NONE), expected_of(table, ids))
    lengths = np.array([*[100] * 59, 0, 106], np.int32)
    found = backend.lookup(split, ids, lengths, pooling=Pooling.SUM)
    expect(table, ids, lengths, pooling=Pooling.SUM).check(found)


@pytest.mark.parametrize("share", [0, 1024])
def test_a_share_that_splits_nothing_is_refused(share: int) -> None:
    table = table_of(RowFormat.INT8, 24)
    with pytest.raises(QuantError, match=f"a share of {share} of 1024 rows; expected 1 to 1023"):
        gpu_backend().place("hybrid", table, torch.from_numpy(table.packed), share=share)


@triton.jit
def addresses_of(
    ids,
    locations,
    out,
    table,
    row_bytes,
    hbm_rows,
    share,
    staging,
    INDIRECT: tl.constexpr,
    TIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The kernel's row addresses, int64 [BLOCK], of ids int64 [BLOCK] and locations int32 [BLOCK]."""
    at = tl.arange(0, BLOCK)
    location = tl.load(locations + at).to(tl.int64)
    address = k._row_address(
        tl.load(ids + at), table, row_bytes, location, hbm_rows, share, staging, INDIRECT, TIGHT
    )
    tl.store(out + at, address)


@pytest.mark.parametrize(
    ("locations", "share"),
    [
        ([-1, -1, -1, -1], 0),
        ([0, 7, -1, 2**31 - 1], 0),
        ([-2, -3, -(2**31), 5], 0),
        ([-1, -1, -1, -1], 3),
        ([-1, -1, -1, -1], 1023),
    ],
    ids=["table", "slots", "staging", "split", "nearly whole"],
)
@pytest.mark.parametrize("row_bytes", [48, 36])
def test_row_addresses_are_those_of_the_reference(locations: list[int], share: int, row_bytes: int) -> None:
    """Each kind of residence, by the one function of the kernel that says where a row lies. Addresses pass
    2^32 bytes."""
    ids = [0, 2, -(1024 * 5 + 2), 10**9] if share == 0 else [0, 2, 1024 * 5 + 2, 10**9]
    table, hbm_rows, staging = 1 << 40, 1 << 41, 1 << 42
    device = gpu_backend().device.torch_device  # type: ignore[attr-defined]
    given = torch.tensor(ids, device=device), torch.tensor(locations, dtype=torch.int32, device=device)
    out = torch.zeros(4, dtype=torch.int64, device=device)
    is_tight = row_bytes % 16 != 0
    addresses_of[(1,)](
        *given, out, table, row_bytes, hbm_rows, share, staging, INDIRECT=True, TIGHT=is_tight, BLOCK=4
    )
    wanted = [
        kernel_steps.row_address(id, table, row_bytes, location, hbm_rows, share, staging)
        for id, location in zip(ids, locations, strict=True)
    ]
    assert out.tolist() == wanted
