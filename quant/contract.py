"""The contract that every backend keeps.

Arrays on the CPU are numpy's. ids are int64, lengths int32, weights fp32. Every id and every length is
checked before a row is read: `BadIds` says which one is wrong. Nothing here knows how a row is packed; that
is `row_format`.

An id is a row number, or becomes one as the table's `RowMap` says (`quant.rows.ids`), before anything else
looks at it. A missing id that has a default row counts as any other: that row is added to a bag, and the
bag's length counts it.

    pooling NONE   out[i] = row(ids[i])                                    [ids, dim]
    pooling SUM    out[b] = sum over the bag of weight * row(id)           [bags, dim]
    pooling MEAN   the sum, divided by the bag's length; 0 for an empty bag
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tableside.quant.errors import QuantError
from tableside.quant.row_format import RowFormat
from tableside.quant.rows.ids import RowMap

INTERPRETER = "interpreter"  # a device for tests: the GPU's kernels in Triton's interpreter, on the CPU

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int64]
Lengths = NDArray[np.int32]
Floats = NDArray[Any]  # float32 or float16


class Pooling(IntEnum):
    """How the rows of one bag become one vector. The values are shared with the native kernel."""

    NONE = 0
    SUM = 1
    MEAN = 2

    @classmethod
    def parse(cls, name: str) -> "Pooling":
        try:
            return cls[name.upper()]
        except (KeyError, AttributeError):
            raise QuantError(f"pooling {name!r} is unknown; expected one of: none, sum, mean") from None

    @property
    def label(self) -> str:
        return self.name.lower()


class Precision(IntEnum):
    """What a lookup's vectors are written as. The values are shared with the kernels; bf16 exists on the
    GPU alone."""

    FP32 = 0
    FP16 = 1
    BF16 = 2

    @property
    def bytes(self) -> int:
        """Bytes of one value."""
        return 4 if self is Precision.FP32 else 2


class RowSource(Protocol):
    """Packed rows that a lookup reads, wherever they lie: a `Table` in host memory, or a table that a
    device reads."""

    @property
    def rows(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def row_format(self) -> RowFormat: ...

    @property
    def dim(self) -> int: ...

    @property
    def row_map(self) -> RowMap | None: ...


@dataclass(frozen=True, eq=False)
class Table:
    """Packed rows in host memory.

    packed: uint8 [rows, row_bytes], contiguous; it stays alive as long as this does. dim: values of a row.
    row_map: how ids become row numbers; None: they are row numbers. QuantError: `packed` has another dtype,
    shape or stride than `row_format` and `dim` need.
    """

    packed: Bytes
    row_format: RowFormat
    dim: int
    row_map: RowMap | None = None

    def __post_init__(self) -> None:
        expected = self.row_format.row_bytes(self.dim)
        if self.packed.dtype != np.uint8 or self.packed.ndim != 2 or self.packed.shape[1] != expected:
            raise QuantError(
                f"packed rows are {self.packed.dtype} {list(self.packed.shape)}; "
                f"expected uint8 [rows, {expected}] for {self.row_format.label} of dim {self.dim}"
            )
        if not self.packed.flags.c_contiguous:
            raise QuantError("packed rows are not contiguous; pass a whole table, not a strided view")

    @property
    def rows(self) -> int:
        return int(self.packed.shape[0])

    @property
    def row_bytes(self) -> int:
        return int(self.packed.shape[1])

    @cached_property
    def address(self) -> int:
        """Where the first row lies in this process's memory."""
        return self.packed.ctypes.data

    @property
    def row_numbers(self) -> tuple[int, int]:
        """The id of row 0, and how many ids have a row of their own, where these ascend with the rows; (0,
        0): ids are raw."""
        if self.row_map is None:
            return 0, self.rows
        return (self.row_map.first, self.row_map.count) if self.row_map.index is None else (0, 0)


