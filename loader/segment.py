"""The segment: one immutable file in shared memory that holds a version. All numbers are little-endian.

    offset   bytes
    0        8      magic, the ASCII text TABLSIDE; written last, so that an unfinished file never looks whole
    8        4      format version, uint32: 1
    12       4      H, uint32: bytes of the header
    16       8      bytes of the whole file, uint64
    24       8      xxh3-64 of header and checksums
    32       32     zeros
    64       H      header: JSON, padded with spaces (`Header`)
    64 + H   8 C    checksums, uint64: xxh3-64 of each chunk of each table, in order
    ...             zeros; then each table at its `offset`, a multiple of 4096: rows of `row_bytes` (quant.row_format), and zeros
    ...             the scorer's program, where there is one, at its `offset`, a multiple of 4096

A table's chunk is `chunk_rows` rows, the last one fewer. What the format does not do: compress, or survive a change of
machine byte order.
"""

import json
import os
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from loader.errors import SegmentError
from loader.memory import Mapping, reserve
from loader.model import EvalSpec, Feature
from quant import RowFormat, Table

MAGIC, FORMAT_VERSION = b"TABLSIDE", 1
PRELUDE = struct.Struct("<8sIIQQ32x")
TABLE_ALIGNMENT_BYTES, CHUNK_BYTES = 4096, 1 << 20
_SPARE_BYTES = 256  # room for what is known only at the end: `load`

Verify = Literal["full", "header"]


@dataclass(frozen=True)
class StoredTable:
    """Where a table lies in the segment. offset: bytes from the start of the file; first_chunk: index of its first checksum."""

    name: str
    key: str
    row_format: str
    dim: int
    rows: int
    row_bytes: int
    offset: int
    chunk_rows: int
    first_chunk: int

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk_rows)

    def chunk_range(self, chunk: int) -> tuple[int, int]:
        """Rows [start, stop) of the table's chunk number `chunk`."""
        return chunk * self.chunk_rows, min((chunk + 1) * self.chunk_rows, self.rows)


@dataclass(frozen=True)
class ScorerInput:
    """A tensor that a scorer takes: the pooled vectors of `feature`, or, where that is None, a dense one. fp32 [batch, width]."""

    name: str
    feature: str | None
    width: int


@dataclass(frozen=True)
class StoredScorer:
    """How a version scores: "dot" or "cosine" of its two inputs, or "program", `bytes` of an archive at `offset`.

    checksum: xxh3-64 of the archive.
    """

    kind: str
    inputs: tuple[ScorerInput, ...]
    offset: int = 0
    bytes: int = 0
    checksum: int = 0


