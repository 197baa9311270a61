"""Lookups of a caller's tensors where they lie on a GPU: nothing is brought together, and nobody waits for the device.

A call takes ids, offsets and weights of each feature as tensors of their own (`each`), or all ids one after another with the
offsets of all features (`packed`), as FBGEMM and TorchRec keep them. In a packed call the host does not know where the ids of a
feature begin. The lookup kernel reads its bags from the offsets, so a call with as many bags as one before needs nothing sent.
Kernels before it, which work on ids, get their jobs from `quant.gpu.tensor_kernel.spread`.

What a call reads (its jobs, the row numbers of its ids) belongs to it, so calls on several streams share none.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cache.jobs import PROBE_BLOCK, ProbeJobs
from tableside.quant.cache.kernels.state import ProbeField
from tableside.quant.cache.tickets import Ticket
from tableside.quant.contract import LookupKind, Pooling, Precision
from tableside.quant.device.launch import Kernel
from tableside.quant.errors import QuantError
from tableside.quant.gpu import kernels
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.job import FIELDS, TENSOR_JOB_FIELDS, JobField, ResolveField, TensorField
from tableside.quant.gpu.launch_config import LaunchConfig
from tableside.quant.gpu.launcher import Launcher
from tableside.quant.gpu.layout import aligned, check_size
from tableside.quant.gpu.reports import Reports
from tableside.quant.gpu.resolve import COUNTS, RESOLVE_BLOCK, ResolveJobs
from tableside.quant.gpu.steady import SteadyKind, steady_kind
from tableside.quant.gpu.tables import on_device
from tableside.quant.gpu.wanted import KernelKey
from tableside.quant.ids import NO_ROW_MAP

_SHAPES = 64  # of calls, whose jobs are kept
_DTYPES = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
_EVERY_ID = NO_ROW_MAP._replace(id_count=-1, default_row=-1, own=2**63 - 1)  # each id is its own row number
_OFFSETS_AT, _OFFSET_BYTES, _OFFSETS, _IS_FIRST, _IS_LAST, _ASKED_AT, _NAME = (FIELDS + field for field in TensorField)
_ADDRESSES = (JobField.IDS_AT, _OFFSETS_AT, JobField.WEIGHTS_AT)
_OF_SHAPE = (JobField.IDS, _OFFSET_BYTES, _OFFSETS, JobField.BAG_LENGTH)
_captured: list[object] = []  # what graphs read: a graph does not say when it goes

Rows = NDArray[np.int64]


class TensorInput(NamedTuple):
    """The tensors of one feature, all on the device and contiguous. ids: int64 [ids]. offsets: int32 or int64, where each of the
    `bags` bags begins, with or without the end of the last one; None: bags of `bag_length` ids, or not pooled. weights: fp32
    [ids]."""

    ids: torch.Tensor
    offsets: torch.Tensor | None
    bag_length: int
    bags: int
    weights: torch.Tensor | None


class _JobList(NamedTuple):
    """Jobs of one kernel. rows: int64 [jobs, fields]; of_program: int32 [programs], the job of each."""

    rows: Rows
    of_program: NDArray[np.int32]

    @classmethod
    def of(cls, rows: Rows, programs: Rows, first: int) -> "_JobList":
        """programs: int64 [jobs], of each job; first: the field for the number of its first one, which is written."""
        rows[:, first] = np.add.accumulate(programs) - programs
        return cls(rows, np.repeat(np.arange(len(rows), dtype=np.int32), programs))


class _Shape(NamedTuple):
    """What calls of tensors of these shapes have in common: all but addresses."""

    jobs: _JobList
    config: LaunchConfig
    is_weighted: bool
    values: int
    cached_ids: int
    is_even: bool


class _Sent(NamedTuple):
    """Jobs on the device, or on their way, at two addresses: the jobs, and int32 [programs], the job of each program."""

    jobs_at: int
    programs_at: int
    programs: int


class _Base(NamedTuple):
    """Addresses that the offsets of jobs count from: row numbers, ids as they came, offsets, weights. ids: of a job without
    IDS."""

    inputs: int = 0
    asked: int = 0
    offsets: int = 0
    weights: int = 0
    ids: int = 0


class StagedLookup(NamedTuple):
    """A call whose jobs are on the device, or on their way there. shape: of the vectors. probe: what the cache looks for first.

    is_even: all features have as many values. held: what the kernels read. sent: what a graph of the call reads besides, in no
    memory that belongs to the graph. ticket: of its rows in the cache, where they were prefetched.
    """

    jobs: _Sent
    config: LaunchConfig
    base: _Base
    is_weighted: bool
    probe: ProbeJobs | None
    shape: tuple[int, ...]
    held: object
    sent: object
    is_even: bool = False
    ticket: Ticket | None = None


class TensorLookup:
    """Lookups of some features, all pooled or none, of tables on one device. names, reports: what wrong ids are told by.

    unfound: int64 [features, 2] on the device: ids without a row in all calls so far, and those whose row came from an older
    version. QuantError: a table is looked up by the CPU.
    """

    def __init__(self, backend: GpuBackend, names: Sequence[str], kinds: Sequence[LookupKind], reports: Reports) -> None:
        tables = [on_device(kind.table) for kind in kinds]
        if not all(table.residence.is_on_device for table in tables):
            raise QuantError("the CPU looks up one of the tables; copy it to HBM (to_hbm), or let the device read it (map_host)")
        self._device, self._launcher, self._configs = backend.device, backend.launcher, backend.configs
        self._reports, self._tables = reports, tables  # whose memory the kernels read
        self._of_kind = [steady_kind(kind, table) for kind, table in zip(kinds, tables, strict=True)]
        self._key = KernelKey()
        for table in tables:
            self._key |= table.key
        self._is_pooled, self._dtype = kinds[0].pooling is not Pooling.NONE, _DTYPES[kinds[0].precision]
        self._dims = np.array([k.dim for k in self._of_kind], np.int64)
        self._columns = np.array([k.columns for k in self._of_kind], np.int64)
        self._template = _template(self._of_kind, reports.add(names, tables))
        self._is_mapped = np.array([k.row_map != 0 for k in self._of_kind])
        self._cached = np.flatnonzero([k.cache_table >= 0 for k in self._of_kind])
        self._has_maps, self._has_cached = bool(self._is_mapped.any()), bool(self._cached.size)
        self._is_overlaid = any(table.is_overlaid for table in tables)
        self._is_indirect = self._has_cached or any(k.hbm_share for k in self._of_kind)
        self._every_id = torch.tensor(_EVERY_ID, dtype=torch.int64, device=backend.device.torch_device)
        self.unfound = torch.zeros((len(kinds), COUNTS), dtype=torch.int64, device=backend.device.torch_device)
        self._packed: OrderedDict[Any, tuple[object, object, _Sent]] = OrderedDict()
        self._shapes: OrderedDict[tuple[int, ...], _Shape] = OrderedDict()
        self._spreads: dict[Any, _Spread] = {}
        self._kernels: dict[Any, Kernel] = {}
        self._reserved = 0
        self._columns_of_bag, self._width = int(self._columns.sum()), int(self._dims.sum())
        self._new = torch.empty(0, dtype=self._dtype, device=backend.device.torch_device).new_empty  # sooner than torch.empty
        self.on_device = OnDevice(backend.launcher)

    # ---- calls ----

    def stage_each(self, inputs: Sequence[TensorInput]) -> StagedLookup:
        """A call with tensors of its own for each feature. It gives the vectors of all, one feature after another, [values]."""
        addresses: list[int] = []
        shape: list[int] = []
        for ids, offsets, bag_length, bags, weights in inputs:
            addresses += (
                ids.data_ptr(),
                -1 if offsets is None else offsets.data_ptr(),
                -1 if weights is None else weights.data_ptr(),
            )
            of_offsets = (0, 0) if offsets is None else (offsets.element_size(), offsets.numel())
            shape += (ids.numel(), *of_offsets, bag_length, bags, weights is not None)
        with self.on_device:
            kept = self._shape(tuple(shape))
        jobs = kept.jobs.rows.copy()
        jobs[:, _ADDRESSES] = np.array(addresses, np.int64).reshape(-1, len(_ADDRESSES))
        jobs[:, _ASKED_AT] = jobs[:, JobField.IDS_AT]
        lists = [_JobList(jobs, kept.jobs.of_program)]
        rows = self._add_resolve(jobs, lists)
        if self._has_cached:
            lists.append(self._probe(jobs))
        with self.on_device:
            memory, host, (sent, *before) = self._send(lists)
            if rows is not None:
                self._resolve(before.pop(0), 0, 0)
        probe = None
        if before:
            probe = ProbeJobs(before[0].jobs_at, before[0].programs_at, kept.cached_ids, before[0].programs)
        return StagedLookup(
            sent, kept.config, _Base(), kept.is_weighted, probe, (kept.values,), (inputs, memory, rows), host, kept.is_even
        )

    def stage_packed(
        self, ids: torch.Tensor, offsets: torch.Tensor, features: int, order: tuple[int, ...], weights: torch.Tensor | None
    ) -> StagedLookup:
        """A call of pooled features with all ids in one tensor. It gives their vectors side by side, [bags, sum of dims].

        ids: int64 [ids]; offsets: int32 or int64 [features * bags + 1] into them, those of the first feature first; weights: fp32
        [ids], all contiguous on the device. order: where each feature of the lookup is among those of the offsets.
        """
        bags, count = (offsets.numel() - 1) // features, ids.numel()
        check_size(count, bags)
        config = self._config(count * len(order) // features, bags * len(order), bags * self._columns_of_bag)
        key = (bags, features, order, offsets.element_size(), weights is None, config)
        with self.on_device:
            if (found := self._packed.get(key)) is None:
                self._compile_for_overlays(offsets, bags, count, order)
                found = self._send_packed(bags, features, order, offsets.element_size(), weights is None, config)
                if not self._device.is_capturing():  # a graph sends its own at each replay
                    self._packed[key] = found
                    if len(self._packed) > _SHAPES:
                        self._packed.popitem(last=False)
            memory, kept, sent = found
            base = _Base(ids.data_ptr(), ids.data_ptr(), offsets.data_ptr(), 0 if weights is None else weights.data_ptr(), count)
            held: list[object] = [ids, offsets, weights, memory]
            probe = None
            if self._has_maps:
                rows = torch.empty_like(ids)
                places, resolve = self._spread(True, order)(self, offsets, bags, count)
                self._resolve(resolve, base.asked, rows.data_ptr())
                base = base._replace(inputs=rows.data_ptr())
                held += (places, rows)
            if self._has_cached:
                places, blocks = self._spread(False, order)(self, offsets, bags, count)
                probe = ProbeJobs(blocks.jobs_at, blocks.programs_at, count, blocks.programs)
                held.append(places)
        return StagedLookup(sent, config, base, weights is not None, probe, (bags, self._width), held, kept)

    def prefetch(self, staged: StagedLookup) -> StagedLookup:
        """Begins to bring the rows of a call to the cache, where some are read through it; they stay until the call."""
        if staged.probe is None:
            return staged
        with self.on_device:
            self._check_can_run()
            return staged._replace(ticket=self._prefetched(staged, self._device.current_stream()))

    def __call__(self, staged: StagedLookup) -> torch.Tensor:
        """The vectors, on the current stream. What is wrong is reported; a bag or row that is wrong reads as zeros.

        QuantError: a graph is captured, and no such call ran before, or rows are read through the cache.
        """
        with self.on_device:
            self._check_can_run()
            kernel = self._kernel(staged)
            self._launcher.await_tables()
            ticket, stream = staged.ticket, None
            if staged.probe is not None:
                stream = self._device.current_stream()
                ticket = ticket or self._prefetched(staged, stream)
            locations, staging = 0, 0
            if ticket is not None:
                ticket.wait(stream)
                locations, staging = ticket.locations.data_ptr(), ticket.staging
            out = self._new(staged.shape)
            jobs, base = staged.jobs, staged.base
            kernel(
                jobs.programs,
                self._device.current_handle(),
                jobs.jobs_at,
                jobs.programs_at,
                base.inputs,
                base.asked,
                base.offsets,
                base.weights,
                out.data_ptr(),
                locations,
                staging,
                base.ids,
                self._reports.address,
            )
            if ticket is not None:
                ticket.release(stream)
            if self._device.is_capturing():
                _captured.append((self, staged.sent))
        return out

    def _check_can_run(self) -> None:
        """QuantError: a graph is captured of rows that move."""
        if self._has_cached and self._device.is_capturing():
            raise QuantError(
                "rows behind a cache move from call to call, which a captured graph would not know; "
                "keep the tables in HBM (placement='hbm'), or call without a graph"
            )

    def _check_not_capturing(self) -> None:
        """QuantError: a graph is captured."""
        if self._device.is_capturing():
            raise QuantError("a call of a new kind cannot be captured; call once like this before")

    # ---- jobs ----

    def _config(self, ids: int, vectors: int, columns: int) -> LaunchConfig:
        return self._configs.of_pooled(ids, vectors, columns) if self._is_pooled else self._configs.unpooled

    def _shape(self, shape: tuple[int, ...]) -> _Shape:
        """shape: for each feature its ids, bytes of an offset and offsets, bag length, bags, and whether it has weights."""
        if (found := self._shapes.get(shape)) is None:
            of_feature = np.array(shape, np.int64).reshape(len(self._dims), -1)
            jobs, counts = self._template.copy(), of_feature[:, 0]
            jobs[:, _OF_SHAPE] = of_feature[:, : len(_OF_SHAPE)]
            vectors = jobs[:, JobField.VECTORS] = of_feature[:, 4] if self._is_pooled else counts
            values = vectors * self._dims
            jobs[:, JobField.OUT_AT] = (np.add.accumulate(values) - values) * self._dtype.itemsize
            columns = vectors * self._columns
            config = self._config(int(counts.sum()), int(vectors.sum()), int(columns.sum()))
            check_size(int(counts.max()), int(vectors.max()))
            listed = _JobList.of(jobs, -(-columns // config.block_columns), JobField.FIRST_PROGRAM)
            is_weighted, cached_ids = bool(of_feature[:, 5].any()), int(counts[self._cached].sum())
            found = self._shapes[shape] = _Shape(
                listed, config, is_weighted, int(values.sum()), cached_ids, len(set(values.tolist())) == 1
            )
            if len(self._shapes) > _SHAPES:
                self._shapes.popitem(last=False)
        return found

    def _add_resolve(self, jobs: Rows, lists: list[_JobList]) -> torch.Tensor | None:
        """Has ids become row numbers in a tensor of their own, which the jobs read then."""
        if not self._has_maps:
            return None
        counts = np.where(self._is_mapped, jobs[:, JobField.IDS], 0)
        ends = np.add.accumulate(counts)
        rows = torch.empty(int(ends[-1]), dtype=torch.int64, device=self._device.torch_device)
        found = _resolve_rows(self._of_kind, 0)
        found[:, ResolveField.IDS_AT], found[:, ResolveField.IDS] = jobs[:, JobField.IDS_AT], counts
        found[:, ResolveField.TARGET_AT] = rows.data_ptr() + 8 * (ends - counts)
        jobs[self._is_mapped, JobField.IDS_AT] = found[self._is_mapped, ResolveField.TARGET_AT]
        block = self._device.block(RESOLVE_BLOCK)
        lists.append(_JobList.of(found, -(-counts // block), ResolveField.FIRST_PROGRAM))
        return rows

    def _probe(self, jobs: Rows) -> _JobList:
        """Has the cache look for ids, and says the jobs where their locations are."""
        counts = jobs[self._cached, JobField.IDS]
        found = _probe_rows([self._of_kind[n] for n in self._cached])
        found[:, ProbeField.IDS_AT], found[:, ProbeField.IDS] = jobs[self._cached, JobField.IDS_AT], counts
        found[:, ProbeField.LOCATIONS_AT] = 4 * (np.add.accumulate(counts) - counts)
        jobs[self._cached, JobField.LOCATIONS_AT] = found[:, ProbeField.LOCATIONS_AT]
        return _JobList.of(found, -(-counts // self._device.block(PROBE_BLOCK)), ProbeField.FIRST_BLOCK)

    def _send_packed(
        self, bags: int, features: int, order: tuple[int, ...], offset_bytes: int, is_plain: bool, config: LaunchConfig
    ) -> tuple[object, object, _Sent]:
        jobs, places = self._template.copy(), np.array(order, np.int64)
        jobs[:, JobField.IDS], jobs[:, JobField.WEIGHTS_AT] = -1, -1 if is_plain else 0
        jobs[:, JobField.VECTORS] = bags
        jobs[:, JobField.OUT_AT] = (np.add.accumulate(self._dims) - self._dims) * self._dtype.itemsize
        jobs[:, JobField.OUT_STEP] = self._dims.sum()
        jobs[self._cached, JobField.LOCATIONS_AT] = 0
        jobs[:, _OFFSETS_AT], jobs[:, _OFFSET_BYTES], jobs[:, _OFFSETS] = places * bags * offset_bytes, offset_bytes, bags + 1
        jobs[:, _IS_FIRST], jobs[:, _IS_LAST] = places == 0, places == features - 1
        programs = -(-bags * self._columns // config.block_columns)
        memory, host, (sent,) = self._send([_JobList.of(jobs, programs, JobField.FIRST_PROGRAM)])
        return memory, (memory, host) if not self._device.is_capturing() else host, sent

    def _send(self, lists: Sequence[_JobList]) -> tuple[object, object, list[_Sent]]:
        """Jobs, on their way to the device: what holds their memory there, what holds it on the host, and where they are."""
        sizes = [(rows.nbytes, of_program.size) for rows, of_program in lists]
        total = sum(size + aligned(4 * programs, 8) for size, programs in sizes)
        host = self._device.pinned(total)
        memory = torch.empty(total, dtype=torch.uint8, device=self._device.torch_device)
        written, address, at, sent = host.numpy(), memory.data_ptr(), 0, []
        for (rows, of_program), (size, programs) in zip(lists, sizes, strict=True):
            written[at : at + size] = rows.reshape(-1).view(np.uint8)
            written[at + size : at + size + 4 * programs] = of_program.view(np.uint8)
            sent.append(_Sent(address + at, address + at + size, programs))
            at += size + aligned(4 * programs, 8)
        memory.copy_(host, non_blocking=True)
        return memory, host, sent  # a graph reads the host's side at each replay

    def _compile_for_overlays(self, offsets: torch.Tensor, bags: int, count: int, order: tuple[int, ...]) -> None:
        """Has a first packed call compile what a state of the same tables with overlays takes beside."""
        if not self._has_maps and (True, order) not in self._spreads and not self._device.is_capturing():
            self._spread(True, order)(self, offsets, bags, count)

    def _spread(self, is_resolve: bool, order: tuple[int, ...]) -> "_Spread":
        """What makes the jobs of one of the kernels before the lookup, for packed calls in this order."""
        if (found := self._spreads.get((is_resolve, order))) is None:
            self._check_not_capturing()
            device, places = self._device, np.array(order, np.int64)
            if is_resolve:
                rows, block = _resolve_rows(self._of_kind, self._every_id.data_ptr()), device.block(RESOLVE_BLOCK)
            else:
                rows, block = _probe_rows([self._of_kind[n] for n in self._cached]), device.block(PROBE_BLOCK)
                places = places[self._cached]
            kernel = kernels.spread(is_resolve, kernels.spread_lanes(len(rows)), block)
            found = self._spreads[is_resolve, order] = _Spread(rows, kernel, places, block, device.torch_device)
        return found

    # ---- launches ----

    def _kernel(self, staged: StagedLookup) -> Kernel:
        key = (staged.config, staged.is_weighted)
        if (kernel := self._kernels.get(key)) is None:
            self._check_not_capturing()
            kernel = self._kernels[key] = kernels.lookup(
                self._key,
                staged.config,
                pooled=self._is_pooled,
                is_weighted=staged.is_weighted,
                is_indirect=self._is_indirect,
                of_tensors=True,
            )
        return kernel

    def _resolve(self, jobs: _Sent, source: int, target: int) -> None:
        placed = ResolveJobs(jobs.jobs_at, jobs.programs_at, jobs.programs, self._is_overlaid)
        self._launcher.resolve(placed, source, target, 0, self.unfound.data_ptr())

    def _prefetched(self, staged: StagedLookup, stream: Any) -> Ticket:
        cache, probe = self._launcher.cache, staged.probe
        assert cache is not None and probe is not None, "a table is read through the cache"
        if probe.ids > self._reserved:
            self._reserved = probe.ids
            cache.reserve(probe.ids)
        cache.follow_current_stream(stream)
        return cache.prefetch(probe, staged.base.inputs)


class OnDevice:
    """A context in which launches go to a device, and nobody else launches there."""

    def __init__(self, launcher: Launcher) -> None:
        self._lock, self._device = launcher.lock, launcher.device
        self._others: list[Any] = []  # contexts to leave, one for each time that this was entered

    def __enter__(self) -> None:
        self._lock.acquire()
        if (other := self._device.switch()) is not None:
            other.__enter__()
        self._others.append(other)

    def __exit__(self, *error: object) -> None:
        if (other := self._others.pop()) is not None:
            other.__exit__(*error)
        self._lock.release()


class _Spread:
    """Makes the jobs of a kernel on the device, where only the device knows where the ids of a feature begin.

    rows: int64 [jobs, fields], as they are for all calls. places: int64 [jobs], of each one's feature among those of the offsets.
    block: ids of a program.
    """

    def __init__(self, rows: Rows, kernel: Kernel, places: Rows, block: int, device: torch.device) -> None:
        idle = rows[:1].copy()  # for programs without work: no ids
        self._template = torch.from_numpy(np.concatenate([rows, idle])).to(device)
        self._places = torch.from_numpy(places).to(device)
        self._count, self._block, self._kernel = len(rows), block, kernel

    def __call__(self, lookup: TensorLookup, offsets: torch.Tensor, bags: int, ids: int) -> tuple[torch.Tensor, _Sent]:
        """The jobs of a call, and what holds their memory."""
        programs = ids // self._block + self._count
        size = self._template.numel() * 8
        memory = torch.empty(size + 4 * programs, dtype=torch.uint8, device=self._template.device)
        sent = _Sent(memory.data_ptr(), memory.data_ptr() + size, programs)
        self._kernel(
            self._count + 1,
            lookup._device.current_handle(),
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


def _template(kinds: Sequence[SteadyKind], first_name: int) -> Rows:
    """What is the same of the jobs of all calls."""
    jobs = np.zeros((len(kinds), TENSOR_JOB_FIELDS), np.int64)
    jobs[:, (JobField.LENGTHS_AT, JobField.WEIGHTS_AT, JobField.LOCATIONS_AT, _OFFSETS_AT)] = -1
    jobs[:, (_IS_FIRST, _IS_LAST)] = 1
    for n, (job, kind) in enumerate(zip(jobs, kinds, strict=True)):
        job[JobField.TABLE], job[JobField.ROWS], job[JobField.ROW_BYTES] = kind.table, kind.rows, kind.row_bytes
        job[JobField.DIM], job[JobField.OUT_STEP], job[JobField.FORMAT] = kind.dim, kind.dim, kind.row_format
        job[JobField.MEAN], job[JobField.PRECISION] = kind.mean, kind.precision
        job[JobField.HBM_ROWS], job[JobField.HBM_SHARE], job[_NAME] = kind.hbm_rows, kind.hbm_share, first_name + n
    return jobs


def _resolve_rows(kinds: Sequence[SteadyKind], every_id: int) -> Rows:
    """Jobs of the resolve kernel. every_id: the address of a row map for tables that have none."""
    rows = np.zeros((len(kinds), len(ResolveField)), np.int64)
    rows[:, ResolveField.ROW_MAP], rows[:, ResolveField.FOUND_AT] = [kind.row_map or every_id for kind in kinds], -1
    return rows


def _probe_rows(kinds: Sequence[SteadyKind]) -> Rows:
    """Jobs of the cache's kernels."""
    rows = np.zeros((len(kinds), len(ProbeField)), np.int64)
    rows[:, ProbeField.TABLE] = [kind.cache_table for kind in kinds]
    return rows
