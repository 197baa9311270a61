"""NUMA nodes: what the kernel says of them, and pages that lie where they were bound."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tableside.loader.errors import ModelError, NoSpace, SegmentError
from tableside.loader.segment import numa
from tableside.loader.segment.memory import FileToMap, reserve

NVIDIA, OTHER = "0x10de", "0x8086"
Host = Callable[..., Path]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """host([(vendor, class, node)], memory="0-1") -> a /sys with these PCI devices, named 0000:00:0N.0. It is
    read from then on."""

    def make(devices: list[tuple[str, str, object]], memory: str = "0-1", cores: str = "0-511") -> Path:
        for n, (vendor, kind, node) in enumerate(devices):
            device = tmp_path / f"bus/pci/devices/0000:00:0{n}.0"
            device.mkdir(parents=True)
            for name, value in (("vendor", vendor), ("class", kind), ("numa_node", node)):
                (device / name).write_text(f"{value}\n")
        node = tmp_path / "devices/system/node"
        (node / "node1").mkdir(parents=True)
        (node / "has_memory").write_text(f"{memory}\n")
        (node / "node1/cpulist").write_text(f"{cores}\n")
        (node / "node1/meminfo").write_text(
            "".join(
                f"Node 1 {name}: {kib} kB\n"
                for name, kib in (("MemFree", 100), ("FilePages", 90), ("Shmem", 60))
            )
        )
        monkeypatch.setattr(numa, "_SYS", tmp_path)
        return tmp_path

    return make


def test_nodes_with_gpus(host: Host) -> None:
    """NVIDIA's graphics and 3D controllers; no sound device, no card of others."""
    gpu, audio = "0x030200", "0x040300"
    devices = [
        (NVIDIA, gpu, 3),
        (NVIDIA, "0x030000", 1),
        (NVIDIA, gpu, 1),
        (NVIDIA, audio, 0),
        (OTHER, gpu, 2),
    ]
    host(devices, "0-3")
    assert numa.gpu_nodes() == [1, 3] == numa.chosen_nodes(())
    assert numa.chosen_nodes(None) == []
    assert numa.chosen_nodes((2, 0)) == [2, 0]


def test_a_host_of_one_node_has_nothing_to_bind(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host([(NVIDIA, "0x030200", -1)], "0")
    assert numa.gpu_nodes() == []
    monkeypatch.setattr(numa, "_SYS", tmp_path / "none")
    assert numa.nodes() == [0]


def test_a_gpu_of_an_unknown_node_is_said(host: Host) -> None:
    host([(NVIDIA, "0x030200", -1)])
    with pytest.raises(ModelError, match=r"\[0, 1\] the GPU 0000:00:00.0 .* copies = \[0, 1\]"):
        numa.gpu_nodes()


def test_a_node_that_is_not_there_is_said(host: Host) -> None:
    host([])
    with pytest.raises(ModelError, match=r"nodes \[4, 7\]; this host has memory on \[0, 1\]"):
        numa.chosen_nodes((7, 1, 4))


def test_a_device_or_the_cores_say_the_node(host: Host) -> None:
    """The device's first; where nobody knows it, the one node of all cores."""
    sys = host([(NVIDIA, "0x030200", 0), (NVIDIA, "0x030200", -1)])
    assert numa.node_of("0000:00:00.0") == 0
    assert numa.node_of("0000:00:01.0") == numa.node_of("0000:ff:00.0") == numa.node_of(None) == 1
    used = sorted(os.sched_getaffinity(0))
    (sys / "devices/system/node/node1/cpulist").write_text(",".join(map(str, used[1:])))
    assert numa.node_of(None) is None


def test_room_of_a_node(host: Host) -> None:
    """Free pages, and those of files that are not shared memory."""
    host([])
    numa.check_room(1, 130 * 1024)
    with pytest.raises(NoSpace, match="NUMA node 1 has 133,120 bytes free, its copy needs 133,121"):
        numa.check_room(1, 130 * 1024 + 1)


def test_pages_lie_where_they_were_bound(root: Path) -> None:
    """The policy is the file's: another mapping has it, too."""
    root.mkdir()
    node, path = numa.nodes()[0], root / "bound"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        mapped = reserve([FileToMap(fd, 4 << 20, True, node)], root)
        mapped.bytes[:] = 1
        (line,) = [
            text for text in Path("/proc/self/numa_maps").read_text().splitlines() if str(path) in text
        ]
    finally:
        os.close(fd)
    assert f" bind:{node} " in line and f" N{node}=" in line


def test_what_cannot_be_bound_is_said(root: Path) -> None:
    root.mkdir()
    fd = os.open(root / "bound", os.O_RDWR | os.O_CREAT)
    try:
        mapped = reserve([FileToMap(fd, 2 << 20, True)], root)
        with pytest.raises(SegmentError, match="cannot be bound to NUMA node 1000: Invalid argument"):
            numa.bind(mapped.address, mapped.size, 1000)
    finally:
        os.close(fd)
