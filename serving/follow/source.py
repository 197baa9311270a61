"""What a stream of changes must offer to be followed. A new kind is a file with such a class, and two
lines in `sources`."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from tableside.loader.deltas.changes import ChangeBatch, TableChanges
from tableside.loader.errors import ChangeError

IsStopping = Callable[[], bool]
PAUSE_S = 0.05  # the longest pause after which a source looks whether it shall stop


class ChangeSource(Protocol):
    """A stream of changes with positions. name: what the state calls it; two streams of one model have two
    names."""

    name: str

    def read(
        self, after: str | None, rows: int, wait_s: float, most: int | None = None
    ) -> ChangeBatch | None:
        """The changes behind the position `after`, as they are after `wait_s` seconds or as soon as they are
        some `rows`, or of as many positions as `most`.

        after: where the last batch ended; None: none was applied, so begin where the source was told to. None
        comes back where there are none; sooner where the follower shall stop. What the stream's server lacks
        for a while is waited for. SourceError: changes behind `after` are gone, or came in another order.
        ChangeError, while the batch's changes are read: some are not what they must be (`refusing`).
        """
        ...

    def content(self, position: str) -> Mapping[str, str]:
        """What lies at a position, as text by name, to be written aside where it is refused."""
        ...

    def close(self) -> None:
        """Lets go of what is open."""
        ...


def refusing(error: ChangeError) -> Iterator[TableChanges]:
    """The changes of a position that cannot be read: `error` comes where they are asked for."""
    raise error
    yield


def pause(seconds: float, is_stopping: IsStopping) -> None:
    """Waits, but not on when the follower shall stop."""
    end = time.monotonic() + seconds
    while not is_stopping() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, PAUSE_S))
