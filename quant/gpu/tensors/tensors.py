"""Lookups of a caller's tensors in place on a GPU, without waiting for the device.
A call takes each feature's ids, offsets and weights (`each`), or all ids one after another with all offsets
(`packed`), as FBGEMM and TorchRec do. In a packed call the host does not know where a feature's ids begin:
the lookup kernel reads its bags from the offsets, so a repeated number of bags needs nothing sent. Kernels
before it get their jobs from `quant.gpu.kernels.tensors.spread`. A call with separate tensors sends its jobs:
on the default stream over those of the call before with as many bags, elsewhere to memory of its own."""

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from tableside.quant.cache.jobs import PROBE_BLOCK
from tableside.quant.cache.tickets import Ticket
from tableside.quant.contract import LookupKind, Pooling, Precision
from tableside.quant.device.launch import Jobs, Kernel
from tableside.quant.errors import QuantError
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.batch.launcher import OnDevice
from tableside.quant.gpu.batch.layout import DeviceKind, check_size
from tableside.quant.gpu.batch.resolve import COUNTS, RESOLVE_BLOCK
from tableside.quant.gpu.kernels import compiled as kernels
from tableside.quant.gpu.kernels.job import FIELDS, JobField, TensorField
from tableside.quant.gpu.kernels.launch_config import LaunchConfig
from tableside.quant.gpu.kernels.wanted import KernelKey
from tableside.quant.gpu.reports import Reports
from tableside.quant.gpu.residence.tables import on_device
from tableside.quant.gpu.tensors.calls import (
    BaseAddresses,
    CallShape,
    StagedLookup,
    TensorInput,
    places_of,
)
from tableside.quant.gpu.tensors.jobs import (
    JobSpreader,
    KernelJobs,
    ShapeJobs,
    probe_jobs,
    probe_rows,
    resolve_jobs,
    resolve_rows,
    send,
    template_rows,
)
from tableside.quant.gpu.tensors.rows import RowGatherer
from tableside.quant.rows.fetched import not_read
from tableside.quant.rows.ids import NO_ROW_MAP

_HERE = nullcontext()
_SHAPES = 64  # of calls, whose jobs are kept
_DTYPES = {Precision.FP32: torch.float32, Precision.FP16: torch.float16, Precision.BF16: torch.bfloat16}
_EVERY_ID = NO_ROW_MAP._replace(id_count=-1, default_row=-1, own=2**63 - 1)  # each id is its own row number
_OFFSETS_AT, _OFFSET_BYTES, _OFFSETS, _IS_FIRST, _IS_LAST, _ASKED_AT, _NAME = (
    FIELDS + field for field in TensorField
)
_OWN = (JobField.IDS_AT, _OFFSETS_AT, JobField.WEIGHTS_AT, _ASKED_AT, JobField.IDS)  # of each call
_OF_SHAPE = (_OFFSET_BYTES, _OFFSETS, JobField.BAG_LENGTH)
_captured: list[object] = []  # what graphs read: a graph does not say when it goes


