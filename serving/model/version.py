"""A served version: attached, placed and warmed up. It lays requests out."""

import hashlib
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.model.specs import FeatureSpec
from tableside.loader.segment.segment import Segment
from tableside.loader.versions.states import State
from tableside.quant import Backend, CpuBackend, LookupKind, Place, Planner, Pooling, Precision, RowSource
from tableside.quant.contract import MatrixPlace
from tableside.quant.rows.fetched import asked_table
from tableside.quant.rows.ids import RowMap
from tableside.serving.errors import ApiError, ErrorKind, bad_request, short
from tableside.serving.model.placements import Placements
from tableside.serving.model.places import DenseInput, Output, kjt_outputs, masks_at, scores_at
from tableside.serving.model.request import FeatureInput, Features, Request, Sizes
from tableside.serving.model.scorer import Scorer, Scoring

logger = logging.getLogger("tableside")


class Beside(NamedTuple):
    """The CPU backend for requests of fewer than `below_ids` ids, faster there than on the device."""

    backend: CpuBackend
    below_ids: int


_ENDS = 4096  # rows at either end of a table that are looked through for ids


@dataclass(frozen=True)
class BoundFeature:
    """A feature and its table. number: the kind of its lookups in the version's planners. strings: requests
    have strings, whose ids (loader.string_ids) the input buffer has."""

    number: int
    feature: FeatureSpec
    table: RowSource
    pooling: Pooling
    strings: bool = False

    @property
    def half(self) -> bool:
        return self.feature.output == "fp16"

    @property
    def precision(self) -> Precision:
        return Precision.FP16 if self.half else Precision.FP32

    @cached_property
    def is_pooled(self) -> bool:
        return self.pooling is not Pooling.NONE

    @cached_property
    def vector_bytes(self) -> int:
        return self.table.dim * self.precision.bytes

    def check(self, i: FeatureInput) -> None:
        """ApiError: an input's bags or weights do not fit the pooling."""
        if self.is_pooled and i.bags is None:
            what = f"feature {i.feature!r} is {self.pooling.label}-pooled and came without lengths"
            raise bad_request(f"{what}; send {i.feature}.lengths")
        if not self.is_pooled and i.weights_at is not None:
            raise bad_request(
                f"feature {i.feature!r} is not pooled and takes no weights; leave {i.feature}.weights out"
            )


