"""Where a request's dense tensors lie in its input buffer, and its vectors and scores in its output buffer."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Buffer = NDArray[np.uint8]


@dataclass(frozen=True)
class DenseInput:
    """A scorer's dense tensor: fp32 [rows, width] at byte `at` of a request's input buffer."""

    name: str
    at: int
    rows: int
    width: int


@dataclass(frozen=True)
class Output:
    """One feature's vectors in a request's output buffer, [bags or ids, dim] at byte `at`; or its scores, [bags] or [bags, n].

    half: the values are fp16, else fp32.
    """

    feature: str
    at: int
    bytes: int
    shape: tuple[int, ...]
    half: bool

    def view(self, buffer: Buffer) -> NDArray[Any]:
        """The values as an array over the buffer's memory."""
        return buffer[self.at : self.at + self.bytes].view(np.float16 if self.half else np.float32).reshape(self.shape)
