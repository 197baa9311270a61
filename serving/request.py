"""A request as bytes: where its ids lie in an input buffer, and where its vectors and scores go in an output buffer.

A `Request` is laid out once, by a version (`serving.version`), and runs on the input buffer of every request that has its layout.
A batch is several requests that run together on a GPU (`serving.batching`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.quant import BadIds, Plan
from tableside.quant.errors import Problem
from tableside.serving.errors import ApiError, Kind, bad_request
from tableside.serving.scorer import Floats, Scorer

Buffer = NDArray[np.uint8]


@dataclass(frozen=True)
class FeatureInput:
    """A feature's ids as byte offsets in a request's input buffer, at any alignment.

    The ids are int64 [ids] at `ids_at`, the weights fp32 [ids] at `weights_at`, the lengths int32 [bags] at `lengths_at`.
    Without lengths there are `bags` bags of `bag_length` ids each. bags is None for ids without bags, which an unpooled feature
    alone takes.
    """

    feature: str
    ids_at: int
    ids: int
    bags: int | None = None
    bag_length: int = 0
    lengths_at: int | None = None
    weights_at: int | None = None


@dataclass(frozen=True)
class DenseInput:
    """A scorer's dense tensor: fp32 [rows, width] at byte `at` of a request's input buffer."""

    name: str
    at: int
    rows: int
    width: int


@dataclass(frozen=True)
class Output:
    """One feature's vectors in a request's output buffer, [bags or ids, dim] at byte `at`; or its scores, [bags] or [bags, n].

    half: the values are fp16, else fp32.
    """

    feature: str
    at: int
    bytes: int
    shape: tuple[int, ...]
    half: bool

    def view(self, buffer: Buffer) -> NDArray[Any]:
        """The values as an array over the buffer's memory."""
        return buffer[self.at : self.at + self.bytes].view(np.float16 if self.half else np.float32).reshape(self.shape)


@dataclass(frozen=True)
class Scoring:
    """What a scorer reads of a request, in the order that it takes it, and where its scores go."""

    scorer: Scorer
    sources: tuple[Output | DenseInput, ...]
    output: Output

    def run(self, inputs: Any, buffer: Buffer) -> None:
        """Reads the request's inputs and its vectors in `buffer`, writes its scores there. ApiError: as `score_together`."""
        score_together([ToScore(self, inputs, buffer)])

    def check(self, given: Sequence[Floats], scores: Floats) -> None:
        """ApiError: a score is not finite. It is a 400 where a dense tensor of the request is not finite either, else a 500."""
        if np.isfinite(scores).all():
            return
        for source, values in zip(self.sources, given, strict=True):
            if isinstance(source, DenseInput) and not np.isfinite(values).all():
                row = int(np.flatnonzero(~np.isfinite(values).all(axis=1))[0])
                raise bad_request(f"dense tensor {source.name!r} is not finite in row {row}; expected finite numbers")
        row = int(np.flatnonzero(~np.isfinite(scores.reshape(len(scores), -1)).all(axis=1))[0])
        raise ApiError(
            500, Kind.SCORER, f"the score of row {row} is {scores[row]}, from {self.scorer.name}; expected a finite number"
        )

    def arrays(self, inputs: Any, buffer: Buffer) -> list[Floats]:
        """What the scorer takes: one fp32 [rows, width] for each source."""
        return [
            s.view(buffer).astype(np.float32, copy=False)
            if isinstance(s, Output)
            else np.frombuffer(inputs, np.float32, s.rows * s.width, s.at).reshape(s.rows, s.width)
            for s in self.sources
        ]


class ToScore(NamedTuple):
    """A request that was looked up. inputs: its input buffer. buffer: its output buffer, with vectors and room for scores."""

    scoring: Scoring
    inputs: Any
    buffer: Buffer


