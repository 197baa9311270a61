"""Where a request's dense tensors lie in its input buffer, and its vectors and scores in its output buffer."""

from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tableside.loader.model import SCORE

Buffer = NDArray[np.uint8]
_DTYPES: dict[str, np.dtype[Any]] = {"FP32": np.dtype("<f4"), "FP16": np.dtype("<f2"), "INT64": np.dtype("<i8")}


class DenseInput(NamedTuple):
    """A scorer's dense tensor: fp32 [rows, width] at byte `at` of a request's input buffer."""

    name: str
    at: int
    rows: int
    width: int


class Output(NamedTuple):
    """One feature's vectors in a request's output buffer, [bags or ids, dim] at byte `at`; or its scores, [bags] or [bags, n].

    bytes: of its values. half: they are fp16, else fp32. row_bytes: from one vector to the next; None: they lie one after
    another. is_offsets: they are int64, offsets of a kjt's sequences.
    """

    feature: str
    at: int
    bytes: int
    shape: tuple[int, ...]
    half: bool
    row_bytes: int | None = None
    is_offsets: bool = False

    @property
    def datatype(self) -> str:
        """As the protocol names it."""
        return "INT64" if self.is_offsets else "FP16" if self.half else "FP32"

    def view(self, buffer: Buffer) -> NDArray[Any]:
        """The values as an array over the buffer's memory."""
        dtype = _DTYPES[self.datatype]
        if self.row_bytes is not None:
            return np.ndarray(self.shape, dtype, buffer, self.at, (self.row_bytes, dtype.itemsize))
        return buffer[self.at : self.at + self.bytes].view(dtype).reshape(self.shape)


def scores_at(at: int, rows: int, width: int | None) -> Output:
    """The scores of so many rows at byte `at` of an output buffer. width: scores of a row, where there are several."""
    shape = (rows,) if width is None else (rows, width)
    return Output(SCORE, at, 4 * prod(shape), shape, half=False)
