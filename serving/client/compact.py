"""The compact form: all features of a request in two tensors, in the order of TorchRec's KeyedJaggedTensor.

    request    kjt.values [ids], INT64, INT32 or BYTES, kjt.lengths INT32 [features, bags],
               kjt.weights FP32 [ids]
    response   kjt [bags, sum of dims]: the pooled features' vectors side by side
               kjt.sequences [elements], kjt.offsets INT64 [unpooled features + 1]: unpooled vectors, flat
               kjt.found BOOL [ids]: whether the tables have the ids, if asked for

The client reads the dims from the model's metadata and sends their digest with each request, so a version
with other dims refuses it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import orjson

from tableside.serving.client.features import Array, Columns, joined, packed
from tableside.serving.client.messages import (
    FOUND,
    Bytes,
    ClientError,
    HttpResponse,
    Outputs,
    padded,
    quoted,
    request_tail,
)

POOLED, SEQUENCES, OFFSETS = "kjt", "kjt.sequences", "kjt.offsets"
SCHEMA = "kjt.schema"


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of a schema. dim: elements of a vector. datatype: FP32 or FP16."""

    name: str
    dim: int
    is_pooled: bool
    datatype: str


@dataclass(frozen=True, slots=True)
class Schema:
    """A model's features for the compact form. digest: the server's."""

    features: Mapping[str, Feature] = field(hash=False)
    digest: str

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "Schema | None":
        """Reads the schema of a model's metadata; None: the server lacks the compact form."""
        parameters = metadata.get("parameters", {})
        if "kjt.features" not in parameters or SCHEMA not in parameters:
            return None
        found = (
            Feature(f["name"], f["dim"], f["pooling"] != "none", f["datatype"])
            for f in parameters["kjt.features"]
        )
        return cls({f.name: f for f in found}, parameters[SCHEMA])

    def obstacle(self, names: Sequence[str], has_weights: bool) -> str:
        """Returns why these features do not fit one compact request, or ""."""
        unknown = [n for n in names if n not in self.features]
        if unknown:
            return f"the model has no feature {unknown[0]!r}; it has {', '.join(self.features)}"
        asked = [self.features[n] for n in names]
        for is_pooled in (True, False):
            alike = {f.datatype: f.name for f in asked if f.is_pooled is is_pooled}
            if len(alike) > 1:
                (one, first), (other, second) = alike.items()
                why = f"{first} has {one} vectors and {second} {other}"
                return f"{why}; ask for them in requests of their own, or by name"
        unpooled = [f.name for f in asked if not f.is_pooled]
        if has_weights and unpooled:
            return f"{unpooled[0]} is not pooled, so it takes no weights; ask for it in a request of its own"
        return ""


class Keyed(NamedTuple):
    """Features in KeyedJaggedTensor's order. values: [ids] of `datatype`, INT64, INT32 or BYTES.
    lengths: int32 [features, bags]. weights: fp32 [ids]."""

    names: tuple[str, ...]
    bags: int
    ids: int
    datatype: str
    values: Bytes
    lengths: Bytes
    weights: Bytes | None


def obstacle(given: Columns) -> str:
    """Returns why these features do not make a `Keyed`, or ""."""
    kinds = {given.kinds[:1]} if given.is_uniform else {*given.kinds}
    if not given.names:
        return "there are no features"
    if kinds & {"v", "V"}:
        return f"{given.names[given.kinds.lower().index('v')]} has no lengths"
    if "J" in kinds and len(kinds) > 1:
        return "some features have weights and some have none"
    of_integers = (v.size for n, v in zip(given.names, given.values, strict=True) if n not in given.strings)
    if given.strings and any(of_integers):
        return "the ids of some features are strings and those of some integers"
    lengths = _lengths(given)
    if len(set(map(len, lengths))) > 1:
        first, *others = ((n, len(each)) for n, each in zip(given.names, lengths, strict=True))
        other = next(o for o in others if o[1] != first[1])
        return f"{first[0]} has {first[1]} bags and {other[0]} {other[1]}"
    return ""