def score_together(requests: Sequence[ToScore]) -> None:
    """Scores requests of one scorer by one call of it; writes each request's scores to its buffer.

    ApiError: the call would take too much memory, the scorer refuses it, or a score is not finite.
    """
    arrays = [scoring.arrays(inputs, buffer) for scoring, inputs, buffer in requests]
    together = arrays[0] if len(requests) == 1 else [np.concatenate(parts) for parts in zip(*arrays, strict=True)]
    rows = [scoring.output.shape[0] for scoring, _, _ in requests]
    scorer = requests[0].scoring.scorer
    scorer.admit(sum(rows))
    try:
        # An array is copied only where its memory is not aligned, or the scorer may not write to it.
        scores = scorer.run([np.require(a, requirements=["C", "A", "W"]) for a in together])
    except (RuntimeError, ValueError, IndexError, AssertionError, ArithmeticError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise bad_request(f"the scorer does not take these {sum(rows)} rows: {reason}") from error
    if scores.shape != (expected := (sum(rows), *requests[0].scoring.output.shape[1:])):
        raise ApiError(500, Kind.SCORER, f"the scorer of {scorer.name} gave scores {scores.shape}; expected {expected}")
    for (scoring, _, buffer), given, part in zip(requests, arrays, np.split(scores, np.cumsum(rows)[:-1]), strict=True):
        scoring.check(given, part)
        scoring.output.view(buffer)[:] = part


class Request:
    """The lookups of a request, and its scoring where it asks for scores, laid out once. Immutable; any thread may call.

    It holds the tables that it reads and not the version that laid it out. So a memory of requests that is
    keyed by their version does not keep the version alive.
    """

    def __init__(
        self,
        model: str,
        version: int,
        inputs: Sequence[FeatureInput],
        outputs: tuple[Output, ...],
        plan: Plan,
        *,
        row_bytes: int,
        unpooled_bags: Sequence[FeatureInput] = (),
        scoring: Scoring | None = None,
    ) -> None:
        """row_bytes: of all rows that it reads. unpooled_bags: inputs of unpooled features that came with lengths."""
        self.model, self.version = model, version
        self.inputs, self.outputs = tuple(inputs), outputs
        self.plan, self.scoring = plan, scoring
        self.ids = sum(i.ids for i in inputs)
        self.vectors = sum(o.shape[0] for o in outputs if scoring is None or o is not scoring.output)
        self.row_bytes = row_bytes
        self.out_bytes = sum(o.bytes for o in outputs)
        self.staged_bytes = plan.staged_bytes
        self._unpooled_bags = tuple(unpooled_bags)

    def check(self, inputs: Any) -> None:
        """ApiError: the lengths of an unpooled feature are negative or do not add up. No kernel reads those lengths."""
        for i in self._unpooled_bags:
            _check_lengths(i, np.frombuffer(inputs, np.int32, i.bags or 0, i.lengths_at or 0))

    def run(self, inputs: Any) -> Buffer:
        """Looks every feature up; returns the output buffer, uint8 [out_bytes]. Its scores are not written yet.

        ApiError: an id, or a length of a pooled feature, is wrong.
        """
        out = np.empty(self.out_bytes, np.uint8)
        try:
            self.plan.run(inputs, out)
        except BadIds as error:
            raise self.refusal(error) from None
        return out

    def refusal(self, error: BadIds) -> ApiError:
        """The error that the client gets; it names the feature."""
        return bad_request(error.describe(f"feature {self.inputs[error.job].feature!r}"), Kind.BAD_ID)


def _check_lengths(i: FeatureInput, lengths: NDArray[np.int32]) -> None:
    name = f"feature {i.feature!r}"
    if (negative := np.flatnonzero(lengths < 0)).size:
        at = int(negative[0])
        raise bad_request(BadIds(Problem.LENGTH, 0, at, int(lengths[at]), 0).describe(name), Kind.BAD_ID)
    if (total := int(lengths.sum(dtype=np.int64))) != i.ids:
        raise bad_request(BadIds(Problem.SUM, 0, lengths.size, total, i.ids).describe(name), Kind.BAD_ID)
