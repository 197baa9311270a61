"""Jobs for lookups of a caller's tensors: written on the host and sent, or made on the device."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.jobs import PROBE_BLOCK
from tableside.quant.cache.kernels.state import ProbeField
from tableside.quant.device.device import Device
from tableside.quant.device.launch import Jobs, Kernel
from tableside.quant.gpu.batch.layout import DeviceKind
from tableside.quant.gpu.batch.resolve import RESOLVE_BLOCK
from tableside.quant.gpu.kernels.job import FIELDS, TENSOR_JOB_FIELDS, JobField, ResolveField, TensorField

Rows = NDArray[np.int64]


class KernelJobs(NamedTuple):
    """Jobs of one kernel. rows: int64 [jobs, fields]; of_program: int32 [programs], the job of each."""

    rows: Rows
    of_program: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Rows, programs: Rows, first: int) -> "KernelJobs":
        """programs: int64 [jobs], of each job; first: the field for its first program's number, written
        here."""
        rows[:, first] = np.add.accumulate(programs) - programs
        return cls(rows, np.repeat(np.arange(len(rows), dtype=np.int32), programs))

    def words(self) -> Rows:
        """As they are sent: the rows, then the job of each program."""
        words = np.zeros(self.rows.size + (self.of_program.size + 1) // 2, np.int64)
        words[: self.rows.size] = self.rows.reshape(-1)
        words[self.rows.size :].view(np.int32)[: self.of_program.size] = self.of_program
        return words

    def at(self, address: int) -> Jobs:
        """Where they are if their words are there."""
        return Jobs(address, address + self.rows.nbytes, self.of_program.size)


class ShapeJobs:
    """Jobs of one kernel for calls on the default stream. They use the same memory on the device one after
    another: each copies its own jobs over those before (`quant.gpu.batch.ring`). fields: of a job, which each
    call has its own of."""

    def __init__(self, jobs: KernelJobs, fields: Sequence[int]) -> None:
        count, of_job = jobs.rows.shape
        self._jobs, self.words = jobs, jobs.words()
        self.fields = (np.arange(count)[:, None] * of_job + np.array(fields)).reshape(-1)
        self._memory: torch.Tensor | None = None

    def addresses(self, device: Device) -> Jobs:
        """Called on the default stream, whose memory it is."""
        if self._memory is None:
            self._memory = torch.empty(self.words.nbytes, dtype=torch.uint8, device=device.torch_device)
        return self._jobs.at(self._memory.data_ptr())


def send(device: Device, lists: Sequence[KernelJobs]) -> tuple[object, object, list[Jobs]]:
    """Sends jobs; returns the owners of their device and host memory, and the addresses."""
    words = [jobs.words() for jobs in lists]
    host = device.pinned(sum(part.nbytes for part in words))
    memory = torch.empty(host.numel(), dtype=torch.uint8, device=device.torch_device)
    np.concatenate(words, out=host.numpy().view(np.int64))
    starts = accumulate((part.nbytes for part in words[:-1]), initial=memory.data_ptr())
    memory.copy_(host, non_blocking=True)
    # a graph reads the host's side at each replay
    return memory, host, [jobs.at(address) for jobs, address in zip(lists, starts, strict=True)]


class JobSpreader:
    """Writes a kernel's jobs on the device, if only the device knows where each feature's ids begin. rows:
    int64 [jobs, fields], common to all calls. places: int64 [jobs], each one's feature among those of the
    offsets. block: ids a program."""

    def __init__(self, rows: Rows, kernel: Kernel, places: Rows, block: int, device: Device) -> None:
        idle = rows[:1].copy()  # for programs without work: no ids
        self._template = torch.from_numpy(np.concatenate([rows, idle])).to(device.torch_device)
        self._places = torch.from_numpy(places).to(device.torch_device)
        self._count, self._block, self._kernel, self._device = len(rows), block, kernel, device

    def __call__(self, offsets: torch.Tensor, bags: int, ids: int) -> tuple[torch.Tensor, Jobs]:
        """The jobs of a call, and what holds their memory."""
        programs = ids // self._block + self._count
        size = self._template.numel() * 8
        memory = torch.empty(size + 4 * programs, dtype=torch.uint8, device=self._template.device)
        sent = Jobs(memory.data_ptr(), memory.data_ptr() + size, programs)
        self._kernel(
            self._count + 1,
            self._device.current_handle(),
            self._template.data_ptr(),
            self._places.data_ptr(),
            offsets.data_ptr(),
            offsets.element_size(),
            bags,
            ids,
            sent.jobs_at,
            sent.programs_at,
            programs,
            self._count,
        )
        return memory, sent


def template_rows(kinds: Sequence[DeviceKind], first_name: int) -> Rows:
    """Job fields common to all calls."""
    jobs = np.zeros((len(kinds), TENSOR_JOB_FIELDS), np.int64)
    jobs[
        :, (JobField.LENGTHS_AT, JobField.WEIGHTS_AT, JobField.LOCATIONS_AT, FIELDS + TensorField.OFFSETS_AT)
    ] = -1
    jobs[:, (FIELDS + TensorField.IS_FIRST, FIELDS + TensorField.IS_LAST)] = 1
    jobs[:, FIELDS + TensorField.NAME] = first_name + np.arange(len(kinds))
    for job, kind in zip(jobs, kinds, strict=True):
        job[JobField.TABLE], job[JobField.ROWS], job[JobField.ROW_BYTES] = (
            kind.table,
            kind.rows,
            kind.row_bytes,
        )
        job[JobField.DIM], job[JobField.OUT_STEP], job[JobField.FORMAT] = kind.dim, kind.dim, kind.row_format
        job[JobField.MEAN], job[JobField.PRECISION] = kind.mean, kind.precision
        job[JobField.HBM_ROWS], job[JobField.HBM_SHARE] = kind.hbm_rows, kind.hbm_share
    return jobs


def resolve_rows(kinds: Sequence[DeviceKind], every_id: int) -> Rows:
    """Jobs of the resolve kernel. every_id: the address of a row map for tables that have none."""
    rows = np.zeros((len(kinds), len(ResolveField)), np.int64)
    rows[:, ResolveField.ROW_MAP], rows[:, ResolveField.FOUND_AT] = (
        [kind.row_map or every_id for kind in kinds],
        -1,
    )
    return rows


def probe_rows(kinds: Sequence[DeviceKind]) -> Rows:
    """Jobs of the cache's kernels."""
    rows = np.zeros((len(kinds), len(ProbeField)), np.int64)
    rows[:, ProbeField.TABLE] = [kind.cache_table for kind in kinds]
    return rows


