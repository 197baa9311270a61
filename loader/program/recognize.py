"""Recognizes programs of dense layers alone: linear maps with activations, over inputs and layers side by
side.

Most ranking models' dense parts are: MLPs, towers, DLRM's MLPs without feature products.
`loader.program.layers` runs them without torch.

    columns = an input | concatenated columns (cat) | activation(columns W^T + b) | a dropout, ignored
    scores  = the columns of one layer, or the one column of one, as [batch]

`recognize` follows the calls with sizes and types of its own; anything unlisted makes it another program.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.program.graph import FP32, Program, ProgramNode, TensorRef, Weight
from tableside.loader.program.operators import aten_name

Floats = NDArray[np.float32]
ACTIVATIONS = ("", "relu", "sigmoid", "tanh")
_END = (1 << 63) - 1  # how export writes "to the end"
_NOTHING = ("dropout", "detach", "clone", "contiguous")  # give what they are given


class Piece(NamedTuple):
    """All columns of the input `of`, or all outputs of the layer -1 - `of`; int64 each for `_layers.run`."""

    of: int
    width: int


@dataclass(frozen=True)
class Layer:
    """activation(x W^T + b) of its pieces side by side. weights [width, depth], bias [width], both fp32."""

    pieces: tuple[Piece, ...]
    weights: Floats
    bias: Floats
    activation: str = ""

    @property
    def width(self) -> int:
        return int(self.weights.shape[0])

    @property
    def depth(self) -> int:
        return int(self.weights.shape[1])


@dataclass(frozen=True)
class LayerColumns:
    """A value of the program: [batch, n], or [batch] where it is one column and is_flat."""

    pieces: tuple[Piece, ...]
    is_flat: bool = False

    @property
    def width(self) -> int:
        return sum(p.width for p in self.pieces)


class _AnotherProgram(Exception):
    """The program is something else than dense layers."""


def _expect(is_so: bool) -> None:
    if not is_so:
        raise _AnotherProgram


def recognize(program: Program) -> tuple[Layer, ...] | None:
    """Returns the layers, each after those it reads, the last with the scores; None: not dense layers alone.
    Weights are views of the program's bytes, in any order."""
    try:
        return _Recognizer(program).layers()
    except _AnotherProgram:
        return None


