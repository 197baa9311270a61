"""Checkpoints of values that were quantized before, with scales beside them: what `init` proposes, and that a
load copies their bytes, refuses what is no number, and quantizes them anew where another format is wanted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference import REFERENCE
from safetensors.torch import save_file
from torch.distributed import checkpoint

from tableside.loader.checkpoint import open_checkpoint
from tableside.loader.errors import CheckpointError
from tableside.loader.load.load import load
from tableside.loader.load.manifest import write_manifest
from tableside.loader.model.first_model import first_model
from tableside.loader.model.model import parse_model
from tableside.loader.versions.versions import Model
from tableside.quant import RowFormat, Table

ROWS = 3001
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(tensor.view(torch.uint8).numpy())


def block32(rows: int = ROWS, dim: int = 64) -> dict[str, torch.Tensor]:
    exponents = torch.randint(100, 130, (rows, dim // 32), generator=torch.Generator().manual_seed(1))
    scales = exponents.to(torch.uint8).view(E8M0)
    return {"engram.embed.weight": random(rows, dim).to(E4M3), "engram.embed.weight_scale": scales}


def nvfp4(rows: int = ROWS, dim: int = 160) -> dict[str, torch.Tensor]:
    codes = torch.randint(0, 256, (rows, dim // 2), generator=torch.Generator().manual_seed(2))
    scales = (random(rows, dim // 16).abs() + 0.1).to(E4M3)
    return {
        "ngram.weight": codes.to(torch.uint8),
        "ngram.weight_scale": scales,
        "ngram.weight_scale_2": torch.tensor(0.0125),
    }


def loaded(path: Path, root: Path, **table: Any) -> Table:
    """The table of a model that `init` proposes, or with these settings, as it is served."""
    spec = first_model(path, "demo", RowFormat.INT8, root).spec
    if table:
        key = spec.tables[0].key
        spec = parse_model(
            {"name": "demo", "checkpoint": str(path), "tables": {"t": {"key": key} | table}}, root
        )
    load(spec, root)
    segment = Model(root, "demo").attach()
    (found,) = segment.tables.values()
    return found


def saved(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_rows_of_fp8_with_scales_of_blocks_are_copied(tmp_path: Path, root: Path) -> None:
    """Also where the scales are bytes without a dtype."""
    given = block32()
    table = loaded(saved(tmp_path, given), root)
    values, scales = given["engram.embed.weight"], given["engram.embed.weight_scale"]
    assert (table.row_format, table.dim, table.rows) == (RowFormat.FP8_E4M3_BLOCK32, 64, ROWS)
    np.testing.assert_array_equal(table.packed[:, :64], bytes_of(values))
    np.testing.assert_array_equal(table.packed[:, 64:66], bytes_of(scales))
    expected = values.float().reshape(ROWS, 2, 32) * scales.float()[:, :, None]
    np.testing.assert_array_equal(REFERENCE.dequantize(table), expected.reshape(ROWS, 64).numpy())
    given["engram.embed.weight_scale"] = scales.view(torch.uint8)
    again = loaded(saved(tmp_path, given), root)
    np.testing.assert_array_equal(again.packed, table.packed)


@pytest.mark.parametrize(
    "scale",
    [
        torch.tensor(0.37),
        torch.tensor([0.37]).bfloat16(),
        torch.tensor([0.37]).half(),
        random(ROWS, 1).abs(),
        random(ROWS).abs(),
        random(ROWS, 1).abs().bfloat16(),
    ],
    ids=["table", "table bf16", "table fp16", "row", "row 1d", "row bf16"],
)
@pytest.mark.parametrize(
    "name", ["embed.weight_scale", "embed.scale", "embed.weight_scale_inv", "embed.weight.scale"]
)
@pytest.mark.drawn(12)
def test_rows_of_fp8_with_a_scale_of_the_table_or_of_rows(
    tmp_path: Path, root: Path, scale: torch.Tensor, name: str
) -> None:
    values = random(ROWS, 160).to(E4M3)
    table = loaded(saved(tmp_path, {"embed.weight": values, name: scale}), root)
    assert table.row_format is RowFormat.FP8_E4M3
    np.testing.assert_array_equal(table.packed[:, 4:164], bytes_of(values))
    np.testing.assert_array_equal(
        REFERENCE.dequantize(table), (values.float() * scale.float().reshape(-1, 1)).numpy()
    )


@pytest.mark.parametrize("is_divisor", [False, True])
def test_rows_of_nvfp4_are_copied(tmp_path: Path, root: Path, is_divisor: bool) -> None:
    """With the table's scale as ModelOpt names it, or compressed-tensors, which keeps its inverse."""
    given = nvfp4()
    if is_divisor:
        given["ngram.weight_packed"] = given.pop("ngram.weight")
        given["ngram.weight_global_scale"] = 1 / given.pop("ngram.weight_scale_2")
    table = loaded(saved(tmp_path, given), root)
    assert (table.row_format, table.dim) == (RowFormat.NVFP4, 160)
    values = given["ngram.weight_packed" if is_divisor else "ngram.weight"]
    np.testing.assert_array_equal(table.packed[:, :80], bytes_of(values))
    np.testing.assert_array_equal(table.packed[:, 84:94], bytes_of(given["ngram.weight_scale"]))
    np.testing.assert_allclose(table.packed[:, 80:84].copy().view(np.float32), 0.0125, rtol=2**-22)


