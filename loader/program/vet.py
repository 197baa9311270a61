"""Rules of a program's graph: from untrusted JSON to a graph of known fields.

Other fields (metadata, guards, nesting of inputs, declared sizes) are dropped. Malformed JSON raises Python's
errors (KeyError, TypeError ...), which `read` turns into ProgramError.
"""

import keyword
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from tableside.loader.program.graph import (
    FP32,
    TYPES,
    Argument,
    DType,
    Item,
    MemoryFormat,
    NumberRef,
    Output,
    OwnDevice,
    ProgramInput,
    ProgramNode,
    TensorRef,
    refuse,
)
from tableside.loader.program.operators import ARITHMETIC, ASSERTION, NOTES, OPERATORS, READ_AS

LARGEST_NODES, LARGEST_LIST, LARGEST_NAME, LARGEST_WIDTH = 20_000, 10_000, 300, 1 << 20
_END = (1 << 63) - 1  # how export writes "to the end" of a slice
_LARGEST_INT = 1 << 31
_STRING = re.compile(r"[\w ,.>-]{0,200}", re.ASCII)
_SYMBOL = re.compile(r"(?:Symbol\('(?P<made>\w{1,40})'[\w ,=]{0,200}\)|(?P<plain>\w{1,40}))", re.ASCII)
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_MEMORY_FORMATS = (1, 4)


def _only(union: Mapping[str, Any]) -> tuple[str, Any]:
    ((kind, value),) = union.items()
    return kind, value


def check_name(name: Any) -> str:
    """Returns a value's name: it is only ever compared with others."""
    if not isinstance(name, str) or not 0 < len(name) <= LARGEST_NAME or not name.isprintable():
        refuse(f"its graph has the name {str(name)[:60]!r}")
    return name


# ---- arguments ----


def _int(value: Any) -> int:
    if type(value) is not int or not (abs(value) <= _LARGEST_INT or value == _END):
        refuse(f"its graph has the number {str(value)[:40]}; expected one of at most {_LARGEST_INT:,}")
    return value


def weight_int(value: Any) -> int:
    """Returns a size, stride or offset of a weight."""
    number = value["as_int"]
    if type(number) is not int:
        refuse(f"a weight has the size {str(number)[:40]!r}")
    return number


def _float(value: Any) -> float:
    number = _FLOATS.get(value) if isinstance(value, str) else value
    if type(number) not in (int, float):
        refuse(f"its graph has the number {str(value)[:40]!r}")
    return float(number)  # type: ignore[arg-type]


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        refuse(f"its graph has {str(value)[:40]!r} for true or false")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str) or not _STRING.fullmatch(value):
        refuse(f"its graph has the text {str(value)[:60]!r}")
    return value


def _tensor(value: Any) -> TensorRef:
    return TensorRef(check_name(value["name"]))


def _maybe_tensor(value: Any) -> TensorRef | None:
    kind, held = _only(value)
    return None if kind == "as_none" else _union(kind, held, "as_tensor", _tensor)


def _number(
    of: str, convert: Callable[[Any], int | float | bool]
) -> Callable[[Any], NumberRef | int | float | bool]:
    """Returns a number, or the name of one that is computed."""

    def parse(value: Any) -> NumberRef | int | float | bool:
        kind, held = _only(value)
        return NumberRef(check_name(held)) if kind == "as_name" else _union(kind, held, of, convert)

    return parse


def _union(kind: str, held: Any, expected: str, parse: Callable[[Any], Any]) -> Any:
    if kind != expected:
        refuse(
            f"its graph holds a {kind.removeprefix('as_')[:40]} where a {expected.removeprefix('as_')} is "
            "expected"
        )
    return parse(held)


def dtype(value: Any) -> int:
    """Returns a ScalarType that is supported."""
    if type(value) is not int or value not in TYPES:
        refuse(
            f"its graph has a tensor of type {str(value)[:20]}; supported: "
            f"{', '.join(t for t, _ in TYPES.values())}"
        )
    return value


