"""A request as bytes: ids in an input buffer, vectors and scores in an output buffer. A version
(`serving.model.version`) lays a `Request` out; a GPU runs several as a batch
(`serving.executors.batching`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.versions.states import State
from tableside.quant import BadIds, Place, Plan
from tableside.quant.contract import MASK_LATE, Unfound, Waiting, places_in
from tableside.quant.errors import Problem, RowsNotRead
from tableside.serving.errors import ApiError, ErrorKind
from tableside.serving.model.places import Buffer, Output
from tableside.serving.model.scorer import Scoring


@dataclass(frozen=True, eq=False)
class Features:
    """Names and sizes of a version's features, by the number that is the kind of their lookups in its
    planners. The states of a version share them. tables: of each feature. numbers: by name. is_pooled,
    is_half, vector_bytes, row_bytes, dims, are_strings (its ids): [features]."""

    model: str
    version: int
    names: tuple[str, ...]
    tables: tuple[str, ...]
    numbers: dict[str, int]
    is_pooled: NDArray[np.bool_]
    is_half: NDArray[np.bool_]
    vector_bytes: NDArray[np.int64]
    row_bytes: NDArray[np.int64]
    dims: NDArray[np.int64]
    are_strings: NDArray[np.bool_]


class FeatureInput(NamedTuple):
    """A feature's byte offsets in an input buffer, at any alignment: ids int64 [ids], weights fp32 [ids],
    lengths int32 [bags]. Without lengths there are `bags` bags of `bag_length` ids; bags None: ids without
    bags, for unpooled features."""

    feature: str
    ids_at: int
    ids: int
    bags: int | None = None
    bag_length: int = 0
    lengths_at: int | None = None
    weights_at: int | None = None


class Answer(NamedTuple):
    """A request's output buffer, uint8 [out_bytes]. unfound: of `Plan.run`. state: the one that answered, if
    not the request's."""

    buffer: Buffer
    unfound: Sequence[Unfound] | None = None
    state: State | None = None


class LateIds(NamedTuple):
    """Ids whose rows came late. by_table: how many. at: by feature, which of its ids; of those with a found
    mask."""

    by_table: dict[str, int]
    at: dict[str, list[int]]


Sizes = tuple[int, int, int, int]
"""Ids, vectors, bytes of all rows read, and of the output buffer. Plain tuples are made faster."""


class Request:
    """A request's lookups and scoring, laid out once. Immutable; any thread may call. It holds its tables,
    not its version, so that caches keyed by version do not keep that alive."""

    __slots__ = (
        "deadline",
        "features",
        "ids",
        "is_small",
        "names_version",
        "out_bytes",
        "outputs",
        "places",
        "plan",
        "row_bytes",
        "scoring",
        "sequence",
        "vectors",
    )

    def __init__(
        self,
        features: Features,
        places: Any,
        plan: Plan,
        sizes: Sizes,
        *,
        is_small: bool = False,
        outputs: tuple[Output, ...] = (),
        scoring: Scoring | None = None,
        sequence: int = 0,
    ) -> None:
        """features: the version's. places: of the lookups. is_small: the CPU beside a device runs the plan.
        outputs: by name; () if the caller knows their places. sequence: the version's last change.
        Set later: `names_version`, the client named the version, so no other may answer; `deadline`, of
        time.monotonic, until when it waits for rows, None: as the server says."""
        self.features, self.places, self.plan, self.is_small = features, places, plan, is_small
        self.scoring, self.outputs = scoring, outputs
        self.ids, self.vectors, self.row_bytes, self.out_bytes = sizes
        self.sequence, self.names_version = sequence, False
        self.deadline: float | None = None

    @property
    def model(self) -> str:
        return self.features.model

    @property
    def version(self) -> int:
        return self.features.version

    @property
    def numbers(self) -> list[int]:
        """The feature of each lookup, by its number."""
        found: list[int] = np.frombuffer(self.places, np.int64)[:: len(Place._fields)].tolist()
        return found

    @property
    def tables(self) -> list[str]:
        return [self.features.tables[number] for number in self.numbers]

    def take_late(self, answer: Answer) -> LateIds | None:
        """Returns the ids that got the default row since theirs came late; None: none did. The answer's found
        masks then say 0 of them."""
        if answer.unfound is None or not any(counts.late for counts in answer.unfound):
            return None
        found = LateIds({}, {})
        for place, counts in zip(places_in(self.places), answer.unfound, strict=True):
            if not counts.late:
                continue
            table = self.features.tables[place.kind]
            found.by_table[table] = found.by_table.get(table, 0) + counts.late
            if place.found_at >= 0:
                mask = answer.buffer[place.found_at : place.found_at + place.ids]
                at = np.flatnonzero(mask == MASK_LATE)
                mask[at] = 0
                found.at[self.features.names[place.kind]] = at.tolist()
        return found

    def feature(self, lookup: int) -> str:
        return self.features.names[self.numbers[lookup]]

    @property
    def staged_bytes(self) -> int:
        return self.plan.staged_bytes

    def look_up(self, inputs: Any, begun: Plan | None = None) -> Answer:
        """Looks every feature up, without scores. begun: what `begin` gave for these inputs. ApiError: an id,
        or a pooled feature's length, is wrong, or rows did not come."""
        out = np.empty(self.out_bytes, np.uint8)
        try:
            return Answer(out, (self.plan if begun is None else begun).run(inputs, out))
        except (BadIds, RowsNotRead) as error:
            raise self.refusal(error) from error

    def look_up_at_once(self, inputs: Any) -> Answer | None:
        """As `Plan.run_at_once`; None: `begin` says more."""
        out = np.empty(self.out_bytes, np.uint8)
        found = self.plan.run_at_once(inputs, out)
        return None if found is None else Answer(out, found or None)

    def begin(self, inputs: Any) -> Plan | Waiting:
        """As `Plan.begin`. ApiError: as `look_up`."""
        try:
            return self.plan.begin(inputs)
        except BadIds as error:
            raise self.refusal(error) from error

    def look(self, begun: Waiting) -> Plan | Waiting:
        """As `Waiting.look`. ApiError: as `look_up`."""
        try:
            return begun.look()
        except (BadIds, RowsNotRead) as error:
            raise self.refusal(error) from error

    def wait(self, begun: Waiting, deadline: float | None = None) -> Plan:
        """As `Waiting.wait`. ApiError: rows did not come, or an id has none."""
        try:
            return begun.wait(deadline)
        except (BadIds, RowsNotRead) as error:
            raise self.refusal(error) from error

    def run(self, inputs: Any) -> Buffer:
        """Looks up like `look_up`; returns the output buffer."""
        return self.look_up(inputs).buffer

    def refusal(self, error: BadIds | RowsNotRead) -> ApiError:
        """Returns the client's error for `error`; it names the feature whose ids are wrong."""
        if isinstance(error, RowsNotRead):
            return ApiError(503, ErrorKind.NOT_READ, f"model {self.model!r}: {error}")
        lacking = self.tables[error.job] if error.problem is Problem.MISSING else None
        id_ = "the string of hash" if self.features.are_strings[self.numbers[error.job]] else "id"
        what = error.describe(f"feature {self.feature(error.job)!r}", id_)
        refused = ApiError(400, ErrorKind.BAD_ID, what, lacking)
        refused.__cause__ = error
        return refused
