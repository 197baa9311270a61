"""Calls on a GPU: what was wrong in one is said by a later one, and a version stays until the last call that
reads it is done.

Nobody waits for the device. The kernels tell in memory of the host what is wrong (`quant.gpu.reports`). A
version that was replaced is kept with events of the streams that read it, until those are done.
"""

import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from tableside.serving.modules.errors import BadFeatureIds, ModuleError

if TYPE_CHECKING:
    from tableside.quant.gpu.backend import GpuBackend
    from tableside.quant.gpu.reports import Reports, WrongInput


class Pending:
    """What calls of one source left behind. Any thread may call."""

    def __init__(self) -> None:
        self.reports: Reports | None = None
        self._retired: deque[tuple[list[Any], object]] = deque()
        self._lock = threading.Lock()

    def reports_of(self, backend: "GpuBackend") -> "Reports":
        """Where the source's lookups tell what is wrong."""
        from tableside.quant.gpu.reports import Reports

        with self._lock:
            if self.reports is None:
                self.reports = Reports(backend.launcher)
            return self.reports

    def retire(self, streams: list[Any], held: object) -> None:
        """Keeps what kernels on these streams read until they are done; at the end of the process all
        goes."""
        if streams and not sys.is_finalizing():
            self._retired.append(([stream.record_event() for stream in streams], held))

    def sweep(self) -> None:
        """Lets go of what no call reads any more."""
        with self._lock:
            while self._retired and all(event.query() for event in self._retired[0][0]):
                self._retired.popleft()

    def raise_first(self) -> None:
        """BadFeatureIds: a call that is done had a wrong id or length. ModuleError: or a wrong offset."""
        if self.reports is not None and self.reports.is_there and (wrong := self.reports.take()) is not None:
            raise _error(wrong)

    def check(self) -> None:
        """As `raise_first`, after waiting for all calls."""
        if self.reports is not None:
            self.reports.wait()
        self.raise_first()
        self.sweep()


def _error(wrong: "WrongInput") -> BadFeatureIds | ModuleError:
    if wrong.cause is not None:
        return BadFeatureIds(wrong.name, wrong.cause)
    number, value = wrong.offset
    expected = "expected 0, where the first bag begins" if number == 0 else "expected 0 or more"
    return ModuleError(f"feature {wrong.name!r}: the offset at position {number} is {value}; {expected}")
