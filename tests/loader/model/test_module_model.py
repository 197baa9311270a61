"""`tableside init --from-module`: a module's features, from TorchRec's configurations or an exported
program."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tableside.loader.errors import ModelError
from tableside.loader.model.first_model import module_model
from tableside.loader.model.specs import ModelSpec
from tableside.quant import RowFormat

USERS, THINGS = np.ones((50, 8), np.float32), np.ones((40, 4), np.float32)


def config(name: str, shape: tuple[int, int], *features: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "num_embeddings": shape[0],
        "embedding_dim": shape[1],
        "feature_names": list(features),
        **more,
    }


def propose(
    folder: Path, module: Any, file: str = "module.json", **tensors: np.ndarray
) -> tuple[ModelSpec, list[str]]:
    if isinstance(module, bytes):
        (folder / file).write_bytes(module)
    else:
        (folder / file).write_text(yaml.safe_dump(module) if file.endswith("yaml") else json.dumps(module))
    np.savez(folder / "c.npz", **tensors)
    return module_model(folder / file, folder / "c.npz", None, RowFormat.INT8, folder)[:2]


def features_of(spec: ModelSpec) -> list[tuple[str, str, str]]:
    return [(f.name, f.table, f.pooling) for f in spec.features]


BAGS, TABLE = "ebc.embedding_bags.users.weight", "ec.embeddings.words.weight"


@pytest.mark.parametrize("file", ["module.json", "module.yaml", "module.yml"])
def test_configurations_name_tables_features_and_poolings(tmp_path: Path, file: str) -> None:
    """As TorchRec names them; what is without a pooling is not pooled, and a table without features has
    one of its name."""
    module = [
        config("users", (50, 8), "clicked", "bought", pooling="MEAN"),
        config("things", (40, 4), pooling="PoolingType.SUM"),
        config("words", (40, 4), "w"),
    ]
    arrays = {BAGS: USERS, "ebc.embedding_bags.things.weight": THINGS, TABLE: THINGS, "top.weight": USERS}
    spec, skipped = propose(tmp_path, module, file, **arrays)
    assert {t.name: t.key for t in spec.tables} == {
        "users": BAGS,
        "things": "ebc.embedding_bags.things.weight",
        "words": TABLE,
    }
    assert features_of(spec) == [
        ("clicked", "users", "mean"),
        ("bought", "users", "mean"),
        ("things", "things", "sum"),
        ("w", "words", "none"),
    ]
    assert skipped == [
        f"top.weight: a matrix {[*USERS.shape]} of fp32, which no embedding of " + file + " is"
    ]


def test_features_of_several_tables_are_told_apart(tmp_path: Path) -> None:
    """By their table inside a collection and across collections; by the collection where tables have one
    name too."""
    module = {
        "a": [
            config("users", (50, 8), "shared", "own", pooling="SUM"),
            config("things", (40, 4), "shared", pooling="SUM"),
        ],
        "b.c": [config("users", (50, 8), "own", "other:one", pooling="SUM")],
        "d": [config("words", (40, 4), "other.one")],
    }
    arrays = {
        "m.a.embedding_bags.users.weight": USERS,
        "m.a.embedding_bags.things.weight": THINGS,
        "m.b.c.embedding_bags.users.weight": USERS,
        "m.d.embeddings.words.weight": THINGS,
    }
    spec, _ = propose(tmp_path, module, **arrays)
    assert [t.name for t in spec.tables] == ["users", "things", "users_2", "words"]
    assert [t.key for t in spec.tables] == list(arrays)
    assert features_of(spec) == [
        ("shared:users", "users", "sum"),
        ("a_own:users", "users", "sum"),
        ("shared:things", "things", "sum"),
        ("b_c_own:users", "users_2", "sum"),
        ("other:one", "users_2", "sum"),
        ("other_one", "words", "none"),
    ]


def test_all_that_does_not_fit_the_checkpoint_is_listed(tmp_path: Path) -> None:
    """Tables that are not there, other shapes, several that could be meant, and a pooling that was
    forgotten."""
    module = [
        config("gone", (5, 8), pooling="SUM"),
        config("users", (51, 9), pooling="SUM"),
        config("things", (40, 4), pooling="SUM"),
        config("words", (40, 4)),
    ]
    twice = {f"{path}.embedding_bags.things.weight": THINGS for path in ("a", "b")}
    with pytest.raises(ModelError) as error:
        propose(tmp_path, module, **{BAGS: USERS, "x.embedding_bags.words.weight": THINGS}, **twice)
    for line in (
        "c.npz does not fit",
        "table gone: looked for embedding_bags.gone.weight, gone.weight, gone; the checkpoint has "
        "a.embedding_bags.things.weight",
        f"table users: the module has 51 rows of dim 9, and {BAGS} of the checkpoint 50 rows of dim 8; give "
        "the checkpoint",
        "table things: a.embedding_bags.things.weight, b.embedding_bags.things.weight of the checkpoint "
        "could be it",
        "table words: x.embedding_bags.words.weight of the checkpoint lies in embedding_bags, and its "
        "pooling is none",
    ):
        assert line in str(error.value)


def test_a_table_of_raw_ids_is_compared_by_its_dim(tmp_path: Path) -> None:
    """Only ids that were trained have rows, whatever the module could hold."""
    found = {"users.weight": USERS, "users.ids": np.arange(50)}
    spec, skipped = propose(tmp_path, [config("users", (1000, 8), "u", pooling="SUM")], **found)
    assert spec.tables[0].raw is not None and spec.tables[0].raw.key == "users.ids" and not skipped
    with pytest.raises(
        ModelError,
        match=r"the module has 1,000 rows of dim 9, and users\.weight of the checkpoint 50 rows of dim 8",
    ):
        propose(tmp_path, [config("users", (1000, 9), "u", pooling="SUM")], **found)


WRONG = [
    ([], "expected a list of TorchRec's configurations"),
    ({"ebc": {}}, "such a list}; found dict"),
    ("text", "found str"),
    ([[]], "expected the fields of an EmbeddingBagConfig, which begin with a name; found list"),
    ([{"num_embeddings": 3}], "which begin with a name; found dict"),
    ([config("t", (0, 4))], "num_embeddings of 't' is 0; expected a number from 1"),
    ([config("t", (4, True))], "embedding_dim of 't' is True; expected a number from 1"),
    (
        [config("t", (4, 4)) | {"feature_names": "u"}],
        "feature_names of 't' are 'u'; expected a list of names",
    ),
    ([config("t", (4, 4), pooling="MAX")], "pooling of 't' is 'MAX'; expected SUM or MEAN"),
    ([config("t", (4, 4), pooling=[1])], "pooling of 't' is list"),
    ([config("t", (4, 4), "a" * 201)], "feature name 'aaa"),
    (
        [config("t", (4, 4), "u", pooling="SUM"), config("t", (4, 4), "u", pooling="SUM")],
        "two features would be called 'u:t'",
    ),
]


@pytest.mark.parametrize(("module", "message"), WRONG)
def test_wrong_configurations_are_named(tmp_path: Path, module: Any, message: str) -> None:
    """With the file, the field, what is there and what was expected."""
    with pytest.raises(ModelError) as error:
        propose(tmp_path, module, t=THINGS)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("module.json", b"{", "not JSON"),
        ("module.yaml", b"[", "not YAML"),
        ("module.yaml", b"!!python/object/apply:os.system [ls]", "not YAML"),
        ("module.yaml", b"[" * 5000, "not YAML"),
        (
            "module.txt",
            b"",
            "expected an exported program (.pt2), or TorchRec's configurations (.json, .yaml)",
        ),
        ("module.pt2", b"PK", "not a zip archive"),
    ],
)
@pytest.mark.drawn(3)
def test_files_that_are_something_else_are_refused(
    tmp_path: Path, file: str, content: bytes, message: str
) -> None:
    """Whatever they hold, nothing of it runs."""
    with pytest.raises(ModelError) as error:
        propose(tmp_path, content, file, t=THINGS)
    assert message in str(error.value)


def test_yaml_of_endless_aliases_is_refused_at_once(tmp_path: Path) -> None:
    """An error does not write out what aliases stand for."""
    lines = ["- &a0 [x, x, x, x, x, x, x, x, x]"] + [
        f"- &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)
    ]
    with pytest.raises(ModelError, match="found list"):
        propose(tmp_path, "\n".join(lines).encode(), "module.yaml", t=THINGS)


# ---- exported programs, as data ----


def program(nodes: list[dict[str, Any]], sizes: dict[str, list[int]] | None = None) -> dict[str, Any]:
    """What `models/model.json` holds of a graph. sizes: of the parameters; p_a_b_weight is a.b.weight."""
    sizes = sizes or {"p_a_user_weight": [50, 8]}
    names = {p: p.removeprefix("p_").replace("_", ".") for p in sizes}
    specs = [{"parameter": {"arg": {"name": p}, "parameter_name": n}} for p, n in names.items()]
    values = {p: {"sizes": [{"as_int": s} for s in shape]} for p, shape in sizes.items()}
    return {
        "graph_module": {
            "graph": {"nodes": nodes, "tensor_values": values},
            "signature": {"input_specs": specs},
        },
    }


def call(
    weight: str = "p_a_user_weight", target: str = "embedding_bag.padding_idx", stack: str = "", **more: Any
) -> dict[str, Any]:
    arguments = {"weight": {"as_tensor": {"name": weight}}, **more}
    inputs = [{"name": name, "arg": arg} for name, arg in arguments.items()]
    return {
        "target": f"torch.ops.aten.{target}",
        "inputs": inputs,
        "metadata": {"nn_module_stack": stack} if stack else {},
    }


def propose_program(
    folder: Path, found: Any, name: str = "m/models/model.json", **tensors: np.ndarray
) -> ModelSpec:
    with zipfile.ZipFile(folder / "m.pt2", "w") as archive:
        archive.writestr(name, json.dumps(found))
    np.savez(folder / "c.npz", **tensors)
    return module_model(folder / "m.pt2", folder / "c.npz", None, RowFormat.INT8, folder)[0]


def test_a_graphs_calls_name_features_by_their_modules(tmp_path: Path) -> None:
    """By the module that called; else by the weight. A mode that is left out is a sum; the same call twice
    is one feature."""
    stack = "L__self__,,M;L__self__a.b,a.{},torch.nn.modules.sparse.Embedding"
    nodes = [
        call(target="_embedding_bag.default"),
        call(target="_embedding_bag.default", padding_idx={"as_int": -1}),
        call("p_a_tied_weight", "embedding.default", stack.format("tied")),
        call("p_a_tied_weight", "embedding.default", stack.format("again")),
        call("p_a_tied_weight", "embedding.default", "L__self__,,M"),
    ]
    sizes = {"p_a_user_weight": [50, 8], "p_a_tied_weight": [40, 4], "p_a_again_weight": [40, 4]}
    arrays = {"a.user.weight": USERS, "a.again.weight": THINGS}  # a weight of two modules, saved once
    spec = propose_program(tmp_path, program(nodes, sizes), **arrays)
    assert [(t.name, t.key) for t in spec.tables] == [
        ("a_user", "a.user.weight"),
        ("a_tied", "a.again.weight"),
    ]
    assert features_of(spec) == [
        ("a_user", "a_user", "sum"),
        ("a_tied", "a_tied", "none"),
        ("a_again", "a_tied", "none"),
    ]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (program([]), "the program calls neither aten.embedding nor aten.embedding_bag"),
        (
            program([call(mode={"as_int": 2})]),
            "the bags of a.user.weight are pooled by mode 2 (max), which is not served",
        ),
        (program([call(padding_idx={"as_int": 3})]), "padding_idx 3 of a.user.weight leaves ids out of bags"),
        (program([call("mul")]), "an embedding reads 'mul', which is computed"),
        (program([call(), call(mode={"as_int": 1})]), "two features would be called 'a_user'"),
        (
            program([call()], {"p_a_user_weight": [50]}),
            "no exported program that this release understands (ValueError",
        ),
        ({"graph_module": []}, "no exported program that this release understands (TypeError"),
    ],
)
def test_programs_that_cannot_be_served_are_refused(tmp_path: Path, found: Any, message: str) -> None:
    """With the weight and the reason."""
    with pytest.raises(ModelError) as error:
        propose_program(tmp_path, found, **{"a.user.weight": USERS})
    assert message in str(error.value)


def test_an_archive_without_a_graph_is_refused(tmp_path: Path) -> None:
    """As one of AOTInductor's is."""
    with pytest.raises(ModelError, match=r"it has 0 entries models/model\.json; expected one"):
        propose_program(tmp_path, {}, "m/data/aotinductor/x.json")
