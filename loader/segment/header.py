"""The header of a segment: its tables, features and scorer, and their places in the file.

It is JSON with a checksum. `check_header` also checks the values, since anyone can write a valid checksum."""

import json
import struct
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from tableside.loader.errors import SegmentError
from tableside.loader.model.model import OUTPUTS, EvalSpec, FeatureSpec
from tableside.loader.segment.blocks import sum_bytes
from tableside.loader.segment.remote import RemoteTable, check_remote
from tableside.loader.segment.stored import StoredIds, StoredIndex, StoredRows, StoredTable, check_ids
from tableside.quant import Pooling, QuantError, RowFormat

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
    other hosts have. origin: `Segment.content` of the loaded version that was compacted to this one, of a
    model over several hosts; 0: this is a loaded one."""

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

    def to_json(self) -> bytes:
        raw = asdict(self)
        for file in raw["files"]:
            if not file["sums_at"]:
                del file["sums_at"], file["sums"]
            if not file["seed"]:
                del file["seed"]
        for name in ("delta", "merged"):
            if raw[name] is not None and not raw[name]["mark"]:
                del raw[name]["mark"], raw[name]["after"]
        for name in ("scorer", "evaluation", "owner", "delta", "merged", "files", "remote", "origin"):
            if not raw[name]:
                del raw[name]  # a version without one reads as it always did
        for table in raw["tables"]:
            if (ids := table["ids"]) is None:
                del table["ids"]
                continue
            if not ids["deleted"]:
                del ids["deleted"]
            for name in ("filter_words", "marked"):
                if ids["index"] is not None and not ids["index"][name]:
                    del ids["index"][name]
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

    @property
    def indexes(self) -> tuple[StoredIndex, ...]:
        return tuple(t.ids.index for t in self.tables if t.ids is not None and t.ids.index is not None)

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

    @property
    def is_over_hosts(self) -> bool:
        """Whether other hosts have parts of the model."""
        return self.owner is not None or bool(self.remote)

    @property
    def table_bytes(self) -> int:
        """Returns the bytes of all rows, without header and padding."""
        return sum(t.bytes for t in self.tables)

    @property
    def fp32_bytes(self) -> int:
        """Returns the bytes of the tables in fp32."""
        return sum(4 * t.id_count * t.dim for t in self.tables)


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


def check_header(header: Header, header_end: int, size: int) -> None:
    """Raises SegmentError for impossible values. header_end, size: bytes of the segment's file."""
    _check_files(header, size)
    files = {f.table: f for f in header.files}
    chunks = 0
    for t in header.tables:
        _check_table(t, chunks)
        chunks += t.chunks
        _check_place(f"table {t.name!r}", t, files.get(t.name), size)
    for t in header.tables:
        if t.ids is None or (index := t.ids.index) is None:
            continue
        if index.first_chunk != chunks:
            raise SegmentError(
                f"an id index has checksum {index.first_chunk} for its first; expected {chunks}"
            )
        chunks += index.chunks
        _check_place("an id index", index, files.get(t.name), size)
    for r in header.remote:
        check_remote(r)
    names = [*(t.name for t in header.tables), *(t.name for t in header.remote)]
    # A delta may say a position alone
    if len(set(names)) != len(names) or not (names or header.delta is not None):
        raise SegmentError("the header names a table twice, or none")
    ends = sorted((s.offset, s.offset + s.bytes) for s in header.stored)
    starts = [header_end, *(end for _, end in ends)]
    if any(start < before for before, (start, _) in zip(starts, ends, strict=False)):
        raise SegmentError("the header has two tables in one place")
    _check_sums(header)
    for f in header.features:
        _check_feature(f, set(names))
    is_without = bool(header.features) if header.delta is not None else not header.features
    if is_without or len({f.name for f in header.features}) != len(header.features):
        raise SegmentError("the header names a feature twice, or none")
    if not isinstance(header.model, str) or type(header.version) is not int:
        raise SegmentError(
            f"the header has model {header.model!r}, version {header.version!r}; expected a name and a number"
        )
    if not isinstance(header.load, dict) or not isinstance(header.source, dict):
        raise SegmentError("the header's source or load is no object")
    if type(header.origin) is not int or not 0 <= header.origin < 1 << 64:
        raise SegmentError(f"the header's origin is {str(header.origin)[:30]!r}; expected a content")
    if header.scorer is not None:
        dims = {t.name: t.dim for t in header.tables} | {t.name: t.dim for t in header.remote}
        pooled = {f.name: dims[f.table] for f in header.features if f.pooling != "none"}
        _check_scorer(header.scorer, pooled, size)
    if header.owner is not None:
        _check_owner(header.owner)
    for change in (header.delta, header.merged):
        if change is not None:
            _check_change(change)
    if header.delta is not None and not all(
        i.filter_words and not i.bucket_ids and i.owned == i.buckets for i in header.indexes
    ):
        raise SegmentError("a table of the delta has no filter, or not all of its buckets")
    if header.delta is not None and len(header.indexes) != len(header.tables):
        raise SegmentError("a table of the delta has no id index")


