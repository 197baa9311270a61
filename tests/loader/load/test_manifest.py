"""Verification: what verifies a load's rows, what it finds, and what is said where nothing does."""

import json
import shutil
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from support import rows_of, run_tableside

from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.errors import CheckpointError, LoaderError
from tableside.loader.load.load import load
from tableside.loader.load.manifest import chunk_rows, manifest_path, write_manifest
from tableside.loader.load.settings import LoadSettings
from tableside.loader.load.verification import summary
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model

pytestmark = pytest.mark.quick

DCP = Path(__file__).parent.parent.parent / "fixtures" / "torchrec_dcp"


def _load(path: Path, root: Path, *keys: str, row_format: str = "fp32") -> str:
    """Loads tensors of a checkpoint; what is said about verification."""
    tables = {f"t{i}": {"key": key, "row_format": row_format} for i, key in enumerate(keys)}
    return summary(
        load(
            parse_model({"name": "m", "checkpoint": str(path), "tables": tables}, Path()), root
        ).header.source
    )


def _served(root: Path, table: str = "t0") -> np.ndarray:
    stored = Model(root, "m").attach().tables[table]
    return stored.packed[:, : 4 * stored.dim].copy().view(np.float32)


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def _npz(folder: Path, **arrays: np.ndarray) -> Path:
    np.savez(folder / "c.npz", **arrays)
    return folder / "c.npz"


def _pt(folder: Path, **arrays: np.ndarray) -> Path:
    torch.save({name: torch.from_numpy(a) for name, a in arrays.items()}, folder / "c.pt")
    return folder / "c.pt"


def _safetensors(folder: Path, **arrays: np.ndarray) -> Path:
    save_file(arrays, folder / "c.safetensors")
    return folder / "c.safetensors"


# ---- CRC-32 of archives ----


@pytest.mark.drawn(2)
@pytest.mark.parametrize("write", [_npz, _pt], ids=["npz", "pt"])
@pytest.mark.parametrize("row", [0, 1, 29_999, 30_010])
def test_a_flipped_bit_is_found_by_the_archives_crc(
    write: Callable[..., Path], row: int, tmp_path: Path, root: Path
) -> None:
    """In the first, a middle and the last piece that is read; the error names file, tensor and rows, and
    nothing is published."""
    path = write(tmp_path, a=rows_of(30_011, 24), b=rows_of(10, 4))
    assert _load(path, root, "a", "b") == "verified by CRC-32"
    _flip(path, path.read_bytes().index(rows_of(30_011, 24)[row].tobytes()) + 5)
    with pytest.raises(CheckpointError, match=rf"{path.name}: 'a' rows \[0, 30011\): the CRC-32 is wrong"):
        _load(path, root, "a", "b")
    assert Model(root, "m").versions() == [1]
    assert _load(path, root, "b") == "verified by CRC-32"


def test_a_flipped_bit_in_a_pickle_is_found_by_the_archives_crc(tmp_path: Path, root: Path) -> None:
    """Where names, sizes and offsets stand; here a tensor begins one row later, inside its storage."""
    big = torch.from_numpy(rows_of(40, 8))
    torch.save({"a": big[2:20]}, tmp_path / "c.pt")
    assert _load(tmp_path / "c.pt", root, "a") == "verified by CRC-32"
    _flip(tmp_path / "c.pt", (tmp_path / "c.pt").read_bytes().index(b"QK\x10K\x12K\x08") + 2)
    with pytest.raises(CheckpointError, match=r"c\.pt: the CRC-32 of record 'c/data\.pkl' is wrong"):
        _load(tmp_path / "c.pt", root, "a")


