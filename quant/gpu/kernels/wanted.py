"""Compile keys of kernels, and the kernels that a model's lookups launch. Imports neither torch nor
Triton."""

from dataclasses import dataclass

from tableside.quant.contract import Table
from tableside.quant.row_format import GPU_ALIGNMENT


@dataclass(frozen=True)
class KernelKey:
    """Compile key of the lookup kernel. formats: a bit for each row format; whole_words: every dim is a
    multiple of 4; is_tight: rows in host memory may not be padded for the device. Tables used together share
    a key, so the first use compiles all."""

    formats: int = 0
    whole_words: bool = True
    is_tight: bool = False

    def __or__(self, other: "KernelKey") -> "KernelKey":
        return KernelKey(
            self.formats | other.formats,
            self.whole_words and other.whole_words,
            self.is_tight or other.is_tight,
        )

    @classmethod
    def of(cls, *tables: Table) -> "KernelKey":
        """For these tables."""
        formats = 0
        for table in tables:
            formats |= 1 << table.row_format
        is_tight = any(t.row_bytes % GPU_ALIGNMENT for t in tables)
        return cls(formats, all(t.dim % 4 == 0 for t in tables), is_tight)


@dataclass(frozen=True)
class WantedKernels:
    """The kernels for lookups of a model's tables.
    pooled, unpooled: there are such features. has_maps: a table maps ids. is_indirect: rows come through a
    cache or from two places; both values if tables differ. cached_row_bytes: sizes that may be a cache's
    widest row; empty: no cache. gathers: the CPU gathers cache misses, or both values. is_lfu: the cache's
    policy. is_followed: something reads vectors on the device (`quant.gpu.batch.follower`). tensor_features:
    most features of a PyTorch module's call (`quant.gpu.tensors.tensors`); 0: no modules."""

    key: KernelKey
    pooled: bool
    unpooled: bool
    has_maps: bool
    is_indirect: tuple[bool, ...]
    cached_row_bytes: tuple[int, ...] = ()
    gathers: tuple[bool, ...] = (False,)
    is_lfu: bool = True
    is_followed: bool = False
    tensor_features: int = 0
