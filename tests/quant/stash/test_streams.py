"""Stashing on a GPU: copies run on the side stream, from and to page-locked memory, and whoever needs one
waits for its event.

Gates hold streams back (tests/helpers/gates.py), so each test sees an order. All need a GPU.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import tables
import torch
from fbgemm_kernels import trains
from gates import gate, is_held, let_others_run
from reference import REFERENCE
from tables import table_of

from tableside.quant import LookupKind, Pooling, RowFormat, Table, choose
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.reports import Reports
from tableside.quant.gpu.tensors.calls import TensorInput
from tableside.quant.gpu.tensors.tensors import TensorLookup
from tableside.quant.stash.registry import Weights
from tableside.quant.stash.stash import Restore, StashError, registry, stash_embedding_weights
from tableside.quant.stash.training import TrainingStash

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("__import__('tables').DEVICE == 'interpreter'", reason="needs a GPU's streams"),
]

ROWS, DIM = 1 << 16, 64  # 16 MiB: the allocator gives such memory a block of its own


class Stashed:
    """Weights that were stashed and restored once, so that all memory is there and every kernel is compiled.

    before: the weights, on the host. host: the copy of them that every stash writes and every restore reads,
    fp32 [rows, dim].
    """

    def __init__(self) -> None:
        self.module = torch.nn.EmbeddingBag(ROWS, DIM, device=tables.DEVICE)
        self.side = torch.cuda.Stream(tables.DEVICE)
        for frees in (True, False):
            restore = self.stash(frees)
            restore()
        self.weight.fill_(1.0).uniform_()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what is freed from now on is what the allocator gives out next
        let_others_run(self.side.device)
        self.before = self.weight.cpu()
        self.host = registry.host_copy(Weights(self.module.weight)).view(torch.float32).view(ROWS, DIM)

    @property
    def weight(self) -> torch.Tensor:
        return self.module.weight.detach()

    @property
    def main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(tables.DEVICE)

    def stash(self, frees: bool) -> Restore:
        return stash_embedding_weights(self.module, self.side, frees=frees)


@pytest.fixture
def stashed() -> Iterator[Stashed]:
    with torch.cuda.stream(torch.cuda.Stream(tables.DEVICE)):  # the main stream of these tests
        yield Stashed()
        torch.cuda.synchronize()
        registry.close()


def test_the_host_copy_is_page_locked(stashed: Stashed) -> None:
    assert stashed.host.is_pinned()


def test_weights_are_copied_out_on_the_side_stream(stashed: Stashed) -> None:
    """While that stream is held the host's copy stays as it was, and later work on the main stream runs."""
    stashed.host.fill_(-1.0)
    with gate() as closed:
        closed.hold(stashed.side)
        restore = stashed.stash(frees=False)
        assert not is_held(stashed.main)
        assert bool((stashed.host == -1.0).all()), "copied out, but not on the side stream"
        closed.open()
        stashed.side.synchronize()
        assert torch.equal(stashed.host, stashed.before)
    restore()


def test_weights_are_copied_out_after_the_work_before(stashed: Stashed) -> None:
    """What the main stream still has to write to them is in the host's copy."""
    with gate() as closed:
        closed.hold(stashed.main)
        stashed.weight.fill_(3.0)
        restore = stashed.stash(frees=False)
        assert is_held(stashed.side)
        closed.open()
        torch.cuda.synchronize()
        assert bool((stashed.host == 3.0).all())
    restore()


def awaited_bytes() -> int:
    """What was freed, and is not given out before a stream that reads it has come to an end with it."""
    found = torch.cuda.memory_stats(tables.DEVICE)
    return int(found["active_bytes.all.current"] - found["allocated_bytes.all.current"])


def test_memory_freed_at_once_is_not_given_out_while_it_is_copied(stashed: Stashed) -> None:
    """The allocator counts it as free and waits with it for the side stream."""
    allocated, awaited = torch.cuda.memory_allocated(tables.DEVICE), awaited_bytes()
    with gate() as closed:
        closed.hold(stashed.side)
        restore = stashed.stash(frees=True)
        assert allocated - torch.cuda.memory_allocated(tables.DEVICE) == 4 * ROWS * DIM
        assert awaited_bytes() - awaited == 4 * ROWS * DIM
        closed.open()
        torch.cuda.synchronize()
        assert torch.equal(stashed.host, stashed.before)
    restore()
    torch.cuda.synchronize()
    assert torch.equal(stashed.weight.cpu(), stashed.before)


