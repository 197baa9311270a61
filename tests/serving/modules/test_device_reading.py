"""Tensors on a GPU, or on Triton's interpreter (--device), which a module reads by one call of C."""

from types import MappingProxyType
from typing import Any

import pytest
import tables as devices
import torch
from device_calls import IDS, OFFSETS, there
from module_tables import ROWS

from tableside.quant.cpu.bags import device_places, tensor_places
from tableside.serving.modules import device
from tableside.serving.modules.inputs import FeatureTensors, Form
from tableside.serving.modules.lookups import BY_INPUT, EXCHANGE
from tableside.torch import BadFeatureIds, Bags, EmbeddingBags, Embeddings, ModuleError

pytest.importorskip("triton")


@pytest.mark.skipif(EXCHANGE is None, reason="torch 2.11 and later")
@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.drawn(1)
def test_tensors_are_read_by_one_call(
    model: str, monkeypatch: pytest.MonkeyPatch, include_last_offset: bool
) -> None:
    """Where kernels take them as they are: ids with offsets of both types, bags of one length, no bags; and
    such calls give what the slow way gives."""
    pooled = ["user_sum", "item_mean", "page_sum"]
    options: dict[str, Any] = {"device": devices.DEVICE, "include_last_offset": include_last_offset}
    module = EmbeddingBags("ads", pooled, root=model, **options)
    ends = torch.cat([OFFSETS, torch.tensor([49])]) if include_last_offset else OFFSETS
    nothing = torch.zeros(int(include_last_offset), dtype=torch.int64)
    calls: list[dict[str, Any]] = [
        {"user_sum": (IDS, ends), "item_mean": (IDS, ends.int()), "page_sum": IDS[:48].view(12, 4)},
        {"user_sum": (IDS[:0], nothing), "item_mean": IDS[:0].view(3, 0), "page_sum": IDS[:6].view(1, 6)},
    ]
    moved = [{n: _moved(value) for n, value in call.items()} for call in calls]
    with monkeypatch.context() as slow:
        slow.setattr(device, "device_places", lambda *_: None)
        expected = [module(call) for call in moved]
    monkeypatch.setattr(device.DeviceLookup, "_input", None)
    monkeypatch.setattr(module, "_given_of", None)
    for call, vectors in zip(moved, expected, strict=True):
        found = module(call)
        for name in pooled:
            assert torch.equal(found[name], vectors[name])
    module.check()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.drawn(1)
def test_calls_with_as_many_bags_and_other_ids(model: str, on_device: bool) -> None:
    """They share their jobs: bags of none, of one, of many ids, then as at first."""
    names, generator = ["user_sum", "page_sum"], torch.Generator().manual_seed(5)
    options: dict[str, Any] = {"device": devices.DEVICE} if on_device else {}
    module, host = EmbeddingBags("ads", names, root=model, **options), EmbeddingBags("ads", names, root=model)
    for most in (3, 0, 1, 90, 3):
        given: dict[str, Any] = {}
        for name in names:
            lengths = torch.randint(0, most + 1, (6,), generator=generator)
            ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
            given[name] = ids, lengths.cumsum(0) - lengths
        found = module({name: _moved(value) if options else value for name, value in given.items()})
        for name, expected in host(MappingProxyType(given)).items():
            torch.testing.assert_close(found[name].cpu(), expected, rtol=0, atol=90 * 200 * 2.0**-24)
    module.check()


def test_an_earlier_error_waits_for_a_call_that_is_right(model: str) -> None:
    """What is wrong with a call itself comes first."""
    module = EmbeddingBags("ads", ["user_sum", "page_sum"], root=model, device=devices.DEVICE)
    right = {name: there(IDS[:48].view(12, 4)) for name in module.features}
    module({**right, "user_sum": there(torch.full((12, 4), ROWS))})
    if devices.DEVICE != "interpreter":
        torch.cuda.synchronize()
    with pytest.raises(ModuleError, match="lacks page_sum and has x besides"):
        module({"user_sum": right["user_sum"], "x": right["page_sum"]})
    with pytest.raises(BadFeatureIds, match="user_sum"):
        module(right)


def _moved(value: Any) -> Any:
    return tuple(map(there, value)) if isinstance(value, tuple) else there(value)


