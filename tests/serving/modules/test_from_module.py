"""From a module and its state dict to published tables in its place, by `tableside init --from-module`,
without a mapping."""

import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_tableside

from tableside.torch import swap_embeddings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import (
        EmbeddingBagCollection,
        EmbeddingBagConfig,
        EmbeddingCollection,
        EmbeddingConfig,
        KeyedJaggedTensor,
    )
    from torchrec.modules.embedding_configs import PoolingType

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)  # torch's
ROWS, IDS = 200, 6
# int8 rows: a step is (max - min) / 255 of a row, and fp16 scale and bias add 2**-11 of their values. Weights
# are within [-1, 1].
STEP = 2 / 255 / 2 + 2 * 2.0**-11 + 255 * (2 / 255) * 2.0**-11
TOLERANCE = IDS * STEP


def uniform(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data.uniform_(-1, 1, generator=generator)
    return module.eval()


def published(module: torch.nn.Module, description: Path, folder: Path, root: Path) -> None:
    """The state dict through `init` and `load`, by the commands."""
    torch.save(module.state_dict(), folder / "trained.pt")
    toml = folder / "model.toml"
    found = run_tableside(
        "init", folder / "trained.pt", "--from-module", description, "--name", "ads", "--out", toml
    )
    assert found.returncode == 0, found.stderr
    found = run_tableside("load", toml, root=root)
    assert found.returncode == 0, found.stderr


class Towers(torch.nn.Module):
    """torch's modules at several depths, of which two have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = torch.nn.ModuleDict(
            {
                "left": torch.nn.EmbeddingBag(ROWS, 8, mode="sum"),
                "right": torch.nn.EmbeddingBag(ROWS + 1, 8, mode="mean", include_last_offset=True),
            }
        )
        self.words = torch.nn.Embedding(ROWS, 8)
        self.again = torch.nn.Embedding(ROWS, 8)
        self.again.weight = self.words.weight
        self.top = torch.nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pooled = (
            self.towers["left"](ids, offsets),
            self.towers["right"](ids, torch.nn.functional.pad(offsets, (0, 1), value=IDS)),
        )
        return *pooled, self.words(ids), self.again(ids + 1), self.top(pooled[0])


@pytest.mark.drawn(0.25)
@pytest.mark.parametrize(
    "form", [lambda program: program, lambda program: program.run_decompositions()], ids=["exported", "core"]
)
@pytest.mark.parametrize("strict", [False, True])
def test_a_plain_module_through_an_exported_program(
    tmp_path: Path, root: Path, form: Callable[[Any], Any], strict: bool
) -> None:
    """Features are called as their modules, so that a swap needs no mapping."""
    module = uniform(Towers())
    inputs = torch.tensor([0, 5, 5, 17, 198, 3]), torch.tensor([0, 2])
    torch.export.save(form(torch.export.export(module, inputs, strict=strict)), tmp_path / "module.pt2")
    published(module, tmp_path / "module.pt2", tmp_path, root)
    expected = module(*inputs)
    assert set(swap_embeddings(module, "ads", root=str(root))) == {
        "towers.left",
        "towers.right",
        "words",
        "again",
    }
    assert module.towers["left"].bags.features == ("towers_left",)
    for found, before in zip(module(*inputs), expected, strict=True):
        torch.testing.assert_close(found, before, rtol=0, atol=8 * TOLERANCE)
        assert not torch.equal(found, before)


def bag_configs() -> list[EmbeddingBagConfig]:
    """Two tables with a feature in common."""
    return [
        EmbeddingBagConfig(
            name="users",
            embedding_dim=8,
            num_embeddings=ROWS,
            feature_names=["clicked", "shared"],
            pooling=PoolingType.SUM,
        ),
        EmbeddingBagConfig(
            name="places",
            embedding_dim=16,
            num_embeddings=50,
            feature_names=["place.id", "shared"],
            pooling=PoolingType.MEAN,
        ),
    ]


class Collections(torch.nn.Module):
    """TorchRec's collections; the feature `clicked` is pooled by one and not by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables=bag_configs())
        configs = [
            EmbeddingConfig(
                name="words", embedding_dim=8, num_embeddings=ROWS, feature_names=["clicked", "word"]
            )
        ]
        self.ec = EmbeddingCollection(tables=configs)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        pooled = self.ebc(features)
        return pooled.to_dict() | {f"words of {name}": v.values() for name, v in self.ec(features).items()}


def told() -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, IDS + 1, (4 * 3,), generator=generator, dtype=torch.int32)
    values = torch.randint(0, 50, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["shared", "place.id", "word", "clicked"], values, lengths=lengths)


def as_before(module: torch.nn.Module, root: Path) -> None:
    """Swaps, and compares what the module gave."""
    expected = module(told())
    assert set(swap_embeddings(module, "ads", root=str(root))) == {"ebc", "ec"}
    found = module(told())
    assert list(found) == list(expected)
    for name, before in expected.items():
        torch.testing.assert_close(found[name], before, rtol=0, atol=TOLERANCE)


@pytest.mark.thorough
@pytest.mark.parametrize("apart", [False, True])
def test_torchrecs_collections_through_their_configurations(
    tmp_path: Path, root: Path, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of docs/torch.md write the configurations; features keep their names, and a feature of
    several is told apart."""
    module = uniform(Collections())
    text = (Path(__file__).parents[3] / "docs" / "torch.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(
        text.split("This writes them:\n\n```py\n")[1].split("```")[0],
        {"model": module, "json": json, "asdict": dataclasses.asdict, "Path": Path},
    )
    if not apart:
        found = json.loads((tmp_path / "module.json").read_text())
        (tmp_path / "module.json").write_text(json.dumps([*found["ebc"], *found["ec"]]))
    published(module, tmp_path / "module.json", tmp_path, root)
    as_before(module, root)
    assert module.ebc.bags.features == ("clicked:users", "shared:users", "place_id", "shared:places")
    assert module.ec.embeddings.features == ("clicked:words", "word")


@pytest.mark.thorough
def test_torchrecs_collections_through_an_exported_program(tmp_path: Path, root: Path) -> None:
    """The program tells tables alone: each is a feature, and every feature of the collection over it reads
    that one."""
    module = uniform(Collections())
    torch.export.save(torch.export.export(module, (told(),), strict=False), tmp_path / "module.pt2")
    published(module, tmp_path / "module.pt2", tmp_path, root)
    as_before(module, root)
    assert module.ebc.bags.features == ("users", "users", "places", "places")


@pytest.mark.drawn(0.5)
def test_the_checkpoint_of_another_module_is_refused(tmp_path: Path) -> None:
    """With the rows and dims of both."""
    torch.save({"ebc.embedding_bags.users.weight": torch.zeros(ROWS, 8)}, tmp_path / "other.pt")
    (tmp_path / "module.json").write_text(
        json.dumps([dataclasses.asdict(c) for c in bag_configs()[:1]], default=str)
    )
    description = json.loads((tmp_path / "module.json").read_text())
    description[0]["num_embeddings"] += 1
    (tmp_path / "module.json").write_text(json.dumps(description))
    found = run_tableside(
        "init", tmp_path / "other.pt", "--from-module", tmp_path / "module.json", "--out", tmp_path / "m.toml"
    )
    assert found.returncode == 1
    assert (
        "the module has 201 rows of dim 8, and ebc.embedding_bags.users.weight of the checkpoint 200 rows of "
        "dim 8" in found.stderr
    )