class ServedVersion:
    """One attached version. Its answers never change; any thread may call. Segment and GPU memory stay while
    it or one of its requests lives."""

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
        beside: Beside | None = None,
        names: Features | None = None,
    ) -> None:
        """max_response_bytes: of one output; None: any. verified_at: time.time() of the last checksum of all
        rows; 0: never. beside: for small requests if `backend` is a device's. names: of another state of
        this version."""
        self.segment, self.header, self.version = segment, segment.header, segment.header.version
        self.backend, self.placed, self.scorer = backend, placed, scorer
        self.threads, self.max_response_bytes, self.verified_at = threads, max_response_bytes, verified_at
        self._beside = beside
        self.state = State(self.version, segment.deltas[0].sequence if segment.deltas else 0)
        strings = segment.header.string_tables
        self.features = {
            f.name: BoundFeature(
                number, f, placed.tables[f.table], Pooling.parse(f.pooling), f.table in strings
            )
            for number, f in enumerate(segment.header.features)
        }
        self.names = names or _names(segment.header.model, self.version, list(self.features.values()))
        self._planner = self._device_planner()
        self._host_planner = None
        if beside is not None:
            self._host_planner = beside.backend.planner(self._kinds(segment.tables))

    @cached_property
    def layout(self) -> int:
        """Hashes the features and scorer: versions with equal layouts lay requests out alike."""
        features = [
            (name, b.table.dim, b.pooling.label, b.half, b.strings) for name, b in self.features.items()
        ]
        inputs = [] if self.scorer is None else [(i.name, i.feature, i.width) for i in self.scorer.inputs]
        width = 0 if self.scorer is None else self.scorer.width
        said = repr((features, inputs, width)).encode()
        return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little") >> 1

    @property
    def inputs(self) -> int:
        """Counts the features, and the scorer's dense tensors."""
        return len(self.features) + (0 if self.scorer is None else len(self.scorer.dense))

    @property
    def sequence(self) -> int:
        """The last change's sequence; 0: none."""
        return self.segment.sequence

    def with_deltas(self, segment: Segment, placed: Placements) -> "ServedVersion":
        """Returns this version in another state, with the same scorer. placed: over this one's."""
        return ServedVersion(
            segment,
            self.backend,
            placed,
            scorer=self.scorer,
            threads=self.threads,
            max_response_bytes=self.max_response_bytes,
            verified_at=self.verified_at,
            beside=self._beside,
            names=self.names,
        )

    def feature(self, name: str) -> BoundFeature:
        """Returns a feature. ApiError: it is unknown."""
        if (bound := self.features.get(name)) is None:
            what = f"feature {short(name)} is unknown"
            raise bad_request(f"{what}; model {self.header.model!r} has: {', '.join(self.features)}")
        return bound

    def can_score(self, given: Container[str]) -> bool:
        """Returns whether `given` names all inputs of a scorer that exists."""
        return self.scorer is not None and all((i.feature or i.name) in given for i in self.scorer.inputs)

    def _device_planner(self) -> Planner:
        return self.backend.planner(self._kinds(), self.threads)

    def _kinds(self, tables: Mapping[str, RowSource] | None = None) -> list[LookupKind]:
        """Returns what each feature's lookups read. tables: by name; None: the placed ones."""
        return [
            LookupKind(b.table if tables is None else tables[b.feature.table], b.pooling, b.precision)
            for b in self.features.values()
        ]

    def request(self, places: Any, sizes: Sizes, on_device: bool = False, **more: Any) -> Request:
        """Returns a request with lookups at `places` (`Planner.plan`). on_device: it goes to a device at any
        size. more: as `Request` takes it."""
        ids, _, _, out_bytes = sizes
        planner, is_small = self._planner, False
        if self._host_planner is not None and self._beside is not None and not on_device:
            is_small = ids < self._beside.below_ids and not self._host_planner.waits
            planner = self._host_planner if is_small else planner
        plan = planner.plan(places, out_bytes)
        return Request(self.names, places, plan, sizes, is_small=is_small, sequence=self.sequence, **more)

    def lay_out(
        self,
        inputs: Sequence[FeatureInput],
        dense: Sequence[DenseInput] = (),
        score: bool = False,
        together: bool = False,
        warms_up: bool = False,
        found: Container[str] = (),
        scores_alone: bool = False,
    ) -> Request:
        """Lays a request out: vectors in the order of `inputs`, scores, masks. together: a kjt; pooled
        vectors are [bags, sum of dims], then the others, then their offsets. warms_up: goes to the device at
        any size. found: features with a mask; KJT for a kjt. scores_alone: only scores are answered, vectors
        are undefined. ApiError: an unknown feature, bags or weights that do not fit, missing scorer inputs,
        or too large an output."""
        if not inputs:
            raise bad_request(
                f"no feature is asked for; model {self.header.model!r} has: {', '.join(self.features)}"
            )
        bound = [self.feature(i.feature) for i in inputs]
        for b, i in zip(bound, inputs, strict=True):
            b.check(i)
        outputs, out_bytes = _together(bound, inputs) if together else _one_after_another(bound, inputs)
        shown = kjt_outputs(outputs, [b.is_pooled for b in bound], out_bytes) if together else outputs
        out_bytes = max(out_bytes, shown[-1].at + shown[-1].bytes)
        scoring = self._scoring(outputs, dense, out_bytes, scores_alone and not found) if score else None
        if scoring is not None:
            shown = [*shown, scoring.output]
            out_bytes += scoring.output.bytes
        masks, found_at = masks_at(out_bytes, [(i.feature, i.ids) for i in inputs], found, together)
        shown = [*shown, *masks]
        out_bytes += sum(m.bytes for m in masks)
        if self.max_response_bytes is not None and out_bytes > self.max_response_bytes:
            raise bad_request(
                f"the request asks for {out_bytes:,} bytes of vectors; the limit is "
                f"{self.max_response_bytes:,} (max_response_bytes)",
                ErrorKind.TOO_LARGE,
            )
        places = np.array(
            [_place(b, i, o, at) for b, i, o, at in zip(bound, inputs, outputs, found_at, strict=True)],
            np.int64,
        )
        row_bytes = sum(i.ids * b.table.row_bytes for b, i in zip(bound, inputs, strict=True))
        return self.request(
            places.tobytes(),
            (sum(i.ids for i in inputs), sum(o.shape[0] for o in outputs), row_bytes, out_bytes),
            score or warms_up,
            outputs=tuple(shown),
            scoring=scoring,
        )

    def _scoring(
        self, outputs: Sequence[Output], dense: Sequence[DenseInput], at: int, is_alone: bool
    ) -> Scoring:
        """Returns the scorer's inputs among these; its scores lie at byte `at`."""
        if self.scorer is None:
            raise bad_request(
                f"model {self.header.model!r} has no scorer; publish one with [scorer] in model.toml"
            )
        given: dict[str, Output | DenseInput] = {o.feature: o for o in outputs} | {d.name: d for d in dense}
        names = [i.feature or i.name for i in self.scorer.inputs]
        if missing := [n for n in names if n not in given]:
            raise bad_request(f"the score needs {', '.join(names)}; the request lacks {', '.join(missing)}")
        sources = tuple(given[n] for n in names)
        rows = [s.shape[0] if isinstance(s, Output) else s.rows for s in sources]
        if len(set(rows)) > 1:
            found = ", ".join(f"{n} {r}" for n, r in zip(names, rows, strict=True))
            raise bad_request(
                f"the score needs as many bags of each feature as rows of each dense tensor; found {found}"
            )
        matrices = np.array([_matrix(s) for s in sources], np.int64)
        return Scoring(self.scorer, matrices.tobytes(), scores_at(at, rows[0], self.scorer.width), is_alone)

    def warm_up(self) -> None:
        """Looks up each feature's first and last row with all bag sizes that have kernels, with and without
        weights: a broken version fails here, and a GPU compiles now. Tables that refuse all ids are left
        out; rows that a disk does not give are told, and hold nothing up."""
        for name, bound in self.features.items():
            try:
                self._warm_up(name, bound)
            except ApiError as error:
                if error.kind is not ErrorKind.NOT_READ:
                    raise
                logger.warning("feature %s reads table %s: %s", name, bound.feature.table, error)

    def _warm_up(self, name: str, bound: BoundFeature) -> None:
        ends = end_ids(bound.table)
        for count in self.backend.warm_up_bags if ends.size else ():
            ids = np.resize(ends, count)
            alone = FeatureInput(name, 0, count, bags=1, bag_length=count)
            self.lay_out([alone], warms_up=True).run(ids.tobytes())
            if bound.is_pooled:
                lengths, weights = np.array([count], np.int32), np.ones(count, np.float32)
                at = ids.nbytes
                weighted = FeatureInput(name, 0, count, bags=1, lengths_at=at, weights_at=at + 4)
                inputs = b"".join(part.tobytes() for part in (ids, lengths, weights))
                self.lay_out([weighted], warms_up=True).run(inputs)


