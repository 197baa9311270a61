"""The named form: each feature's ids, lengths and weights are separate tensors.

    <feature> INT64 [bags, ids a bag]   or   <feature>.values INT64 [ids] and <feature>.lengths INT32 [bags]
    <feature>.weights FP32 [ids]

Ids that are strings are BYTES.
Only shapes and sizes change between requests, so the rest of the JSON is a template. All ids come first, then
all lengths, then all weights, so each part is joined in one go and aligned.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from tableside.serving.client.features import Array, Columns, joined, packed
from tableside.serving.client.messages import FOUND, Bytes, Outputs, padded, quoted, request_tail

_SHAPE = attrgetter("shape")
_PIECES_KEPT = 1 << 16


class _Pieces(dict[int, bytes]):
    """Number of elements -> the JSON that says so, for tensors of one dimension and one element size."""

    def __init__(self, itemsize: int) -> None:
        self._itemsize = itemsize

    def __missing__(self, count: int) -> bytes:
        piece = _piece((count,), count * self._itemsize)
        if len(self) < _PIECES_KEPT:
            self[count] = piece
        return piece


def _piece(shape: Sequence[int], size: int) -> bytes:
    return b'[%b],"parameters":{"binary_data_size":%d}}' % (b",".join(b"%d" % n for n in shape), size)


_EIGHT, _FOUR = _Pieces(8), _Pieces(4)


class NamedForm:
    """The named form of requests with the same features, outputs and dense tensors. outputs: reads responses.
    found: also ask for masks; then outputs are named, and None is all features."""

    def __init__(
        self,
        names: Sequence[str],
        kinds: str,
        dense: Sequence[str],
        outputs: Sequence[str] | None,
        found: bool = False,
        strings: frozenset[str] = frozenset(),
    ) -> None:
        if found:
            wanted = names if outputs is None else outputs
            outputs = [*wanted, *(n + FOUND for n in wanted if n in names)]
        datatypes = ["BYTES" if n in strings else "INT64" for n in names]
        ids = [n if k == "r" else f"{n}.values" for n, k in zip(names, kinds, strict=True)]
        tensors = [*zip(ids, datatypes, strict=True)]
        tensors += [(f"{n}.lengths", "INT32") for n, k in zip(names, kinds, strict=True) if k in "jJ"]
        tensors += [(f"{n}.weights", "FP32") for n, k in zip(names, kinds, strict=True) if k.isupper()]
        tensors += [(n, "FP32") for n in dense]
        template = [b'{"inputs":[']  # what is fixed; after each of it but the last comes a shape and a size
        for name, datatype in tensors:
            template[-1] += b'{"name":%b,"datatype":"%b","shape":' % (quoted(name), datatype.encode())
            template += [b"", b","]
        template[-1] = template[-1].removesuffix(b",") + request_tail(outputs)
        self._template = template
        self.outputs = Outputs()

    def encode(self, given: Columns, dense: Mapping[str, Array]) -> tuple[int, tuple[Bytes, ...]]:
        """The length of the JSON, and the body's parts: the JSON, then the tensors."""
        values = given.values
        if given.strings:
            values = [packed(v) if v.dtype == object else v for v in values]
        elif values and values[0].dtype.itemsize == 4:
            values = [v.astype(np.int64) for v in values]
        if "r" in given.kinds or given.strings:
            shapes = map(_SHAPE, given.values)
            pieces = [_piece(shape, v.nbytes) for shape, v in zip(shapes, values, strict=True)]
        else:
            pieces = [*map(_EIGHT.__getitem__, map(len, values))]
        pieces += map(_FOUR.__getitem__, map(len, given.lengths))
        pieces += map(_FOUR.__getitem__, map(len, given.weights))
        pieces += [_piece(a.shape, a.nbytes) for a in dense.values()]
        parts = self._template.copy()
        parts[1::2] = pieces
        head = padded(b"".join(parts))
        body = (joined(part) for part in (values, given.lengths, given.weights, [*dense.values()]) if part)
        return len(head), (head, *(part for part in body if len(part)))


def vectors(runs: Sequence[tuple[list[str], Any]], as_torch: bool) -> dict[str, Any]:
    """name -> vectors, as views of the runs: numpy arrays or torch tensors."""
    if as_torch:
        import torch

        runs = [(names, torch.from_numpy(block).unbind(0)) for names, block in runs]
    found: dict[str, Any] = {}
    for names, block in runs:
        found.update(zip(names, block, strict=True))
    return found
