"""Kernels compiled without a GPU: in processes of their own, as this one's Triton may be its interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from tableside.quant.gpu.ahead import WantedKernels, kernels_of
from tableside.quant.gpu.tables import KernelKey

WANTED = WantedKernels(KernelKey(1 << 2), pooled=False, unpooled=True, has_maps=True, is_indirect=(False,))
RUN = """
import json, sys
from tableside.quant.gpu.ahead import WantedKernels, compile_all
from tableside.quant.gpu.tables import KernelKey
if __name__ == "__main__":
    wanted = WantedKernels(KernelKey(1 << 2), pooled=False, unpooled=True, has_maps=True, is_indirect=(False,))
    told = []
    done = compile_all(wanted, int(sys.argv[1]), 2, lambda *done: told.append(done))
    print(json.dumps([sorted(one.name for one in done), told]))
"""


def run(tmp_path: Path, arch: int) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "run.py"
    script.write_text(RUN)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run([sys.executable, str(script), str(arch)], capture_output=True, text=True, env=environment, check=False)


def compiled(tmp_path: Path) -> dict[str, float]:
    """The binaries in the cache, and when each was written."""
    return {str(f.relative_to(tmp_path)): f.stat().st_mtime_ns for f in (tmp_path / "cache").rglob("*.cubin")}


def test_kernels_are_compiled_once_for_an_architecture(tmp_path: Path) -> None:
    """Binaries of it are in the cache then, and a second run finds them; another architecture has others."""
    first = run(tmp_path, 90)
    assert first.returncode == 0, first.stderr
    names, told = json.loads(first.stdout)
    assert names == ["lookup, unpooled", "resolve", "resolve, with deltas"] == sorted(kernels_of(WANTED))
    assert told == [[1, 3], [2, 3], [3, 3]]
    before = compiled(tmp_path)
    assert len(before) == 3
    assert run(tmp_path, 90).returncode == 0 and compiled(tmp_path) == before
    assert run(tmp_path, 80).returncode == 0 and len(compiled(tmp_path)) == 6


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    """By the compiler, with its number."""
    found = run(tmp_path, 11)
    assert found.returncode != 0 and "QuantError: sm_11" in found.stderr, found.stderr


def test_every_kernel_of_a_placement_is_there() -> None:
    """Each launch configuration with and without weights, and the cache's for each way to fetch."""
    cached = WantedKernels(KernelKey(1 << 2), True, True, True, (False, True), 144, (False, True), is_followed=True)
    names = kernels_of(cached)
    assert sum(name.startswith("lookup") for name in names) == 3 * 2 * 2 + 2
    assert sum(name.startswith("cache") for name in names) == 2 * 17
    assert {"bag_starts", "resolve", "fill"} < set(names) and "fill" not in kernels_of(WANTED)
