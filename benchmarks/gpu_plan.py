"""What `tableside plan` predicts against what the cache in HBM does with the same batches.

    python benchmarks/gpu_plan.py

Four streams (Zipf's law with 0.8, 1.05 and 1.2, and 1.05 while the hot ids move), five sizes, both policies.
Hit rates are of the second half of the batches. The sample is that of `tableside plan`, unless --sample says
another one.
"""

import argparse
from typing import Any

import numpy as np
import torch
from cache_workload import ROW_BYTES, Workload
from common import console, report, shared_folder

from tableside.quant.cache.settings import Policy
from tableside.quant.row_format import device_row_bytes
from tableside.serving.planning.curves import Sampler, lfu, lru

STREAMS = {"0.8": 0.8, "1.05": 1.05, "1.2": 1.2, "1.05, moving": 1.05}
SHARES = (0.01, 0.03, 0.1, 0.3, 0.6)
MOVES = 8  # of the hot ids, in the moving stream


def streams(work: Workload, batches: int) -> Any:
    for name, zipf in STREAMS.items():
        step = work.rows // 40 if "moving" in name else 0
        yield name, [work.draw(zipf, n * MOVES // batches * step) for n in range(batches)]


def measured(work: Workload, share: float, policy: Policy, batches: list[Any]) -> tuple[int, float]:
    """The cache's slots, and the share of the ids of the second half that found their row."""
    ours = work.ours(share, policy)
    for batch in batches[: len(batches) // 2]:
        ours(batch)
    before = ours.cache.statistics(wait=True).tables
    for batch in batches[len(batches) // 2 :]:
        ours(batch)
    after = ours.cache.statistics(wait=True).tables
    ids, hits = (sum(getattr(after[t], n) - getattr(before[t], n) for t in after) for n in ("ids", "hits"))
    return ours.cache.slots, hits / ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--ids", type=int, default=16_384)
    parser.add_argument("--batches", type=int, default=600)
    parser.add_argument("--sample", type=int, default=1 << 18)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    slot = device_row_bytes(ROW_BYTES) + 24
    with shared_folder() as root:
        work = Workload(root, 1, options.rows, options.ids, 1.05, 0)
        for name, batches in streams(work, options.batches):
            sampler = Sampler([slot], options.sample)
            for batch in batches:
                sampler.add([batch.cpu().numpy()])
            references = sampler.references()
            for policy, curve in ((Policy.LRU, lru), (Policy.LFU, lfu)):
                did = [measured(work, share, policy, batches) for share in SHARES]
                said = curve(references, [slots * slot for slots, _ in did])[:, 0] / references.ids[0]
                for share, (slots, real), predicted in zip(SHARES, did, said.tolist(), strict=True):
                    row = {"stream": name, "policy": policy.value, "cached": f"{share:.0%}", "slots": slots}
                    row |= {"measured": real, "predicted": predicted, "points": 100 * (predicted - real)}
                    found.append({**row, "sampled": references.share})
                    console.print(found[-1])
    worst = max(abs(row["points"]) for row in found)
    console.print(
        f"at most {worst:.2f} points apart, {np.mean([abs(r['points']) for r in found]):.2f} on average"
    )
    of = f"one table of {options.rows:,} rows, {options.batches} batches of {options.ids:,} ids"
    gpu = torch.cuda.get_device_name()
    report("gpu_plan", f"hit rates predicted and measured, {of}", found, gpu=gpu, worst_points=worst)


if __name__ == "__main__":
    main()