def _layout(value: Any) -> None:
    if value != 7:
        refuse("its graph has a tensor that is not dense")


def _memory_format(value: Any) -> MemoryFormat:
    if type(value) is not int or value not in _MEMORY_FORMATS:
        refuse("its graph asks for a memory format; expected contiguous tensors")
    return MemoryFormat(value)


def _device(value: Any) -> OwnDevice:
    if value != {"type": "cpu", "index": None}:
        refuse(f"its graph names the device {str(value)[:60]}; export it on the CPU")
    return OwnDevice()


_OF_LISTS: dict[str, Callable[[Any], Item]] = {
    "as_tensor": _tensor,
    "as_optional_tensor": _maybe_tensor,
    "as_int": _int,
    "as_float": _float,
    "as_bool": _bool,
    "as_sym_int": _number("as_int", _int),
    "as_sym_float": _number("as_float", _float),
    "as_sym_bool": _number("as_bool", _bool),
}
_LISTS = {f"{kind}s": item for kind, item in _OF_LISTS.items()}
_ITEMS: dict[str, Callable[[Any], Item]] = {
    **_OF_LISTS,
    "as_none": lambda _: None,
    "as_string": _string,
    "as_scalar_type": lambda value: DType(dtype(value)),
    "as_memory_format": _memory_format,
    "as_layout": _layout,
    "as_device": _device,
}


def argument(value: Any) -> Argument:
    kind, held = _only(value)
    if kind in _ITEMS:
        return _ITEMS[kind](held)
    if kind not in _LISTS:
        refuse(f"its graph holds a {kind.removeprefix('as_')[:40]}")
    if not isinstance(held, list) or len(held) > LARGEST_LIST:
        refuse(f"its graph has a list of more than {LARGEST_LIST:,} values")
    return tuple(_LISTS[kind](item) for item in held)


def output(value: Any) -> Output:
    """Returns what a call gives: a tensor, several in a list, or a number."""
    kind, held = _only(value)
    if kind in ("as_sym_int", "as_sym_float", "as_sym_bool"):
        inner, name = _only(held)
        if inner != "as_name":
            refuse("a call of its graph gives a number without a name")
        return NumberRef(check_name(name))
    if kind == "as_tensors":
        return tuple(_tensor(item) for item in held)
    found: TensorRef = _union(kind, held, "as_tensor", _tensor)
    return found


# ---- calls ----


def check_target(target: Any) -> str:
    """Refuses other targets than listed operators and arithmetic on sizes."""
    found = READ_AS.get(target, target) if isinstance(target, str) else None
    if found is None or not (found in OPERATORS or found in ARITHMETIC):
        refuse(
            f"its graph calls {str(target)[:80]!r}; expected ATen operators alone, of those that a dense "
            "part is made of"
        )
    return found


def check_is_for_inference(node: ProgramNode) -> None:
    """Refuses dropout and batch norms in training mode."""
    training = dict(node.arguments).get("train" if ".dropout." in node.target else "training")
    if training not in (None, False):
        refuse(
            "it drops values at random, or norms by its batch, as in training; call module.eval() before the "
            "export"
        )


def check_arguments(node: ProgramNode) -> None:
    """Refuses repeated arguments, and memory of another kind."""
    names = [name for name, _ in node.arguments]
    if len(set(names)) != len(names):
        refuse(f"{node.target} is given an argument twice")
    if dict(node.arguments).get("pin_memory") not in (None, False):
        refuse("its graph asks for pinned memory")


def check_is_of_numbers(node: ProgramNode) -> None:
    """Refuses texts, lists and tensors, which Python's operators accept (a text times 2^31)."""
    if node.target not in ARITHMETIC:
        return
    given = [
        value for _, value in node.arguments if not (node.target == ASSERTION and isinstance(value, str))
    ]
    if not all(isinstance(value, bool | int | float | NumberRef) for value in given):
        refuse(f"its graph calls {node.target} with something else than numbers")


