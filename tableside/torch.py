"""PyTorch modules over published tables (docs/torch.md). Registers the operators of compiled programs.

from tableside.torch import EmbeddingBags
bags = EmbeddingBags("ads")
bags({"clicked": (ids, offsets)})["clicked"]        # [bags, dim]
"""

try:
    import torch as _torch  # noqa: F401  (the extra, named where it is missing)
except ModuleNotFoundError as error:
    raise ImportError(
        f"tableside.torch needs {error.name}, which is not installed; install tableside[torch]"
    ) from error

from tableside.serving.modules.embeddings import EmbeddingBags, Embeddings
from tableside.serving.modules.inputs import BadFeatureIds, Bags, ModuleError
from tableside.serving.modules.published import release
from tableside.serving.modules.row_gather import RowGather
from tableside.serving.modules.swap import swap_embeddings

__all__ = [
    "BadFeatureIds",
    "Bags",
    "EmbeddingBags",
    "Embeddings",
    "ModuleError",
    "RowGather",
    "release",
    "swap_embeddings",
]
