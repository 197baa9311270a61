"""`weight_init_device`: weights elsewhere than the metadata, for inference, split and dense modules, until
they are placed."""

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fbgemm_kernels import trains

from tableside.loader.errors import LoaderError
from tableside.loader.tbe.tbe import TbeTable, init_tbe, place, weights_of
from tableside.loader.tbe.training import TrainingTable, init_dense_tbe, init_split_tbe
from tableside.quant import Pooling, RowFormat, Source, choose

IDS, OFFSETS = torch.tensor([1, 2, 9, 0, 19, 3]), torch.tensor([0, 2, 3, 4, 6])  # two tables, two bags each
TABLES = [TrainingTable(10, 8), TrainingTable(20, 4)]
needs_gpu = pytest.mark.skipif("__import__('tables').DEVICE == 'interpreter'", reason="needs a GPU")


def inference(device: str, weight_init_device: str | None, pooling: Pooling = Pooling.SUM) -> Any:
    specs = [TbeTable("a", 10, 8, RowFormat.INT8), TbeTable("b", 20, 4, RowFormat.FP16)]
    return init_tbe(specs, device=device, weight_init_device=weight_init_device, pooling=pooling)


def split(device: str, weight_init_device: str | None, pooling: Pooling = Pooling.SUM) -> Any:
    return init_split_tbe(
        TABLES, device=device, weight_init_device=weight_init_device, pooling=pooling, learning_rate=0.1
    )


def dense(device: str, weight_init_device: str | None, pooling: Pooling = Pooling.SUM) -> Any:
    return init_dense_tbe(TABLES, device=device, weight_init_device=weight_init_device, pooling=pooling)


needs_training = pytest.mark.skipif(not trains(), reason="FBGEMM has no kernels for training here")
MAKERS = pytest.mark.parametrize(
    "make", [inference, *(pytest.param(m, marks=needs_training) for m in (split, dense))]
)
TWO_HALVES = 2 * 2.0**-11  # FBGEMM's kernel for GPUs rounds the values of two rows, below 1, to fp16
DEVICES = ["cpu", pytest.param("cuda:0", marks=needs_gpu)]


def fill(module: Any) -> None:
    """Rows of known values, through the slices."""
    for n, weights in enumerate(slices(module)):
        if weights.dtype == torch.uint8:
            row_format = (RowFormat.INT8, RowFormat.FP16)[n]
            values = torch.empty(weights.shape[0], TABLES[n].dim).uniform_(
                -1, 1, generator=torch.Generator().manual_seed(n)
            )
            choose().quantize(values.numpy(), Source.FP32, row_format, weights.numpy())
        else:
            weights.copy_(
                torch.empty(weights.shape).uniform_(-1, 1, generator=torch.Generator().manual_seed(n))
            )


def slices(module: Any) -> list[torch.Tensor]:
    """The views by table, whole rows."""
    if hasattr(module, "split_embedding_weights_with_scale_bias"):
        return [w for w, _, _ in module.split_embedding_weights_with_scale_bias(split_scale_bias_mode=0)]
    return list(module.split_embedding_weights())


@MAKERS
@pytest.mark.parametrize("weight_device", ["meta", "cpu"])
@pytest.mark.parametrize("device", DEVICES)
def test_weights_begin_on_one_device_and_metadata_on_another(
    make: Callable[..., Any], weight_device: str, device: str
) -> None:
    """Slices and the state dict see the weights where they are; offsets and optimizer states are where the
    module computes."""
    module = make(device, weight_device)
    name, weights = weights_of(module)
    assert weights.device.type == weight_device
    assert {w.device.type for w in slices(module)} == {weight_device}
    assert module.D_offsets.device == torch.device(device)
    if make is not inference:
        assert module.weights_offsets.device == torch.device(device)
        assert module.state_dict()[name].device.type == weight_device
    if make is split:
        states = [s for table in module.split_optimizer_states() for s in table]
        assert {s.device for s in states} == {torch.device(device)} and sum(
            s.numel() for s in states
        ) == 10 * 8 + 20 * 4


@MAKERS
def test_a_forward_pass_before_the_weights_are_placed_is_an_error(make: Callable[..., Any]) -> None:
    module = make("cpu", "meta")
    name, _ = weights_of(module)
    with pytest.raises(
        LoaderError,
        match=rf"\.{name} lies on meta, and the module computes on cpu; bind it to a segment, or place",
    ):
        module(IDS, OFFSETS)
    with pytest.raises(
        LoaderError, match=rf"\.{name} is on meta and has no values to move; give `place` the weights"
    ):
        place(module)


