"""Whether somebody besides the module looks at a call: then it becomes an operator, since a call into C is
invisible to them.

torch.compile and torch.export, torch.jit.trace, dispatch modes (make_fx, FakeTensorMode, functionalization,
those of users) and the transforms of torch.func look at torch's operators. They would record the vectors of
this one call, or an empty tensor.
"""

from typing import NoReturn

import torch
from torch._C import _is_torch_function_mode_enabled, _is_tracing, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch._compile import _disable_dynamo
from torch._ops import _len_torch_dispatch_stack_pre_dispatch as _modes_before_dispatch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tableside.serving.modules.errors import ModuleError

_PLAIN = torch.Tensor.__torch_dispatch__


class NotInMemory(ModuleError):
    """A tensor without memory that could be read: its class or its wrapper says what operators do with it."""


class Leaf(torch.nn.Module):
    """A module whose call torch.fx records as one, as it does those of torch.nn: it tells them by
    `__module__` of the object."""

    def __init__(self) -> None:
        super().__init__()
        self.__module__ = "torch.nn"


def is_traced() -> bool:
    """Whether a call of now is to be an operator. torch.compile must be asked first: it cannot look into
    the others."""
    return (
        is_compiling()
        or _is_tracing()
        or _len_torch_dispatch_stack() > 0
        or peek_interpreter_stack() is not None
        or (_is_torch_function_mode_enabled() and _modes_before_dispatch() > 0)  # type: ignore[no-untyped-call]  # it is slow
    )


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """NotInMemory: operators alone can read this tensor, as a FakeTensor outside of its mode. name: of the
    feature."""
    if type(tensor).__torch_dispatch__ is not _PLAIN or (not tensor.data_ptr() and tensor.numel()):
        raise NotInMemory(
            f"feature {name!r}: a {type(tensor).__name__} has no memory to read; give a torch.Tensor"
        )


def check_constant(name: str, weights: torch.Tensor | None) -> None:
    """ModuleError: the weights of ids want a gradient, backward or forward; vectors have none."""
    if weights is None or not weights.is_floating_point():
        return
    is_dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(weights).tangent is not None  # type: ignore[no-untyped-call]
    if is_dual or (weights.requires_grad and torch.is_grad_enabled()):
        _refuse(name)


@_disable_dynamo
def _refuse(name: str) -> NoReturn:
    """Raises between two graphs of torch.compile, which would otherwise compile what follows an error."""
    raise ModuleError(
        f"feature {name!r}: weights require a gradient, and published tables have none; detach them, or call "
        "under torch.no_grad"
    )
