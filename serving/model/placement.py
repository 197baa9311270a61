"""Places a worker's tables: in its GPU's memory, in the segment for the GPU to read, or with the CPU."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tableside.loader.hot.counts import disk_tables
from tableside.loader.segment.blocks import BlockReader
from tableside.loader.segment.numa import node_of
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredTable
from tableside.quant import CpuBackend, MissingBackend, QuantError, RowSource
from tableside.quant.contract import INTERPRETER
from tableside.quant.cpu.backend import host_table
from tableside.quant.gpu.residence.registry import (
    ELSEWHERE,
    KINDS,
    read_from_disk,
    residence,
    without_device,
)
from tableside.quant.rows.fetched import AskedTable, FetchedTable, RowReader
from tableside.serving.cluster.owners import remote_sources
from tableside.serving.errors import ServingError
from tableside.serving.model.compiled_kernels import are_compiled, compile_ahead, kernels_of_server
from tableside.serving.model.disk_tables import DiskTables
from tableside.serving.model.placements import Placements, files_of, residences_in, size_of
from tableside.serving.settings import ServerSettings

if TYPE_CHECKING:
    import torch

    from tableside.quant.cache.cache import Cache
    from tableside.quant.cache.settings import CacheSettings
    from tableside.quant.gpu.backend import GpuBackend
    from tableside.quant.gpu.residence.layers import DeviceLayer
    from tableside.quant.gpu.residence.memory import InHost
    from tableside.quant.gpu.residence.residence import Maker, Residence, Room, TableSize
    from tableside.quant.gpu.residence.tables import DeviceTable

logger = logging.getLogger("tableside")

_WIDE_BYTES = 4 << 30  # of tables, from which the CPU gathers faster than the GPU reads
_MOST_GATHERERS = 8  # more gain little, and take cores from other work
_GROWTH = 4  # a cache leaves room for the id indexes of a next version that has a quarter more ids
_DEFAULT_FRACTION = 0.4  # of a GPU's memory; two versions are held while one is replaced


class Placer:
    """Places versions' tables for one worker. gpu None: all stay with the CPU. stashable: hbm tables can be
    given back for a while (`GpuBackend.stash`). ahead: batches whose rows a cache prefetches. on_disk: beside
    a GPU the CPU may look up tables on a disk, and on other hosts. count_reads: is given what reads rows from
    a disk, the model and the table. count_remote: takes the counts of `RemoteTables`, behind the model.
    count_sample: takes those of samples of ids for tables in Redis, behind the model and the table."""

    def __init__(
        self,
        settings: ServerSettings,
        cpu: CpuBackend,
        *,
        stashable: bool = False,
        ahead: int = 0,
        on_disk: bool = True,
        count_reads: Callable[[BlockReader, str, str], object] = lambda reader, model, table: None,
        count_remote: Callable[..., object] = lambda model, outcome, rows: None,
        count_sample: Callable[..., object] = lambda model, table, ids, hot: None,
    ) -> None:
        self.gpu: GpuBackend | None = None
        self._stashable, self._ahead, self._on_disk = stashable, ahead, on_disk
        self._count_remote, self._count_sample = count_remote, count_sample
        self._settings, self.cpu = settings, cpu
        self.disk = DiskTables(settings, count_reads)
        self._budget = self._held = 0
        self._lock = threading.Lock()
        self._bases: weakref.WeakKeyDictionary[Segment, weakref.ref[Placements]] = weakref.WeakKeyDictionary()
        self._layers: weakref.WeakSet[DeviceLayer] = weakref.WeakSet()  # that `_held` has

    def open(self) -> None:
        """Takes the device of the settings. MissingBackend: it is not here."""
        if not self._settings.devices:
            return
        (device,) = self._settings.devices  # the supervisor gave each worker one
        name = device if device == INTERPRETER else f"cuda:{device}"
        try:
            from tableside.quant.gpu.backend import GpuBackend

            self.gpu = GpuBackend(name, self.cpu, threads=self._settings.threads)
        except MissingBackend as error:
            raise MissingBackend(f"{error}; or serve without --devices") from error
        default = int(self.gpu.device.memory_bytes * _DEFAULT_FRACTION / self._settings.sharing)
        self._budget = default if self._settings.hbm_budget is None else self._settings.hbm_budget

    @property
    def node(self) -> int | None:
        """Returns the NUMA node of the device, or of this process's cores; None: unknown, or several."""
        return node_of(None if self.gpu is None else self.gpu.device.pci_address)

    @property
    def torch_device(self) -> str:
        return "cpu" if self.gpu is None else str(self.gpu.device)

    @property
    def cache(self) -> "Cache | None":
        """The worker's cache, once a table needed one."""
        return None if self.gpu is None else self.gpu.cache

    def kinds(self, segment: Segment, replaced: Placements | None = None) -> Mapping[str, str]:
        """Returns the kind of residence that each table would have now. ServingError: the budget does not
        hold them."""
        stored = {table.name for table in disk_tables(segment.base)}
        if self.gpu is None:
            placement = self._settings.placement
            return {name: without_device(placement, name in stored) for name in segment.tables}
        with self._lock, _budgeted():
            return self._chosen(self.gpu, segment, self._left(replaced))

    def _chosen(
        self, gpu: "GpuBackend", segment: Segment, left: int, stay: Collection[str] = ()
    ) -> dict[str, str]:
        from tableside.quant.gpu.residence import plan

        may_stay = {t.name for t in disk_tables(segment.base)} if self._on_disk else set()
        sizes = [size_of(t)._replace(is_stored=t.name in may_stay) for t in segment.header.tables]
        kinds = plan.choose(sizes, self._settings.placement, left, gpu.launcher, stay)
        plan.check_padding(sizes, kinds)  # before a cache takes the budget
        return kinds

    def _left(self, replaced: Placements | None) -> int:
        return max(0, self._budget - self._held + (replaced.hbm_bytes if replaced else 0))

    def place(
        self, segment: Segment, replaced: Placements | None = None, stay: Collection[str] = ()
    ) -> Placements:
        """Places a segment's tables within the free budget. replaced: the version that goes; its cached rows
        are kept (`Placements.take_over`), changed hot rows fetched. stay: tables that stay on their disk,
        whatever the budget is now. A state of a placed version takes only new deltas. RegistrationError,
        ServingError: CUDA, the GPU's memory or the budget does not allow it."""
        if (gpu := self.gpu) is None:
            return self._place_on_host(segment, self.kinds(segment))
        if segment.header.remote and not self._on_disk:
            what = f"rows of {segment.header.model} version {segment.header.version} lie on other hosts"
            raise ServingError(f"{what}, or in Redis, and the CPU asks for them; leave the device out")
        known = self._bases.get(segment.base)
        if (base := None if known is None else known()) is None:
            base = self._place_version(gpu, segment.base, replaced, stay)
            self._bases[segment.base] = weakref.ref(base)
            if replaced is not None:
                self._warm(base, replaced.base)
        placed = self._place_deltas(gpu, segment, base, replaced) if segment.deltas else base
        number = self.disk.hot.newest(segment.base)
        return self._beside_remote(segment, self._under_hot(segment, placed, number), number)

    def _place_on_host(self, segment: Segment, kinds: Mapping[str, str]) -> Placements:
        readers = self.disk.readers(segment, kinds)
        number = self.disk.hot.newest(segment.base)
        tables = self.disk.hot.over(segment, readers, number)
        on_host: dict[str, RowSource] = {
            name: residence(kind).without_device(readers.get(name)).source(tables[name])
            for name, kind in kinds.items()
        }
        remote = self._remote(segment, number)
        on_host |= remote
        kinds = {**kinds, **dict.fromkeys(remote, ELSEWHERE)}
        notes = [*(one.note for one in readers.values()), *(one.note for one in remote.values())]
        is_counted = any(note is not None for note in notes)
        return Placements(kinds, on_host=on_host, hot=number, is_counted=is_counted)

    def _remote(self, segment: Segment, number: int) -> dict[str, AskedTable]:
        """Returns a state's tables whose rows other hosts have, or Redis, by name. number: of the hot
        segment."""
        if not segment.header.remote:
            return {}
        model = segment.header.model
        tables = remote_sources(segment, self._settings, partial(self._count_remote, model))
        return self.disk.hot.over_asked(segment.base, tables, number, partial(self._count_sample, model))

    def _beside_remote(self, segment: Segment, placed: Placements, number: int) -> Placements:
        """The same with the tables whose rows the CPU asks for. number: of the hot segment."""
        from tableside.quant.gpu.residence.tables import looked_up_by_cpu

        if not (remote := self._remote(segment, number)):
            return placed
        tables = {**placed.on_gpu, **{name: looked_up_by_cpu(asked) for name, asked in remote.items()}}
        kinds = {**placed.placements, **dict.fromkeys(remote, ELSEWHERE)}
        is_counted = placed.is_counted or any(asked.note is not None for asked in remote.values())
        return placed.with_tables(tables, kinds, hot=number, is_counted=is_counted)

    def _under_hot(self, segment: Segment, placed: Placements, number: int) -> Placements:
        """The same with the tables that are read from a disk under the hot segment with this number."""
        if not (stored := read_from_disk(placed.placements)):
            return placed
        hot = self.disk.hot.over(segment, stored, number)
        # a device finds changes before rows are missing
        base = self.disk.hot.over(segment.base, stored, number)
        tables, is_counted = dict(placed.on_gpu), False
        for name in stored:
            held = tables[name].residence
            source = held.source((base if held.is_on_device else hot)[name])
            if held.is_on_device:
                held.read_from(source)
            else:
                tables[name] = replace(tables[name], host=source)
            is_counted |= isinstance(source, FetchedTable) and source.reader.note is not None
        return placed.with_tables(tables, hot=number, is_counted=is_counted)

    def has_hotter(self, segment: Segment, placed: Placements) -> bool:
        """Returns whether another hot segment is there than the one that a placed state reads, or other
        counts than those that it adds to."""
        base, hot = segment.base, self.disk.hot
        return placed.is_counted and (hot.newest(base) != placed.hot or not hot.are_counted(base))

    def _place_deltas(
        self, gpu: "GpuBackend", segment: Segment, base: Placements, replaced: Placements | None
    ) -> Placements:
        from tableside.serving.model.placed_deltas import going_bytes, with_deltas

        with self._lock, _budgeted():
            going = 0 if replaced is None else going_bytes(replaced.on_gpu, segment)
            if replaced is not None and replaced.base is not base:
                going += replaced.base.hbm_bytes
            tables = with_deltas(gpu, segment, base.on_gpu, max(0, self._budget - self._held + going))
            layers = {layer for table in tables.values() for layer in table.layers}
            for layer in layers - set(self._layers):
                self._layers.add(layer)
                self._held += layer.bytes
                weakref.finalize(layer, self._release, layer.bytes)
        taken = sum(layer.bytes for layer in layers)
        return base.with_tables(tables, hbm_bytes=base.hbm_bytes + taken)

    def _place_version(
        self, gpu: "GpuBackend", segment: Segment, replaced: Placements | None, stay: Collection[str]
    ) -> Placements:
        from tableside.quant.gpu.residence import plan

        gpu.device.trim()
        sizes, home = list(map(size_of, segment.header.tables)), gpu.launcher
        with self._lock, _budgeted():  # one version after another: each sees what those before it took
            left = self._left(replaced)
            kinds = self._chosen(gpu, segment, left, stay)
            in_host, indexes = plan.plan_indexes(sizes, kinds, left, home, replaced is not None)
            files = files_of(segment)
            readers = self.disk.readers(segment, kinds)
            room = self._room(gpu, segment, left, indexes, residences_in(replaced, files), readers)
            makers, hbm_bytes = self._makers(sizes, kinds, room, indexes)
            tables = self._tables(gpu, segment, kinds, makers, in_host)
            placed = Placements(kinds, on_gpu=tables, hbm_bytes=hbm_bytes, files=files)
            self._held += hbm_bytes
        weakref.finalize(placed, self._release, hbm_bytes)
        return placed

    def _makers(
        self, sizes: "Sequence[TableSize]", kinds: Mapping[str, str], room: "Room", indexes: int
    ) -> "tuple[dict[str, Maker], int]":
        """Returns what makes each table's residence, and the HBM of all with their indexes. Each kind plans
        with what those before it left."""
        makers: dict[str, Maker] = {}
        taken = indexes
        for made_by in dict.fromkeys(map(residence, KINDS)):
            if of_kind := [t for t in sizes if residence(kinds[t.name]) is made_by]:
                planned = made_by.plan(of_kind, room._replace(budget=room.budget - taken))
                taken += planned.bytes
                self._held += planned.kept_bytes
                makers |= {t.name: planned.make for t in of_kind}
        return makers, taken

    def _room(
        self,
        gpu: "GpuBackend",
        segment: Segment,
        left: int,
        indexes: int,
        same: "Mapping[str, Residence]",
        readers: Mapping[str, RowReader],
    ) -> "Room":
        from tableside.quant.gpu.residence.plan import without_deltas
        from tableside.quant.gpu.residence.residence import Room

        return Room(
            home=gpu.launcher,
            budget=without_deltas(left),
            growth=indexes // _GROWTH,
            is_stashable=self._stashable,
            same=same,
            open_cache=gpu.open_cache,
            cache_settings=self._cache_settings,
            label=f"{segment.header.model}/",
            readers=readers,
        )

    def compile(self, segment: Segment) -> None:
        """Compiles the kernels for the segment on this worker's GPU, unless some process did or does."""
        if self.gpu is not None:
            if are_compiled(self._settings):
                compile_ahead(kernels_of_server(self._settings, segment), self.gpu.device.architecture)
            self.gpu.launcher.warm_up_overlays()  # for the first delta, which comes while requests run

    def _warm(self, placed: Placements, replaced: Placements) -> None:
        """Plans to keep unchanged cached rows, and fetches the changed ones of the hotter half."""
        from tableside.quant.unchanged import successors

        for name, table in placed.on_gpu.items():
            if (before := replaced.on_gpu.get(name)) is None or not (hot := before.residence.hot()).size:
                continue
            rows, is_same = successors(host_table(before.host), host_table(table.host), hot)
            placed.handovers.append(
                partial(table.residence.take_over, before.residence, hot[is_same], rows[is_same])
            )
            half = (hot.size + 1) // 2
            fetched = rows[:half][(rows[:half] >= 0) & ~is_same[:half]]
            table.residence.warm(fetched)
            counts = (is_same.sum(), fetched.size)
            logger.info("table %s: %d rows of the cache are kept, %d are fetched anew", name, *counts)
        if self.cache is not None:
            self.cache.statistics(wait=True)  # a version that is dropped now must not be read any more

    def _cache_settings(self, cached_bytes: int) -> "CacheSettings":
        """Returns the settings of a cache over `cached_bytes` of tables."""
        from tableside.quant.cache.settings import CacheSettings, Policy

        return CacheSettings(
            Policy(self._settings.cache_policy),
            staging_buffers=1 + self._ahead,
            gather_threads=self._gatherers(cached_bytes),
            replays=True,
        )

    def _gatherers(self, cached_bytes: int) -> int:
        """Returns the CPU threads that gather cache misses; 0: the GPU reads them."""
        if self._settings.gather_threads is not None:
            return self._settings.gather_threads
        if cached_bytes < _WIDE_BYTES:
            return 0
        spare = len(os.sched_getaffinity(0)) - self._settings.workers  # doors keep a core each
        return max(1, min(_MOST_GATHERERS, spare // self._settings.engines))

    def _release(self, hbm_bytes: int) -> None:
        self._held -= hbm_bytes

    def _tables(
        self,
        gpu: "GpuBackend",
        segment: Segment,
        kinds: Mapping[str, str],
        makers: "Mapping[str, Maker]",
        in_host: "Mapping[str, InHost]",
    ) -> "dict[str, DeviceTable]":
        from tableside.quant.gpu.kernels.wanted import KernelKey
        from tableside.quant.gpu.residence.memory import InHost

        for name in (name for name, part in in_host.items() if part is InHost.ALL):
            logger.warning("the id index of table %s is read in host memory (--hbm-budget)", name)
        view = self._registered(gpu, segment, kinds)
        on_device = [n for n, kind in kinds.items() if residence(kind).is_on_device]
        key = KernelKey.of(*(segment.tables[name] for name in on_device))
        tables: dict[str, DeviceTable] = {}
        for stored in segment.header.tables:
            name, table = stored.name, segment.tables[stored.name]
            made = makers[name](name, table, view(stored))
            tables[name] = gpu.placed(table, made, key, in_host.get(name, InHost.NOTHING))
        return tables

    def _registered(
        self, gpu: "GpuBackend", segment: Segment, kinds: Mapping[str, str]
    ) -> "Callable[[StoredTable], torch.Tensor | None]":
        """Registers the segment with CUDA if the GPU reads it, without tables that are read from a disk;
        returns a function from a table to its rows there."""
        of_disk = set(read_from_disk(kinds))
        read = (kind for name, kind in kinds.items() if name not in of_disk)
        if gpu.device.reads_all_memory or not any(residence(k).registers(self._stashable) for k in read):
            return lambda stored: None
        from tableside.loader.segment.registration import Registration

        registration = Registration(segment, gpu.device.torch_device, without=of_disk)
        said = (segment.path, registration.size / 1e9, registration.seconds)
        logger.info("%s: %.1f GB registered with CUDA in %.1f s", *said)
        return lambda t: None if t.name in of_disk else registration.view(t.offset, t.bytes)


@contextmanager
def _budgeted() -> Iterator[None]:
    """Says how to change what a plan of the GPU's memory refuses."""
    try:
        yield
    except QuantError as error:
        what = "(--hbm-budget and --placement say what lies in the GPU's memory)"
        raise ServingError(f"{error} {what}") from error
