"""Tables of raw ids in Parquet, written by pyarrow: what was saved comes back."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from keyed_parquet import DIM, IDS, VALUES, fixed, lists, write
from keyed_tables import read, small_pieces
from support import rows_of

from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.checkpoint.keyed.parquet import open_parquet
from tableside.loader.errors import CheckpointError


@pytest.mark.parametrize("kind", [fixed, lists])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_ids_and_vectors_are_what_was_written(
    kind: Any, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extremes of int64 among them, over three row groups of several blocks, beside columns that
    nobody asked for."""
    small_pieces(monkeypatch, block_bytes=400)
    values = VALUES.astype(dtype)
    path = write(tmp_path / "t.parquet", name=["x"] * 57, id=IDS, vector=kind(values), age=np.arange(57))
    with open_checkpoint(path) as found:
        assert dict(found.keyed_tables) == {"vector": "id"}
        table = found.keyed("vector")
        got = read(table)
    assert (table.rows, table.dim, table.pieces, table.paths) == (
        57,
        DIM,
        3 if dtype is np.float32 else 2,
        (path,),
    ) and got.blocks > 3
    np.testing.assert_array_equal(got.ids, IDS)
    np.testing.assert_array_equal(got.values, values.astype(np.float32))
    assert table.where(43) == f"{path}: row 43 (row group 2)"


def test_a_piece_is_some_row_groups_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as hold PIECE_BYTES of vectors, or one that holds more: a file of many small ones is opened
    a few times."""
    small_pieces(monkeypatch, piece_bytes=4 * DIM * 10)
    write(tmp_path / "0.parquet", 3, id=IDS[:25], vector=fixed(VALUES[:25]))
    write(tmp_path / "1.parquet", 20, id=IDS[25:], vector=fixed(VALUES[25:]))
    with open_checkpoint(tmp_path) as found:
        table = found.keyed("vector")
        assert [sum(len(block.ids) for block in table.blocks(p)) for p in range(table.pieces)] == [
            9,
            9,
            7,
            20,
            12,
        ]
        np.testing.assert_array_equal(read(table).values, VALUES)


@pytest.mark.parametrize(
    "kind", [pa.int8(), pa.int16(), pa.int32(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()], ids=str
)
def test_other_integers_are_widened(kind: Any, tmp_path: Path) -> None:
    """With the signs that they have; uint64 where int64 holds them all."""
    largest = {8: 2**7 - 1, 16: 2**15 - 1, 32: 2**31 - 1, 64: 2**63 - 1}[kind.bit_width]
    signed = pa.types.is_signed_integer(kind)
    ids = [-largest - 1 if signed else 0, 7, largest if signed or kind.bit_width == 64 else 2 * largest + 1]
    path = write(tmp_path / "t.parquet", user=pa.array(ids, kind), vector=fixed(VALUES[:3]))
    with open_checkpoint(path) as found:
        assert read(found.keyed("vector", "user")).ids.tolist() == ids


def test_a_folder_of_part_files(tmp_path: Path) -> None:
    """In name order, row numbers going on; empty parts, and what others leave beside them, are no rows."""
    write(tmp_path / "part-1.parquet", id=IDS[30:], vector=lists(VALUES[30:]))
    write(tmp_path / "part-0.parquet", id=IDS[:30], vector=lists(VALUES[:30]))
    write(tmp_path / "part-2.parquet", id=IDS[:0], vector=lists(VALUES[:0]))
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "_broken.parquet").write_bytes(b"x")
    with open_checkpoint(tmp_path) as found:
        assert dict(found.keyed_tables) == {"vector": "id"}
        table = found.keyed("vector", "id")
        got = read(table)
        assert table.where(30) == f"{tmp_path / 'part-1.parquet'}: row 0 (row group 0)"
    np.testing.assert_array_equal(got.ids, IDS)
    np.testing.assert_array_equal(got.values, VALUES)


def test_several_tables_in_a_folder(tmp_path: Path) -> None:
    """A sub-folder each, or a file each, named before the column."""
    write(tmp_path / "user" / "0.parquet", id=IDS, vector=fixed(VALUES))
    write(tmp_path / "item" / "0.parquet", key=IDS[:3], vector=fixed(VALUES[:3]))
    with open_checkpoint(tmp_path) as found:
        assert dict(found.keyed_tables) == {"user/vector": "id", "item/vector": "key"}
        assert len(read(found.keyed("item/vector")).ids) == 3
    write(tmp_path / "a.parquet", id=IDS, vector=fixed(VALUES))
    write(tmp_path / "b.parquet", id=IDS[:3], vector=fixed(rows_of(3, DIM + 1)))
    with open_checkpoint(tmp_path) as found:
        assert len(read(found.keyed("b.parquet/vector")).ids) == 3
        with pytest.raises(
            CheckpointError,
            match=r"b\.parquet: vectors of 7 float values, in .*a\.parquet they are of 6 float; name a",
        ):
            found.keyed("vector", "id")


def test_an_empty_table(tmp_path: Path) -> None:
    """Has no pieces, where its type says how many values a vector has; else that is what is missing."""
    with open_checkpoint(write(tmp_path / "a.parquet", id=IDS[:0], vector=fixed(VALUES[:0]))) as found:
        table = found.keyed("vector")
        assert (table.rows, table.dim, table.pieces) == (0, DIM, 0)
    with pytest.raises(CheckpointError, match="'vector' has no rows"):
        open_checkpoint(write(tmp_path / "b.parquet", id=IDS[:0], vector=lists(VALUES[:0]))).keyed("vector")


def test_which_column_holds_the_ids(tmp_path: Path) -> None:
    """One called id, or the only one of integers, or of strings; where none is, model.toml says it."""
    path = write(tmp_path / "a.parquet", user=IDS, item=IDS + 1, vector=fixed(VALUES))
    with open_checkpoint(path) as found:
        assert not found.keyed_tables and found.skipped == {
            "vector": "which column holds its ids cannot be told: item, user"
        }
        with pytest.raises(CheckpointError, match="say the column of the ids of 'vector' as id_key"):
            found.keyed("vector")
        assert read(found.keyed("vector", "item")).ids.tolist() == (IDS + 1).tolist()
    assert open_checkpoint(write(tmp_path / "b.parquet", x=VALUES[:, 0], vector=fixed(VALUES))).skipped == {
        "vector": "no column of integers or strings"
    }
    names = [f"user {i}" for i in range(57)]
    for ids, columns in (
        ("user", {"name": names, "user": IDS}),
        ("id", {"id": names, "user": IDS, "item": IDS}),
        ("name", {"name": names, "price": VALUES[:, 0]}),
    ):
        with open_checkpoint(write(tmp_path / f"{ids}.parquet", **columns, vector=fixed(VALUES))) as found:
            assert dict(found.keyed_tables) == {"vector": ids}
            assert [*found.string_tables] == (["vector"] if ids != "user" else [])


@pytest.mark.thorough
def test_memory_does_not_grow_with_a_row_group(tmp_path: Path) -> None:
    """A row group of 200 MB of vectors takes less than twice what a piece is said to take."""
    count, dim, piece = 400_000, 128, 50_000
    schema = pa.schema([("id", pa.int64()), ("vector", pa.list_(pa.float32(), dim))])
    path = tmp_path / "t.parquet"
    table = pa.table(
        {"id": np.arange(count), "vector": fixed(np.tile(rows_of(piece, dim), (count // piece, 1)))},
        schema=schema,
    )
    pq.write_table(table, path, row_group_size=count, use_dictionary=False, compression="none")
    assert pq.ParquetFile(path).metadata.num_row_groups == 1
    code = f"""
