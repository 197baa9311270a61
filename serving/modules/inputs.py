"""The inputs of a module by feature, their checks and errors, and whether a call is traced.

    tensor [bags, n]            bags of n ids each                     (pooled)
    tensor of any shape         one vector an id                       (not pooled)
    (values, offsets)           as torch.nn.EmbeddingBag takes them    (pooled); a third element: weights
    Bags(values, lengths=…)     by lengths; Bags has offsets and weights too

ids, lengths, offsets: int64 or int32. weights: floats, one an id. Only tensors of other types or strides are
copied. C calls are invisible to torch.compile, torch.export, torch.jit.trace, dispatch modes and torch.func,
so a traced call becomes an operator.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, NoReturn, ParamSpec, TypeVar

import torch
from torch._C import _is_torch_function_mode_enabled, _is_tracing, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch._compile import _disable_dynamo
from torch._ops import _len_torch_dispatch_stack_pre_dispatch as _modes_before_dispatch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from tableside.quant import BadIds, QuantError
from tableside.serving.errors import ServingError

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_PLAIN = torch.Tensor.__torch_dispatch__


class ModuleError(ServingError, ValueError):
    """A module that cannot be made here, or a call that it does not take."""


class NotATensor(ModuleError, TypeError):
    """A call with lists, arrays or numbers instead of tensors."""


class BadFeatureIds(QuantError):
    """Ids or lengths of a feature that cannot be looked up. problem, position, value, bound: as of
    `quant.BadIds`."""

    def __init__(self, feature: str, cause: BadIds) -> None:
        super().__init__(feature, cause)
        self.feature, self.problem = feature, cause.problem
        self.position, self.value, self.bound = cause.position, cause.value, cause.bound

    def __str__(self) -> str:
        feature, cause = self.args
        return str(cause.describe(f"feature {feature!r}"))


class NotInMemory(ModuleError):
    """A tensor without readable memory: only operators can take it."""


class Leaf(torch.nn.Module):
    """A module that torch.fx records as one call, as those of torch.nn: it checks the object's
    `__module__`."""

    def __init__(self) -> None:
        super().__init__()
        self.__module__ = "torch.nn"


def is_traced() -> bool:
    """Whether a call must become an operator. Asks torch.compile first: it cannot trace the other checks."""
    return (
        is_compiling()
        or _is_tracing()
        or _len_torch_dispatch_stack() > 0
        or peek_interpreter_stack() is not None
        or (_is_torch_function_mode_enabled() and _modes_before_dispatch() > 0)  # type: ignore[no-untyped-call]  # it is slow
    )


def check_memory(name: str, tensor: torch.Tensor) -> None:
    """NotInMemory: only operators can read this tensor, such as a FakeTensor outside its mode."""
    if type(tensor).__torch_dispatch__ is not _PLAIN or (not tensor.data_ptr() and tensor.numel()):
        raise NotInMemory(
            f"feature {name!r}: a {type(tensor).__name__} has no memory to read; give a torch.Tensor"
        )


def check_constant(name: str, weights: torch.Tensor | None) -> None:
    """ModuleError: the weights require a gradient, backward or forward."""
    if weights is None or not weights.is_floating_point():
        return
    is_dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(weights).tangent is not None  # type: ignore[no-untyped-call]
    if is_dual or (weights.requires_grad and torch.is_grad_enabled()):
        _refuse(name)


def outside_graphs(call: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """Makes a function that torch.compile calls between two graphs. torch's own mark does, and its first call
    imports the compiler, which takes more than a second; where nothing did that, nothing is compiled."""
    marked = _disable_dynamo(call)

    @functools.wraps(call)
    def chosen(*given: _Given.args, **named: _Given.kwargs) -> _Result:
        return (marked if "torch._dynamo" in sys.modules else call)(*given, **named)

    return chosen


@outside_graphs
def _refuse(name: str) -> NoReturn:
    """Raises between two graphs of torch.compile, which would otherwise compile the code after an error."""
    raise ModuleError(
        f"feature {name!r}: weights require a gradient, and published tables have none; detach them, or call "
        "under torch.no_grad"
    )


class Bags(NamedTuple):
    """A feature's ids in bags. values: [ids]. One of offsets: [bags], or [bags + 1] with
    `include_last_offset`, and lengths: [bags]. weights: [ids]."""

    values: torch.Tensor
    offsets: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    weights: torch.Tensor | None = None


class Form(IntEnum):
    """How ids make bags. The values are part of exported programs."""

    IDS = 0  # not pooled: one vector an id
    FIXED = 1  # [bags, n]
    LENGTHS = 2
    OFFSETS = 3
    ENDS = 4  # offsets with the end of the last bag


class FeatureTensors(NamedTuple):
    """One feature's input. bags: lengths or offsets, by `form`."""

    form: Form
    values: torch.Tensor
    bags: torch.Tensor | None
    weights: torch.Tensor | None

    def shape(self, dim: int) -> tuple[int, ...]:
        """Of its vectors."""
        if self.form is Form.IDS:
            return (*self.values.shape, dim)
        return (
            self.values.shape[0] if self.bags is None else self.bags.shape[0] - (self.form is Form.ENDS),
            dim,
        )


class PackedInput(NamedTuple):
    """All pooled features in one tensor, as in a KeyedJaggedTensor. order: the module's features among its
    `features`; empty: the same. values: [ids]. bags: by `form`, lengths [features * bags] or offsets
    [features * bags + 1]. weights: [ids]."""

    order: list[int]
    features: int
    values: torch.Tensor
    form: Form
    bags: torch.Tensor
    weights: torch.Tensor | None


