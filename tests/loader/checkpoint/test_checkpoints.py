"""Checkpoints of every kind: right values from any range of rows, and a clear refusal of what is damaged
or dangerous."""

import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import rows_of

from tableside.loader.checkpoint import Checkpoint, archive, contents, open_checkpoint, rows, safetensors
from tableside.loader.errors import CheckpointError

pytestmark = pytest.mark.quick

DCP = Path(__file__).parent.parent.parent / "fixtures" / "torchrec_dcp"


def read_rows(checkpoint: Checkpoint, key: str, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) as fp32."""
    with checkpoint:
        matrix = checkpoint.matrix(key)
        checkpoint.open_files(matrix)
        dtype = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}[matrix.source.label]
        out = np.empty((stop - start, matrix.dim), dtype)
        checkpoint.read(matrix, start, stop, out, bytearray(out.nbytes))
    if matrix.source.label == "bf16":
        return (out.astype(np.uint32) << 16).view(np.float32)
    return out.astype(np.float32)


def _safetensors(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "c.safetensors")
    return folder / "c.safetensors"


def _sharded(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    weight_map = {key: f"model-{i}.safetensors" for i, key in enumerate(tensors)}
    for key, name in weight_map.items():
        save_file({key: tensors[key]}, folder / name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def _torch_save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    torch.save({"step": 3, "state_dict": tensors}, folder / "c.pt")
    return folder / "c.pt"


def _npz(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    np.savez(folder / "c.npz", **{k: v.numpy() for k, v in tensors.items()})
    return folder / "c.npz"


def _dcp(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(tensors), checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


WRITERS = {"safetensors": _safetensors, "sharded": _sharded, "torch": _torch_save, "npz": _npz, "dcp": _dcp}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", WRITERS)
def test_rows_are_what_was_saved(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Written by the format's own library, in every dtype; read back in odd ranges."""
    if kind == "npz" and dtype is torch.bfloat16:
        pytest.skip("numpy has no bfloat16")
    values = {
        k: torch.from_numpy(rows_of(57, 12, i)).to(dtype) for i, k in enumerate(("a.weight", "b.weight"))
    }
    path = WRITERS[kind](
        tmp_path, {**values, "bias": torch.zeros(3), "ids": torch.zeros(4, 4, dtype=torch.int64)}
    )
    prefix = "state_dict." if kind == "torch" else ""
    for key, expected in values.items():
        for start, stop in ((0, 57), (0, 1), (56, 57), (13, 31)):
            found = read_rows(open_checkpoint(path), prefix + key, start, stop)
            np.testing.assert_array_equal(found, expected[start:stop].float().numpy())
    with pytest.raises(CheckpointError, match=r"cannot be a table: (shape|dtype)"):
        open_checkpoint(path).matrix(prefix + "ids")
    with pytest.raises(CheckpointError, match=r"there is no tensor 'c'; matrices there: .*a.weight"):
        open_checkpoint(path).matrix("c")


@pytest.mark.parametrize("table", ["replicated", "by_row", "by_column"])
def test_torchrecs_own_distributed_checkpoint(table: str) -> None:
    """Written by TorchRec on two gloo ranks (fixtures/make_torchrec_dcp.py): replicated, sharded by row
    and by column."""
    expected = np.load(DCP / "expected.npz")[table]
    rows = len(expected)
    for start, stop in ((0, rows), (3, 4), (rows // 3, rows - 1)):
        found = read_rows(open_checkpoint(DCP), f"sparse.embedding_bags.{table}.weight", start, stop)
        np.testing.assert_array_equal(found, expected[start:stop])


def test_a_file_without_a_suffix_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    """As torch.save writes it."""
    tensors = {"t": torch.arange(8.0).view(2, 4)}
    path = _torch_save(tmp_path, tensors).rename(tmp_path / "weights")
    with open_checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(read_rows(checkpoint, "state_dict.t", 0, 2), tensors["t"].numpy())


def test_npy_is_one_tensor_called_after_the_file(tmp_path: Path) -> None:
    values = rows_of(9, 4)
    np.save(tmp_path / "user.npy", values)
    np.testing.assert_array_equal(read_rows(open_checkpoint(tmp_path / "user.npy"), "user", 2, 9), values[2:])


def test_views_of_a_larger_storage_are_read_at_their_place(tmp_path: Path) -> None:
    """torch.save keeps whole storages: a slice begins somewhere inside one, a transpose cannot be read by
    rows."""
    big = torch.from_numpy(rows_of(20, 8))
    torch.save({"slice": big[5:10], "transposed": big.t()}, tmp_path / "c.pt")
    np.testing.assert_array_equal(
        read_rows(open_checkpoint(tmp_path / "c.pt"), "slice", 0, 5), big[5:10].numpy()
    )
    with pytest.raises(CheckpointError, match=r"save it with .contiguous\(\)"):
        open_checkpoint(tmp_path / "c.pt").matrix("transposed")


def test_a_sparse_tensor_is_skipped(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(4, 4), "s": torch.zeros(4, 4).to_sparse()}, tmp_path / "c.pt")
    found = open_checkpoint(tmp_path / "c.pt")
    assert list(found.matrices) == ["a"]


# ---- damage ----


def _cut(path: Path, keep: float) -> None:
    size = path.stat().st_size
    os.truncate(path, int(size * keep))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.999])
