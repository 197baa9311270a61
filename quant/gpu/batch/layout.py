"""Lays out the lookups of one request for the lookup kernel, without a device; a routine of C does it
(`quant/cpu/native/_native_jobs.c`).
A `Layout` never changes. Its offsets are relative to the request's own parts; a batch puts the parts of
requests one after another and adds each part's start (`quant.gpu.batch.placed`). The parts are
    inputs     int64 ids, int32 lengths and fp32 weights of every lookup, each at a multiple of 8 bytes
    rows       packed rows that the CPU gathers, as in their tables
    outputs    vectors and found masks of every lookup, each at a multiple of 16 bytes, or where the caller
               wants them
    scratch    int32: for each lookup with lengths a verdict, then the start of each bag
    locations  int32 for each id of cached tables
"""

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from tableside.quant.cache.jobs import PROBE_BLOCK
from tableside.quant.cache.kernels.state import ProbeField
from tableside.quant.cache.tickets import Unread
from tableside.quant.contract import (
    FIELD,
    Lookup,
    LookupKind,
    MatrixPlace,
    Place,
    Plan,
    Pooling,
    RowSource,
    lookup_at,
    places_in,
)
from tableside.quant.cpu import _native
from tableside.quant.cpu.backend import CpuBackend, host_table
from tableside.quant.cpu.checked import check_ids, inputs_of, rows_of
from tableside.quant.cpu.native import gather
from tableside.quant.cpu.together import renumbered
from tableside.quant.device.device import Device
from tableside.quant.errors import BadIds, MissingBackend, QuantError, RowsNotRead
from tableside.quant.gpu.batch.moves import Move
from tableside.quant.gpu.batch.resolve import RESOLVE_BLOCK
from tableside.quant.gpu.kernels.job import FillField, JobField, ResolveField
from tableside.quant.gpu.kernels.launch_config import LaunchConfig, LaunchConfigs, NativeLayout, shared_launch
from tableside.quant.gpu.kernels.wanted import KernelKey
from tableside.quant.gpu.residence.tables import DeviceTable, on_device
from tableside.quant.row_format import RowFormat
from tableside.quant.rows.fetched import asked_table, not_read

GATHER_CHUNK = 65_536  # rows that are gathered before their copy to the device begins
GATHER_LEAST = 1_024  # rows that are worth waking a thread for
GATHER_BYTES = (
    128 << 20
)  # of gathered rows in a request; the GPU reads what is beyond in place, which is slower
ALIGNMENT = 16
_LARGEST = 2**31 - 1
_MEASURED = Struct(f"<{len(_native.MEASURED_FIELDS)}q")  # sizes before the places


@dataclass(frozen=True)
class Gather:
    """Rows that the CPU gathers: `plan` writes `bytes` bytes at byte `target` of the request's gathered
    rows."""

    plan: Plan
    target: int
    bytes: int


class Bases(NamedTuple):
    """Starts of a request's parts in the batch's buffers: bytes; scratch: int32 values."""

    inputs: int = 0
    outputs: int = 0
    scratch: int = 0
    rows: int = 0
    locations: int = 0


class DeviceKind(NamedTuple):
    """The request-independent part of a lookup as C takes it, named as in JobField."""

    table: int
    rows: int
    row_bytes: int
    dim: int
    row_format: int
    mean: int
    precision: int
    hbm_rows: int
    hbm_share: int
    cache_table: int  # its number in the cache, or -1
    is_pooled: int
    columns: int
    row_map: int  # address of its NativeRowMap on the device, or 0
    is_on_device: int
    is_gathered: int  # the CPU gathers the rows of requests with many ids

    @classmethod
    def of(cls, kind: LookupKind, table: DeviceTable) -> "DeviceKind":
        residence = table.residence
        return cls(
            residence.address,
            table.job_rows,
            kind.table.row_bytes,
            kind.table.dim,
            kind.table.row_format,
            int(kind.pooling is Pooling.MEAN),
            kind.precision,
            residence.hbm_rows,
            residence.hbm_share,
            residence.cache_table,
            int(kind.pooling is not Pooling.NONE),
            columns(kind.table),
            0 if table.device_map is None else table.device_map.address,
            int(residence.is_on_device),
            int(table.is_gathered),
        )


