"""Sizes and bounds of programs: what no operator may be called with, and what a call takes before it is
made."""

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scorers import Ctr, exported, publish_scored
from support import rows_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export, save

from tableside.loader.errors import ModelError, ProgramError
from tableside.loader.load.load import load
from tableside.loader.model.model import parse_model
from tableside.loader.program import Program, read_program, write_program
from tableside.loader.program.checks import CHECKS
from tableside.loader.program.measure import LARGEST_BYTES, Meter, TooLarge, check_shapes
from tableside.loader.program.operators import OPERATORS, aten_name
from tableside.loader.program.run import Runner, weight_tensors
from tableside.loader.versions.versions import Model

CPU = torch.device("cpu")


class Scores(torch.nn.Module):
    """A dense part of one function, over `user` [batch, 8], with weights where it wants them."""

    def __init__(self, function: Callable[[Tensor, dict[str, Tensor]], Tensor], **weights: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, values in weights.items():
            self.register_buffer(name, values)

    def forward(self, user: Tensor) -> Tensor:
        return self.function(user, dict(self.named_buffers()))


def program(function: Callable[[Tensor, dict[str, Tensor]], Tensor], **weights: Tensor) -> Program:
    return read_program(exported(Scores(function, **weights), user=8))


def batch_norm(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    wide = torch.nn.functional.pad(x, (0, 56))
    found: Tensor = torch.ops.aten._native_batch_norm_legit_no_training(
        wide, w["weight"], w["bias"], w["mean"], w["var"], 0.1, 1e-5
    )[0]
    return found.sum(1)


STATISTICS = {
    "weight": torch.ones(64),
    "bias": torch.zeros(64),
    "mean": torch.zeros(64),
    "var": torch.ones(64),
}


def shrunk(data: bytes, name: str, values: int) -> bytes:
    """An archive whose weight `name` truly has `values` values, as it and its bytes say."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {n: archive.read(n) for n in archive.namelist()}
    (where,) = (n for n in entries if n.endswith("model_weights_config.json"))
    config = json.loads(entries[where])
    (entry,) = (e for n, e in config["config"].items() if n.endswith(name))
    entry["tensor_meta"]["sizes"] = [{"as_int": values}]
    entries[where] = json.dumps(config).encode()
    content = where.replace("model_weights_config.json", entry["path_name"])
    entries[content] = entries[content][: 4 * values]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for n, held in entries.items():
            archive.writestr(n, held)
    return out.getvalue()


def test_a_batch_norm_of_right_sizes_is_taken(tmp_path: Path, root: Path) -> None:
    publish_scored(root, tmp_path, exported(Scores(batch_norm, **STATISTICS), user=8))
    assert Model(root, "demo").versions() == [1]


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.parametrize("values", [2, 1])
@pytest.mark.drawn(4)
def test_a_batch_norm_that_reads_beyond_its_statistics_is_not_published(
    name: str, values: int, tmp_path: Path, root: Path
) -> None:
    """2 values for 64 channels: its kernel reads 62 of what lies behind. A single one would even
    broadcast, as a shape."""
    data = shrunk(exported(Scores(batch_norm, **STATISTICS), user=8), name, values)
    with pytest.raises(ProgramError, match=f"has {values} values for 64 channels"):
        publish_scored(root, tmp_path, data)
    assert not Model(root, "demo").versions()


@pytest.mark.parametrize("name", STATISTICS)
@pytest.mark.drawn(2)
def test_such_a_batch_norm_is_refused_at_the_call(name: str) -> None:
    """Whatever was propagated before: the kernel never sees it."""
    bad = read_program(shrunk(exported(Scores(batch_norm, **STATISTICS), user=8), name, 2))
    runner = Runner(bad, weight_tensors(bad.weights, CPU), CPU, LARGEST_BYTES)
    with pytest.raises(ValueError, match="has 2 values for 64 channels"):
        runner(torch.zeros(2, 8))


FUNCTIONS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "attention: values": (
        "scaled_dot_product_attention",
        {"query": torch.zeros(2, 3, 4), "key": torch.zeros(2, 5, 4), "value": torch.zeros(2, 3, 4)},
        "not as many values as keys",
    ),
    "attention: heads": (
        "scaled_dot_product_attention",
        {"query": torch.zeros(2, 4, 3, 4), "key": torch.zeros(2, 1, 3, 4), "value": torch.zeros(2, 1, 3, 4)},
        "several batches, or numbers of heads",
    ),
    "attention: mask": (
        "scaled_dot_product_attention",
        {
            "query": torch.zeros(2, 3, 4),
            "key": torch.zeros(2, 3, 4),
            "value": torch.zeros(2, 3, 4),
            "attn_mask": torch.zeros(3, 2, dtype=torch.bool),
        },
        "mask|[Ss]hape",
    ),
    "convolution: channels": (
        "conv1d",
        {"input": torch.zeros(2, 3, 4), "weight": torch.zeros(2, 2, 1)},
        "for 2 channels of 3",
    ),
    "convolution: stride": (
        "conv1d",
        {"input": torch.zeros(2, 2, 4), "weight": torch.zeros(2, 2, 1), "stride": [0]},
        r"stride is \[0\]",
    ),
    "norm: type": (
        "layer_norm",
        {"input": torch.zeros(2, 4), "normalized_shape": [4], "weight": torch.zeros(4, dtype=torch.float64)},
        "of another type",
    ),
    "index: booleans": (
        "index",
        {"self": torch.zeros(4), "indices": [torch.ones(4, dtype=torch.bool)]},
        "not of integers",
    ),
    "triangle": ("tril_indices", {"row": 1 << 31, "col": 1 << 31, "offset": 0}, "a triangle of"),
    "remainder": (
        "remainder",
        {"self": torch.tensor([-(1 << 63)]), "other": torch.tensor([-1])},
        "a division of integers",
    ),
    "floor_divide": (
        "floor_divide",
        {"self": torch.tensor([-(1 << 63)]), "other": -1},
        "a division of integers",
    ),
    "div": (
        "div",
        {"self": torch.tensor([-(1 << 63)]), "other": torch.tensor([-1]), "rounding_mode": "trunc"},
        "a division of integers",
    ),
    "full": ("full", {"size": [1 << 20, 1 << 20]}, "the limit is"),
    "expand": ("expand", {"self": torch.zeros(1, 2), "size": [1 << 30, -1]}, "the limit is"),
    "repeat": ("repeat", {"self": torch.zeros(2), "repeats": [1 << 30]}, "the limit is"),
    "pad": ("constant_pad_nd", {"self": torch.zeros(2, 2), "pad": [0, 1 << 30]}, "the limit is"),
    "pad: reflect": (
        "pad",
        {"self": torch.zeros(2, 2), "pad": [1, 1], "mode": "reflect"},
        "something else than a constant",
    ),
    "arange": ("arange", {"start": 0, "end": 1, "step": 1e-12}, "the limit is"),
    "eye": ("eye", {"n": 1 << 16}, "the limit is"),
    "unbind": ("unbind", {"self": torch.zeros(5000), "dim": 0}, "is split into 5,000"),
    "split": ("split", {"self": torch.zeros(5000), "split_size": 1, "dim": 0}, "is split into 5,000"),
    "chunk": ("chunk", {"self": torch.zeros(2), "chunks": 1 << 30}, "is split into"),
}


@pytest.mark.parametrize("case", FUNCTIONS)
def test_calls_that_kernels_do_not_check(case: str) -> None:
    """Each of the checks, alone, with the defaults of the operator's schema."""
    name, arguments, message = FUNCTIONS[case]
    overloads = getattr(torch.ops.aten, name)
    defaults = {
        a.name: a.default_value
        for overload in overloads.overloads()
        for a in getattr(overloads, overload)._schema.arguments
        if a.has_default_value() and "out" not in overload
    }
    defaults.setdefault("attn_mask", None)
    with pytest.raises((ValueError, RuntimeError), match=message):
        CHECKS[name](
            {**{k: v for k, v in defaults.items() if k not in ("step", "m", "rounding_mode")}, **arguments},
            1 << 30,
        )


@pytest.mark.drawn(32)
@pytest.mark.parametrize("target", sorted(OPERATORS))
def test_listed_operators_write_nothing_and_draw_nothing(target: str) -> None:
    """They are there, change no argument, and take no generator that would be used."""
    name, overload = aten_name(target)
    operator = getattr(getattr(torch.ops.aten, name), overload)
    assert not operator._schema.is_mutable
    assert torch.Tag.nondeterministic_seeded not in operator.tags or name in (
        "dropout",
        "scaled_dot_product_attention",
    )
    as_data_say = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(operator.tags)
    assert not as_data_say or name == "index"  # of booleans, which its check refuses


BOMBS: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "full": lambda x, _: x.sum(1) + torch.full((1 << 15, 1 << 15), 1.0).sum(),
    "arange": lambda x, _: x.sum(1) + torch.arange(1 << 28).sum(),
    "repeat": lambda x, _: x.repeat(1, 1 << 24).sum(1),
    "pad": lambda x, _: torch.nn.functional.pad(x, (0, 1 << 28)).sum(1),
    "squares": lambda x, _: x.sum(1) + torch.outer(torch.arange(20_000.0), torch.arange(20_000.0)).sum(),
    "einsum": lambda x, _: (
        torch.einsum("ba,bc,bd,be,bf,bg,bh,bi,bj,bk->bacdefghijk", *[x] * 10).flatten(1).sum(1)
    ),
    "views": lambda x, _: x[:, None, None].expand(-1, 1 << 15, 1 << 15, -1).sum((1, 2, 3)),
    "products": lambda x, _: (torch.ones(1 << 12, 1 << 12) @ torch.ones(1 << 12, 1 << 12)).sum() + x.sum(1),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.drawn(4)
def test_programs_that_take_too_much_are_not_published(name: str) -> None:
    """Found by their shapes: nothing is allocated, nothing is computed."""
    function = BOMBS[name]

    class Later(torch.nn.Module):
        def forward(self, user: Tensor) -> Tensor:
            return function(user, {})

    with FakeTensorMode(allow_non_fake_inputs=True):
        exporting = export(Later(), (torch.zeros(2, 8),), dynamic_shapes={"user": {0: Dim("batch")}})
    out = io.BytesIO()
    save(exporting, out)
    with pytest.raises(ProgramError, match="the limit is"):
        check_shapes(read_program(out.getvalue()))


def test_what_a_call_takes_is_known_beforehand() -> None:
    """x @ x.T of n rows: n * n numbers and n * n * 8 multiplications; a limit is met where it is passed."""
    meter = Meter(program(lambda x, _: (x @ x.t()).sum(1)))
    small, large = meter.cost(64, LARGEST_BYTES), meter.cost(4096, LARGEST_BYTES)
    assert 4 * 4096**2 <= large.bytes <= 4 * 4 * 4096**2
    assert large.work >= 8 * 4096**2
    assert large.bytes / small.bytes > 64**2 / 4
    with pytest.raises(TooLarge, match="the limit is 1,048,576"):
        meter.cost(4096, 1 << 20)


def test_a_product_with_a_vector_takes_its_multiplications() -> None:
    """n * 8 of them, and as much again to read and write."""
    assert Meter(program(lambda x, _: x @ x[0])).cost(4096, LARGEST_BYTES).work < 3 * 8 * 4096


@pytest.mark.drawn(0.5)
def test_what_an_operator_may_copy_counts() -> None:
    """A view of a thousand times its memory is as large as it says to whom reads it."""
    meter = Meter(program(lambda x, _: x[:, None].expand(-1, 1024, -1).sum((1, 2))))
    assert meter.cost(64, LARGEST_BYTES).bytes >= 64 * 1024 * 8 * 4


def test_the_measure_is_what_torch_allocates() -> None:
    """The bytes that a call of an MLP has allocated at once, as torch's profiler counts them, are no more
    than was measured."""
    vetted = read_program(exported(Ctr(8, 4, 3), user=8, clicked=4, context=3))
    runner = Runner(vetted, weight_tensors(vetted.weights, CPU), CPU, LARGEST_BYTES)
    inputs = [torch.zeros(4096, n) for n in (8, 4, 3)]
    with (
        torch.inference_mode(),
        torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as seen,
    ):
        runner(*inputs)
    live = peak = 0
    for event in seen.profiler.kineto_results.events() if seen.profiler else ():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak <= Meter(vetted).cost(4096, LARGEST_BYTES).bytes


def test_results_that_are_no_scores_are_not_published() -> None:
    for function in (
        lambda x, _: x.t(),
        lambda x, _: x.sum(),
        lambda x, _: x[:1].sum(1),
        lambda x, _: x[:, None],
    ):
        with pytest.raises(ProgramError, match=r"it gives .* for a batch of 2; expected \[batch\]"):
            check_shapes(program(function))


def test_numbers_of_sizes_have_an_end() -> None:
    """Python's would grow with every call, to gigabytes."""

    def powers(x: Tensor, _: dict[str, Tensor]) -> Tensor:
        n = x.shape[0]
        for _n in range(6):
            n = n * n
        return x.sum(1) * n

    with pytest.raises(ProgramError, match=r"larger than 2\^53"):
        check_shapes(program(powers))


def test_booleans_are_zeros_and_ones() -> None:
    """Kernels take them for that."""
    data = exported(
        Scores(lambda x, w: torch.where(w["mask"], x, -x).sum(1), mask=torch.ones(8, dtype=torch.bool)),
        user=8,
    )
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {n: archive.read(n) for n in archive.namelist()}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for n, held in entries.items():
            archive.writestr(n, b"\2" * 8 if "/weight_" in n else held)
    with pytest.raises(ProgramError, match="neither 0 nor 1"):
        read_program(out.getvalue())


def test_a_batch_of_other_sizes_than_it_was_exported_for_is_refused() -> None:
    out = io.BytesIO()
    module = Scores(lambda x, _: x.sum(1))
    save(export(module, (torch.zeros(4, 8),), dynamic_shapes={"user": {0: Dim("batch", max=16)}}), out)
    limited = read_program(write_program(read_program(out.getvalue())))
    runner = Runner(limited, weight_tensors(limited.weights, CPU), CPU, LARGEST_BYTES)
    assert runner(torch.zeros(16, 8)).shape == (16,)
    with pytest.raises(ValueError, match="to 16 rows; found 17"):
        runner(torch.zeros(17, 8))


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "nul"])
def test_scorers_are_regular_files(kind: str, tmp_path: Path, root: Path) -> None:
    """A FIFO would wait for a writer, a device never end."""
    path = tmp_path / "s.pt2"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    np.savez(tmp_path / "c.npz", user=rows_of(50, 8))
    raw = {
        "name": "demo",
        "checkpoint": "c.npz",
        "tables": {"user": {"key": "user"}},
        "features": {"user": {"table": "user"}},
        "scorer": {"program": {"device": "/dev/zero", "nul": "s\0.pt2"}.get(kind, "s.pt2")},
    }
    with pytest.raises(ModelError, match=r"expected|NUL"):
        load(parse_model(raw, tmp_path), root)


def test_without_torch_a_program_is_not_published(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line names the remedy; the shapes could not be checked."""
    monkeypatch.setattr("tableside.loader.load.scorer.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"install tableside\[torch\]"):
        publish_scored(root, tmp_path, exported(Scores(lambda x, _: x.sum(1)), user=8))
