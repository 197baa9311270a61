"""Tables of raw ids that are pairs of tensors, in every format: what was saved comes back, what does not
fit is refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from keyed_tables import ids_of, read, small_pieces
from safetensors.torch import save_file
from support import rows_of

from tableside.loader.checkpoint import Checkpoint, Matrix, RowShard, open_checkpoint
from tableside.loader.checkpoint.keyed.flat import FlatRows
from tableside.loader.checkpoint.rows import Ids
from tableside.loader.errors import CheckpointError
from tableside.quant import Source

MPZCH = Path(__file__).parent.parent.parent / "fixtures" / "torchrec_mpzch"
IDENTITIES = "_managed_collision_collection._managed_collision_modules.user._hash_zch_identities"
Tensors = dict[str, torch.Tensor]


def _safetensors(folder: Path, tensors: Tensors) -> Path:
    save_file(tensors, folder / "c.safetensors")
    return folder / "c.safetensors"


def _sharded(folder: Path, tensors: Tensors) -> Path:
    files = {key: f"model-{i}.safetensors" for i, key in enumerate(tensors)}
    for key, name in files.items():
        save_file({key: tensors[key]}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def _torch_save(folder: Path, tensors: Tensors) -> Path:
    torch.save(tensors, folder / "c.pt")
    return folder / "c.pt"


def _npz(folder: Path, tensors: Tensors) -> Path:
    np.savez(folder / "c.npz", **{k: v.numpy() for k, v in tensors.items()})
    return folder / "c.npz"


def _dcp(folder: Path, tensors: Tensors) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(dict(tensors), checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


WRITERS: dict[str, Callable[[Path, Tensors], Path]] = {
    "safetensors": _safetensors,
    "sharded": _sharded,
    "torch": _torch_save,
    "npz": _npz,
    "dcp": _dcp,
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", WRITERS)
def test_ids_and_vectors_are_what_was_saved(
    kind: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extremes of int64 among them, over several pieces and blocks; whether ids are [n] or [n, 1];
    int32 is widened."""
    if kind == "npz" and dtype is torch.bfloat16:
        pytest.skip("numpy has no bfloat16")
    small_pieces(monkeypatch)
    ids, values = ids_of(57), torch.from_numpy(rows_of(57, 12)).to(dtype)
    narrow = ids.astype(np.int32)
    path = WRITERS[kind](
        tmp_path,
        {
            **{"a.ids": torch.from_numpy(ids), "a.weight": values, "b.keys": torch.tensor(ids)[:, None]},
            **{
                "b.values": values.clone(),
                "c_ids": torch.from_numpy(narrow),
                "c": values.clone(),
                "bias": torch.zeros(3),
            },
        },
    )
    with open_checkpoint(path) as found:
        assert dict(found.keyed_tables) == {"a.weight": "a.ids", "b.values": "b.keys", "c": "c_ids"}
        for key, expected in (("a.weight", ids), ("b.values", ids), ("c", narrow)):
            table = found.keyed(key)
            got = read(table)
            assert (table.rows, table.dim, got.rows.tolist()) == (57, 12, list(range(57)))
            assert table.pieces > 2 and got.blocks > table.pieces
            np.testing.assert_array_equal(got.ids, expected)
            np.testing.assert_array_equal(got.values, values.float().numpy())
            assert set(table.paths) <= {p for p in tmp_path.rglob("*") if p.is_file()}


def test_pairs_are_told_by_names_and_rows(tmp_path: Path) -> None:
    """Two tensors alone are a pair whatever they are called; others by what their names share; never of
    different lengths."""
    ids, values = torch.arange(5), torch.ones(5, 2)
    assert dict(open_checkpoint(_npz(tmp_path, {"x": ids, "y": values})).keyed_tables) == {"y": "x"}
    assert not open_checkpoint(_npz(tmp_path, {"x": ids, "y": torch.ones(6, 2)})).keyed_tables
    named = {
        "user/ids": ids,
        "user/embedding": values,
        "item.key": ids,
        "item.weight": torch.ones(6, 2),
        "mlp.weight": values,
    }
    found = open_checkpoint(_npz(tmp_path, named))
    assert dict(found.keyed_tables) == {"user/embedding": "user/ids"}
    assert found.keyed("mlp.weight", "item.key").rows == 5  # model.toml may say it


