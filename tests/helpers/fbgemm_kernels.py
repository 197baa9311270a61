"""What the FBGEMM that is here can run."""

from functools import cache

import torch


@cache
def trains() -> bool:
    """Whether it has its kernels for training; some builds for GPUs come without them."""
    try:
        import fbgemm_gpu  # noqa: F401  (registers its operators)
    except ImportError:
        return False
    return hasattr(torch.ops.fbgemm, "bounds_check_indices")
