"""Programs that are dense layers alone: which are recognized as such, and the kernel that runs them."""

import io
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from scorers import Ctr, exported
from torch import Tensor, nn
from torch.export import Dim, export, save

from tableside.loader.program import Program, _layers, read_program, write_program
from tableside.loader.program import layers as layers_module
from tableside.loader.program.layers import PackedLayers, runnable_layers
from tableside.loader.program.recognize import Floats, Layer, Piece, recognize
from tableside.quant.contract import MatrixPlace

# Of torch, where it takes operators apart.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")

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


@pytest.fixture(params=_layers.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor runs."""
    _layers.use(request.param)
    yield request.param
    _layers.use(_layers.isas()[0])


def inputs_of(rows: int, seed: int = 0) -> list[Floats]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((rows, n), dtype=np.float32) for n in (USER, CONTEXT)]


def source(at: int, width: int, row_bytes: int = 0, is_half: bool = False, is_output: bool = False) -> bytes:
    """Where an input lies, as `MatrixPlace`; its rows lie one after another."""
    return np.array(MatrixPlace(is_output, at, row_bytes or 4 * width, is_half, width), np.int64).tobytes()


def run(packed: PackedLayers, inputs: list[Floats]) -> Floats:
    """Scores [rows, n] of inputs that lie one after another, at an odd byte."""
    rows, at, sources = len(inputs[0]), 1, []
    for values in inputs:
        sources.append(
            source(at, values.shape[1], values.itemsize * values.shape[1], values.dtype == np.float16)
        )
        at += values.nbytes
    scores = np.full((rows, packed.width), np.nan, np.float32)
    given = b"?" + b"".join(v.tobytes() for v in inputs)
    assert packed.run(b"".join(sources), given, scores, rows, 0) == -1
    return scores


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


# ---- which programs ----


@pytest.mark.drawn(6)
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


@pytest.mark.drawn(2)
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


# ---- what the kernel computes ----


@pytest.mark.drawn(19)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 13, 63, 64, 65, 130])
@pytest.mark.parametrize("function", RECOGNIZED)
def test_scores_are_within_the_bound_of_any_fp32_sum(
    function: Callable[[Module, Tensor, Tensor], Tensor], rows: int, isa: str
) -> None:
    """For every number of rows that a block, a tile or a rest of them may have."""
    found, inputs = found_in(program(function)), inputs_of(rows)
    scores, off = exact(found, inputs)
    assert (np.abs(run(PackedLayers(found), inputs) - scores) <= off).all()


@pytest.mark.drawn(32)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 31, 32, 33, 48, 49, 100])
@pytest.mark.parametrize("depth", [1, 3, 64])
def test_layers_of_any_width_and_depth(width: int, depth: int, isa: str) -> None:
    """Panels that are full, half and partly empty; weights in any order of their values."""
    rng = np.random.default_rng(width * depth)
    weights = rng.standard_normal((depth, width), dtype=np.float32).T
    layer = Layer((Piece(0, depth),), weights, rng.standard_normal(width, dtype=np.float32), "relu")
    given = [rng.standard_normal((11, depth), dtype=np.float32)]
    scores, off = exact((layer,), given)
    assert (np.abs(run(PackedLayers([layer]), given) - scores) <= off).all()


def test_a_rows_scores_do_not_depend_on_the_rows_beside_it(isa: str) -> None:
    """To the last bit, and whatever the number of threads: batches may be cut and joined anywhere."""
    found, inputs = found_in(program(deep)), inputs_of(300)
    together = run(PackedLayers(found), inputs)
    assert np.array_equal(run(PackedLayers(found, threads=3), inputs), together)
    for start, end in [(0, 1), (5, 12), (60, 70), (64, 128), (299, 300)]:
        alone = run(PackedLayers(found), [np.ascontiguousarray(values[start:end]) for values in inputs])
        assert np.array_equal(alone, together[start:end])


def test_fp16_inputs_are_read_as_they_are(isa: str) -> None:
    """Vectors of features whose output is fp16 give what their fp32 values give."""
    found, (user, context) = found_in(program(mlp)), inputs_of(9)
    half = user.astype(np.float16)
    assert np.array_equal(
        run(PackedLayers(found), [half, context]),
        run(PackedLayers(found), [half.astype(np.float32), context]),
    )


def test_the_first_row_that_is_not_finite_is_found(isa: str) -> None:
    """A number that is none stays none through every activation, and no other row is changed by it."""
    packed, inputs = PackedLayers(found_in(program(deep))), inputs_of(200)
    expected = run(packed, inputs)
    inputs[0][150, 3], inputs[0][90, 0] = np.nan, np.inf
    scores = np.zeros((200, packed.width), np.float32)
    sources = source(0, 8) + source(inputs[0].nbytes, 3)
    assert packed.run(sources, b"".join(v.tobytes() for v in inputs), scores, 200, 0) == 90
    assert np.flatnonzero(~np.isfinite(scores).all(1)).tolist() == [90, 150]
    assert np.array_equal(np.delete(scores, [90, 150], 0), np.delete(expected, [90, 150], 0))


def test_scores_go_beside_vectors_in_one_buffer(isa: str) -> None:
    """Vectors lie in the buffer that scores are written to, behind them and at any byte; nothing else is
    written."""
    packed, inputs = PackedLayers(found_in(program(mlp))), inputs_of(5)
    outputs = np.full(2 + inputs[0].nbytes + 20 + 1, 7, np.uint8)
    outputs[2 : 2 + inputs[0].nbytes] = inputs[0].view(np.uint8).ravel()
    sources = source(2, 8, is_output=True) + source(0, 3)
    assert packed.run(sources, inputs[1].tobytes(), outputs, 5, 2 + inputs[0].nbytes) == -1
    assert np.array_equal(outputs[-21:-1].copy().view(np.float32), run(packed, inputs)[:, 0])
    assert outputs[:2].tolist() == [7, 7] and outputs[-1] == 7
    assert np.array_equal(outputs[2 : 2 + inputs[0].nbytes], inputs[0].view(np.uint8).ravel())


def test_rows_may_lie_apart(isa: str) -> None:
    """Vectors of several features side by side, as a kjt's are: each feature's rows begin a whole row of
    all of them apart."""
    packed, (user, context) = PackedLayers(found_in(program(mlp))), inputs_of(70)
    between = np.hstack([np.full((70, 1), np.nan, np.float32), user, np.full((70, 2), np.nan, np.float32)])
    scores = np.zeros((70, 1), np.float32)
    sources = source(4, 8, 4 * 11) + source(between.nbytes, 3)
    assert packed.run(sources, between.tobytes() + context.tobytes(), scores, 70, 0) == -1
    assert np.array_equal(scores, run(packed, [user, context]))


# ---- what is refused ----

FAR = 1 << 62


def call(**changes: object) -> int:
    """One layer of depth 2 and width 1 over one row, with changes of single arguments."""
    given: dict[str, object] = {
        "layers": (2, 1, 0, 0, 1),
        "pieces": (0, 2),
        "sources": (0, 0, 8, 0, 2),
        "weights": np.zeros(48, np.float32),
        "inputs": bytes(8),
        "outputs": bytearray(4),
        "rows": 1,
        "scores_at": 0,
        "threads": 1,
    }
    given.update(changes)
    return _layers.run(
        *(np.array(v, np.int64).tobytes() if isinstance(v, tuple) else v for v in given.values())
    )


def test_the_call_that_others_are_changed_from_is_sound() -> None:
    assert call() == -1


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ()},
        *({"layers": (depth, 1, 0, 0, 1)} for depth in (0, 1, 3, -2, FAR)),
        *({"layers": (2, width, 0, 0, 1)} for width in (0, 17, -1, FAR)),
        *({"layers": (2, 1, at, 0, 1)} for at in (1, -1, FAR)),
        *({"layers": (2, 1, 0, activation, 1)} for activation in (4, -1)),
        *({"layers": (2, 1, 0, 0, pieces)} for pieces in (0, 2, -1, FAR)),
        *(
            {"pieces": piece}
            for piece in [(), (1, 2), (-1, 2), (-FAR, 2), (FAR, 2), (0, 1), (0, 0), (0, -2), (0, FAR)]
        ),
        *(
            {"sources": source}
            for source in [
                (),
                (1, 0, 8, 0, 2),
                (0, 1, 8, 0, 2),
                (0, -1, 8, 0, 2),
                (0, FAR, 8, 0, 2),
                (0, 0, -8, 0, 2),
                (0, 0, 8, 0, 1),
            ]
        ),
        *(
            {"inputs": bytes(8 + 12), "rows": 2, "outputs": bytearray(8), "sources": (0, 0, n, 0, 2)}
            for n in (13, -1, FAR, 2 * FAR - 1)
        ),
        {"inputs": bytes(7)},
        {"outputs": bytearray(3)},
        {"weights": np.zeros(47, np.float32)},
        *({"rows": rows} for rows in (-1, 2, FAR)),
        *({"scores_at": at} for at in (-1, 1, FAR)),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, object]) -> None:
    """Before anything is read or written: the kernel trusts no table of its own caller."""
    with pytest.raises(ValueError, match=r"^layers: "):
        call(**changes)


def test_a_layer_reads_layers_before_it_alone() -> None:
    two = {"weights": np.zeros(96, np.float32), "layers": (2, 1, 0, 0, 1, 1, 1, 48, 0, 1)}
    assert call(**two, pieces=(0, 2, -1, 1)) == -1
    for of in (-2, -3):
        with pytest.raises(ValueError, match="no layer before"):
            call(**two, pieces=(0, 2, of, 1))
    with pytest.raises(ValueError, match="no layer before"):
        call(**two, pieces=(0, 2, -1, 2))


def test_outputs_that_cannot_be_written_are_refused() -> None:
    with pytest.raises(BufferError):
        call(outputs=bytes(4))


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="'mmx': this processor does not run it"):
        _layers.use("mmx")


def test_what_a_call_takes_grows_with_its_rows_up_to_a_tile() -> None:
    packed = PackedLayers(found_in(read_program(exported(Ctr(8, 4, 3), user=8, clicked=4, context=3))))
    assert packed.cost(2).work == 2 * packed.cost(1).work >= 2 * (15 * 16 + 16)
    between = packed.cost(64).bytes - 4 * 64
    assert packed.cost(6400).bytes == between + 4 * 6400
