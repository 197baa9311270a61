"""Modules whose lookups FBGEMM's operator makes (backend="fbgemm"): what the native kernel takes, with its
vectors."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raw_loads import publish_raw
from support import rows_of

from tableside.quant.cpu import fbgemm
from tableside.quant.errors import Problem
from tableside.torch import BadFeatureIds, Bags, EmbeddingBags, Embeddings, ModuleError, swap_embeddings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchrec import KeyedJaggedTensor

ROWS = 300
DIMS = {"int2": 36, "int4": 18, "int8": 65, "fp8": 12, "fp16": 33, "fp32": 7}
POOLED = [f"{table}_{pooling}" for table in DIMS for pooling in ("sum", "mean")]
LENGTHS = torch.tensor([3, 0, 5, 1, 0, 40], dtype=torch.int32)
OFFSETS, ENDS = torch.tensor([0, 3, 3, 8, 9, 9]), torch.tensor([0, 3, 3, 8, 9, 9, 49])
IDS = torch.randint(0, ROWS, (49,), generator=torch.Generator().manual_seed(0))
# Sums of up to 40 values below 5 in magnitude, in another order: 40 additions, each rounded to half an ulp of
# at most 200.
TOLERANCE = 40 * 200 * 2.0**-24
HALVES = 200 * 2.0**-11  # sums are rounded to fp16 once more


@pytest.fixture
def formats(root: Path, publish: Callable[..., Any]) -> str:
    """The folder of a model with a table of each row format, at odd dims where the format has them."""
    features = {f"{t}_{p}": {"table": t, "pooling": p} for t in DIMS for p in ("sum", "mean", "none")}
    publish(
        {t: rows_of(ROWS, dim, n) for n, (t, dim) in enumerate(DIMS.items())},
        "ads",
        dict(zip(DIMS, DIMS, strict=True)),
        features,
    )
    return str(root)


def both(kind: type[Any], root: str, features: list[str], **options: Any) -> tuple[Any, Any]:
    native, theirs = (
        kind("ads", features, root=root, backend=backend, **options) for backend in ("native", "fbgemm")
    )
    assert theirs._published.now().served.backend.name == "fbgemm"
    return native, theirs


FORMS = {
    "offsets": (IDS, OFFSETS),
    "int32 offsets": (IDS.int(), OFFSETS.int()),
    "lengths": Bags(IDS, lengths=LENGTHS),
    "weights": (IDS, OFFSETS, torch.linspace(-1, 1, 49)),
    "weighted lengths": Bags(IDS, lengths=LENGTHS.long(), weights=torch.linspace(0, 1, 49)),
    "fixed": IDS[:48].view(6, 8),
    "one bag": (IDS, torch.tensor([0])),
    "no ids": Bags(IDS[:0], lengths=torch.zeros(3, dtype=torch.int32)),
    "no bags": (IDS[:0], OFFSETS[:0]),
    "strided": Bags(IDS.repeat_interleave(2)[::2], lengths=LENGTHS.repeat_interleave(2)[::2]),
}


@pytest.mark.parametrize("output", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.drawn(7)
def test_bags_in_every_form_row_format_and_type(formats: str, form: str, output: torch.dtype) -> None:
    """As the native kernel pools them."""
    native, theirs = both(EmbeddingBags, formats, POOLED, output=output)
    found, expected = theirs(dict.fromkeys(POOLED, FORMS[form])), native(dict.fromkeys(POOLED, FORMS[form]))
    within = {torch.float32: TOLERANCE, torch.float16: HALVES, torch.bfloat16: 8 * HALVES}[output]
    for name in POOLED:
        assert found[name].dtype is output and found[name].is_contiguous()
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=within)


def test_features_of_several_numbers_of_bags_in_one_call(formats: str) -> None:
    """They are several calls of the operator, and come back in their places."""
    native, theirs = both(EmbeddingBags, formats, POOLED)
    told = {name: list(FORMS.values())[n % len(FORMS)] for n, name in enumerate(POOLED)}
    for name, expected in native(told).items():
        torch.testing.assert_close(theirs(told)[name], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("output", [torch.float32, torch.float16])
def test_sequences_of_any_shape(formats: str, output: torch.dtype) -> None:
    """Bit for bit, as nothing is added."""
    features = [f"{t}_none" for t in DIMS]
    native, theirs = both(Embeddings, formats, features, output=output)
    for ids in (IDS, IDS[:48].view(2, 3, 8), IDS[:0], IDS[0]):
        expected = native(dict.fromkeys(features, ids))
        for name, found in theirs(dict.fromkeys(features, ids)).items():
            torch.testing.assert_close(
                found, expected[name], rtol=0, atol=2.0**-22 if output is torch.float32 else 2.0**-9
            )


@pytest.mark.parametrize("weighted", [False, True])
def test_keyed_tensors_are_one_call_of_the_operator(
    formats: str, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sums and of means each, whatever the order of the keys; the operator is bound once."""
    bound, called = [], []
    real = fbgemm.operator

    def counted(tables: Any, half: bool = False) -> Any:
        call = real(tables, half)
        bound.append(len(tables))

        def run(*arguments: Any) -> Any:
            called.append(len(tables))
            return call(*arguments)

        return run

    monkeypatch.setattr(fbgemm, "operator", counted)
    native, theirs = both(EmbeddingBags, formats, POOLED)
    bound.clear(), called.clear()  # of the version's warm-up
    keys = POOLED[::-1]
    lengths = LENGTHS.repeat(len(keys))
    weights = torch.rand(49 * len(keys), generator=torch.Generator().manual_seed(1)) if weighted else None
    told = KeyedJaggedTensor(keys, IDS.repeat(len(keys)), weights, lengths=lengths)
    for _ in range(3):
        torch.testing.assert_close(theirs(told).values(), native(told).values(), rtol=0, atol=TOLERANCE)
    assert sorted(bound) == [6, 6] and called == [6, 6] * 3


