"""A scorer turns pooled vectors and dense tensors into one score a row. Kinds: `serving.model.scorers`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.segment.header import ScorerInput
from tableside.quant.contract import MatrixPlace, Precision, matrices_in
from tableside.quant.gpu.batch.follower import Matrices
from tableside.serving.errors import ApiError, ErrorKind, bad_request
from tableside.serving.model.places import Buffer, Output

if TYPE_CHECKING:
    from tableside.serving.model.device_calls import DeviceCalls  # imports torch

Floats = NDArray[np.float32]
# by which a scorer says that it does not take rows
REFUSED = (RuntimeError, ValueError, IndexError, AssertionError, ArithmeticError)


@dataclass(frozen=True)
class ScorerLimits:
    """Limits of one scorer call; None: none. ending_s: how long a worker answers others after a timeout."""

    bytes: int | None = None
    timeout_s: float | None = None
    ending_s: float = 0.0


NO_LIMITS = ScorerLimits()


class Scorer:
    """Any thread may call. inputs: in order. width: scores a row if several, else None. is_row_wise: rows are
    independent. is_in_place: it has `run_in_place`, else `run`. model, version: its owner. runs_on: for
    people. calls: on rows on a device, or None. precision: of weights, inputs and computing; scores are
    fp32."""

    kind: str
    runs_on: str = "numpy"
    precision: Precision = Precision.FP32
    model: str = ""
    version: int = 0
    limits: ScorerLimits = NO_LIMITS
    inputs: tuple[ScorerInput, ...]
    width: int | None = None
    is_row_wise: bool = True
    is_in_place: bool = False
    calls: "DeviceCalls | None" = None

    def run(self, arrays: list[Floats]) -> Floats:
        """Takes fp32 [rows, width] for each input; returns fp32 [rows], or [rows, self.width]."""
        raise NotImplementedError

    def run_in_place(self, scoring: "Scoring", inputs: Any, outputs: Buffer) -> int:
        """Reads a request's buffers, and writes fp32 scores to `outputs`. Returns the first row with a score
        that is not finite, or -1."""
        raise NotImplementedError

    def admit(self, rows: int) -> int:
        """Returns a call's multiplications. ApiError: it would take too much memory."""
        return 4 * rows * sum(i.width for i in self.inputs)

    @property
    def name(self) -> str:
        return f"{self.model} version {self.version}"

    @property
    def dtype(self) -> str:
        """Its precision in settings and metadata."""
        return self.precision.name.lower()

    @cached_property
    def widths(self) -> list[int]:
        return [i.width for i in self.inputs]

    @property
    def dense(self) -> dict[str, int]:
        """Dense tensors' names and widths."""
        return {i.name: i.width for i in self.inputs if i.feature is None}

    def describe(self) -> dict[str, Any]:
        inputs = [{"name": i.name, "feature": i.feature, "shape": [-1, i.width]} for i in self.inputs]
        shape = [-1] if self.width is None else [-1, self.width]
        about = {"kind": self.kind, "runs_on": self.runs_on, "dtype": self.dtype}
        return {**about, "inputs": inputs, "shape": shape}


