"""Floats of answers as JSON: what is read back is the same float, and no text of it is shorter."""

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from tableside.quant import Place
from tableside.serving.http.v2 import _reader

pytestmark = pytest.mark.quick


@pytest.fixture(params=[0, 1, 2], ids=["any", "avx2", "avx512"])
def vectors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Floats are written with each of the instruction sets that are there."""
    if _reader.use_vectors(request.param) != request.param:
        _reader.use_vectors(2)
        pytest.skip("this processor has none")
    yield
    _reader.use_vectors(2)


def texts(values: NDArray[np.float32]) -> list[str]:
    written = _reader.floats(values, False).decode()
    assert written[0] == "[" and written[-1] == "]"
    return written[1:-1].split(",")


def bits(numbers: NDArray[np.integer]) -> NDArray[np.float32]:
    return numbers.astype(np.uint32).view(np.float32)


def drawn() -> NDArray[np.float32]:
    """Floats of all exponents, those of few digits, and those around powers of two and of ten."""
    random = np.random.default_rng(5)
    around = np.arange(-3, 4)
    twos = (np.arange(1, 255)[:, None] << 23) + around
    tens = np.array([f"1e{k}" for k in range(-44, 39)], np.float32).view(np.uint32)[:, None] + around
    some = [
        bits(random.integers(0, 2**32, 100_000)),
        bits(twos.ravel()),
        bits(tens.ravel()),
        np.arange(-300, 300, dtype=np.float32) / np.float32(8),
        random.integers(-9999, 9999, 2000).astype(np.float32) / np.float32(1000),
        bits(np.concatenate([np.arange(300), np.arange(300) + (1 << 31), random.integers(0, 1 << 23, 3000)])),
        np.arange(2**24 - 40, 2**24 + 4000, dtype=np.float32) * np.float32(3),
    ]
    found = np.concatenate(some)
    return found[np.isfinite(found)]


def test_each_float_is_read_back_as_it_was(vectors: None) -> None:
    values = drawn()
    read = np.array(list(map(float, texts(values)))).astype(np.float32)
    assert (read.view(np.uint32) == values.view(np.uint32)).all()
    again = np.array(orjson.loads(_reader.floats(values, False))).astype(np.float32)
    assert (again.view(np.uint32) == values.view(np.uint32)).all()


def digits_of(text: str) -> int:
    return len(text.split("e")[0].replace(".", "").lstrip("-0").rstrip("0")) or 1


def test_no_text_is_longer_than_it_must_be(vectors: None) -> None:
    """A digit more is there only where the shortest text lies in the middle between two floats, or of
    powers of two."""
    values = drawn()
    values = values[(np.abs(values) >= np.finfo(np.float32).tiny) | (values == 0)]
    for value, text in zip(values, texts(values), strict=True):
        shortest = np.format_float_scientific(value, unique=True)
        found, least = digits_of(text), digits_of(shortest)
        if found == least:
            continue
        assert found > least
        exact = Fraction(float(value))
        step = abs(Fraction(float(np.nextafter(value, np.float32(np.inf) * value))) - exact)
        distance = abs(Fraction(shortest) - exact)
        unit = Fraction(10) ** int(shortest.split("e")[1]) / 10**8
        assert distance > step / 2 - 2 * unit / 10**6 or value.view(np.uint32) & 0x7FFFFF == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (1.0, "1.0"),
        (-12.5, "-12.5"),
        (0.1, "0.1"),
        (123456.78, "123456.78"),
        (16777216.0, "16777216.0"),
        (99999999.0, "1.0e+08"),
        (0.000001, "0.000001"),
        (0.00000012, "1.2e-07"),
        (3.4028235e38, "3.4028235e+38"),
        (-1.1754945e-38, "-1.1754945e-38"),
        (1e-39, "1.00000022e-39"),
        (float("nan"), "null"),
        (float("-inf"), "null"),
    ],
)
def test_how_numbers_are_spelled(vectors: None, value: float, text: str) -> None:
    for before in range(9):  # each place of those that are found at once
        values = np.full(before + 1, 7, np.float32)
        values[-1] = value
        assert texts(values) == ["7.0"] * before + [text]


def test_all_fp16_numbers(vectors: None) -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    assert _reader.floats(halves, True) == _reader.floats(halves.astype(np.float32), False)


def names_of(features: list[tuple[str, bool, bool, int]]) -> object:
    """features: names, whether pooled, whether fp16, and dims."""
    names = [name.encode() for name, *_ in features]
    labels = [orjson.dumps(name) for name, *_ in features]
    rows = [[pooled, half, dim, dim * (2 if half else 4), dim, 0] for _, pooled, half, dim in features]
    said = [*names, *labels, b"", b""]
    words = [len(features), 0, 0, 0, 0, 0, 0, 1 << 40, *np.array(rows).ravel(), *map(len, said)]
    return _reader.names(np.array(words, np.int64).tobytes(), b"".join(said))


def test_vectors_of_all_kinds() -> None:
    features = [("a", True, False, 3), ('quo"ted', False, True, 5), ("none", True, False, 17)]
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    quoted = np.arange(20, dtype=np.float16).reshape(4, 5)
    outputs = b"".join([b"\0" * 2, quoted.tobytes(), a.tobytes()])

    def place(kind: int, ids: int, bags: int, out_at: int) -> Place:
        return Place(kind, 0, ids, -1, 1, bags, -1, out_at, 0, -1)

    places = np.array([place(1, 4, 9, 2), place(0, 9, 2, 42), place(2, 0, 0, 66)], np.int64)
    written = _reader.vectors(names_of(features), places, outputs)
    assert orjson.loads(written) == {'quo"ted': quoted.tolist(), "a": a.tolist(), "none": []}
    assert list(orjson.loads(written)) == ['quo"ted', "a", "none"]
    assert _reader.vectors(names_of(features), b"", outputs) == b"{}"
    for wrong in (
        place(1, 4, 9, 27),
        place(1, -1, 9, 2),
        place(3, 0, 0, 0),
        place(-1, 0, 0, 0),
        place(0, 0, 1, -4),
    ):
        with pytest.raises(ValueError, match="the vectors of place 0 do not lie in the outputs"):
            _reader.vectors(names_of(features), np.array([wrong], np.int64), outputs)
