"""A scorer turns pooled vectors and dense tensors into one score a row. Kinds: `serving.model.scorers`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.program.layers import LayerSource
from tableside.loader.segment.header import ScorerInput
from tableside.quant.contract import Precision
from tableside.serving.errors import ApiError, ErrorKind, bad_request
from tableside.serving.model.places import Buffer, DenseInput, Output

if TYPE_CHECKING:
    from tableside.serving.model.device_calls import DeviceCalls  # imports torch

Floats = NDArray[np.float32]
# by which a scorer says that it does not take rows
REFUSED = (RuntimeError, ValueError, IndexError, AssertionError, ArithmeticError)
# (inputs, outputs) -> the first row with a score that is not finite, or -1
InPlace = Callable[[Any, Any], int]


@dataclass(frozen=True)
class ScorerLimits:
    """Limits of one scorer call; None: none. ending_s: how long a worker answers others after a timeout."""

    bytes: int | None = None
    timeout_s: float | None = None
    ending_s: float = 0.0


NO_LIMITS = ScorerLimits()


class Scorer(ABC):
    """Any thread may call. inputs: of `run`, in order. width: scores a row if several, else None.
    is_row_wise: rows are independent. model, version: its owner. runs_on: for people. calls: on rows on a
    device, or None. precision: of weights, inputs and computing; scores are fp32."""

    kind: str
    runs_on: str = "numpy"
    precision: Precision = Precision.FP32
    model: str = ""
    version: int = 0
    limits: ScorerLimits = NO_LIMITS
    inputs: tuple[ScorerInput, ...]
    width: int | None = None
    is_row_wise: bool = True
    calls: "DeviceCalls | None" = None

    @abstractmethod
    def run(self, arrays: list[Floats]) -> Floats:
        """Takes fp32 [rows, width] for each input; returns fp32 [rows], or [rows, self.width]."""

    def in_place(self, sources: Sequence[LayerSource], rows: int, scores_at: int) -> InPlace | None:
        """Returns a function that reads a request's buffers and writes fp32 scores at byte `scores_at` of the
        output. None: use `run`. sources: per input, with `rows` rows each."""
        return None

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

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(i.feature for i in self.inputs if i.feature is not None)

    def describe(self) -> dict[str, Any]:
        inputs = [{"name": i.name, "feature": i.feature, "shape": [-1, i.width]} for i in self.inputs]
        shape = [-1] if self.width is None else [-1, self.width]
        about = {"kind": self.kind, "runs_on": self.runs_on, "dtype": self.dtype}
        return {**about, "inputs": inputs, "shape": shape}


@dataclass(frozen=True)
class Scoring:
    """A request's scorer inputs in order, and its scores' place. is_alone: only the scorer reads the vectors,
    so a device need not send them. known_vectors: `vectors`, if known already."""

    scorer: Scorer
    sources: tuple[Output | DenseInput, ...]
    output: Output
    is_alone: bool = False
    known_vectors: NDArray[np.int64] | None = field(default=None, compare=False)

    def run(self, inputs: Any, buffer: Buffer) -> None:
        """Scores the vectors in `buffer` and writes scores there. ApiError: as of `score_together`."""
        score_together([ToScore(self, inputs, buffer)])

    @property
    def rows(self) -> int:
        return self.output.shape[0]

    @cached_property
    def vectors(self) -> NDArray[np.int64]:
        """The vectors to read for a device: int64 [outputs, fields of
        `quant.gpu.batch.follower.VectorField`]."""
        if self.known_vectors is not None:
            return self.known_vectors
        found = [
            (s.at, int(s.half), s.shape[1], s.row_values, s.shape[0] * s.shape[1])
            for s in self.sources
            if isinstance(s, Output)
        ]
        return np.array(found, np.int64).reshape(-1, 5)

    @cached_property
    def in_place(self) -> InPlace | None:
        """The scorer's function over the buffers; None if it has none or a width differs (`run` says so)."""
        widths = [s.shape[1] if isinstance(s, Output) else s.width for s in self.sources]
        if widths != self.scorer.widths:
            return None
        sources = [
            LayerSource(
                True, s.at, s.shape[1] * (2 if s.half else 4) if s.row_bytes is None else s.row_bytes, s.half
            )
            if isinstance(s, Output)
            else LayerSource(False, s.at, s.width * 4, False)
            for s in self.sources
        ]
        return self.scorer.in_place(sources, self.rows, self.output.at)

    def run_in_place(self, in_place: InPlace, inputs: Any, buffer: Buffer) -> None:
        if in_place(inputs, buffer) >= 0:
            self.check(inputs, self.output.view(buffer))

    def check(self, inputs: Any, scores: Floats) -> None:
        """ApiError: a score is not finite; 400 if a dense tensor is not finite either, else 500."""
        if np.isfinite(scores).all():
            return
        for source, values in self._dense(inputs):
            if not np.isfinite(values).all():
                row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
                raise bad_request(
                    f"dense tensor {source.name!r} is not finite in row {row}; expected finite numbers"
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
        return [
            s.view(buffer).astype(np.float32, copy=False)
            if isinstance(s, Output)
            else _dense_values(s, inputs)
            for s in self.sources
        ]

    def _dense(self, inputs: Any) -> Iterator[tuple[DenseInput, Floats]]:
        return ((s, _dense_values(s, inputs)) for s in self.sources if isinstance(s, DenseInput))


def _dense_values(source: DenseInput, inputs: Any) -> Floats:
    return np.frombuffer(inputs, np.float32, source.rows * source.width, source.at).reshape(
        source.rows, source.width
    )


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
    for scoring, inputs, buffer in requests:
        if (in_place := scoring.in_place) is None:
            break
        scoring.run_in_place(in_place, inputs, buffer)
    else:
        return
    _score_arrays(scorer, requests)


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
