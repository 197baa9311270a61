"""How launches of the lookup kernel are cut up, and what lookups of several requests share one by."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tableside.quant.gpu.kernels.wanted import KernelKey

LONG = 8  # ids of a bag, on average
VERY_LONG, FEW_PROGRAMS = (
    64,
    1024,
)  # ids of a bag, and programs that do not fill a GPU: several lanes share each bag


@dataclass(frozen=True)
class LaunchConfig:
    """How a launch is cut up. unroll: rows in flight a thread; block_columns: 16-byte chunks of rows a
    program, a power of two; warps: of a program; lanes: threads that share a bag, a power of two."""

    unroll: int
    block_columns: int
    warps: int
    lanes: int = 1


@dataclass(frozen=True)
class LaunchConfigs:
    """The configurations for pooled lookups of long bags and of short ones, for unpooled lookups, and for
    few very long bags, as benchmarks/gpu_lookup.py and gpu_cache.py found them."""

    long: LaunchConfig = LaunchConfig(10, 32, 1)
    short: LaunchConfig = LaunchConfig(4, 32, 1)
    unpooled: LaunchConfig = LaunchConfig(1, 64, 2)
    few: LaunchConfig = LaunchConfig(4, 32, 8, 8)

    def of_pooled(self, ids: int, bags: int, bag_columns: int) -> LaunchConfig:
        """The configuration for a request's bags, by the mean of their lengths and by how many there are.

        bag_columns: of the vectors of all bags.
        """
        if ids >= VERY_LONG * bags and bag_columns < FEW_PROGRAMS * self.long.block_columns:
            return self.few
        return self.long if ids >= LONG * bags else self.short


class SharedLaunch(NamedTuple):
    """What requests share launches by. There is one object of each, so it can be compared by identity."""

    key: KernelKey
    config: LaunchConfig


class NativeLayout(NamedTuple):
    """A request as `_native.place_batch` takes it. measured: what `_native.measure` made of its places.

    pooled, unpooled: what launches of these lookups are shared by. is_overlaid: one of its tables has an
    overlay.
    """

    kinds: bytes
    measured: bytes
    pooled: SharedLaunch
    unpooled: SharedLaunch
    is_overlaid: bool


@cache
def shared_launch(key: KernelKey, config: LaunchConfig) -> SharedLaunch:
    """The one object for lookups that are compiled and cut up alike."""
    return SharedLaunch(key, config)
