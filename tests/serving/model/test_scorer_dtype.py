"""Scorers in bf16 and fp16 on a device: scores are the CPU's in fp32 within what rounding may do, or the
program is refused."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tables
import torch
from dense_rounding import dense, filled
from pydantic import ValidationError
from scored import MODELS, Asked, Both, publish
from scorers import Ctr, exported, publish_scored
from servers import Server

from tableside.loader.program import read_program
from tableside.loader.program.run import Runner, weight_tensors
from tableside.loader.versions.versions import Model
from tableside.quant import Precision
from tableside.serving.client import Client
from tableside.serving.errors import ApiError, ServingError
from tableside.serving.model.program import ProgramScorer
from tableside.serving.model.request import Answer
from tableside.serving.model.scorers import open_scorer
from tableside.serving.settings import ServerSettings

Start = Callable[..., Server]
NARROW = [Precision.BF16, Precision.FP16]


@pytest.fixture(autouse=True)
def metrics_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TABLESIDE_METRICS", raising=False)


def answers(asked: Sequence[Asked], both: Both) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
    """Outputs by name of each request, on the device in one batch and on the CPU."""
    on_device, on_cpu = [a.of(both.device) for a in asked], [a.of(both.cpu) for a in asked]
    found = []
    for (request, _), answer, wanted in zip(
        on_device, both.on_device(on_device), both.on_cpu(on_cpu), strict=True
    ):
        assert isinstance(answer, Answer) and isinstance(wanted, Answer), (answer, wanted)
        outputs = [
            o
            for o in request.outputs
            if o.feature == "score" or not request.scoring or not request.scoring.is_alone
        ]
        found.append(
            tuple({o.feature: o.view(a.buffer).astype(np.float64) for o in outputs} for a in (answer, wanted))
        )
    return found  # type: ignore[return-value]


def check_ctr(
    a: Asked, precision: Precision, found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]
) -> None:
    """Scores lie within their bounds of those of fp64 from the vectors that the device looked up, and so
    of the CPU's in fp32."""
    context = np.asarray(a.parts[-1], np.float64)
    inputs = np.concatenate([found["user"], found["clicked"], context], 1)
    expected, bounds = dense(MODELS[a.model].deep, inputs, precision, filled(precision))
    expected, bounds = expected.reshape(found["score"].shape), bounds.reshape(found["score"].shape)
    assert (np.abs(found["score"] - expected) <= bounds).all()
    np.testing.assert_allclose(
        expected, wanted["score"], rtol=1e-3
    )  # fp16 vectors may differ by their last bit
    assert (np.abs(found["score"] - expected) > 1e-5).any(), "they are those of fp32"


@pytest.mark.thorough
@pytest.mark.parametrize("precision", NARROW)
def test_scores_lie_within_their_bounds(root: Path, tmp_path: Path, precision: Precision) -> None:
    """Programs with one score and with three, fp16 and fp32 vectors, dense tensors; two towers stay fp32."""
    names = ("ctr", "wide", "dot", "cosine")
    publish(root, tmp_path, *names)
    both = Both(root, *names, precision=precision)
    asked = [Asked(name, rows, rows, alone=False) for rows in (5, 1, 9) for name in names]
    for a, (found, wanted) in zip(asked, answers(asked, both), strict=True):
        if a.model in ("dot", "cosine"):
            np.testing.assert_allclose(found["score"], wanted["score"], rtol=1e-5, atol=1e-6)
        else:
            check_ctr(a, precision, found, wanted)
    dtypes = {name: version.scorer.dtype for name, version in both.device.items()}  # type: ignore[union-attr]
    assert dtypes == {
        "ctr": precision.name.lower(),
        "wide": precision.name.lower(),
        "dot": "fp32",
        "cosine": "fp32",
    }


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.drawn(1)
def test_scores_alone_are_those_with_vectors(root: Path, tmp_path: Path, precision: Precision) -> None:
    """Vectors go to the scorer's matrices in its precision, from device memory, wherever its rows stand in
    the batch."""
    publish(root, tmp_path, "ctr")
    both = Both(root, "ctr", precision=precision)
    asked = [Asked("ctr", rows, rows, alone=alone) for rows in (3, 8, 2) for alone in (True, False)]
    outputs = [found for found, _ in answers(asked, both)]
    for alone, other in zip(outputs[::2], outputs[1::2], strict=True):
        np.testing.assert_array_equal(alone["score"], other["score"])
    calls: Any = both.device["ctr"].scorer.calls  # type: ignore[union-attr]
    room = calls.room(26)
    assert {i.dtype for i in room.inputs} == {
        torch.bfloat16 if precision is Precision.BF16 else torch.float16
    }
    np.testing.assert_array_equal(calls.row_bytes, [2 * 8, 2 * 4, 2 * 3])