def end_ids(table: RowSource) -> NDArray[np.int64]:
    """Returns ids of a table's first and last row; one id if all get the default row, none if all are
    refused or asked of other hosts."""
    if asked_table(table) is not None:
        return np.zeros(0, np.int64)
    row_map = RowMap(table.rows) if table.row_map is None else table.row_map
    rows = row_map.count if row_map.index is None else row_map.index.slots
    ends = ((0, min(_ENDS, rows)), (max(0, rows - _ENDS), rows))
    ids = np.concatenate([row_map.rows_with_ids(start, stop)[1] for start, stop in ends])
    if table.row_map is not None and table.row_map.overlay is not None:
        ids = ids[row_map.find(ids) != -1]  # that it did not delete
    if ids.size:
        return ids[[0, -1]]
    return np.zeros(0 if row_map.default_row is None else 1, np.int64)


def _vectors(bound: BoundFeature, i: FeatureInput) -> int:
    return (i.bags or 0) if bound.is_pooled else i.ids


def _one_after_another(
    bound: Sequence[BoundFeature], inputs: Sequence[FeatureInput]
) -> tuple[list[Output], int]:
    outputs, at = [], 0
    for b, i in zip(bound, inputs, strict=True):
        count = _vectors(b, i)
        size = count * b.vector_bytes
        outputs.append(Output(i.feature, at, size, (count, b.table.dim), b.half))
        at += size
    return outputs, at


