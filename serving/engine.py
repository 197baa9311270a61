"""The engine: a model's live version, and batches of lookups planned over it.

`Served` is one attached version and never changes. `Engine` holds the live one and swaps it whole; a request takes
`engine.served()` once and answers from it, so it never mixes versions. A replaced version stays mapped until its last
request is done, and then goes.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from tableside.loader.errors import LoaderError
from tableside.loader.model import SCORE, Feature
from tableside.loader.segment import Segment, Verify
from tableside.loader.versions import Model
from tableside.quant import Backend, BadIds, CpuBackend, Lookup, Plan, Pooling, Precision, QuantError, RowSource
from tableside.quant.errors import Problem
from tableside.serving.errors import ApiError, Kind, ServingError, bad_request, not_found, short
from tableside.serving.placement import Placements, Placer
from tableside.serving.scorer import NO_LIMITS, Floats, Scorer, ScorerLimits, open_scorer

if TYPE_CHECKING:
    from tableside.quant.cache.cache import Cache

logger = logging.getLogger("tableside")

_WARM_UP_BAGS = (2, 32, 64)  # ids of a bag: of each shape that `quant.gpu.layout.Shapes` knows
_PLANS = 256  # layouts of requests that a version remembers
_EXPLICIT_VERSIONS = 4  # versions beside the live one that stay attached after a request named them


@dataclass(frozen=True)
class FeatureInput:
    """A feature's ids as places in a request's input buffer; bytes, at any alignment.

    lengths_at None: `bags` bags of `bag_length` ids each. bags is None for a list of ids without bags (unpooled only).
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
    """A scorer's dense tensor, fp32 [rows, width] at byte `at` of a request's input buffer."""

    name: str
    at: int
    rows: int
    width: int