def test_vectors_that_the_host_looked_up_are_scored_in_the_same_precision(root: Path, tmp_path: Path) -> None:
    publish(root, tmp_path, "ctr")
    both = Both(root, "ctr", precision=Precision.FP16, placement="host")
    asked = [Asked("ctr", rows, rows, alone=False) for rows in (4, 7)]
    assert not asked[0].of(both.device)[0].plan.is_on_device
    for a, (found, wanted) in zip(asked, answers(asked, both), strict=True):
        check_ctr(a, Precision.FP16, found, wanted)


@pytest.mark.drawn(0.5)
def test_a_score_beyond_fp16_is_refused(root: Path, tmp_path: Path) -> None:
    """With what fp16 holds at most; the same dense tensor is scored in bf16."""
    publish(root, tmp_path, "ctr")
    asked = [Asked("ctr", 3, 0), Asked("ctr", 3, 1)]
    asked[1].parts[-1][1] = [7e4, -7e4, 7e4]  # infinite, and then a product of 0 or a difference
    narrow, wide = (Both(root, "ctr", precision=p) for p in (Precision.FP16, Precision.BF16))
    found = narrow.on_device([a.of(narrow.device) for a in asked])
    assert isinstance(found[0], Answer) and isinstance(found[1], ApiError)
    assert re.search(
        r"the score of row 1 is .*in fp16, whose largest number is 65,504 \(--scorer-dtype\)",
        found[1].message,
    )
    assert all(isinstance(f, Answer) for f in wide.on_device([a.of(wide.device) for a in asked]))


# ---- what a program allows ----


class Widened(torch.nn.Module):
    """Goes on in fp32 in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.first(user).to(torch.float32))
        return scores


class Masked(torch.nn.Module):
    """Multiplies by a tensor that it makes itself."""

    def __init__(self, follows: bool) -> None:
        super().__init__()
        self.follows, self.last = follows, torch.nn.Linear(8, 1)

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        mask = (user > 0).to(torch.float32)
        scores: torch.Tensor = self.last(user * (mask.type_as(user) if self.follows else mask))
        return scores


class LastInFp32(torch.nn.Module):
    """Ends in a sigmoid that it computes in fp32; a number of its own makes nothing wider."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(8, 1)
        self.register_buffer("factor", torch.tensor(0.5, dtype=torch.float64))
        self.register_buffer("picked", torch.tensor([3, 1, 0, 2, 7, 6, 5, 4]))

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid((self.last(user[:, self.picked]) * self.factor).to(torch.float32))


