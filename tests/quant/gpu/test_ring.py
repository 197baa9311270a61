"""Page-locked memory that copies to a device take turns with."""

import ctypes
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

from tableside.quant.device.interpreter import InterpretedDevice
from tableside.quant.gpu.batch.ring import CopyRing


class LateDevice(InterpretedDevice):
    """Copies when somebody waits for an event behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[int, int, int]] = []

    def copy(self, stream: int | None, target: int, source: int, size: int) -> None:
        self.waiting.append((target, source, size))

    def run(self, count: int) -> None:
        for target, source, size in self.waiting[:count]:
            ctypes.memmove(target, source, size)
        del self.waiting[:count]

    def event(self, **_: Any) -> Any:
        return LateEvent(self)


class LateEvent:
    """Happens when the copies before it are done."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._behind: list[tuple[int, int, int]] = []

    def record(self) -> None:
        self._behind = [*self._device.waiting]

    def synchronize(self) -> None:
        self._device.run(sum(copy in self._behind for copy in self._device.waiting))


@pytest.mark.parametrize("words", [1, 777, CopyRing.PART_BYTES // 32])
def test_what_was_copied_is_what_was_there_at_the_call(words: int) -> None:
    """Though the device copies late, and the memory went round three times."""
    device = LateDevice()
    ring, template = CopyRing(device), np.arange(words)
    assert ring.takes(template) and not ring.takes(np.zeros(CopyRing.PART_BYTES // 32 + 1, np.int64))
    calls = 3 * CopyRing.PARTS * CopyRing.PART_BYTES // (8 * words) if words > 1 else 300
    targets = np.full((calls, words), -1)
    fields = np.array([0, words - 1])
    for n in range(calls):
        values = np.array([10**6 + n, 10**6 + n])
        ring.copy(template, fields, values, targets[n].ctypes.data)
    device.run(len(device.waiting))
    expected = np.tile(template, (calls, 1))
    expected[:, fields] = (10**6 + np.arange(calls))[:, None]
    np.testing.assert_array_equal(targets, expected)
