"""The header of a segment: its tables, features and scorer, and their places in the file.

It is JSON with a checksum. `header_checks` checks the values, since anyone can write a valid checksum."""

import json
import struct
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import xxhash

from tableside.loader.model.specs import EvalSpec, FeatureSpec
from tableside.loader.segment.remote import RemoteTable
from tableside.loader.segment.stored import StoredIds, StoredIndex, StoredRows, StoredTable

MAGIC, FORMAT_VERSION = b"TABLSIDE", 13
PRELUDE = struct.Struct("<8sIIQQ32x")
TABLE_ALIGNMENT_BYTES = FILE_HEAD_BYTES = 4096
LARGEST_FILE_BYTES = 1 << 42  # of a table


@dataclass(frozen=True)
class ScorerInput:
    """A scorer's input, fp32 [batch, width]: the pooled vectors of `feature`; None: a dense tensor."""

    name: str
    feature: str | None
    width: int


@dataclass(frozen=True)
class StoredScorer:
    """How a version scores: "dot", "cosine", or "program", an archive in the file (checksum: xxh3-64)."""

    kind: str
    inputs: tuple[ScorerInput, ...]
    offset: int = 0
    bytes: int = 0
    checksum: int = 0


@dataclass(frozen=True)
class Owner:
    """The share in a segment: that of owner `number` of `owners`, cut from a version of `model`."""

    model: str
    version: int
    number: int
    owners: int


@dataclass(frozen=True)
class Change:
    """Metadata of a delta. sequence: its number, unique in the model. below: sequence of the delta under it;
    0: none. changed: rows of the last batch. positions: stream -> position after the last change. made_at,
    applied_at: time.time() of the batch's oldest change (0: unknown) and of its publication. mark: of all
    changes since the load, of a model over several hosts (loader.deltas.hosts); 0: unknown. after: where it
    has a mark, the sequence of the state that it was applied over; 0: the loaded version."""

    sequence: int
    below: int = 0
    changed: int = 0
    positions: dict[str, str] = field(default_factory=dict)
    made_at: float = 0.0
    applied_at: float = 0.0
    mark: int = 0
    after: int = 0


@dataclass(frozen=True)
class TableFile:
    """The file of a large table: rows, then id index, behind FILE_HEAD_BYTES of its own. It is mapped behind
    the segment at `offset`. bytes: a multiple of the page; checksum: xxh3-64 of its chunks' checksums.
    sums_at: where the checksums of its blocks are mapped (loader.segment.blocks), sums: xxh3-64 of these, and
    seed: theirs; 0: it has none. A file of format 5 has no seed, and checksums of other blocks, which nothing
    reads any more."""

    table: str
    offset: int
    bytes: int
    checksum: int
    sums_at: int = 0
    sums: int = 0
    seed: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.bytes

    @property
    def sums_in_file(self) -> int:
        """Byte of the file at which its block checksums begin; 0: it has none."""
        return self.sums_at and self.sums_at - self.offset


