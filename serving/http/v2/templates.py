"""Templates of headers: they make reading a repeated header almost free.

Headers repeat but for their numbers; the rest is the *skeleton*. The second header of a skeleton that the
slow path (`serving.http.v2.request`) reads makes a `Template`: each number's meaning, a dimension of an input
or its size. `_headers.c` matches a header, checks its numbers, and writes the features' places and the
response's JSON. Whatever fails goes to the slow path. If tensors lie in regions, their names are part of the
skeleton; inputs are first copied behind the header as if they came in the body.

A header has a template if all tensors are binary, no found mask is asked for, numbers are plain digits and
strings have no escapes, and it is no longer than a header of all the model's features. A version keeps
TEMPLATE_BYTES of templates, least recently used out first; no template holds its version.
"""

import re
import struct
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import orjson
from numpy.typing import NDArray

from tableside.loader.model.model import SCORE
from tableside.quant import Place
from tableside.quant.gpu.batch.follower import VectorField
from tableside.serving.http.asgi import inputs_of
from tableside.serving.http.inputs import kjt
from tableside.serving.http.inputs.tensors import DTYPES, split_name
from tableside.serving.http.v2 import _headers, shm
from tableside.serving.http.v2.region_parts import RegionParts
from tableside.serving.http.v2.request import InferRequest
from tableside.serving.model.places import KJT, OFFSETS, SEQUENCES, DenseInput, Output, scores_at
from tableside.serving.model.request import Request
from tableside.serving.model.scorer import Scorer, Scoring
from tableside.serving.model.version import Planners, ServedVersion, side_by_side
from tableside.serving.shm.regions import Regions

TEMPLATE_BYTES = 32 << 20  # of the headers and responses that a version's templates were made of
# of a header with a template, for each input that the model has, and for _SPARE_INPUTS more
_HEADER_BYTES, _NUMBERS = (1024, 32)
_SPARE_INPUTS = 16
SKELETONS = 1024  # that came once, of which a version remembers a number each
_UNLIMITED = (1 << 62) - 1
_MARK = 10**17  # numbers from here on stand for those of a response while its template is made
_ROLES = {"": 0, "values": 1, "lengths": 2, "weights": 3}
_DENSE = 4
_IDS = (0, 1, 5)
_KJT_ROLES = {kjt.VALUES: 5, kjt.LENGTHS: 6, kjt.WEIGHTS: 7}
_COUNT, _BYTES, _ID = range(3)  # what a number of the response is


@dataclass(frozen=True)
class _Source:
    """An input of a scorer. number: among the request's features, or dense tensors."""

    name: str
    number: int
    is_dense: bool
    width: int
    half: bool
    row_bytes: int | None


class _RegionTensors(NamedTuple):
    """The tensors of a header with regions: inputs in order, outputs as in the response."""

    inputs: RegionParts
    outputs: RegionParts


