"""What an id without a row yields, as a load makes it: an error, zeros, the mean of the table, or a
vector."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keyed_tables import ids_of
from raw_loads import attached, publish_raw, quantized, vectors_of
from support import rows_of

from tableside.loader.errors import ModelError
from tableside.loader.load.load import load
from tableside.loader.load.settings import LoadSettings
from tableside.loader.model.model import parse_model
from tableside.quant import BadIds, Pooling, choose

IDS, VALUES = ids_of(3000), rows_of(3000, 16) + 3
UNKNOWN = int(np.setdiff1d(IDS ^ 1, IDS)[0])
KINDS = pytest.mark.parametrize("ids", [IDS, None], ids=["raw ids", "row numbers"])


def published(
    root: Path, folder: Path, ids: np.ndarray | None, missing: Any, row_format: str = "fp32", **more: Any
) -> Any:
    publish_raw(
        folder, root, {"t": (ids, VALUES)}, {"t": {"missing": missing, **more}}, row_format=row_format
    )
    return attached(root)


def unknown(ids: np.ndarray | None) -> list[int]:
    return [UNKNOWN] if ids is not None else [3000, -1, 2**63 - 1, -(2**63)]


@KINDS
@pytest.mark.parametrize("row_format", ["int8", "fp32"])
def test_zero(root: Path, tmp_path: Path, ids: np.ndarray | None, row_format: str) -> None:
    table = published(root, tmp_path, ids, "zero", row_format)
    assert not vectors_of(table, unknown(ids)).any()
    there = np.arange(3000) if ids is None else ids
    np.testing.assert_allclose(vectors_of(table, there), quantized(VALUES, table), atol=1e-5)


@KINDS
def test_error(root: Path, tmp_path: Path, ids: np.ndarray | None) -> None:
    """The policy where none is given: a table of row numbers has no more rows than before, and format
    version 1."""
    table = published(root, tmp_path, ids, "error")
    for id_ in unknown(ids):
        with pytest.raises(BadIds, match=f"id {id_} at position 0 is"):
            vectors_of(table, [id_])
    if ids is None:
        assert table.row_map is None and table.rows == 3000


@KINDS
@pytest.mark.parametrize("threads", [1, 2])
def test_mean(root: Path, tmp_path: Path, ids: np.ndarray | None, threads: int) -> None:
    """Of the checkpoint's values, added up in fp64, to the rounding of fp32, in however many blocks and
    threads they come."""
    publish_raw(tmp_path, root, {"t": (ids, VALUES)}, {"t": {"missing": "mean"}}, row_format="fp32",
                settings=LoadSettings(threads=threads))  # fmt: skip
    expected = VALUES.mean(0, dtype=np.float64)
    np.testing.assert_allclose(vectors_of(attached(root), unknown(ids)[:1])[0], expected, rtol=2**-23)


def test_the_mean_is_of_what_is_kept(root: Path, tmp_path: Path) -> None:
    """A row that another one with the same id replaces is not in it."""
    ids = np.array([7, 8, 7])
    of = {"missing": "mean", "duplicates": "last"}
    publish_raw(tmp_path, root, {"t": (ids, VALUES[:3])}, {"t": of}, row_format="fp32")
    np.testing.assert_allclose(
        vectors_of(attached(root), [1])[0], VALUES[1:3].mean(0, dtype=np.float64), rtol=2**-23
    )


def test_the_mean_of_bf16(root: Path, tmp_path: Path) -> None:
    """Of the numbers that the bits stand for."""
    import torch
    from safetensors.torch import save_file

    values = torch.from_numpy(VALUES).bfloat16()
    save_file({"t.ids": torch.from_numpy(IDS), "t.weight": values}, tmp_path / "c.safetensors")
    of = {"key": "t.weight", "ids": "raw", "missing": "mean", "row_format": "fp32"}
    load(parse_model({"name": "demo", "checkpoint": "c.safetensors", "tables": {"t": of}}, tmp_path), root)
    expected = values.double().mean(0).numpy()
    np.testing.assert_allclose(vectors_of(attached(root), [UNKNOWN])[0], expected, rtol=2**-23)


@KINDS
def test_a_constant_vector(root: Path, tmp_path: Path, ids: np.ndarray | None) -> None:
    vector = [n / 4 for n in range(16)]
    table = published(root, tmp_path, ids, vector)
    assert vectors_of(table, unknown(ids)[:1]).tolist() == [vector]


@pytest.mark.parametrize(
    ("missing", "row_format", "message"),
    [
        ([1.0] * 15, "fp32", "missing has 15 numbers; the table's dim is 16"),
        ([1e6] * 16, "int8", "missing: row 0 holds a value"),
    ],
)
def test_a_vector_that_does_not_fit_is_refused(
    root: Path, tmp_path: Path, missing: Any, row_format: str, message: str
) -> None:
    """Of another dim, or beyond the row format; the error names the table."""
    with pytest.raises(ModelError, match=rf"\[tables.t\]: {message}"):
        published(root, tmp_path, IDS, missing, row_format)


@KINDS
def test_a_missing_id_counts_in_a_mean_of_a_bag(root: Path, tmp_path: Path, ids: np.ndarray | None) -> None:
    """Like any other row, by a table that was loaded."""
    table = published(root, tmp_path, ids, [8.0] * 16)
    first = 0 if ids is None else int(ids[0])
    found = choose("native").lookup(
        table, np.array([first, unknown(ids)[0]]), np.array([2], np.int32), pooling=Pooling.MEAN
    )
    np.testing.assert_allclose(found[0], (VALUES[0] + np.float32(8)) / 2, rtol=2**-22)  # a sum and a product


@pytest.mark.parametrize("row_format", ["int8", "fp32"])
def test_a_default_row_behind_whole_chunks(root: Path, tmp_path: Path, row_format: str) -> None:
    """Of a table of row numbers whose last chunk is full: the default row has a chunk of its own, with its
    checksum."""
    rows = (1 << 20) // {"int8": 80, "fp32": 256}[row_format]
    values = rows_of(rows, 64)
    publish_raw(tmp_path, root, {"t": (None, values)}, {"t": {"missing": [0.5] * 64}}, row_format=row_format)
    table = attached(root)
    assert table.rows == rows + 1
    np.testing.assert_allclose(vectors_of(table, [rows - 1, rows, -1]), [quantized(values[-1:], table)[0],
                               *[[0.5] * 64] * 2],
                               atol=1e-5)  # fmt: skip