@pytest.mark.skipif(EXCHANGE is None, reason="torch 2.11 and later")
@pytest.mark.parametrize(
    "given",
    [
        (Form.OFFSETS, IDS.int(), OFFSETS, None),
        (Form.OFFSETS, IDS.double(), OFFSETS, None),
        (Form.OFFSETS, torch.cat([IDS, IDS])[::2], OFFSETS, None),
        (Form.OFFSETS, IDS, OFFSETS.double(), None),
        (Form.OFFSETS, IDS, OFFSETS.view(2, 3), None),
        (Form.OFFSETS, IDS, OFFSETS, torch.ones(49)),
        (Form.OFFSETS, IDS, OFFSETS[:0], None),
        (Form.ENDS, IDS[:0], OFFSETS[:0], None),
        (Form.LENGTHS, IDS, torch.tensor([49]), None),
        (Form.FIXED, IDS, None, None),
        (Form.FIXED, IDS.view(7, 7), OFFSETS, None),
        (Form.IDS, [1, 2], None, None),
    ],
)
def test_what_one_call_does_not_read(given: Any) -> None:
    """It is converted, or refused."""
    assert device_places(EXCHANGE, [given], 1, 0, BY_INPUT, Bags) is None


@pytest.mark.skipif(EXCHANGE is None, reason="torch 2.11 and later")
@pytest.mark.parametrize(
    ("form", "value"),
    [
        (Form.OFFSETS, Bags(IDS)),
        (Form.OFFSETS, Bags(IDS, OFFSETS, OFFSETS)),
        (Form.OFFSETS, Bags(IDS, OFFSETS, weights=IDS.float())),
        (Form.OFFSETS, FeatureTensors(Form.OFFSETS, IDS, OFFSETS, None)),
        (Form.IDS, Bags(IDS, OFFSETS)),
        (Form.OFFSETS, [IDS, OFFSETS]),
        (Form.OFFSETS, (IDS, OFFSETS, None)),
        (Form.OFFSETS, (IDS, None)),
        (Form.OFFSETS, (IDS.view(7, 7), OFFSETS)),
        (Form.OFFSETS, IDS),
        (Form.OFFSETS, None),
        (Form.ENDS, (IDS, OFFSETS[:0])),
        (Form.IDS, (IDS, OFFSETS)),
        (Form.IDS, (IDS,)),
        (Form.IDS, [1, 2]),
    ],
)
def test_what_one_call_does_not_read_of_a_dict(form: Form, value: Any) -> None:
    """It is looked at by name, which says what is wrong with it."""
    assert device_places(EXCHANGE, [value], 1, 0, form, Bags) is None
    dims, new = (4,), torch.empty(0).new_empty
    assert tensor_places(EXCHANGE, [value], dims, new, 0, form, Bags) is None


@pytest.mark.skipif(EXCHANGE is None, reason="torch 2.11 and later")
@pytest.mark.parametrize("of_user", ["tuple", "offsets", "lengths"])
def test_a_dict_is_read_by_one_call_on_the_host(
    model: str, monkeypatch: pytest.MonkeyPatch, of_user: str
) -> None:
    """As it is read by name."""
    bags, plain = EmbeddingBags("ads", ["user_sum", "page_sum"], root=model), Embeddings("ads", root=model)
    lengths = torch.cat((OFFSETS, torch.tensor([IDS.numel()]))).diff()
    user = {"tuple": (IDS, OFFSETS), "offsets": Bags(IDS, OFFSETS), "lengths": Bags(IDS, lengths=lengths)}
    pooled = {"page_sum": IDS[:48].view(12, 4), "user_sum": user[of_user]}
    ids = {name: IDS[:6].view(2, 3) for name in plain.features}
    expected = [dict(m(MappingProxyType(given))) for m, given in ((bags, pooled), (plain, ids))]
    for module in (bags, plain):
        monkeypatch.setattr(module, "_given_of", None)
    for found, wanted in zip((bags(pooled), plain(ids)), expected, strict=True):
        assert [*found] == [*wanted]
        for name, vectors in wanted.items():
            assert torch.equal(found[name], vectors)


@pytest.mark.skipif(EXCHANGE is None, reason="torch 2.11 and later")
def test_tensors_of_another_device_are_not_read() -> None:
    good = (Form.OFFSETS, IDS, OFFSETS, None)
    assert device_places(EXCHANGE, [good], 1, 0, BY_INPUT, Bags) is not None
    assert device_places(EXCHANGE, [good], 2, 0, BY_INPUT, Bags) is None
    assert device_places(EXCHANGE, [good], 1, 1, BY_INPUT, Bags) is None
    assert device_places(None, [good], 1, 0, BY_INPUT, Bags) is None
