"""Lays out the lookups of one request for the lookup kernel, without a device.
A `Layout` never changes. Its offsets are relative to the request's own parts; a batch puts the parts of
requests one after another and adds each part's start (`Jobs.shifted`). The parts are
    inputs     int64 ids, int32 lengths and fp32 weights of every lookup, each at a multiple of 8 bytes
    rows       packed rows that the CPU gathers, as in their tables
    outputs    vectors and found masks of every lookup, each at a multiple of 16 bytes
    scratch    int32: for each lookup with lengths a verdict, then the start of each bag
    locations  int32 for each id of cached tables
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tableside.quant.cache.jobs import CachedLookup, cached_ids, cached_rows
from tableside.quant.contract import Lookup, Plan, Pooling, RowSource, Table
from tableside.quant.cpu.backend import CpuBackend, host_table
from tableside.quant.cpu.checked import rows_of
from tableside.quant.cpu.native import gather
from tableside.quant.errors import BadIds, QuantError
from tableside.quant.gpu.batch.moves import Move, as_bytes
from tableside.quant.gpu.batch.resolve import ResolvedLookup
from tableside.quant.gpu.kernels.job import FIELDS, JobField, LookupJob
from tableside.quant.gpu.kernels.launch_config import LaunchConfig, LaunchConfigs, NativeLayout
from tableside.quant.gpu.kernels.wanted import KernelKey
from tableside.quant.gpu.residence.tables import DeviceTable, on_device
from tableside.quant.row_format import RowFormat

GATHER_CHUNK = 65_536  # rows that are gathered before their copy to the device begins
GATHER_LEAST = 1_024  # rows that are worth waking a thread for
GATHER_BYTES = (
    128 << 20
)  # of gathered rows in a request; the GPU reads what is beyond in place, which is slower
ALIGNMENT = 16
_LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Gather:
    """Rows that the CPU gathers: `plan` writes `bytes` bytes at byte `target` of the request's gathered
    rows."""

    plan: Plan
    target: int
    bytes: int


@dataclass(frozen=True)
class Bases:
    """Starts of a request's parts in the batch's buffers: bytes; scratch: int32 values; rows: an address."""

    inputs: int = 0
    outputs: int = 0
    scratch: int = 0
    rows: int = 0
    locations: int = 0


@dataclass(frozen=True, eq=False)
class Jobs:
    """The pooled or the unpooled lookups of a request.
    rows: int64 [jobs, FIELDS]; is_offset: same shape, 1 for offsets; job_of_program: int32 [programs].
    is_indirect: some rows are found through cache locations or in a split table's HBM part."""

    pooled: bool
    config: LaunchConfig
    rows: NDArray[np.int64]
    is_offset: NDArray[np.int64]
    job_of_program: NDArray[np.int32]
    has_lengths: bool
    is_weighted: bool
    is_indirect: bool


_SHIFTED = [JobField.IDS_AT, JobField.LENGTHS_AT, JobField.WEIGHTS_AT]
_SHIFTED += [
    JobField.OUT_AT,
    JobField.STARTS_AT,
    JobField.TABLE,
    JobField.LOCATIONS_AT,
    JobField.FIRST_PROGRAM,
]


def joined(parts: Sequence[Jobs], bases: Sequence[Bases]) -> tuple[bytes, bytes]:
    """Returns rows and program jobs of several requests' lookups of one kind. bases: of each request."""
    counts, programs = [len(part.rows) for part in parts], [part.job_of_program.size for part in parts]
    before = np.cumsum([[0, 0], *zip(counts, programs, strict=True)], axis=0)[:-1]
    shifts = np.zeros((len(parts), FIELDS), np.int64)
    shifts[:, _SHIFTED] = [
        (b.inputs, b.inputs, b.inputs, b.outputs, b.scratch, b.rows, b.locations, 0) for b in bases
    ]
    shifts[:, JobField.FIRST_PROGRAM] = before[:, 1]
    rows = np.repeat(shifts, counts, axis=0)
    rows *= np.concatenate([part.is_offset for part in parts])
    rows += np.concatenate([part.rows for part in parts])
    of_program = np.concatenate([part.job_of_program for part in parts])
    of_program += np.repeat(before[:, 0].astype(np.int32), programs)
    return rows.tobytes(), of_program.tobytes()


