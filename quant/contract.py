"""The contract of every backend.
CPU arrays are numpy's: ids int64, lengths int32, weights fp32. A backend checks every id and length before it
reads a row and raises `BadIds` for the first wrong one. Ids become row numbers first (`quant.rows.ids`). A
missing id with a default row counts like any other: the bag adds that row, and the bag's length counts it.
    pooling NONE   out[i] = row(ids[i])                                    [ids, dim]
    pooling SUM    out[b] = sum over the bag of weight * row(id)           [bags, dim]
    pooling MEAN   the sum divided by the bag's length; 0 for an empty bag
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
from tableside.quant.rows.fetched import FetchedTable, RowReader
from tableside.quant.rows.ids import RowMap, array_address

INTERPRETER = "interpreter"  # a device for tests: the GPU's kernels in Triton's interpreter, on the CPU

HANDLE_BYTES = 64  # of a cudaIpcMemHandle_t, by which a process opens device memory of another

MASK_LATE = 2  # in a found mask, of an id whose row came late; else 1, or 0 without a row

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int64]
Lengths = NDArray[np.int32]
Floats = NDArray[Any]  # float32 or float16


class Pooling(IntEnum):
    """How the rows of a bag become one vector. The native kernel uses the same values."""

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
    """Dtype of a lookup's vectors. The kernels use the same values."""

    FP32 = 0
    FP16 = 1
    BF16 = 2

    @property
    def bytes(self) -> int:
        """Bytes of one value."""
        return 4 if self is Precision.FP32 else 2


class RowSource(Protocol):
    """Packed rows that a lookup reads: a `Table` in host memory, a `FetchedTable`, an `AskedTable`,
    or a table on a device."""

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
    """Packed rows in host memory: uint8 [rows, row_bytes], contiguous; the table keeps them alive.
    row_map: maps ids to row numbers; None: ids are row numbers. QuantError: dtype, shape or stride of
    `packed` is wrong."""

    packed: Bytes
    row_format: RowFormat
    dim: int
    row_map: RowMap | None = None

    def __post_init__(self) -> None:
        expected = self.row_format.row_sizes(self.dim)
        if self.packed.dtype != np.uint8 or self.packed.ndim != 2 or self.packed.shape[1] not in expected:
            raise QuantError(
                f"packed rows are {self.packed.dtype} {list(self.packed.shape)}; expected uint8 "
                f"[rows, {' or '.join(map(str, expected))}] for {self.row_format.label} of dim "
                f"{self.dim}"
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
        """Address of the first row in this process."""
        return array_address(self.packed)

    def fetched_by(self, reader: RowReader) -> FetchedTable:
        """The same rows where `reader` fetches them, with the ids that they keep."""
        index = None if self.row_map is None else self.row_map.index
        in_rows = index is not None and index.ids.strides[0] == self.row_bytes
        at = index.ids.ctypes.data - self.address if in_rows and index is not None else -1
        shape = (self.rows, self.row_bytes, self.row_format, self.dim)
        in_place = None if reader.away is None else self
        return FetchedTable(*shape, reader, self.row_map, at, in_place=in_place)

    @property
    def row_numbers(self) -> tuple[int, int]:
        """Returns (the id of row 0, count of ids with a row); (0, 0): ids are raw."""
        if self.row_map is None:
            return 0, self.rows
        return (self.row_map.first, self.row_map.count) if self.row_map.index is None else (0, 0)


@dataclass(frozen=True)
class Lookup:
    """One lookup of a plan. Offsets and sizes are bytes in the input or output buffer, at any alignment.
    lengths_at None: every bag has `bag_length` ids. Pooling NONE ignores `bags` and `bag_length`.
    out_row_bytes: stride of the vectors; None: dense. found_at: offset of the found mask, one byte an id: 1,
    0, or MASK_LATE; None: no mask."""

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
    """The request-independent part of a `Lookup`."""

    table: RowSource
    pooling: Pooling
    precision: Precision = Precision.FP32


class Place(NamedTuple):
    """The request-dependent part of a `Lookup`; -1 for None. kind: its kind's number in the planner.
    out_row_bytes: 0 for dense vectors. Several are int64 [lookups, fields], in any buffer."""

    kind: int
    ids_at: int
    ids: int
    lengths_at: int
    bag_length: int
    bags: int
    weights_at: int
    out_at: int
    out_row_bytes: int = 0
    found_at: int = -1


FIELD = {name: n for n, name in enumerate(Place._fields)}
"""Which of a place's numbers is which."""


def place_of(lookup: Lookup, kind: int) -> Place:
    """The place of a lookup, whose kind has this number."""
    return Place(
        kind,
        lookup.ids_at,
        lookup.ids,
        -1 if lookup.lengths_at is None else lookup.lengths_at,
        lookup.bag_length,
        lookup.bags,
        -1 if lookup.weights_at is None else lookup.weights_at,
        lookup.out_at,
        lookup.out_row_bytes or 0,
        -1 if lookup.found_at is None else lookup.found_at,
    )


def places_in(buffer: Any) -> list[Place]:
    """The places of a request, int64 [lookups, fields of Place]."""
    rows = np.frombuffer(buffer, np.int64).reshape(-1, len(Place._fields)).tolist()
    return [Place(*row) for row in rows]


def lookup_at(kinds: Sequence[LookupKind], place: Place) -> Lookup:
    """The lookup at a place."""
    kind = kinds[place.kind]
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
        place.out_row_bytes or None,
        None if place.found_at < 0 else place.found_at,
    )