@pytest.mark.parametrize("kind", WRITERS)
def test_half_written_checkpoints_are_refused(kind: str, keep: float, tmp_path: Path) -> None:
    """Truncated anywhere: refused before a row is read, with the file's name."""
    path = WRITERS[kind](tmp_path, {"a.weight": torch.from_numpy(rows_of(400, 64))})
    victim = (
        path if path.is_file() else next(p for p in path.iterdir() if p.suffix in (".distcp", ".safetensors"))
    )
    _cut(victim, keep)
    with pytest.raises(CheckpointError, match=victim.name):
        open_checkpoint(path).matrix("state_dict.a.weight" if kind == "torch" else "a.weight")


def test_a_file_truncated_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Not SIGBUS: values are read, never mapped."""
    path = _safetensors(tmp_path, {"a": torch.from_numpy(rows_of(400, 64))})
    with open_checkpoint(path) as checkpoint:
        matrix = checkpoint.matrix("a")
        checkpoint.open_files(matrix)
        _cut(path, 0.5)
        out = np.empty((400, 64), np.float32)
        with pytest.raises(CheckpointError, match="truncated while it was read"):
            checkpoint.read(matrix, 0, 400, out, bytearray())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("c.safetensors", struct.pack("<Q", 10) + b"not json!!", "not safetensors' JSON"),
        ("c.safetensors", struct.pack("<Q", 2**63) + b"{}", "truncated or not safetensors"),
        ("c.safetensors", b"\x02\0\0\0\0\0\0\0[]", "not safetensors' JSON"),
        ("c.pt", b"\x80\x02]q\x00.", "older than torch"),
        ("c.pt", b"PK\x03\x04 but no archive", "half-written"),
        ("c.npz", b"PK\x03\x04 but no archive", "half-written"),
        ("c.npy", b"\x93NUMPY\x01\x00v\x00{'descr'", "not a .npy array"),
        ("c.csv", b"1,2,3", "no known kind"),
        ("model.safetensors.index.json", b"{}", "weight_map"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "../../etc/passwd"}}',
            "outside the checkpoint's folder",
        ),
        ("model.safetensors.index.json", b'{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors"),
    ],
)
def test_files_that_are_not_what_they_seem(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 63]}, "needs 64 bytes, its offsets span 63"),
        ({"dtype": "F32", "shape": [4, 4], "data_offsets": [64, 128]}, "ends at byte"),
        ({"dtype": "F32", "shape": [-4, -4], "data_offsets": [0, 64]}, "not safetensors' JSON"),
        ({"dtype": "F32", "shape": [4, 4]}, "not safetensors' JSON"),
        (
            {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64], "more": 1},
            "expected dtype, shape and data_offsets, found .*'more'",
        ),
    ],
)
def test_safetensors_headers_that_lie(entry: dict[str, object], message: str, tmp_path: Path) -> None:
    text = json.dumps({"a": entry}).encode()
    (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "c.safetensors")


def test_a_dtype_of_safetensors_has_the_bits_that_its_name_says(tmp_path: Path) -> None:
    named = (
        "F64 I64 U64 C64 F32 I32 U32 F16 BF16 I16 U16 F8_E5M2 F8_E4M3 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0 I8 U8 "
        "F6_E2M3 F6_E3M2 F4"
    )
    for dtype, digits in [("BOOL", "8"), *re.findall(r"([A-Z]+(\d+)\S*)", named)]:
        bits = int(digits)
        text = json.dumps({"a": {"dtype": dtype, "shape": [8, 3], "data_offsets": [0, 3 * bits]}}).encode()
        (tmp_path / "c.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(3 * bits))
        open_checkpoint(tmp_path / "c.safetensors")


def test_hosts_tell_files_apart_by_a_byte_in_the_middle(tmp_path: Path) -> None:
    path, data = tmp_path / "c.npz", bytearray(2 << 20)
    path.write_bytes(data)
    before = contents.sample([path])
    data[1 << 20] = 1
    path.write_bytes(data)
    assert contents.sample([path]) != before


@pytest.mark.parametrize("save", [_safetensors, _torch_save, _npz])
def test_a_checkpoint_has_as_many_tensors_as_the_limit_says(
    save: Callable[[Path, dict[str, torch.Tensor]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not one more."""
    for module in (rows, safetensors):
        monkeypatch.setattr(module, "LIMIT_TENSORS", 3)
    tensors = {f"t{n}": torch.ones(2, 4) for n in range(4)}
    (enough := tmp_path / "enough").mkdir()
    path = save(enough, {name: tensors[name] for name in [*tensors][:3]})
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint.matrices) == 3
    with pytest.raises(CheckpointError, match="more than 3 tensors; save the tables alone"):
        open_checkpoint(save(tmp_path, tensors))