def test_a_table_lies_over_several_tensors_and_files(tmp_path: Path, root: Path) -> None:
    """Numbered ones with one scale, in the order of their numbers and of any number of rows; a second table
    is not theirs."""
    parts = [random(300 + n, 160, seed=n).to(E4M3) for n in range(12)]
    names = [f"ple.ngram_embedding.shard_{n}" for n in range(12)]
    save_file(dict(zip(names[:7], parts[:7], strict=True)), tmp_path / "a.safetensors")
    rest = dict(zip(names[7:], parts[7:], strict=True)) | {
        "ple.ngram_embedding.weight_scale": torch.tensor(0.5)
    }
    save_file(rest, tmp_path / "b.safetensors")
    where = dict.fromkeys(names[:7], "a.safetensors") | dict.fromkeys(rest, "b.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    spec = first_model(tmp_path, "demo", RowFormat.INT8, tmp_path).spec
    assert [t.key for t in spec.tables] == ["ple.ngram_embedding.shard_*"]
    table = loaded(tmp_path, root)
    np.testing.assert_array_equal(table.packed[:, 4:164], np.concatenate([bytes_of(p) for p in parts]))
    del where[names[3]]
    index.write_text(json.dumps({"weight_map": where}))
    with open_checkpoint(tmp_path) as found:
        assert "has no part 3" in found.skipped["ple.ngram_embedding.shard_*"]


def test_a_table_may_become_another_format(tmp_path: Path, root: Path) -> None:
    """As the values that its bytes say do; missing ids may read their mean."""
    path = saved(tmp_path, block32())
    exact = REFERENCE.dequantize(loaded(path, root))
    table = loaded(path, root, row_format="int8", missing="mean")
    error = np.abs(REFERENCE.dequantize(table)[:ROWS] - exact).max(1)
    assert (error <= [RowFormat.INT8.error_bound(float(r.min()), float(r.max())) for r in exact]).all()
    mean = exact.mean(0, dtype=np.float64).astype(np.float32)
    bound = RowFormat.INT8.error_bound(float(mean.min()), float(mean.max()))
    assert np.abs(REFERENCE.dequantize(table)[ROWS] - mean).max() <= bound


def test_raw_ids_of_rows_that_were_quantized_before(tmp_path: Path, root: Path) -> None:
    ids = torch.randperm(10 * ROWS, generator=torch.Generator().manual_seed(3))[:ROWS]
    given = block32() | {"engram.embed.ids": ids}
    table = loaded(saved(tmp_path, given), root)
    assert table.row_map is not None
    rows = table.packed[table.row_map.find(ids.numpy())]
    np.testing.assert_array_equal(rows[:, :64], bytes_of(given["engram.embed.weight"]))


def test_a_manifest_finds_a_byte_that_changed(tmp_path: Path, root: Path) -> None:
    """Of values, and of scales."""
    given = block32()
    path = saved(tmp_path, given)
    write_manifest(path)
    loaded(path, root)
    for name in given:
        damaged = {k: v.view(torch.uint8).clone() if k == name else v for k, v in given.items()}
        damaged[name][1234, 1] ^= 1
        saved(tmp_path, {k: v.view(given[k].dtype) for k, v in damaged.items()})
        with pytest.raises(CheckpointError, match="rows"):
            loaded(path, root)


def test_a_row_that_holds_no_number_is_refused_by_name(tmp_path: Path, root: Path) -> None:
    given = block32()
    given["engram.embed.weight"].view(torch.uint8)[2017, 5] = 0x7F
    with pytest.raises(CheckpointError, match=r"engram.embed.weight.*row 2017 holds a value"):
        loaded(saved(tmp_path, given), root)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        (
            {
                "embed.weight": random(64, 64).to(E4M3),
                "embed.scale": random(1),
                "embed.weight_scale": random(1),
            },
            "two tensors could be its scale",
        ),
        (nvfp4(64) | {"ngram.weight_scale_2": torch.tensor(0.0)}, "scale ngram.weight_scale_2 is 0.0"),
        ({"embed.weight": random(64, 64).to(E4M3)}, "no scale beside it, as embed.weight_scale"),
        ({"embed.weight": random(64, 64).to(E4M3), "embed.weight_scale": random(1, 1, 64)}, "with a scale"),
        ({"embed.weight": random(64, 64).to(E4M3), "embed.weight_scale": random(64, 2)}, "with a scale"),
        ({k: v for k, v in nvfp4(64).items() if not k.endswith("_2")}, "as ngram.weight_scale_2"),
        (block32(64) | {"engram.embed.weight_scale": torch.zeros(64, 3, dtype=torch.uint8)}, "with a scale"),
    ],
)
def test_what_is_no_table_says_why(tmp_path: Path, tensors: dict[str, torch.Tensor], why: str) -> None:
    with open_checkpoint(saved(tmp_path, tensors)) as found:
        key = next(iter(tensors))
        assert why in found.skipped[key]
        with pytest.raises(CheckpointError, match=f"{key}.* cannot be a table"):
            found.matrix(key)