def test_memory_freed_at_a_point_is_given_out_in_the_order_of_the_stream(stashed: Stashed) -> None:
    """The next tensor has the memory at once; what is written to it waits for the rest of the copy out."""
    address = stashed.weight.data_ptr()
    with gate() as closed:
        closed.hold(stashed.side)
        restore = stashed.stash(frees=False)
        restore.free()
        other = torch.empty(ROWS, DIM, device=tables.DEVICE)
        assert other.data_ptr() == address, "the memory was not given out"
        other.fill_(1.0)
        assert is_held(stashed.main), "the main stream does not wait for the copy out"
        closed.open()
        torch.cuda.synchronize()
        assert torch.equal(stashed.host, stashed.before)
    del other
    restore()
    torch.cuda.synchronize()
    assert torch.equal(stashed.weight.cpu(), stashed.before)


def test_weights_come_back_on_the_side_stream_from_page_locked_memory(stashed: Stashed) -> None:
    """The copy reads the host's memory when the side stream comes to it: what is there by then comes back.

    `start` lets the main stream run on; `wait` makes it wait, and not the CPU.
    """
    restore = stashed.stash(frees=True)
    torch.cuda.synchronize()
    assert stashed.host.is_pinned()  # else the copy would wait for the gate, and so would this test
    with gate() as closed:
        closed.hold(stashed.side)
        restore.start()
        assert not is_held(stashed.main), "`start` makes the main stream wait"
        restore.wait()
        assert is_held(stashed.main), "the main stream does not wait for the weights"
        stashed.host.fill_(7.0)
        closed.open()
        torch.cuda.synchronize()
    assert bool((stashed.weight == 7.0).all()), "copied back, but not behind the gate"


def test_weights_come_back_after_the_work_before(stashed: Stashed) -> None:
    """Memory that was another tensor's is not written to while the main stream still works on that one."""
    restore = stashed.stash(frees=True)
    torch.cuda.synchronize()
    with gate() as closed:
        closed.hold(stashed.main)
        restore.start()
        assert is_held(stashed.side)
        closed.open()
    restore()
    torch.cuda.synchronize()
    assert torch.equal(stashed.weight.cpu(), stashed.before)


def test_weights_come_back_on_a_stream_of_their_own(stashed: Stashed) -> None:
    """While the copies out of others are held, and not before the copy out of the same weights."""
    back = torch.cuda.Stream(tables.DEVICE)
    restore = stash_embedding_weights(stashed.module, stashed.side, back_stream=back, frees=False)
    torch.cuda.synchronize()
    restore.free()
    with gate() as closed:
        closed.hold(stashed.side)  # as another lookup's copy out
        restore()
        assert not is_held(back) and not is_held(stashed.main)
        closed.open()
    torch.cuda.synchronize()
    assert torch.equal(stashed.weight.cpu(), stashed.before)
    with gate() as closed:
        closed.hold(stashed.side)
        restore = stash_embedding_weights(stashed.module, stashed.side, back_stream=back, frees=False)
        restore.free()
        restore.start()
        assert is_held(back), "the copy back does not wait for the copy out"
        closed.open()
    restore()
    torch.cuda.synchronize()
    assert torch.equal(stashed.weight.cpu(), stashed.before)


def test_a_transfer_that_is_held_is_an_error_after_its_time(stashed: Stashed) -> None:
    """Out and back; what the main stream waited for the weights is counted when the wait is over, and not
    before."""
    waited = registry.counts().wait_s
    with gate() as closed:
        closed.hold(stashed.side)
        restore = stashed.stash(frees=False)
        with pytest.raises(
            StashError, match=r"16,777,216 bytes of embedding weights were to be copied out .* still are not"
        ):
            restore.finish(0.05)
        closed.open()
        restore.finish(10.0)
    restore.free()
    with gate() as closed:
        closed.hold(stashed.side)
        restore()
        with pytest.raises(
            StashError, match=r"16,777,216 bytes of embedding weights were to be copied back .* still are not"
        ):
            restore.finish(0.05)
        assert registry.counts().wait_s == waited
        closed.open()
        torch.cuda.synchronize()
    assert registry.counts().wait_s - waited >= 0.05
    assert all((ms := t.copy_ms()) is not None and ms > 0 for t in restore.transfers)


