"""Reads pickles of checkpoints without running code of the file or a library.

It knows the instructions that torch and pickle (protocols 2 to 5) write for dicts, lists, tuples, sets,
numbers and strings. Globals are looked up in the caller's table of inert functions; others are refused by
name. Work and memory are bounded, since an instruction makes one value and their number is limited. Dicts
have plain keys only, because Python hashes and prints nested tuples with unbounded recursion.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LIMIT_BYTES = 64 << 20
LIMIT_INSTRUCTIONS = 5_000_000  # some 100 bytes each at most; a tensor takes 35
_NO_INTEGER_ABOVE_BYTES = 64


class PickleError(Exception):
    """Not a pickle of the expected kind: damaged, or it holds what a checkpoint does not need."""


class ForbiddenGlobal(PickleError):
    """The pickle names a global that is not in the table, so it could run code."""


@dataclass(frozen=True, slots=True)
class Name:
    """A global of the pickle. make: what builds its stand-in; None: it cannot be called."""

    full: str
    make: Callable[..., Any] | None = None
    value: Any = None


class PickledObject:
    """Stands in for a class: keeps its arguments or state, does nothing."""

    __slots__ = ("state",)

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = arguments

    def __getitem__(self, name: str) -> Any:
        return self.state[name]


def unpickle(data: bytes, names: Mapping[str, Name], persistent: Callable[[Any], Any] | None = None) -> Any:
    """Returns the value of a pickle. names: "module.name" -> stand-in; persistent: resolves persistent ids.
    PickleError: refused. Errors of `persistent` and of stand-ins' `make`, except TypeError, pass through."""
    if len(data) > LIMIT_BYTES:
        raise PickleError(
            f"{len(data):,} bytes of pickle, more than the {LIMIT_BYTES:,} that are read; save the "
            "state_dict alone"
        )
    try:
        return _Machine(data, names, persistent).run()
    except (
        IndexError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        struct.error,
        OverflowError,
    ) as error:
        raise PickleError(f"not a whole pickle ({type(error).__name__}: {error})") from error


_MARK = object()
_PLAIN = (str, int, float, bool, bytes, type(None), PickledObject, Name)


def _key(value: Any) -> Any:
    """`value`, where it can be a key without recursion."""
    if isinstance(value, _PLAIN) or (type(value) is tuple and all(isinstance(v, _PLAIN) for v in value)):
        return value
    raise PickleError(f"a {type(value).__name__} as the key of a dict")


class _Machine:
    def __init__(
        self, data: bytes, names: Mapping[str, Name], persistent: Callable[[Any], Any] | None
    ) -> None:
        self.data, self.at = data, 0
        self.names, self.persistent = names, persistent
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(LIMIT_INSTRUCTIONS):
            code = self.data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                return self.stack.pop()
            step = _STEPS.get(code)
            if step is None:
                raise PickleError(f"instruction {code:#04x} at byte {self.at - 1}, which no checkpoint needs")
            step(self)
        raise PickleError(f"more than {LIMIT_INSTRUCTIONS:,} instructions; save the state_dict alone")

    # ---- reading ----

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise PickleError(
                f"the pickle ends at byte {len(self.data)}, {count:,} more were expected at {self.at}"
            )
        part = self.data[self.at : self.at + count]
        self.at += count
        return part

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at, self.at + 1000)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text

    def marked(self) -> list[Any]:
        """Pops the values above the last mark, and the mark."""
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                found = self.stack[i + 1 :]
                del self.stack[i:]
                return found
        raise PickleError("an instruction without its mark")

    # ---- instructions ----

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def text(self, size_bytes: int) -> None:
        self.push(self.take(self.number(size_bytes)).decode("utf-8", "surrogatepass"))

    def raw(self, size_bytes: int) -> None:
        self.push(self.take(self.number(size_bytes)))

    def integer(self, size_bytes: int) -> None:
        if (count := self.number(size_bytes)) > _NO_INTEGER_ABOVE_BYTES:
            raise PickleError(f"an integer of {count:,} bytes")
        self.push(int.from_bytes(self.take(count), "little", signed=True))

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise PickleError("a tuple of more values than there are")
        values = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.push(values)

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise PickleError(f"values are added to a {type(target).__name__}")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise PickleError(f"items are set in a {type(target).__name__}")
        for i in range(0, len(values), 2):
            target[_key(values[i])] = values[i + 1]

    def named(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else "no name"
        if full not in self.names:
            raise ForbiddenGlobal(f"GLOBAL {full[:100]}")
        self.push(self.names[full])

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(function) is not Name or function.make is None or type(arguments) is not tuple:
            raise PickleError("a call of what cannot be called")
        self.push(function.make(*arguments))

    def build(self) -> None:
        """Sets the state of a stand-in; that of a dict or a tensor (hooks, metadata) is dropped."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], PickledObject):
            self.stack[-1].state = state

    def resolve(self) -> None:
        if self.persistent is None:
            raise PickleError("a persistent id, which this file cannot have")
        self.push(self.persistent(self.stack.pop()))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.named(module, name)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])


_STEPS: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("("): lambda m: m.push(_MARK),
    ord("0"): lambda m: m.stack.pop(),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    ord("J"): lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
    0x8A: lambda m: m.integer(1),
    0x8B: lambda m: m.integer(4),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    0x8C: lambda m: m.text(1),
    ord("X"): lambda m: m.text(4),
    0x8D: lambda m: m.text(8),
    ord("U"): lambda m: m.push(m.take(m.number(1)).decode("latin-1")),
    ord("T"): lambda m: m.push(m.take(m.number(4)).decode("latin-1")),
    ord("C"): lambda m: m.raw(1),
    ord("B"): lambda m: m.raw(4),
    0x8E: lambda m: m.raw(8),
    0x96: lambda m: m.raw(8),  # BYTEARRAY8: nobody looks into it
    ord("]"): lambda m: m.push([]),
    ord("}"): lambda m: m.push({}),
    ord(")"): lambda m: m.push(()),
    0x8F: lambda m: m.push([]),  # EMPTY_SET: nobody looks into it, and a list is smaller
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): lambda m: m.push(tuple(m.marked())),
    0x91: lambda m: m.push(tuple(m.marked())),  # FROZENSET
    ord("a"): lambda m: m.extend([m.stack.pop()]),
    ord("e"): lambda m: m.extend(m.marked()),
    ord("s"): lambda m: m.set_item(),
    ord("u"): lambda m: m.set_items(m.marked()),
    0x90: lambda m: m.extend(m.marked()),  # ADDITEMS
    ord("q"): lambda m: m.put(m.number(1)),
    ord("r"): lambda m: m.put(m.number(4)),
    0x94: lambda m: m.put(len(m.memo)),
    ord("h"): lambda m: m.push(m.memo[m.number(1)]),
    ord("j"): lambda m: m.push(m.memo[m.number(4)]),
    ord("c"): lambda m: m.named(m.line(), m.line()),
    0x93: lambda m: m.stack_global(),
    ord("R"): lambda m: m.call(),
    0x81: lambda m: m.call(),  # NEWOBJ: a stand-in is called all the same
    ord("b"): lambda m: m.build(),
    ord("Q"): lambda m: m.resolve(),
}
