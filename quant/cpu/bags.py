"""Bags as lookups take them: int32 lengths, and the places of features whose bags lie one after another
(TorchRec's KeyedJaggedTensor). See `_native.pyi`. No function copies or reads ids."""

from tableside.quant.cpu._native import (
    device_places,
    feature_places,
    lengths_of,
    parts_of,
    tensor_parts,
    tensor_places,
)

__all__ = [
    "MOST_IDS",
    "device_places",
    "feature_places",
    "lengths_of",
    "parts_of",
    "tensor_parts",
    "tensor_places",
]

MOST_IDS = 2**31 - 1  # that bags can have together: lengths are int32
