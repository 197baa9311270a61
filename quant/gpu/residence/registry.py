"""The residences by the names that users say: the only file that knows them all. A new one is a file beside
this one, and a line here. Imports neither torch nor Triton."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tableside.quant.gpu.residence.residence import Residence


class Kind(NamedTuple):
    """A kind of residence. at: its module, relative to this package, and class. says: where rows lie, for
    users. is_indirect: kernels read its rows in more places than one. is_cached: it needs the cache's.
    by_cpu: the CPU looks rows up, so no device is needed. from_disk: rows are read as they are asked for."""

    at: str
    says: str
    is_indirect: bool = False
    is_cached: bool = False
    by_cpu: bool = False
    from_disk: bool = False


class Choice(NamedTuple):
    """What a placement chooses from. kinds: the first that fits is taken, or the last. mixes: the smallest
    tables go to the first kind as far as the budget goes."""

    kinds: tuple[str, ...]
    mixes: bool = False


# In the order of their plans: those that take what a budget leaves come after those that say what they take.
KINDS = {
    "hbm": Kind(".in_hbm:InHbm", "in GPU memory"),
    "hybrid": Kind(".split:Split", "some hbm, some zero_copy", is_indirect=True),
    "cached": Kind(
        ".cached:Cached",
        "in shared memory or on a disk, with a cache on the GPU",
        is_indirect=True,
        is_cached=True,
    ),
    "cached_stored": Kind(".cached:Cached", "as cached, on a disk", True, True, from_disk=True),
    "zero_copy": Kind(".mapped:Mapped", "in shared memory, read by the GPU"),
    "host": Kind(".on_host:OnHost", "with the CPU", by_cpu=True),
    "stored": Kind(
        ".stored:Stored", "with the CPU, read from a disk row by row", by_cpu=True, from_disk=True
    ),
}
UNPLACED, ON_DISK = "host", "stored"  # kinds of tables that nobody placed
COPIED = "hbm"  # the kind whose rows are all copied to a device, and can be given back for a while
ELSEWHERE = "remote"  # said of tables whose rows other hosts have, which nobody places
OVER_DISK = {"cached": "cached_stored"}  # what a kind becomes of tables that are read from a disk by number
CHOICES = {
    "auto": Choice(("hbm", "cached", "zero_copy"), mixes=True),
    **{name: Choice((name,)) for name in KINDS if name not in OVER_DISK.values()},
    "hybrid": Choice(("hbm", "hybrid", "zero_copy")),
}
ALIASES = {"uvm": "zero_copy"}  # old names of choices, which users still type


def is_by_cpu(placement: str) -> bool:
    """Returns whether the placement is a kind that needs no device."""
    return placement in KINDS and KINDS[placement].by_cpu


def read_from_disk(kinds: Mapping[str, str]) -> list[str]:
    """Returns the tables, of those whose kinds are given, that are read from a disk row by row."""
    return [name for name, kind in kinds.items() if kind in KINDS and KINDS[kind].from_disk]


def without_device(placement: str, on_disk: bool) -> str:
    """Returns the kind of a table in a worker without a device. on_disk: its rows can be read from a disk."""
    return placement if is_by_cpu(placement) else ON_DISK if on_disk else UNPLACED


def residence(kind: str) -> "type[Residence]":
    """Returns the class of a kind."""
    module, name = KINDS[kind].at.split(":")
    found: type[Residence] = getattr(import_module(module, __package__), name)
    return found
