"""What a batch of requests is, in plain Python: its places, launches, and the bytes that are sent to the
device. `quant/cpu/native/_native_batch.c` writes the same."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tableside.quant import LookupKind, Pooling
from tableside.quant.cache.jobs import PROBE_BLOCK
from tableside.quant.cache.kernels.state import ProbeField
from tableside.quant.contract import Place, places_in
from tableside.quant.device.launch import Jobs
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.batch.layout import Bases, aligned, columns
from tableside.quant.gpu.batch.placed import Launch, Launches, Sizes
from tableside.quant.gpu.batch.resolve import RESOLVE_BLOCK
from tableside.quant.gpu.kernels.job import FIELDS, JobField, ResolveField
from tableside.quant.gpu.kernels.launch_config import LaunchConfig
from tableside.quant.gpu.kernels.wanted import KernelKey
from tableside.quant.gpu.residence.tables import DeviceTable, on_device


class Request(NamedTuple):
    """Lookups at places, of kinds; out_bytes: of the caller's outputs, at least."""

    kinds: Sequence[LookupKind]
    places: np.ndarray
    inputs: bytes
    out_bytes: int = 0


Job = dict[JobField, int]


class RequestParts:
    """A request's parts, at offsets of its own."""

    def __init__(self, request: Request, backend: GpuBackend) -> None:
        self.tables = [on_device(kind.table) for kind in request.kinds]
        self.key = KernelKey()
        for table in self.tables:
            self.key |= table.key
        lookups = [
            (number, request.kinds[place.kind], self.tables[place.kind], place)
            for number, place in enumerate(places_in(request.places.tobytes()))
        ]
        pooled = [(kind, place) for _, kind, _, place in lookups if kind.pooling is not Pooling.NONE]
        bag_columns = sum(place.bags * columns(kind.table) for kind, place in pooled)
        ids, bags = (sum(getattr(place, name) for _, place in pooled) for name in ("ids", "bags"))
        self.configs = (backend.configs.of_pooled(ids, bags, bag_columns), backend.configs.unpooled)
        self.gathers = sum(p.ids for _, _, t, p in lookups if t.is_gathered) >= backend.gather_from
        self.staged = bytearray()
        self.out_bytes = self.scratch = self.rows_bytes = self.located = 0
        self.is_placed = _is_placed(lookups)
        self.jobs: tuple[list[Job], list[Job]] = ([], [])
        self.probes: list[tuple[int, int, int, int]] = []
        self.resolves: list[tuple[int, int, int, int]] = []
        end = request.out_bytes
        for _, kind, table, place in lookups:
            size = kind.table.dim * kind.precision.bytes
            outputs = place.ids if kind.pooling is Pooling.NONE else place.bags
            if outputs:
                end = max(end, place.out_at + (outputs - 1) * (place.out_row_bytes or size) + size)
            if place.found_at >= 0:
                end = max(end, place.found_at + place.ids)
            if table.residence.is_on_device:
                self._add(kind, table, place, request.inputs)
        if self.is_placed:
            self.out_bytes = aligned(end)

    def _stage(self, inputs: bytes, at: int, size: int) -> int:
        if at < 0:
            return -1
        self.staged += b"\xee" * (-len(self.staged) % 8)
        staged = len(self.staged)
        self.staged += inputs[at : at + size]
        return staged

    def _add(self, kind: LookupKind, table: DeviceTable, place: Place, inputs: bytes) -> None:
        is_pooled, residence = kind.pooling is not Pooling.NONE, table.residence
        outputs = place.bags if is_pooled else place.ids
        size = kind.table.dim * kind.precision.bytes
        job = dict.fromkeys(JobField, 0)
        job |= {
            JobField.ROW_BYTES: table.row_bytes,
            JobField.DIM: table.dim,
            JobField.FORMAT: int(table.row_format),
            JobField.MEAN: int(kind.pooling is Pooling.MEAN),
            JobField.IDS: place.ids,
            JobField.BAG_LENGTH: place.bag_length,
            JobField.VECTORS: outputs,
            JobField.PRECISION: int(kind.precision),
            JobField.STARTS_AT: self.scratch,
            JobField.OUT_STEP: table.dim,
            **dict.fromkeys(
                (JobField.IDS_AT, JobField.LENGTHS_AT, JobField.WEIGHTS_AT, JobField.LOCATIONS_AT), -1
            ),
        }
        if self.gathers and table.is_gathered and place.ids:
            job[JobField.TABLE], job[JobField.ROWS] = self.rows_bytes, place.ids
            self.rows_bytes += place.ids * table.row_bytes
        else:
            job[JobField.TABLE], job[JobField.ROWS] = residence.address, table.job_rows
            job[JobField.HBM_ROWS], job[JobField.HBM_SHARE] = residence.hbm_rows, residence.hbm_share
            job[JobField.IDS_AT] = self._stage(inputs, place.ids_at, 8 * place.ids)
        if residence.cache_table >= 0:
            job[JobField.LOCATIONS_AT] = 4 * self.located
            self.probes.append((residence.cache_table, job[JobField.IDS_AT], place.ids, 4 * self.located))
            self.located += place.ids
        if is_pooled:
            job[JobField.LENGTHS_AT] = self._stage(inputs, place.lengths_at, 4 * place.bags)
            job[JobField.WEIGHTS_AT] = self._stage(inputs, place.weights_at, 4 * place.ids)
        if job[JobField.LENGTHS_AT] >= 0:
            self.scratch += place.bags + 2
        if self.is_placed:
            job[JobField.OUT_AT] = place.out_at
            job[JobField.OUT_STEP] = (place.out_row_bytes or size) // kind.precision.bytes
        else:
            job[JobField.OUT_AT] = self.out_bytes
            self.out_bytes += aligned(outputs * size)
        if table.device_map is not None:
            mask_at = place.found_at
            if mask_at >= 0 and not self.is_placed:
                mask_at, self.out_bytes = self.out_bytes, self.out_bytes + aligned(place.ids)
            self.resolves.append((table.device_map.address, job[JobField.IDS_AT], place.ids, mask_at))
        self.jobs[not is_pooled].append(job)

    def programs(self, kind: int) -> list[int]:
        block = self.configs[kind].block_columns
        return [-(-job[JobField.VECTORS] * _chunks(self.tables, job) // block) for job in self.jobs[kind]]


def _chunks(tables: Sequence[DeviceTable], job: Job) -> int:
    """Columns of a vector of the job's table."""
    return next(
        columns(t) for t in tables if (t.dim, t.row_format) == (job[JobField.DIM], job[JobField.FORMAT])
    )


def _is_placed(lookups: Sequence[tuple[int, LookupKind, DeviceTable, Place]]) -> bool:
    """Whether vectors and masks are written where the caller wants them."""
    at, is_packed, is_apart, is_writable = 0, True, False, True
    for _, kind, table, place in lookups:
        if not table.residence.is_on_device or (place.found_at >= 0 and table.device_map is None):
            return False
        size = kind.table.dim * kind.precision.bytes
        total = size * (place.ids if kind.pooling is Pooling.NONE else place.bags)
        is_packed &= not total or (place.out_at == at and not place.out_row_bytes)
        is_apart |= place.out_row_bytes > 0
        unit = kind.precision.bytes * (1 if table.dim % 4 else 4)
        is_writable &= place.out_at % unit == place.out_row_bytes % unit == 0
        at += aligned(total)
    return is_packed or (is_apart and is_writable)


class ReferenceBatch:
    """The batch. extras, stays: as of `BatchLayout`. sent: the bytes for the device, 0xEE between the
    parts; the header begins at `sizes.inputs`. rows_at: device address of gathered rows."""

    def __init__(
        self,
        requests: Sequence[Request],
        extras: Sequence[int],
        stays: Sequence[bool],
        backend: GpuBackend,
        rows_at: int,
    ) -> None:
        self.parts = [RequestParts(request, backend) for request in requests]
        self._rows_at, self._device = rows_at, backend.device
        outputs, at = {}, 0
        for wanted in (True, False):
            for n, part in enumerate(self.parts):
                if stays[n] is wanted:
                    outputs[n], at = at, at + part.out_bytes
        inputs = scratch = rows = located = 0
        self.bases = []
        staged = bytearray()
        for n, part in enumerate(self.parts):
            self.bases.append(Bases(inputs, outputs[n], scratch, rows, 4 * located))
            staged += bytes(part.staged)
            inputs += aligned(len(part.staged)) + extras[n]
            staged += b"\xee" * (inputs - len(staged))
            scratch += part.scratch
            rows += part.rows_bytes
            located += part.located
        self.outputs_at = [outputs[n] for n in range(len(self.parts))]
        self._header = bytearray()
        lookups, resolve, probe = self._lookups(), self._resolve(), self._probe()
        self.launches = Launches(lookups, resolve, probe)
        self.sent = bytes(staged + self._header)
        stay = sum(part.out_bytes for part, stays_there in zip(self.parts, stays, strict=True) if stays_there)
        jobs = sum(launch.jobs for launch in lookups)
        resolved = sum(len(part.resolves) for part in self.parts)
        self.sizes = Sizes(stay, inputs, at, scratch, rows, jobs, resolved, len(self._header))

    def _lookups(self) -> tuple[Launch, ...]:
        groups: dict[tuple[int, KernelKey, LaunchConfig], list[int]] = {}
        for kind in range(2):
            for n, part in enumerate(self.parts):
                if part.jobs[kind]:
                    groups.setdefault((kind, part.key, part.configs[kind]), []).append(n)
        launches, flag = [], 0
        for (kind, key, config), numbers in groups.items():
            jobs: list[Job] = []
            of_program: list[int] = []
            members, first_flag = [], flag
            for n in numbers:
                part, base = self.parts[n], self.bases[n]
                members.append((n, flag, flag + len(part.jobs[kind])))
                flag = members[-1][2]
                for job, programs in zip(part.jobs[kind], part.programs(kind), strict=True):
                    moved = job | {JobField.FIRST_PROGRAM: len(of_program)}
                    moved[JobField.OUT_AT] += base.outputs
                    moved[JobField.STARTS_AT] += base.scratch
                    for field in (JobField.IDS_AT, JobField.LENGTHS_AT, JobField.WEIGHTS_AT):
                        moved[field] += base.inputs if job[field] >= 0 else 0
                    if job[JobField.LOCATIONS_AT] >= 0:
                        moved[JobField.LOCATIONS_AT] += base.locations
                    if job[JobField.IDS_AT] < 0:
                        moved[JobField.TABLE] += self._rows_at + base.rows
                    of_program += [len(jobs)] * programs
                    jobs.append(moved)
            jobs_at = len(self._header)
            rows = np.array([[job[field] for field in JobField] for job in jobs], np.int64)
            programs_at = self._write(rows, of_program)
            self._header += bytes(-len(self._header) % 8)
            is_split = any(job[JobField.HBM_SHARE] > 0 or job[JobField.LOCATIONS_AT] >= 0 for job in jobs)
            launches.append(
                Launch(
                    pooled=kind == 0,
                    key=key,
                    config=config,
                    jobs=len(jobs),
                    programs=len(of_program),
                    first_flag=first_flag,
                    has_lengths=any(job[JobField.LENGTHS_AT] >= 0 for job in jobs),
                    is_weighted=any(job[JobField.WEIGHTS_AT] >= 0 for job in jobs),
                    is_indirect=is_split,
                    jobs_at=jobs_at,
                    programs_at=programs_at,
                    members=tuple(members),
                )
            )
            assert programs_at == jobs_at + 8 * FIELDS * len(jobs)
        return tuple(launches)

    def _write(self, rows: np.ndarray, of_program: list[int]) -> int:
        """Writes jobs and the job of each program; returns where the latter begin."""
        self._header += rows.tobytes()
        programs_at = len(self._header)
        self._header += np.array(of_program, np.int32).tobytes()
        return programs_at

    def _resolve(self) -> Jobs | None:
        rows: list[list[int]] = []
        of_program: list[int] = []
        for part, base in zip(self.parts, self.bases, strict=True):
            for row_map, ids_at, ids, found_at in part.resolves:
                at = ids_at + base.inputs
                job = dict.fromkeys(ResolveField, 0) | {
                    ResolveField.ROW_MAP: row_map,
                    ResolveField.IDS_AT: at,
                    ResolveField.TARGET_AT: at,
                    ResolveField.IDS: ids,
                    ResolveField.FOUND_AT: found_at + base.outputs if found_at >= 0 else -1,
                    ResolveField.FIRST_PROGRAM: len(of_program),
                }
                of_program += [len(rows)] * -(-ids // self._device.block(RESOLVE_BLOCK))
                rows.append([job[field] for field in ResolveField])
        if not rows:
            return None
        at = len(self._header)
        programs_at = self._write(np.array(rows, np.int64), of_program)
        self._header += bytes(-len(self._header) % 8)
        return Jobs(at, programs_at, len(of_program))

    def _probe(self) -> Jobs | None:
        rows: list[list[int]] = []
        of_block: list[int] = []
        count = 0
        for part, base in zip(self.parts, self.bases, strict=True):
            for table, ids_at, ids, locations_at in part.probes:
                job: dict[Any, int] = dict.fromkeys(ProbeField, 0) | {
                    ProbeField.TABLE: table,
                    ProbeField.IDS_AT: ids_at + base.inputs,
                    ProbeField.IDS: ids,
                    ProbeField.LOCATIONS_AT: locations_at + base.locations,
                    ProbeField.FIRST_BLOCK: len(of_block),
                }
                of_block += [len(rows)] * -(-ids // self._device.block(PROBE_BLOCK))
                rows.append([job[field] for field in ProbeField])
                count += ids
        if not rows:
            return None
        at = len(self._header)
        blocks_at = self._write(np.array(rows, np.int64), of_block)
        return Jobs(at, blocks_at, len(of_block), count)
