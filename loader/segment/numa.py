"""NUMA nodes: which of them have GPUs, where a process runs, and files whose pages lie on one node.

From /sys/devices/system/node, the `numa_node` of PCI devices, and mbind(2): the policy is that of the file,
so that its pages lie there whoever writes them first.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from tableside.loader.errors import ModelError, NoSpace, SegmentError

_SYS = Path("/sys")
_DISPLAY, _NVIDIA = "0x03", "0x10de"  # class and vendor of a GPU
_MPOL_BIND = 2
_MBIND = {"x86_64": 237, "aarch64": 235}  # numbers of the system call
_MOST_NODES = 1024

_libc = ctypes.CDLL(None, use_errno=True)


def nodes() -> list[int]:
    """Returns the nodes of this host that have memory, ascending; [0] where the kernel knows none."""
    try:
        return _numbers((_SYS / "devices/system/node/has_memory").read_text())
    except FileNotFoundError:
        return [0]


def gpu_nodes() -> list[int]:
    """Returns the nodes to which NVIDIA GPUs are attached; empty: no GPU, or all memory is one node's.
    ModelError: the kernel does not say to which node a GPU belongs."""
    if len(nodes()) == 1:
        return []
    found = set()
    for device in sorted((_SYS / "bus/pci/devices").glob("*")):
        if _read(device / "class").startswith(_DISPLAY) and _read(device / "vendor") == _NVIDIA:
            if (node := _node_of(device)) is None:
                raise ModelError(
                    f'copies = "numa": the kernel does not say to which of the NUMA nodes {nodes()} the '
                    f"GPU {device.name} belongs, as on many virtual machines; name the nodes: copies = [0, 1]"
                )
            found.add(node)
    return sorted(found)


def node_of(pci_address: str | None) -> int | None:
    """Returns the node of a GPU ("0000:3b:00.0"); where there is none, or nobody knows, the node of all cores
    that this process may use; None: they are of several nodes."""
    if pci_address is not None and (node := _node_of(_SYS / "bus/pci/devices" / pci_address)) is not None:
        return node
    cores = os.sched_getaffinity(0)
    for node in nodes():
        if cores <= set(_numbers(_read(_SYS / f"devices/system/node/node{node}/cpulist"))):
            return node
    return None


def chosen_nodes(copies: Sequence[int] | None) -> list[int]:
    """Returns the nodes of `copies` (loader.model.model.ModelSpec); empty: nothing is bound. ModelError: this
    host has not one of them, or does not say to which a GPU belongs."""
    if copies is None:
        return []
    if lacking := sorted(set(copies) - set(nodes())):
        raise ModelError(
            f"copies names the NUMA nodes {lacking}; this host has memory on {nodes()}: lscpu shows them"
        )
    return list(copies) or gpu_nodes()


def free_bytes(node: int) -> int:
    """Returns the bytes of a node that are free, or of files that can be read again."""
    kib = {}
    for line in (_SYS / f"devices/system/node/node{node}/meminfo").read_text().splitlines():
        _, _, name, value, *_ = line.split()
        kib[name.rstrip(":")] = int(value)
    return (kib["MemFree"] + max(0, kib["FilePages"] - kib["Shmem"])) * 1024


def check_room(node: int, size: int) -> None:
    """Raises NoSpace where a node has fewer bytes: the kernel would end processes to make room."""
    if (free := free_bytes(node)) < size:
        raise NoSpace(
            f"NUMA node {node} has {free:,} bytes free, its copy needs {size:,}; remove old versions "
            "(tableside gc), choose a smaller row format, or load without `copies`"
        )


def bind(address: int, size: int, node: int) -> None:
    """Has the pages of a mapped file lie on a node, those that nobody touched yet. SegmentError: the kernel
    refuses."""
    mask = (ctypes.c_ulong * (_MOST_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    number = _MBIND.get(platform.machine())
    code = errno.ENOSYS
    if number is not None:
        size_of_mask = ctypes.c_ulong(_MOST_NODES + 1)
        where = ctypes.c_void_p(address), ctypes.c_ulong(size)
        if _libc.syscall(ctypes.c_long(number), *where, _MPOL_BIND, mask, size_of_mask, 0) == 0:
            return
        code = ctypes.get_errno()
    remedy = {
        errno.EPERM: "a container needs the right to: docker run --cap-add SYS_NICE",
        errno.ENOSYS: "this kernel has no NUMA nodes",
    }.get(code, "see lscpu")
    raise SegmentError(
        f"memory cannot be bound to NUMA node {node}: {os.strerror(code)}; {remedy}, or load without `copies`"
    )


def _node_of(device: Path) -> int | None:
    text = _read(device / "numa_node")
    return int(text) if text and int(text) >= 0 else None


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _numbers(text: str) -> list[int]:
    """Returns the numbers of a list as the kernel writes it: 0-3,8."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
