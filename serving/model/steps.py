"""How long the steps of an attach take."""

import time


class Steps:
    """Seconds of several steps, for the log."""

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._steps: list[str] = []

    def mark(self, step: str) -> None:
        now = time.monotonic()
        self._steps.append(f"{step} {now - self._last:.2f}")
        self._last = now

    def __str__(self) -> str:
        return f"{self._last - self._started:.2f} s ({', '.join(self._steps)})"