@dataclass(frozen=True, eq=False)
class Scoring:
    """A request's scorer inputs, and its scores' place. sources: `MatrixPlace` of each input, in order.
    is_alone: only the scorer reads the vectors, so a device need not send them."""

    scorer: Scorer
    sources: bytes
    output: Output
    is_alone: bool = False

    def run(self, inputs: Any, buffer: Buffer) -> None:
        """Scores the vectors in `buffer` and writes scores there. ApiError: as of `score_together`."""
        score_together([ToScore(self, inputs, buffer)])

    @property
    def rows(self) -> int:
        return self.output.shape[0]

    @cached_property
    def matrices(self) -> Matrices:
        """The scorer's inputs, for a device that scores many requests together."""
        return Matrices(self.sources, self.rows, self.scorer.precision)

    def check(self, inputs: Any, scores: Floats) -> None:
        """ApiError: a score is not finite; 400 if a dense tensor is not finite either, else 500."""
        if np.isfinite(scores).all():
            return
        for i, place in zip(self.scorer.inputs, self._places, strict=True):
            if not place.is_output and not np.isfinite(values := self._matrix(place, inputs)).all():
                row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
                raise bad_request(
                    f"dense tensor {i.name!r} is not finite in row {row}; expected finite numbers"
                )
        row = int(np.flatnonzero(~np.isfinite(scores.reshape(len(scores), -1)).all(axis=1))[0])
        what = f"the score of row {row} is {scores[row]}, from {self.scorer.name}{self._beyond}"
        raise ApiError(500, ErrorKind.SCORER, f"{what}; expected a finite number")

    @property
    def _beyond(self) -> str:
        return (
            " in fp16, whose largest number is 65,504 (--scorer-dtype)"
            if self.scorer.precision is Precision.FP16
            else ""
        )

    def arrays(self, inputs: Any, buffer: Buffer) -> list[Floats]:
        """Returns the scorer's inputs, fp32 [rows, width] each."""
        return [self._matrix(p, buffer if p.is_output else inputs) for p in self._places]

    @property
    def _places(self) -> list[MatrixPlace]:
        return [MatrixPlace(*fields) for fields in matrices_in(self.sources).tolist()]

    def _matrix(self, place: MatrixPlace, memory: Any) -> Floats:
        """Returns fp32 [rows, width]."""
        dtype = np.dtype(np.float16 if place.is_half else np.float32)
        shape, steps = (self.rows, place.width), (place.row_bytes, dtype.itemsize)
        found: Floats = np.ndarray(shape, dtype, memory, place.at if self.rows else 0, steps)
        return found.astype(np.float32, copy=False)


def does_not_take(rows: int, error: Exception) -> ApiError:
    """Returns the 400 for a call that the scorer refused."""
    reason = str(error).strip().partition("\n")[0]
    return bad_request(f"the scorer does not take these {rows} rows: {reason}")


class ToScore(NamedTuple):
    """A looked-up request: its input buffer, and its output buffer with vectors and room for scores."""

    scoring: Scoring
    inputs: Any
    buffer: Buffer


def score_together(requests: Sequence[ToScore]) -> None:
    """Scores one scorer's requests by one call and writes their scores. ApiError: too much memory, the scorer
    refuses, or a score is not finite."""
    scorer = requests[0].scoring.scorer
    scorer.admit(requests[0].scoring.rows if len(requests) == 1 else sum(r.scoring.rows for r in requests))
    if not scorer.is_in_place:
        _score_arrays(scorer, requests)
        return
    for scoring, inputs, buffer in requests:
        if scorer.run_in_place(scoring, inputs, buffer) >= 0:
            scoring.check(inputs, scoring.output.view(buffer))


def _score_arrays(scorer: Scorer, requests: Sequence[ToScore]) -> None:
    arrays = [scoring.arrays(inputs, buffer) for scoring, inputs, buffer in requests]
    together = (
        arrays[0] if len(requests) == 1 else [np.concatenate(parts) for parts in zip(*arrays, strict=True)]
    )
    rows = [scoring.rows for scoring, _, _ in requests]
    try:
        # An array is copied only where its memory is not aligned, or the scorer may not write to it.
        scores = scorer.run([a if a.flags.carray else a.copy() for a in together])
    except REFUSED as error:
        raise does_not_take(sum(rows), error) from error
    if scores.shape != (expected := (sum(rows), *requests[0].scoring.output.shape[1:])):
        what = f"the scorer of {scorer.name} gave scores {scores.shape}; expected {expected}"
        raise ApiError(500, ErrorKind.SCORER, what)
    start = 0
    for scoring, inputs, buffer in requests:
        part = scores[start : start + scoring.rows]
        scoring.check(inputs, part)
        scoring.output.view(buffer)[:] = part
        start += scoring.rows
