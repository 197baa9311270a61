"""One version that is served: attached, placed and warmed up. It lays requests out."""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tableside.loader.model import SCORE, Feature
from tableside.loader.segment import Segment
from tableside.quant import Backend, Lookup, Pooling, Precision, RowSource
from tableside.serving.errors import Kind, bad_request, short
from tableside.serving.placement import Placements
from tableside.serving.places import DenseInput, Output
from tableside.serving.request import FeatureInput, Request
from tableside.serving.scorer import Scorer
from tableside.serving.scores import Scoring


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

    @property
    def is_pooled(self) -> bool:
        return self.pooling is not Pooling.NONE

    def lookup(self, i: FeatureInput, out_at: int) -> Lookup:
        """The lookup of a request's input, its vectors at byte `out_at`. ApiError: bags or weights do not fit the pooling."""
        if self.is_pooled and i.bags is None:
            raise bad_request(
                f"feature {i.feature!r} is {self.pooling.label}-pooled and came without lengths; send {i.feature}.lengths"
            )
        if not self.is_pooled and i.weights_at is not None:
            raise bad_request(f"feature {i.feature!r} is not pooled and takes no weights; leave {i.feature}.weights out")
        return Lookup(
            self.table,
            self.pooling,
            i.ids_at,
            i.ids,
            out_at,
            self.precision,
            i.bags or 0,
            i.lengths_at,
            i.bag_length,
            i.weights_at,
        )


class ServedVersion:
    """One version, attached and ready to answer. Immutable; any thread may call.

    The segment stays mapped, and what the tables take of a GPU's memory stays taken, as long as this object or a request that it
    laid out lives.
    """

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
        """max_response_bytes: of one request's output; None: any. verified_at: when all rows were last held against their
        checksums, of time.time(); 0: never."""
        self.segment, self.header, self.version = segment, segment.header, segment.header.version
        self.backend, self.placed, self.scorer = backend, placed, scorer
        self.threads, self.max_response_bytes, self.verified_at = threads, max_response_bytes, verified_at
        self.features = {
            f.name: BoundFeature(f, placed.tables[f.table], Pooling.parse(f.pooling)) for f in segment.header.features
        }

    def feature(self, name: str) -> BoundFeature:
        """The feature of that name. ApiError: there is none."""
        if (bound := self.features.get(name)) is None:
            raise bad_request(f"feature {short(name)} is unknown; model {self.header.model!r} has: {', '.join(self.features)}")
        return bound

    def can_score(self, given: Container[str]) -> bool:
        """Whether there is a scorer, and `given`, names of features and dense tensors, holds all that it needs."""
        return self.scorer is not None and all((i.feature or i.name) in given for i in self.scorer.inputs)

    def lay_out(self, inputs: Sequence[FeatureInput], dense: Sequence[DenseInput] = (), score: bool = False) -> Request:
        """Lays a request out: its vectors one after another in the order of `inputs`, then its scores where `score`.

        ApiError: a feature is unknown, its bags or weights do not fit its pooling, the scorer needs something else, or the output
        is larger than a response may be.
        """
        if not inputs:
            raise bad_request(f"no feature is asked for; model {self.header.model!r} has: {', '.join(self.features)}")
        lookups, outputs, unpooled_bags, out_bytes, row_bytes = [], [], [], 0, 0
        for i in inputs:
            bound = self.feature(i.feature)
            lookup = bound.lookup(i, out_bytes)
            lookups.append(lookup)
            size = lookup.out_bytes
            outputs.append(Output(i.feature, out_bytes, size, (lookup.outputs, bound.table.dim), bound.half))
            out_bytes += size
            row_bytes += i.ids * bound.table.row_bytes
            if i.lengths_at is not None and not bound.is_pooled:
                unpooled_bags.append(i)
        scoring = self._scoring(outputs, dense, out_bytes) if score else None
        if scoring is not None:
            outputs.append(scoring.output)
            out_bytes += scoring.output.bytes
        if self.max_response_bytes is not None and out_bytes > self.max_response_bytes:
            raise bad_request(
                f"the request asks for {out_bytes:,} bytes of vectors; the limit is {self.max_response_bytes:,} "
                "(max_response_bytes)",
                Kind.TOO_LARGE,
            )
        return Request(
            self.header.model,
            self.version,
            inputs,
            tuple(outputs),
            self.backend.plan(lookups, self.threads, out_bytes),
            row_bytes=row_bytes,
            unpooled_bags=unpooled_bags,
            scoring=scoring,
        )

    def _scoring(self, outputs: Sequence[Output], dense: Sequence[DenseInput], at: int) -> Scoring:
        """What the scorer reads of these outputs and dense tensors; its scores lie at byte `at`."""
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

    def warm_up(self) -> None:
        """Looks the first and the last row of every feature up, so that a broken version fails here and not in a request.

        Each feature is looked up with bags of every size that the backend compiles a kernel of its own for, with lengths and
        weights and without. So a GPU compiles now what requests will need.
        """
        for name, bound in self.features.items():
            for count in self.backend.warm_up_bags:
                ids = np.resize(np.array([0, bound.table.rows - 1], np.int64), count)
                self.lay_out([FeatureInput(name, 0, count, bags=1, bag_length=count)]).run(ids.tobytes())
                if bound.is_pooled:
                    inputs = ids.tobytes() + np.array([count], np.int32).tobytes() + np.ones(count, np.float32).tobytes()
                    at = ids.nbytes
                    self.lay_out([FeatureInput(name, 0, count, bags=1, lengths_at=at, weights_at=at + 4)]).run(inputs)