@dataclass(frozen=True)
class Output:
    """One feature's vectors in a batch's output buffer: shape [bags or ids, dim] at byte `at`; or the scores, [bags]."""

    feature: str
    at: int
    bytes: int
    shape: tuple[int, ...]
    half: bool

    def view(self, buffer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The vectors, as an array over the buffer."""
        return buffer[self.at : self.at + self.bytes].view(np.float16 if self.half else np.float32).reshape(self.shape)


@dataclass(frozen=True)
class BoundFeature:
    """A feature with its table."""

    feature: Feature
    table: RowSource
    pooling: Pooling

    @property
    def half(self) -> bool:
        return self.feature.output == "fp16"

    @property
    def precision(self) -> Precision:
        return Precision.FP16 if self.half else Precision.FP32


@dataclass(frozen=True)
class Scoring:
    """What a scorer reads of a batch, in its order, and where its scores go."""

    scorer: Scorer
    sources: tuple[Output | DenseInput, ...]
    output: Output

    def run(self, inputs: Any, buffer: np.ndarray[Any, Any]) -> None:
        """From the request's inputs and the vectors in `buffer` to the scores in `buffer`. ApiError: the scorer refuses."""
        score_together([(self, inputs, buffer)])

    def check(self, given: Sequence[Floats], scores: Floats) -> None:
        """ApiError: a score is not finite; 400 where a dense tensor of the request is not either, else 500."""
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

    def arrays(self, inputs: Any, buffer: np.ndarray[Any, Any]) -> list[Floats]:
        """What the scorer takes, fp32 [rows, width] each."""
        return [
            s.view(buffer).astype(np.float32, copy=False)
            if isinstance(s, Output)
            else np.frombuffer(inputs, np.float32, s.rows * s.width, s.at).reshape(s.rows, s.width)
            for s in self.sources
        ]


def score_together(requests: Sequence[tuple[Scoring, Any, np.ndarray[Any, Any]]]) -> None:
    """As `Scoring.run`, of several requests for one scorer: (scoring, inputs, buffer) each.

    ApiError: they take too much memory, the scorer refuses them, or a score is not finite.
    """
    arrays = [scoring.arrays(inputs, buffer) for scoring, inputs, buffer in requests]
    together = arrays[0] if len(requests) == 1 else [np.concatenate(parts) for parts in zip(*arrays, strict=True)]
    rows = [scoring.output.shape[0] for scoring, _, _ in requests]
    scorer = requests[0][0].scorer
    scorer.admit(sum(rows))
    try:
        # Copied where that is needed for a scorer to get aligned memory that it may write to.
        scores = scorer.run([np.require(a, requirements=["C", "A", "W"]) for a in together])
    except (RuntimeError, ValueError, IndexError, AssertionError, ArithmeticError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise bad_request(f"the scorer does not take these {sum(rows)} rows: {reason}") from error
    if scores.shape != (expected := (sum(rows), *requests[0][0].output.shape[1:])):
        raise ApiError(500, Kind.SCORER, f"the scorer of {scorer.name} gave scores {scores.shape}; expected {expected}")
    for (scoring, _, buffer), given, part in zip(requests, arrays, np.split(scores, np.cumsum(rows)[:-1]), strict=True):
        scoring.check(given, part)
        scoring.output.view(buffer)[:] = part


class Batch:
    """A request's lookups, laid out once: run it on the inputs of any request of the same layout.

    scoring: what is to be done with the vectors afterwards, in the same output buffer.
    """

    def __init__(
        self,
        served: "Served",
        inputs: Sequence[FeatureInput],
        plan: Plan,
        outputs: tuple[Output, ...],
        scoring: Scoring | None = None,
    ) -> None:
        self.scoring = scoring
        # Not `served` itself: it remembers batches, and a cycle would keep a replaced version mapped.
        self.model, self.version = served.header.model, served.version
        self.inputs, self.outputs = tuple(inputs), outputs
        self.plan = plan
        self.out_bytes = sum(o.bytes for o in outputs)
        self.ids = sum(i.ids for i in inputs)
        self.vectors = sum(o.shape[0] for o in outputs if scoring is None or o is not scoring.output)
        self.row_bytes = sum(i.ids * served.features[i.feature].table.row_bytes for i in inputs)
        self.staged_bytes = plan.staged_bytes
        self._jagged_unpooled = [i for i in inputs if i.lengths_at is not None and not _pooled(served, i)]

    def run(self, inputs: Any) -> np.ndarray[Any, Any]:
        """Looks everything up; returns the output buffer, uint8 [out_bytes], its scores not yet written.

        ApiError: an id or a length is wrong.
        """
        self.check(inputs)
        out = np.empty(self.out_bytes, np.uint8)
        try:
            self.plan.run(inputs, out)
        except BadIds as error:
            raise self.refusal(error) from None
        return out

    def with_scores(self, buffer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The vectors of a backend that knows of no scores, and room for these."""
        missing = self.out_bytes - buffer.size
        return np.concatenate([buffer, np.empty(missing, np.uint8)]) if missing else buffer

    def check(self, inputs: Any) -> None:
        """ApiError: lengths that no kernel looks at are wrong."""
        for i in self._jagged_unpooled:
            _check_lengths(i, np.frombuffer(inputs, np.int32, i.bags or 0, i.lengths_at or 0))

    def refusal(self, error: BadIds) -> ApiError:
        """What the client is told."""
        return bad_request(error.describe(f"feature {self.inputs[error.job].feature!r}"), Kind.BAD_ID)


def _pooled(served: "Served", i: FeatureInput) -> bool:
    return served.features[i.feature].pooling is not Pooling.NONE


def _check_lengths(i: FeatureInput, lengths: np.ndarray[Any, Any]) -> None:
    """The kernel does not look at the lengths of an unpooled feature; the client's must still add up."""
    name = f"feature {i.feature!r}"
    if (negative := np.flatnonzero(lengths < 0)).size:
        at = int(negative[0])
        raise bad_request(BadIds(Problem.LENGTH, 0, at, int(lengths[at]), 0).describe(name), Kind.BAD_ID)
    if (total := int(lengths.sum(dtype=np.int64))) != i.ids:
        raise bad_request(BadIds(Problem.SUM, 0, lengths.size, total, i.ids).describe(name), Kind.BAD_ID)


class Served:
    """One version, attached and ready to answer. Immutable but for its memory of layouts."""

    def __init__(
        self,
        segment: Segment,
        backend: Backend,
        placed: Placements,
        *,
        scorer: Scorer | None = None,
        threads: int = 1,
        max_response_bytes: int | None = None,
        verified_at: float = 0.0,
    ) -> None:
        """verified_at: when its rows were read against their checksums, of time.time(); 0: never."""
        self.verified_at = verified_at
        self.segment, self.backend, self.threads = segment, backend, threads
        self.scorer = scorer
        self.max_response_bytes = max_response_bytes
        self.header = segment.header
        self.version = segment.header.version
        self.placed = placed
        self.features = {
            f.name: BoundFeature(f, placed.tables[f.table], Pooling.parse(f.pooling)) for f in segment.header.features
        }
        self.layouts: OrderedDict[Any, Any] = OrderedDict()

    def can_score(self, given: Container[str]) -> bool:
        """Whether `given`, names of features and dense tensors, are all that the scorer needs."""
        return self.scorer is not None and all((i.feature or i.name) in given for i in self.scorer.inputs)

    def batch(self, inputs: Sequence[FeatureInput], dense: Sequence[DenseInput] = (), score: bool = False) -> Batch:
        """Lays a request out, with its scores where `score`.

        ApiError: a feature is unknown, its bags or weights do not fit its pooling, or the scorer needs something else.
        """
        if not inputs:
            raise bad_request(f"no feature is asked for; model {self.header.model!r} has: {', '.join(self.features)}")
        lookups, outputs, at = [], [], 0
        for i in inputs:
            bound = self.feature(i.feature)
            unpooled = bound.pooling is Pooling.NONE
            if not unpooled and i.bags is None:
                raise bad_request(
                    f"feature {i.feature!r} is {bound.pooling.label}-pooled and came without lengths; send {i.feature}.lengths"
                )
            if unpooled and i.weights_at is not None:
                raise bad_request(f"feature {i.feature!r} is not pooled and takes no weights; leave {i.feature}.weights out")
            lk = Lookup(
                bound.table,
                bound.pooling,
                i.ids_at,
                i.ids,
                at,
                bound.precision,
                i.bags or 0,
                i.lengths_at,
                i.bag_length,
                i.weights_at,
            )
            lookups.append(lk)
            outputs.append(Output(i.feature, at, lk.out_bytes, (lk.outputs, bound.table.dim), bound.half))
            at += lk.out_bytes
        scoring = self._scoring(outputs, dense, at) if score else None
        if scoring is not None:
            outputs.append(scoring.output)
            at += scoring.output.bytes
        if self.max_response_bytes is not None and at > self.max_response_bytes:
            raise bad_request(
                f"the request asks for {at:,} bytes of vectors; the limit is {self.max_response_bytes:,} (max_response_bytes)",
                Kind.TOO_LARGE,
            )
        return Batch(self, inputs, self.backend.plan(lookups, self.threads), tuple(outputs), scoring)

    def _scoring(self, outputs: Sequence[Output], dense: Sequence[DenseInput], at: int) -> Scoring:
        if self.scorer is None:
            raise bad_request(f"model {self.header.model!r} has no scorer; publish one with [scorer] in model.toml")
        given: dict[str, Output | DenseInput] = {o.feature: o for o in outputs} | {d.name: d for d in dense}
        names = [i.feature or i.name for i in self.scorer.inputs]
        if missing := [n for n in names if n not in given]:
            raise bad_request(f"the score needs {', '.join(names)}; the request lacks {', '.join(missing)}")
        sources = tuple(given[n] for n in names)
        rows = [s.shape[0] if isinstance(s, Output) else s.rows for s in sources]
        if len(set(rows)) > 1:
            found = ", ".join(f"{n} {r}" for n, r in zip(names, rows, strict=True))
            raise bad_request(f"the score needs as many bags of each feature as rows of each dense tensor; found {found}")
        shape = (rows[0],) if self.scorer.width is None else (rows[0], self.scorer.width)
        return Scoring(self.scorer, sources, Output(SCORE, at, 4 * prod(shape), shape, False))

    def feature(self, name: str) -> BoundFeature:
        if (bound := self.features.get(name)) is None:
            raise bad_request(f"feature {short(name)} is unknown; model {self.header.model!r} has: {', '.join(self.features)}")
        return bound

    def remember(self, key: Any, layout: Any) -> None:
        """Keeps a layout for `recall`, dropping the one that was not used for longest."""
        self.layouts[key] = layout
        if len(self.layouts) > _PLANS:
            self.layouts.popitem(last=False)

    def recall(self, key: Any) -> Any:
        if (layout := self.layouts.get(key)) is not None:
            self.layouts.move_to_end(key)
        return layout

    def warm_up(self) -> None:
        """Looks the first and last row of every feature up, so that a broken version fails here and not in a request.

        With weights and without, with bags of one length and of their own, short and long: what a GPU compiles for them is
        compiled now.
        """
        for name, bound in self.features.items():
            for count in _WARM_UP_BAGS:
                ids = np.resize(np.array([0, bound.table.rows - 1], np.int64), count)
                self.batch([FeatureInput(name, 0, count, bags=1, bag_length=count)]).run(ids.tobytes())
                if bound.pooling is not Pooling.NONE:
                    inputs = ids.tobytes() + np.array([count], np.int32).tobytes() + np.ones(count, np.float32).tobytes()
                    at = ids.nbytes
                    self.batch([FeatureInput(name, 0, count, bags=1, lengths_at=at, weights_at=at + 4)]).run(inputs)


class Engine:
    """The versions of one model that this process answers from."""

    def __init__(
        self,
        model: Model,
        backend: CpuBackend,
        placer: Placer,
        *,
        threads: int,
        verify: Verify,
        max_response_bytes: int,
        scorer_limits: ScorerLimits = NO_LIMITS,
    ) -> None:
        self.model, self._scorer_limits = model, scorer_limits
        self._placer = placer
        self._backend, self._threads, self._verify, self._max_response_bytes = (
            backend,
            threads,
            verify,
            max_response_bytes,
        )
        self._served: Served | None = None
        self._explicit: OrderedDict[int, Served] = OrderedDict()
        self._refused: set[int] = set()  # versions that could not be taken, since another one was made live
        self._live = 0
        self._unusable: ApiError | None = None
        self._last_warning = ""

    @property
    def cache(self) -> "Cache | None":
        """The cache that this worker's models share on its GPU."""
        return self._placer.cache

    def served(self) -> Served:
        """The version that answers. ApiError: none is attached yet, or its rows were found damaged and there is no other."""
        if self._unusable is not None:
            raise self._unusable
        return self.attached()

    def attached(self) -> Served:
        """The version that is attached, whether or not it may answer. ApiError: none is yet."""
        if self._served is None:
            raise not_found(f"model {self.model.name!r} is not ready")
        return self._served

    @property
    def is_usable(self) -> bool:
        """Whether it answers."""
        return self._unusable is None

    def attach(self, version: int | None = None, *, as_successor: bool = False) -> Served:
        """Maps, verifies and warms up a version (None: the live one); does not make it the one that is served.

        as_successor: it may take the room of the one that is served, which goes when its last request is done.

        LoaderError, QuantError, ServingError, OSError: it cannot be served here.
        """
        segment = self.model.attach(version, self._verify)
        replaced = self._served.placed if as_successor and self._served is not None else None
        try:
            served = Served(
                segment,
                self._placer.gpu or self._backend,
                self._placer.place(segment, replaced),
                scorer=open_scorer(segment, self._placer.torch_device, self._threads, self._scorer_limits),
                threads=self._threads,
                max_response_bytes=self._max_response_bytes,
                verified_at=time.time() if self._verify == "full" else 0.0,
            )
            served.warm_up()
        except (LoaderError, QuantError, ServingError, OSError):
            raise
        except Exception as error:  # whatever a GPU, its compiler or a scorer may raise
            logger.exception("version %d of %s cannot be served", segment.header.version, self.model.name)
            raise ServingError(f"{self.model.name} version {segment.header.version} cannot be served: {error!r}") from error
        return served

    def swap(self, served: Served) -> None:
        """From the next request on, `served` is answered from."""
        self._served, self._unusable = served, None

    def changed(self) -> int | None:
        """The version that should be served instead, or None: the live one, unless it is served or was refused before; where
        the rows of what is served were found damaged, the last good one.
        """
        try:
            current, damaged = self.model.record().current, self.model.damaged_versions()
            good = self.model.last_good() if damaged else []
        except (LoaderError, OSError) as error:
            self._warn(f"cannot see which version of {self.model.name} is live: {error}")
            return None
        if current != self._live:
            self._live = current
            self._refused.clear()
        served = self._served.version if self._served is not None else 0
        wanted = [current] if current and current not in damaged else good if served in damaged else []
        wanted = [v for v in wanted if v not in self._refused]
        if served in damaged and not wanted and self._unusable is None:
            self._give_up(served)
        return wanted[0] if wanted and wanted[0] != served else None

    def refuse(self, version: int) -> None:
        """Remembers that `version` cannot be served, so that it is not tried again until another one is live."""
        self._refused.add(version)

    def _give_up(self, version: int) -> None:
        logger.critical("rows of %s version %d are damaged, and no other version can be served", self.model.name, version)
        self._unusable = ApiError(
            503, Kind.DAMAGED, f"rows of {self.model.name} were found damaged, and there is no other version; load it again"
        )

    def _warn(self, line: str) -> None:
        """Says something once, not at each look."""
        if line != self._last_warning:
            logger.warning("%s", line)
        self._last_warning = line

    def find(self, version: int) -> Served | None:
        """An attached version by number, or None."""
        if self._served is not None and self._served.version == version:
            return self._served
        return self._explicit.get(version)

    def forget_removed(self) -> None:
        """Lets go of versions that requests named and that were removed, or found damaged, since."""
        if not self._explicit:
            return
        good = set(self.model.versions()) - set(self.model.damaged_versions())
        for version in list(self._explicit):  # a copy: a thread may attach one meanwhile
            if version not in good:
                self._explicit.pop(version, None)

    def attach_explicit(self, version: int) -> Served:
        """Attaches a version that a request named; one call at a time. ApiError 404: it is not published, or cannot be served.

        Why it cannot is for the log: a client learns no paths.
        """
        published = self.model.versions()
        if version not in published:
            known = ", ".join(map(str, published)) or "none"
            raise not_found(f"version {version} of model {self.model.name!r} is not published; versions there: {known}")
        try:
            served = self.attach(version)
        except (LoaderError, QuantError, ServingError, OSError) as error:
            logger.error("version %d of %s, which a request named, is not taken: %s", version, self.model.name, error)
            what = f"version {version} of model {self.model.name!r} cannot be served; the server's log has the reason"
            raise not_found(what) from error
        self._explicit[version] = served
        if len(self._explicit) > _EXPLICIT_VERSIONS:
            self._explicit.popitem(last=False)
        return served
