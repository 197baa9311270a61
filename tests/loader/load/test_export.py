"""Exports: what other programs read of a file is what the table's rows dequantize to, bit for bit."""

import errno
import os
import resource
import signal
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from raw_segments import DenseTable, RawTable, publish_tables
from support import rows_of, run_tableside

from tableside.loader.errors import ModelError
from tableside.loader.load import export as exporting
from tableside.loader.load.export import SUFFIXES, ExportResult, export
from tableside.loader.load.load import Loaded, load
from tableside.loader.model.first_model import first_model
from tableside.loader.model.model import parse_model
from tableside.loader.model.specs import RawIds
from tableside.loader.versions.partial import PartialTensor
from tableside.loader.versions.versions import Model
from tableside.quant import QuantError, RowFormat

IDS = (
    np.random.default_rng(3)
    .permutation(np.concatenate([[-(2**63), 2**63 - 1, -1, 0], np.arange(10, 400, 3)]))
    .astype(np.int64)
)


def read(path: Path) -> dict[str, np.ndarray]:
    """What is in an exported file: ids, where it has them, and weights, by the libraries that others use."""
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return {name: arrays[name] for name in arrays.files}
    if path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        return dict(load_file(path))
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    assert table.column_names == ["id", "vector"]
    vectors = table["vector"].combine_chunks()
    dim = vectors.type.list_size
    return {"ids": table["id"].to_numpy(), "weights": vectors.flatten().to_numpy().reshape(-1, dim)}


def with_zeros(values: np.ndarray) -> np.ndarray:
    """The values, of which some are -0 and some +0."""
    values[::5, ::3], values[1::5, 1::3] = -0.0, 0.0
    return values


