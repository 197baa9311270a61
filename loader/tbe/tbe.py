"""FBGEMM inference modules over a segment, built without weights and pointed at its rows by `bind`.

After FBGEMM's unreleased pull request 5640 (`weight_init_device`): weights lie on another device than the
metadata, or nowhere, so fp32 weights or a second copy never exist on the compute device. Copies of a bound
module share the segment; a pickle holds its path and attaches it again.
"""

import ctypes
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tableside.loader.errors import LoaderError
from tableside.loader.segment.segment import Segment
from tableside.quant import Pooling, RowFormat
from tableside.quant.installed import check_pair
from tableside.quant.row_format import ALIGNMENTS, FP8_EXPONENT_BIAS, FP8_EXPONENT_BITS, GPU_ALIGNMENT

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("tableside")


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
    weight_init_device: str | None = "meta",
    half: bool = False,
    feature_tables: Sequence[int] | None = None,
) -> Any:
    """Returns an IntNBitTableBatchedEmbeddingBagsCodegen with weights on `weight_init_device`: meta: none;
    cpu: zeros, filled through `split_embedding_weights`; None: on `device`. Until `bind` or `place`, forward
    raises LoaderError if they are elsewhere. feature_tables: feature index -> table. LoaderError: another
    weight_init_device. MissingBackend: no torch or FBGEMM."""
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

    check_device(weight_init_device)
    location = EmbeddingLocation.HOST if device == "cpu" else EmbeddingLocation.MANAGED
    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        [(t.name, t.rows, t.dim, SPARSE_TYPES[t.row_format], location) for t in tables],
        feature_table_map=None if feature_tables is None else list(feature_tables),
        pooling_mode=PoolingMode[pooling.name],
        device=device,
        output_dtype=SPARSE_TYPES[RowFormat.FP16 if half else RowFormat.FP32],
        row_alignment=GPU_ALIGNMENT,  # until `bind` knows the rows
        # ids are validated before; the other modes answer bad ids with row 0
        bounds_check_mode=BoundsCheckMode.NONE,
        fp8_exponent_bits=FP8_EXPONENT_BITS,
        fp8_exponent_bias=FP8_EXPONENT_BIAS,
    )
    if weight_init_device is None:
        module.initialize_weights()
        return module
    size = module.host_size or module.uvm_size
    _assign(module, torch.zeros(size, dtype=torch.uint8, device=weight_init_device))
    module.initialize_logical_weights_placements_and_offsets()
    module.weight_initialized = True  # so that slices are given; `guard` refuses forward passes
    guard(module, weight_init_device)
    return module


def fbgemm_module(
    segment: Segment,
    features: Sequence[str],
    *,
    pooling: Pooling | None = None,
    device: str = "cpu",
    half: bool = False,
) -> Any:
    """`init_tbe` and `bind` in one call: features of a segment, or its tables where no feature has the name,
    in this order.

    The module takes ids [n] and offsets [features × bags + 1] as FBGEMM's does, and gives [bags, total dim].
    ids are row numbers and are not checked. pooling: None: that of the features, which must agree; sum for
    tables. On a GPU the segment is registered, and the module keeps the registration. LoaderError: a name,
    pooling or table that does not fit.
    """
    known = {f.name: f for f in segment.header.features}
    stored = {t.name: t for t in segment.header.tables}
    names = [known[name].table if name in known else name for name in features]
    for name in names:
        if name not in stored:
            raise LoaderError(
                f"{segment.path} has no feature or table {name!r}; it has: "
                f"{', '.join(dict.fromkeys([*known, *stored]))}"
            )
        if stored[name].ids is not None:
            raise LoaderError(
                f"table {name!r} of {segment.path} has raw ids; FBGEMM's modules take row numbers alone, "
                "serve it instead"
            )
    if pooling is None:
        poolings = sorted({known[name].pooling for name in features if name in known}) or ["sum"]
        if len(poolings) > 1:
            raise LoaderError(
                f"the features pool by {' and '.join(poolings)}, a module by one; make one of each, or name "
                "a pooling"
            )
        pooling = Pooling[poolings[0].upper()]
    tables = list(dict.fromkeys(names))
    specs = [
        TbeTable(n, stored[n].rows, stored[n].dim, RowFormat.parse(stored[n].row_format)) for n in tables
    ]
    at = [tables.index(name) for name in names]
    module = init_tbe(specs, pooling=pooling, device=device, half=half, feature_tables=at)
    bind(module, segment, tables, None if device == "cpu" else _on_device(segment, device))
    return module


def _on_device(segment: Segment, device: str) -> "torch.Tensor":
    from tableside.loader.segment.registration import Registration

    return Registration(segment, device).view(0, segment.size)


