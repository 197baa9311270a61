"""Compiles kernels where there is no GPU, or before one is used; a first launch finds them in Triton's disk
cache. A kernel is compiled for an architecture, constants and argument types, without a device. `compile_all`
runs the compile part of first launches with a driver that only knows the architecture, so cache keys match.
With CUDA's driver installed it also compiles Triton's launch code. It runs in a separate process, which
imports torch and Triton once and forks `jobs` compilers. That process reads what is wanted from stdin, writes
a line of JSON a kernel, and ends with its stdin, so it does not outlive its parent. This module imports torch
and Triton only there."""

import ctypes
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, NamedTuple

from tableside.quant.errors import QuantError
from tableside.quant.gpu.batch.follower import FILL_BLOCK
from tableside.quant.gpu.batch.resolve import RESOLVE_BLOCK
from tableside.quant.gpu.kernels.wanted import WantedKernels

if TYPE_CHECKING:
    from tableside.quant.device.launch import Kernel

_WARP = 32  # threads
_RUN = "from tableside.quant.gpu.ahead import compile_what_is_read; compile_what_is_read()"
_ONE_THREAD = {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")
}  # so that the process may be forked
_SHOWN = 2000  # characters of what the process wrote before it failed
_LAUNCH_CODE = "Triton's launches"


class CompiledKernel(NamedTuple):
    """A kernel that was compiled, or was there. seconds: that it took."""

    name: str
    seconds: float


def kernels_of(wanted: WantedKernels) -> "dict[str, Kernel]":
    """All of them, by names that say what they are for. MissingBackend: Triton does not import."""
    from tableside.quant.gpu.kernels import compiled as kernels

    found: dict[str, Kernel] = _lookups(wanted, of_tensors=False)
    if wanted.pooled:
        found["bag_starts"] = kernels.bag_starts()
    if wanted.has_maps:
        found["resolve"] = kernels.resolver(RESOLVE_BLOCK)
    found["resolve, with deltas"] = kernels.resolver(RESOLVE_BLOCK, True)  # which may come to any table
    if wanted.is_followed:
        found["fill"] = kernels.filler(FILL_BLOCK)
    if wanted.tensor_features:
        found |= _lookups(wanted, of_tensors=True) | _spreads(wanted)
    return found | _of_cache(wanted)


def _lookups(wanted: WantedKernels, of_tensors: bool) -> "dict[str, Kernel]":
    from tableside.quant.gpu.kernels import compiled as kernels
    from tableside.quant.gpu.kernels.launch_config import LaunchConfigs

    configs = LaunchConfigs()
    kinds = (
        [(True, "long", configs.long), (True, "short", configs.short), (True, "few", configs.few)]
        if wanted.pooled
        else []
    )
    kinds += [(False, "unpooled", configs.unpooled)] if wanted.unpooled else []
    found = {}
    for pooled, label, config in kinds:
        for is_weighted in (False, True) if pooled else (False,):
            for is_indirect in wanted.is_indirect:
                what = f"{label}{', weighted' * is_weighted}{', cached or split' * is_indirect}"
                found[f"lookup{' of tensors' * of_tensors}, {what}"] = kernels.lookup(
                    wanted.key,
                    config,
                    pooled=pooled,
                    is_weighted=is_weighted,
                    is_indirect=is_indirect,
                    of_tensors=of_tensors,
                )
    return found


def _spreads(wanted: WantedKernels) -> "dict[str, Kernel]":
    """Kernels that write the jobs of kernels before the lookup, for every number of features."""
    from tableside.quant.cache.jobs import PROBE_BLOCK
    from tableside.quant.gpu.kernels import compiled as kernels

    kinds = [("ids", True, RESOLVE_BLOCK)]  # without maps as well, as a delta brings one
    kinds += [("cache", False, PROBE_BLOCK)] if wanted.cached_row_bytes else []
    widths = range(kernels.spread_lanes(wanted.tensor_features).bit_length())
    return {
        f"spread, {what}, {1 << n}": kernels.spread(resolves, 1 << n, block)
        for what, resolves, block in kinds
        for n in widths
    }