@dataclass(frozen=True)
class Lookup:
    """One lookup of a plan, as places in an input and an output buffer. Offsets and sizes are bytes, at any
    alignment.

    lengths_at None: every bag has `bag_length` ids. Pooling NONE: `bags` and `bag_length` are not used.
    out_row_bytes: from one vector to the next; None: they lie one after another. found_at: where in the
    output buffer a byte for each id says whether the table has it, 1 or 0; None: nowhere.
    """

    table: RowSource
    pooling: Pooling
    ids_at: int
    ids: int
    out_at: int
    precision: Precision = Precision.FP32
    bags: int = 0
    lengths_at: int | None = None
    bag_length: int = 0
    weights_at: int | None = None
    out_row_bytes: int | None = None
    found_at: int | None = None

    @property
    def outputs(self) -> int:
        """Vectors that the lookup writes."""
        return self.ids if self.pooling is Pooling.NONE else self.bags

    @property
    def vector_bytes(self) -> int:
        return self.table.dim * self.precision.bytes

    @property
    def out_bytes(self) -> int:
        """From its first vector's first byte to its last one's last."""
        return (
            max(0, self.outputs - 1) * (self.out_row_bytes or self.vector_bytes)
            + min(1, self.outputs) * self.vector_bytes
        )


@dataclass(frozen=True)
class LookupKind:
    """What stays the same of a lookup that comes again with other ids: the fields are those of `Lookup`."""

    table: RowSource
    pooling: Pooling
    precision: Precision = Precision.FP32
    out_row_bytes: int | None = None


class Place(NamedTuple):
    """Where a lookup's inputs and vectors are, int64 each: the fields are those of `Lookup`, with -1 where
    there are none.

    Places of several lookups are int64 [lookups, fields of this], in any memory that has the buffer protocol.
    """

    ids_at: int
    ids: int
    lengths_at: int
    bag_length: int
    bags: int
    weights_at: int
    out_at: int
    found_at: int = -1


def place_of(lookup: Lookup) -> Place:
    """The place of a lookup."""
    return Place(
        lookup.ids_at,
        lookup.ids,
        -1 if lookup.lengths_at is None else lookup.lengths_at,
        lookup.bag_length,
        lookup.bags,
        -1 if lookup.weights_at is None else lookup.weights_at,
        lookup.out_at,
        -1 if lookup.found_at is None else lookup.found_at,
    )


def lookup_at(kind: LookupKind, place: Place) -> Lookup:
    """A lookup of a kind at a place."""
    return Lookup(
        kind.table,
        kind.pooling,
        place.ids_at,
        place.ids,
        place.out_at,
        kind.precision,
        place.bags,
        None if place.lengths_at < 0 else place.lengths_at,
        place.bag_length,
        None if place.weights_at < 0 else place.weights_at,
        kind.out_row_bytes,
        None if place.found_at < 0 else place.found_at,
    )


class Unfound(NamedTuple):
    """Ids of one lookup that had no row of their own in its table. missing: they got the default row;
    backfilled: a row that the table took from an older version."""

    missing: int
    backfilled: int


class Plan(ABC):
    """Lookups that were laid out once and run on many pairs of buffers."""

    @property
    def staged_bytes(self) -> int:
        """Bytes that a run takes of the buffers that the requests of a batch share on a GPU; 0 on the CPU."""
        return 0

    @property
    def is_on_device(self) -> bool:
        """Whether all vectors are computed on a GPU, where something else can read them."""
        return False

    @abstractmethod
    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        """Reads ids, lengths and weights from `inputs`, writes every vector to `outputs` (both: the buffer
        protocol).

        Returns what was not found, for each lookup, or None where every id was. BadIds: something in `inputs`
        is wrong; no vector was written to `outputs`.
        """


