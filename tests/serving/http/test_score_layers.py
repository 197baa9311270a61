"""Scorers that are dense layers alone: which scorer a program gets, its bounds, and scores written where
they are sent from."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scorers import Ctr, exported, publish_scored
from torch.export import Dim, export, save

from tableside.loader.program import read_program
from tableside.loader.versions.versions import Model
from tableside.quant.contract import MatrixPlace
from tableside.serving.errors import ApiError, ErrorKind, ServingError
from tableside.serving.model.places import Output
from tableside.serving.model.program import ProgramScorer
from tableside.serving.model.scorer import Scorer, ScorerLimits, Scoring, ToScore, score_together
from tableside.serving.model.scorers import LayersScorer, needs_torch, open_scorer

USER, CONTEXT = 8, 3


class Two(torch.nn.Module):
    """An MLP over `user` [batch, 8] and `context` [batch, 3]."""

    def __init__(self, scores: int = 1) -> None:
        super().__init__()
        self.deep = Ctr(USER, 0, CONTEXT, scores).deep

    def forward(self, user: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.deep(torch.cat([user, context], 1))
        return found


class Product(torch.nn.Module):
    """More than dense layers."""

    def forward(self, user: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return (user * user).sum(1) + context.sum(1)


def publish(root: Path, folder: Path, module: torch.nn.Module | None = None) -> None:
    publish_scored(root, folder, exported(module or Two(), user=USER, context=CONTEXT))


def opened(root: Path, device: str = "cpu", limits: ScorerLimits | None = None) -> Scorer:
    found = open_scorer(Model(root, "demo").attach(), device, limits=limits or ScorerLimits())
    assert found is not None
    return found


def one(scorer: Scorer, rows: int, seed: int = 0, half: bool = False) -> ToScore:
    """A request that was looked up: vectors at byte 0 of its output buffer, scores behind them, `context`
    in its inputs."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((rows, USER)).astype(np.float16 if half else np.float32)
    shape = (rows,) if scorer.width is None else (rows, scorer.width)
    places = (
        MatrixPlace(1, 0, USER * vectors.itemsize, half, USER),
        MatrixPlace(0, 0, 4 * CONTEXT, 0, CONTEXT),
    )
    sources = np.array(places, np.int64).tobytes()
    scores = Output("score", vectors.nbytes, 4 * int(np.prod(shape)), shape, False)
    buffer = np.zeros(vectors.nbytes + scores.bytes, np.uint8)
    buffer[: vectors.nbytes] = vectors.view(np.uint8).ravel()
    inputs = rng.standard_normal((rows, CONTEXT)).astype(np.float32).tobytes()
    return ToScore(Scoring(scorer, sources, scores), inputs, buffer)


def scores_of(request: ToScore) -> np.ndarray:
    return np.array(request.scoring.output.view(request.buffer))


def by_torch(root: Path, request: ToScore) -> np.ndarray:
    """What torch gives for the same request."""
    segment = Model(root, "demo").attach()
    assert segment.header.scorer is not None
    scorer = ProgramScorer(segment.header.scorer, read_program(segment.program()))
    return scorer.run([a.copy() for a in request.scoring.arrays(request.inputs, request.buffer)])


def test_dense_layers_run_without_torch_and_others_with_it(root: Path, tmp_path: Path) -> None:
    """The choice is shown; a GPU takes every program to torch."""
    publish(root, tmp_path)
    scorer = opened(root)
    assert isinstance(scorer, LayersScorer) and scorer.describe()["runs_on"].startswith("dense layers (")
    assert not needs_torch(Model(root, "demo").attach()) and needs_torch(
        Model(root, "demo").attach(), "cuda:0"
    )
    publish(root, tmp_path, Product())
    scorer = opened(root)
    assert (
        isinstance(scorer, ProgramScorer)
        and scorer.describe()["runs_on"] == f"torch {torch.__version__} on cpu"
    )
    assert needs_torch(Model(root, "demo").attach())


