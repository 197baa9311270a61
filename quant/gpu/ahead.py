"""Kernels compiled where there is no GPU, or before one is used: a first launch finds them in Triton's cache on disk.

A kernel is compiled for an architecture, its constants and the types of its arguments; no device takes part. `compile_all` does
what first launches do, up to there, with a driver that knows the architecture alone. So the cache's keys are those that launches
look for. Each of several processes compiles another kernel.
"""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, NamedTuple

from tableside.quant.errors import QuantError
from tableside.quant.gpu.layout import LaunchConfigs
from tableside.quant.gpu.tables import KernelKey

_WARP = 32  # threads


@dataclass(frozen=True)
class WantedKernels:
    """What lookups of a model's tables launch.

    pooled, unpooled: whether there are such features. has_maps: ids of a table become row numbers first. is_indirect: whether
    rows are read through a cache or in two places; both where tables differ. cached_row_bytes: of the widest row behind a cache;
    0: there is none. gathers: the CPU gathers what the cache misses. is_followed: something reads vectors on the device
    (`quant.gpu.follower`).
    """

    key: KernelKey
    pooled: bool
    unpooled: bool
    has_maps: bool
    is_indirect: tuple[bool, ...]
    cached_row_bytes: int = 0
    gathers: tuple[bool, ...] = (False,)
    is_followed: bool = False


class Compiled(NamedTuple):
    """A kernel that was compiled, or was there. seconds: that it took."""

    name: str
    seconds: float


def kernels_of(wanted: WantedKernels) -> dict[str, Any]:
    """All of them, by names that say what they are for. MissingBackend: Triton does not import."""
    from tableside.quant.cache.pipeline import Kernels
    from tableside.quant.cache.settings import CacheSettings
    from tableside.quant.gpu import kernels

    found: dict[str, Any] = {}
    configs = LaunchConfigs()
    kinds = [(True, "long", configs.long), (True, "short", configs.short), (True, "few", configs.few)] if wanted.pooled else []
    kinds += [(False, "unpooled", configs.unpooled)] if wanted.unpooled else []
    for pooled, label, config in kinds:
        for is_weighted in (False, True) if pooled else (False,):
            for is_indirect in wanted.is_indirect:
                name = f"lookup, {label}{', weighted' * is_weighted}{', cached or split' * is_indirect}"
                found[name] = kernels.lookup(wanted.key, config, pooled=pooled, is_weighted=is_weighted, is_indirect=is_indirect)
    if wanted.pooled:
        found["bag_starts"] = kernels.bag_starts()
    if wanted.has_maps:
        found["resolve"] = kernels.resolver(False)
    found["resolve, with deltas"] = kernels.resolver(False, True)  # which may come to any table
    if wanted.is_followed:
        found["fill"] = kernels.filler(False)
    if wanted.cached_row_bytes:
        for gathers in wanted.gathers:
            of_cache = Kernels(CacheSettings().policy.is_lfu, gathers, wanted.cached_row_bytes, False)
            found |= {f"cache, {name}{', gathered' * gathers}": kernel for name, kernel in of_cache.by_name().items()}
    return found


def compile_all(
    wanted: WantedKernels, arch: int, jobs: int, progress: Callable[[int, int], None] | None = None
) -> list[Compiled]:
    """Compiles them, `jobs` at a time. arch: of the GPU, as 90 for sm_90. progress: told how many are done, of how many.

    QuantError: the compiler does not know the architecture, or refuses a kernel.
    """
    names = list(kernels_of(wanted))
    done = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(jobs, len(names))), context, _take_architecture, (arch,)) as pool:
        for future in as_completed([pool.submit(_compile, wanted, name) for name in names]):
            try:
                done.append(future.result())
            except Exception as error:
                pool.shutdown(cancel_futures=True)
                raise QuantError(
                    f"sm_{arch}: {error}; name an architecture that this Triton knows, such as sm_80 or sm_90"
                ) from error
            if progress is not None:
                progress(len(done), len(names))
    return done


class _Architecture:
    """What Triton asks its driver for while it compiles."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, _WARP)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _take_architecture(arch: int) -> None:
    import triton

    triton.runtime.driver.set_active(_Architecture(arch))


def _compile(wanted: WantedKernels, name: str) -> Compiled:
    started = time.perf_counter()
    kernels_of(wanted)[name].compile()
    return Compiled(name, time.perf_counter() - started)