def test_torchrecs_shards_are_verified_by_crc(tmp_path: Path, root: Path) -> None:
    """By row, by column and replicated: each shard's record, however its columns are laid into rows."""
    shutil.copytree(DCP, tmp_path / "dcp")
    keys = [f"sparse.embedding_bags.{t}.weight" for t in ("replicated", "by_row", "by_column")]
    assert _load(tmp_path / "dcp", root, *keys) == "verified by CRC-32"
    for i, key in enumerate(keys):
        np.testing.assert_array_equal(
            _served(root, f"t{i}"), np.load(DCP / "expected.npz")[key.split(".")[2]]
        )
    with open_checkpoint(tmp_path / "dcp") as found:
        shards = [(key, shard) for key in keys for shard in found.matrix(key).shards]
    for key, shard in shards:
        victim = tmp_path / "dcp" / shard.path.name
        _flip(victim, shard.offset + 6)
        with pytest.raises(CheckpointError, match=rf"{victim.name}: '{key}' rows .*: the CRC-32 is wrong"):
            _load(tmp_path / "dcp", root, *keys)
        _flip(victim, shard.offset + 6)
    assert len(shards) == 5


def test_views_of_one_storage_are_verified_together(tmp_path: Path, root: Path) -> None:
    """What no table reads is read at the end, where it is little; tables that overlap or repeat count
    once."""
    big = torch.from_numpy(rows_of(4000, 8))
    torch.save({"a": big[100:1500], "b": big[1400:], "all": big}, tmp_path / "c.pt")
    for keys in (("a",), ("b",), ("a", "b"), ("all", "a", "b"), ("a", "a"), ("b", "all", "b")):
        assert _load(tmp_path / "c.pt", root, *keys) == "verified by CRC-32", keys
    np.testing.assert_array_equal(_served(root), big[1400:].numpy())
    _flip(tmp_path / "c.pt", (tmp_path / "c.pt").read_bytes().index(big[3].numpy().tobytes()))
    for keys in (("a",), ("b", "b"), ("all", "a")):
        with pytest.raises(CheckpointError, match="the CRC-32 is wrong"):
            _load(tmp_path / "c.pt", root, *keys)


def test_a_small_part_of_a_large_storage_is_not_verified(tmp_path: Path, root: Path) -> None:
    """Reading 12 MB to verify 32 bytes would be a second pass; that is said."""
    big = torch.zeros(400_000, 8)
    torch.save({"a": big[:1]}, tmp_path / "c.pt")
    found = _load(tmp_path / "c.pt", root, "a")
    assert found.startswith(
        "not verified: it is a part of a larger storage; write some with: tableside manifest"
    )
    write_manifest(tmp_path / "c.pt")
    assert _load(tmp_path / "c.pt", root, "a") == "verified by manifest"


def test_a_file_saved_without_crc_is_not_damaged(tmp_path: Path, root: Path) -> None:
    """torch.serialization.set_crc32_options(False) writes zeros in their place."""
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.from_numpy(rows_of(10, 8))}, tmp_path / "c.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert _load(tmp_path / "c.pt", root, "a").startswith(
        "not verified: its archive was saved without CRC-32; write some with"
    )
    np.testing.assert_array_equal(_served(root), rows_of(10, 8))


def test_crc_pieces_join_in_any_order() -> None:
    """shift(crc(P), bytes after P), joined by exclusive or, is zlib's CRC-32 of the whole."""
    from tableside.loader.checkpoint.archive import ArchiveRecord
    from tableside.loader.checkpoint.crc import _Sum

    data = rows_of(100, 99).tobytes()
    cuts = [0, 1, 2, 1000, 1001, 20_000, len(data)]
    found = _Sum(Path("x"), ArchiveRecord(7, len(data), 0))
    for begin, end in sorted(pairwise(cuts), key=lambda piece: -piece[1] % 7):
        found.crc ^= found.add(7 + begin, memoryview(data)[begin:end])
    assert found.crc == zlib.crc32(data)


# ---- manifests ----


