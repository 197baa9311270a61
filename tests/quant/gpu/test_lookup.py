"""What the GPU backend does beyond the contract of all backends (test_backends.py): batches of requests,
tables of host and device in one plan, bf16, long bags, and each kernel against its reference."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import kernel_steps
import numpy as np
import pytest
import tables
import torch
from reference import REFERENCE
from rounding import expect
from tables import expected_of, gpu_backend, placed, table_of

from tableside.quant import (
    BadIds,
    Lookup,
    MissingBackend,
    Pooling,
    Precision,
    QuantError,
    RowFormat,
    RowSource,
    Table,
    choose,
)
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.kernels.bag_starts import bag_starts
from tableside.quant.gpu.kernels.job import FIELDS, JobField
from tableside.quant.gpu.kernels.launch_config import LaunchConfigs

pytestmark = pytest.mark.gpu

IDS = np.array([3, 199, 0, 3, 7, 11, 150], np.int64)
LENGTHS = np.array([2, 0, 5], np.int32)


def summed(table: RowSource, precision: Precision = Precision.FP32, out_at: int = 0) -> Lookup:
    return Lookup(table, Pooling.SUM, 0, IDS.size, out_at, precision, LENGTHS.size, IDS.nbytes)


INPUTS = IDS.tobytes() + LENGTHS.tobytes()


def test_bf16_vectors() -> None:
    """The fp32 sums with 8 bits of mantissa (the interpreter cuts where a GPU rounds); FBGEMM refuses to
    write them."""
    table = table_of(RowFormat.INT8, 36)
    lk = summed(placed(table), Precision.BF16)
    out = np.empty(lk.out_bytes, np.uint8)
    gpu_backend().plan([lk]).run(INPUTS, out)
    found = torch.from_numpy(out).view(torch.bfloat16).float().numpy().reshape(3, 36)
    expect(table, IDS, LENGTHS, pooling=Pooling.SUM, precision=Precision.BF16).check(found)
    with pytest.raises(QuantError, match="bf16 vectors are written by the backend native and by GPUs"):
        choose("fbgemm").plan([summed(table, Precision.BF16)])


@pytest.mark.parametrize(
    ("row_format", "dim"),
    [(RowFormat.FP16, 9), (RowFormat.FP8, 17), (RowFormat.INT8, 13)],
)
def test_a_chunk_of_one_value(row_format: RowFormat, dim: int) -> None:
    """The last 16 bytes of a row, which a thread reads at once, hold one value, and that begins a word."""
    table = table_of(row_format, dim)
    lk = summed(placed(table))
    out = np.empty(lk.out_bytes, np.uint8)
    gpu_backend().plan([lk]).run(INPUTS, out)
    expect(table, IDS, LENGTHS, pooling=Pooling.SUM).check(out.view(np.float32).reshape(3, dim))


@pytest.mark.sanitized_gpu
@pytest.mark.drawn(0.5)
def test_every_format_and_width_in_one_launch() -> None:
    """One plan over all formats, widths that fill words and that do not, pooled and not."""
    held = [table_of(f, dim) for f in RowFormat for dim in (4, 12, 100)]
    lookups, at = [], 0
    for n, table in enumerate(held):
        pooling = Pooling.NONE if n % 3 == 2 else Pooling.MEAN
        lk = Lookup(placed(table), pooling, 0, IDS.size, at, bags=LENGTHS.size, lengths_at=IDS.nbytes)
        lookups.append(lk)
        at += lk.out_bytes
    out = np.empty(at, np.uint8)
    gpu_backend().plan(lookups).run(INPUTS, out)
    for table, lk in zip(held, lookups, strict=True):
        lengths = None if lk.pooling is Pooling.NONE else LENGTHS
        found = out[lk.out_at : lk.out_at + lk.out_bytes].view(np.float32).reshape(-1, table.dim)
        expect(table, IDS, lengths, pooling=lk.pooling).check(found)


@pytest.mark.sanitized_gpu
def test_requests_of_a_batch_are_answered_each_on_its_own() -> None:
    """Right ones, one with a bad id, one with bad lengths, and one with no ids, in one batch."""
    table = table_of(RowFormat.INT4, 32)
    backend: Any = gpu_backend()
    plan = backend.plan([summed(placed(table))])
    empty = backend.plan([Lookup(placed(table), Pooling.SUM, 0, 0, 0, bags=2, bag_length=0)])
    bad_id, bad_length = IDS.copy(), LENGTHS.copy()
    bad_id[5], bad_length[1] = 200, 1
    requests = [
        (plan, INPUTS),
        (plan, bad_id.tobytes() + LENGTHS.tobytes()),
        (empty, b""),
        (plan, IDS.tobytes() + bad_length.tobytes()),
        (plan, IDS[::-1].tobytes() + LENGTHS.tobytes()),
    ]
    results = tables.run_batch(backend, requests)
    assert isinstance(results[1], BadIds) and (results[1].position, results[1].value, results[1].bound) == (
        5,
        200,
        200,
    )
    assert isinstance(results[3], BadIds) and results[3].value == 8
    assert not results[2].view(np.float32).any() and results[2].size == 2 * 32 * 4
    for n, ids in ((0, IDS), (4, IDS[::-1].copy())):
        found = results[n].view(np.float32).reshape(3, 32)
        expect(table, ids, LENGTHS, pooling=Pooling.SUM).check(found)


@pytest.mark.sanitized_gpu
def test_tables_of_host_and_device_in_one_plan() -> None:
    """A bad id of either is found, by the number that its lookup has in the plan."""
    table = table_of(RowFormat.INT8, 20)
    lookups = [summed(table), summed(placed(table), out_at=240), summed(table, Precision.FP16, 480)]
    out = np.empty(600, np.uint8)
    gpu_backend().plan(lookups).run(INPUTS, out)
    for at in (0, 240):
        expect(table, IDS, LENGTHS, pooling=Pooling.SUM).check(
            out[at : at + 240].view(np.float32).reshape(3, 20)
        )
    halves = out[480:].view(np.float16).reshape(3, 20)
    expect(table, IDS, LENGTHS, pooling=Pooling.SUM, precision=Precision.FP16).check(halves)
    short = Table(table.packed[:100], table.row_format, table.dim)
    for number in range(3):
        cut = [
            Lookup(
                short if n != 1 else placed(short),
                Pooling.SUM,
                0,
                IDS.size,
                lk.out_at,
                bags=3,
                lengths_at=IDS.nbytes,
            )
            if n == number
            else lk
            for n, lk in enumerate(lookups)
        ]
        with pytest.raises(BadIds) as caught:
            gpu_backend().plan(cut).run(INPUTS, np.empty(720, np.uint8))
        assert (caught.value.job, caught.value.position, caught.value.value) == (number, 1, 199)


def test_bags_of_one_length_that_are_not_the_ids_are_refused() -> None:
    """A second request's ids lie behind a first one's; none may read them."""
    table = placed(table_of(RowFormat.INT8, 8))
    with pytest.raises(QuantError, match="3 bags of 2 ids are 6; the lookup has 4"):
        gpu_backend().plan([Lookup(table, Pooling.SUM, 0, 4, 0, bags=3, bag_length=2)])


def test_models_of_other_formats_and_widths_in_one_batch() -> None:
    """Each is launched as what it was compiled for; flags and answers go to the right one."""
    backend: Any = gpu_backend()
    tables_ = [
        table_of(RowFormat.INT8, 8),
        table_of(RowFormat.INT4, 20),
        table_of(RowFormat.INT8, 6),
        table_of(RowFormat.FP16, 8),
    ]
    plans = [
        backend.plan([summed(placed(t)), Lookup(placed(t), Pooling.NONE, 0, 7, 12 * t.dim)]) for t in tables_
    ]
    bad = IDS.copy()
    bad[4] = 1000
    results = tables.run_batch(
        backend, [(p, bad.tobytes() + LENGTHS.tobytes() if n == 2 else INPUTS) for n, p in enumerate(plans)]
    )
    for n, (table, result) in enumerate(zip(tables_, results, strict=True)):
        if n == 2:
            assert isinstance(result, BadIds) and result.value == 1000
            continue
        found = result.view(np.float32).reshape(10, table.dim)
        expect(table, IDS, LENGTHS, pooling=Pooling.SUM).check(found[:3])
        np.testing.assert_array_equal(found[3:], expected_of(table, IDS))


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize(
    "row_format",
    [pytest.param(RowFormat.INT8, marks=pytest.mark.sanitized_gpu), RowFormat.INT2, RowFormat.FP16],
    ids=lambda f: f.label,
)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_few_long_bags(row_format: RowFormat, is_weighted: bool) -> None:
    """Walked by several threads each: of one length and of their own, an empty one among them, and with a
    bad id in the last."""
    table = table_of(row_format, 36)
    rng = np.random.default_rng(3)
    ids, weights = rng.integers(0, 200, 600), rng.random(600, np.float32)
    how: dict[str, Any] = (
        {"pooling": Pooling.SUM, "weights": weights} if is_weighted else {"pooling": Pooling.MEAN}
    )
    for lengths in (np.array([423, 0, 177], np.int32), np.array([200, 200, 200], np.int32)):
        found = gpu_backend().lookup(placed(table), ids, lengths, **how)
        expect(table, ids, lengths, **how).check(found)
    ids[599] = 200
    with pytest.raises(BadIds) as caught:
        gpu_backend().lookup(placed(table), ids, lengths, pooling=Pooling.SUM)
    assert (caught.value.position, caught.value.value) == (599, 200)


def test_a_plan_of_another_backend_is_refused() -> None:
    """Of the CPU, and of another GPU backend, whose tables may lie on another device."""
    table = table_of(RowFormat.INT8, 20)
    other = GpuBackend(tables.DEVICE, choose())
    for plan in (choose().plan([summed(table)]), other.plan([summed(placed(table))])):
        with pytest.raises(QuantError, match="the plan was made by another backend"):
            tables.run_batch(gpu_backend(), [(plan, INPUTS)])


def test_the_interpreter_is_asked_for_openly() -> None:
    """A GPU where kernels are interpreted, or the other way round, is refused, not replaced."""
    other = "cuda:0" if tables.DEVICE == "interpreter" else "interpreter"
    with pytest.raises(MissingBackend, match="TRITON_INTERPRET was"):
        GpuBackend(other, choose())


@pytest.mark.sanitized_gpu
@pytest.mark.parametrize(
    ("lengths", "ids"),
    [
        ([2, 0, 5], 7),
        ([2, 0, 5], 8),
        ([3, -1, 5], 7),
        ([], 0),
        ([1] * 3000, 3000),
        ([2**31 - 1] * 3, 3 * (2**31 - 1)),
    ],
    ids=["right", "a sum that is not the ids", "negative", "no bags", "more than one block", "beyond int32"],
)
def test_starts_of_bags_are_those_of_the_reference(lengths: list[int], ids: int) -> None:
    """Verdict, starts and flag of one job; starts that int32 does not hold are never read, since plans
    refuse as many ids."""
    device = gpu_backend().device.torch_device  # type: ignore[attr-defined]
    job = np.zeros(FIELDS, np.int64)
    job[JobField.VECTORS], job[JobField.IDS] = len(lengths), ids
    jobs = torch.tensor(job, device=device)
    inputs = torch.tensor([*lengths, 0], dtype=torch.int32, device=device)
    scratch = torch.zeros(len(lengths) + 2, dtype=torch.int32, device=device)
    flags = torch.zeros(1, dtype=torch.int32, device=device)
    bag_starts[(1,)](*(t.data_ptr() for t in (jobs, inputs, scratch, flags)), BLOCK=1024)
    is_wrong, starts = kernel_steps.bag_starts(lengths, ids)
    assert bool(scratch[0]) == bool(flags[0]) == is_wrong
    assert scratch[1:].tolist() == np.array(starts).astype(np.int32).tolist()


def test_vectors_are_those_of_the_reference() -> None:
    """Weighted sums and means of int8 rows, added in the order of their ids."""
    table = table_of(RowFormat.INT8, 12)
    rows = REFERENCE.dequantize(table)
    weights = np.linspace(-1, 2, IDS.size, dtype=np.float32)
    _, starts = kernel_steps.bag_starts(LENGTHS.tolist(), IDS.size)
    for pooling, given in ((Pooling.SUM, weights), (Pooling.MEAN, None)):
        found = gpu_backend().lookup(placed(table), IDS, LENGTHS, pooling=pooling, weights=given)
        vectors = []
        for first, end in pairwise(starts):
            own = None if given is None else given[first:end].tolist()
            vectors.append(
                kernel_steps.pooled(rows[IDS[first:end]].tolist(), own, pooling is Pooling.MEAN, 12)
            )
        wanted = expect(table, IDS, LENGTHS, pooling=pooling, weights=given)
        replace(wanted, vectors=np.array(vectors)).check(found)


def test_a_warm_up_reaches_every_configuration_of_pooled_lookups() -> None:
    """A GPU compiles a kernel for each. The interpreter compiles none, and one bag is enough."""
    configs = LaunchConfigs()
    found = {configs.of_pooled(ids, bags=1, bag_columns=1) for ids in GpuBackend.warm_up_bags}
    assert found == {configs.long, configs.short, configs.few}
    assert (
        gpu_backend().warm_up_bags == GpuBackend.warm_up_bags[: 1 if tables.DEVICE == "interpreter" else None]
    )


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from tableside.quant.gpu.kernels import lookup as k
from tableside.quant.gpu.kernels.bag_starts import bag_starts

names = ("jobs", "job_of_program", "inputs", "scratch", "outputs", "flags", "locations", "staging")
VARIANTS = {80: ((4, 1, 0, 0, 1, 1),),
            90: ((4, 1, 0, 0, 1, 1), (4, 0, 0, 1, 1, 1), (63, 1, 1, 0, 0, 1), (4, 1, 0, 1, 1, 8),
                 (4, 1, 0, 2, 1, 1))}
for arch in VARIANTS:
    for formats, pooled, weighted, indirect, whole, lanes in VARIANTS[arch]:
        constants = dict(FORMATS=formats, POOLED=bool(pooled), WEIGHTED=bool(weighted),
                         INDIRECT=bool(indirect), TIGHT=indirect == 2, WHOLE_WORDS=bool(whole),
                         UNROLL=(4 if lanes > 1 else 8) if pooled else 1,
                         COLUMNS=32 if lanes > 1 else 128 if pooled else 512, LANES=lanes)
        signature = {**dict.fromkeys(names, "i64"), **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(k.lookup, signature=signature, constexprs=constants)
        options = {"num_warps": 8 if lanes > 1 else 4}
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        ptx = compiled.asm["ptx"]
        assert ".local" not in ptx, "registers spill, or arrays are in local memory"
        if whole and formats == 4 and lanes == 1:
            assert "st.global.v4" in ptx, "vectors are not written 16 bytes at a time"
    signature = {**dict.fromkeys(("jobs", "inputs", "scratch", "flags"), "i64"), "BLOCK": "constexpr"}
    source = ASTSource(bag_starts, signature=signature, constexprs={"BLOCK": 1024})
    triton.compile(source, target=GPUTarget("cuda", arch, 32))
print("compiled")
"""


@pytest.mark.thorough
def test_the_kernels_compile_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For sm_80 and sm_90, without a GPU: no local memory, wide stores."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "compiled"
