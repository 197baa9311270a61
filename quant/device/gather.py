"""Rows that kernels ask the CPU for, in the order of a stream: the caller waits for nothing, the stream waits
for the CPU.

A kernel writes a list of rows to page-locked memory. CUDA then calls `gather_rows` of the C extension on a
thread of its own, without Python's interpreter lock. The function copies the rows to a page-locked buffer,
which later work on the stream reads.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cpu import _native
from tableside.quant.device.device import Device

_CHUNKS, _CHUNK_BYTES = 4, 1 << 20  # chunks that are copied to the device while the next one is gathered
_UNIT = 16  # bytes; rows and their places are multiples of it
_HEAD = 2  # int64 values before the addresses in a list


class HostGather:
    """A list of at most `rows` rows and a page-locked buffer of `size` bytes for them, filled by `threads`
    threads of the CPU.

    list: int64 [2 + rows + rows / 2], written by the kernel `list_rows` of the cache. It holds the number of
    rows, the bytes that they fill, then each row's address in 48 bits with its length in units of 16 bytes
    above, then each row's place in the buffer as int32, in units of 16 bytes.
    """

    def __init__(self, rows: int, size: int, threads: int, device: Device) -> None:
        self.rows = rows
        self.list = device.pinned(_HEAD + rows + (rows + 1) // 2, torch.int64).zero_()
        self.staging = device.pinned(size)
        self._head = self.list.numpy()[:_HEAD]
        self._threads = threads
        self._requests: dict[int, list[tuple[int, int, NDArray[np.int64]]]] = {}
        self._launch, self._function = device.host_launcher(), _native.gather_rows()

    @property
    def last_bytes(self) -> int:
        """Bytes that the rows of some earlier batch filled, as far as the device has come."""
        return int(self._head[1])

    def requests(self, size: int) -> list[tuple[int, int, NDArray[np.int64]]]:
        """The buffer in chunks where about `size` bytes are expected: first byte, end, and the argument for
        `__call__`.

        The last chunk reaches the buffer's end. Arguments are kept, because a stream may read them much
        later; sizes should therefore be multiples of a large number.
        """
        if size not in self._requests:
            count = max(1, min(_CHUNKS, size // _CHUNK_BYTES))
            cuts = [size * n // count // _UNIT * _UNIT for n in range(count)]
            addresses, places = self.list.data_ptr(), self.list.data_ptr() + 8 * (_HEAD + self.rows)
            same = (addresses, places, self.staging.data_ptr(), self._threads)
            self._requests[size] = [
                (first, end, np.array([*same, first // _UNIT, end // _UNIT], np.int64))
                for first, end in zip(cuts, [*cuts[1:], self.staging.numel()], strict=True)
            ]
        return self._requests[size]

    def __call__(self, stream: int | None, request: NDArray[np.int64]) -> None:
        """Gathers the listed rows of a chunk once `stream` has come to this point; None: now."""
        self._launch(stream, self._function, request.ctypes.data)
