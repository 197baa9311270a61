"""Layouts of recurring lookups by a C routine; Python takes 10 µs a lookup."""

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tableside.quant.cache.jobs import PROBE_BLOCK, CachedLookup
from tableside.quant.cache.kernels.state import ProbeField
from tableside.quant.contract import Lookup, LookupKind, Place, Pooling, lookup_at, places_in
from tableside.quant.cpu import _native
from tableside.quant.device.device import Device
from tableside.quant.errors import MissingBackend
from tableside.quant.gpu.batch.layout import Jobs, Layout, columns
from tableside.quant.gpu.batch.moves import Move
from tableside.quant.gpu.batch.resolve import RESOLVE_BLOCK, ResolvedLookup
from tableside.quant.gpu.kernels.job import FIELDS, JobField, ResolveField
from tableside.quant.gpu.kernels.launch_config import LaunchConfig, LaunchConfigs, NativeLayout, shared_launch
from tableside.quant.gpu.kernels.wanted import KernelKey
from tableside.quant.gpu.residence.tables import DeviceTable, on_device


class SteadyKind(NamedTuple):
    """The request-independent part of a lookup as `_native.lay_out` takes it, named as in JobField."""

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


_MEASURED = struct.Struct(
    f"<{len(_native.MEASURED_FIELDS)}q"
)  # sizes before the places, named as in `Layout`
_FIELDS = {
    "GPU_KIND_FIELDS": SteadyKind._fields,
    "MOVE_FIELDS": Move._fields,
    "BASE_FIELDS": ("inputs", "outputs", "scratch", "locations"),
    **{
        name: tuple(f.name.lower() for f in fields)
        for name, fields in (
            ("JOB_FIELDS", JobField),
            ("PROBE_FIELDS", ProbeField),
            ("RESOLVE_FIELDS", ResolveField),
        )
    },
}  # that both sides write and read


