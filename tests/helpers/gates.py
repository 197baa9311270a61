"""Gates in CUDA's streams: what is queued behind a closed one waits, so that a test sees an order and
measures no time."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from tableside.quant.device.cuda import driver

_ROUND_TRIPS = 20
_OPENS_AFTER_S = 15.0
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


class Gate:
    """Closed until `open`. Use `gate()`.

    While it is closed nothing should be compiled, or allocated with CUDA for the first time: that may wait
    for the device.
    """

    def __init__(self) -> None:
        self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def hold(self, stream: torch.cuda.Stream) -> None:
        """What is queued on `stream` from now on waits for the gate."""
        arguments = (
            ctypes.c_void_p(stream.cuda_stream),
            ctypes.c_uint64(self._word.data_ptr()),
            ctypes.c_uint32(1),
        )
        code = driver().cuStreamWaitValue32_v2(*arguments, ctypes.c_uint(_AT_LEAST))
        assert code == 0, f"cuStreamWaitValue32 failed (error {code})"

    def open(self) -> None:
        self._word.fill_(1)


@contextmanager
def gate() -> Iterator[Gate]:
    """A closed gate, open at the end. It opens by itself, and the test fails, where the host waits for
    what it holds back."""
    made, gave_up = Gate(), threading.Event()

    def give_up() -> None:
        gave_up.set()
        made.open()

    timer = threading.Timer(_OPENS_AFTER_S, give_up)
    timer.start()
    try:
        yield made
    finally:
        timer.cancel()
        made.open()
        torch.cuda.synchronize()
    assert not gave_up.is_set(), f"the host waited for what a gate held back, for {_OPENS_AFTER_S} s"


@cache
def _beside(device: torch.device) -> tuple[torch.cuda.Stream, torch.Tensor]:
    return torch.cuda.Stream(device), torch.zeros(1 << 20, device=device)


def let_others_run(device: torch.device) -> None:
    """Gives what is not held back the chance to run: kernels on a stream of their own come and go, one after
    another.

    Call it once before the first gate is closed, since then it allocates.
    """
    stream, value = _beside(device)
    for _ in range(_ROUND_TRIPS):
        with torch.cuda.stream(stream):
            value += 1
        stream.synchronize()


def is_held(stream: torch.cuda.Stream) -> bool:
    """Whether what is queued on a stream so far waits for a gate. What does not has the chance to run
    before."""
    event = torch.cuda.Event()
    event.record(stream)
    let_others_run(stream.device)
    return not event.query()