def test_a_part_that_cannot_be_read_is_not_left_out(tmp_path: Path) -> None:
    """One without a scale, the first one, one of two with a number: the table is refused, and its parts that
    can be read are not."""
    both = {f"e.shard_{n}": random(10, 32, seed=n).to(E4M3) for n in (1, 2)}
    both |= {f"e.shard_{n}.scale": random(1, seed=n).abs() for n in (1, 2)}
    for more in ("e.shard_0", "e.shard_3", "e.shard_01"):
        with open_checkpoint(saved(tmp_path, both | {more: random(10, 32).to(E4M3)})) as found:
            assert "part" in found.skipped["e.shard_*"]
            assert found.matrix("e.shard_1").rows == 10
    late = {k.replace("_1", "_5").replace("_2", "_6"): v for k, v in both.items()}
    with open_checkpoint(saved(tmp_path, late)) as found:
        assert "has no part 1" in found.skipped["e.shard_*"]


def test_shards_of_other_values_are_tables_of_their_own(tmp_path: Path) -> None:
    """Whatever their names are."""
    names = [
        "emb.shard_0.weight",
        "emb.shard_1.weight",
        "a*b.shard_1.weight",
        "shard_0.x.shard_1.weight",
        "e.shard_*",
    ]
    names += ["e.shard_" + "9" * 400, "Postcard_shard2_emb.weight"]
    path = saved(tmp_path, {name: random(40, 8) for name in names})
    with open_checkpoint(path) as found:
        assert sorted(found.matrices) == sorted(names)
    spec = first_model(path, "demo", RowFormat.INT8, tmp_path).spec
    assert sorted(t.key for t in spec.tables) == sorted(names)


def test_values_that_do_not_lie_row_after_row(tmp_path: Path) -> None:
    """Of the values, and of a scale of each kind; other tables of the file are read."""
    path = tmp_path / "x.pt"
    scales = random(64, 4).abs().bfloat16()[:, :1]
    codes, steps = torch.zeros(64, 32, dtype=torch.uint8), torch.ones(4, 64).to(E4M3).T
    ok = {"ok.weight": random(64, 8)}
    for tensors in (
        {"q.weight": random(64, 64).to(E4M3), "q.weight_scale": scales},
        {"q.weight": random(64, 64).to(E4M3), "q.weight_scale": torch.tensor([0.5]).expand(64)},
        {"q.weight": codes, "q.weight_scale": steps, "q.weight_scale_2": torch.tensor(0.5)},
    ):
        torch.save(ok | tensors, path)
        with open_checkpoint(path) as found:
            assert "contiguous" in found.skipped["q.weight"]
            assert found.matrix("ok.weight").rows == 64


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_tensors_of_a_distributed_checkpoint_may_be_beside(tmp_path: Path) -> None:
    """Scalars and vectors of floats, which are no scales there."""
    table = {"q.weight": random(40, 32).to(E4M3), "q.weight_scale": torch.tensor(0.5)}
    others = {"a.weight": random(40, 8), "step": random(1)[0], "bias": random(40)}
    checkpoint.save(table | others, checkpoint_id=tmp_path / "d", no_dist=True)
    with open_checkpoint(tmp_path / "d") as found:
        assert found.matrix("a.weight").rows == 40
        assert "as [rows, 1]" in found.skipped["q.weight"]
