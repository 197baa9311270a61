"""Runs a program's graph: one call of torch after another, each checked first. Imports torch.

The operators are taken from the list, by name, and nothing of the program is evaluated. No call writes into a tensor that was
there before, so any number of threads may run one program. Values are let go after their last use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tableside.loader.program.checks import CHECKS, Check
from tableside.loader.program.graph import TYPES, DType, MemoryFormat, Node, NumberRef, OwnDevice, Program, TensorRef, Weight
from tableside.loader.program.operators import ARITHMETIC, LARGEST_NUMBER, aten_name

_FORMATS = {1: torch.contiguous_format, 4: torch.preserve_format}
Tensors = Mapping[str, torch.Tensor]


def weight_tensors(weights: tuple[Weight, ...], device: torch.device) -> dict[str, torch.Tensor]:
    """A program's weights by name, over copies of their bytes; on `meta`, their shapes alone."""
    contents = {id(w.content): w.content for w in weights}
    copies = {} if device.type == "meta" else {key: bytearray(content) for key, content in contents.items()}
    return {w.name: _tensor(w, copies.get(id(w.content)), device) for w in weights}


def _tensor(weight: Weight, content: bytearray | None, device: torch.device) -> torch.Tensor:
    dtype = getattr(torch, TYPES[weight.dtype][0])
    if content is None:
        return torch.empty_strided(weight.sizes, weight.strides, dtype=dtype, device=device)
    if not content:
        return torch.empty(weight.sizes, dtype=dtype, device=device)
    return over(content, weight, dtype).to(device)


def over(memory: Any, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """A weight over memory that holds its content."""
    usable = len(memory) // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=usable).as_strided(weight.sizes, weight.strides, weight.offset)


@dataclass(frozen=True)
class _Call:
    """One call, ready to be made. references: where arguments name values; dead: values that no later call reads."""

    function: Callable[..., Any]
    check: Check | None
    names: tuple[str, ...]  # of `arguments`, then of `keywords`
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    outputs: tuple[Any, ...]
    dead: tuple[str, ...]


class Runner:
    """A program on one device. most_bytes: of one result whose size is a number in the program.

    ValueError: an operator has no such argument.
    """

    def __init__(self, program: Program, weights: Tensors, device: torch.device, most_bytes: int) -> None:
        self._program, self._weights, self._device, self._most_bytes = program, weights, device, most_bytes
        self._calls = [self._bind(n, dead) for n, dead in zip(program.nodes, _last_uses(program), strict=True)]

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, width] of each input -> what the program returns.

        ValueError, RuntimeError, IndexError, TypeError: it does not take inputs of these shapes.
        """
        least, most = self._program.rows
        if not least <= (rows := len(inputs[0])) <= most:
            raise ValueError(f"the program was exported for {least:,} to {most:,} rows; found {rows:,}")
        values: dict[str, Any] = dict(self._weights)
        values.update(zip(self._program.values, inputs, strict=True))
        for call in self._calls:
            arguments = [_resolve(a, values) for a in call.arguments]
            keywords = {name: _resolve(a, values) for name, a in call.keywords.items()}
            if call.check is not None:
                call.check({**dict(zip(call.names, arguments, strict=False)), **keywords}, self._most_bytes)
            _keep(call, call.function(*arguments, **keywords), values)
            for name in call.dead:
                del values[name]
        found: torch.Tensor = values[self._program.result.name]
        return found

    def _bind(self, node: Node, dead: tuple[str, ...]) -> _Call:
        if (function := ARITHMETIC.get(node.target)) is not None:
            arguments = tuple(self._constant(value) for _, value in node.arguments)
            return _Call(_on_numbers(function), None, (), arguments, {}, node.outputs, dead)
        name, overload = aten_name(node.target)
        operator = getattr(getattr(torch.ops.aten, name), overload)
        given = {argument: self._constant(value) for argument, value in node.arguments}
        names, arguments_, keywords = [], [], {}
        for argument in operator._schema.arguments:
            if argument.name not in given and not argument.has_default_value():
                raise ValueError(f"{node.target} is called without {argument.name}")
            value = given.pop(argument.name, argument.default_value)
            if argument.kwarg_only:
                keywords[argument.name] = value
            else:
                names.append(argument.name)
                arguments_.append(value)
        if given:
            raise ValueError(f"{node.target} is called with {next(iter(given))}, which it does not take")
        return _Call(operator, CHECKS.get(name), tuple(names), tuple(arguments_), keywords, node.outputs, dead)

    def _constant(self, value: Any) -> Any:
        """An argument with everything but references as torch wants it."""
        match value:
            case tuple():
                return [self._constant(item) for item in value]
            case DType(code):
                return getattr(torch, TYPES[code][0])
            case MemoryFormat(code):
                return _FORMATS[code]
            case OwnDevice():
                return self._device
        return value


def _resolve(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, TensorRef | NumberRef):
        return values[value.name]
    if type(value) is list:
        return [values[item.name] if isinstance(item, TensorRef | NumberRef) else item for item in value]
    return value


def _on_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Python's numbers have no end: those that a program computes of sizes do."""

    def call(*numbers: Any) -> Any:
        found = function(*numbers)
        if isinstance(found, int | float) and not abs(found) <= LARGEST_NUMBER:
            raise ValueError("a number that is computed of sizes is larger than 2^53")
        return found

    return call


def _keep(call: _Call, found: Any, values: dict[str, Any]) -> None:
    """Puts a call's results under their names."""
    if not call.outputs:
        return
    if len(call.outputs) == 1 and isinstance(call.outputs[0], tuple):
        results, names = found, call.outputs[0]
    else:
        results, names = found if isinstance(found, tuple | list) else (found,), call.outputs
    if len(results) != len(names):
        raise ValueError(f"a call gives {len(results)} values where the program names {len(names)}")
    for ref, result in zip(names, results, strict=True):
        if isinstance(result, torch.Tensor) is not isinstance(ref, TensorRef):
            raise ValueError(f"a call gives no {'tensor' if isinstance(ref, TensorRef) else 'number'} for {ref.name!r}")
        values[ref.name] = result


def _last_uses(program: Program) -> list[tuple[str, ...]]:
    """Of each call, the values that no later one reads; weights and inputs stay."""
    used: set[str] = {program.result.name, *program.values, *(w.name for w in program.weights)}
    dead: list[tuple[str, ...]] = []
    for node in reversed(program.nodes):
        mentioned = {ref.name for ref in _references(node)}
        dead.append(tuple(sorted(mentioned - used)))
        used |= mentioned
    return dead[::-1]


def _references(node: Node) -> list[TensorRef | NumberRef]:
    groups = [*(value for _, value in node.arguments), *node.outputs]
    items = [item for group in groups for item in (group if isinstance(group, tuple) else (group,))]
    return [item for item in items if isinstance(item, TensorRef | NumberRef)]
