"""Where a request's dense tensors lie in its input buffer, and its vectors, scores and found masks in its
output buffer."""

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
KJT, SEQUENCES, OFFSETS = (
    "kjt",
    "kjt.sequences",
    "kjt.offsets",
)  # outputs of requests whose features come together
_FOUND = ".found"


class DenseInput(NamedTuple):
    """A scorer's dense tensor: fp32 [rows, width] at byte `at` of a request's input buffer."""

    name: str
    at: int
    rows: int
    width: int


class Output(NamedTuple):
    """One feature's vectors in a request's output buffer, [bags or ids, dim] at byte `at`; or its scores,
    [bags] or [bags, n].

    bytes: of its values. half: they are fp16, else fp32. row_bytes: from one vector to the next; None: they
    lie one after another. is_offsets: they are int64, offsets of a kjt's sequences. is_mask: they are found
    masks, [ids]: a byte for each id of the feature that `masked_feature` says, 1 where its table has the id,
    else 0.
    """

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
        """As the protocol names it."""
        return "BOOL" if self.is_mask else "INT64" if self.is_offsets else "FP16" if self.half else "FP32"

    @property
    def row_values(self) -> int:
        """Values from one vector to the next."""
        return self.shape[1] if self.row_bytes is None else self.row_bytes // (2 if self.half else 4)

    @property
    def json_bytes(self) -> int:
        """Bytes of fp32 values that take as much JSON: `false,` is longer than a byte is worth otherwise."""
        return 2 * self.bytes if self.is_mask else self.bytes

    def view(self, buffer: Buffer) -> NDArray[Any]:
        """The values as an array over the buffer's memory."""
        dtype = _DTYPES[self.datatype]
        if self.row_bytes is not None:
            return np.ndarray(self.shape, dtype, buffer, self.at, (self.row_bytes, dtype.itemsize))
        return buffer[self.at : self.at + self.bytes].view(dtype).reshape(self.shape)


def scores_at(at: int, rows: int, width: int | None) -> Output:
    """The scores of so many rows at byte `at` of an output buffer. width: scores of a row, where there are
    several."""
    shape = (rows,) if width is None else (rows, width)
    return Output(SCORE, at, 4 * prod(shape), shape, half=False)


def kjt_outputs(outputs: Sequence[Output], are_pooled: Sequence[bool], out_bytes: int) -> list[Output]:
    """What a response shows of a kjt's vectors, which take `out_bytes`.

    The vectors of pooled features are one tensor, [bags, sum of dims]. Those of the others are one after
    another, [values], with the offsets where each feature's begin and the last one's end.
    """
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
    """What the output is called that says which ids of a feature, or of a whole kjt, its table has."""
    return feature + _FOUND


def masked_feature(output: str) -> str | None:
    """The feature, or kjt, whose mask an output of that name is; None: it is no mask's name, as no
    feature's has a dot."""
    return output.removesuffix(_FOUND) if output.endswith(_FOUND) else None


def masks_at(
    at: int, ids: Sequence[tuple[str, int]], asked: Container[str], together: bool
) -> tuple[list[Output], list[int]]:
    """Found masks from byte `at` of an output buffer on: the outputs that show them, and where that of each
    feature is, or -1.

    ids: features and how many ids each has. asked: features whose masks are wanted; or KJT, where the
    features came `together`, for one mask of all ids.
    """
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