@dataclass(frozen=True, eq=False)
class Template:
    """The meaning of a skeleton for one version. size: bytes it was made of. widens: it has INT32 ids."""

    model: str
    version: int
    planners: Planners
    compiled: Any
    size: int
    scorer: Scorer | None
    sources: tuple[_Source, ...]
    shared: _RegionTensors | None = None
    scores_alone: bool = False
    widens: bool = False

    def match(self, body: Any, header_bytes: int, known: Regions | None = None) -> InferRequest | None:
        """Reads a body with the template's header; None: another header. known: regions that it may name.
        ApiError: a region is gone or truncated."""
        if self.widens and len(body) > shm.INLINE_BYTES:
            return None  # the slow path does it beside the event loop
        if self.shared is None:
            found = _headers.match(self.compiled, body, header_bytes)
            return None if found is None else self._request(body, found)
        header = memoryview(body)[:header_bytes]
        if known is None or (held := _headers.numbers(self.compiled, header)) is None:
            return None
        numbers = struct.unpack(f"{len(held) // 8}q", held)
        if (
            gathered := self.shared.inputs.gather(numbers, header, memoryview(body)[header_bytes:], known)
        ) is None:
            return None
        if (found := _headers.match(self.compiled, gathered.body, gathered.header_bytes)) is None:
            return None
        infer = self._request(gathered.body, found)
        assert infer.parts is not None
        if (into := self.shared.outputs.into(numbers, infer.parts, known)) is None:
            return None
        in_body = self.shared.outputs.in_body
        parts = tuple(ends for ends, is_sent in zip(infer.parts, in_body, strict=True) if is_sent)
        return infer._replace(parts=parts, has_binary=any(in_body), into=into)

    def _request(self, body: Any, found: tuple[Any, ...]) -> InferRequest:
        places, ids, vectors, row_bytes, out_bytes, head, parts, inputs, offsets, dense, rows = found
        lookups = self.planners.plan(places, out_bytes, ids, self.scorer is not None)
        scoring = None if self.scorer is None else self._scoring(self.scorer, places, dense, rows, out_bytes)
        sizes = ids, vectors, row_bytes, out_bytes
        request = Request(self.model, self.version, lookups, sizes, scoring=scoring)
        return InferRequest(request, body if inputs is None else inputs, head, parts, offsets)

    def _scoring(self, scorer: Scorer, places: bytes, dense: bytes, rows: int, out_bytes: int) -> Scoring:
        out_at = np.frombuffer(places, np.int64)[_OUT_AT :: len(Place._fields)].tolist()
        dense_at = np.frombuffer(dense, np.int64).tolist()
        sources = tuple(
            DenseInput(s.name, dense_at[s.number], rows, s.width)
            if s.is_dense
            else Output(
                s.name,
                out_at[s.number],
                rows * s.width * (2 if s.half else 4),
                (rows, s.width),
                s.half,
                s.row_bytes,
            )
            for s in self.sources
        )
        size = scores_at(0, rows, scorer.width).bytes
        vectors = None
        if scorer.calls is not None:
            numbers, per_row = self._vectors
            vectors = per_row.copy()
            vectors[:, VectorField.VALUES] *= rows
            vectors[:, VectorField.AT] = np.frombuffer(places, np.int64)[_OUT_AT :: len(Place._fields)][
                numbers
            ]
        return Scoring(
            scorer, sources, scores_at(out_bytes - size, rows, scorer.width), self.scores_alone, vectors
        )

    @cached_property
    def _vectors(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The scorer's features: their numbers, and one row's vectors like `Scoring.vectors`."""
        read = [s for s in self.sources if not s.is_dense]
        steps = [s.width if s.row_bytes is None else s.row_bytes // (2 if s.half else 4) for s in read]
        per_row = [(0, int(s.half), s.width, step, s.width) for s, step in zip(read, steps, strict=True)]
        return np.array([s.number for s in read], np.int64), np.array(per_row, np.int64).reshape(
            -1, len(VectorField)
        )


_OUT_AT = Place._fields.index("out_at")


class _OfVersion:
    """A version's templates by skeleton, least recently used first."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.by_skeleton: OrderedDict[int, Template] = OrderedDict()
        self.seen: OrderedDict[int, None] = OrderedDict()
        self.latest: Template | None = None
        self.bytes = 0

    def keep(self, skeleton: int, template: Template) -> None:
        self.by_skeleton[skeleton] = self.latest = template
        self.bytes += template.size
        while self.bytes > TEMPLATE_BYTES and len(self.by_skeleton) > 1:
            _, forgotten = self.by_skeleton.popitem(last=False)
            self.bytes -= forgotten.size

    def is_second(self, skeleton: int) -> bool:
        """Returns whether the skeleton came before, and remembers it."""
        if skeleton in self.seen:
            del self.seen[skeleton]
            return True
        self.seen[skeleton] = None
        if len(self.seen) > SKELETONS:
            self.seen.popitem(last=False)
        return False


class Templates:
    """Templates by version and skeleton. Belongs to one event loop."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[ServedVersion, _OfVersion] = WeakKeyDictionary()

    def match(
        self, served: ServedVersion, body: Any, header_bytes: int, regions: Regions | None = None
    ) -> InferRequest | None:
        """Reads a body by a template, or None. regions: None if not allowed. ApiError: a region is gone or
        truncated."""
        known = self._known.get(served)
        if known is None or known.latest is None or header_bytes > known.most_bytes:
            return None
        if (found := known.latest.match(body, header_bytes, regions)) is not None:
            return found
        skeleton = _headers.skeleton(memoryview(body)[:header_bytes])
        if skeleton is None or (template := known.by_skeleton.get(skeleton)) is None:
            return None
        known.by_skeleton.move_to_end(skeleton)
        known.latest = template
        return template.match(body, header_bytes, regions)

    def learn(self, served: ServedVersion, head: bytes, header: dict[str, Any], infer: InferRequest) -> None:
        """Makes a template of a header the slow path read, if its skeleton came before."""
        if not infer.head or any(sent.output.is_mask for sent in infer.outputs):
            return
        if (known := self._known.get(served)) is None:
            known = self._known[served] = _OfVersion(_HEADER_BYTES * _inputs(served))
        if len(head) > known.most_bytes or (skeleton := _headers.skeleton(head)) is None:
            return
        if skeleton not in known.by_skeleton and known.is_second(skeleton):
            template = make(served, head, header, infer)
            if template is not None:
                known.keep(skeleton, template)


def _inputs(served: ServedVersion) -> int:
    return inputs_of(served) + _SPARE_INPUTS


def make(served: ServedVersion, head: bytes, header: dict[str, Any], infer: InferRequest) -> Template | None:
    """Makes the template of a header that the slow path read; None: it can have none."""
    spans = _headers.spans(head, _NUMBERS * _inputs(served))
    answer = _answer(infer, len(infer.request.features))
    if spans is None or answer is None or any("data" in entry for entry in header["inputs"]):
        return None
    pieces, end = [], 0
    for start, stop, _ in spans:
        pieces.append(head[end:start])
        end = stop
    pieces.append(head[end:].rstrip(b" \t\r\n"))
    # The header with the number of each hole in its place: what is parsed of it says what the holes mean.
    filled = [head[start:stop] if is_id else b"%d" % k for k, (start, stop, is_id) in enumerate(spans)]
    marked = orjson.loads(b"".join(x for pair in zip(pieces, [*filled, b""], strict=True) for x in pair))
    request = infer.request
    together = kjt.is_kjt(served, [entry["name"] for entry in header["inputs"]])
    scorer = None if request.scoring is None else request.scoring.scorer
    dense = {} if served.scorer is None else served.scorer.dense
    tensors = _tensors(marked["inputs"], request.features, dense, together)
    bound = [served.features[f] for f in request.features]
    apart = side_by_side(bound) if together else 0
    sources = _sources(served, scorer, request.features, apart)
    unpooled = [b for b in bound if not b.is_pooled] if together else []
    told, literals, shown = answer
    shared = _shared(marked, infer)
    words = [
        len(spans),
        next((k for k, (_, _, is_id) in enumerate(spans) if is_id), -1),
        len(tensors),
        len(bound),
        len(dense),
        len(sources),
        len(shown),
        len(told),
        0 if scorer is None else scorer.width or 1,
        _UNLIMITED if served.max_response_bytes is None else served.max_response_bytes,
        int(together),
        apart,
        unpooled[0].precision.bytes if unpooled else 0,
        int(infer.parts is None and shared is None),
        int(bool(unpooled)),
        *map(len, pieces),
        *(word for tensor in tensors for word in tensor),
        *(word for b in bound for word in (int(b.is_pooled), b.vector_bytes, b.table.row_bytes)),
        *(-1 - s.number if s.is_dense else s.number for s in sources),
        *shown,
        *(word for what, output in told for word in (what, output)),
        *map(len, literals),
    ]
    text = b"".join([*pieces, *literals])
    return Template(
        request.model,
        request.version,
        served.planners(request.features, together),
        _headers.template(np.array(words, np.int64).tobytes(), text),
        8 * len(words) + len(text),
        scorer,
        sources,
        shared,
        request.scoring is not None and request.scoring.is_alone,
        any(item == 4 and role in _IDS for role, _, item, *_ in tensors),
    )


def _shared(marked: dict[str, Any], infer: InferRequest) -> _RegionTensors | None:
    """Returns the tensors' region parts; None: the header names no region."""
    by_name = {entry["name"]: entry.get("parameters", {}) for entry in marked.get("outputs", [])}
    inputs = RegionParts([entry["parameters"] for entry in marked["inputs"]])
    outputs = RegionParts([by_name.get(sent.output.feature, {}) for sent in infer.outputs])
    return _RegionTensors(inputs, outputs) if inputs.names or outputs.names else None


def _tensors(
    marked: list[dict[str, Any]], features: tuple[str, ...], dense: dict[str, int], together: bool
) -> list[tuple[int, ...]]:
    """Returns inputs for `_headers.c`: role, owner, item bytes, dimensions, their holes, size's hole,
    width."""
    found: list[tuple[int, ...]] = []
    names = list(dense)
    for entry in marked:
        name, shape = entry["name"], entry["shape"]
        feature, part = split_name(name)
        if name in dense:
            role, owner, width = _DENSE, names.index(name), dense[name]
        elif together:
            role, owner, width = _KJT_ROLES[name], 0, 0
        else:
            role, owner, width = _ROLES[part], features.index(feature), 0
        item = DTYPES[entry["datatype"]].itemsize
        parameters = entry["parameters"]
        size_hole = parameters[shm.SIZE] if shm.REGION in parameters else parameters["binary_data_size"]
        holes = (shape[0], shape[1] if len(shape) == 2 else 0, size_hole)
        found.append((role, owner, item, len(shape), *holes, width))
    return found


def _sources(
    served: ServedVersion, scorer: Scorer | None, features: tuple[str, ...], apart: int
) -> tuple[_Source, ...]:
    """Returns the scorer's inputs. apart: bytes between a feature's pooled vectors in a kjt; else 0."""
    if scorer is None:
        return ()
    dense = list(scorer.dense)
    found = []
    for i in scorer.inputs:
        if i.feature is None:
            found.append(_Source(i.name, dense.index(i.name), True, i.width, False, None))
            continue
        bound = served.features[i.feature]
        row_bytes = apart if apart and bound.is_pooled else None
        found.append(
            _Source(i.feature, features.index(i.feature), False, bound.table.dim, bound.half, row_bytes)
        )
    return tuple(found)


def _answer(
    infer: InferRequest, features: int
) -> tuple[list[tuple[int, int]], list[bytes], list[int]] | None:
    """Cuts the response's JSON at its numbers: each number's (kind, output), the pieces, the outputs'
    numbers. Features come first, then scores, kjt, its sequences. None: it cannot be cut."""
    response = orjson.loads(infer.head)
    numbers = {name: k for k, name in enumerate(infer.request.features)}
    special = {SCORE: features, KJT: features + 1, SEQUENCES: features + 2, OFFSETS: features + 3}
    is_kjt = any(sent.output.feature in (KJT, SEQUENCES) for sent in infer.outputs)
    told: list[tuple[int, int]] = []
    shown = []

    def mark(what: int, output: int) -> int:
        told.append((what, output))
        return _MARK + len(told) - 1

    if "id" in response:
        response["id"] = str(mark(_ID, 0))
    for (output, _, into), entry in zip(infer.outputs, response["outputs"], strict=True):
        is_score = infer.request.scoring is not None and output == infer.request.scoring.output
        number = special[output.feature] if is_score or is_kjt else numbers[output.feature]
        shown.append(number)
        entry["shape"][0] = mark(_COUNT, number)
        entry["parameters"]["binary_data_size" if into is None else shm.SIZE] = mark(_BYTES, number)
    text = orjson.dumps(response)
    marks = re.findall(rb"%d\d*" % (_MARK // 10**4), text)  # whatever looks like a mark
    if marks != [b"%d" % (_MARK + k) for k in range(len(told))]:
        return None  # a name holds such digits
    literals = re.split(b"|".join(marks), text) if marks else [text]
    return told, literals, shown