def node(value: Any) -> ProgramNode:
    arguments = tuple((check_name(i["name"]), argument(i["arg"])) for i in value["inputs"])
    found = ProgramNode(check_target(value["target"]), arguments, tuple(map(output, value["outputs"])))
    check_arguments(found)
    check_is_for_inference(found)
    check_is_of_numbers(found)
    return found


def nodes(values: Any) -> tuple[ProgramNode, ...]:
    """Returns all calls in order, without export's notes."""
    if not isinstance(values, list) or len(values) > LARGEST_NODES:
        refuse(f"its graph has more than {LARGEST_NODES:,} calls")
    return tuple(node(v) for v in values if v["target"] not in NOTES)


def check_order(given: tuple[str, ...], found: tuple[ProgramNode, ...], result: TensorRef) -> None:
    """Refuses values that are not made once, before their use, or are used as another kind."""
    made: dict[str, type] = {}

    def make(ref: TensorRef | NumberRef) -> None:
        if ref.name in made:
            refuse(f"its graph makes {ref.name[:60]!r} twice")
        made[ref.name] = type(ref)

    def use(item: object) -> None:
        if isinstance(item, TensorRef | NumberRef) and made.get(item.name) is not type(item):
            refuse(f"its graph uses {item.name[:60]!r}, which nothing made before")

    for name in given:
        make(TensorRef(name))
    for call in found:
        for _, held in call.arguments:
            for item in held if isinstance(held, tuple) else (held,):
                use(item)
        for out in call.outputs:
            for ref in out if isinstance(out, tuple) else (out,):
                make(ref)
    use(result)


# ---- inputs and the result ----


def program_input(name: str, declared: Mapping[str, Any]) -> ProgramInput:
    """Returns an input by its public name: fp32 [batch, n]."""
    sizes = declared["sizes"]
    if (
        not isinstance(name, str)
        or not name.isidentifier()
        or keyword.iskeyword(name)
        or len(name) > LARGEST_NAME
    ):
        refuse("its inputs have no names of their own")
    if len(sizes) != 2 or "as_int" not in sizes[1]:
        refuse(f"input {name!r} has {len(sizes)} dimensions; expected [batch, n]")
    if "as_expr" not in sizes[0]:
        batch = str(sizes[0].get("as_int"))[:20]
        refuse(
            f"input {name!r} was exported for a batch of {batch} alone; name its dimension 0 in "
            "dynamic_shapes"
        )
    if declared["dtype"] != FP32:
        refuse(f"input {name!r} is not fp32")
    if not 1 <= (width := _int(sizes[1]["as_int"])) <= LARGEST_WIDTH:
        refuse(f"input {name!r} is {width:,} wide; expected 1 to {LARGEST_WIDTH:,}")
    return ProgramInput(name, width)


def rows(name: str, declared: Mapping[str, Any], constraints: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the least and the largest batch that an input was exported for."""
    text = declared["sizes"][0]["as_expr"]["expr_str"]
    found = _SYMBOL.fullmatch(text) if isinstance(text, str) else None
    if not found:
        refuse(
            f"input {name!r} has the batch {str(text)[:60]!r}, which is more than arithmetic; expected a Dim "
            "of its own"
        )
    bounds = constraints.get(found["made"] or found["plain"], {})
    least, most = (bounds.get(k) for k in ("min_val", "max_val"))
    if not all(b is None or type(b) is int for b in (least, most)):
        refuse("its sizes have bounds that are no numbers")
    return max(0, least or 0), _LARGEST_INT if most is None else min(most, _LARGEST_INT)


def result(signature: Mapping[str, Any]) -> TensorRef:
    specs = signature["output_specs"]
    if [list(s) for s in specs] != [["user_output"]] or "as_tensor" not in specs[0]["user_output"]["arg"]:
        refuse(f"it returns {len(specs)} values; expected one tensor, the scores")
    return _tensor(specs[0]["user_output"]["arg"]["as_tensor"])
