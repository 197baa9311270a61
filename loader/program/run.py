"""Runs a program's graph as torch calls, each checked before its first run. Imports torch.

Operators come from the list by name; nothing is evaluated. No call writes into an existing tensor, so threads
can share a program. Values are freed after their last use.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tableside.loader.program.checks import CHECKS, Check
from tableside.loader.program.graph import (
    TYPES,
    DType,
    MemoryFormat,
    NumberRef,
    OwnDevice,
    Program,
    ProgramNode,
    TensorRef,
    Weight,
)
from tableside.loader.program.operators import ARITHMETIC, LARGEST_NUMBER, aten_name
from tableside.loader.program.precision import one_type, takes_values_of_one

_MOST_PROVEN = 1 << 16  # numbers of rows that are remembered
_FORMATS = {1: torch.contiguous_format, 4: torch.preserve_format}
Tensors = Mapping[str, torch.Tensor]


def weight_tensors(weights: tuple[Weight, ...], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns a program's weights by name, over copies of their bytes; on `meta`, their shapes alone."""
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
    """Returns a weight over memory that holds its content."""
    usable = len(memory) // dtype.itemsize
    return torch.frombuffer(memory, dtype=dtype, count=usable).as_strided(
        weight.sizes, weight.strides, weight.offset
    )


@dataclass(frozen=True)
class _Arguments:
    """A call's arguments: constants, and slots of values, also within lists."""

    constants: tuple[Any, ...]
    slots: tuple[tuple[int, int], ...]  # (place, slot)
    lists: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]  # (place of a list, as above)

    def read(self, values: list[Any]) -> list[Any]:
        """Returns the arguments, with values from their slots."""
        found = list(self.constants)
        for place, slot in self.slots:
            found[place] = values[slot]
        for place, slots in self.lists:
            items = found[place] = found[place].copy()
            for at, slot in slots:
                items[at] = values[slot]
        return found


@dataclass(frozen=True)
class _BoundCall:
    """A call ready to run. positional: count of positional arguments; names: of all, keywords last; dead:
    slots not read later; outputs: (slot, is a tensor) per result; target: its name, for people."""

    target: str
    function: Callable[..., Any]
    checks: tuple[Check, ...]
    positional: int
    names: tuple[str, ...]
    arguments: _Arguments
    outputs: tuple[tuple[int, bool], ...]
    dead: tuple[int, ...]

    def make(self, values: list[Any], is_proven: bool, most_bytes: int) -> None:
        """Runs the call and stores its results. is_proven: checks passed for the same types and sizes."""
        given = self.arguments.read(values)
        if self.checks and not is_proven:
            for check in self.checks:
                check(dict(zip(self.names, given, strict=False)), most_bytes)
        if len(given) == self.positional:
            found = self.function(*given)
        else:
            keywords = dict(zip(self.names[self.positional :], given[self.positional :], strict=True))
            found = self.function(*given[: self.positional], **keywords)
        if self.outputs:
            results = found if isinstance(found, tuple | list) else (found,)
            if not is_proven:
                self._check_results(results)
            for (slot, _), result in zip(self.outputs, results, strict=True):
                values[slot] = result
        for slot in self.dead:
            values[slot] = None

    def _check_results(self, results: Sequence[Any]) -> None:
        if len(results) != len(self.outputs):
            raise ValueError(
                f"a call gives {len(results)} values where the program names {len(self.outputs)}"
            )
        for (_, is_tensor), result in zip(self.outputs, results, strict=True):
            if isinstance(result, torch.Tensor) is not is_tensor:
                raise ValueError(
                    f"a call gives no {'tensor' if is_tensor else 'number'} where the program names one"
                )


