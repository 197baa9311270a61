"""Which shared memory regions clients registered: a list that all workers of a server share."""

from collections.abc import Callable
from typing import NamedTuple

from tableside.serving.shared_list import SharedList


class Registered(NamedTuple):
    """A region as it was registered: `byte_size` bytes from byte `offset` on of the object `key` of POSIX shared memory.

    device, inode: of that object, so that another one of its name is not taken for it. worker: the process that registered it,
    for as long as its connection lasts; "" where the region outlives that. handle: of a region in a GPU's memory, in base64:
    `device` is that GPU's number then, and there is no object.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    device: int
    inode: int
    worker: str = ""
    handle: str = ""


Change = Callable[[list[Registered]], list[Registered]]


class RegionRegistry(SharedList[Registered]):
    """The list of registered regions."""

    entry = Registered
    what = "client regions"
