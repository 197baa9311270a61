"""The operators that a program may call: overloads of ATen, and arithmetic on sizes.

Each checks its sizes and indices itself, or `checks` does before each call. Excluded: writes into arguments,
files, views beyond a tensor's memory, uninitialized memory, random numbers, and data-dependent sizes.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

# A name alone means the overload "default".
_LIST = """
    _log_softmax _native_batch_norm_legit_no_training _softmax _to_copy _unsafe_view abs add.Tensor add.Scalar
    addcdiv addcmul addmm all all.dim all.dims amax amin any any.dim any.dims arange arange.start
    arange.start_step argmax argmin argsort argsort.stable atan baddbmm batch_norm bitwise_and.Tensor
    bitwise_and.Scalar bitwise_not bitwise_or.Tensor bitwise_or.Scalar bmm cat ceil celu chunk clamp
    clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor clone concat concatenate
    constant_pad_nd contiguous conv1d cos cosine_similarity cumsum detach diagonal div.Tensor div.Scalar
    div.Tensor_mode div.Scalar_mode dot dropout einsum elu embedding eq.Tensor eq.Scalar erf exp expand
    expand_as expm1 eye eye.m fill.Scalar flatten.using_ints flip floor floor_divide floor_divide.Scalar
    fmod.Tensor fmod.Scalar full full_like gather ge.Tensor ge.Scalar gelu glu group_norm gt.Tensor gt.Scalar
    hardsigmoid hardswish hardtanh index.Tensor index_select isfinite isinf isnan layer_norm le.Tensor
    le.Scalar leaky_relu lerp.Scalar lerp.Tensor lift_fresh_copy linalg_vector_norm linear log log10 log1p
    log2 log_sigmoid log_softmax.int logical_and logical_not logical_or logical_xor logit logsumexp lt.Tensor
    lt.Scalar masked_fill.Scalar masked_fill.Tensor matmul max max.dim max.other maximum mean mean.dim min
    min.dim min.other minimum mish mm movedim.int movedim.intlist mul.Tensor mul.Scalar mv nan_to_num narrow
    native_layer_norm ne.Tensor ne.Scalar neg new_full new_ones new_zeros norm.Scalar norm.ScalarOpt_dim ones
    ones_like outer pad permute pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar prelu prod prod.dim_int
    reciprocal relu relu6 remainder.Tensor remainder.Scalar repeat repeat_interleave.self_int reshape rms_norm
    roll round rsqrt rsub.Tensor rsub.Scalar scalar_tensor scaled_dot_product_attention select.int selu
    sigmoid sign silu sin slice.Tensor softmax.int softplus sort sort.stable split.Tensor split_with_sizes
    sqrt square squeeze squeeze.dim squeeze.dims stack std std.dim std.correction sub.Tensor sub.Scalar sum
    sum.dim_IntList sym_numel sym_size.int t tanh tile to.device to.dtype to.dtype_layout to.other topk
    transpose.int tril tril_indices triu triu_indices type_as unbind.int unflatten.int unsqueeze var var.dim
    var.correction view view_as where.self where.Scalar where.ScalarOther where.ScalarSelf zeros zeros_like
"""
OPERATORS = frozenset(
    f"torch.ops.aten.{name}" if "." in name else f"torch.ops.aten.{name}.default" for name in _LIST.split()
)
# Read as another one: these write into a tensor that nothing else reads.
READ_AS = {"torch.ops.aten.detach_.default": "torch.ops.aten.detach.default"}
# What export notes of types, for itself: left out.
NOTES = frozenset(["torch.ops.aten._assert_tensor_metadata.default"])
ASSERTION = "torch.ops.aten._assert_scalar.default"


def _expect(value: Any, _message: str = "") -> None:
    if not value:
        raise ValueError("the program was exported for other sizes than these")


_ARITHMETIC = "add sub mul floordiv truediv mod neg eq ne lt le gt ge and_ or_ not_"
# On Python's numbers; by position.
ARITHMETIC: Mapping[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in _ARITHMETIC.split()},
    "torch.sym_int": int,
    "torch.sym_float": float,
    "torch.sym_max": max,
    "torch.sym_min": min,
    "torch.sym_not": operator.not_,
    ASSERTION: _expect,
}
LARGEST_NUMBER = 1 << 53  # of what is computed of sizes


def aten_name(target: str) -> tuple[str, str]:
    """Returns the operator and overload of a target of OPERATORS."""
    name, _, overload = target.removeprefix("torch.ops.aten.").partition(".")
    return name, overload
