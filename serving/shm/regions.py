"""Regions of shared memory that clients registered, as a worker reads and writes them.

A region is a part of a client's POSIX shared memory object. A worker opens it on first use and never maps it:
`pread` of a truncated object returns fewer bytes, a mapping would raise SIGBUS. Bytes are copied once in and
once out, so a client that writes meanwhile changes nothing already checked. An object must be a regular file
of the server's user, directly in /dev/shm, with one unreserved name; other reasons share one error, which
does not reveal what lies there. A region ends when it is unregistered or its object loses its name.
"""

import base64
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import posix_ipc

from tableside.quant.contract import HANDLE_BYTES
from tableside.serving.errors import ApiError, ErrorKind, bad_request, short
from tableside.serving.shm.shared_list import SharedList


class RegionEntry(NamedTuple):
    """A registered region: `byte_size` bytes at `offset` of the object `key`. device, inode: identify the
    object. handle: in base64 for a GPU's memory; then `device` is the GPU's number and there is no object."""

    name: str
    key: str
    offset: int
    byte_size: int
    device: int
    inode: int
    handle: str = ""

    @property
    def label(self) -> str:
        return f"{'CUDA ' if self.handle else ''}shared memory region {short(self.name)}"

    def holds(self, offset: int, size: int) -> bool:
        return min(offset, size) >= 0 and offset + size <= self.byte_size


Change = Callable[[list[RegionEntry]], list[RegionEntry]]


class RegionRegistry(SharedList[RegionEntry]):
    entry = RegionEntry
    what = "client regions"


FOLDER = "/dev/shm"
# how names begin that no client may name: ours, semaphores, hidden files
RESERVED = ("tableside", "sem.", ".")
_MOST_NAME_BYTES = 255
LARGEST = (1 << 62) - 1  # offset and size of a region
MOST_REGIONS, MOST_BYTES = 64, 4 << 30  # of a server


class Region:
    """An open region; it is closed with its last request. Any thread may use it."""

    def __init__(self, fd: int, entry: RegionEntry) -> None:
        """Owns `fd`, of the region's object."""
        self.entry = entry
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    def check(self) -> None:
        """ApiError: the object was truncated or lost its name."""
        found = os.fstat(self._fd)
        if not found.st_nlink:
            raise gone(self.entry.name)
        if found.st_size < self.entry.offset + self.entry.byte_size:
            raise self._truncated()

    def read(self, offset: int, into: memoryview) -> None:
        """Fills `into` from byte `offset` of the region. ApiError: the object ends before that."""
        at = self.entry.offset + offset
        while into.nbytes:
            count = os.preadv(self._fd, [into], at)
            if not count:
                raise self._truncated()
            into, at = into[count:], at + count

    def write(self, offset: int, values: memoryview) -> None:
        """Writes `values` at byte `offset`. ApiError: the object was truncated, lost its name, or memory is
        full."""
        self.check()
        at = self.entry.offset + offset
        while values.nbytes:
            try:
                count = os.pwrite(self._fd, values, at)
            except OSError as error:
                why = f"{self.entry.label} takes no more bytes ({error.strerror})"
                message = f"{why}; free shared memory, then try again"
                raise ApiError(507, ErrorKind.TOO_LARGE, message) from None
            values, at = values[count:], at + count

    def _truncated(self) -> ApiError:
        return bad_request(
            f"{self.entry.label}: its object is shorter than the {self.entry.byte_size:,} bytes from byte "
            f"{self.entry.offset:,} on that were registered; unregister it, and register it as it is"
        )


class DeviceRegion(NamedTuple):
    """A region in a GPU's memory. The engine process opens it and has checked its size."""

    entry: RegionEntry


class Slice(NamedTuple):
    """`size` bytes at `offset` of a region, and at `at` of a buffer."""

    region: Region | DeviceRegion
    offset: int
    size: int
    at: int

    @property
    def span(self) -> tuple[int, str, int]:
        """Device, object and byte, to order slices; two regions may share an object."""
        entry = self.region.entry
        return entry.device, entry.handle or str(entry.inode), entry.offset + self.offset


class PartlyOnDevice(NamedTuple):
    """A request's inputs; `reads` lie in a GPU's memory instead, and outputs `writes` go there."""

    inputs: Any
    reads: tuple[Slice, ...]
    writes: tuple[Slice, ...]


