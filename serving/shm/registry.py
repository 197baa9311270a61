"""Which shared memory regions clients registered: a list that all workers of a server share."""

from collections.abc import Callable
from typing import NamedTuple

from tableside.serving.errors import short
from tableside.serving.shm.shared_list import SharedList


class RegionEntry(NamedTuple):
    """A region as it was registered: `byte_size` bytes from byte `offset` on of the object `key` of POSIX
    shared memory.

    device, inode: of that object, so that another one of its name is not taken for it. handle: of a region in
    a GPU's memory, in base64: `device` is that GPU's number then, and there is no object.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    device: int
    inode: int
    handle: str = ""

    @property
    def label(self) -> str:
        """What errors call it, with the name that the client gave it."""
        return f"{'CUDA ' if self.handle else ''}shared memory region {short(self.name)}"

    def holds(self, offset: int, size: int) -> bool:
        """Whether `size` bytes from byte `offset` on lie in the region."""
        return min(offset, size) >= 0 and offset + size <= self.byte_size


Change = Callable[[list[RegionEntry]], list[RegionEntry]]


class RegionRegistry(SharedList[RegionEntry]):
    """The list of registered regions."""

    entry = RegionEntry
    what = "client regions"
