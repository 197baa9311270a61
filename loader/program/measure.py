"""Measures a program's call without running it: propagates shapes (`meta` tensors) against the weights.
Imports torch.

Each operator's shape function checks its arguments, so misfitting weights are found. The cost is the peak of
live bytes, with operators' copies of inputs, and the work: 1 per multiplication of a matrix product,
`_ELEMENT` per other element read or written. Weights cost no bytes.
"""

from math import prod
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tableside.loader.program.graph import Cost, Program, refuse
from tableside.loader.program.precision import DTYPES, rounded
from tableside.loader.program.run import Runner, weight_tensors
from tableside.quant.contract import Precision

_ELEMENT = 16  # a transcendental function, or a row that is gathered, takes some 16 multiplications' time
# Where the inputs' last matrix stands
_PRODUCTS = {"mm": 1, "addmm": 2, "bmm": 1, "baddbmm": 2, "mv": 1, "dot": 1}
LARGEST_BYTES, LARGEST_WORK = 1 << 30, 1 << 35  # of a program that is tried with two rows
_META = torch.device("meta")
_REFUSED = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    AssertionError,
    OverflowError,
    ZeroDivisionError,
    NotImplementedError,
)


class TooLarge(ValueError):
    """A call takes more than it may."""


class Meter:
    """Measures one program, as it runs in a precision. Threads may share it."""

    def __init__(
        self, program: Program, most_bytes: int = LARGEST_BYTES, precision: Precision = Precision.FP32
    ) -> None:
        self._widths, self._dtype = [i.width for i in program.inputs], DTYPES[precision]
        weights = rounded(weight_tensors(program.weights, _META), precision)
        self._runner = Runner(program, weights, _META, most_bytes, self._dtype)

    def cost(self, rows: int, most_bytes: int, most_work: int = 1 << 62) -> Cost:
        """Returns a call's cost for `rows` rows. TooLarge: over a limit. ValueError, RuntimeError ...:
        impossible call."""
        return self.propagate(rows, most_bytes, most_work)[1]

    def propagate(self, rows: int, most_bytes: int, most_work: int) -> tuple[torch.Tensor, Cost]:
        """As `cost`, with what the program gives, as a shape."""
        inputs = [torch.empty(rows, width, dtype=self._dtype, device=_META) for width in self._widths]
        # Not inference mode: there an operator that is made of others would be seen as one.
        with torch.no_grad(), _Count(most_bytes, most_work) as count:
            found = self._runner(*inputs)
        return found, Cost(count.peak, count.work)


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes and work of every operator called while active, including nested ones."""

    def __init__(self, most_bytes: int, most_work: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.work = 0
        self._most_bytes, self._most_work = most_bytes, most_work
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given, made = _tensors([args, list((kwargs or {}).values())]), _tensors(found)
        known = {t.untyped_storage()._cdata for t in given}
        new = [t for t in made if t.untyped_storage()._cdata not in known]
        if made and not new:
            self.work += 1  # a view
            return found
        for storage in (t.untyped_storage() for t in new):
            self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
        self._live = {k: e for k, e in self._live.items() if not e[0].expired()}  # type: ignore[no-untyped-call]
        copied = sum(t.numel() * t.itemsize for t in given)
        self.peak = max(self.peak, sum(size for _, size in self._live.values()) + copied)
        self.work += _work(func, given, new)
        if self.peak > self._most_bytes:
            raise TooLarge(f"a call takes {self.peak:,} bytes or more; the limit is {self._most_bytes:,}")
        if self.work > self._most_work:
            raise TooLarge(
                f"a call takes {self.work:,} multiplications or more; the limit is {self._most_work:,}"
            )
        return found


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


def _work(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    name = func._schema.name.removeprefix("aten::")
    elements = _ELEMENT * sum(t.numel() for t in (*given, *made))
    if name in _PRODUCTS and len(given) > _PRODUCTS[name]:
        last = given[_PRODUCTS[name]]
        return elements // _ELEMENT + made[0].numel() * (last.size(-2) if last.dim() > 1 else last.numel())
    if "convolution" in name:
        return elements + made[0].numel() * prod(given[1].shape[1:])
    if "attention" in name:
        return elements + prod(given[0].shape) * given[1].size(-2) * 2
    return elements


def check_shapes(program: Program) -> None:
    """Propagates two batches' shapes. ProgramError: an operator refuses its arguments, or the cost is too
    high."""
    try:
        meter = Meter(program)
        for rows in program.trial_rows():
            found, _ = meter.propagate(rows, LARGEST_BYTES, LARGEST_WORK)
            if found.dim() not in (1, 2) or found.size(0) != rows or found.numel() == 0:
                refuse(f"it gives {list(found.shape)} for a batch of {rows}; expected [batch], or [batch, n]")
    except _REFUSED as error:
        refuse(
            "its operators do not fit its weights and sizes: "
            f"{str(error).strip().partition(chr(10))[0][:300]}"
        )