def test_ids_stay_no_matrix(tmp_path: Path) -> None:
    """A tensor of ids cannot be a table itself, as before."""
    found = open_checkpoint(_npz(tmp_path, {"ids": torch.arange(5), "weights": torch.ones(5, 2)}))
    assert list(found.matrices) == ["weights"]
    with pytest.raises(CheckpointError, match="'ids' cannot be a table: dtype <i8"):
        found.matrix("ids")


# ---- lies ----


@pytest.mark.parametrize(
    ("key", "id_key", "message"),
    [
        ("a.weight", "b.ids", "'b.ids' has 4 ids, 'a.weight' has 5 vectors; expected as many"),
        ("a.weight", "wide", r"'wide' holds no ids; expected int64 or int32 \[rows\], as these: .*a.ids"),
        ("a.weight", "float", "'float' holds no ids"),
        ("a.weight", "nothing", "there is no tensor 'nothing'; expected int64"),
        (
            "mlp",
            None,
            "names do not tell which tensor holds the ids of 'mlp'; say it as id_key in model.toml, one of: "
            "a.ids, b.ids",
        ),
        ("nothing", "a.ids", "there is no tensor 'nothing'; matrices there: a.weight"),
    ],
)
def test_what_does_not_fit_is_refused(key: str, id_key: str | None, message: str, tmp_path: Path) -> None:
    """With both numbers where they differ, and with what there is."""
    tensors = {
        **{
            "a.ids": torch.arange(5),
            "a.weight": torch.ones(5, 2),
            "b.ids": torch.arange(4),
            "mlp": torch.ones(7, 2),
        },
        **{"wide": torch.zeros(5, 2, dtype=torch.int64), "float": torch.zeros(5)},
    }
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(_npz(tmp_path, tensors)).keyed(key, id_key)


def test_ids_of_one_name_are_no_ids(tmp_path: Path) -> None:
    """Nested dicts may give two tensors one name: which is meant cannot be told."""
    torch.save(
        {"a.ids": torch.arange(5), "a": {"ids": torch.ones(5), "weight": torch.ones(5, 2)}}, tmp_path / "c.pt"
    )
    found = open_checkpoint(tmp_path / "c.pt")
    assert not found.keyed_tables and found.skipped["a.ids"] == "two tensors have this name"
    with pytest.raises(CheckpointError, match="it holds no ids for"):
        found.keyed("a.weight", "a.ids")


@pytest.mark.parametrize("rows", [range(4), range(5, 10)])
def test_ids_that_are_not_all_there_are_refused(rows: range, tmp_path: Path) -> None:
    """Of a sharded tensor of ids, as of a matrix: a shard is missing, or lies outside."""
    (tmp_path / "x").write_bytes(bytes(400))
    shards = (RowShard(tmp_path / "x", 0, rows.start, len(rows), 0, 1),)
    checkpoint = Checkpoint(tmp_path)
    values = Matrix("a", 5, 2, Source.FP32, (RowShard(tmp_path / "x", 0, 0, 5, 0, 2),))
    with pytest.raises(CheckpointError, match=r"a part of the checkpoint is missing|lies outside"):
        FlatRows(checkpoint, Ids("a.ids", 5, np.dtype("<i8"), shards), values)


def test_a_checkpoint_without_ids_says_so(tmp_path: Path) -> None:
    """And what model.toml should say where an id is a row number."""
    with pytest.raises(
        CheckpointError, match=r'it holds no ids for .a.; expected a tensor of ids.* or leave out ids = "raw"'
    ):
        open_checkpoint(_npz(tmp_path, {"a": torch.ones(5, 2)})).keyed("a")


@pytest.mark.parametrize("kind", WRITERS)
def test_truncated_files_are_refused(kind: str, tmp_path: Path) -> None:
    """Before a row is read, with the file's name."""
    path = WRITERS[kind](
        tmp_path, {"a.weight": torch.from_numpy(rows_of(400, 64)), "a.ids": torch.from_numpy(ids_of(400))}
    )
    victim = path if path.is_file() else max(path.iterdir(), key=lambda p: p.stat().st_size)
    os.truncate(victim, victim.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=victim.name):
        open_checkpoint(path).keyed("a.weight")