@pytest.mark.drawn(6)
@pytest.mark.parametrize("row_format", ["fp32", "int8", "int2"])
@pytest.mark.parametrize("shape", [(30_011, 24), (1, 8), (5, 40_000), (4096, 16)], ids=str)
def test_a_manifest_finds_a_flipped_bit(
    shape: tuple[int, int], row_format: str, tmp_path: Path, root: Path
) -> None:
    """In chunks of many shapes beside segments' chunks of others; the error names the rows of 64 KiB, or
    the one row."""
    path = _safetensors(tmp_path, a=rows_of(*shape))
    assert _load(path, root, "a", row_format=row_format).startswith(
        "not verified: its file carries no checksums; write some"
    )
    before = Model(root, "m").attach().tables["t0"].packed.copy()
    write_manifest(path)
    assert _load(path, root, "a", row_format=row_format) == "verified by manifest"
    np.testing.assert_array_equal(Model(root, "m").attach().tables["t0"].packed, before)
    for row in {0, shape[0] // 2, shape[0] - 1}:
        at = path.read_bytes().index(rows_of(*shape)[row].tobytes()) + 1
        _flip(path, at)
        step = chunk_rows(open_checkpoint(path).matrix("a"))
        first = row // step * step
        with pytest.raises(
            CheckpointError,
            match=rf"rows \[{first}, {min(shape[0], first + step)}\) are not those of .*manifest",
        ):
            _load(path, root, "a", row_format=row_format)
        _flip(path, at)
    assert Model(root, "m").versions() == [1, 2]


def test_a_manifest_of_each_kind_of_checkpoint(tmp_path: Path, root: Path) -> None:
    """Beside a file, inside a folder; bf16 and columns of several files too."""
    values = rows_of(700, 12)
    torch.save({"a": torch.from_numpy(values).bfloat16()}, tmp_path / "c.pt")
    np.save(tmp_path / "n.npy", values)
    shutil.copytree(DCP, tmp_path / "dcp")
    (tmp_path / "sharded").mkdir()
    save_file({"a": values}, tmp_path / "sharded" / "one.safetensors")
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "one.safetensors"}})
    )
    for name, key, place in (
        ("c.pt", "a", "c.pt.manifest.json"),
        ("n.npy", "n", "n.npy.manifest.json"),
        ("dcp", "sparse.embedding_bags.by_column.weight", "dcp/tableside.manifest.json"),
        ("sharded", "a", "sharded/tableside.manifest.json"),
        ("sharded/model.safetensors.index.json", "a", "sharded/tableside.manifest.json"),
    ):
        assert write_manifest(tmp_path / name) == tmp_path / place
        assert _load(tmp_path / name, root, key) == "verified by manifest"


LIES = {
    "not JSON": lambda m: b"{",
    "nested without end": lambda m: b"[" * 100_000,
    "a list": lambda m: b"[]",
    "another version": lambda m: json.dumps({**m, "version": 2}).encode(),
    "a checksum of its own that is wrong": lambda m: json.dumps({**m, "checksum": "0" * 16}).encode(),
    "a changed digit": lambda m: json.dumps(m).replace(m["tensors"]["a"]["chunks"][:8], "0" * 8).encode(),
    "tensors that are a list": lambda m: json.dumps({**m, "tensors": []}).encode(),
    "larger than what is read": lambda m: json.dumps({**m, "more": " " * (2 << 20)}).encode(),
    "empty": lambda m: b"",
    "no text": lambda m: b"\xff\xfe\0",
}


