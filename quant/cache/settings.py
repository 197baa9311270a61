"""Settings of a cache: policies, sizes, who fetches."""

from dataclasses import dataclass
from enum import Enum

from tableside.quant.cache.kernels.state import SCORE_UNIT
from tableside.quant.errors import QuantError

_LONGEST_HALF_LIFE = 1 << 16


class Policy(Enum):
    """Evicts the rows not used for longest (LRU), or those used least, where old uses count less (LFU)."""

    LRU = "lru"
    LFU = "lfu"

    @property
    def is_lfu(self) -> bool:
        return self is Policy.LFU


@dataclass(frozen=True)
class CacheSettings:
    """Settings of a cache.
    half_life: tickets after which a use counts half (LFU). page_bytes: None: by the budget. staging_buffers:
    one for each batch in flight, `staging_fraction` of the budget together and at most `staging_bytes` each.
    row_programs: programs that fetch rows; enough to fill the bus, few beside other kernels. programs: of the
    other kernels; fewer leave more of the GPU to other work. gather_threads: CPU threads that gather batches
    of `gather_from` misses or more, for tables over which GPU reads are slow; 0: the GPU reads all. replays:
    launch a batch size as a CUDA graph from its third batch on; during a capture no other thread may
    synchronize the device."""

    policy: Policy = Policy.LFU
    half_life: int = 1000
    page_bytes: int | None = None
    staging_fraction: float = 0.2
    staging_bytes: int = 256 << 20
    staging_buffers: int = 1
    row_programs: int = 66
    programs: int = 1 << 15
    gather_threads: int = 0
    gather_from: int = 4096
    replays: bool = False

    def __post_init__(self) -> None:
        for name, is_right, expected in (
            ("half_life", 1 <= self.half_life <= _LONGEST_HALF_LIFE, f"1 to {_LONGEST_HALF_LIFE}"),
            (
                "page_bytes",
                self.page_bytes is None or (self.page_bytes >= 64 and self.page_bytes % 16 == 0),
                "a multiple of 16, 64 or more",
            ),
            ("staging_fraction", 0 <= self.staging_fraction < 1, "from 0 to below 1"),
            ("staging_buffers", self.staging_buffers >= 1, "1 or more"),
            ("staging_bytes", self.staging_bytes >= 0, "0 or more"),
            ("row_programs", self.row_programs >= 1, "1 or more"),
            ("programs", self.programs >= 1, "1 or more"),
            ("gather_threads", 0 <= self.gather_threads <= 64, "0 to 64"),
            ("gather_from", self.gather_from >= 1, "1 or more"),
        ):
            if not is_right:
                raise QuantError(f"{name} of a cache is {getattr(self, name)}; expected {expected}")

    @property
    def score_rate(self) -> int:
        """By how much the score of one use grows a ticket."""
        return max(1, SCORE_UNIT // self.half_life)

    @property
    def use_rate(self) -> int:
        """By how much what a node keeps of its last use grows a ticket: its score, or the ticket's number."""
        return self.score_rate if self.policy.is_lfu else 1