def joined(slices: Iterable[Slice]) -> list[Slice]:
    """Joins slices that are adjacent in region and buffer; drops empty ones."""
    found: list[Slice] = []
    for one in slices:
        if not one.size:
            continue
        if found:
            last = found[-1]
            if (
                last.region == one.region
                and last.offset + last.size == one.offset
                and last.at + last.size == one.at
            ):
                found[-1] = last._replace(size=last.size + one.size)
                continue
        found.append(one)
    return found


def overlap(slices: Sequence[Slice]) -> bool:
    """Returns whether two slices share a byte of an object."""
    ends: tuple[int, str, int] | None = None
    for span, size in sorted((s.span, s.size) for s in slices if s.size):
        if ends is not None and span < ends:
            return True
        ends = (*span[:2], span[2] + size)
    return False


def read(slices: Iterable[Slice], into: memoryview) -> None:
    """Fills a buffer from regions of the host. ApiError: an object was truncated."""
    for one in slices:
        if isinstance(one.region, Region):
            one.region.read(one.offset, into[one.at : one.at + one.size])


def write(slices: Iterable[Slice], buffer: memoryview) -> None:
    """Writes a buffer into regions of the host. ApiError: an object was truncated or lost its name, or memory
    is full."""
    for one in slices:
        if isinstance(one.region, Region):
            one.region.write(one.offset, buffer[one.at : one.at + one.size])


