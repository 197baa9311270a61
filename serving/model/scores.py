"""What a scorer reads of a request that was looked up, and the call that turns it into scores."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.program.layers import LayerSource
from tableside.quant.contract import Precision
from tableside.serving.errors import ApiError, ErrorKind, bad_request
from tableside.serving.model.places import Buffer, DenseInput, Output
from tableside.serving.model.scorer import REFUSED, Floats, InPlace, Scorer


@dataclass(frozen=True)
class Scoring:
    """What a scorer reads of a request, in the order that it takes it, and where its scores go.

    is_alone: nobody reads the vectors but the scorer, so that a device need not send them. known_vectors:
    `vectors`, where whoever laid the request out has them.
    """

    scorer: Scorer
    sources: tuple[Output | DenseInput, ...]
    output: Output
    is_alone: bool = False
    known_vectors: NDArray[np.int64] | None = field(default=None, compare=False)

    def run(self, inputs: Any, buffer: Buffer) -> None:
        """Reads the request's inputs and its vectors in `buffer`, writes its scores there. ApiError: as
        `score_together`."""
        score_together([ToScore(self, inputs, buffer)])

    @property
    def rows(self) -> int:
        """Rows that get scores."""
        return self.output.shape[0]

    @cached_property
    def vectors(self) -> NDArray[np.int64]:
        """The vectors among the sources as a device takes them: int64 [outputs, fields of
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
        """The scorer's function for this layout, where it reads the request's buffers themselves. Made for
        the first request.

        None as well where a source is of another width than the scorer takes: `run` says so.
        """
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
        """As `run`, by that function."""
        if in_place(inputs, buffer) >= 0:
            self.check(inputs, self.output.view(buffer))

    def check(self, inputs: Any, scores: Floats) -> None:
        """ApiError: a score is not finite. It is a 400 where a dense tensor of the request is not finite
        either, else a 500."""
        if np.isfinite(scores).all():
            return
        for source, values in self._dense(inputs):
            if not np.isfinite(values).all():
                row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
                raise bad_request(
                    f"dense tensor {source.name!r} is not finite in row {row}; expected finite numbers"
                )
        row = int(np.flatnonzero(~np.isfinite(scores.reshape(len(scores), -1)).all(axis=1))[0])
        raise ApiError(
            500,
            ErrorKind.SCORER,
            f"the score of row {row} is {scores[row]}, from {self.scorer.name}{self._beyond}; expected a "
            "finite number",
        )

    @property
    def _beyond(self) -> str:
        """For a score that is not finite: what a precision of few exponents has to do with it."""
        return (
            " in fp16, whose largest number is 65,504 (--scorer-dtype)"
            if self.scorer.precision is Precision.FP16
            else ""
        )

    def arrays(self, inputs: Any, buffer: Buffer) -> list[Floats]:
        """What the scorer takes: one fp32 [rows, width] for each source."""
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
    """400 for a call that a scorer refuses."""
    reason = str(error).strip().partition("\n")[0]
    return bad_request(f"the scorer does not take these {rows} rows: {reason}")


class ToScore(NamedTuple):
    """A request that was looked up. inputs: its input buffer. buffer: its output buffer, with vectors and
    room for scores."""

    scoring: Scoring
    inputs: Any
    buffer: Buffer


def score_together(requests: Sequence[ToScore]) -> None:
    """Scores requests of one scorer by one call of it; writes each request's scores to its buffer.

    ApiError: the call would take too much memory, the scorer refuses it, or a score is not finite.
    """
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
        raise ApiError(
            500,
            ErrorKind.SCORER,
            f"the scorer of {scorer.name} gave scores {scores.shape}; expected {expected}",
        )
    start = 0
    for scoring, inputs, buffer in requests:
        part = scores[start : start + scoring.rows]
        scoring.check(inputs, part)
        scoring.output.view(buffer)[:] = part
        start += scoring.rows