_FIELDS = {
    "GPU_KIND_FIELDS": DeviceKind._fields,
    "MOVE_FIELDS": Move._fields,
    "BASE_FIELDS": Bases._fields,
    "MATRIX_FIELDS": MatrixPlace._fields,
    **{
        name: tuple(f.name.lower() for f in fields)
        for name, fields in (
            ("JOB_FIELDS", JobField),
            ("PROBE_FIELDS", ProbeField),
            ("RESOLVE_FIELDS", ResolveField),
            ("FILL_FIELDS", FillField),
        )
    },
}  # that both sides write and read


class Layouts:
    """Lays out lookups of fixed kinds. cpu: gathers and runs its own tables' lookups, with `threads` threads.
    gather_from: ids in tables read in place from which the CPU gathers."""

    def __init__(
        self,
        kinds: Sequence[LookupKind],
        cpu: CpuBackend,
        threads: int,
        *,
        configs: LaunchConfigs,
        device: Device,
        gather_from: int,
    ) -> None:
        if any(
            getattr(_native, name) != fields for name, fields in _FIELDS.items()
        ):  # of other sources: it would read other fields
            raise MissingBackend(
                "the native kernel was built from other sources than these; reinstall tableside"
            )
        self.threads = threads
        self.tables = [on_device(kind.table) for kind in kinds]
        self.kinds, self._configs, self._gather_from = tuple(kinds), configs, gather_from
        self._blocks = device.block(PROBE_BLOCK), device.block(RESOLVE_BLOCK)
        is_host = np.array([not table.residence.is_on_device for table in self.tables], bool)
        self._is_host, self._host_kind = is_host, is_host.cumsum() - 1
        pairs = zip(kinds, self.tables, is_host.tolist(), strict=True)
        host_kinds = [replace(kind, table=table.host) for kind, table, is_one in pairs if is_one]
        self._host = cpu.planner(host_kinds, threads) if host_kinds else None
        self._is_overlaid = any(table.is_overlaid for table in self.tables)
        self._key = KernelKey()
        for table in self.tables:
            self._key |= table.key
        rows = [DeviceKind.of(kind, table) for kind, table in zip(kinds, self.tables, strict=True)]
        self._rows = np.array(rows, np.int64).tobytes()
        every = (configs.long, configs.short, configs.few, configs.unpooled)
        self._shared = {
            id(config): shared_launch(self._key, config) for config in every
        }  # hashing takes longer than the rest

    def lookups(self, places: Any) -> list[Lookup]:
        """The lookups at these places."""
        return [lookup_at(self.kinds, place) for place in places_in(places)]

    def on_host(self, places: Any) -> tuple[tuple[int, ...], Plan]:
        """Returns the numbers of the lookups at these places that the CPU runs, and its plan for them."""
        assert self._host is not None, "a table is the CPU's"
        every = np.frombuffer(places, np.int64).reshape(-1, len(Place._fields))
        numbers = np.flatnonzero(self._is_host[every[:, FIELD["kind"]]])
        of_host = every[numbers]
        of_host[:, FIELD["kind"]] = self._host_kind[of_host[:, FIELD["kind"]]]
        return tuple(numbers.tolist()), self._host.plan(of_host.tobytes())

    def lay_out(self, places: Any, out_bytes: int) -> "Layout":
        """Lays out lookups at these places: int64 [lookups, fields of Place]. out_bytes: size of the caller's
        outputs if larger than the vectors. QuantError: a lookup is too large for a launch, or its bags do not
        match its ids."""
        *sizes, gathered = _native.totals(self._rows, places)
        config: LaunchConfig = self._configs.of_pooled(*sizes)
        unpooled = self._configs.unpooled
        room = GATHER_BYTES if gathered >= self._gather_from else 0
        blocks = config.block_columns, unpooled.block_columns, *self._blocks
        measured = _native.measure(self._rows, places, out_bytes, room, *blocks)
        if measured is None:
            raise _problem(self.lookups(places))
        shared = self._shared[id(config)], self._shared[id(unpooled)]
        return Layout(self, NativeLayout(self._rows, measured, *shared, self._is_overlaid))


