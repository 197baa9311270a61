"""The list of regions that workers share: what each of them knows, when a region ends, and processes that
change the list at once or die."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from support import descriptors

from tableside.serving.errors import ApiError
from tableside.serving.shm import regions, shared_list
from tableside.serving.shm.regions import RegionEntry, RegionRegistry, Regions


@pytest.mark.drawn(0.5)
def test_every_worker_knows_a_region(make: Callable[..., Path]) -> None:
    """One registers it, another reads and writes it, a third unregisters it; descriptors go with it."""
    path, registry = make(64), RegionRegistry()
    one, other, third = (Regions(registry) for _ in range(3))
    one.register("r", f"/{path.name}", 16, 32)
    region = other.find("r")
    region.write(8, memoryview(b"12345678"))
    assert path.read_bytes() == bytes(24) + b"12345678" + bytes(32)
    found = bytearray(32)
    region.read(0, memoryview(found))
    assert found == bytes(8) + b"12345678" + bytes(16)
    del region
    third.unregister("r")
    for each in (one, other, third):
        with pytest.raises(ApiError, match="region 'r' is not registered"):
            each.find("r")
    gc.collect()
    assert not descriptors(path)


def test_a_request_under_way_keeps_its_region(make: Callable[..., Path]) -> None:
    """Unregistering ends no request: its answer goes into the object that it named, and the descriptor
    goes after that."""
    path, one = make(64), Regions(RegionRegistry())
    one.register("r", path.name, 0, 64)
    region = one.find("r")
    one.unregister(None)
    one.register("r", make(64).name, 0, 64)
    region.write(0, memoryview(b"late"))
    assert path.read_bytes()[:4] == b"late"
    assert one.find("r") is not region
    assert descriptors(path) == 1
    del region
    gc.collect()
    assert not descriptors(path)


def test_a_name_that_was_given_anew_is_another_object(make: Callable[..., Path]) -> None:
    """A worker that has not opened a region yet does not take another object for it; one that has does not
    either."""
    path, registry = make(64), RegionRegistry()
    one, other = Regions(registry), Regions(registry)
    one.register("r", path.name, 0, 64)
    held = path.with_name(path.name + "-held")
    path.rename(held)  # so that the new one cannot have its inode
    try:
        path.write_bytes(bytes(64))
        with pytest.raises(ApiError, match="'r' is not registered, or its object was removed"):
            other.find("r")
        held.unlink()
        with pytest.raises(ApiError, match="'r' is not registered, or its object was removed"):
            one.find("r")
    finally:
        held.unlink(missing_ok=True)


def test_removed_objects_are_unregistered(make: Callable[..., Path]) -> None:
    """By the workers' regular look, so that nobody keeps their memory."""
    path, registry = make(64), RegionRegistry()
    one, other = Regions(registry), Regions(registry)
    one.register("r", path.name, 0, 64)
    other.find("r")
    assert descriptors(path) == 2
    one.look()
    assert one.status("r")
    path.unlink()
    other.look()
    one.look()
    gc.collect()
    assert not registry.read()[1]
    assert not descriptors(path)


def test_a_region_is_forgotten_where_it_is_still_the_same(make: Callable[..., Path]) -> None:
    path, one = make(64), Regions(RegionRegistry())
    mine = one.register("mine", path.name, 0, 64)
    one.forget(mine._replace(offset=1))
    assert one.status(None) == [mine]
    one.forget(mine)
    assert not one.status(None)


def entry(name: str) -> RegionEntry:
    return RegionEntry(name, "key", 0, 1, 2, 3)


def _add_and_remove(registry: RegionRegistry, name: str, rounds: int, begin: Barrier) -> None:
    begin.wait()
    for _ in range(rounds):
        registry.change(lambda entries: [*entries, entry(name)])
        assert entry(name) in registry.read()[1]
        registry.change(lambda entries: [e for e in entries if e.name != name])
    registry.change(lambda entries: [*entries, entry(name)])


@pytest.mark.drawn(0.5)
def test_processes_change_the_list_at_once() -> None:
    """No change is lost and none is read half, over processes that got the registry as workers do."""
    context = multiprocessing.get_context("forkserver")
    registry, names, rounds = RegionRegistry(), ["a" * 9, "b" * 5000, "c"], 300
    begin = context.Barrier(len(names) + 1)
    processes = [
        context.Process(target=_add_and_remove, args=(registry, name, rounds, begin)) for name in names
    ]
    for process in processes:
        process.start()
    begin.wait()
    seen = set()
    while any(process.is_alive() for process in processes):
        seen.add(len(registry.read()[1]))
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(e.name for e in registry.read()[1]) == sorted(names)
    assert registry.generation == len(names) * (2 * rounds + 1)
    assert seen <= {0, 1, 2, 3}


def _die_in_a_change(registry: RegionRegistry) -> None:
    write = os.pwrite

    def half(fd: int, text: bytes, at: int) -> int:
        write(fd, text[: len(text) // 2], at)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    os.pwrite = half  # type: ignore[assignment]
    registry.change(lambda entries: [entry("x" * 1000)])


def test_a_process_that_dies_in_a_change() -> None:
    """It leaves the list as it was, and no lock behind."""
    registry = RegionRegistry()
    registry.change(lambda entries: [entry("a")])
    process = multiprocessing.get_context("fork").Process(target=_die_in_a_change, args=(registry,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert registry.read() == (1, [entry("a")])
    registry.change(lambda entries: [*entries, entry("b")])
    assert registry.read() == (2, [entry("a"), entry("b")])


def test_the_list_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than it holds is refused, and what it holds is kept; as many regions as may be fit."""
    registry = RegionRegistry()
    longest = [
        RegionEntry("\x01" * 255, "\x01" * 255, 1 << 62, 1 << 62, 1 << 62, 1 << 62, "x" * 88)
    ] * regions.MOST_REGIONS
    registry.change(lambda entries: longest)
    assert registry.read()[1] == longest
    monkeypatch.setattr(shared_list, "HALF_BYTES", 1 << 12)
    small = RegionRegistry()
    with pytest.raises(Exception, match=r"the list of client regions has .* bytes; expected at most 4,088"):
        small.change(lambda entries: longest)
    assert small.read() == (0, [])
