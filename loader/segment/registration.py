"""A segment registered with CUDA (`cudaHostRegister`): page-locked in place, so that every GPU of this
process reads it at bus speed without a copy. Processes share the pages. The registration ends with its last
view, before the segment is unmapped.
"""

import logging
import os
import resource
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tableside.loader.errors import RegistrationError
from tableside.loader.files import take_lock
from tableside.loader.segment.memory import Mapping
from tableside.loader.segment.segment import Segment
from tableside.quant.device.cuda import clear_error, registers_read_only, tensor_over

logger = logging.getLogger("tableside")

TURN_WAIT_S = 60.0
PORTABLE, MAPPED, READ_ONLY = 1, 2, 8
_INVALID_VALUE, _OUT_OF_MEMORY, _ALREADY_REGISTERED, _NOT_SUPPORTED = 1, 2, 712, 801
_NO_GPU = {3: "CUDA cannot be initialised", 35: "the driver is older than this CUDA", 100: "there is no GPU"}


class Registration:
    """A segment, registered for every GPU of this process through `device` ("cuda:0"). without: tables whose
    files are not. cudart: for tests. RegistrationError: CUDA refused; says what to do. Processes register one
    by one."""

    def __init__(
        self,
        segment: Segment,
        device: Any,
        cudart: Any = None,
        read_only: bool | None = None,
        without: Collection[str] = (),
    ) -> None:
        self.segment, self.device = segment, device
        self.address, self._ranges = segment.mapping.address, _ranges(segment, without)
        self.size = sum(end - first for first, end in self._ranges)
        if cudart is None:
            cudart = _runtime(device)
        self.is_read_only = registers_read_only(torch.device(device)) if read_only is None else read_only
        flags = PORTABLE | MAPPED | (READ_ONLY if self.is_read_only else 0)
        with _one_by_one(segment):
            started = time.perf_counter()
            done: list[int] = []
            for first, end in self._ranges:
                code = int(cudart.cudaHostRegister(self.address + first, end - first, flags))
                if code:
                    clear_error(cudart)
                    _unregister(cudart, segment.mapping, done)
                    raise RegistrationError(_explain(code, segment.path, self.size, self.is_read_only))
                done.append(self.address + first)
            self.seconds = time.perf_counter() - started
        self._undo = weakref.finalize(self, _unregister_beside, cudart, segment.mapping, done)
        # The end of the process undoes it: a thread in CUDA that comes back to an interpreter that is gone
        # ends the process by SIGABRT.
        self._undo.atexit = False

    def view(self, offset: int, size: int) -> torch.Tensor:
        """Returns bytes [offset, offset + size) as a uint8 tensor on the device. Never write to it."""
        if not any(first <= offset <= offset + size <= end for first, end in self._ranges):
            raise RegistrationError(
                f"bytes [{offset}, {offset + size}) do not lie in what is registered of the segment, "
                f"{self._ranges}"
            )
        return tensor_over(self.address + offset, size, torch.device(self.device), self)

    def close(self) -> None:
        """Undoes the registration; the caller has dropped all views. Safe to call twice."""
        if undo := self._undo.detach():
            _unregister(*undo[2])


def _ranges(segment: Segment, without: Collection[str]) -> list[tuple[int, int]]:
    """Returns the bytes [first, end) of the mapping that files of no such table lie in."""
    ranges: list[tuple[int, int]] = []
    ends = [file.offset for file in segment.files[1:]] + [segment.size]
    for file, end in zip(segment.files, ends, strict=True):
        if file.table is not None and file.table in without:
            continue
        if ranges and ranges[-1][1] == file.offset:
            ranges[-1] = ranges[-1][0], end
        else:
            ranges.append((file.offset, end))
    return ranges


def _unregister(cudart: Any, mapping: Mapping, addresses: Sequence[int]) -> None:
    # `mapping` is an argument so that it cannot be unmapped before.
    for address in addresses:
        cudart.cudaHostUnregister(address)


def _unregister_beside(cudart: Any, mapping: Mapping, addresses: Sequence[int]) -> None:
    """Unregisters on a thread, since unlocking 100 GB takes seconds and a request may drop the last
    reference. Where the main thread is over nobody would wait for it, and the end of the process does it."""
    if not threading.main_thread().is_alive():
        return
    work = threading.Thread(
        target=_unregister, args=(cudart, mapping, addresses), name="tableside-unregister"
    )
    work.start()


def _runtime(device: Any) -> Any:
    """Returns torch's binding of the CUDA runtime. RegistrationError: there is none."""
    if not torch.cuda.is_available():
        raise RegistrationError(
            f"{device} was asked for, and torch {torch.__version__} finds no CUDA device here; check the "
            "driver (nvidia-smi), that torch was built for CUDA, and docker run --gpus"
        )
    torch.cuda.set_device(device)
    torch.cuda.synchronize()
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@contextmanager
def _one_by_one(segment: Segment, wait_s: float = TURN_WAIT_S) -> Iterator[None]:
    """Holds a file lock, since processes that register at once contend; goes on after `wait_s` and says
    so."""
    fd = os.open(segment.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not take_lock(fd, wait_s):
            text = "%s is locked for more than %g s; it is registered beside that process"
            logger.warning(text, segment.path, wait_s)
        yield
    finally:
        os.close(fd)


def _explain(code: int, path: Path, size: int, is_read_only: bool) -> str:
    what = f"{path}: {size:,} bytes cannot be registered with CUDA (error {code})"
    if code == _ALREADY_REGISTERED:
        return f"{what}: this process registered them before; keep that registration, or close it first"
    if code in _NO_GPU:
        return f"{what}: {_NO_GPU[code]}; check nvidia-smi and docker run --gpus, or serve without --devices"
    if code == _OUT_OF_MEMORY:
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft:,} bytes"
        return (
            f"{what}: they could not be page-locked, the limit is {limit}; raise it (ulimit -l unlimited, "
            "docker run --ulimit memlock=-1), free host memory, or serve with --placement hbm or host"
        )
    if code in (_INVALID_VALUE, _NOT_SUPPORTED) and not is_read_only:
        return (
            f"{what}: segments are mapped read-only, and this GPU or driver registers no read-only memory; "
            "update the driver, or serve with --placement hbm or host"
        )
    return f"{what}; serve with --placement hbm or host to do without"