class TensorLookup:
    """Lookups of features, all pooled or none, on one device. names, reports: for errors. unfound: int64
    [features, 2] on the device: ids without a row so far, and with an older version's. QuantError: the CPU
    looks a table up."""

    def __init__(
        self, backend: GpuBackend, names: Sequence[str], kinds: Sequence[LookupKind], reports: Reports
    ) -> None:
        tables = [on_device(kind.table) for kind in kinds]
        if not all(table.residence.is_on_device for table in tables):
            raise QuantError(
                "the CPU looks up one of the tables; place it in HBM (hbm), or in host memory that the "
                "device reads (zero_copy)"
            )
        self._device, self._launcher, self._configs = backend.device, backend.launcher, backend.configs
        self._reports, self._tables = reports, tables  # whose memory the kernels read
        self._of_kind = [DeviceKind.of(kind, table) for kind, table in zip(kinds, tables, strict=True)]
        self._key = KernelKey()
        for table in tables:
            self._key |= table.key
        self._is_pooled, self._dtype = kinds[0].pooling is not Pooling.NONE, _DTYPES[kinds[0].precision]
        self._dims = np.array([k.dim for k in self._of_kind], np.int64)
        self._columns = np.array([k.columns for k in self._of_kind], np.int64)
        name = reports.add(names, tables)
        self._template = template_rows(self._of_kind, name)
        # Of a call for one table whose rows need nothing but their numbers; None: it is no such call.
        self.gatherer: RowGatherer | None = None
        if len(tables) == 1 and RowGatherer.takes(self._of_kind[0]):
            self.gatherer = RowGatherer(backend, self._of_kind[0], tables[0], reports, name)
        self._is_mapped = np.array([k.row_map != 0 for k in self._of_kind])
        self._cached = np.flatnonzero([k.cache_table >= 0 for k in self._of_kind])
        self._has_maps, self._has_cached = bool(self._is_mapped.any()), bool(self._cached.size)
        self._is_overlaid = any(table.is_overlaid for table in tables)
        self._is_indirect = self._has_cached or any(k.hbm_share for k in self._of_kind)
        self._every_id = torch.tensor(_EVERY_ID, dtype=torch.int64, device=backend.device.torch_device)
        self.unfound = torch.zeros(
            (len(kinds), COUNTS), dtype=torch.int64, device=backend.device.torch_device
        )
        self._packed: OrderedDict[Any, tuple[object, object, Jobs]] = OrderedDict()
        self._shapes: OrderedDict[tuple[bytes, int], CallShape] = OrderedDict()
        self._sizes: dict[bytes, tuple[int, int]] = {}  # vectors and columns of a shape
        self._spreads: dict[Any, JobSpreader] = {}
        self._kernels: dict[Any, Kernel] = {}
        self._reserved = 0
        self._columns_of_bag, self._width = int(self._columns.sum()), int(self._dims.sum())
        nothing = torch.empty(0, dtype=self._dtype, device=backend.device.torch_device)
        self._new = nothing.new_empty  # sooner than torch.empty
        self.on_device = OnDevice(backend.launcher)

    # ---- calls ----

    def stage_each(self, inputs: Sequence[TensorInput]) -> StagedLookup:
        """Stages a call with separate tensors; its vectors lie one feature after another, [vectors, dim], or
        [values] where dims differ."""
        return self.stage_placed(*places_of(inputs), inputs)

    def stage_placed(self, places: bytes, shapes: bytes, ids: int, held: object) -> StagedLookup:
        """The same for tensors whose places and shapes are known (`_native.device_places`). ids: of all.
        held: keeps them alive."""
        with self.on_device:
            kept = self._shape(shapes, ids)
        jobs = kept.jobs.rows.copy()
        jobs[:, _OWN] = np.frombuffer(places, np.int64).reshape(-1, len(_OWN))
        lists = [KernelJobs(jobs, kept.jobs.of_program)]
        rows = None
        if self._has_maps:
            resolve, rows = resolve_jobs(jobs, self._of_kind, self._is_mapped, self._device)
            lists.append(resolve)
        if self._has_cached:
            of_cached = [self._of_kind[n] for n in self._cached]
            lists.append(probe_jobs(jobs, self._cached, of_cached, self._device))
        with self.on_device:
            memory, host, (sent, *before) = send(self._device, lists)
            if rows is not None:
                self._resolve(before.pop(0), 0, 0)
        probe = None
        if before:
            probe = before[0]._replace(ids=int(jobs[self._cached, JobField.IDS].sum()))
        held = held, memory, rows
        base, shape = BaseAddresses(), kept.shape
        return StagedLookup(sent, kept.config, base, kept.is_weighted, probe, shape, held, host, kept.parts)

    def of_places(
        self, places: bytes, shapes: bytes, ids: int, held: object
    ) -> tuple[torch.Tensor, Sequence[int]]:
        """Looks up what `stage_placed` would stage; returns the vectors and the part of each feature. Raises
        as a call."""
        with self.on_device:
            kept, ring = self._shape(shapes, ids), self._launcher.ring
            # Jobs that stay on the device are of the default stream: others may be a graph's, or end.
            if (own := kept.own) is not None and not self._device.current_handle() and ring.takes(own.words):
                sent = own.addresses(self._device)
                ring.copy(own.words, own.fields, np.frombuffer(places, np.int64), sent.jobs_at)
                base, shape, weighs = BaseAddresses(), kept.shape, kept.is_weighted
                return self(
                    StagedLookup(sent, kept.config, base, weighs, None, shape, None, None)
                ), kept.parts
        staged = self.stage_placed(places, shapes, ids, held)
        return self(staged), staged.parts

    def stage_packed(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        features: int,
        order: tuple[int, ...],
        weights: torch.Tensor | None,
    ) -> StagedLookup:
        """Stages a call of pooled features with all ids in one tensor; its vectors are [bags, sum of dims].
        ids: int64 [ids]; offsets: int32 or int64 [features * bags + 1]; weights: fp32 [ids]; contiguous on
        the device. order: each feature's place among those of the offsets."""
        bags, count = (offsets.numel() - 1) // features, ids.numel()
        check_size(count, bags)
        config = self._config(count * len(order) // features, bags * len(order), bags * self._columns_of_bag)
        key = (bags, features, order, offsets.element_size(), weights is None, config)
        with self.on_device:
            if (found := self._packed.get(key)) is None:
                self._compile_for_overlays(offsets, bags, count, order)
                found = self._send_packed(
                    bags, features, order, offsets.element_size(), weights is None, config
                )
                if not self._device.is_capturing():  # a graph sends its own at each replay
                    self._packed[key] = found
                    if len(self._packed) > _SHAPES:
                        self._packed.popitem(last=False)
            memory, kept, sent = found
            base = BaseAddresses(
                ids.data_ptr(),
                ids.data_ptr(),
                offsets.data_ptr(),
                0 if weights is None else weights.data_ptr(),
                count,
            )
            held: list[object] = [ids, offsets, weights, memory]
            probe = None
            if self._has_maps:
                rows = torch.empty_like(ids)
                places, resolve = self._spread(True, order)(offsets, bags, count)
                self._resolve(resolve, base.asked, rows.data_ptr())
                base = base._replace(inputs=rows.data_ptr())
                held += (places, rows)
            if self._has_cached:
                places, blocks = self._spread(False, order)(offsets, bags, count)
                probe = blocks._replace(ids=count)
                held.append(places)
        return StagedLookup(sent, config, base, weights is not None, probe, (bags, self._width), held, kept)

    def gather(
        self,
        ids: torch.Tensor,
        bounds: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        beside: Any = None,
    ) -> tuple[torch.Tensor, int | None]:
        """Returns the vectors of ids, and the stream's handle, by the `gatherer`, which says what it takes.
        Raises as a call."""
        assert self.gatherer is not None
        with self._launcher.lock, self._device.switch() or _HERE:
            if out is None:
                out = self.room(ids)
            handle = self.gatherer(ids, out, bounds, beside)
        if self._device.is_capturing():
            _captured.append(self)
        return out, handle

    def room(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns memory for the vectors of ids, [*shape of the ids, dim], of the current stream."""
        return self._new((*ids.shape, self._width))

    def prefetch(self, staged: StagedLookup) -> StagedLookup:
        """Begins to fetch a call's cached rows; they stay until the call. RowsNotRead: some do not come."""
        if staged.probe is None:
            return staged
        with self.on_device:
            self._check_can_run()
            return staged._replace(ticket=self._prefetched(staged, self._device.current_stream()))

    def __call__(self, staged: StagedLookup) -> torch.Tensor:
        """Returns the vectors on the current stream. Wrong bags or rows are reported and read as zeros.
        QuantError: during a graph capture, if no such call ran before or rows are cached."""
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

    def _config(self, ids: int, vectors: int, columns: int) -> LaunchConfig:
        return self._configs.of_pooled(ids, vectors, columns) if self._is_pooled else self._configs.unpooled

    def _shape(self, shape: bytes, ids: int) -> CallShape:
        """shape: int64 [features, 5]: offset bytes and offsets, bag length, bags or ids that are not pooled,
        is weighted. ids: of all."""
        if (sizes := self._sizes.get(shape)) is None:
            vectors = np.frombuffer(shape, np.int64).reshape(len(self._dims), -1)[:, 3]
            check_size(0, int(vectors.max()))
            sizes = self._sizes[shape] = int(vectors.sum()), int((vectors * self._columns).sum())
        config = self._config(ids, *sizes)
        if (found := self._shapes.get((shape, id(config)))) is None:
            found = self._shapes[shape, id(config)] = self._lay_out(shape, config)
            if len(self._shapes) > _SHAPES:
                (old, _), _ = self._shapes.popitem(last=False)
                self._sizes.pop(old, None)
        return found

    def _lay_out(self, shape: bytes, config: LaunchConfig) -> CallShape:
        of_feature = np.frombuffer(shape, np.int64).reshape(len(self._dims), -1)
        jobs, vectors = self._template.copy(), of_feature[:, 3]
        jobs[:, _OF_SHAPE], jobs[:, JobField.VECTORS] = of_feature[:, : len(_OF_SHAPE)], vectors
        values = vectors * self._dims
        jobs[:, JobField.OUT_AT] = (np.add.accumulate(values) - values) * self._dtype.itemsize
        listed = KernelJobs.of(
            jobs, -(-vectors * self._columns // config.block_columns), JobField.FIRST_PROGRAM
        )
        parts, of_vectors, dims = values.tolist(), (int(values.sum()),), set(self._dims.tolist())
        if len(dims) == 1:
            parts, of_vectors = vectors.tolist(), (int(vectors.sum()), *dims)
        own = None if self._has_maps or self._has_cached else ShapeJobs(listed, _OWN)
        return CallShape(listed, own, config, bool(of_feature[:, 4].any()), of_vectors, parts)

    def _send_packed(
        self,
        bags: int,
        features: int,
        order: tuple[int, ...],
        offset_bytes: int,
        is_plain: bool,
        config: LaunchConfig,
    ) -> tuple[object, object, Jobs]:
        jobs, places = self._template.copy(), np.array(order, np.int64)
        jobs[:, JobField.IDS], jobs[:, JobField.WEIGHTS_AT] = -1, -1 if is_plain else 0
        jobs[:, JobField.VECTORS] = bags
        jobs[:, JobField.OUT_AT] = (np.add.accumulate(self._dims) - self._dims) * self._dtype.itemsize
        jobs[:, JobField.OUT_STEP] = self._dims.sum()
        jobs[self._cached, JobField.LOCATIONS_AT] = 0
        jobs[:, _OFFSETS_AT], jobs[:, _OFFSET_BYTES], jobs[:, _OFFSETS] = (
            places * bags * offset_bytes,
            offset_bytes,
            bags + 1,
        )
        jobs[:, _IS_FIRST], jobs[:, _IS_LAST] = places == 0, places == features - 1
        programs = -(-bags * self._columns // config.block_columns)
        memory, host, (sent,) = send(self._device, [KernelJobs.of(jobs, programs, JobField.FIRST_PROGRAM)])
        return memory, (memory, host) if not self._device.is_capturing() else host, sent

    def _compile_for_overlays(
        self, offsets: torch.Tensor, bags: int, count: int, order: tuple[int, ...]
    ) -> None:
        """Has a first packed call compile what a state of the same tables with overlays takes beside."""
        if not self._has_maps and (True, order) not in self._spreads and not self._device.is_capturing():
            self._spread(True, order)(offsets, bags, count)

    def _spread(self, is_resolve: bool, order: tuple[int, ...]) -> "JobSpreader":
        """Returns the spreader of a kernel before the lookup, for packed calls in this order."""
        if (found := self._spreads.get((is_resolve, order))) is None:
            self._check_not_capturing()
            device, places = self._device, np.array(order, np.int64)
            if is_resolve:
                rows = resolve_rows(self._of_kind, self._every_id.data_ptr())
                block = device.block(RESOLVE_BLOCK)
            else:
                rows, block = probe_rows([self._of_kind[n] for n in self._cached]), device.block(PROBE_BLOCK)
                places = places[self._cached]
            kernel = kernels.spread(is_resolve, kernels.spread_lanes(len(rows)), block)
            found = self._spreads[is_resolve, order] = JobSpreader(rows, kernel, places, block, device)
        return found

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

    def _resolve(self, jobs: Jobs, source: int, target: int) -> None:
        self._launcher.resolve(jobs, self._is_overlaid, source, target, 0, self.unfound.data_ptr())

    def _prefetched(self, staged: StagedLookup, stream: Any) -> Ticket:
        cache, probe = self._launcher.cache, staged.probe
        assert cache is not None and probe is not None, "a table is read through the cache"
        if probe.ids > self._reserved:
            self._reserved = probe.ids
            cache.reserve(probe.ids)
        cache.follow_current_stream(stream)
        ticket = cache.prefetch(probe, staged.base.inputs)
        if ticket.unread:
            raise not_read(np.concatenate([state for _, state in ticket.unread.values()]))
        return ticket
