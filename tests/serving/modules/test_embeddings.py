"""Modules against torch's own over the same fp32 rows, in every form of input."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from module_tables import ROWS, tables_of
from reference import REFERENCE

from tableside.loader.errors import VersionError
from tableside.loader.versions.versions import Model
from tableside.quant.errors import Problem
from tableside.torch import BadFeatureIds, Bags, EmbeddingBags, Embeddings, ModuleError

Tables = dict[str, np.ndarray]
pytestmark = pytest.mark.usefixtures("reading")
LENGTHS = torch.tensor([3, 0, 5, 1, 0, 40], dtype=torch.int32)
OFFSETS = torch.tensor([0, 3, 3, 8, 9, 9])
ENDS = torch.tensor([0, 3, 3, 8, 9, 9, 49])
# Sums of up to 40 fp32 values below 5 in magnitude, in any order: 40 additions, each rounded to half an ulp
# of at most 200.
TOLERANCE = 40 * 200 * 2.0**-24


def ids_of(count: int = 49, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, ROWS, (count,), generator=torch.Generator().manual_seed(seed))


def torch_bag(table: np.ndarray, mode: str = "sum", ends: bool = False) -> torch.nn.EmbeddingBag:
    return torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(table), mode=mode, include_last_offset=ends)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_bags_are_those_of_torch_in_every_form(model: str, tables: Tables, dtype: torch.dtype) -> None:
    """Offsets, lengths of both integer types, fixed lengths; sums and means of several dims in one call."""
    bags, ids, pages = (
        EmbeddingBags("ads", root=model),
        ids_of().to(dtype),
        ids_of(12, 1).to(dtype).view(6, 2),
    )
    expected = {
        "user_sum": torch_bag(tables["user"])(ids, OFFSETS.to(dtype)),
        "item_mean": torch_bag(tables["item"], "mean")(ids, OFFSETS.to(dtype)),
        "page_sum": torch_bag(tables["page"])(pages),
    }
    for told in (
        (ids, OFFSETS.to(dtype)),
        Bags(ids, OFFSETS),
        Bags(ids, lengths=LENGTHS),
        Bags(ids, lengths=LENGTHS.long()),
    ):
        found = bags({"user_sum": told, "item_mean": told, "page_sum": pages})
        assert list(found) == ["user_sum", "item_mean", "page_sum"]
        for name, vectors in expected.items():
            close(found[name], vectors)
            assert found[name].is_contiguous()


def test_one_bag_is_found_by_its_offset(model: str, tables: Tables) -> None:
    """The commonest request: one bag, offsets [0]."""
    ids = ids_of(20)
    found = EmbeddingBags("ads", ["user_sum"], root=model)({"user_sum": (ids, torch.tensor([0]))})["user_sum"]
    close(found, torch_bag(tables["user"])(ids, torch.tensor([0])))


def test_the_last_offset_may_be_included(model: str, tables: Tables) -> None:
    """include_last_offset means what it means in torch."""
    bags = EmbeddingBags("ads", ["user_sum"], root=model, include_last_offset=True)
    close(
        bags({"user_sum": (ids_of(), ENDS)})["user_sum"], torch_bag(tables["user"], ends=True)(ids_of(), ENDS)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_multiply_rows(model: str, tables: Tables, dtype: torch.dtype) -> None:
    """Weights of any float type; where they want a gradient the call is refused, as there is none."""
    weights = torch.rand(49, generator=torch.Generator().manual_seed(3)).to(dtype)
    bags = EmbeddingBags("ads", ["user_sum"], root=model)
    found = bags({"user_sum": (ids_of(), OFFSETS, weights)})["user_sum"]
    close(found, torch_bag(tables["user"])(ids_of(), OFFSETS, weights.float()))
    weights.requires_grad_()
    with pytest.raises(ModuleError, match="weights require a gradient, and published tables have none"):
        bags({"user_sum": (ids_of(), OFFSETS, weights)})
    with torch.no_grad():
        close(bags({"user_sum": (ids_of(), OFFSETS, weights)})["user_sum"], found)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 3, 4)])
@pytest.mark.drawn(4)
def test_ids_of_any_shape_give_a_vector_each(model: str, tables: Tables, shape: tuple[int, ...]) -> None:
    """As torch.nn.Embedding, bit for bit."""
    ids = torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(1))
    found = Embeddings("ads", root=model)({"user_ids": ids, "item_ids": ids})
    for feature, table in (("user_ids", "user"), ("item_ids", "item")):
        assert torch.equal(
            found[feature], torch.nn.functional.embedding(ids, torch.from_numpy(tables[table]))
        )


@pytest.mark.parametrize("output", [torch.float16, torch.bfloat16])
def test_vectors_have_the_type_that_was_asked_for(model: str, output: torch.dtype) -> None:
    """Rounded once, from fp32: equal to torch's own rounding of the fp32 vectors."""
    told = {"user_ids": ids_of()}
    exact = Embeddings("ads", ["user_ids"], root=model)(told)["user_ids"]
    found = Embeddings("ads", ["user_ids"], root=model, output=output)(told)["user_ids"]
    assert found.dtype is output and torch.equal(found, exact.to(output))


