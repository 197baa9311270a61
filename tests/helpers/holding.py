"""What spawned processes of tests hold while their memory is measured (`benchmarks/process_memory.py`)."""

import numpy as np
import torch

from tableside.torch import EmbeddingBags


def everything(root: str, model: str, reads: bool) -> EmbeddingBags | None:
    """A module over all features of a model, after it has read every row; or nothing, in a process that
    has imported as much."""
    torch.set_num_threads(1)
    if not reads:
        return None
    module = EmbeddingBags(model, root=root, verify="header")
    for feature, bound in module._published.now().served.features.items():
        for ids in np.array_split(np.arange(bound.table.rows), 100):
            module({feature: torch.from_numpy(ids).view(1, -1)})
    return module


def ends(exit_code: int) -> None:
    raise SystemExit(exit_code)
