"""The kernel that runs programs of dense layers alone: its scores, and the sizes that it refuses."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from layer_programs import RECOGNIZED, Module, deep, exact, found_in, inputs_of, mlp, program
from scorers import Ctr, exported
from torch import Tensor

from tableside.loader.program import _layers, read_program
from tableside.loader.program.layers import PackedLayers
from tableside.loader.program.recognize import Floats, Layer, Piece
from tableside.quant.contract import MatrixPlace

# Of torch, where it takes operators apart.
pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")


@pytest.fixture(params=_layers.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor runs."""
    _layers.use(request.param)
    yield request.param
    _layers.use(_layers.isas()[0])


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


# ---- what the kernel computes ----


@pytest.mark.drawn(4)
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


@pytest.mark.drawn(1)
def test_a_rows_scores_do_not_depend_on_the_rows_beside_it(isa: str) -> None:
    """To the last bit, and whatever the number of threads: batches may be cut and joined anywhere."""
    found, inputs = found_in(program(deep)), inputs_of(300)
    together = run(PackedLayers(found), inputs)
    assert np.array_equal(run(PackedLayers(found, threads=3), inputs), together)
    for start, end in [(0, 1), (5, 12), (60, 70), (64, 128), (299, 300)]:
        alone = run(PackedLayers(found), [np.ascontiguousarray(values[start:end]) for values in inputs])
        assert np.array_equal(alone, together[start:end])


@pytest.mark.drawn(1)
def test_fp16_inputs_are_read_as_they_are(isa: str) -> None:
    """Vectors of features whose output is fp16 give what their fp32 values give."""
    found, (user, context) = found_in(program(mlp)), inputs_of(9)
    half = user.astype(np.float16)
    assert np.array_equal(
        run(PackedLayers(found), [half, context]),
        run(PackedLayers(found), [half.astype(np.float32), context]),
    )


@pytest.mark.drawn(1)
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


@pytest.mark.drawn(1)
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


@pytest.mark.drawn(1)
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
    """On each thread."""
    layers = found_in(read_program(exported(Ctr(8, 4, 3), user=8, clicked=4, context=3)))
    packed = PackedLayers(layers)
    assert packed.cost(2).work == 2 * packed.cost(1).work >= 2 * (15 * 16 + 16)
    between = packed.cost(64).bytes - 4 * 64
    assert packed.cost(6400).bytes == between + 4 * 6400
    assert PackedLayers(layers, threads=3).cost(6400).bytes == 3 * between + 4 * 6400