@dataclass(frozen=True, eq=False)
class Layout:
    """A request's lookups, laid out.
    jobs: pooled, unpooled. moves_in: from its inputs to the staged ones, int64 [moves, fields of Move], as
    bytes. moves_out: from staged outputs to the caller's, likewise. gathers: rows for the CPU to gather.
    resolved: lookups with mapped ids. cached: int64 [lookups, fields of CachedLookup]. host: a plan of the
    CPU's lookups, `host_lookups` by number. all_found: (at, bytes) of found masks for tables with every id.
    is_direct: staged outputs equal the caller's byte for byte. in_bytes, rows_bytes, out_bytes: of its parts;
    scratch: int32 values. asked_bytes: of the caller's outputs. native: the same for the C routine that
    merges; None: Python merges."""

    lookups: Callable[[], Sequence[Lookup]]
    key: KernelKey
    jobs: tuple[Jobs, Jobs]
    moves_in: bytes
    moves_out: bytes
    gathers: tuple[Gather, ...]
    resolved: tuple[ResolvedLookup, ...]
    cached: NDArray[np.int64]
    host: Plan | None
    host_lookups: tuple[int, ...]
    all_found: tuple[tuple[int, int], ...]
    in_bytes: int
    rows_bytes: int
    out_bytes: int
    scratch: int
    asked_bytes: int
    is_direct: bool
    native: NativeLayout | None = None

    @cached_property
    def job_count(self) -> int:
        return sum(len(jobs.rows) for jobs in self.jobs)

    @cached_property
    def cached_ids(self) -> int:
        return cached_ids(self.cached)

    @property
    def staged_bytes(self) -> int:
        """Bytes that the request takes of the buffers it shares with others."""
        return self.in_bytes + self.rows_bytes + self.out_bytes

    def problem(self, inputs: Any) -> BadIds | None:
        """The first id or length that is wrong; None: all are right."""
        for number, lk in enumerate(self.lookups()):
            ids = np.frombuffer(inputs, np.int64, lk.ids, lk.ids_at)
            has_lengths = lk.pooling is not Pooling.NONE and lk.lengths_at is not None
            lengths = np.frombuffer(inputs, np.int32, lk.bags, lk.lengths_at or 0) if has_lengths else None
            try:
                rows_of(lk.table, ids, lengths, number)
            except BadIds as error:
                return error.with_traceback(
                    None
                )  # which would keep this, and its tables, alive with the answer
        return None


def lay_out(
    lookups: Sequence[Lookup],
    cpu: CpuBackend,
    threads: int = 1,
    *,
    configs: LaunchConfigs,
    gather_from: int,
    out_bytes: int = 0,
) -> Layout:
    """Lays out the lookups of one request.
    cpu: gathers and runs its own tables' lookups, with `threads` threads. gather_from: ids in tables read in
    place from which the CPU gathers. out_bytes: size of the caller's outputs if larger than the vectors.
    QuantError: a lookup is too large for a launch, or its bags do not match its ids."""
    tables = [on_device(lk.table) for lk in lookups]
    in_host_memory = sum(lk.ids for lk, table in zip(lookups, tables, strict=True) if table.is_gathered)
    request = _RequestParts(threads, in_host_memory >= gather_from)
    pooled = [lk for lk in lookups if lk.pooling is not Pooling.NONE]
    bag_columns = sum(lk.bags * columns(lk.table) for lk in pooled)
    config = configs.of_pooled(sum(lk.ids for lk in pooled), sum(lk.bags for lk in pooled), bag_columns)
    jobs: tuple[list[tuple[LookupJob, Lookup]], ...] = ([], [])
    key = KernelKey()
    for number, (lk, table) in enumerate(zip(lookups, tables, strict=True)):
        key |= table.key
        if (job := request.add(number, lk, table)) is not None:
            jobs[lk.pooling is Pooling.NONE].append((job, lk))
    moves_out = _joined(request.moves_out)
    written = max((_end(lk) for lk in lookups), default=0)
    asked_bytes = max(written, out_bytes)
    is_direct = not request.on_host and moves_out in ((), (Move(0, 0, written),))
    return Layout(
        lookups=lambda: lookups,
        key=key,
        jobs=(_jobs_of(True, config, jobs[0]), _jobs_of(False, configs.unpooled, jobs[1])),
        moves_in=as_bytes(_joined(request.moves_in)),
        moves_out=as_bytes(moves_out),
        gathers=request.gather_plans(),
        resolved=tuple(request.resolved),
        cached=cached_rows(request.cached),
        host=cpu.plan(list(request.on_host.values()), threads) if request.on_host else None,
        host_lookups=tuple(request.on_host),
        all_found=tuple(request.all_found),
        in_bytes=request.in_bytes,
        rows_bytes=request.rows_bytes,
        out_bytes=max(request.out_bytes, aligned(asked_bytes)) if is_direct else request.out_bytes,
        scratch=request.scratch,
        asked_bytes=asked_bytes,
        is_direct=is_direct,
    )