class MatrixPlace(NamedTuple):
    """Where a request has a matrix [rows, width] for what reads it: in its output buffer, fp32 or (is_half)
    fp16, or in its inputs, fp32. row_bytes: from one row to the next. Several are int64 [matrices, fields],
    in any buffer."""

    is_output: int
    at: int
    row_bytes: int
    is_half: int
    width: int


def matrices_in(buffer: Any) -> NDArray[np.int64]:
    """The matrices of a request, int64 [matrices, fields of MatrixPlace]."""
    return np.frombuffer(buffer, np.int64).reshape(-1, len(MatrixPlace._fields))


class Unfound(NamedTuple):
    """Counts of a lookup's ids without a row of their own: `missing` got the default row, `backfilled` an
    older version's, `late` the default row, since theirs did not come in time."""

    missing: int
    backfilled: int
    late: int = 0


class Waiting(ABC):
    """Lookups that have begun, and lack rows that are not in memory. may_be_here: these may be in memory
    after all, which `look` finds."""

    may_be_here = False

    @abstractmethod
    def wait(self, deadline: float | None = None) -> "Plan":
        """Blocks until the rows are here, on any thread. Returns a plan to run once, with the inputs that it
        was begun with. deadline: of time.monotonic, where it is before that of the tables; None: none.
        RowsNotRead: some do not come."""

    def look(self) -> "Plan | Waiting":
        """Copies the rows that need no wait, which takes more than a moment; returns as `Plan.begin` does."""
        return self


class Plan(ABC):
    """Lookups that were laid out once and run on many pairs of buffers: `begin`, then `run`.
    waits: it reads rows that are not in memory: `run` blocks, where `begin` did not come first.
    begins_at_once: `begin` takes a moment for any number of ids. staged_bytes:
    that a run takes of the buffers that the requests of a batch share on a GPU; 0 on the CPU. is_on_device: a
    GPU computes all vectors and others can read them there."""

    waits = begins_at_once = False
    staged_bytes = 0
    is_on_device = False

    def begin(self, inputs: Any) -> "Plan | Waiting":
        """Finds the rows that these inputs ask for. Returns the plan to run with them, or what to wait for.
        Takes a moment. BadIds: `inputs` is wrong; a plan that waits for nothing finds that as it runs, and
        who waits may find it as well."""
        return self

    def run_at_once(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        """Runs a plan that waits if a glance shows that no row is waited for. Returns `Unfound` of each
        lookup, none if every id was found; None: it did not run, `begin` says more, and found masks hold
        anything."""
        return None

    @abstractmethod
    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        """Reads ids, lengths and weights from `inputs` and writes every vector to `outputs` (both: the buffer
        protocol). Returns `Unfound` of each lookup, or None if every id was found. BadIds: `inputs` is wrong;
        nothing was written."""


class Planner:
    """Plans lookups of its kinds, of any of them in any order, each time at other places. Any thread may
    call. A planner has `run` or `plan` of its own; each is the other's default. waits: as of its plans."""

    waits = False

    def plan(self, places: Any, out_bytes: int = 0) -> Plan:
        """Plans lookups at `places`: int64 [lookups, fields of Place], which must not change. `BadIds.job`
        and the order of `Unfound` are those of the places. out_bytes: as in `Backend.plan`."""
        return _PlacedPlan(self, places)

    def run(self, places: Any, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        """Runs a plan of these places once, as `Plan.run` does."""
        return self.plan(places).run(inputs, outputs)


class _PlacedPlan(Plan):
    """Places, and the planner that runs them."""

    __slots__ = ("_places", "_planner")

    def __init__(self, planner: Planner, places: Any) -> None:
        self._planner, self._places = planner, places

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        return self._planner.run(self._places, inputs, outputs)


class Backend(ABC):
    """Dequantizes and looks up; thread-safe. Warm-up looks up one bag of each size in `warm_up_bags` to
    compile every kernel."""

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
        """Looks ids [n] up, pooled by lengths [bags]; pooling NONE gives one vector an id. Returns fp32, or
        fp16 if `half`. out: contiguous [bags or n, dim] to write to; None: a new array."""

    @abstractmethod
    def plan(self, lookups: Sequence[Lookup], threads: int = 1, out_bytes: int = 0) -> Plan:
        """Lays out the lookups of one request. out_bytes: size of its output buffer if more than vectors lie
        there."""

    @abstractmethod
    def planner(self, kinds: Sequence[LookupKind], threads: int = 1) -> Planner:
        """Returns a planner for requests with lookups of these kinds."""

    def dequantize(self, table: Table, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        """Rows [start, stop) as fp32 [rows, dim], by their numbers."""
        plain = by_row_number(table)
        ids = np.arange(start, table.rows if stop is None else stop, dtype=np.int64)
        return self.lookup(plain, ids, pooling=Pooling.NONE)


def by_row_number(table: RowSource) -> RowSource:
    """The same rows, where an id is a row number."""
    if isinstance(table, Table) and table.row_map is not None:
        return replace(table, row_map=None)
    if isinstance(table, FetchedTable):
        return replace(table, row_map=None, id_at=-1, in_place=None)
    return table