from pathlib import Path
import pyarrow.parquet
from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.checkpoint.keyed.parquet import open_parquet
def most_kib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))
with open_checkpoint(Path({str(path)!r})) as found:
    table = found.keyed("vector")
    before = most_kib()
    rows = sum(len(block.ids) for block in table.blocks(0))
    print(rows, most_kib() - before, table.buffer_bytes)
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    rows, grown_kib, buffer_bytes = map(int, found.stdout.split())
    assert rows == count and grown_kib << 10 < 2 * buffer_bytes < 100 << 20, grown_kib


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path) -> None:
    """In one line; other formats are read without it."""
    without = Path(__file__).parent.parent.parent / "fixtures" / "without"
    path = write(tmp_path / "t.parquet", id=IDS, vector=fixed(VALUES))
    code = (
        f"from pathlib import Path; from tableside.loader.checkpoint import open_checkpoint; "
        f"open_checkpoint(Path({str(path)!r}))"
    )
    top = Path(__file__).parent.parent.parent.parent
    environment = {**os.environ, "WITHOUT": "pyarrow", "PYTHONPATH": f"{without}{os.pathsep}{top}"}
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert "install tableside[eval]" in found.stderr.splitlines()[-1]


def test_float64_is_rounded_and_that_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As pandas writes vectors; over several row groups. What float32 does not hold is refused with its
    row."""
    values = np.random.default_rng(3).standard_normal((57, DIM))
    values[5, 2] = -0.0
    path = write(tmp_path / "t.parquet", id=IDS, vector=lists(values))
    with open_checkpoint(path) as found:
        assert dict(found.keyed_tables) == {"vector": "id"}
        got = read(found.keyed("vector"))
    assert got.values.tobytes() == values.astype(np.float32).tobytes()
    told = [r.getMessage() for r in caplog.records]
    assert told == [f"{path}: the values of 'vector' are float64; they are rounded to float32"]
    values[43, 1] = 1e300
    write(path, id=IDS, vector=lists(values))
    with (
        open_checkpoint(path) as found,
        pytest.raises(CheckpointError, match=r"row 43 \(row group 2\): a value .* is 1e\+300"),
    ):
        read(found.keyed("vector"))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "lz4"])
@pytest.mark.drawn(5)
def test_honest_pages_pass(version: str, compression: str, tmp_path: Path) -> None:
    """Page headers are read of either kind of pages, with dictionaries, checksums, indexes and statistics
    longer than a read."""
    count = 3000
    columns = pa.table({
        "id": np.arange(count),
        "text": ["x" * (n % 1500) for n in range(count)],
        "vector": fixed(rows_of(count, 8)),
        "flag": np.arange(count) % 2 == 0,
        "nested": [{"a": [1.0], "b": None}] * count,
    })  # fmt: skip
    for dictionary, page_bytes in ((True, 1000), (False, 1 << 20)):
        kinds: Any = {
            "data_page_version": version,
            "use_dictionary": dictionary,
            "data_page_size": page_bytes,
        }
        kinds |= {"write_page_checksum": dictionary, "write_page_index": dictionary, "row_group_size": 1000}
        pq.write_table(columns, tmp_path / "t.parquet", compression=compression, **kinds)
        with open_parquet(tmp_path / "t.parquet") as file:
            assert sum(len(batch) for batch in file.batches(500, columns.column_names)) == count
