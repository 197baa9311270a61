"""FBGEMM training modules with weights on another device than their metadata, or none yet.

After FBGEMM's unreleased pull request 5640 (`weight_init_device`): weights are loaded, quantized or mapped
first, then placed (`tbe.place`). Offsets, placements and optimizer states are on the compute device from the
start. `split_embedding_weights` and state dicts see the device of the weights.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tableside.loader.errors import LoaderError
from tableside.loader.tbe.tbe import check_device, guard, training_names
from tableside.quant import Pooling

OPTIMIZERS = ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD")  # that FBGEMM 1.8 has on the CPU too


@dataclass(frozen=True)
class TrainingTable:
    """One table: fp32 or fp16 rows [rows, dim]."""

    rows: int
    dim: int


def init_split_tbe(
    tables: Sequence[TrainingTable],
    *,
    pooling: Pooling = Pooling.SUM,
    device: str = "cpu",
    weight_init_device: str | None = "meta",
    optimizer: str = "EXACT_ADAGRAD",
    half: bool = False,
    **options: Any,
) -> Any:
    """Returns a SplitTableBatchedEmbeddingBagsCodegen. device: cpu, or the current CUDA device. optimizer: a
    name of FBGEMM's OptimType. half: fp16 weights. options: FBGEMM's (learning_rate, eps, ...).
    weight_init_device: meta, cpu, or None: on `device`. LoaderError: unsupported weight_init_device or
    optimizer."""
    check_device(weight_init_device)
    fbgemm = training_names()
    on_cpu = device == "cpu"
    if on_cpu and optimizer not in OPTIMIZERS:
        raise LoaderError(f"optimizer {optimizer!r} on the CPU; FBGEMM has {', '.join(OPTIMIZERS)} there")
    if not hasattr(fbgemm.OptimType, optimizer) or optimizer == "NONE":
        raise LoaderError(
            f"optimizer {optimizer!r} is none of FBGEMM's; without an optimizer, use init_dense_tbe"
        )
    place = fbgemm.EmbeddingLocation.HOST if on_cpu else fbgemm.EmbeddingLocation.DEVICE
    compute = fbgemm.ComputeDevice.CPU if on_cpu else fbgemm.ComputeDevice.CUDA
    plain = fbgemm.SplitTableBatchedEmbeddingBagsCodegen
    module = (plain if weight_init_device is None else _with_weights_on(weight_init_device))(
        [(t.rows, t.dim, place, compute) for t in tables],
        pooling_mode=fbgemm.PoolingMode[pooling.name],
        optimizer=getattr(fbgemm.OptimType, optimizer),
        weights_precision=fbgemm.SparseType.FP16 if half else fbgemm.SparseType.FP32,
        **options,
    )
    module.__class__ = plain  # it was another one only to be built
    if weight_init_device is not None:
        guard(module, weight_init_device)
    return module


def init_dense_tbe(
    tables: Sequence[TrainingTable],
    *,
    pooling: Pooling = Pooling.SUM,
    device: str = "cpu",
    weight_init_device: str | None = "meta",
    half: bool = False,
) -> Any:
    """Returns a DenseTableBatchedEmbeddingBagsCodegen, for torch optimizers. Arguments: see
    `init_split_tbe`."""
    check_device(weight_init_device)
    fbgemm = training_names()
    with nullcontext() if weight_init_device is None else _RandomWeightsOn(weight_init_device):
        module = fbgemm.DenseTableBatchedEmbeddingBagsCodegen(
            [(t.rows, t.dim) for t in tables],
            pooling_mode=fbgemm.PoolingMode[pooling.name],
            use_cpu=device == "cpu",
            weights_precision=fbgemm.SparseType.FP16 if half else fbgemm.SparseType.FP32,
        )
    if weight_init_device is not None:
        guard(module, weight_init_device)
    return module


@cache
def _with_weights_on(weight_init_device: str) -> Any:
    """FBGEMM's split module, built with its weights on a device, all else where it computes."""

    class SplitWeights(training_names().SplitTableBatchedEmbeddingBagsCodegen):  # type: ignore[misc]  # FBGEMM has no types
        def _apply_split(self, split: Any, prefix: str, dtype: Any, **options: Any) -> None:
            if prefix != "weights":
                super()._apply_split(split, prefix=prefix, dtype=dtype, **options)
                return
            nothing = split._replace(dev_size=0, host_size=0, uvm_size=0)
            super()._apply_split(nothing, prefix=prefix, dtype=dtype, **options)
            weights = torch.zeros(split.host_size or split.dev_size, dtype=dtype, device=weight_init_device)
            if split.host_size:  # a parameter, as FBGEMM makes it
                delattr(self, "weights_host")
                self.weights_host = torch.nn.Parameter(weights)
            else:
                self.weights_dev = weights

    return SplitWeights


class _RandomWeightsOn(TorchFunctionMode):
    """What the dense module draws as its weights lies on another device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": self._device} if func is torch.randn else kwargs))