class Large(torch.nn.Module):
    """Has a weight beyond fp16's largest number."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(8, 1)
        with torch.no_grad():
            self.last.weight[0, 3] = 1e5

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(user)
        return scores


def opened(root: Path, folder: Path, module: torch.nn.Module, precision: Precision) -> ProgramScorer:
    """The scorer of a model that was published with the module, on the device of the tests."""
    publish_scored(root, folder, exported(module, user=8))
    device = "cpu" if tables.DEVICE == "interpreter" else tables.DEVICE
    found = open_scorer(Model(root, "demo").attach(), device, on_device=True, precision=precision)
    assert isinstance(found, ProgramScorer)
    return found


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (
            Widened(),
            r"its call torch\.ops\.aten\.linear\.default takes 'to' \(of torch\.ops\.aten\.to\.dtype\) as "
            r"float32 and ",
        ),
        (
            Masked(False),
            r"its call torch\.ops\.aten\.mul\.Tensor takes 'user' \(an input\) as bfloat16 and 'to' \(of "
            r"torch",
        ),
    ],
)
@pytest.mark.drawn(1)
def test_a_program_that_mixes_types_is_refused(
    root: Path, tmp_path: Path, module: torch.nn.Module, named: str
) -> None:
    """By the call that does, with what to write instead; in fp32 it runs."""
    remedy = r".*x\.type_as\(y\) follows y.*take fp32.*--scorer-dtype"
    with pytest.raises(ServingError, match="the scorer does not run in bf16 .*" + named + remedy):
        opened(root, tmp_path, module, Precision.BF16)
    assert opened(root, tmp_path, module, Precision.FP32).dtype == "fp32"


@pytest.mark.parametrize("module", [Masked(True), LastInFp32()])
def test_a_program_that_follows_its_inputs_runs(root: Path, tmp_path: Path, module: torch.nn.Module) -> None:
    """Also where it casts all it has to fp32 at its end, and where it has weights of other types."""
    scorer = opened(root, tmp_path, module.eval(), Precision.BF16)
    assert scorer.is_row_wise and scorer.describe()["dtype"] == "bf16"
    rows = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    found = scorer.run([rows])
    with torch.inference_mode():
        expected = module(torch.from_numpy(rows)).numpy()[:, 0]
    assert found.dtype == np.float32
    # A score passes through 8 products of a rounded value and a rounded weight, and three roundings of its
    # own.
    largest = np.abs(rows) @ module.last.weight.detach().abs().numpy()[0] + np.abs(
        module.last.bias.detach().numpy()
    )  # type: ignore[union-attr, operator]
    assert (np.abs(found - expected) <= 6 * 2.0**-8 * largest).all() and (found != expected).any()


def test_a_weight_beyond_fp16_is_refused(root: Path, tmp_path: Path) -> None:
    expected = (
        r"does not run in fp16 .*its weight '[\w.]*weight' holds 1e\+05; expected at most "
        r"6\.55e\+04.*take bf16 or fp32"
    )
    with pytest.raises(ServingError, match=expected):
        opened(root, tmp_path, Large(), Precision.FP16)
    assert opened(root, tmp_path, Large(), Precision.BF16).dtype == "bf16"


def test_a_kernel_that_torch_has_not_is_named() -> None:
    """By the call that asks for it."""
    program = read_program(exported(Ctr(8, 4, 3), user=8, clicked=4, context=3))

    def relu(*_: Any) -> Any:
        raise NotImplementedError("\"clamp_min\" not implemented for 'Half'")

    runner: Any = Runner(
        program, weight_tensors(program.weights, torch.device("cpu")), torch.device("cpu"), 1 << 30
    )
    (call,) = (c for c in runner._calls if "relu" in c.target)
    object.__setattr__(call, "function", relu)
    with pytest.raises(
        NotImplementedError, match=r"its call torch\.ops\.aten\.relu\.default cannot be made: .*'Half'"
    ):
        runner(*(torch.zeros(2, n) for n in (8, 4, 3)))


def test_memory_of_a_call_is_that_of_its_precision(root: Path, tmp_path: Path) -> None:
    """What `max_scorer_bytes` bounds counts two bytes a value."""
    wide, narrow = (
        opened(root, tmp_path, Large(), p)._cost(1024).bytes for p in (Precision.FP32, Precision.BF16)
    )
    assert narrow < 0.6 * wide


# ---- settings, and what users see ----


def test_the_cpu_scores_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without a GPU refuses another type; the environment may say it, too."""
    with pytest.raises(
        ValidationError,
        match=r"scorer_dtype bf16 is for GPUs.*say which ones with --devices, or leave it out",
    ):
        ServerSettings(scorer_dtype="bf16")
    monkeypatch.setenv("TABLESIDE_SCORER_DTYPE", "fp16")
    assert ServerSettings(devices=("0",)).scorer_precision is Precision.FP16
    monkeypatch.delenv("TABLESIDE_SCORER_DTYPE")
    assert ServerSettings(devices=("0",)).scorer_precision is Precision.FP32


@pytest.mark.thorough
def test_a_server_says_in_what_it_scores(start: Start, root: Path, tmp_path: Path) -> None:
    """By its metadata and its metrics; scores of clients are those of fp32 within their bounds."""
    publish(root, tmp_path, "ctr", "dot")
    models = ("ctr", "dot")
    on_gpu = start("--devices", tables.serve_device(), "--scorer-dtype", "bf16", models=models)
    described = {
        m["name"]: m["scorer"]["dtype"] for m in httpx.get(f"{on_gpu.url}/v1/models").json()["models"]
    }
    assert described == {"ctr": "bf16", "dot": "fp32"}
    metrics = on_gpu.get("/metrics").text
    assert 'tableside_scorer_info{dtype="bf16",kind="program",model="ctr"} 1.0' in metrics
    assert 'tableside_scorer_info{dtype="fp32",kind="dot",model="dot"} 1.0' in metrics
    ids, context = (
        np.arange(12).reshape(6, 2),
        np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32),
    )
    bags = {"user": ids.tolist(), "clicked": ids.tolist()}
    with Client(on_gpu.url, retries=0) as client:
        found, vectors = client.score("ctr", bags, {"context": context}), client.lookup("ctr", bags)
    inputs = np.concatenate([vectors["user"], vectors["clicked"], context], 1)
    expected, bounds = dense(MODELS["ctr"].deep, inputs, Precision.BF16, filled(Precision.BF16))
    assert (np.abs(found - expected[:, 0]) <= bounds[:, 0]).all() and (
        np.abs(found - expected[:, 0]) > 1e-5
    ).any()