@dataclass(frozen=True)
class Header:
    """What a version is. source: the checkpoint it was read from (path, files); load: seconds and source_bytes."""

    model: str
    version: int
    created: str
    tables: tuple[StoredTable, ...]
    features: tuple[Feature, ...]
    source: dict[str, Any] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
    scorer: StoredScorer | None = None
    evaluation: EvalSpec | None = None

    def to_json(self) -> bytes:
        raw = asdict(self)
        for name in ("scorer", "evaluation"):
            if raw[name] is None:
                del raw[name]  # a version without one reads as it always did
        return json.dumps(raw, separators=(",", ":"), sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Header":
        raw = json.loads(text)
        raw["tables"] = tuple(StoredTable(**t) for t in raw["tables"])
        raw["features"] = tuple(Feature(**f) for f in raw["features"])
        if scorer := raw.get("scorer"):
            raw["scorer"] = StoredScorer(**{**scorer, "inputs": tuple(ScorerInput(**i) for i in scorer["inputs"])})
        if evaluation := raw.get("evaluation"):
            columns = tuple((name, tuple(columns)) for name, columns in evaluation["columns"])
            raw["evaluation"] = EvalSpec(evaluation["label"], columns)
        return cls(**raw)

    @property
    def chunks(self) -> int:
        return sum(t.chunks for t in self.tables)

    @property
    def table_bytes(self) -> int:
        """Bytes of all rows, without header and padding."""
        return sum(t.bytes for t in self.tables)

    @property
    def fp32_bytes(self) -> int:
        """Bytes that the same tables take in fp32."""
        return sum(4 * t.rows * t.dim for t in self.tables)


def plan_tables(tables: list[tuple[str, str, RowFormat, int, int]]) -> tuple[StoredTable, ...]:
    """Lays tables (name, key, format, rows, dim) out one after another; offsets are relative to the first table."""
    stored, offset, chunk = [], 0, 0
    for name, key, row_format, rows, dim in tables:
        row_bytes = row_format.row_bytes(dim)
        chunk_rows = max(1, CHUNK_BYTES // row_bytes)
        table = StoredTable(name, key, row_format.label, dim, rows, row_bytes, offset, chunk_rows, chunk)
        stored.append(table)
        offset += _align(table.bytes)
        chunk += table.chunks
    return tuple(stored)


def _align(n: int) -> int:
    return -(-n // TABLE_ALIGNMENT_BYTES) * TABLE_ALIGNMENT_BYTES


def checksum(data: Any) -> int:
    """xxh3-64 of a buffer."""
    return xxhash.xxh3_64_intdigest(data)


class SegmentWriter:
    """A new segment at `path`, all bytes reserved, invisible as a version until `seal` and a rename.

    Caller: writes every chunk of `header.tables` once with `rows` and `finish_chunk` (any thread), then `seal`.
    program: the archive of `header.scorer`. NoSpace: nothing stays at `path` but an empty file.
    """

    def __init__(self, path: Path, header: Header, program: bytes = b"") -> None:
        self.path = path
        self._header_bytes = -(-(len(header.to_json()) + _SPARE_BYTES) // 64) * 64
        first_table = _align(PRELUDE.size + self._header_bytes + 8 * header.chunks)
        tables = tuple(StoredTable(**{**asdict(t), "offset": t.offset + first_table}) for t in header.tables)
        end = max(first_table, *(_align(t.offset + t.bytes) for t in tables)) if tables else first_table
        scorer = header.scorer and replace(header.scorer, offset=end, bytes=len(program), checksum=checksum(program))
        self.header = replace(header, tables=tables, scorer=scorer)
        self.size = _align(end + len(program))
        self._checksums = np.zeros(header.chunks, dtype="<u8")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self.mapping = reserve(self._fd, self.size, path.parent)
            self.mapping.bytes[end : end + len(program)] = np.frombuffer(program, np.uint8)
        except BaseException:
            os.close(self._fd)
            raise

    def rows(self, table: StoredTable, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows [start, stop) of a table of `header`, to be written: uint8 [rows, row_bytes]."""
        first = table.offset + start * table.row_bytes
        return self.mapping.bytes[first : first + (stop - start) * table.row_bytes].reshape(-1, table.row_bytes)

    def finish_chunk(self, table: StoredTable, chunk: int) -> None:
        """Takes the checksum of a chunk whose rows are all written."""
        self._checksums[table.first_chunk + chunk] = checksum(self.rows(table, *table.chunk_range(chunk)))

    def seal(self, load: dict[str, float]) -> Header:
        """Writes header and checksums, then the magic; the file becomes read-only. Returns the final header."""
        self.header = replace(self.header, load=load)
        text = self.header.to_json()
        if len(text) > self._header_bytes:
            raise SegmentError(f"{self.path}: the header grew to {len(text)} bytes; {self._header_bytes} were reserved")
        text = text.ljust(self._header_bytes)
        sums = self._checksums.tobytes()
        data = self.mapping.bytes
        data[PRELUDE.size : PRELUDE.size + len(text) + len(sums)] = np.frombuffer(text + sums, np.uint8)
        prelude = PRELUDE.pack(MAGIC, FORMAT_VERSION, len(text), self.size, checksum(text + sums))
        data[8 : PRELUDE.size] = np.frombuffer(prelude[8:], np.uint8)
        data[:8] = np.frombuffer(prelude[:8], np.uint8)
        os.fchmod(self._fd, 0o444)
        self.close()
        return self.header

    def close(self) -> None:
        """Closes the file; its mapping goes with the last array over it. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Segment:
    """An attached version: mapped, never copied, valid as long as this object or a table of it lives.

    SegmentError: the file is not a whole segment of this format (docs/format.md lists the ways).
    """

    def __init__(self, path: Path, verify: Verify = "full") -> None:
        self.path = path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            prelude = os.pread(fd, PRELUDE.size, 0)
            header_bytes = _check_prelude(path, prelude, size)
            self.mapping = Mapping(fd, size)
        finally:
            os.close(fd)
        self.header, self._checksums = self._read_header(prelude, header_bytes)
        if verify == "full":
            self.verify()
        self.tables = {t.name: self._table(t) for t in self.header.tables}

    @property
    def size(self) -> int:
        return self.mapping.size

    def _read_header(self, prelude: bytes, header_bytes: int) -> tuple[Header, NDArray[np.uint64]]:
        data = self.mapping.bytes
        expected = PRELUDE.unpack(prelude)[4]
        text = data[PRELUDE.size : PRELUDE.size + header_bytes].tobytes()
        try:
            header = Header.from_json(text)
            sums = data[PRELUDE.size + header_bytes :][: 8 * header.chunks]
        except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
            raise SegmentError(f"{self.path}: the header is corrupt ({error}); publish the version again") from error
        if checksum(text + sums.tobytes()) != expected:
            raise SegmentError(f"{self.path}: the checksum of the header is wrong; publish the version again")
        for t in header.tables:
            if t.offset < 0 or t.offset + t.bytes > self.size:
                raise SegmentError(f"{self.path}: table {t.name!r} ends at byte {t.offset + t.bytes}, the file at {self.size}")
        if (s := header.scorer) and (s.offset < 0 or s.bytes < 0 or s.offset + s.bytes > self.size):
            raise SegmentError(f"{self.path}: the scorer ends at byte {s.offset + s.bytes}, the file at {self.size}")
        return header, sums.view("<u8")

    def content(self) -> int:
        """What rows and scorer are, whatever the version's number and the time it was made: xxh3-64 over their checksums."""
        h = self.header
        tables = [(t.name, t.row_format, t.dim, t.rows) for t in h.tables]
        what = repr((h.model, tables, h.features, h.scorer and (h.scorer.kind, h.scorer.inputs, h.scorer.checksum)))
        return checksum(what.encode() + self._checksums.tobytes())

    def program(self) -> bytes:
        """The archive of the version's scorer. SegmentError: its bytes changed since they were written."""
        scorer = self.header.scorer
        assert scorer is not None
        data = self.mapping.bytes[scorer.offset : scorer.offset + scorer.bytes].tobytes()
        if checksum(data) != scorer.checksum:
            raise SegmentError(f"{self.path}: the checksum of the scorer is wrong; activate another version, or publish it again")
        return data

    def _table(self, t: StoredTable) -> Table:
        packed = self.mapping.bytes[t.offset : t.offset + t.bytes].reshape(t.rows, t.row_bytes)
        return Table(packed, RowFormat.parse(t.row_format), t.dim)

    def corrupt_chunks(self) -> Iterator[tuple[StoredTable, int, int]]:
        """Reads every row; yields (table, first row, end row) of each chunk whose checksum is wrong."""
        for t in self.header.tables:
            for chunk in range(t.chunks):
                start, stop = t.chunk_range(chunk)
                first = t.offset + start * t.row_bytes
                data = self.mapping.bytes[first : first + (stop - start) * t.row_bytes]
                if checksum(data) != int(self._checksums[t.first_chunk + chunk]):
                    yield t, start, stop

    def verify(self) -> None:
        """Reads every row; SegmentError names the first chunk whose bytes changed since it was written."""
        if self.header.scorer:
            self.program()
        for t, start, stop in self.corrupt_chunks():
            raise SegmentError(
                f"{self.path}: table {t.name!r}, rows [{start}, {stop}): the checksum is wrong, so bytes changed after they "
                "were written; activate another version, or publish this one again"
            )


def _check_prelude(path: Path, prelude: bytes, size: int) -> int:
    """Bytes of the header, after checking what can be checked without mapping."""
    if len(prelude) < PRELUDE.size:
        raise SegmentError(f"{path}: {len(prelude)} bytes are too few for a segment; it was truncated or never written")
    magic, version, header_bytes, recorded, _ = PRELUDE.unpack(prelude)
    if magic != MAGIC:
        raise SegmentError(f"{path}: expected the magic {MAGIC!r}, found {magic!r}; this is not a finished segment")
    if version != FORMAT_VERSION:
        raise SegmentError(
            f"{path}: segment format version {version}, this tableside reads {FORMAT_VERSION}; publish it again with this release"
        )
    if recorded != size:
        raise SegmentError(f"{path}: the file has {size} bytes, its header says {recorded}; it was truncated, publish it again")
    if PRELUDE.size + header_bytes > size:
        raise SegmentError(f"{path}: a header of {header_bytes} bytes does not fit in {size}; publish it again")
    return int(header_bytes)
