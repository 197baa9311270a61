"""How the lookups of one request are laid out for the fused kernel: numbers alone, nothing here touches a device.

A plan's numbers are relative to its own buffers. To run several requests in one launch is to put their inputs one after
another and to add to each job's numbers what lies before them (`Jobs.shifted`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.quant import contract
from tableside.quant.cache.jobs import CachedLookup
from tableside.quant.contract import CpuBackend, DeviceTable, Lookup, Plan, Pooling, Table, Variant
from tableside.quant.errors import BadIds, QuantError
from tableside.quant.gpu.lookup_kernel import FIELDS, Field
from tableside.quant.row_format import RowFormat

LONG = 8  # ids of a bag
VERY_LONG, FEW_PROGRAMS = 64, 1024  # ids of a bag, and programs that do not fill a GPU: bags are walked by several threads
GATHER_PIECE = 65_536  # rows that are gathered before their copy to the device begins
GATHER_LEAST = 1_024  # rows that are worth waking a thread for
GATHER_BYTES = 128 << 20  # of rows that a request has gathered; what is beyond is read in place, slower, in no memory
ALIGNMENT = 16
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Shape:
    """How the kernel is cut up. columns: a program's, a power of two; rows: ids in flight a walker; warps: a program's; walkers:
    of a bag, a power of two."""

    rows: int
    columns: int
    warps: int
    walkers: int = 1


@dataclass(frozen=True)
class Shapes:
    """The shapes of pooled jobs of long bags and of short ones, of unpooled jobs, and of very long bags where they are few, as
    benchmarks/gpu_lookup.py and gpu_cache.py found."""

    long: Shape = Shape(10, 32, 1)
    short: Shape = Shape(4, 32, 1)
    unpooled: Shape = Shape(1, 64, 2)
    few: Shape = Shape(4, 32, 8, 8)

    def of_pooled(self, lookups: Sequence[Lookup]) -> Shape:
        """The shape for a request's bags, by the mean of their lengths and by how many there are."""
        pooled = [lk for lk in lookups if lk.pooling is not Pooling.NONE]
        ids, bags = sum(lk.ids for lk in pooled), sum(lk.bags for lk in pooled)
        if ids >= VERY_LONG * bags and sum(lk.bags * columns(lk) for lk in pooled) < FEW_PROGRAMS * self.long.columns:
            return self.few
        return self.long if ids >= LONG * bags else self.short


@dataclass(frozen=True)
class Move:
    """Bytes that go from one buffer to another."""

    source: int
    target: int
    bytes: int


@dataclass(frozen=True)
class Gather:
    """Rows that the CPU brings together: `plan` writes them to byte `target` of the gathered rows."""

    plan: Plan
    target: int
    bytes: int


@dataclass(frozen=True)
class Bases:
    """What lies before a request in the buffers of a batch: bytes, int32s of scratch. rows: the address of its gathered rows."""

    inputs: int = 0
    outputs: int = 0
    scratch: int = 0
    rows: int = 0
    locations: int = 0