def _check_table(t: StoredTable, first_chunk: int) -> None:
    numbers = (t.dim, t.rows, t.row_bytes, t.offset, t.chunk_rows, t.first_chunk)
    are_texts = isinstance(t.name, str) and isinstance(t.key, str)
    if not are_texts or not all(type(n) is int and n >= 0 for n in numbers):
        raise SegmentError(f"table {str(t.name)[:60]!r} has a name or a number of the wrong type")
    try:
        sizes = RowFormat.parse(t.row_format).row_sizes(t.dim)
    except (QuantError, TypeError) as error:
        raise SegmentError(f"table {t.name!r}: {error}") from None
    if t.row_bytes not in sizes:
        raise SegmentError(
            f"table {t.name!r} has rows of {t.row_bytes} bytes; {t.row_format} of dim {t.dim} takes "
            f"{' or '.join(map(str, sizes))}"
        )
    if not t.rows or not t.chunk_rows or t.first_chunk != first_chunk:
        raise SegmentError(
            f"table {t.name!r} has {t.rows} rows in chunks of {t.chunk_rows}, the first number "
            f"{t.first_chunk}"
        )
    check_ids(t)


def _check_files(header: Header, size: int) -> None:
    end, names = size, {t.name for t in header.tables if isinstance(t.name, str)}
    if header.files and size % TABLE_ALIGNMENT_BYTES:
        raise SegmentError(
            f"the segment has {size} bytes before files of tables; expected a multiple of "
            f"{TABLE_ALIGNMENT_BYTES}"
        )
    for f in header.files:
        numbers = (f.offset, f.bytes, f.checksum, f.sums_at, f.sums, f.seed)
        are_numbers = all(type(n) is int and 0 <= n < 1 << 64 for n in numbers)
        if not are_numbers or not isinstance(f.table, str) or f.table not in names:
            raise SegmentError(f"the header has a file of table {str(f.table)[:60]!r}, or with no number")
        if f.seed >> 63 or (f.seed and not f.sums_at):
            raise SegmentError(f"the file of table {f.table[:60]!r} has a seed of no block checksums")
        is_size = FILE_HEAD_BYTES < f.bytes <= LARGEST_FILE_BYTES
        if f.offset != end or not is_size or f.bytes % TABLE_ALIGNMENT_BYTES:
            raise SegmentError(
                f"the file of table {f.table[:60]!r} has bytes [{f.offset}, {f.offset + f.bytes}); expected "
                f"a multiple of {TABLE_ALIGNMENT_BYTES} from {end} on"
            )
        names.remove(f.table)
        end = f.end
    if header.files and header.delta is not None:
        raise SegmentError("a delta has a table in a file of its own")


