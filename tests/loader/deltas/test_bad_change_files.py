"""Files of changes that are refused, with the file, the row and the remedy; and bytes of archives that
lie."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from change_rows import ROWS, WRITERS, read, some_rows, write_parquet

from tableside.loader.deltas import change_files
from tableside.loader.deltas.change_files import read_changes, rows_in
from tableside.loader.errors import ChangeError

GOOD = '{"table": "user", "id": 1, "vector": [1, 2]}\n'


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (
            '{"table": "user", "id": 1, "vector": [1]}',
            r"a vector of table 'user' with 1 values; expected 2, as before it",
        ),
        (
            '{"table": "item", "id": 1, "vector": []}',
            "a vector of table 'item' with 0 values; expected at least 1",
        ),
        ('{"table": "user", "id": 1, "vector": [1, true]}', "its vector holds 'True'; expected numbers"),
        ('{"table": "user", "id": 1, "vector": [1, "2"]}', "its vector holds '2'; expected numbers"),
        ('{"table": "user", "id": 1, "vector": [1, 1e39]}', "a value of its vector is too large for float32"),
        ('{"table": "user", "id": 1, "vector": 5}', "its vector is 5; expected a list of numbers, or null"),
        ('{"table": "user", "id": 1}', r"found \['id', 'table'\]; expected an object"),
        ('{"table": "user", "id": 1, "vector": null, "x": 1}', r"found \['id', 'table', 'vector', 'x'\]"),
        (
            '{"table": "user", "id": [1], "vector": null}',
            r"its id is \[1\]; expected an integer that int64 holds, or a string",
        ),
        ('{"table": "user", "id": true, "vector": null}', "its id is True"),
        ('{"table": "user", "id": 9223372036854775808, "vector": null}', "its id is 9223372036854775808"),
        ('{"table": 7, "id": 1, "vector": null}', "its table is 7; expected a table's name"),
        ("[1, 2]", "found a JSON list"),
        ("{", "not JSON"),
    ],
)
def test_a_line_that_is_refused(line: str, fault: str, tmp_path: Path) -> None:
    """With the file and the number of the line; what came before it counts lines too."""
    path = tmp_path / "a.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{GOOD}")
    with pytest.raises(ChangeError, match=rf"a\.jsonl: line 3: {fault}"):
        read(path)


@pytest.mark.parametrize(
    ("at", "row", "fault"),
    [
        (333, ("user", 1, [1.0] * 5), "row 333: a vector of table 'user' with 5 values; expected 6"),
        (333, ("user", 1, [1.0] * 12), "row 333: a vector of table 'user' with 12 values; expected 6"),
        (333, ("user", 1, [1.0, None, *[1.0] * 4]), "row 333: a value of its vector is null"),
        (
            333,
            ("user", 1, [1.0, 1e39, *[1.0] * 4]),
            "row 333: a value of its vector is 1e.39, which float32 does not hold",
        ),
        (333, (None, 1, None), "row 333: its table is null"),
        (333, ("user", None, None), "row 333: its id is null"),
    ],
)
def test_a_row_of_parquet_that_is_refused(at: int, row: Any, fault: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="the eval extra brings pyarrow")
    rows: list[Any] = some_rows()
    rows[at] = row
    with pytest.raises(ChangeError, match=rf"a\.parquet: {fault}"):
        read(write_parquet(tmp_path / "a.parquet", rows, pa.list_(pa.float64())))


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"id": [1.5], "vector": [[1.0]]}, "the column 'id' is of type double; expected integers"),
        (
            {"id": [1], "vector": [[1]]},
            "the column 'vector' is of type list<.*int64>; expected lists of float32",
        ),
        ({"id": [1], "vector": [1.0]}, "the column 'vector' is of type double"),
        (
            {"id": [1], "vec": [[1.0]]},
            r"0 columns are called 'vector'; expected one \(columns there: id, vec\)",
        ),
        (
            {"id": [1], "vector": [[1.0]], "table": [1]},
            "the column 'table' is of type int64; expected strings",
        ),
        ({"id": [1], "vector": [[1.0]], "table": ["item"]}, "row 0: its table is 'item'; expected 'user'"),
        (
            {"id": np.array([2**63], np.uint64), "vector": [[1.0]]},
            "row 0: its id is 9223372036854775808; expected one below",
        ),
    ],
)
def test_columns_of_parquet_that_are_refused(columns: dict[str, Any], fault: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="the eval extra brings pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ChangeError, match=fault):
        read(tmp_path / "a.parquet", "user")


ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("arrays", "fault"),
    [
        ({"user.vectors": ONES}, "'user.vectors' has no 'user.ids' beside it"),
        (
            {"user.ids": [1, 2]},
            "user.ids: row 0: there is no vector for it; expected one, or the id as deleted",
        ),
        (
            {"user.ids": [1, 2, 3], "user.vectors": ONES},
            "3 ids and 2 rows of 'user.vectors'; expected as many",
        ),
        (
            {"user.ids": [1.0, 2.0], "user.vectors": ONES},
            r"'user.ids' is float64 \[2\]; expected integers \[n\]",
        ),
        (
            {"user.ids": [1, 2], "user.vectors": ONES[0, :2]},
            r"'user.vectors' is float32 \[2\]; expected floats \[n, dim\]",
        ),
        (
            {"user.ids": [1, 2], "user.vectors": np.asfortranarray(ONES)},
            r"\[2, 3\], columns first; expected floats",
        ),
        (
            {"user.ids": [1, 2], "user.vectors": ONES * np.float64(1e39)},
            "user.ids: row 0: a value of its vector is too large",
        ),
        (
            {"user.ids": [1, 2], "user.vectors": ONES, "user.deleted": [0, 1]},
            r"'user.deleted' is int64 \[2\]; expected bool",
        ),
        (
            {"user.ids": np.array([1, 2**63], np.uint64), "user.vectors": ONES},
            "user.ids: row 1: the id does not fit an int64",
        ),
        ({"user.ids": [1, 2], "user.vectors": ONES[:, :0]}, "user.ids: row 0: a vector without values"),
        ({"user.scores": ONES}, r"it holds 'user.scores.npy'; expected the arrays TABLE.ids"),
        ({"item.ids": [1], "item.deleted": [True]}, "'item.ids' is of table 'item'; expected 'user'"),
    ],
)
def test_arrays_that_are_refused(arrays: dict[str, Any], fault: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ChangeError, match=rf"a\.npz: .*{fault}"):
        read(tmp_path / "a.npz", "user")


def an_array(dtype: str, shape: str, data: bytes = b"") -> bytes:
    """A .npy whose header says so, whatever `data` is."""
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + data


IDS_OF_TWO, VECTORS_OF_TWO = an_array("<i8", "(2,)", bytes(16)), an_array("<f4", "(2, 4)", bytes(32))


@pytest.mark.parametrize("part", ["ids", "vectors"])
@pytest.mark.parametrize(
    "record",
    [
        an_array("<i8", f"({2**61},)"),
        an_array("<f4", f"({2**32}, {2**32})"),
        an_array("<f4", f"(2, {2**62})", bytes(32)),
        an_array("<f4", f"(2, {10**90})", bytes(32)),
        an_array("<i8", f"({10**90},)"),
        an_array("<f4", "(-2, -4)", bytes(32)),
        an_array("<i8", "(" + "-" * 9000 + "2,)", bytes(16)),
        an_array("<i8", "(" * 4000 + "2" + ",)" * 2000, bytes(16)),
        an_array("<i8", "(True,)", bytes(8)),
        an_array("|V99999999999999", "(2,)", bytes(16)),
        an_array("<f16", "(2, 4)", bytes(128)),
        b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 9000,
        b"\x93NUMPY\x01\x00",
        b"",
    ],
    ids=range(14),
)
def test_headers_of_arrays_that_lie(part: str, record: bytes, tmp_path: Path) -> None:
    """Shapes whose product wraps or no integer holds, nested literals, short ones: one error that names
    the array."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("user.ids.npy", record if part == "ids" else IDS_OF_TWO)
        file.writestr("user.vectors.npy", record if part == "vectors" else VECTORS_OF_TWO)
    with pytest.raises(ChangeError, match=rf"a\.npz: 'user\.{part}'"):
        read(tmp_path / "a.npz")
    if part == "ids":
        with pytest.raises(ChangeError, match=r"a\.npz: 'user\.ids'"):
            rows_in(tmp_path / "a.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_archive_that_says_more_bytes_than_it_has(method: int, tmp_path: Path) -> None:
    """The directory's sizes fit the arrays' headers; the bytes end before."""
    path, rows = tmp_path / "a.npz", 100_000
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("user.ids.npy", an_array("<i8", f"({rows},)", bytes(800)))
        file.writestr("user.vectors.npy", an_array("<f4", f"({rows}, 1)", bytes(400)))
    data, at = bytearray(path.read_bytes()), 0
    for extra in (8 * rows - 800, 4 * rows - 400):
        at = data.find(b"PK\x01\x02", at) + 24
        data[at : at + 4] = (int.from_bytes(data[at : at + 4], "little") + extra).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ChangeError, match=r"a\.npz: not a whole \.npz file"):
        read(path)