def _of_cache(wanted: WantedKernels) -> "dict[str, Kernel]":
    """The cache's. Most do not depend on who gathers, nor on how wide rows are."""
    if not wanted.cached_row_bytes:
        return {}
    from tableside.quant.cache.jobs import PROBE_BLOCK
    from tableside.quant.cache.pipeline import Kernels

    found = {}
    seen = set()
    for gathers in wanted.gathers:
        for row_bytes in wanted.cached_row_bytes:
            kernels = Kernels(wanted.is_lfu, gathers, row_bytes, wanted.key.is_tight, PROBE_BLOCK)
            for name, kernel in kernels.by_name().items():
                if kernel.identity not in seen:
                    seen.add(kernel.identity)
                    found[f"cache, {name}{', gathered' * gathers}, rows of {row_bytes}"] = kernel
    return found


def compile_all(
    wanted: WantedKernels, arch: int, jobs: int, progress: Callable[[int, int], None] | None = None
) -> list[CompiledKernel]:
    """Compiles the kernels, `jobs` at a time. arch: 90 for sm_90. progress: called with (done, total).
    QuantError: the compiler rejects the architecture or a kernel, or Triton does not import."""
    done: list[CompiledKernel] = []
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, **_ONE_THREAD},
        )
        assert process.stdin is not None and process.stdout is not None
        with process:
            try:
                pickle.dump((wanted, arch, jobs), process.stdin)
                process.stdin.flush()
                error = _read(process.stdout, done, progress)
                process.wait()  # it would end at once where its input was closed before
            except BrokenPipeError:
                error = "the compiling process ended"
            except BaseException:
                process.kill()
                raise
        if process.returncode and not error:
            log.seek(0)
            shown = log.read().decode(errors="replace")[-_SHOWN:]
            error = f"the compiling process ended with {process.returncode}: {shown}"
    if error:
        raise QuantError(
            f"sm_{arch}: {' '.join(error.split())}; where this Triton does not know sm_{arch}, name one that "
            "it knows, such as sm_90"
        )
    return done


def _read(lines: Any, done: list[CompiledKernel], progress: Callable[[int, int], None] | None) -> str:
    """Takes what the process says of each kernel; why it failed, or ""."""
    for line in lines:
        if not line.startswith(b'{"'):  # a compiler that fails writes lines of its own between
            continue
        told = json.loads(line)
        if "error" in told:
            return str(told["error"])
        done.append(CompiledKernel(told["name"], told["seconds"]))
        if progress is not None:
            progress(len(done), told["of"])
    return ""


# ---- in the compiling process ----


class _Architecture:
    """The driver that Triton needs to compile."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, _WARP)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_what_is_read() -> None:
    """Runs in the compiling process."""
    wanted, arch, jobs = pickle.load(sys.stdin.buffer)
    try:
        names = list(kernels_of(wanted))
        if has_driver():
            names.insert(0, _LAUNCH_CODE)
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(max(1, min(jobs, len(names))), context, _become_compiler, (arch,)) as pool:
            running = [
                pool.submit(_compile, wanted, name) for name in names
            ]  # the first one forks all compilers
            threading.Thread(target=_end_with_input, daemon=True).start()
            for future in as_completed(running):
                print(json.dumps({**future.result()._asdict(), "of": len(names)}), flush=True)
    except Exception as error:  # noqa: BLE001  (whatever a compiler raises; it is told, and the process fails)
        print(json.dumps({"error": str(error)}), flush=True)
        os._exit(1)


def has_driver() -> bool:
    """True if CUDA's driver, which launch code links to, is installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _end_with_input() -> None:
    """Ends the process when whoever started it closes its input, or is gone."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _become_compiler(arch: int) -> None:
    """Initialises a forked compiler; it ends with its parent."""
    import triton

    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    triton.runtime.driver.set_active(_Architecture(arch))


def _compile(wanted: WantedKernels, name: str) -> CompiledKernel:
    from triton.backends.nvidia import driver

    started = time.perf_counter()
    if name == _LAUNCH_CODE:
        driver.CudaUtils()
        return CompiledKernel(name, time.perf_counter() - started)
    compiled = kernels_of(wanted)[name].compile()
    if has_driver() and hasattr(driver, "make_launcher"):  # of Triton before 3.7: C code for each kernel
        driver.CudaLauncher(compiled.src, compiled.metadata)
    return CompiledKernel(name, time.perf_counter() - started)