class Layout:
    """A request's lookups, laid out. native: for the routines that place and write a batch. host: a plan of
    the CPU's lookups, `host_lookups` by number. is_direct: staged outputs equal the caller's byte for byte.
    in_bytes, rows_bytes, out_bytes: of its parts. asked_bytes: of the caller's outputs."""

    def __init__(self, layouts: Layouts, native: NativeLayout) -> None:
        self._layouts, self.native = layouts, native
        sizes = _MEASURED.unpack_from(native.measured)
        found = dict(zip(_native.MEASURED_FIELDS, sizes, strict=True))
        self.in_bytes: int = found["in_bytes"]
        self.rows_bytes: int = found["rows_bytes"]
        self.out_bytes: int = found["out_bytes"]
        self.asked_bytes: int = found["asked_bytes"]
        self.is_direct, self._has_all_found = bool(found["is_direct"]), bool(found["all_found"])
        self.host: Plan | None = None
        self.host_lookups: tuple[int, ...] = ()
        if found["on_host"]:
            self.host_lookups, self.host = layouts.on_host(self._places)

    @property
    def _places(self) -> bytes:
        return self.native.measured[_MEASURED.size :]

    def lookups(self) -> list[Lookup]:
        return self._layouts.lookups(self._places)

    def with_host(self, host: Plan) -> "Layout":
        """The same with another plan of the CPU's lookups."""
        other = copy(self)
        other.host = host
        return other

    @property
    def staged_bytes(self) -> int:
        """Bytes that the request takes of the buffers it shares with others."""
        return self.in_bytes + self.rows_bytes + self.out_bytes

    @cached_property
    def _parts(self) -> tuple[bytes, bytes, bytes, bytes]:
        return _native.lay_out(self.native.kinds, self.native.measured)

    @property
    def moves_in(self) -> bytes:
        """From its inputs to the staged ones, int64 [moves, fields of Move]."""
        return self._parts[0]

    @property
    def moves_out(self) -> bytes:
        """From staged outputs to the caller's, int64 [moves, fields of Move]."""
        return self._parts[1]

    @property
    def resolved(self) -> list[int]:
        """The numbers of the lookups whose ids become row numbers on the device."""
        return _numbers(self._parts[2])

    @cached_property
    def gathers(self) -> tuple[Gather, ...]:
        """Rows for the CPU to gather."""
        if not self.rows_bytes:
            return ()
        lookups = self.lookups()
        return _gathers([lookups[n] for n in _numbers(self._parts[3])], self._layouts.threads)

    @property
    def all_found(self) -> tuple[tuple[int, int], ...]:
        """(at, bytes) of found masks for tables with every id."""
        if not self._has_all_found:
            return ()
        tables, places = self._layouts.tables, places_in(self._places)
        every = (p for p in places if (t := tables[p.kind]).device_map is None and t.residence.is_on_device)
        return tuple((p.found_at, p.ids) for p in every if p.found_at >= 0)

    def problem(self, inputs: Any, of_host: BadIds | None = None) -> BadIds | None:
        """The first id or length that is wrong; None: all are right. of_host: that of the CPU's plan."""
        known = None if of_host is None else renumbered(of_host, self.host_lookups)
        for number, place in enumerate(places_in(self._places)):
            kind = self._layouts.kinds[place.kind]
            ids, lengths = inputs_of(kind, place, inputs)
            if known is not None and number == known.job:
                return known
            try:
                if asked_table(kind.table) is None:
                    rows_of(kind.table, ids, lengths, number)
                else:  # whoever has the rows knows which there are
                    check_ids(ids, lengths, -1, number)
            except BadIds as error:
                return error.with_traceback(
                    None
                )  # which would keep this, and its tables, alive with the answer
        return None

    def unread(self, inputs: Any, unread: Unread) -> RowsNotRead | None:
        """The error of lookups, right ones, that ask for rows which did not come to the cache; None: none
        does."""
        states = []
        for place in places_in(self._places):
            kind, table = self._layouts.kinds[place.kind], self._layouts.tables[place.kind]
            if table.residence.cache_table in unread:
                rows, state = unread[table.residence.cache_table]
                asked = np.unique(rows_of(kind.table, *inputs_of(kind, place, inputs))[0])
                states.append(np.zeros(asked.size, np.uint8))
                _, here, there = np.intersect1d(asked, rows, assume_unique=True, return_indices=True)
                states[-1][here] = state[there]
        return not_read(np.concatenate(states)) if any(map(np.any, states)) else None