@pytest.mark.parametrize("name", ["stored.npz", "packed.npz", "lists.parquet"])
def test_a_file_that_is_cut_short(name: str, tmp_path: Path) -> None:
    """It is refused wherever it ends."""
    path = WRITERS[name](tmp_path / name, ROWS)
    data = path.read_bytes()
    for end in (0, 1, 10, len(data) // 3, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(ChangeError, match=name):
            read(path)


@pytest.mark.parametrize("name", ["stored.npz", "packed.npz"])
def test_a_flipped_bit_in_an_archive_is_found(name: str, tmp_path: Path) -> None:
    """By the checksum of each array, at the latest when its last block is read."""
    path = WRITERS[name](tmp_path / name, ROWS)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("user.vectors.npy")
    data[info.header_offset + 30 + 200 + info.compress_size // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(ChangeError, match=r"not a whole \.npz file"):
        read(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1")
    (tmp_path / "b.npz").mkdir()
    with pytest.raises(ChangeError, match=r"ends with .parquet, .npz, .jsonl; found '.csv'"):
        read_changes(tmp_path / "a.csv")
    with pytest.raises(ChangeError, match="is a folder; expected a regular file"):
        read(tmp_path / "b.npz")
    with pytest.raises(ChangeError, match="No such file"):
        read(tmp_path / "c.jsonl")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ChangeError, match=r"install tableside\[eval\]"):
        change_files.read_changes(tmp_path / "a.parquet")
