"""Programs that are dense layers alone, inputs for them, and what scores must be."""

import io
from collections.abc import Callable

import numpy as np
import torch
from scorers import exported
from torch import Tensor, nn
from torch.export import Dim, export, save

from tableside.loader.program import Program, read_program
from tableside.loader.program.recognize import Floats, Layer, recognize

USER, CONTEXT = 8, 3


class Module(nn.Module):
    """A dense part of one function, over `user` [batch, 8] and `context` [batch, 3]."""

    def __init__(self, function: Callable[["Module", Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.second = nn.Linear(USER + CONTEXT, 40), nn.Linear(40, 1)
        self.user, self.context = nn.Linear(USER, 5), nn.Linear(CONTEXT, 17, bias=False)
        self.both, self.dropout = nn.Linear(22, 3), nn.Dropout()
        self.square, self.one, self.thirteen = nn.Linear(USER, USER), nn.Linear(USER, 1), nn.Linear(13, 1)
        self.register_buffer("wide", torch.randn(USER, 4, dtype=torch.float64))

    def forward(self, user: Tensor, context: Tensor) -> Tensor:
        return self.function(self, user, context)


def mlp(m: Module, user: Tensor, context: Tensor) -> Tensor:
    x = m.dropout(torch.relu(m.first(torch.cat([user, context], 1))))
    return torch.sigmoid(m.second(x)).squeeze(1)


def towers(m: Module, user: Tensor, context: Tensor) -> Tensor:
    return m.both(torch.cat([torch.tanh(m.user(user)), m.context(context)], -1))


def logits(m: Module, user: Tensor, context: Tensor) -> Tensor:
    return m.second(m.first(torch.cat([context, user][::-1], 1)))


def flattened(m: Module, user: Tensor, context: Tensor) -> Tensor:
    return torch.sigmoid(m.one(torch.relu(m.square(torch.relu(m.square(user)))))[:, 0])


def deep(m: Module, user: Tensor, context: Tensor) -> Tensor:
    """A layer that several later ones read."""
    x = torch.relu(m.square(user))
    return m.first(torch.cat([torch.relu(m.square(x)), context], 1))


RECOGNIZED = [mlp, towers, logits, flattened, deep]


def program(function: Callable[[Module, Tensor, Tensor], Tensor], decomposed: bool = False) -> Program:
    if not decomposed:
        return read_program(exported(Module(function), user=USER, context=CONTEXT))
    batch, out = Dim("batch"), io.BytesIO()
    shapes = {name: {0: batch} for name in ("user", "context")}
    found = export(
        Module(function).eval(), (torch.zeros(2, USER), torch.zeros(2, CONTEXT)), dynamic_shapes=shapes
    )
    save(found.run_decompositions(), out)
    return read_program(out.getvalue())


def found_in(p: Program) -> tuple[Layer, ...]:
    found = recognize(p)
    assert found is not None
    return found


def inputs_of(rows: int, seed: int = 0) -> list[Floats]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((rows, n), dtype=np.float32) for n in (USER, CONTEXT)]


def exact(layers: tuple[Layer, ...], inputs: list[Floats]) -> tuple[np.ndarray, np.ndarray]:
    """Scores [rows, n] in fp64, and how far those of an fp32 sum in any order may be from them.

    A sum of d products and a bias is off by at most g = (d + 1) u / (1 - (d + 1) u) times the sum of absolute
    values, u = 2^-24 (Higham, 2002, section 3.1); what its inputs are off by is multiplied by the absolute
    weights. relu and tanh do not add to that, sigmoid divides it by 4; tanh and sigmoid round once more.
    """
    outputs: list[tuple[np.ndarray, np.ndarray]] = []
    u = 2.0**-24
    for layer in layers:
        parts = [
            (inputs[p.of].astype(np.float64), np.zeros_like(inputs[p.of], np.float64))
            if p.of >= 0
            else outputs[-1 - p.of]
            for p in layer.pieces
        ]
        x, error = (np.concatenate(side, 1) for side in zip(*parts, strict=True))
        w, b = layer.weights.astype(np.float64), layer.bias.astype(np.float64)
        g = (layer.depth + 1) * u / (1 - (layer.depth + 1) * u)
        y = x @ w.T + b
        off = g * ((np.abs(x) + error) @ np.abs(w).T + np.abs(b)) + error @ np.abs(w).T
        if layer.activation == "relu":
            y = np.maximum(y, 0)
        elif layer.activation == "tanh":
            y = np.tanh(y)
            off = off + u
        elif layer.activation == "sigmoid":
            y = 1 / (1 + np.exp(-y))
            off = off / 4 + u
        outputs.append((y, off))
    return outputs[-1]