@MAKERS
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_gpu)])
def test_placed_weights_answer_as_weights_that_were_always_there(
    make: Callable[..., Any], device: str
) -> None:
    """Given for meta, moved for cpu; the same vectors as of a module that FBGEMM allocated by itself."""
    plain, moved, given = make("cpu", None), make(device, "cpu"), make("cpu", "meta")
    for module in (plain, moved):
        fill(module)
    place(moved)
    place(given, weights_of(plain)[1])
    wanted = plain(IDS, OFFSETS)
    ids, offsets = IDS.to(device), OFFSETS.to(device)
    torch.testing.assert_close(
        moved(ids, offsets).cpu(), wanted, rtol=0, atol=0 if device == "cpu" else TWO_HALVES
    )
    assert torch.equal(given(IDS, OFFSETS), wanted) and wanted.abs().sum() > 0


@needs_training
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"])
def test_a_placed_split_module_trains_as_fbgemms_own(optimizer: str) -> None:
    """Three steps, with the optimizer's state: the same weights and states, bit for bit."""
    both = [
        init_split_tbe(TABLES, weight_init_device=where, optimizer=optimizer, learning_rate=0.1)
        for where in (None, "cpu")
    ]
    for module in both:
        fill(module)
    place(both[1])
    for module in both:
        for _ in range(3):
            module(IDS, OFFSETS).square().sum().backward()
    before = init_split_tbe(TABLES, weight_init_device=None)
    fill(before)
    assert not torch.equal(both[0].weights_host, before.weights_host)
    assert torch.equal(both[0].weights_host, both[1].weights_host)
    found, wanted = (m.split_optimizer_states() for m in (both[1], both[0]))
    assert all(
        torch.equal(a, b) for f, w in zip(found, wanted, strict=True) for a, b in zip(f, w, strict=True)
    )


@needs_training
@pytest.mark.filterwarnings("ignore:fbgemm.*an autograd kernel was not registered:UserWarning")
def test_a_placed_dense_module_has_gradients() -> None:
    module = dense("cpu", "cpu")
    fill(module)
    place(module)
    module(IDS, OFFSETS).sum().backward()
    assert module.weights.grad is not None
    assert module.weights.grad.view(-1)[: 10 * 8].view(10, 8).sum(1).tolist() == [
        0,
        8,
        8,
        0,
        0,
        0,
        0,
        0,
        0,
        8,
    ]


@MAKERS
def test_the_log_says_once_that_weights_are_elsewhere(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing where FBGEMM allocates them, which has a log of its own."""

    def ours() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "tableside"]

    with caplog.at_level(logging.INFO, "tableside"):
        make("cpu", None)
        assert not ours()
        make("cpu", "meta")
    (said,) = ours()
    assert "begin on meta, its metadata on cpu; place them before a forward pass" in said


@MAKERS
def test_weights_that_do_not_fit_are_refused(make: Callable[..., Any]) -> None:
    module = make("cpu", "meta")
    count, dtype = weights_of(module)[1].numel(), weights_of(module)[1].dtype
    for wrong in (
        torch.zeros(count + 1, dtype=dtype),
        torch.zeros(count, dtype=torch.int16),
        torch.zeros(count, device="meta", dtype=dtype),
    ):
        with pytest.raises(
            LoaderError, match=rf"has {count:,} elements of {dtype} and belongs on cpu; found .* on "
        ):
            place(module, wrong)


@MAKERS
def test_a_copy_before_the_weights_are_placed_is_placed_by_itself(make: Callable[..., Any]) -> None:
    """Also through pickle, which FBGEMM's split module does not know: a copy refuses forward passes by
    itself."""
    module = make("cpu", "meta")
    plain = make("cpu", None)
    for copied in (
        copy.deepcopy(module),
        copy.deepcopy(module) if make is split else pickle.loads(pickle.dumps(module)),
    ):
        with pytest.raises(LoaderError, match="lies on meta"):
            copied(IDS, OFFSETS)
        place(copied, weights_of(plain)[1])
        copied(IDS, OFFSETS)
    with pytest.raises(LoaderError, match="lies on meta"):
        module(IDS, OFFSETS)


def test_what_fbgemm_cannot_do_is_refused() -> None:
    with pytest.raises(LoaderError, match=r"weight_init_device is 'cuda'; expected meta, cpu or None"):
        init_dense_tbe(TABLES, weight_init_device="cuda")
    with pytest.raises(
        LoaderError,
        match=r"optimizer 'ADAM' on the CPU; FBGEMM has EXACT_SGD, EXACT_ADAGRAD, EXACT_ROWWISE_ADAGRAD",
    ):
        init_split_tbe(TABLES, optimizer="ADAM")
    with pytest.raises(LoaderError, match=r"optimizer 'NONE' on the CPU"):
        init_split_tbe(TABLES, optimizer="NONE")
