"""Transfers of stashed weights: counted, timed out, and refused with a sentence where the host has no
memory for them."""

import gc
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import tables
import torch
from support import LONGEST_S

from tableside.quant.stash import transfers as stash_transfers
from tableside.quant.stash.stash import StashError, registry, stash_embedding_weights
from tableside.quant.stash.transfers import StashCounts, Transfer

pytestmark = pytest.mark.gpu

TOP = Path(__file__).parent.parent.parent.parent


def device() -> torch.device:
    return torch.device("cpu" if tables.DEVICE == "interpreter" else tables.DEVICE)


def test_stashes_restores_and_bytes_are_counted() -> None:
    """What is away now by what has no memory; what the host holds by its copies, until the registry is
    closed."""
    registry.close()
    before = registry.counts()
    big, small = torch.nn.Embedding(50, 4, device=device()), torch.nn.Embedding(10, 4, device=device())
    restores = [stash_embedding_weights(big), stash_embedding_weights(small, frees=False)]
    now = registry.counts()
    assert (now.stashes - before.stashes, now.bytes_out - before.bytes_out) == (2, 960)
    assert (now.bytes_away, now.host_bytes, now.restores - before.restores) == (800, 960, 0)
    restores[1].free()
    assert registry.counts().bytes_away == 960
    for restore in restores:
        restore()
        restore()  # which does nothing
    now = registry.counts()
    assert (now.bytes_away, now.restores - before.restores, now.bytes_back - before.bytes_back) == (0, 2, 960)
    assert now.host_bytes == 960
    registry.close()
    assert registry.counts().host_bytes == 0


def test_weights_that_are_dropped_while_away_are_away_no_more() -> None:
    restore = stash_embedding_weights(torch.nn.Embedding(50, 4, device=device()))
    assert registry.counts().bytes_away == 800
    del restore
    gc.collect()
    assert registry.counts().bytes_away == 0


def test_the_time_that_callers_stood_still_is_counted() -> None:
    """On the CPU it is the copy back. On a GPU it is what a stream waited (test_stash_streams.py)."""
    module = torch.nn.Embedding(1 << 16, 64, device=device())
    before = registry.counts().wait_s
    restore = stash_embedding_weights(module)
    restore()
    if device().type == "cuda":
        torch.cuda.synchronize()
    copied_ms = restore.transfers[1].copy_ms()
    assert copied_ms is not None and copied_ms > 0
    if device().type == "cpu":
        assert registry.counts().wait_s - before == pytest.approx(copied_ms / 1000)
    registry.close()


class Held:
    """An event of a stream that is held: it does not happen. On a GPU it is a real one
    (test_stash_streams.py)."""

    def query(self) -> bool:
        return False


@pytest.mark.parametrize("direction", ["out", "back"])
def test_a_transfer_that_does_not_end_is_an_error_after_its_time(direction: str) -> None:
    """It says which way, how much and what to do; while there is time it says nothing."""
    transfer = Transfer(direction, 4096, None, StashCounts())
    transfer.enqueued()
    transfer.finish(0.0)
    transfer.check(0.0)
    transfer._events = (Held(), Held())
    transfer.check(60.0)
    said = (
        rf"4,096 bytes of embedding weights were to be copied {direction} .* still are not; expected at "
        rf"most .* timeout_s"
    )
    with pytest.raises(StashError, match=said):
        transfer.finish(2 * stash_transfers._POLL_S)
    assert transfer.copy_ms() is None


def test_what_was_restored_is_finished_in_time() -> None:
    restore = stash_embedding_weights(torch.nn.Embedding(50, 4, device=device()))
    restore()
    restore.finish(10.0)
    assert [t.direction for t in restore.transfers] == ["out", "back"] and all(
        t.is_done() for t in restore.transfers
    )
    registry.close()


WITHOUT_MEMORY = """
    import resource
    import torch
    from tableside.quant.stash.stash import StashError, registry, stash_embedding_weights

    modules = [torch.nn.Embedding(1 << 20, 64), torch.nn.Embedding(1 << 19, 64)]  # 256 and 128 MiB
    before = [m.weight.detach()[::999].clone() for m in modules]
    modules[0](torch.zeros(1, dtype=torch.long))
    with open("/proc/self/statm") as f:
        used = int(f.read().split()[0]) * resource.getpagesize()
    limits = used + (320 << 20), resource.RLIM_INFINITY  # room for the first alone
    resource.setrlimit(resource.RLIMIT_AS, limits)
    try:
        stash_embedding_weights(modules)
    except StashError as error:
        print(error)
    assert all(torch.equal(m.weight.detach()[::999], b) for m, b in zip(modules, before))
    counts = registry.counts()
    print(counts.bytes_away, counts.host_bytes, counts.stashes)
    restore = stash_embedding_weights(modules, most_bytes=128 << 20)
    print(restore.bytes)
    restore()
    assert all(torch.equal(m.weight.detach()[::999], b) for m, b in zip(modules, before))
"""


@pytest.mark.thorough
def test_a_host_without_memory_for_the_copies_is_an_error_and_loses_nothing() -> None:
    """A real limit of the process. The copy that it had room for is let go, so that stashing less
    succeeds."""
    code = textwrap.dedent(WITHOUT_MEMORY)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=TOP, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said, counts, stashed = done.stdout.splitlines()
    assert said.startswith("the host has no 134,217,728 bytes to page-lock for embedding weights (")
    assert said.endswith("); stash less (most_bytes), or let other processes of this host lock less")
    assert counts == "0 0 0"
    assert stashed == str(128 << 20)


RSS = """
    import torch
    from tableside.quant.stash.stash import registry, stash_embedding_weights

    def private():
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("RssAnon")) * 1024

    module = torch.nn.Embedding(1 << 18, 64)  # 64 MiB
    stash_embedding_weights(torch.nn.Embedding(8, 8))()
    start = private()
    restore = stash_embedding_weights(module, frees=False)
    print(private() - start)
    restore()
    again = stash_embedding_weights(module, frees=False)
    again()
    print(private() - start)
    registry.close()
    del restore, again
    module(torch.zeros(1, dtype=torch.long))
    print(private() - start)
"""


@pytest.mark.thorough
def test_the_host_pays_one_copy_of_the_weights_until_the_registry_is_closed() -> None:
    """Private memory of a process, from /proc: the copy stays between steps, and nothing beyond it (2 MiB
    for allocators)."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RSS)],
        capture_output=True,
        text=True,
        cwd=TOP,
        check=False,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stderr
    out, back, closed = (int(line) for line in done.stdout.splitlines())
    copy, slack = 64 << 20, 2 << 20
    assert abs(out - copy) < slack and abs(back - copy) < slack
    assert closed < slack
