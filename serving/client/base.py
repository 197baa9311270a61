"""What both clients are."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Generic, Self, TypedDict, TypeVar

from tableside.serving.client import calls
from tableside.serving.client.address import Address
from tableside.serving.client.attempts import Options, with_disk_timeout
from tableside.serving.client.calls import Calls

P = TypeVar("P")


class HowToAsk(TypedDict, total=False):
    """The options of `lookup` that do not change the type of its answer."""

    outputs: Sequence[str] | None
    version: int | None
    compact: bool | None


class HowToScore(TypedDict, total=False):
    version: int | None
    compact: bool | None


class HowToGather(TypedDict, total=False):
    at_once: int
    version: int | None


class BaseClient(Generic[P]):
    """What both clients are."""

    def __init__(
        self,
        base_url: str | None = None,
        timeout_s: float = 10.0,
        retries: int = 2,
        *,
        deadline_s: float | None = None,
        disk_timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        ca: str | Path | None = None,
    ) -> None:
        address = Address.parse(base_url, with_disk_timeout(headers, disk_timeout_s), ca)
        self._calls, options = Calls(), Options(address, timeout_s, retries, deadline_s)
        self._options = options.checked()
        self._pool = self._open(address, timeout_s)

    def with_options(
        self,
        *,
        timeout_s: float | None = None,
        retries: int | None = None,
        deadline_s: float | None = None,
        disk_timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Self:
        """Returns a client with other options over the same connections: where one of the two is closed, both
        are. None: as this one's. headers: besides this one's, or in their place. ValueError: an option
        cannot be used.

            patient = client.with_options(timeout_s=60.0, headers={"X-Request-Id": "nightly"})
        """
        other = copy.copy(self)
        more = with_disk_timeout(headers, disk_timeout_s)
        other._options = self._options.replaced(timeout_s, retries, deadline_s, more)
        return other

    def _open(self, address: Address, timeout_s: float) -> P:
        raise NotImplementedError

    answered_by = staticmethod(calls.answered_by)
    late_rows = staticmethod(calls.late_rows)
    late_ids = staticmethod(calls.late_ids)