def _gathers(lookups: Iterable[Lookup], threads: int) -> tuple[Gather, ...]:
    """Plans that gather the rows of lookups, one after another; each is of several lookups, or of a part of
    one."""
    chunks: list[list[Lookup]] = [[]]
    at = 0
    for lk in lookups:
        table = host_table(on_device(lk.table).host)
        start = 0
        while start < lk.ids:
            count = min(GATHER_CHUNK - sum(part.ids for part in chunks[-1]), lk.ids - start)
            if count == 0:
                chunks.append([])
                continue
            chunks[-1].append(Lookup(table, Pooling.NONE, lk.ids_at + 8 * start, count, at))
            at += count * table.row_bytes
            start += count
    plans = []
    for chunk in filter(None, chunks):
        first = chunk[0].out_at
        parts = [replace(part, out_at=part.out_at - first) for part in chunk]
        wanted = min(threads, -(-sum(part.ids for part in chunk) // GATHER_LEAST))
        size = sum(part.ids * part.table.row_bytes for part in chunk)
        plans.append(Gather(gather(parts, wanted), first, size))
    return tuple(plans)


def check_size(ids: int, vectors: int) -> None:
    """QuantError: a lookup is larger than a launch can be."""
    if max(ids, vectors) > _LARGEST:
        raise QuantError(
            f"a lookup of {ids:,} ids in {vectors:,} vectors; at most {_LARGEST:,} of each run on a GPU"
        )


def _problem(lookups: Sequence[Lookup]) -> QuantError:
    """What is wrong with lookups that cannot be laid out."""
    for lk in lookups:
        check_size(lk.ids, lk.outputs)
        if lk.pooling is not Pooling.NONE and lk.lengths_at is None and lk.bags * lk.bag_length != lk.ids:
            return QuantError(
                f"{lk.bags:,} bags of {lk.bag_length:,} ids are {lk.bags * lk.bag_length:,}; the lookup has "
                f"{lk.ids:,}"
            )
    return QuantError("a lookup has a negative number of ids or bags, or a place that is not in its buffer")


def _numbers(found: bytes) -> list[int]:
    numbers: list[int] = np.frombuffer(found, np.int64).tolist()
    return numbers


def columns(table: RowSource) -> int:
    """Columns of one output vector: chunks of a row, 16 bytes each, 8 of int2."""
    row_format = table.row_format
    return -(-row_format.value_bytes(table.dim) // (8 if row_format is RowFormat.INT2 else 16))


def aligned(n: int, to: int = ALIGNMENT) -> int:
    """`n` rounded up to a multiple of `to`."""
    return -(-n // to) * to
