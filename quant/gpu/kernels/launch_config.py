"""Launch configurations of the lookup kernel, and the keys by which requests share launches."""

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
    """A launch configuration. unroll: rows in flight a thread; block_columns: 16-byte row chunks a program, a
    power of two; warps: of a program; lanes: threads that share a bag, a power of two."""

    unroll: int
    block_columns: int
    warps: int
    lanes: int = 1


@dataclass(frozen=True)
class LaunchConfigs:
    """Configurations for pooled lookups of long, short and few very long bags, and for unpooled ones,
    measured by benchmarks/gpu_lookup.py and gpu_cache.py."""

    long: LaunchConfig = LaunchConfig(10, 32, 1)
    short: LaunchConfig = LaunchConfig(4, 32, 1)
    unpooled: LaunchConfig = LaunchConfig(1, 64, 2)
    few: LaunchConfig = LaunchConfig(4, 32, 8, 8)

    def of_pooled(self, ids: int, bags: int, bag_columns: int) -> LaunchConfig:
        """Returns the configuration by the number and mean length of a request's bags. bag_columns: of all
        bags' vectors."""
        if ids >= VERY_LONG * bags and bag_columns < FEW_PROGRAMS * self.long.block_columns:
            return self.few
        return self.long if ids >= LONG * bags else self.short


class SharedLaunch(NamedTuple):
    """Key of a shared launch; one object a value, so compare by identity."""

    key: KernelKey
    config: LaunchConfig


class NativeLayout(NamedTuple):
    """A request for `_native.place_batch`. measured: by `_native.measure`. pooled, unpooled: keys of shared
    launches. is_overlaid: a table has an overlay."""

    kinds: bytes
    measured: bytes
    pooled: SharedLaunch
    unpooled: SharedLaunch
    is_overlaid: bool


@cache
def shared_launch(key: KernelKey, config: LaunchConfig) -> SharedLaunch:
    """The one object for lookups that are compiled and cut up alike."""
    return SharedLaunch(key, config)