def _lengths(given: Columns) -> list[Array]:
    if "r" not in given.kinds:
        return given.lengths
    lengths = iter(given.lengths)
    shapes = [v.shape for v in given.values]
    return [
        np.full(shape[0], shape[1], np.int32) if kind == "r" else next(lengths)
        for kind, shape in zip(given.kinds, shapes, strict=True)
    ]


def keyed(given: Columns) -> Keyed:
    """Features that have no `obstacle`, side by side."""
    lengths = _lengths(given)
    if given.strings:
        values = joined([packed(v) for v in given.values])
        datatype, ids = "BYTES", sum(v.size for v in given.values)
    else:
        values, itemsize = joined(given.values), given.values[0].dtype.itemsize
        datatype, ids = "INT64" if itemsize == 8 else "INT32", len(values) // itemsize
    weights, bags = joined(given.weights) if given.weights else None, len(lengths[0])
    return Keyed(given.names, bags, ids, datatype, values, joined(lengths), weights)


def make_form(
    schema: Schema | None,
    names: tuple[str, ...],
    has_weights: bool,
    dense: Sequence[str],
    outputs: Sequence[str] | None,
    found: bool = False,
) -> "CompactForm | str":
    """Returns the compact form of such requests, or why there is none."""
    if schema is None:
        return "the server does not know it"
    return schema.obstacle(names, has_weights) or CompactForm(
        schema, names, has_weights, dense, outputs, found
    )


class CompactForm:
    """The compact form of requests with the same features, outputs, dense tensors and schema. outputs: None:
    all, with scores if the features suffice. found: also ask for masks; then outputs are named, and None is
    all features."""

    def __init__(
        self,
        schema: Schema,
        names: tuple[str, ...],
        has_weights: bool,
        dense: Sequence[str],
        outputs: Sequence[str] | None,
        found: bool = False,
    ) -> None:
        self._names = names
        asked = [schema.features[n] for n in names]
        self.pooled = [f for f in asked if f.is_pooled]
        self.unpooled = [f for f in asked if not f.is_pooled]
        self.runs = _runs(self.pooled)
        self._width = sum(f.dim for f in self.pooled)
        self._found = found
        wanted = names if found and outputs is None else outputs
        self._wanted = None if wanted is None else [*wanted]
        self._outputs = Outputs()
        tensors = ["kjt.values", "kjt.lengths"] + ["kjt.weights"] * has_weights + [*dense]
        described = b",".join(b'{"name":' + _escaped(quoted(t)) + _REST for t in tensors)
        parameters = b',"kjt.schema":%b' % quoted(schema.digest)
        if names != tuple(schema.features):
            parameters = b',"kjt.features":%b' % orjson.dumps(names) + parameters
        self._template = b'{"inputs":[' + described + _escaped(request_tail(self._asked(), parameters))

    def _asked(self) -> list[str] | None:
        """The outputs that the request names, of those that the caller wants."""
        if self._wanted is None:
            return None
        wanted = set(self._wanted)
        found = [POOLED] if any(f.name in wanted for f in self.pooled) else []
        found += [SEQUENCES, OFFSETS] if any(f.name in wanted for f in self.unpooled) else []
        found += [name for name in self._wanted if name not in self._names]
        return found + [POOLED + FOUND] * self._found

    def encode(self, given: Keyed, dense: Mapping[str, Array]) -> tuple[int, tuple[Bytes, ...]]:
        """The length of the JSON, and the body's parts: the JSON, then the tensors."""
        shape = b"%d,%d" % (len(given.names), given.bags)
        numbers = [
            given.datatype.encode(),
            b"%d" % given.ids,
            len(given.values),
            b"INT32",
            shape,
            len(given.lengths),
        ]
        parts = [given.values, given.lengths]
        if given.weights is not None:
            numbers += [b"FP32", b"%d" % given.ids, len(given.weights)]
            parts.append(given.weights)
        for each in dense.values():
            numbers += [b"FP32", b",".join(b"%d" % n for n in each.shape), each.nbytes]
        if dense:
            parts.append(joined([*dense.values()]))
        head = padded(self._template % tuple(numbers))
        return len(head), (head, *(part for part in parts if len(part)))

    def read(self, response: HttpResponse) -> "CompactAnswer":
        """Reads the response's tensors. ClientError: they do not fit the request."""
        arrays = {
            name: block[i] for names, block in self._outputs.read(response) for i, name in enumerate(names)
        }
        pooled, sequences, offsets = (
            arrays.pop(POOLED, None),
            arrays.pop(SEQUENCES, None),
            arrays.pop(OFFSETS, None),
        )
        found = arrays.pop(POOLED + FOUND, None)
        if pooled is not None and pooled.shape[-1] != self._width:
            raise ClientError(
                200, f"output {POOLED} has shape {list(pooled.shape)}; expected [bags, {self._width}]"
            )
        if (sequences is None) != (offsets is None) or (
            offsets is not None and len(offsets) != len(self.unpooled) + 1
        ):
            raise ClientError(
                200, f"outputs {SEQUENCES} and {OFFSETS} do not fit {len(self.unpooled)} unpooled features"
            )
        if (found is None) is self._found:
            raise ClientError(
                200, f"the response has {'no' if self._found else 'an unasked'} output {POOLED + FOUND}"
            )
        return CompactAnswer(self, pooled, sequences, offsets, arrays, found)

    def vectors(self, answer: "CompactAnswer", as_torch: bool) -> dict[str, Any]:
        """name -> vectors, in the order of the request, as views of the response."""
        found = answer.pooled_vectors(as_torch)
        if answer.sequences is not None:
            found = {**dict.fromkeys(self._names), **found, **answer.unpooled_vectors(as_torch)}
        found.update({name: given_as(array, as_torch) for name, array in answer.others.items()})
        return found if self._wanted is None else {name: found[name] for name in self._wanted}


