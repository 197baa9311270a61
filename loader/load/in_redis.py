"""The tables of a load whose rows go to Redis."""

from collections.abc import Sequence

import numpy as np

from tableside.loader.load.plan import PlannedTable
from tableside.loader.redis.blocks import new_place
from tableside.loader.redis.keys import write_note
from tableside.loader.segment.remote import RemoteTable
from tableside.loader.versions.versions import Model
from tableside.quant import CpuBackend


def tables_in_redis(
    planned: Sequence[PlannedTable], model: Model, backend: CpuBackend
) -> tuple[RemoteTable, ...]:
    """Gives each table new keys, and notes these in the model's folder before one of them is written."""
    found = []
    for p in planned:
        if (tier := p.spec.redis) is None:
            continue
        t, row_bytes, default = p.spec, p.spec.row_bytes(p.dim), b""
        if p.default_row.is_used:
            packed = np.zeros(row_bytes, np.uint8)
            p.default_row.pack(packed, backend)
            default = packed.tobytes()
        place = new_place(model.name, t.name, tier, row_bytes)
        with model.opened() as folder:
            write_note(folder, place, p.own)
        shape = (t.name, t.key, t.row_format.label, p.dim, row_bytes, p.own, str(t.missing))
        found.append(RemoteTable(*shape, default.hex(), 0, 0, (), redis=place))
    return tuple(found)
