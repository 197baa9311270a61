"""A door's laid-out request as bytes, and back: the engine process runs it over its own tables.

A description is int64 values: model, state, layout, lookups, output bytes, places [lookups, fields of Place];
for scores also their place, rows, whether they are alone, and the scorer's inputs [inputs, fields of
MatrixPlace]. States of one layout (`ServedVersion.layout`) take each other's requests.
"""

import hashlib
import struct
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from tableside.quant import Place, Plan, Planner
from tableside.quant.contract import Unfound
from tableside.serving.model.places import scores_at
from tableside.serving.model.request import Request
from tableside.serving.model.scorer import Scoring
from tableside.serving.model.version import ServedVersion

_HEAD = struct.Struct("<5q")  # model, state, layout, lookups, output bytes
TARGET_BYTES = 3 * 8  # of its target
_SCORES = struct.Struct("<3q")  # where they go, rows, whether nobody reads the vectors
_PLACE_BYTES = 8 * len(Place._fields)
_KEPT = 1024  # requests of a state that are kept: to lay one out takes 20 us of the engine's loop


class DescribedPlan(Plan):
    """Lookups for the engine process. description: the request without its scores."""

    __slots__ = ("description",)

    def __init__(self, description: bytes) -> None:
        self.description = description

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        raise AssertionError("a plan of the engine process is run there alone")


class DescribingPlanner(Planner):
    """Describes a version's requests. model: its key."""

    def __init__(self, model: int, state: int, layout: int) -> None:
        self._target = model, state, layout

    def plan(self, places: Any, out_bytes: int = 0) -> DescribedPlan:
        given = bytes(places)
        return DescribedPlan(_HEAD.pack(*self._target, len(given) // _PLACE_BYTES, out_bytes) + given)


def describe(request: Request) -> bytes:
    """Describes a request that a `DescribingPlanner` planned."""
    plan, scoring = request.plan, request.scoring
    assert isinstance(plan, DescribedPlan), "small requests are the door's own"
    if scoring is None:
        return plan.description
    scores = _SCORES.pack(scoring.output.at, scoring.rows, scoring.is_alone)
    return plan.description + scores + scoring.sources


def model_key(name: str) -> int:
    """Hashes a model's name to a number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


class RequestTarget(NamedTuple):
    """A description's target: model's key, state's number, `ServedVersion.layout`."""

    model: int
    state: int
    layout: int


def wanted_by(description: bytes) -> RequestTarget:
    return RequestTarget(*_HEAD.unpack_from(description)[:3])


class DescribedRequests:
    """Makes a version's requests of descriptions; the latest are kept."""

    def __init__(self, served: ServedVersion) -> None:
        self._version = weakref.ref(served)  # who keeps this keeps it by that version
        self.state = served.state.number
        self._kept: dict[bytes, Request] = {}

    def request(self, description: bytes) -> Request:
        """Returns a described request over this process's tables. QuantError: too large to launch."""
        if (known := self._kept.get(description)) is None:
            known = self._laid_out(description)
            if len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[description] = known
        return known

    def _laid_out(self, description: bytes) -> Request:
        served = self._version()
        assert served is not None, "a request is laid out while its version is held"
        *_, lookups, out_bytes = _HEAD.unpack_from(description)
        end = _HEAD.size + lookups * _PLACE_BYTES
        scoring = None
        if len(description) > end:
            scorer = served.scorer
            assert scorer is not None, "a door scores what its engine can"
            at, rows, is_alone = _SCORES.unpack_from(description, end)
            sources = description[end + _SCORES.size :]
            scoring = Scoring(scorer, sources, scores_at(at, rows, scorer.width), bool(is_alone))
        return served.request(description[_HEAD.size : end], (0, 0, 0, out_bytes), scoring=scoring)
