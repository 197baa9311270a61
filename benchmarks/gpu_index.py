"""The cache's index alone: 128 M slots, 1 M keys a call, at several loads, full, and after 100 M inserts and
evictions.

python benchmarks/gpu_index.py
"""

from collections.abc import Callable
from typing import Any

import torch
from cache_workload import DEVICE, INDEX_BYTES, per_batch, steady_ms
from common import console, report

from tableside.quant.cache.cache import Cache
from tableside.quant.cache.jobs import PROBE_BLOCK, one_lookup
from tableside.quant.cache.settings import CacheSettings, Policy
from tableside.quant.cache.tickets import InFlightBatch
from tableside.quant.device.cuda_device import CudaDevice
from tableside.quant.device.launch import Jobs


def finder(cache: Cache, jobs: Jobs, ids: torch.Tensor) -> Callable[[], None]:
    """A call that finds the ids in the index alone. All must be there."""
    with cache._working():
        first, pipeline = cache._batches.all[0], cache._pipeline
        batch = InFlightBatch(cache.device, first.place, first.staging[:0])
        batch.fit(jobs.ids)
        pipeline._begin(jobs, ids.data_ptr(), batch)
        arguments = cache._streams.main.cuda_stream, cache._memory.root, batch.record.data_ptr()
        pipeline.kernels.release(1, *arguments)
        return lambda: pipeline.kernels.probe(jobs.programs, *arguments)


def index() -> list[dict[str, Any]]:
    """Keys of rows of 16 bytes that lie in HBM, so that what is timed is the index: LRU, 1 M keys a call."""
    slots, keys, rows = 128 << 20, 1 << 20, 1 << 28
    budget = int(slots * (16 + INDEX_BYTES[Policy.LRU]) * 1.001) + 16 * keys
    table = torch.empty(rows * 16, dtype=torch.uint8, device=DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cache = Cache(
            CudaDevice(str(DEVICE)),
            budget,
            CacheSettings(Policy.LRU, staging_fraction=16 * keys / budget, replays=True),
            smallest_row_bytes=16,
            stream=stream,
        )
        number = cache.register(table.data_ptr(), rows, 16)
        total = cache.slots
        order = torch.randperm(rows, device=DEVICE)
        written, jobs = one_lookup(number, keys, PROBE_BLOCK)
        memory = torch.frombuffer(bytearray(written), dtype=torch.uint8).to(DEVICE)
        launched = jobs.placed(memory.data_ptr())

        def call(ids: torch.Tensor) -> None:
            cache.prefetch(launched, ids.view(torch.uint8)).release()

        found = []
        done = 0

        def insert(until: int) -> float:
            nonlocal done
            parts = []
            while done < until:
                at = done % rows
                parts.append(order[at : at + keys])
                done += keys
            return steady_ms(call, parts) if parts else float("nan")

        def add(label: str, insert_ms: float, held: torch.Tensor) -> None:
            ids = [held[torch.randint(0, held.numel(), (keys,), device=DEVICE)] for _ in range(12)]
            before = cache.statistics(wait=True)
            hit_ms = steady_ms(call, ids)
            after = cache.statistics(wait=True)
            hits = per_batch(before, after, len(ids))["hit rate"]
            finds = [finder(cache, launched, i) for i in ids]
            find_ms = steady_ms(lambda find: find(), finds)
            found.append(
                {
                    "state": label,
                    "load": after.occupied / total,
                    "find G keys/s": keys / find_ms / 1e6,
                    "prefetch of hits G keys/s": keys / hit_ms / 1e6,
                    "insert G keys/s": keys / insert_ms / 1e6,
                    "hit rate": hits,
                    "mean chain": after.occupied / int((cache._memory.heads != -1).sum()),
                    "locked out": after.locked_out,
                }
            )
            console.print(found[-1])

        for load in (0.5, 0.75, 1.0):
            ms = insert(int(total * load) // keys * keys)
            add(f"filled to {load}", ms, order[:done])
        ms = insert(done + 16 * keys)
        add("full: each insert evicts", ms, order[done - total // 2 : done])
        insert(done + 84 * keys)
        ms = insert(done + 16 * keys)
        held = torch.cat([order, order])[done - total // 2 : done]
        add("after 100 M inserts and evictions", ms, held)
    return found


if __name__ == "__main__":
    report("gpu_index", "the index alone, 1 M keys a call", index(), gpu=torch.cuda.get_device_name(DEVICE))
