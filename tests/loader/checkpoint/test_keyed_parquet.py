"""Tables of raw ids in Parquet, written by pyarrow: what was saved comes back, what an id or a vector
cannot be is refused."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from keyed_tables import ids_of, read, small_pieces
from support import rows_of

from campaigns.common import random_of
from campaigns.files import mutate
from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.checkpoint.keyed.parquet import open_parquet
from tableside.loader.deltas.change_files import read_changes
from tableside.loader.errors import ChangeError, CheckpointError

SEED, DIM = 14, 6
IDS, VALUES = ids_of(57), rows_of(57, DIM)


def fixed(values: np.ndarray) -> Any:
    """A column of fixed-size lists."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])


def lists(values: np.ndarray) -> Any:
    """A column of lists."""
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values.ravel()))


def write(path: Path, row_group: int = 20, **columns: Any) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group)
    return path


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
        assert len(read(found.keyed("b.parquet/vector", "id")).ids) == 3
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
    """One called id, or the only one of integers; where neither is, model.toml says it."""
    path = write(tmp_path / "a.parquet", user=IDS, item=IDS + 1, vector=fixed(VALUES))
    with open_checkpoint(path) as found:
        assert not found.keyed_tables and found.skipped == {
            "vector": "which column holds its ids cannot be told: item, user"
        }
        with pytest.raises(CheckpointError, match="say the column of the ids of 'vector' as id_key"):
            found.keyed("vector")
        assert read(found.keyed("vector", "item")).ids.tolist() == (IDS + 1).tolist()
    assert open_checkpoint(write(tmp_path / "b.parquet", x=VALUES[:, 0], vector=fixed(VALUES))).skipped == {
        "vector": "no column of integers"
    }


# ---- lies ----


def _with(values: list[Any], kind: Any) -> Any:
    return pa.array(values, kind)


VECTOR, FLOATS = [1.0] * DIM, pa.list_(pa.float32())
LIES: list[tuple[dict[str, Any], str]] = [
    ({"id": _with([1, None, 3], pa.int64())}, r"row 1 \(row group 0\): 'id' is null; expected an id"),
    (
        {"id": _with([1, 2, 2**63], pa.uint64())},
        r"row 2 \(row group 1\): id 9223372036854775808 does not fit an int64",
    ),
    ({"id": _with([1.0, 2.0, 3.0], pa.float64())}, "the ids 'id' are of type double; expected int64"),
    ({"id": _with(["a", "b", "c"], pa.string())}, "the ids 'id' are of type string"),
    ({"vector": _with([VECTOR, None, VECTOR], FLOATS)}, r"row 1 \(row group 0\): 'vector' is null"),
    (
        {"vector": _with([VECTOR, VECTOR, None], pa.list_(pa.float32(), DIM))},
        r"row 2 \(row group 1\): 'vector' is null",
    ),
    (
        {"vector": _with([VECTOR, VECTOR, [1.0]], FLOATS)},
        r"row 2 \(row group 1\): a vector of 1 values; the first one has 6",
    ),
    ({"vector": _with([[], VECTOR, VECTOR], FLOATS)}, "row 0: 'vector' is null or has no values"),
    (
        {"vector": _with([VECTOR, [None, *VECTOR[1:]], VECTOR], FLOATS)},
        r"row 1 .*: a value of 'vector' is null; expected numbers",
    ),
    (
        {"vector": _with([[1] * DIM] * 3, pa.list_(pa.int64()))},
        "of type int64; expected float32, float16 or float64, so cast them",
    ),
    (
        {"vector": _with([1.0, 2.0, 3.0], pa.float32())},
        "the vectors 'vector' are of type float; expected lists",
    ),
]


@pytest.mark.parametrize(("columns", "message"), LIES, ids=[message[:50] for _, message in LIES])
def test_what_is_no_id_or_vector_is_refused(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    """With the file, and the row where it is one row's fault."""
    honest = {"id": pa.array([1, 2, 3]), "vector": pa.array([VECTOR] * 3, FLOATS)}
    path = write(tmp_path / "t.parquet", 2, **{**honest, **columns})
    with pytest.raises(CheckpointError, match=message) as found, open_checkpoint(path) as checkpoint:
        read(checkpoint.keyed("vector", "id"))
    assert str(path) in str(found.value)


@pytest.mark.parametrize(
    ("key", "id_key", "message"),
    [
        ("nothing", "id", "0 columns are called 'nothing'; expected one, of: id, vector"),
        ("vector", "nothing", "0 columns are called 'nothing'"),
        ("vector", "vector", "the ids 'vector' are of type"),
    ],
)
def test_columns_that_are_not_there(key: str, id_key: str, message: str, tmp_path: Path) -> None:
    """With those that are."""
    path = write(tmp_path / "t.parquet", id=IDS, vector=fixed(VALUES))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path).keyed(key, id_key)


