"""Samples of uses: a row with all its uses or with none, as its hash says, in memory of a fixed size."""

import numpy as np
import pytest

from tableside.quant.contract import Place
from tableside.quant.cpu.uses import Uses, changes_of, read_uses, sample_uses
from tableside.quant.rows.ids import MIX

SALTS = np.array([7, 1 << 63, 7], np.uint64)  # the first and the last feature read one table


def keys(ids: np.ndarray, features: np.ndarray) -> np.ndarray:
    salted = [(int(i) + int(SALTS[f])) % 2**64 for i, f in zip(ids, features, strict=True)]
    return np.array([(x ^ x >> 32) * MIX % 2**64 for x in salted], np.uint64)


def add(sample: np.ndarray, ids: list[np.ndarray], half: bool = False, ms: int = 0) -> None:
    """Adds a request with ids [n] of each feature."""
    ends = np.cumsum([0, *(8 * of.size for of in ids)])
    places = [Place(n, int(ends[n]), of.size, -1, 1, of.size, -1, 0) for n, of in enumerate(ids)]
    sample_uses(sample, np.array(places, np.int64), np.concatenate(ids).tobytes(), SALTS, half, ms)


def read(sample: np.ndarray) -> Uses:
    found = read_uses(sample.tobytes(), SALTS.size)
    assert found is not None
    return found


def test_all_is_kept_where_it_fits() -> None:
    """In order, with the time, and counted by half."""
    rng = np.random.default_rng(4)
    sample = np.zeros(1 << 14, np.uint8)
    first, second = ([rng.integers(-(2**62), 2**62, n) for n in sizes] for sizes in ((3, 0, 5), (4, 2, 0)))
    add(sample, first)
    add(sample, second, True, 9)
    found = read(sample)
    assert (found.bits, found.requests) == (0, 2) and found.totals.tolist() == [[3, 4], [0, 2], [5, 0]]
    assert found.uses["id"].tolist() == np.concatenate([*first, *second]).tolist()
    assert found.uses["feature"].tolist() == [0] * 3 + [2] * 5 + [0] * 4 + [1] * 2
    assert found.uses["ms"].tolist() == [0] * 8 + [9] * 6


@pytest.mark.parametrize("bytes_", [1024, 5000])
def test_a_row_is_there_with_all_its_uses_or_with_none(bytes_: int) -> None:
    """As the hash says; where it is full the share halves, and what is left stays in its order."""
    rng, sample = np.random.default_rng(5), np.zeros(bytes_, np.uint8)
    requests = [[rng.integers(0, 300, n) for n in rng.integers(0, 40, 3)] for _ in range(60)]
    for n, ids in enumerate(requests):
        add(sample, ids, ms=n)
    found = read(sample)
    ids = np.concatenate([np.concatenate(of) for of in requests])
    features = np.concatenate([np.repeat(np.arange(3), [one.size for one in of]) for of in requests])
    sampled = keys(ids, features) < np.uint64(1 << (64 - found.bits))
    assert 0 < found.bits < 10 and changes_of(sample.tobytes()) == 2 * found.bits
    assert found.uses["id"].tolist() == ids[sampled].tolist()
    assert found.uses["feature"].tolist() == features[sampled].tolist()
    assert (np.diff(found.uses["ms"].astype(int)) >= 0).all() and found.totals.sum() == ids.size
    fewer = keys(ids, features) < np.uint64(1 << (63 - found.bits))
    assert found.thinned(found.bits + 1, SALTS)["id"].tolist() == ids[fewer].tolist()
    assert found.thinned(found.bits, SALTS).size == found.uses.size


def test_what_is_no_request_of_the_version_is_left_out() -> None:
    """Places outside the inputs, and of features that there are not, are read by nobody."""
    sample = np.zeros(4096, np.uint8)
    bad = [(3, 0, 1), (-1, 0, 1), (0, 8, 1), (0, -8, 1), (0, 0, 2), (0, 0, -1), (0, 1 << 62, 1 << 62)]
    places = np.array([Place(k, at, n, -1, 1, n, -1, 0) for k, at, n in [*bad, (1, 0, 1)]], np.int64)
    sample_uses(sample, places, np.array([5]).tobytes(), SALTS, False, 1)
    found = read(sample)
    assert found.uses.tolist() == [(5, 1, 1)] and found.totals.sum() == 1


def test_what_is_no_sample() -> None:
    """It is neither written to nor read."""
    places = np.zeros((0, len(Place._fields)), np.int64)
    small, odd, beyond = np.zeros(80, np.uint8), np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    odd.view(np.int64)[0] = 1  # uses move
    beyond.view(np.int64)[2] = 1000
    for sample in (small, beyond, np.zeros(4096, np.uint8)[1:]):
        with pytest.raises(ValueError, match="do not belong together"):
            sample_uses(sample, places, b"", SALTS, False, 0)
    for sample in (small[:20], odd, beyond):
        assert read_uses(sample.tobytes(), 3) is None
