"""The segment's format version 2, where ids are not row numbers: golden bytes, and how they are read."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_segment import GOLDEN, IDS
from indexed_tables import built, rows_in
from planned_tables import planned_tables
from reference import REFERENCE

from tableside.loader.model.specs import FeatureSpec
from tableside.loader.segment.header import Header, Owner, checksum
from tableside.loader.segment.segment import Segment
from tableside.loader.segment.stored import StoredIds, StoredIndex, index_parts, plan_index
from tableside.loader.segment.writer import SegmentWriter
from tableside.quant import RowFormat, Source
from tableside.quant.cpu.index_builder import IndexBuilder
from tableside.quant.rows.ids import IdIndex

BACKFILLED = np.array([False, True, False, False, True])  # of "padded"


def _indexes() -> dict[str, IdIndex]:
    return {"padded": built(IDS["padded"], 2), "beside": built(IDS["beside"], 4, 100)}


def write_golden(path: Path) -> None:
    """The segment of GOLDEN: ids in the rows' padding, ids beside them in buckets that are ranges, and row
    numbers with a default row. Fixed values, fixed times."""
    indexes = _indexes()
    slots = {name: index.slots for name, index in indexes.items()}
    ids = {
        "padded": StoredIds(
            5,
            "zero",
            slots["padded"],
            0,
            2,
            plan_index(RowFormat.FP16, 4, slots["padded"], 2, has_backfilled=True),
        ),
        "beside": StoredIds(3, "error", None, 0, 0, plan_index(RowFormat.INT8, 8, slots["beside"], 4, 100)),
        "dense": StoredIds(3, "mean", 3, 0, 1),
    }
    shapes = [
        ("padded", "padded.weight", RowFormat.FP16, slots["padded"] + 1, 4),
        ("beside", "beside.weight", RowFormat.INT8, slots["beside"] + 1, 8),
        ("dense", "dense.weight", RowFormat.INT8, 4, 8),
    ]
    features = tuple(FeatureSpec(name, name) for name in ids)
    header = Header(
        "golden",
        8,
        "2026-11-20T00:00:00+00:00",
        planned_tables(shapes, ids),
        features,
        {"path": "golden.npz"},
    )
    writer = SegmentWriter(path, header)
    for table in writer.header.tables:
        values = np.arange(table.rows * table.dim, dtype=np.float32).reshape(table.rows, table.dim) / 4
        packed = writer.rows(table, 0, table.rows)
        REFERENCE.quantize(values, Source.FP32, RowFormat.parse(table.row_format), packed)
        if table.ids is not None and table.ids.index is not None:
            _write_index(table.ids.index, indexes[table.name], IDS[table.name], packed, writer)
    writer.seal({"seconds": 1.5})


def _write_index(
    stored: StoredIndex, index: IdIndex, ids: np.ndarray, packed: np.ndarray, writer: SegmentWriter
) -> None:
    has_backfilled = stored.id_at >= 0
    data = writer.rows(stored, 0, stored.rows).reshape(-1)
    directory, pilots, kept, bits = index_parts(stored, data, has_backfilled)
    directory[:], pilots[:] = index.directory.reshape(-1).view(np.uint8), index.pilots
    rows = rows_in(index, ids)
    of_row = np.full(index.slots, ids[0])
    of_row[rows] = ids
    if stored.id_at >= 0:
        packed[:-1, stored.id_at : stored.id_at + 8] = of_row.view(np.uint8).reshape(-1, 8)
        bits[:] = np.packbits(
            np.bincount(rows[BACKFILLED], minlength=index.slots).astype(bool), bitorder="little"
        )
    else:
        kept[:] = of_row.view(np.uint8)


def test_golden_bytes(tmp_path: Path) -> None:
    """The format is what it was when the golden file was written; a change needs another FORMAT_VERSION
    and another file."""
    write_golden(tmp_path / "1.segment")
    assert (tmp_path / "1.segment").read_bytes() == GOLDEN.read_bytes()


def test_the_index_read_by_hand() -> None:
    """docs/format.md's account of an index, followed with nothing but struct and json."""
    data = GOLDEN.read_bytes()
    magic, version, header_bytes, size, recorded = struct.unpack_from("<8sIIQQ", data)
    assert (magic, version, size) == (b"TABLSIDE", 2, len(data))
    padded, beside, dense = json.loads(data[64 : 64 + header_bytes])["tables"]
    sums = struct.unpack_from("<5Q", data, 64 + header_bytes)
    assert checksum(data[64 : 64 + header_bytes] + struct.pack("<5Q", *sums)) == recorded
    assert dense["ids"] == {
        "backfilled": 1,
        "count": 3,
        "default_row": 3,
        "first": 0,
        "index": None,
        "missing": "mean",
    }
    for number, table in enumerate((padded, beside)):
        index = table["ids"]["index"]
        part = data[index["offset"] : index["offset"] + 64 * index["rows"]]
        assert index["offset"] % 4096 == 0 and checksum(part) == sums[3 + number]
        buckets, slots = index["buckets"], index["slots"]
        directory = [struct.unpack_from("<2q", part, 16 * n) for n in range(buckets + 1)]
        assert (directory[0][0], directory[-1][0], table["rows"]) == (0, slots, slots + 1)
        kept_at = 64 * -(-16 * (buckets + 1) // 64) + 64 * -(-(slots * 5 // 16 + buckets) // 64)
        kept = [
            struct.unpack_from(
                "<q", *((part, kept_at + 8 * n) if table is beside else (data, table["offset"] + 16 * n + 8))
            )[0]
            for n in range(slots)
        ]
        assert set(kept) == set(IDS[table["name"]].tolist())
        if table is padded:
            bits = part[kept_at : kept_at + -(-slots // 8)]
            older = {kept[n] for n in range(slots) if bits[n // 8] >> n % 8 & 1}
            assert older == set(IDS["padded"][BACKFILLED].tolist())


def test_an_attached_segment_finds_its_ids() -> None:
    """Each id reads the row that was written for it; the others the default row, or none."""
    tables = Segment(GOLDEN).tables
    for name, index in _indexes().items():
        row_map: Any = tables[name].row_map
        np.testing.assert_array_equal(row_map.find(IDS[name]), rows_in(index, IDS[name]))
        assert (row_map.find(np.array([1, 98, 400, -2])) == -1).all()
    padded: Any = tables["padded"].row_map
    np.testing.assert_array_equal(padded.is_backfilled(padded.find(IDS["padded"])), BACKFILLED)
    assert (padded.default_row, tables["beside"].row_map.default_row) == (padded.index.slots, None)  # type: ignore[union-attr]
    dense: Any = tables["dense"].row_map
    assert dense.find(np.array([-1, 0, 2, 3])).tolist() == [-1, 0, 2, -1] and dense.is_backfilled(
        np.arange(3)
    ).tolist() == [
        0,
        0,
        1,
    ]


def test_versions_without_ids_are_written_as_before(tmp_path: Path) -> None:
    """Format version 1 where there is nothing new, so that earlier releases read them; 2 where there is."""
    assert Segment(GOLDEN.with_name("golden.segment")).header.format_version == 1
    header = Segment(GOLDEN).header
    assert header.format_version == 2
    dense = replace(header, tables=tuple(replace(t, ids=None) for t in header.tables))
    assert dense.format_version == 1 and b'"ids"' not in dense.to_json()
    assert replace(dense, owner=Owner("golden", 8, 0, 2)).format_version == 2


@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.label)
@pytest.mark.drawn(4)
def test_an_index_takes_at_most_16_bytes_an_id(row_format: RowFormat) -> None:
    """Of any row format and dim, from 64 ids a bucket on: with the rows that no id has, and the bits of
    what was backfilled."""
    builder = IndexBuilder(1024)
    ids = np.arange(1024 * 64) * 1_000_003
    builder.count(ids)
    records = np.zeros((builder.begin(), 2), np.int64)
    builder.put(ids, np.arange(len(ids)), records)
    builder.distinct(records, "error")
    beside = set()
    for dim in (d for d in range(1, 640) if d % (row_format.block or max(1, 8 // row_format.bits)) == 0):
        index = plan_index(row_format, dim, builder.slots, 1024, has_backfilled=True)
        beside.add(index.id_at < 0)
        assert index.bytes + 8 * (index.id_at >= 0) * builder.slots <= 16 * len(ids)
        assert (builder.slots - len(ids)) * 64 <= len(ids) + 64 * 1024  # rows that no id has
    assert beside == {False, True}
