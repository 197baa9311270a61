"""What dense layers in bf16 or fp16 may differ by from fp64's, for each score.

A number is rounded by at most u of itself, 2^-8 in bf16 and 2^-11 in fp16, or by 2^-25 where fp16 is
subnormal. Let e bound the difference of each input of a layer y = W x + b, and p = |W| (|x| + e) + |b| the
largest sum of its parts. Then y differs by at most

    |W| e  +  u p            weights and biases that were rounded once
    (d + 2) 2^-24 (1 + u) p  sums of d products and a bias in fp32, in any order
    2 u of the result        written once, or twice where a bias is added behind the product

A relu passes e on. A sigmoid passes a fourth of it on, and its result is rounded. Inputs are rounded once
before the first layer; in Triton's interpreter, which cuts where it writes bf16, that counts twice.
"""

import numpy as np
import tables
import torch

from tableside.quant import Precision

_UNIT = {Precision.BF16: 2.0**-8, Precision.FP16: 2.0**-11}
_LEAST = {Precision.BF16: 0.0, Precision.FP16: 2.0**-25}


def dense(
    layers: torch.nn.Sequential, inputs: np.ndarray, precision: Precision, roundings: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Scores fp64 [rows, n] of inputs [rows, width], and their bounds. roundings: of each input before the
    first layer."""
    u, least = _UNIT[precision], _LEAST[precision]
    x = inputs.astype(np.float64)
    e = roundings * (u * np.abs(x) + least)
    for layer in layers:
        if isinstance(layer, torch.nn.Linear):
            w, b = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
            parts = (np.abs(x) + e) @ np.abs(w).T + np.abs(b)
            flat = least * (np.abs(x) + e).sum(1, keepdims=True)  # of weights so small that fp16 loses them
            x, e = (
                x @ w.T + b,
                e @ np.abs(w).T + u * parts + flat + (len(w[0]) + 2) * 2.0**-24 * (1 + u) * parts,
            )
        elif isinstance(layer, torch.nn.Sigmoid):
            x, e = 1 / (1 + np.exp(-x)), e / 4
        else:
            assert isinstance(layer, torch.nn.ReLU), layer
            x = np.maximum(x, 0)
            continue
        e = e + 2 * (u * (np.abs(x) + e) + least)
    return x, e


def filled(precision: Precision) -> int:
    """How often an input counts as rounded that a device's kernel wrote."""
    return 2 if precision is Precision.BF16 and tables.DEVICE == "interpreter" else 1
