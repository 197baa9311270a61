"""Runs a program of dense layers (`recognize`) by our own kernel (`_layers.c`), without torch.

One call reads the looked-up vectors in place and writes the scores. Sizes are proven at packing; each call
checks that its reads and writes lie in the request's buffers. A row's score is independent of other rows, bit
for bit.

Rounding: a value is a sum of `depth` fp32 products, added one by one. Its error is at most
(depth + 1) 2^-24 / (1 - (depth + 1) 2^-24) times the sum of absolute values of bias and products (Higham,
"Accuracy and Stability of Numerical Algorithms", 2002, section 3.1), as for any order of the sum.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tableside.loader.program import _layers
from tableside.loader.program.graph import Cost, Program
from tableside.loader.program.recognize import ACTIVATIONS, Floats, Layer, Piece, recognize
from tableside.quant.contract import Ids, MatrixPlace

LARGEST_PACKED_BYTES = 1 << 30  # of weights; a program may use one weight in many layers
LARGEST_ROW_BYTES = 4 << 20  # of what lies between the layers, for one row
_PANEL = 32  # outputs that lie side by side, and half as many in a layer's last panel
_TILE_ROWS, _TILE_BYTES, _LEAST_TILE_ROWS = 64, 1 << 20, 8
_ELEMENT = 16  # an element that is read or written counts as so many multiplications, as in `measure`


class _LayerFields(NamedTuple):
    """A layer for `_layers.run`, int64 each. weights_at: in floats; pieces: count of its own pieces."""

    depth: int
    width: int
    weights_at: int
    activation: int
    pieces: int


class PackedLayers:
    """Layers ready to run; immutable, thread-safe. width: outputs of the last layer, scores per row."""

    def __init__(self, layers: Sequence[Layer], threads: int = 1) -> None:
        """threads: as many share a call's rows, where these are several tiles."""
        packed = [_pack(layer) for layer in layers]
        starts = np.cumsum([0, *(p.size for p in packed)])
        fields = [
            _LayerFields(
                each.depth, each.width, int(at), ACTIVATIONS.index(each.activation), len(each.pieces)
            )
            for each, at in zip(layers, starts, strict=False)
        ]
        pieces = [piece for layer in layers for piece in layer.pieces]
        self.width, self._threads = layers[-1].width, threads
        self._layers, self._pieces = _as_bytes(fields), _as_bytes(pieces)
        self._weights = np.concatenate(packed)
        self._row_bytes = row_bytes(layers)
        self._row_work = sum(
            layer.depth * layer.width + _ELEMENT * (layer.depth + layer.width) for layer in layers
        )

    def cost(self, rows: int) -> Cost:
        """Returns what a call with so many rows takes."""
        tile_rows = min(rows, _TILE_ROWS, max(_LEAST_TILE_ROWS, _TILE_BYTES // self._row_bytes))
        return Cost(
            self._threads * tile_rows * self._row_bytes + 4 * rows * self.width, rows * self._row_work
        )

    def run(self, sources: bytes, inputs: Any, outputs: Any, rows: int, scores_at: int) -> int:
        """Writes fp32 [rows, width] to byte `scores_at` of `outputs`; returns the first row with a non-finite
        score, or -1. sources: `MatrixPlace` of each input. ValueError: out of the buffers. MemoryError: no
        room for intermediate values."""
        packed = (self._layers, self._pieces, sources, self._weights)
        return _layers.run(*packed, inputs, outputs, rows, scores_at, self._threads)


def runnable_layers(program: Program) -> tuple[Layer, ...] | None:
    """Returns the layers for `PackedLayers`, or None: more than dense layers, or too much memory, since
    layers may share weights."""
    found = recognize(program)
    if found is None or row_bytes(found) > LARGEST_ROW_BYTES:
        return None
    packed_bytes = sum(4 * _padded(layer.width) * (layer.depth + 1) for layer in found)
    return found if packed_bytes <= LARGEST_PACKED_BYTES else None


def kernel_name() -> str:
    """Returns the instruction set that layers run on."""
    return _layers.isas()[0]


def row_bytes(layers: Sequence[Layer]) -> int:
    """Returns the bytes of intermediate values per row: each layer's outputs and the widest concatenated
    input."""
    return 4 * (max(layer.depth for layer in layers) + sum(_padded(layer.width) for layer in layers))


def _padded(width: int) -> int:
    return -(-width // (_PANEL // 2)) * (_PANEL // 2)


def _pack(layer: Layer) -> Floats:
    """Returns a layer as the kernel reads it: bias [padded], then panels [depth, 32]; the last may have
    16."""
    padded = _padded(layer.width)
    weights = np.zeros((layer.depth, padded), np.float32)
    weights[:, : layer.width] = layer.weights.T
    bias = np.zeros(padded, np.float32)
    bias[: layer.width] = layer.bias
    panels = [weights[:, at : at + _PANEL].ravel() for at in range(0, padded, _PANEL)]
    return np.concatenate([bias, *panels])


def _as_bytes(fields: Sequence[tuple[Any, ...]]) -> bytes:
    found: Ids = np.array(fields, np.int64)
    return found.tobytes()


if (_LayerFields._fields, Piece._fields, MatrixPlace._fields, _PANEL) != (
    _layers.LAYER_FIELDS,
    _layers.PIECE_FIELDS,
    _layers.SOURCE_FIELDS,
    _layers.PANEL,
):
    raise ImportError(
        "the kernel of dense layers was built from other sources than these; reinstall tableside"
    )