@pytest.mark.parametrize("keep", [0, 3, 100, 0.5, 0.999])
def test_truncated_files_are_refused(keep: float, tmp_path: Path) -> None:
    """Anywhere: the footer lies at the end."""
    path = write(tmp_path / "t.parquet", id=IDS, vector=fixed(VALUES))
    os.truncate(path, int(path.stat().st_size * keep if isinstance(keep, float) else keep))
    with pytest.raises(CheckpointError, match=r"t\.parquet: not a whole Parquet file"):
        open_checkpoint(path)


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    """And nothing waits for it."""
    os.mkfifo(tmp_path / "t.parquet")
    for path in (tmp_path, tmp_path / "t.parquet"):
        with pytest.raises(CheckpointError, match="is a FIFO; expected a regular file"):
            open_checkpoint(path)


def test_changed_bytes_are_found_where_pages_have_checksums(tmp_path: Path) -> None:
    """One bit of the vectors, in a file whose writer was asked for checksums."""
    path = tmp_path / "t.parquet"
    columns = pa.table({"id": IDS, "vector": fixed(VALUES)})
    pq.write_table(columns, path, write_page_checksum=True, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    at = data.index(VALUES[20].tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with (
        pytest.raises(CheckpointError, match=r"t\.parquet.*(crc|CRC|checksum)"),
        open_checkpoint(path) as found,
    ):
        read(found.keyed("vector"))


@pytest.mark.parametrize("kind", [fixed, lists])
def test_random_changes_break_nothing(kind: Any, tmp_path: Path) -> None:
    """100 of a file whose pages have checksums: refused in one line, or read with the true rows."""
    honest, path = io.BytesIO(), tmp_path / "t.parquet"
    pq.write_table(
        pa.table({"id": IDS, "vector": kind(VALUES)}), honest, row_group_size=20, write_page_checksum=True
    )
    refused = 0
    for number in range(100):
        path.write_bytes(mutate(honest.getvalue(), random_of(SEED, kind.__name__, number)))
        try:
            with open_checkpoint(path) as found:
                got = read(found.keyed("vector", "id"))
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error) and str(path) in str(error), (SEED, number, error)
        else:
            assert np.array_equal(got.ids, IDS) and np.array_equal(got.values, VALUES), (SEED, number)
    assert refused > 50


def test_a_column_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """Arrow decodes names late, and with an error of another kind."""
    path = write(tmp_path / "t.parquet", id=IDS, vector=lists(VALUES), namenamename=IDS)
    path.write_bytes(path.read_bytes().replace(b"namenamename", b"namenam\xffname"))
    with pytest.raises(CheckpointError, match=r"t\.parquet: not a whole Parquet file"):
        open_checkpoint(path)


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


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (
            pa.array([str(i) for i in range(57)]),
            r"string{0} \(where they are numbers, write astype\(.int64.\); else number or hash",
        ),
        (
            pa.array([f"u{i}" for i in range(57)]).dictionary_encode(),
            r"categories of string{0} \(where they are numbers, write",
        ),
        (
            pa.array([*map(float, range(56)), None]),
            r"double{0} \(pandas makes floats of integers where one is missing: leave such",
        ),
        (pa.array([True] * 57), "bool{0}$"),
    ],
    ids=["strings", "categories", "floats", "booleans"],
)
def test_ids_of_other_types_are_named_with_a_remedy(ids: Any, told: str, tmp_path: Path) -> None:
    """Where they are asked for, where a first model.toml is proposed, and in files of changes."""
    path = write(tmp_path / "t.parquet", id=ids, vector=fixed(VALUES))
    with open_checkpoint(path) as found:
        assert re.search("no column of integers; 'id' is of type " + told.format(""), found.skipped["vector"])
        with pytest.raises(
            CheckpointError, match="the ids 'id' are of type " + told.format("; expected int64")
        ):
            found.keyed("vector", "id")
    with pytest.raises(ChangeError, match="the column 'id' is of type " + told.format("; expected integers")):
        list(read_changes(path, "t"))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "lz4"])
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
