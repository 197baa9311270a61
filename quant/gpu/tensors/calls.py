"""Calls of a `TensorLookup`: what they are given, and what is staged of them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tableside.quant.cache.tickets import Ticket
from tableside.quant.device.launch import Jobs
from tableside.quant.gpu.batch.layout import check_size
from tableside.quant.gpu.kernels.launch_config import LaunchConfig
from tableside.quant.gpu.tensors.jobs import KernelJobs, ShapeJobs


class TensorInput(NamedTuple):
    """One feature's tensors, on the device and contiguous. ids: int64 [ids]. offsets: int32 or int64, starts
    of the `bags` bags, with or without the last end; None: bags of `bag_length` ids, or not pooled. weights:
    fp32 [ids]."""

    ids: torch.Tensor
    offsets: torch.Tensor | None
    bag_length: int
    bags: int
    weights: torch.Tensor | None


def places_of(inputs: Sequence[TensorInput]) -> tuple[bytes, bytes, int]:
    """Places and shapes of tensors, as `_native.device_places` gives them. QuantError: there are too many
    ids."""
    places: list[int] = []
    shapes: list[int] = []
    check_size(max(one.ids.numel() for one in inputs), 0)
    for ids, offsets, bag_length, bags, weights in inputs:
        places += (
            ids.data_ptr(),
            -1 if offsets is None else offsets.data_ptr(),
            -1 if weights is None else weights.data_ptr(),
            ids.data_ptr(),
            ids.numel(),
        )
        of_offsets = (0, 0) if offsets is None else (offsets.element_size(), offsets.numel())
        is_pooled = offsets is not None or bags or bag_length
        shapes += (*of_offsets, bag_length, bags if is_pooled else ids.numel(), weights is not None)
    total = sum(one.ids.numel() for one in inputs)
    return np.array(places, np.int64).tobytes(), np.array(shapes, np.int64).tobytes(), total


class CallShape(NamedTuple):
    """What calls with as many bags share: all but addresses and numbers of ids. own: `jobs`, if calls send
    nothing else. shape: of the vectors; parts: of each feature, along its first dim."""

    jobs: KernelJobs
    own: ShapeJobs | None
    config: LaunchConfig
    is_weighted: bool
    shape: tuple[int, ...]
    parts: list[int]


class BaseAddresses(NamedTuple):
    """Base addresses of jobs' offsets: row numbers, original ids, offsets, weights. ids: of jobs without
    IDS."""

    inputs: int = 0
    asked: int = 0
    offsets: int = 0
    weights: int = 0
    ids: int = 0


class StagedLookup(NamedTuple):
    """A call with its jobs on the device, or on their way. shape: of the vectors. probe: the cache's jobs.
    parts: as of `CallShape`; empty: of a packed call. held: memory that kernels read. sent: memory that a
    graph reads and does not own. ticket: of prefetched rows."""

    jobs: Jobs
    config: LaunchConfig
    base: BaseAddresses
    is_weighted: bool
    probe: Jobs | None
    shape: tuple[int, ...]
    held: object
    sent: object
    parts: Sequence[int] = ()
    ticket: Ticket | None = None