def test_no_bags_and_empty_bags_are_answered(model: str) -> None:
    """A batch of none, and a batch of bags without ids."""
    bags, none = EmbeddingBags("ads", ["user_sum"], root=model), torch.zeros(0, dtype=torch.int64)
    for told in ((none, none), Bags(none, lengths=none), Bags(none, lengths=none.int()), none.view(0, 5)):
        assert bags({"user_sum": told})["user_sum"].shape == (0, 16)
    for told in (
        (none, torch.zeros(4, dtype=torch.int64)),
        Bags(none, lengths=torch.zeros(4, dtype=torch.int32)),
        none.view(4, 0),
    ):
        assert torch.equal(bags({"user_sum": told})["user_sum"], torch.zeros(4, 16))


def test_strided_tensors_are_looked_up_as_what_they_say(model: str, tables: Tables) -> None:
    """A column of ids and every second length; nothing is read past them."""
    ids, lengths = ids_of(98).view(49, 2)[:, 1], LENGTHS.repeat_interleave(2)[::2]
    assert not ids.is_contiguous() and not lengths.is_contiguous()
    found = EmbeddingBags("ads", ["user_sum"], root=model)({"user_sum": Bags(ids, lengths=lengths)})[
        "user_sum"
    ]
    close(found, torch_bag(tables["user"])(ids.contiguous(), OFFSETS))


def test_another_backend_reads_the_same_tensors(model: str, tables: Tables) -> None:
    """The address space as one buffer is none of the native kernel's own."""
    bags = EmbeddingBags("ads", ["user_sum", "item_mean"], root=model, backend="fbgemm")
    found = bags(dict.fromkeys(("user_sum", "item_mean"), (ids_of(), OFFSETS)))
    close(found["user_sum"], torch_bag(tables["user"])(ids_of(), OFFSETS))
    close(found["item_mean"], torch_bag(tables["item"], "mean")(ids_of(), OFFSETS))


# ---- what is wrong ----


