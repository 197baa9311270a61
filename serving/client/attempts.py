"""How long a call may take, and how often it is sent."""

import random
import time
from collections.abc import Mapping
from typing import NamedTuple

from tableside.serving.client.address import Address
from tableside.serving.client.messages import (
    BUSY,
    ClientError,
    HttpRequest,
    HttpResponse,
    TimedOut,
    Unreachable,
)

_LONGEST_S = 1e6  # of any wait: sockets take no more than some weeks
DISK_TIMEOUT = "Tableside-Disk-Timeout-Ms"


class Options(NamedTuple):
    """Options of a client's calls, as `Client` takes them."""

    address: Address
    timeout_s: float
    retries: int
    deadline_s: float | None

    def replaced(
        self,
        timeout_s: float | None,
        retries: int | None,
        deadline_s: float | None,
        headers: Mapping[str, str] | None,
    ) -> "Options":
        """Returns the options with those in place of these that are not None. ValueError: one is invalid."""
        address = None if headers is None else self.address.with_headers(headers)
        given = {"address": address, "timeout_s": timeout_s, "retries": retries, "deadline_s": deadline_s}
        return self._replace(**{k: v for k, v in given.items() if v is not None}).checked()  # type: ignore[arg-type]

    def checked(self) -> "Options":
        """The options themselves. ValueError: a time, or the number of retries, is none."""
        if not isinstance(self.retries, int):
            raise ValueError(f"retries is {self.retries!r}; expected a number")
        for name, seconds in (("timeout_s", self.timeout_s), ("deadline_s", self.deadline_s)):
            if seconds is None and name == "deadline_s":
                continue
            if not isinstance(seconds, int | float) or not 0 < seconds < _LONGEST_S:
                raise ValueError(f"{name} is {seconds!r}; expected seconds, above 0 and below {_LONGEST_S:g}")
        return self


def with_disk_timeout(headers: Mapping[str, str] | None, seconds: float | None) -> Mapping[str, str] | None:
    """Returns the headers with that which says how long the server waits for rows. ValueError: that is no
    time."""
    if seconds is None:
        return headers
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < _LONGEST_S:
        raise ValueError(f"disk_timeout_s is {seconds!r}; expected seconds, from 0 to below {_LONGEST_S:g}")
    return {**(headers or {}), DISK_TIMEOUT: f"{1000 * seconds:.3f}"}


class Attempts:
    """The attempts of one call. ends: of time.monotonic; None: each wait has its own end alone."""

    def __init__(self, options: Options) -> None:
        self.options, self._left = options, max(0, options.retries)
        self.ends = None if options.deadline_s is None else time.monotonic() + options.deadline_s

    def wait_s(self) -> float:
        """Returns how long the next wait may take. TimeoutError: the call's time is over."""
        if self.ends is None:
            return self.options.timeout_s
        if (left := self.ends - time.monotonic()) <= 0:
            raise TimeoutError("the call's time is over")
        return min(left, self.options.timeout_s)

    def failed(self, error: OSError) -> ClientError | None:
        """Returns what the caller gets after a failure; None: the request is sent again."""
        if not isinstance(error, TimeoutError) and self._left > 0 and not self._is_over():
            self._left -= 1
            return None
        told = self._told(error)
        told.__cause__ = error
        return told

    def pause_s(self, request: HttpRequest, response: HttpResponse) -> float | None:
        """Returns the seconds after which a request is sent again that the server was too busy for; None: its
        response is taken as it is. Without a deadline it is."""
        if response.retry_after is None or self.ends is None or self._left <= 0:
            return None
        if response.status not in BUSY or not request.may_wait:
            return None
        pause = response.retry_after * random.uniform(1.0, 1.25)
        if time.monotonic() + pause >= self.ends:
            return None
        self._left -= 1
        return pause

    def _is_over(self) -> bool:
        return self.ends is not None and time.monotonic() >= self.ends

    def _told(self, error: OSError) -> ClientError:
        o = self.options
        if not isinstance(error, TimeoutError):
            why = f"{o.address.base_url} cannot be reached ({error!r}); is `tableside serve` running there?"
            return Unreachable(0, why)
        limit = f"{o.timeout_s:g} s (timeout_s)"
        if self._is_over():
            limit = f"the {o.deadline_s:g} s of the call (deadline_s)"
        return TimedOut(0, f"{o.address.base_url} did not answer within {limit}")