def test_a_training_stashes_on_the_stream_that_it_was_given(stashed: Stashed) -> None:
    """As on a pipeline's memcpy stream: while that is held the main stream runs on after the lookup, and
    nothing was copied."""
    stashing = TrainingStash(stashed.module, stream=stashed.side)
    ids = torch.zeros(1, 1, dtype=torch.long, device=tables.DEVICE)
    stashed.module(
        ids
    ).sum().backward()  # nothing is compiled or allocated for the first time while the gate is closed
    torch.cuda.synchronize()
    stashed.host.fill_(-1.0)
    with gate() as closed:
        closed.hold(stashed.side)
        loss = stashed.module(ids).sum()
        assert not is_held(stashed.main)
        assert bool((stashed.host == -1.0).all()), "copied out, but not on the stream that was given"
        closed.open()
        torch.cuda.synchronize()
    assert torch.equal(stashed.host, stashed.before)
    loss.backward()
    stashing.remove()
    torch.cuda.synchronize()
    assert torch.equal(stashed.weight.cpu(), stashed.before)


@pytest.mark.filterwarnings("ignore:.*Failed to import.*:DeprecationWarning")
def test_fbgemms_cache_of_uvm_rows_leaves_and_comes_back_in_a_training() -> None:
    """Its module with rows in weights_uvm and a cache in HBM (EMO), stashed in each step (EMS): the same
    rows, bit for bit.

    The cache is smaller than what is looked up over the steps, so that rows are evicted while others are
    dirty.
    """
    common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    if not trains():
        pytest.skip("FBGEMM has no kernels for training here")
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    managed, cuda = common.EmbeddingLocation.MANAGED_CACHING, training.ComputeDevice.CUDA
    found = []
    for stashes in (False, True):
        module = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(5000, 64, managed, cuda)],
            optimizer=training.OptimType.EXACT_ADAGRAD,
            learning_rate=0.1,
            cache_load_factor=0.1,
        )
        generator = torch.Generator().manual_seed(0)
        for weights in module.split_embedding_weights():
            weights.copy_(torch.empty(weights.shape).uniform_(-1, 1, generator=generator))
        stashing = TrainingStash(module) if stashes else None
        for _ in range(6):
            ids = torch.randint(0, 5000, (300,), generator=generator).to(tables.DEVICE)
            out = module(ids, torch.arange(0, 301, 10, device=tables.DEVICE))
            assert (module.lxu_cache_weights.untyped_storage().nbytes() == 0) == stashes
            out.square().sum().backward()
        if stashing is not None:
            stashing.remove()
        module.flush()
        torch.cuda.synchronize()
        found.append(module.weights_uvm.cpu().clone())
    assert torch.equal(*found)


def pinned(table: Table) -> torch.Tensor:
    memory = torch.empty(table.packed.size, dtype=torch.uint8, pin_memory=True)
    memory.numpy()[:] = table.packed.reshape(-1)
    return memory


def test_served_tables_come_back_beside_other_work_and_a_lookup_waits_for_them() -> None:
    """`restore` returns while nothing was copied yet, the current stream runs on, and the next lookup reads
    what was copied.

    The copy reads registered memory: rows that change before its turn come as they are then.
    """
    backend = GpuBackend(tables.DEVICE, choose())
    old, new = table_of(RowFormat.INT8, 24, seed=1), table_of(RowFormat.INT8, 24, seed=2)
    source, ids = pinned(old), torch.arange(50, device=tables.DEVICE)
    held = backend.place("hbm", old, source, stashable=True)
    lookup = TensorLookup(backend, ["a"], [LookupKind(held, Pooling.NONE)], Reports(backend.launcher))
    inputs = [TensorInput(ids, None, 0, 0, None)]
    lookup(lookup.stage_each(inputs))
    let_others_run(ids.device)
    assert backend.stash() == old.packed.size
    with gate() as closed:
        closed.hold(backend.launcher.copies)
        backend.restore()
        main = torch.cuda.current_stream(tables.DEVICE)
        assert not is_held(main), "`restore` makes the current stream wait"
        vectors = lookup(lookup.stage_each(inputs))
        assert is_held(main), "the lookup does not wait for the rows"
        source.numpy()[:] = new.packed.reshape(-1)
        closed.open()
        torch.cuda.synchronize()
    found = vectors.cpu().numpy().reshape(50, 24)
    np.testing.assert_array_equal(found, REFERENCE.lookup(new, np.arange(50), pooling=Pooling.NONE))