def test_a_bad_id_is_named_with_its_feature_position_and_bound(model: str) -> None:
    """In the second feature of a call, so that the number of the lookup is no accident."""
    ids = ids_of()
    ids[17] = ROWS
    with pytest.raises(
        BadFeatureIds,
        match=r"feature 'item_mean': id 500 at position 17 is outside the table's rows \[0, 500\)",
    ) as e:
        EmbeddingBags("ads", ["user_sum", "item_mean"], root=model)(
            {"user_sum": (ids_of(), OFFSETS), "item_mean": (ids, OFFSETS)}
        )
    found = e.value
    assert (found.feature, found.problem, found.position, found.value, found.bound) == (
        "item_mean",
        Problem.ID,
        17,
        ROWS,
        ROWS,
    )
    assert isinstance(found, ValueError)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (Bags(ids_of(), lengths=torch.tensor([50, -1])), "length -1 at position 1 is negative"),
        (
            Bags(ids_of(), lengths=torch.tensor([50, -1], dtype=torch.int32)),
            "length -1 at position 1 is negative",
        ),
        (Bags(ids_of(), lengths=torch.tensor([24, 24])), "the 2 lengths add up to 48, but there are 49 ids"),
        (
            Bags(ids_of(), lengths=torch.tensor([2**32 + 24, 25])),
            "the 2 lengths add up to 4294967345, but there are 49 ids",
        ),
        (Bags(ids_of(), torch.tensor([0, 20, 10])), "length -10 at position 1 is negative"),
        (Bags(ids_of(), torch.tensor([1, 20])), "the first offset is 1; expected 0"),
        (Bags(ids_of(), torch.tensor([1])), "the first offset is 1; expected 0"),
        (
            Bags(ids_of(), torch.tensor([0, 2**32 + 3, 5])),
            r"the offset 4294967299 at position 1 is outside the ids \[0, 49\]",
        ),
        (Bags(ids_of(), torch.tensor([0, -5])), r"the offset -5 at position 1 is outside the ids \[0, 49\]"),
    ],
)
@pytest.mark.drawn(9)
def test_bags_that_are_not_those_ids_are_refused(model: str, told: Bags, message: str) -> None:
    """Numbers of 64 bits whose low halves would fit are refused too."""
    with pytest.raises(ValueError, match=f"feature 'user_sum': {message}"):
        EmbeddingBags("ads", ["user_sum"], root=model)({"user_sum": told})


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({}, "the call lacks user_sum"),
        ({"user_sum": ids_of().view(7, 7), "other": ids_of()}, "has other besides"),
        ({"user_sum": ids_of()}, "is pooled and came as a tensor of 1 dimensions"),
        ({"user_sum": Bags(ids_of())}, "has neither offsets nor lengths"),
        ({"user_sum": Bags(ids_of(), OFFSETS, LENGTHS)}, "with offsets and lengths; expected"),
        (
            {"user_sum": (ids_of().float(), OFFSETS)},
            r"ids are torch.float32; expected torch.int64 or torch.int32",
        ),
        ({"user_sum": (ids_of(), OFFSETS.float())}, r"lengths or offsets are torch.float32"),
        (
            {"user_sum": (ids_of(), OFFSETS, torch.ones(48))},
            r"weights are torch.float32 \[48\]; expected 49 floats",
        ),
        ({"user_sum": ids_of().view(7, 7).to("meta")}, "a tensor is on meta, the module's tables on cpu"),
    ],
)
@pytest.mark.drawn(9)
def test_inputs_of_another_form_are_refused(model: str, told: dict[str, object], message: str) -> None:
    """Each with what was expected."""
    with pytest.raises(ModuleError, match=message):
        EmbeddingBags("ads", ["user_sum"], root=model)(told)


def test_features_and_models_that_are_not_there_are_named(model: str) -> None:
    """With what is there; a feature of another pooling belongs to the other module."""
    with pytest.raises(
        ModuleError, match=r"no feature 'user_ids' of pooling sum or mean; it has: user_sum \(sum\)"
    ):
        EmbeddingBags("ads", ["user_ids"], root=model)
    with pytest.raises(ModuleError, match="no feature 'user_sum' of pooling none"):
        Embeddings("ads", ["user_sum"], root=model)
    with pytest.raises(VersionError, match="no version is live"):
        EmbeddingBags("other", root=model)
    with pytest.raises(ModuleError, match=r"output is torch\.int8; expected one of: torch\.float32"):
        EmbeddingBags("ads", root=model, output=torch.int8)
    with pytest.raises(ModuleError, match="device is 'gpu'; expected 'cpu' or the GPU by its number"):
        EmbeddingBags("ads", root=model, device="gpu")
    with pytest.raises(ModuleError, match="expected follow='live' without a version"):
        EmbeddingBags("ads", root=model, version=1)


