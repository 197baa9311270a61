"""Checks of a segment's header. Impossible numbers and places are refused before anything is read there."""

from pathlib import Path

from tableside.loader.errors import SegmentError
from tableside.loader.model.model import DISK_TIMEOUTS, OUTPUTS, is_disk_timeout
from tableside.loader.model.specs import FeatureSpec
from tableside.loader.segment.blocks import sum_bytes
from tableside.loader.segment.header import (
    FILE_HEAD_BYTES,
    FORMAT_VERSION,
    LARGEST_FILE_BYTES,
    MAGIC,
    PRELUDE,
    TABLE_ALIGNMENT_BYTES,
    Change,
    Header,
    Owner,
    StoredScorer,
    TableFile,
)
from tableside.loader.segment.remote import check_remote
from tableside.loader.segment.stored import StoredRows, StoredTable, check_ids
from tableside.quant import Pooling, QuantError, RowFormat


def check_prelude(path: Path, prelude: bytes, size: int) -> int:
    """Checks the prelude before mapping; returns the bytes of the header."""
    if len(prelude) < PRELUDE.size:
        raise SegmentError(
            f"{path}: {len(prelude)} bytes are too few for a segment; it was truncated or never written"
        )
    magic, version, header_bytes, recorded, _ = PRELUDE.unpack(prelude)
    if magic != MAGIC:
        raise SegmentError(
            f"{path}: expected the magic {MAGIC!r}, found {magic!r}; this is not a finished segment"
        )
    if not 1 <= version <= FORMAT_VERSION:
        raise SegmentError(
            f"{path}: segment format version {version}, this tableside reads 1 to {FORMAT_VERSION}; publish "
            "it again with this release"
        )
    if recorded != size:
        raise SegmentError(
            f"{path}: the file has {size} bytes, its header says {recorded}; it was truncated, publish it "
            "again"
        )
    if PRELUDE.size + header_bytes > size:
        raise SegmentError(
            f"{path}: a header of {header_bytes} bytes does not fit in {size}; publish it again"
        )
    return int(header_bytes)


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
        if (index := t.index) is None:
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
    if header.disk_timeout_s != 0 and not is_disk_timeout(header.disk_timeout_s):
        raise SegmentError(f"the header's disk_timeout_s is {header.disk_timeout_s!r}; {DISK_TIMEOUTS}")
    if header.scorer is not None:
        dims = {t.name: t.dim for t in header.tables} | {t.name: t.dim for t in header.remote}
        pooled = {f.name: dims[f.table] for f in header.features if f.pooling != "none"}
        _check_scorer(header.scorer, pooled, size)
    if header.owner is not None:
        _check_owner(header.owner)
    for change in (header.delta, header.merged):
        if change is not None:
            _check_change(change)
    if header.delta is None and any(i.numbered for i in header.indexes):
        raise SegmentError("a version has the marks of hot rows")
    if header.delta is not None and not all(
        (i.filter_words or i.numbered) and not i.bucket_ids and i.owned == i.buckets for i in header.indexes
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