def resolve_jobs(
    jobs: Rows, of_kind: Sequence[DeviceKind], is_mapped: NDArray[np.bool_], device: Device
) -> tuple[KernelJobs, torch.Tensor]:
    """Jobs by which ids become row numbers in a tensor of their own, which lookup `jobs` read then.
    is_mapped: those whose ids do."""
    counts = np.where(is_mapped, jobs[:, JobField.IDS], 0)
    ends = np.add.accumulate(counts)
    rows = torch.empty(int(ends[-1]), dtype=torch.int64, device=device.torch_device)
    found = resolve_rows(of_kind, 0)
    found[:, ResolveField.IDS_AT], found[:, ResolveField.IDS] = jobs[:, JobField.IDS_AT], counts
    found[:, ResolveField.TARGET_AT] = rows.data_ptr() + 8 * (ends - counts)
    jobs[is_mapped, JobField.IDS_AT] = found[is_mapped, ResolveField.TARGET_AT]
    programs = -(-counts // device.block(RESOLVE_BLOCK))
    return KernelJobs.of(found, programs, ResolveField.FIRST_PROGRAM), rows


def probe_jobs(jobs: Rows, cached: Any, of_cached: Sequence[DeviceKind], device: Device) -> KernelJobs:
    """Jobs by which the cache looks for ids; says lookup `jobs` where their locations are. cached: the
    numbers of those that read through the cache, whose kinds are `of_cached`."""
    counts = jobs[cached, JobField.IDS]
    found = probe_rows(of_cached)
    found[:, ProbeField.IDS_AT], found[:, ProbeField.IDS] = jobs[cached, JobField.IDS_AT], counts
    found[:, ProbeField.LOCATIONS_AT] = 4 * (np.add.accumulate(counts) - counts)
    jobs[cached, JobField.LOCATIONS_AT] = found[:, ProbeField.LOCATIONS_AT]
    return KernelJobs.of(found, -(-counts // device.block(PROBE_BLOCK)), ProbeField.FIRST_BLOCK)