_REST = b',"datatype":"%b","shape":[%b],"parameters":{"binary_data_size":%d}}'


def _runs(features: Sequence[Feature]) -> list[tuple[list[str], int, int]]:
    """Neighbours of one dim: their names, the dim, and the column in which the first begins."""
    found, at = [], 0
    for dim, run in groupby(features, lambda f: f.dim):
        names = [f.name for f in run]
        found.append((names, dim, at))
        at += len(names) * dim
    return found


def _escaped(text: bytes) -> bytes:
    return text.replace(b"%", b"%%")


def given_as(array: Array, as_torch: bool) -> Any:
    if not as_torch:
        return array
    import torch

    return torch.from_numpy(array)


class CompactAnswer(NamedTuple):
    """The response to a compact request. pooled: [bags, sum of dims]. sequences: [elements]. offsets: int64
    [unpooled features + 1], in elements. others: `score`. found: bool [ids], if asked for."""

    form: CompactForm
    pooled: Array | None
    sequences: Array | None
    offsets: Array | None
    others: dict[str, Array]
    found: Array | None = None

    def pooled_vectors(self, as_torch: bool) -> dict[str, Any]:
        """name -> [bags, dim]. Neighbours of one dim are split in one go."""
        found: dict[str, Any] = {}
        if self.pooled is None:
            return found
        bags, whole = len(self.pooled), given_as(self.pooled, as_torch)
        for names, dim, at in self.form.runs:
            block = whole[:, at : at + len(names) * dim].reshape(bags, len(names), dim)
            blocks = block.unbind(1) if as_torch else block.transpose(1, 0, 2)
            found.update(zip(names, blocks, strict=True))
        return found

    def unpooled_vectors(self, as_torch: bool) -> dict[str, Any]:
        """name -> [ids, dim]."""
        if self.sequences is None or self.offsets is None:
            return {}
        ends, whole = self.offsets.tolist(), given_as(self.sequences, as_torch)
        return {
            f.name: whole[ends[i] : ends[i + 1]].reshape(-1, f.dim) for i, f in enumerate(self.form.unpooled)
        }