def bind(module: Any, segment: Segment, tables: Sequence[str], weights: "torch.Tensor | None" = None) -> None:
    """Points a module's tables at a segment's rows, without a copy. weights: a uint8 view of the segment on
    the module's device; None: the mapping (CPU). The module keeps the segment alive. LoaderError: shape or
    format differ."""
    from tableside.quant.cpu.fbgemm import SPARSE_TYPES

    stored = {t.name: t for t in segment.header.tables}
    offsets, fits = [], set(ALIGNMENTS) if module.use_cpu else {GPU_ALIGNMENT}
    for name, (_, rows, dim, sparse_type, _) in zip(tables, module.embedding_specs, strict=True):
        t = stored.get(name)
        if t is None:
            raise LoaderError(f"{segment.path} has no table {name!r}; it has: {', '.join(stored)}")
        row_format = RowFormat.parse(t.row_format)
        found = (t.rows, t.dim, SPARSE_TYPES[row_format])
        if found != (rows, dim, sparse_type):
            raise LoaderError(
                f"table {name!r} is {found} in {segment.path}; the module was built for "
                f"{(rows, dim, sparse_type)}"
            )
        offsets.append(t.offset)
        fits &= row_format.alignments(t.dim, t.row_bytes)
    if not fits:
        raise LoaderError(
            f"the rows of these tables in {segment.path} have no row alignment in common that the module can "
            f"read; load them with row_alignment = {GPU_ALIGNMENT}, or make a module of each"
        )
    module.row_alignment = max(fits)
    module.weights_physical_offsets = offsets
    module.initialize_logical_weights_placements_and_offsets()
    _assign(module, _host_rows(segment) if weights is None else _shared(weights, None))
    module.weight_initialized = True
    module.segment = segment
    unguard(module)


@cache
def _shared_rows() -> Any:
    """Returns the tensor class of weights in a segment: never copied, pickled as the segment."""
    import torch

    class SharedRows(torch.Tensor):
        """uint8 [bytes] over a segment. segment: None for a device's view, which is not pickled."""

        segment: Segment | None
        # Operators see, and return, plain tensors.
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch.nn.Parameter does

        def __copy__(self) -> Any:
            return self

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            return self

        def __reduce_ex__(self, protocol: Any) -> Any:
            if self.segment is None:
                raise LoaderError(
                    "weights on a device are not pickled; pickle the segment, and bind a module to it again"
                )
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


# ---- weights elsewhere than the compute device ----


def check_device(weight_init_device: str | None) -> None:
    if weight_init_device not in ("meta", "cpu", None):
        raise LoaderError(f"weight_init_device is {weight_init_device!r}; expected meta, cpu or None")


def place(module: Any, weights: "torch.Tensor | None" = None) -> None:
    """Sets a module's weights on the compute device: these (not copied), or a copy of its own. weights: size
    and type as `weights_of`. Replaces parameters: create optimizers afterwards. LoaderError: misfit, another
    device, or nothing to copy (meta)."""
    import torch

    name, initial = weights_of(module)
    device = compute_device(module)
    if weights is None:
        if initial.device.type == "meta":
            raise LoaderError(
                f"{type(module).__name__}.{name} is on meta and has no values to move; give `place` the "
                "weights"
            )
        weights = initial.detach().to(device)
    if (weights.numel(), weights.dtype, weights.device.type) != (initial.numel(), initial.dtype, device.type):
        raise LoaderError(
            f"{type(module).__name__}.{name} has {initial.numel():,} elements of {initial.dtype} and belongs "
            f"on {device}; found {weights.numel():,} of {weights.dtype} on {weights.device}"
        )
    weights = weights.detach().view(initial.shape)
    is_parameter = isinstance(initial, torch.nn.Parameter)
    setattr(
        module,
        name,
        torch.nn.Parameter(weights, requires_grad=initial.requires_grad) if is_parameter else weights,
    )
    unguard(module)


def training_names() -> Any:
    """Returns FBGEMM's names for training modules. MissingBackend: it is not installed."""
    check_pair()
    with warnings.catch_warnings():
        # Its CPU build has no lookups of SSDs, and warns of each
        warnings.simplefilter("ignore", DeprecationWarning)
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
    return training


def guard(module: Any, weight_init_device: str) -> None:
    """Marks a module's weights as elsewhere; forward passes are refused until they are placed."""
    name, weights = weights_of(module)
    logger.info(
        "%s: %s bytes of weights (%s) begin on %s, its metadata on %s; place them before a forward pass",
        *(type(module).__name__, f"{weights.nbytes:,}", name, weight_init_device, compute_device(module)),
    )
    module.register_forward_pre_hook(_refuse_elsewhere)


def unguard(module: Any) -> None:
    for hook in [n for n, f in module._forward_pre_hooks.items() if f is _refuse_elsewhere]:
        del module._forward_pre_hooks[hook]


def weights_of(module: Any) -> tuple[str, "torch.Tensor"]:
    """Returns the one tensor that holds a module's weights, with its name."""
    names = ("weights_host", "weights_dev", "weights_uvm", "weights")
    return next((n, w) for n in names if (w := getattr(module, n, None)) is not None and w.numel())


def compute_device(module: Any) -> "torch.device":
    import torch

    return torch.device("cpu") if module.use_cpu else torch.device(module.D_offsets.device)


def _refuse_elsewhere(module: Any, _: Any) -> None:
    name, weights = weights_of(module)
    if weights.device.type != compute_device(module).type:
        raise LoaderError(
            f"{type(module).__name__}.{name} lies on {weights.device}, and the module computes on "
            f"{compute_device(module)}; bind it to a segment, or place its weights, before a forward pass"
        )


def _assign(module: Any, weights: "torch.Tensor") -> None:
    if module.host_size:
        module.weights_host = weights
    else:
        module.weights_uvm = weights