@pytest.mark.parametrize("kind", ["torch", "npz"])
@pytest.mark.parametrize("part", ["a.ids", "a.weight"])
def test_changed_bytes_of_an_archive_are_found(
    kind: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of an id or of a value: the CRC-32 of its record tells."""
    small_pieces(monkeypatch)
    path = WRITERS[kind](
        tmp_path, {"a.ids": torch.from_numpy(ids_of(57)), "a.weight": torch.from_numpy(rows_of(57, 12))}
    )
    with open_checkpoint(path) as honest:
        table = honest.keyed("a.weight")
        assert table.verification == {"by": "CRC-32"}
        read(table)
        tensor = honest.ids[part] if part == "a.ids" else honest.matrices[part]
        offset = tensor.shards[0].offset + 40
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with (
        open_checkpoint(path) as changed,
        pytest.raises(CheckpointError, match=f"{part}.*the CRC-32 is wrong"),
    ):
        read(changed.keyed("a.weight"))


def test_a_format_without_checksums_says_so(tmp_path: Path) -> None:
    """safetensors has none."""
    path = _safetensors(tmp_path, {"ids": torch.arange(5), "weights": torch.ones(5, 2)})
    with open_checkpoint(path) as found:
        assert "no checksums" in found.keyed("weights").verification["not"]


# ---- TorchRec's MPZCH ----


@pytest.mark.parametrize("file", ["model.pt", "dcp"])
def test_torchrecs_own_mpzch(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by TorchRec's module (fixtures/make_torchrec_mpzch.py): each id has its slot's row, empty
    slots are left out."""
    small_pieces(monkeypatch, block_bytes=96, piece_bytes=640)
    identities = torch.load(MPZCH / "model.pt", weights_only=True)[IDENTITIES].flatten().numpy()
    with open_checkpoint(MPZCH / file) as found:
        assert found.keyed_tables["_embedding_module.embedding_bags.user.weight"] == IDENTITIES
        table = found.keyed("_embedding_module.embedding_bags.user.weight")
        got = read(table)
        assert table.rows == 64 and table.pieces > 1
        np.testing.assert_array_equal(got.rows, np.flatnonzero(identities != -1))
        np.testing.assert_array_equal(got.ids, identities[got.rows])
        np.testing.assert_array_equal(got.values, got.rows[:, None] + np.arange(8) / 16)
        assert {-(2**63), 2**63 - 1, 0} <= set(got.ids.tolist()) and len(got.ids) == 14


def test_ids_sharded_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of two ranks, the ids in one dimension: one table, whose rows say which rank's file
    they lie in."""
    small_pieces(monkeypatch)
    with open_checkpoint(MPZCH / "dcp") as found:
        table = found.keyed("plain.weight")
        got = read(table)
        assert (
            dict(found.keyed_tables)["plain.weight"] == "plain.ids"
            and len(found.ids["plain.ids"].shards) == 2
        )
        np.testing.assert_array_equal(
            got.ids, torch.load(MPZCH / "model.pt", weights_only=True)[IDENTITIES].flatten()
        )
        np.testing.assert_array_equal(got.values, np.arange(64)[:, None] + np.arange(8) / 16)
        assert table.verification == {"by": "CRC-32"}
        assert table.where(40) == f"{MPZCH / 'dcp' / '__1_0.distcp'}: 'plain.ids', row 40 (row 8 there)"


def test_minus_one_is_an_id_elsewhere(tmp_path: Path) -> None:
    """Only a tensor of identities has empty slots."""
    with open_checkpoint(
        _npz(tmp_path, {"ids": torch.tensor([-1, 4]), "weights": torch.ones(2, 2)})
    ) as found:
        assert read(found.keyed("weights")).ids.tolist() == [-1, 4]


def test_places_are_named(tmp_path: Path) -> None:
    """A row's file, its tensor, and its number: where one id is there twice, a reader finds both."""
    found = open_checkpoint(_npz(tmp_path, {"a.ids": torch.arange(5), "a.weight": torch.ones(5, 2)}))
    assert found.keyed("a.weight").where(3) == f"{tmp_path / 'c.npz'}: 'a.ids', row 3"


def test_identities_of_another_module_are_known_by_their_name(tmp_path: Path) -> None:
    """Where names do not pair them and model.toml does, an empty slot is still no id."""
    path = tmp_path / "own.npz"
    np.savez(
        path,
        **{
            "user.weight": np.ones((4, 8), np.float32),
            "mc.user._hash_zch_identities": np.array([5, -1, 7, -1]),
        },
    )
    with open_checkpoint(path) as found:
        rows = found.keyed("user.weight", "mc.user._hash_zch_identities")
        assert [block.ids.tolist() for piece in range(rows.pieces) for block in rows.ids(piece)] == [[5, 7]]
