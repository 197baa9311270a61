"""Says how much memory a model's rows are worth: reads a data set of requests, and predicts how many of its
ids find their row in a cache of each size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tableside.loader.hot.counts import counted_tables
from tableside.loader.segment.header import Header
from tableside.loader.segment.segment import Segment
from tableside.quant.cpu.packed import rows_with_ids
from tableside.quant.row_format import device_row_bytes
from tableside.serving.errors import ServingError
from tableside.serving.evaluation.data import Rows, Shard, data_files, ids_of, plan_shards, read
from tableside.serving.planning.curves import lfu, lru
from tableside.serving.planning.references import Floats, References, Sampler

_SHARD_ROWS = 65536
_SLOT_BYTES = 24  # of a GPU's cache, beside the row (`quant.cache.memory`)
_HOT_BYTES = 12  # of a hot segment, beside the row: its id and what finds it
_STEPS = 9  # sizes that are looked at, each twice the one before, up to all rows
_GAIN = 0.01  # of the ids, that twice the bytes have to gain
GIB = 1 << 30
# Of an id whose row is not in the cache: read in host memory by a GPU, from what twice the slots gain in
# docs/cache.md (gpu_cache_tables.json); read from a disk, 1,000 ids at once (docs/disk.md, disk_rows.json)
MISS_US = {"hbm_budget": 0.003, "host_cache": 9.0}


@dataclass(frozen=True)
class Plan:
    """What was predicted. setting: the one that takes the bytes. rows, ids: of the data; without_row: ids
    that have none. tables: their names. sizes [n]: bytes; lru, lfu [n, tables]: ids that find their row, of
    `references.ids`. chosen: the number of a size. miss_us: of an id that does not. more_lru, more_lfu
    [tables]: as lru, of the chosen size and one GiB."""

    setting: str
    rows: int
    ids: int
    without_row: int
    tables: tuple[str, ...]
    references: References
    sizes: tuple[int, ...]
    lru: Floats
    lfu: Floats
    chosen: int
    more_lru: Floats
    more_lfu: Floats
    miss_us: float

    @property
    def policy(self) -> str:
        """The policy with more hits at the chosen size."""
        if self.setting == "host_cache":
            return "lfu"
        return "lru" if self.lru[self.chosen].sum() > self.lfu[self.chosen].sum() else "lfu"

    @property
    def rate(self) -> float:
        """The share of all ids that find their row at the chosen size."""
        return self.hit_rates(self.lru if self.policy == "lru" else self.lfu)[self.chosen]

    @property
    def rate_of_more(self) -> float:
        """The same with one GiB more."""
        hits = self.more_lru if self.policy == "lru" else self.more_lfu
        return self.hit_rates(hits[np.newaxis])[0]

    @property
    def saved_us(self) -> float:
        """What one GiB more saves, of a thousand ids."""
        return 1000 * (self.rate_of_more - self.rate) * self.miss_us

    def hit_rates(self, hits: Floats) -> list[float]:
        """Returns the share of all ids that find their row, for each size."""
        return (hits.sum(1) / max(1, self.references.ids.sum())).tolist()  # type: ignore[no-any-return]

    def figures(self) -> dict[str, Any]:
        """The output of `--json` (docs/commands.md)."""
        r, best = self.references, self.lru if self.policy == "lru" else self.lfu
        used = np.bincount(r.table, minlength=len(self.tables)) / r.share
        size = np.bincount(r.table, r.bytes, len(self.tables)) / r.share
        return {
            "rows": self.rows,
            "ids": self.ids,
            "ids_without_row": self.without_row,
            "sampled": r.share,
            "setting": self.setting,
            "policy": self.policy,
            "bytes": self.sizes[self.chosen],
            "miss_us": self.miss_us,
            "one_gib_more": {"hit_rate": self.rate_of_more, "saved_us_of_1000_ids": self.saved_us},
            "sizes": [
                {"bytes": at, "lru": of_lru, "lfu": of_lfu}
                for at, of_lru, of_lfu in zip(
                    self.sizes, self.hit_rates(self.lru), self.hit_rates(self.lfu), strict=True
                )
            ],
            "tables": [
                {
                    "name": name,
                    "ids": int(r.ids[n]),
                    "used_rows": round(used[n]),
                    "used_bytes": round(size[n]),
                    "hit_rates": (best[:, n] / max(1, r.ids[n])).tolist(),
                }
                for n, name in enumerate(self.tables)
            ],
        }


def plan(
    segment: Segment,
    data: Path,
    *,
    batch_rows: int,
    most_rows: int,
    sizes: Sequence[int] | None = None,
    hit_rate: float | None = None,
    miss_us: float | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Plan:
    """Predicts for a version with its changes. Of a version on a disk it plans `host_cache`, for its tables
    that are read from there, else a GPU's cache. batch_rows: rows of the data that are looked up together.
    most_rows: rows that are sampled. sizes: bytes; None: up to all rows. hit_rate: of the chosen size; None:
    where more gains little. miss_us: of an id that misses; None: as measured (`MISS_US`). DataError,
    ServingError: the data is not of the model."""
    stored = {table.name for table in counted_tables(segment.base)}
    is_on_disk = bool(stored)
    tables = {name: table for name, table in segment.tables.items() if not stored or name in stored}
    features = {f.name: f.table for f in segment.header.features if f.table in tables}
    strings = segment.header.string_tables
    columns = {name: _column(segment.header, name) for name in features}
    row_bytes = [
        table.row_bytes + _HOT_BYTES if is_on_disk else device_row_bytes(table.row_bytes) + _SLOT_BYTES
        for table in tables.values()
    ]
    if not features:
        raise ServingError(f"no feature of {segment.header.model} asks for rows that are here to be planned")
    shards = plan_shards(data_files(data), _SHARD_ROWS)
    sampler, ids, without_row = Sampler(row_bytes, most_rows), 0, 0
    total, done = sum(shard.rows for shard in shards), 0
    for batch in _batches(shards, sorted(set(columns.values())), batch_rows):
        with_row = []
        for name, table in tables.items():
            of_it = (columns[feature] for feature, of in features.items() if of == name)
            parts = [ids_of(batch, column, name in strings)[0] for column in of_it]
            asked = np.concatenate([np.empty(0, np.int64), *parts])
            has_row = rows_with_ids(table, asked)[0] != 0
            with_row.append(asked[has_row])
            ids, without_row = ids + asked.size, without_row + int((~has_row).sum())
        sampler.add(with_row)
        done += batch.size
        progress(done, total)
    r = sampler.references()
    if not r.ids.sum():
        raise ServingError(f"{data} has no ids of rows in its second half; name more data")
    whole = sum(table.rows * size for table, size in zip(tables.values(), row_bytes, strict=True))
    sizes = sorted(sizes or (max(1, whole >> step) for step in range(_STEPS)))
    of_lru, of_lfu = lru(r, sizes), lfu(r, sizes)
    best = (of_lfu if is_on_disk else np.maximum(of_lru, of_lfu)).sum(1) / r.ids.sum()
    setting = "host_cache" if is_on_disk else "hbm_budget"
    chosen = _chosen(best, hit_rate)
    more = [max(sizes[chosen], min(whole, sizes[chosen] + GIB))]
    found = tuple(sizes), of_lru, of_lfu, chosen, lru(r, more)[0], lfu(r, more)[0]
    cost = MISS_US[setting] if miss_us is None else miss_us
    return Plan(setting, done, ids, without_row, tuple(tables), r, *found, cost)


def _chosen(hit_rates: Floats, wanted: float | None) -> int:
    """Returns the number of the smallest size that is enough; the last one where none is."""
    if wanted is None:
        gains = np.append(hit_rates[1:] - hit_rates[:-1], 0.0)
        return int(np.argmax(gains < _GAIN))
    return int(np.argmax(hit_rates >= wanted)) if hit_rates.max() >= wanted else hit_rates.size - 1


def _batches(shards: Sequence[Shard], columns: Sequence[str], rows: int) -> Iterator[Rows]:
    for shard in shards:
        yield from read(shard, columns, rows)


def _column(header: Header, feature: str) -> str:
    named = dict(header.evaluation.columns) if header.evaluation else {}
    return named.get(feature, (feature,))[0]