@pytest.mark.parametrize("lie", LIES)
def test_manifests_that_are_damaged(
    lie: str, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never ignored: one line with the remedy, and nothing is published."""
    monkeypatch.setattr("tableside.loader.load.manifest._LIMIT_BYTES", 1 << 20)
    path = _safetensors(tmp_path, a=rows_of(10, 4))
    manifest = write_manifest(path)
    manifest.write_bytes(LIES[lie](json.loads(manifest.read_bytes())))
    with pytest.raises(LoaderError, match="manifest") as found:
        _load(path, root, "a")
    assert "\n" not in str(found.value) and Model(root, "m").versions() == []


def _resaved(**arrays: np.ndarray) -> Callable[[Path], object]:
    return lambda folder: save_file(arrays, folder / "c.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_resaved(a=rows_of(11, 4)), "describes 'a' as"),
        (_resaved(a=rows_of(10, 4).astype(np.float16)), "describes 'a' as"),
        (_resaved(a=rows_of(5, 8)), "describes 'a' as"),
        (_resaved(a=rows_of(10, 4, seed=9)), "or, where it was saved anew, run: tableside manifest"),
    ],
    ids=["rows", "dtype", "shape", "values"],
)
def test_a_manifest_of_an_older_checkpoint(
    change: Callable[[Path], object], message: str, tmp_path: Path, root: Path
) -> None:
    """The checkpoint was saved anew, its manifest was not: an error that says how to go on."""
    path = _safetensors(tmp_path, a=rows_of(10, 4))
    write_manifest(path)
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message) as found:
        _load(path, root, "a")
    assert "tableside manifest" in str(found.value)


def test_a_manifest_that_lacks_a_tensor(tmp_path: Path, root: Path) -> None:
    path = _safetensors(tmp_path, a=rows_of(10, 4))
    write_manifest(path)
    _safetensors(tmp_path, a=rows_of(10, 4), b=rows_of(10, 4))
    with pytest.raises(
        CheckpointError, match="it lacks the tensor 'b'; write it again with: tableside manifest"
    ):
        _load(path, root, "a", "b")
    assert _load(path, root, "a") == "verified by manifest"


def test_a_fifo_in_a_manifests_place_is_refused(tmp_path: Path, root: Path) -> None:
    import os

    path = _safetensors(tmp_path, a=rows_of(10, 4))
    os.mkfifo(manifest_path(path))
    with pytest.raises(CheckpointError, match="the manifest is a FIFO"):
        _load(path, root, "a")


def test_a_manifest_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A checkpoint that cannot be read leaves the old manifest as it is, and no temporary file."""
    path = _safetensors(tmp_path, a=rows_of(10, 4))
    before = write_manifest(path).read_bytes()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError):
        write_manifest(path)
    assert manifest_path(path).read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.safetensors", "c.safetensors.manifest.json"]


@pytest.mark.thorough
def test_the_commands_say_what_verified_the_rows(tmp_path: Path, root: Path) -> None:
    """`manifest` writes it, `load` and `inspect` name it; `--out` puts it elsewhere."""
    path = _safetensors(tmp_path, emb=rows_of(1000, 8))
    model = tmp_path / "model.toml"
    model.write_text('name = "m"\ncheckpoint = "c.safetensors"\n[tables.t]\nkey = "emb"\n')
    loaded = run_tableside("load", model, root=root)
    assert (
        f"not verified: its file carries no checksums; write some with: tableside manifest {path}"
        in loaded.stdout
    )
    written = run_tableside("manifest", path)
    assert (written.returncode, written.stderr) == (0, "")
    assert str(manifest_path(path)) in written.stdout
    assert "verified by manifest" in run_tableside("load", model, root=root).stdout
    assert "s, verified by manifest" in run_tableside("inspect", "m", root=root).stdout
    assert run_tableside("manifest", path, "--out", tmp_path / "x.json").returncode == 0
    assert (tmp_path / "x.json").read_bytes() == manifest_path(path).read_bytes()
    missing = run_tableside("manifest", tmp_path / "nothing.npz")
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_threads_verify_alike(threads: int, tmp_path: Path, root: Path) -> None:
    """Pieces in any order: the same verdict, of a table of 24 MB with other tables beside it."""
    path = _npz(tmp_path, a=rows_of(100_000, 60), b=rows_of(3, 5), c=rows_of(9000, 100, 7))
    tables = {t: {"key": t, "row_format": "int4" if t == "a" else "fp16"} for t in "abc"}
    spec = parse_model({"name": "m", "checkpoint": str(path), "tables": tables}, Path())
    assert summary(load(spec, root, LoadSettings(threads=threads)).header.source) == "verified by CRC-32"
    _flip(path, path.read_bytes().index(rows_of(9000, 100, 7)[8999].tobytes()))
    with pytest.raises(CheckpointError, match="'c' rows"):
        load(spec, root, LoadSettings(threads=threads))
