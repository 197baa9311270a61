"""What kernels are compiled for, and which ones the lookups of a model's tables launch. Imports neither
torch nor Triton."""

from dataclasses import dataclass

from tableside.quant.contract import Table


@dataclass(frozen=True)
class KernelKey:
    """What the lookup kernel is compiled for. formats: a bit for each row format; whole_words: every dim is a
    multiple of 4.

    Tables that are used together share a key, so that everything they need is compiled when they are first
    used.
    """

    formats: int = 0
    whole_words: bool = True

    def __or__(self, other: "KernelKey") -> "KernelKey":
        return KernelKey(self.formats | other.formats, self.whole_words and other.whole_words)

    @classmethod
    def of(cls, *tables: Table) -> "KernelKey":
        """For these tables."""
        formats = 0
        for table in tables:
            formats |= 1 << table.row_format
        return cls(formats, all(t.dim % 4 == 0 for t in tables))


@dataclass(frozen=True)
class WantedKernels:
    """What lookups of a model's tables launch.

    pooled, unpooled: whether there are such features. has_maps: ids of a table become row numbers first.
    is_indirect: whether rows are read through a cache or in two places; both where tables differ.
    cached_row_bytes: sizes of rows that may be the widest behind a cache; none: there is none. gathers:
    whether the CPU gathers what the cache misses, or both. is_lfu: the cache's policy. is_followed: something
    reads vectors on the device (`quant.gpu.batch.follower`). tensor_features: features that PyTorch modules
    look up in one call, at most (`quant.gpu.tensors.tensors`); 0: there are no modules.
    """

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