def test_an_archive_has_as_many_records_as_the_limit_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not one more."""
    path = _npz(tmp_path, {f"t{n}": torch.ones(2, 4) for n in range(3)})
    monkeypatch.setattr(archive, "LIMIT_RECORDS", 3)
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint.matrices) == 3
    monkeypatch.setattr(archive, "LIMIT_RECORDS", 2)
    with pytest.raises(CheckpointError, match="an archive of 3 records; at most 2 are read"):
        open_checkpoint(path)


def test_compressed_npz_names_the_remedy(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "c.npz", a=rows_of(4, 4))
    with pytest.raises(CheckpointError, match=r"write it with np\.savez"):
        open_checkpoint(tmp_path / "c.npz")


def test_a_missing_checkpoint_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not exist; expected a \.safetensors"):
        open_checkpoint(tmp_path / "nothing.pt")


def test_a_folder_without_metadata_was_not_finished(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"without \.metadata was not finished"):
        open_checkpoint(tmp_path / "dcp")


def test_a_distributed_checkpoint_with_a_missing_file(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "dcp")
    (tmp_path / "dcp" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: No such file"):
        open_checkpoint(tmp_path / "dcp")


# ---- bombs ----


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_bomb_in_a_torch_file_is_refused(tmp_path: Path) -> None:
    """Nothing of the file's runs, and the error says that it could have."""
    torch.save({"a": torch.zeros(4, 4), "b": Bomb(tmp_path / "boom")}, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="could run code"):
        open_checkpoint(tmp_path / "c.pt")
    assert not (tmp_path / "boom").exists()


def test_a_pickle_bomb_in_dcp_metadata_is_refused(tmp_path: Path) -> None:
    """The allow-list does not know the bomb's function; loading the same bytes with pickle shows that it
    is live."""
    shutil.copytree(DCP, tmp_path / "dcp")
    data = pickle.dumps(Bomb(tmp_path / "boom"))
    (tmp_path / "dcp" / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"refused: \.metadata names (posix|os)\.mkdir"):
        open_checkpoint(tmp_path / "dcp")
    assert not (tmp_path / "boom").exists()
    pickle.loads(data)
    assert (tmp_path / "boom").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_pickle_bomb_in_a_dcp_item_is_refused(tmp_path: Path) -> None:
    """A stored item is a torch.save archive of its own, with a pickle of its own."""
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.zeros(40, 4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    item = tmp_path / "dcp" / "__0_0.distcp"
    torch.save(Bomb(tmp_path / "boom"), tmp_path / "bomb.pt")
    bomb = (tmp_path / "bomb.pt").read_bytes()
    item.write_bytes(bomb)
    metadata = (tmp_path / "dcp" / ".metadata").read_bytes()
    length = pickle.loads(metadata).storage_data
    (info,) = length.values()
    info.length = len(bomb)
    original = pickle.loads(metadata)
    original.storage_data = length
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(original))
    with pytest.raises(CheckpointError, match="could run code"):
        open_checkpoint(tmp_path / "dcp")
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"\x80\x04K\x01.", b"garbage", pickle.dumps({"a": 1}), pickle.dumps([])]
)
def test_metadata_that_is_no_metadata(content: bytes, tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"\.metadata: (damaged|not the metadata)"):
        open_checkpoint(tmp_path / "dcp")
