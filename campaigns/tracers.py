"""All that looks at torch's operators, or changes what they do: a call as each of them answers it.

A `Tracer` is given a module, the inputs that it is traced with, and others of the same shapes. It returns the
module's tensor for the others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

Inputs = tuple[torch.Tensor, ...]
Call = Callable[..., torch.Tensor]
Tracer = Callable[[torch.nn.Module, Inputs, Inputs], torch.Tensor]


class Sees(TorchDispatchMode):
    """A mode as users write them: it counts our operators, and runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func.namespace == "tableside"
        return func(*args, **(kwargs or {}))


def _in_a_mode(call: Call, traced: Inputs, given: Inputs) -> torch.Tensor:
    with Sees() as mode:
        found = call(*given)
    assert mode.seen, "the mode saw no call"
    return found


def _of_functional_tensors(call: Call, traced: Inputs, given: Inputs) -> torch.Tensor:
    torch._enable_functionalization(reapply_views=True)
    try:
        return torch._from_functional_tensor(call(*map(torch._to_functional_tensor, given)))
    finally:
        torch._disable_functionalization()


def _on_another_device(call: Call, traced: Inputs, given: Inputs) -> torch.Tensor:
    with torch.device("meta"):
        return call(*given)


def _compiled(call: Call, traced: Inputs, given: Inputs) -> torch.Tensor:
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    compiled(*traced)
    return compiled(*given)


def _in_a_gradient(call: Call, traced: Inputs, given: Inputs) -> torch.Tensor:
    """Of something else: the vectors are constants in it."""
    found: torch.Tensor = torch.func.jacrev(lambda x: x * call(*given))(torch.ones(()))
    return found


def _in_a_forward_gradient(call: Call, traced: Inputs, given: Inputs) -> torch.Tensor:
    found: torch.Tensor = torch.func.jvp(lambda x: x * call(*given), (torch.ones(()),), (torch.ones(()),))[1]
    return found


def _made_by_fx(**how: Any) -> Tracer:
    return lambda call, traced, given: make_fx(call, **how)(*traced)(*given)


def _exported(is_strict: bool) -> Tracer:
    return lambda call, traced, given: torch.export.export(call, traced, strict=is_strict).module()(*given)


TRACERS: dict[str, Tracer] = {
    "torch.jit.trace": lambda call, traced, given: torch.jit.trace(call, traced)(*given),
    "make_fx": _made_by_fx(),
    "make_fx, fake": _made_by_fx(tracing_mode="fake"),
    "make_fx, symbolic": _made_by_fx(tracing_mode="symbolic"),
    "make_fx, pre_dispatch": _made_by_fx(pre_dispatch=True),
    "make_fx of functionalize": lambda call, traced, given: make_fx(torch.func.functionalize(call))(*traced)(
        *given
    ),
    "torch.compile": _compiled,
    "torch.export": _exported(False),
    "torch.export, strict": _exported(True),
    "functionalize": lambda call, traced, given: torch.func.functionalize(call)(*given),
    "functional tensors": _of_functional_tensors,
    "a mode of users": _in_a_mode,
    "another default device": _on_another_device,
    "jacrev": _in_a_gradient,
    "jvp": _in_a_forward_gradient,
    "inference_mode": lambda call, traced, given: torch.inference_mode()(call)(*given),
    "autocast": lambda call, traced, given: torch.autocast("cpu")(call)(*given),
}