def _check_sums(header: Header) -> None:
    for f in (f for f in header.files if f.sums_at):
        ends = [s.offset + s.bytes for s in header.stored_in(f)]
        (table,) = (t for t in header.tables if t.name == f.table)
        end = f.sums_at + (sum_bytes(table) if f.seed else 0)
        if f.sums_at % TABLE_ALIGNMENT_BYTES or f.sums_at < max(ends, default=f.offset) or end > f.end:
            raise SegmentError(
                f"the block checksums of table {f.table[:60]!r} lie at bytes [{f.sums_at}, {end}) of a file "
                f"of [{f.offset}, {f.end})"
            )


def _check_place(what: str, stored: StoredRows | StoredScorer, file: TableFile | None, size: int) -> None:
    """file: of the table, None: it lies in the segment, of `size` bytes."""
    first, end = (0, size) if file is None else (file.offset + FILE_HEAD_BYTES, file.end)
    at, count = stored.offset, stored.bytes
    if at < first or count < 0 or at % TABLE_ALIGNMENT_BYTES or at + count > end:
        raise SegmentError(f"{what} lies at bytes [{at}, {at + count}) of a file of [{first}, {end})")


def _check_feature(f: FeatureSpec, tables: set[str]) -> None:
    if not all(isinstance(value, str) for value in (f.name, f.table, f.pooling, f.output)):
        raise SegmentError("a feature has a name, table, pooling or output of the wrong type")
    if f.table not in tables or f.pooling not in {p.label for p in Pooling} or f.output not in OUTPUTS:
        raise SegmentError(
            f"feature {f.name[:60]!r} reads table {f.table[:60]!r}, pooled by {f.pooling[:60]!r} as "
            f"{f.output[:60]!r}"
        )


def _check_change(c: Change) -> None:
    numbers, times = (c.sequence, c.below, c.changed, c.mark, c.after), (c.made_at, c.applied_at)
    are_numbers = all(type(n) is int and 0 <= n < 1 << 64 for n in numbers)
    if (
        not (are_numbers and all(type(t) in (int, float) for t in times))
        or c.below >= max(1, c.sequence)
        or not isinstance(c.positions, dict)
    ):
        raise SegmentError(
            f"the delta has sequence {str(c.sequence)[:30]} over {str(c.below)[:30]}, or no number as a time"
        )
    if not all(isinstance(name, str) and isinstance(at, str) for name, at in c.positions.items()):
        raise SegmentError("the delta has a position that is no text")


def _check_owner(o: Owner) -> None:
    numbers = (o.version, o.number, o.owners)
    are_numbers = isinstance(o.model, str) and all(type(n) is int for n in numbers)
    if not are_numbers or not 0 <= o.number < o.owners:
        raise SegmentError(f"the segment is that of owner {str(o.number)[:30]} of {str(o.owners)[:30]}")


def _check_scorer(s: StoredScorer, pooled: dict[str, int], size: int) -> None:
    """pooled: features -> dims, the widths of the vectors that it reads."""
    are_numbers = all(type(n) is int for n in (s.offset, s.bytes, s.checksum))
    if not are_numbers or s.kind not in ("dot", "cosine", "program"):
        raise SegmentError(f"the scorer is of kind {str(s.kind)[:60]!r}, or its place is no number")
    _check_place("the scorer", s, None, size)
    for i in s.inputs:
        if (
            type(i.width) is not int
            or i.width < 1
            or not isinstance(i.name, str)
            or (i.feature is not None and pooled.get(i.feature) != i.width)
        ):
            what = f"the scorer takes {str(i.name)[:60]!r}"
            raise SegmentError(f"{what}, which is no pooled feature of that width and no dense tensor")
    if s.kind != "program" and len(s.inputs) != 2:
        raise SegmentError(f"a scorer of kind {s.kind!r} takes two features, not {len(s.inputs)}")
