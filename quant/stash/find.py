"""Finds embedding weights in a model: torch's modules, FBGEMM's, and those in TorchRec's sharded collections.
    nn.Embedding, nn.EmbeddingBag   weight
    FBGEMM, fused optimizer         weights_dev, lxu_cache_weights (caches weights_uvm), or weights_host (CPU)
    FBGEMM, dense                   weights
weights_uvm, and weights_host beside a GPU, lie in host memory and stay there. TorchRec keeps lookups in a
plain list, `_lookups`, which torch's module search misses."""

from collections.abc import Iterable, Iterator

import torch


def modules_of(given: Iterable[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """The modules, their submodules, and TorchRec's lookups, each once."""
    seen: set[int] = set()
    waiting = list(given)[::-1]
    while waiting:
        module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield module
            waiting += [
                m for m in (*lookups_of(module), *reversed(module._modules.values())) if m is not None
            ]


def lookups_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the lookups of a TorchRec sharded collection in order, some inside DistributedDataParallel;
    otherwise []."""
    lookups = getattr(module, "_lookups", None)
    return [m for m in lookups if isinstance(m, torch.nn.Module)] if isinstance(lookups, list | tuple) else []


def lookups_in(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Returns TorchRec's lookups and the embedding modules outside them, by readable name."""
    found: dict[str, torch.nn.Module] = {}
    inside: set[int] = set()
    for collection, module in enumerate(m for m in modules_of([model]) if lookups_of(m)):
        for n, lookup in enumerate(lookups_of(module)):
            inside |= {id(m) for m in modules_of([lookup])}
            found[f"{type(module).__name__} {collection}, lookup {n}"] = lookup
    for module in modules_of([model]):
        is_one = isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) or hasattr(
            module, "weights_physical_offsets"
        )
        if is_one and id(module) not in inside:
            found[f"{type(module).__name__} {len(found)}"] = module
    return found


def tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers of this module alone, and its `weights_dev`."""
    for tensor in (
        *module._parameters.values(),
        *module._buffers.values(),
        getattr(module, "weights_dev", None),
    ):
        if isinstance(tensor, torch.Tensor):
            yield tensor


def more_weights(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """FBGEMM's weights beside `weights_dev`, if this is such a module."""
    names: list[str] = []
    if hasattr(module, "weights_dev"):
        names = ["lxu_cache_weights", *(["weights_host"] if getattr(module, "use_cpu", False) else [])]
    elif hasattr(module, "weights_physical_offsets"):
        names = ["weights"]
    for name in names:
        if isinstance(tensor := getattr(module, name, None), torch.Tensor):
            yield tensor
