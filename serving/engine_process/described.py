"""A door's laid-out request as bytes, and back: the engine process lays it out over its own tables.

A description is int64 values: model, state, layout, together, number of features, features, output bytes,
places [features, fields of Place]; for scores also sources and place. States of one layout
(`ServedVersion.layout`) take each other's requests.
"""

import hashlib
import struct
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tableside.quant import Place, Plan, Planner
from tableside.quant.contract import Unfound
from tableside.serving.model.places import DenseInput, Output, scores_at
from tableside.serving.model.request import Request
from tableside.serving.model.scorer import Scoring
from tableside.serving.model.version import Planners, ServedVersion

_HEAD = struct.Struct("<5q")  # model, state, layout, together, features
_SCORES = struct.Struct("<3q")  # where they go, rows, whether nobody reads the vectors
_SOURCE = struct.Struct("<7q")  # is dense, at, bytes, rows, width, is half, row bytes or -1
_KEPT = 1024  # descriptions of a version whose requests are kept


class DescribedPlan(Plan):
    """Lookups for the engine process. description: the request without its scores."""

    def __init__(self, description: bytes) -> None:
        self.description = description

    def run(self, inputs: Any, outputs: Any) -> Sequence[Unfound] | None:
        raise AssertionError("a plan of the engine process is run there alone")


class DescribingPlanner(Planner):
    """Describes requests for the same features. model: its key. numbers: the features' in the version."""

    def __init__(self, model: int, state: int, layout: int, numbers: Sequence[int], together: bool) -> None:
        head = _HEAD.pack(model, state, layout, together, len(numbers))
        self._head = head + np.array(numbers, np.int64).tobytes()

    def plan(self, places: Any, out_bytes: int = 0) -> DescribedPlan:
        return DescribedPlan(b"".join((self._head, out_bytes.to_bytes(8, "little"), bytes(places))))


def describe(request: Request) -> bytes:
    """Describes a request that a `DescribingPlanner` planned."""
    plan, scoring = request.plan, request.scoring
    assert isinstance(plan, DescribedPlan), "small requests are the door's own"
    if scoring is None:
        return plan.description
    parts = [plan.description, _SCORES.pack(scoring.output.at, scoring.rows, scoring.is_alone)]
    for s in scoring.sources:
        if isinstance(s, DenseInput):
            parts.append(_SOURCE.pack(1, s.at, 0, s.rows, s.width, 0, -1))
        else:
            row_bytes = -1 if s.row_bytes is None else s.row_bytes
            parts.append(_SOURCE.pack(0, s.at, s.bytes, *s.shape, s.half, row_bytes))
    return b"".join(parts)


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
    """A version's requests by description; the latest are kept."""

    def __init__(self, served: ServedVersion) -> None:
        self._version = weakref.ref(served)  # who keeps this keeps it by that version
        self.state = served.state.number
        self._names = list(served.features)
        self._kept: dict[bytes, Request] = {}
        self._features: dict[bytes, Planners] = {}

    def request(self, description: bytes) -> Request:
        """Lays a described request out over this process's tables. QuantError: too large to launch."""
        if (known := self._kept.get(description)) is None:
            known = self._lay_out(description)
            if len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[description] = known
        return known

    def _lay_out(self, description: bytes) -> Request:
        served = self._served()
        *_, count = _HEAD.unpack_from(description)
        at = _HEAD.size + 8 * count
        head = description[:at]
        if (planners := self._features.get(head)) is None:
            planners = self._features[head] = self._planners(head)
            if len(self._features) > _KEPT:
                del self._features[next(iter(self._features))]
        out_bytes = int.from_bytes(description[at : at + 8], "little")
        end = at + 8 + 8 * count * len(Place._fields)
        plan = planners.device.plan(description[at + 8 : end], out_bytes)
        return Request(
            served.header.model,
            served.version,
            (planners.features, planners.tables, plan, False),
            (0, 0, 0, out_bytes),
            scoring=self._scoring(description[end:]) if len(description) > end else None,
        )

    def _planners(self, head: bytes) -> Planners:
        *_, together, _ = _HEAD.unpack_from(head)
        names = tuple(self._names[n] for n in np.frombuffer(head, np.int64, offset=_HEAD.size).tolist())
        return self._served().planners(names, bool(together))

    def _served(self) -> ServedVersion:
        served = self._version()
        assert served is not None, "a request is laid out while its version is held"
        return served

    def _scoring(self, described: bytes) -> Scoring:
        scorer = self._served().scorer
        assert scorer is not None, "a door scores what its engine can"
        output_at, rows, is_alone = _SCORES.unpack_from(described)
        sources: list[Output | DenseInput] = []
        for i, source in zip(scorer.inputs, _SOURCE.iter_unpack(described[_SCORES.size :]), strict=True):
            is_dense, at, size, count, width, half, row_bytes = source
            if is_dense:
                sources.append(DenseInput(i.name, at, count, width))
            else:
                step = None if row_bytes < 0 else row_bytes
                sources.append(Output(i.feature or i.name, at, size, (count, width), bool(half), step))
        return Scoring(scorer, tuple(sources), scores_at(output_at, rows, scorer.width), bool(is_alone))