def steady_kind(kind: LookupKind, table: DeviceTable) -> SteadyKind:
    """Returns the device's view of a kind."""
    residence = table.residence
    return SteadyKind(
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


class SteadyLayouts:
    """Lays out lookups of fixed kinds by a C routine, if the device needs only their ids. gather_from: of
    `lay_out`."""

    def __init__(
        self, kinds: Sequence[LookupKind], configs: LaunchConfigs, device: Device, gather_from: int
    ) -> None:
        if any(
            getattr(_native, name) != fields for name, fields in _FIELDS.items()
        ):  # of other sources: it would read other fields
            raise MissingBackend(
                "the native kernel was built from other sources than these; reinstall tableside"
            )
        tables = [on_device(kind.table) for kind in kinds]
        self._kinds, self._configs, self._gather_from = tuple(kinds), configs, gather_from
        self._blocks = device.block(PROBE_BLOCK), device.block(RESOLVE_BLOCK)
        self._key, self._are_overlaid = KernelKey(), [table.is_overlaid for table in tables]
        self._is_overlaid = any(self._are_overlaid)
        for table in tables:
            self._key |= table.key
        every = (configs.long, configs.short, configs.few, configs.unpooled)
        self._shared = {
            id(config): shared_launch(self._key, config) for config in every
        }  # hashing takes longer than the rest
        rows = [steady_kind(kind, table) for kind, table in zip(kinds, tables, strict=True)]
        self._rows = np.array(rows, np.int64).tobytes()

    def lookups(self, places: Any) -> list[Lookup]:
        """The lookups at these places."""
        return [lookup_at(self._kinds, place) for place in places_in(places)]

    def lay_out(self, places: Any, out_bytes: int) -> "SteadyLayout | None":
        """Returns the layout at these places; None: `lay_out` must do it, where the CPU gathers rows or looks
        them up, or for errors. out_bytes: as there."""
        *sizes, gathered = _native.totals(self._rows, places)
        if gathered >= self._gather_from:
            return None
        config = self._configs.of_pooled(*sizes)
        blocks = config.block_columns, self._configs.unpooled.block_columns, *self._blocks
        measured = _native.measure(self._rows, places, out_bytes, *blocks)
        if measured is None:
            return None
        shared = self._shared[id(config)], self._shared[id(self._configs.unpooled)]
        return SteadyLayout(self, config, NativeLayout(self._rows, measured, *shared, self._is_overlaid))

    def for_python(self, places: bytes, config: LaunchConfig) -> dict[str, Any]:
        """Returns the fields of `Layout` that C does without, of lookups that were measured with this
        configuration."""
        found = _native.lay_out(
            self._rows, places, config.block_columns, self._configs.unpooled.block_columns
        )
        assert found is not None, "they were measured"
        moves_in, moves_out, resolved, cached, pooled, unpooled = found
        kinds = np.frombuffer(places, np.int64)[:: len(Place._fields)]
        return {
            "jobs": (_jobs(True, config, *pooled), _jobs(False, self._configs.unpooled, *unpooled)),
            "moves_in": moves_in,
            "moves_out": moves_out,
            "resolved": tuple(
                ResolvedLookup(number, row_map, ids_at, ids, found_at, self._are_overlaid[kinds[number]])
                for number, row_map, ids_at, ids, found_at in np.frombuffer(resolved, np.int64)
                .reshape(-1, 5)
                .tolist()
            ),
            "cached": np.frombuffer(cached, np.int64).reshape(-1, len(CachedLookup._fields)),
        }

    def all_found(self, places: bytes) -> tuple[tuple[int, int], ...]:
        """Returns (at, bytes) of the masks for tables with every id."""
        every = (lk for lk in self.lookups(places) if on_device(lk.table).device_map is None)
        return tuple((lk.found_at, lk.ids) for lk in every if lk.found_at is not None)


_MADE_LATER = ("jobs", "moves_in", "moves_out", "resolved", "cached")  # fields of a SteadyLayout


class SteadyLayout(Layout):
    """A measured layout. Makes jobs and moves for Python on demand; a batch of such layouts needs neither."""

    _layouts: SteadyLayouts
    _config: LaunchConfig

    def __init__(self, layouts: SteadyLayouts, config: LaunchConfig, native: NativeLayout) -> None:
        sizes = _MEASURED.unpack_from(native.measured)
        found = dict(zip(_native.MEASURED_FIELDS, sizes, strict=True))
        places = native.measured[_MEASURED.size :]
        self.__dict__.update(
            _layouts=layouts,
            _config=config,
            native=native,
            lookups=partial(layouts.lookups, places),
            key=native.pooled.key,
            gathers=(),
            host=None,
            host_lookups=(),
            all_found=layouts.all_found(places) if found["all_found"] else (),
            in_bytes=found["in_bytes"],
            rows_bytes=0,
            out_bytes=found["out_bytes"],
            scratch=found["scratch"],
            asked_bytes=found["asked_bytes"],
            is_direct=bool(found["is_direct"]),
            job_count=found["pooled_jobs"] + found["unpooled_jobs"],
            cached_ids=found["cached_ids"],
        )

    def __getattr__(self, name: str) -> Any:
        """Makes what is missing, when Python first asks for any of it."""
        if name not in _MADE_LATER:
            raise AttributeError(name)
        assert self.native is not None
        places = self.native.measured[_MEASURED.size :]
        self.__dict__.update(self._layouts.for_python(places, self._config))
        return self.__dict__[name]


def _jobs(
    pooled: bool,
    config: LaunchConfig,
    rows: bytes,
    is_offset: bytes,
    job_of_program: bytes,
    has_lengths: int,
    is_weighted: int,
    is_indirect: int,
) -> Jobs:
    return Jobs(
        pooled,
        config,
        np.frombuffer(rows, np.int64).reshape(-1, FIELDS),
        np.frombuffer(is_offset, np.int64).reshape(-1, FIELDS),
        np.frombuffer(job_of_program, np.int32),
        bool(has_lengths),
        bool(is_weighted),
        bool(is_indirect),
    )