def _jobs_of(pooled: bool, config: LaunchConfig, lookups: Sequence[tuple[LookupJob, Lookup]]) -> Jobs:
    programs = [-(-lk.outputs * columns(lk.table) // config.block_columns) for _, lk in lookups]
    for (job, _), first in zip(lookups, accumulate(programs, initial=0), strict=False):
        job.offset(JobField.FIRST_PROGRAM, first)
    rows = np.array([job.values for job, _ in lookups], np.int64).reshape(-1, FIELDS)
    return Jobs(
        pooled=pooled,
        config=config,
        rows=rows,
        is_offset=np.array([job.is_offset for job, _ in lookups], np.int64).reshape(-1, FIELDS),
        job_of_program=np.repeat(np.arange(len(lookups), dtype=np.int32), programs),
        has_lengths=bool((rows[:, JobField.LENGTHS_AT] >= 0).any()),
        is_weighted=bool((rows[:, JobField.WEIGHTS_AT] >= 0).any()),
        is_indirect=bool(((rows[:, JobField.LOCATIONS_AT] >= 0) | (rows[:, JobField.HBM_SHARE] > 0)).any()),
    )


class _RequestParts:
    """The parts of a request while they grow."""

    def __init__(self, threads: int, gathers: bool) -> None:
        self._threads, self._gathers = threads, gathers
        self.in_bytes = self.out_bytes = self.rows_bytes = self.scratch = self._locations_bytes = 0
        self.moves_in: list[Move] = []
        self.moves_out: list[Move] = []
        self.resolved: list[ResolvedLookup] = []
        self.cached: list[CachedLookup] = []
        self.on_host: dict[int, Lookup] = {}
        self.all_found: list[tuple[int, int]] = []
        self._chunks: list[list[Lookup]] = [[]]

    def add(self, number: int, lk: Lookup, table: DeviceTable) -> LookupJob | None:
        """The job of lookup `number`; None: it is the CPU's."""
        if not table.residence.is_on_device:
            self.on_host[number] = replace(lk, table=table.host)
            return None
        _check(lk)
        job = LookupJob()
        self._add_rows(lk, table, job)
        job[JobField.ROW_BYTES] = lk.table.row_bytes
        job[JobField.DIM] = lk.table.dim
        job[JobField.FORMAT] = lk.table.row_format
        job[JobField.MEAN] = int(lk.pooling is Pooling.MEAN)
        job[JobField.IDS] = lk.ids
        job[JobField.BAG_LENGTH] = lk.bag_length
        job[JobField.VECTORS] = lk.outputs
        job[JobField.PRECISION] = lk.precision
        job[JobField.OUT_STEP] = lk.table.dim
        job.offset(JobField.OUT_AT, self.out_bytes)
        job.offset(JobField.STARTS_AT, self.scratch)
        if lk.pooling is not Pooling.NONE:
            self._stage(job, JobField.LENGTHS_AT, lk.lengths_at, 4 * lk.bags)
            self._stage(job, JobField.WEIGHTS_AT, lk.weights_at, 4 * lk.ids)
        if job[JobField.LENGTHS_AT] >= 0:
            self.scratch += lk.bags + 2
        self._add_vectors(lk)
        self._add_ids(number, lk, table, job)
        return job

    def _add_rows(self, lk: Lookup, table: DeviceTable, job: LookupJob) -> None:
        """Says where rows lie, or has the CPU gather them, while there is room for them."""
        if (
            table.is_gathered
            and self._gathers
            and self.rows_bytes + lk.ids * lk.table.row_bytes <= GATHER_BYTES
        ):
            job.offset(JobField.TABLE, self._gather(lk, host_table(table.host)))
            job[JobField.ROWS] = lk.ids
            return
        residence = table.residence
        self._stage(job, JobField.IDS_AT, lk.ids_at, 8 * lk.ids)
        job[JobField.ROWS], job[JobField.TABLE] = table.job_rows, residence.address
        job[JobField.HBM_ROWS], job[JobField.HBM_SHARE] = residence.hbm_rows, residence.hbm_share
        if residence.cache_table >= 0:
            job.offset(JobField.LOCATIONS_AT, self._locations_bytes)
            ids_at = job[JobField.IDS_AT]
            self.cached.append(CachedLookup(residence.cache_table, ids_at, lk.ids, self._locations_bytes))
            self._locations_bytes += 4 * lk.ids

    def _add_vectors(self, lk: Lookup) -> None:
        size = lk.outputs * lk.vector_bytes
        if lk.out_row_bytes is None:
            self.moves_out.append(Move(self.out_bytes, lk.out_at, size))
        elif size:
            move = Move(
                self.out_bytes, lk.out_at, lk.vector_bytes, lk.outputs, lk.vector_bytes, lk.out_row_bytes
            )
            self.moves_out.append(move)
        self.out_bytes += aligned(size)

    def _add_ids(self, number: int, lk: Lookup, table: DeviceTable, job: LookupJob) -> None:
        """Has ids become row numbers, and says where found masks go."""
        found_at = -1
        if lk.found_at is not None and table.device_map is None:
            self.all_found.append((lk.found_at, lk.ids))
        elif lk.found_at is not None:
            found_at = self.out_bytes
            self.moves_out.append(Move(found_at, lk.found_at, lk.ids))
            self.out_bytes += aligned(lk.ids)
        if table.device_map is not None:
            at, is_overlaid = job[JobField.IDS_AT], table.is_overlaid
            self.resolved.append(
                ResolvedLookup(number, table.device_map.address, at, lk.ids, found_at, is_overlaid)
            )

    def _stage(self, job: LookupJob, field: JobField, source: int | None, size: int) -> None:
        if source is not None:
            self.in_bytes = aligned(self.in_bytes, 8)
            job.offset(field, self.in_bytes)
            self.moves_in.append(Move(source, self.in_bytes, size))
            self.in_bytes += size

    def _gather(self, lookup: Lookup, table: Table) -> int:
        """Has the CPU gather rows; returns their offset among the request's."""
        first = self.rows_bytes
        start = 0
        while start < lookup.ids:
            chunk = self._chunks[-1]
            count = min(GATHER_CHUNK - sum(part.ids for part in chunk), lookup.ids - start)
            if count == 0:
                self._chunks.append([])
                continue
            chunk.append(Lookup(table, Pooling.NONE, lookup.ids_at + 8 * start, count, self.rows_bytes))
            self.rows_bytes += count * table.row_bytes
            start += count
        return first

    def gather_plans(self) -> tuple[Gather, ...]:
        """Plans for all rows that are gathered; each is of several lookups, or of a part of one."""
        plans = []
        for chunk in filter(None, self._chunks):
            first = chunk[0].out_at
            parts = [replace(part, out_at=part.out_at - first) for part in chunk]
            threads = min(self._threads, -(-sum(part.ids for part in chunk) // GATHER_LEAST))
            size = sum(part.ids * part.table.row_bytes for part in chunk)
            plans.append(Gather(gather(parts, threads), first, size))
        return tuple(plans)


def check_size(ids: int, vectors: int) -> None:
    """QuantError: a lookup is larger than a launch can be."""
    if max(ids, vectors) > _LARGEST:
        raise QuantError(
            f"a lookup of {ids:,} ids in {vectors:,} vectors; at most {_LARGEST:,} of each run on a GPU"
        )


def _check(lk: Lookup) -> None:
    check_size(lk.ids, lk.outputs)
    if lk.pooling is not Pooling.NONE and lk.lengths_at is None and lk.bags * lk.bag_length != lk.ids:
        raise QuantError(
            f"{lk.bags:,} bags of {lk.bag_length:,} ids are {lk.bags * lk.bag_length:,}; the lookup has "
            f"{lk.ids:,}"
        )


def _end(lk: Lookup) -> int:
    """End of a lookup's bytes in the caller's outputs."""
    return max(lk.out_at + lk.out_bytes, 0 if lk.found_at is None else lk.found_at + lk.ids)


def columns(table: RowSource) -> int:
    """Columns of one output vector: chunks of a row, 16 bytes each, 8 of int2."""
    row_format = table.row_format
    return -(-row_format.value_bytes(table.dim) // (8 if row_format is RowFormat.INT2 else 16))


def aligned(n: int, to: int = ALIGNMENT) -> int:
    """`n` rounded up to a multiple of `to`."""
    return -(-n // to) * to


def _joined(moves: Iterable[Move]) -> tuple[Move, ...]:
    """The same moves; neighbours in both buffers become one."""
    result: list[Move] = []
    for m in moves:
        last = result[-1] if result else Move(-1, -1, 0)
        if (
            m.rows == last.rows == 1
            and last.source + last.bytes == m.source
            and last.target + last.bytes == m.target
        ):
            result[-1] = last._replace(bytes=last.bytes + m.bytes)
        elif m.bytes:
            result.append(m)
    return tuple(result)