_IDS, _FIXED, _LENGTHS, _OFFSETS, _ENDS = Form  # a name is found sooner than an attribute of an enum
_INTEGERS = (torch.int64, torch.int32)
_SEQUENCES = (tuple, list)  # a union would be made anew by each call
FeatureInput = torch.Tensor | Bags | Sequence[torch.Tensor | None]


def given_bags(name: str, value: FeatureInput, include_last_offset: bool) -> FeatureTensors:
    """Checks a pooled feature's input. ModuleError: its bags are missing or ambiguous. NotATensor: of the
    ids."""
    if isinstance(value, torch.Tensor):
        if value.dim() != 2:
            raise ModuleError(
                f"feature {name!r} is pooled and came as a tensor of {value.dim()} dimensions; expected "
                "[bags, ids of a bag], (values, offsets), or Bags(values, lengths=...)"
            )
        return FeatureTensors(_FIXED, value, None, None)
    if type(value) is tuple and len(value) == 2:  # as nearly all calls have it
        values, offsets = value
        if isinstance(values, torch.Tensor) and offsets is not None and values.dim() == 1:
            return FeatureTensors(_ENDS if include_last_offset else _OFFSETS, values, offsets, None)
    values, offsets, lengths, weights = value if isinstance(value, Bags) else _as_torch_takes(name, value)
    if not isinstance(values, torch.Tensor):
        check_tensor(name, values)
    if offsets is None and lengths is None:
        if values.dim() != 2:
            raise ModuleError(
                f"feature {name!r} has neither offsets nor lengths; give one of them, or ids [bags, ids of a "
                "bag]"
            )
        return FeatureTensors(_FIXED, values, None, weights)
    if values.dim() != 1 or (offsets is not None and lengths is not None):
        both = " with offsets and lengths" if offsets is not None and lengths is not None else ""
        raise ModuleError(
            f"feature {name!r} has values of {values.dim()} dimensions{both}; expected values [ids] with "
            "offsets or lengths"
        )
    if lengths is not None:
        return FeatureTensors(_LENGTHS, values, lengths, weights)
    return FeatureTensors(_ENDS if include_last_offset else _OFFSETS, values, offsets, weights)


def given_ids(name: str, value: FeatureInput) -> FeatureTensors:
    """The input of a feature that is not pooled. NotATensor: it is none."""
    return FeatureTensors(_IDS, check_tensor(name, value), None, None)


def check_tensor(name: str, value: object) -> torch.Tensor:
    """The value. NotATensor: a feature's ids, bags or weights are a list, an array, a number."""
    if not isinstance(value, torch.Tensor):
        raise NotATensor(
            f"feature {name!r} came with {type(value).__name__}; expected a torch.Tensor (torch.tensor of a "
            "list, torch.from_numpy of an array)"
        )
    return value


def check_on(where: torch.device, name: str, tensor: torch.Tensor) -> None:
    """NotATensor; ModuleError: it lies elsewhere than the tables; NotInMemory."""
    check_tensor(name, tensor)
    if tensor.device != where:
        raise ModuleError(
            f"feature {name!r}: a tensor is on {tensor.device}, the module's tables on {where}; send it "
            f"there, or make a module with device={str(tensor.device)!r}"
        )
    check_memory(name, tensor)


def as_integers(where: torch.device, name: str, values: torch.Tensor) -> torch.Tensor:
    """Ids as int64 or int32, contiguous. ModuleError: they are no integers of 32 or 64 bits."""
    check_on(where, name, values)
    if values.dtype not in _INTEGERS:
        raise ModuleError(f"feature {name!r}: ids are {values.dtype}; expected torch.int64 or torch.int32")
    return values.contiguous()


def as_ids(where: torch.device, name: str, values: torch.Tensor) -> torch.Tensor:
    """The same as int64."""
    return as_integers(where, name, values).to(torch.int64)


def as_weights(where: torch.device, name: str, weights: torch.Tensor, count: int) -> torch.Tensor:
    """Converts to contiguous fp32. ModuleError: not `count` floats, or they require a gradient."""
    check_on(where, name, weights)
    if weights.numel() != count or not weights.is_floating_point():
        raise ModuleError(
            f"feature {name!r}: weights are {weights.dtype} {list(weights.shape)}; expected {count} floats, "
            "one an id"
        )
    check_constant(name, weights)
    return weights.detach().to(torch.float32).contiguous()


def as_bags(where: torch.device, name: str, bags: torch.Tensor) -> torch.Tensor:
    """Makes lengths or offsets contiguous. ModuleError: they are no int32 or int64, or not of one
    dimension."""
    check_on(where, name, bags)
    if bags.dtype not in _INTEGERS or bags.dim() != 1:
        raise ModuleError(
            f"feature {name!r}: lengths or offsets are {bags.dtype} {list(bags.shape)}; expected int64 or "
            "int32 [bags]"
        )
    return bags.contiguous()


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Returns the offsets of bags of these lengths, int64 [bags + 1], on their device."""
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
    return offsets


def _as_torch_takes(
    name: str, value: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The fields of `Bags`, of (values, offsets, weights)."""
    if not isinstance(value, _SEQUENCES) or not 1 <= len(value) <= 3:
        raise NotATensor(
            f"feature {name!r} came as {type(value).__name__}; expected a torch.Tensor, or (values, "
            "offsets) or (…, …, weights) of tensors"
        )
    return value[0], value[1] if len(value) > 1 else None, None, value[2] if len(value) > 2 else None
