"""A scorer's program as plain values, without torch: operator calls, weights, inputs.

Each value has one name, given by a weight, an input or the call that computes it.
"""

from dataclasses import dataclass
from typing import NoReturn

from tableside.loader.errors import ProgramError

HOW_TO_EXPORT = (
    "export a module whose forward takes each feature's vectors and dense tensors by name, fp32 [batch, n]: "
    "torch.export.save(torch.export.export(module.eval(), (user, dense), dynamic_shapes={'user': {0: "
    "Dim('batch')}, 'dense': {0: Dim('batch')}}), 'scorer.pt2')"
)
FP32 = 7  # torch._export.serde.schema.ScalarType.FLOAT
BOOL = 12
# By ScalarType: the name of torch's type, and bytes of an element.
TYPES = {
    1: ("uint8", 1),
    2: ("int8", 1),
    3: ("int16", 2),
    4: ("int32", 4),
    5: ("int64", 8),
    6: ("float16", 2),
    FP32: ("float32", 4),
    8: ("float64", 8),
    BOOL: ("bool", 1),
    13: ("bfloat16", 2),
}


@dataclass(frozen=True)
class TensorRef:
    """A tensor that a weight, an input or an earlier call gave."""

    name: str


@dataclass(frozen=True)
class NumberRef:
    """A number (a size, or what was computed of sizes) that an earlier call gave."""

    name: str


@dataclass(frozen=True)
class DType:
    """A type of elements, as its ScalarType."""

    code: int


@dataclass(frozen=True)
class MemoryFormat:
    """1: contiguous, 4: as it was. Others are not taken."""

    code: int


@dataclass(frozen=True)
class OwnDevice:
    """The device that the program runs on."""


Item = None | bool | int | float | str | TensorRef | NumberRef | DType | MemoryFormat | OwnDevice
Argument = Item | tuple[Item, ...]
Output = TensorRef | NumberRef | tuple[TensorRef, ...]


@dataclass(frozen=True)
class ProgramNode:
    """One call. target: the operator as torch.export writes it; arguments: by the names of its schema."""

    target: str
    arguments: tuple[tuple[str, Argument], ...]
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class Weight:
    """A tensor within `content`, which weights may share. Sizes, strides and offset count elements."""

    name: str
    dtype: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    content: bytes


@dataclass(frozen=True)
class ProgramInput:
    """One tensor that a program takes: fp32 [batch, width]."""

    name: str
    width: int


@dataclass(frozen=True)
class Program:
    """A vetted program. values: the inputs' names in the graph; rows: the smallest and largest exported
    batch."""

    inputs: tuple[ProgramInput, ...]
    values: tuple[str, ...]
    rows: tuple[int, int]
    weights: tuple[Weight, ...]
    nodes: tuple[ProgramNode, ...]
    result: TensorRef

    def trial_rows(self) -> tuple[int, int]:
        """Two batches to try a program with. ProgramError: it takes batches of one size alone."""
        first = max(2, self.rows[0])
        if first + 1 > self.rows[1]:
            refuse(
                f"it takes batches of {self.rows[0]} to {self.rows[1]} rows; expected one that takes more "
                "than one size"
            )
        return first, first + 1


@dataclass(frozen=True)
class Cost:
    """What a call takes. bytes: the most that lives at once; work: in multiplications."""

    bytes: int
    work: int


def refuse(why: str) -> NoReturn:
    """ProgramError: why a program is not taken, and how to export one that is."""
    raise ProgramError(f"{why}; {HOW_TO_EXPORT}")
