"""The segment's format: golden bytes, and one test per way a file can lie."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from planned_tables import planned_tables
from reference import REFERENCE

from tableside.loader.errors import SegmentError
from tableside.loader.model.specs import FeatureSpec
from tableside.loader.segment.header import (
    PRELUDE,
    Header,
    ScorerInput,
    StoredScorer,
    checksum,
)
from tableside.loader.segment.header_checks import check_header
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.writer import SegmentWriter
from tableside.quant import RowFormat, Source

pytestmark = pytest.mark.quick

GOLDEN = Path(__file__).parent.parent.parent / "fixtures" / "golden.segment"


def write_golden(path: Path) -> None:
    """The segment of GOLDEN: a table in int8 and one in fp16, fixed values, fixed times."""
    tables = planned_tables(
        [("a", "a.weight", RowFormat.INT8, 3, 8), ("b", "b.weight", RowFormat.FP16, 2, 4)]
    )
    features = (FeatureSpec("a", "a"), FeatureSpec("b", "b", "none", "fp16"))
    header = Header("golden", 7, "2026-11-20T00:00:00+00:00", tables, features, {"path": "golden.npz"})
    writer = SegmentWriter(path, header)
    for table in writer.header.tables:
        values = np.arange(table.rows * table.dim, dtype=np.float32).reshape(table.rows, table.dim) / 4
        row_format = RowFormat.parse(table.row_format)
        REFERENCE.quantize(values, Source.FP32, row_format, writer.rows(table, 0, table.rows))
        writer.finish_chunk(table, 0)
    writer.seal({"seconds": 1.5})


def test_golden_bytes(tmp_path: Path) -> None:
    """The format is what it was when the golden file was written; a change needs another FORMAT_VERSION
    and another file."""
    write_golden(tmp_path / "1.segment")
    assert (tmp_path / "1.segment").read_bytes() == GOLDEN.read_bytes()


class Recorder:
    """Bytes of a mapping, which notes what is seen of the file after each write."""

    def __init__(self, data: np.ndarray, look: Callable[[], str]) -> None:
        self.data, self.look = data, look
        self.seen: list[str] = []

    def __setitem__(self, place: slice, value: Any) -> None:
        self.data[place] = value
        self.seen.append(self.look())


def test_a_segment_whose_seal_was_cut_short_is_not_finished(tmp_path: Path) -> None:
    """After each write but the last one of a seal a reader finds no magic, and after the last one a whole
    segment."""
    path = tmp_path / "1.segment"
    tables = planned_tables([("a", "a", RowFormat.FP32, 3, 8)])
    writer = SegmentWriter(
        path, Header("m", 1, "2026-11-20T00:00:00+00:00", tables, (FeatureSpec("a", "a"),))
    )
    (table,) = writer.header.tables
    writer.rows(table, 0, 3)[:] = 1
    writer.finish_chunk(table, 0)

    def look() -> str:
        try:
            return f"whole: {Segment(path).header.model}"
        except SegmentError as error:
            return str(error)

    recorder = Recorder(writer.mapping.bytes, look)
    writer.mapping = SimpleNamespace(bytes=recorder)  # type: ignore[assignment]
    writer.seal({"seconds": 1.0})
    assert len(recorder.seen) > 2
    assert all("this is not a finished segment" in seen for seen in recorder.seen[:-1])
    assert recorder.seen[-1] == "whole: m"


def test_the_format_read_by_hand() -> None:
    """docs/format.md's table, followed with nothing but struct and json."""
    data = GOLDEN.read_bytes()
    magic, version, header_bytes, size, recorded = struct.unpack_from("<8sIIQQ", data)
    assert (magic, version, size) == (b"TABLSIDE", 1, len(data))
    header = Header.from_json(data[64 : 64 + header_bytes])
    sums = data[64 + header_bytes :][: 8 * header.chunks]
    assert checksum(data[64 : 64 + header_bytes] + sums) == recorded
    for table, chunk_sum in zip(header.tables, struct.unpack("<2Q", sums), strict=True):
        assert table.offset % 4096 == 0
        assert checksum(data[table.offset : table.offset + table.rows * table.row_bytes]) == chunk_sum
    scale, bias = np.frombuffer(data, np.float16, 2, header.tables[0].offset + 16)
    np.testing.assert_allclose(bias, 2.0)
    np.testing.assert_allclose(scale, 1.75 / 255, rtol=2**-11)