def test_raw_ids_and_missing_ids(root: Path, tmp_path: Path) -> None:
    """An id that has no row reads the default row; where there is none, it is named."""
    ids = np.array([-1, 2**62, 7, -(2**63)])
    for name, missing in (("ads", "mean"), ("strict", "error")):
        publish_raw(tmp_path, root, {"t": (ids, rows_of(4, 8))}, {"t": {"missing": missing}}, name)
    told = torch.tensor([[-1, 5], [2**62, 7]])
    native, theirs = both(EmbeddingBags, str(root), ["t"])
    torch.testing.assert_close(theirs({"t": told})["t"], native({"t": told})["t"], rtol=0, atol=TOLERANCE)
    with pytest.raises(
        BadFeatureIds, match="feature 't': id 5 at position 1 is not among the table's 4 ids"
    ) as error:
        EmbeddingBags("strict", root=str(root), backend="fbgemm")({"t": told})
    assert error.value.problem is Problem.MISSING


def test_a_wrong_id_is_refused_and_a_wrong_length_too(formats: str) -> None:
    """FBGEMM's operator would read other memory; the error is that of the native kernel."""
    native, theirs = both(EmbeddingBags, formats, POOLED[:2])
    for wrong in (
        (IDS + ROWS, OFFSETS),
        Bags(IDS, lengths=LENGTHS + 1),
        Bags(IDS, lengths=-LENGTHS),
        (IDS - 400, OFFSETS),
    ):
        errors = []
        for module in (native, theirs):
            with pytest.raises(BadFeatureIds) as error:
                module({POOLED[0]: FORMS["offsets"], POOLED[1]: wrong})
            errors.append(str(error.value))
        assert errors[0] == errors[1]


@pytest.mark.drawn(0.5)
def test_swapped_and_compiled_calls_go_through_it(formats: str) -> None:
    """The backend is part of what a program names."""
    model = torch.nn.ModuleDict({"int8_sum": torch.nn.EmbeddingBag(ROWS, DIMS["int8"], mode="sum")})
    swap_embeddings(model, "ads", root=formats, backend="fbgemm")
    assert model["int8_sum"].bags._published.now().served.backend.name == "fbgemm"
    torch.compiler.reset()
    compiled = torch.compile(model["int8_sum"], fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(IDS, OFFSETS), model["int8_sum"](IDS, OFFSETS))


def test_a_backend_that_is_none_is_refused(formats: str) -> None:
    """With those that there are."""
    with pytest.raises(ModuleError, match="backend: Input should be 'native' or 'fbgemm'"):
        EmbeddingBags("ads", root=formats, backend="tbe")