def side_by_side(bound: Sequence[BoundFeature]) -> int:
    """Returns the bytes from one bag's vectors to the next for pooled features side by side."""
    return sum(b.vector_bytes for b in bound if b.is_pooled)


def _together(bound: Sequence[BoundFeature], inputs: Sequence[FeatureInput]) -> tuple[list[Output], int]:
    for pooled in (True, False):
        if len({b.precision for b in bound if b.is_pooled is pooled}) > 1:
            named = ", ".join(f"{b.feature.name} {b.feature.output}" for b in bound if b.is_pooled is pooled)
            what = f"features of one kjt have several output types ({named})"
            raise bad_request(f"{what}; send them in a request for each type")
    row_bytes = side_by_side(bound)
    column, after = 0, row_bytes * (inputs[0].bags or 0)
    outputs = []
    for b, i in zip(bound, inputs, strict=True):
        count = _vectors(b, i)
        size = count * b.vector_bytes
        shape = (count, b.table.dim)
        if b.is_pooled:
            outputs.append(Output(i.feature, column if count else 0, size, shape, b.half, row_bytes))
            column += b.vector_bytes
        else:
            outputs.append(Output(i.feature, after, size, shape, b.half))
            after += size
    return outputs, after


def _place(b: BoundFeature, i: FeatureInput, output: Output, found_at: int) -> Place:
    return Place(
        b.number,
        i.ids_at,
        i.ids,
        -1 if i.lengths_at is None else i.lengths_at,
        i.bag_length,
        i.bags or 0,
        -1 if i.weights_at is None else i.weights_at,
        output.at,
        output.row_bytes or 0,
        found_at,
    )


def _matrix(source: Output | DenseInput) -> MatrixPlace:
    if isinstance(source, DenseInput):
        return MatrixPlace(0, source.at, 4 * source.width, 0, source.width)
    half, width = source.half, source.shape[1]
    return MatrixPlace(1, source.at, source.row_bytes or width * (2 if half else 4), int(half), width)


def _names(model: str, version: int, bound: Sequence[BoundFeature]) -> Features:
    names = tuple(b.feature.name for b in bound)
    return Features(
        model,
        version,
        names,
        tuple(b.feature.table for b in bound),
        {name: number for number, name in enumerate(names)},
        np.array([b.is_pooled for b in bound], np.bool_),
        np.array([b.half for b in bound], np.bool_),
        np.array([b.vector_bytes for b in bound], np.int64),
        np.array([b.table.row_bytes for b in bound], np.int64),
        np.array([b.table.dim for b in bound], np.int64),
        np.array([b.strings for b in bound], np.bool_),
    )