def raw_tensor(root: Path, row_format: RowFormat = RowFormat.INT8, scale: float = 1.0) -> PartialTensor:
    values = with_zeros(rows_of(IDS.size, 16) * np.float32(scale))
    publish_tables(root, {"t": RawTable(IDS, values, row_format, default=np.ones(16, np.float32))})
    return Model(root, "demo").tensor("t")


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("chunk_bytes", [1, 7 * 64, 1 << 20])
def test_a_raw_table_is_read_back(
    suffix: str, chunk_bytes: int, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every id with its vector, bit for bit, in however many chunks; a suffix alone decides the format."""
    monkeypatch.setattr(exporting, "CHUNK_BYTES", chunk_bytes)
    tensor = raw_tensor(root)
    expected = {
        int(i): v.tobytes() for ids, values in tensor.chunks() for i, v in zip(ids, values, strict=True)
    }
    exported = export(tensor, tmp_path / f"t{suffix}")
    found = read(exported.path)
    assert found["ids"].dtype == np.int64 and found["weights"].dtype == np.float32
    assert {int(i): v.tobytes() for i, v in zip(found["ids"], found["weights"], strict=True)} == expected
    assert sorted(expected) == sorted(IDS.tolist())
    assert exported == ExportResult(tmp_path / f"t{suffix}", IDS.size, 16, exported.path.stat().st_size)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_half_precision(suffix: str, root: Path, tmp_path: Path) -> None:
    """Rows of fp16 are exported as fp16 without loss."""
    tensor = raw_tensor(root, RowFormat.FP16)
    found = read(export(tensor, tmp_path / f"t{suffix}", "fp16").path)
    assert found["weights"].dtype == np.float16
    np.testing.assert_array_equal(found["weights"].astype(np.float32), tensor.numpy())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_plain_table_has_no_ids_of_its_own(
    suffix: str, publish: Callable[..., Loaded], root: Path, tmp_path: Path
) -> None:
    """Tensors are weights alone; Parquet has row numbers, as each of its rows needs an id."""
    publish({"t": rows_of(100, 8)})
    tensor = Model(root, "demo").tensor("t")
    found = read(export(tensor, tmp_path / f"t{suffix}").path)
    np.testing.assert_array_equal(found["weights"], tensor.numpy())
    assert found["ids"].tolist() == list(range(100)) if suffix == ".parquet" else set(found) == {"weights"}


def test_a_dense_table_with_a_policy_has_ids(root: Path, tmp_path: Path) -> None:
    """They may begin anywhere, and the default row is not one of them."""
    publish_tables(
        root, {"t": DenseTable(rows_of(10, 8), RowFormat.FP32, default=np.ones(8, np.float32), first=-5)}
    )
    found = read(export(Model(root, "demo").tensor("t"), tmp_path / "t.npz").path)
    assert found["ids"].tolist() == list(range(-5, 5))
    np.testing.assert_array_equal(found["weights"], rows_of(10, 8))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_row(suffix: str, root: Path, tmp_path: Path) -> None:
    """A part without rows, and a table without ids, are files without rows."""
    publish_tables(root, {"t": RawTable(np.empty(0, np.int64), np.empty((0, 8), np.float32))})
    found = read(export(Model(root, "demo").tensor("t"), tmp_path / f"t{suffix}").path)
    assert found["ids"].shape == (0,) and found["weights"].shape == (0, 8)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("row_format", ["fp16", "fp32"])
@pytest.mark.drawn(2)
def test_loaded_again_the_rows_are_the_same_bytes(
    suffix: str, row_format: str, publish: Callable[..., Loaded], root: Path, tmp_path: Path
) -> None:
    """Through a real load of the exported file, where the row format loses nothing."""
    publish({"t": with_zeros(rows_of(300, 24))}, formats={"t": row_format})
    model = Model(root, "demo")
    path = export(model.tensor("t"), tmp_path / f"again{suffix}", row_format).path
    raw = {
        "name": "demo",
        "checkpoint": path.name,
        "tables": {"t": {"key": "weights", "row_format": row_format}},
    }
    again = load(parse_model(raw, tmp_path), root)
    assert again.version == 2
    assert model.tensor("t", 2).packed().tobytes() == model.tensor("t", 1).packed().tobytes()


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("row_format", ["fp16", "fp32"])
@pytest.mark.drawn(3)
def test_raw_ids_loaded_again_have_the_same_rows(
    suffix: str, row_format: str, root: Path, tmp_path: Path
) -> None:
    """Each id its bytes, where the row format loses nothing; the index may be another."""
    before = raw_tensor(root, RowFormat.parse(row_format))
    assert np.signbit(before.numpy()[before.numpy() == 0]).any()
    path = export(before, tmp_path / f"again{suffix}", row_format).path
    keys = {"key": "vector"} if suffix == ".parquet" else {"key": "weights", "id_key": "ids"}
    table = {**keys, "ids": "raw", "row_format": row_format, "buckets": 4}
    again = load(
        parse_model({"name": "demo", "checkpoint": path.name, "tables": {"t": table}}, tmp_path), root
    )
    after = Model(root, "demo").tensor("t", again.version)
    assert again.version == 2 and len(after) == IDS.size and _rows(after) == _rows(before)


def _rows(tensor: PartialTensor) -> dict[int, bytes]:
    ids = np.concatenate(list(tensor.id_chunks())).tolist()
    return {i: row.tobytes() for i, row in zip(ids, tensor.packed(), strict=True)}


def test_a_file_is_replaced_only_by_a_whole_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an export fails half-way, what was there stays, and nothing stays beside it."""
    monkeypatch.setattr(exporting, "CHUNK_BYTES", 64)
    tensor, path = raw_tensor(root, RowFormat.FP32, scale=1e5), tmp_path / "t.npz"
    path.write_bytes(b"before")
    with pytest.raises(QuantError, match=r"beyond ±65504, fp16's largest; export it as fp32"):
        export(tensor, path, "fp16")
    assert path.read_bytes() == b"before" and os.listdir(tmp_path) == ["t.npz"]
    export(tensor, path)
    np.testing.assert_array_equal(read(path)["weights"], tensor.numpy())
    assert os.listdir(tmp_path) == ["t.npz"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_leaves_nothing(suffix: str, root: Path, tmp_path: Path) -> None:
    """A file that may not grow stands for a file system that is full."""
    tensor = raw_tensor(root)
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        with pytest.raises(OSError) as raised:
            export(tensor, tmp_path / f"t{suffix}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert raised.value.errno == errno.EFBIG and os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.drawn(1)
def test_memory_is_that_of_some_chunks(
    suffix: str, publish: Callable[..., Loaded], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An eighth of the table's fp32 bytes: chunks of 256 KiB, and row numbers of 512 KiB, a few times
    each."""
    monkeypatch.setattr(exporting, "CHUNK_BYTES", 1 << 18)
    publish({"t": rows_of(131_072, 64)})
    tensor = Model(root, "demo").tensor("t")
    tracemalloc.start()
    try:
        export(tensor, tmp_path / f"t{suffix}")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20 == tensor.nbytes // 8
    finally:
        tracemalloc.stop()


def test_the_mode_of_a_file_is_that_of_any_new_file(root: Path, tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    path = export(raw_tensor(root), tmp_path / "t.npz").path
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("t.csv", "fp32", r"expected one of: \.parquet, \.npz, \.safetensors"),
        ("t", "fp32", "suffix is ''"),
        ("t.npz", "int8", "expected one of: fp32, fp16"),
    ],
)
def test_other_files_are_refused(name: str, values: str, message: str, root: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        export(raw_tensor(root), tmp_path / name, values)
    assert os.listdir(tmp_path) == []


@pytest.mark.thorough
def test_the_command(root: Path, tmp_path: Path) -> None:
    """A version by its number, and a file that is there only with --force."""
    tensor, path = raw_tensor(root, RowFormat.FP16), tmp_path / "t.npz"
    publish_tables(root, {"t": RawTable(IDS[:5], rows_of(5, 16))})
    done = run_tableside("export", "demo", "t", "--to", path, "--version", 1, "--format", "fp16", root=root)
    assert done.returncode == 0 and f"{IDS.size} rows of dim 16 in fp16" in done.stdout, done.stderr
    np.testing.assert_array_equal(read(path)["weights"].astype(np.float32), tensor.numpy())
    refused = run_tableside("export", "demo", "t", "--to", path, root=root)
    assert refused.returncode == 1 and "exists; choose another file, or --force" in refused.stderr
    assert run_tableside("export", "demo", "t", "--to", path, "--force", root=root).returncode == 0
    assert read(path)["ids"].size == 5
    unknown = run_tableside("export", "demo", "x", "--to", tmp_path / "x.npz", root=root)
    assert unknown.returncode == 1 and "no table 'x'; expected one of: t" in unknown.stderr


@pytest.mark.drawn(0.5)
def test_a_missing_folder_is_named(root: Path, tmp_path: Path) -> None:
    """With what to do; nothing is made."""
    to = tmp_path / "out" / "t.npz"
    raw_tensor(root)
    found = run_tableside("export", "demo", "t", "--to", to, root=root)
    assert (
        found.returncode == 1
        and f"there is no folder {to.parent}; make it first, or choose another file" in found.stderr
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.drawn(1)
def test_a_name_makes_the_file_a_checkpoint_of_that_table(suffix: str, root: Path, tmp_path: Path) -> None:
    """Its first model.toml calls the table so, and finds its ids; values are what they were."""
    tensor, path = raw_tensor(root), tmp_path / f"t{suffix}"
    done = run_tableside("export", "demo", "t", "--to", path, "--name", "user", root=root)
    assert done.returncode == 0, done.stderr
    (table,) = first_model(path, None, RowFormat.INT8, tmp_path)[0].tables
    assert (table.name, table.key, table.raw) == ("user", "user.weight", RawIds("user.ids"))
    np.testing.assert_array_equal(read(path)["user.weight"], tensor.numpy())


def test_a_name_is_nothing_to_parquet(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a file of Parquet names no tensors; leave the name 'user' out"):
        export(raw_tensor(root), tmp_path / "t.parquet", name="user")


def test_progress_comes_to_its_end(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "CHUNK_BYTES", 10 * 64)
    seen: list[tuple[int, int]] = []
    export(raw_tensor(root), tmp_path / "t.npz", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(min(10 * n, IDS.size), IDS.size) for n in range(-(-IDS.size // 10) + 1)]
