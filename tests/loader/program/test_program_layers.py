"""Programs that are dense layers alone: which are recognized as such."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from layer_programs import RECOGNIZED, Module, deep, exact, found_in, inputs_of, program
from torch import Tensor, nn

from tableside.loader.program import layers as layers_module
from tableside.loader.program import read_program, write_program
from tableside.loader.program.layers import runnable_layers
from tableside.loader.program.recognize import recognize

# Of torch, where it takes operators apart.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")


@pytest.mark.drawn(3)
@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("function", RECOGNIZED)
def test_dense_layers_are_recognized(
    function: Callable[[Module, Tensor, Tensor], Tensor], decomposed: bool
) -> None:
    """As they are exported, with their operators taken apart, and as they are published; they give torch's
    scores."""
    p = program(function, decomposed)
    assert [layer.width for layer in found_in(read_program(write_program(p)))] == [
        layer.width for layer in found_in(p)
    ]
    inputs = inputs_of(7)
    with torch.inference_mode():
        expected = Module(function).eval()(*map(torch.from_numpy, inputs)).numpy().reshape(7, -1)
    scores, off = exact(found_in(p), inputs)
    assert (np.abs(scores - expected) <= off).all()  # the layers are the module's


def early(m: Module, user: Tensor, context: Tensor) -> Tensor:
    """A layer reads what another gives before its activation."""
    x = m.square(user)
    before = m.user(x)
    return m.thirteen(torch.cat([before, torch.relu(x)], 1))


def late(m: Module, user: Tensor, context: Tensor) -> Tensor:
    """The same, with the activation behind another name and called first."""
    x = m.square(user)
    behind = torch.relu(torch.cat([x], 1))
    return m.thirteen(torch.cat([m.user(x), behind], 1))


def residual(m: Module, user: Tensor, context: Tensor) -> Tensor:
    return m.one(m.square(user) + user)


def product(m: Module, user: Tensor, context: Tensor) -> Tensor:
    return (user * m.square(user)).sum(1)


def other_activation(m: Module, user: Tensor, context: Tensor) -> Tensor:
    return m.one(nn.functional.gelu(m.square(user)))


def of_an_input(m: Module, user: Tensor, context: Tensor) -> Tensor:
    """An activation that follows no layer."""
    return m.one(torch.relu(user))


def twice(m: Module, user: Tensor, context: Tensor) -> Tensor:
    """Two activations of one layer."""
    return m.one(torch.tanh(torch.relu(m.square(user))))


def side_by_side(m: Module, user: Tensor, context: Tensor) -> Tensor:
    """An activation of two layers at once."""
    return m.thirteen(torch.relu(torch.cat([m.square(user), m.user(user)], 1)))


def doubles(m: Module, user: Tensor, context: Tensor) -> Tensor:
    return (user.double() @ m.wide).float().sum(1)


def batch_first(m: Module, user: Tensor, context: Tensor) -> Tensor:
    """Rows put behind rows."""
    return torch.cat([m.one(user), m.one(user)], 0)[: user.shape[0]].squeeze(1)


def an_input(m: Module, user: Tensor, context: Tensor) -> Tensor:
    """The scores are the first input: there is no layer."""
    return user.contiguous()


OTHERS = [
    an_input,
    early,
    late,
    residual,
    product,
    other_activation,
    of_an_input,
    twice,
    side_by_side,
    doubles,
    batch_first,
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("function", OTHERS)
def test_other_programs_are_not(function: Callable[[Module, Tensor, Tensor], Tensor]) -> None:
    """They are left to torch, and nothing of them is taken for what it is not."""
    for decomposed in (False, True):
        assert recognize(program(function, decomposed)) is None


def test_layers_that_take_much_memory_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that stands in many layers takes its bytes once in a file, and once a layer here."""
    p = program(deep)
    assert runnable_layers(p) is not None
    monkeypatch.setattr(layers_module, "LARGEST_PACKED_BYTES", 2000)
    assert runnable_layers(p) is None
    monkeypatch.undo()
    monkeypatch.setattr(layers_module, "LARGEST_ROW_BYTES", 200)
    assert runnable_layers(p) is None
