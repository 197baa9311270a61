"""The interface of a stream of changes; `loop.open_source` chooses one."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.errors import ChangeError

IsStopping = Callable[[], bool]
PAUSE_S = 0.05  # the longest pause after which a source looks whether it shall stop


class ChangeSource(Protocol):
    """A stream of changes with positions. name: its key in the state, unique for a model."""

    name: str

    def read(
        self, after: str | None, rows: int, wait_s: float, most: int | None = None
    ) -> ChangeBatch | None:
        """Returns the changes after a position, within `wait_s` seconds, about `rows` rows or `most`
        positions; None: there are none, or a stop. after: None: nothing was applied, begin at the start.
        Waits while the stream's server is away. SourceError: changes are gone or out of order. ChangeError,
        while the batch is read: changes are invalid (`refusing`). Opened for a model over several hosts, it
        returns changes of one group, and all positions that they passed (`ChangeBatch`)."""
        ...

    def content(self, position: str) -> Mapping[str, str]:
        """Returns the content of a position as text by name, to record a refused change."""
        ...

    def close(self) -> None:
        """Closes what is open."""
        ...


def refusing(error: ChangeError) -> Iterator[TableChanges]:
    """Raises `error` when the changes are read."""
    raise error
    yield


def pause(seconds: float, is_stopping: IsStopping) -> None:
    """Waits, but not on when the follower shall stop."""
    end = time.monotonic() + seconds
    while not is_stopping() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, PAUSE_S))