class Runner:
    """A program on one device. most_bytes: limit of a result sized by a number in the program. dtype: of
    inputs; unless fp32, weights are `precision.rounded` and calls must not mix types. Checks depend on sizes
    alone, so they run once per number of rows. ValueError: an operator lacks an argument."""

    def __init__(
        self,
        program: Program,
        weights: Tensors,
        device: torch.device,
        most_bytes: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._program, self._device, self._most_bytes = program, device, most_bytes
        self._makers = None if dtype is torch.float32 else _makers(program)
        given = [*weights, *program.values]
        made = [ref.name for n in program.nodes for ref in _results(n)]
        self._slots = {name: slot for slot, name in enumerate([*given, *made])}
        self._weights = list(weights.values())
        self._calls = [
            self._bind(n, dead) for n, dead in zip(program.nodes, _last_uses(program), strict=True)
        ]
        self._proven: set[int] = set()  # numbers of rows

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Maps [rows, width] inputs to outputs. ValueError, RuntimeError, IndexError, TypeError: shapes do
        not fit."""
        least, most = self._program.rows
        if not least <= (rows := len(inputs[0])) <= most:
            raise ValueError(f"the program was exported for {least:,} to {most:,} rows; found {rows:,}")
        for given, i in zip(inputs, self._program.inputs, strict=True):
            if given.shape != (rows, i.width):
                raise ValueError(f"input {i.name!r} is {list(given.shape)}; expected {[rows, i.width]}")
        values: list[Any] = [*self._weights, *inputs]
        values += [None] * (len(self._slots) - len(values))
        is_proven, most_bytes = rows in self._proven, self._most_bytes
        for call in self._calls:
            try:
                call.make(values, is_proven, most_bytes)
            except NotImplementedError as error:  # torch names its kernel, or none
                raise NotImplementedError(f"its call {call.target} cannot be made: {error}") from error
        if len(self._proven) < _MOST_PROVEN:
            self._proven.add(rows)
        found: torch.Tensor = values[self._slots[self._program.result.name]]
        return found

    def _bind(self, node: ProgramNode, dead: tuple[str, ...]) -> _BoundCall:
        outputs = tuple((self._slots[ref.name], isinstance(ref, TensorRef)) for ref in _results(node))
        gone = tuple(self._slots[name] for name in dead)
        if (function := ARITHMETIC.get(node.target)) is not None:
            numbers = self._arguments([value for _, value in node.arguments])
            return _BoundCall(
                node.target, _on_numbers(function), (), len(node.arguments), (), numbers, outputs, gone
            )
        name, overload = aten_name(node.target)
        operator = getattr(getattr(torch.ops.aten, name), overload)
        given = dict(node.arguments)
        schema = sorted(operator._schema.arguments, key=lambda a: a.kwarg_only)
        values = []
        for argument in schema:
            if argument.name not in given and not argument.has_default_value():
                raise ValueError(f"{node.target} is called without {argument.name}")
            values.append(given.pop(argument.name, argument.default_value))
        if given:
            raise ValueError(f"{node.target} is called with {next(iter(given))}, which it does not take")
        positional = sum(not a.kwarg_only for a in schema)
        names = tuple(a.name for a in schema)
        checks: tuple[Check, ...] = (CHECKS[name],) if name in CHECKS else ()
        if self._makers is not None and not takes_values_of_one(node):
            checks += (one_type(node, self._makers),)
        return _BoundCall(
            node.target, operator, checks, positional, names, self._arguments(values), outputs, gone
        )

    def _arguments(self, values: Sequence[Any]) -> _Arguments:
        slots, lists = self._references(values), []
        for place, value in enumerate(values):
            if isinstance(value, tuple) and (inside := self._references(value)):
                lists.append((place, inside))
        return _Arguments(tuple(self._constant(v) for v in values), slots, tuple(lists))

    def _references(self, values: Sequence[Any]) -> tuple[tuple[int, int], ...]:
        """Returns the places that name a value, with its slot."""
        return tuple(
            (n, self._slots[v.name]) for n, v in enumerate(values) if isinstance(v, TensorRef | NumberRef)
        )

    def _constant(self, value: Any) -> Any:
        """Returns an argument with everything but references as torch wants it."""
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


def _on_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses numbers computed from sizes that exceed LARGEST_NUMBER."""

    def call(*numbers: Any) -> Any:
        found = function(*numbers)
        if isinstance(found, int | float) and not abs(found) <= LARGEST_NUMBER:
            raise ValueError("a number that is computed of sizes is larger than 2^53")
        return found

    return call


def _makers(program: Program) -> dict[str, str]:
    """Returns the maker of each value, for people."""
    found = dict.fromkeys((w.name for w in program.weights), "a weight") | dict.fromkeys(
        program.values, "an input"
    )
    return found | {ref.name: f"of {node.target}" for node in program.nodes for ref in _results(node)}


def _last_uses(program: Program) -> list[tuple[str, ...]]:
    """Returns, per call, the values that no later call reads; weights and inputs stay."""
    used: set[str] = {program.result.name, *program.values, *(w.name for w in program.weights)}
    dead: list[tuple[str, ...]] = []
    for node in reversed(program.nodes):
        mentioned = {ref.name for ref in _references(node)}
        dead.append(tuple(sorted(mentioned - used)))
        used |= mentioned
    return dead[::-1]


def _references(node: ProgramNode) -> list[TensorRef | NumberRef]:
    items = [
        item for _, value in node.arguments for item in (value if isinstance(value, tuple) else (value,))
    ]
    return [*(item for item in items if isinstance(item, TensorRef | NumberRef)), *_results(node)]


def _results(node: ProgramNode) -> list[TensorRef | NumberRef]:
    return [ref for out in node.outputs for ref in (out if isinstance(out, tuple) else (out,))]
