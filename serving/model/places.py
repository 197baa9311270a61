"""Places of a request's dense tensors in its input buffer, and of vectors, scores and masks in its output."""

from collections.abc import Container, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.model.model import SCORE

Buffer = NDArray[np.uint8]
_DTYPES: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"), "FP16": np.dtype("<f2"), "INT64": np.dtype("<i8"), "BOOL": np.dtype(np.bool_)
}  # fmt: skip
# outputs of requests whose features come together
KJT, SEQUENCES, OFFSETS = ("kjt", "kjt.sequences", "kjt.offsets")
_FOUND = ".found"


class DenseInput(NamedTuple):
    """A scorer's dense tensor: fp32 [rows, width] at byte `at` of the input buffer."""

    name: str
    at: int
    rows: int
    width: int


class Output(NamedTuple):
    """A feature's vectors [bags or ids, dim] at byte `at` of the output buffer, or scores [bags] or [bags,
    n]. half: fp16, else fp32. row_bytes: vector stride; None: dense. is_offsets: int64 offsets of a kjt's
    sequences. is_mask: bytes [ids], 1 if the table of `masked_feature` has the id."""

    feature: str
    at: int
    bytes: int
    shape: tuple[int, ...]
    half: bool
    row_bytes: int | None = None
    is_offsets: bool = False
    is_mask: bool = False

    @property
    def datatype(self) -> str:
        """The protocol's name of its type."""
        return "BOOL" if self.is_mask else "INT64" if self.is_offsets else "FP16" if self.half else "FP32"

    @property
    def json_bytes(self) -> int:
        """Bytes of fp32 values with as much JSON; a mask's `false,` counts double."""
        return 2 * self.bytes if self.is_mask else self.bytes

    def view(self, buffer: Buffer) -> NDArray[Any]:
        dtype = _DTYPES[self.datatype]
        if self.row_bytes is not None:
            return np.ndarray(self.shape, dtype, buffer, self.at, (self.row_bytes, dtype.itemsize))
        return buffer[self.at : self.at + self.bytes].view(dtype).reshape(self.shape)


def scores_at(at: int, rows: int, width: int | None) -> Output:
    """Returns the output for scores of `rows` rows at byte `at`. width: scores a row if several."""
    shape = (rows,) if width is None else (rows, width)
    return Output(SCORE, at, 4 * prod(shape), shape, half=False)


def kjt_outputs(outputs: Sequence[Output], are_pooled: Sequence[bool], out_bytes: int) -> list[Output]:
    """Returns a kjt's outputs over `out_bytes` of vectors: pooled features as [bags, sum of dims], the others
    flat [values] with int64 offsets of each feature and the end."""
    pooled = [o for o, is_pooled in zip(outputs, are_pooled, strict=True) if is_pooled]
    unpooled = [o for o, is_pooled in zip(outputs, are_pooled, strict=True) if not is_pooled]
    shown = []
    if pooled:
        shape = (pooled[0].shape[0], sum(o.shape[1] for o in pooled))
        shown.append(Output(KJT, 0, sum(o.bytes for o in pooled), shape, pooled[0].half))
    if unpooled:
        size = sum(o.bytes for o in unpooled)
        shown.append(
            Output(SEQUENCES, unpooled[0].at, size, (sum(prod(o.shape) for o in unpooled),), unpooled[0].half)
        )
        count = len(unpooled) + 1
        shown.append(Output(OFFSETS, out_bytes, 8 * count, (count,), False, is_offsets=True))
    return shown


def mask_name(feature: str) -> str:
    return feature + _FOUND


def masked_feature(output: str) -> str | None:
    """Returns the feature or kjt of a mask's name; None: no mask's. Features' names have no dot."""
    return output.removesuffix(_FOUND) if output.endswith(_FOUND) else None


def masks_at(
    at: int, ids: Sequence[tuple[str, int]], asked: Container[str], together: bool
) -> tuple[list[Output], list[int]]:
    """Returns found masks from byte `at` on as outputs, and each feature's place or -1. ids: (feature, ids).
    asked: features, or KJT if they come `together`, for one mask of all."""
    shown, places, end = [], [], at
    for feature, count in ids:
        is_asked = (KJT if together else feature) in asked
        places.append(end if is_asked else -1)
        if is_asked and not together:
            shown.append(_mask(feature, end, count))
        end += count if is_asked else 0
    return [_mask(KJT, at, end - at)] if together and KJT in asked else shown, places


def _mask(feature: str, at: int, ids: int) -> Output:
    return Output(mask_name(feature), at, ids, (ids,), half=False, is_mask=True)
