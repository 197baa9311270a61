"""Tables of raw ids on the GPU backend, wherever their rows and ids lie, and ids that they are asked for."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import tables
import torch
from raw_tables import Known, random_ids, raw_table
from reference import REFERENCE
from tables import values_of

from tableside.quant import RowFormat, RowSource, Table
from tableside.quant.cache.settings import CacheSettings
from tableside.quant.gpu.backend import GpuBackend
from tableside.quant.gpu.residence.memory import InHost

COUNT = 300
IDS = random_ids(COUNT)
STRANGERS = np.array([2, -2, 77, -(2**62), 2**62, 2**63 - 2], np.int64)
DEFAULT = 4.0  # every value of a default row


class Case(NamedTuple):
    """A table of raw ids. padding of int8 rows of 64 values has room for an id, that of fp16 rows of 32
    has none."""

    row_format: RowFormat
    dim: int
    refuses: bool = False
    bucket_ids: int = 0
    owned: tuple[int, int] | None = None


PADDED, ARRAY = Case(RowFormat.INT8, 64), Case(RowFormat.FP16, 32)
CASES = {
    "in padding": PADDED,
    "in an array": ARRAY,
    "refuses": PADDED._replace(refuses=True),
    "chunked": ARRAY._replace(bucket_ids=100),
    "a range of buckets": PADDED._replace(owned=(1, 3)),
    "a range of chunks": PADDED._replace(bucket_ids=100, owned=(2, 3)),
}


@cache
def made(case: Case) -> tuple[Table, Known]:
    """The table, and what it must answer."""
    ids = np.arange(COUNT) * 1_000_003 % 400 if case.bucket_ids else IDS
    values = values_of(COUNT, case.dim)
    missing = None if case.refuses else np.full(case.dim, DEFAULT, np.float32)
    how: dict[str, Any] = {"missing": missing, "backfilled": ids[5:25].tolist()}
    table = raw_table(ids, values, case.row_format, bucket_ids=case.bucket_ids, owned=case.owned, **how)
    assert table.row_map is not None
    is_here = table.row_map.find(ids) >= 0
    assert is_here.all() or case.owned
    return table, Known.of(ids[is_here], values[is_here], case.row_format, missing, ids[5:25].tolist())


def backend_with_cache() -> GpuBackend:
    backend = GpuBackend(tables.DEVICE, REFERENCE)
    backend.open_cache(60_000, 64, CacheSettings(page_bytes=1024))
    return backend


IN_HOST = {"": InHost.NOTHING, "ids in host": InHost.SOME, "index in host": InHost.ALL}


def placed(backend: GpuBackend, table: Table, how: str) -> RowSource:
    """The table where `how` says, and behind a comma what of its index is not copied."""
    rows = None
    if not backend.device.reads_all_memory:
        rows = torch.empty(table.packed.size, dtype=torch.uint8, pin_memory=True)
        rows.numpy()[:] = table.packed.reshape(-1)
    where, _, more = how.partition(", ")
    in_host = IN_HOST[more]
    match where:
        case "hbm":
            return backend.place("hbm", table)
        case "stashable":
            return backend.place("hbm", table, stashable=True)
        case "mapped":
            return backend.place("zero_copy", table, rows, in_host=in_host)
        case "split":
            return backend.place("hybrid", table, rows, share=300, in_host=in_host)
    return backend.place("cached", table, rows, in_host=in_host)


def inputs_of(*arrays: np.ndarray) -> bytes:
    return b"".join(a.tobytes() for a in arrays)


def asked(known: Known, with_strangers: bool, count: int = 60, seed: int = 0) -> np.ndarray:
    """Ids of a table, some of them twice, in any order; among them those that it lacks."""
    rng = np.random.default_rng(seed)
    ids = rng.choice(np.array(list(known.rows), np.int64), count)
    ids = np.concatenate([ids, ids[:3], STRANGERS if with_strangers else ids[:0]])
    return rng.permutation(ids)