def test_the_default_folder_is_that_of_the_commands(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """TABLESIDE_ROOT counts, as for `tableside load`."""
    monkeypatch.setenv("TABLESIDE_ROOT", model)
    assert EmbeddingBags("ads").version == 1


def test_quantized_rows_are_what_the_segment_holds(root: Path, publish: object) -> None:
    """int8 rows: the vectors are those of FBGEMM's dequantized rows, bit for bit, as the specification has
    them."""
    publish(tables_of(), "q", {"user": "int8", "item": "int4"}, {"u": {"table": "user", "pooling": "none"}})  # type: ignore[operator]
    ours = Embeddings("q", ["u"], root=root)({"u": torch.arange(ROWS)})["u"]
    np.testing.assert_array_equal(
        ours.numpy(), REFERENCE.dequantize(Model(root, "q").attach().tables["user"])
    )
    assert not torch.equal(ours, torch.from_numpy(tables_of()["user"]))


IN_LISTS: dict[str, Callable[[EmbeddingBags, Embeddings], object]] = {
    "ids, a list": lambda bags, ids: bags({"user_sum": [[1, 2]]}),
    "ids, a list of three": lambda bags, ids: bags({"user_sum": [1, 2, 3]}),
    "ids, an array": lambda bags, ids: bags({"user_sum": np.ones((2, 2), np.int64)}),
    "ids, a number": lambda bags, ids: bags({"user_sum": 3}),
    "ids, nothing": lambda bags, ids: bags({"user_sum": None}),
    "ids with offsets, an array": lambda bags, ids: bags({"user_sum": (np.arange(3), torch.tensor([0]))}),
    "offsets, a list": lambda bags, ids: bags({"user_sum": (torch.arange(3), [0])}),
    "offsets, an array": lambda bags, ids: bags({"user_sum": (torch.arange(3), np.array([0]))}),
    "lengths, a list": lambda bags, ids: bags({"user_sum": Bags(torch.arange(3), lengths=[3])}),
    "weights, a list": lambda bags, ids: bags(
        {"user_sum": (torch.arange(3), torch.tensor([0]), [1.0, 1.0, 1.0])}
    ),
    "weights, an array": lambda bags, ids: bags(
        {"user_sum": (torch.arange(3), torch.tensor([0]), np.ones(3))}
    ),
    "packed ids": lambda bags, ids: bags.packed([1, 2], torch.tensor([0, 2])),
    "packed offsets": lambda bags, ids: bags.packed(torch.arange(2), np.array([0, 2])),
    "packed weights": lambda bags, ids: bags.packed(torch.arange(2), torch.tensor([0, 2]), [1.0, 1.0]),
    "ids of sequences, a list": lambda bags, ids: ids({"user_ids": [1]}),
    "ids of sequences, an array": lambda bags, ids: ids({"user_ids": np.arange(3)}),
    "all": lambda bags, ids: bags(torch.arange(3)),
    "all, a list": lambda bags, ids: ids([1, 2]),
}


@pytest.mark.parametrize("case", IN_LISTS)
@pytest.mark.drawn(18)
def test_what_is_no_tensor_is_a_type_error(model: str, case: str) -> None:
    """That says what is expected: a tensor."""
    bags, ids = EmbeddingBags("ads", ["user_sum"], root=model), Embeddings("ads", ["user_ids"], root=model)
    with pytest.raises(TypeError, match=r"expected .*torch\.Tensor") as error:
        IN_LISTS[case](bags, ids)
    assert isinstance(error.value, ModuleError)
