"""A program in bf16 or fp16: weights are rounded at load, inputs per call. Imports torch.

All floating weights take the precision. Casts in the program stay, so a last sigmoid may be fp32. A call with
two floating types is refused, since some operators would silently continue in fp32. Zero-dimensional tensors
do not widen.
"""

from collections.abc import Mapping

import torch

from tableside.loader.errors import ProgramError
from tableside.loader.program.checks import Arguments, Check
from tableside.loader.program.graph import ProgramNode, TensorRef
from tableside.loader.program.operators import aten_name
from tableside.quant.contract import Precision

DTYPES: Mapping[Precision, torch.dtype] = {
    Precision.FP32: torch.float32,
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
}
Tensors = Mapping[str, torch.Tensor]
# Of their second tensor: its type or its shape alone
_TAKE_NO_VALUES = ("expand_as", "to", "type_as", "view_as")


def rounded(weights: Tensors, precision: Precision) -> dict[str, torch.Tensor]:
    """Rounds floating weights to a precision; integers, bools, and everything under fp32 stay."""
    if precision is Precision.FP32:
        return dict(weights)
    return {name: w.to(DTYPES[precision]) if w.is_floating_point() else w for name, w in weights.items()}


def check_range(weights: Tensors, found: Tensors, precision: Precision) -> None:
    """ProgramError: a finite weight was rounded to an infinite one."""
    for name, weight in weights.items():
        if weight.is_floating_point() and (beyond := found[name].isinf() & weight.isfinite()).any():
            most = torch.finfo(DTYPES[precision]).max
            others = "bf16 or fp32" if precision is Precision.FP16 else "fp32"
            raise ProgramError(
                f"its weight {name!r} holds {float(weight[beyond][0]):.4g}; expected at most {most:.4g}, the "
                f"largest number of {precision.name.lower()}; take {others}"
            )


def one_type(node: ProgramNode, makers: Mapping[str, str]) -> Check:
    """Checks that a call takes tensors of one floating type. makers: what made each value, for a person."""

    def check(given: Arguments, _: int) -> None:
        types: dict[torch.dtype, str] = {}
        for argument, held in node.arguments:
            refs: tuple[object, ...] = held if isinstance(held, tuple) else (held,)
            values = given[argument] if isinstance(held, tuple) else (given[argument],)
            for ref, value in zip(refs, values, strict=True):
                if isinstance(ref, TensorRef) and value.is_floating_point() and value.dim():
                    types.setdefault(value.dtype, ref.name)
        if len(types) > 1:
            mixed = " and ".join(
                f"{name!r} ({makers[name]}) as {str(t).removeprefix('torch.')}" for t, name in types.items()
            )
            raise ValueError(
                f"its call {node.target} takes {mixed}; export it without what says a type (x.type_as(y) "
                "follows y), or take fp32"
            )

    return check


def takes_values_of_one(node: ProgramNode) -> bool:
    """Returns whether a call reads the values of one tensor only, so that others may differ in type."""
    return aten_name(node.target)[0] in _TAKE_NO_VALUES
