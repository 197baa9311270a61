"""FBGEMM inference modules over a segment: initialised without weights, then handed a view of the rows.

The idea is FBGEMM's pull request 5640 (`weight_init_device`), which is not in a release: weights are allocated on another
device than the metadata, or not at all, so that fp32 (or a second copy of the quantized rows) never exists on the compute
device. Here the released module is built with everything but its weights, and `bind` points it at the segment.

A bound module is copied without its rows: copies share the segment. Its pickle holds the segment's path, and attaches it again.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tableside.loader.errors import LoaderError
from tableside.loader.segment import Segment
from tableside.quant import Pooling, RowFormat
from tableside.quant.installed import check_pair
from tableside.quant.row_format import FP8_EXPONENT_BIAS, FP8_EXPONENT_BITS, ROW_ALIGNMENT_BYTES

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TbeTable:
    """One table of a module: rows [rows, dim] in `row_format`."""

    name: str
    rows: int
    dim: int
    row_format: RowFormat


def init_tbe(
    tables: Sequence[TbeTable],
    *,
    pooling: Pooling = Pooling.SUM,
    device: str = "cpu",
    weight_init_device: str = "meta",
    half: bool = False,
) -> Any:
    """An IntNBitTableBatchedEmbeddingBagsCodegen with its metadata on `device` and its weights on `weight_init_device`.

    meta: no weight is allocated. cpu: zeros, to be filled by the caller. Until `bind`, a forward pass on meta weights fails.
    LoaderError: another weight_init_device. MissingBackend: torch or FBGEMM is not installed.
    """
    check_pair()
    import torch
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    from tableside.quant.cpu.fbgemm import SPARSE_TYPES

    if weight_init_device not in ("meta", "cpu"):
        raise LoaderError(f"weight_init_device is {weight_init_device!r}; expected meta or cpu")
    location = EmbeddingLocation.HOST if device == "cpu" else EmbeddingLocation.MANAGED
    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        [(t.name, t.rows, t.dim, SPARSE_TYPES[t.row_format], location) for t in tables],
        pooling_mode=PoolingMode[pooling.name],
        device=device,
        output_dtype=SPARSE_TYPES[RowFormat.FP16 if half else RowFormat.FP32],
        row_alignment=ROW_ALIGNMENT_BYTES,
        bounds_check_mode=BoundsCheckMode.NONE,  # ids are validated before; the other modes answer bad ids with row 0
        fp8_exponent_bits=FP8_EXPONENT_BITS,
        fp8_exponent_bias=FP8_EXPONENT_BIAS,
    )
    size = module.host_size or module.uvm_size
    _assign(module, torch.zeros(size, dtype=torch.uint8, device=weight_init_device))
    return module


def bind(module: Any, segment: Segment, tables: Sequence[str], weights: "torch.Tensor | None" = None) -> None:
    """Points a module's tables, in order, at the rows of a segment. Nothing is copied.

    weights: a uint8 view of the whole segment on the module's device; None: this process's mapping (CPU). The module keeps
    the segment alive. LoaderError: a table's shape or format is not the module's.
    """
    from tableside.quant.cpu.fbgemm import SPARSE_TYPES

    stored = {t.name: t for t in segment.header.tables}
    offsets = []
    for name, (_, rows, dim, sparse_type, _) in zip(tables, module.embedding_specs, strict=True):
        t = stored.get(name)
        if t is None:
            raise LoaderError(f"{segment.path} has no table {name!r}; it has: {', '.join(stored)}")
        found = (t.rows, t.dim, SPARSE_TYPES[RowFormat.parse(t.row_format)])
        if found != (rows, dim, sparse_type):
            raise LoaderError(f"table {name!r} is {found} in {segment.path}; the module was built for {(rows, dim, sparse_type)}")
        offsets.append(t.offset)
    module.weights_physical_offsets = offsets
    module.initialize_logical_weights_placements_and_offsets()
    _assign(module, _host_rows(segment) if weights is None else _shared(weights, None))
    module.weight_initialized = True
    module.segment = segment


@cache
def _shared_rows() -> Any:
    """The class of weights that lie in a segment: a tensor that is never copied, and pickled as its segment."""
    import torch

    class SharedRows(torch.Tensor):
        """uint8 [bytes] over a whole segment. segment: None where they are a device's view, which is not pickled."""

        segment: Segment | None
        # Operators see, and return, plain tensors.
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch.nn.Parameter does

        def __copy__(self) -> Any:
            return self

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return self

        def __reduce_ex__(self, protocol: Any) -> Any:
            if self.segment is None:
                raise LoaderError("weights on a device are not pickled; pickle the segment, and bind a module to it again")
            return _host_rows, (self.segment,)

    return SharedRows


def _shared(weights: "torch.Tensor", segment: Segment | None) -> Any:
    shared = weights.as_subclass(_shared_rows())
    shared.segment = segment
    return shared


def _host_rows(segment: Segment) -> Any:
    """This process's mapping of a segment as weights."""
    import torch

    memory = (ctypes.c_uint8 * segment.size).from_address(segment.mapping.address)
    return _shared(torch.frombuffer(memory, dtype=torch.uint8), segment)


def _assign(module: Any, weights: "torch.Tensor") -> None:
    if module.host_size:
        module.weights_host = weights
    else:
        module.weights_uvm = weights
