"""Jobs for lookups of a caller's tensors: written on the host and sent, or made on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.kernels.state import ProbeField
from tableside.quant.device.device import Device
from tableside.quant.device.launch import Kernel
from tableside.quant.gpu.batch.layout import aligned
from tableside.quant.gpu.batch.steady import SteadyKind
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


class JobAddresses(NamedTuple):
    """Device addresses of jobs, and of int32 [programs], each program's job."""

    jobs_at: int
    programs_at: int
    programs: int


class ShapeJobs:
    """Jobs of one kernel for calls on the default stream. They use the same memory on the device one after
    another: each copies its own jobs over those before (`quant.gpu.batch.ring`). fields: of a job, which each
    call has its own of."""

    def __init__(self, jobs: KernelJobs, fields: Sequence[int]) -> None:
        rows, of_program = jobs
        self.words = np.zeros(rows.size + (of_program.size + 1) // 2, np.int64)
        self.words[: rows.size] = rows.reshape(-1)
        self.words[rows.size :].view(np.int32)[: of_program.size] = of_program
        self.fields = (np.arange(len(rows))[:, None] * rows.shape[1] + np.array(fields)).reshape(-1)
        self._programs_at, self._programs = rows.nbytes, of_program.size
        self._memory: torch.Tensor | None = None

    def addresses(self, device: Device) -> JobAddresses:
        """Called on the default stream, whose memory it is."""
        if self._memory is None:
            self._memory = torch.empty(self.words.nbytes, dtype=torch.uint8, device=device.torch_device)
        at = self._memory.data_ptr()
        return JobAddresses(at, at + self._programs_at, self._programs)


def send(device: Device, lists: Sequence[KernelJobs]) -> tuple[object, object, list[JobAddresses]]:
    """Sends jobs; returns the owners of their device and host memory, and the addresses."""
    sizes = [(rows.nbytes, of_program.size) for rows, of_program in lists]
    total = sum(size + aligned(4 * programs, 8) for size, programs in sizes)
    host = device.pinned(total)
    memory = torch.empty(total, dtype=torch.uint8, device=device.torch_device)
    written, address, at, sent = host.numpy(), memory.data_ptr(), 0, []
    for (rows, of_program), (size, programs) in zip(lists, sizes, strict=True):
        written[at : at + size] = rows.reshape(-1).view(np.uint8)
        written[at + size : at + size + 4 * programs] = of_program.view(np.uint8)
        sent.append(JobAddresses(address + at, address + at + size, programs))
        at += size + aligned(4 * programs, 8)
    memory.copy_(host, non_blocking=True)
    return memory, host, sent  # a graph reads the host's side at each replay


class JobSpreader:
    """Writes a kernel's jobs on the device, if only the device knows where each feature's ids begin. rows:
    int64 [jobs, fields], common to all calls. places: int64 [jobs], each one's feature among those of the
    offsets. block: ids a program."""

    def __init__(self, rows: Rows, kernel: Kernel, places: Rows, block: int, device: Device) -> None:
        idle = rows[:1].copy()  # for programs without work: no ids
        self._template = torch.from_numpy(np.concatenate([rows, idle])).to(device.torch_device)
        self._places = torch.from_numpy(places).to(device.torch_device)
        self._count, self._block, self._kernel, self._device = len(rows), block, kernel, device

    def __call__(self, offsets: torch.Tensor, bags: int, ids: int) -> tuple[torch.Tensor, JobAddresses]:
        """The jobs of a call, and what holds their memory."""
        programs = ids // self._block + self._count
        size = self._template.numel() * 8
        memory = torch.empty(size + 4 * programs, dtype=torch.uint8, device=self._template.device)
        sent = JobAddresses(memory.data_ptr(), memory.data_ptr() + size, programs)
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


def template_rows(kinds: Sequence[SteadyKind], first_name: int) -> Rows:
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


def resolve_rows(kinds: Sequence[SteadyKind], every_id: int) -> Rows:
    """Jobs of the resolve kernel. every_id: the address of a row map for tables that have none."""
    rows = np.zeros((len(kinds), len(ResolveField)), np.int64)
    rows[:, ResolveField.ROW_MAP], rows[:, ResolveField.FOUND_AT] = (
        [kind.row_map or every_id for kind in kinds],
        -1,
    )
    return rows


def probe_rows(kinds: Sequence[SteadyKind]) -> Rows:
    """Jobs of the cache's kernels."""
    rows = np.zeros((len(kinds), len(ProbeField)), np.int64)
    rows[:, ProbeField.TABLE] = [kind.cache_table for kind in kinds]
    return rows
