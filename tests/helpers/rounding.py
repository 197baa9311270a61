"""What a lookup must give, and by how much each of its values may differ from that.

A backend computes a value of a bag of n ids in fp32, from the parts `w q s` and `w b` of every id: weight w,
packed value q, scale s and bias b of its row (formats without scale and bias have one part, `w v`). It
multiplies and adds in any order, fused or not. Each part passes through at most k roundings on its way into
the result:

    2          products, w * s and then * q
    2 n        additions: as many as there are parts, and one more where sums are joined
    2          a mean: the reciprocal of n and the product with it
    3          the reference's own: the unpacked value (twice: it also tells q s from b) and the result are
               fp32; its sum is fp64

Each rounding changes a number by at most u = 2^-24 of itself. So the result differs from the reference's by
at most

    g * sum over the bag's ids of |w| (|q s| + |b|), divided by n for a mean, with k = 2 n + 7 and g = k u /
    (1 - k u)

(Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, lemma 3.1 and section 4.2). A value that
is then written as fp16 is rounded once more, by 2^-11 of itself, or 2^-25 where fp16 is subnormal; as bf16 by
2^-8 of itself, and by 2^-7 in Triton's interpreter, which cuts.

The bound is one of each value. Neither a longer bag nor a larger row beside it widens it.
"""

from dataclasses import dataclass

import numpy as np
import tables
from reference import REFERENCE

from tableside.quant import Pooling, Precision, Table

_FP32 = 2.0**-24


@dataclass(frozen=True)
class Expected:
    """vectors: fp32 [n, dim], the reference's. bounds: fp64 [n, dim]. precision: in which they are
    written."""

    vectors: np.ndarray
    bounds: np.ndarray
    precision: Precision

    def check(self, found: np.ndarray) -> None:
        """Fails where a value of [n, dim] lies further from the expected one than its bound, and names the
        worst one."""
        assert found.shape == self.vectors.shape, (
            f"vectors of shape {found.shape}; expected {self.vectors.shape}"
        )
        if not found.size:
            return
        difference = np.abs(found.astype(np.float64) - self.vectors)
        ratio = np.where(
            self.bounds > 0,
            difference / np.maximum(self.bounds, 1e-300),
            np.where(difference > 0, np.inf, 0.0),
        )
        worst = np.unravel_index(np.argmax(np.where(np.isnan(ratio), np.inf, ratio)), ratio.shape)
        assert ratio[worst] <= 1, (
            f"value {worst[1]} of vector {worst[0]} is {found[worst]!r}; expected {self.vectors[worst]!r} "
            "within "
            f"{self.bounds[worst]:.3g}, of which the difference is {ratio[worst]:.3g} times as much"
        )


def expect(
    table: Table,
    ids: np.ndarray,
    lengths: np.ndarray | None = None,
    *,
    pooling: Pooling = Pooling.NONE,
    weights: np.ndarray | None = None,
    precision: Precision = Precision.FP32,
) -> Expected:
    """What a lookup must give. ids: int64 [ids]; lengths: int32 [bags], None where it is not pooled;
    weights: fp32 [ids]."""
    reference = REFERENCE
    vectors = reference.lookup(table, ids, lengths, pooling=pooling, weights=weights)
    per_bag = np.ones(ids.size, np.int64) if lengths is None else lengths.astype(np.int64)
    sizes = np.zeros((per_bag.size, table.dim))
    np.add.at(sizes, np.repeat(np.arange(per_bag.size), per_bag), _sizes_of(table, ids, weights))
    roundings = (2 * per_bag + 7)[:, None] * _FP32
    bounds = (
        roundings
        / (1 - roundings)
        * sizes
        / (np.maximum(per_bag, 1)[:, None] if pooling is Pooling.MEAN else 1)
    )
    return Expected(vectors, bounds + _written(np.abs(vectors) + bounds, precision), precision)


def _sizes_of(table: Table, ids: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """The size of each id's parts, |w| (|q s| + |b|), fp64 [ids, dim]."""
    values = REFERENCE.lookup(table, ids, pooling=Pooling.NONE).astype(np.float64)
    bias = np.zeros((ids.size, 1))
    if table.row_format.has_bias:
        bias = table.packed[ids, 2:4].copy().view(np.float16).astype(np.float64)
    sizes: np.ndarray = np.abs(values - bias) + np.abs(bias)
    return sizes if weights is None else sizes * np.abs(weights.astype(np.float64))[:, None]


def _written(size: np.ndarray, precision: Precision) -> np.ndarray | float:
    """What rounding values of this size to their precision may change, fp64."""
    if precision is Precision.FP16:
        return np.maximum(size * 2.0**-11, 2.0**-25)
    if precision is Precision.BF16:
        return size * (2.0**-7 if tables.DEVICE == "interpreter" else 2.0**-8)
    return 0.0