class Planner(ABC):
    """Plans lookups of the same kinds again and again, each time at other places. Any thread may call."""

    @abstractmethod
    def plan(self, places: Any, out_bytes: int = 0) -> Plan:
        """places: int64 [kinds, fields of Place], a buffer that stays as it is. out_bytes: as for
        `Backend.plan`."""

    def run(self, places: Any, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        """Runs a plan of these places once, as `Plan.run` does."""
        return self.plan(places).run(inputs, outputs)


class _OneByOnePlanner(Planner):
    """A planner of backends that have none of their own."""

    def __init__(self, backend: "Backend", kinds: Sequence[LookupKind], threads: int) -> None:
        self._backend, self._kinds, self._threads = backend, tuple(kinds), threads

    def plan(self, places: Any, out_bytes: int = 0) -> Plan:
        rows = np.frombuffer(places, np.int64).reshape(len(self._kinds), len(Place._fields)).tolist()
        lookups = [lookup_at(kind, Place(*row)) for kind, row in zip(self._kinds, rows, strict=True)]
        return self._backend.plan(lookups, self._threads, out_bytes)


class Backend(ABC):
    """Dequantize and look up. Any thread may call.

    warm_up_bags: numbers of ids of a bag. Lookups of one bag of each cover all the kernels that the backend
    compiles.
    """

    name: str
    warm_up_bags: tuple[int, ...] = (2,)

    @property
    def description(self) -> str:
        """The name with what it runs on, for logs and metadata."""
        return self.name

    @abstractmethod
    def lookup(
        self,
        table: RowSource,
        ids: Ids,
        lengths: Lengths | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        weights: NDArray[np.float32] | None = None,
        half: bool = False,
        out: Floats | None = None,
        threads: int = 1,
    ) -> Floats:
        """Looks ids [n] up, pooled by lengths [bags] (pooling NONE: one vector an id). Returns fp32, or fp16
        where `half`.

        out: where to write, [bags or n, dim], contiguous; a new array where None.
        """

    @abstractmethod
    def plan(self, lookups: Sequence[Lookup], threads: int = 1, out_bytes: int = 0) -> Plan:
        """Lays out several lookups of one request, to be run together.

        out_bytes: of the request's whole output buffer, where that has more than their vectors, as scores
        behind them.
        """

    def planner(self, kinds: Sequence[LookupKind], threads: int = 1) -> Planner:
        """What plans lookups of these kinds, for requests that read the same tables."""
        return _OneByOnePlanner(self, kinds, threads)

    def dequantize(self, table: RowSource, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Rows [start, stop) as fp32 [rows, dim], by their numbers."""
        table = by_row_number(table)
        ids = np.arange(start, table.rows if stop is None else stop, dtype=np.int64)
        return self.lookup(table, ids, pooling=Pooling.NONE)


def by_row_number(table: RowSource) -> RowSource:
    """The same rows, where an id is a row number."""
    return replace(table, row_map=None) if isinstance(table, Table) and table.row_map is not None else table


def check_arguments(
    table: RowSource,
    ids: Ids,
    lengths: Lengths | None,
    pooling: Pooling,
    weights: NDArray[np.float32] | None,
    half: bool,
    out: Floats | None,
) -> Floats:
    """Checks dtypes and shapes of a lookup (not the ids' values); returns `out`, made where it was None."""
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise QuantError(f"ids are {ids.dtype} {list(ids.shape)}; expected int64 [n]")
    if pooling is Pooling.NONE:
        if lengths is not None or weights is not None:
            raise QuantError(
                "an unpooled lookup takes neither lengths nor weights; pool by sum or mean, or leave them out"
            )
    elif lengths is None or lengths.dtype != np.int32 or lengths.ndim != 1:
        found = "None" if lengths is None else f"{lengths.dtype} {list(lengths.shape)}"
        raise QuantError(f"lengths are {found}; expected int32 [bags] for pooling {pooling.label}")
    if weights is not None and (weights.dtype != np.float32 or weights.shape != ids.shape):
        raise QuantError(
            f"weights are {weights.dtype} {list(weights.shape)}; expected float32 {list(ids.shape)}, one an "
            "id"
        )
    dtype = np.float16 if half else np.float32
    shape = (ids.size if lengths is None else lengths.size, table.dim)
    for name, array in (("ids", ids), ("lengths", lengths), ("weights", weights)):
        if array is not None and not array.flags.c_contiguous:
            raise QuantError(
                f"{name} are a strided view; expected a contiguous array (numpy.ascontiguousarray)"
            )
    if out is None:
        return np.empty(shape, dtype)
    if out.dtype != dtype or out.shape != shape or not out.flags.c_contiguous:
        raise QuantError(
            f"out is {out.dtype} {list(out.shape)}; expected contiguous {np.dtype(dtype)} {list(shape)}"
        )
    return out
