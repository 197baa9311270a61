"""Reads infer requests by the C extension (`native/_reader.c`) in one pass, without learning: any order of
keys and inputs, any subset of the features, any spelling of numbers. What it returns None for is wrong:
`serving.http.v2.request` says what is wrong with it."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import orjson

from tableside.loader.model.model import SCORE
from tableside.quant import Place
from tableside.serving.http.inputs import kjt
from tableside.serving.http.v2 import _reader
from tableside.serving.http.v2.answer import InferRequest, Sent
from tableside.serving.model.places import KJT, Output, scores_at
from tableside.serving.model.request import Features
from tableside.serving.model.scorer import Scoring
from tableside.serving.model.version import ServedVersion
from tableside.serving.shm import regions
from tableside.serving.shm.regions import DeviceRegion, PartlyOnDevice, Regions, Slice

if Place._fields != _reader.PLACE_FIELDS:
    raise ImportError("the reader was built from other sources than these; reinstall tableside")

_UNLIMITED = (1 << 62) - 1
_names: WeakKeyDictionary[Features, Any] = WeakKeyDictionary()
_OFFSETS, _MASK = 3, 5  # kinds of outputs


class ReadBeside(NamedTuple):
    """The request has `region_bytes` in regions, more than may be read here."""

    region_bytes: int


def names_of(served: ServedVersion) -> Any:
    """Returns a version's names for the extension. Its states share them."""
    if (names := _names.get(served.names)) is None:
        names = _names[served.names] = _make_names(served)
    return names


def read(
    served: ServedVersion,
    body: Any,
    header_bytes: int,
    known: Regions | None = None,
    most_region_bytes: int = _UNLIMITED,
) -> InferRequest | ReadBeside | None:
    """Reads a body; None: it is wrong or unusual. known: regions; None: not allowed. most_region_bytes:
    more are not read. ApiError: a region is unknown, gone or truncated."""
    names = names_of(served)
    tail = b"]}" if not served.sequence else b'],"parameters":{"sequence":%d}}' % served.sequence
    found = _reader.read(names, tail, body, header_bytes, None, None)
    if found is None or len(found) != 2:
        return None if found is None else _request(served, body, found, [])
    named, runs = found
    if known is None:
        return None
    held = [known.find(name) for name in named]
    slices = _slices(runs, held)
    if slices is None:
        return None
    size = sum(s.size for s in slices if not isinstance(s.region, DeviceRegion))
    if size > most_region_bytes:
        return ReadBeside(size)
    gathered = _gathered(runs, slices, memoryview(body)[header_bytes:])
    if gathered is None:
        return None
    on_device = bytes(isinstance(region, DeviceRegion) for region in held)
    found = _reader.read(names, tail, body, header_bytes, gathered, on_device)
    return None if found is None else _request(served, gathered, found, held)


def _make_names(served: ServedVersion) -> object:
    names, scorer = served.names, served.scorer
    dense = {} if scorer is None else scorer.dense
    numbers = {name: -1 - k for k, name in enumerate(dense)} | names.numbers
    inputs = () if scorer is None else scorer.inputs
    columns = (
        names.is_pooled,
        names.is_half,
        names.dims,
        names.vector_bytes,
        names.row_bytes,
        names.are_strings,
    )
    schema = kjt.describe(served)[kjt.SCHEMA]
    opening = orjson.dumps(
        {"model_name": names.model, "model_version": str(names.version), "outputs": []}
    ).removesuffix(b"]}")[1:]
    texts = [name.encode() for name in names.names]
    texts += [orjson.dumps(name) for name in names.names]
    texts += [*(name.encode() for name in dense), schema.encode(), opening]
    words = [
        len(names.names),
        len(dense),
        len(inputs),
        0 if scorer is None else scorer.width or 1,
        0 if scorer is None else scorer.width or 0,
        KJT in served.features,
        SCORE in served.features,
        _UNLIMITED if served.max_response_bytes is None else served.max_response_bytes,
        *chain.from_iterable(zip(*(column.tolist() for column in columns), strict=True)),
        *dense.values(),
        *(numbers[i.feature or i.name] for i in inputs),
        *map(len, texts),
    ]
    return _reader.names(np.array(words, np.int64).tobytes(), b"".join(texts))


