"""Runs a program that is dense layers alone (`recognize`), without torch, by a kernel of our own
(`_layers.c`).

What a request has looked up is read where it lies, put side by side and turned into scores by one call. Sizes
are proven when the layers are packed; a call checks again that what it reads and writes lies in the request's
buffers. A row's scores do not depend on the rows beside it, to the last bit.

Rounding: each value is a sum of `depth` products in fp32, added one by one. It differs from the exact one by
at most (depth + 1) 2^-24 / (1 - (depth + 1) 2^-24) times the sum of the absolute values of bias and products
(Higham, "Accuracy and Stability of Numerical Algorithms", 2002, section 3.1), as any order of the sum does.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.program import _layers
from tableside.loader.program.graph import Program
from tableside.loader.program.recognize import ACTIVATIONS, Floats, FromInput, Layer, recognize

LARGEST_PACKED_BYTES = 1 << 30  # of weights; a program may use one weight in many layers
LARGEST_ROW_BYTES = 4 << 20  # of what lies between the layers, for one row
_PANEL = 32  # outputs that lie side by side, and half as many in a layer's last panel
_TILE_ROWS, _TILE_BYTES, _LEAST_TILE_ROWS = 64, 1 << 20, 8
_ELEMENT = 16  # an element that is read or written counts as so many multiplications, as in `measure`


class _LayerFields(NamedTuple):
    """A layer as `_layers.run` reads it, int64 each. weights_at: in floats; pieces: how many of the pieces
    are its own."""

    depth: int
    width: int
    weights_at: int
    activation: int
    pieces: int


class _PieceFields(NamedTuple):
    """A part of a layer's input: all columns of a source, or of the layer -1 - `of`."""

    of: int
    width: int


class LayerSource(NamedTuple):
    """An input of the program in a request: [rows, width] at byte `at` of its output buffer, or of its input
    buffer.

    row_bytes: from one row to the next. is_half: the values are fp16, else fp32.
    """

    is_output: bool
    at: int
    row_bytes: int
    is_half: bool


@dataclass(frozen=True)
class Work:
    """bytes: of memory that a call takes; work: in multiplications."""

    bytes: int
    work: int


class PackedLayers:
    """Layers that are ready to run. Immutable; any thread may call. width: outputs of the last layer, the
    scores of a row."""

    def __init__(self, layers: Sequence[Layer], threads: int = 1) -> None:
        """threads: as many share a call's rows, where these are several tiles."""
        packed = [_pack(layer) for layer in layers]
        starts = np.cumsum([0, *(p.size for p in packed)])
        fields = [
            _LayerFields(
                layer.depth, layer.width, int(at), ACTIVATIONS.index(layer.activation), len(layer.pieces)
            )
            for layer, at in zip(layers, starts, strict=False)
        ]
        pieces = [
            _PieceFields(p.number if isinstance(p, FromInput) else -1 - p.number, p.width)
            for layer in layers
            for p in layer.pieces
        ]
        self.width, self._threads = layers[-1].width, threads
        self._layers, self._pieces = _as_bytes(fields), _as_bytes(pieces)
        self._weights = np.concatenate(packed)
        self._row_bytes = row_bytes(layers)
        self._row_work = sum(
            layer.depth * layer.width + _ELEMENT * (layer.depth + layer.width) for layer in layers
        )

    def cost(self, rows: int) -> Work:
        """What a call with so many rows takes."""
        tile_rows = min(rows, _TILE_ROWS, max(_LEAST_TILE_ROWS, _TILE_BYTES // self._row_bytes))
        return Work(
            self._threads * tile_rows * self._row_bytes + 4 * rows * self.width, rows * self._row_work
        )

    def run(self, sources: bytes, inputs: Any, outputs: Any, rows: int, scores_at: int) -> int:
        """Writes fp32 [rows, width] to byte `scores_at` of `outputs`; returns the first row whose score is
        not finite, or -1.

        sources: of each input, by `pack_sources`. inputs, outputs: the request's buffers. ValueError: an
        input or the scores do not lie in them. MemoryError: there is no room for what lies between the
        layers.
        """
        return _layers.run(
            self._layers,
            self._pieces,
            sources,
            self._weights,
            inputs,
            outputs,
            rows,
            scores_at,
            self._threads,
        )


def pack_sources(sources: Sequence[LayerSource]) -> bytes:
    """Where a request's inputs lie, as `PackedLayers.run` takes it."""
    return array("q", [field for source in sources for field in source]).tobytes()


def runnable_layers(program: Program) -> tuple[Layer, ...] | None:
    """The layers of a program that `PackedLayers` runs; None: it is a program for torch.

    That is one which is more than dense layers, or would take much memory here: a weight may stand in many of
    its layers.
    """
    found = recognize(program)
    if found is None or row_bytes(found) > LARGEST_ROW_BYTES:
        return None
    packed_bytes = sum(4 * _padded(layer.width) * (layer.depth + 1) for layer in found)
    return found if packed_bytes <= LARGEST_PACKED_BYTES else None


def kernel_name() -> str:
    """The instruction set that layers run on."""
    return _layers.isas()[0]


def row_bytes(layers: Sequence[Layer]) -> int:
    """Of what lies between the layers, for one row: each layer's outputs, and the widest input that is put
    together."""
    return 4 * (max(layer.depth for layer in layers) + sum(_padded(layer.width) for layer in layers))


def _padded(width: int) -> int:
    return -(-width // (_PANEL // 2)) * (_PANEL // 2)


def _pack(layer: Layer) -> Floats:
    """A layer as the kernel reads it: bias [padded], then panels of [depth, 32] outputs; the last may have
    16."""
    padded = _padded(layer.width)
    weights = np.zeros((layer.depth, padded), np.float32)
    weights[:, : layer.width] = layer.weights.T
    bias = np.zeros(padded, np.float32)
    bias[: layer.width] = layer.bias
    panels = [weights[:, at : at + _PANEL].ravel() for at in range(0, padded, _PANEL)]
    return np.concatenate([bias, *panels])


def _as_bytes(fields: Sequence[tuple[Any, ...]]) -> bytes:
    found: NDArray[np.int64] = np.array(fields, np.int64)
    return found.tobytes()


if (_LayerFields._fields, _PieceFields._fields, LayerSource._fields, _PANEL) != (
    _layers.LAYER_FIELDS,
    _layers.PIECE_FIELDS,
    _layers.SOURCE_FIELDS,
    _layers.PANEL,
):
    raise ImportError(
        "the kernel of dense layers was built from other sources than these; reinstall tableside"
    )
