"""Gathers rows on the CPU in stream order; the stream waits for the CPU, the caller does not.
A kernel lists rows in page-locked memory. CUDA then calls `gather_rows` of the C extension on its own thread,
without the GIL. It copies the rows to a page-locked buffer for later work on the stream."""

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.cpu import _native
from tableside.quant.device.device import Device

_CHUNKS, _CHUNK_BYTES = 4, 1 << 20  # chunks that are copied to the device while the next one is gathered
_UNIT = 16  # bytes; rows and their places are multiples of it
_HEAD = 2  # int64 values before the addresses in a list


class HostGather:
    """A list of at most `rows` rows and a page-locked buffer of `size` bytes, filled by `threads` CPU
    threads. list: int64 [2 + rows + rows / 2], written by the cache's kernel `list_rows`: number of rows,
    their bytes, each row's address in 48 bits with its length (4-byte words) above, then each row's place in
    the buffer (int32, 16-byte units)."""

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
        """Cuts the buffer into chunks for about `size` expected bytes: (first byte, end, argument for
        `__call__`) each; the last ends with the buffer. Arguments are kept because a stream may read them
        much later, so round `size` coarsely."""
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