class _Recognizer:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._layers: list[Layer] = []
        self._values: dict[str, LayerColumns | Floats] = {
            w.name: _weight(w) for w in program.weights if w.dtype == FP32
        }
        for number, (name, i) in enumerate(zip(program.values, program.inputs, strict=True)):
            self._values[name] = LayerColumns((Piece(number, i.width),))

    def layers(self) -> tuple[Layer, ...]:
        for node in self._program.nodes:
            call = _CALLS.get(node.target.removeprefix("torch.ops.aten."))
            made = node.outputs[0] if len(node.outputs) == 1 else None
            if call is None or not isinstance(made, TensorRef):
                raise _AnotherProgram
            self._values[made.name] = call(self, node, dict(node.arguments))
        result = self.columns(self._program.result)
        _expect(bool(self._layers) and result.pieces == (Piece(-len(self._layers), result.width),))
        return tuple(self._layers)

    def columns(self, value: Any) -> LayerColumns:
        found = self._values.get(value.name) if isinstance(value, TensorRef) else None
        if not isinstance(found, LayerColumns):
            raise _AnotherProgram
        return found

    def weight(self, value: Any) -> Floats:
        found = self._values.get(value.name) if isinstance(value, TensorRef) else None
        if not isinstance(found, np.ndarray):
            raise _AnotherProgram
        return found

    # ---- calls ----

    def cat(self, _: ProgramNode, a: Mapping[str, Any]) -> LayerColumns:
        _expect(a.get("dim") in (1, -1) and a.keys() <= {"tensors", "dim"})
        parts = [self.columns(t) for t in a["tensors"]]
        _expect(not any(p.is_flat for p in parts))
        return LayerColumns(tuple(piece for p in parts for piece in p.pieces))

    def linear(self, _: ProgramNode, a: Mapping[str, Any]) -> LayerColumns:
        _expect(a.keys() <= {"input", "weight", "bias"})
        return self._layer(a["input"], self.weight(a["weight"]), a.get("bias"))

    def addmm(self, _: ProgramNode, a: Mapping[str, Any]) -> LayerColumns:
        _expect(a.keys() <= {"self", "mat1", "mat2"})
        weights = self.weight(a["mat2"])
        _expect(weights.ndim == 2)
        return self._layer(a["mat1"], weights.T, a["self"])

    def mm(self, _: ProgramNode, a: Mapping[str, Any]) -> LayerColumns:
        _expect(a.keys() <= {"self", "mat2"})
        weights = self.weight(a["mat2"])
        _expect(weights.ndim == 2)
        return self._layer(a["self"], weights.T, None)

    def _layer(self, given: Any, weights: Floats, bias: Any) -> LayerColumns:
        x = self.columns(given)
        _expect(
            not x.is_flat and weights.ndim == 2 and min(weights.shape) > 0 and weights.shape[1] == x.width
        )
        added = np.zeros(len(weights), np.float32) if bias is None else self.weight(bias)
        _expect(added.shape == (len(weights),))
        self._layers.append(Layer(x.pieces, weights, added))
        return LayerColumns((Piece(-len(self._layers), len(weights)),))

    def transposed(self, node: ProgramNode, a: Mapping[str, Any]) -> Floats:
        """Of a weight alone: `t`, and `permute` with [1, 0], which are the same."""
        weights = self.weight(a["self"])
        _expect(weights.ndim == 2 and (a == {"self": a["self"]} or (a.get("dims") == (1, 0) and len(a) == 2)))
        return weights.T

    def activation(self, node: ProgramNode, a: Mapping[str, Any]) -> LayerColumns:
        """Fuses an activation into its layer; no other call may read the layer's own output."""
        x = self.columns(a["self"])
        _expect(len(x.pieces) == 1 and a.keys() == {"self"})
        (piece,) = x.pieces
        _expect(piece.of < 0 and not any(piece in layer.pieces for layer in self._layers))
        number = -1 - piece.of
        layer = self._layers[number]
        _expect(layer.activation == "")
        self._layers[number] = replace(layer, activation=aten_name(node.target)[0])
        self._values = {
            k: v for k, v in self._values.items() if not (isinstance(v, LayerColumns) and piece in v.pieces)
        }
        return x

    def nothing(self, _: ProgramNode, a: Mapping[str, Any]) -> LayerColumns:
        _expect(a.keys() <= {"self", "input", "p", "train"})
        return self.columns(a.get("self", a.get("input")))

    def whole(self, _: ProgramNode, a: Mapping[str, Any]) -> LayerColumns:
        """Returns a slice of all rows, which `[:, 0]` begins with."""
        _expect({"dim": 0, "start": 0, **a} == {"self": a["self"], "dim": 0, "start": 0, "end": _END})
        return self.columns(a["self"])

    def flattened(self, node: ProgramNode, a: Mapping[str, Any]) -> LayerColumns:
        x = self.columns(a["self"])
        given = {name: value for name, value in a.items() if name != "self"}
        _expect(x.width == 1 and not x.is_flat and given in _FLATTENS[aten_name(node.target)[0]])
        return replace(x, is_flat=True)


# What makes one column of [batch, 1], by the arguments beside `self`.
_FLATTENS: Mapping[str, list[dict[str, Any]]] = {
    "squeeze": [{"dim": 1}, {"dim": -1}, {"dim": (1,)}, {"dim": (-1,)}],
    "select": [{"dim": d, "index": n} for d in (1, -1) for n in (0, -1)],
    "view": [{"size": (-1,)}],
    "reshape": [{"shape": (-1,)}],
    "flatten": [{}, {"start_dim": 0}, {"start_dim": 0, "end_dim": -1}, {"start_dim": 0, "end_dim": 1}],
}
_CALLS: Mapping[str, Callable[[_Recognizer, ProgramNode, Mapping[str, Any]], LayerColumns | Floats]] = {
    **dict.fromkeys(("cat.default", "concat.default", "concatenate.default"), _Recognizer.cat),
    "linear.default": _Recognizer.linear,
    "addmm.default": _Recognizer.addmm,
    "mm.default": _Recognizer.mm,
    **dict.fromkeys(("t.default", "permute.default"), _Recognizer.transposed),
    **dict.fromkeys((f"{name}.default" for name in ACTIVATIONS if name), _Recognizer.activation),
    **dict.fromkeys((f"{name}.default" for name in _NOTHING), _Recognizer.nothing),
    **dict.fromkeys(("squeeze.dim", "squeeze.dims", "select.int", "view.default"), _Recognizer.flattened),
    **dict.fromkeys(("reshape.default", "flatten.using_ints"), _Recognizer.flattened),
    "slice.Tensor": _Recognizer.whole,
}


def _weight(weight: Weight) -> Floats:
    """Returns a weight over its bytes, which `read_program` saw it lie in."""
    strides = [4 * n for n in weight.strides]
    return np.ndarray(weight.sizes, np.float32, weight.content, 4 * weight.offset, strides)
