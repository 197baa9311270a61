"""A request as bytes: where its ids lie in an input buffer, and where its vectors and scores go in an output
buffer.

A `Request` is laid out once, by a version (`serving.model.version`), and runs on the input buffer of every
request that has its layout. A batch is several requests that run together on a GPU
(`serving.executors.batching`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.versions.states import State
from tableside.quant import BadIds, Plan
from tableside.quant.contract import Unfound
from tableside.quant.errors import Problem
from tableside.serving.errors import ApiError, ErrorKind, bad_request
from tableside.serving.model.places import Buffer, Output
from tableside.serving.model.scores import Scoring


class FeatureInput(NamedTuple):
    """A feature's ids as byte offsets in a request's input buffer, at any alignment.

    The ids are int64 [ids] at `ids_at`, the weights fp32 [ids] at `weights_at`, the lengths int32 [bags] at
    `lengths_at`. Without lengths there are `bags` bags of `bag_length` ids each. bags is None for ids without
    bags, which an unpooled feature alone takes.
    """

    feature: str
    ids_at: int
    ids: int
    bags: int | None = None
    bag_length: int = 0
    lengths_at: int | None = None
    weights_at: int | None = None


class Answer(NamedTuple):
    """What a request's lookups gave. buffer: its output buffer, uint8 [out_bytes]. unfound: as `Plan.run`
    returns it. state: that answered, where it is not the one that the request was laid out for."""

    buffer: Buffer
    unfound: Sequence[Unfound] | None = None
    state: State | None = None


# Plain tuples, as each request makes one of each.
Lookups = tuple[tuple[str, ...], tuple[str, ...], Plan, bool]
"""Features and tables of the plan's lookups, in their order, the plan, and whether the CPU beside a device runs it."""
Sizes = tuple[int, int, int, int]
"""Ids, vectors that are looked up, bytes of all rows that are read, and of the output buffer."""


class Request:
    """The lookups of a request, and its scoring where it asks for scores, laid out once. Immutable; any
    thread may call.

    It holds the tables that it reads and not the version that laid it out. So a memory of requests that is
    keyed by their version does not keep the version alive.
    """

    __slots__ = (
        "features",
        "ids",
        "is_small",
        "model",
        "names_version",
        "out_bytes",
        "outputs",
        "plan",
        "row_bytes",
        "scoring",
        "sequence",
        "tables",
        "unpooled_bags",
        "vectors",
        "version",
    )

    def __init__(
        self,
        model: str,
        version: int,
        lookups: Lookups,
        sizes: Sizes,
        *,
        outputs: tuple[Output, ...] = (),
        unpooled_bags: tuple[FeatureInput, ...] = (),
        scoring: Scoring | None = None,
        sequence: int = 0,
    ) -> None:
        """outputs: vectors, scores and masks by name; () where whoever laid the request out knows their
        places otherwise. unpooled_bags: inputs of unpooled features that came with lengths, where these are
        not checked yet. sequence: of the last change that the version holds.

        names_version, which is set before it runs: whether its client named the version, so that no other may
        answer.
        """
        self.model, self.version, self.scoring, self.outputs = model, version, scoring, outputs
        self.features, self.tables, self.plan, self.is_small = lookups
        self.ids, self.vectors, self.row_bytes, self.out_bytes = sizes
        self.unpooled_bags, self.sequence = unpooled_bags, sequence
        self.names_version = False

    @property
    def staged_bytes(self) -> int:
        """As `Plan.staged_bytes`."""
        return self.plan.staged_bytes

    def check(self, inputs: Any) -> None:
        """ApiError: the lengths of an unpooled feature are negative or do not add up. No kernel reads
        those lengths."""
        for i in self.unpooled_bags:
            _check_lengths(i, np.frombuffer(inputs, np.int32, i.bags or 0, i.lengths_at or 0))

    def look_up(self, inputs: Any) -> Answer:
        """Looks every feature up. The scores are not written yet.

        ApiError: an id, or a length of a pooled feature, is wrong.
        """
        out = np.empty(self.out_bytes, np.uint8)
        try:
            return Answer(out, self.plan.run(inputs, out))
        except BadIds as error:
            raise self.refusal(error) from error

    def run(self, inputs: Any) -> Buffer:
        """As `look_up`, for who does not count what was not found: the output buffer."""
        return self.look_up(inputs).buffer

    def refusal(self, error: BadIds) -> ApiError:
        """The error that the client gets; it names the feature, and `error` is its cause."""
        lacking = self.tables[error.job] if error.problem is Problem.MISSING and self.tables else None
        refused = ApiError(
            400, ErrorKind.BAD_ID, error.describe(f"feature {self.features[error.job]!r}"), lacking
        )
        refused.__cause__ = error
        return refused


def _check_lengths(i: FeatureInput, lengths: NDArray[np.int32]) -> None:
    name = f"feature {i.feature!r}"
    if lengths.size and lengths.min() < 0:
        at = int(np.flatnonzero(lengths < 0)[0])
        raise bad_request(BadIds(Problem.LENGTH, 0, at, int(lengths[at]), 0).describe(name), ErrorKind.BAD_ID)
    if (total := int(lengths.sum(dtype=np.int64))) != i.ids:
        raise bad_request(BadIds(Problem.SUM, 0, lengths.size, total, i.ids).describe(name), ErrorKind.BAD_ID)