class Regions:
    """A server's regions in one worker. Any thread may call."""

    def __init__(self, registry: RegionRegistry) -> None:
        self._registry = registry
        self._device = os.stat(FOLDER).st_dev
        self._lock = threading.Lock()
        self._generation = -1
        self._entries: dict[str, RegionEntry] = {}
        self._open: dict[str, Region] = {}

    # ---- registering ----

    def register(self, name: str, key: str, offset: int, byte_size: int) -> RegionEntry:
        """Registers a region for all workers. ApiError: no usable object, too short, the name is taken, or
        too many."""
        _check_name(name)
        if not 0 <= offset <= LARGEST or not 1 <= byte_size <= LARGEST:
            raise bad_request(
                f"shared memory region {short(name)}: offset is {short(offset)} and byte_size "
                f"{short(byte_size)}; expected an offset from 0 and a byte_size from 1"
            )
        fd = self._open_object(name, key)
        found = os.fstat(fd)
        entry = RegionEntry(name, key, offset, byte_size, found.st_dev, found.st_ino)
        region = Region(fd, entry)
        if found.st_size < offset + byte_size:
            what = f"shared memory region {short(name)}"
            raise bad_request(f"{what}: its object ends before offset {offset:,} + byte_size {byte_size:,}")
        self._registry.change(lambda entries: [*self._with_room(entries, entry), entry])
        with self._lock:
            self._refresh()
            if self._entries.get(name) == entry:
                self._open[name] = region
        return entry

    def register_on_device(self, name: str, handle: bytes, device: int, byte_size: int) -> RegionEntry:
        """Registers a GPU's memory, unopened, for all workers. ApiError: as of `register`."""
        _check_name(name)
        if not 1 <= byte_size <= LARGEST or len(handle) != HANDLE_BYTES:
            raise bad_request(
                f"CUDA shared memory region {short(name)}: byte_size is {short(byte_size)} and raw_handle "
                f"has {len(handle)} bytes; expected a byte_size from 1 and {HANDLE_BYTES} bytes in base64"
            )
        entry = RegionEntry(name, "", 0, byte_size, device, 0, base64.b64encode(handle).decode())
        self._registry.change(lambda entries: [*self._with_room(entries, entry), entry])
        return entry

    def _with_room(self, entries: list[RegionEntry], new: RegionEntry) -> list[RegionEntry]:
        """ApiError: the name is taken, or there are too many regions or bytes."""
        if any(e.name == new.name for e in entries):
            raise bad_request(
                f"shared memory region {short(new.name)} is registered already; unregister it first"
            )
        if len(entries) >= MOST_REGIONS:
            what = f"{len(entries)} shared memory regions are registered, the limit; unregister some"
            raise bad_request(what, ErrorKind.TOO_LARGE)
        if (size := sum(e.byte_size for e in entries) + new.byte_size) > MOST_BYTES:
            what = f"all shared memory regions would have {size:,} bytes; the limit is {MOST_BYTES:,}"
            raise bad_request(f"{what}: unregister some, or register fewer bytes", ErrorKind.TOO_LARGE)
        return entries

    def unregister(self, name: str | None, *, on_device: bool = False) -> None:
        """Unregisters a region, or all, of the host or of GPUs. Unknown names are ignored; running requests
        go on."""
        self._registry.change(
            lambda entries: [
                e for e in entries if bool(e.handle) is not on_device or (name is not None and e.name != name)
            ]
        )
        with self._lock:
            self._refresh()

    def forget(self, entry: RegionEntry) -> None:
        self._registry.change(lambda entries: [e for e in entries if e != entry])

    def status(self, name: str | None, *, on_device: bool = False) -> list[RegionEntry]:
        """Returns a region, or all, of the host or of GPUs. ApiError: none has that name."""
        with self._lock:
            self._refresh()
            entries = [
                e for e in self._entries.values() if bool(e.handle) is on_device and name in (None, e.name)
            ]
            if name is not None and not entries:
                raise gone(name)
            return entries

    # ---- using ----

    def is_on_device(self, name: str) -> bool:
        with self._lock:
            self._refresh()
            return name in self._entries and bool(self._entries[name].handle)

    def find(self, name: str) -> Region | DeviceRegion:
        """Returns a region. ApiError: it is not registered, or shorter than then."""
        with self._lock:
            self._refresh()
            region = self._open.get(name)
            if region is None:
                if (entry := self._entries.get(name)) is None:
                    raise gone(name)
                if entry.handle:
                    return DeviceRegion(entry)
                fd = self._open_object(name, entry.key)
                region = Region(fd, entry)
                found = os.fstat(fd)
                if (found.st_dev, found.st_ino) != (entry.device, entry.inode):
                    raise gone(name)
                self._open[name] = region
        region.check()
        return region

    def look(self) -> None:
        """Closes unregistered regions; unregisters those that lost their name."""
        with self._lock:
            self._refresh()
            entries = list(self._entries.values())
        if over := [e for e in entries if not self._is_named(e)]:
            self._registry.change(lambda now: [e for e in now if e not in over])
            with self._lock:
                self._refresh()

    def _refresh(self) -> None:
        """Rereads a changed list. The caller holds the lock."""
        if self._registry.generation == self._generation:
            return
        self._generation, entries = self._registry.read()
        self._entries = {e.name: e for e in entries}
        self._open = {n: r for n, r in self._open.items() if self._entries.get(n) == r.entry}

    def _open_object(self, name: str, key: str) -> int:
        """Opens a key's object. ApiError: a client may not name it."""
        file = key.lstrip("/")  # as shm_open takes it
        if not file or "/" in file or "\0" in file or file.startswith(RESERVED):
            raise _no_object(name)
        try:
            os.fsencode(file)  # posix_ipc 1.3.2 ends the process over what has no encoding
            fd: int = posix_ipc.SharedMemory(f"/{file}").fd
        except (ValueError, OSError, posix_ipc.Error):
            raise _no_object(name) from None
        found = os.fstat(fd)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if not is_ours or found.st_nlink != 1 or found.st_dev != self._device:
            os.close(fd)
            raise _no_object(name)
        return fd

    def _is_named(self, entry: RegionEntry) -> bool:
        """Returns whether the key still names the object. GPU memory has no name."""
        if entry.handle:
            return True
        try:
            found = os.lstat(os.path.join(FOLDER, entry.key.lstrip("/")))
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (entry.device, entry.inode)


def _check_name(name: str) -> None:
    if not name or len(name.encode(errors="surrogatepass")) > _MOST_NAME_BYTES:
        raise bad_request(f"the region's name is {short(name)}; expected 1 to {_MOST_NAME_BYTES} bytes")


def gone(name: Any) -> ApiError:
    """Returns the 400 for an unknown region."""
    return bad_request(
        f"shared memory region {short(name)} is not registered, or its object was removed; register it"
    )


def _no_object(name: str) -> ApiError:
    return bad_request(
        f"shared memory region {short(name)}: its key names no object that may be used; expected POSIX "
        "shared memory that the server's user owns, by a name without slashes that is not reserved"
    )