def _slices(runs: bytes, held: Sequence[Any]) -> list[Slice] | None:
    """Returns the parts of regions; None: one is outside its region."""
    found = []
    for region, offset, size, at, limit in _rows(runs):
        if region >= 0:
            if not held[region].entry.holds(offset, limit - offset):
                return None
            found.append(Slice(held[region], offset, size, at))
    return found


def _rows(runs: bytes) -> list[list[int]]:
    rows: list[list[int]] = np.frombuffer(runs, np.int64).reshape(-1, 5).tolist()
    return rows


def _gathered(runs: bytes, slices: Sequence[Slice], binary: memoryview) -> memoryview | None:
    """Returns all tensors one after another, those of the body too; None: the body has another size."""
    rows = _rows(runs)
    if sum(size for region, _, size, _, _ in rows if region < 0) != binary.nbytes:
        return None
    buffer = np.empty(rows[-1][3] + rows[-1][2] if rows else 0, np.uint8).data
    for region, offset, size, at, _ in rows:
        if region < 0:
            buffer[at : at + size] = binary[offset : offset + size]
    regions.read((s for s in slices if s.size), buffer)
    return buffer


def _request(
    served: ServedVersion, came: Any, found: tuple[Any, ...], held: Sequence[Any]
) -> InferRequest | None:
    """Makes a request of what was read. came: where the inputs are, unless they were made anew."""
    (
        places,
        sizes,
        answer,
        sent_bytes,
        inputs,
        offsets,
        scores,
        elsewhere,
        into,
        has_binary,
        _,
        name,
        timeout_us,
    ) = found
    scoring = scoring_of(served, scores)
    inputs = came if inputs is None else inputs
    writes: tuple[Slice, ...] = ()
    is_on_device = False
    if held:
        outputs = _slices(into, held)
        if outputs is None or (len(outputs) > 1 and regions.overlap(outputs)):
            return None
        of_device = [isinstance(s.region, DeviceRegion) for s in outputs]
        if is_on_device := any(of_device) or bool(elsewhere):
            reads = tuple(s for s in _slices(elsewhere, held) or () if s.size)
            to_device = (s for s, is_one in zip(outputs, of_device, strict=True) if is_one and s.size)
            inputs = PartlyOnDevice(inputs, reads, tuple(to_device))
        writes = tuple(s for s, is_one in zip(outputs, of_device, strict=True) if not is_one and s.size)
    request = served.request(places, sizes, scoring is not None or is_on_device, scoring=scoring)
    parts = None if sent_bytes == request.out_bytes else ((0, sent_bytes),)
    if isinstance(answer, bytes):
        return InferRequest(
            request, inputs, answer, parts, offsets, has_binary, into=writes, timeout_us=timeout_us
        )
    sent = tuple(_sent(one, held) for one in answer)
    json_bytes = sum(s.output.json_bytes for s in sent if s.is_json)
    described = json_bytes, sent, name or "", writes, timeout_us
    return InferRequest(request, inputs, b"", parts, offsets, has_binary, *described)


def scoring_of(served: ServedVersion, scores: tuple[bytes, int, int, bool] | None) -> Scoring | None:
    """Returns the scores that the extension found to be asked for."""
    if scores is None:
        return None
    assert served.scorer is not None, "its inputs are known"
    sources, at, rows, is_alone = scores
    return Scoring(served.scorer, sources, scores_at(at, rows, served.scorer.width), is_alone)


def _sent(one: tuple[Any, ...], held: Sequence[Any]) -> Sent:
    name, at, size, shape, is_half, kind, is_binary, region, offset = one
    output = Output(name, at, size, shape, bool(is_half), is_offsets=kind == _OFFSETS, is_mask=kind == _MASK)
    return Sent(output, bool(is_binary), None if region < 0 else Slice(held[region], offset, size, at))
