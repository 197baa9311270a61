"""TorchRec sharders whose shards begin on another device than the plan's, or without memory.

After FBGEMM's unreleased pull request 5640 (`weight_init_device`), for TorchRec: an evaluation builds its
training's DistributedModelParallel, and swaps the tables of a published model in (`swap_embeddings`). The
training's weights and optimizer states never exist then.
"""

import copy
from typing import Any

from tableside.loader.errors import LoaderError
from tableside.loader.tbe.tbe import check_device


def with_weight_init_device(sharder: Any, weight_init_device: str | None = "meta") -> Any:
    """Returns a copy of a TorchRec sharder. Its shards, with weights, optimizer states and metadata, lie on
    `weight_init_device`: meta: without memory, and a forward pass is a LoaderError until they are replaced;
    cpu: in host memory, to be filled from a state dict; None: as planned. Data-parallel tables have memory in
    any case, since DDP sends their values at once. LoaderError: another weight_init_device."""
    import torch
    from torch.distributed.remote_device import _remote_device

    check_device(weight_init_device)
    found = copy.copy(sharder)
    if weight_init_device is None:
        return found
    begins_on, kind = torch.device(weight_init_device), type(sharder)

    class WithWeightInitDevice(kind):  # type: ignore[valid-type, misc]  # the caller's
        def shard(
            self, module: Any, params: Any, env: Any, device: Any = None, module_fqn: str | None = None
        ) -> Any:
            placed = copy.deepcopy(params)
            for planned in placed.values():
                for shard in getattr(planned.sharding_spec, "shards", ()):
                    rank = shard.placement.rank()
                    shard.placement = _remote_device(f"rank:{rank}/{weight_init_device}")
            sharded = super().shard(module, placed, env, begins_on, module_fqn)
            if begins_on.type == "meta":
                sharded.register_forward_pre_hook(_refuse)
            return sharded

    found.__class__ = WithWeightInitDevice
    return found


def _refuse(module: Any, _: Any) -> None:
    raise LoaderError(
        f"{type(module).__name__} has its weights on meta, so they have no values; replace it "
        "(swap_embeddings), or shard with weight_init_device None or cpu"
    )
