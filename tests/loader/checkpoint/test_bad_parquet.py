"""Tables of raw ids in Parquet that are refused: what an id or a vector cannot be, columns that are missing,
and damaged files."""

import io
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from keyed_parquet import DIM, IDS, VALUES, fixed, lists, write
from keyed_tables import read

from campaigns.common import random_of
from campaigns.files import mutate
from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.deltas.change_files import read_changes
from tableside.loader.errors import ChangeError, CheckpointError

SEED = 14


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
    ({"id": _with([1.0, 2.0, 3.0], pa.float64())}, "the ids 'id' are of type double"),
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


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (
            pa.array([*map(float, range(56)), None]),
            r"double{0} \(pandas makes floats of integers where one is missing: leave such",
        ),
        (pa.array([True] * 57), "bool{0}$"),
    ],
    ids=["floats", "booleans"],
)
def test_ids_of_other_types_are_named_with_a_remedy(ids: Any, told: str, tmp_path: Path) -> None:
    """Where they are asked for, where a first model.toml is proposed, and in files of changes."""
    path = write(tmp_path / "t.parquet", id=ids, vector=fixed(VALUES))
    with open_checkpoint(path) as found:
        expected = "no column of integers or strings; 'id' is of type "
        assert re.search(expected + told.format(""), found.skipped["vector"])
        with pytest.raises(
            CheckpointError, match="the ids 'id' are of type " + told.format("; expected int64 or strings")
        ):
            found.keyed("vector", "id")
    expected = "the column 'id' is of type " + told.format("; expected integers or strings")
    with pytest.raises(ChangeError, match=expected):
        list(read_changes(path, "t"))
