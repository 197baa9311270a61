"""Says how much memory a model's rows are worth: takes requests, of a data set or of running servers, and
predicts how many of their ids find their row in a cache of each size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tableside.loader.hot.counts import disk_tables
from tableside.loader.segment.header import Header
from tableside.loader.segment.segment import Segment
from tableside.quant.contract import Table
from tableside.quant.cpu.packed import rows_with_ids
from tableside.quant.cpu.uses import USE, Uses
from tableside.quant.row_format import device_row_bytes
from tableside.serving.errors import ServingError
from tableside.serving.evaluation.data import Rows, Shard, data_files, ids_of, plan_shards, read
from tableside.serving.planning.curves import HALF_LIFE, Floats, References, Sampler, lfu, lru
from tableside.serving.service.uses import salts_of

_SHARD_ROWS = 65536
_SLOT_BYTES = 24  # of a GPU's cache, beside the row (`quant.cache.memory`)
_SLICES = 4096  # of the time in which live ids are sampled
_STEPS = 9  # sizes that are looked at, each twice the one before, up to all rows
_GAIN = 0.01  # of the ids, that twice the bytes have to gain
GIB = 1 << 30
# Of an id whose row is not in the cache: read in host memory by a GPU, from what twice the slots gain in
# docs/cache.md (gpu_cache_tables.json); read from a disk, 1,000 ids at once (docs/disk.md, disk_rows.json)
MISS_US = {"hbm_budget": 0.003, "host_cache": 9.0}


@dataclass(frozen=True)
class CachePlan:
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


@dataclass(frozen=True)
class Goals:
    """What a plan is for. most_rows: that are sampled. sizes: bytes; None: up to all rows. hit_rate: of the
    chosen size; None: where more gains little. miss_us: of an id that misses; None: as measured (`MISS_US`).
    """

    most_rows: int = 1 << 18
    sizes: Sequence[int] | None = None
    hit_rate: float | None = None
    miss_us: float | None = None


def plan(
    segment: Segment,
    data: Path,
    goals: Goals = Goals(),
    *,
    batch_rows: int,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> CachePlan:
    """Predicts for a version with its changes. Of a version on a disk it plans `host_cache`, for its tables
    that are read from there, else a GPU's cache. batch_rows: rows of the data that are looked up together.
    DataError, ServingError: the data is not of the model."""
    of = _Tables.of(segment)
    strings = segment.header.string_tables
    columns = {name: _column(segment.header, name) for name in of.features}
    shards = plan_shards(data_files(data), _SHARD_ROWS)
    sampler, ids, without_row = Sampler(of.row_bytes, goals.most_rows), 0, 0
    total, done = sum(shard.rows for shard in shards), 0
    for batch in _batches(shards, sorted(set(columns.values())), batch_rows):
        with_row = []
        for name, table in of.tables.items():
            of_it = (columns[feature] for feature, read in of.features.items() if read == name)
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
    return _planned(of, goals, r, (done, ids, without_row))


def plan_live(segment: Segment, samples: Sequence[Uses], seconds: float, goals: Goals) -> CachePlan:
    """As `plan`, of what workers sampled for so many seconds. Uses within a `_SLICES`th of them are one
    batch, and LFU's half life is as many of these as there were in 1,000 requests. ServingError: nothing was
    asked for."""
    of = _Tables.of(segment)
    numbers = {f.name: n for n, f in enumerate(segment.header.features)}
    bits = max((s.bits for s in samples), default=0)
    salts = salts_of([f.table for f in segment.header.features])
    uses = np.concatenate([np.empty(0, USE), *(s.thinned(bits, salts) for s in samples)])
    uses = uses[np.argsort(uses["ms"], kind="stable")]
    slices = uses["ms"].astype(np.int64) * _SLICES // max(1, int(1000 * seconds))
    totals = sum((s.totals for s in samples), np.zeros((len(numbers), 2), np.int64))
    sampler = Sampler(of.row_bytes, goals.most_rows, 2.0**-bits)
    batches, asked, with_row = [], np.zeros((len(of.tables), 2)), np.zeros((len(of.tables), 2))
    for n, (name, table) in enumerate(of.tables.items()):
        of_it = [numbers[feature] for feature, read in of.features.items() if read == name]
        mine = np.isin(uses["feature"], of_it)
        ids, when = uses["id"][mine], slices[mine]
        has_row = rows_with_ids(table, ids)[0] != 0
        rates = [
            has_row[half].mean() if half.any() else 1.0
            for half in (when < _SLICES // 2, when >= _SLICES // 2)
        ]
        asked[n] = totals[of_it].sum(0)
        with_row[n] = asked[n] * rates
        batches.append(np.split(ids[has_row], np.searchsorted(when[has_row], np.arange(1, _SLICES))))
    for batch in zip(*batches, strict=True):
        sampler.add(batch)
    if not (counted := with_row[:, 1].round().astype(np.int64)).sum():
        raise ServingError(
            f"no worker was asked for rows of {segment.header.model} version {segment.header.version} in the "
            f"second half of {seconds:g} s; is it served from this root, by this user, and asked?"
        )
    requests = sum(s.requests for s in samples)
    counts = requests, int(asked.sum()), round(asked.sum() - with_row.sum())
    return _planned(of, goals, sampler.references(counted), counts, HALF_LIFE * _SLICES / requests)


class _Tables(NamedTuple):
    """What is planned: the tables of a version, the features that read them, and the bytes that a row of each
    takes in the cache."""

    setting: str
    tables: dict[str, Table]
    features: dict[str, str]
    row_bytes: list[int]

    @classmethod
    def of(cls, segment: Segment) -> "_Tables":
        stored = {table.name for table in disk_tables(segment.base)}
        tables = {name: table for name, table in segment.tables.items() if not stored or name in stored}
        features = {f.name: f.table for f in segment.header.features if f.table in tables}
        if not features:
            raise ServingError(
                f"no feature of {segment.header.model} asks for rows that are here to be planned"
            )
        row_bytes = [
            table.row_bytes if stored else device_row_bytes(table.row_bytes) + _SLOT_BYTES
            for table in tables.values()
        ]
        return cls("host_cache" if stored else "hbm_budget", tables, features, row_bytes)


def _planned(
    of: _Tables, goals: Goals, r: References, counts: tuple[int, int, int], half_life: float = HALF_LIFE
) -> CachePlan:
    """counts: rows of the data, ids, and those without a row."""
    whole = sum(table.rows * size for table, size in zip(of.tables.values(), of.row_bytes, strict=True))
    sizes = sorted(goals.sizes or (max(1, whole >> step) for step in range(_STEPS)))
    of_lru, of_lfu = lru(r, sizes), lfu(r, sizes, half_life)
    best = (of_lfu if of.setting == "host_cache" else np.maximum(of_lru, of_lfu)).sum(1) / r.ids.sum()
    chosen = _chosen(best, goals.hit_rate)
    more = [max(sizes[chosen], min(whole, sizes[chosen] + GIB))]
    cost = MISS_US[of.setting] if goals.miss_us is None else goals.miss_us
    return CachePlan(
        of.setting,
        *counts,
        tables=tuple(of.tables),
        references=r,
        sizes=tuple(sizes),
        lru=of_lru,
        lfu=of_lfu,
        chosen=chosen,
        more_lru=lru(r, more)[0],
        more_lfu=lfu(r, more, half_life)[0],
        miss_us=cost,
    )


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
