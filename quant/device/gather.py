"""Rows that the kernels ask the CPU for, in the order of a stream: the caller waits for nothing, the stream for the CPU.

The kernels write a list of rows to page-locked memory; CUDA then calls `gather_rows` of our C extension on a thread of its own,
without the interpreter, which copies them to a staging area; what comes next on the stream reads that.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tableside.quant.errors import MissingBackend, QuantError

_PIECES, _PIECE_BYTES = 4, 1 << 20  # parts that are copied while the next one is gathered
_UNIT = 16


class HostGather:
    """A list of at most `rows` rows and a staging area of `size` bytes for them, filled by `threads` threads of the CPU.

    list: as `quant.cache.kernels.list_rows` says. MissingBackend: the C extension was not built.
    """

    def __init__(self, rows: int, size: int, threads: int, is_cuda: bool) -> None:
        try:
            from tableside.quant.cpu import _native
        except ImportError as error:
            raise MissingBackend(
                f"tableside.quant.cpu._native does not import ({error}); serve with --threads 1, or build it"
            ) from error
        self.rows = rows
        self.list = torch.zeros(2 + rows + (rows + 1) // 2, dtype=torch.int64, pin_memory=is_cuda)
        self.staging = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda)
        self._head = self.list.numpy()[:2]
        self._threads = threads
        self._requests: dict[int, list[tuple[int, int, NDArray[np.int64]]]] = {}
        self._function = _native.gather_rows()
        self._launch = _cuda_launch() if is_cuda else None

    @property
    def last_bytes(self) -> int:
        """Of the staging area that were filled some batch ago, as far as the device has come."""
        return int(self._head[1])

    def requests(self, size: int) -> list[tuple[int, int, NDArray[np.int64]]]:
        """Parts of the staging area, if `size` bytes are likely: from and to which byte, and what `__call__` is told of each.

        The last one is to the staging area's end. They stay, since a stream may be far behind; sizes should be multiples of much.
        """
        if size not in self._requests:
            count = max(1, min(_PIECES, size // _PIECE_BYTES))
            cuts = [size * n // count // _UNIT * _UNIT for n in range(count)]
            same = (self.list.data_ptr(), self.list.data_ptr() + 16 + 8 * self.rows, self.staging.data_ptr(), self._threads)
            self._requests[size] = [
                (first, end, np.array([*same, first // _UNIT, end // _UNIT], np.int64))
                for first, end in zip(cuts, [*cuts[1:], self.staging.numel()], strict=True)
            ]
        return self._requests[size]

    def __call__(self, stream: int | None, request: NDArray[np.int64]) -> None:
        """Gathers what the list says of a part once the stream is there; None: now."""
        data = request.ctypes.data
        if self._launch is None:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._function)(data)
        elif code := self._launch(ctypes.c_void_p(stream), ctypes.c_void_p(self._function), ctypes.c_void_p(data)):
            raise QuantError(f"cudaLaunchHostFunc failed (error {code}); serve with --threads 1, and the GPU reads rows itself")


def cuda_runtimes() -> list[ctypes.CDLL]:
    """CUDA's runtime, as this process has it loaded; more than one, or none, where torch was built so."""
    loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line}
    return [ctypes.CDLL(path) for path in sorted(loaded)]


def _cuda_launch() -> Any:
    """cudaLaunchHostFunc of the runtime that torch uses."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    runtimes = cuda_runtimes()
    if not runtimes:
        raise QuantError("torch's CUDA runtime is not among this process's libraries; serve with --threads 1")
    return runtimes[0].cudaLaunchHostFunc
