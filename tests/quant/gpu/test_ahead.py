"""Kernels compiled without a GPU: in processes of their own, as this one's Triton may be its interpreter."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from drivers import stand_in_driver
from support import is_running, until

pytest.importorskip("triton")
from tableside.loader.segment.memory import processes_below
from tableside.quant import QuantError
from tableside.quant.device.architecture import architectures
from tableside.quant.gpu.ahead import compile_all, kernels_of
from tableside.quant.gpu.kernels.wanted import KernelKey, WantedKernels

pytestmark = pytest.mark.gpu

INT8 = KernelKey(1 << 2)
WANTED = WantedKernels(INT8, pooled=False, unpooled=True, has_maps=True, is_indirect=(False,))
LAUNCHES = "Triton's launches"  # what is compiled once where CUDA's driver is


@pytest.fixture(autouse=True)
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return tmp_path / "cache"


def compiled(folder: Path) -> dict[str, float]:
    """The binaries in the cache, and when each was written."""
    return {str(f.relative_to(folder)): f.stat().st_mtime_ns for f in folder.rglob("*.cubin")}


@pytest.mark.thorough
def test_kernels_are_compiled_once_for_an_architecture(triton_cache: Path) -> None:
    """Binaries of it are in the cache then, and a second run finds them."""
    told: list[tuple[int, int]] = []
    done = {one.name for one in compile_all(WANTED, 90, 2, lambda *done: told.append(done))} - {LAUNCHES}
    assert done == {"lookup, unpooled", "resolve", "resolve, with deltas"} == set(
        kernels_of(WANTED)
    ) and told[-1][0] == told[-1][1] == len(told)
    before = compiled(triton_cache)
    assert len(before) == 3
    compile_all(WANTED, 90, 2)
    assert compiled(triton_cache) == before


@pytest.mark.thorough
def test_an_unknown_architecture_is_refused() -> None:
    """By the compiler, with its number."""
    with pytest.raises(QuantError, match=r"^sm_11: .*where this Triton does not know sm_11, name one"):
        compile_all(WANTED, 11, 2)


@pytest.mark.thorough
def test_what_launches_is_compiled_where_the_driver_is(
    tmp_path: Path, triton_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C module that Triton would compile at the first launch is in its cache."""
    stand_in_driver(tmp_path, monkeypatch, 9, 0)
    assert LAUNCHES in {one.name for one in compile_all(WANTED, 90, 2)}
    assert [*triton_cache.rglob("cuda_utils*.so")]


def test_the_architecture_is_what_the_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each device; none where one of them is not there."""
    stand_in_driver(tmp_path, monkeypatch, 10, 3)
    assert architectures((0, 1)) == [103, 103] and architectures((0, 2)) == []


@pytest.mark.thorough
def test_compilers_end_with_the_process_that_asked() -> None:
    """However it ends: here it is killed."""
    code = """
from tableside.quant.gpu.ahead import compile_all
from tableside.quant.gpu.kernels.wanted import *
wanted = WantedKernels(KernelKey(1 << 2), True, True, True, (False, True), (144,))
compile_all(wanted, 90, 2, lambda *done: print(done, flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None and asking.stdout.readline().startswith("(1, ")
        compilers = processes_below(asking.pid)
        assert len(compilers) >= 3
        asking.send_signal(signal.SIGKILL)
    until(lambda: not any(map(is_running, compilers)), what="the compilers' end")


def test_every_kernel_of_a_placement_is_there() -> None:
    """Each launch configuration with and without weights, the cache's for each way to fetch and width of
    rows, and modules'."""
    cached = WantedKernels(
        INT8, True, True, True, (False, True), (144, 140, 64), (False, True), is_followed=True
    )
    names = kernels_of(cached)
    assert sum(name.startswith("lookup,") for name in names) == 3 * 2 * 2 + 2
    gathered = [name for name in names if ", gathered" in name]
    rows_of_64 = [name for name in names if name.endswith("rows of 64")]
    assert sum(name.startswith("cache") for name in names) == 17 + len({*rows_of_64, *gathered})
    assert {re.sub(", rows.*", "", name) for name in gathered} == {"cache, fetch_misses, gathered"} and len(
        gathered
    ) == 2
    assert (
        len(rows_of_64) == 4
    )  # those that copy rows, one in two ways; rows of 140 bytes are copied as those of 144 are
    assert {"bag_starts", "resolve", "fill"} < set(names) and "fill" not in kernels_of(WANTED)


def test_modules_have_kernels_of_their_own() -> None:
    """A lookup for each of a server's, and what makes jobs for every number of features up to the model's."""
    wanted = WantedKernels(INT8, True, False, True, (True,), (144,), tensor_features=5)
    names = kernels_of(wanted)
    assert sum(name.startswith("lookup of tensors") for name in names) == 3 * 2
    assert {name for name in names if name.startswith("spread")} == {
        f"spread, {what}, {lanes}" for what in ("ids", "cache") for lanes in (1, 2, 4, 8)
    }
