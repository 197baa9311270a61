"""Bags as lookups take them: int32 lengths, and the places of features whose bags lie one after another
(TorchRec's KeyedJaggedTensor). See `_native.pyi`. No function copies or reads ids."""

from tableside.quant.cpu._native import device_places as device_places
from tableside.quant.cpu._native import feature_places as feature_places
from tableside.quant.cpu._native import lengths_of as lengths_of
from tableside.quant.cpu._native import parts_of as parts_of
from tableside.quant.cpu._native import tensor_parts as tensor_parts
from tableside.quant.cpu._native import tensor_places as tensor_places

MOST_IDS = 2**31 - 1  # that bags can have together: lengths are int32