class Jobs:
    """The pooled or the unpooled lookups of a request: int64 [jobs, FIELDS], and the job of each program."""

    def __init__(self, pooled: bool, shape: Shape) -> None:
        self.pooled, self.shape = pooled, shape
        self.numbers: list[int] = []  # of the lookups, in the request
        self._rows: list[list[int]] = []
        self._relative: list[list[int]] = []
        self._counts: list[int] = []

    def add(self, number: int, row: list[int], lk: Lookup, relative: Iterable[Field]) -> None:
        """Appends a lookup. relative: fields that `shifted` adds to."""
        row[Field.FIRST_PROGRAM] = sum(self._counts)
        self.numbers.append(number)
        self._rows.append(row)
        fields = {Field.FIRST_PROGRAM, *relative}
        self._relative.append([int(f in fields) for f in Field])
        self._counts.append(-(-lk.outputs * columns(lk) // self.shape.columns))

    def finish(self) -> None:
        """Makes arrays of what was added."""
        self.rows = np.array(self._rows, np.int64).reshape(-1, FIELDS)
        self.relative = np.array(self._relative, np.int64).reshape(-1, FIELDS)
        self.job_of_program = np.repeat(np.arange(len(self._counts), dtype=np.int32), self._counts)
        self.has_lengths = bool((self.rows[:, Field.LENGTHS_AT] >= 0).any())
        self.is_weighted = bool((self.rows[:, Field.WEIGHTS_AT] >= 0).any())
        self.is_cached = bool(((self.rows[:, Field.LOCATIONS_AT] >= 0) | (self.rows[:, Field.SHARE] > 0)).any())

    def shifted(self, bases: Bases, programs: int) -> NDArray[np.int64]:
        """The rows where `bases` and `programs` of other requests come before."""
        shift = np.zeros(FIELDS, np.int64)
        shift[[Field.IDS_AT, Field.LENGTHS_AT, Field.WEIGHTS_AT]] = bases.inputs
        shift[Field.TABLE] = bases.rows
        shift[Field.OUT_AT] = bases.outputs
        shift[Field.STARTS_AT] = bases.scratch
        shift[Field.LOCATIONS_AT] = bases.locations
        shift[Field.FIRST_PROGRAM] = programs
        return self.rows + self.relative * shift


class Layout:
    """A request's lookups, laid out.

    moves_in: from the request's inputs to its staged ones; moves_out: from its staged outputs to what the caller asked for.
    gathers: rows to be brought together before. cached: lookups whose rows the cache finds. host: lookups of tables that are not
    on the device, for the CPU.
    """

    def __init__(
        self, lookups: Sequence[Lookup], cpu: CpuBackend, threads: int, shapes: Shapes, gather_from: int, out_bytes: int = 0
    ) -> None:
        self.lookups = tuple(lookups)
        self.in_bytes = self.out_bytes = self.rows_bytes = self.scratch = 0
        self.gathers: list[Gather] = []
        self._pieces: list[list[Lookup]] = [[]]
        self.cached: list[CachedLookup] = []
        self.variant = Variant()
        self.groups = (Jobs(True, shapes.of_pooled(lookups)), Jobs(False, shapes.unpooled))
        self._cpu, self._threads = cpu, threads
        self._gathers = sum(lk.ids for lk in lookups if _is_uvm(lk)) >= gather_from
        self._in: list[Move] = []
        out: list[Move] = []
        for number, lk in enumerate(lookups):
            if isinstance(lk.table, DeviceTable):
                self.variant |= lk.table.variant
                self._add(number, lk)
                out.append(Move(self.out_bytes, lk.out_at, lk.out_bytes))
                self.out_bytes += aligned(lk.out_bytes)
        self._plan_gathers()
        for group in self.groups:
            group.finish()
        self.jobs = sum(len(group.numbers) for group in self.groups)
        self.cached_ids = sum(job.ids for job in self.cached)
        self.header_bytes = sum(group.rows.nbytes + aligned(group.job_of_program.nbytes, 8) for group in self.groups)
        self.moves_in, self.moves_out = _joined(self._in), _joined(out)
        on_host = [lk for lk in lookups if isinstance(lk.table, Table)]
        self.host = cpu.plan(on_host, threads) if on_host else None
        written = max((lk.out_at + lk.out_bytes for lk in lookups), default=0)
        self.asked_bytes = max(written, out_bytes)
        # The staged outputs are what was asked for, byte for byte: they need not be copied again.
        self.is_direct = self.host is None and self.moves_out in ([], [Move(0, 0, written)])
        if self.is_direct:
            self.out_bytes = max(self.out_bytes, aligned(self.asked_bytes))

    def _add(self, number: int, lk: Lookup) -> None:
        if lk.ids > _LARGEST or lk.outputs > _LARGEST:
            raise QuantError(f"a lookup of {lk.ids:,} ids in {lk.outputs:,} vectors; at most {_LARGEST:,} of each run on a GPU")
        pooled = lk.pooling is not Pooling.NONE
        if pooled and lk.lengths_at is None and lk.bags * lk.bag_length != lk.ids:
            raise QuantError(
                f"{lk.bags:,} bags of {lk.bag_length:,} ids are {lk.bags * lk.bag_length:,}; the lookup has {lk.ids:,}"
            )
        row = [0] * FIELDS
        row[Field.TABLE] = lk.table.address
        row[Field.ROWS] = lk.table.rows
        row[Field.ROW_BYTES] = lk.table.row_bytes
        row[Field.DIM] = lk.table.dim
        row[Field.FORMAT] = lk.table.row_format
        row[Field.MEAN] = int(lk.pooling is Pooling.MEAN)
        row[Field.IDS] = lk.ids
        row[Field.BAG_LENGTH] = lk.bag_length
        row[Field.VECTORS] = lk.outputs
        row[Field.OUT_AT] = self.out_bytes
        row[Field.PRECISION] = lk.precision
        row[Field.STARTS_AT] = self.scratch
        row[Field.IDS_AT] = row[Field.LENGTHS_AT] = row[Field.WEIGHTS_AT] = row[Field.LOCATIONS_AT] = -1
        relative = [Field.OUT_AT, Field.STARTS_AT]
        wanted: list[tuple[Field, int | None, int]] = [(Field.IDS_AT, lk.ids_at, 8 * lk.ids)]
        if self._is_gathered(lk) and isinstance(lk.table, DeviceTable):
            row[Field.TABLE], row[Field.ROWS] = self._gather(lk, lk.table.host), lk.ids
            relative.append(Field.TABLE)
            wanted = []
        if pooled:
            wanted += [(Field.LENGTHS_AT, lk.lengths_at, 4 * lk.bags), (Field.WEIGHTS_AT, lk.weights_at, 4 * lk.ids)]
        for field, source, size in wanted:
            if source is not None:
                self.in_bytes = row[field] = aligned(self.in_bytes, 8)
                self._in.append(Move(source, self.in_bytes, size))
                self.in_bytes += size
                relative.append(field)
        if row[Field.LENGTHS_AT] >= 0:
            self.scratch += lk.bags + 2
        if isinstance(lk.table, DeviceTable) and lk.table.in_cache is not None:
            row[Field.SLOTS] = lk.table.in_cache.slots_at
            row[Field.LOCATIONS_AT] = 4 * sum(job.ids for job in self.cached)
            relative.append(Field.LOCATIONS_AT)
            self.cached.append(CachedLookup(lk.table.in_cache.number, row[Field.IDS_AT], lk.ids, row[Field.LOCATIONS_AT]))
        if isinstance(lk.table, DeviceTable) and lk.table.split is not None:
            row[Field.SLOTS], row[Field.SHARE] = lk.table.split.rows_at, lk.table.split.share
        self.groups[not pooled].add(number, row, lk, relative)

    def _is_gathered(self, lk: Lookup) -> bool:
        return self._gathers and _is_uvm(lk) and self.rows_bytes + lk.ids * lk.table.row_bytes <= GATHER_BYTES

    @property
    def staged_bytes(self) -> int:
        """Bytes that the request takes of the buffers it shares with others."""
        return self.in_bytes + self.rows_bytes + self.out_bytes

    def _gather(self, lk: Lookup, table: Table) -> int:
        """Notes that a lookup's rows are to be gathered; returns where the first will lie."""
        first = self.rows_bytes
        start = 0
        while start < lk.ids:
            piece = self._pieces[-1]
            count = min(GATHER_PIECE - sum(part.ids for part in piece), lk.ids - start)
            if count == 0:
                self._pieces.append([])
                continue
            piece.append(Lookup(table, Pooling.NONE, lk.ids_at + 8 * start, count, self.rows_bytes))
            self.rows_bytes += count * table.row_bytes
            start += count
        return first

    def _plan_gathers(self) -> None:
        """Plans the gathering of all rows, some lookups or a part of one at a time."""
        for piece in filter(None, self._pieces):
            first = piece[0].out_at
            parts = [replace(part, out_at=part.out_at - first) for part in piece]
            threads = min(self._threads, -(-sum(part.ids for part in piece) // GATHER_LEAST))
            size = sum(part.ids * part.table.row_bytes for part in piece)
            self.gathers.append(Gather(self._cpu.gather(parts, threads), first, size))

    def problem(self, inputs: Any) -> BadIds | None:
        """The first id or length that is wrong; None: all are right."""
        for number, lk in enumerate(self.lookups):
            ids = np.frombuffer(inputs, np.int64, lk.ids, lk.ids_at)
            has_lengths = lk.pooling is not Pooling.NONE and lk.lengths_at is not None
            lengths = np.frombuffer(inputs, np.int32, lk.bags, lk.lengths_at or 0) if has_lengths else None
            try:
                contract.check_ids(ids, lengths, lk.table.rows, number)
            except BadIds as error:
                return error.with_traceback(None)  # which would keep this, and its tables, alive with the answer
        return None


def columns(lk: Lookup) -> int:
    """Columns of one output vector."""
    row_format = lk.table.row_format
    return -(-row_format.used_bytes(lk.table.dim) // (8 if row_format is RowFormat.INT2 else 16))


def _is_uvm(lk: Lookup) -> bool:
    """Whether all rows are read on the host."""
    return isinstance(lk.table, DeviceTable) and not (lk.table.in_hbm or lk.table.in_cache or lk.table.split)


def aligned(n: int, to: int = ALIGNMENT) -> int:
    """`n` rounded up to a multiple of `to`."""
    return -(-n // to) * to


def _joined(moves: Iterable[Move]) -> list[Move]:
    """The same moves, neighbours in both buffers made one."""
    result: list[Move] = []
    for m in moves:
        if result and (last := result[-1]).source + last.bytes == m.source and last.target + last.bytes == m.target:
            result[-1] = replace(last, bytes=last.bytes + m.bytes)
        elif m.bytes:
            result.append(m)
    return result