@dataclass(frozen=True)
class Header:
    """Metadata of a version. files: of large tables, one behind the other. source: checkpoint paths, files,
    model.toml digest; load: seconds and source_bytes. owner: None for a whole version. delta: set in a delta
    over `version`, which has no features. merged: the last delta compacted into it. remote: tables whose rows
    other hosts have, or Redis. origin: `Segment.content` of the loaded version that was compacted to this
    one, of a model over several hosts; 0: this is a loaded one. disk_timeout_s: for which requests wait for
    rows; 0: as the server says."""

    model: str
    version: int
    created: str
    tables: tuple[StoredTable, ...]
    features: tuple[FeatureSpec, ...]
    source: dict[str, Any] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
    scorer: StoredScorer | None = None
    evaluation: EvalSpec | None = None
    owner: Owner | None = None
    delta: Change | None = None
    merged: Change | None = None
    files: tuple[TableFile, ...] = ()
    remote: tuple[RemoteTable, ...] = ()
    origin: int = 0
    disk_timeout_s: float = 0

    def to_json(self) -> bytes:
        raw = asdict(self)
        for file in raw["files"]:
            if not file["sums_at"]:
                del file["sums_at"], file["sums"]
            _drop_empty(file, "seed")
        for name in ("delta", "merged"):
            if raw[name] is not None and not raw[name]["mark"]:
                del raw[name]["mark"], raw[name]["after"]
        _drop_empty(raw, "scorer", "evaluation", "owner", "delta", "merged")
        _drop_empty(raw, "files", "remote", "origin", "disk_timeout_s")
        for table in raw.get("remote", ()):
            _drop_empty(table, "strings", "redis")
            _drop_empty(table.get("redis"), "service")
        for table in raw["tables"]:
            if (ids := table["ids"]) is None:
                del table["ids"]
                continue
            _drop_empty(ids, "deleted", "strings", "ttl_s", "max_rows", "expired", "evicted")
            _drop_empty(ids["index"], "filter_words", "marked", "has_times", "numbered")
        return json.dumps(raw, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Header":
        raw = json.loads(text)
        raw["tables"] = tuple(_table_from(t) for t in raw["tables"])
        if (owner := raw.get("owner")) is not None:
            raw["owner"] = Owner(**owner)
        for name in ("delta", "merged"):
            if raw.get(name) is not None:
                raw[name] = Change(**raw[name])
        raw["files"] = tuple(TableFile(**f) for f in raw.get("files", ()))
        raw["remote"] = tuple(RemoteTable.from_json(t) for t in raw.get("remote", ()))
        raw["features"] = tuple(FeatureSpec(**f) for f in raw["features"])
        if (scorer := raw.get("scorer")) is not None:
            inputs = tuple(ScorerInput(**i) for i in scorer["inputs"])
            raw["scorer"] = StoredScorer(**{**scorer, "inputs": inputs})
        if (evaluation := raw.get("evaluation")) is not None:
            columns = tuple((name, tuple(columns)) for name, columns in evaluation["columns"])
            raw["evaluation"] = EvalSpec(evaluation["label"], columns)
        return cls(**raw)

    def row_timeout_s(self, most_s: float) -> float:
        """Returns how long a request waits for rows that are not here, where a server says `most_s`."""
        return min(self.disk_timeout_s or most_s, most_s)

    @property
    def indexes(self) -> tuple[StoredIndex, ...]:
        return tuple(t.index for t in self.tables if t.index is not None)

    @property
    def stored(self) -> tuple[StoredRows, ...]:
        """Returns all rows with checksums, in order: tables, then their indexes."""
        return (*self.tables, *self.indexes)

    def stored_in(self, file: TableFile | None) -> tuple[StoredRows, ...]:
        """Returns what lies in the file of a table, or in the segment."""
        if file is not None:
            return tuple(s for s in self.stored if file.offset <= s.offset < file.end)
        end = self.files[0].offset if self.files else None
        return tuple(s for s in self.stored if end is None or s.offset < end)

    @property
    def chunks(self) -> int:
        return sum(s.chunks for s in self.stored)

    @property
    def format_version(self) -> int:
        """Returns the oldest format that holds the header, so that earlier releases read it."""
        if any(index.numbered for index in self.indexes):
            return 13
        if any(t.has_times for t in self.tables):
            return 12
        if self.string_tables:
            return 11
        if any(table.redis for table in self.remote):
            return 10
        if self.disk_timeout_s:
            return 9
        if any(file.seed for file in self.files):
            return 8
        if any(change is not None and change.mark for change in (self.delta, self.merged)):
            return 7
        if self.remote:
            return 6
        if self.files:
            return 5 if any(file.sums_at for file in self.files) else 4
        if self.delta is not None or self.merged is not None:
            return 3
        return 1 if self.owner is None and all(t.ids is None for t in self.tables) else 2

    @cached_property
    def string_tables(self) -> frozenset[str]:
        """Returns the tables whose ids are strings."""
        kinds = {t.name: t.id_kind for t in self.tables} | {r.name: r.id_kind for r in self.remote}
        return frozenset(name for name, kind in kinds.items() if kind == "string")

    @property
    def is_over_hosts(self) -> bool:
        """Whether other hosts have parts of the model."""
        return self.owner is not None or bool(self.owned)

    @property
    def owned(self) -> tuple[RemoteTable, ...]:
        """Returns the tables whose rows other hosts have; those of others in `remote` are in Redis."""
        return tuple(table for table in self.remote if table.redis is None)

    @property
    def table_bytes(self) -> int:
        """Returns the bytes of all rows, without header and padding."""
        return sum(t.bytes for t in self.tables)

    @property
    def fp32_bytes(self) -> int:
        """Returns the bytes of the tables in fp32."""
        return sum(4 * t.id_count * t.dim for t in self.tables)


def _drop_empty(raw: dict[str, Any] | None, *names: str) -> None:
    """Leaves values out that say nothing: a version without one reads as it always did."""
    for name in names:
        if raw is not None and not raw[name]:
            del raw[name]


def _table_from(raw: dict[str, Any]) -> StoredTable:
    if (ids := raw.get("ids")) is not None:
        index = ids.get("index")
        raw = {**raw, "ids": StoredIds(**{**ids, "index": index if index is None else StoredIndex(**index)})}
    return StoredTable(**raw)


def align(n: int, to: int = TABLE_ALIGNMENT_BYTES) -> int:
    """Rounds up to a multiple of `to`."""
    return -(-n // to) * to


def checksum(data: Any) -> int:
    """Returns the xxh3-64 of a buffer."""
    return xxhash.xxh3_64_intdigest(data)