def test_an_attached_segment_gives_its_tables() -> None:
    segment = Segment(GOLDEN)
    assert segment.header.features[1] == FeatureSpec("b", "b", "none", "fp16")
    np.testing.assert_array_equal(REFERENCE.dequantize(segment.tables["b"]), np.arange(8).reshape(2, 4) / 4)


def test_rows_cannot_be_written_through_an_attachment() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Segment(GOLDEN).tables["a"].packed[0, 0] = 1


def test_a_table_keeps_the_mapping_alive() -> None:
    """The mapping goes with the last array over it, not with the Segment object."""
    table = Segment(GOLDEN).tables["a"]
    assert REFERENCE.dequantize(table).shape == (3, 8)


def _change(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


LIES = {
    "empty": (lambda d: b"", "too few"),
    "shorter than the prelude": (lambda d: d[:63], "too few"),
    "another magic": (lambda d: _change(d, 0, b"TABLSIDF"), "expected the magic"),
    "never sealed": (lambda d: _change(d, 0, bytes(8)), "not a finished segment"),
    "another format version": (
        lambda d: _change(d, 8, struct.pack("<I", 14)),
        "format version 14, this tableside reads 1 to 13",
    ),
    "truncated": (lambda d: d[:-1], "its header says"),
    "longer than it says": (lambda d: d + b"\0", "its header says"),
    "a header larger than the file": (lambda d: _change(d, 12, struct.pack("<I", 2**31)), "does not fit"),
    "a flipped bit in the header": (
        lambda d: _change(d, 80, bytes([d[80] ^ 1])),
        "header is corrupt|checksum of the header",
    ),
    "a flipped bit in the checksums": (
        lambda d: _flip(d, 64 + struct.unpack_from("<I", d, 12)[0]),
        "checksum of the header",
    ),
    "a flipped bit in the first row": (lambda d: _flip(d, 4096), r"table 'a', rows \[0, 3\)"),
    "a flipped bit in the last table": (lambda d: _flip(d, 8192 + 17), r"table 'b', rows \[0, 2\)"),
}


def _flip(data: bytes, at: int) -> bytes:
    return _change(data, at, bytes([data[at] ^ 0x10]))


@pytest.mark.parametrize("lie", LIES)
def test_a_segment_that_lies_is_refused(lie: str, tmp_path: Path) -> None:
    """Each way is found at attach, and the error says which file and what to do."""
    change, expected = LIES[lie]
    path = tmp_path / "1.segment"
    path.write_bytes(change(GOLDEN.read_bytes()))
    with pytest.raises(SegmentError, match=expected) as caught:
        Segment(path)
    assert str(path) in str(caught.value)


def test_a_header_with_a_right_checksum_but_a_table_outside_the_file_is_refused(tmp_path: Path) -> None:
    """A writer's fault, not a disk's: checked all the same, since it would read out of bounds."""
    data = GOLDEN.read_bytes()
    _, version, header_bytes, size, _ = PRELUDE.unpack(data[: PRELUDE.size])
    text = data[64 : 64 + header_bytes].replace(b'"rows":3', b'"rows":9999999'.ljust(0)).ljust(header_bytes)
    text = text.replace(b" " * 7, b"", 1)[:header_bytes].ljust(header_bytes)
    sums = data[64 + header_bytes :][: 8 * Header.from_json(text).chunks]
    prelude = PRELUDE.pack(b"TABLSIDE", version, header_bytes, size, checksum(text + sums))
    path = tmp_path / "1.segment"
    path.write_bytes(prelude + text + data[64 + header_bytes :])
    with pytest.raises(SegmentError, match="table 'a' lies at bytes"):
        Segment(path)


def scored(*inputs: ScorerInput, kind: str = "dot", offset: int = 4096) -> Callable[[Header], Header]:
    return lambda h: replace(h, scorer=StoredScorer(kind, inputs, offset, 0, 0))


def table(**change: Any) -> Callable[[Header], Header]:
    """A change of the first of two tables, which has three int8 rows of dim 8 at byte 4096."""
    return lambda h: replace(h, tables=(replace(h.tables[0], **change), h.tables[1]))


def feature(**change: Any) -> Callable[[Header], Header]:
    return lambda h: replace(h, features=(replace(h.features[0], **change), h.features[1]))


IMPOSSIBLE: dict[str, tuple[Callable[[Header], Header], str]] = {
    "a table outside the file": (table(offset=1 << 20), "table 'a' lies at bytes"),
    "a table over another one": (table(offset=8192), "two tables in one place"),
    "a table over the header": (table(offset=0), "two tables in one place"),
    "a table between two pages": (table(offset=4097), "table 'a' lies at bytes"),
    "an unknown row format": (table(row_format="int5"), "int2, int4, int8"),
    "wrong row bytes": (table(row_bytes=32), "has rows of 32 bytes; int8 of dim 8 takes 12 or 16"),
    "a table without rows": (table(rows=0), "has 0 rows"),
    "negative rows": (table(rows=-3), "a number of the wrong type"),
    "rows that are no number": (table(rows=True), "a number of the wrong type"),
    "chunks of no rows": (table(chunk_rows=0), "in chunks of 0"),
    "another table's checksums": (table(first_chunk=1), "the first number 1"),
    "a name twice": (table(name="b"), "names a table twice"),
    "a feature without its table": (feature(table="c"), "reads table 'c'"),
    "a feature of no pooling": (feature(pooling="max"), "pooled by 'max'"),
    "a feature of no output type": (feature(output="fp64"), "as 'fp64'"),
    "a feature twice": (feature(name="b"), "names a feature twice"),
    "a scorer without its feature": (
        scored(ScorerInput("x", "c", 8), ScorerInput("a", "a", 8)),
        "takes 'x', which is no pooled",
    ),
    "a scorer of another width": (
        scored(ScorerInput("a", "a", 4), ScorerInput("a", "a", 8)),
        "takes 'a', which is no pooled feature of that width",
    ),
    "a scorer of a sequence": (
        scored(ScorerInput("b", "b", 4), ScorerInput("a", "a", 8)),
        "takes 'b', which is no pooled",
    ),
    "a scorer of one input": (scored(ScorerInput("a", "a", 8)), "takes two features, not 1"),
    "a scorer of no kind": (scored(kind="magic"), "the scorer is of kind 'magic'"),
    "a scorer outside the file": (
        scored(ScorerInput("a", "a", 8), ScorerInput("a", "a", 8), offset=1 << 20),
        "the scorer lies at",
    ),
    "a version that is no number": (lambda h: replace(h, version=True), "expected a name and a number"),
}


def test_the_golden_header_is_possible() -> None:
    """So that each refusal below is that of the change."""
    check_header(Segment(GOLDEN).header, 4096, GOLDEN.stat().st_size)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_header_is_refused_whatever_its_checksum(name: str) -> None:
    """One case for each check: what a header says is held against what can be."""
    change, message = IMPOSSIBLE[name]
    with pytest.raises(SegmentError, match=message):
        check_header(change(Segment(GOLDEN).header), 4096, GOLDEN.stat().st_size)


@pytest.mark.parametrize("rows", [1, 13106, 13107, 13108, 40000])
def test_chunks_cover_every_row_once(rows: int) -> None:
    """Sizes around a chunk's 1 MiB."""
    (table,) = planned_tables([("a", "a", RowFormat.INT8, rows, 64)])
    ranges = [table.chunk_range(c) for c in range(table.chunks)]
    assert [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]]
    assert (ranges[0][0], ranges[-1][1]) == (0, rows)