def test_a_process_that_scores_by_dense_layers_does_not_import_torch(root: Path, tmp_path: Path) -> None:
    """So a worker of such a model starts in a fraction of a second, and has torch's memory to spare."""
    publish(root, tmp_path)
    code = f"""
import sys
from pathlib import Path
from tableside.loader.versions.versions import Model
from tableside.quant.contract import MatrixPlace
from tableside.serving.model.places import Output
from tableside.serving.model.scorer import Scoring, ToScore, score_together
from tableside.serving.model.scorers import open_scorer
import numpy as np
scorer = open_scorer(Model(Path({str(root)!r}), "demo").attach())
sources = np.array([MatrixPlace(0, 0, 32, 0, 8), MatrixPlace(0, 64, 12, 0, 3)], np.int64).tobytes()
inputs, scores = np.ones(22, np.float32).tobytes(), np.zeros(8, np.uint8)
score_together([ToScore(Scoring(scorer, sources, Output("score", 0, 8, (2,), False)), inputs, scores)])
print(scores.view(np.float32).all(), "torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "True False\n", done.stderr


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.drawn(2)
def test_scores_are_torchs_but_for_rounding(count: int, half: bool, root: Path, tmp_path: Path) -> None:
    """Sums of 11 and 16 products of values of about 1, and a sigmoid: far within 2^-18 (tests/loader holds
    the exact bound)."""
    publish(root, tmp_path, Two(count))
    scorer = opened(root)
    assert scorer.width == (None if count == 1 else count)
    request = one(scorer, 9, half=half)
    expected = by_torch(root, request)
    score_together([request])
    assert scores_of(request).shape == expected.shape
    assert np.abs(scores_of(request) - expected).max() < 2**-18


def test_requests_that_are_scored_together_get_the_scores_that_they_get_alone(
    root: Path, tmp_path: Path
) -> None:
    publish(root, tmp_path)
    scorer = opened(root)
    together, alone = ([one(scorer, rows, rows) for rows in (3, 70, 1)] for _ in range(2))
    score_together(together)
    for request in alone:
        score_together([request])
    assert [scores_of(r).tolist() for r in together] == [scores_of(r).tolist() for r in alone]


def test_one_layout_scores_every_request_that_has_it(root: Path, tmp_path: Path) -> None:
    """Where inputs lie is worked out for the first request and kept; what lies there is read for each."""
    publish(root, tmp_path)
    first, second = one(opened(root), 4, 1), one(opened(root), 4, 2)
    score_together([first])
    again = ToScore(first.scoring, second.inputs, second.buffer.copy())
    score_together([again])
    score_together([second])
    assert scores_of(again).tolist() == scores_of(second).tolist() != scores_of(first).tolist()


def test_scores_that_are_not_finite_are_an_error(root: Path, tmp_path: Path) -> None:
    """400 where a dense tensor of the request is not finite, with its row; else 500 with the score's row
    and the version."""
    publish(root, tmp_path)
    scorer = opened(root)
    request = one(scorer, 70)
    context = np.frombuffer(request.inputs, np.float32).copy()
    context[66 * CONTEXT + 1] = np.nan
    with pytest.raises(ApiError, match="dense tensor 'context' is not finite in row 66") as refused:
        score_together([request._replace(inputs=context.tobytes())])
    assert (refused.value.status, refused.value.kind) == (400, ErrorKind.BAD_REQUEST)
    request.buffer[:4] = np.array([np.nan], np.float32).view(np.uint8)
    with pytest.raises(
        ApiError, match="the score of row 0 is nan, from demo version 1; expected a finite number"
    ) as refused:
        score_together([request])
    assert (refused.value.status, refused.value.kind) == (500, ErrorKind.SCORER)


def test_a_call_that_takes_too_much_memory_is_refused(root: Path, tmp_path: Path) -> None:
    publish(root, tmp_path)
    scorer = opened(root, limits=ScorerLimits(bytes=1 << 16))
    assert scorer.admit(1000) == 10 * scorer.admit(100)
    expected = r"100,000 rows are too many for the scorer: .*the limit is 65,536 \(max_scorer_bytes\)"
    with pytest.raises(ApiError, match=expected) as refused:
        scorer.admit(100_000)
    assert refused.value.status == 413


def test_a_batch_that_the_program_was_not_exported_for_is_refused(root: Path, tmp_path: Path) -> None:
    batch = Dim("batch", min=2, max=6)
    inputs = (torch.zeros(3, USER), torch.zeros(3, CONTEXT))
    program = export(Two().eval(), inputs, dynamic_shapes={name: {0: batch} for name in ("user", "context")})
    save(program, tmp_path / "bounded.pt2")
    publish_scored(root, tmp_path, (tmp_path / "bounded.pt2").read_bytes())
    scorer = opened(root)
    assert isinstance(scorer, LayersScorer)
    score_together([one(scorer, 6)])
    for rows in (1, 7):
        expected = f"does not take {rows} rows: the program was exported for 2 to 6 rows; found {rows}"
        with pytest.raises(ApiError, match=expected) as refused:
            score_together([one(scorer, rows)])
        assert refused.value.status == 400


def test_inputs_of_other_widths_than_the_programs_are_refused(root: Path, tmp_path: Path) -> None:
    """A header that somebody changed in shared memory does not make a worker read rows at wrong places."""
    publish(root, tmp_path)
    segment = Model(root, "demo").attach()
    stored = segment.header.scorer
    assert stored is not None
    wrong = replace(stored, inputs=(replace(stored.inputs[0], width=4), *stored.inputs[1:]))
    program = read_program(segment.program())
    with pytest.raises(ServingError, match="inputs are 4, 3 wide where its program takes 8, 3"):
        LayersScorer(wrong, program, [])
